//! Retention: what is old is moved out of the way or removed, in small batches on a timer of its own.
//!
//! - Published outbox rows go to the archive (events) or away (their copies: retries, redrives, replays), unless a queue
//!   row still points at them. The archive is removed in its turn; how long it is kept is how far back a replay reaches.
//! - Inbox rows that are done with are forgotten, unless their message still rests in a dead letter or in the outbox. A
//!   copy that turns up even later finds no row; the consumer rejects it by its age (`too-old`) rather than run it again.
//! - Resolved dead letters are removed; open ones never are.
//! - What modules keep for a while ([`Sweep`]) is theirs to remove.
//!
//! One instance works at a time: a batch that does not get the lock leaves the turn to whoever has it. Batches are
//! bookkeeping, so they need not be durable one by one: what a power cut undoes is done again.
//!
//! Old rows are found by the time in their UUIDv7, which the primary keys are sorted by: no index has to be kept for
//! it on the tables that every order writes to.

mod pg;
mod sqlite;

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::health::{LoopState, Pulse};
use super::{Kernel, Patience};
use crate::clock::{Timestamp, first_id_at};
use crate::db::{Tx, dialects};

pub const NAME: &str = "retention";

/// Rows removed in one transaction.
const BATCH: i64 = 500;
/// Between two batches it rests for at least this long, and as long as the batch took.
const REST_MIN: Duration = Duration::from_millis(10);

/// How long things are kept.
#[derive(Debug, Clone, Copy)]
pub struct Keep {
    /// Published outbox rows, before they go to the archive.
    pub outbox: Duration,
    /// Published events, from when they were written; no less than `outbox`.
    pub archive: Duration,
    /// What was processed; also the age at which an event that is not remembered is too old.
    pub inbox: Duration,
    /// Letters that were redriven or discarded.
    pub dead_letters: Duration,
    /// How often it is looked what is old.
    pub look_every: Duration,
}

/// Something of a module that is kept for a while: removes up to `limit` rows older than `before`, returns how many.
#[derive(Clone)]
pub struct Sweep {
    pub name: &'static str,
    pub keep: Duration,
    pub sweep: for<'a> fn(tx: &'a mut Tx, before: Timestamp, limit: i64) -> BoxFuture<'a, sqlx::Result<u64>>,
}

/// What a pass removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Outbox rows moved to the archive, or removed if they were copies.
    pub outbox: u64,
    pub archive: u64,
    pub inbox: u64,
    pub dead_letters: u64,
    pub others: u64,
}

pub struct Retention {
    kernel: Kernel,
    sweeps: Vec<Sweep>,
    pulse: Pulse,
}

dialects! {
    /// Is it this transaction's turn? If so, no other gets it before this one ends.
    async fn take_turn() -> bool;
    /// A page of rows published before `before`, by their ids from `after` to `end`, and whether each may go: not while
    /// a queue row points at it. Once none does, none ever will.
    async fn select_published(after: Uuid, end: Uuid, before: Timestamp, limit: i64) -> Vec<(Uuid, bool)>;
    /// Moves events to the archive and removes the rest.
    async fn archive_many(ids: &[Uuid]) -> u64;
    /// Those whose ids have no time in them.
    async fn select_foreign(before: Timestamp, limit: i64) -> Vec<(String, Uuid)>;
    /// Forgets those of `ids` that nothing still needs.
    async fn forget_many(consumer: &str, ids: &[Uuid], before: Timestamp) -> u64;
}

impl Retention {
    pub fn new(kernel: Kernel, sweeps: Vec<Sweep>) -> Self {
        let pulse = kernel.health.register(NAME);
        Self { kernel, sweeps, pulse }
    }

    /// Makes passes until told to stop; the batch in hand is finished first.
    pub async fn run(self, stop: CancellationToken) {
        let mut patience = Patience::default();
        while !stop.is_cancelled() {
            let pause = match self.pass(&stop).await {
                Ok(swept) => {
                    patience.renew();
                    self.pulse.running(self.kernel.db.clock().now());
                    if swept != Swept::default() {
                        let Swept { outbox, archive, inbox, dead_letters, others } = swept;
                        tracing::info!(outbox, archive, inbox, dead_letters, others, "removed what was old");
                    }
                    self.kernel.tuning.keep.look_every
                }
                Err(error) => {
                    self.pulse.troubled(error.to_string(), self.kernel.db.clock().now());
                    let pause = patience.next_pause();
                    tracing::warn!(%error, ?pause, "cannot remove what is old just now");
                    pause
                }
            };
            tokio::select! { () = stop.cancelled() => {} () = tokio::time::sleep(pause) => {} }
        }
        self.pulse.set(LoopState::Stopped);
    }

    /// Removes everything that is old, batch by batch, or nothing more once it is another instance's turn.
    pub async fn pass(&self, stop: &CancellationToken) -> sqlx::Result<Swept> {
        let now = self.kernel.db.clock().now();
        let keep = &self.kernel.tuning.keep;
        let mut swept = Swept {
            outbox: self.archive(now.minus(keep.outbox), stop).await?,
            inbox: self.forget(now.minus(keep.inbox), stop).await?,
            ..Swept::default()
        };
        let letters = Sweep {
            name: "dead letters",
            keep: keep.dead_letters,
            sweep: |tx, before, limit| Box::pin(remove_letters(tx, before, limit)),
        };
        let archive = Sweep {
            name: "archive",
            keep: keep.archive,
            sweep: |tx, before, limit| Box::pin(remove_archived(tx, before, limit)),
        };
        swept.dead_letters = self.sweep(&letters, now, stop).await?;
        swept.archive = self.sweep(&archive, now, stop).await?;
        for sweep in &self.sweeps {
            swept.others += self.sweep(sweep, now, stop).await?;
        }
        Ok(swept)
    }

    async fn sweep(&self, sweep: &Sweep, now: Timestamp, stop: &CancellationToken) -> sqlx::Result<u64> {
        let before = now.minus(sweep.keep);
        let mut removed = 0;
        while !stop.is_cancelled() {
            let batch = Batch::start();
            let mut tx = self.kernel.db.begin_relaxed().await?;
            if !take_turn(&mut tx).await? {
                break;
            }
            let rows = (sweep.sweep)(&mut tx, before, BATCH).await?;
            tx.commit().await?;
            removed += rows;
            if rows < BATCH.unsigned_abs() {
                break;
            }
            tracing::debug!(rows, "removed from the {}", sweep.name);
            batch.rest().await;
        }
        Ok(removed)
    }

    /// The outbox, by pages: what may not go yet is passed over, and does not keep the rest from going.
    async fn archive(&self, before: Timestamp, stop: &CancellationToken) -> sqlx::Result<u64> {
        let (mut after, mut removed) = (Uuid::nil(), 0);
        while !stop.is_cancelled() {
            let batch = Batch::start();
            let mut reading = self.kernel.db.read().await?;
            let page = select_published(&mut reading, after, first_id_at(before), before, BATCH).await?;
            drop(reading);
            let free: Vec<Uuid> = page.iter().filter(|(_, free)| *free).map(|(id, _)| *id).collect();
            if !free.is_empty() {
                let mut tx = self.kernel.db.begin_relaxed().await?;
                if !take_turn(&mut tx).await? {
                    break;
                }
                removed += archive_many(&mut tx, &free).await?;
                tx.commit().await?;
            }
            match page.last() {
                Some((last, _)) if page.len() as i64 == BATCH => after = *last,
                _ => break,
            }
            batch.rest().await;
        }
        Ok(removed)
    }

    /// The inbox, consumer by consumer and by pages; then what came under foreign ids.
    async fn forget(&self, before: Timestamp, stop: &CancellationToken) -> sqlx::Result<u64> {
        let (mut consumer, mut removed) = (String::new(), 0);
        while let Some(next) = next_consumer(&mut self.kernel.db.read().await?, &consumer).await? {
            consumer = next;
            let mut after = Uuid::nil();
            while !stop.is_cancelled() {
                let batch = Batch::start();
                let page = select_settled(&mut self.kernel.db.read().await?, &consumer, after, before).await?;
                let Some(last) = page.last() else { break };
                let Some(forgotten) = self.forget_page(&consumer, &page, before).await? else { return Ok(removed) };
                removed += forgotten;
                after = *last;
                batch.rest().await;
            }
        }
        while !stop.is_cancelled() {
            let page = select_foreign(&mut self.kernel.db.read().await?, before, BATCH).await?;
            let mut forgotten = 0;
            for same in page.chunk_by(|left, right| left.0 == right.0) {
                let ids: Vec<Uuid> = same.iter().map(|(_, id)| *id).collect();
                let Some(rows) = self.forget_page(&same[0].0, &ids, before).await? else { return Ok(removed) };
                forgotten += rows;
            }
            removed += forgotten;
            if forgotten == 0 {
                break;
            }
        }
        Ok(removed)
    }

    /// `None` if it is another instance's turn.
    async fn forget_page(&self, consumer: &str, ids: &[Uuid], before: Timestamp) -> sqlx::Result<Option<u64>> {
        let mut tx = self.kernel.db.begin_relaxed().await?;
        if !take_turn(&mut tx).await? {
            return Ok(None);
        }
        let rows = forget_many(&mut tx, consumer, ids, before).await?;
        note_forgotten(&mut tx, "verdicts", before, rows).await?;
        tx.commit().await?;
        Ok(Some(rows))
    }
}

/// The consumer after this one in the inbox; a consumer that is gone has rows too.
async fn next_consumer(tx: &mut Tx, after: &str) -> sqlx::Result<Option<String>> {
    crate::on!(tx, c => {
        sqlx::query_scalar("SELECT min(consumer) FROM messaging_inbox WHERE consumer > $1").bind(after).fetch_one(c).await
    })
}

async fn select_settled(tx: &mut Tx, consumer: &str, after: Uuid, before: Timestamp) -> sqlx::Result<Vec<Uuid>> {
    crate::on!(tx, c => {
        sqlx::query_scalar(
            "SELECT event_id FROM messaging_inbox
             WHERE consumer = $1 AND event_id > $2 AND event_id < $3 AND state IN ('processed', 'dead')
                 AND finished_at < $4
             ORDER BY event_id LIMIT $5",
        )
        .bind(consumer)
        .bind(after)
        .bind(first_id_at(before))
        .bind(before)
        .bind(BATCH)
        .fetch_all(c)
        .await
    })
}

async fn remove_letters(tx: &mut Tx, before: Timestamp, limit: i64) -> sqlx::Result<u64> {
    // The state once more: a letter may be restored while this waits for its lock.
    let removed = crate::on!(tx, c => {
        sqlx::query(
            "DELETE FROM messaging_dead_letters WHERE state <> 'open' AND id IN (SELECT id FROM messaging_dead_letters
                 WHERE state <> 'open' AND resolved_at < $1 ORDER BY resolved_at LIMIT $2)",
        )
        .bind(before)
        .bind(limit)
        .execute(c)
        .await
        .map(|done| done.rows_affected())
    })?;
    note_forgotten(tx, "letters", before, removed).await?;
    Ok(removed)
}

async fn remove_archived(tx: &mut Tx, before: Timestamp, limit: i64) -> sqlx::Result<u64> {
    let removed = crate::on!(tx, c => {
        sqlx::query(
            "DELETE FROM messaging_outbox_archive WHERE id IN (SELECT id FROM messaging_outbox_archive
                 WHERE id < $1 AND created_at < $2 ORDER BY id LIMIT $3)",
        )
        .bind(first_id_at(before))
        .bind(before)
        .bind(limit)
        .execute(c)
        .await
        .map(|done| done.rows_affected())
    })?;
    note_forgotten(tx, "events", before, removed).await?;
    Ok(removed)
}

/// Writes down, with the removal, that of what was before this some is gone: the audit asks of the rest only.
async fn note_forgotten(tx: &mut Tx, what: &str, until: Timestamp, rows: u64) -> sqlx::Result<()> {
    if rows == 0 {
        return Ok(());
    }
    crate::on!(tx, c => {
        sqlx::query(
            "INSERT INTO messaging_forgotten (what, until, removed_until) VALUES ($1, $2, $2)
             ON CONFLICT (what) DO UPDATE SET removed_until = excluded.until,
                 until = CASE WHEN messaging_forgotten.until < excluded.until THEN excluded.until
                     ELSE messaging_forgotten.until END
             WHERE messaging_forgotten.removed_until IS NULL OR messaging_forgotten.removed_until < excluded.until",
        )
        .bind(what)
        .bind(until)
        .execute(c)
        .await
        .map(drop)
    })
}

/// Until when inbox rows have been removed; `None` if none ever was. How long they are kept may have been less then.
pub async fn verdicts_removed_until(tx: &mut Tx) -> sqlx::Result<Option<Timestamp>> {
    let found: Option<Option<Timestamp>> = crate::on!(tx, c => {
        sqlx::query_scalar("SELECT removed_until FROM messaging_forgotten WHERE what = 'verdicts'").fetch_optional(c).await
    })?;
    Ok(found.flatten())
}

/// Paces the batches, so that retention takes half of the writer's time at most.
struct Batch(Instant);

impl Batch {
    fn start() -> Self {
        Self(Instant::now())
    }

    async fn rest(self) {
        tokio::time::sleep(self.0.elapsed().max(REST_MIN)).await;
    }
}
