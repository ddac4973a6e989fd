//! Postgres: a concurrent insert of the same id makes the second wait for the first's commit, and then begin again.

use std::time::Duration;

use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Database, PgConnection, Postgres, Row};
use uuid::Uuid;

use super::{Arrival, Claim, Mark, Met, MetColumns};
use crate::clock::{Timestamp, millis};
use crate::db::Column;

pub async fn insert_new(
    c: &mut PgConnection,
    consumer: &str,
    arrivals: &[Arrival<'_>],
    taken_at: Timestamp,
    now: Timestamp,
) -> sqlx::Result<Vec<Uuid>> {
    // A look before each insert, for ON CONFLICT writes every row twice: whoever loses a race to another transaction gets
    // its violation of the key, and is run again. LIMIT keeps the look from being planned as a join.
    let insert = AssertSqlSafe(format!(
        "{INSERT} LEFT JOIN LATERAL (SELECT true AS is_known FROM messaging_inbox i
             WHERE i.consumer = $1 AND i.event_id = row.event_id LIMIT 1) AS met ON true
         WHERE met.is_known IS NULL
         RETURNING event_id"
    ));
    let rows = bind_arrivals(sqlx::query(insert), consumer, arrivals, taken_at, now).fetch_all(c).await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

pub async fn insert_all(
    c: &mut PgConnection,
    consumer: &str,
    arrivals: &[Arrival<'_>],
    taken_at: Timestamp,
    now: Timestamp,
) -> sqlx::Result<()> {
    bind_arrivals(sqlx::query(INSERT), consumer, arrivals, taken_at, now).execute(c).await.map(drop)
}

const INSERT: &str =
    "INSERT INTO messaging_inbox (consumer, event_id, state, attempts, started_at, finished_at, event_type,
         aggregate_id, correlation_id, group_id, body_hash)
     SELECT $1, event_id, 'processed', 1, $3, $2, COALESCE(event_type, $6), aggregate_id, correlation_id,
         COALESCE(group_id, $10), body_hash
     FROM UNNEST($4::uuid[], $5::text[], $7::text[], $8::text[], $9::text[], $11::bytea[])
         AS row(event_id, event_type, aggregate_id, correlation_id, group_id, body_hash)";

type PgQuery<'q> = Query<'q, Postgres, <Postgres as Database>::Arguments>;

fn bind_arrivals<'q>(
    query: PgQuery<'q>,
    consumer: &str,
    arrivals: &[Arrival<'_>],
    taken_at: Timestamp,
    now: Timestamp,
) -> PgQuery<'q> {
    let event_type = Column::of(arrivals.iter().map(|arrival| arrival.key));
    let group_id = Column::of(arrivals.iter().map(|arrival| arrival.event.group_id.as_str()));
    query
        .bind(consumer.to_owned())
        .bind(now)
        .bind(taken_at)
        .bind(arrivals.iter().map(|arrival| arrival.event.event_id).collect::<Vec<_>>())
        .bind(event_type.each)
        .bind(event_type.shared)
        .bind(arrivals.iter().map(|arrival| arrival.event.aggregate_id.as_str()).collect::<Vec<_>>())
        .bind(arrivals.iter().map(|arrival| arrival.event.correlation_id.as_str()).collect::<Vec<_>>())
        .bind(group_id.each)
        .bind(group_id.shared)
        .bind(arrivals.iter().map(|arrival| arrival.body_hash.as_slice()).collect::<Vec<_>>())
}

pub async fn put_end(c: &mut PgConnection, consumer: &str, ids: &[Uuid], ended_at: Timestamp) -> sqlx::Result<()> {
    sqlx::query("UPDATE messaging_inbox SET finished_at = $3 WHERE consumer = $1 AND event_id = ANY($2)")
        .bind(consumer)
        .bind(ids)
        .bind(ended_at)
        .execute(c)
        .await
        .map(drop)
}

pub async fn meet(
    c: &mut PgConnection,
    consumer: &str,
    ids: &[Uuid],
    _now: Timestamp,
) -> sqlx::Result<Vec<(Uuid, Met)>> {
    // clock_timestamp, not now(): this transaction may have waited for the one that wrote the row.
    let rows: Vec<MetColumns> = sqlx::query_as(
        "SELECT event_id, state, attempts, unfinished_runs, body_hash, lock_token IS NOT NULL, version,
             COALESCE(CEIL(EXTRACT(EPOCH FROM lease_until - clock_timestamp()) * 1000), 0)::bigint
         FROM messaging_inbox WHERE consumer = $1 AND event_id = ANY($2) ORDER BY event_id FOR UPDATE",
    )
    .bind(consumer)
    .bind(ids)
    .fetch_all(c)
    .await?;
    rows.into_iter().map(Met::from_columns).collect()
}

pub async fn claim_many(
    c: &mut PgConnection,
    consumer: &str,
    claims: &[Claim],
    lease: Duration,
    now: Timestamp,
) -> sqlx::Result<()> {
    // A run that was recorded (processing, and nobody's) is the one that begins here, and is counted already.
    sqlx::query(
        "UPDATE messaging_inbox i SET state = 'processing', attempts = m.attempt, lock_token = m.token,
             version = m.version, lease_until = clock_timestamp() + $6 * interval '1 ms', started_at = $7,
             finished_at = NULL, body = NULL, waiting_for = NULL, deadline_at = NULL,
             unfinished_runs = unfinished_runs
                 + CASE WHEN i.state = 'processing' AND i.lock_token IS NULL THEN 0 ELSE 1 END
         FROM UNNEST($2::uuid[], $3::uuid[], $4::bigint[], $5::int[]) AS m(event_id, token, version, attempt)
         WHERE i.consumer = $1 AND i.event_id = m.event_id",
    )
    .bind(consumer)
    .bind(claims.iter().map(|claim| claim.event_id).collect::<Vec<_>>())
    .bind(claims.iter().map(|claim| claim.token).collect::<Vec<_>>())
    .bind(claims.iter().map(|claim| claim.version).collect::<Vec<_>>())
    .bind(claims.iter().map(|claim| claim.attempt).collect::<Vec<_>>())
    .bind(millis(lease))
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn hold_many(c: &mut PgConnection, consumer: &str, claims: &[Claim]) -> sqlx::Result<Vec<(Uuid, bool)>> {
    sqlx::query_as(
        "SELECT i.event_id, COALESCE(i.lock_token = m.token, false) FROM messaging_inbox i
         JOIN UNNEST($2::uuid[], $3::uuid[], $4::bigint[]) AS m(event_id, token, version) USING (event_id)
         WHERE i.consumer = $1 AND i.version = m.version
         ORDER BY i.event_id FOR UPDATE OF i",
    )
    .bind(consumer)
    .bind(claims.iter().map(|claim| claim.event_id).collect::<Vec<_>>())
    .bind(claims.iter().map(|claim| claim.token).collect::<Vec<_>>())
    .bind(claims.iter().map(|claim| claim.version).collect::<Vec<_>>())
    .fetch_all(c)
    .await
}

pub async fn renew_many(
    c: &mut PgConnection,
    consumer: &str,
    claims: &[Claim],
    lease: Duration,
    _now: Timestamp,
) -> sqlx::Result<()> {
    // Locked rows are being concluded or taken over: not waited for, so that this cannot deadlock with either.
    sqlx::query(
        "WITH held AS MATERIALIZED (
             SELECT i.event_id FROM messaging_inbox i
             JOIN UNNEST($2::uuid[], $3::uuid[], $4::bigint[]) AS m(event_id, token, version) USING (event_id)
             WHERE i.consumer = $1 AND i.lock_token = m.token AND i.version = m.version
             FOR UPDATE OF i SKIP LOCKED)
         UPDATE messaging_inbox i SET lease_until = clock_timestamp() + $5 * interval '1 ms'
         FROM held WHERE i.consumer = $1 AND i.event_id = held.event_id",
    )
    .bind(consumer)
    .bind(claims.iter().map(|claim| claim.event_id).collect::<Vec<_>>())
    .bind(claims.iter().map(|claim| claim.token).collect::<Vec<_>>())
    .bind(claims.iter().map(|claim| claim.version).collect::<Vec<_>>())
    .bind(millis(lease))
    .execute(c)
    .await
    .map(drop)
}

pub async fn count_fenced(c: &mut PgConnection, consumer: &str, ids: &[Uuid]) -> sqlx::Result<()> {
    sqlx::query("UPDATE messaging_inbox SET fenced = fenced + 1 WHERE consumer = $1 AND event_id = ANY($2)")
        .bind(consumer)
        .bind(ids)
        .execute(c)
        .await
        .map(drop)
}

pub async fn mark_many(c: &mut PgConnection, consumer: &str, marks: &[Mark], now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE messaging_inbox i SET state = m.state, attempts = m.attempts, unfinished_runs = 0,
             lease_until = now() + m.due_in_ms * interval '1 ms', lock_token = NULL,
             reason = m.reason, last_error = m.last_error, body = NULL, waiting_for = NULL, deadline_at = NULL,
             finished_at = CASE WHEN m.state IN ('processed', 'dead') THEN $3 END
         FROM UNNEST($2::uuid[], $4::text[], $5::int[], $6::bigint[], $7::text[], $8::text[])
             AS m(event_id, state, attempts, due_in_ms, reason, last_error)
         WHERE i.consumer = $1 AND i.event_id = m.event_id",
    )
    .bind(consumer)
    .bind(marks.iter().map(|mark| mark.event_id).collect::<Vec<_>>())
    .bind(now)
    .bind(marks.iter().map(|mark| mark.state.as_str()).collect::<Vec<_>>())
    .bind(marks.iter().map(|mark| mark.attempts).collect::<Vec<_>>())
    .bind(marks.iter().map(|mark| mark.due_in.map(millis)).collect::<Vec<_>>())
    .bind(marks.iter().map(|mark| mark.reason.as_deref()).collect::<Vec<_>>())
    .bind(marks.iter().map(|mark| mark.last_error.as_deref()).collect::<Vec<_>>())
    .execute(c)
    .await
    .map(drop)
}

pub async fn count_duplicates(c: &mut PgConnection, consumer: &str, ids: &[Uuid]) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE messaging_inbox i SET duplicates = duplicates + d.seen
         FROM (SELECT id, count(*) AS seen FROM UNNEST($2::uuid[]) AS id GROUP BY id) d
         WHERE i.consumer = $1 AND i.event_id = d.id",
    )
    .bind(consumer)
    .bind(ids)
    .execute(c)
    .await
    .map(drop)
}
