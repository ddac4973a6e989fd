//! Waiting: an event that comes before its predecessor is kept, and runs in the transaction that handles it.
//!
//! A reaction answers [`Outcome::Wait`] and names the event it waits for, one about the same aggregate. Its inbox row
//! then holds the body, and the message is acknowledged. Whoever handles the predecessor looks for such rows before it
//! commits and runs them right there; what these were awaited by runs next, and so on.
//!
//! No wake-up is lost between two instances, because a reaction locks before it decides: the event and its predecessor
//! both lock the same row of their module, writing it first if it is not there. Either the event was second and sees
//! what the predecessor wrote, or the predecessor was second and finds the event waiting.
//!
//! A kept event that fails is not its predecessor's fault: the batch is run again without it, and it is left to the
//! sweep. The sweep runs what has waited too long once more, and rejects it as `predecessor-missing` if it still
//! waits. There is no delivery left to reject, so it files the letter itself, in the transaction of the verdict.

mod pg;
mod sqlite;

use std::time::Duration;

use bytes::Bytes;
use uuid::Uuid;

use super::consumer::{Blame, Books, Consumer, Failure, UNFINISHED_RUNS_MAX, begin_span, is_database_unavailable};
use super::dead_letters::{self, NewLetter};
use super::event::{self, Event, Label, Message, Unreadable};
use super::inbox::{self, Mark, State};
use super::tally::{self, Told};
use super::{Outcome, Reaction};
use crate::clock::Timestamp;
use crate::db::{Trouble, Tx, dialects};
use crate::trace::Traceparent;

/// How often the sweep runs an event again that merely lost to another transaction.
const CONFLICTS_MAX: u32 = 10;

/// An event to keep.
pub(super) struct Wait {
    pub event_id: Uuid,
    pub attempts: i32,
    pub waiting_for: String,
    pub body: Bytes,
    pub traceparent: Option<Traceparent>,
}

/// An event that was kept.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    pub event_id: Uuid,
    pub attempts: i32,
    pub unfinished_runs: i32,
    /// Has it waited as long as it may?
    pub overdue: bool,
    pub body: Vec<u8>,
    pub traceparent: Option<String>,
}

/// What is waited for, within a tenant.
pub(super) type Name = (String, String);

/// When events that waited for a batch are to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Waking {
    /// In the batch's own transaction.
    Now,
    /// By the sweep, each alone.
    Later,
}

dialects! {
    /// Is anything waiting at all? Asked with every batch that something could wait for, and mostly answered with no.
    async fn any(consumer: &str) -> bool;
    /// Keeps events; one that waits again keeps its deadline.
    async fn keep(consumer: &str, waits: &[Wait], deadline: Duration, now: Timestamp) -> ();
    /// Those that wait for one of `names`, in the order of their ids.
    async fn find(consumer: &str, names: &[Name], limit: i64) -> Vec<Kept>;
    /// Has the sweep run those that wait for one of `names` at its next turn.
    async fn hasten(consumer: &str, names: &[Name], now: Timestamp) -> ();
    async fn any_due(consumer: &str, now: Timestamp) -> bool;
    /// Takes the event whose time came first, recording that a run of it begins.
    async fn claim_due(consumer: &str, lease: Duration, now: Timestamp) -> Option<Kept>;
}

/// Writes down events that wait.
pub(super) async fn keep_many(tx: &mut Tx, consumer: &str, waits: &[Wait], deadline: Duration) -> sqlx::Result<()> {
    let now = tx.now();
    if waits.is_empty() { Ok(()) } else { keep(tx, consumer, waits, deadline, now).await }
}

/// `order.placed 0190…`: an event of this key about this aggregate, its id written the one way if it is a uuid.
pub(super) fn name(key: &str, event: &Event) -> String {
    match Uuid::try_parse(&event.aggregate_id) {
        Ok(id) => format!("{key} {id}"),
        Err(_) => format!("{key} {}", event.aggregate_id),
    }
}

/// What can be woken now that these have been handled.
fn names_of<'a, R: Reaction>(handled: impl IntoIterator<Item = (&'a Message<R::Fact>, &'a Outcome)>) -> Vec<Name>
where
    R::Fact: 'a,
{
    let mut names: Vec<Name> = handled
        .into_iter()
        .filter(|(message, outcome)| {
            R::AWAITED.contains(&message.key) && matches!(outcome, Outcome::Done | Outcome::Moot { .. })
        })
        .map(|(message, _)| (message.event.group_id.clone(), name(message.key, &message.event)))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// A kept event that was run, and what came of it.
pub(super) type Ran<F> = (Message<F>, Outcome);

impl<R: Reaction> Consumer<R> {
    /// Runs what waited for the events just handled, within their transaction.
    pub(super) async fn wake<'a>(
        &self,
        tx: &mut Tx,
        handled: impl IntoIterator<Item = (&'a Message<R::Fact>, &'a Outcome)>,
        waking: Waking,
    ) -> Result<Vec<Ran<R::Fact>>, Failure>
    where
        R::Fact: 'a,
    {
        let limit = self.kernel.tuning.batch;
        let mut woken = Vec::new();
        let mut names = names_of::<R>(handled);
        while !names.is_empty() && any(tx, R::NAME).await? {
            let kept = find(tx, R::NAME, &names, i64::try_from(limit).unwrap_or(i64::MAX)).await?;
            // More than a batch may have waited for one event: the rest is for the sweep.
            if waking == Waking::Later || kept.len() == limit {
                let now = tx.now();
                hasten(tx, R::NAME, &names, now).await?;
            }
            if waking == Waking::Later || kept.is_empty() {
                break;
            }
            let ran = self.run_kept(tx, kept).await.map_err(Failure::while_waking)?;
            names = names_of::<R>(ran.iter().map(|(message, outcome)| (message, outcome)));
            woken.extend(ran);
        }
        Ok(woken)
    }

    /// Runs kept events whose time has come, up to a batch of them; returns how many. One that still waits past its deadline
    /// is rejected. Each is taken by itself, right before its run: one that kills the process, or finds the database
    /// away, leaves no mark on those behind it.
    pub async fn sweep(&self) -> sqlx::Result<usize> {
        for count in 0..self.kernel.tuning.batch {
            // A look first, in nobody's way: most of the time there is nothing to do.
            let mut tx = self.kernel.db.read().await?;
            let now = tx.now();
            if !any_due(&mut tx, R::NAME, now).await? {
                return Ok(count);
            }
            drop(tx);
            let mut tx = self.kernel.db.begin().await?;
            let now = tx.now();
            let due = claim_due(&mut tx, R::NAME, self.kernel.tuning.call_lease, now).await?;
            tx.commit().await?;
            match due {
                Some(kept) => self.run_due(kept).await?,
                // Another instance was quicker.
                None => return Ok(count),
            }
        }
        Ok(self.kernel.tuning.batch)
    }

    async fn run_due(&self, kept: Kept) -> sqlx::Result<()> {
        let mut reruns = 0;
        loop {
            match self.attempt_due(&kept).await {
                // Somebody else has dealt with it meanwhile.
                Ok(()) | Err(Failure::Raced) => return Ok(()),
                Err(Failure::Database(error)) if Trouble::of(&error) == Trouble::Conflict && reruns < CONFLICTS_MAX => {
                    reruns += 1;
                }
                Err(Failure::Database(error)) if is_database_unavailable(&error) => {
                    // The database's trouble is not the event's. Best effort: it may be too far away to say so.
                    let mut tx = self.kernel.db.begin().await?;
                    inbox::forget_run(&mut tx, R::NAME, kept.event_id).await?;
                    tx.commit().await?;
                    return Err(error);
                }
                Err(failure) => return self.blame_kept(&kept, failure).await,
            }
        }
    }

    /// One transaction for one kept event, and for what waits for it.
    async fn attempt_due(&self, kept: &Kept) -> Result<(), Failure> {
        let mut tx = self.kernel.db.begin().await?;
        if kept.unfinished_runs > UNFINISHED_RUNS_MAX {
            let error = format!("{} runs of it began and none finished", kept.unfinished_runs - 1);
            self.give_up(&mut tx, kept, "process-killer", error).await?;
            return Ok(tx.commit().await?);
        }
        let mut ran = self.run_kept(&mut tx, vec![kept.clone()]).await?;
        let handled: Vec<(&Message<R::Fact>, &Outcome)> =
            ran.iter().map(|(message, outcome)| (message, outcome)).collect();
        let woken = self.wake(&mut tx, handled, Waking::Later).await?;
        ran.extend(woken);
        tx.commit().await?;
        self.tell_committed(ran);
        Ok(())
    }

    /// Runs kept events and writes down what came of each; they must still be waiting when it is done.
    async fn run_kept(&self, tx: &mut Tx, kept: Vec<Kept>) -> Result<Vec<Ran<R::Fact>>, Failure> {
        let (mut readable, mut spans) = (Vec::with_capacity(kept.len()), Vec::with_capacity(kept.len()));
        for kept in kept {
            match self.read_kept(&kept) {
                Ok(mut message) => {
                    let span = begin_span::<R>(&message, &self.queue, self.kernel.transport.name());
                    message.trace(span.carried());
                    readable.push((kept, message));
                    spans.push(span);
                }
                // It passed the gate once: this binary reads more strictly than the one that kept it.
                Err(unreadable) => self.give_up(tx, &kept, unreadable.code, unreadable.error).await?,
            }
        }
        if readable.is_empty() {
            return Ok(Vec::new());
        }
        let batch: Vec<&Message<R::Fact>> = readable.iter().map(|(_, message)| message).collect();
        let outcomes = self.react(tx, &batch).await?;
        let ids: Vec<Uuid> = batch.iter().map(|message| message.event.event_id).collect();
        if !self.still_wait(tx, &ids).await? {
            return Err(Failure::Raced);
        }
        let mut books = Books::default();
        let mut ran = Vec::with_capacity(readable.len());
        for ((kept, message), outcome) in readable.into_iter().zip(outcomes) {
            let outcome = match outcome {
                Outcome::Wait { key } if kept.overdue => missing(key, self.kernel.tuning.wait_deadline),
                outcome => outcome,
            };
            self.book(&message, kept.attempts, &outcome, &mut books);
            ran.push((message, outcome));
        }
        self.write_books(tx, &books).await?;
        for verdict in books.marks.iter().filter(|mark| mark.state == State::Dead) {
            if let Some((message, _)) = ran.iter().find(|(message, _)| message.event.event_id == verdict.event_id) {
                self.file(tx, verdict, &message.body).await?;
            }
        }
        Ok(ran)
    }

    /// The event failed by itself: that counts as an attempt, and it is retried like any other, or rejected.
    async fn blame_kept(&self, kept: &Kept, failure: Failure) -> sqlx::Result<()> {
        let Blame { reason, last_word, error } = failure.blame();
        let exhausted = self.kernel.tuning.retry.delay((kept.attempts + 1).unsigned_abs()).is_none();
        let mut tx = self.kernel.db.begin().await?;
        match self.read_kept(kept) {
            Ok(message) if !exhausted => {
                if self.still_wait(&mut tx, &[kept.event_id]).await? {
                    let mut books = Books::default();
                    self.book(&message, kept.attempts, &Outcome::retry_for(reason, error), &mut books);
                    self.write_books(&mut tx, &books).await?;
                }
            }
            _ => self.give_up(&mut tx, kept, last_word, error).await?,
        }
        tx.commit().await
    }

    /// The verdict on an event without a delivery: the inbox row and the letter in one transaction.
    async fn give_up(&self, tx: &mut Tx, kept: &Kept, reason: &str, error: String) -> sqlx::Result<()> {
        if !self.still_wait(tx, &[kept.event_id]).await? {
            return Ok(());
        }
        let verdict = Mark {
            event_id: kept.event_id,
            state: State::Dead,
            attempts: kept.attempts + 1,
            due_in: None,
            reason: Some(reason.to_owned()),
            last_error: Some(event::without_nul(&error)),
        };
        let now = tx.now();
        inbox::mark_many(tx, R::NAME, std::slice::from_ref(&verdict), now).await?;
        tally::on_commit(tx, R::NAME, 0, std::slice::from_ref(&verdict), 0);
        if let Ok(event) = event::read_envelope(&kept.body, Label::default(), usize::MAX) {
            tally::tell_on_commit(tx, R::NAME, &[Told::dead_letter(&event, reason, &error)]);
        }
        self.file(tx, &verdict, &kept.body).await
    }

    fn read_kept(&self, kept: &Kept) -> Result<Message<R::Fact>, Unreadable> {
        let mut event = event::read_envelope(&kept.body, Label::default(), usize::MAX)?;
        event.traceparent = kept.traceparent.as_deref().and_then(Traceparent::parse);
        event::open(event.into(), kept.body.clone().into(), R::KEYS, R::decode)
    }

    /// Locks the rows and says whether all of them still wait. If one does not, another transaction has dealt with it,
    /// and what was written for it must not be committed.
    async fn still_wait(&self, tx: &mut Tx, ids: &[Uuid]) -> sqlx::Result<bool> {
        let now = tx.now();
        let met = inbox::meet(tx, R::NAME, ids, now).await?;
        Ok(met.iter().filter(|(_, met)| met.state == State::Waiting).count() == ids.len())
    }

    async fn file(&self, tx: &mut Tx, verdict: &Mark, body: &[u8]) -> sqlx::Result<()> {
        let event = event::read_envelope(body, Label::default(), usize::MAX).ok();
        let letter = NewLetter {
            queue: self.queue.clone(),
            consumer: R::NAME.to_owned(),
            message_id: Some(verdict.event_id.to_string()),
            event_type: event.as_ref().map(Event::routing_key),
            correlation_id: event.as_ref().map(|event| event.correlation_id.clone()),
            group_id: event.as_ref().map(|event| event.group_id.clone()),
            reason: verdict.reason.clone().unwrap_or_default(),
            error: verdict.last_error.clone().unwrap_or_default(),
            attempts: verdict.attempts,
            headers: serde_json::json!({}),
            body: body.to_vec(),
            x_death: serde_json::json!([]),
            filing_key: verdict.event_id.to_string(),
            delivery_key: format!("kept {} {}", verdict.event_id, tx.now()),
        };
        dead_letters::file(tx, &letter).await
    }
}

fn missing(key: &str, deadline: Duration) -> Outcome {
    let error = format!("no {key} of the same aggregate came within {}", humantime::format_duration(deadline));
    Outcome::Reject { reason: "predecessor-missing", error }
}
