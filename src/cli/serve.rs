//! `stockade serve` and `stockade migrate`.

use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use stockade::app::Builder;
use stockade::config::Settings;
use stockade::lifecycle::asked_to_stop;
use stockade::telemetry;
use stockade_kernel::clock::Clock;
use stockade_kernel::db::Db;

use super::out;

#[derive(Args)]
pub struct Serve {
    /// Open the fault lab (loopback only): raw messages into queues, crashes at named points.
    #[arg(long, env = "STOCKADE_FAULT_LAB")]
    demo: bool,
    #[command(flatten)]
    settings: Settings,
}

impl Serve {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        telemetry::init(&self.settings.log, self.settings.log_format)?;
        let _exporting = telemetry::export_traces()?;
        // Listened for before anything starts, so that Ctrl-C during the start is not lost.
        let stop = asked_to_stop();
        tokio::pin!(stop);
        let is_stocked = self.settings.is_embedded() || self.demo;
        let starting = Builder::new(self.settings).demo(self.demo).start();
        let running = tokio::select! {
            running = starting => running?,
            stopped = &mut stop => {
                stopped?;
                return Ok(ExitCode::SUCCESS);
            }
        };
        // A reader that went away (`| head -1`) is no reason to stop serving.
        let _ = std::io::stdout().write_all(banner(running.address, is_stocked).as_bytes());
        let clean = running
            .run_until(async {
                if let Err(error) = stop.await {
                    tracing::error!(%error, "signals cannot be heard");
                }
                eprintln!("Stopping: finishing what is in hand. Ctrl-C again stops at once.");
            })
            .await;
        Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// The URL that a line of the banner gives, if it is the line that does.
pub fn url_in_banner(line: &str) -> Option<&str> {
    line.trim().strip_prefix("dashboard").map(|url| url.trim().trim_end_matches('/'))
}

/// Where everything is, and an order to paste. What holds real goods is not stocked by itself.
fn banner(address: SocketAddr, is_stocked: bool) -> String {
    let at = format!("http://{address}");
    let stocking = match is_stocked {
        true => String::new(),
        false => format!(
            "\
Put something on a shelf, if there is nothing yet:
  curl -s -X PUT {at}/v1/stock/WIDGET-A -H 'Content-Type: application/json' -d '{{\"on_hand\":100}}'
"
        ),
    };
    format!(
        "\
Stockade is ready.
  dashboard  {at}/
  API docs   {at}/docs/
  readiness  {at}/readyz
{stocking}Place an order and wait for its outcome:
  curl -s {at}/v1/orders -H 'Content-Type: application/json' -H 'Prefer: wait=5' \\
    -d '{{\"customer_id\":\"alice\",\"items\":[{{\"sku\":\"WIDGET-A\",\"quantity\":2}}]}}'
"
    )
}

#[derive(Args)]
pub struct Migrate {
    /// Print what it came to as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

impl Migrate {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        telemetry::init(&self.settings.log, self.settings.log_format)?;
        let db = Db::open(&self.settings.database(), Clock::System).await?;
        let about = db.describe().await?;
        if self.json {
            let migrated = json!({
                "database": db.engine_name(),
                "version": about.version,
                "migrations_missing": about.migrations_missing,
            });
            out::print(&out::json_line(&migrated)?)?;
        }
        db.close().await;
        eprintln!("The database is at this version's schema.");
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_banner_says_where_the_server_is_and_how_to_stock_it() {
        for is_stocked in [true, false] {
            let banner = banner("127.0.0.1:4711".parse().unwrap(), is_stocked);
            let urls: Vec<&str> = banner.lines().filter_map(url_in_banner).collect();
            assert_eq!(urls, ["http://127.0.0.1:4711"]);
            assert_eq!(banner.contains("-X PUT http://127.0.0.1:4711/v1/stock/WIDGET-A"), !is_stocked, "{banner}");
        }
    }
}
