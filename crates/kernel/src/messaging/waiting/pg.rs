//! Postgres: deadlines run on the database's clock, so instances with skewed clocks agree.

use std::time::Duration;

use sqlx::PgConnection;
use uuid::Uuid;

use super::{Kept, Name, Wait};
use crate::clock::{Timestamp, millis};

/// The columns of [`Kept`], in its order.
type Columns = (Uuid, i32, i32, bool, Vec<u8>, Option<String>);

fn kept((event_id, attempts, unfinished_runs, overdue, body, traceparent): Columns) -> Kept {
    Kept { event_id, attempts, unfinished_runs, overdue, body, traceparent }
}

pub async fn any(c: &mut PgConnection, consumer: &str) -> sqlx::Result<bool> {
    sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM messaging_inbox WHERE consumer = $1 AND state = 'waiting')")
        .bind(consumer)
        .fetch_one(c)
        .await
}

pub async fn keep(
    c: &mut PgConnection,
    consumer: &str,
    waits: &[Wait],
    deadline: Duration,
    _now: Timestamp,
) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE messaging_inbox i SET state = 'waiting', attempts = w.attempts, unfinished_runs = 0, finished_at = NULL,
             lock_token = NULL, reason = NULL, last_error = NULL, waiting_for = w.waiting_for, body = w.body,
             traceparent = w.traceparent,
             deadline_at = COALESCE(i.deadline_at, now() + $6 * interval '1 ms'),
             lease_until = COALESCE(i.deadline_at, now() + $6 * interval '1 ms')
         FROM UNNEST($2::uuid[], $3::int[], $4::text[], $5::bytea[], $7::text[])
             AS w(event_id, attempts, waiting_for, body, traceparent)
         WHERE i.consumer = $1 AND i.event_id = w.event_id",
    )
    .bind(consumer)
    .bind(waits.iter().map(|wait| wait.event_id).collect::<Vec<_>>())
    .bind(waits.iter().map(|wait| wait.attempts).collect::<Vec<_>>())
    .bind(waits.iter().map(|wait| wait.waiting_for.as_str()).collect::<Vec<_>>())
    .bind(waits.iter().map(|wait| &wait.body[..]).collect::<Vec<_>>())
    .bind(millis(deadline))
    .bind(waits.iter().map(|wait| wait.traceparent.map(|trace| trace.to_string())).collect::<Vec<_>>())
    .execute(c)
    .await
    .map(drop)
}

pub async fn find(c: &mut PgConnection, consumer: &str, names: &[Name], limit: i64) -> sqlx::Result<Vec<Kept>> {
    let rows: Vec<Columns> = sqlx::query_as(
        "SELECT i.event_id, i.attempts, i.unfinished_runs, false, i.body, i.traceparent FROM messaging_inbox i
         JOIN UNNEST($2::text[], $3::text[]) AS wanted(group_id, name)
             ON i.group_id = wanted.group_id AND i.waiting_for = wanted.name
         WHERE i.consumer = $1 AND i.state = 'waiting' ORDER BY i.event_id LIMIT $4",
    )
    .bind(consumer)
    .bind(names.iter().map(|(group_id, _)| group_id.as_str()).collect::<Vec<_>>())
    .bind(names.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>())
    .bind(limit)
    .fetch_all(c)
    .await?;
    Ok(rows.into_iter().map(kept).collect())
}

pub async fn hasten(c: &mut PgConnection, consumer: &str, names: &[Name], _now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE messaging_inbox i SET lease_until = now() FROM UNNEST($2::text[], $3::text[]) AS wanted(group_id, name)
         WHERE i.consumer = $1 AND i.state = 'waiting' AND i.group_id = wanted.group_id AND i.waiting_for = wanted.name",
    )
    .bind(consumer)
    .bind(names.iter().map(|(group_id, _)| group_id.as_str()).collect::<Vec<_>>())
    .bind(names.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>())
    .execute(c)
    .await
    .map(drop)
}

pub async fn any_due(c: &mut PgConnection, consumer: &str, _now: Timestamp) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "SELECT EXISTS (SELECT 1 FROM messaging_inbox WHERE consumer = $1 AND state = 'waiting' AND lease_until <= now())",
    )
    .bind(consumer)
    .fetch_one(c)
    .await
}

pub async fn claim_due(
    c: &mut PgConnection,
    consumer: &str,
    lease: Duration,
    _now: Timestamp,
) -> sqlx::Result<Option<Kept>> {
    let row: Option<Columns> = sqlx::query_as(
        "WITH due AS MATERIALIZED (
             SELECT event_id FROM messaging_inbox WHERE consumer = $1 AND state = 'waiting' AND lease_until <= now()
             ORDER BY lease_until LIMIT 1 FOR UPDATE SKIP LOCKED)
         UPDATE messaging_inbox i SET lease_until = now() + $2 * interval '1 ms', unfinished_runs = unfinished_runs + 1
         FROM due WHERE i.consumer = $1 AND i.event_id = due.event_id
         RETURNING i.event_id, i.attempts, i.unfinished_runs, i.deadline_at <= now(), i.body, i.traceparent",
    )
    .bind(consumer)
    .bind(millis(lease))
    .fetch_optional(c)
    .await?;
    Ok(row.map(kept))
}
