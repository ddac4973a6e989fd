//! What an order waits for, in sentences that name what would clear it. Pure: everything it knows is handed in.
//!
//! The first sentence is about what holds the order itself up; those after it are about what is held up besides, such
//! as a notice.

use std::collections::{BTreeMap, BTreeSet};

use super::{Letter, Sent, Story, Verdict};
use crate::operations::queues::Queue;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::transport::Binding;
use stockade_kernel::messaging::{event, office, relay};

/// What else bears on an order: who rests, how full the queues are, who listens to what.
pub struct Surroundings {
    pub paused: BTreeSet<String>,
    pub queues: BTreeMap<String, Queue>,
    pub bindings: Vec<Binding>,
    /// Does any instance publish?
    pub relay_runs: bool,
    /// Why nothing can be published just now, if so; and why nothing can be consumed.
    pub no_way_out: Option<String>,
    pub no_way_in: Option<String>,
}

pub fn sentences(story: &Story, around: &Surroundings) -> Vec<String> {
    let mut held_up = Vec::new();
    for row in story.sent.iter().filter(|row| row.kind == "event") {
        if let Some(sentence) = unsent(row, around) {
            held_up.push((decides(story, row, None), sentence));
            continue;
        }
        for binding in around.bindings.iter().filter(|binding| binding.keys.contains(&row.key.as_str())) {
            if let Some(sentence) = unsettled(story, row, binding, around) {
                held_up.push((decides(story, row, Some(binding.consumer)), sentence));
            }
        }
    }
    // What the order itself hangs on comes before what merely tells of it.
    held_up.sort_by_key(|(decides, _)| !decides);
    let hangs = held_up.first().is_some_and(|(decides, _)| *decides);
    let mut sentences: Vec<String> = if hangs { Vec::new() } else { vec![standing(story)] };
    for (_, sentence) in held_up {
        // Several events may wait for the same thing.
        if !sentences.contains(&sentence) {
            sentences.push(sentence);
        }
    }
    sentences
}

/// Does the order's state hang on this hop? Until it has inventory's word: on that, and on orders hearing it.
fn decides(story: &Story, row: &Sent, consumer: Option<&str>) -> bool {
    if story.order.status != "placed" {
        return false;
    }
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
            "its {key} could not be published in {} ({error}): fix and retry outbox row {}",
            attempts(row.attempts),
            row.id
        )),
        _ if around.paused.contains(relay::NAME) => {
            Some(format!("its {key} waits for the relay, which is paused: resume it"))
        }
        _ if !around.relay_runs => Some(format!("its {key} waits for a relay, and no instance runs one: start one")),
        _ if around.no_way_out.is_some() => {
            let why = around.no_way_out.as_deref().unwrap_or_default();
            Some(format!("its {key} waits for the broker ({why}): it goes out once that is over"))
        }
        "failed" => Some(format!(
            "its {key} was refused by the broker, {} so far ({error}): it is tried again at {}",
            attempts(row.attempts),
            clock_of(row.available_at)
        )),
        _ => Some(format!("its {key} waits for the relay, which is to publish it")),
    }
}

/// Why a consumer is not done with an event, if it is not.
fn unsettled(story: &Story, row: &Sent, binding: &Binding, around: &Surroundings) -> Option<String> {
    let (key, consumer) = (&row.key, binding.consumer);
    let is_this = |verdict: &&Verdict| verdict.event_id == row.event_id && verdict.consumer == consumer;
    let verdict = story.verdicts.iter().find(is_this).map(|verdict| (verdict.state.as_str(), verdict));
    let letter = story.letters.iter().find(|letter| is_about(letter, row, consumer) && letter.state == "open");
    let resting = around.paused.contains(consumer);
    match verdict {
        Some(("processed", _)) => None,
        _ if let Some(letter) = letter => {
            Some(format!("its {key} is dead letter {} of {consumer} ({}): fix and redrive", letter.id, letter.reason))
        }
        // Given up on for good; only the order itself may hang on it still.
        Some(("dead", _)) if discarded(story, row, consumer) => decides(story, row, Some(consumer)).then(|| {
            format!(
                "its {key} was given up on by {consumer} and discarded: restore and redrive it, or cancel the order"
            )
        }),
        Some(("dead", verdict)) if verdict.finished_at.is_some_and(|at| at < story.letters_since) => {
            decides(story, row, Some(consumer))
                .then(|| format!("its {key} was given up on by {consumer}, and the letter is gone: cancel the order"))
        }
        Some(("dead", _)) if around.paused.contains(office::NAME) => Some(format!(
            "its {key} was rejected by {consumer} and is not filed, for {} is paused: resume it",
            office::NAME
        )),
        Some(("dead", _)) => Some(format!("its {key} was rejected by {consumer} and is about to be filed")),
        _ if resting => Some(format!("waits for {consumer}, which is paused: resume it")),
        Some(("retrying", verdict)) => Some(retrying(key, consumer, verdict)),
        Some(("waiting", verdict)) => Some(awaiting(key, consumer, verdict)),
        Some((_, _)) => Some(format!("waits for {consumer}, which is at work on its {key}")),
        // Dealt with so long ago that nobody remembers.
        None if row.created_at < story.verdicts_since => None,
        None => Some(queued(key, binding, around)),
    }
}

/// Is the letter what this consumer gave up on? One about another body under the event's id is not.
fn is_about(letter: &Letter, row: &Sent, consumer: &str) -> bool {
    letter.event_id == row.event_id && letter.consumer == consumer && letter.reason != event::ID_REUSED
}

/// Was it given up on for good?
fn discarded(story: &Story, row: &Sent, consumer: &str) -> bool {
    story.letters.iter().any(|letter| is_about(letter, row, consumer) && letter.state == "discarded")
}

fn retrying(key: &str, consumer: &str, verdict: &Verdict) -> String {
    let error = verdict.last_error.as_deref().unwrap_or("no reason given");
    let at = verdict.due_at.map(|at| format!(" at {}", clock_of(at))).unwrap_or_default();
    match verdict.attempts {
        // Only a redrive forgets attempts.
        0 => format!("waits for {consumer} to take its {key}, which was redriven"),
        count => {
            format!("waits for {consumer}, which tries its {key} again{at}, after {} ({error})", attempts(count))
        }
    }
}

fn awaiting(key: &str, consumer: &str, verdict: &Verdict) -> String {
    // `order.placed 0190…`, of this very order.
    let what = verdict.waiting_for.as_deref().and_then(|name| name.split(' ').next()).unwrap_or("predecessor");
    let until = verdict.deadline_at.map(|at| format!(", at most until {}", clock_of(at))).unwrap_or_default();
    format!("its {key} is kept by {consumer} until its {what} has been dealt with{until}")
}

fn queued(key: &str, binding: &Binding, around: &Surroundings) -> String {
    let (consumer, queue) = (binding.consumer, around.queues.get(&binding.queue));
    match queue {
        _ if around.no_way_in.is_some() => {
            let why = around.no_way_in.as_deref().unwrap_or_default();
            format!("waits for {consumer}, which cannot reach the broker ({why}): it goes on once that is over")
        }
        Some(queue) if queue.consumers == Some(0) => {
            format!("waits for {consumer}, and nobody takes from {}: start it", binding.queue)
        }
        Some(queue) if queue.depth > 1 => {
            format!("waits for {consumer}, with {} messages in its queue", queue.depth)
        }
        _ => format!("waits for {consumer} to take its {key}"),
    }
}

fn attempts(count: i32) -> String {
    if count == 1 { "1 attempt".to_owned() } else { format!("{count} attempts") }
}

/// The time of day, in UTC, as people say it.
fn clock_of(at: Timestamp) -> String {
    at.to_string().get(11..16).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::operations::timeline::Order;

    const AT: Timestamp = Timestamp::from_millis(1_794_821_400_125); // 09:30
    const BINDINGS: [(&str, &[&str]); 3] = [
        ("orders", &["inventory.reserved", "inventory.failed"]),
        ("inventory", &["order.placed", "order.cancelled"]),
        ("notifications", &["inventory.reserved"]),
    ];

    fn around() -> Surroundings {
        let bind = |(consumer, keys): &(&'static str, &'static [&'static str])| Binding {
            consumer,
            queue: format!("stockade.{consumer}"),
            keys,
        };
        Surroundings {
            paused: BTreeSet::new(),
            queues: BTreeMap::new(),
            bindings: BINDINGS.iter().map(bind).collect(),
            relay_runs: true,
            no_way_out: None,
            no_way_in: None,
        }
    }

    fn sent(key: &str, status: &str) -> Sent {
        Sent {
            id: Uuid::nil(),
            event_id: Uuid::nil(),
            kind: "event".to_owned(),
            key: key.to_owned(),
            status: status.to_owned(),
            attempts: 3,
            available_at: AT,
            created_at: AT,
            claimed_at: None,
            published_at: None,
            target: String::new(),
            last_error: Some("no route".to_owned()),
        }
    }

    fn verdict(consumer: &str, state: &str) -> Verdict {
        Verdict {
            consumer: consumer.to_owned(),
            event_id: Uuid::nil(),
            key: "order.placed".to_owned(),
            state: state.to_owned(),
            attempts: 0,
            duplicates: 0,
            started_at: AT,
            finished_at: Some(AT),
            due_at: Some(AT),
            last_error: None,
            waiting_for: Some("order.placed 0190".to_owned()),
            deadline_at: Some(AT),
        }
    }

    fn letter(state: &str) -> Letter {
        Letter {
            id: Uuid::nil(),
            consumer: "inventory".to_owned(),
            event_id: Uuid::nil(),
            key: "order.placed".to_owned(),
            reason: "schema".to_owned(),
            error: String::new(),
            state: state.to_owned(),
            created_at: AT,
            resolved_at: None,
        }
    }

    fn story(status: &str, sent: Vec<Sent>, verdicts: Vec<Verdict>, letters: Vec<Letter>) -> Story {
        let order = Order {
            id: Uuid::nil(),
            number: "ORD-00000000".to_owned(),
            status: status.to_owned(),
            reason: None,
            correlation_id: String::new(),
            created_at: AT,
            hold_expires_at: Some(AT),
        };
        let long_ago = Timestamp::from_millis(0);
        Story { order, sent, verdicts, letters, effects: vec![], verdicts_since: long_ago, letters_since: long_ago }
    }

    /// The sentence on an order whose `order.placed` has come this far with inventory.
    fn of(verdicts: Vec<Verdict>, letters: Vec<Letter>, around: &Surroundings) -> String {
        sentences(&story("placed", vec![sent("order.placed", "published")], verdicts, letters), around).remove(0)
    }

    fn of_unsent(status: &str, around: &Surroundings) -> String {
        sentences(&story("placed", vec![sent("order.placed", status)], vec![], vec![]), around).remove(0)
    }

    #[test]
    fn an_event_that_has_not_gone_out_says_why() {
        let calm = around();
        assert_eq!(of_unsent("pending", &calm), "its order.placed waits for the relay, which is to publish it");
        assert_eq!(
            of_unsent("failed", &calm),
            "its order.placed was refused by the broker, 3 attempts so far (no route): it is tried again at 09:30"
        );
        assert_eq!(
            of_unsent("dead", &calm),
            format!(
                "its order.placed could not be published in 3 attempts (no route): fix and retry outbox row {}",
                Uuid::nil()
            )
        );
        let paused = Surroundings { paused: [relay::NAME.to_owned()].into(), ..around() };
        assert_eq!(of_unsent("pending", &paused), "its order.placed waits for the relay, which is paused: resume it");
        let unmanned = Surroundings { relay_runs: false, ..around() };
        assert_eq!(
            of_unsent("pending", &unmanned),
            "its order.placed waits for a relay, and no instance runs one: start one"
        );
        let blocked =
            Surroundings { no_way_out: Some("the broker takes no messages: low on memory".into()), ..around() };
        assert_eq!(
            of_unsent("pending", &blocked),
            "its order.placed waits for the broker (the broker takes no messages: low on memory): it goes out once that \
             is over"
        );
    }

    #[test]
    fn an_event_that_its_consumer_is_not_done_with_says_why() {
        let calm = around();
        assert_eq!(of(vec![], vec![], &calm), "waits for inventory to take its order.placed");
        let cut_off = Surroundings { no_way_in: Some("the connection was lost".into()), ..around() };
        assert_eq!(
            of(vec![], vec![], &cut_off),
            "waits for inventory, which cannot reach the broker (the connection was lost): it goes on once that is over"
        );
        for (state, sentence) in [
            ("retrying", "waits for inventory to take its order.placed, which was redriven"),
            (
                "waiting",
                "its order.placed is kept by inventory until its order.placed has been dealt with, at most until 09:30",
            ),
            ("processing", "waits for inventory, which is at work on its order.placed"),
            ("dead", "its order.placed was rejected by inventory and is about to be filed"),
        ] {
            assert_eq!(of(vec![verdict("inventory", state)], vec![], &calm), sentence);
        }
        let failed = Verdict { attempts: 2, last_error: Some("no luck".into()), ..verdict("inventory", "retrying") };
        assert_eq!(
            of(vec![failed], vec![], &calm),
            "waits for inventory, which tries its order.placed again at 09:30, after 2 attempts (no luck)"
        );
        assert_eq!(
            of(vec![verdict("inventory", "dead")], vec![letter("open")], &calm),
            format!("its order.placed is dead letter {} of inventory (schema): fix and redrive", Uuid::nil())
        );
        let given_up = "its order.placed was given up on by inventory and discarded: restore and redrive it, or cancel \
                        the order";
        assert_eq!(of(vec![verdict("inventory", "dead")], vec![letter("discarded")], &calm), given_up);
        let mut long_ago = story("placed", vec![sent("order.placed", "published")], vec![], vec![]);
        long_ago.verdicts.push(verdict("inventory", "dead"));
        long_ago.letters_since = AT.plus(std::time::Duration::from_millis(1));
        assert_eq!(
            sentences(&long_ago, &calm),
            ["its order.placed was given up on by inventory, and the letter is gone: cancel the order"]
        );
    }

    #[test]
    fn a_full_queue_is_told_with_its_depth() {
        let queue = Queue {
            name: "stockade.inventory".to_owned(),
            depth: 7,
            in_flight: Some(0),
            consumers: Some(1),
            paused: false,
            dlq_depth: 0,
            dead_letters: 0,
            oldest_age_ms: None,
            stale: false,
        };
        let full = Surroundings { queues: [("stockade.inventory".to_owned(), queue)].into(), ..around() };
        assert_eq!(of(vec![], vec![], &full), "waits for inventory, with 7 messages in its queue");
    }

    #[test]
    fn a_letter_about_another_body_under_a_known_id_holds_nothing_up() {
        let reused = || Letter { reason: event::ID_REUSED.to_owned(), ..letter("open") };
        let placed = || vec![sent("order.placed", "published")];
        let done = story("fulfilled", placed(), vec![verdict("inventory", "processed")], vec![reused()]);
        assert_eq!(sentences(&done, &around()), ["waits for nothing: it is fulfilled"]);
        assert_eq!(
            of(vec![verdict("inventory", "waiting")], vec![reused()], &around()),
            "its order.placed is kept by inventory until its order.placed has been dealt with, at most until 09:30"
        );
        // Nor does any letter about what has been dealt with.
        let done = story("fulfilled", placed(), vec![verdict("inventory", "processed")], vec![letter("open")]);
        assert_eq!(sentences(&done, &around()), ["waits for nothing: it is fulfilled"]);
    }

    #[test]
    fn an_order_that_moved_on_hangs_on_nothing_that_was_given_up() {
        let told = |status, letters_since| {
            let sent = vec![sent("order.placed", "published")];
            let letters = if letters_since == AT { vec![letter("discarded")] } else { vec![] };
            let story = Story { letters_since, ..story(status, sent, vec![verdict("inventory", "dead")], letters) };
            sentences(&story, &around())
        };
        let gone = AT.plus(std::time::Duration::from_millis(1));
        assert_eq!(told("cancelled", AT), ["waits for nothing: it is cancelled"]);
        assert_eq!(told("cancelled", gone), ["waits for nothing: it is cancelled"]);
        assert_eq!(
            told("placed", gone),
            ["its order.placed was given up on by inventory, and the letter is gone: cancel the order"]
        );
    }

    #[test]
    fn what_several_events_wait_for_is_said_once_and_after_how_the_order_stands() {
        let paused = Surroundings { paused: ["inventory".to_owned()].into(), ..around() };
        let both = vec![sent("order.placed", "published"), sent("order.cancelled", "published")];
        assert_eq!(
            sentences(&story("cancelled", both, vec![], vec![]), &paused),
            ["waits for nothing: it is cancelled", "waits for inventory, which is paused: resume it"]
        );
    }

    #[test]
    fn what_was_dealt_with_so_long_ago_that_nobody_remembers_is_not_waited_for() {
        let mut story = story("reserved", vec![sent("order.placed", "published")], vec![], vec![]);
        story.verdicts_since = AT.plus(std::time::Duration::from_millis(1));
        assert_eq!(sentences(&story, &around()), ["reserved, waits for payment until 09:30"]);
    }

    #[test]
    fn an_order_with_nothing_under_way_is_told_as_it_stands() {
        for (status, sentence) in [
            ("placed", "placed, and nothing is under way for it: run an audit"),
            ("reserved", "reserved, waits for payment until 09:30"),
            ("paid", "paid, waits to be fulfilled"),
            ("fulfilled", "waits for nothing: it is fulfilled"),
            ("cancelled", "waits for nothing: it is cancelled"),
            ("expired", "waits for nothing: it is expired"),
        ] {
            assert_eq!(sentences(&story(status, vec![], vec![], vec![]), &around()), [sentence]);
        }
        let mut untimed = story("reserved", vec![], vec![], vec![]);
        untimed.order.hold_expires_at = None;
        assert_eq!(sentences(&untimed, &around()), ["reserved, waits for payment"]);
    }
}
