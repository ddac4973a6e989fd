//! HTTP, for whatever modules there are: problems, extractors, paging, probes, docs, the dashboard with its live
//! stream, and the layers around all of it. Knows no module.

pub mod caller;
mod codes;
pub mod dashboard;
pub mod document;
pub mod extract;
pub mod finish;
pub mod guard;
mod headers;
pub mod limits;
pub mod live;
mod meter;
pub mod page;
pub mod probes;
pub mod problem;
pub mod serve;
pub mod session;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use tower::layer::layer_fn;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::csrf::{CsrfLayer, ProtectionError};
use tower_http::timeout::TimeoutLayer;
use utoipa::OpenApi as _;
use utoipa::openapi::OpenApi;
use utoipa_swagger_ui::SwaggerUi;

use finish::Finished;
use guard::{Guard, Guarded};
use limits::{Limiter, RateLimit};
use problem::Problem;

use stockade_kernel::metrics::Metrics;

/// The limits of the HTTP side; each has its setting in `config.rs`.
#[derive(Debug, Clone)]
pub struct Limits {
    pub body_bytes_max: usize,
    /// The largest body that any route takes.
    pub buffer_bytes_max: usize,
    /// How long a body may take to come.
    pub body_timeout: Duration,
    pub request_timeout: Duration,
    /// Requests in hand at once.
    pub in_flight_max: usize,
    pub rate: Option<RateLimit>,
}

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Stockade",
        description = "Takes orders, reserves stock, takes payments into a ledger and notifies customers through messages; every effect happens exactly once.",
    ),
    components(schemas(problem::Problem, problem::FieldError)),
    tags(
        (name = "orders", description = "Place orders and see what became of them"),
        (name = "stock", description = "What is on the shelf"),
        (name = "reservations", description = "What is held for whom"),
        (name = "notifications", description = "What customers were told"),
        (name = "ledger", description = "What customers have paid"),
        (name = "operations", description = "Queues, inbox, outbox, dead letters"),
        (name = "access", description = "Keys, and sessions for browsers"),
        (name = "health", description = "Probes"),
    )
)]
struct ApiDoc;

/// Joins the documents of the modules' routes into one.
pub fn join(parts: impl IntoIterator<Item = OpenApi>) -> OpenApi {
    let mut document = ApiDoc::openapi();
    document.info.version = env!("CARGO_PKG_VERSION").to_owned();
    for part in parts {
        document.merge(part);
    }
    document::complete(&mut document);
    document
}

/// Adds the guard before every route, the docs, the dashboard and the layers that every answer passes through.
pub fn finish(router: Router, guard: Guard, api: OpenApi, limits: &Limits, metrics: &Arc<Metrics>) -> Router {
    let cross_site = |_: ProtectionError| -> Response {
        let detail = "another site sent this request; nothing was done";
        Problem::new(403, "cross-site-blocked", detail).into_response()
    };
    let swagger = SwaggerUi::new("/docs")
        .url("/openapi.json", api)
        .config(utoipa_swagger_ui::Config::default().try_it_out_enabled(true));
    let gate = Arc::new((guard, Limiter::new(limits)));
    let meter = meter::new(metrics);
    let panicked =
        |_: Box<dyn std::any::Any + Send>| -> Response { Problem::internal("a handler panicked").into_response() };
    router
        .route_layer(layer_fn(move |route| Guarded { route, gate: gate.clone() }))
        .merge(dashboard::routes())
        .merge(codes::routes())
        .merge(swagger)
        .fallback(async || Problem::not_found("there is nothing at this path; see /docs"))
        // The outermost first. Given one by one, each would be boxed, and cloned by every one around it for each request.
        .layer((
            layer_fn(move |within| Finished { within, meter: meter.clone() }),
            CatchPanicLayer::custom(panicked),
            TimeoutLayer::with_status_code(StatusCode::SERVICE_UNAVAILABLE, limits.request_timeout),
            DefaultBodyLimit::max(limits.body_bytes_max),
            CsrfLayer::new().with_rejection_response(cross_site),
        ))
}
