//! `stockade inbox` and `stockade outbox`: what consumers have dealt with, and what waits to go out.

use std::process::ExitCode;

use clap::Args;
use serde_json::Value;

use super::remote::{Remote, with_query};
use super::table::{short, table};

const ERROR_CHARS: usize = 60;

#[derive(Args)]
pub struct Inbox {
    #[arg(long)]
    consumer: Option<String>,
    /// processing, processed, waiting, retrying or dead
    #[arg(long)]
    state: Option<String>,
    #[arg(long)]
    event_id: Option<String>,
    /// Only events delivered again at least this often.
    #[arg(long)]
    min_duplicates: Option<u32>,
    /// How many at most.
    #[arg(long, default_value_t = 50)]
    limit: usize,
    #[command(flatten)]
    remote: Remote,
}

impl Inbox {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let filters = [
            ("consumer", self.consumer),
            ("state", self.state),
            ("event_id", self.event_id),
            ("min_duplicates", self.min_duplicates.map(|least| least.to_string())),
        ];
        let path = with_query("/v1/inbox", filters);
        let rows: Vec<Value> = self.remote.client()?.list_up_to(&path, self.limit).await?;
        let columns = ["consumer", "event_type", "event_id", "state", "attempts", "duplicates", "last_error"];
        let heads = ["CONSUMER", "EVENT", "ID", "STATE", "ATTEMPTS", "DUPLICATES", "LAST ERROR"];
        self.remote.answer(&rows, |rows| table(heads, rows.iter().map(|row| cells(row, columns))))?;
        Ok(ExitCode::SUCCESS)
    }
}

#[derive(Args)]
pub struct Outbox {
    /// pending, published, failed or dead
    #[arg(long)]
    status: Option<String>,
    #[arg(long)]
    aggregate_type: Option<String>,
    #[arg(long)]
    aggregate_id: Option<String>,
    /// How many at most.
    #[arg(long, default_value_t = 50)]
    limit: usize,
    #[command(flatten)]
    remote: Remote,
}

impl Outbox {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let filters =
            [("status", self.status), ("aggregate_type", self.aggregate_type), ("aggregate_id", self.aggregate_id)];
        let path = with_query("/v1/outbox", filters);
        let rows: Vec<Value> = self.remote.client()?.list_up_to(&path, self.limit).await?;
        let columns = ["event_type", "id", "aggregate_id", "status", "attempts", "created_at", "last_error"];
        let heads = ["EVENT", "ID", "ABOUT", "STATUS", "ATTEMPTS", "WRITTEN", "LAST ERROR"];
        self.remote.answer(&rows, |rows| table(heads, rows.iter().map(|row| cells(row, columns))))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn cells<const N: usize>(row: &Value, columns: [&str; N]) -> [String; N] {
    columns.map(|column| match &row[column] {
        Value::Null => String::new(),
        Value::String(text) => short(text, ERROR_CHARS),
        other => other.to_string(),
    })
}
