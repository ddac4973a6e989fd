//! The embedded queue: a table in the database the effects live in.
//!
//! A claim marks rows with a token and a lease in a short transaction of its own; nobody waits for anybody's
//! lock. Settling is fenced by the token, so a consumer that lost its lease cannot settle for its successor. All of
//! it is bookkeeping that may safely be repeated, hence relaxed transactions: the durable commit is the effect's.
//!
//! A message from the outbox is not copied: its queue row points at the outbox row, whose bytes are read when it is
//! delivered. So an outbox row must be kept for as long as a queue row points at it.
//!
//! A message written by the process that consumes it is handed over in memory, its row born with the lease of a claim
//! ([`crate::db::Hatches`]): the table is then what it is for when something goes wrong, and is looked at only for
//! what comes from elsewhere. Many that one transaction hands over share one such row, a bundle, which is deleted when the
//! last of them is done; whoever finds one whose lease is over puts its messages into the queue, each for itself.
//!
//! The relay has no network to cross here, so [`publish_due`] moves due outbox rows into their queues within one
//! transaction, without claim or lease, and no row can be published but unmarked.

mod pg;
mod sqlite;
mod subscription;

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use uuid::Uuid;

use super::{Depth, RawMessage, Topology, TransportError};
use crate::clock::Timestamp;
use crate::db::{Db, Tx, dialects};
use crate::messaging::resync::record_bindings;
pub use subscription::TableSubscription;

/// After how long without a word a subscription counts as gone.
const HEARTBEAT_STALE: Duration = Duration::from_secs(15);

/// The bell that rings when messages went from hand to hand, for those who watch: nobody has to look for them.
pub const HANDED_OVER: &str = "handed over";

pub fn bell_of(queue: &str) -> String {
    format!("queue {queue}")
}

#[derive(Clone)]
pub struct TableQueue {
    db: Db,
    lease: Duration,
}

/// A row of the queue, as claimed.
pub struct Row {
    pub id: i64,
    pub message_id: Option<String>,
    pub routing_key: String,
    pub correlation_id: Option<String>,
    pub headers: Cow<'static, str>,
    pub body: Bytes,
    pub x_death: Option<String>,
    pub deliveries: i32,
}

/// The message id that a letter on its way back was given by whoever sent it first.
fn redriven_id(headers: &str) -> Option<String> {
    let headers: serde_json::Value = serde_json::from_str(headers).ok()?;
    Some(headers.get("x-message-id")?.as_str()?.to_owned())
}

/// One look into a queue.
pub struct Look<'a> {
    pub queue: &'a str,
    /// Only rows with a higher id.
    pub after: i64,
    pub limit: i64,
    pub token: Uuid,
    pub lease: Duration,
}

/// Where messages are written down: rows of the queue, and bundles.
#[derive(Debug, Default)]
pub struct Places {
    pub rows: Vec<i64>,
    pub bundles: Vec<i64>,
}

impl Places {
    fn len(&self) -> usize {
        self.rows.len() + self.bundles.len()
    }
}

/// What is done with and not yet deleted, and the tokens it is held under.
#[derive(Debug, Default)]
pub struct Owed {
    pub places: Places,
    pub tokens: Vec<Uuid>,
}

/// Messages that leave their bundle to be rows of a queue, by their numbers.
pub struct Leaving<'a> {
    pub bundle: i64,
    pub token: Uuid,
    pub numbers: &'a [i64],
    pub queue: &'a str,
    /// The history of each that was rejected.
    pub deaths: &'a [Option<String>],
}

/// What a relay pass moved.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Moved {
    pub rows: i64,
    pub queues: Vec<String>,
}

dialects! {
    /// Moves up to `limit` due outbox rows into the queues they are meant for and marks them published.
    async fn move_due(limit: i64, now: Timestamp) -> Moved;
    /// Claims free rows, lowest first.
    async fn claim(look: &Look<'_>, now: Timestamp) -> Vec<Row>;
    async fn renew(places: &Places, token: Uuid, lease: Duration, now: Timestamp) -> ();
    /// Deletes what is owed; returns how much of it was still ours.
    async fn delete(owed: &Owed) -> u64;
    /// Puts what is in bundles whose lease is over into the queue.
    async fn unpack(queue: &str, now: Timestamp) -> ();
    /// Makes messages of a bundle that is still held rows of their own, free for all; returns how many.
    async fn take_out(leaving: &Leaving<'_>, now: Timestamp) -> u64;
    /// Frees what a process left behind that was alone on this database, as only one can be on SQLite.
    async fn free_leftovers() -> ();
    async fn give_back(ids: &[i64], token: Uuid) -> u64;
    /// Moves claimed rows to another queue, each with its history.
    async fn move_to(ids: &[i64], token: Uuid, queue: &str, deaths: &[String], now: Timestamp) -> u64;
    async fn count(queues: &[String], stale_after: Duration, now: Timestamp) -> Vec<Depth>;
    async fn beat(subscription: Uuid, queue: &str, now: Timestamp) -> ();
}

/// One relay pass within `tx`: all or nothing, and the consumers are woken by its commit.
pub async fn publish_due(tx: &mut Tx, limit: i64) -> sqlx::Result<i64> {
    let now = tx.now();
    let moved = move_due(tx, limit, now).await?;
    for queue in &moved.queues {
        tx.ring_on_commit(&bell_of(queue));
    }
    Ok(moved.rows)
}

impl TableQueue {
    pub fn new(db: Db, lease: Duration) -> Self {
        Self { db, lease }
    }

    pub async fn declare(&self, topology: &Topology) -> Result<(), TransportError> {
        let mut tx = self.db.begin().await?;
        free_leftovers(&mut tx).await?;
        record_bindings(&mut tx, &topology.queues).await?;
        Ok(tx.commit().await?)
    }

    pub async fn publish_raw(&self, message: &RawMessage, times: u32) -> Result<(), TransportError> {
        let mut tx = self.db.begin().await?;
        let now = tx.now();
        let queues = match message.queue.as_str() {
            "" => crate::on!(tx, c => {
                sqlx::query_scalar::<_, String>("SELECT queue FROM messaging_bindings WHERE routing_key = $1")
                    .bind(&message.routing_key)
                    .fetch_all(c)
                    .await
            })?,
            queue => vec![queue.to_owned()],
        };
        let headers = serde_json::Value::Object(message.headers.clone()).to_string();
        for queue in &queues {
            for _ in 0..times {
                crate::on!(tx, c => {
                    sqlx::query(
                        "INSERT INTO messaging_queue (queue, message_id, routing_key, correlation_id, headers, body, enqueued_at)
                         VALUES ($1, $2, $3, $4, $5, $6, $7)",
                    )
                    .bind(queue)
                    .bind(&message.message_id)
                    .bind(&message.routing_key)
                    .bind(&message.correlation_id)
                    .bind(&headers)
                    .bind(&message.body[..])
                    .bind(now)
                    .execute(c)
                    .await
                    .map(drop)
                })?;
            }
            tx.ring_on_commit(&bell_of(queue));
        }
        Ok(tx.commit().await?)
    }

    pub fn subscribe(&self, queue: &str) -> TableSubscription {
        TableSubscription::new(self.clone(), queue)
    }

    pub async fn depths(&self, queues: &[String]) -> Result<Vec<Depth>, TransportError> {
        let mut tx = self.db.read().await?;
        let now = tx.now();
        let mut found: HashMap<String, Depth> =
            count(&mut tx, queues, HEARTBEAT_STALE, now).await?.into_iter().map(|d| (d.queue.clone(), d)).collect();
        let empty = |queue: &String| Depth {
            queue: queue.clone(),
            ready: 0,
            in_flight: Some(0),
            consumers: Some(0),
            oldest_enqueued_at: None,
            stale: false,
        };
        Ok(queues.iter().map(|queue| found.remove(queue).unwrap_or_else(|| empty(queue))).collect())
    }
}
