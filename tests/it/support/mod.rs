//! What the tests stand on: databases of their own, servers in and out of process, and waiting with a deadline.

mod answers;
mod api;
mod app;
mod browser;
mod database;
pub mod kernel;
mod postgres;
mod process;
pub mod rabbit;
mod receiver;

pub use answers::{fields, problem, wrong_field};
pub use api::{Api, order};
pub use app::{App, settings};
pub use browser::Browser;
pub use database::{CONNECTIONS_MAX, Engine, TestDb, Wire};
pub use postgres::OwnPostgres;
pub use process::Server;
pub use receiver::{Mails, Reply, Taking, Webhooks};

use std::time::Duration;

/// Nothing here takes this long unless it is broken.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Polls until `look` finds something; panics with `what` at the deadline.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let deadline = tokio::time::Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Runs each test, an async function that takes a [`TestDb`], on every database.
macro_rules! each_database {
    ($($name:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::support::TestDb::new($crate::support::Engine::Sqlite).await).await;
            })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::support::TestDb::new($crate::support::Engine::Postgres).await).await;
            })+
        }
    };
}
pub(crate) use each_database;

/// The same over RabbitMQ.
macro_rules! each_database_on_rabbit {
    ($($name:ident),+ $(,)?) => {
        mod rabbit_sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::support::TestDb::on_rabbit($crate::support::Engine::Sqlite).await).await;
            })+
        }
        mod rabbit_postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::support::TestDb::on_rabbit($crate::support::Engine::Postgres).await).await;
            })+
        }
    };
}
pub(crate) use each_database_on_rabbit;
