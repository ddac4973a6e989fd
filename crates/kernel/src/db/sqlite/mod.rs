//! SQLite, called on the thread that asks.
//!
//! A driver that keeps SQLite on a thread of its own pays two context switches for every statement, which is more than
//! most statements take; and the one writer is held meanwhile. So the connection that writes is used right where it is
//! lent: its statements are short, and its transactions are one at a time. Readers may take long (an audit looks at every
//! row), so theirs run beside the runtime's threads, on those kept for blocking work.
//!
//! [`query`], [`query_as`] and [`query_scalar`] are spelled as sqlx spells them, so that SQL which reads the same on both
//! databases is written once ([`on!`](crate::on)). [`SqliteConnection::execute_each`] is the batch: one statement, run for
//! each row; [`SqliteConnection::insert_each`] inserts several rows at a time.

mod error;
mod insert;
mod log;
mod query;
mod readers;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use insert::Values;
pub use query::{Bind, Done, Query, QueryAs, QueryBuilder, QueryScalar, Separated, query, query_as, query_scalar};
pub use readers::{Lent, Readers};
use rusqlite::{Connection, InterruptHandle, OpenFlags, Params, Row};
/// As the code that is compiled for both databases names them.
pub use sqlx::{Error, Result};
use tokio::sync::OwnedSemaphorePermit;
pub use writer::{Durability, Turn, Writer, Writing};

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
    /// Used on a thread for blocking work; `None` meanwhile, and for good if the caller was cancelled.
    Aside(Option<Reader>),
}

/// A connection beside the writer's. One that reads stays together with its permit: a statement whose caller was cancelled
/// holds the permit until it has ended.
struct Reader {
    connection: Connection,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Interrupts the statement of a caller that was cancelled.
struct Interrupt {
    handle: InterruptHandle,
    /// For a statement that has not begun, which cannot be interrupted.
    cancelled: Arc<AtomicBool>,
    is_armed: bool,
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        if self.is_armed {
            self.cancelled.store(true, Ordering::SeqCst);
            self.handle.interrupt();
        }
    }
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
        // A commit only writes; the log is brought to disk by a thread of its own, see `log`.
        connection.pragma_update(None, "synchronous", "normal")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        // Never by a commit, which would not tell that the disk failed: see `Writer::keep_log_short`.
        connection.pragma_update(None, "wal_autocheckpoint", 0)?;
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

    fn aside(reader: Reader) -> Self {
        Self { place: Place::Aside(Some(reader)) }
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

    /// The connection itself, of a transaction that writes: for several statements in turns. Not of one that a statement has
    /// rolled back by failing: what was to be part of it would now each be committed for itself.
    pub fn writing(&mut self) -> sqlx::Result<&mut Connection> {
        let connection = self.connection()?;
        if connection.is_autocommit() {
            return Err(sqlx::Error::Protocol("a statement has failed and rolled this transaction back".to_owned()));
        }
        Ok(connection)
    }

    /// The same, be there a transaction or not.
    fn connection(&mut self) -> sqlx::Result<&mut Connection> {
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
        let Place::Aside(slot) = &mut self.place else {
            return work(self.writing()?).map_err(to_sqlx);
        };
        let reader = slot.take().ok_or(sqlx::Error::WorkerCrashed)?;
        let cancelled = Arc::new(AtomicBool::new(false));
        let handle = reader.connection.get_interrupt_handle();
        let mut interrupt = Interrupt { handle, cancelled: cancelled.clone(), is_armed: true };
        let worked = tokio::task::spawn_blocking(move || {
            if cancelled.load(Ordering::SeqCst) {
                return None;
            }
            let done = work(&reader.connection);
            Some((reader, done))
        });
        let worked = worked.await;
        interrupt.is_armed = false;
        let (reader, done) = worked.ok().flatten().ok_or(sqlx::Error::WorkerCrashed)?;
        *slot = Some(reader);
        done.map_err(to_sqlx)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use futures_util::FutureExt;

    use super::log::Log;
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    async fn open_both(folder: &tempfile::TempDir) -> (Writer, Readers) {
        let opening = Opening { path: folder.path().join("test.db"), pages_max: 0, busy_timeout: PATIENCE };
        let writer = Writer::open(opening.clone(), PATIENCE).unwrap();
        let mut tx = writer.begin(Turn::InLine, Durability::Full).await.unwrap();
        query("CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT) STRICT").execute(&mut tx).await.unwrap();
        tx.commit().unwrap().on_disk().await.unwrap();
        (writer, Readers::open(opening, PATIENCE).await.unwrap())
    }

    async fn count(readers: &Readers) -> i64 {
        query_scalar("SELECT count(*) FROM rows").fetch_one(&mut readers.begin().await.unwrap()).await.unwrap()
    }

    #[tokio::test]
    async fn values_go_by_their_number_wherever_they_stand() {
        let folder = tempfile::tempdir().unwrap();
        let (_writer, readers) = open_both(&folder).await;
        let mut tx = readers.begin().await.unwrap();
        let row: (String, i64, String) =
            query_as("SELECT $2, $1, $2").bind(7_i64).bind("seven").fetch_one(&mut tx).await.unwrap();
        assert_eq!(row, ("seven".to_owned(), 7, "seven".to_owned()));
        let missing = query("SELECT $1, $2").bind(1_i64).execute(&mut tx).await;
        assert!(missing.is_err(), "a value that was not bound is no NULL");
    }

    #[tokio::test]
    async fn a_transaction_that_is_dropped_has_done_nothing_and_the_next_one_begins() {
        let folder = tempfile::tempdir().unwrap();
        let (writer, readers) = open_both(&folder).await;
        for is_committed in [false, true] {
            let mut tx = writer.begin(Turn::InLine, Durability::Relaxed).await.unwrap();
            let changed = tx.execute_each("INSERT INTO rows (id, name) VALUES (?1, ?2)", [(1, "a"), (2, "b")]).unwrap();
            assert_eq!(changed, [1, 1]);
            if is_committed {
                tx.commit().unwrap().on_disk().await.unwrap();
            }
        }
        assert_eq!(count(&readers).await, 2, "of the one that was committed, and once");
        let mut tx = writer.begin(Turn::InLine, Durability::Full).await.unwrap();
        let refused = tx.execute_each("INSERT INTO rows (id, name) VALUES (?1, ?2)", [(1, "c")]).unwrap_err();
        assert!(refused.as_database_error().unwrap().is_unique_violation(), "{refused}");
    }

    #[tokio::test]
    async fn a_read_whose_caller_was_cancelled_ends_and_frees_its_permit_only_then() {
        const FOREVER: &str = "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n) SELECT count(*) FROM n";
        let folder = tempfile::tempdir().unwrap();
        let (_writer, readers) = open_both(&folder).await;
        for _ in 0..2 * readers::READERS {
            // A permit is free again within the patience of `begin` only if the statement before it was interrupted.
            let mut tx = readers.begin().await.unwrap();
            let reading = query_scalar::<_, i64>(FOREVER).fetch_one(&mut tx);
            assert!(tokio::time::timeout(Duration::from_millis(20), reading).await.is_err());
        }
        let all = futures_util::future::join_all((0..readers::READERS).map(|_| readers.begin())).await;
        assert!(all.iter().all(Result::is_ok), "every statement has ended");
        let mut one_too_many = pin!(readers.begin());
        assert!(one_too_many.as_mut().now_or_never().is_none());
    }

    /// A writer whose disk finishes one piece of work for each word it is given, and the words it took.
    async fn with_slow_disk(folder: &tempfile::TempDir) -> (Writer, mpsc::Sender<()>, Arc<AtomicUsize>) {
        drop(open_both(folder).await);
        let opening = Opening { path: folder.path().join("test.db"), pages_max: 0, busy_timeout: PATIENCE };
        let (word, words) = mpsc::channel::<()>();
        let taken = Arc::new(AtomicUsize::new(0));
        let count = taken.clone();
        let log = Log::start(move || {
            if words.recv().is_ok() {
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        (Writer::over(opening.to_write().unwrap(), log.unwrap(), opening, PATIENCE), word, taken)
    }

    async fn insert(writer: &Writer, id: i64) -> Writing {
        let mut tx = writer.begin(Turn::InLine, Durability::Chained).await.unwrap();
        tx.execute_each("INSERT INTO rows (id) VALUES (?1)", [(id,)]).unwrap();
        tx
    }

    #[tokio::test]
    async fn nobody_is_told_of_a_commit_before_the_disk_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let (writer, word, _) = with_slow_disk(&folder).await;
        let mut landing = insert(&writer, 1).await.commit().unwrap();
        assert!(landing.on_disk().now_or_never().is_none(), "it waits for the disk");
        let mut chained = writer.begin(Turn::InLine, Durability::Chained).await.unwrap();
        let seen: i64 = query_scalar("SELECT count(*) FROM rows").fetch_one(&mut chained).await.unwrap();
        assert_eq!(seen, 1, "what builds on it need not wait");
        drop(chained);
        let mut strict = pin!(writer.begin(Turn::InLine, Durability::Full));
        assert!(strict.as_mut().now_or_never().is_none(), "what sees only what is on disk has to");
        assert!(pin!(writer.until_on_disk()).now_or_never().is_none(), "and so have those who read");
        word.send(()).unwrap();
        landing.on_disk().await.unwrap();
        strict.await.unwrap();
        writer.until_on_disk().await.unwrap();
    }

    #[tokio::test]
    async fn the_log_of_a_file_behind_a_link_is_found() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere/real.db", folder.path().join("test.db")).unwrap();
        let (writer, readers) = open_both(&folder).await; // ends the process if there is no log to bring to disk
        insert(&writer, 1).await.commit().unwrap().on_disk().await.unwrap();
        assert!(folder.path().join("elsewhere/real.db-wal").exists());
        assert_eq!(count(&readers).await, 1);
    }

    #[tokio::test]
    async fn what_a_dead_process_left_in_the_log_is_written_anew_before_anything_is_built_on_it() {
        let (folder, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (writer, _readers) = open_both(&folder).await;
        insert(&writer, 1).await.commit().unwrap().on_disk().await.unwrap();
        for file in ["test.db", "test.db-wal"] {
            std::fs::copy(folder.path().join(file), copy.path().join(file)).unwrap();
        }
        let length = || std::fs::metadata(copy.path().join("test.db-wal")).unwrap().len();
        assert!(length() > 0);
        let opening = Opening { path: copy.path().join("test.db"), pages_max: 0, busy_timeout: PATIENCE };
        let writer = Writer::open(opening.clone(), PATIENCE).unwrap();
        assert_eq!(length(), 0);
        assert_eq!(count(&Readers::open(opening, PATIENCE).await.unwrap()).await, 1);
        drop(writer);
    }

    #[tokio::test]
    async fn a_log_that_somebody_reads_is_written_over_itself() {
        let (folder, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (writer, _readers) = open_both(&folder).await;
        insert(&writer, 1).await.commit().unwrap().on_disk().await.unwrap();
        for file in ["test.db", "test.db-wal"] {
            std::fs::copy(folder.path().join(file), copy.path().join(file)).unwrap();
        }
        let log = copy.path().join("test.db-wal");
        let (before, last_written) =
            (std::fs::read(&log).unwrap(), || std::fs::metadata(&log).unwrap().modified().unwrap());
        let opening = Opening { path: copy.path().join("test.db"), pages_max: 0, busy_timeout: Duration::ZERO };
        let readers = Readers::open(opening.clone(), PATIENCE).await.unwrap();
        let reading = readers.begin().await.unwrap();
        let copied_at = last_written();
        let writer = Writer::open(opening, PATIENCE).unwrap();
        assert!(last_written() > copied_at);
        assert_eq!(std::fs::read(&log).unwrap(), before);
        drop(reading);
        insert(&writer, 2).await.commit().unwrap().on_disk().await.unwrap();
        assert_eq!(count(&readers).await, 2);
    }

    #[tokio::test]
    async fn a_wal_is_not_rewritten_while_another_process_writes() {
        let (folder, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (writer, _readers) = open_both(&folder).await;
        insert(&writer, 1).await.commit().unwrap().on_disk().await.unwrap();
        for file in ["test.db", "test.db-wal"] {
            std::fs::copy(folder.path().join(file), copy.path().join(file)).unwrap();
        }
        let opening = Opening { path: copy.path().join("test.db"), pages_max: 0, busy_timeout: Duration::ZERO };
        // Keeps the checkpoint from truncating the WAL.
        let readers = Readers::open(opening.clone(), PATIENCE).await.unwrap();
        let _reading = readers.begin().await.unwrap();
        let other = Connection::open(&opening.path).unwrap();
        other.execute_batch("BEGIN IMMEDIATE; INSERT INTO rows (id) VALUES (2)").unwrap();
        let error = Writer::open(opening.clone(), PATIENCE).err().expect("the other process holds the write lock");
        assert!(error.to_string().contains("locked"), "{error}");
        other.execute_batch("COMMIT").unwrap();
        Writer::open(opening, PATIENCE).unwrap();
        assert_eq!(count(&readers).await, 2);
    }

    #[tokio::test]
    async fn a_writer_that_closes_leaves_everything_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let (writer, readers) = open_both(&folder).await;
        insert(&writer, 1).await.commit().unwrap().on_disk().await.unwrap();
        // It saw the beginning of what is there, and has ended by the time the writer asks again.
        let reading = readers.begin().await.unwrap();
        insert(&writer, 2).await.commit().unwrap();
        let ending = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(reading);
        });
        writer.close().await;
        ending.join().unwrap();
        std::fs::remove_file(folder.path().join("test.db-wal")).ok();
        let opening = Opening { path: folder.path().join("test.db"), pages_max: 0, busy_timeout: PATIENCE };
        drop(readers);
        assert_eq!(count(&Readers::open(opening, PATIENCE).await.unwrap()).await, 2);
    }

    #[tokio::test]
    async fn what_is_committed_while_the_disk_works_goes_there_together() {
        let folder = tempfile::tempdir().unwrap();
        let (writer, word, taken) = with_slow_disk(&folder).await;
        let mut landings = Vec::new();
        for id in 1..=5 {
            landings.push(insert(&writer, id).await.commit().unwrap());
        }
        // The first may have begun alone or with others; whoever came after it shares the next.
        word.send(()).unwrap();
        word.send(()).unwrap();
        for mut landing in landings {
            landing.on_disk().await.unwrap();
        }
        assert!(taken.load(Ordering::SeqCst) <= 2);
    }

    #[tokio::test]
    async fn what_follows_a_commit_happens_though_whoever_waited_has_gone() {
        let folder = tempfile::tempdir().unwrap();
        let (writer, word, _) = with_slow_disk(&folder).await;
        let (follow, mut followed) = tokio::sync::mpsc::unbounded_channel();
        let stays = follow.clone();
        let gone = insert(&writer, 1).await.commit().unwrap().then(move || follow.send("gone").unwrap());
        assert!(gone.now_or_never().is_none());
        let stayed = insert(&writer, 2).await.commit().unwrap().then(move || stays.send("stayed").unwrap());
        assert!(followed.try_recv().is_err(), "the disk has neither");
        word.send(()).unwrap();
        word.send(()).unwrap();
        stayed.await.unwrap();
        let both = [followed.recv().await.unwrap(), followed.recv().await.unwrap()];
        assert!(both.contains(&"gone") && both.contains(&"stayed"), "{both:?}");
        assert!(followed.recv().await.is_none(), "each once");
    }

    #[tokio::test]
    async fn whoever_keeps_people_waiting_goes_ahead_and_the_line_in_between() {
        let folder = tempfile::tempdir().unwrap();
        let (writer, _readers) = open_both(&folder).await;
        let held = writer.begin(Turn::InLine, Durability::Relaxed).await.unwrap();
        let mut lined_up = [Turn::InLine, Turn::InLine, Turn::Ahead].map(|turn| {
            let writer = writer.clone();
            Box::pin(async move { writer.begin(turn, Durability::Relaxed).await.unwrap() })
        });
        for waiting in &mut lined_up {
            assert!(waiting.as_mut().now_or_never().is_none(), "somebody has the writer");
        }
        let [mut first, mut second, ahead] = lined_up;
        drop(held);
        let ahead = ahead.await;
        assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
        let mut again = Box::pin(writer.begin(Turn::Ahead, Durability::Relaxed));
        assert!(again.as_mut().now_or_never().is_none());
        drop(ahead);
        let first = first.await;
        assert!(again.as_mut().now_or_never().is_none(), "not twice in a row");
        drop(first);
        drop(again.await.unwrap());
        drop(second.await);
    }

    #[tokio::test]
    async fn rows_go_in_in_order_whatever_number_of_them_there_is() {
        let folder = tempfile::tempdir().unwrap();
        let (writer, _readers) = open_both(&folder).await;
        let mut tx = writer.begin(Turn::InLine, Durability::Relaxed).await.unwrap();
        for count in [0, 1, 15, 16, 17, 50] {
            let rows = (1..=count).map(|id| (id, format!("row {id}")));
            let inserted: Vec<(i64, String)> =
                tx.insert_returning("rows (id, name)", rows, "RETURNING id, name").unwrap();
            assert_eq!(inserted, (1..=count).map(|id| (id, format!("row {id}"))).collect::<Vec<_>>());
            query("DELETE FROM rows WHERE id % 20 > 0").execute(&mut tx).await.unwrap();
            let kept: Vec<(i64,)> = tx
                .insert_returning(
                    "rows (id, name)",
                    (1..=count).map(|id| (id, "new")),
                    "ON CONFLICT DO NOTHING RETURNING id",
                )
                .unwrap();
            let new: Vec<(i64,)> = (1..=count).filter(|id| id % 20 > 0).map(|id| (id,)).collect();
            assert_eq!(kept, new, "what was there is left alone");
            query("DELETE FROM rows").execute(&mut tx).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_row_that_cannot_be_inserted_takes_its_transaction_with_it_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (writer, readers) = open_both(&folder).await;
        let mut tx = insert(&writer, 1).await;
        let refused = tx.insert_each("rows (id, name)", [(2, "b"), (1, "a")], "").unwrap_err();
        assert!(refused.as_database_error().unwrap().is_unique_violation(), "{refused}");
        let stray = "INSERT INTO rows (id) VALUES (3)";
        assert!(query(stray).execute(&mut tx).await.is_err(), "it would be committed for itself");
        assert!(tx.execute_each(stray, [()]).is_err());
        assert!(tx.commit().is_err());
        assert_eq!(count(&readers).await, 0);
        insert(&writer, 1).await.commit().unwrap().on_disk().await.unwrap();
        assert_eq!(count(&readers).await, 1);
    }

    #[tokio::test]
    async fn a_transaction_for_reading_cannot_write() {
        let folder = tempfile::tempdir().unwrap();
        let (_writer, readers) = open_both(&folder).await;
        let mut tx = readers.begin().await.unwrap();
        assert!(query("INSERT INTO rows (id) VALUES (1)").execute(&mut tx).await.is_err());
        assert!(tx.execute_each("INSERT INTO rows (id) VALUES (?1)", [(1,)]).is_err());
    }

    #[tokio::test]
    async fn a_reader_whose_statement_was_abandoned_is_not_lent_again() {
        let folder = tempfile::tempdir().unwrap();
        let (_writer, readers) = open_both(&folder).await;
        for _ in 0..10 {
            let mut tx = readers.begin().await.unwrap();
            let slow =
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 300000) SELECT count(*) FROM n";
            let abandoned = pin!(query_scalar::<_, i64>(slow).fetch_one(&mut tx)).now_or_never();
            assert!(abandoned.is_none(), "it is under way elsewhere");
            drop(tx);
            assert_eq!(count(&readers).await, 0);
        }
    }
}
