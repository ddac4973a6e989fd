//! Who is calling, on behalf of which tenant, and what for.

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName};

use super::finish::RequestId;
use super::limits::Place;
use super::problem::Problem;
use crate::access::{Hash, Key, Keys, Role};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::Origin;
use stockade_kernel::messaging::event::is_plain_text;
use stockade_kernel::trace::Traceparent;

/// The one tenant of an installation without API keys, and the one a key for every group acts in unless told otherwise.
pub const DEFAULT_GROUP: &str = "00000000-0000-0000-0000-000000000001";

/// Names the group that a key for every group acts in.
pub static X_GROUP_ID: HeaderName = HeaderName::from_static("x-group-id");

const OPERATOR_CHARS_MAX: usize = 128;

/// What the guard found out about a request's sender.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The tenant whose orders, stock and books it deals with.
    pub group_id: String,
    pub subsidiary_id: Option<String>,
    pub role: Role,
    /// Is it of no one tenant? Then it may also see what belongs to none.
    pub platform: bool,
    /// Does it see the messages of `group_id` alone, though it might see all?
    pub narrowed: bool,
    pub name: Option<String>,
    /// The key behind it; none on a server that is open.
    pub key: Option<Hash>,
    /// When its session ends, if it has one.
    pub expires_at: Option<Timestamp>,
}

impl Identity {
    /// Anybody, on a server without keys.
    pub fn anybody() -> Self {
        Self {
            group_id: DEFAULT_GROUP.to_owned(),
            subsidiary_id: None,
            role: Role::Admin,
            platform: true,
            narrowed: false,
            name: None,
            key: None,
            expires_at: None,
        }
    }

    /// The holder of `key`, who may have asked for a group.
    pub fn of(key: &Key, asked_group: Option<&str>) -> Result<Self, Problem> {
        let group_id = match asked_group {
            Some(asked) if key.is_for_every_group() => asked,
            Some(asked) if asked != key.group => {
                let detail = "this key is bound to another group than the one that was asked for";
                return Err(Problem::new(403, "role-insufficient", detail));
            }
            None if key.is_for_every_group() => DEFAULT_GROUP,
            _ => &key.group,
        };
        Ok(Self {
            group_id: group_id.to_owned(),
            subsidiary_id: key.subsidiary.clone(),
            role: key.role,
            platform: key.is_for_every_group(),
            narrowed: asked_group.is_some(),
            name: Some(key.name.clone()),
            key: Some(key.hash),
            expires_at: None,
        })
    }

    /// Is what let it in still good?
    pub fn is_good(&self, keys: &Keys) -> bool {
        let lives = self.expires_at.is_none_or(|end| keys.now() < end);
        lives && self.key.map_or_else(|| keys.is_open(), |key| keys.find(&key).is_some())
    }
}

/// The caller of a handler.
#[derive(Debug, Clone)]
pub struct Caller {
    pub group_id: String,
    pub subsidiary_id: Option<String>,
    pub request_id: String,
    /// The trace that the request belongs to.
    pub traceparent: Option<Traceparent>,
    /// For the record: the key's name, and what the caller says of itself in `X-Operator`.
    pub operator: String,
    pub identity: Identity,
    place: Option<Place>,
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

    /// The group whose messages it may see; `None` is everybody's, and those that are nobody's.
    pub fn messages_of(&self) -> Option<String> {
        (!self.identity.platform || self.identity.narrowed).then(|| self.group_id.clone())
    }

    /// Says that the request does nothing from here on but wait, so that another may be taken in hand.
    pub fn only_waits(&self) {
        if let Some(place) = &self.place {
            place.give_back();
        }
    }

    fn read(parts: &Parts) -> Option<Self> {
        let identity = parts.extensions.get::<Identity>()?.clone();
        Some(Self {
            group_id: identity.group_id.clone(),
            subsidiary_id: identity.subsidiary_id.clone(),
            request_id: parts.extensions.get::<RequestId>().map(|id| id.0.clone()).unwrap_or_default(),
            traceparent: parts.extensions.get::<Traceparent>().copied(),
            operator: operator(&parts.headers, identity.name.as_deref()),
            place: parts.extensions.get::<Place>().cloned(),
            identity,
        })
    }
}

/// Who it was, for the record. What a caller says of itself is told apart from what its key says of it.
fn operator(headers: &HeaderMap, key: Option<&str>) -> String {
    let said = headers.get("x-operator").and_then(|value| value.to_str().ok());
    match (said.filter(|name| is_plain_text(name, OPERATOR_CHARS_MAX)), key) {
        (Some(said), Some(key)) => format!("{key} ({said})"),
        (None, Some(key)) => key.to_owned(),
        (Some(said), None) => said.to_owned(),
        (None, None) => "anonymous".to_owned(),
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        // A route that the guard does not stand before gets nobody, and so does nothing.
        Self::read(parts).ok_or_else(|| Problem::internal("a handler asks for a caller where no guard stands"))
    }
}

/// `Option<Caller>`: for routes that anybody may ask.
impl<S: Sync> OptionalFromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Option<Self>, Problem> {
        Ok(Self::read(parts))
    }
}
