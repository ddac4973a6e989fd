use sqlx::SqliteConnection;
use sqlx::types::Json;
use uuid::Uuid;

use super::{Moved, NewReservation, ShelfKey, StockColumns};
use crate::clock::Timestamp;
use crate::orders::events::Sku;

pub async fn select_reserved(c: &mut SqliteConnection, orders: &[(&str, Uuid)]) -> sqlx::Result<Vec<(String, Uuid)>> {
    let rows: Vec<_> = orders.iter().map(|(group_id, order_id)| (group_id, order_id.simple())).collect();
    sqlx::query_as(
        "SELECT r.group_id, r.order_id FROM jsonb_each($1) AS wanted CROSS JOIN inventory_reservations r
             ON r.group_id = wanted.value ->> 0 AND r.order_id = unhex(wanted.value ->> 1)",
    )
    .bind(Json(rows))
    .fetch_all(c)
    .await
}

/// The writer's transaction is the lock.
pub async fn select_stock_locked(c: &mut SqliteConnection, keys: &[(&str, &Sku)]) -> sqlx::Result<Vec<StockColumns>> {
    // All in one row: each row that crosses from SQLite's thread costs two context switches.
    let found: String = sqlx::query_scalar(
        "SELECT json_group_array(json_array(s.group_id, s.sku, s.on_hand, s.reserved, s.updated_at))
         FROM jsonb_each($1) AS wanted
         CROSS JOIN inventory_stock s ON s.group_id = wanted.value ->> 0 AND s.sku = wanted.value ->> 1",
    )
    .bind(Json(keys))
    .fetch_one(c)
    .await?;
    let rows: Vec<(String, String, i64, i64, i64)> =
        serde_json::from_str(&found).map_err(|error| sqlx::Error::Decode(error.into()))?;
    let columns = |(group_id, sku, on_hand, reserved, updated_at)| {
        (group_id, sku, on_hand, reserved, Timestamp::from_millis(updated_at))
    };
    Ok(rows.into_iter().map(columns).collect())
}

pub async fn hold(
    c: &mut SqliteConnection,
    taken: &[(ShelfKey, i64)],
    reservations: &[NewReservation],
    now: Timestamp,
) -> sqlx::Result<()> {
    let rows: Vec<_> = reservations
        .iter()
        .map(|r| (&r.group_id, r.id.simple(), &r.number, r.order_id.simple(), r.cause_event_id.simple()))
        .collect();
    let lines: Vec<_> = reservations
        .iter()
        .flat_map(|r| r.lines.iter().map(move |(sku, quantity)| (&r.group_id, r.id.simple(), sku, quantity)))
        .collect();
    sqlx::query(
        "UPDATE inventory_stock SET reserved = reserved + (t.value ->> 1), updated_at = $4
         FROM jsonb_each($1) AS t
         WHERE group_id = t.value ->> '$[0][0]' AND sku = t.value ->> '$[0][1]';
         INSERT INTO inventory_reservations
             (group_id, id, number, order_id, state, cause_event_id, created_at, updated_at)
         SELECT value ->> 0, unhex(value ->> 1), value ->> 2, unhex(value ->> 3), 'held', unhex(value ->> 4), $4, $4
         FROM jsonb_each($2);
         INSERT INTO inventory_reservation_lines (group_id, reservation_id, sku, quantity)
         SELECT value ->> 0, unhex(value ->> 1), value ->> 2, value ->> 3 FROM jsonb_each($3)",
    )
    .bind(Json(taken))
    .bind(Json(rows))
    .bind(Json(lines))
    .bind(now)
    .execute(c)
    .await
    .map(drop)
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
    sqlx::query_as(
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
    sqlx::query(
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
    sqlx::query(
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
    sqlx::query_scalar(
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
    sqlx::query(
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
    sqlx::query_as(
        "SELECT reservation_id, sku, quantity FROM inventory_reservation_lines
         WHERE group_id = $1 AND reservation_id IN (SELECT unhex(value) FROM json_each($2))
         ORDER BY reservation_id, sku",
    )
    .bind(group_id)
    .bind(Json(reservations.iter().map(|id| id.simple()).collect::<Vec<_>>()))
    .fetch_all(c)
    .await
}
