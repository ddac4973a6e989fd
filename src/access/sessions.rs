//! Sessions: what a browser holds instead of a key. A session is random, ends by itself, and is good only as long as
//! the key that began it. It is a row, so that every instance knows it and a logout holds for all.

use super::{Hash, Secret};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::Tx;

/// A session that has not ended.
#[derive(Debug, Clone)]
pub struct Session {
    /// The key that began it.
    pub key: Hash,
    /// For a key of every group: the one it acts in.
    pub group_id: Option<String>,
    pub expires_at: Timestamp,
}

/// Begins a session. Only its hash is kept.
pub async fn begin(tx: &mut Tx, session: &Session) -> sqlx::Result<Secret> {
    let secret = Secret::random();
    stockade_kernel::on!(tx, c => {
        sqlx::query("INSERT INTO access_sessions (hash, key_hash, group_id, expires_at) VALUES ($1, $2, $3, $4)")
            .bind(secret.hash().0.to_vec())
            .bind(session.key.0.to_vec())
            .bind(&session.group_id)
            .bind(session.expires_at)
            .execute(c)
            .await
            .map(drop)
    })?;
    Ok(secret)
}

pub async fn find(tx: &mut Tx, hash: &Hash) -> sqlx::Result<Option<Session>> {
    let now = tx.now();
    let row: Option<(Vec<u8>, Option<String>, Timestamp)> = stockade_kernel::on!(tx, c => {
        sqlx::query_as("SELECT key_hash, group_id, expires_at FROM access_sessions WHERE hash = $1 AND expires_at > $2")
            .bind(hash.0.to_vec())
            .bind(now)
            .fetch_optional(c)
            .await
    })?;
    let session = |(key, group_id, expires_at): (Vec<u8>, _, _)| {
        Some(Session { key: Hash::from_slice(&key)?, group_id, expires_at })
    };
    Ok(row.and_then(session))
}

pub async fn end(tx: &mut Tx, hash: &Hash) -> sqlx::Result<()> {
    stockade_kernel::on!(tx, c => {
        sqlx::query("DELETE FROM access_sessions WHERE hash = $1").bind(hash.0.to_vec()).execute(c).await.map(drop)
    })
}

/// Removes up to `limit` sessions that ended before then; returns how many.
pub async fn forget(tx: &mut Tx, before: Timestamp, limit: i64) -> sqlx::Result<u64> {
    stockade_kernel::on!(tx, c => {
        sqlx::query(
            "DELETE FROM access_sessions
             WHERE hash IN (SELECT hash FROM access_sessions WHERE expires_at < $1 ORDER BY expires_at LIMIT $2)",
        )
        .bind(before)
        .bind(limit)
        .execute(c)
        .await
        .map(|done| done.rows_affected())
    })
}
