//! The brim: how much the outbox may hold. While a broker is away the outbox takes what would have gone out; past the
//! brim no more orders are taken, so that the disk is not the first to say no.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::db::Db;

/// How often it is looked, and how many times as long as a look takes it must have rested.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const RESTS: u32 = 20;

#[derive(Clone)]
pub struct Brim {
    /// Rows to go out that there may be; no limit if it is 0.
    pending_max: u32,
    is_full: Arc<AtomicBool>,
}

impl Brim {
    pub fn at(pending_max: u32) -> Self {
        Self { pending_max, is_full: Arc::default() }
    }

    /// Did the outbox hold more than it may when it was last looked at?
    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    /// Looks at the outbox until cancelled.
    pub async fn watch(self, db: Db) {
        if self.pending_max == 0 {
            return std::future::pending().await;
        }
        loop {
            let started = Instant::now();
            match self.look(&db).await {
                Ok(full) => {
                    if self.is_full.swap(full, Ordering::Relaxed) != full {
                        let max = self.pending_max;
                        if full {
                            tracing::warn!(
                                "OUTBOX FULL: over {max} rows wait to go out; no orders are taken until they do"
                            );
                        } else {
                            tracing::info!("the outbox has room again: fewer than {max} rows wait to go out");
                        }
                    }
                }
                Err(error) => tracing::debug!(%error, "the outbox cannot be looked at just now"),
            }
            tokio::time::sleep(LOOK_EVERY.max(started.elapsed() * RESTS)).await;
        }
    }

    /// Counts no further than the brim.
    async fn look(&self, db: &Db) -> sqlx::Result<bool> {
        let mut tx = db.read().await?;
        let beyond: Option<i32> = crate::on!(tx, c => {
            sqlx::query_scalar("SELECT 1 FROM messaging_outbox WHERE status IN ('pending', 'failed') LIMIT 1 OFFSET $1")
                .bind(i64::from(self.pending_max))
                .fetch_optional(c)
                .await
        })?;
        Ok(beyond.is_some())
    }
}
