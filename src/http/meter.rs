//! Times requests by route, method and status, without an allocation for any of them.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use axum::extract::{MatchedPath, Request};
use axum::http::{Method, StatusCode};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

use stockade_kernel::metrics::{Metrics, seconds};

pub type Meter = Family<Answered, Histogram, fn() -> Histogram>;

/// A meter whose readings are among `metrics`.
pub fn new(metrics: &Arc<Metrics>) -> Meter {
    let meter = Meter::new_with_constructor(seconds);
    let help = "From a request's headers read to its answer's headers ready";
    metrics.register("http_server_request_duration_seconds", help, meter.clone());
    meter
}

/// A request that is being answered.
pub struct Timing {
    started: Instant,
    route: Route,
    method: &'static str,
}

impl Timing {
    pub fn start(request: &Request) -> Self {
        let route = Route(request.extensions().get::<MatchedPath>().cloned());
        Self { started: Instant::now(), route, method: method_of(request.method()) }
    }

    pub fn end(self, status: StatusCode, meter: &Meter) {
        let answered = Answered { route: self.route, method: self.method, status: status.as_u16() };
        meter.get_or_create(&answered).observe(self.started.elapsed().as_secs_f64());
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Answered {
    route: Route,
    method: &'static str,
    status: u16,
}

/// The pattern a path matched, never the path: ids are no labels.
#[derive(Debug, Clone)]
struct Route(Option<MatchedPath>);

impl Route {
    fn as_str(&self) -> &str {
        self.0.as_ref().map_or("none", MatchedPath::as_str)
    }
}

impl PartialEq for Route {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for Route {}

impl Hash for Route {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl EncodeLabelValue for Route {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> std::fmt::Result {
        self.as_str().encode(encoder)
    }
}

/// Any word may stand as a method; only those of the API are labels.
fn method_of(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        _ => "other",
    }
}
