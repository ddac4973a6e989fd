//! The relay: publishes what the outbox holds.
//!
//! Over a broker a pass has three steps, so that no lock is ever held over the network: claim rows for a while in
//! one short transaction, publish them, settle them in another, fenced by the claim. A crash after the publish and
//! before the settling publishes again under the same id, and the inboxes absorb it. On the table queue the three
//! are one transaction, and there is nothing to repeat.
//!
//! Several relays may run: a claimed row is skipped by the others until its lease ends.

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::health::{LoopState, Pulse};
use super::outbox::{self, Claimed, Settlement};
use super::transport::{Transport, Verdict, Way, table};
use super::{Kernel, Pace, Patience};
use crate::clock::mint_id;

pub const NAME: &str = "relay";

pub struct Relay {
    kernel: Kernel,
    pulse: Pulse,
}

impl Relay {
    pub fn new(kernel: Kernel) -> Self {
        let pulse = kernel.health.register(NAME);
        Self { kernel, pulse }
    }

    /// Publishes until told to stop, then makes one last pass for what the last batches wrote.
    pub async fn run(self, stop: CancellationToken) {
        let mut bell = self.kernel.db.wakes().bell(outbox::BELL);
        let mut gate = self.kernel.pauses.gate(NAME);
        let mut patience = Patience::default();
        while !stop.is_cancelled() {
            if gate.is_paused() {
                self.pulse.set(LoopState::Paused);
                tokio::select! { () = gate.until(false) => continue, () = stop.cancelled() => break }
            }
            if let Some(why) = self.kernel.transport.obstacle(Way::Out) {
                // Nothing is claimed that could not go out, however long the broker is away.
                self.pulse.troubled(why, self.kernel.db.clock().now());
                tokio::select! {
                    () = self.kernel.transport.until_open(Way::Out) => {}
                    () = gate.until(true) => {}
                    () = stop.cancelled() => {}
                }
                continue;
            }
            bell.hush();
            let pace = Pace::start();
            let pause = match self.try_once().await {
                Ok(rows) => {
                    pace.next(usize::try_from(rows).unwrap_or(0)).await;
                    patience.renew();
                    self.pulse.running(self.kernel.db.clock().now());
                    if rows >= i64::from(self.kernel.tuning.outbox_batch) {
                        continue;
                    }
                    self.kernel.tuning.outbox_poll
                }
                Err(error) => {
                    let pause = patience.next_pause();
                    tracing::warn!(%error, ?pause, "the relay cannot reach the outbox and waits");
                    self.pulse.troubled(error.to_string(), self.kernel.db.clock().now());
                    tokio::select! { () = stop.cancelled() => {} () = tokio::time::sleep(pause) => {} }
                    continue;
                }
            };
            tokio::select! {
                () = stop.cancelled() => {}
                () = gate.until(true) => {}
                () = bell.rung() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        if !gate.is_paused() && self.kernel.transport.obstacle(Way::Out).is_none() {
            // A pass that is not full has sent everything our own last batches wrote.
            let full = i64::from(self.kernel.tuning.outbox_batch);
            while matches!(self.try_once().await, Ok(rows) if rows >= full) {}
        }
        self.pulse.set(LoopState::Stopped);
    }

    /// One pass; returns how many rows it took on.
    pub async fn try_once(&self) -> sqlx::Result<i64> {
        match &self.kernel.transport {
            Transport::Table(_) => self.hand_on().await,
            broker @ (Transport::Memory(_) | Transport::Rabbit(_)) => self.publish(broker).await,
        }
    }

    /// The table queue's road: from outbox to queues in one transaction.
    async fn hand_on(&self) -> sqlx::Result<i64> {
        let started = Instant::now();
        let mut tx = self.kernel.db.begin_relaxed().await?;
        let rows = table::publish_due(&mut tx, i64::from(self.kernel.tuning.outbox_batch)).await?;
        self.kernel.faults.reach("relay.before_mark", NAME);
        tx.commit().await?;
        if rows > 0 {
            self.kernel.db.metrics().outbox_publish.observe(started.elapsed().as_secs_f64());
        }
        Ok(rows)
    }

    /// A broker's road: claim, publish, settle.
    async fn publish(&self, broker: &Transport) -> sqlx::Result<i64> {
        let started = Instant::now();
        let claimed_by = mint_id();
        let mut tx = self.kernel.db.begin_relaxed().await?;
        let (limit, now) = (i64::from(self.kernel.tuning.outbox_batch), tx.now());
        let claimed = outbox::claim_many(&mut tx, claimed_by, limit, self.kernel.tuning.outbox_lease, now).await?;
        tx.commit().await?;
        if claimed.is_empty() {
            return Ok(0);
        }
        let verdicts = broker.publish(&claimed).await;
        self.kernel.db.metrics().outbox_publish.observe(started.elapsed().as_secs_f64());
        self.kernel.faults.reach("relay.before_mark", NAME);
        let settlements: Vec<Settlement> =
            claimed.iter().zip(verdicts).map(|(row, verdict)| self.settlement(row, verdict)).collect();
        let mut tx = self.kernel.db.begin_relaxed().await?;
        let now = tx.now();
        outbox::settle_many(&mut tx, claimed_by, &settlements, now).await?;
        tx.commit().await?;
        // Rows the broker said nothing about count as none taken, so that a broker that is away is not hammered.
        let answered = settlements.iter().filter(|settlement| !matches!(settlement, Settlement::Released(_)));
        Ok(i64::try_from(answered.count()).unwrap_or(i64::MAX))
    }

    fn failed(&self, reason: &'static str) {
        self.kernel.db.metrics().outbox_publish_failures.get_or_create(&[("reason", reason)]).inc();
    }

    fn settlement(&self, row: &Claimed, verdict: Verdict) -> Settlement {
        match verdict {
            Verdict::Accepted => Settlement::Published(row.id),
            Verdict::Unknown => {
                self.failed("unanswered");
                Settlement::Released(row.id)
            }
            Verdict::Refused(error) => {
                self.failed("refused");
                let attempts = u32::try_from(row.attempts).unwrap_or(0) + 1;
                tracing::warn!(%error, outbox.id = %row.id, attempts, "the broker refused {}", row.routing_key());
                Settlement::Failed { id: row.id, retry_after: self.kernel.tuning.outbox_backoff.delay(attempts), error }
            }
        }
    }
}
