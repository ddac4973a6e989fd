//! The guard before every route of the API: who is it, and may it?
//!
//! What an operation asks for is what its `security` says in the API document: each requirement names a role, and
//! `platform` where no one tenant's key will do; an empty requirement lets anybody in, and where it stands alone nobody
//! is asked who they are. The guard reads the document, so what is promised there is what holds. An operation that says
//! nothing is for admins of the platform.
//!
//! Whose a key is, is known without asking; whose a session is, the database knows. That look is taken within the
//! limits that hold for strangers, and probes do not wait for it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::Route;
use futures_util::future::BoxFuture;
use tower::Service;
use utoipa::openapi::OpenApi;

use super::caller::{Identity, X_GROUP_ID};
use super::document::KEY_SCHEME;
use super::limits::{Limiter, Origin, Place, is_always_answered};
use super::problem::Problem;
use crate::access::{Hash, Keys, Role, Secret, check_name, sessions};

pub const COOKIE: &str = "stockade_session";
const PLATFORM: &str = "platform";
/// How long a probe waits to learn whose session it was sent with.
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);

/// What an operation asks of its caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rule {
    /// Nobody is asked who they are.
    Anybody,
    /// Anybody, but whoever is known may be told more.
    AnybodyAndHolders,
    /// Any of these.
    Holders(Vec<Need>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    pub role: Role,
    /// Only a key for every group will do.
    pub platform: bool,
}

impl Need {
    fn is_met_by(self, identity: &Identity) -> bool {
        identity.role.includes(self.role) && (identity.platform || !self.platform)
    }
}

impl Rule {
    const STRICTEST: Need = Need { role: Role::Admin, platform: true };

    fn read(security: Option<&serde_json::Value>) -> Self {
        let requirements = security.and_then(serde_json::Value::as_array).map_or(&[][..], Vec::as_slice);
        let requirements: Vec<_> = requirements.iter().filter_map(serde_json::Value::as_object).collect();
        if requirements.iter().any(|requirement| requirement.is_empty()) {
            return if requirements.len() == 1 { Self::Anybody } else { Self::AnybodyAndHolders };
        }
        let mut needs = Vec::new();
        for requirement in requirements {
            let Some(words) = requirement.get(KEY_SCHEME).and_then(serde_json::Value::as_array) else { continue };
            let words: Vec<&str> = words.iter().filter_map(serde_json::Value::as_str).collect();
            needs.extend(
                words
                    .iter()
                    .find_map(|word| Role::read(word))
                    .map(|role| Need { role, platform: words.contains(&PLATFORM) }),
            );
        }
        Self::Holders(if needs.is_empty() { vec![Self::STRICTEST] } else { needs })
    }

    fn is_met_by(&self, identity: &Identity) -> bool {
        match self {
            Self::Anybody | Self::AnybodyAndHolders => true,
            Self::Holders(needs) => needs.iter().any(|need| need.is_met_by(identity)),
        }
    }

    fn in_words(&self) -> String {
        let Self::Holders(needs) = self else { return "nothing".to_owned() };
        let words = needs.iter().map(|need| match need.platform {
            true => format!("the role {} for every group", need.role.as_str()),
            false => format!("the role {}", need.role.as_str()),
        });
        words.collect::<Vec<_>>().join(" or ")
    }
}

/// By path, what each method asks for.
type Rules = HashMap<String, Vec<(Method, Rule)>>;

fn rules(document: &OpenApi) -> anyhow::Result<Rules> {
    let document = serde_json::to_value(document)?;
    let mut rules = Rules::new();
    for (path, item) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in item.as_object().into_iter().flatten() {
            let method = Method::from_bytes(method.to_uppercase().as_bytes())?;
            rules.entry(path.clone()).or_default().push((method, Rule::read(operation.get("security"))));
        }
    }
    Ok(rules)
}

#[derive(Clone)]
pub struct Guard {
    keys: Keys,
    rules: Arc<Rules>,
    /// Without keys on a loopback address it answers to no name but that address and `localhost`: a page from elsewhere
    /// could otherwise reach it by a name that resolves to it.
    loopback: bool,
}

impl Guard {
    pub fn new(keys: Keys, document: &OpenApi, loopback: bool) -> anyhow::Result<Self> {
        Ok(Self { keys, rules: Arc::new(rules(document)?), loopback })
    }

    /// What a request takes; or that its path takes no such method, so that none is answered that is not documented.
    fn rule(&self, request: &Request) -> Result<Rule, Response> {
        let path = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
        let Some(of_path) = self.rules.get(path) else { return Ok(Rule::Holders(vec![Rule::STRICTEST])) };
        let asked = if request.method() == Method::HEAD { &Method::GET } else { request.method() };
        let rule = of_path.iter().find(|(method, _)| method == asked).map(|(_, rule)| rule.clone());
        rule.ok_or_else(|| {
            let named = |method: &Method| if method == Method::GET { "GET,HEAD" } else { method.as_str() }.to_owned();
            let allowed: Vec<String> = of_path.iter().map(|(method, _)| named(method)).collect();
            (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, allowed.join(","))]).into_response()
        })
    }

    /// Whoever it says it is, as far as that is known without asking the database.
    fn claim(&self, headers: &HeaderMap) -> Result<Claim, Problem> {
        if self.keys.is_open() {
            return if self.loopback && !is_own_name(headers) {
                let detail = "without API keys this server answers only to its own address and to localhost";
                Err(Problem::new(403, "cross-site-blocked", detail))
            } else {
                Ok(Claim::Identity(Identity::anybody()))
            };
        }
        let invalid = || Problem::new(401, "token-invalid", "there is no such key, or it has expired or been revoked");
        if let Some(value) = headers.get(header::AUTHORIZATION) {
            let secret =
                value.to_str().ok().and_then(bearer).ok_or_else(|| {
                    Problem::new(401, "token-invalid", "give the key as `Authorization: Bearer <key>`")
                })?;
            let key = self.keys.find(&Hash::of(secret)).ok_or_else(invalid)?;
            return Identity::of(&key, asked_group(headers)?.as_deref()).map(Claim::Identity);
        }
        match session_token(headers) {
            None => Ok(Claim::Nothing),
            Some(token) if Secret::may_be(token) => Ok(Claim::Session(Hash::of(token))),
            Some(_) => Err(session_ended()),
        }
    }

    /// Whose a session is.
    async fn resume(&self, session: Hash, headers: &HeaderMap) -> Result<Identity, Problem> {
        let session = sessions::find(&mut self.keys.db().read().await?, &session).await?.ok_or_else(session_ended)?;
        let key = self.keys.find(&session.key).ok_or_else(session_ended)?;
        let asked = asked_group(headers)?.or(session.group_id);
        let identity = Identity::of(&key, asked.as_deref())?;
        Ok(Identity { expires_at: Some(session.expires_at), ..identity })
    }

    /// The same, for a probe: whose it is if the database tells in time.
    async fn resume_in_time(&self, session: Hash, headers: &HeaderMap) -> Result<Who, Problem> {
        match tokio::time::timeout(PROBE_TIMEOUT, self.resume(session, headers)).await {
            Ok(Ok(identity)) => Ok(Who::Known(identity)),
            Ok(Err(problem)) if problem.status < 500 => Err(problem),
            Ok(Err(_)) | Err(_) => Ok(Who::Unclear),
        }
    }
}

/// What a request presents.
enum Claim {
    Nothing,
    Identity(Identity),
    Session(Hash),
}

/// Who sends a request.
enum Who {
    Nobody,
    Known(Identity),
    /// The database, which knows, is away; only probes are answered then.
    Unclear,
}

impl Rule {
    /// Lets somebody in, or says why not.
    fn admit(&self, who: Result<Who, Problem>) -> Result<Option<Identity>, Problem> {
        // What anybody may ask is answered whatever else is wrong with the request.
        let is_open = *self == Self::AnybodyAndHolders;
        match who {
            Ok(Who::Known(identity)) if self.is_met_by(&identity) => Ok(Some(identity)),
            Ok(Who::Known(_)) => {
                let detail = format!("this takes {}, which this key does not have", self.in_words());
                Err(Problem::new(403, "role-insufficient", detail))
            }
            Ok(Who::Unclear) => Ok(None),
            Ok(Who::Nobody) | Err(_) if is_open => Ok(None),
            Ok(Who::Nobody) => {
                let detail = format!("this takes {}: give a key as `Authorization: Bearer <key>`", self.in_words());
                Err(Problem::new(401, "token-missing", detail))
            }
            Err(problem) => Err(problem),
        }
    }
}

/// A route behind the guard.
#[derive(Clone)]
pub struct Guarded {
    pub route: Route,
    pub gate: Arc<(Guard, Limiter)>,
}

impl Service<Request> for Guarded {
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request>::poll_ready(&mut self.route, context)
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        // The one that is ready; the next request has another to get ready.
        let next = self.route.clone();
        let (gate, mut route) = (self.gate.clone(), std::mem::replace(&mut self.route, next));
        Box::pin(async move {
            let place = match admit(&gate, &mut request).await {
                Ok(place) => place,
                Err(refusal) => return Ok(refusal),
            };
            let response = route.call(request).await;
            place.iter().for_each(Place::give_back);
            response
        })
    }
}

/// Lets a request through to its route, within the limits, or refuses it; refusals count against the address they came
/// from, so that keys are not tried faster than requests are made.
async fn admit(gate: &(Guard, Limiter), request: &mut Request) -> Result<Option<Place>, Response> {
    let (guard, limiter) = gate;
    let rule = guard.rule(request)?;
    if rule == Rule::Anybody {
        return limiter.take_in_hand(request).await;
    }
    let (origin, is_probe) = (Origin::of(request), is_always_answered(request));
    let headers = request.headers();
    let who = match guard.claim(headers) {
        Ok(Claim::Nothing) => Ok(Who::Nobody),
        Ok(Claim::Identity(identity)) => Ok(Who::Known(identity)),
        // Boxed: every request would carry the room for it.
        Ok(Claim::Session(session)) if is_probe => Box::pin(guard.resume_in_time(session, headers)).await,
        Ok(Claim::Session(session)) => {
            let _place = Box::pin(limiter.place_for_stranger(&origin)).await?;
            Box::pin(guard.resume(session, headers)).await.map(Who::Known)
        }
        Err(problem) => Err(problem),
    };
    match rule.admit(who) {
        Ok(identity) => {
            if let Some(identity) = identity {
                request.extensions_mut().insert(identity);
            }
            limiter.take_in_hand(request).await
        }
        Err(problem) => Err(limiter.refuse_stranger(&origin).unwrap_or_else(|| problem.into_response())),
    }
}

fn session_ended() -> Problem {
    Problem::new(401, "token-invalid", "the session has ended; log in again")
}

/// The token of an Authorization header.
pub fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()).filter(|token| !token.is_empty())
}

/// The session that a browser holds.
pub fn session_token(headers: &HeaderMap) -> Option<&str> {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.flat_map(|cookies| cookies.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, _)| *name == COOKIE).map(|(_, value)| value)
}

fn asked_group(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(value) = headers.get(&X_GROUP_ID) else { return Ok(None) };
    let group = value.to_str().map_err(|_| "a group is plain text".to_owned());
    match group.and_then(|group| check_name("a group", group)) {
        Ok(group) => Ok(Some(group.to_owned())),
        Err(why) => Err(Problem::new(400, "bad-filter", format!("X-Group-Id cannot be read: {why}"))),
    }
}

fn is_own_name(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else { return true };
    let host = host.to_str().unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_rule_is_what_the_document_says_and_strict_where_it_says_nothing() {
        let read = |security| Rule::read(Some(&security));
        let need = |role, platform| Need { role, platform };
        assert_eq!(read(json!([{}])), Rule::Anybody);
        assert_eq!(read(json!([{}, { "key": ["viewer"] }])), Rule::AnybodyAndHolders);
        assert_eq!(read(json!([{ "key": ["client"] }])), Rule::Holders(vec![need(Role::Client, false)]));
        assert_eq!(read(json!([{ "key": ["operator", "platform"] }])), Rule::Holders(vec![need(Role::Operator, true)]));
        let strictest = Rule::Holders(vec![need(Role::Admin, true)]);
        for unclear in
            [json!([]), json!([{ "key": [] }]), json!([{ "key": ["chief"] }]), json!([{ "other": ["viewer"] }])]
        {
            assert_eq!(read(unclear), strictest);
        }
        assert_eq!(Rule::read(None), strictest);
    }

    #[test]
    fn a_session_is_found_among_other_cookies() {
        let mut headers = HeaderMap::new();
        assert_eq!(session_token(&headers), None);
        headers.insert(header::COOKIE, "theme=dark; stockade_session=abc; x=y".parse().unwrap());
        assert_eq!(session_token(&headers), Some("abc"));
    }

    #[test]
    fn only_addresses_and_localhost_are_names_of_its_own() {
        let own = |host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().unwrap());
            is_own_name(&headers)
        };
        for host in ["127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:8080", "::1"] {
            assert_eq!(own(host), host != "::1", "{host}");
        }
        for host in ["evil.example:8080", "127.0.0.1.evil.example", ""] {
            assert!(!own(host), "{host}");
        }
    }
}
