//! A database of its own for each test, gone afterwards, and the transport to go with it.

use std::str::FromStr;

use rusqlite::OpenFlags;
use rusqlite::config::DbConfig;
use rusqlite::types::FromSql;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, Executor, PgConnection, PgPool};
use stockade::schema::SCHEMAS;
use stockade_kernel::clock::{Clock, mint_id};
use stockade_kernel::db::{Db, Options};
use tempfile::TempDir;
use tokio::sync::OnceCell;

use super::{postgres, rabbit};

/// How many connections a server of a test opens at most: on Postgres each is a process, which takes more CPU to start
/// and to stop than the queries of most tests.
pub const CONNECTIONS_MAX: u32 = 6;

const SQLITE_FILE: &str = "test.db";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    Sqlite,
    Postgres,
}

/// What carries messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wire {
    /// The embedded queue, whose rows are relayed and claimed one by one.
    Table,
    /// The embedded queue as a server uses it: direct enqueue, in-process delivery, batch rows, deferred deletes.
    InProcess,
    /// A broker at this URL, on which all names begin with this prefix.
    Rabbit { url: String, prefix: String },
}

const CONFIRM_TIMEOUT: &str = "--amqp-confirm-timeout";

impl Wire {
    /// Names of its own on a broker that others use too.
    pub fn on(url: String) -> Self {
        Self::Rabbit { url, prefix: format!("t{}", mint_id().simple()) }
    }

    /// The flags that have a server use it, beside those given.
    pub fn flags(&self, given: &[&str]) -> Vec<String> {
        let Self::Rabbit { url, prefix } = self else { return Vec::new() };
        let mut flags = vec!["--broker-url", url, "--queue-prefix", prefix];
        if !given.contains(&CONFIRM_TIMEOUT) {
            // A relay that died holds its claim for three times as long as it may wait for confirms.
            flags.extend([CONFIRM_TIMEOUT, "2s"]);
        }
        flags.into_iter().map(str::to_owned).collect()
    }
}

/// A migrated database of each engine, made once: a copy takes a tenth of the time that the migrations take.
static SQLITE_TEMPLATE: OnceCell<TestDb> = OnceCell::const_new();
static POSTGRES_TEMPLATE: OnceCell<String> = OnceCell::const_new();

async fn sqlite_template() -> TestDb {
    let template = TestDb::empty_sqlite();
    template.open(Clock::System).await.close().await;
    template
}

async fn postgres_template() -> String {
    let mut template = TestDb::empty_postgres().await;
    template.open(Clock::System).await.close().await;
    template.postgres_name.take().expect("not dropped, but kept to be copied")
}

/// A new Postgres database like the one of that name; its name.
async fn copy_of(template: &str) -> String {
    let name = format!("t{}", mint_id().simple());
    let admin = tokio::task::spawn_blocking(|| postgres::url("postgres")).await.unwrap();
    let mut admin = PgConnection::connect(&admin).await.unwrap();
    admin
        .execute(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")))
        .await
        .unwrap();
    admin.close().await.unwrap();
    name
}

pub struct TestDb {
    pub url: String,
    pub wire: Wire,
    folder: TempDir,
    /// The database on the shared Postgres that is dropped with this.
    postgres_name: Option<String>,
    /// Kept for queries beside the server: on Postgres each new connection is a process and a login.
    beside: OnceCell<PgPool>,
}

impl TestDb {
    pub async fn new(engine: Engine) -> Self {
        match engine {
            Engine::Sqlite => {
                let db = Self::empty_sqlite();
                let template = SQLITE_TEMPLATE.get_or_init(sqlite_template).await;
                std::fs::copy(template.folder.path().join(SQLITE_FILE), db.folder.path().join(SQLITE_FILE)).unwrap();
                db
            }
            Engine::Postgres => {
                Self::on_postgres(copy_of(POSTGRES_TEMPLATE.get_or_init(postgres_template).await).await)
            }
        }
    }

    /// A SQLite database whose file does not exist yet.
    pub fn empty_sqlite() -> Self {
        let folder = folder_of_this_test();
        let url = format!("sqlite:{}", folder.path().join(SQLITE_FILE).display());
        Self { url, wire: Wire::Table, folder, postgres_name: None, beside: OnceCell::new() }
    }

    /// A Postgres database without a table.
    pub async fn empty_postgres() -> Self {
        Self::on_postgres(copy_of("template0").await)
    }

    fn on_postgres(name: String) -> Self {
        let mut db = Self::at(postgres::url(&name));
        db.postgres_name = Some(name);
        db
    }

    /// On the embedded queue with in-process delivery.
    pub async fn in_process(engine: Engine) -> Self {
        Self::new(engine).await.over(Wire::InProcess)
    }

    /// On the broker that tests share.
    pub async fn on_rabbit(engine: Engine) -> Self {
        let url = tokio::task::spawn_blocking(rabbit::url).await.unwrap();
        Self::new(engine).await.over(Wire::on(url))
    }

    pub fn over(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    pub fn is_on_rabbit(&self) -> bool {
        matches!(self.wire, Wire::Rabbit { .. })
    }

    /// A database that somebody else looks after.
    pub fn at(url: String) -> Self {
        let folder = folder_of_this_test();
        Self { url, wire: Wire::Table, folder, postgres_name: None, beside: OnceCell::new() }
    }

    /// Opens it as a server would, with a clock that may be set by hand.
    pub async fn open(&self, clock: Clock) -> Db {
        Db::open(&self.options(), clock).await.unwrap()
    }

    /// Opens it beside a server.
    pub async fn look(&self) -> Db {
        Db::open_read_only(&self.options(), Clock::System).await.unwrap()
    }

    /// The one row of a query beside the server. On SQLite the connection is opened for each look: one that stays open
    /// would keep the server from truncating its WAL.
    async fn value<T>(&self, sql: &'static str, texts: &[&str]) -> T
    where
        T: FromSql + for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
    {
        if let Some(file) = self.url.strip_prefix("sqlite:") {
            let connection = rusqlite::Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
            connection.busy_timeout(super::DEADLINE).unwrap();
            return connection.query_row(sql, rusqlite::params_from_iter(texts), |row| row.get(0)).unwrap();
        }
        let query = texts.iter().fold(sqlx::query_scalar(sql), |query, text| query.bind(*text));
        query.fetch_one(self.beside().await).await.unwrap()
    }

    /// A connection to the SQLite file beside the server, as an operator's shell would have.
    pub fn sqlite(&self) -> rusqlite::Connection {
        let file = self.url.strip_prefix("sqlite:").expect("it is on SQLite");
        let connection = rusqlite::Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_WRITE).unwrap();
        connection.busy_timeout(super::DEADLINE).unwrap();
        // The WAL of a dead process is left for the next one to recover.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).unwrap();
        connection
    }

    /// Executes a statement beside the server; how many rows it changed.
    pub async fn execute(&self, sql: &'static str, texts: &[&str]) -> u64 {
        if self.url.starts_with("sqlite:") {
            let connection = self.sqlite();
            return connection.execute(sql, rusqlite::params_from_iter(texts)).unwrap().try_into().unwrap();
        }
        let query = texts.iter().fold(sqlx::query(sql), |query, text| query.bind(*text));
        query.execute(self.beside().await).await.unwrap().rows_affected()
    }

    /// Waits until no server is connected, then ends all leases: Postgres may still run the last statement of a server that
    /// was killed.
    pub async fn end_leases_of_dead_servers(&self) {
        if !self.url.starts_with("sqlite:") {
            let others = "SELECT COUNT(*) FROM pg_stat_activity
                 WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()";
            let gone = async || (self.count(others).await == 0).then_some(());
            super::eventually("no other connection", gone).await;
        }
        self.end_leases().await;
    }

    /// Ends all leases, as if their time had run out.
    pub async fn end_leases(&self) {
        let statements = match self.url.starts_with("sqlite:") {
            true => [
                "UPDATE messaging_outbox SET available_at = available_at - 3600000
                 WHERE claimed_by IS NOT NULL AND status IN ('pending', 'failed')",
                "UPDATE messaging_queue SET lease_until = lease_until - 3600000",
                "UPDATE messaging_bundles SET lease_until = lease_until - 3600000",
                "UPDATE messaging_inbox SET lease_until = lease_until - 3600000
                 WHERE state = 'processing' OR (state = 'waiting' AND unfinished_runs > 0)",
            ],
            false => [
                "UPDATE messaging_outbox SET available_at = available_at - interval '1 hour'
                 WHERE claimed_by IS NOT NULL AND status IN ('pending', 'failed')",
                "UPDATE messaging_queue SET lease_until = lease_until - interval '1 hour'",
                "UPDATE messaging_bundles SET lease_until = lease_until - interval '1 hour'",
                "UPDATE messaging_inbox SET lease_until = lease_until - interval '1 hour'
                 WHERE state = 'processing' OR (state = 'waiting' AND unfinished_runs > 0)",
            ],
        };
        for end in statements {
            self.execute(end, &[]).await;
        }
    }

    async fn beside(&self) -> &PgPool {
        // Fail instead of waiting forever for a lock that a stopped server holds.
        let options = PgConnectOptions::from_str(&self.url).unwrap().options([("lock_timeout", "10s")]);
        let open = async || PgPoolOptions::new().max_connections(1).connect_with(options).await.unwrap();
        self.beside.get_or_init(open).await
    }

    /// The one number that a query beside the server finds.
    pub async fn count(&self, sql: &'static str) -> i64 {
        self.value(sql, &[]).await
    }

    /// Duplicates beyond the events that were sent again on purpose.
    pub async fn unexplained_duplicates(&self) -> i64 {
        let duplicates = "SELECT CAST(COALESCE(SUM(duplicates), 0) AS BIGINT) FROM messaging_inbox";
        let sent_again = "SELECT COUNT(*) FROM messaging_outbox WHERE kind <> 'event'";
        (self.count(duplicates).await - self.count(sent_again).await).max(0)
    }

    /// The one number that a query with one text bound finds.
    pub async fn count_of(&self, sql: &'static str, text: &str) -> i64 {
        self.value(sql, &[text]).await
    }

    /// The bytes of the event of type `key` about `aggregate_id`, as they were published.
    pub async fn event_body(&self, aggregate_id: &str, key: &str) -> String {
        let (aggregate_type, event_type) = key.split_once('.').unwrap();
        let body: Vec<u8> = self
            .value(
                "SELECT body FROM messaging_outbox
                 WHERE aggregate_type = $1 AND aggregate_id = $2 AND event_type = $3 AND kind = 'event'",
                &[aggregate_type, aggregate_id, event_type],
            )
            .await;
        String::from_utf8(body).unwrap()
    }

    pub fn options(&self) -> Options {
        Options { connections_max: CONNECTIONS_MAX, schemas: SCHEMAS, ..Options::new(&self.url) }
    }
}

impl Drop for TestDb {
    fn drop(&mut self) {
        // A server that a failed test leaves running would abort the whole run when it finds its files gone.
        self.folder.disable_cleanup(std::thread::panicking());
        if let Some(name) = self.postgres_name.take() {
            postgres::drop_database(name);
        }
        if let Wire::Rabbit { url, prefix } = &self.wire {
            rabbit::delete_queues(url, prefix);
        }
    }
}

/// Most tests stay in memory. The crash tests of `processes` and `databases` keep their files on a real disk.
fn folder_of_this_test() -> TempDir {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    if ["crashes::processes::", "crashes::databases::"].iter().any(|module| test.starts_with(module)) {
        tempfile::tempdir_in("/var/tmp").unwrap()
    } else {
        tempfile::tempdir().unwrap()
    }
}
