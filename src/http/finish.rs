//! The outermost layer: times each request and gives it its id, each error its problem+json body, and every answer the
//! headers that browsers heed.
//!
//! A service rather than a function that is given the next one: that would have every request copy all services within.

use std::convert::Infallible;
use std::task::{Context, Poll};

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderName, HeaderValue, Uri, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::BoxFuture;
use tower::Service;

use super::extract::bad_filter;
use super::headers;
use super::limits::{OVERLOADED, RATE_LIMIT, RATE_LIMIT_POLICY};
use super::meter::{Meter, Timing};
use super::page::NextCursor;
use super::problem::Problem;
use super::serve::HEAD_BYTES_MAX;
use stockade_kernel::clock::mint_id;
use stockade_kernel::trace::{KeyValue, Span, SpanKind, Traceparent};

static X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const REQUEST_ID_CHARS_MAX: usize = 64;

/// The id of a request: the caller's own if it is a safe one, else minted. Events carry it as correlation id.
#[derive(Debug, Clone)]
pub struct RequestId(pub String);

/// What is within, with its answers finished.
#[derive(Clone)]
pub struct Finished<S> {
    pub within: S,
    pub meter: Meter,
}

impl<S> Service<Request> for Finished<S>
where
    S: Service<Request, Response: IntoResponse, Error = Infallible, Future: Send + 'static>,
{
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.within.poll_ready(context)
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        let begun = Begun::on(&mut request);
        let answer = match unanswerable(&request) {
            Some(problem) => Err(problem),
            None => Ok(self.within.call(request)),
        };
        let meter = self.meter.clone();
        Box::pin(async move {
            let response = match answer {
                Ok(answer) => answer.await?.into_response(),
                Err(problem) => problem.into_response(),
            };
            Ok(begun.finish(response, &meter))
        })
    }
}

/// A request that is being answered.
struct Begun {
    timing: Timing,
    id: String,
    uri: Uri,
    span: Span,
}

impl Begun {
    /// Gives the request its id and its trace.
    fn on(request: &mut Request) -> Self {
        let timing = Timing::start(request);
        let id = request
            .headers()
            .get(&X_REQUEST_ID)
            .and_then(|value| value.to_str().ok())
            .filter(|id| is_safe_id(id))
            .map_or_else(|| mint_id().to_string(), str::to_owned);
        request.extensions_mut().insert(RequestId(id.clone()));
        let span = begin_span(request);
        if let Some(carried) = span.carried() {
            request.extensions_mut().insert(carried);
        }
        Self { timing, id, uri: request.uri().clone(), span }
    }

    fn finish(self, mut response: Response, meter: &Meter) -> Response {
        let Self { timing, id, uri, mut span } = self;
        span.set("http.response.status_code", i64::from(response.status().as_u16()));
        if response.status().is_server_error() {
            span.fail("the request failed");
        }
        if let Some(problem) = problem_of(&mut response) {
            response = write(problem, response, &uri, &id);
        } else if let Some(NextCursor(cursor)) = response.extensions_mut().remove() {
            let link = format!("<{}>; rel=\"next\"", next_page(&uri, &cursor));
            if let Ok(link) = HeaderValue::from_str(&link) {
                response.headers_mut().insert(header::LINK, link);
            }
        }
        if let Ok(id) = HeaderValue::from_str(&id) {
            response.headers_mut().insert(X_REQUEST_ID.clone(), id);
        }
        headers::secure(uri.path(), response.headers_mut());
        timing.end(response.status(), meter);
        response
    }
}

fn begin_span(request: &Request) -> Span {
    let parent = request.headers().get("traceparent").and_then(|value| Traceparent::parse(value.to_str().ok()?));
    Span::begin(parent, SpanKind::Server, || {
        let route = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str).to_owned();
        let method = request.method().to_string();
        let name = format!("{method} {route}").trim_end().to_owned();
        let attributes = vec![
            KeyValue::new("http.request.method", method),
            KeyValue::new("http.route", route),
            KeyValue::new("url.path", request.uri().path().to_owned()),
        ];
        (name.into(), attributes)
    })
}

/// No id, name or filter of ours has a NUL, and Postgres would take its query for a broken one.
fn unanswerable(request: &Request) -> Option<Problem> {
    const NUL: &str = "%00";
    let uri = request.uri();
    if head_bytes(request) > HEAD_BYTES_MAX {
        let detail = format!("the request's line and headers are larger than {HEAD_BYTES_MAX} bytes");
        Some(Problem::new(431, "head-too-large", detail))
    } else if uri.path().contains(NUL) {
        Some(Problem::not_found("there is nothing at a path with a NUL in it"))
    } else {
        uri.query().filter(|query| query.contains(NUL)).map(|_| bad_filter("no parameter takes a NUL"))
    }
}

/// How large a request's line and headers are, as far as anybody can choose it.
fn head_bytes(request: &Request) -> usize {
    let uri = request.uri();
    let line = uri.path().len() + uri.query().map_or(0, str::len);
    line + request.headers().iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>()
}

fn is_safe_id(id: &str) -> bool {
    (1..=REQUEST_ID_CHARS_MAX).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte))
}

fn problem_of(response: &mut Response) -> Option<Problem> {
    let status = response.status();
    let ours = response.extensions_mut().remove::<Problem>();
    // An error that comes with JSON is one that a handler means to give, as `/readyz` does.
    let bare = response.headers().get(header::CONTENT_TYPE).is_none_or(|kind| kind != "application/json");
    let is_error = status.is_client_error() || status.is_server_error();
    ours.or_else(|| (bare && is_error).then(|| Problem::of_status(status)))
}

fn write(mut problem: Problem, bare: Response, uri: &Uri, id: &str) -> Response {
    problem.instance = Some(uri.path().to_owned());
    problem.request_id = Some(id.to_owned());
    // A line for each that a flood is refused would only feed it; metrics count them.
    if problem.status >= 500 && problem.code != OVERLOADED {
        let cause = problem.cause.as_deref().unwrap_or("");
        tracing::error!(
            request.id = id,
            path = uri.path(),
            status = problem.status,
            code = problem.code,
            cause,
            "request failed: {}",
            problem.detail
        );
    }
    let mut response = problem.render();
    // What was said in headers stays true: which methods a path allows, above all.
    for name in [&header::ALLOW, &header::LINK, &RATE_LIMIT, &RATE_LIMIT_POLICY] {
        if let Some(value) = bare.headers().get(name) {
            response.headers_mut().insert(name, value.clone());
        }
    }
    response
}

fn next_page(uri: &Uri, cursor: &str) -> String {
    let others = uri.query().unwrap_or_default().split('&');
    let kept = others.filter(|pair| !pair.is_empty() && !pair.starts_with("cursor="));
    let cursor = format!("cursor={cursor}");
    let query: Vec<&str> = kept.chain([cursor.as_str()]).collect();
    format!("{}?{}", uri.path(), query.join("&"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_from_outside_must_be_safe_to_log() {
        assert!(is_safe_id("abc-123_X.y:z"));
        for bad in ["", "a b", "a\nb", "ä", &"x".repeat(65)] {
            assert!(!is_safe_id(bad), "{bad:?}");
        }
    }

    #[test]
    fn the_next_page_keeps_the_filters() {
        let uri: Uri = "/v1/orders?status=placed&cursor=old&limit=2".parse().unwrap();
        assert_eq!(next_page(&uri, "new"), "/v1/orders?status=placed&limit=2&cursor=new");
        assert_eq!(next_page(&"/v1/orders".parse().unwrap(), "new"), "/v1/orders?cursor=new");
    }
}
