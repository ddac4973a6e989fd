//! `stockade dead-letters`: what was given up on and why, and what to do about single letters.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::dead_letters::Group;

use super::client::Client;
use super::exit::Exit;
use super::remote::{Remote, read_time, segment, with_query};
use super::table::{facts, printable, short, table};

const PATH: &str = "/v1/dead-letters";
const ERROR_CHARS: usize = 60;

#[derive(Args)]
pub struct DeadLetters {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Subcommand)]
enum Verb {
    /// Count them by consumer, reason and event type: start here.
    Groups(Filter),
    /// List them, newest first.
    List {
        #[command(flatten)]
        filter: Filter,
        /// How many at most.
        #[arg(long, default_value_t = 50)]
        limit: usize,
    },
    /// Show one with its body and all that is known of it.
    Show { id: String },
    /// Send letters back to their queues. For many by a filter there is `stockade redrive`.
    Redrive {
        #[arg(required = true)]
        ids: Vec<String>,
        /// For whoever looks later.
        #[arg(long)]
        reason: Option<String>,
    },
    /// Put letters aside; they can be restored until retention removes them.
    Discard {
        #[arg(required = true)]
        ids: Vec<String>,
        /// Why they may be forgotten.
        #[arg(long)]
        reason: String,
    },
    /// Open discarded letters again.
    Restore {
        #[arg(required = true)]
        ids: Vec<String>,
        /// For whoever looks later.
        #[arg(long)]
        reason: Option<String>,
    },
}

#[derive(Args)]
struct Filter {
    /// By its full or its short name.
    #[arg(long)]
    queue: Option<String>,
    #[arg(long)]
    consumer: Option<String>,
    /// As in `not-json`.
    #[arg(long)]
    reason: Option<String>,
    /// As in `order.placed`.
    #[arg(long)]
    event_type: Option<String>,
    /// open, redriven or discarded
    #[arg(long, default_value = "open")]
    state: String,
    /// Filed since: `2h`, or a time.
    #[arg(long, value_parser = read_time)]
    since: Option<Timestamp>,
    /// Filed before.
    #[arg(long, value_parser = read_time)]
    until: Option<Timestamp>,
}

impl Filter {
    fn path(self, path: &str) -> String {
        let filters = [
            ("queue", self.queue),
            ("consumer", self.consumer),
            ("reason", self.reason),
            ("event_type", self.event_type),
            ("state", Some(self.state)),
            ("from", self.since.map(|time| time.to_string())),
            ("to", self.until.map(|time| time.to_string())),
        ];
        with_query(path, filters)
    }
}

impl DeadLetters {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let Self { verb, remote } = self;
        let client = remote.client()?;
        match verb {
            Verb::Groups(filter) => {
                let page: Value = client.get(&filter.path(&format!("{PATH}/groups"))).await?;
                let groups: Vec<Group> = serde_json::from_value(page["data"].clone())?;
                remote.answer(&groups, |groups| groups_table(groups))?;
                if groups.is_empty() {
                    eprintln!("No dead letters.");
                }
            }
            Verb::List { filter, limit } => {
                // One more than is shown tells whether there are more.
                let mut letters: Vec<Value> = client.list_up_to(&filter.path(PATH), limit.saturating_add(1)).await?;
                let more = letters.len() > limit;
                letters.truncate(limit);
                remote.answer(&letters, |letters| letters_table(letters))?;
                if more {
                    eprintln!("There are more: --limit N shows N of them, `stockade dead-letters groups` counts all.");
                } else if letters.is_empty() {
                    eprintln!("No dead letters.");
                }
            }
            Verb::Show { id } => {
                remote.answer(&client.get::<Value>(&format!("{PATH}/{}", segment(&id))).await?, show)?
            }
            Verb::Redrive { ids, reason } => {
                let redriven = each(&client, &ids, "redrive", &json!({ "reason": reason })).await?;
                remote.answer(&redriven, |rows| {
                    let outcome = |row: &Value| if row["already_applied"] == true { "applied already" } else { "sent" };
                    table(["ID", "REDRIVEN"], rows.iter().map(|row| [text(&row["id"]), outcome(row).to_owned()]))
                })?;
            }
            Verb::Discard { ids, reason } => {
                let letters = each(&client, &ids, "discard", &json!({ "reason": reason })).await?;
                remote.answer(&letters, |letters| letters_table(letters))?;
                eprintln!("`stockade dead-letters restore ID` takes it back.");
            }
            Verb::Restore { ids, reason } => {
                let letters = each(&client, &ids, "restore", &json!({ "reason": reason })).await?;
                remote.answer(&letters, |letters| letters_table(letters))?;
            }
        }
        Ok(Exit::Ok.into())
    }
}

/// Does it to each, one after the other; the first that cannot be done ends it.
async fn each(client: &Client, ids: &[String], verb: &str, body: &Value) -> anyhow::Result<Vec<Value>> {
    let mut done = Vec::with_capacity(ids.len());
    for id in ids {
        done.push(client.post(&format!("{PATH}/{}/{verb}", segment(id)), body).await?);
    }
    Ok(done)
}

pub fn groups_table(groups: &[Group]) -> String {
    let row = |group: &Group| {
        [
            group.consumer.clone(),
            group.reason.clone(),
            group.event_type.clone().unwrap_or_else(|| "?".to_owned()),
            group.count.to_string(),
            group.first_seen_at.to_string(),
            group.last_seen_at.to_string(),
        ]
    };
    table(["CONSUMER", "REASON", "EVENT TYPE", "COUNT", "FIRST SEEN", "LAST SEEN"], groups.iter().map(row))
}

fn letters_table(letters: &[Value]) -> String {
    let row = |letter: &Value| {
        [
            text(&letter["id"]),
            text(&letter["consumer"]),
            text(&letter["reason"]),
            text(&letter["event_type"]),
            text(&letter["state"]),
            text(&letter["attempts"]),
            text(&letter["created_at"]),
            short(&text(&letter["error"]), ERROR_CHARS),
        ]
    };
    table(["ID", "CONSUMER", "REASON", "EVENT TYPE", "STATE", "ATTEMPTS", "FILED", "ERROR"], letters.iter().map(row))
}

fn show(letter: &Value) -> String {
    let names = [
        "id",
        "queue",
        "consumer",
        "message_id",
        "event_type",
        "correlation_id",
        "state",
        "reason",
        "error",
        "attempts",
        "created_at",
        "x_death",
        "headers",
        "body_encoding",
    ];
    let mut shown = facts(&names.map(|name| (name, text(&letter[name]))));
    for action in letter["actions"].as_array().into_iter().flatten() {
        let [at, who, what, why] = ["created_at", "who", "action", "why"].map(|name| text(&action[name]));
        shown.push_str(&printable(&format!("{at}  {who}  {what}  {why}")));
        shown.push('\n');
    }
    let body = letter["body"].as_str().unwrap_or_default();
    // Elsewhere the bytes are somebody's data; a terminal would obey them.
    let body = if std::io::stdout().is_terminal() { printable(body) } else { body.to_owned() };
    format!("{shown}\n{body}\n")
}

/// A value as people read it.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
