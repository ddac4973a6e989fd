//! The one connection that writes, lent to one transaction at a time: first come first served, but that whoever keeps
//! people waiting goes ahead of those who do not.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::{Mutex, Notify, OwnedMutexGuard};
use tokio::time::Instant;

use super::log::{self, Landing, Log};
use super::{Opening, Reader, SqliteConnection, error};

#[derive(Clone)]
pub struct Writer {
    inner: Arc<Inner>,
}

struct Inner {
    opening: Opening,
    /// How long a transaction waits for those before it.
    patience: Duration,
    slot: Arc<Mutex<Slot>>,
    /// Held by the one transaction of those in no hurry that may wait for the slot or have it.
    line: Arc<Mutex<()>>,
    log: Log,
    committed: Notify,
}

/// How often to ask for a lock that another process holds.
const ASK_EVERY: Duration = Duration::from_millis(5);
/// How many pages may gather in the log before they are copied into the file, and from how many on the writer waits for
/// readers to leave it, so that it can begin anew.
const LOG_PAGES: i64 = 4_000;
const LOG_PAGES_MAX: i64 = 32_000;
const WAIT_FOR_READERS: Duration = Duration::from_millis(20);
/// How long a writer that closes waits for them.
const WAIT_TO_CLOSE: Duration = Duration::from_secs(2);
/// How often the log is looked at while there are commits.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const AGAIN_AFTER: Duration = Duration::from_secs(5);

enum Slot {
    Open(SqliteConnection),
    /// A rollback has failed on it: it is opened anew.
    Broken,
    Closed,
}

/// What a transaction waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// All it sees is on disk before it begins, and what it writes when its commit returns.
    Full,
    /// What it writes is on disk when its commit returns, and with it all that it saw.
    Chained,
    /// Nothing: the next one that waits brings it along.
    Relaxed,
}

/// When a transaction gets its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// After those before it.
    InLine,
    /// Ahead of the line, though not twice in a row: whoever stands at its head goes in between.
    Ahead,
}

/// A writing transaction. Dropped without a commit, it has done nothing.
pub struct Writing {
    slot: OwnedMutexGuard<Slot>,
    _line: Option<OwnedMutexGuard<()>>,
    writer: Writer,
    durability: Durability,
    done: bool,
}

impl Writer {
    pub fn open(opening: Opening, patience: Duration) -> sqlx::Result<Self> {
        let connection = opening.to_write().map_err(error::to_sqlx)?;
        // SQLite has followed the links to it.
        let file = connection.path().map_or(opening.path.clone(), PathBuf::from);
        // What a process that died has left in the log may be in the system's memory alone, where the disk has failed to
        // keep it: nothing is built on it before it was written anew.
        if !fold(&connection, opening.busy_timeout)? {
            rewrite_wal(&connection, &file, opening.busy_timeout)?;
        }
        let log = Log::start(log::of(&file))?;
        Ok(Self::over(connection, log, opening, patience))
    }

    pub(super) fn over(connection: Connection, log: Log, opening: Opening, patience: Duration) -> Self {
        let slot = Arc::new(Mutex::new(Slot::Open(SqliteConnection::here(connection))));
        Self { inner: Arc::new(Inner { opening, patience, slot, line: Arc::default(), log, committed: Notify::new() }) }
    }

    pub fn path(&self) -> &Path {
        &self.inner.opening.path
    }

    /// Begins a transaction. A lock that another process holds is waited for without holding up a thread.
    pub async fn begin(&self, turn: Turn, durability: Durability) -> sqlx::Result<Writing> {
        let admitted = async {
            let line = match turn {
                Turn::InLine => Some(self.inner.line.clone().lock_owned().await),
                Turn::Ahead => None,
            };
            (line, self.inner.slot.clone().lock_owned().await)
        };
        let waited = tokio::time::timeout(self.inner.patience, admitted).await;
        let (line, mut slot) = waited.map_err(|_| sqlx::Error::PoolTimedOut)?;
        let deadline = Instant::now() + self.inner.opening.busy_timeout;
        loop {
            match &mut *slot {
                Slot::Open(connection) => match try_begin(connection.connection()?) {
                    Ok(()) => break,
                    Err(error) if is_busy(&error) && Instant::now() < deadline => tokio::time::sleep(ASK_EVERY).await,
                    Err(error) => return Err(error::to_sqlx(error)),
                },
                Slot::Broken => {
                    let connection = self.inner.opening.to_write().map_err(error::to_sqlx)?;
                    *slot = Slot::Open(SqliteConnection::here(connection));
                }
                Slot::Closed => return Err(sqlx::Error::PoolClosed),
            }
        }
        let writing = Writing { slot, _line: line, writer: self.clone(), durability, done: false };
        if durability == Durability::Full {
            self.until_on_disk().await?;
        }
        Ok(writing)
    }

    /// Returns once every commit so far is on disk that somebody wants there.
    pub async fn until_on_disk(&self) -> sqlx::Result<()> {
        let log = &self.inner.log;
        tokio::time::timeout(self.inner.patience, log.landing(log.newest()).on_disk())
            .await
            .map_err(|_| sqlx::Error::PoolTimedOut)?
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
            None => {
                let connection = self.inner.opening.to_write().map_err(error::to_sqlx)?;
                own.insert(SqliteConnection::aside(Reader { connection, _permit: None }))
            }
        };
        let in_log = connection.run(|connection| {
            let in_log = connection.query_row("PRAGMA wal_checkpoint(NOOP)", [], |row| row.get::<_, i64>(1))?;
            if in_log >= LOG_PAGES {
                checkpoint(connection, "PASSIVE")?;
            }
            Ok(in_log)
        });
        let in_log = in_log.await?;
        if in_log >= LOG_PAGES
            && let Slot::Open(connection) = &mut *self.inner.slot.lock().await
        {
            let connection = connection.connection()?;
            let copied = match in_log < LOG_PAGES_MAX {
                true => checkpoint(connection, "PASSIVE"),
                false => waiting(connection, WAIT_FOR_READERS, |connection| checkpoint(connection, "RESTART")),
            };
            copied.map_err(error::to_sqlx)?;
        }
        Ok(())
    }

    /// Closes it once the transaction under way has ended, with everything in the file.
    pub async fn close(&self) {
        let mut slot = self.inner.slot.lock().await;
        if let Slot::Open(connection) = &mut *slot {
            let folded = async {
                self.until_on_disk().await?;
                fold(connection.connection()?, WAIT_TO_CLOSE).map(drop)
            };
            if let Err(error) = folded.await {
                crate::db::abort_if_the_disk_failed(&error);
                tracing::warn!(%error, "the log stays beside the database file");
            }
        }
        *slot = Slot::Closed;
    }
}

/// Copies the whole log into the file and brings it to disk; `false` if somebody who reads, or a full disk, keeps it from
/// that.
fn fold(connection: &Connection, patience: Duration) -> sqlx::Result<bool> {
    match waiting(connection, patience, |connection| checkpoint(connection, "TRUNCATE")) {
        Ok(true) => return Ok(true),
        Ok(false) => tracing::warn!("somebody reads the database file, so that its log stays beside it"),
        Err(error) if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull) => {
            tracing::warn!(%error, "the log stays beside the database file");
        }
        Err(error) => return Err(error::to_sqlx(error)),
    }
    Ok(false)
}

/// Rewrites the WAL under the write lock: another process that commits meanwhile would have its commit overwritten.
fn rewrite_wal(connection: &Connection, database: &Path, patience: Duration) -> sqlx::Result<()> {
    waiting(connection, patience, try_begin).map_err(error::to_sqlx)?;
    let rewritten = log::write_anew(database);
    connection.execute_batch("ROLLBACK").map_err(error::to_sqlx)?;
    Ok(rewritten?)
}

fn try_begin(connection: &Connection) -> rusqlite::Result<()> {
    connection.prepare_cached("BEGIN IMMEDIATE")?.execute([]).map(drop)
}

fn is_busy(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy)
}

/// Was nobody in its way?
fn checkpoint(connection: &Connection, mode: &str) -> rusqlite::Result<bool> {
    connection.query_row(&format!("PRAGMA wal_checkpoint({mode})"), [], |row| Ok(row.get::<_, i64>(0)? == 0))
}

/// Does it on a connection that meanwhile waits so long for those in its way.
fn waiting<T>(
    connection: &Connection,
    patience: Duration,
    work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
) -> rusqlite::Result<T> {
    connection.busy_timeout(patience)?;
    let done = work(connection);
    connection.busy_timeout(Duration::ZERO)?;
    done
}

impl Writing {
    /// Commits; the next one begins while the disk works.
    pub fn commit(mut self) -> sqlx::Result<Landing> {
        let writer = self.writer.clone();
        let Inner { log, committed, .. } = &*writer.inner;
        let durability = self.durability;
        let connection = self.connection()?;
        let number = (durability != Durability::Relaxed).then(|| log.announce());
        let ended = connection.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
        if let Some(number) = number {
            log.bring(number, ended.is_ok());
        }
        ended.map_err(error::to_sqlx)?;
        self.done = true;
        committed.notify_one();
        Ok(log.landing(number.unwrap_or(0)))
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        // SQLite itself may have rolled back already, as it does when the disk is full.
        let is_clean = self.done
            || self.connection().is_ok_and(|connection| {
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
