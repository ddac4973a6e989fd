//! Dead letters, for operators: what was given up on and why, and the way back for one of them.

use axum::Json;
use axum::extract::{Path, State};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Operations;
use crate::http::extract::{Params, bad_filter};
use crate::http::page::{Page, fetch_limit, limit, read_uuid_cursor};
use crate::http::problem::Problem;
use crate::messaging::dead_letters::{self, Letter, LetterRow, Redriven};

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(list_dead_letters))
        .routes(routes!(get_dead_letter))
        .routes(routes!(redrive_dead_letter))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListDeadLetters {
    /// The full or the short name of the queue.
    queue: Option<String>,
    consumer: Option<String>,
    reason: Option<String>,
    event_type: Option<String>,
    /// open, redriven or discarded
    state: Option<String>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

const STATES: [&str; 3] = ["open", "redriven", "discarded"];

/// List dead letters, newest first, without their bodies.
#[utoipa::path(get, path = "/v1/dead-letters", tag = "operations", params(ListDeadLetters), responses(
    (status = 200, body = Page<LetterRow>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_dead_letters(
    State(operations): State<Operations>,
    Params(params): Params<ListDeadLetters>,
) -> Result<Page<LetterRow>, Problem> {
    let limit = limit(params.limit)?;
    if params.state.as_deref().is_some_and(|state| !STATES.contains(&state)) {
        return Err(bad_filter(format!("state must be one of {}", STATES.join(", "))));
    }
    let full_name = |name: String| operations.binding(&name).map_or(name, |binding| binding.queue.clone());
    let query = dead_letters::Query {
        // Letters whose tenant cannot be read are shown too: the caller without keys holds every role.
        group_id: None,
        queue: params.queue.map(full_name),
        consumer: params.consumer,
        reason: params.reason,
        event_type: params.event_type,
        state: params.state,
        before: read_uuid_cursor(params.cursor.as_deref())?,
        limit: fetch_limit(limit),
    };
    let rows = dead_letters::list(&mut operations.kernel.db.read().await?, query).await?;
    Ok(Page::new(rows, limit, |row| row.id.to_string()))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct DeadLetter {
    #[serde(flatten)]
    row: LetterRow,
    headers: serde_json::Value,
    /// The bytes as they arrived: text if they are UTF-8, else base64.
    body: String,
    /// utf8 or base64
    #[schema(example = "utf8")]
    body_encoding: &'static str,
}

impl From<Letter> for DeadLetter {
    fn from(letter: Letter) -> Self {
        let (body, body_encoding) = match String::from_utf8(letter.body) {
            Ok(text) => (text, "utf8"),
            Err(error) => (STANDARD.encode(error.as_bytes()), "base64"),
        };
        Self { row: letter.row, headers: letter.headers, body, body_encoding }
    }
}

/// Get a dead letter with its body and headers.
#[utoipa::path(get, path = "/v1/dead-letters/{id}", tag = "operations",
    params(("id" = String, Path)),
    responses(
        (status = 200, body = DeadLetter),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn get_dead_letter(
    State(operations): State<Operations>,
    Path(id): Path<String>,
) -> Result<Json<DeadLetter>, Problem> {
    let mut tx = operations.kernel.db.read().await?;
    Ok(Json(load(&mut tx, &id).await?.into()))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct RedriveAnswer {
    id: Uuid,
    #[schema(example = "redriven")]
    state: &'static str,
    /// The event turned out to be processed already; nothing was sent.
    already_applied: bool,
}

/// Send a dead letter's bytes back to its queue.
#[utoipa::path(post, path = "/v1/dead-letters/{id}/redrive", tag = "operations",
    params(("id" = String, Path)),
    responses(
        (status = 200, body = RedriveAnswer),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It is not open any more", body = Problem, content_type = "application/problem+json"),
    ))]
async fn redrive_dead_letter(
    State(operations): State<Operations>,
    Path(id): Path<String>,
) -> Result<Json<RedriveAnswer>, Problem> {
    let mut tx = operations.kernel.db.begin().await?;
    let letter = load(&mut tx, &id).await?;
    let already_applied = match dead_letters::redrive(&mut tx, &letter).await? {
        Redriven::Sent => false,
        Redriven::AlreadyApplied => true,
        Redriven::NotOpen => {
            let detail = format!("the letter is {} already", letter.row.state);
            return Err(Problem::new(409, "already-redriven", detail));
        }
    };
    tx.commit().await?;
    Ok(Json(RedriveAnswer { id: letter.row.id, state: "redriven", already_applied }))
}

async fn load(tx: &mut crate::db::Tx, id: &str) -> Result<Letter, Problem> {
    let missing = || Problem::not_found(format!("there is no dead letter {id}"));
    let id = Uuid::try_parse(id).map_err(|_| missing())?;
    dead_letters::find(tx, None, id).await?.ok_or_else(missing)
}
