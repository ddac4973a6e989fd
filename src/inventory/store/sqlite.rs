use sqlx::types::Json;
use uuid::Uuid;

use super::{Moved, NewReservation, ShelfKey, StockColumns};
use crate::orders::events::Sku;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::sqlite::{SqliteConnection, query, query_as, query_scalar};

pub async fn select_for_survey(
    c: &mut SqliteConnection,
    orders: &[(&str, Uuid)],
    keys: &[(&str, &Sku)],
) -> sqlx::Result<(Vec<(String, Uuid)>, Vec<StockColumns>)> {
    let reserved = c.fetch_each(
        "SELECT group_id, order_id FROM inventory_reservations WHERE group_id = ?1 AND order_id = ?2",
        orders.iter().map(|(group_id, order_id)| (group_id, order_id.as_bytes())),
    )?;
    Ok((reserved, select_stock_locked(c, keys).await?))
}

/// The writer's transaction is the lock.
pub async fn select_stock_locked(c: &mut SqliteConnection, keys: &[(&str, &Sku)]) -> sqlx::Result<Vec<StockColumns>> {
    c.fetch_each(
        "SELECT group_id, sku, on_hand, reserved, updated_at FROM inventory_stock WHERE group_id = ?1 AND sku = ?2",
        keys.iter().map(|(group_id, sku)| (group_id, sku.as_str())),
    )
}

pub async fn hold(
    c: &mut SqliteConnection,
    taken: &[(ShelfKey, i64)],
    reservations: &[NewReservation],
    now: Timestamp,
) -> sqlx::Result<()> {
    c.execute_each(
        "UPDATE inventory_stock SET reserved = reserved + ?3, updated_at = ?4 WHERE group_id = ?1 AND sku = ?2",
        taken.iter().map(|((group_id, sku), quantity)| (group_id, sku.as_str(), quantity, now)),
    )?;
    c.insert_each(
        "inventory_reservations (group_id, id, number, order_id, state, cause_event_id, created_at, updated_at)",
        reservations.iter().map(|r| {
            let [id, order_id, cause_event_id] = [&r.id, &r.order_id, &r.cause_event_id].map(Uuid::as_bytes);
            (&r.group_id, id, &r.number, order_id, "held", cause_event_id, now, now)
        }),
        "",
    )?;
    c.insert_each(
        "inventory_reservation_lines (group_id, reservation_id, sku, quantity)",
        reservations.iter().flat_map(|r| {
            r.lines.iter().map(move |(sku, quantity)| (&r.group_id, r.id.as_bytes(), sku.as_str(), quantity))
        }),
        "",
    )
}

/// Nothing to do: the writer's transaction is the lock.
pub async fn lock_shelves(
    _c: &mut SqliteConnection,
    _orders: &[(&str, Uuid)],
    _skus: &[(&str, &Sku)],
) -> sqlx::Result<()> {
    Ok(())
}

pub async fn select_reservations_locked(
    c: &mut SqliteConnection,
    orders: &[(&str, Uuid)],
) -> sqlx::Result<Vec<(String, Uuid, Uuid, String)>> {
    let rows: Vec<_> = orders.iter().map(|(group_id, order_id)| (group_id, order_id.simple())).collect();
    query_as(
        "SELECT r.group_id, r.order_id, r.id, r.state FROM jsonb_each($1) AS wanted
         CROSS JOIN inventory_reservations r
             ON r.group_id = wanted.value ->> 0 AND r.order_id = unhex(wanted.value ->> 1)",
    )
    .bind(Json(rows))
    .fetch_all(c)
    .await
}

pub async fn update_states(c: &mut SqliteConnection, moved: &[Moved], now: Timestamp) -> sqlx::Result<()> {
    let rows: Vec<_> = moved.iter().map(|m| (&m.group_id, m.id.simple(), m.from.as_str(), m.to.as_str())).collect();
    query(
        "UPDATE inventory_reservations SET state = m.value ->> 3, updated_at = $2 FROM jsonb_each($1) AS m
         WHERE group_id = m.value ->> 0 AND inventory_reservations.id = unhex(m.value ->> 1)
             AND state = m.value ->> 2",
    )
    .bind(Json(rows))
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn let_go(c: &mut SqliteConnection, reservations: &[(&str, Uuid, bool)], now: Timestamp) -> sqlx::Result<()> {
    let rows: Vec<_> = reservations.iter().map(|(group_id, id, gone)| (group_id, id.simple(), gone)).collect();
    query(
        "UPDATE inventory_stock SET reserved = reserved - d.freed, on_hand = on_hand - d.gone,
             fulfilled = fulfilled + d.gone, updated_at = $2
         FROM (SELECT l.group_id, l.sku, sum(l.quantity) AS freed,
                 sum(CASE WHEN m.value ->> 2 THEN l.quantity ELSE 0 END) AS gone
             FROM jsonb_each($1) AS m CROSS JOIN inventory_reservation_lines l
                 ON l.group_id = m.value ->> 0 AND l.reservation_id = unhex(m.value ->> 1)
             GROUP BY l.group_id, l.sku) AS d
         WHERE inventory_stock.group_id = d.group_id AND inventory_stock.sku = d.sku",
    )
    .bind(Json(rows))
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn insert_released(
    c: &mut SqliteConnection,
    reservations: &[NewReservation],
    now: Timestamp,
) -> sqlx::Result<Vec<Uuid>> {
    let rows: Vec<_> = reservations
        .iter()
        .map(|r| (&r.group_id, r.id.simple(), &r.number, r.order_id.simple(), r.cause_event_id.simple()))
        .collect();
    query_scalar(
        // `WHERE true`: without it, ON CONFLICT would parse as a join condition
        "INSERT INTO inventory_reservations
             (group_id, id, number, order_id, state, cause_event_id, created_at, updated_at)
         SELECT value ->> 0, unhex(value ->> 1), value ->> 2, unhex(value ->> 3), 'released', unhex(value ->> 4), $2, $2
         FROM jsonb_each($1) WHERE true ON CONFLICT (group_id, order_id) DO NOTHING RETURNING id",
    )
    .bind(Json(rows))
    .bind(now)
    .fetch_all(c)
    .await
}

pub async fn delete_tombstones(c: &mut SqliteConnection, reservations: &[(&str, Uuid)]) -> sqlx::Result<()> {
    let rows: Vec<_> = reservations.iter().map(|(group_id, id)| (group_id, id.simple())).collect();
    query(
        "DELETE FROM inventory_reservations
         WHERE (group_id, id) IN (SELECT value ->> 0, unhex(value ->> 1) FROM jsonb_each($1))",
    )
    .bind(Json(rows))
    .execute(c)
    .await
    .map(drop)
}

pub async fn select_lines(
    c: &mut SqliteConnection,
    group_id: &str,
    reservations: &[Uuid],
) -> sqlx::Result<Vec<(Uuid, String, i64)>> {
    query_as(
        "SELECT reservation_id, sku, quantity FROM inventory_reservation_lines
         WHERE group_id = $1 AND reservation_id IN (SELECT unhex(value) FROM json_each($2))
         ORDER BY reservation_id, sku",
    )
    .bind(group_id)
    .bind(Json(reservations.iter().map(|id| id.simple()).collect::<Vec<_>>()))
    .fetch_all(c)
    .await
}
