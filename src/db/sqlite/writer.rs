//! The one connection that writes, lent to one transaction at a time, first come first served.

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::{Mutex, Notify, OwnedMutexGuard};
use tokio::time::Instant;

use super::{Opening, SqliteConnection, error};

#[derive(Clone)]
pub struct Writer {
    inner: Arc<Inner>,
}

struct Inner {
    opening: Opening,
    /// How long a transaction waits for those before it.
    patience: Duration,
    slot: Arc<Mutex<Slot>>,
    committed: Notify,
}

/// How often to ask for a lock that another process holds.
const ASK_EVERY: Duration = Duration::from_millis(5);
/// How many pages may gather in the log before they are copied into the file.
const LOG_PAGES: i64 = 4_000;
/// How often the log is looked at while there are commits.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const AGAIN_AFTER: Duration = Duration::from_secs(5);

enum Slot {
    Open {
        connection: SqliteConnection,
        durability: Durability,
    },
    /// A rollback has failed on it: it is opened anew.
    Broken,
    Closed,
}

/// What a commit waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// That it is on disk.
    Full,
    /// Nothing: the next full one brings it along.
    Relaxed,
}

/// A writing transaction. Dropped without a commit, it has done nothing.
pub struct Writing {
    slot: OwnedMutexGuard<Slot>,
    writer: Writer,
    done: bool,
}

impl Writer {
    pub fn open(opening: Opening, patience: Duration) -> sqlx::Result<Self> {
        let connection = SqliteConnection::here(opening.to_write().map_err(error::to_sqlx)?);
        let slot = Arc::new(Mutex::new(Slot::Open { connection, durability: Durability::Full }));
        Ok(Self { inner: Arc::new(Inner { opening, patience, slot, committed: Notify::new() }) })
    }

    pub fn path(&self) -> &Path {
        &self.inner.opening.path
    }

    /// Begins a transaction. A lock that another process holds is waited for without holding up a thread.
    pub async fn begin(&self, wanted: Durability) -> sqlx::Result<Writing> {
        let waited = tokio::time::timeout(self.inner.patience, self.inner.slot.clone().lock_owned()).await;
        let mut slot = waited.map_err(|_| sqlx::Error::PoolTimedOut)?;
        let deadline = Instant::now() + self.inner.opening.busy_timeout;
        loop {
            match &mut *slot {
                Slot::Open { connection, durability } => match try_begin(connection.writing()?, durability, wanted) {
                    Ok(()) => return Ok(Writing { slot, writer: self.clone(), done: false }),
                    Err(error) if is_busy(&error) && Instant::now() < deadline => tokio::time::sleep(ASK_EVERY).await,
                    Err(error) => return Err(error::to_sqlx(error)),
                },
                Slot::Broken => {
                    let connection = self.inner.opening.to_write().map_err(error::to_sqlx)?;
                    *slot = Slot::Open { connection: SqliteConnection::here(connection), durability: Durability::Full };
                }
                Slot::Closed => return Err(sqlx::Error::PoolClosed),
            }
        }
    }

    /// Copies pages from the log into the file whenever many have gathered: most of them on a connection of its own
    /// while transactions go on, then the rest between two of them, so that the log can begin anew.
    pub async fn keep_log_short(&self) {
        let mut own = None;
        loop {
            self.inner.committed.notified().await;
            tokio::time::sleep(LOOK_EVERY).await;
            if let Err(error) = self.shorten_log(&mut own).await {
                crate::db::abort_if_the_disk_failed(&error);
                tracing::warn!(%error, "the log was not copied into the database file; trying again");
                own = None;
                tokio::time::sleep(AGAIN_AFTER).await;
            }
        }
    }

    async fn shorten_log(&self, own: &mut Option<SqliteConnection>) -> sqlx::Result<()> {
        let connection = match own {
            Some(connection) => connection,
            None => own.insert(SqliteConnection::aside(self.inner.opening.to_write().map_err(error::to_sqlx)?)),
        };
        let shortened = connection.run(|connection| {
            let (in_log, copied) = connection.query_row("PRAGMA wal_checkpoint(NOOP)", [], |row| {
                Ok((row.get::<_, i64>(1)?, row.get::<_, i64>(2)?))
            })?;
            let is_long = in_log - copied >= LOG_PAGES;
            if is_long {
                checkpoint(connection)?;
            }
            Ok(is_long)
        });
        if shortened.await?
            && let Slot::Open { connection, .. } = &mut *self.inner.slot.lock().await
        {
            checkpoint(connection.writing()?).map_err(error::to_sqlx)?;
        }
        Ok(())
    }

    /// Closes it once the transaction under way has ended.
    pub async fn close(&self) {
        *self.inner.slot.lock().await = Slot::Closed;
    }
}

fn try_begin(connection: &Connection, durability: &mut Durability, wanted: Durability) -> rusqlite::Result<()> {
    if *durability != wanted {
        let synchronous = match wanted {
            Durability::Full => "PRAGMA synchronous = FULL",
            Durability::Relaxed => "PRAGMA synchronous = NORMAL",
        };
        connection.execute_batch(synchronous)?;
        *durability = wanted;
    }
    connection.prepare_cached("BEGIN IMMEDIATE")?.execute([]).map(drop)
}

fn is_busy(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy)
}

fn checkpoint(connection: &Connection) -> rusqlite::Result<()> {
    connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()))
}

impl Writing {
    pub fn commit(mut self) -> sqlx::Result<()> {
        let committed = self.writing()?.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
        committed.map_err(error::to_sqlx)?;
        self.done = true;
        self.writer.inner.committed.notify_one();
        Ok(())
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        // SQLite itself may have rolled back already, as it does when the disk is full.
        let is_clean = self.done
            || self.writing().is_ok_and(|connection| {
                connection.is_autocommit() || connection.execute_batch("ROLLBACK").is_ok() || connection.is_autocommit()
            });
        if !is_clean {
            *self.slot = Slot::Broken;
        }
    }
}

impl Deref for Writing {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        match &*self.slot {
            Slot::Open { connection, .. } => connection,
            Slot::Broken | Slot::Closed => unreachable!("a transaction keeps its connection until it ends"),
        }
    }
}

impl DerefMut for Writing {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        match &mut *self.slot {
            Slot::Open { connection, .. } => connection,
            Slot::Broken | Slot::Closed => unreachable!("a transaction keeps its connection until it ends"),
        }
    }
}
