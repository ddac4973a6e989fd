//! What orders do, each in the caller's transaction.

use std::collections::HashMap;

use uuid::Uuid;

use super::error::OrderError;
use super::events::PLACED;
use super::model::{Order, OrderId, Placing, Request, Status};
use super::store::{self, Key, KeyUse};
use crate::clock::Timestamp;
use crate::db::Tx;
use crate::messaging::{Event, Origin, outbox};
use crate::numbers::Numbers;

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

/// The idempotency scope of placing orders.
const PLACE_ROUTE: &str = "POST /v1/orders";

/// Places orders: one answer per submission, in order. Keys, orders, lines and events are one commit.
pub async fn place_many(tx: &mut Tx, submissions: &[&Submission], numbers: &Numbers) -> sqlx::Result<Vec<Placed>> {
    let now = tx.now();
    let drafts: Vec<Order> =
        submissions.iter().map(|s| Order::place(&s.request, &s.placing, numbers.mint(), now)).collect();
    let earlier = claim_keys(tx, submissions, &drafts).await?;
    let mut orders = Vec::with_capacity(drafts.len());
    let placed = drafts
        .into_iter()
        .zip(earlier)
        .map(|(draft, earlier)| {
            earlier.unwrap_or_else(|| {
                orders.push(draft.clone());
                Placed::New(draft)
            })
        })
        .collect();
    if !orders.is_empty() {
        let events: Vec<Event> = orders.iter().map(placed_event).collect();
        store::insert_many(tx, &orders).await?;
        outbox::append_events(tx, &events).await?;
    }
    Ok(placed)
}

/// Claims the idempotency keys among the submissions; `Some` for those whose key was used before.
async fn claim_keys(tx: &mut Tx, submissions: &[&Submission], drafts: &[Order]) -> sqlx::Result<Vec<Option<Placed>>> {
    let now = tx.now();
    let mut firsts: HashMap<(&str, &str), KeyUse> = HashMap::new();
    for (submission, draft) in submissions.iter().zip(drafts) {
        if let Some(key) = &submission.key {
            let first_use = KeyUse { fingerprint: key.fingerprint, order_id: draft.id };
            firsts.entry((&submission.placing.group_id, &key.key)).or_insert(first_use);
        }
    }
    if firsts.is_empty() {
        return Ok(vec![None; submissions.len()]);
    }
    let mut keys: Vec<Key<'_>> = firsts
        .iter()
        .map(|((group_id, key), first_use)| Key { group_id, route: PLACE_ROUTE, key, first_use })
        .collect();
    keys.sort_by_key(|key| (key.group_id, key.key));
    let stored = store::claim_keys(tx, &keys, now).await?;
    let standing: HashMap<(&str, &str), &KeyUse> =
        keys.iter().map(|key| (key.group_id, key.key)).zip(&stored).collect();
    Ok(submissions
        .iter()
        .zip(drafts)
        .map(|(submission, draft)| {
            let key = submission.key.as_ref()?;
            let first_use = standing[&(submission.placing.group_id.as_str(), key.key.as_str())];
            if first_use.order_id == draft.id {
                None
            } else if first_use.fingerprint == key.fingerprint {
                Some(Placed::Replay(first_use.order_id))
            } else {
                let prefix = first_use.fingerprint[..4].iter().map(|byte| format!("{byte:02x}")).collect();
                Some(Placed::KeyReused { first_fingerprint: prefix })
            }
        })
        .collect())
}

fn placed_event(order: &Order) -> Event {
    let origin = Origin {
        group_id: order.group_id.clone(),
        subsidiary_id: order.subsidiary_id.clone(),
        correlation_id: order.correlation_id.clone(),
        causation_id: None,
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

/// Records answers on orders that still wait for one; the rest have moved on or are not ours.
pub async fn answer_many(tx: &mut Tx, answers: &[Answer]) -> sqlx::Result<()> {
    let now = tx.now();
    store::answer_many(tx, answers, now).await?;
    tx.ring_on_commit(BELL);
    time_on_commit(tx, answers);
    Ok(())
}

/// Times answered orders from their placing, which their ids tell: they are minted with the order.
fn time_on_commit(tx: &mut Tx, answers: &[Answer]) {
    let placed_at = |answer: &Answer| Some(answer.order_id.0.get_timestamp()?.to_unix());
    let took: Vec<f64> = answers
        .iter()
        .filter_map(placed_at)
        .map(|(seconds, nanos)| Timestamp::from_millis((seconds * 1000 + u64::from(nanos) / 1_000_000).cast_signed()))
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
