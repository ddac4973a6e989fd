//! The outbox, for operators: what waits to go out, what went, what would not go.

use axum::Json;
use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Operations;
use super::actions::{Why, acted};
use crate::http::caller::Caller;
use crate::http::extract::{Body, Params, bad_filter};
use crate::http::page::{Page, fetch_limit, limit, read_uuid_cursor};
use crate::http::problem::Problem;
use stockade_kernel::messaging::actions;
use stockade_kernel::messaging::outbox::{self, Dead, OutboxRow};

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(list_outbox))
        .routes(routes!(get_outbox_row))
        .routes(routes!(retry_outbox_row))
        .routes(routes!(retry_outbox))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListOutbox {
    /// pending, published, failed or dead
    status: Option<String>,
    aggregate_type: Option<String>,
    aggregate_id: Option<String>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

const STATUSES: [&str; 4] = ["pending", "published", "failed", "dead"];

/// List outbox rows, newest first.
#[utoipa::path(get, path = "/v1/outbox", tag = "operations", security(("key" = ["viewer"])), params(ListOutbox), responses(
    (status = 200, body = Page<OutboxRow>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_outbox(
    State(operations): State<Operations>,
    caller: Caller,
    Params(params): Params<ListOutbox>,
) -> Result<Page<OutboxRow>, Problem> {
    let limit = limit(params.limit)?;
    if params.status.as_deref().is_some_and(|status| !STATUSES.contains(&status)) {
        return Err(bad_filter(format!("status must be one of {}", STATUSES.join(", "))));
    }
    let query = outbox::Query {
        group_id: caller.messages_of(),
        status: params.status,
        aggregate_type: params.aggregate_type,
        aggregate_id: params.aggregate_id,
        before: read_uuid_cursor(params.cursor.as_deref())?,
        limit: fetch_limit(limit),
    };
    let rows = outbox::list(&mut operations.kernel.db.read().await?, query).await?;
    Ok(Page::new(rows, limit, |row| row.id.to_string()))
}

/// Get an outbox row.
#[utoipa::path(get, path = "/v1/outbox/{id}", tag = "operations", security(("key" = ["viewer"])),
    params(("id" = String, Path)),
    responses(
        (status = 200, body = OutboxRow),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn get_outbox_row(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<OutboxRow>, Problem> {
    let missing = || Problem::not_found(format!("there is no outbox row {id}"));
    let id = Uuid::try_parse(&id).map_err(|_| missing())?;
    let row = outbox::find(&mut operations.kernel.db.read().await?, caller.messages_of(), id).await?;
    row.map(Json).ok_or_else(missing)
}

/// Publish a row again that was given up on, with its attempts forgotten.
#[utoipa::path(post, path = "/v1/outbox/{id}/retry", tag = "operations", security(("key" = ["operator"])),
    params(("id" = String, Path)), request_body = Option<Why>,
    responses(
        (status = 200, body = OutboxRow),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It is not dead", body = Problem, content_type = "application/problem+json"),
    ))]
async fn retry_outbox_row(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
    body: Option<Body<Why>>,
) -> Result<Json<OutboxRow>, Problem> {
    let why = Why::of(body)?;
    let missing = || Problem::not_found(format!("there is no outbox row {id}"));
    let id = Uuid::try_parse(&id).map_err(|_| missing())?;
    let mut tx = operations.kernel.db.begin().await?;
    let revived = outbox::revive(&mut tx, caller.messages_of(), &Dead { id: Some(id), ..Dead::default() }).await?;
    let row = outbox::find(&mut tx, caller.messages_of(), id).await?.ok_or_else(missing)?;
    if revived == 0 {
        return Err(Problem::new(409, "not-dead", format!("the row is {}; only a dead one is tried anew", row.status)));
    }
    actions::record(&mut tx, &acted(&caller, "outbox.retry", id, why, json!({}))).await?;
    tx.commit().await?;
    Ok(Json(row))
}

#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({"aggregate_type": "order", "reason": "the queue is bound again"}))]
pub struct RetryOutbox {
    aggregate_type: Option<String>,
    aggregate_id: Option<String>,
    /// For whoever looks later.
    reason: Option<String>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Retried {
    retried: u64,
}

/// Publish every row again that was given up on and that the filter finds; all of them without one.
#[utoipa::path(post, path = "/v1/outbox/retry", tag = "operations", security(("key" = ["operator"])), request_body = Option<RetryOutbox>, responses(
    (status = 200, body = Retried),
    (status = 422, body = Problem, content_type = "application/problem+json"),
))]
async fn retry_outbox(
    State(operations): State<Operations>,
    caller: Caller,
    body: Option<Body<RetryOutbox>>,
) -> Result<Json<Retried>, Problem> {
    let asked = body.map(|body| body.value).unwrap_or_default();
    let why = Why { reason: asked.reason }.checked()?;
    let details = json!({ "aggregate_type": &asked.aggregate_type, "aggregate_id": &asked.aggregate_id });
    let dead = Dead { id: None, aggregate_type: asked.aggregate_type, aggregate_id: asked.aggregate_id };
    let mut tx = operations.kernel.db.begin().await?;
    let retried = outbox::revive(&mut tx, caller.messages_of(), &dead).await?;
    if retried > 0 {
        actions::record(&mut tx, &acted(&caller, "outbox.retry", "dead rows", why, details)).await?;
        tx.commit().await?;
    }
    Ok(Json(Retried { retried }))
}
