//! SQLite: a single writer, so a claim needs no lock but its transaction. Row ids travel as one JSON array.

use std::time::Duration;

use sqlx::types::Json;
use uuid::Uuid;

use super::{Depth, Leaving, Look, Moved, Owed, Places, Row, redriven_id};
use crate::clock::{Timestamp, millis};
use crate::db::sqlite::{SqliteConnection, query, query_as, query_scalar};

pub async fn move_due(c: &mut SqliteConnection, limit: i64, now: Timestamp) -> sqlx::Result<Moved> {
    // Postgres does this in one statement; SQLite's WITH takes no writes, so the batch is named by its row numbers.
    let (due, rows): (String, i64) = query_as(
        "SELECT json_group_array(seq), count(*) FROM (
             SELECT seq FROM messaging_outbox WHERE status IN ('pending', 'failed') AND available_at <= $2
             ORDER BY available_at LIMIT $1)",
    )
    .bind(limit)
    .bind(now)
    .fetch_one(&mut *c)
    .await?;
    if rows == 0 {
        return Ok(Moved::default());
    }
    query(
        "UPDATE messaging_outbox SET status = 'published', published_at = $2, claimed_by = NULL, last_error = NULL
         WHERE seq IN (SELECT value FROM json_each($1))",
    )
    .bind(&due)
    .bind(now)
    .execute(&mut *c)
    .await?;
    query(
        "INSERT INTO messaging_queue (queue, outbox_ref, enqueued_at)
         SELECT CASE o.target WHEN '' THEN b.queue ELSE o.target END, o.seq, $2
         FROM json_each($1) AS due
         CROSS JOIN messaging_outbox o ON o.seq = due.value
         LEFT JOIN messaging_bindings b
             ON o.target = '' AND b.routing_key = o.aggregate_type || '.' || o.event_type
         WHERE o.target <> '' OR b.queue IS NOT NULL",
    )
    .bind(due)
    .bind(now)
    .execute(&mut *c)
    .await?;
    // One statement of one writer: its rows are numbered without a gap, so those just written are the last ones. NOT
    // INDEXED: by row number, rather than over the whole backlog by queue.
    let queues: Vec<String> = query_scalar(
        "SELECT DISTINCT queue FROM messaging_queue NOT INDEXED
         WHERE changes() > 0 AND id > (SELECT last_insert_rowid()) - changes()",
    )
    .fetch_all(c)
    .await?;
    Ok(Moved { rows, queues })
}

/// Whatever is in a row is claimed, be it one that nobody of us wrote: what makes no sense is the gate's to refuse.
pub async fn claim(c: &mut SqliteConnection, look: &Look<'_>, now: Timestamp) -> sqlx::Result<Vec<Row>> {
    let claimed = query(
        "UPDATE messaging_queue SET lock_token = $2, lease_until = $6, deliveries = max(0, min(deliveries, 2147483646)) + 1
         WHERE id IN (SELECT id FROM messaging_queue
             WHERE queue = $1 AND id > $3 AND (lease_until IS NULL OR lease_until <= $5) ORDER BY id LIMIT $4)",
    )
    .bind(look.queue)
    .bind(look.token)
    .bind(look.after)
    .bind(look.limit)
    .bind(now)
    .bind(now.plus(look.lease))
    .execute(&mut *c)
    .await?;
    if claimed.rows_affected() == 0 {
        return Ok(Vec::new());
    }
    let found: Vec<Columns> = query_as(
        "SELECT q.id,
             CAST(CASE WHEN o.seq IS NULL THEN q.message_id ELSE lower(hex(o.event_id)) END AS BLOB),
             CAST(COALESCE(q.routing_key, o.aggregate_type || '.' || o.event_type, '') AS BLOB),
             CAST(COALESCE(q.correlation_id, o.correlation_id) AS BLOB),
             CAST(COALESCE(q.headers, o.headers, '{}') AS BLOB),
             COALESCE(q.body, o.body, x''), CAST(q.x_death AS BLOB), q.deliveries, COALESCE(o.kind = 'redrive', false)
         FROM (SELECT * FROM messaging_queue WHERE queue = $1 AND id > $3 AND lock_token = $2 ORDER BY id) AS q
         LEFT JOIN messaging_outbox o ON o.seq = q.outbox_ref",
    )
    .bind(look.queue)
    .bind(look.token)
    .bind(look.after)
    .fetch_all(c)
    .await?;
    Ok(found.into_iter().map(row).collect())
}

/// Texts as bytes: those of SQLite may be no UTF-8.
type Columns = (i64, Option<Vec<u8>>, Vec<u8>, Option<Vec<u8>>, Vec<u8>, Vec<u8>, Option<Vec<u8>>, i32, bool);

fn row(columns: Columns) -> Row {
    let (id, message_id, routing_key, correlation_id, headers, body, x_death, deliveries, is_redrive) = columns;
    let text =
        |bytes| String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
    let (message_id, routing_key, headers) = (message_id.map(text), text(routing_key), text(headers));
    let (correlation_id, x_death) = (correlation_id.map(text), x_death.map(text));
    let message_id = if is_redrive { redriven_id(&headers) } else { message_id };
    // An id of our own comes without hyphens; a foreign one stays as it is.
    let ours = message_id.as_deref().and_then(|id| Uuid::try_parse(id).ok());
    let message_id = ours.map(|id| id.to_string()).or(message_id);
    Row { id, message_id, routing_key, correlation_id, headers: headers.into(), body: body.into(), x_death, deliveries }
}

pub async fn renew(
    c: &mut SqliteConnection,
    places: &Places,
    token: Uuid,
    lease: Duration,
    now: Timestamp,
) -> sqlx::Result<()> {
    for (sql, ids) in [
        (
            "UPDATE messaging_queue SET lease_until = $3
             WHERE id IN (SELECT value FROM json_each($1)) AND lock_token = $2",
            &places.rows,
        ),
        (
            "UPDATE messaging_bundles SET lease_until = $3
             WHERE id IN (SELECT value FROM json_each($1)) AND lock_token = $2",
            &places.bundles,
        ),
    ] {
        query(sql).bind(Json(ids)).bind(token).bind(now.plus(lease)).execute(&mut *c).await?;
    }
    Ok(())
}

pub async fn delete(c: &mut SqliteConnection, owed: &Owed) -> sqlx::Result<u64> {
    let tokens: Vec<_> = owed.tokens.iter().map(|token| token.simple()).collect();
    let mut settled = 0;
    for (sql, ids) in [
        (
            "DELETE FROM messaging_queue
             WHERE id IN (SELECT value FROM json_each($1)) AND lock_token IN (SELECT unhex(value) FROM json_each($2))",
            &owed.places.rows,
        ),
        (
            "DELETE FROM messaging_bundles
             WHERE id IN (SELECT value FROM json_each($1)) AND lock_token IN (SELECT unhex(value) FROM json_each($2))",
            &owed.places.bundles,
        ),
    ] {
        if !ids.is_empty() {
            settled += query(sql).bind(Json(ids)).bind(Json(&tokens)).execute(&mut *c).await?.rows_affected();
        }
    }
    Ok(settled)
}

pub async fn unpack(c: &mut SqliteConnection, queue: &str, now: Timestamp) -> sqlx::Result<()> {
    // One that is no list of rows becomes a message itself, for the gate to refuse.
    query(
        "WITH over AS MATERIALIZED (
             SELECT queue, outbox_refs, enqueued_at, CASE WHEN json_valid(outbox_refs) THEN NOT EXISTS (
                 SELECT 1 FROM json_each(outbox_refs) WHERE typeof(value) NOT IN ('integer', 'null')) END AS is_list
             FROM messaging_bundles WHERE queue = $1 AND lease_until <= $2)
         INSERT INTO messaging_queue (queue, outbox_ref, body, enqueued_at, deliveries)
         SELECT queue, part.value, NULL, enqueued_at, 1
         FROM over, json_each(CASE WHEN is_list THEN outbox_refs ELSE '[]' END) AS part WHERE part.value IS NOT NULL
         UNION ALL SELECT queue, NULL, CAST(outbox_refs AS BLOB), enqueued_at, 1 FROM over WHERE is_list IS NOT TRUE
         ORDER BY 2",
    )
    .bind(queue)
    .bind(now)
    .execute(&mut *c)
    .await?;
    query("DELETE FROM messaging_bundles WHERE queue = $1 AND lease_until <= $2")
        .bind(queue)
        .bind(now)
        .execute(c)
        .await
        .map(drop)
}

pub async fn take_out(c: &mut SqliteConnection, leaving: &Leaving<'_>, now: Timestamp) -> sqlx::Result<u64> {
    let leaves: Vec<_> = leaving.numbers.iter().zip(leaving.deaths).collect();
    let left = query(
        "INSERT INTO messaging_queue (queue, outbox_ref, x_death, enqueued_at)
         SELECT $4, b.outbox_refs ->> (l.value ->> 0), l.value ->> 1,
             CASE WHEN l.value ->> 1 IS NULL THEN b.enqueued_at ELSE $5 END
         FROM messaging_bundles b, json_each($3) AS l
         WHERE b.id = $1 AND b.lock_token = $2 AND b.outbox_refs ->> (l.value ->> 0) IS NOT NULL
         ORDER BY l.value ->> 0",
    )
    .bind(leaving.bundle)
    .bind(leaving.token)
    .bind(Json(leaves))
    .bind(leaving.queue)
    .bind(now)
    .execute(&mut *c)
    .await?;
    query(
        "UPDATE messaging_bundles SET outbox_refs = (
             SELECT json_group_array(CASE WHEN key IN (SELECT value FROM json_each($3)) THEN NULL ELSE value END)
             FROM json_each(outbox_refs))
         WHERE id = $1 AND lock_token = $2",
    )
    .bind(leaving.bundle)
    .bind(leaving.token)
    .bind(Json(leaving.numbers))
    .execute(c)
    .await?;
    Ok(left.rows_affected())
}

pub async fn free_leftovers(c: &mut SqliteConnection) -> sqlx::Result<()> {
    query("UPDATE messaging_queue SET lock_token = NULL, lease_until = NULL WHERE lock_token IS NOT NULL")
        .execute(&mut *c)
        .await?;
    query("UPDATE messaging_bundles SET lease_until = 0").execute(c).await.map(drop)
}

pub async fn give_back(c: &mut SqliteConnection, ids: &[i64], token: Uuid) -> sqlx::Result<u64> {
    query(
        "UPDATE messaging_queue SET lock_token = NULL, lease_until = NULL, deliveries = deliveries - 1
         WHERE id IN (SELECT value FROM json_each($1)) AND lock_token = $2",
    )
    .bind(Json(ids))
    .bind(token)
    .execute(c)
    .await
    .map(|done| done.rows_affected())
}

pub async fn move_to(
    c: &mut SqliteConnection,
    ids: &[i64],
    token: Uuid,
    queue: &str,
    deaths: &[String],
    now: Timestamp,
) -> sqlx::Result<u64> {
    let rows: Vec<_> = ids.iter().zip(deaths).collect();
    query(
        "UPDATE messaging_queue SET queue = $3, x_death = d.value ->> 1, enqueued_at = $4, lock_token = NULL,
             lease_until = NULL, deliveries = 0
         FROM jsonb_each($1) AS d
         WHERE messaging_queue.id = d.value ->> 0 AND lock_token = $2",
    )
    .bind(Json(rows))
    .bind(token)
    .bind(queue)
    .bind(now)
    .execute(c)
    .await
    .map(|done| done.rows_affected())
}

pub async fn count(
    c: &mut SqliteConnection,
    queues: &[String],
    stale_after: Duration,
    now: Timestamp,
) -> sqlx::Result<Vec<Depth>> {
    let rows: Vec<(String, i64, i64, Option<Timestamp>, i64)> = query_as(
        "SELECT name,
             (SELECT count(*) FROM messaging_queue WHERE queue = name AND (lease_until IS NULL OR lease_until <= $2))
                 + COALESCE(b.ready, 0),
             (SELECT count(*) FROM messaging_queue WHERE queue = name AND lease_until > $2)
                 + COALESCE(b.held, 0),
             (SELECT min(at) FROM (SELECT b.oldest AS at UNION ALL
                 SELECT min(enqueued_at) FROM messaging_queue WHERE queue = name)),
             (SELECT count(*) FROM messaging_subscriptions WHERE queue = name AND seen_at > $2 - $3)
         FROM (SELECT value AS name FROM jsonb_each($1))
         LEFT JOIN (SELECT queue, min(enqueued_at) AS oldest,
                 sum((SELECT count(value) FROM json_each(refs))) FILTER (WHERE lease_until <= $2) AS ready,
                 sum((SELECT count(value) FROM json_each(refs))) FILTER (WHERE lease_until > $2) AS held
             FROM (SELECT *, CASE WHEN json_valid(outbox_refs) THEN outbox_refs ELSE '[0]' END AS refs
                 FROM messaging_bundles) GROUP BY queue) AS b ON b.queue = name",
    )
    .bind(Json(queues))
    .bind(now)
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

pub async fn beat(c: &mut SqliteConnection, subscription: Uuid, queue: &str, now: Timestamp) -> sqlx::Result<()> {
    query("DELETE FROM messaging_subscriptions WHERE seen_at < $1 - 3600000").bind(now).execute(&mut *c).await?;
    query(
        "INSERT INTO messaging_subscriptions (id, queue, seen_at) VALUES ($1, $2, $3)
         ON CONFLICT (id) DO UPDATE SET seen_at = $3",
    )
    .bind(subscription)
    .bind(queue)
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}
