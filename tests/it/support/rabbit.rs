//! Private RabbitMQ nodes: own folder, ports, name, cookie and epmd, gone when the tests are. No system broker is
//! touched.
//!
//! A small shell holds the node and reads words from a pipe whose other end is this process: `kill`, `start`, `stop`
//! (freeze) and `cont`. However the tests end, the pipe closes, and the shell kills the node and removes the folder.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::postgres::free_port;

const BIN: &str = "/usr/lib/rabbitmq/bin";

/// With NOTIFY_SOCKET set the start script becomes the node itself, so that the pid is the node's, and the node tells
/// that socket when it is ready. Our own epmd in the foreground: a node left to itself starts one that outlives it.
const KEEPER: &str = r#"
dir=$1 port=$2 dist=$3 epmd=$4 bin=$5
epmd -port $epmd -address 127.0.0.1 </dev/null >/dev/null 2>&1 &
epmd_pid=$!
launch() {
    env -i PATH="$PATH" HOME="$dir" LANG=C.UTF-8 RABBITMQ_CONF_ENV_FILE=/dev/null RABBITMQ_NODENAME=t$port@localhost \
        RABBITMQ_DIST_PORT=$dist ERL_EPMD_PORT=$epmd ERL_EPMD_ADDRESS=127.0.0.1 RABBITMQ_MNESIA_BASE="$dir/mnesia" \
        RABBITMQ_LOG_BASE="$dir/log" RABBITMQ_ENABLED_PLUGINS_FILE="$dir/enabled_plugins" \
        RABBITMQ_CONFIG_FILE="$dir/rabbitmq.conf" RABBITMQ_ADVANCED_CONFIG_FILE="$dir/advanced.config" \
        RABBITMQ_CONFIG_FILES="$dir/conf.d" NOTIFY_SOCKET="$dir/notify" \
        RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='-kernel inet_dist_use_interface {127,0,0,1}' \
        "$bin/rabbitmq-server" </dev/null >>"$dir/node.log" 2>&1 &
    pid=$!
}
trap 'kill -KILL $pid $epmd_pid 2>/dev/null; wait 2>/dev/null; rm -rf "$dir"' EXIT
trap '' INT TERM HUP
while read -r word; do
    case $word in
        start) launch ;;
        kill) kill -KILL $pid; wait $pid 2>/dev/null ;;
        stop) kill -STOP $pid ;;
        cont) kill -CONT $pid ;;
    esac
    echo done
done
"#;

/// A node, to be killed and started again at will.
pub struct Rabbit {
    folder: PathBuf,
    port: u16,
    epmd_port: u16,
    ready: UnixDatagram,
    keeper: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    _child: Child,
}

/// The URL of the node that all tests share, which this starts if need be.
pub fn url() -> String {
    static SHARED: OnceLock<Rabbit> = OnceLock::new();
    SHARED.get_or_init(Rabbit::start).url()
}

/// The node for tests that take it away from under its clients, one test at a time.
pub async fn faulty() -> tokio::sync::MutexGuard<'static, Rabbit> {
    static FAULTY: OnceLock<tokio::sync::Mutex<Rabbit>> = OnceLock::new();
    let started = || FAULTY.get_or_init(|| tokio::sync::Mutex::new(Rabbit::start()));
    tokio::task::spawn_blocking(started).await.unwrap().lock().await
}

impl Rabbit {
    pub fn start() -> Self {
        assert!(Path::new(BIN).exists(), "RabbitMQ is installed; ./scripts/test does it");
        let folder = tempfile::Builder::new().prefix("stockade-test-mq.").tempdir_in("/tmp").unwrap().keep();
        let (port, dist_port, epmd_port) = (free_port(), free_port(), free_port());
        std::fs::write(folder.join("enabled_plugins"), "[].\n").unwrap();
        let settings = format!(
            "listeners.tcp.1 = 127.0.0.1:{port}\nlog.file = false\nlog.console = true\nlog.console.level = warning\n\
             disk_free_limit.absolute = 50MB\nvm_memory_high_watermark.absolute = 2GB\n"
        );
        std::fs::write(folder.join("rabbitmq.conf"), settings).unwrap();
        let ready = UnixDatagram::bind(folder.join("notify")).unwrap();
        let mut child = Command::new("sh")
            .args(["-c", KEEPER, "keeper"])
            .arg(&folder)
            .args([port, dist_port, epmd_port].map(|port| port.to_string()))
            .arg(BIN)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh is there");
        let pipes = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let rabbit = Self { folder, port, epmd_port, ready, keeper: Mutex::new(pipes), _child: child };
        rabbit.start_again();
        rabbit
    }

    pub fn url(&self) -> String {
        format!("amqp://127.0.0.1:{}", self.port)
    }

    /// Starts it and waits until it takes connections.
    pub fn start_again(&self) {
        self.say("start");
        self.ready.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let mut message = [0; 256];
        loop {
            let length = self.ready.recv(&mut message).unwrap_or_else(|error| {
                let log = std::fs::read_to_string(self.folder.join("node.log")).unwrap_or_default();
                panic!("RabbitMQ did not start: {error}\n{log}")
            });
            if message[..length].windows(7).any(|window| window == b"READY=1") {
                return;
            }
        }
    }

    /// As kill -9.
    pub fn kill(&self) {
        self.say("kill");
    }

    /// Lets it hang: connections stay open and nothing answers.
    pub fn freeze(&self) {
        self.say("stop");
    }

    pub fn thaw(&self) {
        self.say("cont");
    }

    /// Runs `rabbitmqctl`; what it prints.
    pub fn ctl(&self, args: &[&str]) -> String {
        let output = Command::new(format!("{BIN}/rabbitmqctl"))
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("HOME", &self.folder)
            .env("LANG", "C.UTF-8")
            .env("RABBITMQ_CONF_ENV_FILE", "/dev/null")
            .env("ERL_EPMD_PORT", self.epmd_port.to_string())
            .args(["-q", "-n", &format!("t{}@localhost", self.port)])
            .args(args)
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "rabbitmqctl {args:?}: {out}{err}");
        out
    }

    fn say(&self, word: &str) {
        let (to, from) = &mut *self.keeper.lock().unwrap();
        writeln!(to, "{word}").unwrap();
        to.flush().unwrap();
        let mut answer = String::new();
        from.read_line(&mut answer).unwrap();
        assert_eq!(answer.trim(), "done", "the keeper of the node is gone");
    }
}
