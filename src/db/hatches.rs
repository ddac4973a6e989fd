//! Hatches: rows that a transaction writes for a reader in this very process, passed to it in memory when it commits.
//!
//! Such a row is written as leased to this process, so that nobody else takes it meanwhile. A hatch saves the reader
//! from claiming the row and reading it back, and promises nothing: what is not passed, or not dealt with in time, is
//! found in the table once its lease has ended.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;
use uuid::Uuid;

use crate::clock::mint_id;

/// The hatches that are open in this process, by name.
#[derive(Clone)]
pub struct Hatches {
    token: Uuid,
    open: Arc<Mutex<HashMap<String, Pledge>>>,
}

/// A message as its row holds it.
#[derive(Debug)]
pub struct Parcel {
    pub row: i64,
    pub message_id: Uuid,
    pub routing_key: String,
    pub correlation_id: String,
    pub headers: String,
    pub body: Bytes,
    pub passed_at: Instant,
}

/// The reader's side.
pub struct Hatch {
    name: String,
    hatches: Hatches,
    lease: Duration,
    passed: mpsc::UnboundedReceiver<Parcel>,
    arrived: VecDeque<Parcel>,
    filling: Arc<Filling>,
}

/// How full a hatch is. It has room for twice what its reader takes at a time: more would only keep messages from
/// readers elsewhere who may be quicker.
#[derive(Default)]
struct Filling {
    inside: AtomicUsize,
    room: AtomicUsize,
}

/// The writer's side. While there is one, the hatch does not close.
#[derive(Clone)]
pub struct Pledge {
    passed: mpsc::UnboundedSender<Parcel>,
    filling: Arc<Filling>,
    lease: Duration,
}

impl Default for Hatches {
    fn default() -> Self {
        Self { token: mint_id(), open: Arc::default() }
    }
}

impl Hatches {
    /// Marks the rows that are written as leased to this process.
    pub fn token(&self) -> Uuid {
        self.token
    }

    /// Opens a hatch for rows that are leased for `lease`.
    pub fn open(&self, name: &str, lease: Duration) -> Hatch {
        let (sender, passed) = mpsc::unbounded_channel();
        let filling = Arc::<Filling>::default();
        self.lock().insert(name.to_owned(), Pledge { passed: sender, filling: filling.clone(), lease });
        Hatch { name: name.to_owned(), hatches: self.clone(), lease, passed, arrived: VecDeque::new(), filling }
    }

    /// The hatches that have room.
    pub fn with_room(&self) -> HashMap<String, Pledge> {
        let has_room = |(_, Pledge { filling, .. }): &(&String, &Pledge)| {
            filling.inside.load(Ordering::Relaxed) < filling.room.load(Ordering::Relaxed)
        };
        self.lock().iter().filter(has_room).map(|(name, pledge)| (name.clone(), pledge.clone())).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Pledge>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pledge {
    pub fn lease(&self) -> Duration {
        self.lease
    }

    pub fn pass(&self, parcel: Parcel) {
        self.filling.inside.fetch_add(1, Ordering::Relaxed);
        // A reader that is gone without closing leaves the row to the end of its lease.
        let _ = self.passed.send(parcel);
    }
}

impl Hatch {
    /// Returns when something is there; cancelled, it has lost nothing.
    pub async fn filled(&mut self) {
        if self.arrived.is_empty() {
            match self.passed.recv().await {
                Some(parcel) => self.arrived.push_back(parcel),
                None => std::future::pending().await,
            }
        }
    }

    /// Takes up to `count` of what is there, for a reader who takes `batch` at a time. What has lain too long to be
    /// dealt with within its lease is left to the table.
    pub fn take(&mut self, batch: usize, count: usize) -> Vec<Parcel> {
        self.filling.room.store(2 * batch, Ordering::Relaxed);
        let mut taken = Vec::new();
        while taken.len() < count
            && let Some(parcel) = self.arrived.pop_front().or_else(|| self.passed.try_recv().ok())
        {
            self.filling.inside.fetch_sub(1, Ordering::Relaxed);
            if parcel.passed_at.elapsed() < self.lease / 2 {
                taken.push(parcel);
            }
        }
        taken
    }

    /// Closes, waiting for transactions that have counted on it, though not longer than `patience`; returns the rows
    /// that were not taken.
    pub async fn close(mut self, patience: Duration) -> Vec<i64> {
        self.hatches.lock().remove(&self.name);
        let mut left: Vec<i64> = self.arrived.drain(..).map(|parcel| parcel.row).collect();
        let deadline = Instant::now() + patience;
        while let Ok(Some(parcel)) = tokio::time::timeout_at(deadline, self.passed.recv()).await {
            left.push(parcel.row);
        }
        left
    }
}
