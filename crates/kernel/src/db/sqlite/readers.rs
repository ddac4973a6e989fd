//! Connections that read: a few, each lent to one transaction at a time.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::Semaphore;

use super::{Opening, Place, Reader, SqliteConnection, error};

/// How many may read at once.
pub(super) const READERS: usize = 4;

#[derive(Clone)]
pub struct Readers {
    inner: Arc<Inner>,
}

struct Inner {
    opening: Opening,
    patience: Duration,
    places: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
    closed: AtomicBool,
}

/// A transaction that reads: one view of the database, of when it began.
pub struct Lent {
    connection: SqliteConnection,
    readers: Readers,
}

impl Readers {
    /// Opens the first of them, so that a file that cannot be read is told at once.
    pub async fn open(opening: Opening, patience: Duration) -> sqlx::Result<Self> {
        let readers = Self {
            inner: Arc::new(Inner {
                opening,
                patience,
                places: Arc::new(Semaphore::new(READERS)),
                idle: Mutex::default(),
                closed: AtomicBool::new(false),
            }),
        };
        drop(readers.begin().await?);
        Ok(readers)
    }

    /// Begins a transaction.
    pub async fn begin(&self) -> sqlx::Result<Lent> {
        let waited = tokio::time::timeout(self.inner.patience, self.inner.places.clone().acquire_owned()).await;
        let permit = waited.map_err(|_| sqlx::Error::PoolTimedOut)?.map_err(|_| sqlx::Error::PoolClosed)?;
        let idle = self.idle().pop();
        let connection = match idle {
            Some(connection) => connection,
            None => self.inner.opening.to_read().map_err(error::to_sqlx)?,
        };
        connection.execute_batch("BEGIN; SELECT 1 FROM sqlite_schema LIMIT 1").map_err(error::to_sqlx)?;
        let connection = SqliteConnection::aside(Reader { connection, _permit: Some(permit) });
        Ok(Lent { connection, readers: self.clone() })
    }

    /// Closes them; what is lent is closed when it comes back.
    pub fn close(&self) {
        self.inner.closed.store(true, Ordering::Relaxed);
        self.inner.places.close();
        self.idle().clear();
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.inner.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // One whose statement was abandoned is not there any more; one that cannot end its transaction is not kept.
        if let Place::Aside(Some(Reader { connection, _permit })) =
            std::mem::replace(&mut self.connection.place, Place::Aside(None))
            && connection.execute_batch("ROLLBACK").is_ok()
            && !self.readers.inner.closed.load(Ordering::Relaxed)
        {
            self.readers.idle().push(connection);
        }
    }
}

impl Deref for Lent {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        &self.connection
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.connection
    }
}
