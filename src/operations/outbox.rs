//! The outbox, for operators: what waits to go out, what went, what would not go.

use axum::Json;
use axum::extract::{Path, State};
use serde::Deserialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Operations;
use crate::http::caller::Caller;
use crate::http::extract::{Params, bad_filter};
use crate::http::page::{Page, fetch_limit, limit, read_uuid_cursor};
use crate::http::problem::Problem;
use crate::messaging::outbox::{self, OutboxRow};

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(list_outbox)).routes(routes!(get_outbox_row))
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
