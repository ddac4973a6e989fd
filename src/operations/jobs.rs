//! What redrives and replays have in common as operators see them.

use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::Operations;
use super::actions::acted;
use crate::http::caller::Caller;
use crate::http::extract::bad_filter;
use crate::http::page::{Page, fetch_limit, limit, read_uuid_cursor};
use crate::http::problem::{FieldError, Problem};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::actions;
use stockade_kernel::messaging::jobs::{self, Kind};

const STATES: [&str; 4] = ["running", "done", "stopped", "failed"];
const RATE_MAX: i64 = 10_000;

/// A redrive or a replay, with its progress.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Job {
    id: Uuid,
    /// redrive or replay
    #[schema(example = "redrive")]
    kind: String,
    /// running, done, stopped or failed
    #[schema(example = "running")]
    state: String,
    /// What it was asked to do.
    #[schema(value_type = Object)]
    filter: Value,
    /// Messages per second.
    rate: i64,
    /// How many messages there were when it was asked for.
    total: i64,
    sent: i64,
    /// Found to be processed already: reported, not repeated.
    already_applied: i64,
    /// Resolved by somebody else meanwhile.
    skipped: i64,
    /// Not sent in bulk, because the inbox no longer remembers such old events.
    refused: i64,
    remaining: i64,
    who: String,
    why: Option<String>,
    last_error: Option<String>,
    created_at: Timestamp,
    finished_at: Option<Timestamp>,
}

impl From<jobs::Job> for Job {
    fn from(job: jobs::Job) -> Self {
        let progress = job.progress;
        Self {
            id: job.id,
            kind: job.kind,
            remaining: if job.state == "done" { 0 } else { (job.total - progress.total()).max(0) },
            state: job.state,
            filter: job.criteria,
            rate: job.rate,
            total: job.total,
            sent: progress.sent,
            already_applied: progress.already_applied,
            skipped: progress.skipped,
            refused: progress.refused,
            who: job.who,
            why: job.why,
            last_error: job.last_error,
            created_at: job.created_at,
            finished_at: job.finished_at,
        }
    }
}

#[derive(Debug, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListJobs {
    /// running, done, stopped or failed
    state: Option<String>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

pub(super) fn check_rate(rate: Option<i64>, default: i64) -> Result<i64, Problem> {
    match rate.unwrap_or(default) {
        rate @ 1..=RATE_MAX => Ok(rate),
        other => {
            let detail = format!("must be 1 to {RATE_MAX} messages per second, not {other}");
            Err(Problem::validation(vec![FieldError { pointer: "/rate".to_owned(), detail }]))
        }
    }
}

impl Operations {
    pub(super) async fn list_jobs(&self, caller: &Caller, kind: Kind, params: ListJobs) -> Result<Page<Job>, Problem> {
        let limit = limit(params.limit)?;
        if params.state.as_deref().is_some_and(|state| !STATES.contains(&state)) {
            return Err(bad_filter(format!("state must be one of {}", STATES.join(", "))));
        }
        let query = jobs::Query {
            group_id: caller.messages_of(),
            id: None,
            kind: Some(kind.as_str()),
            state: params.state,
            before: read_uuid_cursor(params.cursor.as_deref())?,
            limit: fetch_limit(limit),
        };
        let rows = jobs::list(&mut self.kernel.db.read().await?, query).await?;
        Ok(Page::new(rows, limit, |row| row.id.to_string()))
    }

    pub(super) async fn get_job(&self, caller: &Caller, kind: Kind, id: &str) -> Result<Job, Problem> {
        let missing = || Problem::not_found(format!("there is no {} {id}", kind.as_str()));
        let uuid = Uuid::try_parse(id).map_err(|_| missing())?;
        let job = jobs::find(&mut self.kernel.db.read().await?, kind, caller.messages_of(), uuid).await?;
        job.map(Job::from).ok_or_else(missing)
    }

    pub(super) async fn stop_job(
        &self,
        caller: &Caller,
        kind: Kind,
        id: &str,
        why: Option<String>,
    ) -> Result<Job, Problem> {
        let job = self.get_job(caller, kind, id).await?;
        let mut tx = self.kernel.db.begin().await?;
        if !jobs::stop(&mut tx, job.id).await? {
            drop(tx);
            let state = self.get_job(caller, kind, id).await?.state;
            return Err(Problem::new(409, "not-running", format!("the {} is {state} already", kind.as_str())));
        }
        let action = match kind {
            Kind::Redrive => "redrive.stop",
            Kind::Replay => "replay.stop",
        };
        actions::record(&mut tx, &acted(caller, action, job.id, why, json!({}))).await?;
        tx.commit().await?;
        self.get_job(caller, kind, id).await
    }
}
