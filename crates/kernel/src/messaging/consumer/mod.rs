//! The consumer loop: takes what has arrived, hands it to a module's reaction, and acknowledges after the commit.
//!
//! A batch is one transaction: inbox rows, effects, outgoing events and retry bookkeeping commit together or not
//! at all, and only then is anything acknowledged, so a crash at any line means a redelivery that the inbox
//! absorbs. If a batch fails as a whole it is halved until the culprit stands alone, and only that one is retried.
//! A database that is away or busy is nobody's fault: the consumer waits with what it holds and tries again, and no
//! attempt is counted.
//!
//! A message delivered for the third time may be killing the process: it runs alone, each run recorded before it
//! starts, and after three runs that never finished it is rejected as `process-killer`.
//!
//! This file is the loop: it takes, holds and settles. `gate` reads what was taken, `batch` runs it, `plan` says what
//! of it is to run at all, and `books` writes down what came of it.

mod batch;
mod books;
mod gate;
mod plan;

use std::pin::{Pin, pin};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(super) use batch::{Blame, Failure, UNFINISHED_RUNS_MAX, is_database_unavailable, panic_text};
pub(super) use books::Books;
use gate::Hand;
pub use gate::read_delivery;
pub(super) use gate::{Item, begin_span};
pub(super) use plan::Plan;

use super::health::{LoopState, Pulse};
use super::transport::{Subscription, Tag, TransportError, Way};
use super::{Kernel, Pacing, Patience, Reaction};
use crate::clock::mint_id;

/// How often to look for events that have waited for their predecessor too long.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

pub struct Consumer<R> {
    pub(super) kernel: Kernel,
    pub(super) reaction: R,
    pub(super) queue: String,
    pub(super) pulse: Pulse,
}

/// What is to be done with a delivery once everything about it is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Settle {
    Ack,
    AckRetry,
    Reject,
}

impl<R: Reaction> Consumer<R> {
    pub fn new(kernel: Kernel, reaction: R) -> Self {
        let pulse = kernel.health.register(R::NAME);
        let queue = kernel.tuning.queue_name(R::NAME);
        let kernel = Kernel { db: kernel.db.on_a_lane(), ..kernel };
        Self { kernel, reaction, queue, pulse }
    }

    /// Consumes until told to stop. Pausing and stopping finish the batch in hand first.
    pub async fn run(self, stop: CancellationToken) {
        let mut gate = self.kernel.pauses.gate(R::NAME);
        let mut patience = Patience::default();
        while !stop.is_cancelled() {
            if gate.is_paused() {
                self.pulse.set(LoopState::Paused);
                tokio::select! { () = gate.until(false) => {} () = stop.cancelled() => {} }
                continue;
            }
            if let Some(why) = self.kernel.transport.obstacle(Way::In) {
                self.pulse.troubled(why, self.kernel.db.clock().now());
                tokio::select! {
                    () = self.kernel.transport.until_open(Way::In) => {}
                    () = gate.until(true) => {}
                    () = stop.cancelled() => {}
                }
                continue;
            }
            let stopping = async {
                tokio::select! { () = gate.until(true) => {} () = stop.cancelled() => {} }
            };
            if let Err(error) = self.consume(stopping, &mut patience).await {
                let pause = patience.next_pause();
                tracing::warn!(consumer = R::NAME, %error, ?pause, "cannot consume just now and waits");
                self.pulse.troubled(error.to_string(), self.kernel.db.clock().now());
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = gate.until(true) => {}
                    () = tokio::time::sleep(pause) => {}
                }
            }
        }
        self.pulse.set(LoopState::Stopped);
    }

    /// Takes batches on one subscription until `stopping` resolves or something is away.
    async fn consume(&self, stopping: impl Future<Output = ()>, patience: &mut Patience) -> Result<(), TransportError> {
        // A broker counts deliveries and gives up on a message after so many: none is taken before the database is seen
        // to work, or an outage would use them up.
        self.check_database().await?;
        let mut subscription = self.kernel.transport.subscribe(&self.queue).await?;
        subscription.open_hatch();
        // Said now: the first batch may make calls that take their time.
        self.pulse.running(self.kernel.db.clock().now());
        let mut swept_at = Instant::now();
        tokio::pin!(stopping);
        let ended = loop {
            tokio::select! {
                biased;
                () = &mut stopping => break self.work_off_rest(&mut subscription).await,
                () = subscription.ready(self.kernel.tuning.poll) => {}
            }
            if swept_at.elapsed() >= SWEEP_EVERY {
                swept_at = Instant::now();
                if let Err(error) = self.sweep().await
                    && !self.wait_out(&error, stopping.as_mut(), patience).await
                {
                    break self.work_off_rest(&mut subscription).await;
                }
            }
            let pacing = Pacing::start();
            let dealt_with = match self.deal_with_next(&mut subscription, stopping.as_mut(), patience).await {
                Ok((count, done)) => subscription.ack_soon(&done).await.map(|()| count),
                Err(error) => Err(error),
            };
            match dealt_with {
                Ok(count) => {
                    patience.renew();
                    self.pulse.running(self.kernel.db.clock().now());
                    pacing.next(count).await;
                }
                Err(error) => break Err(error),
            }
        };
        subscription.close().await;
        ended
    }

    /// Writes something durably, and leaves no trace of it.
    async fn check_database(&self) -> sqlx::Result<()> {
        let mut tx = self.kernel.db.begin().await?;
        let (id, now) = (mint_id(), tx.now());
        crate::on!(tx, c => {
            sqlx::query("INSERT INTO messaging_subscriptions (id, queue, seen_at) VALUES ($1, $2, $3)")
                .bind(id)
                .bind(&self.queue)
                .bind(now)
                .execute(c)
                .await
        .map(drop)})?;
        crate::on!(tx, c => {
            sqlx::query("DELETE FROM messaging_subscriptions WHERE id = $1").bind(id).execute(c).await.map(drop)
        })?;
        tx.commit().await
    }

    /// Works off what a broker has sent already; the rest of the queue is left alone.
    async fn work_off_rest(&self, subscription: &mut Subscription) -> Result<(), TransportError> {
        subscription.wind_down().await;
        while self.try_once(subscription).await? > 0 {}
        Ok(())
    }

    /// Takes what is there, deals with it and acknowledges; returns how many deliveries that was. Does not wait for a
    /// database that is away.
    pub async fn try_once(&self, subscription: &mut Subscription) -> Result<usize, TransportError> {
        let (count, done) = self.try_unacknowledged(subscription).await?;
        subscription.ack(&done).await?;
        Ok(count)
    }

    /// As [`Self::try_once`], but leaves the acknowledgement to the caller: also returns the tags to acknowledge.
    pub async fn try_unacknowledged(
        &self,
        subscription: &mut Subscription,
    ) -> Result<(usize, Vec<Tag>), TransportError> {
        let stopping = pin!(std::future::ready(()));
        self.deal_with_next(subscription, stopping, &mut Patience::default()).await
    }

    /// Takes what is there and deals with it; returns how many deliveries that was, and those to acknowledge. A database
    /// that is away is waited for until `stopping` resolves: then everything is given back.
    async fn deal_with_next(
        &self,
        subscription: &mut Subscription,
        stopping: Pin<&mut impl Future<Output = ()>>,
        patience: &mut Patience,
    ) -> Result<(usize, Vec<Tag>), TransportError> {
        // A consumer that the fault lab slows down takes one delivery at a time, so each of them is slow.
        let is_slow = self.kernel.faults.delay(R::NAME).is_some();
        let deliveries = subscription.take(if is_slow { 1 } else { self.batch_max() }).await?;
        let count = deliveries.len();
        if count == 0 {
            return Ok((0, Vec::new()));
        }
        let tags: Vec<Tag> = deliveries.iter().map(|delivery| delivery.tag).collect();
        let (started, taken_at) = (Instant::now(), self.kernel.db.clock().now());
        let settled = {
            let work = async {
                // Read for each delivery: the fault may begin, change or end while a batch waits.
                for _ in 0..count {
                    let Some(delay) = self.kernel.faults.delay(R::NAME) else { break };
                    tokio::time::sleep(delay).await;
                }
                self.repeat(&deliveries).await;
                let hand = self.read(deliveries, taken_at);
                self.hold(hand, subscription, stopping, patience).await
            };
            tokio::select! {
                settled = work => settled,
                () = subscription.keep(&tags) => unreachable!("keeping a lease never ends"),
            }
        };
        match settled {
            Ok(settled) => {
                self.kernel.db.metrics().observe_handling(R::NAME, started.elapsed());
                Ok((count, self.settle(subscription, settled).await?))
            }
            Err(error) => {
                // Put it back at once rather than let the lease run out; what was committed of it is a duplicate then.
                // Nothing is to come to this subscription again, least of all what goes back.
                subscription.wind_down().await;
                if let Err(error) = subscription.release(&tags).await {
                    tracing::debug!(consumer = R::NAME, %error, "could not give messages back; their lease will");
                }
                Err(error)
            }
        }
    }

    /// Works off what is in hand, and holds it while the database is away: to give it back and take it anew would cost
    /// every message one of the deliveries that a broker counts.
    async fn hold(
        &self,
        mut hand: Hand<R::Fact>,
        subscription: &Subscription,
        mut stopping: Pin<&mut impl Future<Output = ()>>,
        patience: &mut Patience,
    ) -> Result<Vec<(Tag, Settle)>, TransportError> {
        while let Err(error) = self.work_off(&mut hand).await {
            self.kernel.db.metrics().db_busy.inc();
            if !self.wait_out(&error, stopping.as_mut(), patience).await {
                return Err(error.into());
            }
            // A broker that has taken it back gives it to somebody else.
            subscription.check()?;
            hand.put_down_settled();
        }
        Ok(hand.settled)
    }

    /// Waits before the next try at what the database did not take; `false` if it is time to stop instead.
    async fn wait_out(
        &self,
        error: &sqlx::Error,
        stopping: Pin<&mut impl Future<Output = ()>>,
        patience: &mut Patience,
    ) -> bool {
        let pause = patience.next_pause();
        tracing::warn!(consumer = R::NAME, %error, ?pause, "cannot work just now, and waits with what it holds");
        self.pulse.troubled(error.to_string(), self.kernel.db.clock().now());
        tokio::select! {
            biased;
            () = stopping => false,
            () = tokio::time::sleep(pause) => true,
        }
    }

    /// Everything is committed: rejects what is to be rejected and returns what is to be acknowledged.
    async fn settle(
        &self,
        subscription: &mut Subscription,
        settled: Vec<(Tag, Settle)>,
    ) -> Result<Vec<Tag>, TransportError> {
        let tags = |wanted: &[Settle]| -> Vec<Tag> {
            settled.iter().filter(|(_, settle)| wanted.contains(settle)).map(|(tag, _)| *tag).collect()
        };
        let rejected = tags(&[Settle::Reject]);
        if !rejected.is_empty() {
            self.kernel.faults.reach("consumer.before_reject", R::NAME);
            subscription.reject(&rejected).await?;
        }
        if settled.iter().any(|(_, settle)| *settle == Settle::AckRetry) {
            self.kernel.faults.reach("consumer.retry_written", R::NAME);
        }
        Ok(tags(&[Settle::Ack, Settle::AckRetry]))
    }
}
