//! The processes that share this database: each says that it is there and how its loops are doing, so that any one of
//! them can tell the health of all.

use std::collections::BTreeMap;
use std::time::Duration;

use uuid::Uuid;

use super::Kernel;
use super::health::LoopStatus;
use crate::clock::{Timestamp, millis};
use crate::db::Tx;

/// How often a process says that it is there, and after how long without a word it counts as gone.
const BEAT_EVERY: Duration = Duration::from_secs(5);
const GONE_AFTER: Duration = Duration::from_secs(15);
/// After how long it is forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(24 * 3600);

/// A process, as it last said itself.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
pub struct Instance {
    pub id: Uuid,
    #[schema(example = "127.0.0.1:8080")]
    pub address: String,
    #[schema(example = "0.1.0")]
    pub version: String,
    pub started_at: Timestamp,
    /// When it last said so; one that has not for a while is gone.
    pub seen_at: Timestamp,
    /// Its relay, its consumers and its dead-letter office, those that it runs.
    pub loops: BTreeMap<String, LoopStatus>,
}

/// Says that this process is there until cancelled, then that it is not.
pub async fn beat(kernel: Kernel, id: Uuid, address: String, stop: impl Future<Output = ()>) {
    let started_at = kernel.db.clock().now();
    tokio::pin!(stop);
    loop {
        if let Err(error) = say(&kernel, id, &address, started_at).await {
            tracing::debug!(%error, "could not tell the others that we are here");
        }
        tokio::select! {
            () = &mut stop => break,
            () = tokio::time::sleep(BEAT_EVERY) => {}
        }
    }
    if let Err(error) = leave(&kernel, id).await {
        tracing::debug!(%error, "left without a goodbye; the others will see");
    }
}

async fn say(kernel: &Kernel, id: Uuid, address: &str, started_at: Timestamp) -> sqlx::Result<()> {
    let loops = serde_json::to_string(&kernel.health.statuses()).expect("statuses are plain data");
    let mut tx = kernel.db.begin_relaxed().await?;
    let now = tx.now();
    let forgotten = Timestamp::from_millis(now.millis() - millis(FORGOTTEN_AFTER));
    crate::on!(tx, c => {
        sqlx::query("DELETE FROM messaging_instances WHERE seen_at < $1").bind(forgotten).execute(c).await.map(drop)
    })?;
    crate::on!(tx, c => {
        sqlx::query(
            "INSERT INTO messaging_instances (id, address, version, started_at, seen_at, loops)
             VALUES ($1, $2, $3, $4, $5, $6)
             ON CONFLICT (id) DO UPDATE SET seen_at = $5, loops = $6",
        )
        .bind(id)
        .bind(address)
        .bind(env!("CARGO_PKG_VERSION"))
        .bind(started_at)
        .bind(now)
        .bind(loops)
        .execute(c)
        .await
        .map(drop)
    })?;
    tx.commit().await
}

async fn leave(kernel: &Kernel, id: Uuid) -> sqlx::Result<()> {
    let mut tx = kernel.db.begin_relaxed().await?;
    crate::on!(tx, c => {
        sqlx::query("DELETE FROM messaging_instances WHERE id = $1").bind(id).execute(c).await.map(drop)
    })?;
    tx.commit().await
}

/// The processes that are there, the oldest first.
pub async fn list(tx: &mut Tx) -> sqlx::Result<Vec<Instance>> {
    let since = Timestamp::from_millis(tx.now().millis() - millis(GONE_AFTER));
    let rows: Vec<(Uuid, String, String, Timestamp, Timestamp, String)> = crate::on!(tx, c => {
        sqlx::query_as(
            "SELECT id, address, version, started_at, seen_at, loops FROM messaging_instances
             WHERE seen_at >= $1 ORDER BY started_at, id",
        )
        .bind(since)
        .fetch_all(c)
        .await
    })?;
    let instance = |(id, address, version, started_at, seen_at, loops): (_, _, _, _, _, String)| {
        // A newer version may say more than we understand; that it is there we do.
        let loops = serde_json::from_str(&loops).unwrap_or_default();
        Instance { id, address, version, started_at, seen_at, loops }
    };
    Ok(rows.into_iter().map(instance).collect())
}
