//! The tables of inventory: stock, the adjustments that explain it, reservations and their lines.

mod pg;
mod sqlite;

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use super::model::{ShelfKey, State};
use crate::orders::events::Sku;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::{Filter, Tx, dialects, fetch_page};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stock {
    pub group_id: String,
    pub sku: Sku,
    pub on_hand: i64,
    pub reserved: i64,
    pub updated_at: Timestamp,
}

impl Stock {
    pub fn available(&self) -> i64 {
        self.on_hand - self.reserved
    }
}

#[derive(Debug, Clone)]
pub struct Adjustment {
    pub id: Uuid,
    pub group_id: String,
    pub sku: Sku,
    pub delta: i64,
    pub reason: String,
    pub on_hand: i64,
}

#[derive(Debug, Clone)]
pub struct NewReservation {
    pub id: Uuid,
    pub number: String,
    pub group_id: String,
    pub order_id: Uuid,
    pub cause_event_id: Uuid,
    pub lines: Vec<(Sku, i64)>,
}

/// A reservation as it stands, locked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub group_id: String,
    pub order_id: Uuid,
    pub id: Uuid,
    pub state: State,
}

/// A reservation that moves on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    pub group_id: String,
    pub id: Uuid,
    pub from: State,
    pub to: State,
}

/// What is to be known before stock is held for orders.
#[derive(Debug)]
pub struct Survey {
    /// Those of the orders that have a reservation row already.
    pub reserved: HashSet<(String, Uuid)>,
    /// The stock asked for, locked. SKUs that do not exist are simply not there.
    pub stock: Vec<Stock>,
}

type StockColumns = (String, String, i64, i64, Timestamp);

dialects! {
    /// Looks for reservations and locks stock, in the order of its keys.
    async fn select_for_survey(
        orders: &[(&str, Uuid)],
        keys: &[(&str, &Sku)],
    ) -> (Vec<(String, Uuid)>, Vec<StockColumns>);
    async fn select_stock_locked(keys: &[(&str, &Sku)]) -> Vec<StockColumns>;
    /// Writes what a batch holds: the stock taken, the reservations and their lines.
    pub async fn hold(taken: &[(ShelfKey, i64)], reservations: &[NewReservation], now: Timestamp) -> ();
    /// Locks, in the order of their keys, the stock that these orders' reservations hold and these SKUs.
    pub async fn lock_shelves(orders: &[(&str, Uuid)], skus: &[(&str, &Sku)]) -> ();
    async fn select_reservations_locked(orders: &[(&str, Uuid)]) -> Vec<(String, Uuid, Uuid, String)>;
    async fn update_states(moved: &[Moved], now: Timestamp) -> ();
    /// Takes what the reservations hold off `reserved`, and off the shelf where the goods are gone.
    async fn let_go(reservations: &[(&str, Uuid, bool)], now: Timestamp) -> ();
    async fn insert_released(reservations: &[NewReservation], now: Timestamp) -> Vec<Uuid>;
    /// Removes tombstones that were written only to hold their orders' places.
    pub async fn delete_tombstones(reservations: &[(&str, Uuid)]) -> ();
    async fn select_lines(group_id: &str, reservations: &[Uuid]) -> Vec<(Uuid, String, i64)>;
}

/// Looks at what there is for a batch of orders, and locks the stock that they ask for.
pub async fn survey(tx: &mut Tx, orders: &[(&str, Uuid)], keys: &[(&str, &Sku)]) -> sqlx::Result<Survey> {
    let (reserved, stock) = select_for_survey(tx, orders, keys).await?;
    let stock = stock.into_iter().map(stock_from_columns).collect::<sqlx::Result<_>>()?;
    Ok(Survey { reserved: reserved.into_iter().collect(), stock })
}

/// Locks stock rows in key order. SKUs that do not exist are simply not there.
pub async fn lock_stock(tx: &mut Tx, keys: &[(&str, &Sku)]) -> sqlx::Result<Vec<Stock>> {
    select_stock_locked(tx, keys).await?.into_iter().map(stock_from_columns).collect()
}

/// Locks the reservations of orders, in the order of their keys. Orders that have none are simply not there.
pub async fn lock_reservations(tx: &mut Tx, orders: &[(&str, Uuid)]) -> sqlx::Result<Vec<Standing>> {
    let rows = select_reservations_locked(tx, orders).await?;
    rows.into_iter()
        .map(|(group_id, order_id, id, state)| {
            let unknown = || sqlx::Error::Decode(format!("unknown reservation state {state:?}").into());
            Ok(Standing { group_id, order_id, id, state: State::find(&state).ok_or_else(unknown)? })
        })
        .collect()
}

/// Moves reservations on, with what that does to the stock they hold.
pub async fn move_many(tx: &mut Tx, moved: &[Moved], now: Timestamp) -> sqlx::Result<()> {
    update_states(tx, moved, now).await?;
    let lets_go: Vec<(&str, Uuid, bool)> = moved
        .iter()
        .filter(|moved| matches!(moved.to, State::Released | State::Fulfilled))
        .map(|moved| (moved.group_id.as_str(), moved.id, moved.to == State::Fulfilled))
        .collect();
    if lets_go.is_empty() { Ok(()) } else { let_go(tx, &lets_go, now).await }
}

/// Writes reservations that hold nothing, except where there is one already; returns the ids of those written. One
/// that another transaction is just writing makes this one wait for it.
pub async fn insert_tombstones(
    tx: &mut Tx,
    tombstones: &[NewReservation],
    now: Timestamp,
) -> sqlx::Result<HashSet<Uuid>> {
    Ok(insert_released(tx, tombstones, now).await?.into_iter().collect())
}

pub async fn create_stock(tx: &mut Tx, group_id: &str, sku: &Sku, now: Timestamp) -> sqlx::Result<()> {
    stockade_kernel::on!(tx, c => {
        sqlx::query(
            "INSERT INTO inventory_stock (group_id, sku, on_hand, updated_at) VALUES ($1, $2, 0, $3)
             ON CONFLICT DO NOTHING",
        )
        .bind(group_id)
        .bind(sku.as_str())
        .bind(now)
        .execute(c)
        .await
        .map(drop)
    })
}

pub async fn adjust(tx: &mut Tx, adjustment: &Adjustment, now: Timestamp) -> sqlx::Result<()> {
    stockade_kernel::on!(tx, c => {
        sqlx::query(
            "UPDATE inventory_stock SET on_hand = $3, updated_at = $4 WHERE group_id = $1 AND sku = $2",
        )
        .bind(&adjustment.group_id)
        .bind(adjustment.sku.as_str())
        .bind(adjustment.on_hand)
        .bind(now)
        .execute(c)
        .await
        .map(drop)
    })?;
    stockade_kernel::on!(tx, c => {
        sqlx::query(
            "INSERT INTO inventory_adjustments (group_id, id, sku, delta, reason, on_hand, created_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7)",
        )
        .bind(&adjustment.group_id)
        .bind(adjustment.id)
        .bind(adjustment.sku.as_str())
        .bind(adjustment.delta)
        .bind(&adjustment.reason)
        .bind(adjustment.on_hand)
        .bind(now)
        .execute(c)
        .await
        .map(drop)
    })
}

/// Is there any stock at all, of any tenant? Tells a fresh store.
pub async fn is_empty(tx: &mut Tx) -> sqlx::Result<bool> {
    let rows: i64 = stockade_kernel::on!(tx, c => {
        sqlx::query_scalar("SELECT count(*) FROM (SELECT 1 FROM inventory_stock LIMIT 1) AS one").fetch_one(c).await
    })?;
    Ok(rows == 0)
}

/// Stock in SKU order, from after `after`.
pub async fn list_stock(
    tx: &mut Tx,
    group_id: &str,
    sku: Option<&str>,
    after: Option<String>,
    limit: i64,
) -> sqlx::Result<Vec<Stock>> {
    let filter = Filter::new("SELECT group_id, sku, on_hand, reserved, updated_at FROM inventory_stock")
        .and("group_id = ?", [group_id.into()])
        .and_some("sku = ?", sku)
        .and_some("sku > ?", after)
        .page("sku", limit);
    fetch_page!(tx, filter, StockColumns)?.into_iter().map(stock_from_columns).collect()
}

#[derive(Debug, Clone)]
pub struct Reservation {
    pub id: Uuid,
    pub number: String,
    pub order_id: Uuid,
    pub state: String,
    pub lines: Vec<(String, i64)>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// Which reservations to list; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct Query {
    pub group_id: String,
    pub id: Option<Uuid>,
    pub number: Option<String>,
    pub order_id: Option<Uuid>,
    pub state: Option<String>,
    pub sku: Option<String>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

/// Newest first, each with its lines.
pub async fn list_reservations(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<Reservation>> {
    let filter = Filter::new("SELECT id, number, order_id, state, created_at, updated_at FROM inventory_reservations")
        .and("group_id = ?", [query.group_id.as_str().into()])
        .and_some("id = ?", query.id)
        .and_some("number = ?", query.number)
        .and_some("order_id = ?", query.order_id)
        .and_some("state = ?", query.state)
        .and_some(
            "EXISTS (SELECT 1 FROM inventory_reservation_lines l \
                 WHERE l.group_id = inventory_reservations.group_id \
                 AND l.reservation_id = inventory_reservations.id AND l.sku = ?)",
            query.sku,
        )
        .and_some("id < ?", query.before)
        .page("id DESC", query.limit);
    let rows = fetch_page!(tx, filter, (Uuid, String, Uuid, String, Timestamp, Timestamp))?;
    let ids: Vec<Uuid> = rows.iter().map(|row| row.0).collect();
    let mut lines: HashMap<Uuid, Vec<(String, i64)>> = HashMap::with_capacity(ids.len());
    if !ids.is_empty() {
        for (reservation_id, sku, quantity) in select_lines(tx, &query.group_id, &ids).await? {
            lines.entry(reservation_id).or_default().push((sku, quantity));
        }
    }
    Ok(rows
        .into_iter()
        .map(|(id, number, order_id, state, created_at, updated_at)| Reservation {
            id,
            number,
            order_id,
            state,
            lines: lines.remove(&id).unwrap_or_default(),
            created_at,
            updated_at,
        })
        .collect())
}

fn stock_from_columns(columns: StockColumns) -> sqlx::Result<Stock> {
    let (group_id, sku, on_hand, reserved, updated_at) = columns;
    let sku = Sku::try_from(sku).map_err(|error| sqlx::Error::Decode(error.into()))?;
    Ok(Stock { group_id, sku, on_hand, reserved, updated_at })
}
