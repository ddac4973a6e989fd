//! `stockade healthcheck`: is the server ready? For containers and scripts, which read the exit code.
//!
//! 0 if it is ready, if need be degraded; 6 if it is not, or cannot be reached; 1 if something else answers.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use reqwest::{Method, StatusCode};
use serde::{Deserialize, Serialize};

use super::client::{At, Client};
use super::exit::Exit;
use super::out;
use super::table::printable;

#[derive(Args)]
pub struct Healthcheck {
    #[command(flatten)]
    at: At,

    /// How long to wait for its answer.
    #[arg(long, default_value = "3s", value_parser = humantime::parse_duration)]
    timeout: Duration,

    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
}

/// What `/readyz` answers.
#[derive(Deserialize, Serialize)]
struct Readiness {
    status: String,
    checks: BTreeMap<String, String>,
}

impl Healthcheck {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let url = self.at.url();
        let client = Client::new(&url, self.timeout)?;
        let response = client.answer(client.request(Method::GET, "/readyz")).await?;
        let exit = match response.status() {
            StatusCode::OK => Exit::Ok,
            StatusCode::SERVICE_UNAVAILABLE => Exit::Unavailable,
            status => anyhow::bail!("{url}/readyz answered {status}: is that a Stockade server?"),
        };
        let readiness: Readiness =
            response.json().await.with_context(|| format!("{url}/readyz is not what Stockade answers"))?;
        if self.json {
            out::print(&out::json_line(&readiness)?)?;
        } else {
            let checks: Vec<String> = readiness.checks.iter().map(|(name, state)| format!("{name} {state}")).collect();
            out::print(&(printable(&format!("{}: {}", readiness.status, checks.join(", "))) + "\n"))?;
        }
        Ok(exit.into())
    }
}
