//! The order desk: concurrent requests, to place an order or to take one a step on, share commits.
//!
//! Whatever has arrived while the last group was being committed goes into the next transaction, so a lone
//! request is committed at once and a crowd pays for one commit together. Each is answered after the commit. If a
//! group fails as a whole it is halved until the culprit stands alone: one bad order never fails its neighbours.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::error::OrderError;
use super::service::{self, Draft, Placed, StepRequest, Stepped, Submission};
use crate::numbers::Numbers;
use stockade_kernel::db::{Db, Trouble, Tx};
use stockade_kernel::messaging::faults::Faults;
use stockade_kernel::messaging::health::{Health, Pulse};

/// What health calls it.
pub const NAME: &str = "desk";

/// Requests that may wait for the next group before callers feel back-pressure.
const WAITING_MAX: usize = 4096;
/// Orders in one transaction: past this, a larger group only makes its first members wait longer.
const GROUP_MAX: usize = 512;
/// How often an idle desk says that it is there.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// How often a group is run again after losing to another transaction or meeting a taken number.
const RERUNS_MAX: u32 = 10;

/// What somebody came for, and where the answer goes.
enum Waiting {
    ToPlace {
        submission: Box<Submission>,
        /// For the first attempt; another would need another number.
        draft: Option<Box<Draft>>,
        answer: oneshot::Sender<Result<Placed, OrderError>>,
    },
    ToStep {
        request: StepRequest,
        answer: oneshot::Sender<Result<Stepped, OrderError>>,
    },
}

/// The counter, for whoever has an order to place.
#[derive(Clone)]
pub struct Desk {
    counter: mpsc::Sender<Waiting>,
    db: Db,
    numbers: Arc<Numbers>,
}

impl Desk {
    /// The counter and the clerk behind it, who must be run.
    pub fn open(db: Db, faults: Faults, health: &Health, numbers: Arc<Numbers>) -> (Self, Clerk) {
        let (counter, waiting) = mpsc::channel(WAITING_MAX);
        let pulse = health.register_serving(NAME);
        let desk = Self { counter, db: db.clone(), numbers: numbers.clone() };
        (desk, Clerk { db: db.on_a_lane(), faults, pulse, numbers, waiting })
    }

    /// Places an order; returns once it is committed.
    pub async fn place(&self, submission: Box<Submission>) -> Result<Placed, OrderError> {
        let (answer, answered) = oneshot::channel();
        let draft = Some(Box::new(submission.draft(&self.numbers, self.db.clock().now())));
        self.counter.send(Waiting::ToPlace { submission, draft, answer }).await.map_err(|_| OrderError::Draining)?;
        answered.await.map_err(|_| OrderError::Draining)?
    }

    /// Takes an order a step on; returns once that is committed, or refused.
    pub async fn step(&self, request: StepRequest) -> Result<Stepped, OrderError> {
        let (answer, answered) = oneshot::channel();
        self.counter.send(Waiting::ToStep { request, answer }).await.map_err(|_| OrderError::Draining)?;
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
                () = tokio::time::sleep(BEAT_EVERY) => self.pulse.idle(self.db.clock().now()),
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
        let mut begun = Some(self.db.begin_ahead().await);
        while group.len() < GROUP_MAX
            && let Ok(waiting) = self.waiting.try_recv()
        {
            group.push(waiting);
        }
        let mut todo = vec![group];
        while let Some(mut group) = todo.pop() {
            let begun = match begun.take() {
                Some(begun) => begun,
                None => self.db.begin_ahead().await,
            };
            match self.handle(begun, &mut group).await {
                Ok(answers) => {
                    self.pulse.running(self.db.clock().now());
                    answers.give(group);
                }
                Err(error) if group.len() > 1 && !Trouble::of(&error).is_passing() => {
                    let right = group.split_off(group.len() / 2);
                    todo.extend([right, group]);
                }
                Err(error) => {
                    // A database in trouble is nobody's fault in particular, and halving would only knock more often.
                    let (trouble, cause) = (Trouble::of(&error), error.to_string());
                    if trouble.is_passing() {
                        self.db.metrics().db_busy.inc();
                        self.pulse.troubled(cause.clone(), self.db.clock().now());
                    }
                    for waiting in group {
                        waiting.fail(OrderError::GroupFailed { trouble, cause: cause.clone() });
                    }
                }
            }
        }
    }

    /// One transaction for all of them, run again while it merely loses to others or meets a taken number.
    async fn handle(&self, begun: sqlx::Result<Tx>, group: &mut [Waiting]) -> sqlx::Result<Answers> {
        let mut tx = begun;
        let mut reruns = 0;
        loop {
            match self.handle_once(tx?, group).await {
                Err(error) if reruns < RERUNS_MAX && worth_a_rerun(&error) => {
                    self.db.metrics().db_serialization_retries.inc();
                    reruns += 1;
                }
                ended => return ended,
            }
            tx = self.db.begin_ahead().await;
        }
    }

    async fn handle_once(&self, mut tx: Tx, group: &mut [Waiting]) -> sqlx::Result<Answers> {
        let (mut submitted, mut requests) = (Vec::new(), Vec::new());
        for waiting in group {
            match waiting {
                Waiting::ToPlace { submission, draft, .. } => {
                    let first = draft.take().map(|draft| *draft);
                    let draft = first.unwrap_or_else(|| submission.draft(&self.numbers, tx.now()));
                    submitted.push((&**submission, draft));
                }
                Waiting::ToStep { request, .. } => requests.push(&*request),
            }
        }
        let mut answers = Answers::default();
        if !submitted.is_empty() {
            answers.placed = service::place_many(&mut tx, submitted).await?;
        }
        if !requests.is_empty() {
            answers.stepped = service::step_many(&mut tx, &requests).await?;
        }
        self.faults.reach("orders.before_commit", "orders");
        tx.commit().await?;
        self.faults.reach("orders.after_commit", "orders");
        Ok(answers)
    }
}

/// What a committed group is answered with, each kind in the order it came.
#[derive(Default)]
struct Answers {
    placed: Vec<Placed>,
    stepped: Vec<Stepped>,
}

impl Answers {
    fn give(self, group: Vec<Waiting>) {
        let (mut placed, mut stepped) = (self.placed.into_iter(), self.stepped.into_iter());
        for waiting in group {
            match waiting {
                Waiting::ToPlace { answer, .. } => tell(answer, placed.next()),
                Waiting::ToStep { answer, .. } => tell(answer, stepped.next()),
            }
        }
    }
}

fn tell<T>(answer: oneshot::Sender<Result<T, OrderError>>, outcome: Option<T>) {
    let outcome = outcome.expect("one answer for each of the group");
    // A caller that hung up has its order all the same.
    let _ = answer.send(Ok(outcome));
}

impl Waiting {
    fn fail(self, error: OrderError) {
        match self {
            Self::ToPlace { answer, .. } => drop(answer.send(Err(error))),
            Self::ToStep { answer, .. } => drop(answer.send(Err(error))),
        }
    }
}

/// Ids are fresh and keys are claimed without conflict, so the only key that can be taken is an order number, or an
/// idempotency key that another instance was just using: the rerun mints anew and reads again.
fn worth_a_rerun(error: &sqlx::Error) -> bool {
    Trouble::of(error) == Trouble::Conflict
        || error.as_database_error().is_some_and(sqlx::error::DatabaseError::is_unique_violation)
}
