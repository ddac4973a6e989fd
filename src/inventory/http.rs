//! Stock and reservations over HTTP.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::error::InventoryError;
use super::service::{self, Change};
use super::store::{self, Reservation, Stock};
use crate::http::caller::Caller;
use crate::http::extract::{Body, Params, bad_filter};
use crate::http::page::{Page, fetch_limit, limit, read_cursor, read_uuid_cursor};
use crate::http::problem::Problem;
use crate::orders::events::{QUANTITY_MAX, Sku};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::Db;
use stockade_kernel::messaging::event::is_plain_text;

const REASON_CHARS_MAX: usize = 200;
/// What has to be escaped for a SKU to be one segment of a path.
const NOT_IN_A_SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

pub fn routes() -> OpenApiRouter<Db> {
    OpenApiRouter::new()
        .routes(routes!(list_stock))
        .routes(routes!(get_stock, put_stock))
        .routes(routes!(adjust_stock))
        .routes(routes!(list_reservations))
        .routes(routes!(get_reservation))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Stock)]
pub struct StockBody {
    #[schema(example = "WIDGET-A")]
    sku: String,
    #[schema(example = 100)]
    on_hand: i64,
    /// Held for orders.
    #[schema(example = 2)]
    reserved: i64,
    /// `on_hand − reserved`, never negative.
    #[schema(example = 98)]
    available: i64,
    updated_at: Timestamp,
}

impl From<Stock> for StockBody {
    fn from(stock: Stock) -> Self {
        Self {
            available: stock.available(),
            sku: stock.sku.to_string(),
            on_hand: stock.on_hand,
            reserved: stock.reserved,
            updated_at: stock.updated_at,
        }
    }
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListStock {
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

/// List stock by SKU.
#[utoipa::path(get, path = "/v1/stock", tag = "stock", security(("key" = ["viewer"])), params(ListStock), responses(
    (status = 200, body = Page<StockBody>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_stock(
    State(db): State<Db>,
    caller: Caller,
    Params(params): Params<ListStock>,
) -> Result<Page<StockBody>, Problem> {
    let limit = limit(params.limit)?;
    let after = read_cursor(params.cursor.as_deref())?;
    let rows = store::list_stock(&mut db.read().await?, &caller.group_id, None, after, fetch_limit(limit)).await?;
    Ok(Page::new(rows, limit, |row| row.sku.to_string()))
}

/// Get the stock of a SKU.
#[utoipa::path(get, path = "/v1/stock/{sku}", tag = "stock", security(("key" = ["viewer"])),
    params(("sku" = String, Path, example = "WIDGET-A")),
    responses(
        (status = 200, body = StockBody),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn get_stock(State(db): State<Db>, caller: Caller, Path(sku): Path<String>) -> Result<Json<StockBody>, Problem> {
    let row = store::list_stock(&mut db.read().await?, &caller.group_id, Some(&sku), None, 1).await?.pop();
    let row = row.ok_or(InventoryError::NotFound { what: "SKU", id: sku })?;
    Ok(Json(row.into()))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PutStock {
    #[schema(example = 100, minimum = 0)]
    on_hand: i64,
}

/// Set what is on hand, creating the SKU if need be. Posts an adjustment of the difference.
#[utoipa::path(put, path = "/v1/stock/{sku}", tag = "stock", security(("key" = ["operator"])), request_body = PutStock,
    params(("sku" = String, Path, example = "WIDGET-A")),
    responses(
        (status = 200, body = StockBody),
        (status = 409, description = "Less than is reserved", body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json"),
    ))]
async fn put_stock(
    State(db): State<Db>,
    caller: Caller,
    Path(sku): Path<String>,
    body: Body<PutStock>,
) -> Result<Json<StockBody>, Problem> {
    let sku = read_sku(sku)?;
    if !(0..=QUANTITY_MAX).contains(&body.value.on_hand) {
        let rule = format!("must be 0 to {QUANTITY_MAX}");
        return Err(InventoryError::Invalid { pointer: "/on_hand", rule }.into());
    }
    let mut tx = db.begin().await?;
    let change = Change::Set(body.value.on_hand);
    let stock = service::adjust(&mut tx, caller.origin(), &sku, change, "set").await?;
    tx.commit().await?;
    Ok(Json(stock.into()))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdjustStock {
    #[schema(example = 25)]
    delta: i64,
    #[schema(example = "delivery 4711")]
    reason: String,
}

/// Change what is on hand, and say why.
#[utoipa::path(post, path = "/v1/stock/{sku}/adjustments", tag = "stock", security(("key" = ["operator"])), request_body = AdjustStock,
    params(("sku" = String, Path, example = "WIDGET-A")),
    responses(
        (status = 201, description = "Adjusted", body = StockBody),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It would go negative", body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json"),
    ))]
async fn adjust_stock(
    State(db): State<Db>,
    caller: Caller,
    Path(sku): Path<String>,
    body: Body<AdjustStock>,
) -> Result<Response, Problem> {
    let sku = read_sku(sku)?;
    let AdjustStock { delta, reason } = body.value;
    if delta == 0 || delta.unsigned_abs() > QUANTITY_MAX.unsigned_abs() {
        let rule = format!("must be a change of 1 to {QUANTITY_MAX} either way");
        return Err(InventoryError::Invalid { pointer: "/delta", rule }.into());
    }
    if !is_plain_text(&reason, REASON_CHARS_MAX) {
        let rule = format!("must have 1 to {REASON_CHARS_MAX} characters and no control characters");
        return Err(InventoryError::Invalid { pointer: "/reason", rule }.into());
    }
    let mut tx = db.begin().await?;
    let stock = service::adjust(&mut tx, caller.origin(), &sku, Change::By(delta), &reason).await?;
    tx.commit().await?;
    let location = format!("/v1/stock/{}", utf8_percent_encode(sku.as_str(), NOT_IN_A_SEGMENT));
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], Json(StockBody::from(stock))).into_response())
}

fn read_sku(sku: String) -> Result<Sku, Problem> {
    Sku::try_from(sku).map_err(|rule| InventoryError::Invalid { pointer: "", rule }.into())
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Reservation)]
pub struct ReservationBody {
    id: Uuid,
    #[schema(example = "RES-7K3M9Q2A")]
    number: String,
    order_id: Uuid,
    #[schema(example = "held")]
    state: String,
    lines: Vec<ReservationLine>,
    created_at: Timestamp,
    updated_at: Timestamp,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ReservationLine {
    sku: String,
    quantity: i64,
}

impl From<Reservation> for ReservationBody {
    fn from(reservation: Reservation) -> Self {
        let lines = reservation.lines.into_iter().map(|(sku, quantity)| ReservationLine { sku, quantity });
        Self {
            id: reservation.id,
            number: reservation.number,
            order_id: reservation.order_id,
            state: reservation.state,
            lines: lines.collect(),
            created_at: reservation.created_at,
            updated_at: reservation.updated_at,
        }
    }
}

/// How many reservations the live picture shows.
const LATEST: i64 = 12;

/// The reservations' part of the live picture.
pub async fn latest(db: Db, group_id: String) -> Result<Vec<ReservationBody>, Problem> {
    let query = store::Query { group_id, limit: LATEST, ..store::Query::default() };
    let reservations = store::list_reservations(&mut db.read().await?, query).await?;
    Ok(reservations.into_iter().map(ReservationBody::from).collect())
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListReservations {
    order_id: Option<Uuid>,
    /// held, committed, fulfilled or released
    state: Option<String>,
    sku: Option<String>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

const RESERVATION_STATES: [&str; 4] = ["held", "committed", "fulfilled", "released"];

/// List reservations, newest first.
#[utoipa::path(get, path = "/v1/reservations", tag = "reservations", security(("key" = ["viewer"])), params(ListReservations), responses(
    (status = 200, body = Page<ReservationBody>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_reservations(
    State(db): State<Db>,
    caller: Caller,
    Params(params): Params<ListReservations>,
) -> Result<Page<ReservationBody>, Problem> {
    let limit = limit(params.limit)?;
    if params.state.as_deref().is_some_and(|state| !RESERVATION_STATES.contains(&state)) {
        return Err(bad_filter(format!("state must be one of {}", RESERVATION_STATES.join(", "))));
    }
    let query = store::Query {
        group_id: caller.group_id,
        order_id: params.order_id,
        state: params.state,
        sku: params.sku,
        before: read_uuid_cursor(params.cursor.as_deref())?,
        limit: fetch_limit(limit),
        ..store::Query::default()
    };
    let reservations = store::list_reservations(&mut db.read().await?, query).await?;
    Ok(Page::new(reservations, limit, |reservation| reservation.id.to_string()))
}

/// Get a reservation by its id or its number.
#[utoipa::path(get, path = "/v1/reservations/{id}", tag = "reservations", security(("key" = ["viewer"])),
    params(("id" = String, Path, description = "The uuid or the RES- number")),
    responses(
        (status = 200, body = ReservationBody),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn get_reservation(
    State(db): State<Db>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<ReservationBody>, Problem> {
    let query = store::Query { group_id: caller.group_id, limit: 1, ..store::Query::default() };
    let query = match Uuid::try_parse(&id) {
        Ok(id) => store::Query { id: Some(id), ..query },
        Err(_) => store::Query { number: Some(id.to_ascii_uppercase()), ..query },
    };
    let reservation = store::list_reservations(&mut db.read().await?, query).await?.pop();
    let reservation = reservation.ok_or(InventoryError::NotFound { what: "reservation", id })?;
    Ok(Json(reservation.into()))
}
