//! One private Postgres for the whole test run: its own folder, its own port, gone when the tests are.
//!
//! A small shell holds the server and reads from a pipe whose other end is this process. However the tests end,
//! the pipe closes, and the shell stops the server and removes the folder. Nothing is vacuumed: with a database per test
//! that would keep a core busy.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{OnceLock, mpsc};

use sqlx::{Connection, Executor, PgConnection};

struct Cluster {
    port: u16,
    /// A copy of its data from before it started, for servers of a test's own: initdb takes more than a second of CPU.
    new: PathBuf,
    /// Its stdin is the pipe that keeps the server up.
    _keeper: Child,
}

/// Stops the server (fast shutdown) and cleans up when stdin closes. As root it drops to the user postgres, since
/// Postgres refuses to run as root.
const KEEPER: &str = r#"
set -e
bin=$1 port=$2 dir=$(mktemp -d -t stockade-test-pg.XXXXXX)
if [ "$(id -u)" = 0 ]; then chown postgres "$dir"; as="setpriv --reuid=postgres --regid=postgres --clear-groups"; fi
cd /
$as "$bin/initdb" -D "$dir/data" -U postgres -A trust -E UTF8 --no-locale --no-sync >"$dir/log" 2>&1 </dev/null
cp -a "$dir/data" "$dir/new"
$as "$bin/postgres" -D "$dir/data" -p "$port" -k "$dir" -c listen_addresses=127.0.0.1 -c max_connections=400 \
    -c autovacuum=off -c shared_buffers=16MB -c max_wal_size=4GB -c checkpoint_timeout=1h >>"$dir/log" 2>&1 </dev/null &
pid=$!
trap 'kill -INT $pid 2>/dev/null || true; wait $pid 2>/dev/null || true; rm -rf "$dir"' EXIT
trap '' INT TERM HUP
until "$bin/pg_isready" -q -h 127.0.0.1 -p "$port"; do kill -0 $pid; sleep 0.05; done
echo "ready $dir"
cat >/dev/null
"#;

/// The private server, which this starts if need be.
fn shared() -> &'static Cluster {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    CLUSTER.get_or_init(start)
}

/// The URL of a database on the private server.
pub fn url(database: &str) -> String {
    format!("postgres://postgres@127.0.0.1:{}/{database}", shared().port)
}

/// Drops a database of a test that has ended, later and one after another: no test waits for it.
pub fn drop_database(name: String) {
    static ENDED: OnceLock<mpsc::Sender<String>> = OnceLock::new();
    let ended = ENDED.get_or_init(|| {
        let (ended, names) = mpsc::channel();
        std::thread::spawn(move || drop_databases(&names));
        ended
    });
    let _ = ended.send(name);
}

#[tokio::main(flavor = "current_thread")]
async fn drop_databases(names: &mpsc::Receiver<String>) {
    let mut admin = PgConnection::connect(&url("postgres")).await.unwrap();
    for name in names {
        // FORCE: a server that was killed may not have been missed yet.
        let drop = format!("DROP DATABASE {name} WITH (FORCE)");
        admin.execute(sqlx::AssertSqlSafe(drop)).await.unwrap();
    }
}

fn start() -> Cluster {
    let bin = newest_bin();
    let port = free_port();
    let mut keeper = Command::new("sh")
        .args(["-c", KEEPER, "keeper"])
        .arg(&bin)
        .arg(port.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sh is there");
    let mut line = String::new();
    let stdout = keeper.stdout.take().expect("its stdout is piped");
    BufReader::new(stdout).read_line(&mut line).expect("the keeper talks text");
    let folder = line.trim().strip_prefix("ready ");
    let folder = folder.expect("Postgres did not start; is it installed? ./scripts/test installs it");
    Cluster { port, new: Path::new(folder).join("new"), _keeper: keeper }
}

fn newest_bin() -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").expect("Postgres is installed; ./scripts/test does it");
    let newest = versions.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok()).max();
    PathBuf::from(format!("/usr/lib/postgresql/{}/bin", newest.expect("a version of Postgres")))
}

/// A port below the ephemeral range, so that no client socket takes it while the server restarts. None is given out
/// twice, for there is a while before its server listens.
pub fn free_port() -> u16 {
    static NEXT: OnceLock<AtomicU16> = OnceLock::new();
    let next = NEXT.get_or_init(|| AtomicU16::new(20_000 + (std::process::id() % 5_000) as u16));
    std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed))
        .take_while(|port| *port < 32_000)
        .find(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("a free port between 20000 and 32000")
}

/// A server of a test's own, to be taken away from under its clients.
pub struct OwnPostgres {
    folder: tempfile::TempDir,
    port: u16,
}

impl OwnPostgres {
    pub fn start() -> Self {
        // On a real disk: these are the databases whose crashes are tested.
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let own = Self { folder, port: free_port() };
        let data = own.folder.path().join("data");
        let copy = Command::new("cp").arg("-a").arg(&shared().new).arg(data).status().unwrap();
        assert!(copy.success());
        if is_root() {
            assert!(Command::new("chown").arg("postgres").arg(own.folder.path()).status().unwrap().success());
        }
        own.start_again();
        own
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Immediate shutdown: the next start recovers as from a crash.
    pub fn crash(&self) {
        self.run("pg_ctl", &["stop", "-m", "immediate", "-w"]);
    }

    /// Fast shutdown: its clients are disconnected with 57P01.
    pub fn stop(&self) {
        self.run("pg_ctl", &["stop", "-m", "fast", "-w"]);
    }

    pub fn start_again(&self) {
        let folder = self.folder.path().display();
        let options = format!("-p {} -k {folder} -c listen_addresses=127.0.0.1", self.port);
        self.run("pg_ctl", &["start", "-w", "-l", &format!("{folder}/log"), "-o", &options]);
    }

    /// Lets it hang: connections stay open and nothing answers.
    pub fn freeze(&self) {
        let pid = self.pid().unwrap();
        kill("STOP", &pid);
        // Its children are only all known once it starts no more of them.
        let is_stopped = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('T'))
        };
        while !is_stopped() {
            std::thread::yield_now();
        }
        kill("STOP", &children_of(&pid));
    }

    pub fn thaw(&self) {
        let pid = self.pid().unwrap();
        kill("CONT", &format!("{pid} {}", children_of(&pid)));
    }

    fn pid(&self) -> Option<String> {
        let lines = std::fs::read_to_string(self.folder.path().join("data/postmaster.pid")).ok()?;
        lines.lines().next().map(str::to_owned)
    }

    fn run(&self, program: &str, args: &[&str]) {
        let program = newest_bin().join(program);
        let mut command = if is_root() {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command.arg("-D").arg(self.folder.path().join("data")).args(args).current_dir("/");
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        assert!(status.success(), "{command:?}");
    }
}

impl Drop for OwnPostgres {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            let all = format!("{pid} {}", children_of(&pid));
            kill("QUIT", &all);
            kill("CONT", &all);
        }
    }
}

fn children_of(pid: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default()
}

/// Signals processes, of which some may have ended.
fn kill(signal: &str, pids: &str) {
    let _ = Command::new("sh").args(["-c", &format!("kill -s {signal} {pids} 2>/dev/null")]).status();
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0)
}
