//! Postgres: consumers and relays pass each other by SKIP LOCKED; leases run on the database's clock.

use std::time::Duration;

use sqlx::PgConnection;
use uuid::Uuid;

use super::{Depth, Leaving, Look, Moved, Owed, Places, Row, redriven_id};
use crate::clock::{Timestamp, millis};

/// The columns of [`Row`], in its order, and whether it is a letter on its way back.
type Columns = (i64, Option<String>, String, Option<String>, String, Vec<u8>, Option<String>, i32, bool);

impl From<Columns> for Row {
    fn from(columns: Columns) -> Self {
        let (id, message_id, routing_key, correlation_id, headers, body, x_death, deliveries, is_redrive) = columns;
        Self {
            id,
            message_id: if is_redrive { redriven_id(&headers) } else { message_id },
            routing_key,
            correlation_id,
            headers: headers.into(),
            body: body.into(),
            x_death,
            deliveries,
        }
    }
}

pub async fn move_due(c: &mut PgConnection, limit: i64, now: Timestamp) -> sqlx::Result<Moved> {
    let (rows, queues) = sqlx::query_as(
        "WITH due AS MATERIALIZED (
             SELECT id FROM messaging_outbox
             WHERE status IN ('pending', 'failed') AND available_at <= now()
             ORDER BY available_at LIMIT $1 FOR UPDATE SKIP LOCKED),
         moved AS (
             UPDATE messaging_outbox o SET status = 'published', published_at = $2, claimed_by = NULL, last_error = NULL
             FROM due WHERE o.id = due.id
             RETURNING o.id, o.aggregate_type || '.' || o.event_type AS routing_key, o.target),
         queued AS (
             INSERT INTO messaging_queue (queue, outbox_ref, enqueued_at)
             SELECT q.queue, m.id, $2
             FROM moved m CROSS JOIN LATERAL (
                 SELECT b.queue FROM messaging_bindings b WHERE m.target = '' AND b.routing_key = m.routing_key
                 UNION ALL SELECT m.target WHERE m.target <> '') q
             ORDER BY m.id
             RETURNING queue)
         SELECT (SELECT count(*) FROM moved), ARRAY(SELECT DISTINCT queue FROM queued)",
    )
    .bind(limit)
    .bind(now)
    .fetch_one(c)
    .await?;
    Ok(Moved { rows, queues })
}

/// Whatever is in a row is claimed, be it one that nobody of us wrote: what makes no sense is the gate's to refuse.
pub async fn claim(c: &mut PgConnection, look: &Look<'_>, _now: Timestamp) -> sqlx::Result<Vec<Row>> {
    let rows: Vec<Columns> = sqlx::query_as(
        "WITH next AS MATERIALIZED (
             SELECT id FROM messaging_queue
             WHERE queue = $1 AND id > $5 AND (lease_until IS NULL OR lease_until <= now())
             ORDER BY queue, id LIMIT $3 FOR UPDATE SKIP LOCKED),
         claimed AS (
             UPDATE messaging_queue q SET lock_token = $2, lease_until = now() + $4 * interval '1 ms',
                 deliveries = GREATEST(0, LEAST(deliveries, 2147483646)) + 1
             FROM next WHERE q.id = next.id RETURNING q.*)
         SELECT c.id, CASE WHEN o.id IS NULL THEN c.message_id ELSE o.event_id::text END,
             COALESCE(c.routing_key, o.aggregate_type || '.' || o.event_type, ''),
             COALESCE(c.correlation_id, o.correlation_id), COALESCE(c.headers, o.headers, '{}'), COALESCE(c.body, o.body, ''),
             c.x_death, c.deliveries, COALESCE(o.kind = 'redrive', false)
         FROM claimed c LEFT JOIN messaging_outbox o ON o.id = c.outbox_ref",
    )
    .bind(look.queue)
    .bind(look.token)
    .bind(look.limit)
    .bind(millis(look.lease))
    .bind(look.after)
    .fetch_all(c)
    .await?;
    Ok(rows.into_iter().map(Row::from).collect())
}

pub async fn renew(
    c: &mut PgConnection,
    places: &Places,
    token: Uuid,
    lease: Duration,
    _now: Timestamp,
) -> sqlx::Result<()> {
    sqlx::query(
        "WITH bundles AS (
             UPDATE messaging_bundles SET lease_until = now() + $3 * interval '1 ms'
             WHERE id = ANY($4) AND lock_token = $2)
         UPDATE messaging_queue SET lease_until = now() + $3 * interval '1 ms'
         WHERE id = ANY($1) AND lock_token = $2",
    )
    .bind(&places.rows)
    .bind(token)
    .bind(millis(lease))
    .bind(&places.bundles)
    .execute(c)
    .await
    .map(drop)
}

/// Others may be at work on the rows that are held.
pub async fn free_leftovers(_c: &mut PgConnection) -> sqlx::Result<()> {
    Ok(())
}

pub async fn delete(c: &mut PgConnection, owed: &Owed) -> sqlx::Result<u64> {
    let mut settled = 0;
    for (sql, ids) in [
        ("DELETE FROM messaging_queue WHERE id = ANY($1) AND lock_token = ANY($2)", &owed.places.rows),
        ("DELETE FROM messaging_bundles WHERE id = ANY($1) AND lock_token = ANY($2)", &owed.places.bundles),
    ] {
        if !ids.is_empty() {
            settled += sqlx::query(sql).bind(ids).bind(&owed.tokens).execute(&mut *c).await?.rows_affected();
        }
    }
    Ok(settled)
}

pub async fn unpack(c: &mut PgConnection, queue: &str, _now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "WITH over AS MATERIALIZED (
             SELECT id FROM messaging_bundles WHERE queue = $1 AND lease_until <= now() ORDER BY id FOR UPDATE SKIP LOCKED),
         gone AS (DELETE FROM messaging_bundles b USING over WHERE b.id = over.id RETURNING b.*)
         INSERT INTO messaging_queue (queue, outbox_ref, enqueued_at, deliveries)
         SELECT queue, UNNEST(array_remove(outbox_refs, NULL)), enqueued_at, 1 FROM gone ORDER BY 2",
    )
    .bind(queue)
    .execute(c)
    .await
    .map(drop)
}

pub async fn take_out(c: &mut PgConnection, leaving: &Leaving<'_>, now: Timestamp) -> sqlx::Result<u64> {
    let left = sqlx::query(
        "INSERT INTO messaging_queue (queue, outbox_ref, x_death, enqueued_at)
         SELECT $5, b.outbox_refs[l.number + 1], l.x_death, CASE WHEN l.x_death IS NULL THEN b.enqueued_at ELSE $6 END
         FROM (SELECT * FROM messaging_bundles WHERE id = $1 AND lock_token = $2 FOR UPDATE) b
         CROSS JOIN UNNEST($3::bigint[], $4::text[]) AS l(number, x_death)
         WHERE b.outbox_refs[l.number + 1] IS NOT NULL ORDER BY l.number",
    )
    .bind(leaving.bundle)
    .bind(leaving.token)
    .bind(leaving.numbers)
    .bind(leaving.deaths)
    .bind(leaving.queue)
    .bind(now)
    .execute(&mut *c)
    .await?;
    sqlx::query(
        "UPDATE messaging_bundles SET outbox_refs = ARRAY(
             SELECT CASE WHEN number - 1 = ANY($3) THEN NULL ELSE outbox_ref END
             FROM UNNEST(outbox_refs) WITH ORDINALITY AS part(outbox_ref, number) ORDER BY number)
         WHERE id = $1 AND lock_token = $2",
    )
    .bind(leaving.bundle)
    .bind(leaving.token)
    .bind(leaving.numbers)
    .execute(c)
    .await?;
    Ok(left.rows_affected())
}

pub async fn give_back(c: &mut PgConnection, ids: &[i64], token: Uuid) -> sqlx::Result<u64> {
    sqlx::query(
        "UPDATE messaging_queue SET lock_token = NULL, lease_until = NULL, deliveries = deliveries - 1
         WHERE id = ANY($1) AND lock_token = $2",
    )
    .bind(ids)
    .bind(token)
    .execute(c)
    .await
    .map(|done| done.rows_affected())
}

pub async fn move_to(
    c: &mut PgConnection,
    ids: &[i64],
    token: Uuid,
    queue: &str,
    deaths: &[String],
    now: Timestamp,
) -> sqlx::Result<u64> {
    sqlx::query(
        "UPDATE messaging_queue q SET queue = $3, x_death = d.x_death, enqueued_at = $5, lock_token = NULL,
             lease_until = NULL, deliveries = 0
         FROM UNNEST($1::bigint[], $4::text[]) AS d(id, x_death)
         WHERE q.id = d.id AND q.lock_token = $2",
    )
    .bind(ids)
    .bind(token)
    .bind(queue)
    .bind(deaths)
    .bind(now)
    .execute(c)
    .await
    .map(|done| done.rows_affected())
}

pub async fn count(
    c: &mut PgConnection,
    queues: &[String],
    stale_after: Duration,
    _now: Timestamp,
) -> sqlx::Result<Vec<Depth>> {
    let rows: Vec<(String, i64, i64, Option<Timestamp>, i64)> = sqlx::query_as(
        "SELECT name,
             (SELECT count(*) FROM messaging_queue WHERE queue = name AND (lease_until IS NULL OR lease_until <= now()))
                 + COALESCE(b.ready, 0),
             (SELECT count(*) FROM messaging_queue WHERE queue = name AND lease_until > now())
                 + COALESCE(b.held, 0),
             LEAST(b.oldest, (SELECT min(enqueued_at) FROM messaging_queue WHERE queue = name)),
             (SELECT count(*) FROM messaging_subscriptions
              WHERE queue = name AND seen_at > now() - $2 * interval '1 ms')
         FROM UNNEST($1::text[]) AS name
         LEFT JOIN (SELECT queue, min(enqueued_at) AS oldest,
                 sum(cardinality(array_remove(outbox_refs, NULL))) FILTER (WHERE lease_until <= now()) AS ready,
                 sum(cardinality(array_remove(outbox_refs, NULL))) FILTER (WHERE lease_until > now()) AS held
             FROM messaging_bundles GROUP BY queue) AS b ON b.queue = name",
    )
    .bind(queues)
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
            stale: false,
        })
        .collect())
}

pub async fn beat(c: &mut PgConnection, subscription: Uuid, queue: &str, _now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "WITH gone AS (DELETE FROM messaging_subscriptions WHERE seen_at < now() - interval '1 hour')
         INSERT INTO messaging_subscriptions (id, queue, seen_at) VALUES ($1, $2, now())
         ON CONFLICT (id) DO UPDATE SET seen_at = now()",
    )
    .bind(subscription)
    .bind(queue)
    .execute(c)
    .await
    .map(drop)
}
