//! Named points at which the process can be told to die, so that tests and demos can see what a crash leaves.
//!
//! Disarmed, a point costs one atomic load. Armed, the next thread to reach it aborts the process: no destructor
//! runs, no buffer is flushed, as with a kill -9 at that very line.

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
}
