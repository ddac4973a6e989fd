//! Probes: is the process alive, can it serve, and how is everything doing.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::db::Trouble;
use crate::messaging::health::LoopStatus;
use crate::messaging::{Kernel, outbox};

/// No probe takes longer than this, whatever is down.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub struct Probes {
    pub kernel: Kernel,
    /// Cancelled when shutdown begins.
    pub draining: CancellationToken,
}

pub fn routes() -> OpenApiRouter<Probes> {
    OpenApiRouter::new().routes(routes!(livez)).routes(routes!(readyz)).routes(routes!(health))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Liveness {
    #[schema(example = "ok")]
    status: &'static str,
}

/// Is the process alive? Touches nothing.
#[utoipa::path(get, path = "/livez", tag = "health", responses((status = 200, body = Liveness)))]
async fn livez() -> Json<Liveness> {
    Json(Liveness { status: "ok" })
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Readiness {
    /// `ok`, `degraded` (serving, but something behind is in trouble) or `unavailable`.
    #[schema(example = "ok")]
    status: &'static str,
    checks: BTreeMap<&'static str, String>,
}

/// Can this instance serve requests?
#[utoipa::path(get, path = "/readyz", tag = "health", responses(
    (status = 200, body = Readiness),
    (status = 503, description = "Draining, or the database cannot be used", body = Readiness),
))]
async fn readyz(State(probes): State<Probes>) -> Response {
    let health = probes.look().await;
    let draining = probes.draining.is_cancelled();
    let mut checks = BTreeMap::from([("database", health.database.status.clone())]);
    checks.insert("draining", if draining { "yes" } else { "no" }.to_owned());
    for (name, status) in &health.loops {
        checks.insert(name, format!("{:?}", status.state).to_lowercase());
    }
    let refusing = health.loops.values().any(|status| status.refuses_requests(probes.kernel.db.clock().now()));
    let up = health.database.status == "up";
    let status = if draining || !up || refusing { "unavailable" } else { health.status };
    let code = if status == "unavailable" { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (code, Json(Readiness { status, checks })).into_response()
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct HealthReport {
    /// `ok`, `degraded` or `unavailable`.
    #[schema(example = "ok")]
    status: &'static str,
    version: &'static str,
    database: Part,
    broker: Part,
    outbox: Option<OutboxReport>,
    /// The relay, the consumers and the dead-letter office of this instance.
    #[schema(value_type = BTreeMap<String, LoopStatus>)]
    loops: BTreeMap<&'static str, LoopStatus>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Part {
    #[schema(example = "sqlite")]
    kind: &'static str,
    /// `up`, `busy` or `down`.
    #[schema(example = "up")]
    status: String,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct OutboxReport {
    pending: i64,
    dead: i64,
    /// How long the oldest row that is due has been waiting; null if none is.
    oldest_due_ms: Option<i64>,
}

/// How is everything doing? Always 200: the body tells.
#[utoipa::path(get, path = "/v1/health", tag = "health", responses((status = 200, body = HealthReport)))]
async fn health(State(probes): State<Probes>) -> Json<HealthReport> {
    Json(probes.look().await)
}

impl Probes {
    /// The report without what changes though nothing happens: for those who watch for news.
    pub async fn steady(&self) -> serde_json::Value {
        let mut report = serde_json::to_value(self.look().await).unwrap_or_default();
        let loops = report.get_mut("loops").and_then(serde_json::Value::as_object_mut);
        for status in loops.into_iter().flat_map(serde_json::Map::values_mut) {
            if let Some(status) = status.as_object_mut() {
                status.remove("last_success_at");
            }
        }
        report
    }

    async fn look(&self) -> HealthReport {
        let backlog = async {
            let mut tx = self.kernel.db.read().await?;
            let now = tx.now();
            outbox::backlog(&mut tx, now).await
        };
        let (database, outbox) = match tokio::time::timeout(PROBE_TIMEOUT, backlog).await {
            Ok(Ok(backlog)) => ("up", Some(backlog)),
            Ok(Err(error)) if Trouble::of(&error) == Trouble::Busy => ("busy", None),
            Ok(Err(_)) | Err(_) => ("down", None),
        };
        let loops = self.kernel.health.statuses();
        let now = self.kernel.db.clock().now();
        let troubled = loops.values().any(|status| status.is_troubled(now));
        let dead = outbox.is_some_and(|outbox| outbox.dead > 0);
        HealthReport {
            status: match database {
                "down" => "unavailable",
                "up" if !troubled && !dead => "ok",
                _ => "degraded",
            },
            version: env!("CARGO_PKG_VERSION"),
            database: Part { kind: self.kernel.db.engine_name(), status: database.to_owned() },
            // The embedded queue is a table: it is up when its database is.
            broker: Part { kind: self.kernel.transport.name(), status: database.to_owned() },
            outbox: outbox.map(|outbox| OutboxReport {
                pending: outbox.pending,
                dead: outbox.dead,
                oldest_due_ms: outbox.oldest_due_ms,
            }),
            loops,
        }
    }
}
