//! SQLite: a statement, run for each row. No SKIP LOCKED: there is a single writer.

use std::collections::HashMap;

use rusqlite::{CachedStatement, params};
use sqlx::types::Json;
use uuid::Uuid;

use super::{Backlog, Claim, Claimed, Entry, Kind, Passing, Queued, Settled, Settlement, routing_key};
use crate::clock::Timestamp;
use crate::db::sqlite::{SqliteConnection, query, query_as, to_sqlx};

pub async fn insert_many(
    c: &mut SqliteConnection,
    entries: &[Entry],
    claim: Option<Claim>,
    now: Timestamp,
) -> sqlx::Result<()> {
    let mut statement = c.writing()?.prepare_cached(INSERT).map_err(to_sqlx)?;
    for entry in entries {
        insert(&mut statement, entry, "pending", claim, now).map_err(to_sqlx)?;
    }
    Ok(())
}

pub async fn insert_handed_on(
    c: &mut SqliteConnection,
    entries: &[Entry],
    passing: &Passing<'_>,
    now: Timestamp,
) -> sqlx::Result<Vec<Queued>> {
    hand_on(c.writing()?, entries, passing, now).map_err(to_sqlx)
}

fn hand_on(
    connection: &rusqlite::Connection,
    entries: &[Entry],
    passing: &Passing<'_>,
    now: Timestamp,
) -> rusqlite::Result<Vec<Queued>> {
    let mut bound = connection.prepare_cached("SELECT queue FROM messaging_bindings WHERE routing_key = ?1")?;
    let mut event = connection.prepare_cached(INSERT)?;
    let mut message = connection.prepare_cached(
        "INSERT INTO messaging_queue (queue, outbox_ref, enqueued_at, lock_token, lease_until, deliveries)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?;
    let lease_until = now.plus(passing.lease);
    let mut queues_of: HashMap<String, Vec<String>> = HashMap::new();
    let mut queued = Vec::with_capacity(entries.len());
    for (index, entry) in entries.iter().enumerate() {
        insert(&mut event, entry, "published", None, now)?;
        let seq = connection.last_insert_rowid();
        let mut enqueue = |queue: &str, is_passed: bool| -> rusqlite::Result<()> {
            let (token, until) = is_passed.then_some((passing.token, lease_until)).unzip();
            message.execute((queue, seq, now, token, until, is_passed))?;
            let id = connection.last_insert_rowid();
            queued.push(Queued { id, queue: queue.to_owned(), entry: index });
            Ok(())
        };
        if !entry.target.is_empty() {
            enqueue(&entry.target, false)?;
            continue;
        }
        let key = routing_key(&entry.aggregate_type, &entry.event_type);
        if !queues_of.contains_key(&key) {
            let queues = bound.query_map([&key], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
            queues_of.insert(key.clone(), queues);
        }
        for queue in &queues_of[&key] {
            enqueue(queue, entry.kind == Kind::Event && passing.queues.contains(&queue.as_str()))?;
        }
    }
    Ok(queued)
}

const INSERT: &str = "INSERT INTO messaging_outbox (id, event_id, kind, group_id, subsidiary_id, aggregate_type,
         aggregate_id, event_type, body, headers, status, available_at, created_at, correlation_id, causation_id, target,
         traceparent, published_at, claimed_by)
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17,
         CASE ?11 WHEN 'published' THEN ?13 END, ?18)";

fn insert(
    statement: &mut CachedStatement<'_>,
    entry: &Entry,
    status: &str,
    claim: Option<Claim>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let due = claim.map_or(now, |claim| now.plus(claim.lease)).plus(entry.delay);
    let row = params![
        entry.id,
        entry.event_id,
        entry.kind.as_str(),
        entry.group_id,
        entry.subsidiary_id,
        entry.aggregate_type,
        entry.aggregate_id,
        entry.event_type,
        &entry.body[..],
        entry.headers,
        status,
        due,
        now,
        entry.correlation_id,
        entry.causation_id,
        entry.target,
        entry.traceparent.map(|trace| trace.to_string()),
        claim.map(|claim| claim.by),
    ];
    statement.execute(row).map(drop)
}

pub async fn claim_many(
    c: &mut SqliteConnection,
    claim: Claim,
    limit: i64,
    now: Timestamp,
) -> sqlx::Result<Vec<Claimed>> {
    type Columns = (
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
        Vec<u8>,
        String,
        i32,
        Timestamp,
    );
    let found: Vec<Columns> = query_as(
        "SELECT seq, id, event_id, kind, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type, correlation_id,
             traceparent, headers, body, target, attempts, created_at
         FROM messaging_outbox WHERE status IN ('pending', 'failed') AND available_at <= $2
         ORDER BY available_at LIMIT $1",
    )
    .bind(limit)
    .bind(now)
    .fetch_all(&mut *c)
    .await?;
    c.execute_each(
        "UPDATE messaging_outbox SET claimed_by = ?2, claimed_at = ?3, available_at = ?4 WHERE seq = ?1",
        found.iter().map(|row| (row.0, claim.by, now, now.plus(claim.lease))),
    )?;
    let claimed = |row: Columns| Claimed {
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
        body: row.12.into(),
        target: row.13,
        attempts: row.14,
        created_at: row.15,
    };
    Ok(found.into_iter().map(claimed).collect())
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
    c.execute_each(
        "UPDATE messaging_outbox SET status = 'published', published_at = ?3, claimed_by = NULL, last_error = NULL,
             claimed_at = ?4
         WHERE id = ?2 AND claimed_by = ?1",
        settled.published.iter().map(|id| (claimed_by, id, now, taken_at)),
    )?;
    if !settled.released.is_empty() {
        query(
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
        query(
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
    query(
        "UPDATE messaging_outbox SET available_at = $1, claimed_by = NULL
         WHERE status IN ('pending', 'failed') AND claimed_by IS NOT NULL",
    )
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn backlog(c: &mut SqliteConnection, now: Timestamp) -> sqlx::Result<Backlog> {
    let (pending, dead, attempts_max, oldest_due_ms) = query_as(
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
