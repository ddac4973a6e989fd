//! What orders do, each in the caller's transaction.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use uuid::Uuid;

use super::error::OrderError;
use super::events::{CANCELLED, EXPIRED, FULFILLED, OrderMoved, OrderPaid, PAID, PLACED};
use super::model::{Order, OrderId, Placing, Refusal, Request, Standing, Status, Step};
use super::store::{self, Key, KeyUse, StepKey, Taken};
use crate::numbers::Numbers;
use stockade_kernel::clock::{Timestamp, minted_at};
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::{Event, Origin, outbox};
use stockade_kernel::trace::Traceparent;

/// The bell that rings when orders change state.
pub const BELL: &str = "orders";

/// One request to place an order.
#[derive(Debug, Clone)]
pub struct Submission {
    pub placing: Placing,
    pub request: Request,
    pub key: Option<IdempotencyKey>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    pub key: String,
    pub fingerprint: [u8; 32],
}

/// What came of a submission.
#[derive(Debug, Clone)]
pub enum Placed {
    New(Order),
    /// The key's first use placed this order.
    Replay(OrderId),
    /// The key's first use was another request.
    KeyReused {
        first_fingerprint: String,
    },
}

/// The order that a submission comes to unless its key was used before, and the event that tells of it.
#[derive(Debug)]
pub struct Draft {
    order: Order,
    told: outbox::Entry,
}

impl Submission {
    /// Made before the transaction begins: others wait for the database meanwhile.
    pub fn draft(&self, numbers: &Numbers, now: Timestamp) -> Draft {
        let order = Order::place(&self.request, &self.placing, numbers.mint(), now);
        let told = outbox::Entry::from(placed_event(&order, self.placing.traceparent));
        Draft { order, told }
    }
}

/// The idempotency scope of placing orders.
const PLACE_ROUTE: &str = "POST /v1/orders";

/// Places orders: one answer per submission, in order. Keys, orders, lines and events are one commit.
pub async fn place_many(tx: &mut Tx, submitted: Vec<(&Submission, Draft)>) -> sqlx::Result<Vec<Placed>> {
    let earlier = claim_keys(tx, &submitted).await?;
    let (mut orders, mut told) = (Vec::with_capacity(submitted.len()), Vec::with_capacity(submitted.len()));
    for ((_, draft), earlier) in submitted.into_iter().zip(&earlier) {
        if earlier.is_none() {
            orders.push(draft.order);
            told.push(draft.told);
        }
    }
    if !orders.is_empty() {
        store::insert_many(tx, &orders).await?;
        outbox::append_told(tx, &told).await?;
    }
    let mut orders = orders.into_iter();
    let mut new = || Placed::New(orders.next().expect("an order for each submission whose key is new"));
    Ok(earlier.into_iter().map(|earlier| earlier.unwrap_or_else(&mut new)).collect())
}

/// Claims the idempotency keys among the submissions; `Some` for those whose key was used before.
async fn claim_keys(tx: &mut Tx, submitted: &[(&Submission, Draft)]) -> sqlx::Result<Vec<Option<Placed>>> {
    let now = tx.now();
    let mut firsts: HashMap<(&str, &str), KeyUse> = HashMap::new();
    for (submission, draft) in submitted {
        if let Some(key) = &submission.key {
            let first_use = KeyUse { fingerprint: key.fingerprint, order_id: draft.order.id };
            firsts.entry((&submission.placing.group_id, &key.key)).or_insert(first_use);
        }
    }
    if firsts.is_empty() {
        return Ok(vec![None; submitted.len()]);
    }
    let mut keys: Vec<Key<'_>> = firsts
        .iter()
        .map(|((group_id, key), first_use)| Key { group_id, route: PLACE_ROUTE, key, first_use })
        .collect();
    keys.sort_by_key(|key| (key.group_id, key.key));
    let stored = store::claim_keys(tx, &keys, now).await?;
    let standing: HashMap<(&str, &str), &KeyUse> =
        keys.iter().map(|key| (key.group_id, key.key)).zip(&stored).collect();
    Ok(submitted
        .iter()
        .map(|(submission, draft)| {
            let key = submission.key.as_ref()?;
            let first_use = standing[&(submission.placing.group_id.as_str(), key.key.as_str())];
            if first_use.order_id == draft.order.id {
                None
            } else if first_use.fingerprint == key.fingerprint {
                Some(Placed::Replay(first_use.order_id))
            } else {
                Some(Placed::KeyReused { first_fingerprint: prefix_of(&first_use.fingerprint) })
            }
        })
        .collect())
}

/// Enough of a fingerprint to tell two requests apart by eye.
fn prefix_of(fingerprint: &[u8; 32]) -> String {
    fingerprint[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn placed_event(order: &Order, traceparent: Option<Traceparent>) -> Event {
    let origin = Origin {
        group_id: order.group_id.clone(),
        subsidiary_id: order.subsidiary_id.clone(),
        correlation_id: order.correlation_id.clone(),
        causation_id: None,
        traceparent,
    };
    Event::new(PLACED, order.id.0.to_string(), origin, order.created_at, &order.placed())
}

/// Inventory's answer on one order.
#[derive(Debug, Clone)]
pub struct Answer {
    pub group_id: String,
    pub order_id: OrderId,
    pub status: Status,
    pub reason: Option<String>,
}

/// Records answers on orders that still wait for one, which begins the hold of those reserved. Returns, for each
/// answer that came too late to change anything, the state its order is in; `None` if it is no order of ours.
pub async fn answer_many(
    tx: &mut Tx,
    answers: &[Answer],
    hold: Duration,
) -> sqlx::Result<HashMap<(String, OrderId), Option<Status>>> {
    let now = tx.now();
    let moved = store::answer_many(tx, answers, hold, now).await?;
    tx.ring_on_commit(BELL);
    time_on_commit(tx, answers);
    if moved == answers.len() as u64 {
        return Ok(HashMap::new());
    }
    let keys: Vec<(&str, OrderId)> = answers.iter().map(|answer| (answer.group_id.as_str(), answer.order_id)).collect();
    let standings = store::lock_many(tx, &keys).await?;
    let standings: HashMap<(&str, OrderId), &(Standing, Timestamp)> =
        standings.iter().map(|standing| ((standing.0.group_id.as_str(), standing.0.id), standing)).collect();
    Ok(answers
        .iter()
        .filter_map(|answer| {
            let key = (answer.group_id.clone(), answer.order_id);
            match standings.get(&(answer.group_id.as_str(), answer.order_id)) {
                Some((standing, updated_at)) if standing.status == answer.status && *updated_at == now => None,
                Some((standing, _)) => Some((key, Some(standing.status))),
                None => Some((key, None)),
            }
        })
        .collect())
}

/// One request to take an order a step on.
#[derive(Debug, Clone)]
pub struct StepRequest {
    pub group_id: String,
    pub order_id: OrderId,
    pub step: Step,
    pub key: Option<IdempotencyKey>,
    pub traceparent: Option<Traceparent>,
}

impl StepRequest {
    fn order(&self) -> (&str, OrderId) {
        (&self.group_id, self.order_id)
    }

    /// Its idempotency key as it would be stored.
    fn key_use(&self) -> Option<StepKey<'_>> {
        let key = self.key.as_ref()?;
        let route = match self.step {
            Step::Pay { .. } => "POST /v1/orders/{id}/payments",
            Step::Cancel { .. } => "POST /v1/orders/{id}/cancel",
            Step::Fulfil => "POST /v1/orders/{id}/fulfil",
            Step::Expire => return None,
        };
        let (group_id, order_id) = self.order();
        Some(StepKey { group_id, route, key: &key.key, fingerprint: key.fingerprint, order_id })
    }
}

/// What came of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stepped {
    Done,
    /// The key's first use took this very step.
    Replay,
    /// The key's first use was another request.
    KeyReused {
        first_fingerprint: String,
    },
    Refused(Refusal),
    /// There is no such order.
    Missing,
}

/// Takes orders a step on: one answer per request, in order. States, keys and events are one commit. A step that is
/// refused leaves nothing behind, not even its key.
pub async fn step_many(tx: &mut Tx, requests: &[&StepRequest]) -> sqlx::Result<Vec<Stepped>> {
    let now = tx.now();
    let mut orders: Vec<(&str, OrderId)> = requests.iter().map(|request| request.order()).collect();
    orders.sort_unstable();
    orders.dedup();
    let mut standings: HashMap<(String, OrderId), Standing> = store::lock_many(tx, &orders)
        .await?
        .into_iter()
        .map(|(standing, _)| ((standing.group_id.clone(), standing.id), standing))
        .collect();
    // Read under the lock on their orders: a repeat that had to wait for the first finds its key.
    let keys: Vec<StepKey<'_>> = requests.iter().filter_map(|request| request.key_use()).collect();
    let mut used = store::find_step_keys(tx, &keys).await?;
    let (mut taken, mut events, mut first_uses) = (BTreeMap::new(), Vec::new(), Vec::new());
    let mut told = Told::default();
    let mut answers = Vec::with_capacity(requests.len());
    for request in requests {
        let key = request.key_use();
        if let Some(earlier) = key.as_ref().and_then(|key| Some((used.get(&key.scope())?, key.fingerprint))) {
            answers.push(match earlier {
                (first, fingerprint) if *first == fingerprint => Stepped::Replay,
                (first, _) => Stepped::KeyReused { first_fingerprint: prefix_of(first) },
            });
            continue;
        }
        let Some(standing) = standings.get_mut(&(request.group_id.clone(), request.order_id)) else {
            answers.push(Stepped::Missing);
            continue;
        };
        answers.push(match standing.decide(&request.step) {
            Err(refusal) => Stepped::Refused(refusal),
            Ok(to) => {
                let (group_id, id) = request.order();
                let reason = request.step.reason();
                let from = taken.get(&(group_id, id)).map_or(standing.status, |earlier: &Taken<'_>| earlier.from);
                taken.insert((group_id, id), Taken { group_id, id, from, to, reason });
                events.push(step_event(standing, &request.step, request.traceparent, now));
                told.add(standing, to, &events);
                standing.status = to;
                if let Some(key) = key {
                    used.insert(key.scope(), key.fingerprint);
                    first_uses.push(key);
                }
                Stepped::Done
            }
        });
    }
    if !events.is_empty() {
        let taken: Vec<Taken<'_>> = taken.into_values().collect();
        store::insert_step_keys(tx, &first_uses, now).await?;
        store::take_many(tx, &taken, now).await?;
        outbox::append_events(tx, events).await?;
        tx.ring_on_commit(BELL);
        tx.after_commit(move || told.tell());
    }
    Ok(answers)
}

/// Ends holds that have run out, up to `limit` of them; returns how many. Orders that were paid or cancelled in time
/// are no longer reserved, and those that another transaction is just moving are left to it.
pub async fn expire_many(tx: &mut Tx, limit: i64) -> sqlx::Result<usize> {
    let now = tx.now();
    let expired = store::expire_many(tx, limit, Step::Expire.reason(), now).await?;
    if !expired.is_empty() {
        let (mut events, mut told) = (Vec::with_capacity(expired.len()), Told::default());
        for standing in &expired {
            events.push(step_event(standing, &Step::Expire, None, now));
            told.add(standing, Status::Expired, &events);
        }
        outbox::append_events(tx, events).await?;
        tx.ring_on_commit(BELL);
        tx.after_commit(move || told.tell());
    }
    Ok(expired.len())
}

/// What the log is to say of orders once it is true: a line each that reads alone.
#[derive(Default)]
struct Told(Vec<(OrderId, Uuid, String, String)>);

impl Told {
    /// `events` ends with the one about this step.
    fn add(&mut self, order: &Standing, to: Status, events: &[Event]) {
        if tracing::enabled!(tracing::Level::INFO)
            && let Some(event) = events.last()
        {
            let line = format!("{} {}", to.as_str().to_uppercase(), order.number);
            self.0.push((order.id, event.event_id, event.correlation_id.clone(), line));
        }
    }

    fn tell(self) {
        for (OrderId(order_id), event_id, correlation_id, line) in self.0 {
            tracing::info!(order.id = %order_id, event.id = %event_id, correlation.id = correlation_id, "{line}");
        }
    }
}

fn step_event(order: &Standing, step: &Step, traceparent: Option<Traceparent>, now: Timestamp) -> Event {
    let origin = Origin {
        group_id: order.group_id.clone(),
        subsidiary_id: order.subsidiary_id.clone(),
        correlation_id: order.correlation_id.clone(),
        causation_id: None,
        traceparent,
    };
    let (order_id, about) = (order.id.0, order.id.0.to_string());
    let moved = OrderMoved { order_id, reason: step.reason().map(str::to_owned) };
    match step {
        Step::Pay { amount, currency } => {
            let (customer_id, currency) = (order.customer_id.clone(), currency.clone());
            let paid = OrderPaid { order_id, customer_id, amount_minor: *amount, currency };
            Event::new(PAID, about, origin, now, &paid)
        }
        Step::Cancel { .. } => Event::new(CANCELLED, about, origin, now, &moved),
        Step::Expire => Event::new(EXPIRED, about, origin, now, &moved),
        Step::Fulfil => Event::new(FULFILLED, about, origin, now, &moved),
    }
}

/// Times answered orders from their placing, which their ids tell: they are minted with the order.
fn time_on_commit(tx: &mut Tx, answers: &[Answer]) {
    let took: Vec<f64> = answers
        .iter()
        .filter_map(|answer| minted_at(&answer.order_id.0))
        .map(|placed_at| tx.now().since(placed_at).as_secs_f64())
        .collect();
    let metrics = tx.metrics().clone();
    tx.after_commit(move || took.into_iter().for_each(|took| metrics.orders_end_to_end.observe(took)));
}

/// Finds an order by its uuid or its number.
pub async fn get(tx: &mut Tx, group_id: &str, id_or_number: &str) -> Result<Order, OrderError> {
    let query = store::Query { group_id: group_id.to_owned(), limit: 1, ..store::Query::default() };
    let query = match Uuid::try_parse(id_or_number) {
        Ok(id) => store::Query { id: Some(id), ..query },
        Err(_) => store::Query { number: Some(id_or_number.to_ascii_uppercase()), ..query },
    };
    let found = store::list(tx, query).await?.pop();
    found.ok_or_else(|| OrderError::NotFound(id_or_number.to_owned()))
}
