//! The tables of orders: `orders_orders`, `orders_lines`, `orders_idempotency`.

mod pg;
mod sqlite;

use std::collections::HashMap;
use std::time::Duration;

use uuid::Uuid;

use super::events::{Amount, Currency, Customer, Item, Price, Quantity, Sku};
use super::model::{Order, OrderId, Standing, Status};
use super::service::Answer;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::{Filter, Tx, dialects, fetch_page};

/// A key to claim, with the use it would get.
#[derive(Debug, Clone, Copy)]
pub struct Key<'a> {
    pub group_id: &'a str,
    pub route: &'static str,
    pub key: &'a str,
    pub first_use: &'a KeyUse,
}

/// What a key was first used for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyUse {
    pub fingerprint: [u8; 32],
    pub order_id: OrderId,
}

/// A key used for a step of an order.
#[derive(Debug, Clone)]
pub struct StepKey<'a> {
    pub group_id: &'a str,
    pub route: &'static str,
    pub key: &'a str,
    pub fingerprint: [u8; 32],
    pub order_id: OrderId,
}

/// Tenant, route and key: within these a key stands for one request.
pub type Scope = (String, String, String);

impl StepKey<'_> {
    pub fn scope(&self) -> Scope {
        (self.group_id.to_owned(), self.route.to_owned(), self.key.to_owned())
    }
}

/// A step that an order takes, from the state it was met in.
#[derive(Debug, Clone)]
pub struct Taken<'a> {
    pub group_id: &'a str,
    pub id: OrderId,
    pub from: Status,
    pub to: Status,
    pub reason: Option<&'a str>,
}

dialects! {
    /// Inserts orders with their lines.
    pub async fn insert_many(orders: &[Order]) -> ();
    async fn insert_keys(keys: &[Key<'_>], now: Timestamp) -> ();
    async fn select_keys(keys: &[Key<'_>]) -> Vec<(String, String, Vec<u8>, Uuid)>;
    /// Moves orders that are still placed to the status answered, those reserved with a hold; returns how many.
    pub async fn answer_many(answers: &[Answer], hold: Duration, now: Timestamp) -> u64;
    async fn select_locked(orders: &[(&str, OrderId)]) -> Vec<StandingColumns>;
    async fn select_step_keys(keys: &[StepKey<'_>]) -> Vec<(String, String, String, Vec<u8>)>;
    /// Writes keys that must be new; one that is taken fails the transaction.
    async fn write_step_keys(keys: &[StepKey<'_>], now: Timestamp) -> ();
    async fn move_many(taken: &[Taken<'_>], now: Timestamp) -> u64;
    /// Has any hold run out? Only a look: nothing is locked.
    pub async fn any_hold_over(now: Timestamp) -> bool;
    async fn end_holds(limit: i64, reason: Option<&str>, now: Timestamp) -> Vec<StandingColumns>;
    async fn select_lines(group_id: &str, orders: &[Uuid]) -> Vec<(Uuid, String, i64, i64)>;
}

/// Claims keys that are free and returns the standing use of each, in order. A key that another transaction is
/// just claiming makes this one wait for it.
pub async fn claim_keys(tx: &mut Tx, keys: &[Key<'_>], now: Timestamp) -> sqlx::Result<Vec<KeyUse>> {
    insert_keys(tx, keys, now).await?;
    let mut stored: HashMap<(String, String), KeyUse> = HashMap::with_capacity(keys.len());
    for (group_id, key, fingerprint, order_id) in select_keys(tx, keys).await? {
        let fingerprint = fingerprint_from_column(fingerprint)?;
        stored.insert((group_id, key), KeyUse { fingerprint, order_id: OrderId(order_id) });
    }
    keys.iter()
        .map(|key| stored.remove(&(key.group_id.to_owned(), key.key.to_owned())).ok_or(sqlx::Error::RowNotFound))
        .collect()
}

/// Locks orders in the order of their keys and returns each with when it last changed. Those that do not exist are
/// simply not there.
pub async fn lock_many(tx: &mut Tx, orders: &[(&str, OrderId)]) -> sqlx::Result<Vec<(Standing, Timestamp)>> {
    select_locked(tx, orders).await?.into_iter().map(standing_from_columns).collect()
}

/// The fingerprints of those among `keys` that have been used.
pub async fn find_step_keys(tx: &mut Tx, keys: &[StepKey<'_>]) -> sqlx::Result<HashMap<Scope, [u8; 32]>> {
    if keys.is_empty() {
        return Ok(HashMap::new());
    }
    let rows = select_step_keys(tx, keys).await?;
    rows.into_iter()
        .map(|(group_id, route, key, fingerprint)| Ok(((group_id, route, key), fingerprint_from_column(fingerprint)?)))
        .collect()
}

pub async fn insert_step_keys(tx: &mut Tx, keys: &[StepKey<'_>], now: Timestamp) -> sqlx::Result<()> {
    if keys.is_empty() { Ok(()) } else { write_step_keys(tx, keys, now).await }
}

/// Moves orders that were locked. One that is not in the state it was met in fails the transaction: its event must
/// not get out without it.
pub async fn take_many(tx: &mut Tx, taken: &[Taken<'_>], now: Timestamp) -> sqlx::Result<()> {
    let moved = move_many(tx, taken, now).await?;
    if moved == taken.len() as u64 { Ok(()) } else { Err(sqlx::Error::RowNotFound) }
}

/// Expires reserved orders whose hold has run out, the longest over first; those locked by others are skipped.
pub async fn expire_many(tx: &mut Tx, limit: i64, reason: Option<&str>, now: Timestamp) -> sqlx::Result<Vec<Standing>> {
    let rows = end_holds(tx, limit, reason, now).await?;
    rows.into_iter().map(|columns| Ok(standing_from_columns(columns)?.0)).collect()
}

/// Forgets keys first used before that time, up to `limit` of them; returns how many.
pub async fn forget_keys(tx: &mut Tx, before: Timestamp, limit: i64) -> sqlx::Result<u64> {
    stockade_kernel::on!(tx, c => {
        sqlx::query(
            "DELETE FROM orders_idempotency WHERE (group_id, route, key) IN (
                 SELECT group_id, route, key FROM orders_idempotency WHERE created_at < $1 ORDER BY created_at LIMIT $2)",
        )
        .bind(before)
        .bind(limit)
        .execute(c)
        .await
        .map(|done| done.rows_affected())
    })
}

/// Which orders to list; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct Query {
    pub group_id: String,
    pub id: Option<Uuid>,
    pub number: Option<String>,
    pub status: Option<Status>,
    pub customer_id: Option<String>,
    pub correlation_id: Option<String>,
    pub sku: Option<String>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

type Columns = (
    Uuid,
    String,
    String,
    String,
    Option<String>,
    i64,
    String,
    String,
    Option<String>,
    String,
    Timestamp,
    Timestamp,
    Option<Timestamp>,
);

/// Newest first, each with its lines.
pub async fn list(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<Order>> {
    let filter = Filter::new(
        "SELECT id, number, customer_id, status, reason, total_minor, currency, group_id, subsidiary_id, \
         correlation_id, created_at, updated_at, hold_expires_at FROM orders_orders",
    )
    .and("group_id = ?", [query.group_id.as_str().into()])
    .and_some("id = ?", query.id)
    .and_some("number = ?", query.number)
    .and_some("status = ?", query.status.map(Status::as_str))
    .and_some("customer_id = ?", query.customer_id)
    .and_some("correlation_id = ?", query.correlation_id)
    .and_some(
        "EXISTS (SELECT 1 FROM orders_lines l WHERE l.group_id = orders_orders.group_id \
         AND l.order_id = orders_orders.id AND l.sku = ?)",
        query.sku,
    )
    .and_some("id < ?", query.before)
    .page("id DESC", query.limit);
    let rows = fetch_page!(tx, filter, Columns)?;
    let ids: Vec<Uuid> = rows.iter().map(|row| row.0).collect();
    let mut items: HashMap<Uuid, Vec<Item>> = HashMap::with_capacity(ids.len());
    if !ids.is_empty() {
        for (order_id, sku, quantity, price) in select_lines(tx, &query.group_id, &ids).await? {
            items.entry(order_id).or_default().push(item_from_columns(sku, quantity, price)?);
        }
    }
    rows.into_iter()
        .map(|columns| {
            let items = items.remove(&columns.0).unwrap_or_default();
            order_from_columns(columns, items)
        })
        .collect()
}

/// How many orders were placed since then, up to `max`. By their ids, which begin with the time they were minted at.
pub async fn count_since(tx: &mut Tx, group_id: &str, since: Timestamp, max: i64) -> sqlx::Result<i64> {
    let first = Uuid::from_u128(u128::from(since.millis().unsigned_abs()) << 80);
    stockade_kernel::on!(tx, c => {
        sqlx::query_scalar(
            "SELECT count(*) FROM (SELECT 1 FROM orders_orders WHERE group_id = $1 AND id >= $2 LIMIT $3) AS recent",
        )
        .bind(group_id)
        .bind(first)
        .bind(max)
        .fetch_one(c)
        .await
    })
}

fn item_from_columns(sku: String, quantity: i64, price: i64) -> sqlx::Result<Item> {
    let item = || -> Result<Item, String> {
        Ok(Item {
            sku: Sku::try_from(sku)?,
            quantity: Quantity::try_from(quantity)?,
            unit_price_minor: Price::try_from(price)?,
        })
    };
    item().map_err(|error| sqlx::Error::Decode(error.into()))
}

fn fingerprint_from_column(bytes: Vec<u8>) -> sqlx::Result<[u8; 32]> {
    bytes.try_into().map_err(|_| sqlx::Error::Decode("a fingerprint must have 32 bytes".into()))
}

/// Tenant, id, subsidiary, correlation id, status, customer, total, currency, last change.
type StandingColumns = (String, Uuid, String, Option<String>, String, String, String, i64, String, Timestamp);

fn standing_from_columns(columns: StandingColumns) -> sqlx::Result<(Standing, Timestamp)> {
    let (group_id, id, number, subsidiary_id, correlation_id, ..) = columns;
    let (.., status, customer_id, total_minor, currency, updated_at) = columns;
    let standing = || -> Result<Standing, String> {
        Ok(Standing {
            group_id,
            id: OrderId(id),
            number,
            subsidiary_id,
            correlation_id,
            status: Status::find(&status).ok_or_else(|| format!("unknown order status {status:?}"))?,
            customer_id: Customer::try_from(customer_id)?,
            total: Amount::try_from(total_minor)?,
            currency: Currency::try_from(currency)?,
        })
    };
    Ok((standing().map_err(|error| sqlx::Error::Decode(error.into()))?, updated_at))
}

fn order_from_columns(columns: Columns, items: Vec<Item>) -> sqlx::Result<Order> {
    let (id, number, customer_id, status, reason, total_minor, currency, ..) = columns;
    let (.., group_id, subsidiary_id, correlation_id, created_at, updated_at, hold_expires_at) = columns;
    let unknown = || sqlx::Error::Decode(format!("unknown order status {status:?}").into());
    Ok(Order {
        id: OrderId(id),
        number,
        customer_id,
        status: Status::find(&status).ok_or_else(unknown)?,
        reason,
        items,
        total_minor,
        currency,
        group_id,
        subsidiary_id,
        correlation_id,
        created_at,
        updated_at,
        hold_expires_at,
    })
}
