//! SQLite: one bind of JSON rows and one of all bodies end to end, so that a batch of any size is one constant
//! statement and bodies travel as bytes. No SKIP LOCKED: there is a single writer.

use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use sqlx::query::Query;
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, Database, Row, Sqlite, SqliteConnection};
use uuid::Uuid;

use super::{Backlog, Claim, Claimed, Entry, Passing, Queued, Settled, Settlement};
use crate::clock::Timestamp;

pub async fn insert_many(
    c: &mut SqliteConnection,
    entries: &[Entry],
    claim: Option<Claim>,
    now: Timestamp,
) -> sqlx::Result<()> {
    bind_entries(sqlx::query(INSERT), entries, "pending", claim, now).execute(c).await.map(drop)
}

pub async fn insert_handed_on(
    c: &mut SqliteConnection,
    entries: &[Entry],
    passing: &Passing<'_>,
    now: Timestamp,
) -> sqlx::Result<Vec<Queued>> {
    // One trip to SQLite's thread for all three. One statement of one writer: its rows are numbered without a gap, so
    // those just written are the last ones. NOT INDEXED: by row number, rather than over the whole backlog by queue.
    static INSERT_AND_ENQUEUE: LazyLock<String> = LazyLock::new(|| {
        format!(
            "{INSERT};
             INSERT INTO messaging_queue (queue, outbox_ref, enqueued_at, lock_token, lease_until, deliveries)
             SELECT queue, seq, $3, iif(passed, $6, NULL), iif(passed, $7, NULL), passed
             FROM (SELECT CASE o.target WHEN '' THEN b.queue ELSE o.target END AS queue, o.seq,
                     o.target = '' AND o.kind = 'event' AND b.queue IN (SELECT value FROM json_each($8)) AS passed
                 FROM messaging_outbox o LEFT JOIN messaging_bindings b
                     ON o.target = '' AND b.routing_key = o.aggregate_type || '.' || o.event_type
                 WHERE o.seq > (SELECT last_insert_rowid() - changes()) AND (o.target <> '' OR b.queue IS NOT NULL));
             SELECT json_group_array(json_array(id, queue, outbox_ref)), (SELECT max(seq) FROM messaging_outbox)
             FROM messaging_queue NOT INDEXED
             WHERE changes() > 0 AND id > (SELECT last_insert_rowid() - changes())"
        )
    });
    let query = sqlx::query(AssertSqlSafe(INSERT_AND_ENQUEUE.as_str()));
    let answered = bind_entries(query, entries, "published", None, now)
        .bind(passing.token)
        .bind(now.plus(passing.lease))
        .bind(Json(&passing.queues))
        .fetch_all(c)
        .await?;
    let answer = answered.first().ok_or(sqlx::Error::RowNotFound)?;
    let (rows, newest): (&str, i64) = (answer.try_get(0)?, answer.try_get(1)?);
    let rows: Vec<(i64, String, i64)> =
        serde_json::from_str(rows).map_err(|error| sqlx::Error::Decode(error.into()))?;
    // The outbox's rows are numbered without a gap as well, the last entry's being the newest.
    let entry_of = |seq: i64| usize::try_from(newest - seq).ok().and_then(|back| entries.len().checked_sub(back + 1));
    rows.into_iter()
        .map(|(id, queue, seq)| {
            let entry = entry_of(seq).ok_or_else(|| sqlx::Error::Decode("a queue's row without its entry".into()))?;
            Ok(Queued { id, queue, entry })
        })
        .collect()
}

const INSERT: &str =
    // COALESCE: substr of a blob without bytes is NULL, and an empty body is a body
    "INSERT INTO messaging_outbox (id, event_id, kind, group_id, subsidiary_id, aggregate_type, aggregate_id,
         event_type, body, headers, status, available_at, created_at, correlation_id, causation_id, target,
         traceparent, published_at, claimed_by)
     SELECT unhex(value ->> 0), unhex(value ->> 1), value ->> 2, value ->> 3, value ->> 4, value ->> 5,
         value ->> 6, value ->> 7, COALESCE(substr($2, value ->> '$[8][0]', value ->> '$[8][1]'), x''),
         value ->> 9, $4, value ->> 10, $3, value ->> 11, unhex(value ->> 12), value ->> 13, value ->> 14,
         CASE $4 WHEN 'published' THEN $3 END, $5
     FROM jsonb_each($1)";

type SqliteQuery<'q> = Query<'q, Sqlite, <Sqlite as Database>::Arguments>;

fn bind_entries<'q>(
    query: SqliteQuery<'q>,
    entries: &[Entry],
    status: &'static str,
    claim: Option<Claim>,
    now: Timestamp,
) -> SqliteQuery<'q> {
    let due = now.plus(claim.map_or(Duration::ZERO, |claim| claim.lease));
    let mut bodies = Vec::with_capacity(entries.iter().map(|entry| entry.body.len()).sum());
    let rows: Vec<_> = entries
        .iter()
        .map(|entry| {
            let start = bodies.len() + 1; // substr counts from 1
            bodies.extend_from_slice(&entry.body);
            (
                entry.id.simple(),
                entry.event_id.simple(),
                entry.kind.as_str(),
                &entry.group_id,
                &entry.subsidiary_id,
                &entry.aggregate_type,
                &entry.aggregate_id,
                &entry.event_type,
                (start, entry.body.len()),
                &entry.headers,
                due.plus(entry.delay).millis(),
                &entry.correlation_id,
                entry.causation_id.map(Uuid::simple),
                &entry.target,
                entry.traceparent.map(|trace| trace.to_string()),
            )
        })
        .collect();
    query.bind(Json(rows)).bind(bodies).bind(now).bind(status).bind(claim.map(|claim| claim.by))
}

pub async fn claim_many(
    c: &mut SqliteConnection,
    claim: Claim,
    limit: i64,
    now: Timestamp,
) -> sqlx::Result<Vec<Claimed>> {
    // All in one row, the bodies end to end: each row that crosses from SQLite's thread costs two context switches.
    let (found, bodies): (String, Option<Vec<u8>>) = sqlx::query_as(
        "SELECT json_group_array(json_array(seq, lower(hex(id)), lower(hex(event_id)), kind, group_id, subsidiary_id,
             aggregate_type, aggregate_id, event_type, correlation_id, traceparent, headers, length(body), target,
             attempts, created_at)),
             CAST(group_concat(CAST(body AS TEXT), '') AS BLOB)
         FROM (SELECT * FROM messaging_outbox WHERE status IN ('pending', 'failed') AND available_at <= $2
             ORDER BY available_at LIMIT $1)",
    )
    .bind(limit)
    .bind(now)
    .fetch_one(&mut *c)
    .await?;
    let (due, claimed) = read_claimed(&found, &bodies.unwrap_or_default())?;
    if !due.is_empty() {
        sqlx::query(
            "UPDATE messaging_outbox SET claimed_by = $1, claimed_at = $4, available_at = $3
             WHERE seq IN (SELECT value FROM json_each($2))",
        )
        .bind(claim.by)
        .bind(Json(due))
        .bind(now.plus(claim.lease))
        .bind(now)
        .execute(c)
        .await?;
    }
    Ok(claimed)
}

/// The columns of a claimed row after its number, with the length of the body in place of the body.
#[derive(serde::Deserialize)]
struct Found(
    i64,
    Uuid,
    Uuid,
    String,
    String,
    Option<String>,
    String,
    String,
    String,
    String,
    Option<String>,
    String,
    usize,
    String,
    i32,
    i64,
);

fn read_claimed(json: &str, mut bodies: &[u8]) -> sqlx::Result<(Vec<i64>, Vec<Claimed>)> {
    let found: Vec<Found> = serde_json::from_str(json).map_err(|error| sqlx::Error::Decode(error.into()))?;
    let mut due = Vec::with_capacity(found.len());
    let mut claimed = Vec::with_capacity(found.len());
    for row in found {
        let (body, rest) = bodies
            .split_at_checked(row.12)
            .ok_or_else(|| sqlx::Error::Decode("bodies are shorter than their lengths say".into()))?;
        bodies = rest;
        due.push(row.0);
        claimed.push(Claimed {
            id: row.1,
            event_id: row.2,
            kind: row.3,
            group_id: row.4,
            subsidiary_id: row.5,
            aggregate_type: row.6,
            aggregate_id: row.7,
            event_type: row.8,
            correlation_id: row.9,
            traceparent: row.10,
            headers: row.11,
            body: Bytes::copy_from_slice(body),
            target: row.13,
            attempts: row.14,
            created_at: Timestamp::from_millis(row.15),
        });
    }
    Ok((due, claimed))
}

pub async fn settle_many(
    c: &mut SqliteConnection,
    claimed_by: Uuid,
    settlements: &[Settlement],
    taken_at: Timestamp,
    now: Timestamp,
) -> sqlx::Result<()> {
    let settled = Settled::sort(settlements);
    let hex = |ids: &[Uuid]| Json(ids.iter().map(|id| id.simple()).collect::<Vec<_>>());
    if !settled.published.is_empty() {
        sqlx::query(
            "UPDATE messaging_outbox SET status = 'published', published_at = $3, claimed_by = NULL, last_error = NULL,
                 claimed_at = $4
             WHERE id IN (SELECT unhex(value) FROM json_each($2)) AND claimed_by = $1",
        )
        .bind(claimed_by)
        .bind(hex(&settled.published))
        .bind(now)
        .bind(taken_at)
        .execute(&mut *c)
        .await?;
    }
    if !settled.released.is_empty() {
        sqlx::query(
            "UPDATE messaging_outbox SET available_at = $3, claimed_by = NULL
             WHERE id IN (SELECT unhex(value) FROM json_each($2)) AND claimed_by = $1",
        )
        .bind(claimed_by)
        .bind(hex(&settled.released))
        .bind(now)
        .execute(&mut *c)
        .await?;
    }
    if !settled.failed.is_empty() {
        let rows: Vec<_> = settled
            .failed
            .iter()
            .zip(&settled.failed_delay_ms)
            .zip(&settled.failed_errors)
            .map(|((id, delay_ms), error)| (id.simple(), delay_ms, error))
            .collect();
        sqlx::query(
            "UPDATE messaging_outbox SET attempts = attempts + 1, last_error = f.value ->> 2, claimed_by = NULL,
                 status = CASE WHEN f.value ->> 1 IS NULL THEN 'dead' ELSE 'failed' END,
                 available_at = $3 + COALESCE(f.value ->> 1, 0)
             FROM jsonb_each($2) AS f
             WHERE messaging_outbox.id = unhex(f.value ->> 0) AND claimed_by = $1",
        )
        .bind(claimed_by)
        .bind(Json(rows))
        .bind(now)
        .execute(c)
        .await?;
    }
    Ok(())
}

pub async fn free_leftovers(c: &mut SqliteConnection, now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE messaging_outbox SET available_at = $1, claimed_by = NULL
         WHERE status IN ('pending', 'failed') AND claimed_by IS NOT NULL",
    )
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn backlog(c: &mut SqliteConnection, now: Timestamp) -> sqlx::Result<Backlog> {
    let (pending, dead, attempts_max, oldest_due_ms) = sqlx::query_as(
        "SELECT (SELECT count(*) FROM messaging_outbox WHERE status IN ('pending', 'failed')),
                (SELECT count(*) FROM messaging_outbox WHERE status = 'dead'),
                (SELECT COALESCE(max(attempts), 0) FROM messaging_outbox WHERE status IN ('pending', 'failed')),
                (SELECT $1 - min(available_at)
                 FROM messaging_outbox WHERE status IN ('pending', 'failed') AND available_at <= $1)",
    )
    .bind(now)
    .fetch_one(c)
    .await?;
    Ok(Backlog { pending, dead, attempts_max, oldest_due_ms })
}
