//! What notifications do, each in the caller's transaction.

use super::model::Fact;
use super::store::{self, NewNotice};
use crate::clock::mint_id;
use crate::db::Tx;
use crate::messaging::Message;

/// The channel that needs nothing configured.
pub const LOG_CHANNEL: &str = "log";

/// Writes one notice per outcome; an outcome that has its notice already gets no second one.
pub async fn notify_many(tx: &mut Tx, batch: &[&Message<Fact>]) -> sqlx::Result<()> {
    let now = tx.now();
    let mut notices: Vec<NewNotice> = batch
        .iter()
        .map(|message| {
            let (order_id, kind) = message.fact.notice();
            NewNotice {
                id: mint_id(),
                group_id: message.event.group_id.clone(),
                order_id,
                kind,
                channel: LOG_CHANNEL,
                state: "sent",
                event_id: message.event.event_id,
            }
        })
        .collect();
    // In the order of the unique key, so that two instances cannot deadlock on it.
    notices.sort_by(|a, b| (&a.group_id, a.order_id, a.kind.as_str()).cmp(&(&b.group_id, b.order_id, b.kind.as_str())));
    store::insert_many(tx, &notices, now).await
}
