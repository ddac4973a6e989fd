//! RabbitMQ as the transport: quorum queues, confirms, manual acknowledgements.
//!
//! Publishing and consuming have a connection each, and each is kept up by [`Rabbit::tend`]. While a link is down, calls
//! fail or say "unknown" at once rather than wait: the outbox keeps what is to be published, the broker what is to be
//! consumed. Nothing here remembers a message; a lost connection loses only the knowledge of what was under way, and
//! that goes out or comes in again under the same id.
//!
//! - [`shape`]: what is declared, and what to say when it is there already but different;
//! - [`declare`]: declares it, and records queues that are missing;
//! - [`greeting`]: what the broker says of itself;
//! - [`link`]: a connection that comes back by itself;
//! - [`publisher`]: verdicts from confirms and returns;
//! - [`subscription`]: deliveries and acknowledgements;
//! - [`wire`]: messages as AMQP has them.

mod declare;
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
use tokio::time::timeout;

use self::declare::Declarations;
use self::link::{Link, LinkState};
use self::publisher::Publisher;
pub use self::shape::ExtraQueue;
use self::shape::{Shape, is_not_found};
pub use self::subscription::RabbitSubscription;
use super::{Condition, Depth, Published, RawMessage, Topology, TransportError, Way};
use crate::messaging::outbox::Claimed;
use crate::messaging::resync::Resyncs;

/// How long the broker may take to say how full its queues are, all together.
const DEPTHS_TIMEOUT: Duration = Duration::from_millis(400);
const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);
const DECLARE_TIMEOUT: Duration = Duration::from_secs(10);
const INSPECT_TIMEOUT: Duration = Duration::from_secs(5);

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

    fn shape(&self, topology: &Topology) -> Shape {
        Shape::new(&self.prefix, topology, &self.extra_queues)
    }
}

/// Says what the broker is, and the arguments of each queue, without a change to it. Fails with what is in a server's way.
pub async fn inspect(options: &Options, topology: &Topology) -> Result<Vec<(String, String)>, String> {
    let uri = options.uri()?;
    let inspecting = async {
        let connecting = Connection::connect_uri(uri.clone(), ConnectionProperties::default());
        let connection = connecting.await.map_err(|error| format!("cannot connect: {error}"))?;
        if connection.status().blocked() {
            return Err("it takes no messages: it is short of memory or disk".to_owned());
        }
        let shape = options.shape(topology);
        let missing = declare::inspect(&connection, &shape).await?;
        let version = greeting::version(&uri.authority.host, uri.authority.port, &uri.scheme).await;
        let version = version.unwrap_or_else(|| "of unknown version".to_owned());
        let summary = if missing.is_empty() {
            "exchanges and queues are as needed"
        } else {
            "missing queues are declared by a server"
        };
        let mut found = vec![("broker".to_owned(), format!("rabbitmq {version}: {summary}"))];
        found.extend(shape.all_queues().map(|(queue, arguments)| {
            let detail = if missing.contains(&queue) { "missing".to_owned() } else { shape::in_one_line(&arguments) };
            (format!("queue {queue}"), detail)
        }));
        // Best effort: the connection is dropped in any case.
        let _ = connection.close(200, "inspected".into()).await;
        Ok(found)
    };
    timeout(INSPECT_TIMEOUT, inspecting).await.unwrap_or_else(|_| Err(format!("no answer within {INSPECT_TIMEOUT:?}")))
}

#[derive(Clone)]
pub struct Rabbit {
    inner: Arc<Inner>,
}

struct Inner {
    options: Options,
    declarations: Arc<Declarations>,
    publishing: Link,
    consuming: Link,
    publisher: Publisher,
    /// The channel to ask for depths on, and what was said last.
    asking: tokio::sync::Mutex<Option<Channel>>,
    last_known: Mutex<HashMap<String, Depth>>,
}

impl Rabbit {
    /// Connects to nothing yet: [`Self::tend`] does. Fails on a URL that cannot be read.
    pub fn try_new(options: Options, resyncs: Resyncs) -> Result<Self, String> {
        let uri = options.uri()?;
        let declarations = Declarations::new(options.shape(&Topology::default()), resyncs);
        let inner = Inner {
            options,
            declarations: Arc::new(declarations),
            publishing: Link::new("publishing", uri.clone()),
            consuming: Link::new("consuming", uri),
            publisher: Publisher::default(),
            asking: tokio::sync::Mutex::new(None),
            last_known: Mutex::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Sets what to declare at each connect from now on.
    pub async fn declare(&self, topology: &Topology) -> sqlx::Result<()> {
        self.inner.declarations.set(self.inner.options.shape(topology), topology).await
    }

    /// Declares one queue now.
    pub async fn declare_queue(&self, queue: &str) -> Result<(), TransportError> {
        let connection = self.inner.publishing.connection()?;
        let declaring = async {
            let channel = connection.create_channel().await.map_err(|error| error.to_string())?;
            self.inner.declarations.declare_one(&connection, &channel, queue).await
        };
        let declared = timeout(DECLARE_TIMEOUT, declaring).await;
        declared
            .unwrap_or_else(|_| Err(format!("no answer within {DECLARE_TIMEOUT:?}")))
            .map_err(TransportError::Broker)
    }

    /// Keeps both links up until cancelled.
    pub async fn tend(self) {
        let Inner { publishing, consuming, declarations, .. } = &*self.inner;
        tokio::join!(publishing.tend(declarations), consuming.tend(declarations));
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
            self.inner.declarations.shape().remove(&connection).await.map_err(failed)
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
        let Inner { publisher, publishing, options, declarations, .. } = &*self.inner;
        publisher.publish(publishing, declarations, batch, options.confirm_timeout).await
    }

    pub async fn publish_raw(&self, message: &RawMessage, times: u32) -> Result<(), TransportError> {
        let Inner { publisher, publishing, options, declarations, .. } = &*self.inner;
        publisher.publish_raw(publishing, declarations, message, times, options.confirm_timeout).await
    }

    pub async fn subscribe(&self, queue: &str) -> Result<RabbitSubscription, TransportError> {
        let connection = self.inner.consuming.connection()?;
        let Inner { declarations, options, .. } = &*self.inner;
        RabbitSubscription::open(connection, declarations.clone(), queue, options.prefetch).await
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
