//! Not too much at once: a rate for each key, and so many requests in hand and no more.
//!
//! A server that takes on more than it can do does ever less of it. Beyond the number it can have in hand, requests are
//! refused at once with a 503 that says when to come again. Whoever comes again sooner, and there is still no place, is
//! kept waiting until then: so a connection is refused once a second at most, and a flood costs next to nothing. That
//! holds for a connection, not for an address: clients of one address that wait while places are free cost more goodput
//! than refusing them does, and those behind one proxy have one address. A body is read before its request takes a
//! place, so whoever sends one slowly keeps nobody out; whoever waits for an outcome gives the place back. Probes are
//! always answered.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tower_http::timeout::{TimeoutBody, TimeoutError};

use super::caller::Identity;
use super::problem::Problem;
use super::serve::Peer;

pub static RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
pub static RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The problem of a server that has as many requests in hand as it can do.
pub const OVERLOADED: &str = "overloaded";

/// When whoever found no place is asked to come again.
const COME_AGAIN_SECONDS: u32 = 1;

/// Answered however busy the server is.
const ALWAYS: [&str; 5] = ["/livez", "/readyz", "/startupz", "/v1/health", "/v1/metrics"];
/// Callers remembered at most; those who have not asked for a while are forgotten.
const CALLERS_MAX: usize = 10_000;

pub struct Limiter {
    rate: Option<Rate>,
    places: Arc<Semaphore>,
    body_bytes_max: usize,
    body_timeout: Duration,
}

impl Limiter {
    pub fn new(limits: &super::Limits) -> Self {
        Self {
            rate: limits.rate.map(Rate::new),
            places: Arc::new(Semaphore::new(limits.in_flight_max)),
            body_bytes_max: limits.buffer_bytes_max,
            body_timeout: limits.body_timeout,
        }
    }
}

/// A request's place among those in hand; it is free again when the answer is there, or when given back.
#[derive(Debug, Clone)]
pub struct Place(Arc<Mutex<Option<OwnedSemaphorePermit>>>);

impl Place {
    /// For requests that do nothing from here on but wait.
    pub fn give_back(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// The moment before which a connection was last asked not to come again.
#[derive(Debug, Clone, Default)]
pub struct Advice(Arc<Mutex<Option<Instant>>>);

impl Advice {
    /// Waits until then, if there was one, and gives the advice anew.
    async fn enforce(&self) {
        let given = self.lock().take();
        if let Some(moment) = given {
            tokio::time::sleep_until(moment).await;
        }
        *self.lock() = Some(Instant::now() + Duration::from_secs(COME_AGAIN_SECONDS.into()));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Is this one of the requests that are answered however busy the server is?
pub fn is_always_answered(request: &Request) -> bool {
    let path = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    ALWAYS.contains(&path)
}

/// Where a request came from, and what was said there before.
pub struct Origin {
    address: IpAddr,
    advice: Advice,
}

impl Origin {
    pub fn of(request: &Request) -> Self {
        Self { address: address(request), advice: request.extensions().get::<Advice>().cloned().unwrap_or_default() }
    }

    /// The answer where there is no place.
    async fn refuse(&self) -> Response {
        self.advice.enforce().await;
        let detail = "the server has as many requests in hand as it can do; nothing was done";
        Problem::new(503, OVERLOADED, detail).retry_after(COME_AGAIN_SECONDS).into_response()
    }
}

impl Limiter {
    /// Takes a request in hand if that is not too much, with its body read to the end. Its place is to be given back once it
    /// is answered; one that is always answered has none.
    pub async fn take_in_hand(&self, request: &mut Request) -> Result<Option<Place>, Response> {
        if is_always_answered(request) {
            return Ok(None);
        }
        if let Some(rate) = &self.rate
            && let Err(wait) = rate.admit(Sender::of(request), Instant::now())
        {
            return Err(rate.refuse(wait));
        }
        self.read_body(request).await.map_err(IntoResponse::into_response)?;
        let Ok(permit) = self.places.clone().try_acquire_owned() else {
            let origin = Origin::of(request);
            // Whoever waits to be refused keeps nothing here meanwhile.
            *request = Request::default();
            return Err(Box::pin(origin.refuse()).await);
        };
        let place = Place(Arc::new(Mutex::new(Some(permit))));
        request.extensions_mut().insert(place.clone());
        Ok(Some(place))
    }

    /// For a request that is refused anyway: the answer to give instead if its address sends more of them than it may.
    pub fn refuse_stranger(&self, origin: &Origin) -> Option<Response> {
        let rate = self.rate.as_ref()?;
        rate.admit(Sender::Address(origin.address), Instant::now()).err().map(|wait| rate.refuse(wait))
    }

    /// A place to find out in the database who sends a request. Whoever turns out to be nobody has taken one, too; and
    /// from an address that sends too many of those none is looked at.
    pub async fn place_for_stranger(&self, origin: &Origin) -> Result<OwnedSemaphorePermit, Response> {
        if let Some(rate) = &self.rate
            && let Err(wait) = rate.check(Sender::Address(origin.address), Instant::now())
        {
            return Err(rate.refuse(wait));
        }
        match self.places.clone().try_acquire_owned() {
            Ok(place) => Ok(place),
            Err(_) => Err(origin.refuse().await),
        }
    }

    async fn read_body(&self, request: &mut Request) -> Result<(), Problem> {
        if request.body().is_end_stream() {
            return Ok(());
        }
        let too_large = || {
            let detail = format!("the body is larger than the {} bytes that this server takes", self.body_bytes_max);
            Problem::new(413, "body-too-large", detail)
        };
        // One that says so itself is not waited for.
        if request.body().size_hint().lower() > self.body_bytes_max as u64 {
            return Err(too_large());
        }
        let body = std::mem::take(request.body_mut());
        // So long for each part: a large body may come from far away, and the time for a request bounds the whole.
        let body = TimeoutBody::new(self.body_timeout, Limited::new(body, self.body_bytes_max));
        match body.collect().await {
            Ok(body) => {
                *request.body_mut() = Body::from(body.to_bytes());
                Ok(())
            }
            Err(error) if error.is::<LengthLimitError>() => Err(too_large()),
            Err(error) if error.is::<TimeoutError>() => {
                Err(Problem::new(408, "body-too-slow", "the body did not come in time"))
            }
            Err(_) => Err(Problem::new(400, "malformed-body", "the body could not be read to its end")),
        }
    }
}

/// How many requests a sender may send.
#[derive(Debug, Clone, Copy)]
pub struct RateLimit {
    pub per_second: u32,
    /// How many may come at once.
    pub burst: u32,
}

/// Who is counted: a key, or else an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Sender {
    Key([u8; 32]),
    Address(IpAddr),
}

impl Sender {
    fn of(request: &Request) -> Self {
        let key = request.extensions().get::<Identity>().and_then(|identity| identity.key);
        key.map_or_else(|| Self::Address(address(request)), |key| Self::Key(key.0))
    }
}

fn address(request: &Request) -> IpAddr {
    request.extensions().get::<Peer>().map_or(Ipv4Addr::LOCALHOST.into(), |peer| peer.0)
}

/// For each sender, the moment until which what it sent has been paid for (the generic cell rate algorithm).
struct Rate {
    limit: RateLimit,
    paid_until: Mutex<HashMap<Sender, Instant>>,
}

impl Rate {
    fn new(limit: RateLimit) -> Self {
        Self { limit, paid_until: Mutex::default() }
    }

    /// What one request costs in time.
    fn cost(&self) -> Duration {
        Duration::from_secs(1) / self.limit.per_second.max(1)
    }

    /// Lets a request through, or says how long to wait.
    fn admit(&self, sender: Sender, now: Instant) -> Result<(), Duration> {
        let mut all = self.paid_until.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= CALLERS_MAX {
            all.retain(|_, until| *until > now);
        }
        let until = self.paid_until(&all, sender, now)?;
        all.insert(sender, until + self.cost());
        Ok(())
    }

    /// Would a request be let through?
    fn check(&self, sender: Sender, now: Instant) -> Result<(), Duration> {
        self.paid_until(&self.paid_until.lock().unwrap_or_else(PoisonError::into_inner), sender, now).map(drop)
    }

    fn paid_until(&self, all: &HashMap<Sender, Instant>, sender: Sender, now: Instant) -> Result<Instant, Duration> {
        let until = all.get(&sender).copied().unwrap_or(now).max(now);
        let ahead = until - now + self.cost();
        let over = ahead.checked_sub(self.cost() * self.limit.burst.max(1)).filter(|over| !over.is_zero());
        over.map_or(Ok(until), Err)
    }

    fn refuse(&self, wait: Duration) -> Response {
        let seconds = u32::try_from(wait.as_secs()).unwrap_or(u32::MAX).saturating_add(1);
        let detail = format!("more than {} requests a second; wait {seconds} s", self.limit.per_second);
        let mut response = Problem::new(429, "rate-limited", detail).retry_after(seconds).into_response();
        let window = (self.limit.burst / self.limit.per_second.max(1)).max(1);
        let fields = [
            (&RATE_LIMIT_POLICY, format!("\"key\";q={};w={window}", self.limit.burst)),
            (&RATE_LIMIT, format!("\"key\";r=0;t={seconds}")),
        ];
        set(response.headers_mut(), fields);
        response
    }
}

fn set<'a>(headers: &mut HeaderMap, fields: impl IntoIterator<Item = (&'a HeaderName, String)>) {
    for (name, value) in fields {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_may_burst_and_then_keeps_its_rate_whatever_others_do() {
        let rate = Rate::new(RateLimit { per_second: 10, burst: 5 });
        let (one, other) = (Sender::Key([1; 32]), Sender::Address(Ipv4Addr::LOCALHOST.into()));
        let start = Instant::now();
        let sent = |sender, now| (0..100).take_while(|_| rate.admit(sender, now).is_ok()).count();
        assert_eq!((sent(one, start), sent(other, start)), (5, 5));
        assert_eq!(rate.admit(one, start), Err(Duration::from_millis(100)));
        let later = start + Duration::from_millis(200);
        assert_eq!(sent(one, later), 2, "ten a second");
        let much_later = later + Duration::from_secs(60);
        assert!((0..100).all(|_| rate.check(one, much_later).is_ok()), "to ask costs nothing");
        assert_eq!(sent(one, much_later), 5, "never more than the burst");
        assert!(rate.check(one, much_later).is_err());
    }
}
