//! SQLite, called on the thread that asks.
//!
//! A driver that keeps SQLite on a thread of its own pays two context switches for every statement, which is more than
//! most statements take; and the one writer is held meanwhile. So the connection that writes is used right where it is
//! lent: its statements are short, and its transactions are one at a time. Readers may take long (an audit looks at every
//! row), so theirs run beside the runtime's threads, on those kept for blocking work.
//!
//! [`query`], [`query_as`] and [`query_scalar`] are spelled as sqlx spells them, so that SQL which reads the same on both
//! databases is written once ([`on!`](crate::on)). [`SqliteConnection::execute_each`] is the batch: one statement, run for
//! each row.

mod error;
mod query;
mod readers;
mod writer;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use query::{Bind, Done, Query, QueryAs, QueryBuilder, QueryScalar, Separated, query, query_as, query_scalar};
pub use readers::{Lent, Readers};
use rusqlite::{Connection, OpenFlags, Params, Row};
/// As the code that is compiled for both databases names them.
pub use sqlx::{Error, Result};
pub use writer::{Durability, Writer, Writing};

pub use self::error::{SqliteError, to_sqlx};

/// Statements that are kept prepared: more than there are.
const STATEMENTS_KEPT: usize = 256;

/// A connection that is lent to one transaction at a time.
pub struct SqliteConnection {
    place: Place,
}

enum Place {
    /// Used on the thread that asks.
    Here(Connection),
    /// Used on a thread for blocking work; `None` while it is, and for good if whoever asked has gone meanwhile.
    Aside(Option<Connection>),
}

/// How to open a file.
#[derive(Clone)]
pub struct Opening {
    pub path: PathBuf,
    /// Stop growing at this many pages, as a disk that is full would; 0 is no limit.
    pub pages_max: u32,
    pub busy_timeout: Duration,
}

impl Opening {
    /// Opens it to write, creating it if it is not there.
    fn to_write(&self) -> rusqlite::Result<Connection> {
        let connection = open(&self.path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE)?;
        connection.busy_timeout(self.busy_timeout)?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "synchronous", "full")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        // Only should the task that does it beside the writer fall behind: see `Writer::keep_log_short`.
        connection.pragma_update(None, "wal_autocheckpoint", 32_000)?;
        // What a statement needs to undo itself stays out of files.
        connection.pragma_update(None, "temp_store", "memory")?;
        // 8 MB: what a batch touches. A commit that has split a page looks at all that is in the cache, because SQLite
        // numbers pages anew by way of one far beyond the end of the file; a larger cache costs more than it saves.
        connection.pragma_update(None, "cache_size", -8192)?;
        if self.pages_max > 0 {
            connection.pragma_update(None, "max_page_count", self.pages_max)?;
        }
        // Whoever waits for a lock that another process holds must not hold up a thread: see `Writer::begin`.
        connection.busy_timeout(Duration::ZERO)?;
        Ok(connection)
    }

    fn to_read(&self) -> rusqlite::Result<Connection> {
        let connection = open(&self.path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        connection.busy_timeout(self.busy_timeout)?;
        Ok(connection)
    }
}

fn open(path: &Path, flags: OpenFlags) -> rusqlite::Result<Connection> {
    // One transaction at a time uses a connection, so that it needs no mutex of its own.
    let connection = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_KEPT);
    Ok(connection)
}

impl SqliteConnection {
    fn here(connection: Connection) -> Self {
        Self { place: Place::Here(connection) }
    }

    fn aside(connection: Connection) -> Self {
        Self { place: Place::Aside(Some(connection)) }
    }

    /// Runs one statement of a transaction that writes, once for each row; says how many rows each changed. Parameters go
    /// by number, `?1` being the first of a row.
    pub fn execute_each<P: Params>(
        &mut self,
        sql: &'static str,
        rows: impl IntoIterator<Item = P>,
    ) -> sqlx::Result<Vec<u64>> {
        let mut statement = self.writing()?.prepare_cached(sql).map_err(to_sqlx)?;
        rows.into_iter().map(|row| Ok(statement.execute(row).map_err(to_sqlx)? as u64)).collect()
    }

    /// As [`Self::execute_each`], for a statement that returns rows: all of them.
    pub fn fetch_each<P: Params, O>(
        &mut self,
        sql: &'static str,
        rows: impl IntoIterator<Item = P>,
    ) -> sqlx::Result<Vec<O>>
    where
        O: for<'r> TryFrom<&'r Row<'r>, Error = rusqlite::Error>,
    {
        let mut statement = self.writing()?.prepare_cached(sql).map_err(to_sqlx)?;
        let mut found = Vec::new();
        for row in rows {
            let mut answers = statement.query(row).map_err(to_sqlx)?;
            while let Some(answer) = answers.next().map_err(to_sqlx)? {
                found.push(O::try_from(answer).map_err(to_sqlx)?);
            }
        }
        Ok(found)
    }

    /// The connection itself, of a transaction that writes: for several statements in turns.
    pub fn writing(&mut self) -> sqlx::Result<&mut Connection> {
        match &mut self.place {
            Place::Here(connection) => Ok(connection),
            Place::Aside(_) => Err(sqlx::Error::Configuration("a transaction for reading cannot write".into())),
        }
    }

    /// Lets `work` use the connection, wherever that is.
    async fn run<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> sqlx::Result<T> {
        match &mut self.place {
            Place::Here(connection) => work(connection),
            Place::Aside(slot) => {
                let connection = slot.take().ok_or(sqlx::Error::WorkerCrashed)?;
                let worked = tokio::task::spawn_blocking(move || {
                    let done = work(&connection);
                    (connection, done)
                });
                let (connection, done) = worked.await.map_err(|_| sqlx::Error::WorkerCrashed)?;
                *slot = Some(connection);
                done
            }
        }
        .map_err(to_sqlx)
    }
}
