//! Dead letters: what was given up on, with its bytes, its history and the reason, kept in SQL until resolved.
//!
//! An open letter stands for one thing: an event that a consumer's inbox calls dead (however many copies of it
//! are rejected, they only count up), or else one rejected delivery. Filing the same delivery twice changes
//! nothing, so the office may crash between filing and acknowledging.

use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use super::event::{self, Label, routing_key};
use super::inbox::{self, State};
use super::outbox::{self, Entry, Kind};
use crate::clock::{Timestamp, mint_id};
use crate::db::{Filter, Tx, fetch_page};
use crate::trace::Traceparent;

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

/// Files a letter, or counts it onto the open one it repeats.
pub async fn file(tx: &mut Tx, letter: &NewLetter) -> sqlx::Result<()> {
    let now = tx.now();
    let counted = crate::on!(tx, c => {
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
        .map(|done| done.rows_affected())
    })?;
    if counted > 0 {
        return Ok(());
    }
    crate::on!(tx, c => {
        sqlx::query(
            "INSERT INTO messaging_dead_letters (id, queue, consumer, message_id, event_type, correlation_id, group_id,
                 reason, error, attempts, headers, body, x_death, state, filing_key, delivery_key, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, 'open', $14, $15, $16, $16)
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
        .execute(c)
        .await
        .map(drop)
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

const SELECT_ROWS: &str = "SELECT id, queue, consumer, message_id, event_type, correlation_id, reason, error, \
     attempts, state, x_death, created_at FROM messaging_dead_letters";

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
    pub group_id: Option<String>,
    pub queue: Option<String>,
    pub consumer: Option<String>,
    pub reason: Option<String>,
    pub event_type: Option<String>,
    pub state: Option<String>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

/// Newest first.
pub async fn list(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<LetterRow>> {
    let filter = Filter::new(SELECT_ROWS)
        .and_some("group_id = ?", query.group_id)
        .and_some("queue = ?", query.queue)
        .and_some("consumer = ?", query.consumer)
        .and_some("reason = ?", query.reason)
        .and_some("event_type = ?", query.event_type)
        .and_some("state = ?", query.state)
        .and_some("id < ?", query.before)
        .page("id DESC", query.limit);
    Ok(fetch_page!(tx, filter, Columns)?.into_iter().map(LetterRow::from).collect())
}

/// A letter with everything that was kept of the message.
#[derive(Debug, Clone)]
pub struct Letter {
    pub row: LetterRow,
    pub headers: Value,
    pub body: Vec<u8>,
}

pub async fn find(tx: &mut Tx, group_id: Option<String>, id: Uuid) -> sqlx::Result<Option<Letter>> {
    let filter = Filter::new(SELECT_ROWS).and_some("group_id = ?", group_id).and("id = ?", [id.into()]).page("id", 1);
    let Some(columns) = fetch_page!(tx, filter, Columns)?.pop() else { return Ok(None) };
    let (headers, body): (String, Vec<u8>) = crate::on!(tx, c => {
        sqlx::query_as("SELECT headers, body FROM messaging_dead_letters WHERE id = $1").bind(id).fetch_one(c).await
    })?;
    let headers = serde_json::from_str(&headers).unwrap_or(Value::Null);
    Ok(Some(Letter { row: LetterRow::from(columns), headers, body }))
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

/// What a redrive did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Redriven {
    /// On its way back to its queue.
    Sent,
    /// The event turned out to be processed already: closed, nothing sent.
    AlreadyApplied,
    /// Somebody else resolved it first.
    NotOpen,
}

/// Sends a letter's bytes back to its queue: the letter is closed, the inbox row revived and the outbox row
/// written in this one transaction.
pub async fn redrive(tx: &mut Tx, letter: &Letter) -> sqlx::Result<Redriven> {
    let now = tx.now();
    let row = &letter.row;
    let closed = crate::on!(tx, c => {
        sqlx::query("UPDATE messaging_dead_letters SET state = 'redriven', updated_at = $2 WHERE id = $1 AND state = 'open'")
            .bind(row.id)
            .bind(now)
            .execute(c)
            .await
            .map(|done| done.rows_affected())
    })?;
    if closed == 0 {
        return Ok(Redriven::NotOpen);
    }
    let event = event::read_envelope(&letter.body, Label::default(), usize::MAX).ok();
    if let Some(event) = &event {
        let verdict = inbox::find_verdict(tx, &row.consumer, event.event_id).await?;
        let same_body = verdict.as_ref().is_some_and(|v| v.body_hash == event::hash_of(&letter.body));
        // Another body than the one the inbox knows revives nothing: it will only be put aside again.
        if same_body && inbox::revive(tx, &row.consumer, event.event_id).await? == Some(State::Processed) {
            return Ok(Redriven::AlreadyApplied);
        }
    }
    let mut headers = letter.headers.as_object().cloned().unwrap_or_default();
    headers.remove("x-message-id");
    // Postgres reads no JSON that holds a NUL, and one such row would stop its relay. The letter keeps them all.
    headers.retain(|name, value| !name.contains('\0') && !value.to_string().contains("\\u0000"));
    if let Some(message_id) = &row.message_id {
        headers.insert("x-message-id".to_owned(), message_id.as_str().into());
    }
    // A redriven event starts over, and the retry its revived row waits for is this one.
    headers.insert(outbox::X_ATTEMPTS.to_owned(), 0.into());
    let id = mint_id();
    let entry = Entry {
        id,
        kind: Kind::Redrive,
        body: letter.body.clone(),
        traceparent: headers.get(outbox::TRACEPARENT).and_then(Value::as_str).and_then(Traceparent::parse),
        headers: Value::Object(headers).to_string(),
        target: row.queue.clone(),
        ..match &event {
            Some(event) => Entry::from(event),
            None => unreadable_entry(id, row),
        }
    };
    outbox::append_many(tx, &[entry]).await?;
    Ok(Redriven::Sent)
}

/// The outbox columns of a letter whose envelope cannot be read.
fn unreadable_entry(id: Uuid, row: &LetterRow) -> Entry {
    let key = row.event_type.clone().unwrap_or_else(|| routing_key("unreadable", "message"));
    let (aggregate_type, event_type) = key.split_once('.').unwrap_or(("unreadable", &key));
    Entry {
        id,
        event_id: id,
        kind: Kind::Redrive,
        group_id: String::new(),
        subsidiary_id: None,
        aggregate_type: aggregate_type.to_owned(),
        aggregate_id: row.id.to_string(),
        event_type: event_type.to_owned(),
        body: Vec::new(),
        headers: String::new(),
        delay: Duration::ZERO,
        correlation_id: row.correlation_id.clone().unwrap_or_default(),
        causation_id: None,
        traceparent: None,
        target: String::new(),
    }
}
