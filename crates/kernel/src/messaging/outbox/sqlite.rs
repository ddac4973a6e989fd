//! SQLite. No SKIP LOCKED: there is a single writer.

use std::collections::hash_map::Entry::Vacant;
use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;

use sqlx::types::Json;
use uuid::Uuid;

use super::{Backlog, Claim, Claimed, Entry, Kind, Passing, Queued, Settled, Settlement, routing_key};
use crate::clock::Timestamp;
use crate::db::sqlite::{SqliteConnection, query, query_as};

pub async fn insert_many(
    c: &mut SqliteConnection,
    entries: &[Entry],
    claim: Option<Claim>,
    now: Timestamp,
) -> sqlx::Result<()> {
    insert(c, entries, "pending", claim, now)
}

pub async fn insert_handed_on(
    c: &mut SqliteConnection,
    entries: &[Entry],
    passing: &Passing<'_>,
    now: Timestamp,
) -> sqlx::Result<Vec<Queued>> {
    insert(c, entries, "published", None, now)?;
    let seqs = numbers_of_last(c, entries.len())?;
    let queues_of = select_bound(c, entries)?;
    let lease_until = now.plus(passing.lease);
    let mut rows = Vec::new();
    let mut bundles: BTreeMap<&str, (Vec<i64>, Vec<usize>)> = BTreeMap::new();
    let mut queued = Vec::new();
    for (index, (entry, seq)) in entries.iter().zip(seqs).enumerate() {
        let to_target = (!entry.target.is_empty()).then_some(&entry.target);
        let key = (&*entry.aggregate_type, &*entry.event_type);
        let bound = queues_of.get(&key).filter(|_| to_target.is_none());
        for queue in to_target.into_iter().chain(bound.into_iter().flatten()) {
            let is_passed =
                to_target.is_none() && entry.kind == Kind::Event && passing.queues.contains(&queue.as_str());
            if is_passed && passing.bundled {
                let (refs, indexes) = bundles.entry(queue).or_default();
                refs.push(seq);
                indexes.push(index);
            } else {
                let (token, until) = is_passed.then_some((passing.token, lease_until)).unzip();
                rows.push((queue, seq, now, token, until, is_passed));
                queued.push(Queued { id: 0, queue: queue.clone(), entries: vec![index], is_bundle: false });
            }
        }
    }
    c.insert_each("messaging_queue (queue, outbox_ref, enqueued_at, lock_token, lease_until, deliveries)", rows, "")?;
    let ids = numbers_of_last(c, queued.len())?;
    for (row, id) in queued.iter_mut().zip(ids) {
        row.id = id;
    }
    for (queue, (refs, entries)) in bundles {
        query(
            "INSERT INTO messaging_bundles (queue, outbox_refs, enqueued_at, lock_token, lease_until)
             VALUES ($1, $2, $3, $4, $5)",
        )
        .bind(queue)
        .bind(Json(refs))
        .bind(now)
        .bind(passing.token)
        .bind(lease_until)
        .execute(&mut *c)
        .await?;
        let id = c.writing()?.last_insert_rowid();
        queued.push(Queued { id, queue: queue.to_owned(), entries, is_bundle: true });
    }
    Ok(queued)
}

/// The numbers of the rows inserted last: one writer counts them off without a gap.
fn numbers_of_last(c: &mut SqliteConnection, count: usize) -> sqlx::Result<RangeInclusive<i64>> {
    let last = c.writing()?.last_insert_rowid();
    Ok(last + 1 - i64::try_from(count).unwrap_or(i64::MAX)..=last)
}

/// The queues that the entries' types are bound to, for those that go to no queue in particular.
fn select_bound<'e>(
    c: &mut SqliteConnection,
    entries: &'e [Entry],
) -> sqlx::Result<HashMap<(&'e str, &'e str), Vec<String>>> {
    let mut bound = HashMap::new();
    for entry in entries.iter().filter(|entry| entry.target.is_empty()) {
        let key = (&*entry.aggregate_type, &*entry.event_type);
        if let Vacant(unknown) = bound.entry(key) {
            let queues: Vec<(String,)> = c.fetch_each(
                "SELECT queue FROM messaging_bindings WHERE routing_key = ?1",
                [(routing_key(key.0, key.1),)],
            )?;
            unknown.insert(queues.into_iter().map(|(queue,)| queue).collect());
        }
    }
    Ok(bound)
}

fn insert(
    c: &mut SqliteConnection,
    entries: &[Entry],
    status: &str,
    claim: Option<Claim>,
    now: Timestamp,
) -> sqlx::Result<()> {
    let published_at = (status == "published").then_some(now);
    let due = claim.map_or(now, |claim| now.plus(claim.lease));
    c.insert_each(
        "messaging_outbox (id, event_id, kind, group_id, subsidiary_id, aggregate_type, aggregate_id,
             event_type, body, headers, status, available_at, created_at, correlation_id, causation_id, target,
             traceparent, published_at, claimed_by)",
        entries.iter().map(|entry| {
            (
                entry.id.as_bytes(),
                entry.event_id.as_bytes(),
                entry.kind.as_str(),
                &entry.group_id,
                &entry.subsidiary_id,
                &entry.aggregate_type,
                &entry.aggregate_id,
                &entry.event_type,
                &entry.body[..],
                &entry.headers,
                status,
                due.plus(entry.delay),
                now,
                &entry.correlation_id,
                entry.causation_id.as_ref().map(Uuid::as_bytes),
                &entry.target,
                entry.traceparent.map(|trace| trace.to_string()),
                published_at,
                claim.map(|claim| claim.by),
            )
        }),
        "",
    )
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
