//! What notifications do, each in the caller's transaction.

use std::collections::HashSet;

use uuid::Uuid;

use super::model::{Fact, State};
use super::store::{self, Attempt, NewNotice};
use stockade_kernel::clock::mint_id;
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::outside::{Answer, Concluded};
use stockade_kernel::messaging::{Message, Outcome};

/// The channel that needs nothing configured.
pub const LOG_CHANNEL: &str = "log";

/// Writes one notice per outcome, sent by that; an outcome that has its notice already gets no second one.
pub async fn notify_many(tx: &mut Tx, batch: &[&Message<Fact>]) -> sqlx::Result<()> {
    let now = tx.now();
    store::write_many(tx, &new_notices(batch, LOG_CHANNEL, State::Sent), now).await.map(drop)
}

/// Writes notices that are about to be sent by `channel`, new ones and those tried again: these are to be called for.
pub async fn begin_many(tx: &mut Tx, batch: &[&Message<Fact>], channel: &'static str) -> sqlx::Result<Vec<Outcome>> {
    let now = tx.now();
    let notices = new_notices(batch, channel, State::Sending);
    let begun: HashSet<Uuid> = store::write_many(tx, &notices, now).await?.into_iter().collect();
    let outcome = |message: &&Message<Fact>| match begun.contains(&message.event.event_id) {
        true => Outcome::Call,
        false => Outcome::moot("another event has brought this notice about"),
    };
    Ok(batch.iter().map(outcome).collect())
}

/// Writes what came of sending.
pub async fn conclude_many(tx: &mut Tx, calls: &[Concluded<'_, Fact>]) -> sqlx::Result<()> {
    let now = tx.now();
    let attempt = |call: &Concluded<'_, Fact>| {
        let (order_id, kind) = call.message.fact.notice();
        let last_error = match call.answer {
            Answer::Done => None,
            Answer::Failed { error, .. } | Answer::Refused { error } | Answer::Unknown { error } => Some(error.clone()),
        };
        Attempt {
            group_id: call.message.event.group_id.clone(),
            order_id,
            kind,
            event_id: call.message.event.event_id,
            state: State::after(call.answer, call.again),
            last_error,
        }
    };
    let mut attempts: Vec<Attempt> = calls.iter().map(attempt).collect();
    attempts.sort_by(|a, b| a.key().cmp(&b.key()));
    store::conclude_many(tx, &attempts, now).await
}

/// One notice for each order and kind, in the order of that key, so that two instances cannot deadlock on it.
fn new_notices(batch: &[&Message<Fact>], channel: &'static str, state: State) -> Vec<NewNotice> {
    let notice = |message: &&Message<Fact>| {
        let (order_id, kind) = message.fact.notice();
        let (group_id, event_id) = (message.event.group_id.clone(), message.event.event_id);
        NewNotice { id: mint_id(), group_id, order_id, kind, channel, state, event_id }
    };
    let mut notices: Vec<NewNotice> = batch.iter().map(notice).collect();
    notices.sort_by(|a, b| a.key().cmp(&b.key()));
    notices.dedup_by(|later, first| later.key() == first.key());
    notices
}
