//! SQLite: ids travel as JSON, those of events in hex.

use sqlx::types::Json;
use uuid::Uuid;

use super::{LetterColumns, Reader, VerdictColumns};
use stockade_kernel::db::sqlite::{SqliteConnection, query_as};

pub async fn select_verdicts(
    c: &mut SqliteConnection,
    consumers: &[&str],
    events: &[Uuid],
    reader: &Reader<'_>,
) -> sqlx::Result<Vec<VerdictColumns>> {
    query_as(
        "SELECT consumer, event_id, event_type, state, attempts, duplicates, started_at, finished_at, lease_until,
             last_error, waiting_for, deadline_at
         FROM messaging_inbox WHERE consumer IN (SELECT value FROM json_each($1))
             AND event_id IN (SELECT unhex(value) FROM json_each($2)) AND (group_id = $3 OR (group_id IS NULL AND $4))",
    )
    .bind(Json(consumers))
    .bind(Json(events.iter().map(|id| id.simple()).collect::<Vec<_>>()))
    .bind(reader.group_id)
    .bind(reader.platform)
    .fetch_all(c)
    .await
}

pub async fn select_letters(
    c: &mut SqliteConnection,
    message_ids: &[String],
    reader: &Reader<'_>,
) -> sqlx::Result<Vec<LetterColumns>> {
    query_as(
        "SELECT id, consumer, message_id, event_type, reason, error, state, created_at, resolved_at
         FROM messaging_dead_letters
         WHERE message_id IN (SELECT value FROM json_each($1)) AND (group_id = $2 OR (group_id IS NULL AND $3))",
    )
    .bind(Json(message_ids))
    .bind(reader.group_id)
    .bind(reader.platform)
    .fetch_all(c)
    .await
}
