//! The audit: asks the database itself whether the promises are kept.
//!
//! All checks look at one moment, in one reading transaction. The whole audit, on demand, looks at every row; the one
//! that runs by itself ([`rounds`]) goes through what was written of late in small windows, where a check can be told so.
//! What is under way is no violation: it is counted as unsettled.

mod checks;
mod pg;
mod rounds;
mod sqlite;

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

pub use checks::{CHECKS, Check};
use checks::{LOST, STRANDED, UNFILED};
pub use rounds::{Audits, watch};

use super::Operations;
use crate::http::problem::Problem;
use stockade_kernel::clock::{Timestamp, first_id_at};
use stockade_kernel::db::{Db, Tx, dialects};
use stockade_kernel::messaging::transport::{Binding, Depth, Transport, TransportError, dlq_of};
use stockade_kernel::messaging::{Tuning, inbox, outbox};

/// The check that no event gets lost on its way to a consumer; its query is made per binding.
pub const NOTHING_LOST: &str = "nothing-lost";
const NOTHING_LOST_PROMISE: &str =
    "an event that went out was dealt with by each consumer bound to it, or left a letter";

/// Offenders that are named; all are counted.
const SAMPLE_MAX: usize = 10;
/// The embedded queue's messages are in the order they came, but for transactions that were slow to commit.
const COMMIT_MARGIN: Duration = Duration::from_secs(30);
/// How long a broker that does not tell what is in flight may keep a message in flight, at least.
const FLIGHT_MIN: Duration = Duration::from_secs(5 * 60);

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
    Within(Window),
}

/// What was written from one moment on and before another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    pub from: Timestamp,
    pub to: Timestamp,
}

impl Scope {
    /// What every check's query may use: where the window begins and ends, by ids and by times.
    fn bounds(self) -> (Uuid, Uuid, Timestamp, Timestamp) {
        let (from, to) = match self {
            Self::Whole => (Timestamp::from_millis(0), Timestamp::from_millis(i64::MAX)),
            Self::Within(Window { from, to }) => (from, to),
        };
        (first_id_at(from), first_id_at(to), from, to)
    }
}

/// The queues just before the audited moment. An event that is in none of them must have been handled. A queue whose
/// depth is not known is left out of the check for lost events.
pub struct Queues<'a> {
    pub bindings: &'a [Binding],
    pub depths: Vec<Depth>,
    pub grace: Grace,
}

/// How long ago an event must have been published to count as lost.
#[derive(Debug, Clone, Copy)]
pub struct Grace {
    /// On a queue that counts its messages in flight.
    counted: Duration,
    /// On a queue that does not.
    uncounted: Duration,
}

impl Grace {
    /// For a system that is known to be at rest: an event published before the audit began has been handled.
    pub const NONE: Self = Self { counted: Duration::ZERO, uncounted: Duration::ZERO };

    fn of(flight_max: Duration) -> Self {
        Self { counted: COMMIT_MARGIN, uncounted: flight_max }
    }
}

impl<'a> Queues<'a> {
    pub async fn look(transport: &Transport, bindings: &'a [Binding], tuning: &Tuning) -> Result<Self, TransportError> {
        let names: Vec<String> = bindings.iter().flat_map(|b| [b.queue.clone(), dlq_of(&b.queue)]).collect();
        let depths = transport.depths(&names).await?;
        Ok(Self { bindings, depths, grace: Grace::of(flight_max(transport, tuning)) })
    }

    /// The queues of a broker that this process has no connection to.
    pub fn unknown(bindings: &'a [Binding]) -> Self {
        Self { bindings, depths: Vec::new(), grace: Grace::of(FLIGHT_MIN) }
    }

    /// Queues that are known to be empty, with no grace.
    pub fn at_rest(bindings: &'a [Binding]) -> Self {
        let empty = |queue| Depth {
            queue,
            ready: 0,
            in_flight: Some(0),
            consumers: None,
            oldest_enqueued_at: None,
            stale: false,
        };
        let depths = bindings.iter().flat_map(|b| [b.queue.clone(), dlq_of(&b.queue)]).map(empty).collect();
        Self { bindings, depths, grace: Grace::NONE }
    }
}

fn flight_max(transport: &Transport, tuning: &Tuning) -> Duration {
    FLIGHT_MIN.max(COMMIT_MARGIN + calls_span(transport.prefetch(), tuning.calls_max, tuning.call_timeout))
}

/// How long the last of so many messages that a consumer holds waits for the calls that those before it need.
fn calls_span(held: u16, at_once: usize, timeout: Duration) -> Duration {
    let turns = usize::from(held).div_ceil(at_once.max(1));
    timeout.saturating_mul(u32::try_from(turns).unwrap_or(u32::MAX))
}

/// Check every promise on every row.
#[utoipa::path(get, path = "/v1/audit", tag = "operations", security(("key" = ["viewer", "platform"])), responses((status = 200, body = Report)))]
async fn get_audit(State(operations): State<Operations>) -> Result<Json<Report>, Problem> {
    Ok(Json(operations.audit().await?))
}

impl Operations {
    async fn audit(&self) -> Result<Report, Problem> {
        let queues = self.queues().await?;
        let report = run(&self.kernel.db, &queues).await?;
        self.audits.keep_whole(report.clone());
        Ok(report)
    }

    async fn queues(&self) -> Result<Queues<'_>, TransportError> {
        Queues::look(&self.kernel.transport, &self.topology.queues, &self.kernel.tuning).await
    }
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

/// Runs a check's query.
async fn offenders(tx: &mut Tx, sql: &str, scope: Scope) -> sqlx::Result<Offenders> {
    let sql = complete(tx, sql, scope).await?;
    let (first, end, from, to) = scope.bounds();
    stockade_kernel::on!(tx, c => sqlx::query_as(sql).bind(first).bind(end).bind(from).bind(to).fetch_all(c).await)
}

/// The same for what [`LOST`] takes.
async fn lost(tx: &mut Tx, scope: Scope, owed: &Owed<'_>) -> sqlx::Result<Offenders> {
    let sql = complete(tx, LOST, scope).await?;
    let (first, end, from, to) = scope.bounds();
    stockade_kernel::on!(tx, c => {
        sqlx::query_as(sql)
            .bind(first)
            .bind(end)
            .bind(from)
            .bind(to)
            .bind(owed.consumer)
            .bind(owed.routing_key)
            .bind(owed.bound_since)
            .bind(owed.settled_before)
            .fetch_all(c)
            .await
    })
}

/// The same for what [`STRANDED`] and [`UNFILED`] take: by the consumer's few rows that are not processed, in any scope.
async fn left_over(tx: &mut Tx, sql: &str, consumer: &str, settled_before: Timestamp) -> sqlx::Result<Offenders> {
    let sql = complete(tx, sql, Scope::Whole).await?;
    let (first, end, from, to) = Scope::Whole.bounds();
    stockade_kernel::on!(tx, c => {
        sqlx::query_as(sql)
            .bind(first)
            .bind(end)
            .bind(from)
            .bind(to)
            .bind(consumer)
            .bind(settled_before)
            .fetch_all(c)
            .await
    })
}

/// What one consumer is owed.
pub struct Owed<'a> {
    consumer: &'a str,
    routing_key: &'a str,
    bound_since: Timestamp,
    settled_before: Timestamp,
}

/// Runs every check on every row.
pub async fn run(db: &Db, queues: &Queues<'_>) -> sqlx::Result<Report> {
    run_some(db, queues, Scope::Whole, |_, _| true).await
}

/// Runs the checks that are `wanted`, by name and by whether they look at the scope alone.
async fn run_some(
    db: &Db,
    queues: &Queues<'_>,
    scope: Scope,
    wanted: impl Fn(&str, bool) -> bool,
) -> sqlx::Result<Report> {
    let asked_at = db.clock().now();
    run_in(&mut db.read().await?, queues, asked_at, scope, wanted).await
}

/// The same in a transaction of the caller's, whose own uncommitted rows count.
pub async fn run_in(
    tx: &mut Tx,
    queues: &Queues<'_>,
    asked_at: Timestamp,
    scope: Scope,
    wanted: impl Fn(&str, bool) -> bool,
) -> sqlx::Result<Report> {
    let mut checked = Vec::with_capacity(CHECKS.len() + 1);
    for check in CHECKS.iter().filter(|check| wanted(check.name, check.has_scope())) {
        let found = offenders(tx, check.offenders, scope).await?;
        checked.push(Checked::of(check.name, check.promise, found));
    }
    let mut nothing_lost = Checked::of(NOTHING_LOST, NOTHING_LOST_PROMISE, Vec::new());
    if wanted(NOTHING_LOST, false) {
        look_for_left_over(tx, queues, asked_at, &mut nothing_lost).await?;
    }
    if wanted(NOTHING_LOST, true) {
        look_for_lost(tx, queues, asked_at, scope, &mut nothing_lost).await?;
        checked.push(nothing_lost);
    }
    Ok(Report {
        violations: checked.iter().map(|checked| checked.violations).sum(),
        unsettled: unsettled(tx, &queues.depths).await?,
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

    /// Counts more offenders, each called what `name` makes of it.
    fn add(&mut self, offenders: Offenders, name: impl Fn(String) -> String) {
        self.violations += offenders.first().map_or(0, |(_, count)| *count);
        let room = SAMPLE_MAX - self.sample.len();
        self.sample.extend(offenders.into_iter().take(room).map(|(subject, _)| name(subject)));
    }
}

/// What each consumer met and left, with nothing to bring it back and no letter about it.
async fn look_for_left_over(
    tx: &mut Tx,
    queues: &Queues<'_>,
    asked_at: Timestamp,
    found: &mut Checked,
) -> sqlx::Result<()> {
    for binding in queues.bindings {
        let Some(settled_before) = settled_before(binding, queues, asked_at) else { continue };
        let consumer = binding.consumer;
        let stranded = left_over(tx, STRANDED, consumer, settled_before).await?;
        found.add(stranded, |event_id| format!("{event_id}, left undone by {consumer}"));
        let unfiled = left_over(tx, UNFILED, consumer, settled_before).await?;
        found.add(unfiled, |event_id| format!("{event_id}, rejected by {consumer}"));
    }
    Ok(())
}

/// What no consumer that it was sent to has met.
async fn look_for_lost(
    tx: &mut Tx,
    queues: &Queues<'_>,
    asked_at: Timestamp,
    scope: Scope,
    found: &mut Checked,
) -> sqlx::Result<()> {
    let bound: Vec<(String, String, Timestamp)> = stockade_kernel::on!(tx, c => {
        sqlx::query_as("SELECT queue, routing_key, since FROM messaging_bindings").fetch_all(c).await
    })?;
    for binding in queues.bindings {
        let Some(settled_before) = settled_before(binding, queues, asked_at) else { continue };
        let consumer = binding.consumer;
        for key in binding.keys {
            let is_this = |(queue, bound, _): &&(String, String, Timestamp)| *queue == binding.queue && bound == key;
            let Some((.., bound_since)) = bound.iter().find(is_this) else { continue };
            let owed = Owed { consumer, routing_key: key, bound_since: *bound_since, settled_before };
            let lost = lost(tx, scope, &owed).await?;
            found.add(lost, |event_id| format!("{key} {event_id} of {consumer}"));
        }
    }
    Ok(())
}

/// What was sent before this can no longer be on its way to the consumer; `None` if that cannot be told.
fn settled_before(binding: &Binding, queues: &Queues<'_>, asked_at: Timestamp) -> Option<Timestamp> {
    let of = |name: &str| queues.depths.iter().find(|depth| depth.queue == name);
    let (queue, dlq) = (of(&binding.queue)?, of(&dlq_of(&binding.queue))?);
    let held = |depth: &Depth| depth.ready + depth.in_flight.unwrap_or(0);
    if queue.stale || dlq.stale || held(dlq) > 0 {
        return None;
    }
    let margin = if queue.in_flight.is_some() { queues.grace.counted } else { queues.grace.uncounted };
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

/// Tables that a scope may narrow: the word for each, and the two columns of its key, of which the second is a UUIDv7.
const TABLES: [(&str, &str, &str, &str); 5] = [
    ("{orders}", "orders_orders", "group_id", "id"),
    ("{reservations}", "inventory_reservations", "group_id", "id"),
    ("{notices}", "notifications_notices", "group_id", "id"),
    ("{entries}", "ledger_entries", "group_id", "id"),
    ("{verdicts}", "messaging_inbox", "consumer", "event_id"),
];
const EVENTS: &str = "{events}";
const KEYS: &str = "{keys}";

impl Check {
    /// Does it look only at what the scope shows?
    fn has_scope(&self) -> bool {
        let mut words = TABLES.iter().map(|(word, ..)| *word).chain([EVENTS, KEYS]);
        words.any(|word| self.offenders.contains(word))
    }
}

/// The tables as a scope shows them: within a window by id, which grows with time. The key's first column has few
/// values, which are stepped through, so that no row outside the window is read.
fn with_tables(sql: &str, scope: Scope) -> String {
    let mut sql = sql.replace(EVENTS, &events(scope)).replace(KEYS, &keys(scope));
    for (word, table, first, id) in TABLES {
        let shown = match scope {
            Scope::Whole => table.to_owned(),
            Scope::Within(_) => format!(
                "(WITH RECURSIVE g (part) AS (SELECT min({first}) FROM {table} UNION ALL
                     SELECT (SELECT min(n.{first}) FROM {table} n WHERE n.{first} > g.part) FROM g
                     WHERE g.part IS NOT NULL)
                 SELECT t.* FROM g CROSS JOIN {table} t WHERE t.{first} = g.part AND t.{id} >= $1 AND t.{id} < $2)"
            ),
        };
        sql = sql.replace(word, &shown);
    }
    let sql = replace_calls(&sql, "forgotten", |what| {
        format!("(SELECT until FROM messaging_forgotten WHERE what = '{what}')")
    });
    // Each table by its own index: what both hold together would be read as a whole for every row that asks.
    let sql = replace_calls(&sql, "event where", |condition| {
        format!(
            "(EXISTS (SELECT 1 FROM messaging_outbox a WHERE a.kind = 'event' AND {condition})
                 OR EXISTS (SELECT 1 FROM messaging_outbox_archive a WHERE {condition}))"
        )
    });
    // `$1 < $2`: a parameter must be used, and most checks have no use for it when they look at everything.
    format!("SELECT subject, count(*) OVER () FROM ({sql}) AS found WHERE $1 < $2 AND $3 < $4 LIMIT {SAMPLE_MAX}")
}

/// Events of the outbox and of its archive: retention may have moved them. Read by time and not by type: most events
/// are of few types.
fn events(scope: Scope) -> String {
    let condition = if scope == Scope::Whole { "true" } else { "id >= $1 AND id < $2" };
    format!(
        "(SELECT id AS event_id, group_id, aggregate_id, event_type, aggregate_type || '.' || event_type AS routing_key,
             status, published_at FROM messaging_outbox WHERE kind = 'event' AND {condition}
         UNION ALL SELECT id, group_id, aggregate_id, event_type, aggregate_type || '.' || event_type, 'published',
             published_at FROM messaging_outbox_archive WHERE {condition})"
    )
}

/// Idempotency keys have no ids, but an index by time.
fn keys(scope: Scope) -> String {
    let condition = if scope == Scope::Whole { "true" } else { "created_at >= $3 AND created_at < $4" };
    format!("(SELECT * FROM orders_idempotency WHERE {condition})")
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
        let late = Window { from: Timestamp::from_millis(1), to: Timestamp::from_millis(2) };
        assert!(with_tables("SELECT 1 FROM {notices} n", Scope::Within(late)).contains("t.id >= $1 AND t.id < $2"));
        let nested = with_tables("SELECT 1 WHERE {event where a.created_at >= {forgotten events}}", Scope::Whole);
        assert!(!nested.contains(['{', '}']), "{nested}");
    }

    #[test]
    fn a_check_has_a_scope_if_it_names_a_table_that_a_scope_narrows() {
        let has_scope = |name| CHECKS.iter().find(|check| check.name == name).unwrap().has_scope();
        assert!(has_scope("no-phantoms") && has_scope("keys-have-orders") && has_scope("answers-are-true"));
        assert!(!has_scope("stock-conserved") && !has_scope("no-wake-up-lost"));
    }

    #[test]
    fn the_last_message_held_waits_for_all_calls_before_it() {
        let timeout = Duration::from_secs(30);
        assert_eq!(calls_span(1024, 64, timeout), Duration::from_secs(16 * 30));
        assert_eq!(calls_span(1, 64, timeout), timeout);
        assert_eq!(calls_span(0, 64, timeout), Duration::ZERO);
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
        let settled = |queue: Depth, dlq: Depth| {
            let queues = Queues { bindings: &[], depths: vec![queue, dlq], grace: Grace::of(Duration::from_secs(600)) };
            settled_before(&binding, &queues, now).map(Timestamp::millis)
        };
        assert_eq!(settled(depth("q", 0, None), depth("q.dlq", 0, None)), Some(970_000));
        assert_eq!(settled(depth("q", 3, Some(500_000)), depth("q.dlq", 0, None)), Some(470_000));
        assert_eq!(settled(depth("q", 3, None), depth("q.dlq", 0, None)), None);
        assert_eq!(settled(depth("q", 0, None), depth("q.dlq", 1, Some(1))), None);
        let secretive = Depth { in_flight: None, ..depth("q", 0, None) };
        assert_eq!(settled(secretive, depth("q.dlq", 0, None)), Some(400_000));
    }
}
