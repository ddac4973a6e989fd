//! The timeline of one order: every hop with its times, and in one sentence what it waits for and what would clear it.
//!
//! It only looks: at the order, its events in the outbox and its archive, their verdicts in the inboxes, their letters,
//! and what came of them. That crosses the walls between modules on purpose, as the audit does: an operator's question does too.

mod hops;
mod pg;
mod sqlite;
mod waits;

use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Operations;
use crate::http::caller::Caller;
use crate::http::problem::Problem;
use crate::money::in_major;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::{Filter, Tx, dialects, fetch_page};
use stockade_kernel::messaging::event::routing_key;
use stockade_kernel::messaging::transport::{Binding, Way};
use stockade_kernel::messaging::{instances, relay};

pub use hops::Hop;
use waits::Surroundings;

/// Rows of one order's trail that are shown; more would be an order that loops.
const ROWS_MAX: i64 = 500;

pub fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(get_timeline))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Timeline {
    pub order_id: Uuid,
    #[schema(example = "ORD-7K2M9QXA")]
    pub number: String,
    #[schema(example = "placed")]
    pub status: String,
    /// What the order waits for and what would clear it.
    #[schema(example = "waits for inventory, which is paused: resume it")]
    pub waiting_for: String,
    /// What else is held up about it, such as a notice.
    pub also: Vec<String>,
    /// Everything that happened, oldest first.
    pub hops: Vec<Hop>,
}

/// Get everything that happened to an order, and what it waits for.
#[utoipa::path(get, path = "/v1/orders/{id}/timeline", tag = "orders", security(("key" = ["viewer"])),
    params(("id" = String, Path, description = "The order's id or its number", example = "ORD-7K2M9QXA")),
    responses(
        (status = 200, body = Timeline),
        (status = 404, body = Problem, content_type = "application/problem+json"),
    ))]
async fn get_timeline(
    State(operations): State<Operations>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Timeline>, Problem> {
    let story = {
        let mut tx = operations.kernel.db.read().await?;
        let reader = Reader { group_id: &caller.group_id, platform: caller.identity.platform };
        let story = Story::read(&mut tx, &operations, &reader, &id).await?;
        story.ok_or_else(|| Problem::not_found(format!("there is no order {id}")))?
    };
    let mut sentences = waits::sentences(&story, &operations.surroundings(caller.identity.platform).await?).into_iter();
    Ok(Json(Timeline {
        order_id: story.order.id,
        number: story.order.number.clone(),
        status: story.order.status.clone(),
        waiting_for: sentences.next().unwrap_or_default(),
        also: sentences.collect(),
        hops: hops::of(&story),
    }))
}

impl Operations {
    /// `whole`: as callers of no one tenant see it; to others the broker's own words are not passed on.
    async fn surroundings(&self, whole: bool) -> Result<Surroundings, Problem> {
        let obstacle = |way| {
            let why = self.kernel.transport.obstacle(way)?;
            Some(if whole { why } else { "it cannot be used just now".to_owned() })
        };
        let bindings: Vec<&Binding> = self.topology.queues.iter().collect();
        let queues = self.look_at(&bindings).await?;
        let others = instances::list(&mut self.kernel.db.read().await?).await?;
        let relay_runs = self.kernel.health.statuses().contains_key(relay::NAME)
            || others.iter().any(|other| other.loops.contains_key(relay::NAME));
        Ok(Surroundings {
            paused: self.kernel.pauses.names(),
            queues: queues.into_iter().map(|queue| (queue.name.clone(), queue)).collect(),
            bindings: self.topology.queues.clone(),
            relay_runs,
            no_way_out: obstacle(Way::Out),
            no_way_in: obstacle(Way::In),
        })
    }
}

/// All that is known of one order.
#[derive(Debug)]
pub(super) struct Story {
    order: Order,
    sent: Vec<Sent>,
    verdicts: Vec<Verdict>,
    letters: Vec<Letter>,
    effects: Vec<Effect>,
    /// Of what was settled before this, verdicts and letters may be forgotten.
    verdicts_since: Timestamp,
    letters_since: Timestamp,
}

#[derive(Debug)]
struct Order {
    id: Uuid,
    number: String,
    status: String,
    reason: Option<String>,
    correlation_id: String,
    created_at: Timestamp,
    hold_expires_at: Option<Timestamp>,
}

/// An outbox row.
#[derive(Debug)]
struct Sent {
    id: Uuid,
    event_id: Uuid,
    kind: String,
    key: String,
    status: String,
    attempts: i32,
    available_at: Timestamp,
    created_at: Timestamp,
    /// When it was taken to be sent to a broker; the embedded queue needs no sending.
    claimed_at: Option<Timestamp>,
    published_at: Option<Timestamp>,
    target: String,
    last_error: Option<String>,
}

/// An inbox row.
#[derive(Debug)]
struct Verdict {
    consumer: String,
    event_id: Uuid,
    key: String,
    state: String,
    attempts: i32,
    duplicates: i32,
    started_at: Timestamp,
    finished_at: Option<Timestamp>,
    due_at: Option<Timestamp>,
    last_error: Option<String>,
    waiting_for: Option<String>,
    deadline_at: Option<Timestamp>,
}

#[derive(Debug)]
struct Letter {
    id: Uuid,
    consumer: String,
    event_id: Uuid,
    key: String,
    reason: String,
    error: String,
    state: String,
    created_at: Timestamp,
    resolved_at: Option<Timestamp>,
}

/// A row that a module wrote about the order.
#[derive(Debug)]
struct Effect {
    who: &'static str,
    text: String,
    event_id: Option<Uuid>,
    at: Timestamp,
}

/// Who reads: an id is whatever a message says it is, so what is under one may still be another's.
struct Reader<'a> {
    group_id: &'a str,
    /// Does it see also what is nobody's, for its group cannot be read?
    platform: bool,
}

type VerdictColumns = (
    String,
    Uuid,
    String,
    String,
    i32,
    i32,
    Timestamp,
    Option<Timestamp>,
    Option<Timestamp>,
    Option<String>,
    Option<String>,
    Option<Timestamp>,
);
type LetterColumns =
    (Uuid, String, Option<String>, Option<String>, String, String, String, Timestamp, Option<Timestamp>);

dialects! {
    /// What these consumers made of these events.
    async fn select_verdicts(consumers: &[&str], events: &[Uuid], reader: &Reader<'_>) -> Vec<VerdictColumns>;
    /// The letters under these message ids.
    async fn select_letters(message_ids: &[String], reader: &Reader<'_>) -> Vec<LetterColumns>;
}

impl Story {
    async fn read(
        tx: &mut Tx,
        operations: &Operations,
        reader: &Reader<'_>,
        id_or_number: &str,
    ) -> sqlx::Result<Option<Self>> {
        let group_id = reader.group_id;
        let Some(order) = read_order(tx, group_id, id_or_number).await? else { return Ok(None) };
        let sent = read_sent(tx, group_id, order.id).await?;
        let effects = read_effects(tx, group_id, order.id).await?;
        // Effects outlive the events that caused them.
        let causes = effects.iter().filter_map(|effect| effect.event_id);
        let mut events: Vec<Uuid> = sent.iter().map(|row| row.event_id).chain(causes).collect();
        events.sort_unstable();
        events.dedup();
        let consumers: Vec<&str> = operations.topology.queues.iter().map(|binding| binding.consumer).collect();
        let verdicts = select_verdicts(tx, &consumers, &events, reader).await?.into_iter().map(Verdict::from).collect();
        let message_ids: Vec<String> = events.iter().map(Uuid::to_string).collect();
        let letters = select_letters(tx, &message_ids, reader).await?.into_iter().filter_map(Letter::read).collect();
        let verdicts_since = forgotten_until(tx, "verdicts").await?;
        let letters_since = forgotten_until(tx, "letters").await?;
        Ok(Some(Self { order, sent, verdicts, letters, effects, verdicts_since, letters_since }))
    }
}

async fn forgotten_until(tx: &mut Tx, what: &str) -> sqlx::Result<Timestamp> {
    stockade_kernel::on!(tx, c => {
        sqlx::query_scalar("SELECT until FROM messaging_forgotten WHERE what = $1").bind(what).fetch_one(c).await
    })
}

async fn read_order(tx: &mut Tx, group_id: &str, id_or_number: &str) -> sqlx::Result<Option<Order>> {
    const SELECT: &str =
        "SELECT id, number, status, reason, correlation_id, created_at, hold_expires_at FROM orders_orders";
    let filter = Filter::new(SELECT).and("group_id = ?", [group_id.into()]);
    let filter = match Uuid::try_parse(id_or_number) {
        Ok(id) => filter.and("id = ?", [id.into()]),
        Err(_) => filter.and("number = ?", [id_or_number.to_ascii_uppercase().into()]),
    };
    type Columns = (Uuid, String, String, Option<String>, String, Timestamp, Option<Timestamp>);
    let found = fetch_page!(tx, filter.page("id", 1), Columns)?.pop();
    Ok(found.map(|(id, number, status, reason, correlation_id, created_at, hold_expires_at)| Order {
        id,
        number,
        status,
        reason,
        correlation_id,
        created_at,
        hold_expires_at,
    }))
}

async fn read_sent(tx: &mut Tx, group_id: &str, order_id: Uuid) -> sqlx::Result<Vec<Sent>> {
    const WAITING: &str = "SELECT id, event_id, kind, aggregate_type, event_type, status, attempts, available_at, \
         created_at, claimed_at, published_at, target, last_error FROM messaging_outbox";
    const ARCHIVED: &str = "SELECT id, id, 'event', aggregate_type, event_type, 'published', attempts, created_at, \
         created_at, claimed_at, published_at, '', CAST(NULL AS text) FROM messaging_outbox_archive";
    // The aggregate of what inventory says is the order, too.
    let of_order = |select| {
        Filter::new(select)
            .and("aggregate_type IN ('order', 'inventory')", [])
            .and("aggregate_id = ?", [order_id.to_string().into()])
            .and("group_id = ?", [group_id.into()])
            .page("created_at, id", ROWS_MAX)
    };
    type Columns = (
        Uuid,
        Uuid,
        String,
        String,
        String,
        String,
        i32,
        Timestamp,
        Timestamp,
        Option<Timestamp>,
        Option<Timestamp>,
        String,
        Option<String>,
    );
    let sent = |columns: Columns| {
        let (id, event_id, kind, aggregate_type, event_type, status, attempts, ..) = columns;
        let (.., available_at, created_at, claimed_at, published_at, target, last_error) = columns;
        let key = routing_key(&aggregate_type, &event_type);
        Sent {
            id,
            event_id,
            kind,
            key,
            status,
            attempts,
            available_at,
            created_at,
            claimed_at,
            published_at,
            target,
            last_error,
        }
    };
    let mut rows = fetch_page!(tx, of_order(ARCHIVED), Columns)?;
    rows.extend(fetch_page!(tx, of_order(WAITING), Columns)?);
    Ok(rows.into_iter().map(sent).collect())
}

/// One entry for each table that keeps effects on orders.
async fn read_effects(tx: &mut Tx, group_id: &str, order_id: Uuid) -> sqlx::Result<Vec<Effect>> {
    let reservations: Vec<(String, String, Uuid, Timestamp, Timestamp)> = stockade_kernel::on!(tx, c => {
        sqlx::query_as(
            "SELECT number, state, cause_event_id, created_at, updated_at FROM inventory_reservations
             WHERE group_id = $1 AND order_id = $2",
        )
        .bind(group_id)
        .bind(order_id)
        .fetch_all(c)
        .await
    })?;
    let notices: Vec<(String, String, String, Uuid, Timestamp)> = stockade_kernel::on!(tx, c => {
        sqlx::query_as(
            "SELECT kind, channel, state, event_id, COALESCE(updated_at, created_at) FROM notifications_notices
             WHERE group_id = $1 AND order_id = $2",
        )
        .bind(group_id)
        .bind(order_id)
        .fetch_all(c)
        .await
    })?;
    let entries: Vec<(String, i64, String, Uuid, Timestamp)> = stockade_kernel::on!(tx, c => {
        sqlx::query_as(
            "SELECT account, amount_minor, currency, event_id, created_at FROM ledger_entries
             WHERE group_id = $1 AND order_id = $2",
        )
        .bind(group_id)
        .bind(order_id)
        .fetch_all(c)
        .await
    })?;
    let mut effects = Vec::new();
    for (account, amount_minor, currency, event_id, at) in entries {
        let text = format!("booked {} to {account}", in_major(amount_minor, &currency));
        effects.push(Effect { who: "ledger", text, event_id: Some(event_id), at });
    }
    for (number, state, event_id, created_at, updated_at) in reservations {
        let text = format!("wrote reservation {number}");
        effects.push(Effect { who: "inventory", text, event_id: Some(event_id), at: created_at });
        if updated_at > created_at {
            let text = format!("reservation {number} is {state}");
            effects.push(Effect { who: "inventory", text, event_id: None, at: updated_at });
        }
    }
    for (kind, channel, state, event_id, at) in notices {
        let text = format!("notice of {kind} by {channel} is {state}");
        effects.push(Effect { who: "notifications", text, event_id: Some(event_id), at });
    }
    Ok(effects)
}

impl From<VerdictColumns> for Verdict {
    fn from(columns: VerdictColumns) -> Self {
        let (consumer, event_id, key, state, attempts, duplicates, ..) = columns;
        let (.., started_at, finished_at, due_at, last_error, waiting_for, deadline_at) = columns;
        Self {
            consumer,
            event_id,
            key,
            state,
            attempts,
            duplicates,
            started_at,
            finished_at,
            due_at,
            last_error,
            waiting_for,
            deadline_at,
        }
    }
}

impl Letter {
    fn read(columns: LetterColumns) -> Option<Self> {
        let (id, consumer, message_id, key, reason, error, state, created_at, resolved_at) = columns;
        let event_id = Uuid::try_parse(&message_id?).ok()?;
        let key = key.unwrap_or_else(|| "message".to_owned());
        Some(Self { id, consumer, event_id, key, reason, error, state, created_at, resolved_at })
    }
}
