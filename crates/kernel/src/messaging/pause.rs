//! Pausing: a row in the database, so that it holds for every instance and survives a restart.
//!
//! Each process re-reads the rows when the bell rings and once a second anyway; its loops watch the copy.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::watch;

use super::relay;
use crate::db::{Db, Tx};

pub const BELL: &str = "pauses";
/// Other instances follow within two of these even if every wake-up is lost.
const REREAD_EVERY: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub struct Pauses {
    db: Db,
    may_hand_on: bool,
    names: watch::Sender<BTreeSet<String>>,
}

/// One loop's view of whether it is to rest.
pub struct Gate {
    name: &'static str,
    names: watch::Receiver<BTreeSet<String>>,
}

impl Pauses {
    /// `may_hand_on`: the queues are tables of this database, so while the relay is not paused, transactions may
    /// put their events into them directly.
    pub async fn load(db: Db, may_hand_on: bool) -> sqlx::Result<Self> {
        let pauses = Self { db, may_hand_on, names: watch::Sender::default() };
        let names = read_names(&pauses.db).await?;
        pauses.db.set_hands_on(may_hand_on && !names.contains(relay::NAME));
        pauses.names.send_replace(names);
        Ok(pauses)
    }

    pub fn gate(&self, name: &'static str) -> Gate {
        Gate { name, names: self.names.subscribe() }
    }

    pub fn is_paused(&self, name: &str) -> bool {
        self.names.borrow().contains(name)
    }

    /// Who is to rest.
    pub fn names(&self) -> BTreeSet<String> {
        self.names.borrow().clone()
    }

    /// Follows the rows until cancelled. While the database is away, the last known rows stand.
    pub async fn follow(self) {
        let mut bell = self.db.wakes().bell(BELL);
        loop {
            tokio::select! {
                () = bell.rung() => {}
                () = tokio::time::sleep(REREAD_EVERY) => {}
            }
            self.reread().await;
        }
    }

    /// Looks at the rows now.
    pub async fn reread(&self) {
        if let Ok(names) = read_names(&self.db).await {
            self.db.set_hands_on(self.may_hand_on && !names.contains(relay::NAME));
            self.names.send_if_modified(|known| {
                let news = *known != names;
                *known = names;
                news
            });
        }
    }
}

impl Gate {
    pub fn is_paused(&self) -> bool {
        self.names.borrow().contains(self.name)
    }

    /// Waits until this loop is (or is no longer) to rest.
    pub async fn until(&mut self, paused: bool) {
        let name = self.name;
        if self.names.wait_for(|names| names.contains(name) == paused).await.is_err() {
            std::future::pending::<()>().await; // nobody is left to change it: shutting down
        }
    }
}

pub async fn set(tx: &mut Tx, name: &str, paused: bool) -> sqlx::Result<()> {
    let now = tx.now();
    crate::on!(tx, c => {
        if paused {
            sqlx::query("INSERT INTO messaging_pauses (name, paused_at) VALUES ($1, $2) ON CONFLICT DO NOTHING")
                .bind(name)
                .bind(now)
                .execute(c)
                .await
                .map(drop)
        } else {
            sqlx::query("DELETE FROM messaging_pauses WHERE name = $1").bind(name).execute(c).await.map(drop)
        }
    })?;
    tx.ring_on_commit(BELL);
    Ok(())
}

async fn read_names(db: &Db) -> sqlx::Result<BTreeSet<String>> {
    let mut tx = db.read().await?;
    let names: Vec<String> =
        crate::on!(tx, c => sqlx::query_scalar("SELECT name FROM messaging_pauses").fetch_all(c).await)?;
    Ok(names.into_iter().collect())
}
