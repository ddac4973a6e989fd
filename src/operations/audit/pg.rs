//! Postgres: a uuid is cast to text and back.

use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::checks::{LOST, UNFILED};
use super::{Owed, Scope, replace_calls, with_tables};
use crate::clock::Timestamp;

pub async fn offenders(c: &mut PgConnection, sql: &str, scope: Scope, since: Uuid) -> sqlx::Result<Vec<(String, i64)>> {
    sqlx::query_as(AssertSqlSafe(complete(sql, scope))).bind(since).fetch_all(c).await
}

pub async fn lost(
    c: &mut PgConnection,
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
    c: &mut PgConnection,
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
    let sql = replace_calls(sql, "text of", |column| format!("{column}::text"));
    let sql = replace_calls(&sql, "uuid of", |column| format!("{column}::uuid"));
    let sql = replace_calls(&sql, "type in", |key| format!("split_part({key}, '.', 1)"));
    let sql = replace_calls(&sql, "minutes", |count| format!("interval '{count} minutes'"));
    with_tables(&sql, scope)
}
