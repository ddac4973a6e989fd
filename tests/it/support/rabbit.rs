//! Private RabbitMQ nodes: own folder, ports, name, cookie and epmd, gone when the tests are. No system broker is
//! touched.
//!
//! A small shell holds the node and reads words from a pipe whose other end is this process: `kill`, `start`, `stop`
//! (freeze) and `cont`. However the tests end, the pipe closes, and the shell kills the node and removes the folder.

use std::io::{BufRead, BufReader, Write};
use std::ops::Deref;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use lapin::options::QueueDeleteOptions;
use lapin::{Connection, ConnectionProperties};
use stockade_kernel::messaging::transport::dlq_of;

use super::postgres::free_port;

const BIN: &str = "/usr/lib/rabbitmq/bin";

/// With NOTIFY_SOCKET set the start script becomes the node itself, so that the pid is the node's, and the node tells
/// that socket when it is ready. Our own epmd in the foreground: a node left to itself starts one that outlives it.
const KEEPER: &str = r#"
dir=$1 port=$2 dist=$3 epmd=$4 bin=$5 log=$6
epmd -port $epmd -address 127.0.0.1 </dev/null >/dev/null 2>&1 &
epmd_pid=$!
launch() {
    env -i PATH="$PATH" HOME="$dir" LANG=C.UTF-8 RABBITMQ_CONF_ENV_FILE=/dev/null RABBITMQ_NODENAME=t$port@localhost \
        RABBITMQ_DIST_PORT=$dist ERL_EPMD_PORT=$epmd ERL_EPMD_ADDRESS=127.0.0.1 RABBITMQ_MNESIA_BASE="$dir/mnesia" \
        RABBITMQ_LOG_BASE="$dir/log" RABBITMQ_ENABLED_PLUGINS_FILE="$dir/enabled_plugins" \
        RABBITMQ_CONFIG_FILE="$dir/rabbitmq.conf" RABBITMQ_ADVANCED_CONFIG_FILE="$dir/advanced.config" \
        RABBITMQ_CONFIG_FILES="$dir/conf.d" NOTIFY_SOCKET="$dir/notify" \
        RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='-kernel inet_dist_use_interface {127,0,0,1}' \
        "$bin/rabbitmq-server" </dev/null >>"$log" 2>&1 &
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

/// A node for a test that takes it away from under its clients, and for no other test meanwhile.
pub async fn faulty() -> Faulty {
    let idle = IDLE.lock().unwrap().pop();
    let node = match idle {
        Some(node) => node,
        None => tokio::task::spawn_blocking(Rabbit::start).await.unwrap(),
    };
    Faulty { node: Some(node) }
}

/// Breakable nodes that no test uses at the moment.
static IDLE: Mutex<Vec<Rabbit>> = Mutex::new(Vec::new());

pub struct Faulty {
    node: Option<Rabbit>,
}

impl Deref for Faulty {
    type Target = Rabbit;

    fn deref(&self) -> &Rabbit {
        self.node.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Faulty {
    /// Leaves the node to the next test, unless this one has failed: the node may be down or frozen.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            IDLE.lock().unwrap().extend(self.node.take());
        }
    }
}

/// Waits for queues that have been declared to be there for a while: RabbitMQ 3.10 forgets a quorum queue, confirmed
/// messages and all, when it is killed within half a second of the queue's declaration.
pub async fn until_queues_are_safe() {
    tokio::time::sleep(Duration::from_secs(2)).await;
}

/// A test that has ended, and its queues.
struct Ended {
    at: Instant,
    url: String,
    prefix: String,
}

/// Deletes the queues of a test that has ended, later and one after another: each one left costs the broker time.
pub fn delete_queues(url: &str, prefix: &str) {
    static ENDED: OnceLock<mpsc::Sender<Ended>> = OnceLock::new();
    let sender = ENDED.get_or_init(|| {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || delete_all_queues(&receiver));
        sender
    });
    let _ = sender.send(Ended { at: Instant::now(), url: url.to_owned(), prefix: prefix.to_owned() });
}

#[tokio::main(flavor = "current_thread")]
async fn delete_all_queues(tests: &mpsc::Receiver<Ended>) {
    for Ended { at, url, prefix } in tests {
        // RabbitMQ 3.10 starts a dead-letter worker moments after it declares a quorum queue. A queue deleted in between
        // crashes the worker again and again, until their supervisor gives up and takes the workers of all queues along.
        tokio::time::sleep(Duration::from_secs(10).saturating_sub(at.elapsed())).await;
        // The breakable broker may be away just now; its queues go with it.
        let _ = delete_queues_of(&url, &prefix).await;
    }
}

async fn delete_queues_of(url: &str, prefix: &str) -> lapin::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    for name in ["orders", "inventory", "notifications", "ledger", "witness", "probe", "shadow", "saga"] {
        for queue in [format!("{prefix}.{name}"), dlq_of(&format!("{prefix}.{name}"))] {
            channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        }
    }
    connection.close(200, "done".into()).await
}

/// A node's log, kept after the tests.
fn log_of(port: u16) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("rabbitmq-{port}.log"))
}

impl Rabbit {
    pub fn start() -> Self {
        assert!(Path::new(BIN).exists(), "RabbitMQ is installed; ./scripts/test does it");
        let folder = tempfile::Builder::new().prefix("stockade-test-mq.").tempdir().unwrap().keep();
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
            .arg(log_of(port))
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

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Starts it and waits until it takes connections.
    pub fn start_again(&self) {
        // `rabbit:start()` reports readiness too: a message from then would be taken for this start's.
        self.ready.set_nonblocking(true).unwrap();
        while self.ready.recv(&mut [0; 256]).is_ok() {}
        self.ready.set_nonblocking(false).unwrap();
        self.say("start");
        self.ready.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let mut message = [0; 256];
        loop {
            let length = self.ready.recv(&mut message).unwrap_or_else(|error| {
                let log = std::fs::read_to_string(log_of(self.port)).unwrap_or_default();
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

    /// Evaluates Erlang on the node with `erl_call`, which takes milliseconds of CPU: `rabbitmqctl` takes over a second.
    pub fn eval(&self, expression: &str) -> String {
        let mut call = Command::new("erl_call")
            .env("HOME", &self.folder)
            .env("ERL_EPMD_PORT", self.epmd_port.to_string())
            .args(["-sname", &format!("t{}@localhost", self.port), "-timeout", "60", "-e"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("erl_call comes with Erlang");
        writeln!(call.stdin.take().unwrap(), "{expression}.").unwrap();
        let answer = String::from_utf8(call.wait_with_output().unwrap().stdout).unwrap();
        let value = answer.strip_prefix("{ok, ").and_then(|rest| rest.strip_suffix('}'));
        let value = value.filter(|value| !value.starts_with("{error"));
        value.unwrap_or_else(|| panic!("{expression}: {answer}")).to_owned()
    }

    /// It takes no more messages until [`Self::clear_memory_alarm`].
    pub async fn raise_memory_alarm(&self) {
        self.eval("vm_memory_monitor:set_vm_memory_high_watermark({absolute, 1})");
        let alarmed = async || (self.eval("rabbit_alarm:get_alarms()") != "[]").then_some(());
        super::eventually("an alarm", alarmed).await;
    }

    pub fn clear_memory_alarm(&self) {
        self.eval("vm_memory_monitor:set_vm_memory_high_watermark({absolute, \"2GB\"})");
    }

    /// Sets a limit of one queue until it is cleared.
    pub fn limit_queue(&self, queue: &str, key: &str, value: u32) {
        self.eval(&format!(
            r#"rabbit_policy:set(
                <<"/">>, <<"limit">>, <<"^{queue}$">>, [{{<<"{key}">>, {value}}}], 0, <<"queues">>, <<"tests">>)"#
        ));
    }

    pub fn clear_limit(&self) {
        self.eval(r#"rabbit_policy:delete(<<"/">>, <<"limit">>, <<"tests">>)"#);
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
