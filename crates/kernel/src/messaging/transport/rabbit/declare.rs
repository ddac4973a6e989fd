//! Declares the topology: at each connect, and for one queue when its consumer subscribes.
//!
//! A queue of ours that is missing is recorded in the database before it is declared ([`Resyncs`]): what it lost is sent
//! again, whatever happens to this process.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ExchangeKind};

use super::shape::{QueueShape, Shape, dlq_arguments, in_words, is_not_found, short};
use crate::messaging::resync::Resyncs;
use crate::messaging::transport::{Topology, dlq_of};

pub struct Declarations {
    resyncs: Resyncs,
    shape: Mutex<Arc<Shape>>,
    /// One connection declares at a time: another would find the same queue missing.
    turn: tokio::sync::Mutex<()>,
    /// Queues whose consumer the broker cancelled: they were deleted, even if someone has declared them again since.
    suspect: Mutex<BTreeSet<String>>,
}

impl Declarations {
    pub fn new(shape: Shape, resyncs: Resyncs) -> Self {
        Self {
            resyncs,
            shape: Mutex::new(Arc::new(shape)),
            turn: tokio::sync::Mutex::default(),
            suspect: Mutex::default(),
        }
    }

    pub fn shape(&self) -> Arc<Shape> {
        lock(&self.shape).clone()
    }

    /// Sets what to declare at each connect from now on.
    pub async fn set(&self, shape: Shape, topology: &Topology) -> sqlx::Result<()> {
        self.resyncs.record_bindings(&topology.queues).await?;
        *lock(&self.shape) = Arc::new(shape);
        Ok(())
    }

    /// Notes that the consumer of a queue was cancelled by the broker.
    pub fn suspect(&self, queue: &str) {
        lock(&self.suspect).insert(queue.to_owned());
    }

    /// Declares everything. An error names all queues that cannot be declared.
    pub async fn declare_all(&self, connection: &Connection) -> Result<(), String> {
        let _turn = self.turn.lock().await;
        let shape = self.shape();
        if !is_exchange_there(connection, &shape.exchange).await? {
            // Its bindings went with it: events miss every queue that is not bound again yet.
            for queue in shape.queues.iter().filter(|queue| queue.is_ours) {
                self.request_resync(queue).await?;
            }
        }
        let channel = open(connection).await?;
        declare_exchanges(&channel, &shape).await?;
        let mut channel = Some(channel);
        let mut wrong = Vec::new();
        for queue in &shape.queues {
            // A refused declaration closes its channel.
            let used = match channel.take() {
                Some(channel) => channel,
                None => open(connection).await?,
            };
            match self.declare_queue(connection, &used, &shape, queue).await {
                Ok(()) => channel = Some(used),
                Err(error) if connection.status().connected() => wrong.push(error),
                Err(error) => return Err(error),
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join(" ")) }
    }

    /// Declares one queue of ours with its dead-letter queue; either may be named.
    pub async fn declare_one(&self, connection: &Connection, channel: &Channel, queue: &str) -> Result<(), String> {
        let _turn = self.turn.lock().await;
        let shape = self.shape();
        match shape.find(queue) {
            Some(known) => self.declare_queue(connection, channel, &shape, known).await,
            None => Ok(()),
        }
    }

    async fn declare_queue(
        &self,
        connection: &Connection,
        channel: &Channel,
        shape: &Shape,
        queue: &QueueShape,
    ) -> Result<(), String> {
        if queue.is_ours && (lock(&self.suspect).contains(&queue.name) || !is_there(connection, &queue.name).await?) {
            self.request_resync(queue).await?;
        }
        let dlq = dlq_of(&queue.name);
        make(channel, &dlq, dlq_arguments()).await?;
        bind(channel, &dlq, &shape.dead_letter_exchange, &dlq).await?;
        make(channel, &queue.name, shape.queue_arguments(queue)).await?;
        for pattern in &queue.patterns {
            bind(channel, &queue.name, &shape.exchange, pattern).await?;
        }
        Ok(())
    }

    async fn request_resync(&self, queue: &QueueShape) -> Result<(), String> {
        let requested = self.resyncs.request(&queue.name).await;
        requested
            .map_err(|error| format!("{} is missing, which cannot be recorded in the database: {error}", queue.name))?;
        lock(&self.suspect).remove(&queue.name);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn declare_exchanges(channel: &Channel, shape: &Shape) -> Result<(), String> {
    for (name, kind) in [(&shape.exchange, ExchangeKind::Topic), (&shape.dead_letter_exchange, ExchangeKind::Direct)] {
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        channel
            .exchange_declare(short(name)?, kind, options, FieldTable::default())
            .await
            .map_err(|error| in_words("exchange", name, &error))?;
    }
    Ok(())
}

async fn make(channel: &Channel, name: &str, arguments: FieldTable) -> Result<(), String> {
    let declared = channel.queue_declare(short(name)?, QueueDeclareOptions::durable(), arguments).await;
    declared.map(drop).map_err(|error| in_words("queue", name, &error))
}

/// Compares the broker with what a server would declare, and creates nothing: a missing queue is declared by a server,
/// which records it first. Returns the missing exchanges and queues; an error names all that have other arguments.
pub async fn inspect(connection: &Connection, shape: &Shape) -> Result<BTreeSet<String>, String> {
    let mut missing = BTreeSet::new();
    for exchange in [&shape.exchange, &shape.dead_letter_exchange] {
        if !is_exchange_there(connection, exchange).await? {
            missing.insert(exchange.clone());
        }
    }
    if missing.is_empty() {
        declare_exchanges(&open(connection).await?, shape).await?;
    }
    let mut wrong = Vec::new();
    for (queue, arguments) in shape.all_queues() {
        if !is_there(connection, &queue).await? {
            missing.insert(queue);
        } else if let Err(error) = make(&open(connection).await?, &queue, arguments).await {
            wrong.push(error);
        }
    }
    if wrong.is_empty() { Ok(missing) } else { Err(wrong.join(" ")) }
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
