//! Brings a database to the schema this binary wants. Append-only, and the same file names on both sides.
//!
//! Several instances may start at once: on Postgres an advisory lock lets one migrate while the others wait; a
//! SQLite file has one server, held by its lock file before this runs.

use std::borrow::Cow;
use std::panic::Location;
use std::time::Duration;

use sqlx::migrate::{Migrate, MigrateError, Migration, MigrationType};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, SqlSafeStr, SqlStr};

use super::Engine;
use crate::crash_points::{self, Step};

macro_rules! migrations {
    ($($version:literal $name:literal),+ $(,)?) => {
        [$((
            $version,
            $name,
            include_str!(concat!("../../../../migrations/postgres/", $name, ".sql")),
            include_str!(concat!("../../../../migrations/sqlite/", $name, ".sql")),
        )),+]
    };
}

const MIGRATIONS: [(i64, &str, &str, &str); 25] = migrations![
    1 "0001_messaging",
    2 "0002_orders",
    3 "0003_inventory",
    4 "0004_notifications",
    5 "0005_orders_hold",
    6 "0006_messaging_waiting",
    7 "0007_ledger",
    20 "0020_messaging",
    21 "0021_orders",
    30 "0030_messaging",
    31 "0031_messaging",
    40 "0040_messaging_fenced",
    41 "0041_notifications_sending",
    50 "0050_access",
    51 "0051_messaging",
    60 "0060_messaging_times",
    61 "0061_messaging_forgotten",
    62 "0062_messaging",
    63 "0063_orders",
    64 "0064_messaging_foreign",
    65 "0065_messaging_checks",
    66 "0066_orders_checks",
    67 "0067_inventory_checks",
    68 "0068_notifications_checks",
    69 "0069_messaging",
];

/// sqlx's table of applied migrations.
const TABLE: &str = "_sqlx_migrations";

/// How long to wait for somebody who reads or writes the file with another program.
const BUSY_FOR_MAX: Duration = Duration::from_secs(5);

/// How many there are.
pub(super) fn count() -> usize {
    MIGRATIONS.len()
}

pub(super) async fn run(engine: &Engine) -> Result<(), MigrateError> {
    match engine {
        Engine::Postgres { pool, .. } => {
            // To index a large table, or to wait for an instance that does, takes longer than any other statement may.
            let patient = (*pool.connect_options()).clone().options([("statement_timeout", "0")]);
            let mut connection = patient.connect().await?;
            apply(&migrations_for(|(_, _, postgres, _)| postgres), &mut connection).await?;
            Ok(connection.close().await?)
        }
        Engine::Sqlite { writer: Some(writer), .. } => {
            let connect = SqliteConnectOptions::new().filename(writer.path()).busy_timeout(BUSY_FOR_MAX);
            let mut connection = connect.disable_statement_logging().connect().await?;
            apply(&migrations_for(|(_, _, _, sqlite)| sqlite), &mut connection).await?;
            Ok(connection.close().await?)
        }
        Engine::Sqlite { writer: None, .. } => Ok(()),
    }
}

/// Applies missing migrations, each in its own transaction between two crash points. A newer binary may have migrated
/// further; this one still runs on that schema.
async fn apply<C: Migrate>(migrations: &[Migration], connection: &mut C) -> Result<(), MigrateError> {
    connection.lock().await?;
    connection.ensure_migrations_table(TABLE).await?;
    if let Some(version) = connection.dirty_version(TABLE).await? {
        return Err(MigrateError::Dirty(version));
    }
    let applied = connection.list_applied_migrations(TABLE).await?;
    for migration in migrations {
        match applied.iter().find(|applied| applied.version == migration.version) {
            Some(applied) if applied.checksum != migration.checksum => {
                return Err(MigrateError::VersionMismatch(migration.version));
            }
            Some(_) => {}
            None => {
                let step = connection.apply(TABLE, migration);
                crash_points::around(Step::Commit, Location::caller(), step).await?;
            }
        }
    }
    connection.unlock().await
}

/// The migrations of one database.
fn migrations_for(side: fn((i64, &'static str, &'static str, &'static str)) -> &'static str) -> Vec<Migration> {
    let migration = |entry: (i64, &'static str, &'static str, &'static str)| {
        let sql: SqlStr = side(entry).into_sql_str();
        Migration::new(entry.0, Cow::Borrowed(entry.1), MigrationType::Simple, sql, false)
    };
    MIGRATIONS.into_iter().map(migration).collect()
}
