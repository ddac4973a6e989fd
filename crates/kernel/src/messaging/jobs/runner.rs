//! The loop that takes jobs forward, a batch at a time.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::replay::{self, Unreadable};
use super::{BELL, Due, Kind, advance, end, lock_due, next_due_ms, pause_after, peek_due, redrive};
use crate::db::Trouble;
use crate::messaging::health::{LoopState, Pulse};
use crate::messaging::transport::Topology;
use crate::messaging::{Kernel, Patience};

pub const NAME: &str = "jobs";

/// How often it looks for jobs even if nothing wakes it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long it leaves a job to the instance that is at it.
const GIVE_WAY: Duration = Duration::from_millis(50);

pub struct Runner {
    kernel: Kernel,
    topology: Arc<Topology>,
    pulse: Pulse,
}

impl Runner {
    pub fn new(kernel: Kernel, topology: Arc<Topology>) -> Self {
        let pulse = kernel.health.register(NAME);
        Self { kernel, topology, pulse }
    }

    /// Works until told to stop; the batch in hand is finished first.
    pub async fn run(self, stop: CancellationToken) {
        let mut bell = self.kernel.db.wakes().bell(BELL);
        let mut patience = Patience::default();
        while !stop.is_cancelled() {
            bell.hush();
            let pause = match self.try_once().await {
                Ok(pause) => {
                    patience.renew();
                    self.pulse.running(self.kernel.db.clock().now());
                    pause
                }
                Err(error) => {
                    let pause = patience.next_pause();
                    tracing::warn!(%error, ?pause, "redrives and replays cannot go on just now");
                    self.pulse.troubled(error.to_string(), self.kernel.db.clock().now());
                    tokio::select! { () = stop.cancelled() => {} () = tokio::time::sleep(pause) => {} }
                    continue;
                }
            };
            tokio::select! {
                () = stop.cancelled() => {}
                () = bell.rung() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        self.pulse.set(LoopState::Stopped);
    }

    /// One batch of the job that is due, if one is; says how long there is nothing to do afterwards.
    pub async fn try_once(&self) -> sqlx::Result<Duration> {
        let mut reading = self.kernel.db.read().await?;
        let now = reading.now();
        let Some(due) = peek_due(&mut reading, now).await? else {
            let wait = next_due_ms(&mut reading, now).await?.and_then(|wait| u64::try_from(wait.max(0)).ok());
            return Ok(wait.map_or(LOOK_EVERY, Duration::from_millis).min(LOOK_EVERY));
        };
        // What a replay sends is looked for beside the writer: that may take a while, and holds nobody up here.
        let batch = match due.kind == Kind::Replay.as_str() {
            true => Some(replay::read(&mut reading, &due, &self.topology).await),
            false => None,
        };
        drop(reading);
        let batch = match batch.transpose() {
            Ok(batch) => batch,
            Err(Unreadable::Database(error)) if Trouble::of(&error).is_passing() => return Err(error),
            Err(error) => return self.give_up(&due, error.to_string()).await,
        };
        match self.take_step(&due, batch).await {
            Err(error) if !Trouble::of(&error).is_passing() => self.give_up(&due, error.to_string()).await,
            stepped => stepped,
        }
    }

    async fn take_step(&self, due: &Due, batch: Option<replay::Batch>) -> sqlx::Result<Duration> {
        let mut tx = self.kernel.db.begin().await?;
        let now = tx.now();
        // Another instance may be at it, or have been since we looked.
        match lock_due(&mut tx, due.id, now).await? {
            Some(reached) if reached == due.reached => {}
            _ => return Ok(GIVE_WAY),
        }
        let step = match &batch {
            Some(batch) => replay::step(&mut tx, batch).await?,
            None => redrive::step(&mut tx, due).await?,
        };
        let pause = pause_after(step.progress.sent, due.rate);
        advance(&mut tx, due.id, &step, pause, now).await?;
        tx.commit().await?;
        if step.finished {
            tracing::info!(job.id = %due.id, "the {} {} is done", due.kind, due.id);
        }
        Ok(Duration::ZERO)
    }

    /// A job that cannot be done stops with the reason, rather than fail for ever.
    async fn give_up(&self, due: &Due, error: String) -> sqlx::Result<Duration> {
        let mut tx = self.kernel.db.begin().await?;
        end(&mut tx, due.id, "failed", Some(error.clone())).await?;
        tx.commit().await?;
        tracing::error!(job.id = %due.id, %error, "the {} {} has failed", due.kind, due.id);
        Ok(Duration::ZERO)
    }
}
