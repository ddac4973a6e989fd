//! A database of its own for each test, gone afterwards, and the transport to go with it.

use sqlx::{Connection, Executor, PgConnection};
use stockade::clock::{Clock, mint_id};
use stockade::db::{Db, Options};
use tempfile::TempDir;
use tokio::sync::OnceCell;

use super::{postgres, rabbit};

/// How many connections each opens at most: tests share one Postgres.
pub const CONNECTIONS_MAX: u32 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    Sqlite,
    Postgres,
}

/// What carries messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wire {
    Table,
    /// A broker at this URL, on which all names begin with this prefix.
    Rabbit {
        url: String,
        prefix: String,
    },
}

impl Wire {
    /// Names of its own on a broker that others use too.
    pub fn on(url: String) -> Self {
        Self::Rabbit { url, prefix: format!("t{}", mint_id().simple()) }
    }

    /// The flags that have a server use it.
    pub fn flags(&self) -> Vec<String> {
        match self {
            Self::Table => Vec::new(),
            // A relay that died holds its claim for three times as long as it may wait for confirms.
            Self::Rabbit { url, prefix } => {
                let flags = ["--broker-url", url, "--queue-prefix", prefix, "--amqp-confirm-timeout", "2s"];
                flags.map(str::to_owned).to_vec()
            }
        }
    }
}

/// A database with the schema, made once: to copy it takes a tenth of the time that it takes to migrate an empty one.
static TEMPLATE: OnceCell<String> = OnceCell::const_new();

async fn template() -> String {
    let url = copy_of("template0").await;
    TestDb::at(url.clone()).open(Clock::System).await.close().await;
    url.rsplit_once('/').unwrap().1.to_owned()
}

/// A new database like the one of that name; its URL.
async fn copy_of(template: &str) -> String {
    let name = format!("t{}", mint_id().simple());
    let admin = tokio::task::spawn_blocking(|| postgres::url("postgres")).await.unwrap();
    let mut admin = PgConnection::connect(&admin).await.unwrap();
    admin.execute(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name} TEMPLATE {template}"))).await.unwrap();
    admin.close().await.unwrap();
    postgres::url(&name)
}

pub struct TestDb {
    pub url: String,
    pub wire: Wire,
    _folder: TempDir,
}

impl TestDb {
    pub async fn new(engine: Engine) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = match engine {
            Engine::Sqlite => format!("sqlite:{}", folder.path().join("test.db").display()),
            Engine::Postgres => copy_of(TEMPLATE.get_or_init(template).await).await,
        };
        Self { url, wire: Wire::Table, _folder: folder }
    }

    /// A Postgres database without a table.
    pub async fn empty_postgres() -> Self {
        Self::at(copy_of("template0").await)
    }

    /// On the broker that tests share.
    pub async fn on_rabbit(engine: Engine) -> Self {
        let url = tokio::task::spawn_blocking(rabbit::url).await.unwrap();
        Self::new(engine).await.over(Wire::on(url))
    }

    pub fn over(self, wire: Wire) -> Self {
        Self { wire, ..self }
    }

    pub fn is_on_rabbit(&self) -> bool {
        self.wire != Wire::Table
    }

    /// A database that somebody else looks after.
    pub fn at(url: String) -> Self {
        Self { url, wire: Wire::Table, _folder: tempfile::tempdir().unwrap() }
    }

    /// Opens it as a server would, with a clock that may be set by hand.
    pub async fn open(&self, clock: Clock) -> Db {
        Db::open(&self.options(), clock).await.unwrap()
    }

    /// Opens it beside a server.
    pub async fn look(&self) -> Db {
        Db::open_read_only(&self.options(), Clock::System).await.unwrap()
    }

    /// The one number that a query beside the server finds.
    pub async fn count(&self, sql: &'static str) -> i64 {
        let db = self.look().await;
        let mut tx = db.read().await.unwrap();
        let count = stockade::on!(tx, c => sqlx::query_scalar(sql).fetch_one(c).await).unwrap();
        drop(tx);
        db.close().await;
        count
    }

    /// The same, with one text bound.
    pub async fn count_of(&self, sql: &'static str, text: &str) -> i64 {
        let db = self.look().await;
        let mut tx = db.read().await.unwrap();
        let count = stockade::on!(tx, c => sqlx::query_scalar(sql).bind(text).fetch_one(c).await).unwrap();
        drop(tx);
        db.close().await;
        count
    }

    /// The bytes of the event of type `key` about `aggregate_id`, as they were published.
    pub async fn event_body(&self, aggregate_id: &str, key: &str) -> String {
        let (aggregate_type, event_type) = key.split_once('.').unwrap();
        let db = self.look().await;
        let mut tx = db.read().await.unwrap();
        let body: Vec<u8> = stockade::on!(tx, c => {
            sqlx::query_scalar(
                "SELECT body FROM messaging_outbox
                 WHERE aggregate_type = $1 AND aggregate_id = $2 AND event_type = $3 AND kind = 'event'",
            )
            .bind(aggregate_type)
            .bind(aggregate_id)
            .bind(event_type)
            .fetch_one(c)
            .await
        })
        .unwrap();
        drop(tx);
        db.close().await;
        String::from_utf8(body).unwrap()
    }

    pub fn options(&self) -> Options {
        Options { connections_max: CONNECTIONS_MAX, ..Options::new(&self.url) }
    }
}
