//! What `stockade redrive` and `stockade replay` share: following a job, listing and stopping jobs.

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::client::Client;
use super::exit::Exit;
use super::remote::{Remote, segment, with_query};
use super::table::{facts, table};

/// How often the server is asked how far it has come.
const ASK_EVERY: Duration = Duration::from_millis(250);
/// How often that is written down where it cannot be drawn in place.
const LINE_EVERY: Duration = Duration::from_secs(5);

#[derive(Subcommand)]
pub enum Jobs {
    /// List them, newest first.
    List {
        /// running, done, stopped or failed
        #[arg(long)]
        state: Option<String>,
    },
    /// How far one has come.
    Show { id: String },
    /// Wait for one to end.
    Follow { id: String },
    /// Stop one after the batch in hand.
    Stop {
        id: String,
        /// For whoever looks later.
        #[arg(long)]
        reason: Option<String>,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    pub id: String,
    kind: String,
    state: String,
    filter: Value,
    rate: i64,
    total: i64,
    sent: i64,
    already_applied: i64,
    skipped: i64,
    refused: i64,
    remaining: i64,
    who: String,
    why: Option<String>,
    last_error: Option<String>,
    created_at: String,
    finished_at: Option<String>,
}

impl Jobs {
    /// `path` is that of the jobs in question.
    pub async fn run(self, remote: &Remote, path: &str) -> anyhow::Result<ExitCode> {
        let client = remote.client()?;
        match self {
            Self::List { state } => {
                let path = with_query(path, [("state", state)]);
                remote.answer(&client.list::<Job>(&path).await?, |jobs| list(jobs))?;
            }
            Self::Show { id } => remote.answer(&client.get::<Job>(&one(path, &id)).await?, show)?,
            Self::Follow { id } => {
                let job = client.get::<Job>(&one(path, &id)).await?;
                return follow(remote, &client, path, job).await;
            }
            Self::Stop { id, reason } => {
                let stopped: Job =
                    client.post(&format!("{}/stop", one(path, &id)), &json!({ "reason": reason })).await?;
                remote.answer(&stopped, show)?;
            }
        }
        Ok(Exit::Ok.into())
    }
}

/// The path of one of them.
fn one(path: &str, id: &str) -> String {
    format!("{path}/{}", segment(id))
}

fn list(jobs: &[Job]) -> String {
    let row = |job: &Job| {
        let done = job.total - job.remaining;
        [job.id.clone(), job.state.clone(), format!("{done}/{}", job.total), job.created_at.clone(), job.who.clone()]
    };
    table(["ID", "STATE", "DONE", "STARTED", "BY"], jobs.iter().map(row))
}

fn show(job: &Job) -> String {
    let mut rows = vec![
        ("id", job.id.clone()),
        ("state", job.state.clone()),
        ("filter", job.filter.to_string()),
        ("rate", format!("{}/s", job.rate)),
        ("total", job.total.to_string()),
        ("sent", job.sent.to_string()),
        ("already applied", job.already_applied.to_string()),
        ("skipped", job.skipped.to_string()),
        ("refused", job.refused.to_string()),
        ("remaining", job.remaining.to_string()),
        ("asked for by", job.who.clone()),
        ("started", job.created_at.clone()),
    ];
    let maybe = [("why", &job.why), ("ended", &job.finished_at), ("error", &job.last_error)];
    rows.extend(maybe.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))));
    facts(&rows)
}

/// Shows how far a job has come until it ends. Ctrl-C only looks away.
pub async fn follow(remote: &Remote, client: &Client, path: &str, mut job: Job) -> anyhow::Result<ExitCode> {
    let bar = ProgressBar::new(job.total.unsigned_abs());
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}, {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut written = Instant::now();
    while job.state == "running" {
        let done = job.total - job.remaining;
        bar.set_position(done.unsigned_abs());
        bar.set_message(format!("at {}/s", job.rate));
        if bar.is_hidden() && written.elapsed() >= LINE_EVERY {
            eprintln!("{done}/{} at {}/s", job.total, job.rate);
            written = Instant::now();
        }
        tokio::select! {
            () = tokio::time::sleep(ASK_EVERY) => {}
            _ = tokio::signal::ctrl_c() => {
                bar.finish_and_clear();
                let message = format!("the {} {} goes on; `stockade {} stop {}` stops it", job.kind, job.id, job.kind, job.id);
                return Err(Exit::Interrupted.because(message));
            }
        }
        job = client.get(&one(path, &job.id)).await?;
    }
    bar.finish_and_clear();
    remote.answer(&job, show)?;
    Ok(if job.state == "done" { Exit::Ok } else { Exit::Failure }.into())
}
