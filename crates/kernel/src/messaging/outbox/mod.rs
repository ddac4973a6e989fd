//! The outbox: events waiting to be published, written in the transaction that made them true.
//!
//! A row is claimed by its status, never by a cursor: a slow transaction may commit a lower id after a higher
//! one has long gone out, and a cursor would skip it. Retries, redrives and replays are rows of their own that
//! send the stored bytes unchanged.

mod pg;
mod sqlite;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::{Deref, RangeInclusive};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

use super::event::{Event, routing_key};
use super::transport::table::{HANDED_OVER, bell_of};
use crate::clock::{Timestamp, millis, mint_id};
pub use crate::db::Claimed;
use crate::db::{Bundle, Filter, Parcel, Part, Place, Pledge, Tx, dialects, fetch_page};
use crate::trace::Traceparent;

/// The bell that rings when rows are due.
pub const BELL: &str = "outbox";

/// From how many entries on those handed over are written as one row for each queue. Fewer are as cheap each for itself.
const BUNDLE_MIN: usize = 8;

/// The header that tells how many attempts at an event went before this message.
pub const X_ATTEMPTS: &str = "x-attempts";

/// The header that carries the trace a message belongs to.
pub const TRACEPARENT: &str = "traceparent";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Event,
    Retry,
    Redrive,
    Replay,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Retry => "retry",
            Self::Redrive => "redrive",
            Self::Replay => "replay",
        }
    }
}

/// A row to append.
#[derive(Debug)]
pub struct Entry {
    pub id: Uuid,
    pub event_id: Uuid,
    pub kind: Kind,
    pub group_id: String,
    pub subsidiary_id: Option<String>,
    pub aggregate_type: Cow<'static, str>,
    pub aggregate_id: String,
    pub event_type: Cow<'static, str>,
    pub body: Body,
    /// Headers beside those every message has, as a JSON object.
    pub headers: Cow<'static, str>,
    pub delay: Duration,
    pub correlation_id: String,
    pub causation_id: Option<Uuid>,
    pub traceparent: Option<Traceparent>,
    /// Empty: to the exchange under the routing key; else straight to that queue.
    pub target: String,
}

/// The bytes of a message, and what they say where that is known: for consumers of this process, who then need not read
/// them.
#[derive(Debug, Clone)]
pub struct Body {
    bytes: Bytes,
    written: Option<Arc<Event>>,
}

impl<B: Into<Bytes>> From<B> for Body {
    fn from(bytes: B) -> Self {
        Self { bytes: bytes.into(), written: None }
    }
}

impl Deref for Body {
    type Target = Bytes;

    fn deref(&self) -> &Bytes {
        &self.bytes
    }
}

impl From<&Event> for Entry {
    fn from(event: &Event) -> Self {
        Self {
            id: event.event_id,
            event_id: event.event_id,
            kind: Kind::Event,
            group_id: event.group_id.clone(),
            subsidiary_id: event.subsidiary_id.clone(),
            aggregate_type: event.aggregate_type.clone(),
            aggregate_id: event.aggregate_id.clone(),
            event_type: event.event_type.clone(),
            body: event.to_body().into(),
            headers: headers_of(event.traceparent, None),
            delay: Duration::ZERO,
            correlation_id: event.correlation_id.clone(),
            causation_id: event.causation_id,
            traceparent: event.traceparent,
            target: String::new(),
        }
    }
}

impl From<Event> for Entry {
    fn from(event: Event) -> Self {
        let mut entry = Self::from(&event);
        entry.body.written = Some(Arc::new(event));
        entry
    }
}

impl Entry {
    /// The retry that `attempts` failed attempts call for.
    pub fn retry(event: &Event, body: impl Into<Body>, queue: &str, attempts: i32, delay: Duration) -> Self {
        let headers = headers_of(event.traceparent, Some(attempts));
        Self { headers, ..Self::again(event, body, queue, delay) }
    }

    /// The same bytes once more, to one queue, after `delay`.
    pub fn again(event: &Event, body: impl Into<Body>, queue: &str, delay: Duration) -> Self {
        Self {
            id: mint_id(),
            kind: Kind::Retry,
            body: body.into(),
            delay,
            target: queue.to_owned(),
            ..Self::from(event)
        }
    }

    /// The stored bytes to one queue once more: as the retry that its consumer waits for, or as a replay.
    fn resent(row: Resent, queue: &str) -> Self {
        let (_, event_id, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type, body, ..) = row;
        let (.., correlation_id, causation_id, attempts) = row;
        Self {
            id: mint_id(),
            event_id,
            kind: if attempts.is_some() { Kind::Retry } else { Kind::Replay },
            group_id,
            subsidiary_id,
            aggregate_type: aggregate_type.into(),
            aggregate_id,
            event_type: event_type.into(),
            body: body.into(),
            headers: headers_of(None, attempts),
            delay: Duration::ZERO,
            correlation_id,
            causation_id,
            traceparent: None,
            target: queue.to_owned(),
        }
    }

    /// The row as a relay holds it that was written at `now`.
    fn claimed(&self, now: Timestamp) -> Claimed {
        Claimed {
            id: self.id,
            event_id: self.event_id,
            kind: self.kind.as_str().to_owned(),
            group_id: self.group_id.clone(),
            subsidiary_id: self.subsidiary_id.clone(),
            aggregate_type: self.aggregate_type.clone().into_owned(),
            aggregate_id: self.aggregate_id.clone(),
            event_type: self.event_type.clone().into_owned(),
            correlation_id: self.correlation_id.clone(),
            traceparent: self.traceparent.map(|trace| trace.to_string()),
            headers: self.headers.clone().into_owned(),
            body: self.body.bytes.clone(),
            target: self.target.clone(),
            attempts: 0,
            created_at: now,
        }
    }
}

/// Headers as a JSON object; what is in them needs no escaping.
fn headers_of(traceparent: Option<Traceparent>, attempts: Option<i32>) -> Cow<'static, str> {
    match (traceparent, attempts) {
        (None, None) => "{}".into(),
        (Some(traceparent), None) => format!(r#"{{"{TRACEPARENT}":"{traceparent}"}}"#).into(),
        (None, Some(attempts)) => format!(r#"{{"{X_ATTEMPTS}":{attempts}}}"#).into(),
        (Some(traceparent), Some(attempts)) => {
            format!(r#"{{"{TRACEPARENT}":"{traceparent}","{X_ATTEMPTS}":{attempts}}}"#).into()
        }
    }
}

/// Adds facts to be published once this transaction commits.
pub async fn append_events(tx: &mut Tx, events: Vec<Event>) -> sqlx::Result<()> {
    let entries: Vec<Entry> = events.into_iter().map(Entry::from).collect();
    append_told(tx, &entries).await
}

/// The same, for facts whose rows are made already.
pub async fn append_told(tx: &mut Tx, entries: &[Entry]) -> sqlx::Result<()> {
    append_many(tx, entries).await?;
    count_on_commit(tx, entries);
    Ok(())
}

/// A batch has few types, so that a look through the list is the quickest way to sum them up.
fn count_on_commit(tx: &mut Tx, entries: &[Entry]) {
    let mut counts: Vec<(&Entry, u64)> = Vec::new();
    for entry in entries {
        let alike = |(known, _): &&mut (&Entry, u64)| {
            known.event_type == entry.event_type && known.aggregate_type == entry.aggregate_type
        };
        match counts.iter_mut().find(alike) {
            Some((_, count)) => *count += 1,
            None => counts.push((entry, 1)),
        }
    }
    let key = |entry: &Entry| routing_key(&entry.aggregate_type, &entry.event_type);
    let counts: Vec<(String, u64)> = counts.into_iter().map(|(entry, count)| (key(entry), count)).collect();
    let metrics = tx.metrics().clone();
    tx.after_commit(move || {
        for (key, count) in counts {
            metrics.events.get_or_create(&[("event_type", key)]).inc_by(count);
        }
    });
}

/// Adds rows, and has the relay woken when this transaction commits. Rows that are due at once go from hand to hand
/// where they can: on a broker's road to the relay of this process; and where the queues are tables of this database,
/// into them in this same transaction, so that nothing is left for the relay, and to those consumers that run in this
/// process.
pub async fn append_many(tx: &mut Tx, entries: &[Entry]) -> sqlx::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let now = tx.now();
    let token = tx.hatches().token();
    let are_due = entries.iter().all(|entry| entry.delay.is_zero());
    if are_due && tx.hands_on() {
        let pledges = tx.hatches().queues.with_room();
        let passing = Passing { bundled: entries.len() >= BUNDLE_MIN, ..Passing::through(token, &pledges) };
        let queued = insert_handed_on(tx, entries, &passing, now).await?;
        pass_to_consumers(tx, entries, queued, pledges);
    } else if are_due && let Some(pledge) = tx.hatches().outbox.with_room().into_values().next() {
        insert_many(tx, entries, Some(Claim { by: token, lease: pledge.lease() }), now).await?;
        pass_to_relay(tx, entries, pledge, now);
    } else {
        insert_many(tx, entries, None, now).await?;
        tx.ring_on_commit(BELL);
    }
    Ok(())
}

/// A relay's hold on rows.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    pub by: Uuid,
    pub lease: Duration,
}

/// Once the transaction has been committed, hands the relay what was written as claimed by it.
fn pass_to_relay(tx: &mut Tx, entries: &[Entry], pledge: Pledge<Claimed>, now: Timestamp) {
    let leased_at = Instant::now();
    let claimed: Vec<Claimed> = entries.iter().map(|entry| entry.claimed(now)).collect();
    tx.ring_on_commit(HANDED_OVER);
    tx.after_commit(move || {
        for row in claimed {
            pledge.pass(row, leased_at);
        }
    });
}

/// The queues whose rows are leased to this process as they are written.
pub struct Passing<'a> {
    pub token: Uuid,
    pub lease: Duration,
    pub queues: Vec<&'a str>,
    /// All that goes into one queue in one row.
    pub bundled: bool,
}

impl<'a> Passing<'a> {
    fn through(token: Uuid, pledges: &'a HashMap<String, Pledge<Parcel>>) -> Self {
        let lease = pledges.values().map(Pledge::lease).min().unwrap_or_default();
        Self { token, lease, queues: pledges.keys().map(String::as_str).collect(), bundled: false }
    }
}

/// A row written for a queue: for one entry, or a bundle of them, by their indexes.
pub struct Queued {
    pub id: i64,
    pub queue: String,
    pub entries: Vec<usize>,
    pub is_bundle: bool,
}

impl Queued {
    /// Each entry, and the place where it is to be found.
    fn places(&self) -> Vec<(usize, Place)> {
        if self.is_bundle {
            let bundle = Bundle::new(self.id, self.entries.len());
            let parts = (0..).map(|number| Place::Bundle(Part { bundle: bundle.clone(), number }));
            self.entries.iter().copied().zip(parts).collect()
        } else {
            self.entries.iter().map(|entry| (*entry, Place::Row(self.id))).collect()
        }
    }
}

/// Once the transaction has been committed, hands each message to its consumer, or has the queue looked at.
fn pass_to_consumers(tx: &mut Tx, entries: &[Entry], queued: Vec<Queued>, pledges: HashMap<String, Pledge<Parcel>>) {
    let leased_at = Instant::now();
    let mut passed = Vec::new();
    for row in queued {
        for (entry, place) in row.places() {
            let entry = &entries[entry];
            match pledges.get(&row.queue) {
                Some(pledge) if entry.kind == Kind::Event => {
                    let parcel = Parcel {
                        place,
                        message_id: entry.event_id,
                        routing_key: routing_key(&entry.aggregate_type, &entry.event_type),
                        correlation_id: entry.correlation_id.clone(),
                        headers: entry.headers.clone(),
                        body: entry.body.bytes.clone(),
                        written: entry.body.written.clone().map(|event| event as _),
                    };
                    passed.push((pledge.clone(), parcel));
                    tx.ring_on_commit(HANDED_OVER);
                }
                _ => tx.ring_on_commit(&bell_of(&row.queue)),
            }
        }
    }
    // The pledges go with it: until the commit, or the end without one, no hatch closes.
    tx.after_commit(move || {
        drop(pledges);
        for (pledge, parcel) in passed {
            pledge.pass(parcel, leased_at);
        }
    });
}

/// What a row sends, with the row it was found in first, and the attempts that a retry of it tells of last.
type Resent = (Uuid, Uuid, String, Option<String>, String, String, String, Vec<u8>, String, Option<Uuid>, Option<i32>);

/// Events of type `key` of that time that are out, or being sent just now, and that `consumer` has never met, as rows
/// that send them to its queue once more: up to `limit` of those above `after`, with the id of each row they were found in.
pub async fn list_unmet(
    tx: &mut Tx,
    consumer: &str,
    queue: &str,
    key: &str,
    time: RangeInclusive<Timestamp>,
    after: Uuid,
    limit: i64,
) -> sqlx::Result<Vec<(Uuid, Entry)>> {
    let (aggregate_type, event_type) = key.split_once('.').unwrap_or((key, ""));
    let rows: Vec<Resent> = crate::on!(tx, c => {
        sqlx::query_as(
            "SELECT o.id, o.event_id, o.group_id, o.subsidiary_id, o.aggregate_type, o.aggregate_id, o.event_type, o.body,
                 o.correlation_id, o.causation_id, CAST(NULL AS integer)
             FROM messaging_outbox o
             WHERE (o.status = 'published' OR o.claimed_by IS NOT NULL) AND o.kind = 'event' AND o.aggregate_type = $1 AND o.event_type = $2
                 AND o.created_at >= $3 AND o.created_at <= $7 AND o.id > $4
                 AND NOT EXISTS (SELECT 1 FROM messaging_inbox i WHERE i.consumer = $5 AND i.event_id = o.event_id)
             ORDER BY o.id LIMIT $6",
        )
        .bind(aggregate_type)
        .bind(event_type)
        .bind(*time.start())
        .bind(after)
        .bind(consumer)
        .bind(limit)
        .bind(*time.end())
        .fetch_all(c)
        .await
    })?;
    Ok(rows.into_iter().map(|row| (row.0, Entry::resent(row, queue))).collect())
}

/// The newest row that went to a queue, found by one of its indexes, unless another is still to go. `<> 'processed'`: SQLite
/// wants the words of the partial index.
macro_rules! unfinished {
    ($join:literal) => {
        concat!(
            "SELECT o.id, o.event_id, o.group_id, o.subsidiary_id, o.aggregate_type, o.aggregate_id, o.event_type, o.body,
                 o.correlation_id, o.causation_id, i.attempts
             FROM messaging_inbox i JOIN messaging_outbox o ON ",
            $join,
            " WHERE i.consumer = $1 AND i.state <> 'processed' AND (i.state IN ('retrying', 'processing')
                     OR (i.state = 'dead' AND i.finished_at >= (SELECT until FROM messaging_forgotten WHERE what = 'letters')
                         AND NOT EXISTS (SELECT 1 FROM messaging_dead_letters d
                             WHERE d.event_id = i.event_id AND d.consumer = i.consumer)))
                 AND i.event_id > $3 AND (o.status = 'published' OR o.claimed_by IS NOT NULL)
                 AND NOT EXISTS (SELECT 1 FROM messaging_outbox n
                     WHERE n.event_id = i.event_id AND n.kind <> 'event' AND n.target = $2
                         AND (n.id > o.id OR (n.status <> 'published' AND n.claimed_by IS NULL)))"
        )
    };
}

/// Events that `consumer` has met and not finished, and whose next delivery is out already, or being sent just now, as rows
/// that send its bytes to its queue once more: up to `limit` of those above `after`, by their ids. An event that it gave up
/// on is not finished until its dead letter is filed.
pub async fn list_unfinished(
    tx: &mut Tx,
    consumer: &str,
    queue: &str,
    after: Uuid,
    limit: i64,
) -> sqlx::Result<Vec<Entry>> {
    let rows: Vec<Resent> = crate::on!(tx, c => {
        sqlx::query_as(
            concat!(unfinished!("o.id = i.event_id AND o.kind = 'event'"), " UNION ALL ",
                unfinished!("o.event_id = i.event_id AND o.kind <> 'event' AND o.target = $2"), " ORDER BY 2 LIMIT $4"),
        )
        .bind(consumer)
        .bind(queue)
        .bind(after)
        .bind(limit)
        .fetch_all(c)
        .await
    })?;
    Ok(rows.into_iter().map(|row| Entry::resent(row, queue)).collect())
}

impl Claimed {
    pub fn routing_key(&self) -> String {
        routing_key(&self.aggregate_type, &self.event_type)
    }

    /// Is it a dead letter on its way back, to be sent as it came?
    pub fn is_redrive(&self) -> bool {
        self.kind == Kind::Redrive.as_str()
    }
}

/// What became of a claimed row.
#[derive(Debug, Clone, PartialEq)]
pub enum Settlement {
    Published(Uuid),
    /// A verdict on the message: counted, and tried again after the delay; `None` gives up.
    Failed {
        id: Uuid,
        retry_after: Option<Duration>,
        error: String,
    },
    /// No verdict (the link broke): due again at once, nothing counted.
    Released(Uuid),
}

dialects! {
    /// Inserts rows that wait for a relay, or that one holds from the start.
    async fn insert_many(entries: &[Entry], claim: Option<Claim>, now: Timestamp) -> ();
    /// Inserts rows that go into the queues of this database at once; returns what is in the queues now.
    async fn insert_handed_on(entries: &[Entry], passing: &Passing<'_>, now: Timestamp) -> Vec<Queued>;
    /// Claims up to `limit` due rows, oldest due first; others skip them until the lease ends.
    pub async fn claim_many(claim: Claim, limit: i64, now: Timestamp) -> Vec<Claimed>;
    /// Settles rows still claimed by `claimed_by`, which it took up at `taken_at`; a row that another relay has taken
    /// over is left to it.
    pub async fn settle_many(claimed_by: Uuid, settlements: &[Settlement], taken_at: Timestamp, now: Timestamp) -> ();
    /// Makes due what a relay left claimed that was alone on this database, as only one can be on SQLite.
    pub async fn free_leftovers(now: Timestamp) -> ();
    /// How many rows wait to go out, and since when the oldest that is due has been waiting.
    pub async fn backlog(now: Timestamp) -> Backlog;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backlog {
    pub pending: i64,
    pub dead: i64,
    /// The most refusals that a row still to go out has met.
    pub attempts_max: i32,
    pub oldest_due_ms: Option<i64>,
}

/// A row as operators see it: no body, so that a list stays light.
#[derive(Debug, Clone, serde::Serialize, utoipa::ToSchema)]
pub struct OutboxRow {
    pub id: Uuid,
    #[schema(example = "order.placed")]
    pub event_type: String,
    pub aggregate_type: String,
    pub aggregate_id: String,
    #[schema(example = "published")]
    pub status: String,
    pub attempts: i32,
    pub available_at: Timestamp,
    pub created_at: Timestamp,
    pub published_at: Option<Timestamp>,
    pub correlation_id: String,
    /// Empty: to every queue bound to the event type; else the one queue it goes to.
    pub target: String,
    pub last_error: Option<String>,
}

type Columns = (
    Uuid,
    String,
    String,
    String,
    String,
    i32,
    Timestamp,
    Timestamp,
    Option<Timestamp>,
    String,
    String,
    Option<String>,
);

const SELECT_ROWS: &str = "SELECT id, event_type, aggregate_type, aggregate_id, status, attempts, available_at, \
     created_at, published_at, correlation_id, target, last_error FROM messaging_outbox";

impl From<Columns> for OutboxRow {
    fn from(columns: Columns) -> Self {
        let (id, event_type, aggregate_type, aggregate_id, status, attempts, ..) = columns;
        let (.., available_at, created_at, published_at, correlation_id, target, last_error) = columns;
        Self {
            id,
            event_type: routing_key(&aggregate_type, &event_type),
            aggregate_type,
            aggregate_id,
            status,
            attempts,
            available_at,
            created_at,
            published_at,
            correlation_id,
            target,
            last_error,
        }
    }
}

/// Which rows to list; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct Query {
    pub group_id: Option<String>,
    pub status: Option<String>,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

/// Newest first.
pub async fn list(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<OutboxRow>> {
    let filter = Filter::new(SELECT_ROWS)
        .and_some("group_id = ?", query.group_id)
        .and_some("status = ?", query.status)
        .and_some("aggregate_type = ?", query.aggregate_type)
        .and_some("aggregate_id = ?", query.aggregate_id)
        .and_some("id < ?", query.before)
        .page("id DESC", query.limit);
    Ok(fetch_page!(tx, filter, Columns)?.into_iter().map(OutboxRow::from).collect())
}

pub async fn find(tx: &mut Tx, group_id: Option<String>, id: Uuid) -> sqlx::Result<Option<OutboxRow>> {
    let filter = Filter::new(SELECT_ROWS).and_some("group_id = ?", group_id).and("id = ?", [id.into()]).page("id", 1);
    Ok(fetch_page!(tx, filter, Columns)?.pop().map(OutboxRow::from))
}

/// Rows given up on, of one tenant; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct Dead {
    pub id: Option<Uuid>,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
}

/// Gives dead rows of a group, or of any, their attempts back and has them published; returns how many there were.
pub async fn revive(tx: &mut Tx, group_id: Option<String>, dead: &Dead) -> sqlx::Result<u64> {
    let now = tx.now();
    let revived = crate::on!(tx, c => {
        sqlx::query(
            "UPDATE messaging_outbox SET status = 'pending', attempts = 0, available_at = $1, claimed_by = NULL
             WHERE status = 'dead' AND group_id = COALESCE($2, group_id) AND id = COALESCE($3, id)
                 AND aggregate_type = COALESCE($4, aggregate_type) AND aggregate_id = COALESCE($5, aggregate_id)",
        )
        .bind(now)
        .bind(group_id)
        .bind(dead.id)
        .bind(&dead.aggregate_type)
        .bind(&dead.aggregate_id)
        .execute(c)
        .await
        .map(|done| done.rows_affected())
    })?;
    if revived > 0 {
        tx.ring_on_commit(BELL);
    }
    Ok(revived)
}

/// Splits settlements into what the two update statements take.
pub(super) struct Settled {
    pub published: Vec<Uuid>,
    pub released: Vec<Uuid>,
    pub failed: Vec<Uuid>,
    pub failed_delay_ms: Vec<Option<i64>>,
    pub failed_errors: Vec<String>,
}

impl Settled {
    fn sort(settlements: &[Settlement]) -> Self {
        let mut sorted = Self {
            published: Vec::new(),
            released: Vec::new(),
            failed: Vec::new(),
            failed_delay_ms: Vec::new(),
            failed_errors: Vec::new(),
        };
        for settlement in settlements {
            match settlement {
                Settlement::Published(id) => sorted.published.push(*id),
                Settlement::Released(id) => sorted.released.push(*id),
                Settlement::Failed { id, retry_after, error } => {
                    sorted.failed.push(*id);
                    sorted.failed_delay_ms.push(retry_after.map(millis));
                    sorted.failed_errors.push(error.clone());
                }
            }
        }
        sorted
    }
}
