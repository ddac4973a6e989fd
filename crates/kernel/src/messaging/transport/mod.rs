//! The transport port: how messages get from the outbox to the consumers.
//!
//! Every transport delivers at least once. It may repeat and reorder; it may not lose what it accepted, nor hand a
//! message to two consumers while the first one's claim holds. An acknowledged message is gone, a rejected one
//! moves to its queue's dead-letter queue, an abandoned one comes back. `tests/it/transports.rs` holds every
//! implementation to this.

pub mod memory;
pub mod rabbit;
pub mod table;

use std::collections::BTreeSet;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use uuid::Uuid;

use super::event::Event;
use super::outbox::Claimed;
use crate::clock::Timestamp;
use crate::crash_points::{Step, around};

/// Which queues there are and what flows into them.
#[derive(Debug, Clone, Default)]
pub struct Topology {
    pub queues: Vec<Binding>,
}

/// Longest name of a consumer: queue and dead-letter queue names, in which it stands, are limited to 255 bytes.
const NAME_CHARS_MAX: usize = 64;

impl Topology {
    /// Checks that consumers can be told apart, from each other and from the loops in `reserved`, and that events can have
    /// their keys.
    pub fn check(&self, reserved: &[&str]) -> Result<(), String> {
        let mut names = BTreeSet::new();
        for Binding { consumer, keys, .. } in &self.queues {
            if !is_word(consumer) || consumer.len() > NAME_CHARS_MAX {
                return Err(format!(
                    "consumer name {consumer:?}: use 1 to {NAME_CHARS_MAX} of the characters a-z, 0-9, _ and -"
                ));
            }
            if reserved.contains(consumer) {
                return Err(format!("consumer name {consumer:?} is reserved: choose another"));
            }
            if !names.insert(consumer) {
                return Err(format!("two consumers are named {consumer:?}: rename one"));
            }
            if keys.is_empty() {
                return Err(format!("consumer {consumer:?} has no keys: name the events that it takes"));
            }
            for (index, key) in keys.iter().enumerate() {
                if !key.split_once('.').is_some_and(|(aggregate, event)| is_word(aggregate) && is_word(event)) {
                    return Err(format!(
                        "key {key:?} of consumer {consumer:?}: write it as AGGREGATE.EVENT, as in order.placed"
                    ));
                }
                if keys[..index].contains(key) {
                    return Err(format!("consumer {consumer:?} has the key {key:?} twice"));
                }
            }
        }
        Ok(())
    }
}

fn is_word(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-".contains(&byte);
    !text.is_empty() && text.bytes().all(is_allowed)
}

/// A consumer's queue and the routing keys bound to it.
#[derive(Debug, Clone)]
pub struct Binding {
    /// The short name, `inventory`.
    pub consumer: &'static str,
    /// The full name, `stockade.inventory`.
    pub queue: String,
    pub keys: &'static [&'static str],
}

/// The dead-letter queue of a queue.
pub fn dlq_of(queue: &str) -> String {
    format!("{queue}.dlq")
}

/// A message handed to a consumer, to be acknowledged or rejected by its tag.
#[derive(Debug, Clone)]
pub struct Delivery {
    pub tag: Tag,
    /// Names this message for as long as it exists, where a transport has such a name.
    pub lasting_id: Option<i64>,
    /// It came straight from the commit of this process that wrote it: very likely nobody has met its event yet.
    pub handed_over: bool,
    /// What its body says, if whoever wrote it is of this process and has said so.
    pub written: Option<Arc<Event>>,
    pub message_id: Option<String>,
    pub routing_key: String,
    pub correlation_id: Option<String>,
    pub headers: serde_json::Map<String, Value>,
    pub body: Bytes,
    /// 1 at first; more means that an earlier delivery was not settled.
    pub deliveries: u32,
    /// The history of rejections, in RabbitMQ's shape; null for a message never rejected.
    pub x_death: Value,
}

impl Delivery {
    /// A header's value as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(Value::as_str)
    }
}

/// Names one delivery. Good only on the subscription that handed it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tag {
    pub id: i64,
    pub token: Uuid,
}

/// A message put straight into a queue or under a routing key, whatever its bytes.
#[derive(Debug, Clone)]
pub struct RawMessage {
    /// The full queue name, or empty to route by `routing_key`.
    pub queue: String,
    pub routing_key: String,
    pub message_id: Option<String>,
    pub correlation_id: Option<String>,
    pub headers: serde_json::Map<String, Value>,
    pub body: Bytes,
}

/// What the broker said of one published message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Accepted,
    /// The broker's word on this message: it counts as an attempt.
    Refused(String),
    /// No word: the link broke or stayed silent. Counts for nothing.
    Unknown,
}

/// What came of a batch: one verdict per message, in order.
#[derive(Debug)]
pub struct Published {
    pub verdicts: Vec<Verdict>,
    /// Why some got none, though the broker can be reached.
    pub trouble: Option<String>,
}

impl From<Vec<Verdict>> for Published {
    fn from(verdicts: Vec<Verdict>) -> Self {
        Self { verdicts, trouble: None }
    }
}

/// How full a queue is. `None` where the transport cannot know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Depth {
    pub queue: String,
    pub ready: i64,
    pub in_flight: Option<i64>,
    pub consumers: Option<i64>,
    pub oldest_enqueued_at: Option<Timestamp>,
    /// True for the last known values of a broker that cannot be asked.
    pub stale: bool,
}

/// Which way messages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Out,
    In,
}

/// Can the broker be worked with?
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    Up,
    /// It is there and takes no messages; why.
    Blocked(String),
    /// It cannot be reached or used; why.
    Down(String),
}

#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    #[error("the queue's database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("the broker: {0}")]
    Broker(String),
}

/// The transports there are; a closed set, so an enum.
#[derive(Clone)]
pub enum Transport {
    Table(table::TableQueue),
    Memory(memory::MemoryBroker),
    Rabbit(rabbit::Rabbit),
}

impl Transport {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Table(_) => "embedded",
            Self::Memory(_) => "memory",
            Self::Rabbit(_) => "rabbitmq",
        }
    }

    pub async fn declare(&self, topology: &Topology) -> Result<(), TransportError> {
        match self {
            Self::Table(table) => table.declare(topology).await,
            Self::Memory(memory) => memory.declare(topology),
            Self::Rabbit(rabbit) => Ok(rabbit.declare(topology).await?),
        }
    }

    /// Keeps the connections to a broker up until cancelled; does nothing where there are none.
    pub async fn tend(&self) {
        match self {
            Self::Table(_) | Self::Memory(_) => std::future::pending().await,
            Self::Rabbit(rabbit) => rabbit.clone().tend().await,
        }
    }

    /// Declares one queue of the topology now, if that is not done already.
    pub async fn declare_queue(&self, queue: &str) -> Result<(), TransportError> {
        match self {
            Self::Table(_) | Self::Memory(_) => Ok(()),
            Self::Rabbit(rabbit) => rabbit.declare_queue(queue).await,
        }
    }

    /// How the broker is; `None` for a queue that is as well as its database.
    pub fn condition(&self) -> Option<Condition> {
        match self {
            Self::Table(_) | Self::Memory(_) => None,
            Self::Rabbit(rabbit) => Some(rabbit.condition()),
        }
    }

    /// How many messages a broker lets a consumer hold at once; 0 where the queues themselves tell what is held.
    pub fn prefetch(&self) -> u16 {
        match self {
            Self::Table(_) | Self::Memory(_) => 0,
            Self::Rabbit(rabbit) => rabbit.prefetch(),
        }
    }

    /// Why nothing can be published (or consumed) just now, if so.
    pub fn obstacle(&self, way: Way) -> Option<String> {
        match self {
            Self::Table(_) | Self::Memory(_) => None,
            Self::Rabbit(rabbit) => rabbit.obstacle(way),
        }
    }

    /// Waits until there is no obstacle.
    pub async fn until_open(&self, way: Way) {
        if let Self::Rabbit(rabbit) = self {
            rabbit.until_open(way).await;
        }
    }

    pub async fn close(&self) {
        if let Self::Rabbit(rabbit) = self {
            rabbit.close().await;
        }
    }

    /// Publishes what a relay has claimed. The table queue has no such road: its relay hands rows on inside the database.
    #[track_caller]
    pub fn publish(&self, batch: &[Claimed]) -> impl Future<Output = Published> + Send {
        let work = async move {
            match self {
                Self::Table(_) => vec![Verdict::Unknown; batch.len()].into(),
                Self::Memory(memory) => memory.publish(batch).await.into(),
                Self::Rabbit(rabbit) => rabbit.publish(batch).await,
            }
        };
        around(Step::Publish, Location::caller(), work)
    }

    /// Puts bytes into a queue, past the outbox: what a foreign program could do.
    #[track_caller]
    pub fn publish_raw(
        &self,
        message: &RawMessage,
        times: u32,
    ) -> impl Future<Output = Result<(), TransportError>> + Send {
        let work = async move {
            match self {
                Self::Table(table) => table.publish_raw(message, times).await,
                Self::Memory(memory) => memory.publish_raw(message, times),
                Self::Rabbit(rabbit) => rabbit.publish_raw(message, times).await,
            }
        };
        around(Step::Publish, Location::caller(), work)
    }

    pub async fn subscribe(&self, queue: &str) -> Result<Subscription, TransportError> {
        Ok(match self {
            Self::Table(table) => Subscription::Table(Box::new(table.subscribe(queue))),
            Self::Memory(memory) => Subscription::Memory(memory.subscribe(queue)),
            Self::Rabbit(rabbit) => Subscription::Rabbit(Box::new(rabbit.subscribe(queue).await?)),
        })
    }

    /// The depth of each queue given, in order.
    pub async fn depths(&self, queues: &[String]) -> Result<Vec<Depth>, TransportError> {
        match self {
            Self::Table(table) => table.depths(queues).await,
            Self::Memory(memory) => Ok(memory.depths(queues)),
            Self::Rabbit(rabbit) => Ok(rabbit.depths(queues).await),
        }
    }
}

/// A consumer's hold on a queue. What it took and did not settle comes back once it is dropped or its lease ends.
pub enum Subscription {
    Table(Box<table::TableSubscription>),
    Memory(memory::MemorySubscription),
    Rabbit(Box<rabbit::RabbitSubscription>),
}

impl Subscription {
    /// Waits until there may be something to take. Safe to cancel: it takes nothing.
    pub async fn ready(&mut self, poll: Duration) {
        match self {
            Self::Table(table) => table.ready(poll).await,
            Self::Memory(memory) => memory.ready(poll).await,
            Self::Rabbit(rabbit) => rabbit.ready(poll).await,
        }
    }

    /// From now on takes messages that are written in this process from hand to hand, where a transport can.
    pub fn open_hatch(&mut self) {
        if let Self::Table(table) = self {
            table.open_hatch();
        }
    }

    /// Takes what is there now, up to `max`; often nothing. Not to be cancelled.
    pub async fn take(&mut self, max: usize) -> Result<Vec<Delivery>, TransportError> {
        match self {
            Self::Table(table) => table.take(max).await,
            Self::Memory(memory) => Ok(memory.take(max)),
            Self::Rabbit(rabbit) => rabbit.take(max),
        }
    }

    #[track_caller]
    pub fn ack(&mut self, tags: &[Tag]) -> impl Future<Output = Result<(), TransportError>> + Send {
        let work = async move {
            match self {
                Self::Table(table) => table.ack(tags).await,
                Self::Memory(memory) => memory.ack(tags).await,
                Self::Rabbit(rabbit) => rabbit.ack(tags).await,
            }
        };
        around(Step::Acknowledge, Location::caller(), work)
    }

    /// Acknowledges at a time of the transport's choosing: soon, or on closing.
    #[track_caller]
    pub fn ack_soon(&mut self, tags: &[Tag]) -> impl Future<Output = Result<(), TransportError>> + Send {
        let work = async move {
            match self {
                Self::Table(table) => {
                    table.ack_soon(tags);
                    Ok(())
                }
                Self::Memory(memory) => memory.ack(tags).await,
                Self::Rabbit(rabbit) => rabbit.ack(tags).await,
            }
        };
        around(Step::Acknowledge, Location::caller(), work)
    }

    /// Sends messages to the dead-letter queue.
    #[track_caller]
    pub fn reject(&mut self, tags: &[Tag]) -> impl Future<Output = Result<(), TransportError>> + Send {
        let work = async move {
            match self {
                Self::Table(table) => table.reject(tags).await,
                Self::Memory(memory) => memory.reject(tags),
                Self::Rabbit(rabbit) => rabbit.reject(tags).await,
            }
        };
        around(Step::Reject, Location::caller(), work)
    }

    /// Puts messages back as if they had never been taken. RabbitMQ counts the delivery all the same.
    #[track_caller]
    pub fn release(&mut self, tags: &[Tag]) -> impl Future<Output = Result<(), TransportError>> + Send {
        let work = async move {
            match self {
                Self::Table(table) => table.release(tags).await,
                Self::Memory(memory) => memory.release(tags),
                Self::Rabbit(rabbit) => rabbit.release(tags).await,
            }
        };
        around(Step::Release, Location::caller(), work)
    }

    /// Keeps the hold on what was taken while it is worked on: never returns, to be raced against the work.
    pub async fn keep(&self, tags: &[Tag]) {
        match self {
            Self::Table(table) => table.keep(tags).await,
            Self::Memory(_) | Self::Rabbit(_) => std::future::pending().await,
        }
    }

    /// Fails once a broker has taken back what was handed out here.
    pub fn check(&self) -> Result<(), TransportError> {
        match self {
            Self::Table(_) | Self::Memory(_) => Ok(()),
            Self::Rabbit(rabbit) => rabbit.check(),
        }
    }

    /// Takes nothing more from the queue; what has arrived here already is still handed out by [`Self::take`].
    pub async fn wind_down(&mut self) {
        match self {
            Self::Table(table) => table.wind_down(),
            Self::Memory(memory) => memory.wind_down(),
            Self::Rabbit(rabbit) => rabbit.wind_down().await,
        }
    }

    pub async fn close(self) {
        match self {
            Self::Table(table) => table.close().await,
            Self::Memory(_) => {}
            Self::Rabbit(rabbit) => rabbit.close().await,
        }
    }
}

/// An entry of `x-death`, in RabbitMQ's shape.
pub fn death_record(queue: &str, routing_key: &str, reason: &str, at: Timestamp) -> Value {
    serde_json::json!({
        "count": 1, "exchange": "", "queue": queue, "reason": reason, "routing-keys": [routing_key], "time": at,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consumers_that_cannot_be_told_apart_and_keys_that_no_event_has_are_refused() {
        type Consumers = &'static [(&'static str, &'static [&'static str])];
        let check = |consumers: Consumers| {
            let bind = |(consumer, keys): &(&'static str, &'static [&'static str])| Binding {
                consumer,
                queue: format!("test.{consumer}"),
                keys,
            };
            Topology { queues: consumers.iter().map(bind).collect() }.check(&["relay"])
        };
        assert_eq!(
            check(&[("loyalty", &["order.paid"]), ("points-2", &["order.paid", "stock_adjustment.posted"])]),
            Ok(())
        );
        let refused: [(Consumers, &str); 8] = [
            (&[("loyalty", &["a.b"]), ("loyalty", &["a.c"])], "two consumers are named"),
            (&[("relay", &["a.b"])], "is reserved"),
            (&[("", &["a.b"])], "consumer name"),
            (&[("Loyalty points", &["a.b"])], "consumer name"),
            (&[("loyalty", &[])], "has no keys"),
            (&[("loyalty", &["placed"])], "AGGREGATE.EVENT"),
            (&[("loyalty", &["order.*"])], "AGGREGATE.EVENT"),
            (&[("loyalty", &["a.b", "a.b"])], "twice"),
        ];
        for (consumers, why) in refused {
            let error = check(consumers).unwrap_err();
            assert!(error.contains(why), "{consumers:?}: {error}");
        }
    }
}
