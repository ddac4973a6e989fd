//! Orders over HTTP: placing and finding them here, what may be done to them afterwards in `steps.rs`.

mod steps;

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::http::caller::Caller;
use crate::http::extract::{Body, Object, Params, fingerprint, idempotency_key, prefer_wait};
use crate::http::page::{Page, fetch_limit, limit, read_uuid_cursor};
use crate::http::problem::Problem;
use crate::orders::desk::Desk;
use crate::orders::error::OrderError;
use crate::orders::events::{Item, Price, Quantity, Sku};
use crate::orders::model::{Order, Placing, Request, Status};
use crate::orders::service::{self, IdempotencyKey, Placed, Submission};
use crate::orders::store;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::Db;
use stockade_kernel::messaging::brim::Brim;

/// How often a waiting request looks even if no bell rings.
const WAIT_POLL: Duration = Duration::from_millis(250);

pub struct OrdersApi {
    pub db: Db,
    pub desk: Desk,
    pub brim: Brim,
    pub items_max: usize,
    /// The longest that `Prefer: wait` holds a request.
    pub wait_max: Duration,
    /// Cancelled when shutdown begins: nobody is kept waiting then.
    pub draining: CancellationToken,
}

pub fn routes() -> OpenApiRouter<Arc<OrdersApi>> {
    OpenApiRouter::new().routes(routes!(place_order, list_orders)).routes(routes!(get_order)).merge(steps::routes())
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"customer_id": "alice", "items": [{"sku": "WIDGET-A", "quantity": 2, "unit_price_minor": 1250}]}))]
pub struct PlaceOrder {
    customer_id: String,
    #[schema(value_type = Vec<PlaceItem>)]
    items: Vec<Object<PlaceItem>>,
    /// Three capital letters.
    #[serde(default = "default_currency")]
    #[schema(default = "USD")]
    currency: String,
}

/// How many orders the live picture shows.
const LATEST: i64 = 12;
/// Orders of the last minute are counted up to here, so that a look costs the same on the busiest day.
const COUNTED_MAX: i64 = 20_000;

/// The orders' part of the live picture.
#[derive(Debug, Serialize)]
pub struct Latest {
    placed_last_minute: i64,
    /// There were more than could be counted.
    at_least: bool,
    data: Vec<OrderBody>,
}

pub async fn latest(db: Db, group_id: String) -> Result<Latest, Problem> {
    let mut tx = db.read().await?;
    let since = Timestamp::from_millis(tx.now().millis() - 60_000);
    let placed_last_minute = store::count_since(&mut tx, &group_id, since, COUNTED_MAX).await?;
    let query = store::Query { group_id, limit: LATEST, ..store::Query::default() };
    let data = store::list(&mut tx, query).await?.into_iter().map(OrderBody::from).collect();
    Ok(Latest { placed_last_minute, at_least: placed_last_minute >= COUNTED_MAX, data })
}

fn default_currency() -> String {
    "USD".to_owned()
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlaceItem {
    #[schema(value_type = String, example = "WIDGET-A")]
    sku: Sku,
    #[schema(value_type = i64, minimum = 1, example = 2)]
    quantity: Quantity,
    /// In minor units (cents).
    #[serde(default)]
    #[schema(value_type = i64, minimum = 0, default = 0, example = 1250)]
    unit_price_minor: Price,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Order)]
pub struct OrderBody {
    id: Uuid,
    #[schema(example = "ORD-7K3M9Q2A")]
    number: String,
    customer_id: String,
    status: Status,
    /// Why it was rejected, cancelled or expired.
    #[schema(example = "Insufficient WIDGET-C: need 1, have 0")]
    reason: Option<String>,
    items: Vec<OrderItem>,
    total_minor: i64,
    currency: String,
    group_id: String,
    subsidiary_id: Option<String>,
    correlation_id: String,
    created_at: Timestamp,
    updated_at: Timestamp,
    /// While it is reserved: when the stock is given up unless the order is paid. If it expired: when that was.
    hold_expires_at: Option<Timestamp>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct OrderItem {
    sku: String,
    quantity: i64,
    unit_price_minor: i64,
}

impl From<Order> for OrderBody {
    fn from(order: Order) -> Self {
        let items = order.items.into_iter().map(|item| OrderItem {
            sku: item.sku.to_string(),
            quantity: item.quantity.get(),
            unit_price_minor: item.unit_price_minor.get(),
        });
        Self {
            id: order.id.0,
            number: order.number,
            customer_id: order.customer_id,
            status: order.status,
            reason: order.reason,
            items: items.collect(),
            total_minor: order.total_minor,
            currency: order.currency,
            group_id: order.group_id,
            subsidiary_id: order.subsidiary_id,
            correlation_id: order.correlation_id,
            created_at: order.created_at,
            updated_at: order.updated_at,
            hold_expires_at: order.hold_expires_at,
        }
    }
}

/// Place an order.
///
/// The order is committed when this answers; stock is reserved, or the order rejected, moments later. Ask to wait
/// for that with `Prefer: wait=N`.
#[utoipa::path(post, path = "/v1/orders", tag = "orders", security(("key" = ["client"])), request_body = PlaceOrder,
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat of this request answer with the first one's order"),
        ("Prefer" = Option<String>, Header, description = "`wait=N`: answer once the order is reserved or rejected, after N seconds at most"),
    ),
    responses(
        (status = 201, description = "Placed", body = OrderBody, headers(
            ("Location" = String, description = "The order"),
            ("Idempotent-Replayed" = String, description = "`true` if an earlier request placed it"),
        )),
        (status = 400, description = "Malformed JSON, or a bad key", body = Problem, content_type = "application/problem+json"),
        (status = 413, description = "The body is too large", body = Problem, content_type = "application/problem+json"),
        (status = 415, description = "The body is not JSON", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "A field is wrong, or the key was used for another request", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "The database cannot be used just now, or the outbox is full", body = Problem, content_type = "application/problem+json"),
    ))]
async fn place_order(
    State(api): State<Arc<OrdersApi>>,
    caller: Caller,
    headers: HeaderMap,
    body: Body<PlaceOrder>,
) -> Result<Response, Problem> {
    let submission = submission(&api, &caller, &headers, body)?;
    if api.brim.is_full() {
        return Err(OrderError::OutboxFull.into());
    }
    let (order, replayed) = match api.desk.place(submission).await? {
        Placed::New(order) => (order, false),
        // Boxed, as the waiting below: every order would carry the room for it.
        Placed::Replay(id) => (Box::pin(api.load(&caller, &id.0.to_string())).await?, true),
        Placed::KeyReused { first_fingerprint } => return Err(OrderError::KeyReused { first_fingerprint }.into()),
    };
    let wait = prefer_wait(&headers);
    let order = match wait {
        Some(_) => Box::pin(api.wait_while(&caller, order, wait, |status| !status.is_answered())).await?,
        None => order,
    };
    let mut response = created(order, replayed);
    note_wait(response.headers_mut(), wait, api.wait_max);
    Ok(response)
}

fn submission(
    api: &OrdersApi,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body<PlaceOrder>,
) -> Result<Box<Submission>, Problem> {
    let key = idempotency_key(headers)?
        .map(|key| IdempotencyKey { key, fingerprint: fingerprint("POST", "/v1/orders", &body.raw) });
    let items = body.value.items.into_iter().map(|Object(item)| Item {
        sku: item.sku,
        quantity: item.quantity,
        unit_price_minor: item.unit_price_minor,
    });
    let request = Request::try_new(body.value.customer_id, body.value.currency, items.collect(), api.items_max)?;
    let placing = Placing {
        group_id: caller.group_id.clone(),
        subsidiary_id: caller.subsidiary_id.clone(),
        correlation_id: caller.request_id.clone(),
        traceparent: caller.traceparent,
    };
    // Boxed: it is handed from one to the next, each with room for it.
    Ok(Box::new(Submission { placing, request, key }))
}

fn created(order: Order, replayed: bool) -> Response {
    let location = format!("/v1/orders/{}", order.id.0);
    let mut response =
        (StatusCode::CREATED, [(header::LOCATION, location)], Json(OrderBody::from(order))).into_response();
    note_replay(response.headers_mut(), replayed);
    response
}

fn note_replay(headers: &mut HeaderMap, replayed: bool) {
    if replayed {
        headers.insert(HeaderName::from_static("idempotent-replayed"), "true".parse().expect("plain ASCII"));
    }
}

fn note_wait(headers: &mut HeaderMap, wait: Option<u64>, wait_max: Duration) {
    if let Some(seconds) = wait {
        let applied = format!("wait={}", seconds.min(wait_max.as_secs()));
        headers.insert(HeaderName::from_static("preference-applied"), applied.parse().expect("plain ASCII"));
    }
}

/// Get an order by its id or its number.
#[utoipa::path(get, path = "/v1/orders/{id}", tag = "orders", security(("key" = ["viewer"])),
    params(
        ("id" = String, Path, description = "The uuid or the ORD- number"),
        ("Prefer" = Option<String>, Header, description = "`wait=N`: answer once the order is reserved or rejected, after N seconds at most"),
    ),
    responses(
        (status = 200, body = OrderBody),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn get_order(
    State(api): State<Arc<OrdersApi>>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, Problem> {
    let order = api.load(&caller, &id).await?;
    let wait = prefer_wait(&headers);
    let order = api.wait_while(&caller, order, wait, |status| !status.is_answered()).await?;
    let mut response = Json(OrderBody::from(order)).into_response();
    note_wait(response.headers_mut(), wait, api.wait_max);
    Ok(response)
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListOrders {
    status: Option<Status>,
    sku: Option<String>,
    customer_id: Option<String>,
    correlation_id: Option<String>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

/// List orders, newest first.
#[utoipa::path(get, path = "/v1/orders", tag = "orders", security(("key" = ["viewer"])), params(ListOrders), responses(
    (status = 200, body = Page<OrderBody>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_orders(
    State(api): State<Arc<OrdersApi>>,
    caller: Caller,
    Params(params): Params<ListOrders>,
) -> Result<Page<OrderBody>, Problem> {
    let limit = limit(params.limit)?;
    let query = store::Query {
        group_id: caller.group_id,
        status: params.status,
        sku: params.sku,
        customer_id: params.customer_id,
        correlation_id: params.correlation_id,
        before: read_uuid_cursor(params.cursor.as_deref())?,
        limit: fetch_limit(limit),
        ..store::Query::default()
    };
    let orders = store::list(&mut api.db.read().await?, query).await?;
    Ok(Page::new(orders, limit, |order| order.id.0.to_string()))
}

impl OrdersApi {
    async fn load(&self, caller: &Caller, id: &str) -> Result<Order, OrderError> {
        service::get(&mut self.db.read().await?, &caller.group_id, id).await
    }

    /// Waits while the order is in one of these states, as long as the caller asked for, and returns it as it then is.
    async fn wait_while(
        &self,
        caller: &Caller,
        mut order: Order,
        wait: Option<u64>,
        unsettled: impl Fn(Status) -> bool,
    ) -> Result<Order, OrderError> {
        let Some(seconds) = wait else { return Ok(order) };
        caller.only_waits();
        let began = Instant::now();
        let deadline = began + Duration::from_secs(seconds).min(self.wait_max);
        let mut bell = self.db.wakes().bell(service::BELL);
        let id = order.id.0.to_string();
        while unsettled(order.status) && Instant::now() < deadline && !self.draining.is_cancelled() {
            bell.hush();
            order = self.load(caller, &id).await?;
            if unsettled(order.status) {
                // Under load the bell rings all the time, and mostly for others: who has waited long looks less often.
                let next_look = Instant::now() + (began.elapsed() / 4).min(WAIT_POLL);
                let rung = async {
                    bell.rung().await;
                    tokio::time::sleep_until(next_look).await;
                };
                tokio::select! {
                    () = rung => {}
                    () = tokio::time::sleep(WAIT_POLL) => {}
                    () = tokio::time::sleep_until(deadline) => {}
                    () = self.draining.cancelled() => {}
                }
            }
        }
        Ok(order)
    }
}
