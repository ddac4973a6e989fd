use sqlx::PgConnection;
use uuid::Uuid;

use super::{Answer, Item, Key, Order};
use crate::clock::Timestamp;

pub async fn insert_many(c: &mut PgConnection, orders: &[Order]) -> sqlx::Result<()> {
    let text = |of: fn(&Order) -> &str| orders.iter().map(of).collect::<Vec<&str>>();
    let lines: Vec<(&Order, i32, &Item)> = orders
        .iter()
        .flat_map(|order| order.items.iter().zip(1..).map(move |(item, line)| (order, line, item)))
        .collect();
    sqlx::query(
        "WITH placed AS (
             INSERT INTO orders_orders (group_id, id, subsidiary_id, number, customer_id, status, currency, total_minor,
                 correlation_id, created_at, updated_at)
             SELECT group_id, id, subsidiary_id, number, customer_id, status, currency, total_minor, correlation_id,
                 created_at, created_at
             FROM UNNEST($1::text[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
                 $8::bigint[], $9::text[], $10::timestamptz[])
                 AS row(group_id, id, subsidiary_id, number, customer_id, status, currency, total_minor, correlation_id,
                     created_at))
         INSERT INTO orders_lines (group_id, order_id, line, sku, quantity, unit_price_minor)
         SELECT * FROM UNNEST($11::text[], $12::uuid[], $13::int[], $14::text[], $15::bigint[], $16::bigint[])",
    )
    .bind(text(|order| &order.group_id))
    .bind(orders.iter().map(|order| order.id.0).collect::<Vec<_>>())
    .bind(orders.iter().map(|order| order.subsidiary_id.as_deref()).collect::<Vec<_>>())
    .bind(text(|order| &order.number))
    .bind(text(|order| &order.customer_id))
    .bind(text(|order| order.status.as_str()))
    .bind(text(|order| &order.currency))
    .bind(orders.iter().map(|order| order.total_minor).collect::<Vec<_>>())
    .bind(text(|order| &order.correlation_id))
    .bind(orders.iter().map(|order| order.created_at).collect::<Vec<_>>())
    .bind(lines.iter().map(|(order, _, _)| order.group_id.as_str()).collect::<Vec<_>>())
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
        "INSERT INTO orders_idempotency (group_id, route, key, fingerprint, order_id, created_at)
         SELECT group_id, route, key, fingerprint, order_id, $6
         FROM UNNEST($1::text[], $2::text[], $3::text[], $4::bytea[], $5::uuid[])
             AS row(group_id, route, key, fingerprint, order_id)
         ON CONFLICT DO NOTHING",
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

pub async fn answer_many(c: &mut PgConnection, answers: &[Answer], now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE orders_orders o SET status = a.status, reason = a.reason, updated_at = $5
         FROM UNNEST($1::text[], $2::uuid[], $3::text[], $4::text[]) AS a(group_id, id, status, reason)
         WHERE o.group_id = a.group_id AND o.id = a.id AND o.status = 'placed'",
    )
    .bind(answers.iter().map(|answer| answer.group_id.as_str()).collect::<Vec<_>>())
    .bind(answers.iter().map(|answer| answer.order_id.0).collect::<Vec<_>>())
    .bind(answers.iter().map(|answer| answer.status.as_str()).collect::<Vec<_>>())
    .bind(answers.iter().map(|answer| answer.reason.as_deref()).collect::<Vec<_>>())
    .bind(now)
    .execute(c)
    .await
    .map(drop)
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
