//! Resync: sends again what a deleted queue took with it.
//!
//! A queue that is deleted loses its messages, and events published while it is gone never reach it. The outbox still has
//! them, and the inbox shows which of them the consumer has seen. The others are sent to the queue again, and so are the
//! retries and redrives that were in it. A consumer dismisses what it gets twice.
//!
//! A queue that is found missing is recorded in the database before it is declared, and the record is removed after its
//! events have been sent. A process that dies in between leaves the record, and any instance completes the resync. Clocks
//! of different instances are never compared.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;
use uuid::Uuid;

use super::outbox;
use super::transport::{Binding, Topology, TransportError};
use super::{Kernel, Patience};
use crate::clock::{Timestamp, mint_id};
use crate::db::{Db, Tx};

/// How often to look for resyncs that a dead instance has left.
const POLL: Duration = Duration::from_secs(10);
/// Events sent in one transaction.
const BATCH: i64 = 500;

/// Records since when each queue is bound to each of its keys: it is not sent older events.
pub async fn record_bindings(tx: &mut Tx, bindings: &[Binding]) -> sqlx::Result<()> {
    let now = tx.now();
    for binding in bindings {
        for key in binding.keys {
            crate::on!(tx, c => {
                sqlx::query(
                    "INSERT INTO messaging_bindings (queue, routing_key, since) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
                )
                .bind(&binding.queue)
                .bind(key)
                .bind(now)
                .execute(c)
                .await
                .map(drop)
            })?;
        }
    }
    Ok(())
}

/// The record of what is bound to each queue, and of the queues to resync.
#[derive(Clone)]
pub struct Resyncs {
    db: Db,
    requested: Arc<Notify>,
}

impl Resyncs {
    pub fn new(db: Db) -> Self {
        Self { db, requested: Arc::default() }
    }

    /// Records the bindings of queues that are about to be declared.
    pub async fn record_bindings(&self, bindings: &[Binding]) -> sqlx::Result<()> {
        let mut tx = self.db.begin().await?;
        record_bindings(&mut tx, bindings).await?;
        tx.commit().await
    }

    /// Records that a queue is missing; to be called before it is declared. While nothing has been published no queue can
    /// have lost anything, as on the first start.
    pub async fn request(&self, queue: &str) -> sqlx::Result<()> {
        let mut tx = self.db.begin().await?;
        let recorded = crate::on!(tx, c => {
            sqlx::query(
                "INSERT INTO messaging_resyncs (queue, id) SELECT $1, $2
                 WHERE EXISTS (SELECT 1 FROM messaging_outbox WHERE status = 'published' OR claimed_by IS NOT NULL)
                 ON CONFLICT (queue) DO UPDATE SET id = excluded.id",
            )
            .bind(queue)
            .bind(mint_id())
            .execute(c)
            .await
            .map(|done| done.rows_affected())
        })?;
        tx.commit().await?;
        if recorded > 0 {
            self.requested.notify_one();
        }
        Ok(())
    }
}

/// Completes resyncs until cancelled.
pub async fn run(kernel: Kernel, topology: Arc<Topology>, resyncs: Resyncs) {
    let mut patience = Patience::default();
    loop {
        match resync_all(&kernel, &topology).await {
            Ok(()) => {
                patience.renew();
                // Timed out, it polls.
                let _ = timeout(POLL, resyncs.requested.notified()).await;
            }
            Err(error) => {
                let pause = patience.next_pause();
                tracing::warn!(%error, ?pause, "cannot resync queues; trying again");
                tokio::time::sleep(pause).await;
            }
        }
    }
}

async fn resync_all(kernel: &Kernel, topology: &Topology) -> Result<(), TransportError> {
    for queue in list_requested(&kernel.db).await? {
        // A queue of a module that this instance does not have is left to one that has it.
        let Some(binding) = topology.queues.iter().find(|binding| binding.queue == queue) else { continue };
        // Events published from here on reach the queue.
        kernel.transport.declare_queue(&queue).await?;
        let Some(id) = find_request(&kernel.db, &queue).await? else { continue };
        let sent = resync(kernel, binding).await?;
        finish(&kernel.db, id).await?;
        if sent > 0 {
            tracing::warn!(queue, sent, "a missing queue was declared; sent its consumer's unfinished events again");
        }
    }
    Ok(())
}

async fn list_requested(db: &Db) -> sqlx::Result<Vec<String>> {
    let mut tx = db.read().await?;
    crate::on!(tx, c => sqlx::query_scalar("SELECT queue FROM messaging_resyncs").fetch_all(c).await)
}

async fn find_request(db: &Db, queue: &str) -> sqlx::Result<Option<Uuid>> {
    let mut tx = db.read().await?;
    crate::on!(tx, c => {
        sqlx::query_scalar("SELECT id FROM messaging_resyncs WHERE queue = $1").bind(queue).fetch_optional(c).await
    })
}

/// Sends a consumer what it has not seen of all that was published before, and what it has yet to finish; returns the
/// number of events.
async fn resync(kernel: &Kernel, binding: &Binding) -> sqlx::Result<usize> {
    // The newest event there is, so that events published from now on are not sent twice.
    let mut tx = kernel.db.read().await?;
    let until: Option<Timestamp> =
        crate::on!(tx, c => sqlx::query_scalar("SELECT MAX(created_at) FROM messaging_outbox").fetch_one(c).await)?;
    drop(tx);
    let Some(until) = until else { return Ok(0) };
    let mut sent = resend_unfinished(kernel, binding).await?;
    for key in binding.keys {
        sent += resend_unmet(kernel, binding, key, until).await?;
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

async fn resend_unmet(kernel: &Kernel, binding: &Binding, key: &str, until: Timestamp) -> sqlx::Result<usize> {
    let (mut sent, mut after) = (0, Uuid::nil());
    loop {
        let mut tx = kernel.db.begin().await?;
        let Some(since) = bound_since(&mut tx, &binding.queue, key).await? else { return Ok(sent) };
        let unmet =
            outbox::list_unmet(&mut tx, binding.consumer, &binding.queue, key, since..=until, after, BATCH).await?;
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
        sqlx::query_scalar("SELECT since FROM messaging_bindings WHERE queue = $1 AND routing_key = $2")
            .bind(queue)
            .bind(key)
            .fetch_optional(c)
            .await
    })
}

/// Removes a request, unless the queue has been found missing again meanwhile.
async fn finish(db: &Db, id: Uuid) -> sqlx::Result<()> {
    let mut tx = db.begin().await?;
    crate::on!(tx, c => sqlx::query("DELETE FROM messaging_resyncs WHERE id = $1").bind(id).execute(c).await.map(drop))?;
    tx.commit().await
}
