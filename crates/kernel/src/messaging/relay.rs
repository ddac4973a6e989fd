//! The relay: publishes what the outbox holds.
//!
//! Over a broker no lock is ever held over the network: rows are claimed for a while, published, and settled in a
//! transaction of their own, fenced by the claim. What this process writes is born claimed and comes in memory, through
//! a hatch; what others wrote, what failed and what was left behind is claimed from the table in one short transaction.
//! A crash after the publish and before the settling publishes again under the same id, and the inboxes absorb it. On
//! the table queue all of it is one transaction, and there is nothing to repeat.
//!
//! Several relays may run: a claimed row is skipped by the others until its lease ends.

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::health::{LoopState, Pulse};
use super::outbox::{self, Claim, Claimed, Settlement};
use super::transport::{Published, Transport, Verdict, Way, table};
use super::{Kernel, Pacing, Patience};
use crate::clock::{Timestamp, mint_id};
use crate::db::Hatch;
use crate::trace::{self, KeyValue, Span, SpanKind, Traceparent};

pub const NAME: &str = "relay";

pub struct Relay {
    kernel: Kernel,
    pulse: Pulse,
}

/// What one look into the table or the hatch came to.
#[derive(Default)]
struct Took {
    rows: usize,
    /// Why rows stay behind, though the broker can be reached.
    trouble: Option<String>,
}

impl Relay {
    pub fn new(kernel: Kernel) -> Self {
        let pulse = kernel.health.register(NAME);
        Self { kernel: Kernel { db: kernel.db.on_a_lane(), ..kernel }, pulse }
    }

    /// Publishes until told to stop, then makes one last pass for what the last batches wrote.
    pub async fn run(self, stop: CancellationToken) {
        let mut bell = self.kernel.db.wakes().bell(outbox::BELL);
        let mut gate = self.kernel.pauses.gate(NAME);
        let mut patience = Patience::default();
        let mut hatch = None;
        let mut troubled_by = None;
        let mut look_at = Instant::now();
        if let Err(error) = self.free_leftovers().await {
            tracing::warn!(%error, "what an earlier relay left claimed waits for the end of its lease");
        }
        while !stop.is_cancelled() {
            if gate.is_paused() {
                self.shut(&mut hatch).await;
                self.pulse.set(LoopState::Paused);
                tokio::select! { () = gate.until(false) => continue, () = stop.cancelled() => break }
            }
            if let Some(why) = self.kernel.transport.obstacle(Way::Out) {
                // Nothing is claimed that could not go out, however long the broker is away.
                self.shut(&mut hatch).await;
                self.pulse.troubled(why, self.kernel.db.clock().now());
                tokio::select! {
                    () = self.kernel.transport.until_open(Way::Out) => {}
                    () = gate.until(true) => {}
                    () = stop.cancelled() => {}
                }
                continue;
            }
            if hatch.is_none() && self.has_hatch() {
                hatch = Some(self.open());
                look_at = Instant::now();
            }
            let pacing = Pacing::start();
            // The table before the hatch: what is handed over never keeps the rest waiting.
            let looks = bell.is_rung() || look_at <= Instant::now();
            bell.hush();
            match self.pass(looks, hatch.as_mut()).await {
                Ok((found, handed)) => {
                    pacing.next(found.rows + handed.rows).await;
                    patience.renew();
                    self.tell(found.trouble.or(handed.trouble), &mut troubled_by);
                    if found.rows >= self.batch() {
                        look_at = Instant::now();
                    } else if looks {
                        look_at = Instant::now() + self.kernel.tuning.outbox_poll;
                    }
                }
                Err(error) => {
                    let pause = patience.next_pause();
                    tracing::warn!(%error, ?pause, "the relay cannot reach the outbox and waits");
                    self.pulse.troubled(error.to_string(), self.kernel.db.clock().now());
                    tokio::select! { () = stop.cancelled() => {} () = tokio::time::sleep(pause) => {} }
                    look_at = Instant::now();
                    continue;
                }
            }
            let handed = async {
                match &mut hatch {
                    Some(hatch) => hatch.filled().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => {}
                () = gate.until(true) => {}
                () = bell.rung() => look_at = Instant::now(),
                () = handed => {}
                () = tokio::time::sleep_until(look_at) => {}
            }
        }
        self.shut(&mut hatch).await;
        if !gate.is_paused() && self.kernel.transport.obstacle(Way::Out).is_none() {
            // A pass that is not full has sent everything our own last batches wrote.
            while matches!(self.try_once().await, Ok(rows) if rows >= self.batch()) {}
        }
        self.pulse.set(LoopState::Stopped);
    }

    /// Says how it is doing: in health always, in the log when it changes.
    fn tell(&self, trouble: Option<String>, known: &mut Option<String>) {
        let now = self.kernel.db.clock().now();
        match &trouble {
            None => self.pulse.running(now),
            Some(why) => {
                if trouble != *known {
                    tracing::warn!(why, "the broker does not take what is published; trying again");
                }
                self.pulse.troubled(why.clone(), now);
            }
        }
        *known = trouble;
    }

    fn batch(&self) -> usize {
        usize::try_from(self.kernel.tuning.outbox_batch).unwrap_or(usize::MAX)
    }

    async fn free_leftovers(&self) -> sqlx::Result<()> {
        let mut tx = self.kernel.db.begin_relaxed().await?;
        let now = tx.now();
        outbox::free_leftovers(&mut tx, now).await?;
        tx.commit().await
    }

    /// On the table queue there is nothing left to hand to a relay.
    fn has_hatch(&self) -> bool {
        !matches!(self.kernel.transport, Transport::Table(_))
    }

    fn open(&self) -> Hatch<Claimed> {
        let mut hatch = self.kernel.db.hatches().outbox.open(NAME, self.kernel.tuning.outbox_lease);
        hatch.take(self.batch(), 0);
        hatch
    }

    /// Closes the hatch and frees what was not taken from it.
    async fn shut(&self, hatch: &mut Option<Hatch<Claimed>>) {
        let Some(hatch) = hatch.take() else { return };
        self.put_back(&hatch.close().await).await;
    }

    /// Frees rows that were handed over, for whichever relay comes first.
    async fn put_back(&self, rows: &[Claimed]) {
        let freed: Vec<Settlement> = rows.iter().map(|row| Settlement::Released(row.id)).collect();
        if !freed.is_empty()
            && let Err(error) =
                self.settle(self.kernel.db.hatches().token(), &freed, self.kernel.db.clock().now()).await
        {
            tracing::warn!(%error, rows = freed.len(), "rows handed to the relay wait for the end of their lease");
        }
    }

    /// One look into the table, if it is time, and one into the hatch.
    async fn pass(&self, looks: bool, hatch: Option<&mut Hatch<Claimed>>) -> sqlx::Result<(Took, Took)> {
        let found = if looks { self.look().await? } else { Took::default() };
        let handed = match hatch {
            Some(hatch) => self.publish_handed(hatch).await?,
            None => Took::default(),
        };
        Ok((found, handed))
    }

    /// One look into the table; returns how many rows it took on.
    pub async fn try_once(&self) -> sqlx::Result<usize> {
        Ok(self.look().await?.rows)
    }

    async fn look(&self) -> sqlx::Result<Took> {
        match &self.kernel.transport {
            Transport::Table(_) => self.hand_on().await,
            Transport::Memory(_) | Transport::Rabbit(_) => self.publish_due().await,
        }
    }

    /// The table queue's road: from outbox to queues in one transaction.
    async fn hand_on(&self) -> sqlx::Result<Took> {
        let started = Instant::now();
        let mut tx = self.kernel.db.begin_relaxed().await?;
        let rows = table::publish_due(&mut tx, i64::from(self.kernel.tuning.outbox_batch)).await?;
        if rows > 0 {
            self.kernel.faults.reach("relay.before_mark", NAME);
        }
        tx.commit().await?;
        if rows > 0 {
            self.kernel.db.metrics().outbox_publish.observe(started.elapsed().as_secs_f64());
        }
        Ok(Took { rows: usize::try_from(rows).unwrap_or(usize::MAX), trouble: None })
    }

    /// A broker's road: claim, publish, settle.
    async fn publish_due(&self) -> sqlx::Result<Took> {
        let claim = Claim { by: mint_id(), lease: self.kernel.tuning.outbox_lease };
        let mut tx = self.kernel.db.begin_relaxed().await?;
        let now = tx.now();
        let claimed = outbox::claim_many(&mut tx, claim, i64::from(self.kernel.tuning.outbox_batch), now).await?;
        tx.commit().await?;
        if let Err(error) = self.kernel.db.until_on_disk().await {
            let released: Vec<Settlement> = claimed.iter().map(|row| Settlement::Released(row.id)).collect();
            self.settle(claim.by, &released, now).await?;
            return Err(error);
        }
        self.publish(claim.by, &claimed, now).await
    }

    /// What came in memory is claimed already.
    async fn publish_handed(&self, hatch: &mut Hatch<Claimed>) -> sqlx::Result<Took> {
        let handed = hatch.take(self.batch(), self.batch());
        self.put_back(&handed.stale).await;
        self.publish(self.kernel.db.hatches().token(), &handed.fresh, self.kernel.db.clock().now()).await
    }

    async fn publish(&self, claimed_by: Uuid, claimed: &[Claimed], taken_at: Timestamp) -> sqlx::Result<Took> {
        if claimed.is_empty() {
            return Ok(Took::default());
        }
        let started = Instant::now();
        let spans = self.begin_spans(claimed);
        let Published { verdicts, trouble } = self.kernel.transport.publish(claimed).await;
        drop(spans);
        self.kernel.db.metrics().outbox_publish.observe(started.elapsed().as_secs_f64());
        self.kernel.faults.reach("relay.before_mark", NAME);
        let settlements: Vec<Settlement> =
            claimed.iter().zip(verdicts).map(|(row, verdict)| self.settlement(row, verdict)).collect();
        self.settle(claimed_by, &settlements, taken_at).await?;
        // Rows the broker said nothing about count as none taken, so that a broker that is away is not hammered.
        let rows = settlements.iter().filter(|settlement| !matches!(settlement, Settlement::Released(_))).count();
        Ok(Took { rows, trouble })
    }

    /// The sending of each message, in the words of OpenTelemetry's conventions.
    fn begin_spans(&self, claimed: &[Claimed]) -> Vec<Span> {
        if !trace::is_on() {
            return Vec::new();
        }
        let begin = |row: &Claimed| {
            let parent = row.traceparent.as_deref().and_then(Traceparent::parse);
            let destination = if row.target.is_empty() { row.routing_key() } else { row.target.clone() };
            Span::begin(parent, SpanKind::Producer, || {
                let attributes = vec![
                    KeyValue::new("messaging.system", self.kernel.transport.name()),
                    KeyValue::new("messaging.operation.type", "send"),
                    KeyValue::new("messaging.operation.name", "publish"),
                    KeyValue::new("messaging.destination.name", destination),
                    KeyValue::new("messaging.message.id", row.event_id.to_string()),
                    KeyValue::new("messaging.message.conversation_id", row.correlation_id.clone()),
                    KeyValue::new("messaging.rabbitmq.destination.routing_key", row.routing_key()),
                ];
                (format!("publish {}", row.routing_key()).into(), attributes)
            })
        };
        claimed.iter().map(begin).collect()
    }

    async fn settle(&self, claimed_by: Uuid, settlements: &[Settlement], taken_at: Timestamp) -> sqlx::Result<()> {
        let mut tx = self.kernel.db.begin_relaxed().await?;
        let now = tx.now();
        outbox::settle_many(&mut tx, claimed_by, settlements, taken_at, now).await?;
        tx.commit().await
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
