//! RabbitMQ as the transport: quorum queues, confirms, manual acknowledgements.
//!
//! Publishing and consuming have a connection each, and each is kept up by [`Rabbit::tend`]. While a link is down, calls
//! fail or say "unknown" at once rather than wait: the outbox keeps what is to be published, the broker what is to be
//! consumed. Nothing here remembers a message; a lost connection loses only the knowledge of what was under way, and
//! that goes out or comes in again under the same id.
//!
//! - [`shape`]: what is declared, and what to say when it is there already but different;
//! - [`greeting`]: what the broker says of itself;
//! - [`link`]: a connection that comes back by itself;
//! - [`publisher`]: verdicts from confirms and returns;
//! - [`subscription`]: deliveries and acknowledgements;
//! - [`wire`]: messages as AMQP has them.

mod greeting;
mod link;
mod publisher;
mod shape;
mod subscription;
mod wire;

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties};
use tokio::sync::watch;
use tokio::time::timeout;

use self::link::{Link, LinkState};
use self::publisher::Publisher;
pub use self::shape::ExtraQueue;
use self::shape::{Made, Shape, is_not_found};
pub use self::subscription::RabbitSubscription;
use super::{Condition, Depth, Published, RawMessage, Topology, TransportError, Way};
use crate::messaging::outbox::Claimed;

/// How long the broker may take to say how full its queues are, all together.
const DEPTHS_TIMEOUT: Duration = Duration::from_millis(400);
const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);

/// How to reach the broker and what to ask of it.
#[derive(Clone)]
pub struct Options {
    /// `amqp://user:password@host:port/vhost` or `amqps://…`.
    pub url: String,
    /// What exchange names begin with; queues bring their full names.
    pub prefix: String,
    pub extra_queues: Vec<ExtraQueue>,
    /// Deliveries that a consumer may hold unacknowledged.
    pub prefetch: u16,
    /// A broker that is silent for twice this long is gone.
    pub heartbeat: Duration,
    /// How long the next confirm may take before what waits for one counts as neither accepted nor refused.
    pub confirm_timeout: Duration,
}

impl Options {
    /// The URL as lapin reads it, or what is wrong with it.
    pub fn uri(&self) -> Result<AMQPUri, String> {
        let mut uri = AMQPUri::from_str(&self.url)?;
        if uri.query.heartbeat.is_none() {
            uri.query.heartbeat = Some(u16::try_from(self.heartbeat.as_secs()).unwrap_or(u16::MAX).max(1));
        }
        Ok(uri)
    }
}

#[derive(Clone)]
pub struct Rabbit {
    inner: Arc<Inner>,
}

struct Inner {
    options: Options,
    made: Arc<Made>,
    shape: watch::Sender<Arc<Shape>>,
    publishing: Link,
    consuming: Link,
    publisher: Publisher,
    /// The channel to ask for depths on, and what was said last.
    asking: tokio::sync::Mutex<Option<Channel>>,
    last_known: Mutex<HashMap<String, Depth>>,
}

impl Rabbit {
    /// Connects to nothing yet: [`Self::tend`] does. Fails on a URL that cannot be read.
    pub fn try_new(options: Options) -> Result<Self, String> {
        let uri = options.uri()?;
        let made = Arc::new(Made::default());
        let shape = Shape::new(&options.prefix, &Topology::default(), &options.extra_queues, made.clone());
        let inner = Inner {
            options,
            made,
            shape: watch::Sender::new(Arc::new(shape)),
            publishing: Link::new("publishing", uri.clone()),
            consuming: Link::new("consuming", uri),
            publisher: Publisher::default(),
            asking: tokio::sync::Mutex::new(None),
            last_known: Mutex::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Says what to declare, at each connect from now on.
    pub fn declare(&self, topology: &Topology) {
        let Inner { options, made, .. } = &*self.inner;
        let shape = Shape::new(&options.prefix, topology, &options.extra_queues, made.clone());
        self.inner.shape.send_replace(Arc::new(shape));
    }

    /// The broker's version if it tells, and every queue with its arguments, which are in force once it is connected.
    pub async fn describe(&self) -> (Option<String>, Vec<(String, String)>) {
        let uri = self.inner.publishing.uri();
        (greeting::version(&uri.authority.host, uri.authority.port, &uri.scheme).await, self.shape().describe())
    }

    /// Waits for a queue of ours that had to be made, because it was not there.
    pub async fn next_made(&self) -> String {
        self.inner.made.next().await
    }

    /// Keeps both links up until cancelled.
    pub async fn tend(self) {
        let shape = self.inner.shape.subscribe();
        tokio::join!(self.inner.publishing.tend(&shape), self.inner.consuming.tend(&shape));
    }

    /// Says goodbye to the broker.
    pub async fn close(&self) {
        tokio::join!(self.inner.publishing.close(), self.inner.consuming.close());
    }

    /// Takes every exchange and queue of its own away from the broker, with what is in them: for a run on names of its
    /// own that is over.
    pub async fn remove(&self) -> Result<(), TransportError> {
        let failed = |error: lapin::Error| TransportError::Broker(error.to_string());
        let uri = self.inner.options.uri().map_err(TransportError::Broker)?;
        let removing = async {
            let connection = Connection::connect_uri(uri, ConnectionProperties::default()).await.map_err(failed)?;
            self.shape().remove(&connection).await.map_err(failed)
        };
        let in_time = timeout(REMOVE_TIMEOUT, removing).await;
        in_time.unwrap_or_else(|_| Err(TransportError::Broker(format!("no answer within {REMOVE_TIMEOUT:?}"))))
    }

    pub fn prefetch(&self) -> u16 {
        self.inner.options.prefetch
    }

    /// The worse of the two links.
    pub fn condition(&self) -> Condition {
        match (self.inner.publishing.state(), self.inner.consuming.state()) {
            (LinkState::Up(_), LinkState::Up(_)) => Condition::Up,
            (LinkState::Down(why), _) | (_, LinkState::Down(why)) => Condition::Down(why),
            (LinkState::Blocked(why), _) | (_, LinkState::Blocked(why)) => Condition::Blocked(why),
        }
    }

    /// Why nothing can be published (or consumed) just now, if so.
    pub fn obstacle(&self, way: Way) -> Option<String> {
        match self.link(way).state() {
            LinkState::Up(_) => None,
            LinkState::Down(why) | LinkState::Blocked(why) => Some(why),
        }
    }

    /// Waits until there is no obstacle.
    pub async fn until_open(&self, way: Way) {
        self.link(way).until_up(true).await;
    }

    pub async fn publish(&self, batch: &[Claimed]) -> Published {
        let Inner { publisher, publishing, options, .. } = &*self.inner;
        publisher.publish(publishing, &self.shape(), batch, options.confirm_timeout).await
    }

    pub async fn publish_raw(&self, message: &RawMessage, times: u32) -> Result<(), TransportError> {
        let Inner { publisher, publishing, options, .. } = &*self.inner;
        publisher.publish_raw(publishing, &self.shape(), message, times, options.confirm_timeout).await
    }

    pub async fn subscribe(&self, queue: &str) -> Result<RabbitSubscription, TransportError> {
        let connection = self.inner.consuming.connection()?;
        RabbitSubscription::open(connection, &self.shape(), queue, self.inner.options.prefetch).await
    }

    /// What the broker says now, or else what it said last, marked as stale.
    pub async fn depths(&self, queues: &[String]) -> Vec<Depth> {
        if let Ok(Err(error)) | Err(error) =
            timeout(DEPTHS_TIMEOUT, self.ask(queues)).await.map_err(|_| "no answer in time".to_owned())
        {
            tracing::debug!(error, "the broker cannot be asked for its depths");
            self.inner.last_known().values_mut().for_each(|depth| depth.stale = true);
        }
        let known = self.inner.last_known();
        queues.iter().map(|queue| known.get(queue).cloned().unwrap_or_else(|| unknown(queue, true))).collect()
    }

    async fn ask(&self, queues: &[String]) -> Result<(), String> {
        let mut asking = self.inner.asking.lock().await;
        for queue in queues {
            let channel = match asking.take().filter(|channel| channel.status().connected()) {
                Some(channel) => channel,
                None => {
                    let connection = self.inner.consuming.connection().map_err(|error| error.to_string())?;
                    connection.create_channel().await.map_err(|error| error.to_string())?
                }
            };
            let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            let depth = match channel.queue_declare(shape::short(queue)?, passive, FieldTable::default()).await {
                Ok(found) => {
                    *asking = Some(channel);
                    Depth {
                        ready: i64::from(found.message_count()),
                        consumers: Some(i64::from(found.consumer_count())),
                        ..unknown(queue, false)
                    }
                }
                // The channel is gone with that; the queue will be declared again by whoever needs it.
                Err(error) if is_not_found(&error) => unknown(queue, false),
                Err(error) => return Err(error.to_string()),
            };
            self.inner.last_known().insert(queue.clone(), depth);
        }
        Ok(())
    }

    fn link(&self, way: Way) -> &Link {
        match way {
            Way::Out => &self.inner.publishing,
            Way::In => &self.inner.consuming,
        }
    }

    fn shape(&self) -> Arc<Shape> {
        self.inner.shape.borrow().clone()
    }
}

impl Inner {
    fn last_known(&self) -> std::sync::MutexGuard<'_, HashMap<String, Depth>> {
        self.last_known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A broker tells how much is ready and who consumes, not what is in flight nor how old.
fn unknown(queue: &str, stale: bool) -> Depth {
    Depth { queue: queue.to_owned(), ready: 0, in_flight: None, consumers: None, oldest_enqueued_at: None, stale }
}
