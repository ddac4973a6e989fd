//! Login for browsers: a key is exchanged for a cookie that scripts cannot read and other sites cannot send.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::{Caller, Identity};
use super::extract::Body;
use super::guard::{COOKIE, session_token};
use super::problem::{FieldError, Problem};
use crate::access::sessions::{self, Session};
use crate::access::{Hash, Keys, Role, Secret, check_name};
use stockade_kernel::clock::Timestamp;

#[derive(Clone)]
pub struct Sessions {
    pub keys: Keys,
    /// How long a session lasts.
    pub ttl: Duration,
}

pub fn routes() -> OpenApiRouter<Sessions> {
    OpenApiRouter::new().routes(routes!(log_in, get_session, log_out))
}

#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LogIn {
    #[schema(example = "stk_…")]
    key: String,
    /// For a key of every group: the one to act in.
    group_id: Option<String>,
}

/// Who is asking, as the server sees it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct SessionBody {
    /// The key's name; null on a server without keys.
    name: Option<String>,
    role: Role,
    /// The group whose orders, stock and books are shown.
    group_id: String,
    /// Is the key for every group?
    platform: bool,
    /// Is the server open, without any key?
    open: bool,
    /// When the session ends; null if there is none.
    expires_at: Option<Timestamp>,
}

impl From<Identity> for SessionBody {
    fn from(identity: Identity) -> Self {
        Self {
            open: identity.key.is_none(),
            name: identity.name,
            role: identity.role,
            group_id: identity.group_id,
            platform: identity.platform,
            expires_at: identity.expires_at,
        }
    }
}

/// Log in with a key: the answer sets a cookie that stands for it.
#[utoipa::path(post, path = "/v1/session", tag = "access", request_body = LogIn, security(()), responses(
    (status = 200, body = SessionBody, headers(("Set-Cookie" = String, description = "The session"))),
    (status = 401, description = "There is no such key", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The server is open: there is nothing to log in to", body = Problem, content_type = "application/problem+json"),
))]
async fn log_in(State(ours): State<Sessions>, headers: HeaderMap, body: Body<LogIn>) -> Result<Response, Problem> {
    if ours.keys.is_open() {
        return Err(Problem::new(409, "no-keys", "this server has no keys: anybody may do anything already"));
    }
    let LogIn { key, group_id } = body.value;
    let wrong = |detail| Problem::validation(vec![FieldError { pointer: "/group_id".to_owned(), detail }]);
    let group_id = group_id.filter(|group| !group.is_empty());
    group_id.as_deref().map(|group| check_name("a group", group)).transpose().map_err(wrong)?;
    let key = ours
        .keys
        .find(&Hash::of(key.trim()))
        .ok_or_else(|| Problem::new(401, "token-invalid", "there is no such key, or it has expired or been revoked"))?;
    let identity = Identity::of(&key, group_id.as_deref())?;
    let ends = ours.keys.now().plus(ours.ttl);
    let expires_at = key.expires_at.map_or(ends, |key_ends| key_ends.min(ends));
    let mut tx = ours.keys.db().begin().await?;
    // The browser's last session is over, whoever it was.
    if let Some(token) = session_token(&headers).filter(|token| Secret::may_be(token)) {
        sessions::end(&mut tx, &Hash::of(token)).await?;
    }
    let secret = sessions::begin(&mut tx, &Session { key: key.hash, group_id, expires_at }).await?;
    tx.commit().await?;
    let cookie = cookie(secret.reveal(), ours.keys.now(), expires_at, &headers)?;
    let body = SessionBody::from(Identity { expires_at: Some(expires_at), ..identity });
    Ok(([(header::SET_COOKIE, cookie)], Json(body)).into_response())
}

/// Get who is asking, and what they may do.
#[utoipa::path(get, path = "/v1/session", tag = "access", security(("key" = ["viewer"])), responses(
    (status = 200, body = SessionBody),
))]
async fn get_session(caller: Caller) -> Json<SessionBody> {
    Json(caller.identity.into())
}

/// Log out: the session ends on the server.
#[utoipa::path(delete, path = "/v1/session", tag = "access", security(()), responses(
    (status = 204, description = "There is no session any more"),
))]
async fn log_out(State(ours): State<Sessions>, headers: HeaderMap) -> Result<Response, Problem> {
    if let Some(token) = session_token(&headers).filter(|token| Secret::may_be(token)) {
        let mut tx = ours.keys.db().begin().await?;
        sessions::end(&mut tx, &Hash::of(token)).await?;
        tx.commit().await?;
    }
    let now = ours.keys.now();
    Ok((StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie("", now, now, &headers)?)]).into_response())
}

/// Behind a proxy that speaks TLS the cookie is for TLS alone; without one a browser would not keep such a cookie.
fn cookie(value: &str, now: Timestamp, ends: Timestamp, headers: &HeaderMap) -> Result<HeaderValue, Problem> {
    let secure = headers.get("x-forwarded-proto").is_some_and(|proto| proto == "https");
    let text = format!(
        "{COOKIE}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={}{}",
        ends.since(now).as_secs(),
        if secure { "; Secure" } else { "" }
    );
    HeaderValue::from_str(&text).map_err(|error| Problem::internal(error.to_string()))
}
