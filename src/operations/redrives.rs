//! Redrives: dead letters sent back in bulk, at a rate, on record.

use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Operations;
use super::actions::{Why, acted, checked_text};
use super::jobs::{Job, ListJobs, check_rate};
use crate::http::caller::Caller;
use crate::http::extract::{Body, Params};
use crate::http::page::Page;
use crate::http::problem::{FieldError, Problem};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::actions;
use stockade_kernel::messaging::jobs::{self, Kind, Letters, Preview};

const RATE_DEFAULT: i64 = 100;
/// As many ids as a caller is likely to have picked by hand; for more there are filters.
const IDS_MAX: usize = 1000;

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(start_redrive, list_redrives))
        .routes(routes!(get_redrive))
        .routes(routes!(stop_redrive))
}

#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({"consumer": "inventory", "reason": "retries-exhausted", "rate": 50, "dry_run": true}))]
pub struct StartRedrive {
    /// Only these letters.
    ids: Vec<Uuid>,
    /// The full or the short name of the queue.
    queue: Option<String>,
    consumer: Option<String>,
    /// The reason code of the letters.
    reason: Option<String>,
    event_type: Option<String>,
    /// Filed at this time or later.
    from: Option<Timestamp>,
    /// Filed before this time.
    to: Option<Timestamp>,
    /// Letters per second, 1 to 10000; 100 if not given.
    rate: Option<i64>,
    /// Only say what would be done.
    dry_run: bool,
    /// For whoever looks later.
    why: Option<String>,
}

/// What a redrive would do.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct RedrivePreview {
    dry_run: bool,
    /// Give this as `to` and what is filed after this look is left alone.
    to: Timestamp,
    #[serde(flatten)]
    preview: Preview,
}

/// Send back the open dead letters that a filter finds.
///
/// The set is frozen now: what is filed later is not in it. Answers with the redrive, which goes on by itself and
/// survives restarts; or, with `dry_run`, with what it would do.
#[utoipa::path(post, path = "/v1/redrives", tag = "operations", security(("key" = ["operator"])), request_body = StartRedrive, responses(
    (status = 200, description = "With dry_run: what would be done", body = RedrivePreview),
    (status = 201, description = "It is under way", body = Job),
    (status = 422, body = Problem, content_type = "application/problem+json"),
))]
async fn start_redrive(
    State(operations): State<Operations>,
    caller: Caller,
    body: Body<StartRedrive>,
) -> Result<Response, Problem> {
    let asked = body.value;
    let order = jobs::Order {
        group_id: caller.messages_of(),
        who: caller.operator.clone(),
        why: checked_text("/why", asked.why)?,
        rate: check_rate(asked.rate, RATE_DEFAULT)?,
    };
    if asked.ids.len() > IDS_MAX {
        let detail = format!("at most {IDS_MAX}; a filter takes any number");
        return Err(Problem::validation(vec![FieldError { pointer: "/ids".to_owned(), detail }]));
    }
    let letters = Letters {
        group_id: caller.messages_of(),
        ids: asked.ids,
        queue: asked.queue.map(|name| operations.full_name(name)),
        consumer: asked.consumer,
        reason: asked.reason,
        event_type: asked.event_type,
        from: asked.from,
        to: asked.to,
    };
    if asked.dry_run {
        let mut tx = operations.kernel.db.read().await?;
        // What was filed in this very millisecond is seen.
        let to = asked.to.unwrap_or_else(|| tx.now().plus(Duration::from_millis(1)));
        let preview = jobs::preview(&mut tx, &Letters { to: Some(to), ..letters }).await?;
        return Ok(Json(RedrivePreview { dry_run: true, to, preview }).into_response());
    }
    let mut tx = operations.kernel.db.begin().await?;
    let id = jobs::start_redrive(&mut tx, &letters, &order).await?;
    let details = json!({ "filter": letters, "rate": order.rate });
    actions::record(&mut tx, &acted(&caller, "redrive.start", id, order.why, details)).await?;
    tx.commit().await?;
    let job = operations.get_job(&caller, Kind::Redrive, &id.to_string()).await?;
    Ok((StatusCode::CREATED, location("/v1/redrives", id), Json(job)).into_response())
}

pub(super) fn location(path: &str, id: Uuid) -> HeaderMap {
    let location = HeaderValue::from_str(&format!("{path}/{id}")).ok();
    location.map(|location| (header::LOCATION, location)).into_iter().collect()
}

/// List redrives, newest first.
#[utoipa::path(get, path = "/v1/redrives", tag = "operations", security(("key" = ["viewer"])), params(ListJobs), responses(
    (status = 200, body = Page<Job>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_redrives(
    State(operations): State<Operations>,
    caller: Caller,
    Params(params): Params<ListJobs>,
) -> Result<Page<Job>, Problem> {
    operations.list_jobs(&caller, Kind::Redrive, params).await
}

/// Get a redrive and how far it has come.
#[utoipa::path(get, path = "/v1/redrives/{id}", tag = "operations", security(("key" = ["viewer"])), params(("id" = String, Path)), responses(
    (status = 200, body = Job),
    (status = 404, body = Problem, content_type = "application/problem+json"),
))]
async fn get_redrive(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Job>, Problem> {
    operations.get_job(&caller, Kind::Redrive, &id).await.map(Json)
}

/// Stop a redrive. What it has not sent yet stays open.
#[utoipa::path(post, path = "/v1/redrives/{id}/stop", tag = "operations", security(("key" = ["operator"])),
    params(("id" = String, Path)), request_body = Option<Why>,
    responses(
        (status = 200, body = Job),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It has ended already", body = Problem, content_type = "application/problem+json"),
    ))]
async fn stop_redrive(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
    body: Option<Body<Why>>,
) -> Result<Json<Job>, Problem> {
    operations.stop_job(&caller, Kind::Redrive, &id, Why::of(body)?).await.map(Json)
}
