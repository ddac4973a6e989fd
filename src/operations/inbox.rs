//! The inbox, for operators: which consumer has dealt with which event.

use axum::Json;
use axum::extract::{Path, State};
use serde::Deserialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Operations;
use crate::http::caller::Caller;
use crate::http::extract::{Params, bad_filter};
use crate::http::page::{Page, bad_cursor, fetch_limit, limit, read_cursor};
use crate::http::problem::Problem;
use stockade_kernel::messaging::inbox::{self, InboxRow};

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(list_inbox)).routes(routes!(get_inbox_row))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListInbox {
    consumer: Option<String>,
    /// processing, processed, waiting, retrying or dead
    state: Option<String>,
    event_id: Option<Uuid>,
    /// Only events delivered again at least this often.
    min_duplicates: Option<i64>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

const STATES: [&str; 5] = ["processing", "processed", "waiting", "retrying", "dead"];

/// List inbox rows by consumer, the newest events of each first.
#[utoipa::path(get, path = "/v1/inbox", tag = "operations", security(("key" = ["viewer"])), params(ListInbox), responses(
    (status = 200, body = Page<InboxRow>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_inbox(
    State(operations): State<Operations>,
    caller: Caller,
    Params(params): Params<ListInbox>,
) -> Result<Page<InboxRow>, Problem> {
    let limit = limit(params.limit)?;
    if params.state.as_deref().is_some_and(|state| !STATES.contains(&state)) {
        return Err(bad_filter(format!("state must be one of {}", STATES.join(", "))));
    }
    let query = inbox::Query {
        group_id: caller.messages_of(),
        consumer: params.consumer,
        state: params.state,
        event_id: params.event_id,
        duplicates_min: params.min_duplicates,
        before: read_cursor(params.cursor.as_deref())?.map(|key| read_key(&key)).transpose()?,
        limit: fetch_limit(limit),
    };
    let rows = inbox::list(&mut operations.kernel.db.read().await?, query).await?;
    Ok(Page::new(rows, limit, |row| format!("{}/{}", row.consumer, row.event_id)))
}

fn read_key(key: &str) -> Result<(String, Uuid), Problem> {
    let (consumer, event_id) = key.rsplit_once('/').ok_or_else(bad_cursor)?;
    Ok((consumer.to_owned(), Uuid::try_parse(event_id).map_err(|_| bad_cursor())?))
}

/// Get what a consumer knows of an event.
#[utoipa::path(get, path = "/v1/inbox/{consumer}/{event_id}", tag = "operations", security(("key" = ["viewer"])),
    params(("consumer" = String, Path, example = "inventory"), ("event_id" = String, Path)),
    responses(
        (status = 200, body = InboxRow),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn get_inbox_row(
    State(operations): State<Operations>,
    caller: Caller,
    Path((consumer, event_id)): Path<(String, String)>,
) -> Result<Json<InboxRow>, Problem> {
    let missing = || Problem::not_found(format!("{consumer} has seen no event {event_id}"));
    let query = inbox::Query {
        group_id: caller.messages_of(),
        consumer: Some(consumer.clone()),
        event_id: Some(Uuid::try_parse(&event_id).map_err(|_| missing())?),
        limit: 1,
        ..inbox::Query::default()
    };
    let row = inbox::list(&mut operations.kernel.db.read().await?, query).await?.pop();
    row.map(Json).ok_or_else(missing)
}
