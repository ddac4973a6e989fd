//! What inventory does when orders are placed.

use std::sync::Arc;

use serde_json::value::RawValue;

use super::service;
use crate::db::Tx;
use crate::messaging::{Message, Outcome, Reaction};
use crate::numbers::Numbers;
use crate::orders::events::{OrderPlaced, PLACED};

pub struct Inventory {
    pub numbers: Arc<Numbers>,
}

impl Reaction for Inventory {
    const NAME: &'static str = "inventory";
    const KEYS: &'static [&'static str] = &[PLACED];
    type Fact = OrderPlaced;

    fn decode(_key: &str, payload: &RawValue) -> Result<OrderPlaced, serde_json::Error> {
        serde_json::from_str(payload.get())
    }

    async fn react(&self, tx: &mut Tx, batch: &[&Message<OrderPlaced>]) -> sqlx::Result<Vec<Outcome>> {
        service::reserve_many(tx, batch, &self.numbers).await?;
        Ok(vec![Outcome::Done; batch.len()])
    }
}
