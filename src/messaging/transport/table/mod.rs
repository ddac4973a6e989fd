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
//! what comes from elsewhere.
//!
//! The relay has no network to cross here, so [`publish_due`] moves due outbox rows into their queues within one
//! transaction, without claim or lease, and no row can be published but unmarked.

mod pg;
mod sqlite;

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Delivery, Depth, RawMessage, Tag, Topology, TransportError, death_record, dlq_of};
use crate::clock::{Timestamp, mint_id};
use crate::db::{Bell, Db, Hatch, Parcel, Tx, dialects};

/// How often a subscription says that it is there, and after how long without a word it counts as gone.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(5);
const HEARTBEAT_STALE: Duration = Duration::from_secs(15);

/// Acknowledged rows leave dead entries at the low end of Postgres' index, and while any transaction is held open they
/// cannot be cleared: a claim that began at the very start would wade through all of them. So most claims begin this
/// far below the newest message taken, which covers what was committed late, and one a second begins at the start.
const LOOK_BACK: i64 = 10_000;
const LOOK_FROM_START_EVERY: Duration = Duration::from_secs(1);

/// How long acknowledged rows may wait to be deleted by a look into the queue, and how many.
const OWED_FOR_MAX: Duration = Duration::from_millis(50);
const OWED_MAX: usize = 2048;

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
    pub headers: String,
    pub body: Bytes,
    pub x_death: Option<String>,
    pub deliveries: i32,
}

/// One look into a queue.
pub struct Look<'a> {
    pub queue: &'a str,
    /// Only rows with a higher id.
    pub after: i64,
    pub limit: i64,
    pub token: Uuid,
    pub lease: Duration,
    pub owed: &'a Owed,
}

/// Messages that are done with and not yet deleted, and the tokens they are held under.
#[derive(Debug, Default)]
pub struct Owed {
    pub ids: Vec<i64>,
    pub tokens: Vec<Uuid>,
    since: Option<Instant>,
}

impl Owed {
    fn add(&mut self, tags: &[Tag]) {
        if !tags.is_empty() {
            self.since = self.since.or_else(|| Some(Instant::now()));
        }
        for tag in tags {
            self.ids.push(tag.id);
            if !self.tokens.contains(&tag.token) {
                self.tokens.push(tag.token);
            }
        }
    }

    /// When it is to be paid, if there is anything.
    fn due_at(&self) -> Option<Instant> {
        let since = self.since?;
        Some(if self.ids.len() < OWED_MAX { since + OWED_FOR_MAX } else { since })
    }
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
    /// Deletes what is owed and claims free rows, lowest first; returns how many of the owed were still ours, and
    /// the rows.
    async fn claim(look: &Look<'_>, now: Timestamp) -> (u64, Vec<Row>);
    async fn renew(ids: &[i64], token: Uuid, lease: Duration, now: Timestamp) -> u64;
    async fn delete(owed: &Owed) -> u64;
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
        for binding in &topology.queues {
            for key in binding.keys {
                crate::on!(tx, c => {
                    sqlx::query("INSERT INTO messaging_bindings (queue, routing_key) VALUES ($1, $2) ON CONFLICT DO NOTHING")
                        .bind(&binding.queue)
                        .bind(key)
                        .execute(c)
                        .await
                        .map(drop)
                })?;
            }
        }
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
        TableSubscription {
            table: self.clone(),
            id: mint_id(),
            queue: queue.to_owned(),
            bell: self.db.wakes().bell(&bell_of(queue)),
            hatch: None,
            look_again_at: Some(Instant::now()),
            winding_down: false,
            newest_taken: 0,
            looked_from_start: None,
            last_beat: None,
            taken: HashMap::new(),
            owed: Owed::default(),
        }
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

pub struct TableSubscription {
    table: TableQueue,
    id: Uuid,
    queue: String,
    bell: Bell,
    hatch: Option<Hatch<Parcel>>,
    /// When to look into the queue, should neither the bell nor what is owed call for it sooner.
    look_again_at: Option<Instant>,
    winding_down: bool,
    newest_taken: i64,
    looked_from_start: Option<Timestamp>,
    last_beat: Option<Timestamp>,
    /// The routing key and earlier deaths of what is held, for the record of a rejection.
    taken: HashMap<i64, (String, serde_json::Value)>,
    /// Acknowledged, to be deleted by the next look.
    owed: Owed,
}

impl TableSubscription {
    pub fn open_hatch(&mut self) {
        self.hatch = Some(self.table.db.hatches().queues.open(&self.queue, self.table.lease));
    }

    pub async fn ready(&mut self, poll: Duration) {
        let look_again_at = *self.look_again_at.get_or_insert_with(|| Instant::now() + poll);
        let look_at = self.owed.due_at().map_or(look_again_at, |due| due.min(look_again_at));
        let handed = async {
            match &mut self.hatch {
                Some(hatch) => hatch.filled().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = handed => {}
            () = self.bell.rung() => self.look_again_at = Some(Instant::now()),
            () = tokio::time::sleep_until(look_at) => {}
        }
    }

    pub async fn take(&mut self, max: usize) -> Result<Vec<Delivery>, TransportError> {
        if self.winding_down {
            return Ok(Vec::new());
        }
        let is_past = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
        let is_due = self.bell.is_rung() || is_past(self.look_again_at) || is_past(self.owed.due_at());
        // The queue before the hatch: what is handed over never keeps others waiting, and a look that fails has left it
        // where it was.
        let mut deliveries = match is_due || self.hatch.is_none() {
            true => self.look(max).await?,
            false => Vec::new(),
        };
        if let Some(hatch) = &mut self.hatch {
            let parcels = hatch.take(max, max - deliveries.len());
            deliveries.extend(parcels.into_iter().map(|parcel| self.deliver_parcel(parcel)));
        }
        Ok(deliveries)
    }

    /// Looks into the queue: pays what is owed, claims what is free.
    async fn look(&mut self, max: usize) -> Result<Vec<Delivery>, TransportError> {
        // Before the look: a ring from now on is news.
        self.bell.hush();
        let mut tx = self.table.db.begin_relaxed().await?;
        let now = tx.now();
        let token = mint_id();
        if self.last_beat.is_none_or(|last| now.since(last) >= HEARTBEAT_EVERY) {
            beat(&mut tx, self.id, &self.queue, now).await?;
            self.last_beat = Some(now);
        }
        let limit = i64::try_from(max).unwrap_or(i64::MAX);
        let from_start = self.looked_from_start.is_none_or(|last| now.since(last) >= LOOK_FROM_START_EVERY);
        let after = if from_start { i64::MIN } else { self.newest_taken - LOOK_BACK };
        let lease = self.table.lease;
        let look = Look { queue: &self.queue, after, limit, token, lease, owed: &self.owed };
        let (settled, mut rows) = claim(&mut tx, &look, now).await?;
        tx.commit().await?;
        let paid = std::mem::take(&mut self.owed);
        self.forget(&paid.ids, settled);
        if from_start {
            self.looked_from_start = Some(now);
        }
        self.newest_taken = rows.iter().map(|row| row.id).fold(self.newest_taken, i64::max);
        // A look that found all it asked for may leave more behind.
        self.look_again_at = (rows.len() == max).then(Instant::now);
        rows.sort_unstable_by_key(|row| row.id);
        Ok(rows.into_iter().map(|row| self.deliver(row, token)).collect())
    }

    fn deliver_parcel(&mut self, parcel: Parcel) -> Delivery {
        let token = self.table.db.hatches().token();
        self.deliver(
            Row {
                id: parcel.row,
                message_id: Some(parcel.message_id.to_string()),
                routing_key: parcel.routing_key,
                correlation_id: Some(parcel.correlation_id),
                headers: parcel.headers,
                body: parcel.body,
                x_death: None,
                deliveries: 1,
            },
            token,
        )
    }

    fn deliver(&mut self, row: Row, token: Uuid) -> Delivery {
        let x_death = row.x_death.as_deref().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let delivery = Delivery {
            tag: Tag { id: row.id, token },
            lasting_id: Some(row.id),
            message_id: row.message_id,
            routing_key: row.routing_key,
            correlation_id: row.correlation_id,
            headers: serde_json::from_str(&row.headers).unwrap_or_default(),
            body: row.body,
            deliveries: u32::try_from(row.deliveries).unwrap_or(u32::MAX),
            x_death,
        };
        self.taken.insert(row.id, (delivery.routing_key.clone(), delivery.x_death.clone()));
        delivery
    }

    pub async fn ack(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        let mut owed = Owed::default();
        owed.add(tags);
        if owed.since.is_some() {
            let mut tx = self.table.db.begin_relaxed().await?;
            let settled = delete(&mut tx, &owed).await?;
            tx.commit().await?;
            self.forget(&owed.ids, settled);
        }
        Ok(())
    }

    /// Acknowledges with one of the next looks, whose transaction it shares, or on closing. Until then a crash brings
    /// the messages back, as it does before any acknowledgement.
    pub fn ack_soon(&mut self, tags: &[Tag]) {
        self.owed.add(tags);
    }

    pub async fn reject(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        for (token, ids) in by_token(tags) {
            let mut tx = self.table.db.begin().await?;
            let now = tx.now();
            let deaths: Vec<String> = ids.iter().map(|id| self.death_of(*id, now)).collect();
            let dlq = dlq_of(&self.queue);
            let settled = move_to(&mut tx, &ids, token, &dlq, &deaths, now).await?;
            tx.ring_on_commit(&bell_of(&dlq));
            tx.commit().await?;
            self.forget(&ids, settled);
        }
        Ok(())
    }

    pub async fn release(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        for (token, ids) in by_token(tags) {
            let mut tx = self.table.db.begin_relaxed().await?;
            let settled = give_back(&mut tx, &ids, token).await?;
            tx.ring_on_commit(&bell_of(&self.queue));
            tx.commit().await?;
            self.forget(&ids, settled);
        }
        Ok(())
    }

    pub async fn keep(&self, tags: &[Tag]) {
        loop {
            tokio::time::sleep(self.table.lease / 3).await;
            for (token, ids) in by_token(tags) {
                if let Err(error) = self.renew(&ids, token).await {
                    tracing::warn!(%error, queue = self.queue, "cannot renew the lease of a running batch");
                }
            }
        }
    }

    async fn renew(&self, ids: &[i64], token: Uuid) -> sqlx::Result<()> {
        let mut tx = self.table.db.begin_relaxed().await?;
        let now = tx.now();
        renew(&mut tx, ids, token, self.table.lease, now).await?;
        tx.commit().await
    }

    pub fn wind_down(&mut self) {
        self.winding_down = true;
    }

    pub async fn close(mut self) {
        let untaken = match self.hatch.take() {
            Some(hatch) => hatch.close().await.into_iter().map(|parcel| parcel.row).collect(),
            None => Vec::new(),
        };
        let goodbye = async {
            let mut tx = self.table.db.begin_relaxed().await?;
            delete(&mut tx, &self.owed).await?;
            if !untaken.is_empty() {
                give_back(&mut tx, &untaken, self.table.db.hatches().token()).await?;
                tx.ring_on_commit(&bell_of(&self.queue));
            }
            crate::on!(tx, c => {
                sqlx::query("DELETE FROM messaging_subscriptions WHERE id = $1").bind(self.id).execute(c).await.map(drop)
            })?;
            tx.commit().await
        };
        // Best effort: without it, what is owed comes back as duplicates and the entry goes stale by itself.
        if let Err(error) = goodbye.await {
            tracing::debug!(%error, queue = self.queue, "left the queue without a goodbye");
        }
    }

    fn death_of(&self, id: i64, now: Timestamp) -> String {
        let (routing_key, earlier) = self.taken.get(&id).cloned().unwrap_or_default();
        let mut deaths = vec![death_record(&self.queue, &routing_key, "rejected", now)];
        deaths.extend(earlier.as_array().cloned().unwrap_or_default());
        serde_json::Value::Array(deaths).to_string()
    }

    fn forget(&mut self, ids: &[i64], settled: u64) {
        for id in ids {
            self.taken.remove(id);
        }
        if settled < ids.len() as u64 {
            let lost = ids.len() as u64 - settled;
            self.table.db.metrics().fenced_writes.inc_by(lost);
            tracing::warn!(lost, queue = self.queue, "a lease ran out: messages have gone to another consumer");
        }
    }
}

fn by_token(tags: &[Tag]) -> HashMap<Uuid, Vec<i64>> {
    let mut groups: HashMap<Uuid, Vec<i64>> = HashMap::new();
    for tag in tags {
        groups.entry(tag.token).or_default().push(tag.id);
    }
    groups
}
