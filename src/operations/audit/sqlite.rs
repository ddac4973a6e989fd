//! SQLite: ids are blobs; as text they are written in hex with hyphens, as everywhere else.

use super::replace_calls;
use stockade_kernel::db::sqlite::SqliteConnection;

pub async fn translate(_c: &mut SqliteConnection, sql: &str) -> sqlx::Result<String> {
    let sql = replace_calls(sql, "text of", hyphenated);
    let sql = replace_calls(&sql, "uuid of", |column| format!("unhex(replace({column}, '-', ''))"));
    let sql = replace_calls(&sql, "type in", |key| format!("substr({key}, 1, instr({key}, '.') - 1)"));
    Ok(replace_calls(&sql, "minutes", |count| format!("{count} * 60000")))
}

fn hyphenated(column: &str) -> String {
    let part = |from: u8, length: u8| format!("substr(hex({column}), {from}, {length})");
    let parts = [part(1, 8), part(9, 4), part(13, 4), part(17, 4), part(21, 12)];
    format!("lower({})", parts.join(" || '-' || "))
}
