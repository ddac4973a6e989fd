//! Wake-ups: a commit rings a bell for whoever waits on what it wrote.
//!
//! A bell carries no data. Whoever hears it looks at the table again, so a bell that is lost costs one poll
//! interval and nothing else. Within the process a bell is a version counter that a listener has or has not yet
//! seen: one rung between "look" and "sleep" is not missed. On Postgres each ring is also announced to the other
//! instances by NOTIFY, gathered so that a busy instance sends forty a second at most and never one per row.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::PgPool;
use sqlx::postgres::PgListener;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use uuid::Uuid;

use crate::clock::mint_id;

/// The Postgres channel; LISTEN/NOTIFY is already scoped to one database.
const CHANNEL: &str = "stockade_wakes";
/// How long rings are gathered before one NOTIFY tells the others.
const GATHER_FOR: Duration = Duration::from_millis(5);
/// How far apart a busy instance's announcements are: each is a transaction, and wakes every other instance.
const ANNOUNCE_EVERY: Duration = Duration::from_millis(25);
const RECONNECT_AFTER: Duration = Duration::from_secs(1);

#[derive(Clone, Default)]
pub struct Wakes {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    bells: Mutex<HashMap<String, watch::Sender<u64>>>,
    /// Rung here, not yet told to other instances.
    unannounced: Mutex<BTreeSet<String>>,
    announce: Notify,
}

/// Hears every ring of one bell from the moment it was made.
pub struct Bell(watch::Receiver<u64>);

impl Bell {
    /// Returns at the first ring not heard yet.
    pub async fn rung(&mut self) {
        // The sender lives in the registry for as long as the process; a closed channel means shutdown.
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Has it rung since it was last heard or hushed?
    pub fn is_rung(&self) -> bool {
        self.0.has_changed().unwrap_or(false)
    }

    /// Takes every ring so far as heard: call it before looking at the table.
    pub fn hush(&mut self) {
        self.0.mark_unchanged();
    }
}

impl Wakes {
    pub fn bell(&self, topic: &str) -> Bell {
        Bell(self.sender(topic).subscribe())
    }

    /// Rings here and, on Postgres, in the other instances.
    pub fn ring(&self, topic: &str) {
        self.ring_here(topic);
        self.inner.unannounced.lock().unwrap_or_else(PoisonError::into_inner).insert(topic.to_owned());
        self.inner.announce.notify_one();
    }

    fn ring_here(&self, topic: &str) {
        self.sender(topic).send_modify(|version| *version += 1);
    }

    fn sender(&self, topic: &str) -> watch::Sender<u64> {
        let mut bells = self.inner.bells.lock().unwrap_or_else(PoisonError::into_inner);
        match bells.get(topic) {
            Some(bell) => bell.clone(),
            None => bells.entry(topic.to_owned()).or_insert_with(|| watch::Sender::new(0)).clone(),
        }
    }

    /// Carries bells between instances over Postgres until cancelled. While the link is down, polling carries on.
    pub async fn exchange(&self, pool: &PgPool) {
        let me = mint_id();
        loop {
            let ended = tokio::select! {
                ended = self.announce(pool, me) => ended,
                ended = self.listen(pool, me) => ended,
            };
            if let Err(error) = ended {
                tracing::warn!(%error, "wake-ups between instances are down; polling until they are back");
            }
            tokio::time::sleep(RECONNECT_AFTER).await;
        }
    }

    async fn announce(&self, pool: &PgPool, me: Uuid) -> sqlx::Result<()> {
        let mut next_at = Instant::now();
        // What was gathered when the link broke is still to be told.
        self.inner.announce.notify_one();
        loop {
            self.inner.announce.notified().await;
            tokio::time::sleep_until((Instant::now() + GATHER_FOR).max(next_at)).await;
            next_at = Instant::now() + ANNOUNCE_EVERY;
            let topics = std::mem::take(&mut *self.inner.unannounced.lock().unwrap_or_else(PoisonError::into_inner));
            let topics: Vec<String> = topics.into_iter().collect();
            if !topics.is_empty() {
                // Told as soon as it is committed: there is nothing in it that a disk would have to keep.
                sqlx::query(
                    "SELECT pg_notify($1, $2 || ' ' || topic), set_config('synchronous_commit', 'off', true)
                     FROM UNNEST($3::text[]) AS topic",
                )
                .bind(CHANNEL)
                .bind(me.to_string())
                .bind(topics)
                .execute(pool)
                .await?;
            }
        }
    }

    async fn listen(&self, pool: &PgPool, me: Uuid) -> sqlx::Result<()> {
        let mut listener = PgListener::connect_with(pool).await?;
        listener.listen(CHANNEL).await?;
        let me = me.to_string();
        loop {
            // `None` is a lost connection, renewed by the next call: what was rung meanwhile is found by polling.
            if let Some(notification) = listener.try_recv().await?
                && let Some((sender, topic)) = notification.payload().split_once(' ')
                && sender != me
            {
                self.ring_here(topic);
            }
        }
    }
}
