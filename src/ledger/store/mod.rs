//! The tables of the ledger: the orders it has heard of, and the entries.

mod pg;
mod sqlite;

use uuid::Uuid;

use super::model::Side;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::{Filter, Tx, dialects, fetch_page};

/// The payment that was booked for an order.
#[derive(Debug, Clone, Copy)]
pub struct Paid<'a> {
    pub group_id: &'a str,
    pub order_id: Uuid,
    pub event_id: Uuid,
}

#[derive(Debug, Clone)]
pub struct NewEntry<'a> {
    pub id: Uuid,
    pub group_id: &'a str,
    pub order_id: Uuid,
    pub event_id: Uuid,
    pub side: Side,
    pub currency: &'a str,
}

dialects! {
    /// Writes orders that are not there yet, notes of those that say so that they are placed, and locks all of them.
    /// They must be distinct and in the order of their keys.
    pub async fn note_and_lock(orders: &[(&str, Uuid, bool)], now: Timestamp) -> ();
    /// Tenant, order, whether it is placed and whether it is paid.
    pub async fn find_orders(orders: &[(&str, Uuid)]) -> Vec<(String, Uuid, bool, bool)>;
    async fn mark_paid(paid: &[Paid<'_>]) -> ();
    async fn insert_entries(entries: &[NewEntry<'_>], now: Timestamp) -> ();
}

/// Books payments: which event paid each order, and the entries.
pub async fn book(tx: &mut Tx, paid: &[Paid<'_>], entries: &[NewEntry<'_>], now: Timestamp) -> sqlx::Result<()> {
    if !paid.is_empty() {
        mark_paid(tx, paid).await?;
    }
    if entries.is_empty() { Ok(()) } else { insert_entries(tx, entries, now).await }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub id: Uuid,
    pub order_id: Uuid,
    pub event_id: Uuid,
    pub account: String,
    pub amount_minor: i64,
    pub currency: String,
    pub created_at: Timestamp,
}

/// Which entries to list; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct Query {
    pub group_id: String,
    pub order_id: Option<Uuid>,
    pub event_id: Option<Uuid>,
    pub account: Option<String>,
    pub currency: Option<String>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

/// Newest first.
pub async fn list_entries(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<Entry>> {
    let filter =
        Filter::new("SELECT id, order_id, event_id, account, amount_minor, currency, created_at FROM ledger_entries")
            .and("group_id = ?", [query.group_id.into()])
            .and_some("order_id = ?", query.order_id)
            .and_some("event_id = ?", query.event_id)
            .and_some("account = ?", query.account)
            .and_some("currency = ?", query.currency)
            .and_some("id < ?", query.before)
            .page("id DESC", query.limit);
    let rows = fetch_page!(tx, filter, (Uuid, Uuid, Uuid, String, i64, String, Timestamp))?;
    Ok(rows
        .into_iter()
        .map(|(id, order_id, event_id, account, amount_minor, currency, created_at)| Entry {
            id,
            order_id,
            event_id,
            account,
            amount_minor,
            currency,
            created_at,
        })
        .collect())
}

/// What the entries on an account come to, in one currency.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Balance {
    pub account: String,
    pub currency: String,
    pub balance_minor: i64,
}

/// Which balances to list; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct BalanceQuery {
    pub group_id: String,
    pub account: Option<String>,
    pub currency: Option<String>,
    pub after: Option<(String, String)>,
    pub limit: i64,
}

/// By account and currency.
pub async fn list_balances(tx: &mut Tx, query: BalanceQuery) -> sqlx::Result<Vec<Balance>> {
    let mut filter = Filter::new("SELECT account, currency, CAST(sum(amount_minor) AS bigint) FROM ledger_entries")
        .and("group_id = ?", [query.group_id.into()])
        .and_some("account = ?", query.account)
        .and_some("currency = ?", query.currency);
    if let Some((account, currency)) = query.after {
        filter = filter.and("(account, currency) > (?, ?)", [account.into(), currency.into()]);
    }
    let filter = filter.group("account, currency").page("account, currency", query.limit);
    let rows = fetch_page!(tx, filter, (String, String, i64))?;
    Ok(rows
        .into_iter()
        .map(|(account, currency, balance_minor)| Balance { account, currency, balance_minor })
        .collect())
}
