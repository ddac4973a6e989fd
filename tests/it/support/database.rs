//! A database of its own for each test, gone afterwards.

use sqlx::{Connection, Executor, PgConnection};
use stockade::clock::{Clock, mint_id};
use stockade::db::{Db, Options};
use tempfile::TempDir;

use super::postgres;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    Sqlite,
    Postgres,
}

pub struct TestDb {
    pub url: String,
    _folder: TempDir,
}

impl TestDb {
    pub async fn new(engine: Engine) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = match engine {
            Engine::Sqlite => format!("sqlite:{}", folder.path().join("test.db").display()),
            Engine::Postgres => {
                let name = format!("t{}", mint_id().simple());
                let admin = tokio::task::spawn_blocking(|| postgres::url("postgres")).await.unwrap();
                let mut admin = PgConnection::connect(&admin).await.unwrap();
                admin.execute(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
                admin.close().await.unwrap();
                postgres::url(&name)
            }
        };
        Self { url, _folder: folder }
    }

    /// Opens it as a server would, with a clock that may be set by hand.
    pub async fn open(&self, clock: Clock) -> Db {
        Db::open(&self.options(), clock).await.unwrap()
    }

    /// Opens it beside a server.
    pub async fn look(&self) -> Db {
        Db::open_read_only(&self.options(), Clock::System).await.unwrap()
    }

    pub fn options(&self) -> Options {
        Options { connections_max: 8, ..Options::new(&self.url) }
    }
}
