//! `stockade audit`: are the promises kept? Exit code 0 if they are, 3 if one is broken, 6 if nobody answers.
//!
//! Asks the database itself, read only, beside its server if there is one; or a server, with `--url`. That one must be
//! said: a variable that is set for other commands does not have another database audited than the one that is meant.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use stockade::config::Settings;
use stockade::operations::audit::Report;
use stockade::{app, telemetry};

use super::client::{Client, Credential};
use super::exit::Exit;
use super::out;
use super::table::printable;

#[derive(Args)]
pub struct Audit {
    /// Ask this server instead of the database.
    #[arg(long)]
    url: Option<String>,

    /// Report every unhandled event as lost, however new.
    ///
    /// For a system at rest: all queues are empty, nothing is being placed. Without it an event counts as lost only
    /// after half a minute, or five minutes on RabbitMQ.
    #[arg(long, conflicts_with = "url")]
    at_rest: bool,

    /// How long a server may take.
    #[arg(long, default_value = "10m", value_parser = humantime::parse_duration)]
    timeout: Duration,

    /// Print the report as JSON.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    credential: Credential,

    #[command(flatten)]
    settings: Settings,
}

impl Audit {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        telemetry::init(&self.settings.log, self.settings.log_format)?;
        let report: Report = match &self.url {
            Some(url) => self.credential.given_to(Client::new(url, self.timeout)?)?.get("/v1/audit").await?,
            None => app::audit(self.settings, self.at_rest).await.map_err(|error| {
                match error.chain().any(is_out_of_reach) {
                    true => Exit::Unavailable.because(format!("{error:#}")),
                    false => error,
                }
            })?,
        };
        if self.json {
            out::print(&out::json_line(&report)?)?;
        } else {
            out::print(&page(&report))?;
        }
        Ok(if report.violations == 0 { Exit::Ok } else { Exit::Broken }.into())
    }
}

/// Is it a database that does not answer?
fn is_out_of_reach(cause: &(dyn std::error::Error + 'static)) -> bool {
    matches!(cause.downcast_ref(), Some(sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut))
}

fn page(report: &Report) -> String {
    let mut page = String::new();
    for checked in &report.checks {
        if checked.violations == 0 {
            page.push_str(&format!("ok      {:<30} {}\n", checked.name, checked.promise));
        } else {
            let broken = (checked.name.as_str(), checked.violations, printable(&checked.sample.join(", ")));
            page.push_str(&format!("BROKEN  {:<30} {} break it: {}\n", broken.0, broken.1, broken.2));
        }
    }
    let verdict = match report.violations {
        0 => "every promise is kept".to_owned(),
        count => format!("{count} violations"),
    };
    page + &format!("{verdict}; {} under way at {}\n", report.unsettled, report.checked_at)
}
