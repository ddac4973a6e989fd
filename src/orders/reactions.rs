//! What orders do when inventory answers.

use std::time::Duration;

use serde_json::value::RawValue;

use super::model::{OrderId, Status};
use super::service::{self, Answer};
use crate::inventory::events::{FAILED, InventoryFailed, InventoryReserved, RESERVED};
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::{Message, Outcome, Reaction};

pub struct Orders {
    /// How long stock is held for an order that is not paid.
    pub hold: Duration,
}

pub enum Fact {
    Reserved(InventoryReserved),
    Failed(InventoryFailed),
}

impl Reaction for Orders {
    const NAME: &'static str = "orders";
    const KEYS: &'static [&'static str] = &[RESERVED, FAILED];
    type Fact = Fact;

    fn decode(key: &str, payload: &RawValue) -> Result<Fact, serde_json::Error> {
        Ok(match key {
            RESERVED => Fact::Reserved(serde_json::from_str(payload.get())?),
            _ => Fact::Failed(serde_json::from_str(payload.get())?),
        })
    }

    async fn react(&self, tx: &mut Tx, batch: &[&Message<Fact>]) -> sqlx::Result<Vec<Outcome>> {
        let mut answers: Vec<Answer> = batch.iter().map(|message| answer(message)).collect();
        // Locked in the order of their keys; of two answers on one order the first stands.
        answers.sort_by(|a, b| (&a.group_id, a.order_id).cmp(&(&b.group_id, b.order_id)));
        answers.dedup_by(|later, first| (&later.group_id, later.order_id) == (&first.group_id, first.order_id));
        let late = service::answer_many(tx, &answers, self.hold).await?;
        Ok(batch
            .iter()
            .map(|message| {
                let Answer { group_id, order_id, .. } = answer(message);
                match late.get(&(group_id, order_id)) {
                    None => Outcome::Done,
                    Some(Some(status)) => Outcome::moot(format!("the order is {} already", status.as_str())),
                    Some(None) => Outcome::moot("there is no such order here"),
                }
            })
            .collect())
    }
}

fn answer(message: &Message<Fact>) -> Answer {
    let (order_id, status, reason) = match &message.fact {
        Fact::Reserved(reserved) => (reserved.order_id, Status::Reserved, None),
        Fact::Failed(failed) => (failed.order_id, Status::Rejected, Some(failed.reason.clone())),
    };
    Answer { group_id: message.event.group_id.clone(), order_id: OrderId(order_id), status, reason }
}
