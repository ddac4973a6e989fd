//! Postgres: a hold ends by the database's own clock, so instances with skewed clocks agree.

use std::time::Duration;

use sqlx::PgConnection;
use uuid::Uuid;

use super::{Answer, Item, Key, Order, OrderId, StandingColumns, StepKey, Taken};
use stockade_kernel::clock::{Timestamp, millis};
use stockade_kernel::db::Column;

pub async fn insert_many(c: &mut PgConnection, orders: &[Order]) -> sqlx::Result<()> {
    let text = |of: fn(&Order) -> &str| orders.iter().map(of).collect::<Vec<&str>>();
    let lines: Vec<(&Order, i32, &Item)> = orders
        .iter()
        .flat_map(|order| order.items.iter().zip(1..).map(move |(item, line)| (order, line, item)))
        .collect();
    let group_id = Column::of(orders.iter().map(|order| order.group_id.as_str()));
    let subsidiary_id = Column::of(orders.iter().map(|order| order.subsidiary_id.as_deref()));
    let status = Column::of(orders.iter().map(|order| order.status.as_str()));
    let currency = Column::of(orders.iter().map(|order| order.currency.as_str()));
    let line_group_id = Column::of(lines.iter().map(|(order, ..)| order.group_id.as_str()));
    sqlx::query(
        "WITH placed AS (
             INSERT INTO orders_orders (group_id, id, subsidiary_id, number, customer_id, status, currency, total_minor,
                 correlation_id, created_at, updated_at)
             SELECT COALESCE(group_id, $2), id, COALESCE(subsidiary_id, $5), number, customer_id, COALESCE(status, $9),
                 COALESCE(currency, $11), total_minor, correlation_id, created_at, created_at
             FROM UNNEST($1::text[], $3::uuid[], $4::text[], $6::text[], $7::text[], $8::text[], $10::text[],
                 $12::bigint[], $13::text[], $14::timestamptz[])
                 AS row(group_id, id, subsidiary_id, number, customer_id, status, currency, total_minor, correlation_id,
                     created_at))
         INSERT INTO orders_lines (group_id, order_id, line, sku, quantity, unit_price_minor)
         SELECT COALESCE(group_id, $16), order_id, line, sku, quantity, unit_price_minor
         FROM UNNEST($15::text[], $17::uuid[], $18::int[], $19::text[], $20::bigint[], $21::bigint[])
             AS row(group_id, order_id, line, sku, quantity, unit_price_minor)",
    )
    .bind(group_id.each)
    .bind(group_id.shared)
    .bind(orders.iter().map(|order| order.id.0).collect::<Vec<_>>())
    .bind(subsidiary_id.each)
    .bind(subsidiary_id.shared)
    .bind(text(|order| &order.number))
    .bind(text(|order| &order.customer_id))
    .bind(status.each)
    .bind(status.shared)
    .bind(currency.each)
    .bind(currency.shared)
    .bind(orders.iter().map(|order| order.total_minor).collect::<Vec<_>>())
    .bind(text(|order| &order.correlation_id))
    .bind(orders.iter().map(|order| order.created_at).collect::<Vec<_>>())
    .bind(line_group_id.each)
    .bind(line_group_id.shared)
    .bind(lines.iter().map(|(order, _, _)| order.id.0).collect::<Vec<_>>())
    .bind(lines.iter().map(|(_, line, _)| *line).collect::<Vec<_>>())
    .bind(lines.iter().map(|(_, _, item)| item.sku.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|(_, _, item)| item.quantity.get()).collect::<Vec<_>>())
    .bind(lines.iter().map(|(_, _, item)| item.unit_price_minor.get()).collect::<Vec<_>>())
    .execute(c)
    .await
    .map(drop)
}

pub async fn insert_keys(c: &mut PgConnection, keys: &[Key<'_>], now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        // The update changes nothing: it locks a key that exists, so retention cannot delete it before it is read.
        "INSERT INTO orders_idempotency (group_id, route, key, fingerprint, order_id, created_at)
         SELECT group_id, route, key, fingerprint, order_id, $6
         FROM UNNEST($1::text[], $2::text[], $3::text[], $4::bytea[], $5::uuid[])
             AS row(group_id, route, key, fingerprint, order_id)
         ON CONFLICT (group_id, route, key) DO UPDATE SET created_at = orders_idempotency.created_at",
    )
    .bind(keys.iter().map(|key| key.group_id).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.route).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.key).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.first_use.fingerprint.as_slice()).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.first_use.order_id.0).collect::<Vec<_>>())
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn select_keys(c: &mut PgConnection, keys: &[Key<'_>]) -> sqlx::Result<Vec<(String, String, Vec<u8>, Uuid)>> {
    sqlx::query_as(
        "SELECT group_id, key, fingerprint, order_id FROM orders_idempotency
         JOIN UNNEST($1::text[], $2::text[], $3::text[]) AS wanted(group_id, route, key) USING (group_id, route, key)",
    )
    .bind(keys.iter().map(|key| key.group_id).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.route).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.key).collect::<Vec<_>>())
    .fetch_all(c)
    .await
}

pub async fn answer_many(
    c: &mut PgConnection,
    answers: &[Answer],
    hold: Duration,
    now: Timestamp,
) -> sqlx::Result<u64> {
    let group_id = Column::of(answers.iter().map(|answer| answer.group_id.as_str()));
    let status = Column::of(answers.iter().map(|answer| answer.status.as_str()));
    let reason = Column::of(answers.iter().map(|answer| answer.reason.as_deref()));
    let moved: i64 = sqlx::query_scalar(
        // `|| ''` hides the status from the planner: its statistics may say that no order is placed, taken just before
        // thousands were, and it would then compare each of those with each answer.
        "WITH moved AS (
             UPDATE orders_orders o SET status = a.status, reason = a.reason, updated_at = $8,
                 hold_expires_at = CASE a.status WHEN 'reserved' THEN now() + $9 * interval '1 ms' END
             FROM (SELECT COALESCE(group_id, $2) AS group_id, id, COALESCE(status, $5) AS status,
                     COALESCE(reason, $7) AS reason
                 FROM UNNEST($1::text[], $3::uuid[], $4::text[], $6::text[]) AS row(group_id, id, status, reason)) AS a
             WHERE o.group_id = a.group_id AND o.id = a.id AND o.status || '' = 'placed'
             RETURNING o.group_id, o.id, o.hold_expires_at),
         held AS (
             INSERT INTO orders_holds (expires_at, order_id, group_id)
             SELECT hold_expires_at, id, group_id FROM moved WHERE hold_expires_at IS NOT NULL)
         SELECT count(*) FROM moved",
    )
    .bind(group_id.each)
    .bind(group_id.shared)
    .bind(answers.iter().map(|answer| answer.order_id.0).collect::<Vec<_>>())
    .bind(status.each)
    .bind(status.shared)
    .bind(reason.each)
    .bind(reason.shared)
    .bind(now)
    .bind(millis(hold))
    .fetch_one(c)
    .await?;
    Ok(moved.unsigned_abs())
}

pub async fn select_locked(c: &mut PgConnection, orders: &[(&str, OrderId)]) -> sqlx::Result<Vec<StandingColumns>> {
    sqlx::query_as(
        "SELECT o.group_id, o.id, o.number, o.subsidiary_id, o.correlation_id, o.status, o.customer_id, o.total_minor,
             o.currency, o.updated_at
         FROM orders_orders o
         JOIN UNNEST($1::text[], $2::uuid[]) AS wanted(group_id, id)
             ON o.group_id = wanted.group_id AND o.id = wanted.id
         ORDER BY o.group_id, o.id FOR UPDATE OF o",
    )
    .bind(orders.iter().map(|(group_id, _)| *group_id).collect::<Vec<_>>())
    .bind(orders.iter().map(|(_, id)| id.0).collect::<Vec<_>>())
    .fetch_all(c)
    .await
}

pub async fn select_step_keys(
    c: &mut PgConnection,
    keys: &[StepKey<'_>],
) -> sqlx::Result<Vec<(String, String, String, Vec<u8>)>> {
    sqlx::query_as(
        "SELECT group_id, route, key, fingerprint FROM orders_idempotency
         JOIN UNNEST($1::text[], $2::text[], $3::text[]) AS wanted(group_id, route, key) USING (group_id, route, key)",
    )
    .bind(keys.iter().map(|key| key.group_id).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.route).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.key).collect::<Vec<_>>())
    .fetch_all(c)
    .await
}

pub async fn write_step_keys(c: &mut PgConnection, keys: &[StepKey<'_>], now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO orders_idempotency (group_id, route, key, fingerprint, order_id, created_at)
         SELECT group_id, route, key, fingerprint, order_id, $6
         FROM UNNEST($1::text[], $2::text[], $3::text[], $4::bytea[], $5::uuid[])
             AS row(group_id, route, key, fingerprint, order_id)
         ORDER BY group_id, route, key",
    )
    .bind(keys.iter().map(|key| key.group_id).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.route).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.key).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.fingerprint.as_slice()).collect::<Vec<_>>())
    .bind(keys.iter().map(|key| key.order_id.0).collect::<Vec<_>>())
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn move_many(c: &mut PgConnection, taken: &[Taken<'_>], now: Timestamp) -> sqlx::Result<u64> {
    let moved: i64 = sqlx::query_scalar(
        "WITH moved AS (
             UPDATE orders_orders o SET status = t.status, reason = t.reason, updated_at = $6, hold_expires_at = NULL
             FROM UNNEST($1::text[], $2::uuid[], $3::text[], $4::text[], $5::text[]) AS t(group_id, id, was, status, reason)
             JOIN orders_orders held ON held.group_id = t.group_id AND held.id = t.id
             WHERE o.group_id = t.group_id AND o.id = t.id AND o.status = t.was
             RETURNING o.id, held.hold_expires_at),
         ended AS (
             DELETE FROM orders_holds h USING moved WHERE h.expires_at = moved.hold_expires_at AND h.order_id = moved.id)
         SELECT count(*) FROM moved",
    )
    .bind(taken.iter().map(|step| step.group_id).collect::<Vec<_>>())
    .bind(taken.iter().map(|step| step.id.0).collect::<Vec<_>>())
    .bind(taken.iter().map(|step| step.from.as_str()).collect::<Vec<_>>())
    .bind(taken.iter().map(|step| step.to.as_str()).collect::<Vec<_>>())
    .bind(taken.iter().map(|step| step.reason).collect::<Vec<_>>())
    .bind(now)
    .fetch_one(c)
    .await?;
    Ok(moved.unsigned_abs())
}

pub async fn any_hold_over(c: &mut PgConnection, _now: Timestamp) -> sqlx::Result<bool> {
    // By the one that ends first, which an index knows: asked whether any is over, Postgres would guess that a third are, and
    // read them all to find none.
    sqlx::query_scalar("SELECT COALESCE((SELECT min(expires_at) FROM orders_holds) <= now(), false)").fetch_one(c).await
}

pub async fn end_holds(
    c: &mut PgConnection,
    limit: i64,
    reason: Option<&str>,
    now: Timestamp,
) -> sqlx::Result<Vec<StandingColumns>> {
    sqlx::query_as(
        "WITH due AS MATERIALIZED (
             SELECT h.expires_at, h.order_id, h.group_id FROM orders_holds h
             JOIN orders_orders o ON o.group_id = h.group_id AND o.id = h.order_id
             WHERE h.expires_at <= now() ORDER BY h.expires_at LIMIT $1 FOR UPDATE SKIP LOCKED),
         ended AS (
             DELETE FROM orders_holds h USING due WHERE h.expires_at = due.expires_at AND h.order_id = due.order_id)
         UPDATE orders_orders o SET status = 'expired', reason = $2, updated_at = $3
         FROM due WHERE o.group_id = due.group_id AND o.id = due.order_id AND o.status = 'reserved'
         RETURNING o.group_id, o.id, o.number, o.subsidiary_id, o.correlation_id, o.status, o.customer_id,
             o.total_minor, o.currency, o.updated_at",
    )
    .bind(limit)
    .bind(reason)
    .bind(now)
    .fetch_all(c)
    .await
}

pub async fn select_lines(
    c: &mut PgConnection,
    group_id: &str,
    orders: &[Uuid],
) -> sqlx::Result<Vec<(Uuid, String, i64, i64)>> {
    sqlx::query_as(
        "SELECT order_id, sku, quantity, unit_price_minor FROM orders_lines
         WHERE group_id = $1 AND order_id = ANY($2) ORDER BY order_id, line",
    )
    .bind(group_id)
    .bind(orders)
    .fetch_all(c)
    .await
}
