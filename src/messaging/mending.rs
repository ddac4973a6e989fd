//! Mending: a queue that was deleted took its messages with it, and got none while it was gone. The outbox still has
//! them, and the inbox knows which of them its consumer has met; the others are sent to it once more, and so are the
//! retries and redrives that were in it.
//!
//! So nothing is lost even if somebody deletes a queue, or a broker comes back without its data. What the consumer would
//! have got anyway arrives twice and is dismissed. What went out before the queue was first bound to it is none of the
//! consumer's business.

use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::outbox;
use super::transport::{Binding, Topology};
use super::{Kernel, Patience};
use crate::clock::Timestamp;
use crate::db::Tx;

/// How far the clocks of instances may be apart: an event written by one that is ahead may have gone out before the queue
/// was there.
const CLOCKS_APART: Duration = Duration::from_secs(1);
/// A queue bound so recently was made for the first time: nobody has sent anything to it before.
const NEW_FOR: Duration = Duration::from_secs(5);
/// Rows looked for and written in one transaction.
const BATCH: i64 = 500;

/// Mends queues as they are made, until cancelled.
pub async fn run(kernel: Kernel, topology: Arc<Topology>) {
    loop {
        let made = kernel.transport.next_made().await;
        let Some(binding) = topology.queues.iter().find(|binding| binding.queue == made) else { continue };
        let made_at = kernel.db.clock().now();
        let mut patience = Patience::default();
        loop {
            match mend(&kernel, binding, made_at).await {
                Ok(0) => break,
                Ok(sent) => {
                    tracing::warn!(
                        queue = made,
                        sent,
                        "the queue was not there; sending again what its consumer never met or has yet to finish"
                    );
                    break;
                }
                Err(error) => {
                    let pause = patience.next_pause();
                    tracing::warn!(%error, queue = made, ?pause, "cannot send again what a queue lost, and waits");
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }
}

/// Sends a consumer what it never met of what was written before its queue was made, and what it has met and waits for;
/// returns how many events that is.
pub async fn mend(kernel: &Kernel, binding: &Binding, made_at: Timestamp) -> sqlx::Result<usize> {
    let mut sent = resend_unfinished(kernel, binding).await?;
    for key in binding.keys {
        sent += resend_unmet(kernel, binding, key, made_at).await?;
    }
    Ok(sent)
}

async fn resend_unfinished(kernel: &Kernel, binding: &Binding) -> sqlx::Result<usize> {
    let (mut sent, mut after) = (0, Uuid::nil());
    loop {
        let mut tx = kernel.db.begin().await?;
        let entries = outbox::list_unfinished(&mut tx, binding.consumer, &binding.queue, after, BATCH).await?;
        let Some(last) = entries.last() else { return Ok(sent) };
        after = last.event_id;
        outbox::append_many(&mut tx, &entries).await?;
        tx.commit().await?;
        sent += entries.len();
    }
}

async fn resend_unmet(kernel: &Kernel, binding: &Binding, key: &str, made_at: Timestamp) -> sqlx::Result<usize> {
    let (mut sent, mut after) = (0, Uuid::nil());
    loop {
        let mut tx = kernel.db.begin().await?;
        let Some(since) = bound_since(&mut tx, &binding.queue, key).await? else { return Ok(sent) };
        let is_new = made_at.since(since) < NEW_FOR;
        let time = since..if is_new { made_at } else { made_at.plus(CLOCKS_APART) };
        let unmet = outbox::list_unmet(&mut tx, binding.consumer, &binding.queue, key, time, after, BATCH).await?;
        let (found_in, entries): (Vec<Uuid>, Vec<outbox::Entry>) = unmet.into_iter().unzip();
        let Some(last) = found_in.last() else { return Ok(sent) };
        outbox::append_many(&mut tx, &entries).await?;
        tx.commit().await?;
        after = *last;
        sent += entries.len();
    }
}

/// Since when events of type `key` are meant for a queue.
async fn bound_since(tx: &mut Tx, queue: &str, key: &str) -> sqlx::Result<Option<Timestamp>> {
    crate::on!(tx, c => {
        sqlx::query_scalar("SELECT since FROM messaging_bound WHERE queue = $1 AND routing_key = $2")
            .bind(queue)
            .bind(key)
            .fetch_optional(c)
            .await
    })
}
