//! What notifications do when something becomes of an order.

use futures_util::future::BoxFuture;
use serde_json::value::RawValue;

use super::channels::Channel;
use super::model::Fact;
use super::service;
use crate::inventory::events::{FAILED, RESERVED};
use crate::orders::events::{CANCELLED, EXPIRED, PAID};
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::outside::{Answer, Concluded, Outside};
use stockade_kernel::messaging::{Message, Outcome, Reaction};

/// By default to the log.
#[derive(Default)]
pub struct Notifications {
    /// `None`: the log.
    pub channel: Option<Channel>,
    /// Whether to send again what may have been sent; if not said, by what the channel's receiver can tell.
    pub repeats_unknown: Option<bool>,
}

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
        match &self.channel {
            Some(channel) => service::begin_many(tx, batch, channel.name()).await,
            None => {
                service::notify_many(tx, batch).await?;
                Ok(vec![Outcome::Done; batch.len()])
            }
        }
    }

    fn outside(&self) -> Option<&dyn Outside<Fact>> {
        self.channel.as_ref().map(|_| self as &dyn Outside<Fact>)
    }

    fn committed(&self, batch: &[&Message<Fact>], outcomes: &[Outcome]) {
        let sent = batch.iter().zip(outcomes).filter(|(_, outcome)| **outcome == Outcome::Done);
        for (message, _) in sent {
            let (order_id, kind) = message.fact.notice();
            tracing::info!(
                order.id = %order_id, correlation.id = message.event.correlation_id, kind = kind.as_str(),
                "NOTICE {order_id}: {}", message.fact.text()
            );
        }
    }
}

impl Outside<Fact> for Notifications {
    fn call<'a>(&'a self, message: &'a Message<Fact>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            match &self.channel {
                Some(channel) => channel.send(message).await,
                None => Answer::Done,
            }
        })
    }

    fn conclude<'a>(&'a self, tx: &'a mut Tx, calls: &'a [Concluded<'a, Fact>]) -> BoxFuture<'a, sqlx::Result<()>> {
        Box::pin(service::conclude_many(tx, calls))
    }

    fn repeats_unknown(&self) -> bool {
        let tells_repeats = || self.channel.as_ref().is_some_and(Channel::receiver_tells_repeats);
        self.repeats_unknown.unwrap_or_else(tells_repeats)
    }
}
