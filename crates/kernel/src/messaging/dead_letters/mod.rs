//! Dead letters: what was given up on, with its bytes, its history and the reason, kept in SQL until resolved.
//!
//! An open letter stands for one thing: an event that a consumer's inbox calls dead (however many copies of it
//! are rejected, they only count up), or else one rejected delivery. Filing the same delivery twice changes
//! nothing, so the office may crash between filing and acknowledging. An event whose letter was discarded is put aside
//! for good: further copies count onto that letter, and open none.
//!
//! A letter is resolved by sending it back or by discarding it, see [`resolve`]; a discarded one can be restored.

mod pg;
mod resolve;
mod sqlite;

use std::collections::HashMap;

use serde_json::Value;
use uuid::Uuid;

pub use resolve::{NotResolved, Redriven, UNREADABLE, discard, redrive, redrive_many, restore};

use super::event::{self, Label};
use crate::clock::{Timestamp, mint_id};
use crate::db::{Filter, Tx, dialects, fetch_page};

dialects! {
    /// Marks those letters as redriven that are still open, on behalf of a job if there is one; returns them.
    async fn close_many(ids: &[Uuid], job_id: Option<Uuid>, now: Timestamp) -> Vec<Uuid>;
    async fn select_contents(ids: &[Uuid]) -> Vec<(Uuid, String, Vec<u8>)>;
}

/// A letter to file.
#[derive(Debug, Clone)]
pub struct NewLetter {
    pub queue: String,
    pub consumer: String,
    pub message_id: Option<String>,
    pub event_type: Option<String>,
    pub correlation_id: Option<String>,
    pub group_id: Option<String>,
    pub reason: String,
    pub error: String,
    pub attempts: i32,
    pub headers: Value,
    pub body: Vec<u8>,
    pub x_death: Value,
    pub filing_key: String,
    pub delivery_key: String,
}

/// Files a letter, or counts it onto the one it repeats.
pub async fn file(tx: &mut Tx, letter: &NewLetter) -> sqlx::Result<()> {
    let event_id = event::read_envelope(&letter.body, Label::default(), usize::MAX).ok().map(|event| event.event_id);
    if count_onto_open(tx, letter).await? || count_onto_discarded(tx, letter, event_id).await? {
        return Ok(());
    }
    let now = tx.now();
    crate::on!(tx, c => {
        sqlx::query(
            "INSERT INTO messaging_dead_letters (id, queue, consumer, message_id, event_type, correlation_id, group_id,
                 reason, error, attempts, headers, body, x_death, state, filing_key, delivery_key, created_at, updated_at,
                 event_id)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, 'open', $14, $15, $16, $16, $17)
             ON CONFLICT DO NOTHING",
        )
        .bind(mint_id())
        .bind(&letter.queue)
        .bind(&letter.consumer)
        .bind(&letter.message_id)
        .bind(&letter.event_type)
        .bind(&letter.correlation_id)
        .bind(&letter.group_id)
        .bind(&letter.reason)
        .bind(&letter.error)
        .bind(letter.attempts)
        .bind(letter.headers.to_string())
        .bind(&letter.body)
        .bind(letter.x_death.to_string())
        .bind(&letter.filing_key)
        .bind(&letter.delivery_key)
        .bind(now)
        .bind(event_id)
        .execute(c)
        .await
        .map(drop)
    })
}

async fn count_onto_open(tx: &mut Tx, letter: &NewLetter) -> sqlx::Result<bool> {
    let now = tx.now();
    crate::on!(tx, c => {
        sqlx::query(
            "UPDATE messaging_dead_letters SET count = count + 1, delivery_key = $3, x_death = $4, updated_at = $5
             WHERE queue = $1 AND filing_key = $2 AND state = 'open'
                 AND NOT EXISTS (SELECT 1 FROM messaging_dead_letters WHERE queue = $1 AND delivery_key = $3)",
        )
        .bind(&letter.queue)
        .bind(&letter.filing_key)
        .bind(&letter.delivery_key)
        .bind(letter.x_death.to_string())
        .bind(now)
        .execute(c)
        .await
        .map(|done| done.rows_affected() > 0)
    })
}

/// The last letter about the same event, if that was discarded. One that was sent back is followed by a new letter.
async fn count_onto_discarded(tx: &mut Tx, letter: &NewLetter, event_id: Option<Uuid>) -> sqlx::Result<bool> {
    let now = tx.now();
    crate::on!(tx, c => {
        sqlx::query(
            "UPDATE messaging_dead_letters SET count = count + 1, delivery_key = $3, x_death = $4, updated_at = $5
             WHERE state = 'discarded' AND id = (SELECT id FROM messaging_dead_letters
                     WHERE event_id = $6 AND consumer = $7 AND queue = $1 AND filing_key = $2
                     ORDER BY id DESC LIMIT 1)
                 AND NOT EXISTS (SELECT 1 FROM messaging_dead_letters WHERE queue = $1 AND delivery_key = $3)",
        )
        .bind(&letter.queue)
        .bind(&letter.filing_key)
        .bind(&letter.delivery_key)
        .bind(letter.x_death.to_string())
        .bind(now)
        .bind(event_id)
        .bind(&letter.consumer)
        .execute(c)
        .await
        .map(|done| done.rows_affected() > 0)
    })
}

/// Has this delivery been filed?
pub async fn is_filed(tx: &mut Tx, queue: &str, delivery_key: &str) -> sqlx::Result<bool> {
    let found: Option<i32> = crate::on!(tx, c => {
        sqlx::query_scalar("SELECT 1 FROM messaging_dead_letters WHERE queue = $1 AND delivery_key = $2")
            .bind(queue)
            .bind(delivery_key)
            .fetch_optional(c)
            .await
    })?;
    Ok(found.is_some())
}

/// A letter in a list: no body, no headers, so that one monster does not weigh on all.
#[derive(Debug, Clone, serde::Serialize, utoipa::ToSchema)]
pub struct LetterRow {
    pub id: Uuid,
    #[schema(example = "stockade.inventory")]
    pub queue: String,
    #[schema(example = "inventory")]
    pub consumer: String,
    pub message_id: Option<String>,
    pub event_type: Option<String>,
    pub correlation_id: Option<String>,
    /// A stable code; see the delivery guarantees for the list.
    #[schema(example = "not-json")]
    pub reason: String,
    pub error: String,
    pub attempts: i32,
    #[schema(example = "open")]
    pub state: String,
    /// The history of rejections, in RabbitMQ's shape.
    pub x_death: Value,
    pub created_at: Timestamp,
}

type Columns = (
    Uuid,
    String,
    String,
    Option<String>,
    Option<String>,
    Option<String>,
    String,
    String,
    i32,
    String,
    String,
    Timestamp,
);

const SELECT_ROWS: &str = "SELECT l.id, l.queue, l.consumer, l.message_id, l.event_type, l.correlation_id, l.reason, \
     l.error, l.attempts, l.state, l.x_death, l.created_at FROM messaging_dead_letters l";

impl From<Columns> for LetterRow {
    fn from(columns: Columns) -> Self {
        let (id, queue, consumer, message_id, event_type, correlation_id, ..) = columns;
        let (.., reason, error, attempts, state, x_death, created_at) = columns;
        Self {
            id,
            queue,
            consumer,
            message_id,
            event_type,
            correlation_id,
            reason,
            error,
            attempts,
            state,
            x_death: serde_json::from_str(&x_death).unwrap_or(Value::Null),
            created_at,
        }
    }
}

/// Which letters to list; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct Query {
    pub ids: Vec<Uuid>,
    pub group_id: Option<String>,
    pub queue: Option<String>,
    pub consumer: Option<String>,
    pub reason: Option<String>,
    pub event_type: Option<String>,
    pub state: Option<String>,
    pub correlation_id: Option<String>,
    /// Filed at this time or later.
    pub from: Option<Timestamp>,
    /// Filed before this time.
    pub to: Option<Timestamp>,
    /// Sent by this redrive.
    pub job_id: Option<Uuid>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

impl Query {
    /// Adds its conditions to a SELECT that calls the letters `l`.
    pub(super) fn narrow(self, filter: Filter) -> Filter {
        filter
            .and_any("l.id", self.ids)
            .and_some("l.group_id = ?", self.group_id)
            .and_some("l.queue = ?", self.queue)
            .and_some("l.consumer = ?", self.consumer)
            .and_some("l.reason = ?", self.reason)
            .and_some("l.event_type = ?", self.event_type)
            .and_some("l.state = ?", self.state)
            .and_some("l.correlation_id = ?", self.correlation_id)
            .and_some("l.created_at >= ?", self.from)
            .and_some("l.created_at < ?", self.to)
            .and_some("l.job_id = ?", self.job_id)
            .and_some("l.id < ?", self.before)
    }
}

/// Newest first.
pub async fn list(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<LetterRow>> {
    let limit = query.limit;
    let filter = query.narrow(Filter::new(SELECT_ROWS)).page("l.id DESC", limit);
    Ok(fetch_page!(tx, filter, Columns)?.into_iter().map(LetterRow::from).collect())
}

/// The same, of those that also meet a condition on `l`.
pub(super) async fn list_where(tx: &mut Tx, query: Query, condition: &'static str) -> sqlx::Result<Vec<LetterRow>> {
    let limit = query.limit;
    let filter = query.narrow(Filter::new(SELECT_ROWS)).and(condition, []).page("l.id DESC", limit);
    Ok(fetch_page!(tx, filter, Columns)?.into_iter().map(LetterRow::from).collect())
}

/// Letters that are likely to have one cause.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
pub struct Group {
    #[schema(example = "inventory")]
    pub consumer: String,
    #[schema(example = "stockade.inventory")]
    pub queue: String,
    #[schema(example = "not-json")]
    pub reason: String,
    /// Null where the message did not say.
    #[schema(example = "order.placed")]
    pub event_type: Option<String>,
    pub count: i64,
    pub first_seen_at: Timestamp,
    pub last_seen_at: Timestamp,
}

/// The largest groups first. A query's `before` has no meaning here.
pub async fn list_groups(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<Group>> {
    let limit = query.limit;
    let select = "SELECT l.consumer, l.queue, l.reason, l.event_type, count(*), min(l.created_at), max(l.updated_at) \
         FROM messaging_dead_letters l";
    let filter = query
        .narrow(Filter::new(select))
        .group("l.consumer, l.queue, l.reason, l.event_type")
        .page("count(*) DESC, l.consumer, l.reason, l.event_type", limit);
    let rows = fetch_page!(tx, filter, (String, String, String, Option<String>, i64, Timestamp, Timestamp))?;
    let group = |(consumer, queue, reason, event_type, count, first_seen_at, last_seen_at)| Group {
        consumer,
        queue,
        reason,
        event_type,
        count,
        first_seen_at,
        last_seen_at,
    };
    Ok(rows.into_iter().map(group).collect())
}

/// A letter with everything that was kept of the message.
#[derive(Debug, Clone)]
pub struct Letter {
    pub row: LetterRow,
    pub headers: Value,
    pub body: Vec<u8>,
}

pub async fn find(tx: &mut Tx, group_id: Option<String>, id: Uuid) -> sqlx::Result<Option<Letter>> {
    let query = Query { group_id, ids: vec![id], limit: 1, ..Query::default() };
    Ok(fetch(tx, query).await?.pop())
}

/// The letters of these ids, in the order they were filed.
pub async fn find_many(tx: &mut Tx, ids: &[Uuid]) -> sqlx::Result<Vec<Letter>> {
    match ids {
        [] => Ok(Vec::new()),
        ids => fetch(tx, Query { ids: ids.to_vec(), limit: i64::MAX, ..Query::default() }).await,
    }
}

async fn fetch(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<Letter>> {
    let limit = query.limit;
    let filter = query.narrow(Filter::new(SELECT_ROWS)).page("l.id", limit);
    let rows = fetch_page!(tx, filter, Columns)?;
    let ids: Vec<Uuid> = rows.iter().map(|columns| columns.0).collect();
    let mut contents: HashMap<Uuid, (String, Vec<u8>)> =
        select_contents(tx, &ids).await?.into_iter().map(|(id, headers, body)| (id, (headers, body))).collect();
    let letter = |columns: Columns| {
        let (headers, body) = contents.remove(&columns.0)?;
        let headers = serde_json::from_str(&headers).unwrap_or(Value::Null);
        Some(Letter { row: LetterRow::from(columns), headers, body })
    };
    Ok(rows.into_iter().filter_map(letter).collect())
}

/// Open letters per queue.
pub async fn count_open(tx: &mut Tx) -> sqlx::Result<Vec<(String, i64)>> {
    crate::on!(tx, c => {
        sqlx::query_as("SELECT queue, count(*) FROM messaging_dead_letters WHERE state = 'open' GROUP BY queue")
            .fetch_all(c)
            .await
    })
}

/// Open letters per consumer and reason.
pub async fn count_by_reason(tx: &mut Tx) -> sqlx::Result<Vec<(String, String, i64)>> {
    crate::on!(tx, c => {
        sqlx::query_as(
            "SELECT consumer, reason, count(*) FROM messaging_dead_letters WHERE state = 'open'
             GROUP BY consumer, reason",
        )
        .fetch_all(c)
        .await
    })
}
