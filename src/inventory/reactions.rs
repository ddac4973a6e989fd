//! What inventory does as orders go through their life.

use std::sync::Arc;

use serde_json::value::RawValue;
use uuid::Uuid;

use super::model::Move;
use super::service::{self, Asked, Placed};
use crate::numbers::Numbers;
use crate::orders::events::{CANCELLED, EXPIRED, FULFILLED, OrderMoved, OrderPaid, OrderPlaced, PAID, PLACED};
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::{Message, Outcome, Reaction};

pub struct Inventory {
    pub numbers: Arc<Numbers>,
}

pub enum Fact {
    Placed(OrderPlaced),
    Moved { order_id: Uuid, step: Move },
}

impl Reaction for Inventory {
    const NAME: &'static str = "inventory";
    const KEYS: &'static [&'static str] = &[PLACED, PAID, CANCELLED, EXPIRED, FULFILLED];
    const AWAITED: &'static [&'static str] = &[PLACED, PAID];
    type Fact = Fact;

    fn decode(key: &str, payload: &RawValue) -> Result<Fact, serde_json::Error> {
        let moved = |step| {
            serde_json::from_str(payload.get()).map(|OrderMoved { order_id, .. }| Fact::Moved { order_id, step })
        };
        match key {
            PLACED => serde_json::from_str(payload.get()).map(Fact::Placed),
            PAID => serde_json::from_str(payload.get())
                .map(|OrderPaid { order_id, .. }| Fact::Moved { order_id, step: Move::Commit }),
            FULFILLED => moved(Move::Fulfil),
            _ => moved(Move::Release),
        }
    }

    async fn react(&self, tx: &mut Tx, batch: &[&Message<Fact>]) -> sqlx::Result<Vec<Outcome>> {
        let (mut placed, mut asked) = (Vec::with_capacity(batch.len()), Vec::new());
        for (place, message) in batch.iter().enumerate() {
            let event = &message.event;
            match &message.fact {
                Fact::Placed(order) => placed.push(Placed { place, event, order }),
                Fact::Moved { order_id, step } => asked.push(Asked { place, event, order_id: *order_id, step: *step }),
            }
        }
        let mut outcomes = vec![Outcome::Done; batch.len()];
        if asked.is_empty() {
            service::reserve_many(tx, &placed, &self.numbers, &mut outcomes).await?;
        } else {
            service::live_on(tx, placed, &asked, &self.numbers, &mut outcomes).await?;
        }
        Ok(outcomes)
    }
}
