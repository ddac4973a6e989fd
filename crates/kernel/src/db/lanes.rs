//! Connections to Postgres that belong to one loop each.
//!
//! A pool hands its connections out in turn, so that a dozen servers each do a part of what every loop writes: each plans
//! its statements, and each maps the pages of what the others wrote. A loop that writes again and again does so on one
//! connection. It is one of those that the settings allow, and only for as long as it is free: whoever finds it taken, by
//! a renewal beside the work, say, goes the way that all go.
//!
//! A loop finds rows by their keys, a batch at a time. Postgres keeps the plan it made for that, and while a table is small, or
//! was when its statistics were taken, the best plan is to read all of it: a table that grows by thousands of rows a second is
//! then read for every batch. So in a lane rows are looked up one by one, by an index, however small the table is.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use sqlx::PgPool;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// One connection in so many may have a lane.
const ONE_IN: u32 = 3;

/// What Postgres does without in a lane, where there is another way.
const NOT_IN_A_LANE: [(&str, &str); 3] =
    [("enable_seqscan", "off"), ("enable_hashjoin", "off"), ("enable_mergejoin", "off")];

/// The lanes of a database.
pub struct Lanes {
    count: u32,
    left: AtomicU32,
    open: Mutex<Vec<PgPool>>,
}

/// A connection of somebody's own.
pub struct Lane {
    pool: PgPool,
    free: Arc<Semaphore>,
}

/// The use of a lane, until it is dropped.
pub type InLane = OwnedSemaphorePermit;

impl Lanes {
    /// As many as there may be among so many connections.
    pub fn out_of(connections: u32) -> Self {
        let count = connections / ONE_IN;
        Self { count, left: AtomicU32::new(count), open: Mutex::default() }
    }

    pub fn count(&self) -> u32 {
        self.count
    }

    /// Opens one beside `pool`, if there is one left.
    pub fn open(&self, pool: &PgPool) -> Option<Arc<Lane>> {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).ok()?;
        let connect = (*pool.connect_options()).clone().options(NOT_IN_A_LANE);
        let own = pool.options().clone().max_connections(1).connect_lazy_with(connect);
        self.open.lock().unwrap_or_else(PoisonError::into_inner).push(own.clone());
        Some(Arc::new(Lane { pool: own, free: Arc::new(Semaphore::new(1)) }))
    }

    pub async fn close(&self) {
        let open = std::mem::take(&mut *self.open.lock().unwrap_or_else(PoisonError::into_inner));
        for pool in open {
            pool.close().await;
        }
    }
}

impl Lane {
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// Takes it, if nobody has.
    pub fn enter(&self) -> Option<InLane> {
        self.free.clone().try_acquire_owned().ok()
    }
}
