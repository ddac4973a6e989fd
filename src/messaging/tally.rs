//! Counts what became of events, once their transaction is committed, and says so in the log where nobody else does.

use std::borrow::Cow;

use uuid::Uuid;

use super::inbox::{Mark, State};
use crate::db::Tx;
use crate::metrics::Metrics;

/// Counts what is written about a batch when `tx` commits: `done` new events whose inbox row says so already, those
/// with a mark of their own, and those kept `waiting`.
pub fn on_commit(tx: &mut Tx, consumer: &'static str, done: usize, marks: &[Mark], waiting: usize) {
    let marked = |state| marks.iter().filter(|mark| mark.state == state).count();
    let results = [
        ("done", done + marked(State::Processed)),
        ("retried", marked(State::Retrying)),
        ("rejected", marked(State::Dead)),
        ("waiting", waiting),
    ];
    if results.iter().all(|(_, count)| *count == 0) {
        return;
    }
    let dead = marks.iter().filter(|mark| mark.state == State::Dead);
    let reasons: Vec<String> = dead.filter_map(|mark| mark.reason.clone()).collect();
    let metrics = tx.metrics().clone();
    tx.after_commit(move || {
        for (result, count) in results.into_iter().filter(|(_, count)| *count > 0) {
            let labels = [("consumer", consumer), ("result", result)];
            metrics.consumer_processed.get_or_create(&labels).inc_by(count as u64);
            if result == "retried" {
                let labels = [("consumer", consumer), ("reason", "failed-for-now")];
                metrics.consumer_retries.get_or_create(&labels).inc_by(count as u64);
            }
        }
        for reason in reasons {
            rejected(&metrics, consumer, reason.into());
        }
    });
}

/// Counts a delivery that goes to the dead-letter queue.
pub fn rejected(metrics: &Metrics, consumer: &'static str, reason: Cow<'static, str>) {
    metrics.consumer_dlq.get_or_create(&[("consumer", consumer.into()), ("reason", reason)]).inc();
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
