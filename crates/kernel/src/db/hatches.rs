//! Hatches: rows that a transaction writes for a reader in this very process, passed to it in memory when it commits.
//!
//! Such a row is written as leased to this process, so that nobody else takes it meanwhile. A hatch saves the reader
//! from claiming the row and reading it back, and promises nothing: what is not passed, or not dealt with in time, is
//! found in the table, where the reader puts it back or its lease ends.

use std::any::Any;
use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;
use uuid::Uuid;

use crate::clock::{Timestamp, mint_id};

/// How long to wait on closing for transactions that count on the hatch.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// The hatches that are open in this process.
#[derive(Clone)]
pub struct Hatches {
    token: Uuid,
    /// To the consumers of table queues, by queue.
    pub queues: Openings<Parcel>,
    /// To the relay that publishes over a broker.
    pub outbox: Openings<Claimed>,
}

/// Hatches for one kind of row, by name.
pub struct Openings<P>(Arc<Mutex<HashMap<String, Pledge<P>>>>);

/// A message as its row in a queue holds it.
#[derive(Debug)]
pub struct Parcel {
    pub place: Place,
    pub message_id: Uuid,
    pub routing_key: String,
    pub correlation_id: String,
    pub headers: Cow<'static, str>,
    pub body: Bytes,
    /// What the writer knows the body to say. Only the two sides know what that is; a database only carries it.
    pub written: Option<Arc<dyn Any + Send + Sync>>,
}

/// Where a parcel is written down.
#[derive(Debug, Clone)]
pub enum Place {
    /// In a row of its own.
    Row(i64),
    /// In one row together with others.
    Bundle(Part),
}

/// One of the messages in a bundle.
#[derive(Debug, Clone)]
pub struct Part {
    pub bundle: Arc<Bundle>,
    pub number: usize,
}

/// A row that stands for several messages. It is there until each of them is settled.
#[derive(Debug)]
pub struct Bundle {
    pub row: i64,
    unsettled: AtomicUsize,
}

impl Bundle {
    pub fn new(row: i64, parts: usize) -> Arc<Self> {
        Arc::new(Self { row, unsettled: AtomicUsize::new(parts) })
    }
}

impl Part {
    /// Notes that it is settled, which it can be once; is it the last of its bundle?
    pub fn settle(&self) -> bool {
        self.bundle.unsettled.fetch_sub(1, Ordering::Relaxed) == 1
    }
}

/// A row of the outbox that a relay holds, to publish it over a broker.
#[derive(Debug, Clone, PartialEq)]
pub struct Claimed {
    pub id: Uuid,
    pub event_id: Uuid,
    pub kind: String,
    pub group_id: String,
    pub subsidiary_id: Option<String>,
    pub aggregate_type: String,
    pub aggregate_id: String,
    pub event_type: String,
    pub correlation_id: String,
    pub traceparent: Option<String>,
    pub headers: String,
    pub body: Bytes,
    pub target: String,
    pub attempts: i32,
    pub created_at: Timestamp,
}

/// The reader's side.
pub struct Hatch<P> {
    name: String,
    openings: Openings<P>,
    lease: Duration,
    passed: mpsc::UnboundedReceiver<Passed<P>>,
    arrived: VecDeque<Passed<P>>,
    filling: Arc<Filling>,
}

/// What a reader takes out.
pub struct Taken<P> {
    pub fresh: Vec<P>,
    /// What has lain too long to be dealt with within its lease: to be put back for all.
    pub stale: Vec<P>,
}

struct Passed<P> {
    parcel: P,
    leased_at: Instant,
}

/// How full a hatch is. It has room for twice what its reader takes at a time: more would only keep messages from
/// readers elsewhere who may be quicker.
#[derive(Default)]
struct Filling {
    inside: AtomicUsize,
    room: AtomicUsize,
}

/// The writer's side. While there is one, the hatch does not close.
pub struct Pledge<P> {
    passed: mpsc::UnboundedSender<Passed<P>>,
    filling: Arc<Filling>,
    lease: Duration,
}

impl Default for Hatches {
    fn default() -> Self {
        Self { token: mint_id(), queues: Openings::default(), outbox: Openings::default() }
    }
}

impl Hatches {
    /// Marks the rows that are written as leased to this process.
    pub fn token(&self) -> Uuid {
        self.token
    }
}

impl<P> Openings<P> {
    /// Opens a hatch for rows that are leased for `lease`.
    pub fn open(&self, name: &str, lease: Duration) -> Hatch<P> {
        let (sender, passed) = mpsc::unbounded_channel();
        let filling = Arc::<Filling>::default();
        self.lock().insert(name.to_owned(), Pledge { passed: sender, filling: filling.clone(), lease });
        Hatch { name: name.to_owned(), openings: self.clone(), lease, passed, arrived: VecDeque::new(), filling }
    }

    /// The hatches that have room.
    pub fn with_room(&self) -> HashMap<String, Pledge<P>> {
        let has_room = |(_, Pledge { filling, .. }): &(&String, &Pledge<P>)| {
            filling.inside.load(Ordering::Relaxed) < filling.room.load(Ordering::Relaxed)
        };
        self.lock().iter().filter(has_room).map(|(name, pledge)| (name.clone(), pledge.clone())).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Pledge<P>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P> Default for Openings<P> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<P> Clone for Openings<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P> Clone for Pledge<P> {
    fn clone(&self) -> Self {
        Self { passed: self.passed.clone(), filling: self.filling.clone(), lease: self.lease }
    }
}

impl<P> Pledge<P> {
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Passes what was leased at that moment.
    pub fn pass(&self, parcel: P, leased_at: Instant) {
        self.filling.inside.fetch_add(1, Ordering::Relaxed);
        // A reader that is gone without closing leaves the row to the end of its lease.
        let _ = self.passed.send(Passed { parcel, leased_at });
    }
}

impl<P> Hatch<P> {
    /// Returns when something is there; cancelled, it has lost nothing.
    pub async fn filled(&mut self) {
        if self.arrived.is_empty() {
            match self.passed.recv().await {
                Some(passed) => self.arrived.push_back(passed),
                None => std::future::pending().await,
            }
        }
    }

    /// Takes up to `count` of what is there, for a reader who takes `batch` at a time, and what has lain too long.
    pub fn take(&mut self, batch: usize, count: usize) -> Taken<P> {
        self.filling.room.store(2 * batch, Ordering::Relaxed);
        let mut taken = Taken { fresh: Vec::new(), stale: Vec::new() };
        while taken.fresh.len() < count
            && let Some(passed) = self.arrived.pop_front().or_else(|| self.passed.try_recv().ok())
        {
            self.filling.inside.fetch_sub(1, Ordering::Relaxed);
            let is_fresh = passed.leased_at.elapsed() < self.lease / 2;
            if is_fresh { &mut taken.fresh } else { &mut taken.stale }.push(passed.parcel);
        }
        taken
    }

    /// Closes, waiting for transactions that have counted on it, though not longer than [`CLOSE_PATIENCE`]; returns
    /// what was not taken.
    pub async fn close(mut self) -> Vec<P> {
        self.openings.lock().remove(&self.name);
        let mut left: Vec<P> = self.arrived.drain(..).map(|passed| passed.parcel).collect();
        let deadline = Instant::now() + CLOSE_PATIENCE;
        while let Ok(Some(passed)) = tokio::time::timeout_at(deadline, self.passed.recv()).await {
            left.push(passed.parcel);
        }
        left
    }
}
