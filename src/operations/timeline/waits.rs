//! What an order waits for, in sentences that name what would clear it. Pure: everything it knows is handed in.
//!
//! The first sentence is about what holds the order itself up; those after it are about what is held up besides, such
//! as a notice.

use std::collections::{BTreeMap, BTreeSet};

use super::{Sent, Story, Verdict};
use crate::clock::Timestamp;
use crate::messaging::transport::Binding;
use crate::messaging::{office, relay};
use crate::operations::queues::Queue;

/// What else bears on an order: who rests, how full the queues are, who listens to what.
pub struct Surroundings {
    pub paused: BTreeSet<String>,
    pub queues: BTreeMap<String, Queue>,
    pub bindings: Vec<Binding>,
    /// Why nothing can be published just now, if so.
    pub outage: Option<String>,
}

pub fn sentences(story: &Story, around: &Surroundings) -> Vec<String> {
    let mut held_up = Vec::new();
    for row in story.sent.iter().filter(|row| row.kind == "event") {
        if let Some(sentence) = unsent(row, around) {
            held_up.push((decides(row, None), sentence));
            continue;
        }
        for binding in around.bindings.iter().filter(|binding| binding.keys.contains(&row.key.as_str())) {
            if let Some(sentence) = unsettled(story, row, binding, around) {
                held_up.push((decides(row, Some(binding.consumer)), sentence));
            }
        }
    }
    // What the order itself hangs on comes before what merely tells of it.
    held_up.sort_by_key(|(decides, _)| !decides);
    let hangs = held_up.first().is_some_and(|(decides, _)| *decides);
    let mut sentences: Vec<String> = held_up.into_iter().map(|(_, sentence)| sentence).collect();
    if !hangs {
        sentences.insert(0, standing(story));
    }
    sentences
}

/// Does the order's state hang on this hop? On inventory's word on it, and on orders hearing that word.
fn decides(row: &Sent, consumer: Option<&str>) -> bool {
    match row.key.as_str() {
        "order.placed" => consumer.is_none_or(|consumer| consumer == "inventory"),
        key if key.starts_with("inventory.") => consumer.is_none_or(|consumer| consumer == "orders"),
        _ => false,
    }
}

/// The order as it stands, with nothing of it under way.
fn standing(story: &Story) -> String {
    let order = &story.order;
    let reason = order.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
    match (order.status.as_str(), order.hold_expires_at) {
        ("reserved", Some(until)) => format!("reserved, waits for payment until {}", clock_of(until)),
        ("reserved", None) => "reserved, waits for payment".to_owned(),
        ("paid", _) => "paid, waits to be fulfilled".to_owned(),
        ("placed", _) => "placed, and nothing is under way for it: run an audit".to_owned(),
        (status, _) => format!("waits for nothing: it is {status}{reason}"),
    }
}

/// Why an event has not gone out, if it has not.
fn unsent(row: &Sent, around: &Surroundings) -> Option<String> {
    let key = &row.key;
    let error = row.last_error.as_deref().unwrap_or("no reason given");
    match row.status.as_str() {
        "published" => None,
        "dead" => Some(format!(
            "its {key} could not be published in {} attempts ({error}): retry outbox row {}",
            row.attempts, row.id
        )),
        _ if around.paused.contains(relay::NAME) => {
            Some(format!("its {key} waits for the relay, which is paused: resume it"))
        }
        _ if around.outage.is_some() => {
            let outage = around.outage.as_deref().unwrap_or_default();
            Some(format!("its {key} waits for the broker ({outage}): it goes out when the broker is back"))
        }
        "failed" => Some(format!(
            "its {key} was refused by the broker {} times ({error}): it is tried again at {}",
            row.attempts,
            clock_of(row.available_at)
        )),
        _ => Some(format!("its {key} waits for the relay, which is to publish it")),
    }
}

/// Why a consumer is not done with an event, if it is not.
fn unsettled(story: &Story, row: &Sent, binding: &Binding, around: &Surroundings) -> Option<String> {
    let (key, consumer) = (&row.key, binding.consumer);
    let of_this = |event_id, who: &str| event_id == row.event_id && who == consumer;
    let letter =
        story.letters.iter().find(|letter| of_this(letter.event_id, &letter.consumer) && letter.state == "open");
    if let Some(letter) = letter {
        return Some(format!(
            "its {key} is dead letter {} of {consumer} ({}): fix and redrive",
            letter.id, letter.reason
        ));
    }
    let verdict = story.verdicts.iter().find(|verdict| of_this(verdict.event_id, &verdict.consumer));
    let resting = around.paused.contains(consumer);
    match verdict.map(|verdict| (verdict.state.as_str(), verdict)) {
        Some(("processed", _)) => None,
        Some(("dead", _)) if discarded(story, row, consumer) => None,
        Some(("dead", _)) if around.paused.contains(office::NAME) => Some(format!(
            "its {key} was rejected by {consumer} and is not filed, for {} is paused: resume it",
            office::NAME
        )),
        Some(("dead", _)) => Some(format!("its {key} was rejected by {consumer} and is about to be filed")),
        _ if resting => Some(format!("waits for {consumer}, which is paused: resume it")),
        Some(("retrying", verdict)) => Some(retrying(key, consumer, verdict)),
        Some(("waiting", verdict)) => Some(awaiting(key, consumer, verdict)),
        Some((_, _)) => Some(format!("waits for {consumer}, which is at work on its {key}")),
        None => Some(queued(key, binding, around)),
    }
}

/// Was it given up on for good?
fn discarded(story: &Story, row: &Sent, consumer: &str) -> bool {
    let of_this = |event_id, who: &str| event_id == row.event_id && who == consumer;
    story.letters.iter().any(|letter| of_this(letter.event_id, &letter.consumer) && letter.state == "discarded")
}

fn retrying(key: &str, consumer: &str, verdict: &Verdict) -> String {
    let error = verdict.last_error.as_deref().unwrap_or("no reason given");
    let at = verdict.due_at.map(|at| format!(" at {}", clock_of(at))).unwrap_or_default();
    let attempts = if verdict.attempts == 1 { "1 attempt" } else { &format!("{} attempts", verdict.attempts) };
    format!("waits for {consumer}, which tries its {key} again{at}, after {attempts} ({error})")
}

fn awaiting(key: &str, consumer: &str, verdict: &Verdict) -> String {
    let what = verdict.waiting_for.as_deref().unwrap_or("its predecessor");
    let until = verdict.deadline_at.map(|at| format!(" until {}", clock_of(at))).unwrap_or_default();
    format!("its {key} is kept by {consumer}, waiting for {what}{until}")
}

fn queued(key: &str, binding: &Binding, around: &Surroundings) -> String {
    let (consumer, queue) = (binding.consumer, around.queues.get(&binding.queue));
    match queue {
        Some(queue) if queue.consumers == Some(0) => {
            format!("waits for {consumer}, and nobody takes from {}: start it", binding.queue)
        }
        Some(queue) if queue.depth > 1 => {
            format!("waits for {consumer}, with {} messages in its queue", queue.depth)
        }
        _ => format!("waits for {consumer} to take its {key}"),
    }
}

/// The time of day, in UTC, as people say it.
fn clock_of(at: Timestamp) -> String {
    at.to_string().get(11..16).unwrap_or_default().to_owned()
}
