//! Named points at which the process can be told to die, and handlers that can be told to fail, so that tests and
//! demos can see what that leaves.
//!
//! Disarmed, a fault costs one atomic load. At an armed point the next thread aborts the process: no destructor
//! runs, no buffer is flushed, as with a kill -9 at that very line.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Every point there is, with the moment it stands for.
pub const POINTS: &[(&str, &str)] = &[
    ("orders.before_commit", "an order is written, not committed, not answered"),
    ("orders.after_commit", "an order is committed, not answered"),
    ("relay.before_mark", "events are published, not marked as published"),
    ("consumer.before_commit", "effects are written, not committed"),
    ("consumer.after_commit", "effects are committed, the messages not acknowledged"),
    ("consumer.before_reject", "the verdict is in the inbox, the message not yet rejected"),
    ("consumer.retry_written", "a retry is committed, its message not acknowledged"),
    ("office.before_commit", "a dead letter is written, not committed"),
    ("office.after_commit", "a dead letter is filed, its message not acknowledged"),
];

#[derive(Clone, Default)]
pub struct Faults {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    armed: AtomicBool,
    /// The point, and the consumer it is meant for; no consumer means any.
    point: Mutex<Option<(String, Option<String>)>>,
    /// How many more events of a consumer are to fail.
    failures: Mutex<HashMap<String, usize>>,
}

impl Faults {
    /// Arms `point`; `false` if there is no such point.
    pub fn arm_crash(&self, point: &str, consumer: Option<&str>) -> bool {
        let known = POINTS.iter().any(|(name, _)| *name == point);
        if known {
            *self.inner.point.lock().unwrap_or_else(PoisonError::into_inner) =
                Some((point.to_owned(), consumer.map(str::to_owned)));
            self.inner.armed.store(true, Ordering::Release);
        }
        known
    }

    /// Dies here if this point is armed for `who`.
    pub fn reach(&self, point: &str, who: &str) {
        if !self.inner.armed.load(Ordering::Acquire) {
            return;
        }
        let armed = self.inner.point.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((armed_point, consumer)) = &*armed
            && armed_point == point
            && consumer.as_deref().is_none_or(|consumer| consumer == who)
        {
            tracing::error!(point, who, "crash point reached: aborting");
            std::process::abort();
        }
    }

    /// Lets the next `times` events of `consumer` fail for now, to be retried.
    pub fn arm_failures(&self, consumer: &str, times: usize) {
        self.inner.failures.lock().unwrap_or_else(PoisonError::into_inner).insert(consumer.to_owned(), times);
        self.inner.armed.store(true, Ordering::Release);
    }

    /// How many events of a batch of `count` are to fail, counted off what was asked for.
    pub fn failures(&self, consumer: &str, count: usize) -> usize {
        if !self.inner.armed.load(Ordering::Acquire) {
            return 0;
        }
        let mut failures = self.inner.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(left) = failures.get_mut(consumer) else { return 0 };
        let now = count.min(*left);
        *left -= now;
        now
    }
}
