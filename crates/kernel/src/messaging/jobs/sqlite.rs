//! SQLite: the single writer is the lock, and the injected clock says when a job is due.

use std::time::Duration;

use sqlx::types::Json;
use uuid::Uuid;

use super::{Due, Step};
use crate::clock::{Timestamp, millis};
use crate::db::sqlite::{SqliteConnection, query, query_as, query_scalar};

pub async fn peek_due(c: &mut SqliteConnection, now: Timestamp) -> sqlx::Result<Option<Due>> {
    let row: Option<(Uuid, String, String, i64, Option<Uuid>)> = query_as(
        "SELECT id, kind, criteria, rate, reached FROM messaging_jobs
         WHERE state = 'running' AND next_at <= $1 ORDER BY next_at LIMIT 1",
    )
    .bind(now)
    .fetch_optional(c)
    .await?;
    Ok(row.map(|(id, kind, criteria, rate, reached)| Due { id, kind, criteria, rate, reached }))
}

pub async fn lock_due(c: &mut SqliteConnection, job_id: Uuid, now: Timestamp) -> sqlx::Result<Option<Option<Uuid>>> {
    query_scalar("SELECT reached FROM messaging_jobs WHERE id = $1 AND state = 'running' AND next_at <= $2")
        .bind(job_id)
        .bind(now)
        .fetch_optional(c)
        .await
}

pub async fn advance(
    c: &mut SqliteConnection,
    job_id: Uuid,
    step: &Step,
    pause: Duration,
    now: Timestamp,
) -> sqlx::Result<()> {
    query(
        "UPDATE messaging_jobs SET sent = sent + $2, already_applied = already_applied + $3, skipped = skipped + $4,
             refused = refused + $5, reached = COALESCE($6, reached), next_at = max(next_at, $9 - 1000) + $7,
             state = CASE WHEN $8 THEN 'done' ELSE state END, finished_at = CASE WHEN $8 THEN $9 END
         WHERE id = $1",
    )
    .bind(job_id)
    .bind(step.progress.sent)
    .bind(step.progress.already_applied)
    .bind(step.progress.skipped)
    .bind(step.progress.refused)
    .bind(step.reached)
    .bind(millis(pause))
    .bind(step.finished)
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn make_due(c: &mut SqliteConnection, job_id: Uuid, now: Timestamp) -> sqlx::Result<()> {
    query("UPDATE messaging_jobs SET next_at = $2 WHERE id = $1").bind(job_id).bind(now).execute(c).await.map(drop)
}

pub async fn next_due_ms(c: &mut SqliteConnection, now: Timestamp) -> sqlx::Result<Option<i64>> {
    query_scalar("SELECT min(next_at) - $1 FROM messaging_jobs WHERE state = 'running'").bind(now).fetch_one(c).await
}

pub async fn forget_letters(c: &mut SqliteConnection, job_id: Uuid, letters: &[Uuid]) -> sqlx::Result<()> {
    query(
        "DELETE FROM messaging_job_letters WHERE job_id = $1 AND letter_id IN (SELECT unhex(value) FROM json_each($2))",
    )
    .bind(job_id)
    .bind(Json(letters.iter().map(|id| id.simple()).collect::<Vec<_>>()))
    .execute(c)
    .await
    .map(drop)
}
