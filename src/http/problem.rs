//! Errors as clients see them: RFC 9457 problem+json with a stable code.
//!
//! A 5xx tells the client nothing but a request id; the log gets the whole chain, once, in `finish.rs`.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::codes;
use stockade_kernel::db::Trouble;
use stockade_kernel::messaging::transport::TransportError;

#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
pub struct Problem {
    /// A stable path that names the kind of problem, and leads to what is to be said of it.
    #[serde(rename = "type")]
    #[schema(example = "/problems/validation")]
    pub kind: String,
    #[schema(example = "Unprocessable Entity")]
    pub title: String,
    #[schema(example = 422)]
    pub status: u16,
    /// What happened, in words.
    pub detail: String,
    /// The path that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// The stable code, for programs.
    #[schema(example = "validation")]
    pub code: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
    /// The state that what was to change is in, where that forbids it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "expired")]
    pub state: Option<String>,
    /// For the log only.
    #[serde(skip)]
    pub cause: Option<String>,
    #[serde(skip)]
    pub retry_after_seconds: Option<u32>,
}

/// What is wrong with one field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct FieldError {
    /// A JSON pointer into the request body.
    #[schema(example = "/items/0/quantity")]
    pub pointer: String,
    pub detail: String,
}

impl Problem {
    pub fn new(status: u16, code: &'static str, detail: impl Into<String>) -> Self {
        debug_assert!(codes::find(code).is_some(), "{code} has no page in static/problems.md");
        let title = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
        Self {
            kind: format!("/problems/{code}"),
            title: title.unwrap_or("Error").to_owned(),
            status,
            detail: detail.into(),
            instance: None,
            code: code.to_owned(),
            request_id: None,
            errors: Vec::new(),
            state: None,
            cause: None,
            retry_after_seconds: None,
        }
    }

    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new(404, "not-found", detail)
    }

    pub fn validation(errors: Vec<FieldError>) -> Self {
        let detail = errors
            .iter()
            .map(|error| match error.pointer.as_str() {
                "" => error.detail.clone(),
                pointer => format!("{pointer}: {}", error.detail),
            })
            .collect::<Vec<_>>()
            .join("; ");
        Self { errors, ..Self::new(422, "validation", detail) }
    }

    pub fn internal(cause: impl Into<String>) -> Self {
        Self {
            cause: Some(cause.into()),
            ..Self::new(500, "internal", "something went wrong here; the log has it under the request id")
        }
    }

    /// Tells the state that is in the way.
    #[must_use]
    pub fn state(self, state: &str) -> Self {
        Self { state: Some(state.to_owned()), ..self }
    }

    #[must_use]
    pub fn retry_after(self, seconds: u32) -> Self {
        Self { retry_after_seconds: Some(seconds), ..self }
    }

    /// The problem that an answer without a body of ours amounts to.
    pub fn of_status(status: StatusCode) -> Self {
        match status {
            StatusCode::NOT_FOUND => Self::not_found("there is nothing at this path; see /docs"),
            StatusCode::METHOD_NOT_ALLOWED => {
                Self::new(405, "method-not-allowed", "this path does not take that method; see the Allow header")
            }
            StatusCode::PAYLOAD_TOO_LARGE => Self::new(413, "body-too-large", "the body is too large"),
            StatusCode::SERVICE_UNAVAILABLE => {
                Self::new(503, "timeout", "the request took too long; it may still be carried out").retry_after(1)
            }
            status if status.is_server_error() => Self::internal(format!("an answer of {status} without a body")),
            status => Self::new(status.as_u16(), "bad-request", "the request cannot be understood"),
        }
    }

    /// The finished answer.
    pub fn render(&self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(self).unwrap_or_default();
        let mut response = (status, body).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = self.retry_after_seconds {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

/// Leaves the problem in the answer's extensions; `finish.rs` adds what only it knows and writes the body.
impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        Self::from_trouble(Trouble::of(&error), error.to_string())
    }
}

impl Problem {
    /// What a database in trouble means for a client.
    pub fn from_trouble(trouble: Trouble, cause: String) -> Self {
        let problem = match trouble {
            Trouble::Statement => Self::internal(""),
            Trouble::Away => {
                Self::new(503, "db-unavailable", "the database cannot be used just now; try again").retry_after(1)
            }
            Trouble::Busy | Trouble::TimedOut | Trouble::Conflict => {
                Self::new(503, "db-busy", "the database is busy; try again").retry_after(1)
            }
        };
        Self { cause: Some(format!("database: {cause}")), ..problem }
    }
}

impl From<TransportError> for Problem {
    fn from(error: TransportError) -> Self {
        match error {
            TransportError::Database(error) => Self::from(error),
            TransportError::Broker(text) => Self {
                cause: Some(text),
                ..Self::new(503, "broker-unreachable", "the broker cannot be reached just now").retry_after(1)
            },
        }
    }
}
