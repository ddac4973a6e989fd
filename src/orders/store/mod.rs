//! The tables of orders: `orders_orders`, `orders_lines`, `orders_idempotency`.

mod pg;
mod sqlite;

use std::collections::HashMap;

use uuid::Uuid;

use super::events::{Item, Price, Quantity, Sku};
use super::model::{Order, OrderId, Status};
use super::service::Answer;
use crate::clock::Timestamp;
use crate::db::{Filter, Tx, dialects, fetch_page};

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

dialects! {
    /// Inserts orders with their lines.
    pub async fn insert_many(orders: &[Order]) -> ();
    async fn insert_keys(keys: &[Key<'_>], now: Timestamp) -> ();
    async fn select_keys(keys: &[Key<'_>]) -> Vec<(String, String, Vec<u8>, Uuid)>;
    /// Moves orders that are still placed to the status answered.
    pub async fn answer_many(answers: &[Answer], now: Timestamp) -> ();
    async fn select_lines(group_id: &str, orders: &[Uuid]) -> Vec<(Uuid, String, i64, i64)>;
}

/// Claims keys that are free and returns the standing use of each, in order. A key that another transaction is
/// just claiming makes this one wait for it.
pub async fn claim_keys(tx: &mut Tx, keys: &[Key<'_>], now: Timestamp) -> sqlx::Result<Vec<KeyUse>> {
    insert_keys(tx, keys, now).await?;
    let mut stored: HashMap<(String, String), KeyUse> = HashMap::with_capacity(keys.len());
    for (group_id, key, fingerprint, order_id) in select_keys(tx, keys).await? {
        let fingerprint =
            fingerprint.try_into().map_err(|_| sqlx::Error::Decode("a fingerprint must have 32 bytes".into()))?;
        stored.insert((group_id, key), KeyUse { fingerprint, order_id: OrderId(order_id) });
    }
    keys.iter()
        .map(|key| stored.remove(&(key.group_id.to_owned(), key.key.to_owned())).ok_or(sqlx::Error::RowNotFound))
        .collect()
}

/// Which orders to list; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct Query {
    pub group_id: String,
    pub id: Option<Uuid>,
    pub number: Option<String>,
    pub status: Option<Status>,
    pub customer_id: Option<String>,
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
    crate::on!(tx, c => {
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
