//! What the ledger does, each in the caller's transaction.

use std::collections::{BTreeMap, HashMap};

use uuid::Uuid;

use super::model::sides_of;
use super::reactions::Fact;
use super::store::{self, NewEntry, Paid};
use crate::orders::events::PLACED;
use stockade_kernel::clock::mint_id;
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::{Message, Outcome};

/// Notes orders that were placed and books payments: one outcome per event, in order, in four statements at most. A
/// payment whose order has not come yet waits for it.
pub async fn book_many(tx: &mut Tx, batch: &[&Message<Fact>]) -> sqlx::Result<Vec<Outcome>> {
    let now = tx.now();
    // The order's row is written and locked by all its events before anything is decided, in the order of its key: so
    // of a payment and its order on two instances, the second sees what the first did.
    let mut orders: BTreeMap<(&str, Uuid), bool> = BTreeMap::new();
    for message in batch {
        let (order_id, is_placed) = match &message.fact {
            Fact::Placed(placed) => (placed.order_id, true),
            Fact::Paid(paid) => (paid.order_id, false),
        };
        *orders.entry((&message.event.group_id, order_id)).or_default() |= is_placed;
    }
    let rows: Vec<(&str, Uuid, bool)> =
        orders.iter().map(|((group_id, id), placed)| (*group_id, *id, *placed)).collect();
    store::note_and_lock(tx, &rows, now).await?;
    let payments: Vec<(&str, Uuid)> = batch
        .iter()
        .filter_map(|message| match &message.fact {
            Fact::Paid(paid) => Some((message.event.group_id.as_str(), paid.order_id)),
            Fact::Placed(_) => None,
        })
        .collect();
    if payments.is_empty() {
        return Ok(vec![Outcome::Done; batch.len()]);
    }
    let mut standing: HashMap<(String, Uuid), (bool, bool)> = store::find_orders(tx, &payments)
        .await?
        .into_iter()
        .map(|(group_id, order_id, is_placed, is_paid)| ((group_id, order_id), (is_placed, is_paid)))
        .collect();
    let (mut booked, mut entries) = (Vec::new(), Vec::new());
    let mut outcomes = Vec::with_capacity(batch.len());
    for message in batch {
        let Fact::Paid(paid) = &message.fact else {
            outcomes.push(Outcome::Done);
            continue;
        };
        let event = &message.event;
        let (is_placed, is_paid) = standing.entry((event.group_id.clone(), paid.order_id)).or_default();
        outcomes.push(match (*is_placed, *is_paid) {
            (false, _) => Outcome::wait_for(PLACED),
            // However many payments an order is said to have, its customer is credited once.
            (true, true) => Outcome::moot("the order is paid already"),
            (true, false) => {
                *is_paid = true;
                booked.push(Paid { group_id: &event.group_id, order_id: paid.order_id, event_id: event.event_id });
                entries.extend(sides_of(paid).into_iter().map(|side| NewEntry {
                    id: mint_id(),
                    group_id: &event.group_id,
                    order_id: paid.order_id,
                    event_id: event.event_id,
                    side,
                    currency: paid.currency.as_str(),
                }));
                Outcome::Done
            }
        });
    }
    store::book(tx, &booked, &entries, now).await?;
    Ok(outcomes)
}
