//! The audit: asks the database itself whether the promises are kept.
//!
//! All checks look at one moment, in one reading transaction. The whole audit, on demand, looks at every row; the one
//! that runs by itself looks at what was written of late, where a check can be told so, and rests many times as long
//! as it took. What is under way is no violation: it is counted as unsettled.

mod checks;
mod pg;
mod sqlite;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

pub use checks::{CHECKS, Check};
use checks::{LOST, UNFILED};

use super::Operations;
use crate::clock::{Timestamp, first_id_at};
use crate::db::{Db, Tx, dialects};
use crate::http::problem::Problem;
use crate::messaging::transport::{Binding, Depth, Transport, TransportError, dlq_of};
use crate::messaging::{inbox, outbox};

/// The check that no event gets lost on its way to a consumer; its query is made per binding.
pub const NOTHING_LOST: &str = "nothing-lost";
const NOTHING_LOST_PROMISE: &str =
    "an event that went out was dealt with by each consumer bound to it, or left a letter";

/// Offenders that are named; all are counted.
const SAMPLE_MAX: usize = 10;
/// How far back the audit that runs by itself looks.
const RECENT: Duration = Duration::from_secs(15 * 60);
/// How many times as long as it took it rests at least.
const RESTS: u32 = 20;
/// The embedded queue's messages are in the order they came, but for transactions that were slow to commit.
const COMMIT_MARGIN: Duration = Duration::from_secs(30);
/// How long a broker that does not tell what is in flight may keep a message in flight.
const FLIGHT_MAX: Duration = Duration::from_secs(5 * 60);

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(get_audit))
}

#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Report {
    /// Over all checks; 0 if every promise is kept.
    pub violations: i64,
    /// What was under way: rows to be published, messages in queues, events to be tried again or awaiting others.
    pub unsettled: i64,
    pub checks: Vec<Checked>,
    pub checked_at: Timestamp,
}

#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Checked {
    #[schema(example = "stock-conserved")]
    pub name: String,
    /// What was checked, in words.
    pub promise: String,
    pub violations: i64,
    /// Some of those who break it.
    pub sample: Vec<String>,
}

/// Which rows to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Whole,
    Recent,
}

/// Check every promise on every row.
#[utoipa::path(get, path = "/v1/audit", tag = "operations", security(("key" = ["viewer", "platform"])), responses((status = 200, body = Report)))]
async fn get_audit(State(operations): State<Operations>) -> Result<Json<Report>, Problem> {
    Ok(Json(operations.audit(Scope::Whole).await?))
}

impl Operations {
    async fn audit(&self, scope: Scope) -> Result<Report, Problem> {
        let bindings = &self.topology.queues;
        // Before the moment that is looked at: what is in no queue by now must have its verdict by then.
        let depths = depths(&self.kernel.transport, bindings).await?;
        let report = run(&self.kernel.db, bindings, &depths, scope).await?;
        self.audits.keep(scope, report.clone());
        Ok(report)
    }
}

/// How full the queues and their dead-letter queues are.
pub async fn depths(transport: &Transport, bindings: &[Binding]) -> Result<Vec<Depth>, TransportError> {
    let names: Vec<String> = bindings.iter().flat_map(|b| [b.queue.clone(), dlq_of(&b.queue)]).collect();
    transport.depths(&names).await
}

/// The last report of each scope.
#[derive(Clone, Default)]
pub struct Audits(Arc<Mutex<(Option<Report>, Option<Report>)>>);

impl Audits {
    fn keep(&self, scope: Scope, report: Report) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match scope {
            Scope::Whole => kept.0 = Some(report),
            Scope::Recent => kept.1 = Some(report),
        }
    }

    /// The last reports as one: each check as the one that found more violations has it. None before the first audit.
    pub fn latest(&self) -> Option<Report> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let reports = [&kept.0, &kept.1].into_iter().flatten();
        let mut latest = reports.clone().max_by_key(|report| report.checked_at)?.clone();
        for checked in reports.flat_map(|report| &report.checks) {
            if let Some(known) = latest.checks.iter_mut().find(|known| known.name == checked.name)
                && known.violations < checked.violations
            {
                *known = checked.clone();
            }
        }
        latest.violations = latest.checks.iter().map(|checked| checked.violations).sum();
        Some(latest)
    }
}

/// Audits what was written of late, now and then, until cancelled.
pub async fn watch(operations: Operations, every: Duration) {
    loop {
        let started = tokio::time::Instant::now();
        match operations.audit(Scope::Recent).await {
            Ok(report) => {
                for broken in report.checks.iter().filter(|checked| checked.violations > 0) {
                    tracing::error!(
                        check = broken.name,
                        violations = broken.violations,
                        sample = ?broken.sample,
                        "BROKEN PROMISE {}: {} of them break it",
                        broken.name,
                        broken.violations
                    );
                }
            }
            Err(error) => tracing::debug!(?error, "no audit just now"),
        }
        tokio::time::sleep(every.max(started.elapsed() * RESTS)).await;
    }
}

/// Remembers since when each queue is bound to what.
pub async fn remember_bindings(db: &Db, bindings: &[Binding]) -> sqlx::Result<()> {
    let mut tx = db.begin().await?;
    let now = tx.now();
    for binding in bindings {
        for key in binding.keys {
            crate::on!(tx, c => {
                sqlx::query("INSERT INTO messaging_bound (queue, routing_key, since) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING")
                    .bind(&binding.queue)
                    .bind(key)
                    .bind(now)
                    .execute(c)
                    .await
                    .map(drop)
            })?;
        }
    }
    tx.commit().await
}

dialects! {
    /// A check's query in the words of the database.
    async fn translate(sql: &str) -> String;
}

/// The same for a scope.
async fn complete(tx: &mut Tx, sql: &str, scope: Scope) -> sqlx::Result<AssertSqlSafe<String>> {
    Ok(AssertSqlSafe(with_tables(&translate(tx, sql).await?, scope)))
}

/// Those who break a promise: how many, beside each of some of them.
type Offenders = Vec<(String, i64)>;

/// Runs a check's query from `since` on.
async fn offenders(tx: &mut Tx, sql: &str, scope: Scope, since: Uuid) -> sqlx::Result<Offenders> {
    let sql = complete(tx, sql, scope).await?;
    crate::on!(tx, c => sqlx::query_as(sql).bind(since).fetch_all(c).await)
}

/// The same for what [`LOST`] takes.
async fn lost(tx: &mut Tx, scope: Scope, since: Uuid, owed: &Owed<'_>) -> sqlx::Result<Offenders> {
    let sql = complete(tx, LOST, scope).await?;
    crate::on!(tx, c => {
        sqlx::query_as(sql)
            .bind(since)
            .bind(owed.consumer)
            .bind(owed.routing_key)
            .bind(owed.bound_since)
            .bind(owed.published_before)
            .fetch_all(c)
            .await
    })
}

/// The same for what [`UNFILED`] takes: by the consumer's few rows that are dead, in either scope.
async fn unfiled(tx: &mut Tx, consumer: &str, rejected_before: Timestamp) -> sqlx::Result<Offenders> {
    let sql = complete(tx, UNFILED, Scope::Whole).await?;
    crate::on!(tx, c => {
        sqlx::query_as(sql).bind(Uuid::nil()).bind(consumer).bind(rejected_before).fetch_all(c).await
    })
}

/// What one consumer is owed.
pub struct Owed<'a> {
    consumer: &'a str,
    routing_key: &'a str,
    bound_since: Timestamp,
    published_before: Timestamp,
}

/// Runs every check, with the `depths` of the queues as they were just before; a queue that is not among them is not
/// asked for what got lost on its way.
pub async fn run(db: &Db, bindings: &[Binding], depths: &[Depth], scope: Scope) -> sqlx::Result<Report> {
    let asked_at = db.clock().now();
    let mut tx = db.read().await?;
    let since = match scope {
        Scope::Whole => Uuid::nil(),
        Scope::Recent => first_id_at(asked_at.minus(RECENT)),
    };
    let mut checked = Vec::with_capacity(CHECKS.len() + 1);
    for check in CHECKS {
        let found = offenders(&mut tx, check.offenders, scope, since).await?;
        checked.push(Checked::of(check.name, check.promise, found));
    }
    checked.push(nothing_lost(&mut tx, bindings, depths, asked_at, scope, since).await?);
    Ok(Report {
        violations: checked.iter().map(|checked| checked.violations).sum(),
        unsettled: unsettled(&mut tx, depths).await?,
        checks: checked,
        checked_at: asked_at,
    })
}

impl Checked {
    fn of(name: &str, promise: &str, found: Vec<(String, i64)>) -> Self {
        let violations = found.first().map_or(0, |(_, count)| *count);
        let sample = found.into_iter().map(|(subject, _)| subject).collect();
        Self { name: name.to_owned(), promise: promise.to_owned(), violations, sample }
    }
}

async fn nothing_lost(
    tx: &mut Tx,
    bindings: &[Binding],
    depths: &[Depth],
    asked_at: Timestamp,
    scope: Scope,
    since: Uuid,
) -> sqlx::Result<Checked> {
    let bound: Vec<(String, String, Timestamp)> = crate::on!(tx, c => {
        sqlx::query_as("SELECT queue, routing_key, since FROM messaging_bound").fetch_all(c).await
    })?;
    let mut found = Checked::of(NOTHING_LOST, NOTHING_LOST_PROMISE, Vec::new());
    let mut add = |offenders: Offenders, name: &dyn Fn(String) -> String| {
        found.violations += offenders.first().map_or(0, |(_, count)| *count);
        let room = SAMPLE_MAX - found.sample.len();
        found.sample.extend(offenders.into_iter().take(room).map(|(event_id, _)| name(event_id)));
    };
    for binding in bindings {
        let Some(published_before) = settled_before(binding, depths, asked_at) else { continue };
        let consumer = binding.consumer;
        let unfiled = unfiled(tx, consumer, published_before).await?;
        add(unfiled, &|event_id| format!("{event_id}, rejected by {consumer}"));
        for key in binding.keys {
            let Some((.., bound_since)) =
                bound.iter().find(|(queue, bound, _)| *queue == binding.queue && bound == key)
            else {
                continue;
            };
            let owed = Owed { consumer, routing_key: key, bound_since: *bound_since, published_before };
            let lost = lost(tx, scope, since, &owed).await?;
            add(lost, &|event_id| format!("{key} {event_id} of {consumer}"));
        }
    }
    Ok(found)
}

/// What was published before this can no longer be on its way to the consumer; `None` if that cannot be told.
fn settled_before(binding: &Binding, depths: &[Depth], asked_at: Timestamp) -> Option<Timestamp> {
    let of = |name: &str| depths.iter().find(|depth| depth.queue == name);
    let (queue, dlq) = (of(&binding.queue)?, of(&dlq_of(&binding.queue))?);
    let held = |depth: &Depth| depth.ready + depth.in_flight.unwrap_or(0);
    if queue.stale || dlq.stale || held(dlq) > 0 {
        return None;
    }
    let margin = if queue.in_flight.is_some() { COMMIT_MARGIN } else { FLIGHT_MAX };
    let newest_settled = match (held(queue), queue.oldest_enqueued_at) {
        (0, _) => asked_at,
        (_, Some(oldest)) => oldest,
        (_, None) => return None,
    };
    Some(newest_settled.minus(margin))
}

async fn unsettled(tx: &mut Tx, depths: &[Depth]) -> sqlx::Result<i64> {
    let now = tx.now();
    let pending = outbox::backlog(tx, now).await?.pending;
    let undecided = inbox::count_unsettled(tx).await?.into_iter().filter(|count| count.state != "dead");
    let queued: i64 = depths.iter().map(|depth| depth.ready + depth.in_flight.unwrap_or(0)).sum();
    Ok(pending + queued + undecided.map(|count| count.rows).sum::<i64>())
}

/// The tables as a scope shows them. Of late: by id, which grows with time; by tenant first, as the keys are.
fn with_tables(sql: &str, scope: Scope) -> String {
    const TABLES: [(&str, &str); 4] = [
        ("{orders}", "orders_orders"),
        ("{reservations}", "inventory_reservations"),
        ("{notices}", "notifications_notices"),
        ("{entries}", "ledger_entries"),
    ];
    let mut sql = sql.replace("{events}", &events(scope));
    for (word, table) in TABLES {
        let shown = match scope {
            Scope::Whole => table.to_owned(),
            Scope::Recent => format!(
                "(SELECT t.* FROM (SELECT DISTINCT group_id FROM messaging_outbox WHERE id >= $1) g
                 JOIN {table} t ON t.group_id = g.group_id AND t.id >= $1)"
            ),
        };
        sql = sql.replace(word, &shown);
    }
    // Each table by its own index: what both hold together would be read as a whole for every row that asks.
    let sql = replace_calls(&sql, "event where", |condition| {
        format!(
            "(EXISTS (SELECT 1 FROM messaging_outbox a WHERE a.kind = 'event' AND {condition})
                 OR EXISTS (SELECT 1 FROM messaging_outbox_archive a WHERE {condition}))"
        )
    });
    let sql = replace_calls(&sql, "forgotten", |what| {
        format!("(SELECT until FROM messaging_forgotten WHERE what = '{what}')")
    });
    // `$1 = $1`: a parameter must be used, and most checks have no use for it when they look at everything.
    format!("SELECT subject, count(*) OVER () FROM ({sql}) AS found WHERE $1 = $1 LIMIT {SAMPLE_MAX}")
}

/// Events of the outbox and of its archive: retention may have moved them. Read by time and not by type: most events
/// are of few types.
fn events(scope: Scope) -> String {
    let condition = if scope == Scope::Recent { "id >= $1" } else { "true" };
    format!(
        "(SELECT id AS event_id, group_id, aggregate_id, event_type, aggregate_type || '.' || event_type AS routing_key,
             status, published_at FROM messaging_outbox WHERE kind = 'event' AND {condition}
         UNION ALL SELECT id, group_id, aggregate_id, event_type, aggregate_type || '.' || event_type, 'published',
             published_at FROM messaging_outbox_archive WHERE {condition})"
    )
}

/// Replaces `{word X}` by what `write` makes of X.
fn replace_calls(sql: &str, word: &str, write: impl Fn(&str) -> String) -> String {
    let (mut out, opening) = (String::with_capacity(sql.len()), format!("{{{word} "));
    let mut rest = sql;
    while let Some((before, after)) = rest.split_once(&opening) {
        let (argument, after) = after.split_once('}').unwrap_or((after, ""));
        out.push_str(before);
        out.push_str(&write(argument));
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_query_are_replaced_wherever_they_stand() {
        let sql = replace_calls("a {text of o.id} b {text of e.id}", "text of", |column| format!("<{column}>"));
        assert_eq!(sql, "a <o.id> b <e.id>");
        assert!(with_tables("SELECT 1 FROM {notices} n", Scope::Recent).contains("t.id >= $1"));
    }

    #[test]
    fn what_may_still_be_under_way_is_not_owed_yet() {
        let binding = Binding { consumer: "c", queue: "q".to_owned(), keys: &[] };
        let depth = |queue: &str, ready, oldest_ms: Option<i64>| Depth {
            queue: queue.to_owned(),
            ready,
            in_flight: Some(0),
            consumers: Some(1),
            oldest_enqueued_at: oldest_ms.map(Timestamp::from_millis),
            stale: false,
        };
        let now = Timestamp::from_millis(1_000_000);
        let settled = |queue: Depth, dlq: Depth| settled_before(&binding, &[queue, dlq], now).map(Timestamp::millis);
        assert_eq!(settled(depth("q", 0, None), depth("q.dlq", 0, None)), Some(970_000));
        assert_eq!(settled(depth("q", 3, Some(500_000)), depth("q.dlq", 0, None)), Some(470_000));
        assert_eq!(settled(depth("q", 3, None), depth("q.dlq", 0, None)), None);
        assert_eq!(settled(depth("q", 0, None), depth("q.dlq", 1, Some(1))), None);
    }
}
