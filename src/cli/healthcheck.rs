//! `stockade healthcheck`: is the server ready? For containers and scripts, which read the exit code.
//!
//! 0 if it is ready, if need be degraded; 6 if it is not, or cannot be reached; 1 if something else answers.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use reqwest::{Method, StatusCode};
use serde::{Deserialize, Serialize};

use super::client::Client;
use super::exit::Exit;

#[derive(Args)]
pub struct Healthcheck {
    /// The server to ask; if not given, the one on this machine.
    #[arg(long)]
    url: Option<String>,

    /// Where the server on this machine listens.
    #[arg(long, env = "STOCKADE_LISTEN", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,

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
        let url = match self.url {
            Some(url) => url,
            None => format!("http://{}", reachable(self.listen)),
        };
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
            println!("{}", serde_json::to_string(&readiness)?);
        } else {
            let checks: Vec<String> = readiness.checks.iter().map(|(name, state)| format!("{name} {state}")).collect();
            println!("{}: {}", readiness.status, checks.join(", "));
        }
        Ok(exit.into())
    }
}

/// The address to call a server that listens on all addresses.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_listens_everywhere_is_asked_on_loopback() {
        for (listen, called) in
            [("0.0.0.0:80", "127.0.0.1:80"), ("[::]:80", "[::1]:80"), ("10.1.2.3:80", "10.1.2.3:80")]
        {
            assert_eq!(reachable(listen.parse().unwrap()).to_string(), called);
        }
    }
}
