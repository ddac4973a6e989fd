//! SQLite's one writing connection, lent to one transaction at a time, first come first served.
//!
//! Not a pool of one: a pool asks the connection for a sign of life before and after every loan, and each question
//! is a trip to SQLite's thread and back while every other writer waits. Here a connection is replaced once its thread
//! is gone or a rollback has failed on it, which the next BEGIN tells.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteTransactionManager};
use sqlx::{ConnectOptions, Connection, SqlSafeStr, SqliteConnection};
use sqlx_core::transaction::TransactionManager;
use tokio::sync::{Mutex, Notify, OwnedMutexGuard};

#[derive(Clone)]
pub(super) struct Writer {
    inner: Arc<Inner>,
}

struct Inner {
    options: SqliteConnectOptions,
    /// How long a transaction waits for those before it.
    patience: Duration,
    slot: Arc<Mutex<Slot>>,
    committed: Notify,
}

/// How many pages may gather in the log before they are copied into the file.
const LOG_PAGES: i64 = 4_000;
/// How often the log is looked at while there are commits.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const AGAIN_AFTER: Duration = Duration::from_secs(5);

enum Slot {
    Open(SqliteConnection),
    Broken,
    Closed,
}

/// A writing transaction. Dropped without a commit, it has done nothing.
pub struct Writing {
    slot: OwnedMutexGuard<Slot>,
    writer: Writer,
    done: bool,
}

impl Writer {
    /// `options` open a new connection should this one break.
    pub fn new(connection: SqliteConnection, options: SqliteConnectOptions, patience: Duration) -> Self {
        let slot = Arc::new(Mutex::new(Slot::Open(connection)));
        Self { inner: Arc::new(Inner { options, patience, slot, committed: Notify::new() }) }
    }

    /// A connection of its own, for what brings its own transactions.
    pub async fn connect(&self) -> sqlx::Result<SqliteConnection> {
        self.inner.options.connect().await
    }

    /// Begins a transaction with `statement`.
    pub async fn begin(&self, statement: &'static str) -> sqlx::Result<Writing> {
        let waited = tokio::time::timeout(self.inner.patience, self.inner.slot.clone().lock_owned()).await;
        let mut slot = waited.map_err(|_| sqlx::Error::PoolTimedOut)?;
        loop {
            match &mut *slot {
                Slot::Open(connection) => {
                    match SqliteTransactionManager::begin(connection, Some(statement.into_sql_str())).await {
                        Ok(()) => return Ok(Writing { slot, writer: self.clone(), done: false }),
                        // Its thread is gone, or a transaction was left behind on it.
                        Err(sqlx::Error::WorkerCrashed | sqlx::Error::InvalidSavePointStatement) => {
                            *slot = Slot::Broken
                        }
                        Err(error) => return Err(error),
                    }
                }
                Slot::Broken => *slot = Slot::Open(self.connect().await?),
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
                super::abort_if_the_disk_failed(&error);
                tracing::warn!(%error, "the log was not copied into the database file; trying again");
                own = None;
                tokio::time::sleep(AGAIN_AFTER).await;
            }
        }
    }

    async fn shorten_log(&self, own: &mut Option<SqliteConnection>) -> sqlx::Result<()> {
        let connection = match own {
            Some(connection) => connection,
            None => own.insert(self.connect().await?),
        };
        let (_, in_log, copied): (i64, i64, i64) =
            sqlx::query_as("PRAGMA wal_checkpoint(NOOP)").fetch_one(&mut *connection).await?;
        if in_log - copied < LOG_PAGES {
            return Ok(());
        }
        sqlx::query("PRAGMA wal_checkpoint(PASSIVE)").execute(connection).await?;
        if let Slot::Open(writer) = &mut *self.inner.slot.lock().await {
            sqlx::query("PRAGMA wal_checkpoint(PASSIVE)").execute(writer).await?;
        }
        Ok(())
    }

    /// Closes it once the transaction under way has ended.
    pub async fn close(&self) {
        if let Slot::Open(connection) = std::mem::replace(&mut *self.inner.slot.lock().await, Slot::Closed)
            && let Err(error) = connection.close().await
        {
            tracing::warn!(%error, "the database file was not closed cleanly; the next start recovers it");
        }
    }
}

impl Writing {
    pub async fn commit(mut self) -> sqlx::Result<()> {
        SqliteTransactionManager::commit(&mut self).await?;
        self.done = true;
        self.writer.inner.committed.notify_one();
        Ok(())
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.done {
            SqliteTransactionManager::start_rollback(self);
        }
    }
}

impl Deref for Writing {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        match &*self.slot {
            Slot::Open(connection) => connection,
            Slot::Broken | Slot::Closed => unreachable!("a transaction keeps its connection until it ends"),
        }
    }
}

impl DerefMut for Writing {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        match &mut *self.slot {
            Slot::Open(connection) => connection,
            Slot::Broken | Slot::Closed => unreachable!("a transaction keeps its connection until it ends"),
        }
    }
}
