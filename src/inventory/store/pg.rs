use sqlx::PgConnection;
use uuid::Uuid;

use super::{NewReservation, ShelfKey, StockColumns};
use crate::clock::Timestamp;
use crate::orders::events::Sku;

pub async fn select_reserved(c: &mut PgConnection, orders: &[(&str, Uuid)]) -> sqlx::Result<Vec<(String, Uuid)>> {
    sqlx::query_as(
        "SELECT group_id, order_id FROM inventory_reservations
         JOIN UNNEST($1::text[], $2::uuid[]) AS wanted(group_id, order_id) USING (group_id, order_id)",
    )
    .bind(orders.iter().map(|(group_id, _)| *group_id).collect::<Vec<_>>())
    .bind(orders.iter().map(|(_, order_id)| *order_id).collect::<Vec<_>>())
    .fetch_all(c)
    .await
}

pub async fn select_stock_locked(c: &mut PgConnection, keys: &[(&str, &Sku)]) -> sqlx::Result<Vec<StockColumns>> {
    sqlx::query_as(
        "SELECT s.group_id, s.sku, s.on_hand, s.reserved, s.updated_at FROM inventory_stock s
         JOIN UNNEST($1::text[], $2::text[]) AS wanted(group_id, sku)
             ON s.group_id = wanted.group_id AND s.sku = wanted.sku
         ORDER BY s.group_id, s.sku FOR UPDATE OF s",
    )
    .bind(keys.iter().map(|(group_id, _)| *group_id).collect::<Vec<_>>())
    .bind(keys.iter().map(|(_, sku)| sku.as_str()).collect::<Vec<_>>())
    .fetch_all(c)
    .await
}

pub async fn hold(
    c: &mut PgConnection,
    taken: &[(ShelfKey, i64)],
    reservations: &[NewReservation],
    now: Timestamp,
) -> sqlx::Result<()> {
    let lines: Vec<(&NewReservation, &Sku, i64)> =
        reservations.iter().flat_map(|r| r.lines.iter().map(move |(sku, quantity)| (r, sku, *quantity))).collect();
    sqlx::query(
        "WITH taken AS (
             UPDATE inventory_stock s SET reserved = reserved + t.quantity, updated_at = $4
             FROM UNNEST($1::text[], $2::text[], $3::bigint[]) AS t(group_id, sku, quantity)
             WHERE s.group_id = t.group_id AND s.sku = t.sku),
         made AS (
             INSERT INTO inventory_reservations
                 (group_id, id, number, order_id, state, cause_event_id, created_at, updated_at)
             SELECT group_id, id, number, order_id, 'held', cause_event_id, $4, $4
             FROM UNNEST($5::text[], $6::uuid[], $7::text[], $8::uuid[], $9::uuid[])
                 AS row(group_id, id, number, order_id, cause_event_id))
         INSERT INTO inventory_reservation_lines (group_id, reservation_id, sku, quantity)
         SELECT * FROM UNNEST($10::text[], $11::uuid[], $12::text[], $13::bigint[])",
    )
    .bind(taken.iter().map(|((group_id, _), _)| group_id.as_str()).collect::<Vec<_>>())
    .bind(taken.iter().map(|((_, sku), _)| sku.as_str()).collect::<Vec<_>>())
    .bind(taken.iter().map(|(_, quantity)| *quantity).collect::<Vec<_>>())
    .bind(now)
    .bind(reservations.iter().map(|r| r.group_id.as_str()).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.id).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.number.as_str()).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.order_id).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.cause_event_id).collect::<Vec<_>>())
    .bind(lines.iter().map(|(r, _, _)| r.group_id.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|(r, _, _)| r.id).collect::<Vec<_>>())
    .bind(lines.iter().map(|(_, sku, _)| sku.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|(_, _, quantity)| *quantity).collect::<Vec<_>>())
    .execute(c)
    .await
    .map(drop)
}

pub async fn select_lines(
    c: &mut PgConnection,
    group_id: &str,
    reservations: &[Uuid],
) -> sqlx::Result<Vec<(Uuid, String, i64)>> {
    sqlx::query_as(
        "SELECT reservation_id, sku, quantity FROM inventory_reservation_lines
         WHERE group_id = $1 AND reservation_id = ANY($2) ORDER BY reservation_id, sku",
    )
    .bind(group_id)
    .bind(reservations)
    .fetch_all(c)
    .await
}
