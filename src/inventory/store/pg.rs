use sqlx::PgConnection;
use uuid::Uuid;

use super::{Moved, NewReservation, ShelfKey, StockColumns};
use crate::orders::events::Sku;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::Column;

/// The stock that is asked for, locked; `$1` and `$2` are its keys.
macro_rules! stock_locked {
    () => {
        "SELECT s.group_id, s.sku, s.on_hand, s.reserved, s.updated_at FROM inventory_stock s
         JOIN UNNEST($1::text[], $2::text[]) AS wanted(group_id, sku)
             ON s.group_id = wanted.group_id AND s.sku = wanted.sku
         ORDER BY s.group_id, s.sku FOR UPDATE OF s"
    };
}

pub async fn select_for_survey(
    c: &mut PgConnection,
    orders: &[(&str, Uuid)],
    keys: &[(&str, &Sku)],
) -> sqlx::Result<(Vec<(String, Uuid)>, Vec<StockColumns>)> {
    let group_id = Column::of(orders.iter().map(|(group_id, _)| *group_id));
    type Columns = (String, Option<Uuid>, Option<String>, Option<i64>, Option<i64>, Option<Timestamp>);
    let rows: Vec<Columns> = sqlx::query_as(concat!(
        "WITH stock AS MATERIALIZED (",
        stock_locked!(),
        ")
         SELECT group_id, NULL::uuid, sku, on_hand, reserved, updated_at FROM stock
         UNION ALL
         SELECT wanted.group_id, wanted.order_id, NULL, NULL, NULL, NULL
         FROM (SELECT COALESCE(group_id, $4) AS group_id, order_id
             FROM UNNEST($3::text[], $5::uuid[]) AS row(group_id, order_id)) AS wanted
         CROSS JOIN LATERAL (SELECT FROM inventory_reservations r
             -- LIMIT keeps this from being planned as a join, which would read the whole table while it is small by the
             -- last statistics, or was when the plan was made.
             WHERE r.group_id = wanted.group_id AND r.order_id = wanted.order_id LIMIT 1) AS found",
    ))
    .bind(keys.iter().map(|(group_id, _)| *group_id).collect::<Vec<_>>())
    .bind(keys.iter().map(|(_, sku)| sku.as_str()).collect::<Vec<_>>())
    .bind(group_id.each)
    .bind(group_id.shared)
    .bind(orders.iter().map(|(_, order_id)| *order_id).collect::<Vec<_>>())
    .fetch_all(c)
    .await?;
    let (mut reserved, mut stock) = (Vec::new(), Vec::new());
    for row in rows {
        match row {
            (group_id, Some(order_id), ..) => reserved.push((group_id, order_id)),
            (group_id, None, Some(sku), Some(on_hand), Some(held), Some(updated_at)) => {
                stock.push((group_id, sku, on_hand, held, updated_at));
            }
            _ => return Err(sqlx::Error::Decode("a row of neither an order nor a SKU".into())),
        }
    }
    Ok((reserved, stock))
}

pub async fn select_stock_locked(c: &mut PgConnection, keys: &[(&str, &Sku)]) -> sqlx::Result<Vec<StockColumns>> {
    sqlx::query_as(stock_locked!())
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
    let group_id = Column::of(reservations.iter().map(|r| r.group_id.as_str()));
    let line_group_id = Column::of(lines.iter().map(|(r, ..)| r.group_id.as_str()));
    sqlx::query(
        "WITH taken AS (
             UPDATE inventory_stock s SET reserved = reserved + t.quantity, updated_at = $4
             FROM UNNEST($1::text[], $2::text[], $3::bigint[]) AS t(group_id, sku, quantity)
             WHERE s.group_id = t.group_id AND s.sku = t.sku),
         made AS (
             INSERT INTO inventory_reservations
                 (group_id, id, number, order_id, state, cause_event_id, created_at, updated_at)
             SELECT COALESCE(group_id, $6), id, number, order_id, 'held', cause_event_id, $4, $4
             FROM UNNEST($5::text[], $7::uuid[], $8::text[], $9::uuid[], $10::uuid[])
                 AS row(group_id, id, number, order_id, cause_event_id))
         INSERT INTO inventory_reservation_lines (group_id, reservation_id, sku, quantity)
         SELECT COALESCE(group_id, $12), reservation_id, sku, quantity
         FROM UNNEST($11::text[], $13::uuid[], $14::text[], $15::bigint[]) AS row(group_id, reservation_id, sku, quantity)",
    )
    .bind(taken.iter().map(|((group_id, _), _)| group_id.as_str()).collect::<Vec<_>>())
    .bind(taken.iter().map(|((_, sku), _)| sku.as_str()).collect::<Vec<_>>())
    .bind(taken.iter().map(|(_, quantity)| *quantity).collect::<Vec<_>>())
    .bind(now)
    .bind(group_id.each)
    .bind(group_id.shared)
    .bind(reservations.iter().map(|r| r.id).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.number.as_str()).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.order_id).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.cause_event_id).collect::<Vec<_>>())
    .bind(line_group_id.each)
    .bind(line_group_id.shared)
    .bind(lines.iter().map(|(r, _, _)| r.id).collect::<Vec<_>>())
    .bind(lines.iter().map(|(_, sku, _)| sku.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|(_, _, quantity)| *quantity).collect::<Vec<_>>())
    .execute(c)
    .await
    .map(drop)
}

pub async fn lock_shelves(c: &mut PgConnection, orders: &[(&str, Uuid)], skus: &[(&str, &Sku)]) -> sqlx::Result<()> {
    sqlx::query(
        "SELECT FROM inventory_stock s JOIN (
             SELECT l.group_id, l.sku FROM UNNEST($1::text[], $2::uuid[]) AS o(group_id, order_id)
             JOIN inventory_reservations r ON r.group_id = o.group_id AND r.order_id = o.order_id
             JOIN inventory_reservation_lines l ON l.group_id = r.group_id AND l.reservation_id = r.id
             UNION SELECT * FROM UNNEST($3::text[], $4::text[])) AS wanted
             ON s.group_id = wanted.group_id AND s.sku = wanted.sku
         ORDER BY s.group_id, s.sku FOR UPDATE OF s",
    )
    .bind(orders.iter().map(|(group_id, _)| *group_id).collect::<Vec<_>>())
    .bind(orders.iter().map(|(_, order_id)| *order_id).collect::<Vec<_>>())
    .bind(skus.iter().map(|(group_id, _)| *group_id).collect::<Vec<_>>())
    .bind(skus.iter().map(|(_, sku)| sku.as_str()).collect::<Vec<_>>())
    .execute(c)
    .await
    .map(drop)
}

pub async fn select_reservations_locked(
    c: &mut PgConnection,
    orders: &[(&str, Uuid)],
) -> sqlx::Result<Vec<(String, Uuid, Uuid, String)>> {
    sqlx::query_as(
        "SELECT r.group_id, r.order_id, r.id, r.state FROM inventory_reservations r
         JOIN UNNEST($1::text[], $2::uuid[]) AS wanted(group_id, order_id)
             ON r.group_id = wanted.group_id AND r.order_id = wanted.order_id
         ORDER BY r.group_id, r.order_id FOR UPDATE OF r",
    )
    .bind(orders.iter().map(|(group_id, _)| *group_id).collect::<Vec<_>>())
    .bind(orders.iter().map(|(_, order_id)| *order_id).collect::<Vec<_>>())
    .fetch_all(c)
    .await
}

pub async fn update_states(c: &mut PgConnection, moved: &[Moved], now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE inventory_reservations r SET state = m.state, updated_at = $5
         FROM UNNEST($1::text[], $2::uuid[], $3::text[], $4::text[]) AS m(group_id, id, was, state)
         WHERE r.group_id = m.group_id AND r.id = m.id AND r.state = m.was",
    )
    .bind(moved.iter().map(|moved| moved.group_id.as_str()).collect::<Vec<_>>())
    .bind(moved.iter().map(|moved| moved.id).collect::<Vec<_>>())
    .bind(moved.iter().map(|moved| moved.from.as_str()).collect::<Vec<_>>())
    .bind(moved.iter().map(|moved| moved.to.as_str()).collect::<Vec<_>>())
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn let_go(c: &mut PgConnection, reservations: &[(&str, Uuid, bool)], now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE inventory_stock s SET reserved = s.reserved - d.freed, on_hand = s.on_hand - d.gone,
             fulfilled = s.fulfilled + d.gone, updated_at = $4
         FROM (SELECT l.group_id, l.sku, sum(l.quantity)::bigint AS freed,
                 COALESCE(sum(l.quantity) FILTER (WHERE m.gone), 0)::bigint AS gone
             FROM UNNEST($1::text[], $2::uuid[], $3::bool[]) AS m(group_id, id, gone)
             JOIN inventory_reservation_lines l ON l.group_id = m.group_id AND l.reservation_id = m.id
             GROUP BY l.group_id, l.sku) d
         WHERE s.group_id = d.group_id AND s.sku = d.sku",
    )
    .bind(reservations.iter().map(|(group_id, ..)| *group_id).collect::<Vec<_>>())
    .bind(reservations.iter().map(|(_, id, _)| *id).collect::<Vec<_>>())
    .bind(reservations.iter().map(|(.., gone)| *gone).collect::<Vec<_>>())
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn insert_released(
    c: &mut PgConnection,
    reservations: &[NewReservation],
    now: Timestamp,
) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar(
        "INSERT INTO inventory_reservations
             (group_id, id, number, order_id, state, cause_event_id, created_at, updated_at)
         SELECT group_id, id, number, order_id, 'released', cause_event_id, $6, $6
         FROM UNNEST($1::text[], $2::uuid[], $3::text[], $4::uuid[], $5::uuid[])
             AS row(group_id, id, number, order_id, cause_event_id)
         ON CONFLICT (group_id, order_id) DO NOTHING RETURNING id",
    )
    .bind(reservations.iter().map(|r| r.group_id.as_str()).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.id).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.number.as_str()).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.order_id).collect::<Vec<_>>())
    .bind(reservations.iter().map(|r| r.cause_event_id).collect::<Vec<_>>())
    .bind(now)
    .fetch_all(c)
    .await
}

pub async fn delete_tombstones(c: &mut PgConnection, reservations: &[(&str, Uuid)]) -> sqlx::Result<()> {
    sqlx::query(
        "DELETE FROM inventory_reservations r USING UNNEST($1::text[], $2::uuid[]) AS gone(group_id, id)
         WHERE r.group_id = gone.group_id AND r.id = gone.id",
    )
    .bind(reservations.iter().map(|(group_id, _)| *group_id).collect::<Vec<_>>())
    .bind(reservations.iter().map(|(_, id)| *id).collect::<Vec<_>>())
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
