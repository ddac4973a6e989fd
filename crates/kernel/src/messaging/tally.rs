//! Counts what became of events, once their transaction is committed, and says so in the log where nobody else does.

use std::borrow::Cow;
use std::time::Duration;

use uuid::Uuid;

use super::event::{Event, ID_REUSED, Message};
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
    let reasons = |state| -> Vec<String> {
        let marked = marks.iter().filter(|mark| mark.state == state);
        marked.filter_map(|mark| mark.reason.clone()).collect()
    };
    let (retried, dead) = (reasons(State::Retrying), reasons(State::Dead));
    let metrics = tx.metrics().clone();
    tx.after_commit(move || {
        for (result, count) in results.into_iter().filter(|(_, count)| *count > 0) {
            let labels = [("consumer", consumer), ("result", result)];
            metrics.consumer_processed.get_or_create(&labels).inc_by(count as u64);
        }
        for reason in retried {
            metrics.consumer_retries.get_or_create(&[("consumer", consumer.into()), ("reason", reason.into())]).inc();
        }
        for reason in dead {
            rejected(&metrics, consumer, reason.into());
        }
    });
}

/// Counts a delivery that goes to the dead-letter queue.
pub fn rejected(metrics: &Metrics, consumer: &'static str, reason: Cow<'static, str>) {
    metrics.consumer_dlq.get_or_create(&[("consumer", consumer.into()), ("reason", reason)]).inc();
}

/// Counts deliveries put aside because the first body under their event id was another, and tells of them, when `tx`
/// commits. They have no mark: the inbox row is the first one's.
pub fn quarantined_on_commit(tx: &mut Tx, consumer: &'static str, told: &[Told]) {
    if !told.is_empty() {
        let (metrics, count) = (tx.metrics().clone(), told.len());
        tx.after_commit(move || (0..count).for_each(|_| rejected(&metrics, consumer, ID_REUSED.into())));
        tell_on_commit(tx, consumer, told);
    }
}

/// Counts deliveries dismissed as duplicates, and tells of them, when `tx` commits.
pub fn duplicates_on_commit<'a, F: 'a>(
    tx: &mut Tx,
    consumer: &'static str,
    repeated: impl Iterator<Item = &'a Message<F>>,
) {
    let repeated: Vec<&Message<F>> = repeated.collect();
    let (metrics, count) = (tx.metrics().clone(), repeated.len());
    tx.after_commit(move || {
        metrics.consumer_dedup.get_or_create(&[("consumer", consumer)]).inc_by(count as u64);
    });
    if tracing::enabled!(tracing::Level::INFO) {
        let told: Vec<Told> = repeated.iter().map(|message| Told::of(&message.event, What::Duplicate)).collect();
        tell_on_commit(tx, consumer, &told);
    }
}

/// What the log is to say of an event once it is true, in a line that reads alone.
#[derive(Debug, Clone)]
pub struct Told {
    event_id: Uuid,
    key: String,
    aggregate_id: String,
    correlation_id: String,
    what: What,
}

#[derive(Debug, Clone)]
enum What {
    Duplicate,
    Dead { reason: String, error: String },
    Retry { attempt: i32, delay: Duration, error: String },
    Kept { until: &'static str },
}

impl Told {
    pub fn dead_letter(event: &Event, reason: &str, error: &str) -> Self {
        Self::of(event, What::Dead { reason: reason.to_owned(), error: error.to_owned() })
    }

    pub fn retry(event: &Event, attempt: i32, delay: Duration, error: &str) -> Self {
        Self::of(event, What::Retry { attempt, delay, error: error.to_owned() })
    }

    /// `until`: the key of the event that it waits for.
    pub fn kept(event: &Event, until: &'static str) -> Self {
        Self::of(event, What::Kept { until })
    }

    fn of(event: &Event, what: What) -> Self {
        Self {
            event_id: event.event_id,
            key: event.routing_key(),
            aggregate_id: event.aggregate_id.clone(),
            correlation_id: event.correlation_id.clone(),
            what,
        }
    }

    fn tell(self, consumer: &'static str) {
        let Self { event_id, key, aggregate_id, correlation_id, what } = self;
        // One set of fields for all: a log is searched by them.
        macro_rules! line {
            ($level:ident, $($rest:tt)+) => {
                tracing::$level!(
                    consumer, event.id = %event_id, aggregate.id = aggregate_id, correlation.id = correlation_id, $($rest)+
                )
            };
        }
        match what {
            What::Duplicate => {
                line!(info, "DUPLICATE {consumer} {key} of {aggregate_id}: {event_id} was dealt with before")
            }
            What::Dead { reason, error } => {
                line!(warn, reason, "DEAD LETTER {consumer} {key} of {aggregate_id} ({reason}): {error}")
            }
            What::Retry { attempt, delay, error } => line!(
                info,
                attempt,
                "RETRY {consumer} {key} of {aggregate_id} in {delay:?}, after attempt {attempt}: {error}"
            ),
            What::Kept { until } => line!(info, "WAITING {consumer} {key} of {aggregate_id} for its {until}"),
        }
    }
}

/// Tells all of it when `tx` commits: no line holds up the transaction, and none is untrue.
pub fn tell_on_commit(tx: &mut Tx, consumer: &'static str, told: &[Told]) {
    if !told.is_empty() {
        let told = told.to_vec();
        tx.after_commit(move || told.into_iter().for_each(|line| line.tell(consumer)));
    }
}
