//! The topology on RabbitMQ: exchanges, queues and bindings, with every argument explicit.
//!
//! Nothing is left to a default that differs between broker versions. A queue that exists with other arguments is never
//! used, because without dead-lettering a rejected message is lost. The error says what differs and what to do.

use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Connection, Error, ErrorKind};

use crate::messaging::transport::{Topology, dlq_of};

/// Deliveries before the broker itself gives up on a message: far more than a consumer needs to find a message that
/// kills it. The default is none at all before RabbitMQ 4.0 and 20 since.
const DELIVERY_LIMIT: i32 = 50;
/// Nobody gives up on a dead letter.
const DLQ_DELIVERY_LIMIT: i32 = 1_000_000;
const NOT_FOUND: u16 = 404;
const PRECONDITION_FAILED: u16 = 406;

/// A queue for a program that is not ours, as configuration asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtraQueue {
    pub queue: String,
    /// Binding patterns: `*` stands for one word, `#` for any number.
    pub patterns: Vec<String>,
}

impl ExtraQueue {
    /// Reads `analytics.ingest=#;erp.sync=order.*,inventory.failed`.
    pub fn read_many(text: &str) -> Result<Vec<Self>, String> {
        text.split(';').map(str::trim).filter(|entry| !entry.is_empty()).map(Self::read).collect()
    }

    fn read(entry: &str) -> Result<Self, String> {
        let (queue, patterns) =
            entry.split_once('=').ok_or_else(|| format!("{entry:?} is not NAME=PATTERN,PATTERN"))?;
        let queue = queue.trim().to_owned();
        let patterns: Vec<String> = patterns.split(',').map(|pattern| pattern.trim().to_owned()).collect();
        let plain = |text: &String| !text.is_empty() && text.len() <= 200 && text.bytes().all(|b| b.is_ascii_graphic());
        if !plain(&queue) || !patterns.iter().all(plain) || queue.starts_with("amq.") {
            return Err(format!("{entry:?}: names and patterns are visible ASCII, and `amq.` is the broker's own"));
        }
        Ok(Self { queue, patterns })
    }
}

/// Everything to be declared.
#[derive(Debug, Clone)]
pub struct Shape {
    pub exchange: String,
    pub dead_letter_exchange: String,
    pub queues: Vec<QueueShape>,
}

#[derive(Debug, Clone)]
pub struct QueueShape {
    pub name: String,
    pub patterns: Vec<String>,
    pub is_ours: bool,
}

impl Shape {
    pub fn new(prefix: &str, topology: &Topology, extra: &[ExtraQueue]) -> Self {
        let ours = topology.queues.iter().map(|binding| QueueShape {
            name: binding.queue.clone(),
            patterns: binding.keys.iter().map(|key| (*key).to_owned()).collect(),
            is_ours: true,
        });
        let others = extra.iter().map(|extra| QueueShape {
            name: extra.queue.clone(),
            patterns: extra.patterns.clone(),
            is_ours: false,
        });
        Self {
            exchange: format!("{prefix}.events"),
            dead_letter_exchange: format!("{prefix}.events.dlx"),
            queues: ours.chain(others).collect(),
        }
    }

    /// Is some queue meant to get what is published under `key`? Then not getting there is a failure.
    pub fn is_bound(&self, key: &str) -> bool {
        self.queues.iter().flat_map(|queue| &queue.patterns).any(|pattern| matches_pattern(pattern, key))
    }

    /// Every queue and dead-letter queue with its arguments.
    pub fn all_queues(&self) -> impl Iterator<Item = (String, FieldTable)> {
        let both = |queue: &QueueShape| {
            [(queue.name.clone(), self.queue_arguments(queue)), (dlq_of(&queue.name), dlq_arguments())]
        };
        self.queues.iter().flat_map(both)
    }

    /// Takes everything away that is declared, with what is in it.
    pub async fn remove(&self, connection: &Connection) -> lapin::Result<()> {
        let channel = connection.create_channel().await?;
        for (queue, _) in self.all_queues() {
            channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        }
        for exchange in [&self.exchange, &self.dead_letter_exchange] {
            channel.exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default()).await?;
        }
        Ok(())
    }

    /// The queue of this name, or the one whose dead-letter queue it is.
    pub fn find(&self, name: &str) -> Option<&QueueShape> {
        self.queues.iter().find(|queue| queue.name == name || dlq_of(&queue.name) == name)
    }

    pub fn queue_arguments(&self, queue: &QueueShape) -> FieldTable {
        let mut arguments = FieldTable::default();
        set_text(&mut arguments, "x-queue-type", "quorum");
        arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(DELIVERY_LIMIT));
        set_text(&mut arguments, "x-dead-letter-exchange", &self.dead_letter_exchange);
        set_text(&mut arguments, "x-dead-letter-routing-key", &dlq_of(&queue.name));
        if queue.is_ours {
            // Dead-lettering that loses nothing needs a queue that refuses when full rather than drop its oldest.
            set_text(&mut arguments, "x-overflow", "reject-publish");
            set_text(&mut arguments, "x-dead-letter-strategy", "at-least-once");
        } else {
            // Somebody else's consumer that is away must not stop our publishing.
            set_text(&mut arguments, "x-overflow", "drop-head");
        }
        arguments
    }
}

pub fn dlq_arguments() -> FieldTable {
    let mut arguments = FieldTable::default();
    set_text(&mut arguments, "x-queue-type", "quorum");
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(DLQ_DELIVERY_LIMIT));
    arguments
}

pub fn in_one_line(arguments: &FieldTable) -> String {
    let value = |value: &AMQPValue| match value {
        AMQPValue::LongString(text) => text.to_string(),
        AMQPValue::LongInt(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    let words: Vec<String> = arguments.inner().iter().map(|(name, it)| format!("{name}={}", value(it))).collect();
    words.join(" ")
}

fn set_text(arguments: &mut FieldTable, name: &str, value: &str) {
    arguments.insert(name.into(), AMQPValue::LongString(value.into()));
}

pub fn is_not_found(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::ProtocolError(refusal) if refusal.get_id() == NOT_FOUND)
}

/// AMQP keeps names to 255 bytes.
pub fn short(text: &str) -> Result<ShortString, String> {
    ShortString::try_new(text).map_err(|_| format!("{text:?} is longer than the 255 bytes that AMQP takes"))
}

/// Why a declaration failed, and for one that met something of the same name, what to do about it.
pub fn in_words(kind: &str, name: &str, error: &Error) -> String {
    let ErrorKind::ProtocolError(refusal) = error.kind() else {
        return format!("{kind} {name} cannot be declared: {error}");
    };
    if refusal.get_id() != PRECONDITION_FAILED {
        return format!("{kind} {name} cannot be declared: {}", refusal.get_message());
    }
    advise(kind, name, refusal.get_message().as_str())
}

/// What to do about something of the same name that is not ours, out of the broker's sentence on it.
fn advise(kind: &str, name: &str, refusal: &str) -> String {
    let difference = read_difference(refusal)
        .map_or_else(|| refusal.to_owned(), |(what, is, ought)| format!("its {what} is {is}, Stockade needs {ought}"));
    let vhost = refusal.split_once("in vhost '").and_then(|(_, rest)| rest.split_once('\''));
    let vhost = vhost.map_or("/", |(vhost, _)| vhost);
    // rabbitmqctl deletes queues and no exchanges.
    let (when, how) = match kind {
        "queue" => ("it is empty and nobody else needs it", format!("`rabbitmqctl -p {vhost} delete_queue {name}`")),
        _ => (
            "nobody else needs it",
            format!("in the management UI, or by `rabbitmqadmin -V {vhost} delete exchange name={name}`"),
        ),
    };
    format!(
        "{kind} {name} is there already, but not as Stockade declares it: {difference}. Delete it once {when} ({how}; it \
         is declared again within seconds), or set STOCKADE_QUEUE_PREFIX to use other names."
    )
}

/// What differs, what it is and what it ought to be, out of the broker's sentence.
fn read_difference(text: &str) -> Option<(&str, &str, &str)> {
    let what = text.split_once("inequivalent arg '")?.1.split_once('\'')?.0;
    let received = text.split_once("received ")?.1;
    let (ought, is) = received.split_once(" but current is ")?;
    Some((what, first_quoted(is), first_quoted(ought)))
}

/// `the value 'x' of type 'longstr'` and `'x'` both say x; `none` has no quotes.
fn first_quoted(text: &str) -> &str {
    text.split('\'').nth(1).unwrap_or(text)
}

/// The topic exchange's own rule: words between dots, `*` for one, `#` for any number.
fn matches_pattern(pattern: &str, key: &str) -> bool {
    let (pattern, key): (Vec<&str>, Vec<&str>) = (pattern.split('.').collect(), key.split('.').collect());
    matches_words(&pattern, &key)
}

fn matches_words(pattern: &[&str], key: &[&str]) -> bool {
    match (pattern, key) {
        ([], []) => true,
        (["#", rest @ ..], _) => (0..=key.len()).any(|skipped| matches_words(rest, &key[skipped..])),
        (["*", pattern @ ..], [_, key @ ..]) => matches_words(pattern, key),
        ([word, pattern @ ..], [first, key @ ..]) if word == first => matches_words(pattern, key),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_as_a_topic_exchange_does() {
        for (pattern, key, matches) in [
            ("order.placed", "order.placed", true),
            ("order.placed", "order.paid", false),
            ("order.*", "order.placed", true),
            ("order.*", "order", false),
            ("order.*", "order.placed.twice", false),
            ("#", "order.placed", true),
            ("order.#", "order", true),
            ("#.failed", "inventory.failed", true),
            ("#.failed", "inventory.reserved", false),
        ] {
            assert_eq!(matches_pattern(pattern, key), matches, "{pattern} {key}");
        }
    }

    #[test]
    fn extra_queues_are_read_from_one_line() {
        let read = ExtraQueue::read_many(" analytics.ingest=#; erp.sync=order.*,inventory.failed;").unwrap();
        let expected = [("analytics.ingest", vec!["#"]), ("erp.sync", vec!["order.*", "inventory.failed"])];
        let seen: Vec<_> =
            read.iter().map(|q| (q.queue.as_str(), q.patterns.iter().map(String::as_str).collect())).collect();
        assert_eq!(seen, expected);
        assert!(ExtraQueue::read_many("").unwrap().is_empty());
        for wrong in ["analytics", "=#", "a b=#", "a=", "a=x,,y", "amq.mine=#"] {
            assert!(ExtraQueue::read_many(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_brokers_sentence_on_a_difference_is_understood() {
        let text = "PRECONDITION_FAILED - inequivalent arg 'x-delivery-limit' for queue 'stockade.orders' in vhost \
                    '/': received '50' but current is '20'";
        assert_eq!(read_difference(text), Some(("x-delivery-limit", "20", "50")));
        let text = "PRECONDITION_FAILED - inequivalent arg 'x-dead-letter-exchange' for queue 'q' in vhost '/': \
                    received the value 'stockade.events.dlx' of type 'longstr' but current is none";
        assert_eq!(read_difference(text), Some(("x-dead-letter-exchange", "none", "stockade.events.dlx")));
        assert_eq!(read_difference("something else"), None);
    }

    #[test]
    fn the_advice_names_commands_that_there_are() {
        let text = |kind: &str| {
            format!(
                "PRECONDITION_FAILED - inequivalent arg 'type' for {kind} 'x' in vhost 'shop': received 'a' but current is 'b'"
            )
        };
        let advice = advise("queue", "stockade.orders", &text("queue"));
        assert!(advice.contains("`rabbitmqctl -p shop delete_queue stockade.orders`"), "{advice}");
        let advice = advise("exchange", "stockade.events", &text("exchange"));
        assert!(advice.contains("`rabbitmqadmin -V shop delete exchange name=stockade.events`"), "{advice}");
        assert!(advice.contains("its type is b, Stockade needs a"), "{advice}");
        assert!(!advice.contains("rabbitmqctl"), "{advice}");
    }
}
