//! A broker in memory that misbehaves by the seed: repeats, reorders, loses confirms and acks, refuses.
//!
//! For tests and simulation only, and never a default: it forgets everything with the process. The same seed and
//! the same calls give the same misbehaviour.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use tokio::sync::Notify;
use uuid::Uuid;

use super::{Delivery, Depth, RawMessage, Tag, Topology, TransportError, Verdict, death_record, dlq_of};
use crate::clock::{Clock, Timestamp, mint_id};
use crate::messaging::outbox::Claimed;

/// How likely each kind of misbehaviour is, from 0 to 1.
#[derive(Debug, Clone, Copy, Default)]
pub struct Chaos {
    /// A published message is stored twice.
    pub duplicate: f64,
    /// A message jumps to a random place in its queue.
    pub reorder: f64,
    /// A message is stored, but its confirm is lost.
    pub lose_confirm: f64,
    /// A message is refused outright.
    pub refuse: f64,
    /// An acknowledgement is lost, and its message delivered again.
    pub lose_ack: f64,
}

#[derive(Clone)]
pub struct MemoryBroker {
    state: Arc<Mutex<State>>,
    arrived: Arc<Notify>,
    clock: Clock,
}

struct State {
    rng: StdRng,
    chaos: Chaos,
    bindings: HashMap<&'static str, Vec<String>>,
    queues: HashMap<String, VecDeque<Stored>>,
    next_id: i64,
}

#[derive(Clone)]
struct Stored {
    id: i64,
    message_id: Option<String>,
    routing_key: String,
    correlation_id: Option<String>,
    headers: serde_json::Map<String, Value>,
    body: Bytes,
    deliveries: u32,
    x_death: Value,
    enqueued_at: Timestamp,
}

impl State {
    fn happens(&mut self, likely: fn(&Chaos) -> f64) -> bool {
        let probability = likely(&self.chaos);
        probability > 0.0 && self.rng.random_bool(probability)
    }

    fn store(&mut self, queue: &str, mut message: Stored) {
        let copies = if self.happens(|chaos| chaos.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            self.next_id += 1;
            message.id = self.next_id;
            let reorder = self.happens(|chaos| chaos.reorder);
            let waiting = self.queues.entry(queue.to_owned()).or_default();
            let place = if reorder { self.rng.random_range(0..=waiting.len()) } else { waiting.len() };
            waiting.insert(place, message.clone());
        }
    }

    fn route(&self, queue: &str, routing_key: &str) -> Vec<String> {
        match queue {
            "" => self.bindings.get(routing_key).cloned().unwrap_or_default(),
            queue => vec![queue.to_owned()],
        }
    }
}

impl MemoryBroker {
    pub fn new(seed: u64, chaos: Chaos, clock: Clock) -> Self {
        let state = State {
            rng: StdRng::seed_from_u64(seed),
            chaos,
            bindings: HashMap::new(),
            queues: HashMap::new(),
            next_id: 0,
        };
        Self { state: Arc::new(Mutex::new(state)), arrived: Arc::new(Notify::new()), clock }
    }

    /// Ends all misbehaviour, so that a test can see things settle.
    pub fn heal(&self) {
        self.lock().chaos = Chaos::default();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn declare(&self, topology: &Topology) -> Result<(), TransportError> {
        let mut state = self.lock();
        for binding in &topology.queues {
            for key in binding.keys {
                let queues = state.bindings.entry(key).or_default();
                if !queues.contains(&binding.queue) {
                    queues.push(binding.queue.clone());
                }
            }
        }
        Ok(())
    }

    /// Yields before the messages are stored and before the caller learns of it, so that a caller can be dropped at
    /// either moment, as with a broker behind a network.
    pub async fn publish(&self, batch: &[Claimed]) -> Vec<Verdict> {
        tokio::task::yield_now().await;
        let verdicts = self.store_all(batch);
        tokio::task::yield_now().await;
        verdicts
    }

    fn store_all(&self, batch: &[Claimed]) -> Vec<Verdict> {
        let now = self.clock.now();
        let mut state = self.lock();
        let verdicts = batch
            .iter()
            .map(|claimed| {
                if state.happens(|chaos| chaos.refuse) {
                    return Verdict::Refused("refused by the seed".to_owned());
                }
                let headers: serde_json::Map<String, Value> =
                    serde_json::from_str(&claimed.headers).unwrap_or_default();
                let message_id = match claimed.is_redrive() {
                    true => headers.get("x-message-id").and_then(Value::as_str).map(str::to_owned),
                    false => Some(claimed.event_id.to_string()),
                };
                let message = Stored {
                    id: 0,
                    message_id,
                    routing_key: claimed.routing_key(),
                    correlation_id: Some(claimed.correlation_id.clone()),
                    headers,
                    body: claimed.body.clone(),
                    deliveries: 0,
                    x_death: Value::Null,
                    enqueued_at: now,
                };
                for queue in state.route(&claimed.target, &message.routing_key) {
                    state.store(&queue, message.clone());
                }
                if state.happens(|chaos| chaos.lose_confirm) { Verdict::Unknown } else { Verdict::Accepted }
            })
            .collect();
        drop(state);
        self.arrived.notify_waiters();
        verdicts
    }

    pub fn publish_raw(&self, message: &RawMessage, times: u32) -> Result<(), TransportError> {
        let mut state = self.lock();
        let stored = Stored {
            id: 0,
            message_id: message.message_id.clone(),
            routing_key: message.routing_key.clone(),
            correlation_id: message.correlation_id.clone(),
            headers: message.headers.clone(),
            body: message.body.clone(),
            deliveries: 0,
            x_death: Value::Null,
            enqueued_at: self.clock.now(),
        };
        for queue in state.route(&message.queue, &message.routing_key) {
            for _ in 0..times {
                state.store(&queue, stored.clone());
            }
        }
        drop(state);
        self.arrived.notify_waiters();
        Ok(())
    }

    pub fn subscribe(&self, queue: &str) -> MemorySubscription {
        MemorySubscription {
            broker: self.clone(),
            queue: queue.to_owned(),
            token: mint_id(),
            taken: Vec::new(),
            winding_down: false,
        }
    }

    pub fn depths(&self, queues: &[String]) -> Vec<Depth> {
        let state = self.lock();
        queues
            .iter()
            .map(|queue| {
                let waiting = state.queues.get(queue);
                Depth {
                    queue: queue.clone(),
                    ready: waiting.map_or(0, |waiting| i64::try_from(waiting.len()).unwrap_or(i64::MAX)),
                    in_flight: None,
                    consumers: None,
                    oldest_enqueued_at: waiting.and_then(|w| w.iter().map(|m| m.enqueued_at).min()),
                    stale: false,
                }
            })
            .collect()
    }
}

/// Dropped with messages in hand, it puts them back: what a broker does when a consumer's link breaks.
pub struct MemorySubscription {
    broker: MemoryBroker,
    queue: String,
    token: Uuid,
    taken: Vec<Stored>,
    winding_down: bool,
}

impl MemorySubscription {
    pub async fn ready(&mut self, poll: Duration) {
        let arrived = self.broker.arrived.clone();
        let arrived = arrived.notified();
        if self.broker.lock().queues.get(&self.queue).is_some_and(|waiting| !waiting.is_empty()) {
            return;
        }
        tokio::select! {
            () = arrived => {}
            () = tokio::time::sleep(poll) => {}
        }
    }

    pub fn wind_down(&mut self) {
        self.winding_down = true;
    }

    pub fn take(&mut self, max: usize) -> Vec<Delivery> {
        if self.winding_down {
            return Vec::new();
        }
        let mut state = self.broker.lock();
        let waiting = state.queues.entry(self.queue.clone()).or_default();
        let count = waiting.len().min(max);
        let taken: Vec<Stored> = waiting.drain(..count).collect();
        drop(state);
        taken
            .into_iter()
            .map(|mut message| {
                message.deliveries += 1;
                let delivery = Delivery {
                    tag: Tag { id: message.id, token: self.token },
                    lasting_id: Some(message.id),
                    handed_over: false,
                    written: None,
                    message_id: message.message_id.clone(),
                    routing_key: message.routing_key.clone(),
                    correlation_id: message.correlation_id.clone(),
                    headers: message.headers.clone(),
                    body: message.body.clone(),
                    deliveries: message.deliveries,
                    x_death: message.x_death.clone(),
                };
                self.taken.push(message);
                delivery
            })
            .collect()
    }

    /// Yields first, so that a consumer can be dropped between its commit and its acknowledgement.
    pub async fn ack(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        tokio::task::yield_now().await;
        let broker = self.broker.clone();
        let mut state = broker.lock();
        for message in self.settle(tags) {
            if state.happens(|chaos| chaos.lose_ack) {
                state.queues.entry(self.queue.clone()).or_default().push_back(message);
            }
        }
        drop(state);
        broker.arrived.notify_waiters();
        Ok(())
    }

    pub fn reject(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        let broker = self.broker.clone();
        let now = broker.clock.now();
        let mut state = broker.lock();
        for mut message in self.settle(tags) {
            let mut deaths = vec![death_record(&self.queue, &message.routing_key, "rejected", now)];
            deaths.extend(message.x_death.as_array().cloned().unwrap_or_default());
            message.x_death = Value::Array(deaths);
            message.deliveries = 0;
            state.queues.entry(dlq_of(&self.queue)).or_default().push_back(message);
        }
        drop(state);
        broker.arrived.notify_waiters();
        Ok(())
    }

    pub fn release(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        let broker = self.broker.clone();
        let mut state = broker.lock();
        for mut message in self.settle(tags) {
            message.deliveries -= 1;
            state.queues.entry(self.queue.clone()).or_default().push_front(message);
        }
        drop(state);
        broker.arrived.notify_waiters();
        Ok(())
    }

    fn settle(&mut self, tags: &[Tag]) -> Vec<Stored> {
        let token = self.token;
        let (settled, kept) = std::mem::take(&mut self.taken)
            .into_iter()
            .partition(|message| tags.contains(&Tag { id: message.id, token }));
        self.taken = kept;
        settled
    }
}

impl Drop for MemorySubscription {
    fn drop(&mut self) {
        let mut state = self.broker.lock();
        let waiting = state.queues.entry(self.queue.clone()).or_default();
        for message in self.taken.drain(..).rev() {
            waiting.push_front(message);
        }
        drop(state);
        self.broker.arrived.notify_waiters();
    }
}
