//! What is counted and timed while the work is done, one set per open database.
//!
//! Counters and timings are kept here; whatever can be asked of the tables (how many wait, how old the oldest is) is
//! asked at each scrape instead, by the queries that the API answers with, so that the two cannot disagree. A
//! transition is counted once, after its commit: see [`crate::db::Tx::after_commit`].
//!
//! Cheap on purpose: hot paths count per batch, and labels are names fixed in the code, never ids.

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

/// Names and values known when the code is written.
pub type Labels<const N: usize> = [(&'static str, &'static str); N];

/// From a fast commit to a request that is about to time out.
const SECONDS: [f64; 14] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0];
/// From an order answered at once to one that waited for an operator.
const END_TO_END_SECONDS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 600.0, 3600.0];

/// Why an event is retried: the `reason` of `stockade_consumer_retries_total`. A module may add its own.
const RETRY_REASONS: [&str; 7] =
    ["failed-for-now", "call-failed", "outcome-unknown", "handler-panic", "database", "woken-failed", "raced"];
/// Why a delivery is rejected: the `reason` of `stockade_consumer_dlq_total`. `broker-limit` is missing because the
/// broker rejects those, not a consumer.
const DEAD_LETTER_REASONS: [&str; 18] = [
    "too-large",
    "not-utf8",
    "too-deep",
    "not-json",
    "no-id",
    "schema",
    "id-mismatch",
    "unknown-type",
    "id-reused",
    "business-rule",
    "predecessor-missing",
    "retries-exhausted",
    "handler-panic",
    "process-killer",
    "refused",
    "outcome-unknown",
    "not-concluded",
    "too-old",
];

pub struct Metrics {
    registry: Mutex<Registry>,
    pub events: Family<[(&'static str, String); 1], Counter>,
    pub orders_end_to_end: Histogram,
    pub outbox_publish: Histogram,
    pub outbox_publish_failures: Family<Labels<1>, Counter>,
    pub consumer_processed: Family<Labels<2>, Counter>,
    pub consumer_dedup: Family<Labels<1>, Counter>,
    pub consumer_retries: Family<[(&'static str, Cow<'static, str>); 2], Counter>,
    pub consumer_dlq: Family<[(&'static str, Cow<'static, str>); 2], Counter>,
    pub consumer_handle: Family<Labels<1>, Histogram, fn() -> Histogram>,
    pub db_busy: Counter,
    pub db_serialization_retries: Counter,
    pub db_pool_wait: Histogram,
    pub fenced_writes: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            registry: Mutex::default(),
            events: Family::default(),
            orders_end_to_end: Histogram::new(END_TO_END_SECONDS),
            outbox_publish: seconds(),
            outbox_publish_failures: Family::default(),
            consumer_processed: Family::default(),
            consumer_dedup: Family::default(),
            consumer_retries: Family::default(),
            consumer_dlq: Family::default(),
            consumer_handle: Family::new_with_constructor(seconds),
            db_busy: Counter::default(),
            db_serialization_retries: Counter::default(),
            db_pool_wait: seconds(),
            fenced_writes: Counter::default(),
        };
        metrics.register_all();
        // A rate that begins at nothing would miss the first failure; these begin at 0.
        for reason in ["refused", "unanswered"] {
            drop(metrics.outbox_publish_failures.get_or_create(&[("reason", reason)]));
        }
        metrics
    }
}

/// A histogram for what takes from a fraction of a millisecond to half a minute.
pub fn seconds() -> Histogram {
    Histogram::new(SECONDS)
}

impl Metrics {
    /// Adds a metric to what is exported. A counter's name is given without its `_total`.
    pub fn register(&self, name: &str, help: &str, metric: impl Metric) {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner).register(name, help, metric);
    }

    /// Creates the counters of a consumer at 0: `rate()` cannot see a counter's first increment if the counter appears
    /// with it.
    pub fn create_consumer_counters(&self, consumer: &'static str) {
        drop(self.consumer_dedup.get_or_create(&[("consumer", consumer)]));
        for result in ["done", "retried", "rejected", "waiting"] {
            drop(self.consumer_processed.get_or_create(&[("consumer", consumer), ("result", result)]));
        }
        for reason in RETRY_REASONS {
            let labels = [("consumer", consumer.into()), ("reason", reason.into())];
            drop(self.consumer_retries.get_or_create(&labels));
        }
        for reason in DEAD_LETTER_REASONS {
            let labels = [("consumer", consumer.into()), ("reason", reason.into())];
            drop(self.consumer_dlq.get_or_create(&labels));
        }
    }

    fn register_all(&self) {
        self.register("stockade_events", "Events made true, by type", self.events.clone());
        self.register(
            "stockade_order_end_to_end_seconds",
            "From placing an order to inventory's answer on it",
            self.orders_end_to_end.clone(),
        );
        self.register(
            "stockade_outbox_publish_seconds",
            "A pass of the relay that published something, from claim to confirm",
            self.outbox_publish.clone(),
        );
        self.register(
            "stockade_outbox_publish_failures",
            "Messages that the broker refused, or gave no word on",
            self.outbox_publish_failures.clone(),
        );
        self.register(
            "stockade_consumer_processed",
            "Events that a consumer ran, by result: done, retried or rejected",
            self.consumer_processed.clone(),
        );
        self.register(
            "stockade_consumer_dedup",
            "Deliveries dismissed because their event had been dealt with",
            self.consumer_dedup.clone(),
        );
        self.register("stockade_consumer_retries", "Events put off to be run again", self.consumer_retries.clone());
        self.register(
            "stockade_consumer_dlq",
            "Deliveries rejected to the dead-letter queue",
            self.consumer_dlq.clone(),
        );
        self.register(
            "stockade_consumer_handle_seconds",
            "A batch, from its deliveries in hand to its commit",
            self.consumer_handle.clone(),
        );
        self.register(
            "stockade_db_busy",
            "Work put off because the database was locked, full or away",
            self.db_busy.clone(),
        );
        self.register(
            "stockade_db_serialization_retries",
            "Transactions run again because they lost to another",
            self.db_serialization_retries.clone(),
        );
        self.register("stockade_db_pool_wait_seconds", "Waiting to begin a transaction", self.db_pool_wait.clone());
        self.register(
            "stockade_fenced_writes",
            "Settlements refused because a lease had run out and another had taken over",
            self.fenced_writes.clone(),
        );
    }

    /// Everything kept here and in `gauges`, as OpenMetrics text.
    pub fn expose(&self, gauges: &Registry) -> String {
        let mut page = String::with_capacity(32 * 1024);
        let kept = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        text::encode_registry(&mut page, &kept)
            .and_then(|()| text::encode_registry(&mut page, gauges))
            .and_then(|()| text::encode_eof(&mut page))
            .expect("a String takes whatever is written to it");
        page
    }

    pub fn observe_handling(&self, consumer: &'static str, took: Duration) {
        self.consumer_handle.get_or_create(&[("consumer", consumer)]).observe(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_exported_under_its_full_name() {
        let metrics = Metrics::default();
        metrics.consumer_dedup.get_or_create(&[("consumer", "inventory")]).inc_by(3);
        metrics.observe_handling("inventory", Duration::from_millis(2));
        let page = metrics.expose(&Registry::default());
        assert!(page.contains("stockade_consumer_dedup_total{consumer=\"inventory\"} 3\n"), "{page}");
        assert!(page.contains("stockade_consumer_handle_seconds_count{consumer=\"inventory\"} 1\n"), "{page}");
        assert!(page.ends_with("# EOF\n"), "{page}");
    }
}
