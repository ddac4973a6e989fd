//! One supervised connection: connect, declare, stay up, back off, again, for as long as the process runs.
//!
//! Whoever needs the connection asks for it and gets it or the reason why not; nobody else connects. Publishing and
//! consuming have a link each: the broker stops reading from a connection that publishes while it is short of
//! memory or disk, and acknowledgements must not be stuck behind that.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties, Event};
use rand::RngExt;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::declare::Declarations;
use crate::messaging::transport::TransportError;

/// A handshake has no timeout of its own: a broker that accepts and says nothing would hang it for ever.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const DECLARE_TIMEOUT: Duration = Duration::from_secs(15);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
const BACKOFF_BASE: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// A link that held this long was good: the next trouble is a new one and backs off from the start.
const STEADY: Duration = Duration::from_secs(10);
/// Every loss is told by an event; this is for one that is not.
const LOOK_EVERY: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub enum LinkState {
    Down(String),
    /// The broker is short of memory or disk and takes nothing from this connection.
    Blocked(String),
    Up(Arc<Connection>),
}

pub struct Link {
    role: &'static str,
    uri: AMQPUri,
    state: watch::Sender<LinkState>,
    /// Counts how often a user of the link has found its connection useless.
    useless: watch::Sender<u64>,
}

impl Link {
    pub fn new(role: &'static str, uri: AMQPUri) -> Self {
        let state = watch::Sender::new(LinkState::Down("not connected yet".to_owned()));
        Self { role, uri, state, useless: watch::Sender::new(0) }
    }

    pub fn state(&self) -> LinkState {
        self.state.borrow().clone()
    }

    /// The connection, or why there is none just now.
    pub fn connection(&self) -> Result<Arc<Connection>, TransportError> {
        match self.state() {
            LinkState::Up(connection) => Ok(connection),
            LinkState::Down(why) | LinkState::Blocked(why) => Err(TransportError::Broker(why)),
        }
    }

    /// Waits until the link is (or is no longer) up.
    pub async fn until_up(&self, up: bool) {
        let wanted = |state: &LinkState| matches!(state, LinkState::Up(_)) == up;
        if self.state.subscribe().wait_for(wanted).await.is_err() {
            std::future::pending::<()>().await; // nobody is left to change it: shutting down
        }
    }

    /// Has the connection closed and made anew.
    pub fn give_up_on(&self, why: &str) {
        tracing::warn!(link = self.role, why, "the connection to the broker is of no use; making a new one");
        self.useless.send_modify(|times| *times += 1);
    }

    /// Keeps the link up until cancelled.
    pub async fn tend(&self, declarations: &Declarations) {
        let mut failures = 0;
        loop {
            let ended = match self.connect(declarations).await {
                Ok(connection) => {
                    let began = Instant::now();
                    let ended = self.stay(connection).await;
                    if began.elapsed() >= STEADY {
                        failures = 0;
                    }
                    ended
                }
                Err(why) => why,
            };
            self.is_down(ended);
            sleep(backoff(failures)).await;
            failures += 1;
        }
    }

    /// Says goodbye, if there is anybody to say it to.
    pub async fn close(&self) {
        if let LinkState::Up(connection) = self.state() {
            // Best effort: the broker notices a connection that is gone as well.
            let _ = timeout(CLOSE_TIMEOUT, connection.close(200, "stopping".into())).await;
        }
    }

    async fn connect(&self, declarations: &Declarations) -> Result<Connection, String> {
        let properties = ConnectionProperties::default().with_connection_name(format!("stockade {}", self.role).into());
        let connecting = timeout(CONNECT_TIMEOUT, Connection::connect_uri(self.uri.clone(), properties));
        let connection = match connecting.await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => return Err(format!("cannot connect: {error}")),
            Err(_) => return Err(format!("cannot connect: no answer within {CONNECT_TIMEOUT:?}")),
        };
        match timeout(DECLARE_TIMEOUT, declarations.declare_all(&connection)).await {
            Ok(Ok(())) => Ok(connection),
            Ok(Err(why)) => Err(self.leave(connection, why).await),
            Err(_) => {
                let why = format!("the queues could not be declared within {DECLARE_TIMEOUT:?}");
                Err(self.leave(connection, why).await)
            }
        }
    }

    async fn leave(&self, connection: Connection, why: String) -> String {
        let _ = timeout(CLOSE_TIMEOUT, connection.close(200, "leaving".into())).await;
        why
    }

    /// Follows the connection until it is lost; says how.
    async fn stay(&self, connection: Connection) -> String {
        let connection = Arc::new(connection);
        let mut events = connection.events_listener();
        // From before anybody has the connection, so that no word about it is missed.
        let mut useless = self.useless.subscribe();
        let authority = &self.uri.authority;
        tracing::info!(link = self.role, "connected to RabbitMQ at {}:{}", authority.host, authority.port);
        self.state.send_replace(LinkState::Up(connection.clone()));
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(Event::ConnectionBlocked(reason)) => {
                        tracing::warn!(link = self.role, reason, "the broker takes no messages for now");
                        self.state.send_replace(LinkState::Blocked(format!("the broker takes no messages: {reason}")));
                    }
                    Some(Event::ConnectionUnblocked) => {
                        tracing::info!(link = self.role, "the broker takes messages again");
                        self.state.send_replace(LinkState::Up(connection.clone()));
                    }
                    // An error that the connection survives was a channel's, whose user knows.
                    Some(Event::Error(error)) if !connection.status().connected() => {
                        return format!("the connection was lost: {error}");
                    }
                    Some(_) => {}
                    None => return "the connection was lost".to_owned(),
                },
                Ok(()) = useless.changed() => {
                    self.is_down("given up on".to_owned());
                    let _ = timeout(CLOSE_TIMEOUT, connection.close(200, "of no use".into())).await;
                    return "the broker did not answer".to_owned();
                }
                () = sleep(LOOK_EVERY) => {
                    if !connection.status().connected() {
                        return "the connection was lost".to_owned();
                    }
                }
            }
        }
    }

    fn is_down(&self, why: String) {
        let news = !matches!(&*self.state.borrow(), LinkState::Down(known) if *known == why);
        if news {
            tracing::warn!(link = self.role, "{why}");
        }
        self.state.send_replace(LinkState::Down(why));
    }
}

/// Doubles up to the limit, each between its half and its whole, so that many instances do not knock together.
fn backoff(failures: u32) -> Duration {
    let whole = BACKOFF_BASE.saturating_mul(2u32.saturating_pow(failures.min(16))).min(BACKOFF_MAX);
    whole.mul_f64(rand::rng().random_range(0.5..=1.0))
}
