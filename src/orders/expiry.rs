//! The end of holds: a reserved order that is not paid in time expires.
//!
//! A sweep on its own timer, in batches, over a partial index of reserved orders. Each batch is one compare-and-set
//! with its events in one commit, so payment, cancellation and expiry of an order cannot win over one another, and
//! any number of instances may sweep: they pass by what another has locked. A hold ends when the sweep ends it, never
//! before its time and about a second after it; until then the order can still be paid.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{service, store};
use stockade_kernel::db::Db;
use stockade_kernel::messaging::Patience;
use stockade_kernel::messaging::health::{Health, LoopState, Pulse};

/// What health calls it.
pub const NAME: &str = "expiry";

const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// Orders in one transaction.
const BATCH: i64 = 512;

pub struct Expiry {
    db: Db,
    pulse: Pulse,
}

impl Expiry {
    pub fn new(db: Db, health: &Health) -> Self {
        Self { db, pulse: health.register(NAME) }
    }

    /// Sweeps until told to stop.
    pub async fn run(self, stop: CancellationToken) {
        let mut patience = Patience::default();
        while !stop.is_cancelled() {
            let pause = match self.try_once().await {
                Ok(expired) => {
                    patience.renew();
                    self.pulse.running(self.db.clock().now());
                    if expired == BATCH as usize { Duration::ZERO } else { SWEEP_EVERY }
                }
                Err(error) => {
                    let pause = patience.next_pause();
                    tracing::warn!(%error, ?pause, "holds cannot be ended just now");
                    self.pulse.troubled(error.to_string(), self.db.clock().now());
                    pause
                }
            };
            tokio::select! { () = stop.cancelled() => {} () = tokio::time::sleep(pause) => {} }
        }
        self.pulse.set(LoopState::Stopped);
    }

    /// Ends one batch of holds; returns how many.
    pub async fn try_once(&self) -> sqlx::Result<usize> {
        // A look first, in nobody's way: most of the time there is nothing to do.
        let mut tx = self.db.read().await?;
        let now = tx.now();
        if !store::any_hold_over(&mut tx, now).await? {
            return Ok(0);
        }
        drop(tx);
        let mut tx = self.db.begin().await?;
        let expired = service::expire_many(&mut tx, BATCH).await?;
        tx.commit().await?;
        Ok(expired)
    }
}
