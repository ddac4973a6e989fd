//! Postgres: a uuid is cast to text and back.

use sqlx::PgConnection;

use super::replace_calls;

pub async fn translate(_c: &mut PgConnection, sql: &str) -> sqlx::Result<String> {
    let sql = replace_calls(sql, "text of", |column| format!("{column}::text"));
    let sql = replace_calls(&sql, "uuid of", |column| format!("{column}::uuid"));
    let sql = replace_calls(&sql, "type in", |key| format!("split_part({key}, '.', 1)"));
    Ok(replace_calls(&sql, "minutes", |count| format!("interval '{count} minutes'")))
}
