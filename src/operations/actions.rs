//! Who did what, when and why.

use axum::extract::State;
use serde::Deserialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Operations;
use crate::http::caller::Caller;
use crate::http::extract::{Body, Params};
use crate::http::page::{Page, fetch_limit, limit, read_uuid_cursor};
use crate::http::problem::{FieldError, Problem};
use stockade_kernel::messaging::actions::{self, Action, NewAction};
use stockade_kernel::messaging::event::is_plain_text;

const REASON_CHARS_MAX: usize = 500;

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(list_actions))
}

/// The action of a caller on `subject`.
pub(super) fn acted(
    caller: &Caller,
    action: &'static str,
    subject: impl ToString,
    why: Option<String>,
    details: serde_json::Value,
) -> NewAction {
    NewAction {
        group_id: caller.messages_of(),
        who: caller.operator.clone(),
        action,
        subject: subject.to_string(),
        why,
        details,
        request_id: caller.request_id.clone(),
    }
}

/// What an operator may say about anything that is done.
#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"reason": "the shelf was mended"}))]
pub struct Why {
    /// For whoever looks later.
    pub reason: Option<String>,
}

impl Why {
    pub(super) fn of(body: Option<Body<Self>>) -> Result<Option<String>, Problem> {
        body.map(|body| body.value).unwrap_or_default().checked()
    }

    pub(super) fn checked(self) -> Result<Option<String>, Problem> {
        checked_text("/reason", self.reason)
    }
}

/// A line of text that people are to read.
pub(super) fn checked_text(pointer: &str, text: Option<String>) -> Result<Option<String>, Problem> {
    match &text {
        Some(line) if !is_plain_text(line, REASON_CHARS_MAX) || line.trim().is_empty() => {
            let detail = format!("must be one line of 1 to {REASON_CHARS_MAX} characters");
            Err(Problem::validation(vec![FieldError { pointer: pointer.to_owned(), detail }]))
        }
        _ => Ok(text),
    }
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListActions {
    who: Option<String>,
    /// As in `dead-letter.discard`.
    action: Option<String>,
    /// The id of a letter, a redrive or a replay, or the name of a consumer.
    subject: Option<String>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

/// List what operators did, newest first.
#[utoipa::path(get, path = "/v1/actions", tag = "operations", security(("key" = ["viewer"])), params(ListActions), responses(
    (status = 200, body = Page<Action>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_actions(
    State(operations): State<Operations>,
    caller: Caller,
    Params(params): Params<ListActions>,
) -> Result<Page<Action>, Problem> {
    let limit = limit(params.limit)?;
    let query = actions::Query {
        group_id: caller.messages_of(),
        who: params.who,
        action: params.action,
        subject: params.subject,
        before: read_uuid_cursor(params.cursor.as_deref())?,
        limit: fetch_limit(limit),
    };
    let rows = actions::list(&mut operations.kernel.db.read().await?, query).await?;
    Ok(Page::new(rows, limit, |row| row.id.to_string()))
}
