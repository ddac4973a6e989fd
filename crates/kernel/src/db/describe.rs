//! What a database says about itself, for `stockade doctor`.

use super::sqlite::query_scalar;
use super::{Conn, Db};
use crate::clock::Timestamp;

pub struct About {
    pub version: String,
    /// Name, value in force, and the value it should have if that matters.
    pub settings: Vec<(&'static str, String, Option<&'static str>)>,
    pub migrations_missing: usize,
    /// How far the database's clock is ahead of this machine's.
    pub clock_skew_ms: i64,
}

impl Db {
    pub async fn describe(&self) -> sqlx::Result<About> {
        let mut tx = self.read().await?;
        let asked_at = self.inner.clock.now();
        let (version, settings, its_time) = match tx.conn() {
            Conn::Postgres(c) => {
                const WANTED: [(&str, Option<&str>); 4] = [
                    ("fsync", Some("on")),
                    ("full_page_writes", Some("on")),
                    ("synchronous_commit", None),
                    ("max_connections", None),
                ];
                let names: Vec<&str> = WANTED.iter().map(|(name, _)| *name).collect();
                let found: Vec<(String, String)> =
                    sqlx::query_as("SELECT name, setting FROM pg_settings WHERE name = ANY($1)")
                        .bind(names)
                        .fetch_all(&mut **c)
                        .await?;
                let value = |name: &str| found.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
                let settings = WANTED.iter().map(|(name, wanted)| (*name, value(name).unwrap_or_default(), *wanted));
                let (version, its_time): (String, Timestamp) =
                    sqlx::query_as("SELECT current_setting('server_version'), clock_timestamp()")
                        .fetch_one(&mut **c)
                        .await?;
                (version, settings.collect(), its_time)
            }
            Conn::Sqlite(c) => {
                let version: String = query_scalar("SELECT sqlite_version()").fetch_one(c).await?;
                let journal: String = query_scalar("PRAGMA journal_mode").fetch_one(c).await?;
                let pages: i64 = query_scalar("PRAGMA page_count").fetch_one(c).await?;
                let size: i64 = query_scalar("PRAGMA page_size").fetch_one(c).await?;
                let settings = vec![
                    ("journal_mode", journal, Some("wal")),
                    // No property of the file: each transaction of a server says it anew.
                    ("synchronous", "full, by a thread of the server; not waited for by bookkeeping".to_owned(), None),
                    ("size", format!("{pages} pages of {size} bytes"), None),
                ];
                // The file's clock is this machine's.
                (version, settings, asked_at)
            }
        };
        let mut migrations_missing = 0;
        for schema in &self.inner.schemas {
            migrations_missing += schema.count_missing(&mut tx).await?;
        }
        Ok(About { version, settings, migrations_missing, clock_skew_ms: its_time.millis() - asked_at.millis() })
    }
}
