//! The books: what outcomes mean, written down in the transaction that they came of.
//!
//! What became of an event is in its inbox row; a retry is an outbox row as well, so that it is sent if and only if the
//! attempt before it was counted. Each outcome also says how its delivery is to be settled once all this is committed.
//! Outcomes are noted first and written together, in a few statements for a whole batch.

use std::time::Duration;

use uuid::Uuid;

use super::gate::Item;
use super::{Consumer, Settle};
use crate::clock::mint_id;
use crate::db::Tx;
use crate::messaging::event::{self, Message};
use crate::messaging::inbox::{self, Claim, Mark, Met, State};
use crate::messaging::outbox::{self, Entry};
use crate::messaging::tally::{self, Told};
use crate::messaging::transport::Tag;
use crate::messaging::waiting::{self, Wait};
use crate::messaging::{Outcome, Reaction};

/// Handling that takes less need not say when it ended: an inbox row is written as it begins, and to write it twice would
/// cost every batch more than the difference is worth.
const SLOW: Duration = Duration::from_millis(50);
/// Errors are kept short enough to read in a list.
const ERROR_CHARS_MAX: usize = 2000;

/// What outcomes have to be written down: marks and waits in the inbox, retries in the outbox.
#[derive(Default)]
pub(in crate::messaging) struct Books {
    pub marks: Vec<Mark>,
    waits: Vec<Wait>,
    retries: Vec<Entry>,
    claims: Vec<Claim>,
    told: Vec<Told>,
    /// New events that are simply done, whose inbox row says so already.
    done_at_once: Vec<Uuid>,
}

/// What a transaction has decided: how deliveries are to be settled, and which items are to be called for first.
pub(super) type Decided = (Vec<(Tag, Settle)>, Vec<(usize, Claim)>);

impl<R: Reaction> Consumer<R> {
    /// Writes what the outcomes mean: nothing for a new event that is done, else its mark, its wait, its retry row.
    pub(in crate::messaging) async fn keep_books(
        &self,
        tx: &mut Tx,
        items: &[Item<R::Fact>],
        run: &[(usize, Option<Met>)],
        outcomes: &[Outcome],
    ) -> sqlx::Result<Decided> {
        let mut books = Books::default();
        let mut claimed = Vec::new();
        let token = mint_id();
        let mut settled = Vec::with_capacity(run.len());
        for ((index, met), outcome) in run.iter().zip(outcomes) {
            let item = &items[*index];
            let settle = match (met, outcome) {
                (None, Outcome::Done) => {
                    books.done_at_once.push(item.message.event.event_id);
                    Settle::Ack
                }
                (met, Outcome::Call) => {
                    assert!(self.reaction.outside().is_some(), "{} must say how to call the outside", R::NAME);
                    let (version, attempts) = met.as_ref().map_or((0, 0), |met| (met.version, met.attempts));
                    let event_id = item.message.event.event_id;
                    let claim = Claim { event_id, token, version: version + 1, attempt: attempts + 1 };
                    books.claims.push(claim);
                    claimed.push((*index, claim));
                    continue;
                }
                (met, outcome) => {
                    let attempts = met.as_ref().map_or(0, |met| met.attempts);
                    self.book(&item.message, attempts, outcome, &mut books)
                }
            };
            settled.push((item.tag, settle));
        }
        self.write_books(tx, &books).await?;
        Ok((settled, claimed))
    }

    pub(in crate::messaging) async fn write_books(&self, tx: &mut Tx, books: &Books) -> sqlx::Result<()> {
        tally::on_commit(tx, R::NAME, books.done_at_once.len(), &books.marks, books.waits.len());
        tally::tell_on_commit(tx, R::NAME, &books.told);
        let ended_at = self.kernel.db.clock().now();
        if !books.done_at_once.is_empty() && ended_at.since(tx.now()) >= SLOW {
            inbox::put_end(tx, R::NAME, &books.done_at_once, ended_at).await?;
        }
        if !books.marks.is_empty() {
            let now = tx.now();
            inbox::mark_many(tx, R::NAME, &books.marks, now).await?;
            outbox::append_many(tx, &books.retries).await?;
        }
        if !books.claims.is_empty() {
            let now = tx.now();
            inbox::claim_many(tx, R::NAME, &books.claims, self.kernel.tuning.call_lease, now).await?;
        }
        waiting::keep_many(tx, R::NAME, &books.waits, self.kernel.tuning.wait_deadline).await
    }

    /// Notes what an outcome means for an event that has had `attempts` before this one.
    pub(in crate::messaging) fn book(
        &self,
        message: &Message<R::Fact>,
        attempts: i32,
        outcome: &Outcome,
        books: &mut Books,
    ) -> Settle {
        let event_id = message.event.event_id;
        let attempt = attempts + 1;
        let mark = |state, due_in, reason: Option<&str>, error: Option<&String>| Mark {
            event_id,
            state,
            attempts: attempt,
            due_in,
            reason: reason.map(str::to_owned),
            last_error: error.map(|error| event::without_nul(error).chars().take(ERROR_CHARS_MAX).collect()),
        };
        match outcome {
            Outcome::Done => {
                books.marks.push(mark(State::Processed, None, None, None));
                Settle::Ack
            }
            // Woken within another event's transaction: it gets a delivery of its own, and the call is made then.
            Outcome::Call => {
                books.retries.push(Entry::retry(
                    &message.event,
                    message.body.clone(),
                    &self.queue,
                    attempts,
                    Duration::ZERO,
                ));
                books.marks.push(Mark { attempts, ..mark(State::Retrying, Some(Duration::ZERO), None, None) });
                Settle::AckRetry
            }
            Outcome::Moot { why } => {
                books.marks.push(mark(State::Processed, None, Some("moot"), Some(why)));
                Settle::Ack
            }
            Outcome::Wait { key } => {
                assert!(R::AWAITED.contains(key), "{} must declare that {key} is awaited, or nothing wakes", R::NAME);
                let waiting_for = waiting::name(key, &message.event);
                books.told.push(Told::kept(&message.event, key));
                // To wait is no attempt.
                let (body, traceparent) = (message.body.clone(), message.event.traceparent);
                books.waits.push(Wait { event_id, attempts, waiting_for, body, traceparent });
                Settle::Ack
            }
            Outcome::Reject { reason, error } => {
                books.told.push(Told::dead_letter(&message.event, reason, error));
                books.marks.push(mark(State::Dead, None, Some(reason), Some(error)));
                Settle::Reject
            }
            Outcome::Retry { reason, error, after } => match self.kernel.tuning.retry.delay(attempt.unsigned_abs()) {
                Some(delay) => {
                    let delay = delay.max(*after);
                    books.told.push(Told::retry(&message.event, attempt, delay, error));
                    books.retries.push(Entry::retry(&message.event, message.body.clone(), &self.queue, attempt, delay));
                    books.marks.push(mark(State::Retrying, Some(delay), Some(reason), Some(error)));
                    Settle::AckRetry
                }
                None => {
                    let exhausted = Outcome::Reject { reason: "retries-exhausted", error: error.clone() };
                    self.book(message, attempts, &exhausted, books)
                }
            },
        }
    }
}
