//! What commands that talk to a running server share: where it is, who asks, and how to answer people and programs.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use stockade_kernel::clock::{Clock, Timestamp};

use super::client::{Client, Credential};
use super::exit::Exit;
use super::out;

/// A redrive of many letters, or the count of a long replay, may take the server a while to write down.
const TIMEOUT: Duration = Duration::from_secs(35);

#[derive(Debug, Clone, Args)]
pub struct Remote {
    /// The server to talk to.
    #[arg(long, env = "STOCKADE_URL", default_value = "http://127.0.0.1:8080", global = true, help_heading = "Server")]
    url: String,

    /// Who asks, for the record.
    #[arg(long, env = "USER", default_value = "anonymous", global = true, help_heading = "Server")]
    operator: String,

    #[command(flatten)]
    credential: Credential,

    /// Print JSON, for programs.
    #[arg(long, global = true, help_heading = "Server")]
    pub json: bool,
}

impl Remote {
    pub fn client(&self) -> anyhow::Result<Client> {
        self.credential.given_to(Client::new(&self.url, TIMEOUT)?.operated_by(&self.operator))
    }

    /// Data for stdout: as JSON, or as `print` shows it to people.
    pub fn answer<T: Serialize>(&self, data: &T, print: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
        let text = if self.json { out::json(data)? } else { print(data) };
        out::print(&text).map(drop)
    }

    /// One of many lines of data: JSON without a break in it, or as `print` words it. Says whether anybody reads on.
    pub fn line<T: Serialize>(&self, data: &T, print: impl FnOnce(&T) -> String) -> anyhow::Result<bool> {
        let text = if self.json { out::json_line(data)? } else { print(data) + "\n" };
        out::print(&text)
    }
}

/// A text as one segment of a path.
pub fn segment(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}

/// Asks before something is done in bulk; without a terminal it must have been said beforehand.
pub fn confirm(question: &str, yes: bool) -> anyhow::Result<()> {
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        return Err(Exit::Usage.because(format!("{question} Say so with --yes")));
    }
    eprint!("{question} [y/N] ");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Exit::Interrupted.because("nothing was done")),
    }
}

/// A time in the past: that long ago, or RFC 3339.
pub fn read_time(text: &str) -> Result<Timestamp, String> {
    if let Ok(ago) = humantime::parse_duration(text) {
        return Ok(Clock::System.now().minus(ago));
    }
    serde_json::from_value(text.into())
        .map_err(|_| "give how long ago, as 2h, or a time, as 2026-11-16T09:30:00Z".to_owned())
}

/// `50` or `50/s`.
pub fn read_rate(text: &str) -> Result<i64, String> {
    let number = text.strip_suffix("/s").unwrap_or(text);
    number.parse().ok().filter(|rate| *rate > 0).ok_or_else(|| "give messages per second, as 50 or 50/s".to_owned())
}

/// Adds a filter to a path's query, escaped.
pub fn with_query<'a>(path: &str, filters: impl IntoIterator<Item = (&'a str, Option<String>)>) -> String {
    let given = filters.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let pairs: Vec<String> = given
        .map(|(name, value)| {
            format!("{name}={}", percent_encoding::utf8_percent_encode(&value, percent_encoding::NON_ALPHANUMERIC))
        })
        .collect();
    if pairs.is_empty() { path.to_owned() } else { format!("{path}?{}", pairs.join("&")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_ago_or_absolute() {
        let now = Clock::System.now();
        let ago = now.since(read_time("2h").unwrap());
        assert!(ago <= Duration::from_secs(7200) && ago > Duration::from_secs(7100), "{ago:?}");
        assert_eq!(read_time("2026-11-16T09:30:00Z").unwrap().millis(), 1_794_821_400_000);
        assert!(read_time("yesterday").is_err());
    }

    #[test]
    fn rates_may_have_a_unit() {
        assert_eq!((read_rate("50"), read_rate("50/s")), (Ok(50), Ok(50)));
        assert!(read_rate("0").is_err() && read_rate("fast").is_err());
    }

    #[test]
    fn a_query_has_what_was_given_escaped() {
        let filters = [("reason", Some("not-json".to_owned())), ("queue", None), ("who", Some("a&b".to_owned()))];
        assert_eq!(with_query("/x", filters), "/x?reason=not%2Djson&who=a%26b");
        assert_eq!(with_query("/x", [("queue", None)]), "/x");
    }
}
