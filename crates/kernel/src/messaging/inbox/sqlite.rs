//! SQLite: the writer's BEGIN IMMEDIATE is the lock on every row, so nothing needs FOR UPDATE. CROSS JOIN, and a
//! consumer in every JSON row, keep the planner from walking a consumer's whole inbox for a batch of ids.

use std::time::Duration;

use sqlx::types::Json;
use uuid::Uuid;

use super::{Arrival, Claim, Mark, Met, MetColumns};
use crate::clock::Timestamp;
use crate::db::sqlite::{SqliteConnection, Values, query, query_as};

pub async fn insert_new(
    c: &mut SqliteConnection,
    consumer: &str,
    arrivals: &[Arrival<'_>],
    taken_at: Timestamp,
    now: Timestamp,
) -> sqlx::Result<Vec<Uuid>> {
    let new: Vec<(Uuid,)> = c.insert_returning(
        INSERT,
        rows(consumer, arrivals, taken_at, now),
        "ON CONFLICT DO NOTHING RETURNING event_id",
    )?;
    Ok(new.into_iter().map(|(id,)| id).collect())
}

pub async fn insert_all(
    c: &mut SqliteConnection,
    consumer: &str,
    arrivals: &[Arrival<'_>],
    taken_at: Timestamp,
    now: Timestamp,
) -> sqlx::Result<()> {
    c.insert_each(INSERT, rows(consumer, arrivals, taken_at, now), "")
}

const INSERT: &str = "messaging_inbox (consumer, event_id, state, attempts, started_at, finished_at, event_type,
         aggregate_id, correlation_id, group_id, body_hash)";

fn rows<'a>(
    consumer: &'a str,
    arrivals: &'a [Arrival<'a>],
    taken_at: Timestamp,
    now: Timestamp,
) -> impl Iterator<Item = impl Values + 'a> {
    arrivals.iter().map(move |Arrival { event, key, body_hash, .. }| {
        let ids = (&event.aggregate_id, &event.correlation_id, &event.group_id);
        (consumer, event.event_id.as_bytes(), "processed", 1, taken_at, now, *key, ids.0, ids.1, ids.2, *body_hash)
    })
}

pub async fn put_end(c: &mut SqliteConnection, consumer: &str, ids: &[Uuid], ended_at: Timestamp) -> sqlx::Result<()> {
    query(
        "UPDATE messaging_inbox SET finished_at = $3
         WHERE consumer = $1 AND event_id IN (SELECT unhex(value) FROM json_each($2))",
    )
    .bind(consumer)
    .bind(Json(ids.iter().map(|id| id.simple()).collect::<Vec<_>>()))
    .bind(ended_at)
    .execute(c)
    .await
    .map(drop)
}

pub async fn meet(
    c: &mut SqliteConnection,
    consumer: &str,
    ids: &[Uuid],
    now: Timestamp,
) -> sqlx::Result<Vec<(Uuid, Met)>> {
    let rows: Vec<MetColumns> = query_as(
        "SELECT event_id, state, attempts, unfinished_runs, body_hash, lock_token IS NOT NULL, version,
             COALESCE(lease_until - $3, 0)
         FROM messaging_inbox
         WHERE consumer = $1 AND event_id IN (SELECT unhex(value) FROM json_each($2)) ORDER BY event_id",
    )
    .bind(consumer)
    .bind(Json(ids.iter().map(|id| id.simple()).collect::<Vec<_>>()))
    .bind(now)
    .fetch_all(c)
    .await?;
    rows.into_iter().map(Met::from_columns).collect()
}

pub async fn claim_many(
    c: &mut SqliteConnection,
    consumer: &str,
    claims: &[Claim],
    lease: Duration,
    now: Timestamp,
) -> sqlx::Result<()> {
    // A run that was recorded (processing, and nobody's) is the one that begins here, and is counted already.
    query(
        "UPDATE messaging_inbox SET state = 'processing', attempts = m.value ->> 4, lock_token = unhex(m.value ->> 2),
             version = m.value ->> 3, lease_until = $2, started_at = $3, finished_at = NULL, body = NULL,
             waiting_for = NULL, deadline_at = NULL,
             unfinished_runs = unfinished_runs + CASE WHEN state = 'processing' AND lock_token IS NULL THEN 0 ELSE 1 END
         FROM jsonb_each($1) AS m
         WHERE consumer = m.value ->> 0 AND event_id = unhex(m.value ->> 1)",
    )
    .bind(json(consumer, claims))
    .bind(now.plus(lease))
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn hold_many(c: &mut SqliteConnection, consumer: &str, claims: &[Claim]) -> sqlx::Result<Vec<(Uuid, bool)>> {
    query_as(
        "SELECT i.event_id, i.lock_token IS unhex(m.value ->> 2) FROM jsonb_each($1) AS m
         CROSS JOIN messaging_inbox i ON i.consumer = m.value ->> 0 AND i.event_id = unhex(m.value ->> 1)
         WHERE i.version = m.value ->> 3",
    )
    .bind(json(consumer, claims))
    .fetch_all(c)
    .await
}

pub async fn renew_many(
    c: &mut SqliteConnection,
    consumer: &str,
    claims: &[Claim],
    lease: Duration,
    now: Timestamp,
) -> sqlx::Result<()> {
    query(
        "UPDATE messaging_inbox SET lease_until = $2 FROM jsonb_each($1) AS m
         WHERE consumer = m.value ->> 0 AND event_id = unhex(m.value ->> 1)
             AND lock_token = unhex(m.value ->> 2) AND version = m.value ->> 3",
    )
    .bind(json(consumer, claims))
    .bind(now.plus(lease))
    .execute(c)
    .await
    .map(drop)
}

pub async fn count_fenced(c: &mut SqliteConnection, consumer: &str, ids: &[Uuid]) -> sqlx::Result<()> {
    query(
        "UPDATE messaging_inbox SET fenced = fenced + 1
         WHERE consumer = $1 AND event_id IN (SELECT unhex(value) FROM json_each($2))",
    )
    .bind(consumer)
    .bind(Json(ids.iter().map(|id| id.simple()).collect::<Vec<_>>()))
    .execute(c)
    .await
    .map(drop)
}

pub async fn mark_many(c: &mut SqliteConnection, consumer: &str, marks: &[Mark], now: Timestamp) -> sqlx::Result<()> {
    let rows: Vec<_> = marks
        .iter()
        .map(|mark| {
            (
                mark.event_id.simple(),
                mark.state.as_str(),
                mark.attempts,
                mark.due_in.map(|due_in| now.plus(due_in).millis()),
                &mark.reason,
                &mark.last_error,
                consumer,
            )
        })
        .collect();
    query(
        "UPDATE messaging_inbox SET state = m.value ->> 1, attempts = m.value ->> 2, unfinished_runs = 0,
             lease_until = m.value ->> 3, lock_token = NULL, reason = m.value ->> 4, last_error = m.value ->> 5,
             body = NULL, waiting_for = NULL, deadline_at = NULL,
             finished_at = CASE WHEN m.value ->> 1 IN ('processed', 'dead') THEN $2 END
         FROM jsonb_each($1) AS m
         WHERE consumer = m.value ->> 6 AND event_id = unhex(m.value ->> 0)",
    )
    .bind(Json(rows))
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn count_duplicates(c: &mut SqliteConnection, consumer: &str, ids: &[Uuid]) -> sqlx::Result<()> {
    query(
        "UPDATE messaging_inbox SET duplicates = duplicates + d.seen
         FROM (SELECT value ->> 0 AS consumer, unhex(value ->> 1) AS event_id, count(*) AS seen
             FROM jsonb_each($1) GROUP BY value) AS d
         WHERE messaging_inbox.consumer = d.consumer AND messaging_inbox.event_id = d.event_id",
    )
    .bind(Json(ids.iter().map(|id| (consumer, id.simple())).collect::<Vec<_>>()))
    .execute(c)
    .await
    .map(drop)
}

fn json(consumer: &str, claims: &[Claim]) -> Json<Vec<impl serde::Serialize>> {
    let row = |claim: &Claim| {
        (consumer.to_owned(), claim.event_id.simple(), claim.token.simple(), claim.version, claim.attempt)
    };
    Json(claims.iter().map(row).collect())
}
