//! Postgres: whose turn it is, is an advisory lock that ends with the transaction, so a crash cannot leave it taken.

use std::collections::HashSet;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::clock::Timestamp;

/// "retain" in ASCII; any number will do that nobody else uses.
const TURN: i64 = 0x7265_7461_696e;

pub async fn take_turn(c: &mut PgConnection) -> sqlx::Result<bool> {
    sqlx::query_scalar("SELECT pg_try_advisory_xact_lock($1)").bind(TURN).fetch_one(c).await
}

pub async fn select_published(
    c: &mut PgConnection,
    after: Uuid,
    end: Uuid,
    before: Timestamp,
    limit: i64,
) -> sqlx::Result<Vec<(Uuid, bool)>> {
    let ids: Vec<Uuid> = sqlx::query_scalar(
        "SELECT id FROM messaging_outbox
         WHERE id > $1 AND id < $2 AND status = 'published' AND published_at < $3 ORDER BY id LIMIT $4",
    )
    .bind(after)
    .bind(end)
    .bind(before)
    .bind(limit)
    .fetch_all(&mut *c)
    .await?;
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    // There is no index on outbox_ref, which every message would pay for: the queue is read once per page.
    let queued: Vec<Uuid> = sqlx::query_scalar(
        "SELECT outbox_ref FROM messaging_queue WHERE outbox_ref = ANY($1)
         UNION ALL SELECT UNNEST(array_remove(outbox_refs, NULL)) FROM messaging_bundles WHERE outbox_refs && $1",
    )
    .bind(&ids)
    .fetch_all(c)
    .await?;
    let queued: HashSet<Uuid> = queued.into_iter().collect();
    Ok(ids.into_iter().map(|id| (id, !queued.contains(&id))).collect())
}

pub async fn archive_many(c: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<u64> {
    let gone: i64 = sqlx::query_scalar(
        "WITH gone AS (DELETE FROM messaging_outbox WHERE id = ANY($1) RETURNING *),
         archived AS (
             INSERT INTO messaging_outbox_archive (id, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type,
                 headers, attempts, created_at, claimed_at, published_at, correlation_id, causation_id, traceparent,
                 body)
             SELECT id, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type, headers, attempts, created_at,
                 claimed_at, published_at, correlation_id, causation_id, traceparent, body FROM gone WHERE kind = 'event'
             ON CONFLICT DO NOTHING)
         SELECT count(*) FROM gone",
    )
    .bind(ids)
    .fetch_one(c)
    .await?;
    Ok(gone.unsigned_abs())
}

pub async fn select_foreign(c: &mut PgConnection, before: Timestamp, limit: i64) -> sqlx::Result<Vec<(String, Uuid)>> {
    sqlx::query_as(
        "SELECT i.consumer, i.event_id FROM messaging_inbox i
         WHERE get_byte(uuid_send(i.event_id), 6) >> 4 <> 7 AND i.finished_at < $1 AND i.state IN ('processed', 'dead')
             AND NOT EXISTS (SELECT 1 FROM messaging_dead_letters l
                 WHERE l.event_id = i.event_id AND l.consumer = i.consumer)
             AND NOT EXISTS (SELECT 1 FROM messaging_outbox o WHERE o.id = i.event_id)
             AND NOT EXISTS (SELECT 1 FROM messaging_outbox o WHERE o.event_id = i.event_id AND o.kind <> 'event')
         ORDER BY i.finished_at LIMIT $2",
    )
    .bind(before)
    .bind(limit)
    .fetch_all(c)
    .await
}

pub async fn forget_many(c: &mut PgConnection, consumer: &str, ids: &[Uuid], before: Timestamp) -> sqlx::Result<u64> {
    sqlx::query(
        "DELETE FROM messaging_inbox i
         WHERE i.consumer = $1 AND i.event_id = ANY($2) AND i.finished_at < $3 AND i.state IN ('processed', 'dead')
             AND NOT EXISTS (SELECT 1 FROM messaging_dead_letters l
                 WHERE l.event_id = i.event_id AND l.consumer = i.consumer)
             AND NOT EXISTS (SELECT 1 FROM messaging_outbox o WHERE o.id = i.event_id)
             AND NOT EXISTS (SELECT 1 FROM messaging_outbox o WHERE o.event_id = i.event_id AND o.kind <> 'event')",
    )
    .bind(consumer)
    .bind(ids)
    .bind(before)
    .execute(c)
    .await
    .map(|done| done.rows_affected())
}
