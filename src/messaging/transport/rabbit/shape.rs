//! The topology on RabbitMQ: which exchanges, queues and bindings there are, with every argument said outright.
//!
//! Nothing is left to a default that differs between broker versions. A queue that is there already with other
//! arguments is never used as it is, because a message rejected on a queue without dead-lettering would be gone: it
//! is reported in words, with what to do, until somebody has done it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lapin::options::{
    ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection, Error, ErrorKind, ExchangeKind};
use tokio::sync::Notify;

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
    queues: Vec<QueueShape>,
    pub made: Arc<Made>,
}

/// Queues of ours that were found missing, and those of them that have been made since: new, or deleted with all that
/// was in them.
#[derive(Debug, Default)]
pub struct Made {
    queues: Mutex<Losses>,
    any: Notify,
}

#[derive(Debug, Default)]
struct Losses {
    missing: BTreeSet<String>,
    made: BTreeSet<String>,
}

impl Made {
    /// Says that a queue is, or may have been, gone. Remembered until it is declared with all its bindings, however
    /// many attempts that takes: only then does it get what is sent to it.
    pub fn missed(&self, queue: &str) {
        self.lock().missing.insert(queue.to_owned());
    }

    fn declared(&self, queue: &str) {
        let mut queues = self.lock();
        if queues.missing.remove(queue) {
            queues.made.insert(queue.to_owned());
            self.any.notify_one();
        }
    }

    /// Waits for a queue that was made.
    pub async fn next(&self) -> String {
        loop {
            let next = self.lock().made.pop_first();
            match next {
                Some(queue) => return queue,
                None => self.any.notified().await,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Losses> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Clone)]
struct QueueShape {
    name: String,
    patterns: Vec<String>,
    is_ours: bool,
}

impl Shape {
    pub fn new(prefix: &str, topology: &Topology, extra: &[ExtraQueue], made: Arc<Made>) -> Self {
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
            made,
        }
    }

    /// Is some queue meant to get what is published under `key`? Then not getting there is a failure.
    pub fn is_bound(&self, key: &str) -> bool {
        self.queues.iter().flat_map(|queue| &queue.patterns).any(|pattern| matches_pattern(pattern, key))
    }

    /// Declares everything. What stands in the way is told of all queues at once.
    pub async fn declare(&self, connection: &Connection) -> Result<(), String> {
        if !is_exchange_there(connection, &self.exchange).await? {
            // Its bindings went with it: until each queue is bound again, others may publish past it.
            self.queues.iter().filter(|queue| queue.is_ours).for_each(|queue| self.made.missed(&queue.name));
        }
        let channel = open(connection).await?;
        self.declare_exchanges(&channel).await?;
        let mut channel = Some(channel);
        let mut wrong = Vec::new();
        for queue in &self.queues {
            // A refused declaration takes its channel with it.
            let used = match channel.take() {
                Some(channel) => channel,
                None => open(connection).await?,
            };
            match self.declare_queue(connection, &used, queue).await {
                Ok(()) => channel = Some(used),
                Err(error) if connection.status().connected() => wrong.push(error),
                Err(error) => return Err(error),
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join(" ")) }
    }

    /// Every queue with its arguments. A queue with others is refused, so once declared these are in force.
    pub fn describe(&self) -> Vec<(String, String)> {
        let both = |queue: &QueueShape| {
            let own = (queue.name.clone(), in_one_line(&self.queue_arguments(queue)));
            [own, (dlq_of(&queue.name), in_one_line(&dlq_arguments()))]
        };
        self.queues.iter().flat_map(both).collect()
    }

    /// Takes everything away that is declared, with what is in it.
    pub async fn remove(&self, connection: &Connection) -> lapin::Result<()> {
        let channel = connection.create_channel().await?;
        for queue in &self.queues {
            for name in [queue.name.clone(), dlq_of(&queue.name)] {
                channel.queue_delete(name.into(), QueueDeleteOptions::default()).await?;
            }
        }
        for exchange in [&self.exchange, &self.dead_letter_exchange] {
            channel.exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default()).await?;
        }
        Ok(())
    }

    /// Declares one queue of ours with its dead-letter queue: somebody may have deleted it meanwhile.
    pub async fn declare_again(&self, connection: &Connection, channel: &Channel, queue: &str) -> Result<(), String> {
        match self.queues.iter().find(|known| known.name == queue || dlq_of(&known.name) == queue) {
            Some(known) => self.declare_queue(connection, channel, known).await,
            None => Ok(()),
        }
    }

    async fn declare_exchanges(&self, channel: &Channel) -> Result<(), String> {
        for (name, kind) in [(&self.exchange, ExchangeKind::Topic), (&self.dead_letter_exchange, ExchangeKind::Direct)]
        {
            let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
            channel
                .exchange_declare(short(name)?, kind, options, FieldTable::default())
                .await
                .map_err(|error| in_words("exchange", name, &error))?;
        }
        Ok(())
    }

    async fn declare_queue(
        &self,
        connection: &Connection,
        channel: &Channel,
        queue: &QueueShape,
    ) -> Result<(), String> {
        if queue.is_ours && !is_there(connection, &queue.name).await? {
            self.made.missed(&queue.name);
        }
        let dlq = dlq_of(&queue.name);
        self.make(channel, &dlq, dlq_arguments()).await?;
        bind(channel, &dlq, &self.dead_letter_exchange, &dlq).await?;
        self.make(channel, &queue.name, self.queue_arguments(queue)).await?;
        for pattern in &queue.patterns {
            bind(channel, &queue.name, &self.exchange, pattern).await?;
        }
        self.made.declared(&queue.name);
        Ok(())
    }

    async fn make(&self, channel: &Channel, name: &str, arguments: FieldTable) -> Result<(), String> {
        let declared = channel.queue_declare(short(name)?, QueueDeclareOptions::durable(), arguments).await;
        declared.map(drop).map_err(|error| in_words("queue", name, &error))
    }

    fn queue_arguments(&self, queue: &QueueShape) -> FieldTable {
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

fn dlq_arguments() -> FieldTable {
    let mut arguments = FieldTable::default();
    set_text(&mut arguments, "x-queue-type", "quorum");
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(DLQ_DELIVERY_LIMIT));
    arguments
}

fn in_one_line(arguments: &FieldTable) -> String {
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

/// A question that is answered with no takes its channel with it, so it has one of its own.
async fn is_there(connection: &Connection, queue: &str) -> Result<bool, String> {
    let channel = open(connection).await?;
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    found(channel.queue_declare(short(queue)?, passive, FieldTable::default()).await)
}

async fn is_exchange_there(connection: &Connection, exchange: &str) -> Result<bool, String> {
    let channel = open(connection).await?;
    let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    found(channel.exchange_declare(short(exchange)?, ExchangeKind::Topic, passive, FieldTable::default()).await)
}

fn found<T>(answer: lapin::Result<T>) -> Result<bool, String> {
    match answer {
        Ok(_) => Ok(true),
        Err(error) if is_not_found(&error) => Ok(false),
        Err(error) => Err(error.to_string()),
    }
}

pub fn is_not_found(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::ProtocolError(refusal) if refusal.get_id() == NOT_FOUND)
}

async fn open(connection: &Connection) -> Result<Channel, String> {
    connection.create_channel().await.map_err(|error| error.to_string())
}

async fn bind(channel: &Channel, queue: &str, exchange: &str, pattern: &str) -> Result<(), String> {
    channel
        .queue_bind(
            short(queue)?,
            short(exchange)?,
            short(pattern)?,
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await
        .map_err(|error| format!("queue {queue} cannot be bound to {exchange} by {pattern}: {error}"))
}

/// AMQP keeps names to 255 bytes.
pub fn short(text: &str) -> Result<ShortString, String> {
    ShortString::try_new(text).map_err(|_| format!("{text:?} is longer than the 255 bytes that AMQP takes"))
}

/// Why a declaration failed, and for one that met something of the same name, what to do about it.
fn in_words(kind: &str, name: &str, error: &Error) -> String {
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
