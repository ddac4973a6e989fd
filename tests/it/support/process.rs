//! The real binary as a process of its own, to be killed.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::Deref;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use super::{Api, CONNECTIONS_MAX, TestDb, eventually};

pub struct Server {
    api: Api,
    child: Child,
    stdout: Option<BufReader<ChildStdout>>,
}

impl Server {
    /// Starts `stockade serve --demo` on a free port and waits until it is ready.
    pub fn start(db: &TestDb, flags: &[&str]) -> Self {
        Self::start_logging(db, flags, Path::new("/dev/null"))
    }

    /// The same, with what it logs kept in a file.
    pub fn start_logging(db: &TestDb, flags: &[&str], log: &Path) -> Self {
        let mut server = Self::spawn(Self::command(db, flags), log);
        // The pipe is closed with the banner half read, as `| head` would.
        server.stdout = None;
        server
    }

    /// Starts a command line and waits until it is ready. Its stdout stays open: libtest, which runs the server with a
    /// witness, prints a warning after 60 seconds and would end the process if it could not.
    pub fn spawn(command: Command, log: &Path) -> Self {
        Self::try_spawn(command, log).expect("the server prints its URL")
    }

    /// The same, or how the server ended before it was ready.
    pub fn try_spawn(mut command: Command, log: &Path) -> Result<Self, ExitStatus> {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(File::options().create(true).append(true).open(log).unwrap())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let url = stdout.by_ref().lines().map_while(Result::ok).find_map(|line| {
            line.trim().strip_prefix("dashboard").map(|url| url.trim().trim_end_matches('/').to_owned())
        });
        let mut server = Self { api: Api::new(url.clone().unwrap_or_default()), child, stdout: Some(stdout) };
        match url {
            Some(_) => Ok(server),
            None => Err(server.child.wait().unwrap()),
        }
    }

    /// The command line of a server on `db`, to be started.
    pub fn command(db: &TestDb, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
        // Below a flag, above the environment of whoever runs the tests.
        command.env("STOCKADE_LOG", "warn");
        command.args(["serve", "--demo", "--database-url", &db.url]);
        command.env("STOCKADE_DB_MAX_CONNECTIONS", CONNECTIONS_MAX.to_string());
        if !flags.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        command.args(db.wire.flags(flags)).args(flags);
        command
    }

    /// As kill -9.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn has_ended(&self) -> bool {
        // A zombie: `try_wait` needs a mutable server, which requests under way have borrowed.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with('Z'))
    }

    /// Waits for the process to end by itself.
    pub async fn ended(&mut self) -> ExitStatus {
        let child = std::cell::RefCell::new(&mut self.child);
        eventually("the end of the process", || async { child.borrow_mut().try_wait().unwrap() }).await
    }

    /// Sends `TERM`, `INT`, `KILL`.
    pub fn signal(&self, signal: &str) {
        // By the shell: a lean system has no `kill` of its own.
        let kill = format!("kill -s {signal} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// Asks for an orderly stop and waits for it; says whether the process ended well.
    pub async fn terminate(mut self) -> bool {
        self.signal("TERM");
        self.ended().await.success()
    }
}

impl Deref for Server {
    type Target = Api;

    fn deref(&self) -> &Api {
        &self.api
    }
}

/// A test that fails leaves no server behind.
impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
