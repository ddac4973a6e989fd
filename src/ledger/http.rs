//! The books over HTTP.

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::store::{self, Balance, Entry};
use crate::http::caller::Caller;
use crate::http::extract::Params;
use crate::http::page::{Page, bad_cursor, fetch_limit, limit, read_cursor, read_uuid_cursor};
use crate::http::problem::Problem;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::Db;

pub fn routes() -> OpenApiRouter<Db> {
    OpenApiRouter::new().routes(routes!(list_ledger_entries)).routes(routes!(list_ledger_balances))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = LedgerEntry)]
pub struct EntryBody {
    id: Uuid,
    order_id: Uuid,
    /// The `order.paid` that it books.
    event_id: Uuid,
    #[schema(example = "customer:alice")]
    account: String,
    /// Plus is a debit, minus a credit; the two entries of a payment sum to zero.
    #[schema(example = -2500)]
    amount_minor: i64,
    #[schema(example = "USD")]
    currency: String,
    created_at: Timestamp,
}

impl From<Entry> for EntryBody {
    fn from(entry: Entry) -> Self {
        Self {
            id: entry.id,
            order_id: entry.order_id,
            event_id: entry.event_id,
            account: entry.account,
            amount_minor: entry.amount_minor,
            currency: entry.currency,
            created_at: entry.created_at,
        }
    }
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListEntries {
    order_id: Option<Uuid>,
    event_id: Option<Uuid>,
    /// `cash` or `customer:<customer_id>`
    account: Option<String>,
    currency: Option<String>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

/// List ledger entries, newest first.
#[utoipa::path(get, path = "/v1/ledger/entries", tag = "ledger", security(("key" = ["viewer"])), params(ListEntries), responses(
    (status = 200, body = Page<EntryBody>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_ledger_entries(
    State(db): State<Db>,
    caller: Caller,
    Params(params): Params<ListEntries>,
) -> Result<Page<EntryBody>, Problem> {
    let limit = limit(params.limit)?;
    let query = store::Query {
        group_id: caller.group_id,
        order_id: params.order_id,
        event_id: params.event_id,
        account: params.account,
        currency: params.currency,
        before: read_uuid_cursor(params.cursor.as_deref())?,
        limit: fetch_limit(limit),
    };
    let entries = store::list_entries(&mut db.read().await?, query).await?;
    Ok(Page::new(entries, limit, |entry| entry.id.to_string()))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = LedgerBalance)]
pub struct BalanceBody {
    #[schema(example = "cash")]
    account: String,
    #[schema(example = "USD")]
    currency: String,
    /// What the entries on the account come to; those of all accounts sum to zero in each currency.
    #[schema(example = 2500)]
    balance_minor: i64,
}

impl From<Balance> for BalanceBody {
    fn from(balance: Balance) -> Self {
        Self { account: balance.account, currency: balance.currency, balance_minor: balance.balance_minor }
    }
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListBalances {
    /// `cash` or `customer:<customer_id>`
    account: Option<String>,
    currency: Option<String>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

/// List balances by account and currency.
#[utoipa::path(get, path = "/v1/ledger/balances", tag = "ledger", security(("key" = ["viewer"])), params(ListBalances), responses(
    (status = 200, body = Page<BalanceBody>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_ledger_balances(
    State(db): State<Db>,
    caller: Caller,
    Params(params): Params<ListBalances>,
) -> Result<Page<BalanceBody>, Problem> {
    let limit = limit(params.limit)?;
    let query = store::BalanceQuery {
        group_id: caller.group_id,
        account: params.account,
        currency: params.currency,
        after: read_cursor(params.cursor.as_deref())?.map(|key| read_key(&key)).transpose()?,
        limit: fetch_limit(limit),
    };
    let balances = store::list_balances(&mut db.read().await?, query).await?;
    Ok(Page::new(balances, limit, |balance| format!("{}/{}", balance.currency, balance.account)))
}

/// A currency has no slash; an account may.
fn read_key(key: &str) -> Result<(String, String), Problem> {
    let (currency, account) = key.split_once('/').ok_or_else(bad_cursor)?;
    Ok((account.to_owned(), currency.to_owned()))
}
