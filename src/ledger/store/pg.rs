use sqlx::PgConnection;
use uuid::Uuid;

use super::{NewEntry, Paid};
use stockade_kernel::clock::Timestamp;

pub async fn note_and_lock(c: &mut PgConnection, orders: &[(&str, Uuid, bool)], now: Timestamp) -> sqlx::Result<()> {
    // DO UPDATE rather than DO NOTHING: it waits for and locks a row that is there.
    sqlx::query(
        "INSERT INTO ledger_orders (group_id, order_id, placed_at)
         SELECT group_id, order_id, CASE WHEN placed THEN $4::timestamptz END
         FROM UNNEST($1::text[], $2::uuid[], $3::bool[]) AS row(group_id, order_id, placed)
         ORDER BY group_id, order_id
         ON CONFLICT (group_id, order_id)
             DO UPDATE SET placed_at = COALESCE(ledger_orders.placed_at, EXCLUDED.placed_at)",
    )
    .bind(orders.iter().map(|(group_id, ..)| *group_id).collect::<Vec<_>>())
    .bind(orders.iter().map(|(_, order_id, _)| *order_id).collect::<Vec<_>>())
    .bind(orders.iter().map(|(.., placed)| *placed).collect::<Vec<_>>())
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}

pub async fn find_orders(
    c: &mut PgConnection,
    orders: &[(&str, Uuid)],
) -> sqlx::Result<Vec<(String, Uuid, bool, bool)>> {
    sqlx::query_as(
        "SELECT group_id, order_id, placed_at IS NOT NULL, paid_event_id IS NOT NULL FROM ledger_orders
         JOIN UNNEST($1::text[], $2::uuid[]) AS wanted(group_id, order_id) USING (group_id, order_id)",
    )
    .bind(orders.iter().map(|(group_id, _)| *group_id).collect::<Vec<_>>())
    .bind(orders.iter().map(|(_, order_id)| *order_id).collect::<Vec<_>>())
    .fetch_all(c)
    .await
}

pub async fn mark_paid(c: &mut PgConnection, paid: &[Paid<'_>]) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE ledger_orders o SET paid_event_id = p.event_id
         FROM UNNEST($1::text[], $2::uuid[], $3::uuid[]) AS p(group_id, order_id, event_id)
         WHERE o.group_id = p.group_id AND o.order_id = p.order_id",
    )
    .bind(paid.iter().map(|paid| paid.group_id).collect::<Vec<_>>())
    .bind(paid.iter().map(|paid| paid.order_id).collect::<Vec<_>>())
    .bind(paid.iter().map(|paid| paid.event_id).collect::<Vec<_>>())
    .execute(c)
    .await
    .map(drop)
}

pub async fn insert_entries(c: &mut PgConnection, entries: &[NewEntry<'_>], now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO ledger_entries (group_id, id, order_id, event_id, account, amount_minor, currency, created_at)
         SELECT group_id, id, order_id, event_id, account, amount_minor, currency, $8
         FROM UNNEST($1::text[], $2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::bigint[], $7::text[])
             AS row(group_id, id, order_id, event_id, account, amount_minor, currency)",
    )
    .bind(entries.iter().map(|entry| entry.group_id).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.id).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.order_id).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.event_id).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.side.account.as_str()).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.side.amount_minor).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.currency).collect::<Vec<_>>())
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}
