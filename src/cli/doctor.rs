//! `stockade doctor`: looks at everything a server stands on and says what is amiss and what to do about it.
//!
//! The database is opened read only, beside its server if there is one; a broker's queues are declared as a server would,
//! which fails if those in force are not as wanted. Exit code 0 if a server would run well, 1 if something must be mended
//! first.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use reqwest::StatusCode;
use serde::Serialize;
use serde_json::Value;
use stockade::config::Settings;
use stockade::{app, telemetry};
use stockade_kernel::clock::{Clock, millis};
use stockade_kernel::db::Db;

use super::client::{Client, Credential, reachable, refusal};
use super::exit::Exit;
use super::out;
use super::table::printable;

const SERVER_TIMEOUT: Duration = Duration::from_secs(3);
/// Clocks further apart than this make times hard to read; leases go by the database's clock and do not care.
const SKEW_MAX: Duration = Duration::from_secs(2);
/// Less free space than this is soon none.
const FREE_BYTES_MIN: u64 = 1 << 30;

#[derive(Args)]
pub struct Doctor {
    /// Print the findings as JSON.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    credential: Credential,

    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// Works, but somebody should look.
    Warning,
    /// Must be mended.
    Bad,
}

#[derive(Debug, Serialize)]
struct Finding {
    what: String,
    verdict: Verdict,
    detail: String,
}

fn finding(what: &str, verdict: Verdict, detail: impl Into<String>) -> Finding {
    Finding { what: what.to_owned(), verdict, detail: detail.into() }
}

impl Doctor {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        telemetry::init(&self.settings.log, self.settings.log_format)?;
        let mut findings = vec![finding("version", Verdict::Ok, env!("CARGO_PKG_VERSION"))];
        findings.push(match self.settings.validate() {
            Ok(()) => finding("settings", Verdict::Ok, "they fit together"),
            Err(error) => finding("settings", Verdict::Bad, error.to_string()),
        });
        findings.extend(look_at_database(&self.settings).await);
        findings.extend(look_at_disk(&self.settings));
        match app::inspect_broker(&self.settings).await {
            Ok(told) => findings.extend(told.into_iter().map(|(what, detail)| finding(&what, Verdict::Ok, detail))),
            Err(error) => findings.push(finding("broker", Verdict::Bad, format!("{error:#}"))),
        }
        findings.push(look_at_server(&self.settings, &self.credential).await);
        if self.json {
            out::print(&out::json_line(&findings)?)?;
        } else {
            for Finding { what, verdict, detail } in &findings {
                let mark = match verdict {
                    Verdict::Ok => "ok      ",
                    Verdict::Warning => "warning ",
                    Verdict::Bad => "BAD     ",
                };
                out::print(&(printable(&format!("{mark}{what:<32} {detail}")) + "\n"))?;
            }
        }
        let bad = findings.iter().any(|finding| finding.verdict == Verdict::Bad);
        Ok(if bad { Exit::Failure } else { Exit::Ok }.into())
    }
}

async fn look_at_database(settings: &Settings) -> Vec<Finding> {
    let db = match Db::open_read_only(&settings.database(), Clock::System).await {
        Ok(db) => db,
        Err(error) => return vec![finding("database", Verdict::Bad, format!("{error:#}"))],
    };
    let mut findings = Vec::new();
    match db.describe().await {
        Ok(about) => {
            findings.push(finding("database", Verdict::Ok, format!("{} {}", db.engine_name(), about.version)));
            for (name, value, wanted) in about.settings {
                findings.push(match wanted {
                    Some(wanted) if wanted != value => {
                        finding(name, Verdict::Bad, format!("{value}, should be {wanted}"))
                    }
                    _ => finding(name, Verdict::Ok, value),
                });
            }
            let schema = match about.migrations_missing {
                0 => finding("schema", Verdict::Ok, "at this version's"),
                count => {
                    let todo = "run `stockade migrate`, or start a server, which does";
                    finding("schema", Verdict::Warning, format!("{count} migrations behind this version's: {todo}"))
                }
            };
            findings.push(schema);
            // An older schema may have no table for keys yet.
            if about.migrations_missing == 0 {
                findings.push(match app::check_access(settings, &db).await {
                    Ok(()) => finding("access", Verdict::Ok, "it has keys, or only those meant to can reach it"),
                    Err(error) => finding("access", Verdict::Bad, format!("{error:#}")),
                });
            }
            let skew = Duration::from_millis(about.clock_skew_ms.unsigned_abs());
            let detail = format!("the database's clock is {} ms off this machine's", about.clock_skew_ms);
            let verdict = if skew > SKEW_MAX { Verdict::Warning } else { Verdict::Ok };
            findings.push(finding("clock", verdict, detail));
        }
        Err(error) => findings.push(finding("database", Verdict::Bad, error.to_string())),
    }
    db.close().await;
    findings
}

/// The disk that a SQLite file is on; a Postgres server's is its own affair.
fn look_at_disk(settings: &Settings) -> Option<Finding> {
    let path = settings.database_url.strip_prefix("sqlite:")?;
    let path = std::path::Path::new(path.trim_start_matches("//").split('?').next().unwrap_or(path));
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(std::path::Path::new("."));
    Some(match rustix::fs::statvfs(folder) {
        Ok(disk) => {
            let free = disk.f_bavail.saturating_mul(disk.f_frsize);
            let verdict = if free < FREE_BYTES_MIN { Verdict::Warning } else { Verdict::Ok };
            finding("disk", verdict, format!("{} free at {}", bytesize::ByteSize(free), folder.display()))
        }
        Err(error) => finding("disk", Verdict::Warning, format!("{}: {error}", folder.display())),
    })
}

/// The server that these settings would start, if it is there already.
async fn look_at_server(settings: &Settings, credential: &Credential) -> Finding {
    let url = format!("http://{}", reachable(settings.listen));
    let asked: anyhow::Result<Value> =
        async { credential.given_to(Client::new(&url, SERVER_TIMEOUT)?)?.get("/v1/health").await }.await;
    match asked {
        Ok(health) => {
            let status = health["status"].as_str().unwrap_or("unknown").to_owned();
            let verdict = if status == "ok" { Verdict::Ok } else { Verdict::Warning };
            let count = health["instances"].as_array().map_or(0, Vec::len);
            finding("server", verdict, format!("{status} at {url}, {count} instances on its database"))
        }
        Err(error) if refusal(&error) == Some(StatusCode::UNAUTHORIZED) => finding(
            "server",
            Verdict::Ok,
            format!("one at {url} that wants a key: set STOCKADE_API_KEY to look closer"),
        ),
        Err(_) => finding("server", Verdict::Ok, format!("none at {url} (waited up to {} ms)", millis(SERVER_TIMEOUT))),
    }
}
