//! The order desk: concurrent requests share commits.
//!
//! Whatever has arrived while the last group was being committed goes into the next transaction, so a lone
//! request is committed at once and a crowd pays for one commit together. Each is answered after the commit. If a
//! group fails as a whole it is halved until the culprit stands alone: one bad order never fails its neighbours.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::error::OrderError;
use super::service::{self, Placed, Submission};
use crate::db::{Db, Trouble, Tx};
use crate::messaging::faults::Faults;
use crate::messaging::health::{Health, Pulse};
use crate::numbers::Numbers;

/// What health calls it.
pub const NAME: &str = "desk";

/// Requests that may wait for the next group before callers feel back-pressure.
const WAITING_MAX: usize = 4096;
/// Orders in one transaction: past this, a larger group only makes its first members wait longer.
const GROUP_MAX: usize = 512;
/// How often a group is run again after losing to another transaction or meeting a taken number.
const RERUNS_MAX: u32 = 10;

type Answer = Result<Placed, OrderError>;

struct Waiting {
    submission: Submission,
    answer: oneshot::Sender<Answer>,
}

/// The counter, for whoever has an order to place.
#[derive(Clone)]
pub struct Desk {
    submissions: mpsc::Sender<Waiting>,
}

impl Desk {
    /// The counter and the clerk behind it, who must be run.
    pub fn open(db: Db, faults: Faults, health: &Health, numbers: Arc<Numbers>) -> (Self, Clerk) {
        let (submissions, waiting) = mpsc::channel(WAITING_MAX);
        let pulse = health.register_serving(NAME);
        (Self { submissions }, Clerk { db, faults, pulse, numbers, waiting })
    }

    /// Places an order; returns once it is committed.
    pub async fn place(&self, submission: Submission) -> Answer {
        let (answer, answered) = oneshot::channel();
        self.submissions.send(Waiting { submission, answer }).await.map_err(|_| OrderError::Draining)?;
        answered.await.map_err(|_| OrderError::Draining)?
    }
}

pub struct Clerk {
    db: Db,
    faults: Faults,
    pulse: Pulse,
    numbers: Arc<Numbers>,
    waiting: mpsc::Receiver<Waiting>,
}

impl Clerk {
    /// Commits groups until told to stop, then works off what is waiting.
    pub async fn run(mut self, stop: CancellationToken) {
        self.pulse.running(self.db.clock().now());
        let mut group = Vec::new();
        loop {
            tokio::select! {
                biased;
                count = self.waiting.recv_many(&mut group, GROUP_MAX) => {
                    if count == 0 {
                        // The counter is closed for good: HTTP has stopped before us.
                        return stop.cancelled().await;
                    }
                    self.commit(std::mem::take(&mut group)).await;
                }
                () = stop.cancelled() => {
                    self.waiting.close();
                    while self.waiting.recv_many(&mut group, GROUP_MAX).await > 0 {
                        self.commit(std::mem::take(&mut group)).await;
                    }
                    return;
                }
            }
        }
    }

    async fn commit(&mut self, mut group: Vec<Waiting>) {
        // The transaction first: whoever comes while we wait for it still gets into this group.
        let mut begun = Some(self.db.begin().await);
        while group.len() < GROUP_MAX
            && let Ok(waiting) = self.waiting.try_recv()
        {
            group.push(waiting);
        }
        let mut todo = vec![group];
        while let Some(mut group) = todo.pop() {
            let submissions: Vec<&Submission> = group.iter().map(|waiting| &waiting.submission).collect();
            let begun = match begun.take() {
                Some(begun) => begun,
                None => self.db.begin().await,
            };
            match self.place(begun, &submissions).await {
                Ok(placed) => {
                    self.pulse.running(self.db.clock().now());
                    answer_all(group, placed.into_iter().map(Ok));
                }
                Err(error) if Trouble::of(&error).is_passing() => {
                    // Nobody's fault in particular, and halving would only knock more often: all hear of it.
                    let (trouble, cause) = (Trouble::of(&error), error.to_string());
                    self.db.metrics().db_busy.inc();
                    self.pulse.troubled(cause.clone(), self.db.clock().now());
                    let answer = || Err(OrderError::GroupFailed { trouble, cause: cause.clone() });
                    answer_all(group, std::iter::repeat_with(answer));
                }
                Err(error) if group.len() == 1 => answer_all(group, [Err(error.into())]),
                Err(_) => {
                    let right = group.split_off(group.len() / 2);
                    todo.extend([right, group]);
                }
            }
        }
    }

    /// One transaction for all of them, run again while it merely loses to others or meets a taken number.
    async fn place(&self, begun: sqlx::Result<Tx>, submissions: &[&Submission]) -> sqlx::Result<Vec<Placed>> {
        let mut tx = begun;
        let mut reruns = 0;
        loop {
            match self.place_once(tx?, submissions).await {
                Err(error) if reruns < RERUNS_MAX && worth_a_rerun(&error) => {
                    self.db.metrics().db_serialization_retries.inc();
                    reruns += 1;
                }
                ended => return ended,
            }
            tx = self.db.begin().await;
        }
    }

    async fn place_once(&self, mut tx: Tx, submissions: &[&Submission]) -> sqlx::Result<Vec<Placed>> {
        let placed = service::place_many(&mut tx, submissions, &self.numbers).await?;
        self.faults.reach("orders.before_commit", "orders");
        tx.commit().await?;
        self.faults.reach("orders.after_commit", "orders");
        Ok(placed)
    }
}

/// Ids are fresh and keys are claimed without conflict, so the only key that can be taken is an order number.
fn worth_a_rerun(error: &sqlx::Error) -> bool {
    Trouble::of(error) == Trouble::Conflict
        || error.as_database_error().is_some_and(sqlx::error::DatabaseError::is_unique_violation)
}

fn answer_all(group: Vec<Waiting>, answers: impl IntoIterator<Item = Answer>) {
    for (waiting, answer) in group.into_iter().zip(answers) {
        // A caller that hung up has its order all the same.
        let _ = waiting.answer.send(answer);
    }
}
