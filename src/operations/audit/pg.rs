//! Postgres: a uuid is cast to text and back.

use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::checks::LOST;
use super::{Owed, Scope, replace_calls, with_tables};

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
        .bind(owed.aggregate_type)
        .bind(owed.event_type)
        .bind(owed.bound_since)
        .bind(owed.published_before)
        .fetch_all(c)
        .await
}

fn complete(sql: &str, scope: Scope) -> String {
    let sql = replace_calls(sql, "text of", |column| format!("{column}::text"));
    let sql = replace_calls(&sql, "uuid of", |column| format!("{column}::uuid"));
    with_tables(&sql, scope)
}
