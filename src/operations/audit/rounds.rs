//! The audit that runs by itself, in rounds, and what the last audits found.
//!
//! A round goes through what was written of late in windows of so many events, each at a moment of its own, and rests
//! many times as long after each as it took: however much was written, no look at it is long. What could still have been
//! under way is looked at again in the next round, which begins where this one found everything settled: nothing is
//! skipped, be a round ever so long.
//!
//! What a whole audit found broken is asked again, whole, at the end of each round, until it is mended.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::{Checked, Report, SAMPLE_MAX, Scope, Window, run_some};
use crate::http::problem::Problem;
use crate::operations::Operations;
use stockade_kernel::clock::{Timestamp, first_id_at, minted_at};
use stockade_kernel::db::Tx;

/// How long what was written may take until all of it is settled, at least.
const SETTLED_MIN: Duration = Duration::from_secs(15 * 60);
/// How long after its start a process first looks, if it is to look that often.
const FIRST_AFTER: Duration = Duration::from_secs(10);
/// How many times as long as it took an audit rests at least.
const RESTS: u32 = 20;

/// What the last audits found.
#[derive(Clone, Default)]
pub struct Audits(Arc<Mutex<Found>>);

#[derive(Default)]
struct Found {
    whole: Option<Report>,
    /// The last round, once it was over.
    round: Option<Report>,
    looked_at: Option<Timestamp>,
}

impl Audits {
    fn with<T>(&self, work: impl FnOnce(&mut Found) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn keep_whole(&self, report: Report) {
        self.with(|found| {
            found.looked_at = found.looked_at.max(Some(report.checked_at));
            found.whole = Some(report);
        });
    }

    fn keep_round(&self, report: Report) {
        self.with(|found| found.round = Some(report));
    }

    fn note_look(&self, at: Timestamp) {
        self.with(|found| found.looked_at = found.looked_at.max(Some(at)));
    }

    /// What the last whole audit found broken, by name.
    fn broken(&self) -> Vec<String> {
        self.with(|found| {
            let checks = found.whole.iter().flat_map(|report| &report.checks);
            checks.filter(|checked| checked.violations > 0).map(|checked| checked.name.clone()).collect()
        })
    }

    /// Puts in what checks found that were run again on every row.
    fn amend_whole(&self, again: Report) {
        self.with(|found| {
            // Another whole audit may have been made meanwhile.
            if let Some(whole) = found.whole.as_mut().filter(|whole| whole.checked_at < again.checked_at) {
                for checked in again.checks {
                    if let Some(known) = whole.checks.iter_mut().find(|known| known.name == checked.name) {
                        *known = checked;
                    }
                }
            }
        });
    }

    /// The last reports as one: each check as the one that found more violations has it, and of a round only what is
    /// not older than the whole audit. None before the first.
    pub fn latest(&self) -> Option<Report> {
        self.with(|found| {
            let whole_at = found.whole.as_ref().map(|whole| whole.checked_at);
            let round = found.round.as_ref().filter(|round| Some(round.checked_at) >= whole_at);
            let mut reports = [round, found.whole.as_ref()].into_iter().flatten();
            let mut latest = reports.next()?.clone();
            for checked in reports.flat_map(|report| &report.checks) {
                if let Some(known) = latest.checks.iter_mut().find(|known| known.name == checked.name)
                    && known.violations < checked.violations
                {
                    *known = checked.clone();
                }
            }
            latest.violations = latest.checks.iter().map(|checked| checked.violations).sum();
            latest.checked_at = found.looked_at.unwrap_or(latest.checked_at);
            Some(latest)
        })
    }
}

/// A round, as far as it has come.
struct Round {
    started_at: Timestamp,
    /// Where its next window begins.
    at: Timestamp,
    /// What its windows have shown so far.
    found: Option<Report>,
}

impl Round {
    fn beginning(at: Timestamp, started_at: Timestamp) -> Self {
        Self { started_at, at, found: None }
    }

    fn add(&mut self, report: Report) {
        let Some(found) = &mut self.found else {
            self.found = Some(report);
            return;
        };
        found.unsettled = report.unsettled;
        found.violations += report.violations;
        for Checked { name, violations, sample, .. } in report.checks {
            if let Some(known) = found.checks.iter_mut().find(|known| known.name == name) {
                known.violations += violations;
                let room = SAMPLE_MAX - known.sample.len();
                known.sample.extend(sample.into_iter().take(room));
            }
        }
    }
}

/// Goes through what was written of late, round after round, until cancelled. A window has so many `events`.
pub async fn watch(operations: Operations, every: Duration, events: u32) {
    let clock = operations.kernel.db.clock().clone();
    let settled = |at: Timestamp| at.minus(operations.settles_within());
    // Not among the first things a process does, which has enough to do then.
    tokio::time::sleep(every.min(FIRST_AFTER)).await;
    let mut round = Round::beginning(settled(clock.now()), clock.now());
    loop {
        let looked = Instant::now();
        let rest = match operations.look(&mut round, events).await {
            Ok(Some(report)) => {
                tell(&report);
                round = Round::beginning(settled(round.started_at), clock.now());
                every
            }
            Ok(None) => Duration::ZERO,
            Err(error) => {
                tracing::debug!(?error, "no audit just now");
                every
            }
        };
        tokio::time::sleep(rest.max(looked.elapsed() * RESTS)).await;
    }
}

impl Operations {
    /// After this nothing that was written is on its way any more, unless something is held up.
    fn settles_within(&self) -> Duration {
        SETTLED_MIN.max(super::flight_max(&self.kernel.transport, &self.kernel.tuning) * 2)
    }

    /// Looks at the round's next window; returns what the round found if that was its last.
    async fn look(&self, round: &mut Round, events: u32) -> Result<Option<Report>, Problem> {
        let (db, queues) = (&self.kernel.db, self.queues().await?);
        let end = window_end(&mut db.read().await?, round.at, events).await?;
        // Ids of the future are no ids of ours, but for clocks that differ.
        let to = end.unwrap_or_else(|| db.clock().now().plus(SETTLED_MIN));
        let is_first = round.found.is_none();
        let scope = Scope::Within(Window { from: round.at, to });
        // What looks at more than its window has seen all of it in the first one.
        let report = run_some(db, &queues, scope, |_, has_scope| is_first || has_scope).await?;
        self.audits.note_look(report.checked_at);
        round.add(report);
        if let Some(end) = end {
            round.at = end;
            return Ok(None);
        }
        let broken = self.audits.broken();
        if !broken.is_empty() {
            let is_broken = |name: &str, _| broken.iter().any(|broken| broken == name);
            self.audits.amend_whole(run_some(db, &queues, Scope::Whole, is_broken).await?);
        }
        let found = round.found.take();
        if let Some(found) = &found {
            self.audits.keep_round(found.clone());
        }
        Ok(found)
    }
}

/// Where a window from `from` on has so many events; `None` if there are not that many.
async fn window_end(tx: &mut Tx, from: Timestamp, events: u32) -> sqlx::Result<Option<Timestamp>> {
    let last: Option<Uuid> = stockade_kernel::on!(tx, c => {
        sqlx::query_scalar(
            "SELECT id FROM (
                 SELECT id FROM (SELECT id FROM messaging_outbox WHERE kind = 'event' AND id >= $1 ORDER BY id LIMIT $2) o
                 UNION ALL
                 SELECT id FROM (SELECT id FROM messaging_outbox_archive WHERE id >= $1 ORDER BY id LIMIT $2) a) AS e
             ORDER BY id LIMIT 1 OFFSET $2 - 1",
        )
        .bind(first_id_at(from))
        .bind(i64::from(events))
        .fetch_optional(c)
        .await
    })?;
    // Past the millisecond of the last one, so that a window is never empty.
    Ok(last.as_ref().and_then(minted_at).map(|at| at.max(from).plus(Duration::from_millis(1))))
}

fn tell(report: &Report) {
    for broken in report.checks.iter().filter(|checked| checked.violations > 0) {
        tracing::error!(
            check = broken.name,
            violations = broken.violations,
            sample = ?broken.sample,
            "BROKEN PROMISE {}: {} of them break it",
            broken.name,
            broken.violations
        );
    }
}
