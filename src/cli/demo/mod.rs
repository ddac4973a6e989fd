//! `stockade demo`: the promises, seen to be kept. Each demo says what it does and what one should see, shows the
//! figures while they move, and ends with proofs; if one does not hold, the exit code is 3.
//!
//! A demo runs on the server given by `--url`, on a shelf of its own there, and leaves it as it was. Without that it
//! starts processes of this same binary in a place of their own, gone afterwards: a temporary SQLite file, or a schema
//! in the Postgres given. On a broker its queues have a prefix of their own, so that it takes no message of others.

mod backlog;
mod crash;
mod duplicates;
mod poison;
mod report;
mod server;
mod shop;
mod stage;
mod tell;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use stockade::lifecycle::asked_to_stop;

use super::client::Credential;
use super::exit::Exit;
use backlog::Backlog;
use crash::Crash;
use duplicates::Duplicates;
use poison::Poison;
use report::Report;
use stage::Stage;

/// The queue that is a table in the database.
const EMBEDDED: &str = "embedded";

#[derive(Args)]
pub struct Demo {
    #[command(subcommand)]
    which: Which,
}

#[derive(Subcommand)]
enum Which {
    #[command(flatten)]
    One(One),
    /// All of these, one after the other.
    All(Place),
}

#[derive(Subcommand)]
enum One {
    /// Inventory rests while orders come in; when it is back it works off what waited, and nothing is lost.
    Backlog(Backlog),
    /// The same event is published again and again; its effect happens once. Needs the fault lab (`serve --demo`).
    Duplicates(Duplicates),
    /// Messages that nobody can read become dead letters with a reason, and hold nobody up. Needs the fault lab.
    Poison(Poison),
    /// The process dies between its commit and its acknowledgement, and comes back; nothing is lost or done twice.
    Crash(Crash),
}

/// Where a demo runs, and how it reports.
#[derive(Debug, Clone, Args)]
pub struct Place {
    /// A running server; without it the demo starts one of its own.
    #[arg(long, help_heading = "Where")]
    url: Option<String>,

    /// What to present to it: a demo places orders, fills shelves and pauses consumers, so it takes an admin's key for
    /// every group.
    #[command(flatten)]
    credential: Credential,

    /// For a server of its own: `postgres://…`, where it keeps to a schema that is dropped at the end. Otherwise a
    /// temporary SQLite file.
    #[arg(long, env = "STOCKADE_DATABASE_URL", hide_env_values = true, help_heading = "Where")]
    database_url: Option<String>,

    /// For a server of its own: `embedded`, or `amqp://…`.
    #[arg(long, env = "STOCKADE_BROKER_URL", default_value = EMBEDDED, hide_env_values = true, help_heading = "Where")]
    broker_url: String,

    /// For a server of its own: what queue names begin with; `stockade-demo` on a broker.
    #[arg(long, help_heading = "Where")]
    queue_prefix: Option<String>,

    /// How long to wait while nothing moves.
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    patience: Duration,

    /// Print the figures as one JSON object.
    #[arg(long)]
    json: bool,
}

/// A demo: what it is about, and how it goes.
trait Play {
    const NAME: &str;
    const TITLE: &str;
    const ABOUT: &str;

    fn place(&self) -> &Place;

    /// Goes through the steps and adds to the report what they prove. An error breaks it off.
    async fn play(&self, stage: &mut Stage) -> anyhow::Result<()>;
}

impl Demo {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let reports = match self.which {
            Which::One(demo) => {
                let report = demo.perform().await?;
                report.print(demo.place().json)?;
                vec![report]
            }
            Which::All(place) => perform_all(place).await?,
        };
        let proven = reports.iter().all(Report::is_proven);
        Ok(if proven { Exit::Ok } else { Exit::Broken }.into())
    }
}

async fn perform_all(place: Place) -> anyhow::Result<Vec<Report>> {
    let mut demos = vec![
        One::Backlog(Backlog::usual(place.clone())),
        One::Duplicates(Duplicates::usual(place.clone())),
        One::Poison(Poison::usual(place.clone())),
    ];
    match place.url {
        None => demos.push(One::Crash(Crash::usual(place.clone()))),
        Some(_) => tell::note("Without the crash: the server at --url is not the demo's to kill.\n"),
    }
    let mut reports = Vec::new();
    for demo in demos {
        let report = demo.perform().await?;
        if !place.json {
            report.print(false)?;
            tell::gap();
        }
        reports.push(report);
    }
    if place.json {
        report::print_all(&reports)?;
    }
    Ok(reports)
}

impl One {
    fn place(&self) -> &Place {
        match self {
            Self::Backlog(backlog) => backlog.place(),
            Self::Duplicates(duplicates) => duplicates.place(),
            Self::Poison(poison) => poison.place(),
            Self::Crash(crash) => crash.place(),
        }
    }

    async fn perform(&self) -> anyhow::Result<Report> {
        match self {
            Self::Backlog(backlog) => perform(backlog).await,
            Self::Duplicates(duplicates) => perform(duplicates).await,
            Self::Poison(poison) => perform(poison).await,
            Self::Crash(crash) => perform(crash).await,
        }
    }
}

/// Plays a demo through. A promise that was seen broken is part of the report; anything else that goes wrong is an
/// error, since it proves nothing.
async fn perform<P: Play>(play: &P) -> anyhow::Result<Report> {
    let mut stage = Stage::new(P::NAME, play.place().clone());
    tell::title(P::TITLE, P::ABOUT);
    let ended = tokio::select! {
        // First, so that signals are listened for before anything starts that must be put right.
        biased;
        asked = asked_to_stop() => asked.map_err(Into::into).and(Err(Exit::Interrupted.because("interrupted"))),
        ended = play.play(&mut stage) => ended,
    };
    let ended = match ended {
        Err(error) if Exit::of(&error) == Exit::Broken => {
            stage.report.broke_off(error.to_string());
            Ok(())
        }
        ended => ended,
    };
    if !stage.report.is_proven() {
        stage.show_logs();
    }
    let report = stage.leave().await;
    ended.map(|()| report)
}

impl Place {
    /// The Postgres for a server of its own, if one was given.
    fn postgres(&self) -> anyhow::Result<Option<&str>> {
        match self.database_url.as_deref() {
            Some(url) if url.starts_with("postgres://") || url.starts_with("postgresql://") => Ok(Some(url)),
            Some(url) if !url.starts_with("sqlite:") => {
                Err(Exit::Usage.because("--database-url must start with postgres:// or sqlite:"))
            }
            // A demo never writes into a file that is somebody's.
            _ => Ok(None),
        }
    }

    fn own_queue_prefix(&self) -> String {
        let usual = if self.broker_url == EMBEDDED { "stockade" } else { "stockade-demo" };
        self.queue_prefix.clone().unwrap_or_else(|| usual.to_owned())
    }
}
