//! What the tests stand on: databases of their own, servers in and out of process, and waiting with a deadline.

mod answers;
mod api;
mod app;
mod browser;
mod database;
mod finished;
pub mod kernel;
mod postgres;
mod process;
mod proxy;
pub mod rabbit;
mod receiver;
pub mod schedule;
pub mod witness;

pub use answers::{fields, problem, wrong_field};
pub use api::{Api, http_client, order};
pub use app::{App, settings, settings_from};
pub use browser::Browser;
pub use database::{CONNECTIONS_MAX, Engine, TestDb, Wire};
pub use finished::{assert_audited, under_way, until_finished, until_finished_and_audited};
pub use postgres::OwnPostgres;
pub use process::Server;
pub use proxy::Proxy;
pub use receiver::{Mails, Reply, Taking, Webhooks};

use std::time::Duration;

/// Nothing here takes this long unless it is broken.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Polls until `look` finds something; panics with `what` at the deadline.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, look: impl FnMut() -> F) -> T {
    eventually_within(DEADLINE, Duration::from_millis(50), what, look).await
}

/// The same with another deadline and poll interval.
pub async fn eventually_within<T, F: Future<Output = Option<T>>>(
    limit: Duration,
    interval: Duration,
    what: &str,
    mut look: impl FnMut() -> F,
) -> T {
    let deadline = tokio::time::Instant::now() + limit;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(interval).await;
    }
}

/// Polls for the whole of `span`; panics with `what` as soon as `look` finds something.
pub async fn never<T, F: Future<Output = Option<T>>>(what: &str, span: Duration, mut look: impl FnMut() -> F) {
    let end = tokio::time::Instant::now() + span;
    let mut pace = tokio::time::interval(Duration::from_millis(25));
    while tokio::time::Instant::now() < end {
        assert!(look().await.is_none(), "{what}");
        pace.tick().await;
    }
}

/// Runs each test, an async function that takes a [`TestDb`], on every database.
macro_rules! each_database {
    ($($name:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
            async fn $name() {
                super::$name($crate::support::TestDb::new($crate::support::Engine::Sqlite).await).await;
            })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
            async fn $name() {
                super::$name($crate::support::TestDb::new($crate::support::Engine::Postgres).await).await;
            })+
        }
    };
}
pub(crate) use each_database;

/// The same on the embedded queue with in-process delivery.
macro_rules! each_database_in_process {
    ($($name:ident),+ $(,)?) => {
        mod in_process_sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
            async fn $name() {
                super::$name($crate::support::TestDb::in_process($crate::support::Engine::Sqlite).await).await;
            })+
        }
        mod in_process_postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
            async fn $name() {
                super::$name($crate::support::TestDb::in_process($crate::support::Engine::Postgres).await).await;
            })+
        }
    };
}
pub(crate) use each_database_in_process;

/// The same over RabbitMQ.
macro_rules! each_database_on_rabbit {
    ($($name:ident),+ $(,)?) => {
        mod rabbit_sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
            async fn $name() {
                super::$name($crate::support::TestDb::on_rabbit($crate::support::Engine::Sqlite).await).await;
            })+
        }
        mod rabbit_postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
            async fn $name() {
                super::$name($crate::support::TestDb::on_rabbit($crate::support::Engine::Postgres).await).await;
            })+
        }
    };
}
pub(crate) use each_database_on_rabbit;
