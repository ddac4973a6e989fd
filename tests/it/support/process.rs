//! The real binary as a process of its own, to be killed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::TestDb;

pub struct Server {
    pub url: String,
    child: Child,
}

impl Server {
    /// Starts `stockade serve --demo` on a free port and waits until it is ready.
    pub fn start(db: &TestDb, flags: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_stockade"))
            .args(["serve", "--demo", "--listen", "127.0.0.1:0", "--log", "warn", "--database-url", &db.url])
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let url = stdout
            .lines()
            .map_while(Result::ok)
            .find_map(|line| {
                line.trim().strip_prefix("dashboard").map(|url| url.trim().trim_end_matches('/').to_owned())
            })
            .expect("the server prints its URL");
        Self { url, child }
    }

    /// As kill -9.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for the process to end by itself and returns whether it ended well.
    pub fn wait(mut self) -> bool {
        self.child.wait().unwrap().success()
    }

    /// Asks for an orderly stop and waits for it.
    pub fn terminate(self) -> bool {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        self.wait()
    }
}

/// A test that fails leaves no server behind.
impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
