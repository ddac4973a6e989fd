use std::time::Duration;

use sqlx::types::Json;
use uuid::Uuid;

use super::{Answer, Key, Order, OrderId, StandingColumns, Status, StepKey, Taken};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::sqlite::{SqliteConnection, query, query_as, query_scalar};

pub async fn insert_many(c: &mut SqliteConnection, orders: &[Order]) -> sqlx::Result<()> {
    c.insert_each(
        "orders_orders (group_id, id, subsidiary_id, number, customer_id, status, currency, total_minor,
             correlation_id, created_at, updated_at)",
        orders.iter().map(|order| {
            (
                &order.group_id,
                order.id.0.as_bytes(),
                &order.subsidiary_id,
                &order.number,
                &order.customer_id,
                order.status.as_str(),
                &order.currency,
                order.total_minor,
                &order.correlation_id,
                order.created_at,
                order.created_at,
            )
        }),
        "",
    )?;
    let lines = orders.iter().flat_map(|order| {
        order.items.iter().zip(1..).map(|(item, line): (_, i64)| {
            let (quantity, price) = (item.quantity.get(), item.unit_price_minor.get());
            (&order.group_id, order.id.0.as_bytes(), line, item.sku.as_str(), quantity, price)
        })
    });
    c.insert_each("orders_lines (group_id, order_id, line, sku, quantity, unit_price_minor)", lines, "")
}

pub async fn insert_keys(c: &mut SqliteConnection, keys: &[Key<'_>], now: Timestamp) -> sqlx::Result<()> {
    let mut fingerprints = Vec::with_capacity(keys.len() * 32);
    let rows: Vec<_> = keys
        .iter()
        .map(|key| {
            fingerprints.extend_from_slice(&key.first_use.fingerprint);
            (key.group_id, key.route, key.key, key.first_use.order_id.0.simple())
        })
        .collect();
    query(
        // `WHERE true`: without it, ON CONFLICT would parse as a join condition
        "INSERT INTO orders_idempotency (group_id, route, key, fingerprint, order_id, created_at)
         SELECT value ->> 0, value ->> 1, value ->> 2, substr($2, jsonb_each.key * 32 + 1, 32), unhex(value ->> 3), $3
         FROM jsonb_each($1) WHERE true ON CONFLICT DO NOTHING",
    )
    .bind(Json(rows))
    .bind(fingerprints)
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn select_keys(
    c: &mut SqliteConnection,
    keys: &[Key<'_>],
) -> sqlx::Result<Vec<(String, String, Vec<u8>, Uuid)>> {
    let rows: Vec<_> = keys.iter().map(|key| (key.group_id, key.route, key.key)).collect();
    query_as(
        "SELECT i.group_id, i.key, i.fingerprint, i.order_id FROM jsonb_each($1) AS wanted
         CROSS JOIN orders_idempotency i ON i.group_id = wanted.value ->> 0 AND i.route = wanted.value ->> 1
             AND i.key = wanted.value ->> 2",
    )
    .bind(Json(rows))
    .fetch_all(c)
    .await
}

pub async fn answer_many(
    c: &mut SqliteConnection,
    answers: &[Answer],
    hold: Duration,
    now: Timestamp,
) -> sqlx::Result<u64> {
    let held_until = now.plus(hold);
    let moved = c.execute_each(
        "UPDATE orders_orders SET status = ?3, reason = ?4, updated_at = ?5,
             hold_expires_at = CASE ?3 WHEN 'reserved' THEN ?6 END
         WHERE group_id = ?1 AND id = ?2 AND status = 'placed'",
        answers.iter().map(|answer| {
            (&answer.group_id, answer.order_id.0.as_bytes(), answer.status.as_str(), &answer.reason, now, held_until)
        }),
    )?;
    let held = answers.iter().zip(&moved).filter(|(answer, moved)| answer.status == Status::Reserved && **moved > 0);
    c.insert_each(
        "orders_holds (expires_at, order_id, group_id)",
        held.map(|(answer, _)| (held_until, answer.order_id.0.as_bytes(), &answer.group_id)),
        "",
    )?;
    Ok(moved.iter().sum())
}

/// The writer's transaction is the lock.
pub async fn select_locked(c: &mut SqliteConnection, orders: &[(&str, OrderId)]) -> sqlx::Result<Vec<StandingColumns>> {
    let rows: Vec<_> = orders.iter().map(|(group_id, id)| (group_id, id.0.simple())).collect();
    query_as(
        "SELECT o.group_id, o.id, o.number, o.subsidiary_id, o.correlation_id, o.status, o.customer_id, o.total_minor,
             o.currency, o.updated_at
         FROM jsonb_each($1) AS wanted
         CROSS JOIN orders_orders o ON o.group_id = wanted.value ->> 0 AND o.id = unhex(wanted.value ->> 1)",
    )
    .bind(Json(rows))
    .fetch_all(c)
    .await
}

pub async fn select_step_keys(
    c: &mut SqliteConnection,
    keys: &[StepKey<'_>],
) -> sqlx::Result<Vec<(String, String, String, Vec<u8>)>> {
    let rows: Vec<_> = keys.iter().map(|key| (key.group_id, key.route, key.key)).collect();
    query_as(
        "SELECT i.group_id, i.route, i.key, i.fingerprint FROM jsonb_each($1) AS wanted
         CROSS JOIN orders_idempotency i ON i.group_id = wanted.value ->> 0 AND i.route = wanted.value ->> 1
             AND i.key = wanted.value ->> 2",
    )
    .bind(Json(rows))
    .fetch_all(c)
    .await
}

pub async fn write_step_keys(c: &mut SqliteConnection, keys: &[StepKey<'_>], now: Timestamp) -> sqlx::Result<()> {
    let mut fingerprints = Vec::with_capacity(keys.len() * 32);
    let rows: Vec<_> = keys
        .iter()
        .map(|key| {
            fingerprints.extend_from_slice(&key.fingerprint);
            (key.group_id, key.route, key.key, key.order_id.0.simple())
        })
        .collect();
    query(
        "INSERT INTO orders_idempotency (group_id, route, key, fingerprint, order_id, created_at)
         SELECT value ->> 0, value ->> 1, value ->> 2, substr($2, jsonb_each.key * 32 + 1, 32), unhex(value ->> 3), $3
         FROM jsonb_each($1)",
    )
    .bind(Json(rows))
    .bind(fingerprints)
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn move_many(c: &mut SqliteConnection, taken: &[Taken<'_>], now: Timestamp) -> sqlx::Result<u64> {
    let rows: Vec<_> = taken
        .iter()
        .map(|step| (step.group_id, step.id.0.simple(), step.from.as_str(), step.to.as_str(), step.reason))
        .collect();
    query(
        "DELETE FROM orders_holds WHERE (expires_at, order_id) IN (
             SELECT o.hold_expires_at, o.id FROM jsonb_each($1) AS t
             CROSS JOIN orders_orders o ON o.group_id = t.value ->> 0 AND o.id = unhex(t.value ->> 1)
             WHERE o.status = t.value ->> 2)",
    )
    .bind(Json(&rows))
    .execute(&mut *c)
    .await?;
    query(
        "UPDATE orders_orders SET status = t.value ->> 3, reason = t.value ->> 4, updated_at = $2,
             hold_expires_at = NULL
         FROM jsonb_each($1) AS t
         WHERE group_id = t.value ->> 0 AND orders_orders.id = unhex(t.value ->> 1) AND status = t.value ->> 2",
    )
    .bind(Json(rows))
    .bind(now)
    .execute(c)
    .await
    .map(|done| done.rows_affected())
}

pub async fn any_hold_over(c: &mut SqliteConnection, now: Timestamp) -> sqlx::Result<bool> {
    query_scalar("SELECT EXISTS (SELECT 1 FROM orders_holds WHERE expires_at <= $1)").bind(now).fetch_one(c).await
}

pub async fn end_holds(
    c: &mut SqliteConnection,
    limit: i64,
    reason: Option<&str>,
    now: Timestamp,
) -> sqlx::Result<Vec<StandingColumns>> {
    let ended = query_as(
        "UPDATE orders_orders SET status = 'expired', reason = $2, updated_at = $3
         WHERE status = 'reserved' AND (group_id, id) IN (
             SELECT group_id, order_id FROM orders_holds WHERE expires_at <= $3 ORDER BY expires_at LIMIT $1)
         RETURNING group_id, id, number, subsidiary_id, correlation_id, status, customer_id, total_minor, currency,
             updated_at",
    )
    .bind(limit)
    .bind(reason)
    .bind(now)
    .fetch_all(&mut *c)
    .await?;
    query(
        "DELETE FROM orders_holds WHERE (expires_at, order_id) IN (
             SELECT expires_at, order_id FROM orders_holds WHERE expires_at <= $2 ORDER BY expires_at LIMIT $1)",
    )
    .bind(limit)
    .bind(now)
    .execute(c)
    .await?;
    Ok(ended)
}

pub async fn select_lines(
    c: &mut SqliteConnection,
    group_id: &str,
    orders: &[Uuid],
) -> sqlx::Result<Vec<(Uuid, String, i64, i64)>> {
    query_as(
        "SELECT order_id, sku, quantity, unit_price_minor FROM orders_lines
         WHERE group_id = $1 AND order_id IN (SELECT unhex(value) FROM json_each($2)) ORDER BY order_id, line",
    )
    .bind(group_id)
    .bind(Json(orders.iter().map(|id| id.simple()).collect::<Vec<_>>()))
    .fetch_all(c)
    .await
}
