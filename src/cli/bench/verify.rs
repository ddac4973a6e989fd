//! The end state of a run, by SQL: stock conserved, one reservation and one notice per order.

use stockade::db::Db;
use stockade::http::caller::DEFAULT_GROUP;
use uuid::Uuid;

use super::load::sku;

/// Each check counts offenders among the run's rows; the run's ids are minted after `run` itself was.
const CHECKS: [(&str, &str); 5] = [
    (
        "orders not reserved",
        "SELECT count(*) FROM orders_orders WHERE group_id = $1 AND id > $2 AND status <> 'reserved' AND $3 = $3",
    ),
    (
        "orders without exactly one reservation",
        "SELECT count(*) FROM orders_orders o WHERE o.group_id = $1 AND o.id > $2 AND $3 = $3 AND 1 <>
             (SELECT count(*) FROM inventory_reservations r WHERE r.group_id = o.group_id AND r.order_id = o.id)",
    ),
    (
        "orders without exactly one notice",
        "SELECT count(*) FROM orders_orders o WHERE o.group_id = $1 AND o.id > $2 AND $3 = $3 AND 1 <>
             (SELECT count(*) FROM notifications_notices n WHERE n.group_id = o.group_id AND n.order_id = o.id)",
    ),
    (
        "SKUs whose adjustments do not add up to what is on hand",
        "SELECT count(*) FROM inventory_stock s WHERE s.group_id = $1 AND s.sku LIKE $3 AND s.on_hand <>
             (SELECT COALESCE(sum(a.delta), 0) FROM inventory_adjustments a
              WHERE a.group_id = s.group_id AND a.id > $2 AND a.sku = s.sku)",
    ),
    (
        "SKUs whose reserved is not what reservations hold",
        "WITH held AS (
             SELECT l.sku, sum(l.quantity) AS quantity FROM inventory_reservation_lines l
             WHERE l.group_id = $1 AND l.reservation_id > $2 AND l.sku LIKE $3 GROUP BY l.sku)
         SELECT count(*) FROM inventory_stock s LEFT JOIN held h ON h.sku = s.sku
         WHERE s.group_id = $1 AND s.sku LIKE $3 AND s.reserved <> COALESCE(h.quantity, 0)",
    ),
];

/// What is wrong, in words; nothing if all is well.
pub async fn check(db: &Db, run: Uuid, placed: usize) -> anyhow::Result<Vec<String>> {
    let mut tx = db.read().await?;
    let skus = sku(run, 0).trim_end_matches("00").to_owned() + "%";
    let mut violations = Vec::new();
    let orders: i64 = stockade::on!(tx, c => {
        sqlx::query_scalar("SELECT count(*) FROM orders_orders WHERE group_id = $1 AND id > $2")
            .bind(DEFAULT_GROUP)
            .bind(run)
            .fetch_one(c)
            .await
    })?;
    if usize::try_from(orders)? != placed {
        violations.push(format!("{placed} orders were answered, {orders} are there"));
    }
    for (name, sql) in CHECKS {
        let offenders: i64 = stockade::on!(tx, c => {
            sqlx::query_scalar(sql).bind(DEFAULT_GROUP).bind(run).bind(&skus).fetch_one(c).await
        })?;
        if offenders > 0 {
            violations.push(format!("{offenders} {name}"));
        }
    }
    Ok(violations)
}
