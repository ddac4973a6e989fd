//! `stockade order`: place orders, see what became of them, and watch one on its way.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use stockade::money::in_major;
use tokio::time::Instant;

use super::client::Client;
use super::exit::Exit;
use super::remote::{Remote, segment, with_query};
use super::table::{facts, printable, table};

/// How often a watched order is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(Args)]
pub struct Orders {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Subcommand)]
enum Verb {
    /// Place an order: `stockade order place alice WIDGET-A=2 WIDGET-B=1@1250`.
    Place(Place),
    /// Show an order by its id or its number.
    Get { id: String },
    /// List orders, newest first.
    List {
        #[arg(long)]
        status: Option<String>,
        #[arg(long)]
        sku: Option<String>,
        #[arg(long)]
        customer: Option<String>,
        /// How many at most.
        #[arg(long, default_value_t = 50)]
        limit: usize,
    },
    /// Follow an order live, hop by hop, until it is reserved or rejected.
    Watch {
        id: String,
        /// Go on until it is paid for and fulfilled, cancelled or expired.
        #[arg(long)]
        to_the_end: bool,
        /// Give up after this long.
        #[arg(long, default_value = "5m", value_parser = humantime::parse_duration)]
        timeout: Duration,
    },
    /// Pay an order; its total if no amount is given.
    Pay {
        id: String,
        /// In minor units (cents).
        #[arg(long)]
        amount: Option<i64>,
    },
    /// Cancel an order that is not paid.
    Cancel {
        id: String,
        /// For the customer.
        #[arg(long)]
        reason: Option<String>,
    },
    /// Say that a paid order has left the house.
    Fulfil { id: String },
}

#[derive(Args)]
struct Place {
    customer: String,

    /// `SKU=QUANTITY`, or `SKU=QUANTITY@PRICE` in minor units (cents).
    #[arg(required = true, value_parser = read_item)]
    items: Vec<Item>,

    #[arg(long)]
    currency: Option<String>,

    /// Makes a repeat of the command answer with the first one's order.
    #[arg(long)]
    idempotency_key: Option<String>,

    /// Wait this long for it to be reserved or rejected.
    #[arg(long, value_parser = humantime::parse_duration)]
    wait: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Item {
    sku: String,
    quantity: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit_price_minor: Option<i64>,
}

fn read_item(text: &str) -> Result<Item, String> {
    let how = || "give SKU=QUANTITY or SKU=QUANTITY@PRICE".to_owned();
    let (sku, rest) = text.rsplit_once('=').ok_or_else(how)?;
    let (quantity, price) = rest.split_once('@').map_or((rest, None), |(quantity, price)| (quantity, Some(price)));
    Ok(Item {
        sku: sku.to_owned(),
        quantity: quantity.parse().map_err(|_| how())?,
        unit_price_minor: price.map(str::parse).transpose().map_err(|_| how())?,
    })
}

#[derive(Debug, Serialize, Deserialize)]
struct Timeline {
    number: String,
    status: String,
    waiting_for: String,
    hops: Vec<Value>,
}

impl Orders {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let Self { verb, remote } = self;
        let client = remote.client()?;
        match verb {
            Verb::Place(place) => remote.answer(&place.run(&client).await?, show)?,
            Verb::Get { id } => remote.answer(&client.get::<Value>(&path(&id, "")).await?, show)?,
            Verb::List { status, sku, customer, limit } => {
                let filters = [("status", status), ("sku", sku), ("customer_id", customer)];
                let orders = client.list_up_to::<Value>(&with_query("/v1/orders", filters), limit).await?;
                remote.answer(&orders, |orders| list(orders))?;
            }
            Verb::Watch { id, to_the_end, timeout } => {
                return watch(&remote, &client, &id, to_the_end, timeout).await;
            }
            Verb::Pay { id, amount } => {
                let order: Value = client.get(&path(&id, "")).await?;
                let amount = amount.map_or_else(|| order["total_minor"].clone(), Value::from);
                let body = json!({ "amount_minor": amount, "currency": order["currency"] });
                remote.answer(&client.post::<Value>(&path(&id, "/payments"), &body).await?, show)?;
            }
            Verb::Cancel { id, reason } => {
                let body = reason.map_or_else(|| json!({}), |reason| json!({ "reason": reason }));
                remote.answer(&client.post::<Value>(&path(&id, "/cancel"), &body).await?, show)?;
            }
            Verb::Fulfil { id } => {
                let request = client.request(Method::POST, &path(&id, "/fulfil"));
                remote.answer(&client.send::<Value>(&path(&id, "/fulfil"), request).await?, show)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Place {
    async fn run(self, client: &Client) -> anyhow::Result<Value> {
        let mut body = json!({ "customer_id": self.customer, "items": self.items });
        if let Some(currency) = self.currency {
            body["currency"] = currency.into();
        }
        let mut request = client.request(Method::POST, "/v1/orders").json(&body);
        if let Some(key) = self.idempotency_key {
            request = request.header("idempotency-key", key);
        }
        if let Some(wait) = self.wait {
            request = request.header("prefer", format!("wait={}", wait.as_secs().max(1)));
        }
        client.send("/v1/orders", request).await
    }
}

fn path(id: &str, rest: &str) -> String {
    format!("/v1/orders/{}{rest}", segment(id))
}

/// Prints each hop once, as it happens. With `--json` a hop a line.
async fn watch(
    remote: &Remote,
    client: &Client,
    id: &str,
    to_the_end: bool,
    timeout: Duration,
) -> anyhow::Result<ExitCode> {
    let unsettled: &[&str] = if to_the_end { &["placed", "reserved", "paid"] } else { &["placed"] };
    let (started, mut seen, mut said) = (Instant::now(), BTreeSet::new(), String::new());
    loop {
        let timeline: Timeline = client.get(&path(id, "/timeline")).await?;
        for hop in &timeline.hops {
            if seen.insert(hop.to_string()) && !remote.line(hop, hop_in_words)? {
                return Ok(ExitCode::SUCCESS);
            }
        }
        if !unsettled.contains(&timeline.status.as_str()) {
            eprintln!("{} is {}.", printable(&timeline.number), printable(&timeline.status));
            return Ok(ExitCode::SUCCESS);
        }
        if timeline.waiting_for != said {
            said.clone_from(&timeline.waiting_for);
            eprintln!("{}: {}", printable(&timeline.status), printable(&said));
        }
        if started.elapsed() > timeout {
            return Err(Exit::Unavailable.because(format!("after {timeout:?} it still {}", printable(&said))));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn hop_in_words(hop: &Value) -> String {
    let text = |name: &str| hop[name].as_str().unwrap_or_default();
    let error = hop["error"].as_str().map_or_else(String::new, |error| format!(": {error}"));
    printable(&format!("{}  {:<13} {}{error}", text("at"), text("who"), text("text")))
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn items(order: &Value) -> String {
    let item = |item: &Value| format!("{} × {}", plain(&item["sku"]), item["quantity"]);
    order["items"].as_array().into_iter().flatten().map(item).collect::<Vec<_>>().join(", ")
}

fn total(order: &Value) -> String {
    in_major(order["total_minor"].as_i64().unwrap_or_default(), &plain(&order["currency"]))
}

fn list(orders: &[Value]) -> String {
    let row = |order: &Value| {
        let total = total(order);
        let columns = [&order["number"], &order["status"], &order["customer_id"]].map(plain);
        let [number, status, customer] = columns;
        [number, status, customer, items(order), total, plain(&order["created_at"])]
    };
    table(["NUMBER", "STATUS", "CUSTOMER", "ITEMS", "TOTAL", "PLACED"], orders.iter().map(row))
}

fn show(order: &Value) -> String {
    let fields = ["number", "id", "status", "reason", "customer_id", "group_id", "created_at", "hold_expires_at"];
    let known = fields.into_iter().filter(|name| !order[name].is_null());
    let mut rows: Vec<(&str, String)> = known.map(|name| (name, plain(&order[name]))).collect();
    rows.push(("items", items(order)));
    rows.push(("total", total(order)));
    facts(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_a_sku_a_quantity_and_perhaps_a_price() {
        let item = |sku: &str, quantity, unit_price_minor| Item { sku: sku.to_owned(), quantity, unit_price_minor };
        assert_eq!(read_item("A=2"), Ok(item("A", 2, None)));
        assert_eq!(read_item("A=B=2@1250"), Ok(item("A=B", 2, Some(1250))));
        for wrong in ["A", "A=", "A=x", "A=1@", "A=1@x"] {
            assert!(read_item(wrong).is_err(), "{wrong}");
        }
    }
}
