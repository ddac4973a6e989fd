//! The seam between the code and its two databases: [`Db`] opens them, [`Tx`] is one unit of work on either.
//!
//! Functions that need the database borrow `&mut Tx`; only the owner of a `Tx` (an HTTP handler or a loop) can
//! commit it, and a `Tx` that is dropped has done nothing. SQL that reads the same on both databases is written
//! once with [`on!`](crate::on); tuned SQL lives in twin files `pg.rs` and `sqlite.rs`, joined by [`dialects!`].
//!
//! SQLite has one writing connection, and every writing transaction opens with BEGIN IMMEDIATE: a deferred one
//! would fail halfway, when it turns from reading to writing, without honouring the busy timeout. Reads use a pool
//! of their own. One process serves a file; a second is refused by a lock file beside it.

mod column;
mod describe;
mod filter;
mod hatches;
mod lanes;
mod migrate;
mod open;
mod scratch;
pub mod sqlite;
mod trouble;
mod wakes;

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Context;
use sqlx::{PgPool, Postgres, Transaction};

pub use column::Column;
pub use describe::About;
pub use filter::fetch_page;
pub use filter::{Filter, Value};
pub use hatches::{Bundle, Claimed, Hatch, Hatches, Parcel, Part, Place, Pledge};
use lanes::{InLane, Lane, Lanes};
pub use migrate::{Migration, Schema};
pub use open::Options;
pub use scratch::ScratchSchema;
use sqlite::{Durability, Lent, Readers, SqliteConnection, Turn, Writer, Writing};
pub use trouble::Trouble;
pub use wakes::{Bell, Wakes};

use crate::clock::{Clock, Timestamp};
use crate::crash_points::{self, Step};
use crate::metrics::Metrics;

/// An open database. Clones share it: every request has several.
#[derive(Clone)]
pub struct Db {
    inner: Arc<Inner>,
    lane: Option<Arc<Lane>>,
}

struct Inner {
    engine: Engine,
    /// The kernel's and its host's.
    schemas: Vec<Schema>,
    wakes: Wakes,
    hatches: Hatches,
    clock: Clock,
    hands_on: AtomicBool,
    metrics: Arc<Metrics>,
}

enum Engine {
    Postgres {
        pool: PgPool,
        lanes: Lanes,
    },
    Sqlite {
        /// `None` when opened for reading only.
        writer: Option<Writer>,
        readers: Readers,
        /// Held until the database is closed; `None` when opened for reading only.
        lock: Mutex<Option<open::ServerLock>>,
    },
}

/// One unit of work. Lent as `&mut Tx`; only its owner can commit it.
pub struct Tx {
    conn: Conn,
    now: Timestamp,
    wakes: Wakes,
    rings: BTreeSet<String>,
    hatches: Hatches,
    hands_on: bool,
    metrics: Arc<Metrics>,
    after_commit: Vec<Box<dyn FnOnce() + Send>>,
    _in_lane: Option<InLane>,
}

/// What follows a commit.
struct Sequel {
    wakes: Wakes,
    rings: BTreeSet<String>,
    after_commit: Vec<Box<dyn FnOnce() + Send>>,
}

impl Sequel {
    fn play(self) {
        for topic in &self.rings {
            self.wakes.ring(topic);
        }
        for told in self.after_commit {
            told();
        }
    }
}

/// The transaction behind a [`Tx`], for the macros to match on.
pub enum Conn {
    Postgres(Transaction<'static, Postgres>),
    Sqlite(SqliteTx),
}

/// A transaction on one of the connections that read, or on the one that writes.
pub enum SqliteTx {
    Reading(Lent),
    Writing(Writing),
}

impl Deref for SqliteTx {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        match self {
            Self::Reading(tx) => tx,
            Self::Writing(tx) => tx,
        }
    }
}

impl DerefMut for SqliteTx {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        match self {
            Self::Reading(tx) => tx,
            Self::Writing(tx) => tx,
        }
    }
}

impl Db {
    /// Opens the database for a server, creating and migrating it as needed.
    pub async fn open(options: &Options, clock: Clock) -> anyhow::Result<Self> {
        let engine = open::to_serve(options).await?;
        let db = Self::over(engine, clock, options);
        for schema in &db.inner.schemas {
            schema.migrate(&db).await.context("cannot migrate the database")?;
        }
        Ok(db)
    }

    /// Opens an existing database to look at it, beside the server that owns it.
    pub async fn open_read_only(options: &Options, clock: Clock) -> anyhow::Result<Self> {
        let engine = open::to_look(options).await?;
        Ok(Self::over(engine, clock, options))
    }

    fn over(engine: Engine, clock: Clock, options: &Options) -> Self {
        let schemas = [migrate::KERNEL].into_iter().chain(options.schemas.iter().copied()).collect();
        let inner = Inner {
            engine,
            schemas,
            wakes: Wakes::default(),
            hatches: Hatches::default(),
            clock,
            hands_on: AtomicBool::default(),
            metrics: Arc::default(),
        };
        Self { inner: Arc::new(inner), lane: None }
    }

    /// The same database, for a loop that writes again and again: on Postgres it has a connection of its own as long as there
    /// are any to spare, see [`lanes`].
    pub fn on_a_lane(&self) -> Self {
        let lane = match &self.inner.engine {
            Engine::Postgres { pool, lanes } => lanes.open(pool),
            Engine::Sqlite { .. } => None,
        };
        Self { inner: self.inner.clone(), lane }
    }

    /// Begins a transaction that is on disk when its commit returns, and sees only what is.
    pub async fn begin(&self) -> sqlx::Result<Tx> {
        self.begin_durable(Turn::InLine, Durability::Full).await
    }

    /// Begins a transaction that is on disk when its commit returns, and with it all that it builds on: on SQLite that
    /// may be so new that it is on its way there still. Only for whoever tells nobody what was seen before the commit.
    pub async fn begin_chained(&self) -> sqlx::Result<Tx> {
        self.begin_durable(Turn::InLine, Durability::Chained).await
    }

    /// As [`Self::begin_chained`], ahead of loops that wait for SQLite's writer: for whoever keeps people waiting.
    pub async fn begin_ahead(&self) -> sqlx::Result<Tx> {
        self.begin_durable(Turn::Ahead, Durability::Chained).await
    }

    async fn begin_durable(&self, turn: Turn, durability: Durability) -> sqlx::Result<Tx> {
        let asked = Instant::now();
        match &self.inner.engine {
            Engine::Postgres { pool, .. } => {
                let (pool, in_lane) = self.way(pool);
                Ok(Tx { _in_lane: in_lane, ..self.tx(Conn::Postgres(pool.begin().await?), asked) })
            }
            Engine::Sqlite { writer, .. } => Ok(self.tx(write(writer, turn, durability).await?, asked)),
        }
    }

    /// Begins a transaction of bookkeeping: atomic as any, but a power cut may undo the last few. Only for what
    /// is safely done again: claiming, handing on and acknowledging messages. A crash of the process undoes none,
    /// and the next durable commit makes all before it durable, so a later effect never outlives an earlier claim.
    pub async fn begin_relaxed(&self) -> sqlx::Result<Tx> {
        let asked = Instant::now();
        match &self.inner.engine {
            Engine::Postgres { pool, .. } => {
                let (pool, in_lane) = self.way(pool);
                let begun = pool.begin_with("BEGIN; SET LOCAL synchronous_commit TO off").await?;
                Ok(Tx { _in_lane: in_lane, ..self.tx(Conn::Postgres(begun), asked) })
            }
            Engine::Sqlite { writer, .. } => {
                Ok(self.tx(write(writer, Turn::InLine, Durability::Relaxed).await?, asked))
            }
        }
    }

    /// The connection of its own if there is one and it is free, else those that all share.
    fn way<'a>(&'a self, shared: &'a PgPool) -> (&'a PgPool, Option<InLane>) {
        match self.lane.as_ref().and_then(|lane| Some((lane.pool(), lane.enter()?))) {
            Some((own, in_lane)) => (own, Some(in_lane)),
            None => (shared, None),
        }
    }

    /// Begins a transaction for reading: one consistent view of what is on disk, never in a writer's way.
    pub async fn read(&self) -> sqlx::Result<Tx> {
        let asked = Instant::now();
        let conn = match &self.inner.engine {
            Engine::Postgres { pool, .. } => {
                Conn::Postgres(pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?)
            }
            Engine::Sqlite { readers, .. } => {
                let reading = readers.begin().await?;
                self.until_on_disk().await?;
                Conn::Sqlite(SqliteTx::Reading(reading))
            }
        };
        Ok(self.tx(conn, asked))
    }

    /// Returns once everything is on disk that a relaxed or chained transaction may have seen: before anybody outside is
    /// told of it. On Postgres nothing is to be seen sooner.
    pub async fn until_on_disk(&self) -> sqlx::Result<()> {
        match &self.inner.engine {
            Engine::Sqlite { writer: Some(writer), .. } => writer.until_on_disk().await,
            Engine::Sqlite { writer: None, .. } | Engine::Postgres { .. } => Ok(()),
        }
    }

    fn tx(&self, conn: Conn, asked: Instant) -> Tx {
        self.inner.metrics.db_pool_wait.observe(asked.elapsed().as_secs_f64());
        Tx {
            conn,
            now: self.inner.clock.now(),
            wakes: self.inner.wakes.clone(),
            rings: BTreeSet::new(),
            hatches: self.inner.hatches.clone(),
            hands_on: self.inner.hands_on.load(Ordering::Relaxed),
            metrics: self.inner.metrics.clone(),
            after_commit: Vec::new(),
            _in_lane: None,
        }
    }

    pub fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.inner.metrics
    }

    pub fn wakes(&self) -> &Wakes {
        &self.inner.wakes
    }

    pub fn hatches(&self) -> &Hatches {
        &self.inner.hatches
    }

    /// Says whether transactions from now on hand their events on to the queues themselves; see [`Tx::hands_on`].
    pub fn set_hands_on(&self, hands_on: bool) {
        self.inner.hands_on.store(hands_on, Ordering::Relaxed);
    }

    /// `"sqlite"` or `"postgres"`, for people.
    pub fn engine_name(&self) -> &'static str {
        match &self.inner.engine {
            Engine::Postgres { .. } => "postgres",
            Engine::Sqlite { .. } => "sqlite",
        }
    }

    /// True if every statement is a round trip to another process.
    pub fn is_a_trip_away(&self) -> bool {
        matches!(self.inner.engine, Engine::Postgres { .. })
    }

    /// Carries wake-ups between instances; returns at once where there is only one.
    pub async fn exchange_wakes(self) {
        if let Engine::Postgres { pool, .. } = &self.inner.engine {
            self.inner.wakes.exchange(pool).await;
        }
    }

    /// Copies what was written from SQLite's log into its file, beside the writer; returns at once on Postgres, which
    /// sees to that itself.
    pub async fn keep_log_short(self) {
        if let Engine::Sqlite { writer: Some(writer), .. } = &self.inner.engine {
            writer.keep_log_short().await;
        }
    }

    pub async fn close(&self) {
        match &self.inner.engine {
            Engine::Postgres { pool, lanes } => {
                lanes.close().await;
                pool.close().await;
            }
            Engine::Sqlite { writer, readers, lock } => {
                readers.close();
                if let Some(writer) = writer {
                    writer.close().await;
                }
                drop(lock.lock().unwrap_or_else(PoisonError::into_inner).take());
            }
        }
    }
}

impl Tx {
    /// Commits, then runs the after-commit hooks and notifies. The line that calls this is a crash point.
    #[track_caller]
    pub fn commit(self) -> impl Future<Output = sqlx::Result<()>> + Send {
        crash_points::around(Step::Commit, Location::caller(), self.commit_now())
    }

    async fn commit_now(self) -> sqlx::Result<()> {
        let sequel = Sequel { wakes: self.wakes, rings: self.rings, after_commit: self.after_commit };
        let committed = match self.conn {
            Conn::Postgres(tx) => return commit_to_the_end(tx, sequel, self._in_lane).await,
            Conn::Sqlite(SqliteTx::Writing(tx)) => match tx.commit() {
                // A caller that hangs up while the disk works has committed all the same.
                Ok(landing) => return landing.then(|| sequel.play()).await,
                Err(error) => Err(error),
            },
            Conn::Sqlite(SqliteTx::Reading(_)) => Ok(()),
        };
        if let Err(error) = &committed {
            abort_if_the_disk_failed(error);
        }
        committed?;
        sequel.play();
        Ok(())
    }

    /// Counts or logs once this transaction has been committed, and not at all if it is not: once a batch, not once a
    /// row.
    pub fn after_commit(&mut self, told: impl FnOnce() + Send + 'static) {
        self.after_commit.push(Box::new(told));
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Wakes those who wait on `topic`, once this transaction has been committed.
    pub fn ring_on_commit(&mut self, topic: &str) {
        if !self.rings.contains(topic) {
            self.rings.insert(topic.to_owned());
        }
    }

    /// Are the queues in this database and open, so that what is due at once may go into them with this very commit?
    pub fn hands_on(&self) -> bool {
        self.hands_on
    }

    pub fn hatches(&self) -> &Hatches {
        &self.hatches
    }

    /// The moment this transaction began.
    pub fn now(&self) -> Timestamp {
        self.now
    }

    /// For the macros `on!` and `dialects!`.
    pub fn conn(&mut self) -> &mut Conn {
        &mut self.conn
    }
}

/// Commits in a task of its own: a caller that is cancelled has sent the COMMIT all the same, and what follows it must not be
/// lost.
async fn commit_to_the_end(
    transaction: Transaction<'static, Postgres>,
    sequel: Sequel,
    in_lane: Option<InLane>,
) -> sqlx::Result<()> {
    #[expect(clippy::disallowed_methods, reason = "as short as a commit, and nobody may cut it short")]
    let committing = tokio::spawn(async move {
        let committed = transaction.commit().await;
        drop(in_lane);
        match &committed {
            Ok(()) => sequel.play(),
            Err(error) => abort_if_the_disk_failed(error),
        }
        committed
    });
    committing.await.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => Err(sqlx::Error::WorkerCrashed),
    })
}

fn abort_if_the_disk_failed(error: &sqlx::Error) {
    if trouble::is_failed_fsync(error) {
        abort_for_the_disk(error);
    }
}

/// What an earlier commit wrote may be lost though it looks kept. Only recovery from disk can tell.
fn abort_for_the_disk(error: &dyn std::error::Error) -> ! {
    tracing::error!(%error, "the disk failed to keep what was written; stopping at once");
    std::process::abort();
}

async fn write(writer: &Option<Writer>, turn: Turn, durability: Durability) -> sqlx::Result<Conn> {
    match writer {
        Some(writer) => Ok(Conn::Sqlite(SqliteTx::Writing(writer.begin(turn, durability).await?))),
        None => Err(sqlx::Error::Configuration("the database was opened for reading only".into())),
    }
}

/// Runs one piece of SQL that reads the same on both databases: `on!(tx, c => sqlx::query("…").execute(c).await)`. It is
/// compiled twice: `sqlx` in it is sqlx itself for Postgres, and what is spelled like it for SQLite ([`sqlite`]).
#[macro_export]
macro_rules! on {
    ($tx:expr, $c:ident => $body:expr) => {
        match $tx.conn() {
            $crate::db::Conn::Postgres($c) => {
                let $c = &mut **$c;
                $body
            }
            $crate::db::Conn::Sqlite($c) => {
                use $crate::db::sqlite as sqlx;
                let $c = &mut **$c;
                $body
            }
        }
    };
}

/// Declares store functions and forwards each to its twin in `pg` or `sqlite`.
#[macro_export]
macro_rules! dialects {
    ($($(#[$doc:meta])* $vis:vis async fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)+) => {$(
        $(#[$doc])*
        $vis async fn $name(tx: &mut $crate::db::Tx, $($arg: $ty),*) -> sqlx::Result<$ret> {
            match tx.conn() {
                $crate::db::Conn::Postgres(c) => pg::$name(&mut **c, $($arg),*).await,
                $crate::db::Conn::Sqlite(c) => sqlite::$name(&mut **c, $($arg),*).await,
            }
        }
    )+};
}
pub use dialects;
