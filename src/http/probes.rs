//! Probes: is the process alive, can it serve, and how is everything doing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::caller::Caller;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::Trouble;
use stockade_kernel::messaging::health::{LoopState, LoopStatus};
use stockade_kernel::messaging::instances::{self, Instance};
use stockade_kernel::messaging::transport::{Condition, Topology};
use stockade_kernel::messaging::{Kernel, office, outbox, relay};

/// How long a probe waits for the database: all of them answer within a second, whatever is down.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);

#[derive(Clone)]
pub struct Probes {
    pub kernel: Kernel,
    /// This process among the instances.
    pub me: Uuid,
    pub topology: Arc<Topology>,
    /// Cancelled when shutdown begins.
    pub draining: CancellationToken,
}

pub fn routes() -> OpenApiRouter<Probes> {
    OpenApiRouter::new()
        .routes(routes!(livez))
        .routes(routes!(readyz))
        .routes(routes!(startupz))
        .routes(routes!(health))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Liveness {
    #[schema(example = "ok")]
    status: &'static str,
}

/// Is the process alive? Touches nothing.
#[utoipa::path(get, path = "/livez", tag = "health", security(()), responses((status = 200, body = Liveness)))]
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
///
/// A broker that is away leaves it ready, and degraded: orders are taken and wait in the outbox.
#[utoipa::path(get, path = "/readyz", tag = "health", security(()), responses(
    (status = 200, body = Readiness),
    (status = 503, description = "Draining, or the database cannot be used", body = Readiness),
))]
async fn readyz(State(probes): State<Probes>) -> Response {
    let health = probes.look().await;
    let draining = probes.draining.is_cancelled();
    let mut checks =
        BTreeMap::from([("database", health.database.status.clone()), ("broker", health.broker.status.clone())]);
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

/// Has everything that this instance runs begun its work? Touches nothing.
///
/// What cannot work for now, such as a consumer without its broker, has begun all the same.
#[utoipa::path(get, path = "/startupz", tag = "health", security(()), responses(
    (status = 200, body = Readiness),
    (status = 503, description = "Still starting", body = Readiness),
))]
async fn startupz(State(probes): State<Probes>) -> Response {
    let loops = probes.kernel.health.statuses();
    let starting = loops.values().any(|status| status.state == LoopState::Starting);
    let checks = loops.into_iter().map(|(name, status)| (name, format!("{:?}", status.state).to_lowercase())).collect();
    let (code, status) =
        if starting { (StatusCode::SERVICE_UNAVAILABLE, "unavailable") } else { (StatusCode::OK, "ok") };
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
    /// The relay, over all instances.
    relay: Overall,
    /// Each consumer and the dead-letter office, over all instances.
    #[schema(value_type = BTreeMap<String, Overall>)]
    consumers: BTreeMap<&'static str, Overall>,
    /// The processes that share this database, as each last said itself; empty while the database cannot be read.
    instances: Vec<Instance>,
    /// The relay, the consumers and the dead-letter office of this instance.
    #[schema(value_type = BTreeMap<String, LoopStatus>)]
    loops: BTreeMap<&'static str, LoopStatus>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Part {
    #[schema(example = "sqlite")]
    kind: &'static str,
    /// `up`, `busy` (the database), `blocked` (the broker takes no messages) or `down`.
    #[schema(example = "up")]
    status: String,
    /// What is wrong, where it is known.
    error: Option<String>,
}

/// How a loop is doing over all instances.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Overall {
    /// The best that an instance says of its own: `running`, `starting`, `paused`, `troubled` or `stopped`; `absent` if
    /// none runs it.
    #[schema(example = "running")]
    state: &'static str,
    /// How many run it.
    instances: usize,
    /// When one of them last did its work or saw that there was none.
    last_success_at: Option<Timestamp>,
    last_error: Option<String>,
}

impl Overall {
    fn of<'a>(statuses: impl Iterator<Item = &'a LoopStatus>) -> Self {
        let mut overall = Self { state: "absent", instances: 0, last_success_at: None, last_error: None };
        const WORST_FIRST: [&str; 6] = ["absent", "stopped", "troubled", "paused", "starting", "running"];
        let rank = |state| WORST_FIRST.iter().position(|known| *known == state);
        for status in statuses {
            let state = match status.state {
                LoopState::Starting => "starting",
                LoopState::Running => "running",
                LoopState::Paused => "paused",
                LoopState::Troubled => "troubled",
                LoopState::Stopped => "stopped",
            };
            if rank(state) > rank(overall.state) {
                overall.state = state;
            }
            overall.instances += 1;
            overall.last_success_at = overall.last_success_at.max(status.last_success_at);
            overall.last_error = overall.last_error.or_else(|| status.last_error.clone());
        }
        overall
    }

    fn is_amiss(&self) -> bool {
        ["absent", "stopped", "troubled"].contains(&self.state)
    }
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct OutboxReport {
    pending: i64,
    dead: i64,
    /// How long the oldest row that is due has been waiting; null if none is.
    oldest_due_ms: Option<i64>,
}

/// How is everything doing? Always 200: the body tells.
///
/// Tenants are not told what is none of their business; nor is a session that cannot be looked up while the database
/// is away.
#[utoipa::path(get, path = "/v1/health", tag = "health", security(("key" = ["viewer"])), responses((status = 200, body = HealthReport)))]
async fn health(State(probes): State<Probes>, caller: Option<Caller>) -> Json<HealthReport> {
    let report = probes.look().await;
    Json(if caller.is_some_and(|caller| caller.identity.platform) { report } else { report.for_tenants() })
}

impl HealthReport {
    /// Without what is none of a tenant's business: where instances run, how much waits, and errors that may tell of others.
    fn for_tenants(mut self) -> Self {
        self.instances.clear();
        self.loops.clear();
        self.outbox = None;
        self.database.error = None;
        self.broker.error = None;
        for overall in self.consumers.values_mut().chain([&mut self.relay]) {
            overall.last_error = None;
        }
        self
    }
}

impl Probes {
    fn broker(&self, database: &'static str) -> Part {
        let (status, error) = match self.kernel.transport.condition() {
            // The embedded queue is a table: it is up when its database is.
            None => (database, None),
            Some(Condition::Up) => ("up", None),
            Some(Condition::Blocked(why)) => ("blocked", Some(why)),
            Some(Condition::Down(why)) => ("down", Some(why)),
        };
        Part { kind: self.kernel.transport.name(), status: status.to_owned(), error }
    }

    /// The report without what changes though nothing happens: for those who watch for news.
    /// `whole`: as callers of no one tenant see it.
    pub async fn steady(&self, whole: bool) -> serde_json::Value {
        let report = self.look().await;
        let report = if whole { report } else { report.for_tenants() };
        let mut report = serde_json::to_value(report).unwrap_or_default();
        still(&mut report);
        report
    }

    async fn look(&self) -> HealthReport {
        let backlog = async {
            let mut tx = self.kernel.db.read().await?;
            let now = tx.now();
            let backlog = outbox::backlog(&mut tx, now).await?;
            Ok((backlog, instances::list(&mut tx).await?))
        };
        let (database, read, error) = match tokio::time::timeout(PROBE_TIMEOUT, backlog).await {
            Ok(Ok(read)) => ("up", Some(read), None),
            Ok(Err(error)) => {
                let status =
                    if matches!(Trouble::of(&error), Trouble::Busy | Trouble::TimedOut) { "busy" } else { "down" };
                (status, None, Some(error.to_string()))
            }
            Err(_) => ("down", None, Some(format!("no answer within {} ms", PROBE_TIMEOUT.as_millis()))),
        };
        let (outbox, instances) = read.map_or((None, Vec::new()), |(outbox, all)| (Some(outbox), all));
        let loops = self.kernel.health.statuses();
        // The others by what they last said, this one by what is so now.
        let others = instances.iter().filter(|instance| instance.id != self.me);
        let everywhere = |name: &'static str| {
            Overall::of(others.clone().filter_map(|other| other.loops.get(name)).chain(loops.get(name)))
        };
        let relay = everywhere(relay::NAME);
        let names = self.topology.queues.iter().map(|binding| binding.consumer).chain([office::NAME]);
        let consumers: BTreeMap<&'static str, Overall> = names.map(|name| (name, everywhere(name))).collect();
        let missing = relay.is_amiss() || consumers.values().any(Overall::is_amiss);
        let now = self.kernel.db.clock().now();
        let troubled = loops.values().any(|status| status.is_troubled(now));
        let dead = outbox.is_some_and(|outbox| outbox.dead > 0);
        let broker = self.broker(database);
        HealthReport {
            status: match database {
                "down" => "unavailable",
                "up" if !troubled && !dead && !missing && broker.status == "up" => "ok",
                _ => "degraded",
            },
            version: env!("CARGO_PKG_VERSION"),
            database: Part { kind: self.kernel.db.engine_name(), status: database.to_owned(), error },
            broker,
            outbox: outbox.map(|outbox| OutboxReport {
                pending: outbox.pending,
                dead: outbox.dead,
                oldest_due_ms: outbox.oldest_due_ms,
            }),
            relay,
            consumers,
            instances,
            loops,
        }
    }
}

/// Takes out, wherever they are, the times that move with every beat of a loop.
fn still(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(fields) => {
            fields.retain(|name, _| !["last_success_at", "seen_at"].contains(&name.as_str()));
            fields.values_mut().for_each(still);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(still),
        _ => {}
    }
}
