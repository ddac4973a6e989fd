//! Postgres: when a job is due is the database's clock, so that instances with skewed clocks keep one rate.

use std::time::Duration;

use sqlx::PgConnection;
use uuid::Uuid;

use super::{Due, Step};
use crate::clock::{Timestamp, millis};

pub async fn peek_due(c: &mut PgConnection, _now: Timestamp) -> sqlx::Result<Option<Due>> {
    let row: Option<(Uuid, String, String, i64, Option<Uuid>)> = sqlx::query_as(
        "SELECT id, kind, criteria, rate, reached FROM messaging_jobs
         WHERE state = 'running' AND next_at <= now() ORDER BY next_at LIMIT 1",
    )
    .fetch_optional(c)
    .await?;
    Ok(row.map(|(id, kind, criteria, rate, reached)| Due { id, kind, criteria, rate, reached }))
}

pub async fn lock_due(c: &mut PgConnection, job_id: Uuid, _now: Timestamp) -> sqlx::Result<Option<Option<Uuid>>> {
    sqlx::query_scalar(
        "SELECT reached FROM messaging_jobs
         WHERE id = $1 AND state = 'running' AND next_at <= now() FOR UPDATE SKIP LOCKED",
    )
    .bind(job_id)
    .fetch_optional(c)
    .await
}

pub async fn advance(
    c: &mut PgConnection,
    job_id: Uuid,
    step: &Step,
    pause: Duration,
    now: Timestamp,
) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE messaging_jobs SET sent = sent + $2, already_applied = already_applied + $3, skipped = skipped + $4,
             refused = refused + $5, reached = COALESCE($6, reached),
             next_at = greatest(next_at, now() - interval '1 s') + $7 * interval '1 ms',
             state = CASE WHEN $8 THEN 'done' ELSE state END, finished_at = CASE WHEN $8 THEN $9::timestamptz END
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

pub async fn make_due(c: &mut PgConnection, job_id: Uuid, _now: Timestamp) -> sqlx::Result<()> {
    sqlx::query("UPDATE messaging_jobs SET next_at = now() WHERE id = $1").bind(job_id).execute(c).await.map(drop)
}

pub async fn next_due_ms(c: &mut PgConnection, _now: Timestamp) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar(
        "SELECT CAST(extract(epoch FROM min(next_at) - now()) * 1000 AS bigint) FROM messaging_jobs WHERE state = 'running'",
    )
    .fetch_one(c)
    .await
}

pub async fn forget_letters(c: &mut PgConnection, job_id: Uuid, letters: &[Uuid]) -> sqlx::Result<()> {
    sqlx::query("DELETE FROM messaging_job_letters WHERE job_id = $1 AND letter_id = ANY($2)")
        .bind(job_id)
        .bind(letters)
        .execute(c)
        .await
        .map(drop)
}
