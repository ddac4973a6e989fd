//! Running a batch: one transaction, and what is done about one that does not commit.
//!
//! What merely lost to another transaction is run again as it is. What fails as a whole is halved until the culprit
//! stands alone, and that one is blamed: its failure counts as an attempt. Only the trouble of a database that is away
//! or busy is handed up, for the loop to wait out; what was committed before it stays settled.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use sqlx::error::DatabaseError;
use uuid::Uuid;

use super::books::Decided;
use super::gate::{Hand, Item};
use super::plan::Meeting;
use super::{Consumer, Settle};
use crate::db::{Trouble, Tx};
use crate::messaging::event::Message;
use crate::messaging::inbox::{self, Action, Arrival, State};
use crate::messaging::transport::Tag;
use crate::messaging::waiting::{Ran, Waking};
use crate::messaging::{Outcome, Reaction, tally};
use crate::secrets;

/// Recorded runs that never finished before a message counts as a process killer.
pub(in crate::messaging) const UNFINISHED_RUNS_MAX: i32 = 3;
/// How often a transaction that lost to another is run again before the batch is given back.
const CONFLICTS_MAX: u32 = 10;
/// How often it is run again after a unique key was violated: numbers are then minted anew.
const REMINTS_MAX: u32 = 2;

/// Why a batch did not commit.
pub(in crate::messaging) enum Failure {
    Database(sqlx::Error),
    Panic(String),
    /// Another transaction has meanwhile dealt with an event that was kept: run it again.
    Raced,
    /// An event that waited for this batch fails, and the batch does not.
    Woken(String),
}

impl Failure {
    /// The failure of events that waited, as the batch that wakes them sees it.
    pub(in crate::messaging) fn while_waking(self) -> Self {
        match self {
            Self::Database(error) if is_database_unavailable(&error) => Self::Database(error),
            Self::Database(error) => Self::Woken(error.to_string()),
            Self::Panic(text) => Self::Woken(text),
            Self::Raced | Self::Woken(_) => self,
        }
    }

    pub(in crate::messaging) fn blame(self) -> Blame {
        let (reason, last_word, error) = match self {
            Self::Panic(text) => ("handler-panic", "handler-panic", format!("the handler panicked: {text}")),
            Self::Database(error) => ("database", "retries-exhausted", format!("database: {error}")),
            Self::Woken(text) => ("woken-failed", "retries-exhausted", text),
            Self::Raced => ("raced", "retries-exhausted", "another transaction was always first".to_owned()),
        };
        Blame { reason, last_word, error }
    }

    /// How many reruns of the same work it is worth.
    fn reruns_worth(&self) -> u32 {
        match self {
            Self::Raced => CONFLICTS_MAX,
            Self::Database(error) if Trouble::of(error) == Trouble::Conflict => CONFLICTS_MAX,
            Self::Database(error) if inbox::lost_race(error) => CONFLICTS_MAX,
            Self::Database(error) if error.as_database_error().is_some_and(DatabaseError::is_unique_violation) => {
                REMINTS_MAX
            }
            _ => 0,
        }
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

/// Is the database unavailable or busy, so that no event is to blame? A statement that timed out is the event's own failure:
/// it would stop its module forever. If the database is slow as such, recording the attempt fails too, and nothing is counted.
pub(in crate::messaging) fn is_database_unavailable(error: &sqlx::Error) -> bool {
    let trouble = Trouble::of(error);
    trouble.is_passing() && trouble != Trouble::TimedOut
}

/// What an event that failed by itself is told.
pub(in crate::messaging) struct Blame {
    /// Why it is tried again.
    pub reason: &'static str,
    /// The reason code, should this have been the last attempt.
    pub last_word: &'static str,
    pub error: String,
}

impl<R: Reaction> Consumer<R> {
    /// Decides and commits everything about what is in hand.
    pub(super) async fn work_off(&self, hand: &mut Hand<R::Fact>) -> sqlx::Result<()> {
        self.join_processed(hand).await?;
        // Rows are written in the order of their keys, so that two instances cannot deadlock. Mostly they came in it, and a
        // sort would make room for half of them before it sees that.
        if !hand.together.is_sorted_by_key(|item| item.message.event.event_id) {
            hand.together.sort_by_key(|item| item.message.event.event_id);
        }
        self.run_halving(&hand.together, Waking::Now, &mut hand.settled).await?;
        for item in &hand.alone {
            self.run_alone(item, &mut hand.settled).await?;
        }
        Ok(())
    }

    /// What would run alone and is processed already has nothing to run: it is dismissed with the batch.
    async fn join_processed(&self, hand: &mut Hand<R::Fact>) -> sqlx::Result<()> {
        if hand.alone.is_empty() {
            return Ok(());
        }
        let ids: Vec<Uuid> = hand.alone.iter().map(|item| item.message.event.event_id).collect();
        let mut tx = self.kernel.db.begin_relaxed().await?;
        let now = tx.now();
        let met = inbox::meet(&mut tx, R::NAME, &ids, now).await?;
        tx.commit().await?;
        let processed: HashSet<Uuid> =
            met.into_iter().filter(|(_, met)| met.state == State::Processed).map(|(id, _)| id).collect();
        let is_processed = |item: &mut Item<_>| processed.contains(&item.message.event.event_id);
        hand.together.extend(hand.alone.extract_if(.., is_processed));
        Ok(())
    }

    /// Runs a batch; one that fails as a whole is halved until the culprit stands alone.
    async fn run_halving(
        &self,
        items: &[Item<R::Fact>],
        waking: Waking,
        settled: &mut Vec<(Tag, Settle)>,
    ) -> sqlx::Result<()> {
        let mut todo = vec![(items, waking)];
        while let Some((items, waking)) = todo.pop() {
            if items.is_empty() {
                continue;
            }
            match self.run_once(items, waking).await {
                Ok((done, claimed)) => {
                    settled.extend(done);
                    settled.extend(self.call_all(items, &claimed).await);
                }
                Err(Failure::Database(error)) if is_database_unavailable(&error) => return Err(error),
                Err(Failure::Woken(error)) if waking == Waking::Now => {
                    tracing::warn!(consumer = R::NAME, %error, "an event that waited for this batch fails; left to the sweep");
                    todo.push((items, Waking::Later));
                }
                Err(failure) if items.len() == 1 => settled.push(self.blame(&items[0], failure).await?),
                Err(_) => {
                    let (left, right) = items.split_at(items.len() / 2);
                    todo.extend([(right, waking), (left, waking)]);
                }
            }
        }
        Ok(())
    }

    /// Runs a transaction again while it merely loses to others, or may have minted a number that was taken.
    async fn run_once(&self, items: &[Item<R::Fact>], waking: Waking) -> Result<Decided, Failure> {
        let mut reruns = 0;
        let mut meeting = Meeting::of(items);
        loop {
            match self.attempt(items, waking, meeting).await {
                Err(failure) if reruns < failure.reruns_worth() => {
                    self.kernel.db.metrics().db_serialization_retries.inc();
                    meeting = Meeting::Possible;
                    reruns += 1;
                }
                ended => return ended,
            }
        }
    }

    /// One transaction: inbox, reaction, bookkeeping, what waited for it, commit.
    async fn attempt(&self, items: &[Item<R::Fact>], waking: Waking, meeting: Meeting) -> Result<Decided, Failure> {
        let mut tx = self.kernel.db.begin_chained().await?;
        let mut plan = self.plan(&mut tx, items, meeting).await?;
        if !plan.stale.is_empty() {
            self.take_over(&mut tx, items, &mut plan).await?;
        }
        let batch: Vec<&Message<R::Fact>> = plan.run.iter().map(|(index, _)| &items[*index].message).collect();
        let failing = self.kernel.faults.failures(R::NAME, batch.len());
        let mut outcomes = vec![Outcome::retry("the fault lab let it fail"); failing];
        if failing < batch.len() {
            outcomes.extend(self.react(&mut tx, &batch[failing..]).await?);
        }
        let mut settled = plan.settled;
        let (decided, claimed) = self.keep_books(&mut tx, items, &plan.run, &outcomes).await?;
        settled.extend(decided);
        if !plan.duplicates.is_empty() {
            inbox::count_duplicates(&mut tx, R::NAME, &plan.duplicates).await?;
            // Items are in the order of their ids.
            let find = |id| items.binary_search_by_key(id, |item: &Item<_>| item.message.event.event_id).ok();
            let repeated = plan.duplicates.iter().filter_map(find).map(|index| &items[index].message);
            tally::duplicates_on_commit(&mut tx, R::NAME, repeated);
        }
        let woken = self.wake(&mut tx, batch.iter().copied().zip(&outcomes), waking).await?;
        self.kernel.faults.reach("consumer.before_commit", R::NAME);
        tx.commit().await?;
        self.kernel.faults.reach("consumer.after_commit", R::NAME);
        self.reaction.committed(&batch[failing..], &outcomes[failing..]);
        self.tell_committed(woken);
        Ok((settled, claimed))
    }

    pub(in crate::messaging) async fn react(
        &self,
        tx: &mut Tx,
        batch: &[&Message<R::Fact>],
    ) -> Result<Vec<Outcome>, Failure> {
        match AssertUnwindSafe(self.reaction.react(tx, batch)).catch_unwind().await {
            Ok(outcomes) => {
                let outcomes = outcomes?;
                match outcomes.len() == batch.len() {
                    true => Ok(outcomes),
                    false => Err(Failure::Panic(format!("{} must give one outcome per event", R::NAME))),
                }
            }
            Err(panic) => Err(Failure::Panic(panic_text(panic.as_ref()))),
        }
    }

    /// Tells the reaction of kept events that were run.
    pub(in crate::messaging) fn tell_committed(&self, ran: Vec<Ran<R::Fact>>) {
        if !ran.is_empty() {
            let (messages, outcomes): (Vec<_>, Vec<_>) = ran.into_iter().unzip();
            self.reaction.committed(&messages.iter().collect::<Vec<_>>(), &outcomes);
        }
    }

    /// The culprit stands alone: its failure counts as an attempt, and it is retried or rejected.
    async fn blame(&self, item: &Item<R::Fact>, failure: Failure) -> sqlx::Result<(Tag, Settle)> {
        let Blame { reason, last_word, error } = failure.blame();
        let mut tx = self.kernel.db.begin().await?;
        let plan = match self.plan(&mut tx, std::slice::from_ref(item), Meeting::Possible).await {
            // Another instance has just written it down, which is to be seen from here on.
            Err(error) if inbox::lost_race(&error) => {
                tx = self.kernel.db.begin().await?;
                self.plan(&mut tx, std::slice::from_ref(item), Meeting::Possible).await?
            }
            planned => planned?,
        };
        let mut run = plan.run;
        run.extend(plan.stale.into_iter().map(|(index, met)| (index, Some(met))));
        let settled = match run.first() {
            // Another instance has handled it since. The plan may have written something all the same: a later delivery of
            // an event whose call is under way there, or the verdict on one that has just become too old.
            None => plan.settled.first().copied().unwrap_or((item.tag, Settle::Ack)),
            Some((_, met)) => {
                let attempts = met.as_ref().map_or(0, |met| met.attempts) + 1;
                let outcome = match self.kernel.tuning.retry.delay(attempts.unsigned_abs()) {
                    None => Outcome::Reject { reason: last_word, error },
                    Some(_) => Outcome::retry_for(reason, error),
                };
                self.keep_books(&mut tx, std::slice::from_ref(item), &run, &[outcome]).await?.0[0]
            }
        };
        tx.commit().await?;
        Ok(settled)
    }

    /// Runs a message that has been left unfinished before, recording the run before it starts.
    async fn run_alone(&self, item: &Item<R::Fact>, settled: &mut Vec<(Tag, Settle)>) -> sqlx::Result<()> {
        let mut tx = self.kernel.db.begin().await?;
        let (id, now) = (item.message.event.event_id, tx.now());
        // A row to lock: where there is none, another instance may be inserting it with a copy of its own.
        inbox::insert_begun(&mut tx, R::NAME, &Arrival::from(&item.message)).await?;
        let met = inbox::meet(&mut tx, R::NAME, &[id], now).await?.pop().map(|(_, met)| item.meets(met));
        if inbox::decide(met.as_ref(), &item.message.body_hash) == Action::Run {
            let unfinished = met.as_ref().map_or(0, |met| met.unfinished_runs);
            if unfinished >= UNFINISHED_RUNS_MAX {
                let error = format!("{unfinished} runs of it began and none finished");
                let outcome = Outcome::Reject { reason: "process-killer", error };
                let run = [(0, met)];
                settled.extend(self.keep_books(&mut tx, std::slice::from_ref(item), &run, &[outcome]).await?.0);
                return tx.commit().await;
            }
            inbox::record_run(&mut tx, R::NAME, id).await?;
        }
        tx.commit().await?;
        let ended = self.run_halving(std::slice::from_ref(item), Waking::Later, settled).await;
        if ended.is_err() {
            // The database's trouble is not the message's. Best effort: it may be too far away to say so.
            let mut tx = self.kernel.db.begin().await?;
            inbox::forget_run(&mut tx, R::NAME, id).await?;
            tx.commit().await?;
        }
        ended
    }
}

/// What a handler panicked with, to be kept and shown: without the secrets that somebody may have formatted into it.
pub(in crate::messaging) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.map_or_else(|| "no message".to_owned(), secrets::strike_from)
}
