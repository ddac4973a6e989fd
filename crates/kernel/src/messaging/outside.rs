//! Outside effects: a webhook, an e-mail, whatever cannot be part of a commit.
//!
//! A reaction that answers [`Outcome::Call`] has an event claimed: its inbox row is `processing` under a lock token, a
//! version and a lease, in the transaction that also wrote what the reaction prepared. Then the call is made, with no
//! transaction open, the lease renewed meanwhile. What came of it is written, with the module's own rows, only if the
//! row is still under that claim; then the message is acknowledged. No more events are claimed than are called for at
//! once, so that a claim always means a call under way.
//!
//! A claim whose lease ran out may be taken over: whoever held it died, or was stopped for too long. Nobody can say
//! whether its call went through, so the answer of that attempt is [`Answer::Unknown`], as it is of a call that was
//! cut short. What is written late by one who was only stopped is turned away and counted.
//!
//! Exactly once ends here: the receiver must tell a repeat by the event's id, which every call carries. Whether an
//! unknown outcome is worth that repeat is the module's to say.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::consumer::{Books, Consumer, Failure, Item, Plan, Settle, UNFINISHED_RUNS_MAX, panic_text};
use super::event::Message;
use super::inbox::{self, Claim, Met};
use super::transport::Tag;
use super::waiting::Waking;
use super::{Outcome, Patience, Reaction};
use crate::db::{Trouble, Tx};

/// Why an event whose call did not go through is tried again.
const CALL_FAILED: &str = "call-failed";
/// The reason code of an event whose call ended nobody knows how, and is not to be made again.
pub const OUTCOME_UNKNOWN: &str = "outcome-unknown";
/// The reason code of an event whose receiver will never take it.
pub const REFUSED: &str = "refused";

/// How long a receiver may put off the next attempt. The inbox must remember an event for longer than all of them.
pub const AFTER_MAX: Duration = Duration::from_secs(3600);

/// A module's way to the outside.
pub trait Outside<F>: Send + Sync {
    /// Makes the call for one event, giving the receiver the event's id to tell repeats by. Cut off after
    /// `STOCKADE_HANDLER_TIMEOUT`; that, and a panic, are [`Answer::Unknown`].
    fn call<'a>(&'a self, message: &'a Message<F>) -> BoxFuture<'a, Answer>;

    /// Writes down what came of calls, in the transaction that settles their events.
    fn conclude<'a>(&'a self, tx: &'a mut Tx, calls: &'a [Concluded<'a, F>]) -> BoxFuture<'a, sqlx::Result<()>>;

    /// Is a call to be made again if nobody knows whether it went through?
    fn repeats_unknown(&self) -> bool;
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It went through.
    Done,
    /// It did not, and may the next time, which is no sooner than `after`.
    Failed { error: String, after: Duration },
    /// It did not, and never will.
    Refused { error: String },
    /// It may have gone through, and it may not.
    Unknown { error: String },
}

impl Answer {
    pub fn failed(error: impl Into<String>) -> Self {
        Self::Failed { error: error.into(), after: Duration::ZERO }
    }

    pub fn refused(error: impl Into<String>) -> Self {
        Self::Refused { error: error.into() }
    }

    pub fn unknown(error: impl Into<String>) -> Self {
        Self::Unknown { error: error.into() }
    }

    /// What it means for the event.
    fn outcome(&self, repeats_unknown: bool) -> Outcome {
        match self.clone() {
            Self::Done => Outcome::Done,
            Self::Failed { error, after } => Outcome::Retry { reason: CALL_FAILED, error, after: after.min(AFTER_MAX) },
            Self::Refused { error } => Outcome::Reject { reason: REFUSED, error },
            Self::Unknown { error } if repeats_unknown => Outcome::retry_for(OUTCOME_UNKNOWN, error),
            Self::Unknown { error } => Outcome::Reject { reason: OUTCOME_UNKNOWN, error },
        }
    }
}

/// A call that ended.
#[derive(Debug)]
pub struct Concluded<'a, F> {
    pub message: &'a Message<F>,
    pub answer: &'a Answer,
    /// Will it be made again?
    pub again: bool,
}

/// A call that ended, and the claim it was made under.
struct Called<'a, F> {
    item: &'a Item<F>,
    claim: Claim,
    answer: Answer,
}

impl<R: Reaction> Consumer<R> {
    /// How many deliveries to take at once.
    pub(super) fn batch_max(&self) -> usize {
        let tuning = &self.kernel.tuning;
        match self.reaction.outside() {
            Some(_) => tuning.batch.min(tuning.calls_max),
            None => tuning.batch,
        }
    }

    /// Makes the calls that were claimed, all at once, and writes down what came of each as they end; says how their
    /// deliveries are to be settled.
    pub(super) async fn call_all(&self, items: &[Item<R::Fact>], claimed: &[(usize, Claim)]) -> Vec<(Tag, Settle)> {
        let Some(outside) = self.reaction.outside().filter(|_| !claimed.is_empty()) else { return Vec::new() };
        self.kernel.faults.reach("outside.before_call", R::NAME);
        let calls: FuturesUnordered<_> = claimed
            .iter()
            .map(|(index, claim)| async {
                let item = &items[*index];
                Called { item, claim: *claim, answer: self.call(outside, &item.message).await }
            })
            .collect();
        let mut settled = Vec::with_capacity(claimed.len());
        let all = async {
            let mut ended = calls.ready_chunks(claimed.len());
            while let Some(called) = ended.next().await {
                settled.extend(self.conclude_all(outside, &called).await);
            }
        };
        tokio::select! {
            () = all => {}
            () = self.keep_claims(claimed) => unreachable!("keeping claims never ends"),
        }
        settled
    }

    async fn call(&self, outside: &dyn Outside<R::Fact>, message: &Message<R::Fact>) -> Answer {
        let within = self.kernel.tuning.call_timeout;
        let call = AssertUnwindSafe(async { outside.call(message).await }).catch_unwind();
        match tokio::time::timeout(within, call).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(panic)) => Answer::unknown(format!("the call panicked: {}", panic_text(panic.as_ref()))),
            Err(_) => Answer::unknown(format!("no answer within {}", humantime::format_duration(within))),
        }
    }

    /// Renews the leases of what is being called for, until cancelled.
    async fn keep_claims(&self, claimed: &[(usize, Claim)]) {
        let claims: Vec<Claim> = claimed.iter().map(|(_, claim)| *claim).collect();
        let lease = self.kernel.tuning.call_lease;
        loop {
            tokio::time::sleep(lease / 3).await;
            let renewed = async {
                let mut tx = self.kernel.db.begin_relaxed().await?;
                let now = tx.now();
                inbox::renew_many(&mut tx, R::NAME, &claims, lease, now).await?;
                tx.commit().await
            };
            if let Err(error) = renewed.await {
                tracing::warn!(consumer = R::NAME, %error, "cannot renew the leases of calls under way");
            }
        }
    }

    /// Writes down what came of calls. What is known now would be unknown if it were not written: a database that is
    /// away is waited for, and one call that cannot be concluded does not hold up the others.
    async fn conclude_all(&self, outside: &dyn Outside<R::Fact>, called: &[Called<'_, R::Fact>]) -> Vec<(Tag, Settle)> {
        let mut settled = Vec::with_capacity(called.len());
        let mut patience = Patience::default();
        let mut todo: Vec<(&[Called<'_, R::Fact>], Option<String>)> = vec![(called, None)];
        while let Some((part, spoilt)) = todo.pop() {
            match self.conclude(outside, part, spoilt.as_deref()).await {
                Ok(done) => settled.extend(done),
                Err(Failure::Database(error)) if Trouble::of(&error).is_passing() => {
                    let pause = patience.next_pause();
                    tracing::warn!(consumer = R::NAME, %error, ?pause, "cannot write down what came of calls, and waits");
                    self.pulse.troubled(error.to_string(), self.kernel.db.clock().now());
                    todo.push((part, spoilt));
                    tokio::time::sleep(pause).await;
                }
                Err(failure) if part.len() == 1 => todo.push((part, Some(failure.blame().error))),
                Err(_) => {
                    let (left, right) = part.split_at(part.len() / 2);
                    todo.extend([(right, None), (left, None)]);
                }
            }
        }
        settled
    }

    /// One transaction: whatever is still under its claim gets its outcome, with the module's rows unless those are
    /// what `spoilt` it.
    async fn conclude(
        &self,
        outside: &dyn Outside<R::Fact>,
        called: &[Called<'_, R::Fact>],
        spoilt: Option<&str>,
    ) -> Result<Vec<(Tag, Settle)>, Failure> {
        let claims: Vec<Claim> = called.iter().map(|called| called.claim).collect();
        let mut tx = self.kernel.db.begin().await?;
        let held = inbox::hold_many(&mut tx, R::NAME, &claims).await?;
        let (mut books, mut concluded, mut outcomes) = (Books::default(), Vec::new(), Vec::new());
        let (mut settled, mut fenced) = (Vec::new(), Vec::new());
        for called in called {
            let message = &called.item.message;
            let event_id = message.event.event_id;
            let Some((_, open)) = held.iter().find(|(id, _)| *id == event_id) else {
                fenced.push(event_id);
                settled.push((called.item.tag, Settle::Ack));
                continue;
            };
            let outcome = match spoilt {
                None => called.answer.outcome(outside.repeats_unknown()),
                Some(error) => Outcome::Reject {
                    reason: "not-concluded",
                    error: format!("the call ended ({:?}), and this could not be written down: {error}", called.answer),
                },
            };
            if *open {
                let again = self.is_worth_another(&outcome, called.claim.attempt);
                settled.push((called.item.tag, self.book(message, called.claim.attempt - 1, &outcome, &mut books)));
                concluded.push(Concluded { message, answer: &called.answer, again });
                outcomes.push(outcome);
            } else {
                // Written by a commit whose confirmation was lost: only the delivery is left to settle.
                let settle = self.book(message, called.claim.attempt - 1, &outcome, &mut Books::default());
                settled.push((called.item.tag, settle));
            }
        }
        if spoilt.is_none() && !concluded.is_empty() {
            tell(outside, &mut tx, &concluded).await?;
        }
        self.write_books(&mut tx, &books).await?;
        let messages: Vec<&Message<R::Fact>> = concluded.iter().map(|concluded| concluded.message).collect();
        self.wake(&mut tx, messages.iter().copied().zip(&outcomes), Waking::Later).await?;
        if !fenced.is_empty() {
            inbox::count_fenced(&mut tx, R::NAME, &fenced).await?;
            let metrics = tx.metrics().clone();
            tx.after_commit(move || {
                metrics.fenced_writes.inc_by(fenced.len() as u64);
                for event_id in fenced {
                    tracing::warn!(
                        consumer = R::NAME, event.id = %event_id,
                        "FENCED {} {event_id}: taken over meanwhile, so what came of this call is not written", R::NAME
                    );
                }
            });
        }
        self.kernel.faults.reach("outside.before_commit", R::NAME);
        tx.commit().await?;
        self.reaction.committed(&messages, &outcomes);
        Ok(settled)
    }

    /// Takes over what is under a claim whose lease ran out: the call made under it has an unknown outcome. What is not
    /// to be called for again is settled; the rest runs.
    pub(super) async fn take_over(&self, tx: &mut Tx, items: &[Item<R::Fact>], plan: &mut Plan) -> Result<(), Failure> {
        let Some(outside) = self.reaction.outside() else {
            // It has become an inside effect since.
            plan.run.extend(plan.stale.drain(..).map(|(index, met)| (index, Some(met))));
            return Ok(());
        };
        let answer = Answer::unknown("whoever made the call was gone before its outcome was written down");
        let (mut concluded, mut given_up, mut verdicts) = (Vec::new(), Vec::new(), Vec::new());
        for (index, met) in std::mem::take(&mut plan.stale) {
            let message = &items[index].message;
            let outcome = if met.unfinished_runs >= UNFINISHED_RUNS_MAX {
                let error = format!("{} runs of it began and none finished", met.unfinished_runs);
                Outcome::Reject { reason: "process-killer", error }
            } else {
                answer.outcome(outside.repeats_unknown())
            };
            let again = self.is_worth_another(&outcome, met.attempts);
            let (event_id, version) = (message.event.event_id, met.version);
            let line = format!("TAKEOVER {} {}: {outcome:?}", R::NAME, message.key);
            tx.after_commit(move || {
                tracing::warn!(consumer = R::NAME, event.id = %event_id, version, again, "{line}");
            });
            concluded.push(Concluded { message, answer: &answer, again });
            if again {
                plan.run.push((index, Some(met)));
            } else {
                // The attempt that is given up on is counted already.
                given_up.push((index, Some(Met { attempts: met.attempts - 1, ..met })));
                verdicts.push(outcome);
            }
        }
        tell(outside, tx, &concluded).await?;
        plan.settled.extend(self.keep_books(tx, items, &given_up, &verdicts).await?.0);
        Ok(())
    }

    /// Is an event with this outcome of its `attempt`th attempt run again?
    fn is_worth_another(&self, outcome: &Outcome, attempt: i32) -> bool {
        let attempts_left = self.kernel.tuning.retry.delay(attempt.unsigned_abs()).is_some();
        attempts_left && matches!(outcome, Outcome::Retry { .. })
    }
}

async fn tell<F>(outside: &dyn Outside<F>, tx: &mut Tx, calls: &[Concluded<'_, F>]) -> Result<(), Failure> {
    match AssertUnwindSafe(async { outside.conclude(tx, calls).await }).catch_unwind().await {
        Ok(written) => Ok(written?),
        Err(panic) => Err(Failure::Panic(panic_text(panic.as_ref()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_outcome_is_repeated_only_if_the_module_says_so() {
        let unknown = Answer::unknown("no answer");
        assert!(matches!(unknown.outcome(true), Outcome::Retry { .. }));
        assert!(matches!(unknown.outcome(false), Outcome::Reject { reason: OUTCOME_UNKNOWN, .. }));
        assert!(matches!(Answer::refused("no").outcome(true), Outcome::Reject { reason: REFUSED, .. }));
        assert_eq!(Answer::Done.outcome(false), Outcome::Done);
    }

    #[test]
    fn a_receiver_may_put_off_the_next_attempt_for_so_long_only() {
        let failed = |after| Answer::Failed { error: "busy".to_owned(), after }.outcome(false);
        let retry = |after| Outcome::Retry { reason: CALL_FAILED, error: "busy".to_owned(), after };
        assert_eq!(failed(Duration::from_secs(60)), retry(Duration::from_secs(60)));
        assert_eq!(failed(Duration::from_secs(86_400)), retry(AFTER_MAX));
    }
}
