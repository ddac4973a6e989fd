//! SQLite: the writer's transaction is the lock. The planner must be told to use the index of what waits, or it walks a
//! consumer's whole inbox to find the few.

use std::time::Duration;

use sqlx::types::Json;
use uuid::Uuid;

use super::{Kept, Name, Wait};
use crate::clock::Timestamp;
use crate::db::sqlite::{SqliteConnection, query, query_as, query_scalar};

/// The columns of [`Kept`], in its order.
type Columns = (Uuid, i32, i32, bool, Vec<u8>, Option<String>);

fn kept((event_id, attempts, unfinished_runs, overdue, body, traceparent): Columns) -> Kept {
    Kept { event_id, attempts, unfinished_runs, overdue, body, traceparent }
}

pub async fn any(c: &mut SqliteConnection, consumer: &str) -> sqlx::Result<bool> {
    query_scalar(
        "SELECT EXISTS (SELECT 1 FROM messaging_inbox INDEXED BY messaging_inbox_waiting
             WHERE consumer = $1 AND state = 'waiting')",
    )
    .bind(consumer)
    .fetch_one(c)
    .await
}

pub async fn keep(
    c: &mut SqliteConnection,
    consumer: &str,
    waits: &[Wait],
    deadline: Duration,
    now: Timestamp,
) -> sqlx::Result<()> {
    let mut bodies = Vec::with_capacity(waits.iter().map(|wait| wait.body.len()).sum());
    let rows: Vec<_> = waits
        .iter()
        .map(|wait| {
            let start = bodies.len() + 1; // substr counts from 1
            bodies.extend_from_slice(&wait.body);
            let trace = wait.traceparent.map(|trace| trace.to_string());
            (wait.event_id.simple(), wait.attempts, &wait.waiting_for, start, wait.body.len(), consumer, trace)
        })
        .collect();
    query(
        "UPDATE messaging_inbox SET state = 'waiting', attempts = w.value ->> 1, unfinished_runs = 0, finished_at = NULL,
             lock_token = NULL, reason = NULL, last_error = NULL, waiting_for = w.value ->> 2,
             body = substr($2, w.value ->> 3, w.value ->> 4), traceparent = w.value ->> 6,
             deadline_at = COALESCE(deadline_at, $3), lease_until = COALESCE(deadline_at, $3)
         FROM jsonb_each($1) AS w
         WHERE consumer = w.value ->> 5 AND event_id = unhex(w.value ->> 0)",
    )
    .bind(Json(rows))
    .bind(bodies)
    .bind(now.plus(deadline))
    .execute(c)
    .await
    .map(drop)
}

pub async fn find(c: &mut SqliteConnection, consumer: &str, names: &[Name], limit: i64) -> sqlx::Result<Vec<Kept>> {
    let rows: Vec<Columns> = query_as(
        "SELECT i.event_id, i.attempts, i.unfinished_runs, false, i.body, i.traceparent FROM jsonb_each($2) AS wanted
         CROSS JOIN messaging_inbox i INDEXED BY messaging_inbox_waiting
             ON i.consumer = $1 AND i.waiting_for = wanted.value ->> 1 AND i.state = 'waiting'
             AND i.group_id = wanted.value ->> 0
         ORDER BY i.event_id LIMIT $3",
    )
    .bind(consumer)
    .bind(Json(names))
    .bind(limit)
    .fetch_all(c)
    .await?;
    Ok(rows.into_iter().map(kept).collect())
}

pub async fn hasten(c: &mut SqliteConnection, consumer: &str, names: &[Name], now: Timestamp) -> sqlx::Result<()> {
    query(
        "UPDATE messaging_inbox INDEXED BY messaging_inbox_waiting SET lease_until = $3
         WHERE consumer = $1 AND state = 'waiting'
             AND (group_id, waiting_for) IN (SELECT value ->> 0, value ->> 1 FROM jsonb_each($2))",
    )
    .bind(consumer)
    .bind(Json(names))
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn any_due(c: &mut SqliteConnection, consumer: &str, now: Timestamp) -> sqlx::Result<bool> {
    query_scalar(
        "SELECT EXISTS (SELECT 1 FROM messaging_inbox INDEXED BY messaging_inbox_due
             WHERE consumer = $1 AND state = 'waiting' AND lease_until <= $2)",
    )
    .bind(consumer)
    .bind(now)
    .fetch_one(c)
    .await
}

pub async fn claim_due(
    c: &mut SqliteConnection,
    consumer: &str,
    lease: Duration,
    now: Timestamp,
) -> sqlx::Result<Option<Kept>> {
    let row: Option<Columns> = query_as(
        "UPDATE messaging_inbox SET lease_until = $3, unfinished_runs = unfinished_runs + 1
         WHERE consumer = $1 AND event_id IN (SELECT event_id FROM messaging_inbox INDEXED BY messaging_inbox_due
             WHERE consumer = $1 AND state = 'waiting' AND lease_until <= $2 ORDER BY lease_until LIMIT 1)
         RETURNING event_id, attempts, unfinished_runs, deadline_at <= $2, body, traceparent",
    )
    .bind(consumer)
    .bind(now)
    .bind(now.plus(lease))
    .fetch_optional(c)
    .await?;
    Ok(row.map(kept))
}
