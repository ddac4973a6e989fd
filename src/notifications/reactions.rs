//! What notifications do when something becomes of an order.

use serde_json::value::RawValue;

use super::model::Fact;
use super::service;
use crate::db::Tx;
use crate::inventory::events::{FAILED, RESERVED};
use crate::messaging::{Message, Outcome, Reaction};
use crate::orders::events::{CANCELLED, EXPIRED, PAID};

pub struct Notifications;

impl Reaction for Notifications {
    const NAME: &'static str = "notifications";
    const KEYS: &'static [&'static str] = &[RESERVED, FAILED, PAID, CANCELLED, EXPIRED];
    type Fact = Fact;

    fn decode(key: &str, payload: &RawValue) -> Result<Fact, serde_json::Error> {
        Ok(match key {
            RESERVED => Fact::Reserved(serde_json::from_str(payload.get())?),
            FAILED => Fact::Failed(serde_json::from_str(payload.get())?),
            PAID => Fact::Paid(serde_json::from_str(payload.get())?),
            CANCELLED => Fact::Cancelled(serde_json::from_str(payload.get())?),
            _ => Fact::Expired(serde_json::from_str(payload.get())?),
        })
    }

    async fn react(&self, tx: &mut Tx, batch: &[&Message<Fact>]) -> sqlx::Result<Vec<Outcome>> {
        service::notify_many(tx, batch).await?;
        Ok(vec![Outcome::Done; batch.len()])
    }

    fn committed(&self, batch: &[&Message<Fact>], _outcomes: &[Outcome]) {
        for message in batch {
            let (order_id, kind) = message.fact.notice();
            tracing::info!(
                order.id = %order_id, correlation.id = message.event.correlation_id, kind = kind.as_str(),
                "NOTICE {order_id}: {}", message.fact.text()
            );
        }
    }
}
