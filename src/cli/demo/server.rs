//! A server of a demo's own: a process of this same binary, to be stopped, killed and started again.

use std::fs::File;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::cli::serve;

/// How long a server may take to start, and to stop in good order.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// Lines of its log that are worth showing when something went wrong.
const LOG_LINES: usize = 10;

/// What a server is started with.
pub struct Recipe {
    pub database_url: String,
    pub broker_url: String,
    pub queue_prefix: String,
    /// As for STOCKADE_MODULES.
    pub modules: String,
    pub flags: Vec<String>,
    pub log: PathBuf,
}

pub struct Server {
    recipe: Recipe,
    child: Child,
    pub url: String,
}

impl Server {
    pub async fn start(recipe: Recipe) -> anyhow::Result<Self> {
        let (child, url) = spawn(&recipe).await?;
        Ok(Self { recipe, child, url })
    }

    /// Starts it again, after it was stopped or has died.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        (self.child, self.url) = spawn(&self.recipe).await?;
        Ok(())
    }

    /// The process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits for it to end by itself; `None` if it does not.
    pub async fn ended(&mut self, within: Duration) -> std::io::Result<Option<ExitStatus>> {
        tokio::time::timeout(within, self.child.wait()).await.ok().transpose()
    }

    /// Stops it in good order, or the hard way if that takes too long.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        let pid = self.child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
        let Some(pid) = pid else { return Ok(()) };
        kill_process(pid, Signal::TERM)?;
        if self.ended(STOP_TIMEOUT).await?.is_none() {
            self.child.kill().await?;
        }
        Ok(())
    }

    pub fn log_tail(&self) -> String {
        log_tail(&self.recipe)
    }
}

async fn spawn(recipe: &Recipe) -> anyhow::Result<(Child, String)> {
    let log = File::options().create(true).append(true).open(&recipe.log)?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["serve", "--demo", "--listen", "127.0.0.1:0", "--modules", &recipe.modules])
        .args(["--queue-prefix", &recipe.queue_prefix])
        .args(&recipe.flags)
        // Not as flags: they may carry passwords, and everybody sees a process's flags.
        .env("STOCKADE_DATABASE_URL", &recipe.database_url)
        .env("STOCKADE_BROKER_URL", &recipe.broker_url)
        // Keys are for whatever server they were set for; this one is gone in a minute.
        .env_remove("STOCKADE_API_KEYS")
        .env_remove("STOCKADE_API_KEYS_FILE")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        // A Ctrl-C on the terminal is for the demo, which then stops its servers itself.
        .process_group(0)
        .kill_on_drop(true);
    if std::env::var_os("STOCKADE_LOG").is_none() {
        command.env("STOCKADE_LOG", "warn");
    }
    let mut child = command.spawn().context("cannot start a server")?;
    let stdout = child.stdout.take().context("a server's stdout is piped")?;
    let mut lines = BufReader::new(stdout).lines();
    let url = async {
        while let Some(line) = lines.next_line().await? {
            if let Some(url) = serve::url_in_banner(&line) {
                return Ok(Some(url.to_owned()));
            }
        }
        Ok::<_, std::io::Error>(None)
    };
    match tokio::time::timeout(START_TIMEOUT, url).await {
        Ok(Ok(Some(url))) => Ok((child, url)),
        _ => anyhow::bail!("the demo's own server did not start:\n{}", log_tail(recipe)),
    }
}

fn log_tail(recipe: &Recipe) -> String {
    let log = std::fs::read(&recipe.log).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}
