//! Postgres: ids travel as arrays.

use sqlx::PgConnection;
use uuid::Uuid;

use super::{LetterColumns, Reader, VerdictColumns};

pub async fn select_verdicts(
    c: &mut PgConnection,
    consumers: &[&str],
    events: &[Uuid],
    reader: &Reader<'_>,
) -> sqlx::Result<Vec<VerdictColumns>> {
    sqlx::query_as(
        "SELECT consumer, event_id, event_type, state, attempts, duplicates, started_at, finished_at, lease_until,
             last_error, waiting_for, deadline_at
         FROM messaging_inbox
         WHERE consumer = ANY($1) AND event_id = ANY($2) AND (group_id = $3 OR (group_id IS NULL AND $4))",
    )
    .bind(consumers)
    .bind(events)
    .bind(reader.group_id)
    .bind(reader.platform)
    .fetch_all(c)
    .await
}

pub async fn select_letters(
    c: &mut PgConnection,
    message_ids: &[String],
    reader: &Reader<'_>,
) -> sqlx::Result<Vec<LetterColumns>> {
    sqlx::query_as(
        "SELECT id, consumer, message_id, event_type, reason, error, state, created_at, resolved_at
         FROM messaging_dead_letters
         WHERE message_id = ANY($1) AND (group_id = $2 OR (group_id IS NULL AND $3))",
    )
    .bind(message_ids)
    .bind(reader.group_id)
    .bind(reader.platform)
    .fetch_all(c)
    .await
}
