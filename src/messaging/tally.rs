//! Counts what became of events, once their transaction is committed, and says it in the log.

use uuid::Uuid;

use crate::db::Tx;
use crate::metrics::Metrics;

/// What became of one event that was run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Result {
    Done,
    Retried,
    /// Under this reason code.
    Rejected(&'static str),
}

/// Counts the results of a batch when `tx` commits.
pub fn on_commit(tx: &mut Tx, consumer: &'static str, results: impl Iterator<Item = Result>) {
    let (mut done, mut retried, mut rejected) = (0, 0, Vec::new());
    for result in results {
        match result {
            Result::Done => done += 1,
            Result::Retried => retried += 1,
            Result::Rejected(reason) => rejected.push(reason),
        }
    }
    if (done, retried, rejected.len()) == (0, 0, 0) {
        return;
    }
    let metrics = tx.metrics().clone();
    tx.after_commit(move || {
        for (result, count) in [("done", done), ("retried", retried), ("rejected", rejected.len() as u64)] {
            if count > 0 {
                metrics.consumer_processed.get_or_create(&[("consumer", consumer), ("result", result)]).inc_by(count);
            }
        }
        if retried > 0 {
            let labels = [("consumer", consumer), ("reason", "failed-for-now")];
            metrics.consumer_retries.get_or_create(&labels).inc_by(retried);
        }
        for reason in rejected {
            self::rejected(&metrics, consumer, reason);
        }
    });
}

/// Counts a delivery that goes to the dead-letter queue.
pub fn rejected(metrics: &Metrics, consumer: &'static str, reason: &'static str) {
    metrics.consumer_dlq.get_or_create(&[("consumer", consumer), ("reason", reason)]).inc();
}

/// Counts deliveries dismissed as duplicates when `tx` commits.
pub fn duplicates_on_commit(tx: &mut Tx, consumer: &'static str, events: Vec<Uuid>) {
    let metrics = tx.metrics().clone();
    tx.after_commit(move || {
        metrics.consumer_dedup.get_or_create(&[("consumer", consumer)]).inc_by(events.len() as u64);
        for event_id in events {
            tracing::info!(
                consumer, event.id = %event_id, "DUPLICATE {consumer} {event_id}: dealt with before, dismissed"
            );
        }
    });
}
