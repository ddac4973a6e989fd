//! SQLite: ids are blobs; as text they are written in hex with hyphens, as everywhere else.

use sqlx::{AssertSqlSafe, SqliteConnection};
use uuid::Uuid;

use super::checks::{LOST, UNFILED};
use super::{Owed, Scope, replace_calls, with_tables};
use crate::clock::Timestamp;

pub async fn offenders(
    c: &mut SqliteConnection,
    sql: &str,
    scope: Scope,
    since: Uuid,
) -> sqlx::Result<Vec<(String, i64)>> {
    sqlx::query_as(AssertSqlSafe(complete(sql, scope))).bind(since).fetch_all(c).await
}

pub async fn lost(
    c: &mut SqliteConnection,
    scope: Scope,
    since: Uuid,
    owed: &Owed<'_>,
) -> sqlx::Result<Vec<(String, i64)>> {
    sqlx::query_as(AssertSqlSafe(complete(LOST, scope)))
        .bind(since)
        .bind(owed.consumer)
        .bind(owed.routing_key)
        .bind(owed.bound_since)
        .bind(owed.published_before)
        .fetch_all(c)
        .await
}

pub async fn unfiled(
    c: &mut SqliteConnection,
    consumer: &str,
    rejected_before: Timestamp,
) -> sqlx::Result<Vec<(String, i64)>> {
    // By the consumer's few rows that are dead, in either scope.
    sqlx::query_as(AssertSqlSafe(complete(UNFILED, Scope::Whole)))
        .bind(Uuid::nil())
        .bind(consumer)
        .bind(rejected_before)
        .fetch_all(c)
        .await
}

fn complete(sql: &str, scope: Scope) -> String {
    let sql = replace_calls(sql, "text of", hyphenated);
    let sql = replace_calls(&sql, "uuid of", |column| format!("unhex(replace({column}, '-', ''))"));
    let sql = replace_calls(&sql, "type in", |key| format!("substr({key}, 1, instr({key}, '.') - 1)"));
    let sql = replace_calls(&sql, "minutes", |count| format!("{count} * 60000"));
    with_tables(&sql, scope)
}

fn hyphenated(column: &str) -> String {
    let part = |from: u8, length: u8| format!("substr(hex({column}), {from}, {length})");
    let parts = [part(1, 8), part(9, 4), part(13, 4), part(17, 4), part(21, 12)];
    format!("lower({})", parts.join(" || '-' || "))
}
