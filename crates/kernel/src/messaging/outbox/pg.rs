//! Postgres: due times and leases are the database's own clock, so instances with skewed clocks agree.

use std::collections::HashMap;

use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Database, PgConnection, Postgres, Row};
use uuid::Uuid;

use super::{Backlog, Claim, Claimed, Entry, Passing, Queued, Settled, Settlement};
use crate::clock::{Timestamp, millis};
use crate::db::Column;

pub async fn insert_many(
    c: &mut PgConnection,
    entries: &[Entry],
    claim: Option<Claim>,
    now: Timestamp,
) -> sqlx::Result<()> {
    let insert = AssertSqlSafe(format!("WITH {ROADS} {INSERT}"));
    bind_entries(sqlx::query(insert), entries, "pending", claim, now).execute(c).await.map(drop)
}

pub async fn insert_handed_on(
    c: &mut PgConnection,
    entries: &[Entry],
    passing: &Passing<'_>,
    now: Timestamp,
) -> sqlx::Result<Vec<Queued>> {
    let insert = AssertSqlSafe(format!(
        "WITH {ROADS},
         written AS ({INSERT}),
         ends AS MATERIALIZED (
             SELECT roads.number, COALESCE(b.queue, roads.target) AS queue,
                 roads.kind = 'event' AND COALESCE(b.queue = ANY($31), false) AS passed
             FROM roads LEFT JOIN messaging_bindings b
                 ON roads.target = '' AND b.routing_key = roads.aggregate_type || '.' || roads.event_type
             WHERE roads.target <> '' OR b.queue IS NOT NULL),
         bundled AS (
             INSERT INTO messaging_bundles (queue, outbox_refs, enqueued_at, lock_token, lease_until)
             SELECT ends.queue, array_agg(e.id), $25, $29, now() + $30 * interval '1 ms'
             FROM ends JOIN UNNEST($1::uuid[], $4::bigint[]) AS e(id, road) ON COALESCE(e.road, $5) = ends.number
             WHERE passed AND $32 GROUP BY ends.queue
             RETURNING id, queue, outbox_refs),
         queued AS (
             INSERT INTO messaging_queue (queue, outbox_ref, enqueued_at, lock_token, lease_until, deliveries)
             SELECT ends.queue, e.id, $25, CASE WHEN passed THEN $29::uuid END,
                 CASE WHEN passed THEN now() + $30 * interval '1 ms' END, CASE WHEN passed THEN 1 ELSE 0 END
             FROM ends JOIN UNNEST($1::uuid[], $4::bigint[]) AS e(id, road) ON COALESCE(e.road, $5) = ends.number
             WHERE NOT (passed AND $32) ORDER BY e.id
             RETURNING id, queue, outbox_ref)
         SELECT id, queue, outbox_refs, true FROM bundled
         UNION ALL SELECT id, queue, ARRAY[outbox_ref], false FROM queued"
    ));
    let rows = bind_entries(sqlx::query(insert), entries, "published", None, now)
        .bind(passing.token)
        .bind(millis(passing.lease))
        .bind(&passing.queues)
        .bind(passing.bundled)
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

/// The roads that entries take, each once: a batch has few of them, and what is said of a road is not said of every entry.
const ROADS: &str = "roads AS MATERIALIZED (
    SELECT * FROM UNNEST($21::text[], $22::text[], $23::text[], $24::text[])
        WITH ORDINALITY AS road(kind, aggregate_type, event_type, target, number))";

/// Takes the entries' columns (those that most batches share as [`Column`]s) with the number of each one's road, the roads, the
/// moment, the status, and the claim they are born with.
const INSERT: &str =
    "INSERT INTO messaging_outbox (id, event_id, kind, group_id, subsidiary_id, aggregate_type, aggregate_id,
         event_type, body, headers, status, available_at, created_at, correlation_id, causation_id, target, traceparent,
         published_at, claimed_by)
     SELECT id, COALESCE(event_id, $3, id), roads.kind, COALESCE(group_id, $7), COALESCE(subsidiary_id, $9),
         roads.aggregate_type, aggregate_id, roads.event_type, body, COALESCE(headers, $13), $26::text,
         now() + (COALESCE(delay_ms, $15) + $28) * interval '1 ms', $25, correlation_id, COALESCE(causation_id, $18),
         roads.target, COALESCE(traceparent, $20), CASE $26::text WHEN 'published' THEN $25::timestamptz END, $27::uuid
     FROM UNNEST($1::uuid[], $2::uuid[], $4::bigint[], $6::text[], $8::text[], $10::text[], $11::bytea[], $12::text[],
         $14::bigint[], $16::text[], $17::uuid[], $19::text[])
         AS row(id, event_id, road, group_id, subsidiary_id, aggregate_id, body, headers, delay_ms, correlation_id,
             causation_id, traceparent)
     JOIN roads ON roads.number = COALESCE(row.road, $5)";

type PgQuery<'q> = Query<'q, Postgres, <Postgres as Database>::Arguments>;

fn bind_entries<'q>(
    query: PgQuery<'q>,
    entries: &[Entry],
    status: &'static str,
    claim: Option<Claim>,
    now: Timestamp,
) -> PgQuery<'q> {
    let text = |of: fn(&Entry) -> &str| entries.iter().map(of).collect::<Vec<&str>>();
    // Null is the row's own id, as it is of every event that goes out for the first time.
    let event_id = Column::of(entries.iter().map(|entry| (entry.event_id != entry.id).then_some(entry.event_id)));
    let (roads, road_of) = roads_of(entries);
    let road = Column::of(road_of.into_iter());
    let group_id = Column::of(entries.iter().map(|entry| entry.group_id.as_str()));
    let subsidiary_id = Column::of(entries.iter().map(|entry| entry.subsidiary_id.as_deref()));
    let headers = Column::of(entries.iter().map(|entry| &*entry.headers));
    let delay_ms = Column::of(entries.iter().map(|entry| millis(entry.delay)));
    let causation_id = Column::of(entries.iter().map(|entry| entry.causation_id));
    let traceparent = Column::of(entries.iter().map(|entry| entry.traceparent.map(|trace| trace.to_string())));
    let road_text = |of: fn(&Entry) -> &str| roads.iter().map(|first| of(first)).collect::<Vec<&str>>();
    query
        .bind(entries.iter().map(|entry| entry.id).collect::<Vec<_>>())
        .bind(event_id.each)
        .bind(event_id.shared)
        .bind(road.each)
        .bind(road.shared)
        .bind(group_id.each)
        .bind(group_id.shared)
        .bind(subsidiary_id.each)
        .bind(subsidiary_id.shared)
        .bind(text(|entry| &entry.aggregate_id))
        .bind(entries.iter().map(|entry| &entry.body[..]).collect::<Vec<_>>())
        .bind(headers.each)
        .bind(headers.shared)
        .bind(delay_ms.each)
        .bind(delay_ms.shared)
        .bind(text(|entry| &entry.correlation_id))
        .bind(causation_id.each)
        .bind(causation_id.shared)
        .bind(traceparent.each)
        .bind(traceparent.shared)
        .bind(road_text(|entry| entry.kind.as_str()))
        .bind(road_text(|entry| &entry.aggregate_type))
        .bind(road_text(|entry| &entry.event_type))
        .bind(road_text(|entry| &entry.target))
        .bind(now)
        .bind(status)
        .bind(claim.map(|claim| claim.by))
        .bind(claim.map_or(0, |claim| millis(claim.lease)))
}

/// The first entry of each road, and the number of the road that each entry takes, from 1.
fn roads_of(entries: &[Entry]) -> (Vec<&Entry>, Vec<i64>) {
    let mut firsts: Vec<&Entry> = Vec::new();
    let numbers = entries.iter().map(|entry| {
        let known = firsts.iter().position(|first| {
            first.event_type == entry.event_type
                && first.aggregate_type == entry.aggregate_type
                && first.kind == entry.kind
                && first.target == entry.target
        });
        let index = known.unwrap_or_else(|| {
            firsts.push(entry);
            firsts.len() - 1
        });
        i64::try_from(index + 1).unwrap_or(i64::MAX)
    });
    let numbers = numbers.collect();
    (firsts, numbers)
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
