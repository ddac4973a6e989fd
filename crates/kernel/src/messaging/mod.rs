//! The messaging kernel: events from one transaction to another, each effect exactly once.
//!
//! It knows no order and no HTTP. A module implements [`Reaction`]; the kernel does the rest:
//!
//! - [`outbox`] rows are written in the transaction that makes a fact true, and [`relay`] publishes them;
//! - [`transport`] carries them at least once;
//! - [`consumer`] hands batches to a reaction, with the [`inbox`] row and the effect in one commit, then acks;
//! - an effect outside the database is claimed, done and then written down, each for itself ([`outside`]);
//! - an event that comes before its predecessor waits in the inbox ([`waiting`]);
//! - what fails for now is retried through the outbox ([`retry`]); what fails for good is rejected to the
//!   dead-letter queue, and [`office`] files it in SQL ([`dead_letters`]);
//! - what is old is moved out of the way ([`retention`]);
//! - what an operator sends again goes out at a rate ([`jobs`]), and what operators did is kept ([`actions`]).
//!
//! Promises, and the tests in `tests/it` that hold them:
//!
//! | promise | test |
//! |---|---|
//! | a fact is published if and only if its transaction commits | `outbox::an_event_exists_only_if_its_transaction_commits` |
//! | a late commit of an older row is not skipped | `outbox::a_row_committed_late_is_not_skipped` |
//! | an event delivered again has no second effect | `consumers::a_duplicate_has_no_second_effect_and_is_counted` |
//! | one bad event does not hold up its batch | `consumers::a_batch_that_fails_as_a_whole_is_halved_down_to_the_culprit` |
//! | a crash at any named point loses and doubles nothing | `crashes::*` |
//! | a queue that was deleted costs no event | `rabbit::*::a_deleted_queue_is_declared_again_and_nothing_is_lost` |
//! | an event that waits runs with its predecessor, whichever instance has it | `waiting::*` |
//! | what came of an outside effect is written by whoever holds its claim, and by nobody else | `outside::*` |
//! | poison is filed with its bytes and reason | `consumers::poison_is_filed_verbatim_with_its_reason` |

pub mod actions;
pub mod brim;
pub mod consumer;
pub mod dead_letters;
pub mod event;
pub mod faults;
pub mod health;
pub mod inbox;
pub mod instances;
pub mod jobs;
pub mod office;
pub mod outbox;
pub mod outside;
pub mod pause;
pub mod relay;
pub mod resync;
pub mod retention;
pub mod retry;
mod tally;
pub mod transport;
pub mod waiting;

use std::future::Future;
use std::time::Duration;

use serde_json::value::RawValue;

pub use event::{Event, Message, Origin};
use faults::Faults;
use health::Health;
use outside::Outside;
use pause::Pauses;
use retention::Keep;
use retry::Backoff;
use transport::Transport;

use crate::db::{Db, Tx};

/// A module's side of the kernel: what it takes from its queue and what it does about it.
pub trait Reaction: Send + Sync + 'static {
    /// The consumer's name, `inventory`; its queue is called after it.
    const NAME: &'static str;
    /// The routing keys its queue is bound to.
    const KEYS: &'static [&'static str];
    /// Those of its keys that other events may wait for; see [`Outcome::Wait`].
    const AWAITED: &'static [&'static str] = &[];
    /// What payloads decode to.
    type Fact: Send + Sync;

    /// Reads a payload. Pure: the dead-letter office runs it again to say what was wrong.
    fn decode(key: &str, payload: &RawValue) -> Result<Self::Fact, serde_json::Error>;

    /// Handles a batch within `tx`: one outcome per event, in order. Decide in memory, then write in a few
    /// statements. An `Err` is the database's and rolls the whole batch back; an outcome rolls nothing back, so
    /// an event that is retried or rejected must have written nothing.
    fn react(
        &self,
        tx: &mut Tx,
        batch: &[&Message<Self::Fact>],
    ) -> impl Future<Output = sqlx::Result<Vec<Outcome>>> + Send;

    /// How to make calls, if its effects happen outside the database: then [`Reaction::react`] only prepares them and
    /// answers [`Outcome::Call`].
    fn outside(&self) -> Option<&dyn Outside<Self::Fact>> {
        None
    }

    /// Told after the commit: the place to log and count, never to write. Of an event that is called for it is told
    /// twice: that it is, and what came of it.
    fn committed(&self, _batch: &[&Message<Self::Fact>], _outcomes: &[Outcome]) {}
}

/// What became of one event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// To be done outside, by a call that is made once this transaction is committed; see [`Reaction::outside`].
    Call,
    /// Done, and there was nothing to do: what it would have changed has moved on. The inbox keeps why.
    Moot {
        why: String,
    },
    /// Came too early: kept until the event `key` about the same aggregate has been handled, and run in that very
    /// transaction. Before it decides so, a reaction must lock a row that the handling of `key` locks too, writing it
    /// if it is not there. `key` must be one of [`Reaction::AWAITED`].
    Wait {
        key: &'static str,
    },
    /// Failed for now, for a stable reason: run again later, and no sooner than `after`.
    Retry {
        reason: &'static str,
        error: String,
        after: Duration,
    },
    /// Failed for good: to the dead letters, under a stable reason code.
    Reject {
        reason: &'static str,
        error: String,
    },
}

impl Outcome {
    pub fn moot(why: impl Into<String>) -> Self {
        Self::Moot { why: why.into() }
    }

    pub fn wait_for(key: &'static str) -> Self {
        Self::Wait { key }
    }

    pub fn retry(error: impl Into<String>) -> Self {
        Self::retry_for("failed-for-now", error)
    }

    /// The same, for a reason that metrics tell from others.
    pub fn retry_for(reason: &'static str, error: impl Into<String>) -> Self {
        Self::Retry { reason, error: error.into(), after: Duration::ZERO }
    }

    /// A rule of the domain forbids it, now and for ever.
    pub fn reject(error: impl Into<String>) -> Self {
        Self::Reject { reason: "business-rule", error: error.into() }
    }
}

/// What every loop of the kernel shares.
#[derive(Clone)]
pub struct Kernel {
    pub db: Db,
    pub transport: Transport,
    pub pauses: Pauses,
    pub health: Health,
    pub faults: Faults,
    pub tuning: Tuning,
}

/// The kernel's limits and intervals; each has its setting in `config.rs`.
#[derive(Debug, Clone)]
pub struct Tuning {
    pub queue_prefix: String,
    pub outbox_batch: u32,
    pub outbox_poll: Duration,
    pub outbox_backoff: Backoff,
    /// How long a relay may take to publish what it claimed before another takes it over.
    pub outbox_lease: Duration,
    pub batch: usize,
    pub poll: Duration,
    pub retry: Backoff,
    /// Calls to the outside that a consumer has under way at once, how long each may take, and how long its claim holds
    /// unless renewed. The sweep's claim of a deferred event holds as long.
    pub calls_max: usize,
    pub call_timeout: Duration,
    pub call_lease: Duration,
    /// How long an event may wait for its predecessor.
    pub wait_deadline: Duration,
    pub event_bytes_max: usize,
    pub keep: Keep,
}

impl Tuning {
    pub fn queue_name(&self, consumer: &str) -> String {
        format!("{}.{consumer}", self.queue_prefix)
    }
}

/// Batch pacing: after a batch of more than a few, the next one starts no sooner than some milliseconds after this one did. A
/// busy loop does the same work in fewer, larger transactions; an idle one is never delayed.
pub struct Pacing {
    started: tokio::time::Instant,
}

impl Pacing {
    const BUSY: usize = 16;
    const INTERVAL: Duration = Duration::from_millis(8);

    /// A batch starts now.
    pub fn start() -> Self {
        Self { started: tokio::time::Instant::now() }
    }

    /// Waits until the next batch may start after this one of `size`.
    pub async fn next(self, size: usize) {
        if size >= Self::BUSY {
            tokio::time::sleep_until(self.started + Self::INTERVAL).await;
        }
    }
}

/// A pause that grows while something is away, so that no loop ever spins on an error.
#[derive(Default)]
pub struct Patience(u32);

impl Patience {
    const BASE: Duration = Duration::from_millis(100);
    const CAP: Duration = Duration::from_secs(2);

    pub fn renew(&mut self) {
        self.0 = 0;
    }

    pub fn next_pause(&mut self) -> Duration {
        let pause = Self::BASE.saturating_mul(2u32.saturating_pow(self.0.min(16))).min(Self::CAP);
        self.0 += 1;
        pause
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn only_a_busy_loop_is_delayed() {
        for (size, is_delayed) in [(0, false), (Pacing::BUSY - 1, false), (Pacing::BUSY, true)] {
            assert_eq!(Pacing::start().next(size).now_or_never().is_none(), is_delayed, "{size}");
        }
    }
}
