//! `stockade replay`: sends published events again. Effects already applied are skipped by the inbox.

use std::process::ExitCode;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::jobs::TypeCount;

use super::exit::Exit;
use super::jobs::{Job, Jobs, follow};
use super::remote::{Remote, confirm, read_rate, read_time};
use super::table::table;

const PATH: &str = "/v1/replays";

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Replay {
    #[command(subcommand)]
    jobs: Option<Jobs>,
    #[command(flatten)]
    start: Start,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Args)]
struct Start {
    /// Events written since: `2h`, or a time.
    #[arg(long, value_parser = read_time, required = true)]
    since: Option<Timestamp>,
    /// Events written before; now if not given.
    #[arg(long, value_parser = read_time)]
    until: Option<Timestamp>,
    /// Only events of this kind of thing, as in `order`.
    #[arg(long)]
    aggregate_type: Option<String>,
    /// Only to this consumer, and only what it takes; to all if not given.
    #[arg(long)]
    consumer: Option<String>,
    /// Events per second.
    #[arg(long, value_parser = read_rate, default_value = "500/s")]
    rate: i64,
    /// Only say what would be sent.
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

/// What the server says a replay would send.
#[derive(Debug, Serialize, Deserialize)]
struct Preview {
    total: i64,
    by_type: Vec<TypeCount>,
    from: Timestamp,
    to: Timestamp,
    consumer: Option<String>,
}

impl Replay {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let Self { jobs, start, remote } = self;
        if let Some(jobs) = jobs {
            return jobs.run(&remote, PATH).await;
        }
        let client = remote.client()?;
        // The same range for the look and for the start, whenever that is confirmed.
        let asked = |to: Option<Timestamp>, dry_run: bool| {
            json!({
                "aggregate_type": start.aggregate_type, "from": start.since, "to": to, "consumer": start.consumer,
                "rate": start.rate, "why": start.why, "dry_run": dry_run,
            })
        };
        let preview: Preview = client.post(PATH, &asked(start.until, true)).await?;
        if start.dry_run {
            remote.answer(&preview, show)?;
            return Ok(Exit::Ok.into());
        }
        if preview.total == 0 {
            eprintln!("No event was published in that time; nothing to do.");
            return Ok(Exit::Ok.into());
        }
        eprint!("{}", show(&preview));
        confirm(&format!("Send {} events again, {} a second?", preview.total, start.rate), start.yes)?;
        let job: Job = client.post(PATH, &asked(Some(preview.to), false)).await?;
        if start.no_wait {
            eprintln!("Under way; `stockade replay follow {}` waits for its end.", job.id);
            remote.answer(&job, |job| format!("{}\n", job.id))?;
            return Ok(Exit::Ok.into());
        }
        follow(&remote, &client, PATH, job).await
    }
}

fn show(preview: &Preview) -> String {
    let rows = preview.by_type.iter().map(|of_type| [of_type.event_type.clone(), of_type.count.to_string()]);
    let to = preview.consumer.as_deref().unwrap_or("every consumer");
    let table = table(["EVENT TYPE", "COUNT"], rows);
    format!(
        "{table}{} events from {} to {}, for {to}; what was applied is skipped.\n",
        preview.total, preview.from, preview.to
    )
}
