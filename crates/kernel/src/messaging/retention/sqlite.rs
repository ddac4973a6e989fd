//! SQLite: one process serves a file, so it is always its turn. Queue rows point at outbox rows by their row number.

use std::collections::HashSet;

use sqlx::types::Json;
use uuid::Uuid;

use crate::clock::Timestamp;
use crate::db::sqlite::{SqliteConnection, query, query_as, query_scalar};

pub async fn take_turn(_c: &mut SqliteConnection) -> sqlx::Result<bool> {
    Ok(true)
}

pub async fn select_published(
    c: &mut SqliteConnection,
    after: Uuid,
    end: Uuid,
    before: Timestamp,
    limit: i64,
) -> sqlx::Result<Vec<(Uuid, bool)>> {
    let rows: Vec<(Uuid, i64)> = query_as(
        "SELECT id, seq FROM messaging_outbox
         WHERE id > $1 AND id < $2 AND status = 'published' AND published_at < $3 ORDER BY id LIMIT $4",
    )
    .bind(after)
    .bind(end)
    .bind(before)
    .bind(limit)
    .fetch_all(&mut *c)
    .await?;
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    // There is no index on outbox_ref, which every message would pay for: the queue is read once per page.
    let queued: Vec<i64> = query_scalar(
        "SELECT outbox_ref FROM messaging_queue WHERE outbox_ref IN (SELECT value FROM json_each($1))
         UNION ALL SELECT part.value FROM messaging_bundles, json_each(outbox_refs) AS part WHERE part.value IS NOT NULL",
    )
    .bind(Json(rows.iter().map(|(_, seq)| *seq).collect::<Vec<_>>()))
    .fetch_all(c)
    .await?;
    let queued: HashSet<i64> = queued.into_iter().collect();
    Ok(rows.into_iter().map(|(id, seq)| (id, !queued.contains(&seq))).collect())
}

pub async fn archive_many(c: &mut SqliteConnection, ids: &[Uuid]) -> sqlx::Result<u64> {
    let ids = json(ids);
    query(
        "INSERT INTO messaging_outbox_archive (id, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type,
             headers, attempts, created_at, claimed_at, published_at, correlation_id, causation_id, traceparent,
             body)
         SELECT id, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type, headers, attempts, created_at,
             claimed_at, published_at, correlation_id, causation_id, traceparent, body FROM messaging_outbox
         WHERE id IN (SELECT unhex(value) FROM json_each($1)) AND kind = 'event' ON CONFLICT DO NOTHING",
    )
    .bind(&ids)
    .execute(&mut *c)
    .await?;
    query("DELETE FROM messaging_outbox WHERE id IN (SELECT unhex(value) FROM json_each($1))")
        .bind(&ids)
        .execute(c)
        .await
        .map(|done| done.rows_affected())
}

pub async fn select_foreign(
    c: &mut SqliteConnection,
    before: Timestamp,
    limit: i64,
) -> sqlx::Result<Vec<(String, Uuid)>> {
    query_as(
        "SELECT i.consumer, i.event_id FROM messaging_inbox i
         WHERE substr(i.event_id, 7, 1) NOT BETWEEN x'70' AND x'7f' AND i.finished_at < $1 AND i.state IN ('processed', 'dead')
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

pub async fn forget_many(
    c: &mut SqliteConnection,
    consumer: &str,
    ids: &[Uuid],
    before: Timestamp,
) -> sqlx::Result<u64> {
    query(
        "DELETE FROM messaging_inbox AS i
         WHERE i.consumer = $1 AND i.event_id IN (SELECT unhex(value) FROM json_each($2)) AND i.finished_at < $3
             AND i.state IN ('processed', 'dead')
             AND NOT EXISTS (SELECT 1 FROM messaging_dead_letters l
                 WHERE l.event_id = i.event_id AND l.consumer = i.consumer)
             AND NOT EXISTS (SELECT 1 FROM messaging_outbox o WHERE o.id = i.event_id)
             AND NOT EXISTS (SELECT 1 FROM messaging_outbox o WHERE o.event_id = i.event_id AND o.kind <> 'event')",
    )
    .bind(consumer)
    .bind(json(ids))
    .bind(before)
    .execute(c)
    .await
    .map(|done| done.rows_affected())
}

fn json(ids: &[Uuid]) -> Json<Vec<uuid::fmt::Simple>> {
    Json(ids.iter().map(|id| id.simple()).collect())
}
