//! `stockade stock`: what is on the shelves, and putting it right.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::remote::{Remote, segment};
use super::table::table;

#[derive(Args)]
pub struct Stock {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Subcommand)]
enum Verb {
    /// List what is on hand, reserved and available, by SKU.
    List,
    /// Set what is on hand; a SKU that is not there is made.
    Set { sku: String, on_hand: i64 },
    /// Add to what is on hand, or take from it.
    Adjust {
        sku: String,
        #[arg(allow_negative_numbers = true)]
        delta: i64,
        /// For the books.
        #[arg(long)]
        reason: String,
    },
}

#[derive(Debug, Serialize, Deserialize)]
struct Shelf {
    sku: String,
    on_hand: i64,
    reserved: i64,
    available: i64,
    updated_at: String,
}

impl Stock {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let Self { verb, remote } = self;
        let client = remote.client()?;
        let shelves: Vec<Shelf> = match verb {
            Verb::List => client.list("/v1/stock").await?,
            Verb::Set { sku, on_hand } => {
                vec![client.put(&path(&sku), &json!({ "on_hand": on_hand })).await?]
            }
            Verb::Adjust { sku, delta, reason } => {
                let adjustments = format!("{}/adjustments", path(&sku));
                client.post::<Value>(&adjustments, &json!({ "delta": delta, "reason": reason })).await?;
                vec![client.get(&path(&sku)).await?]
            }
        };
        remote.answer(&shelves, |shelves| list(shelves))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn path(sku: &str) -> String {
    format!("/v1/stock/{}", segment(sku))
}

fn list(shelves: &[Shelf]) -> String {
    let row = |shelf: &Shelf| {
        let [on_hand, reserved, available] = [shelf.on_hand, shelf.reserved, shelf.available].map(|n| n.to_string());
        [shelf.sku.clone(), on_hand, reserved, available, shelf.updated_at.clone()]
    };
    table(["SKU", "ON HAND", "RESERVED", "AVAILABLE", "CHANGED"], shelves.iter().map(row))
}
