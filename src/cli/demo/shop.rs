//! The calls that demos make on a server, on a shelf of their own that nobody else orders from.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::{Method, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use stockade::http::caller::DEFAULT_GROUP;
use stockade_kernel::clock::{Clock, mint_id};
use tokio::time::Instant;
use uuid::Uuid;

use crate::cli::client::{Client, Credential, is_missing, refusal};
use crate::cli::exit::Exit;

/// Longer than a pause takes to be answered.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a demo looks whether something has come about.
const LOOK_EVERY: Duration = Duration::from_millis(50);

#[derive(Clone)]
pub struct Shop {
    client: Arc<Client>,
    /// The group that the demo acts in.
    pub group: String,
    /// Unknown to everybody else.
    pub sku: String,
    patience: Duration,
}

#[derive(Deserialize)]
struct Session {
    group_id: String,
}

#[derive(Deserialize)]
pub struct Health {
    pub database: Engine,
    pub broker: Engine,
}

#[derive(Deserialize)]
pub struct Engine {
    pub kind: String,
    pub status: String,
}

#[derive(Deserialize)]
pub struct Queue {
    pub name: String,
    pub depth: i64,
    /// What no transport may know is `None`.
    pub in_flight: Option<i64>,
    pub consumers: Option<i64>,
    pub paused: bool,
}

impl Queue {
    /// Ready or in somebody's hands.
    pub fn waiting(&self) -> i64 {
        self.depth + self.in_flight.unwrap_or(0)
    }
}

#[derive(Deserialize)]
pub struct Stock {
    pub reserved: i64,
    pub available: i64,
}

#[derive(Deserialize)]
pub struct Order {
    pub id: Uuid,
    pub status: String,
}

#[derive(Deserialize)]
pub struct Reservation {
    pub order_id: Uuid,
}

#[derive(Deserialize)]
pub struct InboxRow {
    pub state: String,
    pub duplicates: i64,
}

#[derive(Deserialize)]
struct OutboxRow {
    id: Uuid,
    event_type: String,
}

#[derive(Deserialize)]
pub struct DeadLetter {
    id: Uuid,
    pub message_id: Option<String>,
    pub reason: String,
    pub error: String,
    /// The history of rejections, the latest first.
    pub x_death: Vec<Death>,
}

#[derive(Deserialize)]
pub struct Death {
    pub reason: String,
    pub queue: String,
}

#[derive(Deserialize)]
struct Letters {
    data: Vec<DeadLetter>,
}

#[derive(Deserialize)]
struct LetterBody {
    body: String,
    body_encoding: String,
}

/// What a look at the server found: what was waited for, or a figure that moves as long as there is hope.
pub enum Look<T> {
    There(T),
    NotYet(i64),
}

impl Shop {
    /// At somebody's server, which may want a key.
    pub async fn enter(url: &str, credential: &Credential, patience: Duration) -> anyhow::Result<Self> {
        let client = credential.given_to(Client::new(url, REQUEST_TIMEOUT)?)?;
        let session: Session = client.get("/v1/session").await.map_err(|error| match refusal(&error) {
            Some(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => error
                .context(format!("the server at {url} wants a key: give one by STOCKADE_API_KEY or --api-key-file")),
            None if Exit::of(&error) == Exit::Unavailable => error,
            _ => error.context(format!("{url} is no Stockade server")),
        })?;
        Ok(Self::with(client, session.group_id, patience))
    }

    /// At a server of the demo's own, which wants no key.
    pub fn own(url: &str, patience: Duration) -> anyhow::Result<Self> {
        Ok(Self::with(Client::new(url, REQUEST_TIMEOUT)?, DEFAULT_GROUP.to_owned(), patience))
    }

    fn with(client: Client, group: String, patience: Duration) -> Self {
        let id = mint_id().simple().to_string();
        let sku = format!("DEMO-{}", id[id.len() - 8..].to_uppercase());
        Self { client: Arc::new(client), group, sku, patience }
    }

    pub fn url(&self) -> &str {
        self.client.url()
    }

    /// The same shelf, at a server of its own that was started again.
    pub fn at(&self, url: &str) -> anyhow::Result<Self> {
        Ok(Self { sku: self.sku.clone(), ..Self::own(url, self.patience)? })
    }

    pub async fn health(&self) -> anyhow::Result<Health> {
        self.client.get("/v1/health").await
    }

    /// Is the fault lab open? Asks for something that it must refuse.
    pub async fn has_lab(&self) -> anyhow::Result<bool> {
        match self.client.post::<Value>("/v1/lab/publish", &json!({})).await {
            Err(error) if is_missing(&error) => Ok(false),
            Err(error) if Exit::of(&error) != Exit::Usage => Err(error),
            _ => Ok(true),
        }
    }

    pub async fn queue(&self, name: &str) -> anyhow::Result<Queue> {
        self.client.get(&format!("/v1/queues/{name}")).await
    }

    pub async fn queues(&self) -> anyhow::Result<Vec<Queue>> {
        self.client.list("/v1/queues").await
    }

    pub async fn pause(&self, consumer: &str) -> anyhow::Result<()> {
        self.client.post::<Value>(&format!("/v1/consumers/{consumer}/pause"), &json!({})).await.map(drop)
    }

    pub async fn resume(&self, consumer: &str) -> anyhow::Result<()> {
        self.client.post::<Value>(&format!("/v1/consumers/{consumer}/resume"), &json!({})).await.map(drop)
    }

    /// Puts `on_hand` units on the demo's own shelf.
    pub async fn stock_up(&self, on_hand: i64) -> anyhow::Result<()> {
        self.client.put::<Value>(&format!("/v1/stock/{}", self.sku), &json!({ "on_hand": on_hand })).await.map(drop)
    }

    pub async fn stock(&self) -> anyhow::Result<Stock> {
        self.client.get(&format!("/v1/stock/{}", self.sku)).await
    }

    /// Places an order of `quantity` units. Asking again under the same key gives the same order.
    pub async fn place(&self, key: &str, quantity: i64) -> anyhow::Result<Order> {
        let request = self.client.request(Method::POST, "/v1/orders").header("idempotency-key", key);
        self.client.send("/v1/orders", request.json(&self.order(quantity))).await
    }

    /// Places an order and waits for its outcome.
    pub async fn place_and_wait(&self, quantity: i64) -> anyhow::Result<Order> {
        let wait = format!("wait={}", self.patience.as_secs().clamp(1, 20));
        let request = self.client.request(Method::POST, "/v1/orders").header("prefer", wait);
        self.client.send("/v1/orders", request.json(&self.order(quantity))).await
    }

    fn order(&self, quantity: i64) -> Value {
        json!({ "customer_id": "demo", "items": [{ "sku": self.sku, "quantity": quantity, "unit_price_minor": 1250 }] })
    }

    /// The orders from the demo's shelf.
    pub async fn orders(&self) -> anyhow::Result<Vec<Order>> {
        self.client.list(&format!("/v1/orders?sku={}", self.sku)).await
    }

    /// The reservations on the demo's shelf.
    pub async fn reservations(&self) -> anyhow::Result<Vec<Reservation>> {
        self.client.list(&format!("/v1/reservations?sku={}", self.sku)).await
    }

    /// How often the customer of an order was told of its reservation.
    pub async fn notices_of(&self, order_id: Uuid) -> anyhow::Result<usize> {
        let path = format!("/v1/notifications?kind=reserved&order_id={order_id}");
        Ok(self.client.list::<Value>(&path).await?.len())
    }

    /// What a consumer knows of an event.
    pub async fn inbox(&self, consumer: &str, event_id: Uuid) -> anyhow::Result<Option<InboxRow>> {
        self.client.find(&format!("/v1/inbox/{consumer}/{event_id}")).await
    }

    /// The id of the `order.placed` of an order.
    pub async fn placed_event(&self, order_id: Uuid) -> anyhow::Result<Uuid> {
        let path = format!("/v1/outbox?aggregate_type=order&aggregate_id={order_id}");
        let rows: Vec<OutboxRow> = self.client.list(&path).await?;
        let first = rows.iter().rfind(|row| row.event_type == "order.placed");
        Ok(first.with_context(|| format!("order {order_id} has no order.placed"))?.id)
    }

    /// An `order.placed` from its shelf as another program would write it, for an order that is not ours.
    pub fn order_placed(&self, event_id: Uuid, order_id: Uuid, quantity: i64) -> Value {
        json!({
            "event_id": event_id,
            "occurred_at": Clock::System.now(),
            "aggregate_type": "order",
            "aggregate_id": order_id,
            "event_type": "placed",
            "group_id": self.group,
            "correlation_id": format!("demo-{event_id}"),
            "payload": {
                "order_id": order_id,
                "order_number": "DEMO",
                "customer_id": "demo",
                "currency": "USD",
                "total_minor": 1250 * quantity,
                "items": [{ "sku": self.sku, "quantity": quantity, "unit_price_minor": 1250 }],
            },
        })
    }

    /// Puts raw bytes onto the queues, past the outbox, as a foreign program could.
    pub async fn publish(&self, message: &Value) -> anyhow::Result<()> {
        self.client.post::<Value>("/v1/lab/publish", message).await.map(drop)
    }

    /// Lets the server die the next time that `consumer` gets to `point`.
    pub async fn arm_crash(&self, point: &str, consumer: &str) -> anyhow::Result<()> {
        let crash = json!({ "point": point, "consumer": consumer });
        self.client.post::<Value>("/v1/lab/crash", &crash).await.map(drop)
    }

    /// The open dead letters of a queue, the newest of them.
    pub async fn dead_letters(&self, queue: &str) -> anyhow::Result<Vec<DeadLetter>> {
        let page: Letters = self.client.get(&format!("/v1/dead-letters?state=open&queue={queue}&limit=200")).await?;
        Ok(page.data)
    }

    /// The bytes that a dead letter has kept.
    pub async fn bytes_of(&self, letter: &DeadLetter) -> anyhow::Result<Vec<u8>> {
        let LetterBody { body, body_encoding } = self.client.get(&format!("/v1/dead-letters/{}", letter.id)).await?;
        Ok(if body_encoding == "base64" { STANDARD.decode(body)? } else { body.into_bytes() })
    }

    /// Looks until what is waited for is there. Gives up when nothing has moved for as long as patience lasts.
    pub async fn until<T>(
        &self,
        what: &str,
        mut look: impl AsyncFnMut() -> anyhow::Result<Look<T>>,
    ) -> anyhow::Result<T> {
        let (mut moved_at, mut last) = (Instant::now(), None);
        loop {
            match look().await? {
                Look::There(found) => return Ok(found),
                Look::NotYet(figure) if last != Some(figure) => (moved_at, last) = (Instant::now(), Some(figure)),
                Look::NotYet(_) if moved_at.elapsed() < self.patience => {}
                Look::NotYet(_) => {
                    let patience = humantime::format_duration(self.patience);
                    return Err(Exit::Broken.because(format!("waited for {what}, and nothing moved for {patience}")));
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}
