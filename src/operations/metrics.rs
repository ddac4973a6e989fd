//! `GET /v1/metrics`: what was counted here, and what the tables say now, for Prometheus.
//!
//! Gauges are read at each scrape, by the queries behind the API. If the database cannot be asked they are missing
//! from the page, never stale. One number would take too long to read each time, the processed rows of the inbox:
//! they are counted now and then, the more seldom the longer it takes.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Operations;
use crate::http::caller::Caller;
use crate::http::guard::bearer;
use crate::http::live::Live;
use crate::http::problem::Problem;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::transport::{Binding, Condition};
use stockade_kernel::messaging::{dead_letters, inbox, office, outbox, relay};
use stockade_kernel::metrics::Labels;

/// How long a scrape waits for the database: it is answered within a second, whatever is down.
const READ_TIMEOUT: Duration = Duration::from_millis(700);
/// How often the processed rows of the inbox are counted anew, and how many times as long as a count takes it must
/// have rested.
const RECOUNT_EVERY: Duration = Duration::from_secs(60);
const RECOUNT_RESTS: u32 = 50;

/// What becomes of an order, and the event that tells.
const ORDER_OUTCOMES: [(&str, &str); 7] = [
    ("placed", "order.placed"),
    ("reserved", "inventory.reserved"),
    ("rejected", "inventory.failed"),
    ("paid", "order.paid"),
    ("cancelled", "order.cancelled"),
    ("expired", "order.expired"),
    ("fulfilled", "order.fulfilled"),
];

#[derive(Clone)]
pub struct Scrape {
    pub operations: Operations,
    /// What a caller must know; anybody may look if there is none.
    pub token: Option<String>,
    pub processed: ProcessedRows,
    pub live: Live,
}

/// The last count of processed inbox rows, per consumer.
#[derive(Clone, Default)]
pub struct ProcessedRows(Arc<Mutex<Vec<(String, i64)>>>);

pub fn routes() -> OpenApiRouter<Scrape> {
    OpenApiRouter::new().routes(routes!(metrics))
}

/// Metrics for Prometheus, as OpenMetrics text.
///
/// With METRICS_TOKEN set it must be given, as `x-metrics-token` or as a Bearer token. On a server with API keys a key
/// for every group will do instead.
#[utoipa::path(get, path = "/v1/metrics", tag = "health", security((), ("key" = ["viewer", "platform"])), responses(
    (status = 200, body = String, content_type = "application/openmetrics-text"),
    (status = 401, body = Problem, content_type = "application/problem+json"),
))]
async fn metrics(
    State(scrape): State<Scrape>,
    caller: Option<Caller>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    scrape.admit(&headers, caller.as_ref())?;
    let mut gauges = Gauges::default();
    scrape.read_process(&mut gauges);
    let read = tokio::time::timeout(READ_TIMEOUT, scrape.read_tables()).await;
    let up = match read {
        Ok(Ok(tables)) => {
            tables.fill(&mut gauges, &scrape);
            true
        }
        Ok(Err(error)) => {
            tracing::debug!(?error, "a scrape goes without the tables");
            false
        }
        Err(_) => false,
    };
    gauges.set("stockade_database_up", "Could the tables be read for this page?", &[], f64::from(u8::from(up)));
    scrape.read_broker(&mut gauges, up);
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], scrape.operations.kernel.db.metrics().expose(&gauges.done())).into_response())
}

/// What one read of the tables found.
struct Tables {
    now: Timestamp,
    backlog: outbox::Backlog,
    queues: Vec<super::queues::Queue>,
    letters: Vec<(String, String, i64)>,
    unsettled: Vec<inbox::Count>,
}

impl Scrape {
    fn admit(&self, headers: &HeaderMap, caller: Option<&Caller>) -> Result<(), Problem> {
        // They count every tenant's messages. Anybody on an open server is no such key: the token is for them.
        let key = caller.filter(|caller| caller.identity.platform && caller.identity.key.is_some());
        let Some(token) = &self.token else {
            return match caller.filter(|caller| caller.identity.platform) {
                Some(_) => Ok(()),
                None => Err(Problem::new(401, "token-missing", "metrics need a key for every group, or METRICS_TOKEN")),
            };
        };
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        match text("x-metrics-token").or_else(|| text("authorization").and_then(bearer)) {
            _ if key.is_some() => Ok(()),
            None => {
                let how = "metrics need the token of METRICS_TOKEN, as x-metrics-token or as a Bearer token";
                Err(Problem::new(401, "token-missing", how))
            }
            Some(given) if !is_same(given, token) => {
                Err(Problem::new(401, "token-invalid", "this is not the token of METRICS_TOKEN"))
            }
            Some(_) => Ok(()),
        }
    }

    async fn read_tables(&self) -> Result<Tables, Problem> {
        let bindings: Vec<&Binding> = self.operations.topology.queues.iter().collect();
        let queues = self.operations.look_at(&bindings).await?;
        let mut tx = self.operations.kernel.db.read().await?;
        let now = tx.now();
        Ok(Tables {
            now,
            backlog: outbox::backlog(&mut tx, now).await?,
            queues,
            letters: dead_letters::count_by_reason(&mut tx).await?,
            unsettled: inbox::count_unsettled(&mut tx).await?,
        })
    }

    /// What this process knows without asking anybody.
    fn read_process(&self, gauges: &mut Gauges) {
        let kernel = &self.operations.kernel;
        gauges.info(kernel.db.engine_name(), kernel.transport.name());
        self.count_orders(gauges);
        let streams = float(i64::try_from(self.live.streams()).unwrap_or(i64::MAX));
        gauges.set("stockade_sse_streams", "Pages that watch", &[], streams);
        if let Some(audit) = self.operations.audits.latest() {
            for checked in &audit.checks {
                let help = "Rows that break a promise, as the last audits found";
                let labels = [("name", checked.name.as_str())];
                gauges.set("stockade_invariant_violations", help, &labels, float(checked.violations));
            }
            let help = "When the promises were last checked";
            gauges.set("stockade_invariant_last_check_timestamp_seconds", help, &[], seconds_of(audit.checked_at));
        }
        for (name, status) in kernel.health.statuses() {
            if let Some(at) = status.last_success_at {
                gauges.set(
                    "stockade_consumer_last_success_timestamp_seconds",
                    "When a loop last did its work or saw that there was none",
                    &[("consumer", name)],
                    seconds_of(at),
                );
            }
        }
        let consumers = self.operations.topology.queues.iter().map(|binding| binding.consumer);
        for name in consumers.chain([relay::NAME, office::NAME]) {
            let paused = f64::from(u8::from(kernel.pauses.is_paused(name)));
            gauges.set("stockade_consumer_paused", "1 while it is to rest", &[("consumer", name)], paused);
        }
    }

    /// Orders by what became of them, as the events made here tell.
    fn count_orders(&self, gauges: &mut Gauges) {
        let orders: Family<Labels<1>, Counter> = Family::default();
        for (outcome, event_type) in ORDER_OUTCOMES {
            let told = self.operations.kernel.db.metrics().events.get(&[("event_type", event_type.to_owned())]);
            orders.get_or_create(&[("outcome", outcome)]).inc_by(told.map_or(0, |count| count.get()));
        }
        gauges.registry.register("stockade_orders", "Orders placed, and what became of them", orders);
    }

    fn read_broker(&self, gauges: &mut Gauges, database_up: bool) {
        let (connected, blocked) = match self.operations.kernel.transport.condition() {
            // The embedded queue is a table: it is up when its database is.
            None => (database_up, false),
            Some(Condition::Up) => (true, false),
            Some(Condition::Blocked(_)) => (true, true),
            Some(Condition::Down(_)) => (false, false),
        };
        gauges.set("stockade_broker_connected", "Is the broker there?", &[], f64::from(u8::from(connected)));
        gauges.set(
            "stockade_broker_blocked",
            "Is the broker there but takes no messages?",
            &[],
            f64::from(u8::from(blocked)),
        );
    }
}

impl Tables {
    fn fill(self, gauges: &mut Gauges, scrape: &Scrape) {
        self.fill_outbox(gauges);
        self.fill_queues(gauges);
        for (consumer, reason, count) in &self.letters {
            let labels = [("consumer", consumer.as_str()), ("reason", reason.as_str())];
            gauges.set("stockade_dead_letters", "Open dead letters", &labels, float(*count));
        }
        for count in &self.unsettled {
            let labels = [("consumer", count.consumer.as_str()), ("state", count.state.as_str())];
            gauges.set(INBOX_ROWS, INBOX_ROWS_HELP, &labels, float(count.rows));
        }
        for binding in &scrape.operations.topology.queues {
            let versions = self.unsettled.iter().filter(|count| count.consumer == binding.consumer);
            gauges.set(
                "stockade_lease_epoch",
                "The highest fencing version among a consumer's unsettled inbox rows",
                &[("consumer", binding.consumer)],
                versions.map(|count| float(count.version_max)).fold(0.0, f64::max),
            );
        }
        for (consumer, count) in scrape.processed.last() {
            let labels = [("consumer", consumer.as_str()), ("state", "processed")];
            gauges.set(INBOX_ROWS, INBOX_ROWS_HELP, &labels, float(count));
        }
    }

    fn fill_outbox(&self, gauges: &mut Gauges) {
        let backlog = &self.backlog;
        gauges.set("stockade_outbox_pending", "Outbox rows to go out", &[], float(backlog.pending));
        gauges.set(
            "stockade_outbox_oldest_pending_age_seconds",
            "How long the oldest outbox row that is due has been waiting",
            &[],
            float(backlog.oldest_due_ms.unwrap_or(0)) / 1000.0,
        );
        gauges.set("stockade_outbox_dead", "Outbox rows given up on", &[], float(backlog.dead));
        gauges.set(
            "stockade_outbox_attempts",
            "The most refusals that an outbox row still to go out has met",
            &[],
            f64::from(backlog.attempts_max),
        );
        gauges.set("stockade_scrape_timestamp_seconds", "When these tables were read", &[], seconds_of(self.now));
    }

    fn fill_queues(&self, gauges: &mut Gauges) {
        for queue in &self.queues {
            let labels = [("queue", queue.name.as_str())];
            let consumer = queue.name.rsplit('.').next().unwrap_or_default();
            gauges.set("stockade_queue_depth", "Messages ready to be taken", &labels, float(queue.depth));
            if let Some(in_flight) = queue.in_flight {
                gauges.set("stockade_queue_in_flight", "Messages taken, not yet settled", &labels, float(in_flight));
            }
            if let Some(consumers) = queue.consumers {
                gauges.set("stockade_queue_consumers", "Live consumers, all instances", &labels, float(consumers));
            }
            gauges.set("stockade_queue_dlq_depth", "Rejected, not yet filed", &labels, float(queue.dlq_depth));
            gauges.set(
                "stockade_queue_oldest_age_seconds",
                "Age of the oldest message",
                &labels,
                float(queue.oldest_age_ms.unwrap_or(0)) / 1000.0,
            );
            gauges.set(
                "stockade_consumer_lag",
                "Messages that a consumer has yet to settle",
                &[("consumer", consumer)],
                float(queue.depth + queue.in_flight.unwrap_or(0)),
            );
        }
    }
}

/// In a time that tells nothing of the token, nor of its length.
fn is_same(given: &str, token: &str) -> bool {
    Sha256::digest(given).ct_eq(&Sha256::digest(token)).into()
}

const INBOX_ROWS: &str = "stockade_inbox_rows";
const INBOX_ROWS_HELP: &str = "Inbox rows; those processed are counted every few minutes";

type Labelled = Family<Vec<(String, String)>, Gauge<f64, AtomicU64>>;

/// The gauges of one page, made for it.
#[derive(Default)]
struct Gauges {
    registry: Registry,
    families: Vec<(&'static str, Labelled)>,
}

impl Gauges {
    fn set(&mut self, name: &'static str, help: &'static str, labels: &[(&str, &str)], value: f64) {
        if labels.is_empty() {
            let gauge = Gauge::<f64, AtomicU64>::default();
            gauge.set(value);
            return self.registry.register(name, help, gauge);
        }
        let known = self.families.iter().position(|(known, _)| *known == name);
        let index = known.unwrap_or_else(|| {
            let family = Labelled::default();
            self.registry.register(name, help, family.clone());
            self.families.push((name, family));
            self.families.len() - 1
        });
        let labels: Vec<(String, String)> = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        self.families[index].1.get_or_create(&labels).set(value);
    }

    fn info(&mut self, database: &'static str, broker: &'static str) {
        let labels = [("version", env!("CARGO_PKG_VERSION")), ("database", database), ("broker", broker)];
        self.registry.register("stockade_build", "What is running", Info::new(labels));
    }

    fn done(self) -> Registry {
        self.registry
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn float(count: i64) -> f64 {
    count as f64
}

fn seconds_of(at: Timestamp) -> f64 {
    float(at.millis()) / 1000.0
}

impl ProcessedRows {
    fn last(&self) -> Vec<(String, i64)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts now and then until cancelled.
    pub async fn follow(self, operations: Operations) {
        loop {
            let started = tokio::time::Instant::now();
            match self.count(&operations).await {
                Ok(counts) => *self.0.lock().unwrap_or_else(PoisonError::into_inner) = counts,
                Err(error) => tracing::debug!(%error, "the inbox cannot be counted just now"),
            }
            tokio::time::sleep(RECOUNT_EVERY.max(started.elapsed() * RECOUNT_RESTS)).await;
        }
    }

    async fn count(&self, operations: &Operations) -> sqlx::Result<Vec<(String, i64)>> {
        inbox::count_processed(&mut operations.kernel.db.read().await?).await
    }
}
