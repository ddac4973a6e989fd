//! Jobs: work that an operator asks for and that outlives the request: redrives and replays.
//!
//! What a job is to do is written down before it does anything. It then goes forward in small batches at its rate; a
//! batch and the progress it makes are one commit, so a job that was cut off anywhere goes on where it was, on
//! whichever instance looks next. While a batch runs it holds the job's row: no other instance works on the same job,
//! and a stop takes effect between two batches.

mod pg;
mod redrive;
mod replay;
mod runner;
mod sqlite;

use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

pub use redrive::{Letters, Preview, preview, start_redrive};
pub use replay::{Events, TypeCount, count_events, start_replay};
pub use runner::{NAME, Runner};

use super::event::without_nul;
use crate::clock::{Timestamp, mint_id};
use crate::db::{Filter, Tx, dialects, fetch_page};

/// The bell that rings when there is a new job.
pub const BELL: &str = "jobs";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Redrive,
    Replay,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Replay => "replay",
        }
    }
}

/// Who asked for a job, and how fast it may go.
#[derive(Debug, Clone)]
pub struct Order {
    /// Whose operators asked; `None` if it is for every group.
    pub group_id: Option<String>,
    pub who: String,
    pub why: Option<String>,
    /// Messages per second.
    pub rate: i64,
}

/// A job as it stands.
#[derive(Debug, Clone)]
pub struct Job {
    pub id: Uuid,
    pub kind: String,
    /// running, done, stopped or failed
    pub state: String,
    pub criteria: Value,
    pub rate: i64,
    pub total: i64,
    pub progress: Progress,
    pub who: String,
    pub why: Option<String>,
    pub last_error: Option<String>,
    pub created_at: Timestamp,
    pub finished_at: Option<Timestamp>,
}

/// What became of a job's messages so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// On their way.
    pub sent: i64,
    /// Found to be processed already; not sent.
    pub already_applied: i64,
    /// Resolved by somebody else meanwhile.
    pub skipped: i64,
    /// Not to be sent in bulk.
    pub refused: i64,
}

impl Progress {
    pub fn total(self) -> i64 {
        self.sent + self.already_applied + self.skipped + self.refused
    }
}

/// A job whose turn it is.
#[derive(Debug, Clone)]
pub struct Due {
    pub id: Uuid,
    pub kind: String,
    pub criteria: String,
    pub rate: i64,
    pub reached: Option<Uuid>,
}

impl Due {
    /// How many messages go in one batch: a fifth of a second's worth, and few enough to hold nobody up.
    fn batch(&self) -> i64 {
        (self.rate / 5).clamp(1, BATCH_MAX)
    }
}

const BATCH_MAX: i64 = 200;

/// What a batch did.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    progress: Progress,
    reached: Option<Uuid>,
    /// There is nothing left to do.
    finished: bool,
}

dialects! {
    /// The running job that has been due the longest.
    async fn peek_due(now: Timestamp) -> Option<Due>;
    /// Locks a job that is due, and says how far it has come; `None` if another instance is at it, or was.
    async fn lock_due(job_id: Uuid, now: Timestamp) -> Option<Option<Uuid>>;
    /// Counts a step, and sets when the next one is due: `pause` after this one was, so that a job keeps its rate on
    /// average, but makes up for a second at most.
    async fn advance(job_id: Uuid, step: &Step, pause: Duration, now: Timestamp) -> ();
    /// Makes a new job due at once, by the clock that decides when it is due.
    async fn make_due(job_id: Uuid, now: Timestamp) -> ();
    /// How long until the next job is due; `None` if none is running.
    async fn next_due_ms(now: Timestamp) -> Option<i64>;
    async fn forget_letters(job_id: Uuid, letters: &[Uuid]) -> ();
}

/// Writes a job down. It begins when this transaction commits.
async fn insert(tx: &mut Tx, kind: Kind, criteria: &Value, order: &Order) -> sqlx::Result<Uuid> {
    let (id, now) = (mint_id(), tx.now());
    crate::on!(tx, c => {
        sqlx::query(
            "INSERT INTO messaging_jobs (id, kind, state, criteria, rate, total, next_at, who, why, created_at, group_id)
             VALUES ($1, $2, 'running', $3, $4, 0, $5, $6, $7, $5, $8)",
        )
        .bind(id)
        .bind(kind.as_str())
        .bind(criteria.to_string())
        .bind(order.rate)
        .bind(now)
        .bind(&order.who)
        .bind(&order.why)
        .bind(&order.group_id)
        .execute(c)
        .await
        .map(drop)
    })?;
    make_due(tx, id, now).await?;
    tx.ring_on_commit(BELL);
    Ok(id)
}

async fn set_total(tx: &mut Tx, id: Uuid, total: i64) -> sqlx::Result<()> {
    crate::on!(tx, c => {
        sqlx::query("UPDATE messaging_jobs SET total = $2 WHERE id = $1").bind(id).bind(total).execute(c).await.map(drop)
    })
}

/// Ends a running job as `stopped`, `failed` or `done`; `false` if it has ended already. Waits for a batch under way.
async fn end(tx: &mut Tx, id: Uuid, state: &'static str, error: Option<String>) -> sqlx::Result<bool> {
    let now = tx.now();
    let ended = crate::on!(tx, c => {
        sqlx::query(
            "UPDATE messaging_jobs SET state = $2, last_error = $3, finished_at = $4 WHERE id = $1 AND state = 'running'",
        )
        .bind(id)
        .bind(state)
        .bind(error.as_deref().map(without_nul))
        .bind(now)
        .execute(c)
        .await
        .map(|done| done.rows_affected())
    })?;
    // What it had still to do is not to be done any more.
    crate::on!(tx, c => {
        sqlx::query("DELETE FROM messaging_job_letters WHERE job_id = $1").bind(id).execute(c).await.map(drop)
    })?;
    Ok(ended > 0)
}

/// Stops a job after the batch in hand; `false` if it has ended already.
pub async fn stop(tx: &mut Tx, id: Uuid) -> sqlx::Result<bool> {
    end(tx, id, "stopped", None).await
}

#[derive(Debug, Default, Clone)]
pub struct Query {
    /// Those of this group alone.
    pub group_id: Option<String>,
    pub id: Option<Uuid>,
    pub kind: Option<&'static str>,
    pub state: Option<String>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

/// Newest first.
pub async fn list(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<Job>> {
    let filter = Filter::new(
        "SELECT id, kind, state, criteria, rate, total, sent, already_applied, skipped, refused, who, why, last_error, \
         created_at, finished_at FROM messaging_jobs",
    )
    .and_some("group_id = ?", query.group_id)
    .and_some("id = ?", query.id)
    .and_some("kind = ?", query.kind)
    .and_some("state = ?", query.state)
    .and_some("id < ?", query.before)
    .page("id DESC", query.limit);
    Ok(fetch_page!(tx, filter, Columns)?.into_iter().map(Job::from).collect())
}

type Columns = (
    Uuid,
    String,
    String,
    String,
    i64,
    i64,
    i64,
    i64,
    i64,
    i64,
    String,
    Option<String>,
    Option<String>,
    Timestamp,
    Option<Timestamp>,
);

impl From<Columns> for Job {
    fn from(columns: Columns) -> Self {
        let (id, kind, state, criteria, rate, total, ..) = columns;
        let (.., sent, already_applied, skipped, refused, _, _, _, _, _) = columns;
        let (.., who, why, last_error, created_at, finished_at) = columns;
        Self {
            id,
            kind,
            state,
            criteria: serde_json::from_str(&criteria).unwrap_or(Value::Null),
            rate,
            total,
            progress: Progress { sent, already_applied, skipped, refused },
            who,
            why,
            last_error,
            created_at,
            finished_at,
        }
    }
}

pub async fn find(tx: &mut Tx, kind: Kind, group_id: Option<String>, id: Uuid) -> sqlx::Result<Option<Job>> {
    let query = Query { group_id, id: Some(id), kind: Some(kind.as_str()), limit: 1, ..Query::default() };
    Ok(list(tx, query).await?.pop())
}

/// How long a batch of `count` messages must last at `rate` per second.
fn pause_after(count: i64, rate: i64) -> Duration {
    Duration::from_millis(u64::try_from(count.saturating_mul(1000) / rate.max(1)).unwrap_or(0))
}
