use sqlx::types::Json;
use uuid::Uuid;

use super::{NewEntry, Paid};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::sqlite::{SqliteConnection, query, query_as};

/// The writer's transaction is the lock.
pub async fn note_and_lock(
    c: &mut SqliteConnection,
    orders: &[(&str, Uuid, bool)],
    now: Timestamp,
) -> sqlx::Result<()> {
    c.insert_each(
        "ledger_orders (group_id, order_id, placed_at)",
        orders.iter().map(|(group_id, order_id, placed)| (group_id, order_id.as_bytes(), placed.then_some(now))),
        "ON CONFLICT (group_id, order_id)
             DO UPDATE SET placed_at = COALESCE(ledger_orders.placed_at, excluded.placed_at)",
    )
}

pub async fn find_orders(
    c: &mut SqliteConnection,
    orders: &[(&str, Uuid)],
) -> sqlx::Result<Vec<(String, Uuid, bool, bool)>> {
    let rows: Vec<_> = orders.iter().map(|(group_id, order_id)| (group_id, order_id.simple())).collect();
    query_as(
        "SELECT o.group_id, o.order_id, o.placed_at IS NOT NULL, o.paid_event_id IS NOT NULL
         FROM jsonb_each($1) AS wanted CROSS JOIN ledger_orders o
             ON o.group_id = wanted.value ->> 0 AND o.order_id = unhex(wanted.value ->> 1)",
    )
    .bind(Json(rows))
    .fetch_all(c)
    .await
}

pub async fn mark_paid(c: &mut SqliteConnection, paid: &[Paid<'_>]) -> sqlx::Result<()> {
    let rows: Vec<_> = paid.iter().map(|p| (p.group_id, p.order_id.simple(), p.event_id.simple())).collect();
    query(
        "UPDATE ledger_orders SET paid_event_id = unhex(p.value ->> 2) FROM jsonb_each($1) AS p
         WHERE group_id = p.value ->> 0 AND order_id = unhex(p.value ->> 1)",
    )
    .bind(Json(rows))
    .execute(c)
    .await
    .map(drop)
}

pub async fn insert_entries(c: &mut SqliteConnection, entries: &[NewEntry<'_>], now: Timestamp) -> sqlx::Result<()> {
    let rows: Vec<_> = entries
        .iter()
        .map(|entry| {
            let (id, order_id, event_id) = (entry.id.simple(), entry.order_id.simple(), entry.event_id.simple());
            let side = &entry.side;
            (entry.group_id, id, order_id, event_id, &side.account, side.amount_minor, entry.currency)
        })
        .collect();
    query(
        "INSERT INTO ledger_entries (group_id, id, order_id, event_id, account, amount_minor, currency, created_at)
         SELECT value ->> 0, unhex(value ->> 1), unhex(value ->> 2), unhex(value ->> 3), value ->> 4, value ->> 5,
             value ->> 6, $2
         FROM jsonb_each($1)",
    )
    .bind(Json(rows))
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}
