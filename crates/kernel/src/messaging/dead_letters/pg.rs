//! Postgres: letters are locked in the order of their ids, so that two redrives of the same ones wait, not deadlock.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::clock::Timestamp;

pub async fn close_many(
    c: &mut PgConnection,
    ids: &[Uuid],
    job_id: Option<Uuid>,
    now: Timestamp,
) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar(
        "WITH open AS MATERIALIZED (
             SELECT id FROM messaging_dead_letters WHERE id = ANY($1) AND state = 'open' ORDER BY id FOR UPDATE)
         UPDATE messaging_dead_letters l SET state = 'redriven', resolved_at = $2, job_id = $3
         FROM open WHERE l.id = open.id RETURNING l.id",
    )
    .bind(ids)
    .bind(now)
    .bind(job_id)
    .fetch_all(c)
    .await
}

pub async fn select_contents(c: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<Vec<(Uuid, String, Vec<u8>)>> {
    sqlx::query_as("SELECT id, headers, body FROM messaging_dead_letters WHERE id = ANY($1)")
        .bind(ids)
        .fetch_all(c)
        .await
}
