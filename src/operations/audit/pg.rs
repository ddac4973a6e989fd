//! Postgres: a uuid is cast to text and back.

use super::replace_calls;

/// A check's query in this dialect.
pub fn translate(sql: &str) -> String {
    let sql = replace_calls(sql, "text of", |column| format!("{column}::text"));
    let sql = replace_calls(&sql, "uuid of", |column| format!("{column}::uuid"));
    let sql = replace_calls(&sql, "type in", |key| format!("split_part({key}, '.', 1)"));
    replace_calls(&sql, "minutes", |count| format!("interval '{count} minutes'"))
}
