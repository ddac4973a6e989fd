//! What the ledger does when orders are placed and paid.

use serde_json::value::RawValue;

use super::service;
use crate::orders::events::{OrderPaid, OrderPlaced, PAID, PLACED};
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::{Message, Outcome, Reaction};

pub struct Ledger;

pub enum Fact {
    Placed(OrderPlaced),
    Paid(OrderPaid),
}

impl Reaction for Ledger {
    const NAME: &'static str = "ledger";
    const KEYS: &'static [&'static str] = &[PLACED, PAID];
    const AWAITED: &'static [&'static str] = &[PLACED];
    type Fact = Fact;

    fn decode(key: &str, payload: &RawValue) -> Result<Fact, serde_json::Error> {
        Ok(match key {
            PLACED => Fact::Placed(serde_json::from_str(payload.get())?),
            _ => Fact::Paid(serde_json::from_str(payload.get())?),
        })
    }

    async fn react(&self, tx: &mut Tx, batch: &[&Message<Fact>]) -> sqlx::Result<Vec<Outcome>> {
        service::book_many(tx, batch).await
    }

    fn committed(&self, batch: &[&Message<Fact>], outcomes: &[Outcome]) {
        for (message, outcome) in batch.iter().zip(outcomes) {
            if let (Fact::Paid(paid), Outcome::Done) = (&message.fact, outcome)
                && paid.amount_minor.get() > 0
            {
                let (event, order_id) = (&message.event, paid.order_id);
                tracing::info!(
                    order.id = %order_id, event.id = %event.event_id, correlation.id = event.correlation_id,
                    "BOOKED {order_id}: {} {}", paid.amount_minor.get(), paid.currency.as_str()
                );
            }
        }
    }
}
