//! What can be done about a letter: send it back to its queue, discard it, and take the discarding back.
//!
//! Each moves the letter from one state to another by compare-and-set, so of two operators one is first and the
//! other is told so; no letter is sent twice.

use bytes::Bytes;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use super::{Letter, LetterRow, close_many};
use crate::clock::mint_id;
use crate::db::Tx;
use crate::messaging::event::{self, Event, Label};
use crate::messaging::inbox::{self, State};
use crate::messaging::outbox::{self, Entry, Kind};
use crate::trace::Traceparent;

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

/// Redrives one letter.
pub async fn redrive(tx: &mut Tx, letter: &Letter) -> sqlx::Result<Redriven> {
    let redriven = redrive_many(tx, std::slice::from_ref(letter), None).await?;
    redriven.first().copied().ok_or(sqlx::Error::RowNotFound)
}

/// Sends letters' bytes back to their queues: the letters are closed, the inbox rows revived and the outbox rows
/// written in this one transaction. Says what became of each, in order.
pub async fn redrive_many(tx: &mut Tx, letters: &[Letter], job_id: Option<Uuid>) -> sqlx::Result<Vec<Redriven>> {
    let now = tx.now();
    let ids: Vec<Uuid> = letters.iter().map(|letter| letter.row.id).collect();
    let closed: HashSet<Uuid> = close_many(tx, &ids, job_id, now).await?.into_iter().collect();
    let mut redriven: Vec<Redriven> = letters
        .iter()
        .map(|letter| if closed.contains(&letter.row.id) { Redriven::Sent } else { Redriven::NotOpen })
        .collect();
    let events: Vec<Option<Event>> =
        letters.iter().map(|letter| event::read_envelope(&letter.body, Label::default(), usize::MAX).ok()).collect();
    let mut by_consumer: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, letter) in letters.iter().enumerate() {
        if redriven[index] == Redriven::Sent && events[index].is_some() {
            by_consumer.entry(&letter.row.consumer).or_default().push(index);
        }
    }
    for (consumer, indexes) in by_consumer {
        let readable = |index: &usize| Some((events[*index].as_ref()?.event_id, event::hash_of(&letters[*index].body)));
        let wanted: Vec<_> = indexes.iter().filter_map(readable).collect();
        // Another body than the one the inbox knows revives nothing: it will only be put aside again.
        let states = inbox::revive_many(tx, consumer, &wanted).await?;
        for (index, state) in indexes.into_iter().zip(states) {
            if state == Some(State::Processed) {
                redriven[index] = Redriven::AlreadyApplied;
            }
        }
    }
    let entries: Vec<Entry> = letters
        .iter()
        .zip(&events)
        .zip(&redriven)
        .filter(|(_, redriven)| **redriven == Redriven::Sent)
        .map(|((letter, event), _)| entry(letter, event.as_ref()))
        .collect();
    outbox::append_many(tx, &entries).await?;
    Ok(redriven)
}

/// The outbox row that carries a letter back.
fn entry(letter: &Letter, event: Option<&Event>) -> Entry {
    let row = &letter.row;
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
    Entry {
        id,
        kind: Kind::Redrive,
        body: letter.body.clone().into(),
        traceparent: headers.get(outbox::TRACEPARENT).and_then(Value::as_str).and_then(Traceparent::parse),
        headers: Value::Object(headers).to_string().into(),
        target: row.queue.clone(),
        ..match event {
            Some(event) => Entry::from(event),
            None => unreadable_entry(id, row),
        }
    }
}

/// The routing key under which a letter goes back that has none: no type of any event.
pub const UNREADABLE: &str = "unreadable.message";

/// The outbox columns of a letter whose envelope cannot be read.
fn unreadable_entry(id: Uuid, row: &LetterRow) -> Entry {
    let key = row.event_type.as_deref().unwrap_or(UNREADABLE);
    let (aggregate_type, event_type) = key.split_once('.').unwrap_or(("unreadable", key));
    Entry {
        id,
        event_id: id,
        kind: Kind::Redrive,
        group_id: String::new(),
        subsidiary_id: None,
        aggregate_type: aggregate_type.to_owned().into(),
        aggregate_id: row.id.to_string(),
        event_type: event_type.to_owned().into(),
        body: Bytes::new().into(),
        headers: Cow::Borrowed(""),
        delay: Duration::ZERO,
        correlation_id: row.correlation_id.clone().unwrap_or_default(),
        causation_id: None,
        traceparent: None,
        target: String::new(),
    }
}

/// Why a letter could not be discarded or restored.
#[derive(Debug, thiserror::Error)]
pub enum NotResolved {
    #[error("the letter is in another state")]
    OtherState,
    #[error("a later letter of the same event is open")]
    OpenAnew,
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

/// Puts an open letter aside: nothing of it is lost, and [`restore`] brings it back until retention removes it.
pub async fn discard(tx: &mut Tx, id: Uuid) -> Result<(), NotResolved> {
    let now = tx.now();
    let moved = crate::on!(tx, c => {
        sqlx::query("UPDATE messaging_dead_letters SET state = 'discarded', resolved_at = $2 WHERE id = $1 AND state = 'open'")
            .bind(id)
            .bind(now)
            .execute(c)
            .await
            .map(|done| done.rows_affected())
    })?;
    if moved > 0 { Ok(()) } else { Err(NotResolved::OtherState) }
}

/// Opens a discarded letter again. While it lay aside, another copy of its event may have been rejected and filed;
/// that letter stands for the event then.
pub async fn restore(tx: &mut Tx, id: Uuid) -> Result<(), NotResolved> {
    let moved = crate::on!(tx, c => {
        sqlx::query("UPDATE messaging_dead_letters SET state = 'open', resolved_at = NULL WHERE id = $1 AND state = 'discarded'")
            .bind(id)
            .execute(c)
            .await
            .map(|done| done.rows_affected())
    });
    match moved {
        Ok(0) => Err(NotResolved::OtherState),
        Ok(_) => Ok(()),
        Err(error) if error.as_database_error().is_some_and(|error| error.is_unique_violation()) => {
            Err(NotResolved::OpenAnew)
        }
        Err(error) => Err(error.into()),
    }
}
