//! `stockade queues`: how full, how old, and whether at rest; with `--watch` again and again, in place on a terminal.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{At, Client};
use super::out;
use super::table::printable;

/// No answer takes this long.
const TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Args)]
pub struct Queues {
    #[command(flatten)]
    at: At,

    /// Look again and again.
    #[arg(long)]
    watch: bool,

    /// How often.
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    every: Duration,

    /// Look this many times; for ever if not given.
    #[arg(long)]
    times: Option<u32>,

    /// Print what the server answers, one JSON object a look.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Deserialize)]
struct Queue {
    name: String,
    depth: i64,
    in_flight: Option<i64>,
    consumers: Option<i64>,
    paused: bool,
    dlq_depth: i64,
    dead_letters: i64,
    oldest_age_ms: Option<i64>,
    stale: bool,
}

impl Queues {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let client = self.at.client(TIMEOUT)?;
        let looks = if self.watch { self.times.unwrap_or(u32::MAX) } else { 1 };
        let in_place = self.watch && !self.json && std::io::stdout().is_terminal();
        let mut drawn = 0;
        for look in 0..looks {
            if look > 0 {
                tokio::time::sleep(self.every).await;
            }
            let page = self.look(&client).await?;
            if in_place && drawn > 0 {
                // Up over the last picture, and clear what is below.
                out::print(&format!("\x1b[{drawn}A\x1b[J"))?;
            }
            if !out::print(&page)? {
                break;
            }
            drawn = page.lines().count();
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn look(&self, client: &Client) -> anyhow::Result<String> {
        let queues: Value = client.get("/v1/queues").await?;
        let health: Value = client.get("/v1/health").await?;
        if self.json {
            return out::json_line(&json!({ "queues": queues["data"], "health": health }));
        }
        let queues: Vec<Queue> = serde_json::from_value(queues["data"].clone())?;
        Ok(picture(&queues, &health))
    }
}

fn picture(queues: &[Queue], health: &Value) -> String {
    let mut page = format!(
        "{:<28}{:>10}{:>11}{:>11}{:>10}{:>14}\n",
        "QUEUE", "READY", "IN FLIGHT", "CONSUMERS", "OLDEST", "DEAD LETTERS"
    );
    for queue in queues {
        let number = |count: Option<i64>| count.map_or_else(|| "?".to_owned(), |count| count.to_string());
        let letters = match queue.dlq_depth {
            0 => queue.dead_letters.to_string(),
            unfiled => format!("{} (+{unfiled})", queue.dead_letters),
        };
        let mut notes = String::new();
        if queue.paused {
            notes.push_str("  paused");
        }
        if queue.stale {
            notes.push_str("  as last known");
        }
        page.push_str(&format!(
            "{:<28}{:>10}{:>11}{:>11}{:>10}{:>14}{notes}\n",
            printable(&queue.name),
            queue.depth,
            number(queue.in_flight),
            number(queue.consumers),
            age(queue.oldest_age_ms),
            letters
        ));
    }
    let text = |value: &Value| printable(value.as_str().unwrap_or("unknown"));
    page + &format!(
        "{}: database {}, broker {}, relay {} with {} to go out, the oldest {}\n",
        text(&health["status"]),
        text(&health["database"]["status"]),
        text(&health["broker"]["status"]),
        text(&health["relay"]["state"]),
        health["outbox"]["pending"].as_i64().map_or_else(|| "?".to_owned(), |pending| pending.to_string()),
        age(health["outbox"]["oldest_due_ms"].as_i64()),
    )
}

fn age(millis: Option<i64>) -> String {
    match millis {
        None => "-".to_owned(),
        Some(millis) if millis < 60_000 => format!("{}.{} s", millis / 1000, millis % 1000 / 100),
        Some(millis) if millis < 3_600_000 => format!("{} min", millis / 60_000),
        Some(millis) => format!("{} h", millis / 3_600_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_a_line_per_queue_and_says_what_is_wrong() {
        let queue = Queue {
            name: "stockade.inventory".to_owned(),
            depth: 118,
            in_flight: None,
            consumers: Some(1),
            paused: true,
            dlq_depth: 1,
            dead_letters: 2,
            oldest_age_ms: Some(4_250),
            stale: false,
        };
        let page = picture(&[queue], &json!({ "status": "ok", "outbox": { "pending": 3, "oldest_due_ms": 90_000 } }));
        let line = page.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(line, "stockade.inventory 118 ? 1 4.2 s 2 (+1) paused");
        assert!(page.ends_with("with 3 to go out, the oldest 1 min\n"), "{page}");
    }
}
