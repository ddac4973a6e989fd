//! `stockade redrive`: sends dead letters back in bulk, after a look at what that would do.

use std::process::ExitCode;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::dead_letters::Group;

use super::dead_letters::groups_table;
use super::exit::Exit;
use super::jobs::{Job, Jobs, follow};
use super::remote::{Remote, confirm, read_rate, read_time};

const PATH: &str = "/v1/redrives";

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Redrive {
    #[command(subcommand)]
    jobs: Option<Jobs>,
    #[command(flatten)]
    start: Start,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Args)]
struct Start {
    /// Only letters of this queue, by its full or its short name.
    #[arg(long)]
    queue: Option<String>,
    #[arg(long)]
    consumer: Option<String>,
    /// Only letters with this reason code, as in `not-json`.
    #[arg(long)]
    reason: Option<String>,
    /// Only letters of this event type, as in `order.placed`.
    #[arg(long)]
    event_type: Option<String>,
    /// Only letters filed since: `2h`, or a time.
    #[arg(long, value_parser = read_time)]
    since: Option<Timestamp>,
    /// Only letters filed before.
    #[arg(long, value_parser = read_time)]
    until: Option<Timestamp>,
    /// Letters per second.
    #[arg(long, value_parser = read_rate, default_value = "100/s")]
    rate: i64,
    /// Only say what would be done.
    #[arg(long)]
    dry_run: bool,
    /// Do it without asking.
    #[arg(long)]
    yes: bool,
    /// For whoever looks later.
    #[arg(long)]
    why: Option<String>,
    /// Start it and do not wait for its end.
    #[arg(long)]
    no_wait: bool,
}

/// What the server says a redrive would do.
#[derive(Debug, Serialize, Deserialize)]
struct Preview {
    total: i64,
    already_applied: i64,
    refused: i64,
    to: Timestamp,
    groups: Vec<Group>,
    sample: Vec<Value>,
    already_applied_sample: Vec<Value>,
}

impl Redrive {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let Self { jobs, start, remote } = self;
        if let Some(jobs) = jobs {
            return jobs.run(&remote, PATH).await;
        }
        let client = remote.client()?;
        // The same letters for the look and for the start, whenever that is confirmed.
        let asked = |to: Option<Timestamp>, dry_run: bool| {
            json!({
                "queue": start.queue, "consumer": start.consumer, "reason": start.reason, "event_type": start.event_type,
                "from": start.since, "to": to, "rate": start.rate, "why": start.why, "dry_run": dry_run,
            })
        };
        let preview: Preview = client.post(PATH, &asked(start.until, true)).await?;
        if start.dry_run {
            remote.answer(&preview, show)?;
            return Ok(Exit::Ok.into());
        }
        if preview.total == 0 {
            eprintln!("No open letter matches; nothing to do.");
            return Ok(Exit::Ok.into());
        }
        eprint!("{}", show(&preview));
        confirm(&format!("Send {} letters back, {} a second?", preview.total, start.rate), start.yes)?;
        let job: Job = client.post(PATH, &asked(Some(preview.to), false)).await?;
        if start.no_wait {
            eprintln!("Under way; `stockade redrive follow {}` waits for its end.", job.id);
            remote.answer(&job, |job| format!("{}\n", job.id))?;
            return Ok(Exit::Ok.into());
        }
        follow(&remote, &client, PATH, job).await
    }
}

fn show(preview: &Preview) -> String {
    let mut text = groups_table(&preview.groups);
    text.push_str(&format!("{} letters", preview.total));
    if preview.already_applied > 0 {
        text.push_str(&format!(", {} of them applied already and only to be closed", preview.already_applied));
    }
    if preview.refused > 0 {
        text.push_str(&format!(", {} too old to be sent in bulk", preview.refused));
    }
    text.push_str(".\n");
    text
}
