//! The end state of a run, by SQL: stock conserved, one reservation and one notice per order; in the mix also that every
//! order came to its end, with the stock, the entries and the notices that go with it.

use std::time::Duration;

use stockade_kernel::db::Db;
use tokio::time::Instant;
use uuid::Uuid;

use super::load::{Fate, Placed, sku_prefix};

/// How long the last messages may take after the last notice.
const PATIENCE: Duration = Duration::from_secs(10);

/// A check counts offenders among the run's rows; the run's ids are minted after `run` itself was.
type Check = (&'static str, &'static str);

/// Outside the mix.
const RESERVED: [Check; 3] = [
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
];

/// In any case.
const STOCK: [Check; 2] = [
    (
        "SKUs whose adjustments do not add up to what is on hand and what has left",
        "SELECT count(*) FROM inventory_stock s WHERE s.group_id = $1 AND s.sku LIKE $3 AND s.on_hand + s.fulfilled <>
             (SELECT COALESCE(sum(a.delta), 0) FROM inventory_adjustments a
              WHERE a.group_id = s.group_id AND a.id > $2 AND a.sku = s.sku)",
    ),
    (
        "SKUs whose reserved is not what reservations hold",
        "WITH held AS (
             SELECT l.sku, sum(l.quantity) AS quantity FROM inventory_reservation_lines l
             JOIN inventory_reservations r ON r.group_id = l.group_id AND r.id = l.reservation_id
             WHERE l.group_id = $1 AND l.reservation_id > $2 AND l.sku LIKE $3 AND r.state IN ('held', 'committed')
             GROUP BY l.sku)
         SELECT count(*) FROM inventory_stock s LEFT JOIN held h ON h.sku = s.sku
         WHERE s.group_id = $1 AND s.sku LIKE $3 AND s.reserved <> COALESCE(h.quantity, 0)",
    ),
];

/// In the mix.
const MIX: [Check; 6] = [
    (
        "orders whose reservation is not where it should be",
        "SELECT count(*) FROM orders_orders o LEFT JOIN inventory_reservations r
             ON r.group_id = o.group_id AND r.order_id = o.id
         WHERE o.group_id = $1 AND o.id > $2 AND $3 = $3 AND COALESCE(r.state, 'none') <> CASE o.status
             WHEN 'paid' THEN 'committed' WHEN 'rejected' THEN 'none' ELSE 'released' END",
    ),
    (
        "orders without exactly one notice of what became of them",
        "SELECT count(*) FROM orders_orders o WHERE o.group_id = $1 AND o.id > $2 AND $3 = $3 AND 1 <>
             (SELECT count(*) FROM notifications_notices n
              WHERE n.group_id = o.group_id AND n.order_id = o.id AND n.kind = o.status)",
    ),
    (
        "orders with another notice than of their reservation and their end",
        "SELECT count(*) FROM notifications_notices n JOIN orders_orders o
             ON o.group_id = n.group_id AND o.id = n.order_id
         WHERE n.group_id = $1 AND n.id > $2 AND o.id > $2 AND $3 = $3 AND n.kind <> o.status
             AND NOT (n.kind = 'reserved' AND o.status <> 'rejected')",
    ),
    (
        "orders whose entries in the ledger are not what was paid",
        "SELECT count(*) FROM orders_orders o WHERE o.group_id = $1 AND o.id > $2 AND $3 = $3 AND (
             (SELECT COALESCE(sum(e.amount_minor), 0) FROM ledger_entries e
              WHERE e.group_id = o.group_id AND e.order_id = o.id AND e.account = 'cash')
                 <> CASE o.status WHEN 'paid' THEN o.total_minor ELSE 0 END
             OR (SELECT COALESCE(sum(e.amount_minor), 0) FROM ledger_entries e
              WHERE e.group_id = o.group_id AND e.order_id = o.id) <> 0
             OR (SELECT count(*) FROM ledger_entries e WHERE e.group_id = o.group_id AND e.order_id = o.id)
                 <> CASE o.status WHEN 'paid' THEN 2 ELSE 0 END)",
    ),
    (
        "events that wait, are retried or are dead",
        "SELECT count(*) FROM messaging_inbox
         WHERE group_id = $1 AND event_id > $2 AND $3 = $3 AND state <> 'processed'",
    ),
    ("dead letters", "SELECT count(*) FROM messaging_dead_letters WHERE group_id = $1 AND id > $2 AND $3 = $3"),
];

/// What is wrong, in words; nothing if all is well. The last messages have some time to arrive: when the last customer has
/// been told, others who take the same event may still have it before them.
pub async fn check(db: &Db, group: &str, run: Uuid, placed: &[Placed], mix: bool) -> anyhow::Result<Vec<String>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let violations = look(db, group, run, placed, mix).await?;
        if violations.is_empty() || Instant::now() >= deadline {
            return Ok(violations);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn look(db: &Db, group: &str, run: Uuid, placed: &[Placed], mix: bool) -> anyhow::Result<Vec<String>> {
    let mut tx = db.read().await?;
    let skus = sku_prefix(run) + "%";
    let mut violations = Vec::new();
    let expected = match mix {
        false => vec![("reserved", Fate::Reserved)],
        true => vec![
            ("paid", Fate::Paid),
            ("cancelled", Fate::Cancelled),
            ("expired", Fate::Expired),
            ("rejected", Fate::Rejected),
        ],
    };
    for (status, fate) in expected {
        let answered = placed.iter().filter(|order| order.fate == fate).count();
        let orders: i64 = stockade_kernel::on!(tx, c => {
            sqlx::query_scalar("SELECT count(*) FROM orders_orders WHERE group_id = $1 AND id > $2 AND status = $3")
                .bind(group)
                .bind(run)
                .bind(status)
                .fetch_one(c)
                .await
        })?;
        if usize::try_from(orders)? != answered {
            violations.push(format!("{answered} orders were to be {status}, {orders} are"));
        }
    }
    let checks = if mix { MIX.iter() } else { RESERVED.iter() };
    for (name, sql) in STOCK.iter().chain(checks) {
        let offenders: i64 = stockade_kernel::on!(tx, c => {
            sqlx::query_scalar(*sql).bind(group).bind(run).bind(&skus).fetch_one(c).await
        })?;
        if offenders > 0 {
            violations.push(format!("{offenders} {name}"));
        }
    }
    Ok(violations)
}
