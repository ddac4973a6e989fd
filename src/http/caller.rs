//! Who is calling, and on behalf of which tenant.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use super::finish::RequestId;
use crate::messaging::Origin;
use crate::messaging::event::is_plain_text;
use crate::trace::Traceparent;

/// The one tenant of an installation without API keys.
pub const DEFAULT_GROUP: &str = "00000000-0000-0000-0000-000000000001";

const OPERATOR_CHARS_MAX: usize = 128;

#[derive(Debug, Clone)]
pub struct Caller {
    pub group_id: String,
    pub subsidiary_id: Option<String>,
    pub request_id: String,
    /// The trace that the request belongs to.
    pub traceparent: Option<Traceparent>,
    /// The person, as far as is known: without API keys it is what the caller says of itself in `X-Operator`.
    pub operator: String,
}

impl Caller {
    /// The origin of events that this request brings about.
    pub fn origin(&self) -> Origin {
        Origin {
            group_id: self.group_id.clone(),
            subsidiary_id: self.subsidiary_id.clone(),
            correlation_id: self.request_id.clone(),
            causation_id: None,
            traceparent: self.traceparent,
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let request_id = parts.extensions.get::<RequestId>().map(|id| id.0.clone()).unwrap_or_default();
        let traceparent = parts.extensions.get::<Traceparent>().copied();
        let operator = parts.headers.get("x-operator").and_then(|value| value.to_str().ok());
        let operator =
            operator.filter(|name| is_plain_text(name, OPERATOR_CHARS_MAX)).unwrap_or("anonymous").to_owned();
        Ok(Self { group_id: DEFAULT_GROUP.to_owned(), subsidiary_id: None, request_id, operator, traceparent })
    }
}
