//! Replays: published events sent again, to all consumers or to one.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Operations;
use super::actions::{Why, acted, checked_text};
use super::jobs::{Job, ListJobs, check_rate};
use super::redrives::location;
use crate::http::caller::Caller;
use crate::http::extract::{Body, Params};
use crate::http::page::Page;
use crate::http::problem::{FieldError, Problem};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::actions;
use stockade_kernel::messaging::jobs::{self, Events, Kind, TypeCount};

const RATE_DEFAULT: i64 = 500;

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(start_replay, list_replays))
        .routes(routes!(get_replay))
        .routes(routes!(stop_replay))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"aggregate_type": "order", "from": "2026-11-16T00:00:00Z", "consumer": "notifications", "dry_run": true}))]
pub struct StartReplay {
    aggregate_type: Option<String>,
    /// Written at this time or later.
    from: Timestamp,
    /// Written before this time; now if not given, and never later than now.
    to: Option<Timestamp>,
    /// Only to this consumer, and only what it takes; to all if not given.
    consumer: Option<String>,
    /// Events per second, 1 to 10000; 500 if not given.
    rate: Option<i64>,
    /// Only say what would be done.
    #[serde(default)]
    dry_run: bool,
    /// For whoever looks later.
    why: Option<String>,
}

/// What a replay would send.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ReplayPreview {
    dry_run: bool,
    total: i64,
    by_type: Vec<TypeCount>,
    from: Timestamp,
    to: Timestamp,
    consumer: Option<String>,
}

/// Send published events again, the archived ones too.
///
/// They keep their ids and their bytes, so each consumer does only what it has not done. Answers with the replay, which
/// goes on by itself and survives restarts; or, with `dry_run`, with what it would send.
#[utoipa::path(post, path = "/v1/replays", tag = "operations", security(("key" = ["operator", "platform"])), request_body = StartReplay, responses(
    (status = 200, description = "With dry_run: what would be sent", body = ReplayPreview),
    (status = 201, description = "It is under way", body = Job),
    (status = 422, body = Problem, content_type = "application/problem+json"),
))]
async fn start_replay(
    State(operations): State<Operations>,
    caller: Caller,
    body: Body<StartReplay>,
) -> Result<Response, Problem> {
    let asked = body.value;
    let order = jobs::Order {
        group_id: None,
        who: caller.operator.clone(),
        why: checked_text("/why", asked.why)?,
        rate: check_rate(asked.rate, RATE_DEFAULT)?,
    };
    let wrong =
        |pointer: &str, detail: String| Problem::validation(vec![FieldError { pointer: pointer.to_owned(), detail }]);
    let now = operations.kernel.db.clock().now();
    let to = asked.to.unwrap_or(now).min(now);
    if asked.from > asked.to.unwrap_or(asked.from) {
        return Err(wrong("/from", "must not be later than `to`".to_owned()));
    }
    let events = Events { aggregate_type: asked.aggregate_type, from: asked.from, to, consumer: asked.consumer };
    let found = jobs::count_events(&mut operations.kernel.db.read().await?, &events, &operations.topology).await?;
    let Some(by_type) = found else {
        let consumer = events.consumer.unwrap_or_default();
        return Err(wrong("/consumer", format!("there is no consumer {consumer}")));
    };
    let total = by_type.iter().map(|of_type| of_type.count).sum();
    if asked.dry_run {
        let Events { from, to, consumer, .. } = events;
        return Ok(Json(ReplayPreview { dry_run: true, total, by_type, from, to, consumer }).into_response());
    }
    let mut tx = operations.kernel.db.begin().await?;
    let id = jobs::start_replay(&mut tx, &events, total, &order).await?;
    let details = json!({ "filter": events, "rate": order.rate });
    actions::record(&mut tx, &acted(&caller, "replay.start", id, order.why, details)).await?;
    tx.commit().await?;
    let job = operations.get_job(&caller, Kind::Replay, &id.to_string()).await?;
    Ok((StatusCode::CREATED, location("/v1/replays", id), Json(job)).into_response())
}

/// List replays, newest first.
#[utoipa::path(get, path = "/v1/replays", tag = "operations", security(("key" = ["viewer", "platform"])), params(ListJobs), responses(
    (status = 200, body = Page<Job>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_replays(
    State(operations): State<Operations>,
    caller: Caller,
    Params(params): Params<ListJobs>,
) -> Result<Page<Job>, Problem> {
    operations.list_jobs(&caller, Kind::Replay, params).await
}

/// Get a replay and how far it has come.
#[utoipa::path(get, path = "/v1/replays/{id}", tag = "operations", security(("key" = ["viewer", "platform"])), params(("id" = String, Path)), responses(
    (status = 200, body = Job),
    (status = 404, body = Problem, content_type = "application/problem+json"),
))]
async fn get_replay(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Job>, Problem> {
    operations.get_job(&caller, Kind::Replay, &id).await.map(Json)
}

/// Stop a replay.
#[utoipa::path(post, path = "/v1/replays/{id}/stop", tag = "operations", security(("key" = ["operator", "platform"])),
    params(("id" = String, Path)), request_body = Option<Why>,
    responses(
        (status = 200, body = Job),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It has ended already", body = Problem, content_type = "application/problem+json"),
    ))]
async fn stop_replay(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
    body: Option<Body<Why>>,
) -> Result<Json<Job>, Problem> {
    operations.stop_job(&caller, Kind::Replay, &id, Why::of(body)?).await.map(Json)
}
