//! Dead letters, for operators: what was given up on and why, the way back for one of them, and the way out.

use axum::Json;
use axum::extract::{Path, State};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Operations;
use super::actions::{Why, acted};
use crate::http::caller::Caller;
use crate::http::extract::{Body, Params, bad_filter};
use crate::http::page::{LIMIT_MAX, Page, fetch_limit, limit, read_uuid_cursor};
use crate::http::problem::Problem;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::actions::{self, Action};
use stockade_kernel::messaging::dead_letters::{self, Group, Letter, LetterRow, NotResolved, Redriven};

/// More groups than anybody reads; foreign messages may bring any event type.
const GROUPS_MAX: i64 = 1000;

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(list_dead_letters))
        .routes(routes!(list_dead_letter_groups))
        .routes(routes!(get_dead_letter))
        .routes(routes!(redrive_dead_letter))
        .routes(routes!(discard_dead_letter))
        .routes(routes!(restore_dead_letter))
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
    correlation_id: Option<String>,
    /// Filed at this time or later.
    from: Option<Timestamp>,
    /// Filed before this time.
    to: Option<Timestamp>,
    /// Sent by this redrive.
    redrive: Option<Uuid>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

const STATES: [&str; 3] = ["open", "redriven", "discarded"];

fn check_state(state: Option<&str>) -> Result<(), Problem> {
    match state {
        Some(state) if !STATES.contains(&state) => {
            Err(bad_filter(format!("state must be one of {}", STATES.join(", "))))
        }
        _ => Ok(()),
    }
}

/// List dead letters, newest first, without their bodies.
#[utoipa::path(get, path = "/v1/dead-letters", tag = "operations", security(("key" = ["viewer"])), params(ListDeadLetters), responses(
    (status = 200, body = Page<LetterRow>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_dead_letters(
    State(operations): State<Operations>,
    caller: Caller,
    Params(params): Params<ListDeadLetters>,
) -> Result<Page<LetterRow>, Problem> {
    let limit = limit(params.limit)?;
    check_state(params.state.as_deref())?;
    let query = dead_letters::Query {
        ids: Vec::new(),
        group_id: caller.messages_of(),
        queue: params.queue.map(|name| operations.full_name(name)),
        consumer: params.consumer,
        reason: params.reason,
        event_type: params.event_type,
        state: params.state,
        correlation_id: params.correlation_id,
        from: params.from,
        to: params.to,
        job_id: params.redrive,
        before: read_uuid_cursor(params.cursor.as_deref())?,
        limit: fetch_limit(limit),
    };
    let rows = dead_letters::list(&mut operations.kernel.db.read().await?, query).await?;
    Ok(Page::new(rows, limit, |row| row.id.to_string()))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListGroups {
    /// The full or the short name of the queue.
    queue: Option<String>,
    consumer: Option<String>,
    reason: Option<String>,
    event_type: Option<String>,
    /// open (if not given), redriven or discarded
    state: Option<String>,
    /// Filed at this time or later.
    from: Option<Timestamp>,
    /// Filed before this time.
    to: Option<Timestamp>,
}

/// Count dead letters by consumer, reason and event type, the largest groups first.
#[utoipa::path(get, path = "/v1/dead-letters/groups", tag = "operations", security(("key" = ["viewer"])), params(ListGroups), responses(
    (status = 200, body = Page<Group>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_dead_letter_groups(
    State(operations): State<Operations>,
    caller: Caller,
    Params(params): Params<ListGroups>,
) -> Result<Page<Group>, Problem> {
    check_state(params.state.as_deref())?;
    let query = dead_letters::Query {
        group_id: caller.messages_of(),
        queue: params.queue.map(|name| operations.full_name(name)),
        consumer: params.consumer,
        reason: params.reason,
        event_type: params.event_type,
        state: Some(params.state.unwrap_or_else(|| "open".to_owned())),
        from: params.from,
        to: params.to,
        limit: GROUPS_MAX,
        ..dead_letters::Query::default()
    };
    let data = dead_letters::list_groups(&mut operations.kernel.db.read().await?, query).await?;
    Ok(Page { data, next_cursor: None })
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
    /// What was done about it, newest first.
    actions: Vec<Action>,
}

impl DeadLetter {
    fn new(letter: Letter, actions: Vec<Action>) -> Self {
        let (body, body_encoding) = match String::from_utf8(letter.body) {
            Ok(text) => (text, "utf8"),
            Err(error) => (STANDARD.encode(error.as_bytes()), "base64"),
        };
        Self { row: letter.row, headers: letter.headers, body, body_encoding, actions }
    }
}

/// Get a dead letter with its body and headers.
#[utoipa::path(get, path = "/v1/dead-letters/{id}", tag = "operations", security(("key" = ["viewer"])),
    params(("id" = String, Path)),
    responses(
        (status = 200, body = DeadLetter),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn get_dead_letter(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<DeadLetter>, Problem> {
    let mut tx = operations.kernel.db.read().await?;
    let letter = load(&mut tx, &caller, &id).await?;
    let subject = Some(letter.row.id.to_string());
    let done = actions::Query { subject, limit: LIMIT_MAX, ..actions::Query::default() };
    Ok(Json(DeadLetter::new(letter, actions::list(&mut tx, done).await?)))
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
///
/// A `too-old` letter is sent too, and then run: look first whether its effect is there.
#[utoipa::path(post, path = "/v1/dead-letters/{id}/redrive", tag = "operations", security(("key" = ["operator"])),
    params(("id" = String, Path)), request_body = Option<Why>,
    responses(
        (status = 200, body = RedriveAnswer),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It is not open any more", body = Problem, content_type = "application/problem+json"),
    ))]
async fn redrive_dead_letter(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
    body: Option<Body<Why>>,
) -> Result<Json<RedriveAnswer>, Problem> {
    let why = Why::of(body)?;
    let mut tx = operations.kernel.db.begin().await?;
    let letter = load(&mut tx, &caller, &id).await?;
    let already_applied = match dead_letters::redrive(&mut tx, &letter).await? {
        Redriven::Sent => false,
        Redriven::AlreadyApplied => true,
        Redriven::NotOpen => return Err(not_in_state(&mut tx, &caller, letter.row.id).await?),
    };
    let details = json!({ "already_applied": already_applied });
    actions::record(&mut tx, &acted(&caller, "dead-letter.redrive", letter.row.id, why, details)).await?;
    tx.commit().await?;
    Ok(Json(RedriveAnswer { id: letter.row.id, state: "redriven", already_applied }))
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"reason": "sent by a test of ours"}))]
pub struct Discard {
    /// Why it may be forgotten, for whoever looks later.
    reason: String,
}

/// Put a dead letter aside. It can be restored until retention removes it.
#[utoipa::path(post, path = "/v1/dead-letters/{id}/discard", tag = "operations", security(("key" = ["operator"])),
    params(("id" = String, Path)), request_body = Discard,
    responses(
        (status = 200, body = LetterRow),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It is not open any more", body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json"),
    ))]
async fn discard_dead_letter(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
    body: Body<Discard>,
) -> Result<Json<LetterRow>, Problem> {
    let why = Why { reason: Some(body.value.reason) }.checked()?;
    let mut tx = operations.kernel.db.begin().await?;
    let id = load(&mut tx, &caller, &id).await?.row.id;
    match dead_letters::discard(&mut tx, id).await {
        Ok(()) => {}
        Err(NotResolved::Database(error)) => return Err(error.into()),
        Err(_) => return Err(not_in_state(&mut tx, &caller, id).await?),
    }
    actions::record(&mut tx, &acted(&caller, "dead-letter.discard", id, why, json!({}))).await?;
    let row = load(&mut tx, &caller, &id.to_string()).await?.row;
    tx.commit().await?;
    Ok(Json(row))
}

/// Open a discarded dead letter again.
#[utoipa::path(post, path = "/v1/dead-letters/{id}/restore", tag = "operations", security(("key" = ["operator"])),
    params(("id" = String, Path)), request_body = Option<Why>,
    responses(
        (status = 200, body = LetterRow),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "It is not discarded", body = Problem, content_type = "application/problem+json"),
    ))]
async fn restore_dead_letter(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
    body: Option<Body<Why>>,
) -> Result<Json<LetterRow>, Problem> {
    let why = Why::of(body)?;
    let mut tx = operations.kernel.db.begin().await?;
    let id = load(&mut tx, &caller, &id).await?.row.id;
    match dead_letters::restore(&mut tx, id).await {
        Ok(()) => {}
        Err(NotResolved::Database(error)) => return Err(error.into()),
        Err(NotResolved::OtherState) => return Err(not_in_state(&mut tx, &caller, id).await?),
        Err(error @ NotResolved::OpenAnew) => return Err(Problem::new(409, "open-anew", error.to_string())),
    }
    actions::record(&mut tx, &acted(&caller, "dead-letter.restore", id, why, json!({}))).await?;
    let row = load(&mut tx, &caller, &id.to_string()).await?.row;
    tx.commit().await?;
    Ok(Json(row))
}

/// Somebody was first, or it was never in the state that this takes.
async fn not_in_state(tx: &mut Tx, caller: &Caller, id: Uuid) -> Result<Problem, Problem> {
    let state = load(tx, caller, &id.to_string()).await?.row.state;
    let code = match state.as_str() {
        "redriven" => "already-redriven",
        "discarded" => "already-discarded",
        _ => "already-open",
    };
    Ok(Problem::new(409, code, format!("the letter is {state} already")))
}

/// A letter that the caller may see: its own tenant's, or any if it is of none.
async fn load(tx: &mut Tx, caller: &Caller, id: &str) -> Result<Letter, Problem> {
    let missing = || Problem::not_found(format!("there is no dead letter {id}"));
    let id = Uuid::try_parse(id).map_err(|_| missing())?;
    dead_letters::find(tx, caller.messages_of(), id).await?.ok_or_else(missing)
}
