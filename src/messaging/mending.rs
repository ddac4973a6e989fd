//! Mending: a queue that was deleted took its messages with it, and got none while it was gone. The outbox still has
//! them, and the inbox knows which of them its consumer has met; the others are sent to it once more.
//!
//! So nothing is lost even if somebody deletes a queue, or a broker comes back without its data. What the consumer would
//! have got anyway arrives twice and is dismissed. A consumer that has met nothing yet is new: what went out before its
//! time is none of its business.

use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::outbox;
use super::transport::{Binding, Topology};
use super::{Kernel, Patience, inbox};

/// How much older than the first event a consumer met an event may be that was meant for it too.
const EARLIER: Duration = Duration::from_secs(3600);
/// Rows looked for and written in one transaction.
const BATCH: i64 = 500;

/// Mends queues as they are made, until cancelled.
pub async fn run(kernel: Kernel, topology: Arc<Topology>) {
    loop {
        let made = kernel.transport.next_made().await;
        let Some(binding) = topology.queues.iter().find(|binding| binding.queue == made) else { continue };
        let mut patience = Patience::default();
        loop {
            match mend(&kernel, binding).await {
                Ok(0) => break,
                Ok(sent) => {
                    tracing::warn!(
                        queue = made,
                        sent,
                        "the queue was not there; sending again what its consumer never met"
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

/// Sends a consumer what it never met; returns how many events that is.
pub async fn mend(kernel: &Kernel, binding: &Binding) -> sqlx::Result<usize> {
    let mut tx = kernel.db.read().await?;
    let Some(first) = inbox::first_met(&mut tx, binding.consumer).await? else { return Ok(0) };
    let since = first.minus(EARLIER);
    drop(tx);
    let mut sent = 0;
    for key in binding.keys {
        let mut after = Uuid::nil();
        loop {
            let mut tx = kernel.db.begin().await?;
            let unmet = outbox::list_unmet(&mut tx, binding.consumer, &binding.queue, key, since, after, BATCH).await?;
            let (found_in, entries): (Vec<Uuid>, Vec<outbox::Entry>) = unmet.into_iter().unzip();
            let Some(last) = found_in.last() else { break };
            outbox::append_many(&mut tx, &entries).await?;
            tx.commit().await?;
            after = *last;
            sent += entries.len();
        }
    }
    Ok(sent)
}
