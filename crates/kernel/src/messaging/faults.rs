//! Named points at which the process can be told to die, and consumers that can be told to fail, to dawdle, or to get
//! their messages more than once, so that tests and demos can see what that leaves.
//!
//! Disarmed, a fault costs one atomic load. At an armed point the next thread aborts the process: no destructor
//! runs, no buffer is flushed, as with a kill -9 at that very line.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Every point there is, with the moment it stands for.
pub const POINTS: &[(&str, &str)] = &[
    ("orders.before_commit", "an order is written, not committed, not answered"),
    ("orders.after_commit", "an order is committed, not answered"),
    ("relay.before_mark", "events are published, not marked as published"),
    ("consumer.before_commit", "effects are written, not committed"),
    ("consumer.after_commit", "effects are committed, the messages not acknowledged"),
    ("consumer.before_reject", "the verdict is in the inbox, the message not yet rejected"),
    ("consumer.retry_written", "a retry is committed, its message not acknowledged"),
    ("outside.before_call", "a call is claimed, not made"),
    ("outside.before_commit", "a call is answered, what came of it not written down"),
    ("office.before_commit", "a dead letter is written, not committed"),
    ("office.after_commit", "a dead letter is filed, its message not acknowledged"),
];

/// What is armed just now.
#[derive(Debug, Clone, Default, serde::Serialize, utoipa::ToSchema)]
#[schema(as = ArmedFaults)]
pub struct Armed {
    /// Where the process will die.
    pub crash: Option<ArmedCrash>,
    /// How many more events of a consumer will fail.
    pub fail: BTreeMap<String, usize>,
    /// How long a consumer takes over each event, in milliseconds.
    pub slow_ms: BTreeMap<String, u64>,
    /// Which deliveries to a consumer will be repeated.
    pub duplicate: BTreeMap<String, Repeats>,
}

#[derive(Debug, Clone, serde::Serialize, utoipa::ToSchema)]
pub struct ArmedCrash {
    pub point: String,
    /// The consumer it is meant for; none means any.
    pub consumer: Option<String>,
}

#[derive(Debug, Clone, Copy, serde::Serialize, utoipa::ToSchema)]
pub struct Repeats {
    /// How many more deliveries come again.
    pub deliveries: usize,
    /// How often each comes again.
    pub copies: u32,
}

#[derive(Clone, Default)]
pub struct Faults {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Is anything armed? Spares the others a lock.
    any: AtomicBool,
    armed: Mutex<Armed>,
}

impl Faults {
    /// Arms `point`; `false` if there is no such point.
    pub fn arm_crash(&self, point: &str, consumer: Option<&str>) -> bool {
        let known = POINTS.iter().any(|(name, _)| *name == point);
        if known {
            let crash = ArmedCrash { point: point.to_owned(), consumer: consumer.map(str::to_owned) };
            self.arm(|armed| armed.crash = Some(crash));
        }
        known
    }

    /// Dies here if this point is armed for `who`.
    pub fn reach(&self, point: &str, who: &str) {
        let Some(armed) = self.look() else { return };
        if let Some(crash) = &armed.crash
            && crash.point == point
            && crash.consumer.as_deref().is_none_or(|consumer| consumer == who)
        {
            tracing::error!(point, who, "crash point reached: aborting");
            std::process::abort();
        }
    }

    /// Lets the next `times` events of `consumer` fail for now, to be retried.
    pub fn arm_failures(&self, consumer: &str, times: usize) {
        self.arm(|armed| armed.fail.insert(consumer.to_owned(), times));
    }

    /// How many events of a batch of `count` are to fail, counted off what was asked for.
    pub fn failures(&self, consumer: &str, count: usize) -> usize {
        let Some(mut armed) = self.look() else { return 0 };
        let Some(left) = armed.fail.get_mut(consumer) else { return 0 };
        let now = count.min(*left);
        *left -= now;
        now
    }

    /// Lets `consumer` take this long over each event; nothing at all ends it.
    pub fn arm_delay(&self, consumer: &str, each: Duration) {
        let millis = u64::try_from(each.as_millis()).unwrap_or(u64::MAX);
        self.arm(|armed| armed.slow_ms.insert(consumer.to_owned(), millis));
    }

    /// How long to take over each event, if that is to be slow.
    pub fn delay(&self, consumer: &str) -> Option<Duration> {
        let millis = self.look()?.slow_ms.get(consumer).copied()?;
        (millis > 0).then(|| Duration::from_millis(millis))
    }

    /// Lets each of the next deliveries to `consumer` come again.
    pub fn arm_repeats(&self, consumer: &str, repeats: Repeats) {
        self.arm(|armed| armed.duplicate.insert(consumer.to_owned(), repeats));
    }

    /// How often this delivery is to come again, counted off what was asked for.
    pub fn repeats(&self, consumer: &str) -> u32 {
        let Some(mut armed) = self.look() else { return 0 };
        let Some(repeats) = armed.duplicate.get_mut(consumer).filter(|repeats| repeats.deliveries > 0) else {
            return 0;
        };
        repeats.deliveries -= 1;
        repeats.copies
    }

    /// What is armed, without what has run its course.
    pub fn armed(&self) -> Armed {
        let Some(mut armed) = self.look() else { return Armed::default() };
        armed.fail.retain(|_, left| *left > 0);
        armed.slow_ms.retain(|_, millis| *millis > 0);
        armed.duplicate.retain(|_, repeats| repeats.deliveries > 0);
        armed.clone()
    }

    /// Takes everything back.
    pub fn disarm(&self) {
        self.inner.any.store(false, Ordering::Release);
        *self.lock() = Armed::default();
    }

    fn arm<T>(&self, change: impl FnOnce(&mut Armed) -> T) {
        change(&mut self.lock());
        self.inner.any.store(true, Ordering::Release);
    }

    fn look(&self) -> Option<MutexGuard<'_, Armed>> {
        self.inner.any.load(Ordering::Acquire).then(|| self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Armed> {
        self.inner.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
