//! SQLite: the single writer is the lock. Ids travel as one JSON array.

use sqlx::types::Json;
use uuid::Uuid;

use crate::clock::Timestamp;
use crate::db::sqlite::{SqliteConnection, query_as, query_scalar};

pub async fn close_many(
    c: &mut SqliteConnection,
    ids: &[Uuid],
    job_id: Option<Uuid>,
    now: Timestamp,
) -> sqlx::Result<Vec<Uuid>> {
    query_scalar(
        "UPDATE messaging_dead_letters SET state = 'redriven', resolved_at = $2, job_id = $3
         WHERE id IN (SELECT unhex(value) FROM json_each($1)) AND state = 'open' RETURNING id",
    )
    .bind(json(ids))
    .bind(now)
    .bind(job_id)
    .fetch_all(c)
    .await
}

pub async fn select_contents(c: &mut SqliteConnection, ids: &[Uuid]) -> sqlx::Result<Vec<(Uuid, String, Vec<u8>)>> {
    query_as(
        "SELECT id, headers, body FROM messaging_dead_letters WHERE id IN (SELECT unhex(value) FROM json_each($1))",
    )
    .bind(json(ids))
    .fetch_all(c)
    .await
}

fn json(ids: &[Uuid]) -> Json<Vec<uuid::fmt::Simple>> {
    Json(ids.iter().map(|id| id.simple()).collect())
}
