//! Watches the notices appear, as a reader of the database beside the server.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use indicatif::ProgressBar;
use stockade_kernel::db::{Conn, Db, Tx, sqlite};
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

use super::load::{Fate, Placed, Target, Workload};

/// How often to look: finely when latency is what is measured, rarely when looking would cost throughput.
const LOOK_FINELY: Duration = Duration::from_millis(1);
const LOOK_RARELY: Duration = Duration::from_millis(25);
/// Notices are minted in the order of their ids but committed by several instances, if it is not our own server alone:
/// so each look goes back a bit.
const OVERLAP_OF_ONE: usize = 20;
const OVERLAP_OF_SEVERAL: usize = 500;
/// How long without any new notice before the run is called stuck.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Watcher {
    db: Db,
    /// On Postgres, the transaction of every look: each statement sees what is committed by then, in one trip.
    looking: Option<Tx>,
    group: String,
    last: Uuid,
    every: Duration,
    overlap: usize,
    seen: Notices,
}

/// When the notices of orders were first seen.
#[derive(Default)]
pub struct Notices {
    /// Any notice.
    pub first: HashMap<Uuid, Instant>,
    /// The notice of what became of the order in the end, which a reservation is only outside the mix.
    pub last: HashMap<Uuid, Instant>,
}

impl Notices {
    fn settle(&self, order: &Placed) -> bool {
        match order.fate {
            Fate::Reserved => self.first.contains_key(&order.id),
            _ => self.last.contains_key(&order.id),
        }
    }
}

/// Runs the load and the watch side by side: all that was placed, and when each order's notices were seen.
pub async fn run(
    workload: &Arc<Workload>,
    target: &Arc<Target>,
    mut watcher: Watcher,
    bar: &ProgressBar,
) -> anyhow::Result<(Vec<Placed>, Notices)> {
    let start = Instant::now();
    let clients = (0..workload.concurrency).map(|_| workload.clone().work(target.clone(), start));
    let mut clients: JoinSet<anyhow::Result<Vec<Placed>>> = clients.collect();
    let placing = async {
        let mut placed = Vec::new();
        while let Some(share) = clients.join_next().await {
            placed.extend(share??);
        }
        anyhow::Ok(placed)
    };
    tokio::pin!(placing);
    let mut placed: Option<Vec<Placed>> = None;
    let mut last_news = Instant::now();
    loop {
        if let Some(placed) = placed.take_if(|placed| placed.iter().all(|order| watcher.seen.settle(order))) {
            return Ok((placed, watcher.seen));
        }
        tokio::select! {
            done = &mut placing, if placed.is_none() => {
                placed = Some(done?);
            }
            () = tokio::time::sleep(watcher.every) => {}
        }
        if watcher.look().await? > 0 {
            last_news = Instant::now();
            bar.set_position(watcher.seen.first.len() as u64);
        }
        anyhow::ensure!(last_news.elapsed() < PATIENCE, "no notice for {PATIENCE:?}: the pipeline is stuck");
    }
}

impl Watcher {
    /// Watches for notices of a group minted after `run` was.
    pub fn new(db: Db, group: &str, run: Uuid, finely: bool, own_server: bool) -> Self {
        let every = if finely { LOOK_FINELY } else { LOOK_RARELY };
        let overlap = if own_server { OVERLAP_OF_ONE } else { OVERLAP_OF_SEVERAL };
        Self { db, looking: None, group: group.to_owned(), last: run, every, overlap, seen: Notices::default() }
    }

    /// Notes the notices that have appeared; returns how many.
    async fn look(&mut self) -> anyhow::Result<usize> {
        let mut tx = match self.looking.take() {
            Some(tx) => tx,
            None if self.db.is_a_trip_away() => self.db.begin().await?,
            None => self.db.read().await?,
        };
        let rows: Vec<(Uuid, Uuid, String)> = match tx.conn() {
            Conn::Postgres(c) => {
                // All in one row, which costs the server the least.
                let (ids, orders, kinds): (Vec<Uuid>, Vec<Uuid>, Vec<String>) = sqlx::query_as(
                    "SELECT COALESCE(array_agg(id), '{}'), COALESCE(array_agg(order_id), '{}'), COALESCE(array_agg(kind), '{}')
                     FROM (SELECT id, order_id, kind FROM notifications_notices
                         WHERE group_id = $1 AND id > $2 ORDER BY id) n",
                )
                .bind(&self.group)
                .bind(self.last)
                .fetch_one(&mut **c)
                .await?;
                ids.into_iter().zip(orders).zip(kinds).map(|((id, order), kind)| (id, order, kind)).collect()
            }
            Conn::Sqlite(c) => {
                sqlite::query_as(
                    "SELECT id, order_id, kind FROM notifications_notices WHERE group_id = $1 AND id > $2 ORDER BY id",
                )
                .bind(&self.group)
                .bind(self.last)
                .fetch_all(c)
                .await?
            }
        };
        let now = Instant::now();
        self.looking = self.db.is_a_trip_away().then_some(tx);
        let known = self.seen.first.len() + self.seen.last.len();
        for (_, order_id, kind) in &rows {
            self.seen.first.entry(*order_id).or_insert(now);
            if kind != "reserved" {
                self.seen.last.entry(*order_id).or_insert(now);
            }
        }
        if rows.len() > self.overlap {
            self.last = rows[rows.len() - self.overlap].0;
        }
        Ok(self.seen.first.len() + self.seen.last.len() - known)
    }
}
