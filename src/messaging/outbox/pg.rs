//! Postgres: due times and leases are the database's own clock, so instances with skewed clocks agree.

use std::collections::HashMap;

use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Database, PgConnection, Postgres, Row};
use uuid::Uuid;

use super::{Backlog, Claim, Claimed, Entry, Passing, Queued, Settled, Settlement, routing_key};
use crate::clock::{Timestamp, millis};

pub async fn insert_many(
    c: &mut PgConnection,
    entries: &[Entry],
    claim: Option<Claim>,
    now: Timestamp,
) -> sqlx::Result<()> {
    bind_entries(sqlx::query(INSERT), entries, "pending", claim, now).execute(c).await.map(drop)
}

pub async fn insert_handed_on(
    c: &mut PgConnection,
    entries: &[Entry],
    passing: &Passing<'_>,
    now: Timestamp,
) -> sqlx::Result<Vec<Queued>> {
    let insert = AssertSqlSafe(format!(
        "WITH written AS ({INSERT}),
         meant AS MATERIALIZED (
             SELECT COALESCE(b.queue, e.target) AS queue, e.id,
                 e.kind = 'event' AND COALESCE(b.queue = ANY($22), false) AS passed
             FROM UNNEST($1::uuid[], $3::text[], $24::text[], $15::text[]) AS e(id, kind, routing_key, target)
             LEFT JOIN messaging_bindings b ON e.target = '' AND b.routing_key = e.routing_key
             WHERE e.target <> '' OR b.queue IS NOT NULL),
         bundled AS (
             INSERT INTO messaging_bundles (queue, outbox_refs, enqueued_at, lock_token, lease_until)
             SELECT queue, array_agg(id), $14, $20, now() + $21 * interval '1 ms' FROM meant
             WHERE passed AND $23 GROUP BY queue
             RETURNING id, queue, outbox_refs),
         queued AS (
             INSERT INTO messaging_queue (queue, outbox_ref, enqueued_at, lock_token, lease_until, deliveries)
             SELECT queue, id, $14, CASE WHEN passed THEN $20::uuid END,
                 CASE WHEN passed THEN now() + $21 * interval '1 ms' END, CASE WHEN passed THEN 1 ELSE 0 END
             FROM meant WHERE NOT (passed AND $23) ORDER BY id
             RETURNING id, queue, outbox_ref)
         SELECT id, queue, outbox_refs, true FROM bundled
         UNION ALL SELECT id, queue, ARRAY[outbox_ref], false FROM queued"
    ));
    let keys: Vec<String> = entries.iter().map(|entry| routing_key(&entry.aggregate_type, &entry.event_type)).collect();
    let rows = bind_entries(sqlx::query(insert), entries, "published", None, now)
        .bind(passing.token)
        .bind(millis(passing.lease))
        .bind(&passing.queues)
        .bind(passing.bundled)
        .bind(keys)
        .fetch_all(c)
        .await?;
    let entry_of: HashMap<Uuid, usize> = entries.iter().enumerate().map(|(index, entry)| (entry.id, index)).collect();
    rows.iter()
        .map(|row| {
            let refs: Vec<Uuid> = row.try_get(2)?;
            let entries = refs.iter().map(|id| entry_of.get(id).copied()).collect::<Option<_>>();
            let entries = entries.ok_or(sqlx::Error::RowNotFound)?;
            Ok(Queued { id: row.try_get(0)?, queue: row.try_get(1)?, entries, is_bundle: row.try_get(3)? })
        })
        .collect()
}

/// Takes the entries' columns, the moment, the status, and the claim they are born with.
const INSERT: &str =
    "INSERT INTO messaging_outbox (id, event_id, kind, group_id, subsidiary_id, aggregate_type, aggregate_id,
         event_type, body, headers, status, available_at, created_at, correlation_id, causation_id, target, traceparent,
         published_at, claimed_by)
     SELECT id, event_id, kind, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type, body,
         headers, $17::text, now() + (delay_ms + $19) * interval '1 ms', $14, correlation_id, causation_id, target, traceparent,
         CASE $17::text WHEN 'published' THEN $14::timestamptz END, $18::uuid
     FROM UNNEST($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
         $8::text[], $9::bytea[], $10::text[], $11::bigint[], $12::text[], $13::uuid[], $15::text[], $16::text[])
         AS row(id, event_id, kind, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type, body,
             headers, delay_ms, correlation_id, causation_id, target, traceparent)";

type PgQuery<'q> = Query<'q, Postgres, <Postgres as Database>::Arguments>;

fn bind_entries<'q>(
    query: PgQuery<'q>,
    entries: &[Entry],
    status: &'static str,
    claim: Option<Claim>,
    now: Timestamp,
) -> PgQuery<'q> {
    let text = |of: fn(&Entry) -> &str| entries.iter().map(of).collect::<Vec<&str>>();
    query
        .bind(entries.iter().map(|entry| entry.id).collect::<Vec<_>>())
        .bind(entries.iter().map(|entry| entry.event_id).collect::<Vec<_>>())
        .bind(text(|entry| entry.kind.as_str()))
        .bind(text(|entry| &entry.group_id))
        .bind(entries.iter().map(|entry| entry.subsidiary_id.as_deref()).collect::<Vec<_>>())
        .bind(text(|entry| &entry.aggregate_type))
        .bind(text(|entry| &entry.aggregate_id))
        .bind(text(|entry| &entry.event_type))
        .bind(entries.iter().map(|entry| &entry.body[..]).collect::<Vec<_>>())
        .bind(text(|entry| &entry.headers))
        .bind(entries.iter().map(|entry| millis(entry.delay)).collect::<Vec<_>>())
        .bind(text(|entry| &entry.correlation_id))
        .bind(entries.iter().map(|entry| entry.causation_id).collect::<Vec<_>>())
        .bind(now)
        .bind(text(|entry| &entry.target))
        .bind(entries.iter().map(|entry| entry.traceparent.map(|trace| trace.to_string())).collect::<Vec<_>>())
        .bind(status)
        .bind(claim.map(|claim| claim.by))
        .bind(claim.map_or(0, |claim| millis(claim.lease)))
}

pub async fn claim_many(c: &mut PgConnection, claim: Claim, limit: i64, now: Timestamp) -> sqlx::Result<Vec<Claimed>> {
    let rows = sqlx::query(
        "WITH due AS MATERIALIZED (
             SELECT id FROM messaging_outbox
             WHERE status IN ('pending', 'failed') AND available_at <= now()
             ORDER BY available_at LIMIT $2 FOR UPDATE SKIP LOCKED)
         UPDATE messaging_outbox o SET claimed_by = $1, claimed_at = $4, available_at = now() + $3 * interval '1 ms'
         FROM due WHERE o.id = due.id
         RETURNING o.id, o.event_id, o.kind, o.group_id, o.subsidiary_id, o.aggregate_type, o.aggregate_id,
             o.event_type, o.correlation_id, o.traceparent, o.headers, o.body, o.target, o.attempts, o.created_at",
    )
    .bind(claim.by)
    .bind(limit)
    .bind(millis(claim.lease))
    .bind(now)
    .fetch_all(c)
    .await?;
    rows.iter()
        .map(|row| {
            Ok(Claimed {
                id: row.try_get(0)?,
                event_id: row.try_get(1)?,
                kind: row.try_get(2)?,
                group_id: row.try_get(3)?,
                subsidiary_id: row.try_get(4)?,
                aggregate_type: row.try_get(5)?,
                aggregate_id: row.try_get(6)?,
                event_type: row.try_get(7)?,
                correlation_id: row.try_get(8)?,
                traceparent: row.try_get(9)?,
                headers: row.try_get(10)?,
                body: row.try_get::<Vec<u8>, _>(11)?.into(),
                target: row.try_get(12)?,
                attempts: row.try_get(13)?,
                created_at: row.try_get(14)?,
            })
        })
        .collect()
}

pub async fn settle_many(
    c: &mut PgConnection,
    claimed_by: Uuid,
    settlements: &[Settlement],
    taken_at: Timestamp,
    now: Timestamp,
) -> sqlx::Result<()> {
    let settled = Settled::sort(settlements);
    if !settled.published.is_empty() {
        sqlx::query(
            "UPDATE messaging_outbox SET status = 'published', published_at = $3, claimed_by = NULL, last_error = NULL,
                 claimed_at = $4
             WHERE id = ANY($2) AND claimed_by = $1",
        )
        .bind(claimed_by)
        .bind(settled.published)
        .bind(now)
        .bind(taken_at)
        .execute(&mut *c)
        .await?;
    }
    if !settled.released.is_empty() {
        sqlx::query(
            "UPDATE messaging_outbox SET available_at = now(), claimed_by = NULL
             WHERE id = ANY($2) AND claimed_by = $1",
        )
        .bind(claimed_by)
        .bind(settled.released)
        .execute(&mut *c)
        .await?;
    }
    if !settled.failed.is_empty() {
        sqlx::query(
            "UPDATE messaging_outbox o SET attempts = o.attempts + 1, last_error = f.error, claimed_by = NULL,
                 status = CASE WHEN f.delay_ms IS NULL THEN 'dead' ELSE 'failed' END,
                 available_at = now() + COALESCE(f.delay_ms, 0) * interval '1 ms'
             FROM UNNEST($2::uuid[], $3::bigint[], $4::text[]) AS f(id, delay_ms, error)
             WHERE o.id = f.id AND o.claimed_by = $1",
        )
        .bind(claimed_by)
        .bind(settled.failed)
        .bind(settled.failed_delay_ms)
        .bind(settled.failed_errors)
        .execute(c)
        .await?;
    }
    Ok(())
}

/// A claim may be another instance's.
pub async fn free_leftovers(_: &mut PgConnection, _now: Timestamp) -> sqlx::Result<()> {
    Ok(())
}

pub async fn backlog(c: &mut PgConnection, _now: Timestamp) -> sqlx::Result<Backlog> {
    let (pending, dead, attempts_max, oldest_due_ms) = sqlx::query_as(
        "SELECT (SELECT count(*) FROM messaging_outbox WHERE status IN ('pending', 'failed')),
                (SELECT count(*) FROM messaging_outbox WHERE status = 'dead'),
                (SELECT COALESCE(max(attempts), 0) FROM messaging_outbox WHERE status IN ('pending', 'failed')),
                (SELECT CAST(extract(epoch FROM now() - min(available_at)) * 1000 AS bigint)
                 FROM messaging_outbox WHERE status IN ('pending', 'failed') AND available_at <= now())",
    )
    .fetch_one(c)
    .await?;
    Ok(Backlog { pending, dead, attempts_max, oldest_due_ms })
}
