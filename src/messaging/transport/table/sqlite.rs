//! SQLite: a single writer, so a claim needs no lock but its transaction. Row ids travel as one JSON array.

use std::time::Duration;

use sqlx::SqliteConnection;
use sqlx::types::Json;
use uuid::Uuid;

use super::{Columns, Depth, Moved, Row};
use crate::clock::{Timestamp, millis};

pub async fn move_due(c: &mut SqliteConnection, limit: i64, now: Timestamp) -> sqlx::Result<Moved> {
    // Postgres does this in one statement; SQLite's WITH takes no writes, so the batch is named by its row numbers.
    let due: Vec<i64> = sqlx::query_scalar(
        "SELECT seq FROM messaging_outbox WHERE status IN ('pending', 'failed') AND available_at <= $2
         ORDER BY available_at LIMIT $1",
    )
    .bind(limit)
    .bind(now)
    .fetch_all(&mut *c)
    .await?;
    if due.is_empty() {
        return Ok(Moved::default());
    }
    let rows = i64::try_from(due.len()).unwrap_or(i64::MAX);
    let due = Json(due);
    let mut queues: Vec<String> = sqlx::query_scalar(
        "INSERT INTO messaging_queue (queue, message_id, routing_key, correlation_id, headers, body, enqueued_at)
         SELECT CASE o.target WHEN '' THEN b.queue ELSE o.target END,
             CASE o.kind WHEN 'redrive' THEN o.headers ->> 'x-message-id' ELSE lower(hex(o.event_id)) END,
             o.aggregate_type || '.' || o.event_type, o.correlation_id, o.headers, o.body, $2
         FROM json_each($1) AS due
         JOIN messaging_outbox o ON o.seq = due.value
         LEFT JOIN messaging_bindings b
             ON o.target = '' AND b.routing_key = o.aggregate_type || '.' || o.event_type
         WHERE o.target <> '' OR b.queue IS NOT NULL
         RETURNING queue",
    )
    .bind(&due)
    .bind(now)
    .fetch_all(&mut *c)
    .await?;
    queues.sort_unstable();
    queues.dedup();
    sqlx::query(
        "UPDATE messaging_outbox SET status = 'published', published_at = $2, claimed_by = NULL, last_error = NULL
         WHERE seq IN (SELECT value FROM json_each($1))",
    )
    .bind(&due)
    .bind(now)
    .execute(c)
    .await?;
    Ok(Moved { rows, queues })
}

pub async fn claim(
    c: &mut SqliteConnection,
    queue: &str,
    token: Uuid,
    limit: i64,
    lease: Duration,
    now: Timestamp,
) -> sqlx::Result<Vec<Row>> {
    let rows: Vec<Columns> = sqlx::query_as(
        "UPDATE messaging_queue SET lock_token = $2, lease_until = $4, deliveries = deliveries + 1
         WHERE id IN (SELECT id FROM messaging_queue
             WHERE queue = $1 AND (lease_until IS NULL OR lease_until <= $5) ORDER BY id LIMIT $3)
         RETURNING id, message_id, routing_key, correlation_id, headers, body, x_death, deliveries",
    )
    .bind(queue)
    .bind(token)
    .bind(limit)
    .bind(now.plus(lease))
    .bind(now)
    .fetch_all(c)
    .await?;
    let mut rows: Vec<Row> = rows.into_iter().map(Row::from).collect();
    for row in &mut rows {
        // An id of our own was written by the relay without hyphens; a foreign one stays as it is.
        if let Some(id) = row.message_id.as_deref().and_then(|id| Uuid::try_parse(id).ok()) {
            row.message_id = Some(id.to_string());
        }
    }
    Ok(rows)
}

pub async fn renew(
    c: &mut SqliteConnection,
    ids: &[i64],
    token: Uuid,
    lease: Duration,
    now: Timestamp,
) -> sqlx::Result<u64> {
    sqlx::query(
        "UPDATE messaging_queue SET lease_until = $3
         WHERE id IN (SELECT value FROM json_each($1)) AND lock_token = $2",
    )
    .bind(Json(ids))
    .bind(token)
    .bind(now.plus(lease))
    .execute(c)
    .await
    .map(|done| done.rows_affected())
}

pub async fn delete(c: &mut SqliteConnection, ids: &[i64], token: Uuid) -> sqlx::Result<u64> {
    sqlx::query("DELETE FROM messaging_queue WHERE id IN (SELECT value FROM json_each($1)) AND lock_token = $2")
        .bind(Json(ids))
        .bind(token)
        .execute(c)
        .await
        .map(|done| done.rows_affected())
}

pub async fn give_back(c: &mut SqliteConnection, ids: &[i64], token: Uuid) -> sqlx::Result<u64> {
    sqlx::query(
        "UPDATE messaging_queue SET lock_token = NULL, lease_until = NULL, deliveries = deliveries - 1
         WHERE id IN (SELECT value FROM json_each($1)) AND lock_token = $2",
    )
    .bind(Json(ids))
    .bind(token)
    .execute(c)
    .await
    .map(|done| done.rows_affected())
}

pub async fn move_to(
    c: &mut SqliteConnection,
    ids: &[i64],
    token: Uuid,
    queue: &str,
    deaths: &[String],
    now: Timestamp,
) -> sqlx::Result<u64> {
    let rows: Vec<_> = ids.iter().zip(deaths).collect();
    sqlx::query(
        "UPDATE messaging_queue SET queue = $3, x_death = d.value ->> 1, enqueued_at = $4, lock_token = NULL,
             lease_until = NULL, deliveries = 0
         FROM json_each($1) AS d
         WHERE messaging_queue.id = d.value ->> 0 AND lock_token = $2",
    )
    .bind(Json(rows))
    .bind(token)
    .bind(queue)
    .bind(now)
    .execute(c)
    .await
    .map(|done| done.rows_affected())
}

pub async fn count(
    c: &mut SqliteConnection,
    queues: &[String],
    stale_after: Duration,
    now: Timestamp,
) -> sqlx::Result<Vec<Depth>> {
    let rows: Vec<(String, i64, i64, Option<Timestamp>, i64)> = sqlx::query_as(
        "SELECT name,
             (SELECT count(*) FROM messaging_queue WHERE queue = name AND (lease_until IS NULL OR lease_until <= $2)),
             (SELECT count(*) FROM messaging_queue WHERE queue = name AND lease_until > $2),
             (SELECT enqueued_at FROM messaging_queue WHERE queue = name ORDER BY id LIMIT 1),
             (SELECT count(*) FROM messaging_subscriptions WHERE queue = name AND seen_at > $2 - $3)
         FROM (SELECT value AS name FROM json_each($1))",
    )
    .bind(Json(queues))
    .bind(now)
    .bind(millis(stale_after))
    .fetch_all(c)
    .await?;
    Ok(rows
        .into_iter()
        .map(|(queue, ready, in_flight, oldest_enqueued_at, consumers)| Depth {
            queue,
            ready,
            in_flight: Some(in_flight),
            consumers: Some(consumers),
            oldest_enqueued_at,
        })
        .collect())
}

pub async fn beat(c: &mut SqliteConnection, subscription: Uuid, queue: &str, now: Timestamp) -> sqlx::Result<()> {
    sqlx::query("DELETE FROM messaging_subscriptions WHERE seen_at < $1 - 3600000").bind(now).execute(&mut *c).await?;
    sqlx::query(
        "INSERT INTO messaging_subscriptions (id, queue, seen_at) VALUES ($1, $2, $3)
         ON CONFLICT (id) DO UPDATE SET seen_at = $3",
    )
    .bind(subscription)
    .bind(queue)
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}
