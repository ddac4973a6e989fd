//! Redrives: dead letters sent back in bulk. The set is frozen when the redrive is asked for: letters that are filed
//! later, among them what it sent and what failed again, are not in it.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Due, Kind, Order, Progress, Step, forget_letters, insert, set_total};
use crate::clock::Timestamp;
use crate::db::{Filter, Tx, fetch_page};
use crate::messaging::dead_letters::{self, Group, LetterRow, Query, Redriven};
use crate::messaging::event::TOO_OLD;

const GROUPS_MAX: i64 = 100;
const SAMPLE_MAX: i64 = 10;

/// Which open letters to redrive; every field narrows.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Letters {
    /// Of this group alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_id: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<Uuid>,
    pub queue: Option<String>,
    pub consumer: Option<String>,
    pub reason: Option<String>,
    pub event_type: Option<String>,
    pub from: Option<Timestamp>,
    pub to: Option<Timestamp>,
}

impl Letters {
    fn open(&self, limit: i64) -> Query {
        Query {
            ids: self.ids.clone(),
            group_id: self.group_id.clone(),
            queue: self.queue.clone(),
            consumer: self.consumer.clone(),
            reason: self.reason.clone(),
            event_type: self.event_type.clone(),
            state: Some("open".to_owned()),
            from: self.from,
            to: self.to,
            limit,
            ..Query::default()
        }
    }
}

/// What a redrive would do.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
pub struct Preview {
    pub total: i64,
    /// Letters whose event has been processed since: they would be closed, and nothing sent.
    pub already_applied: i64,
    /// Letters that are not sent in bulk: their events are older than the inbox remembers.
    pub refused: i64,
    pub groups: Vec<Group>,
    /// The newest of the letters.
    pub sample: Vec<LetterRow>,
    /// The newest of those applied already.
    pub already_applied_sample: Vec<LetterRow>,
}

const APPLIED: &str = "l.reason <> 'id-reused' AND EXISTS (SELECT 1 FROM messaging_inbox i \
     WHERE i.consumer = l.consumer AND i.event_id = l.event_id AND i.state = 'processed')";

pub async fn preview(tx: &mut Tx, letters: &Letters) -> sqlx::Result<Preview> {
    let counting = || letters.open(0).narrow(Filter::new("SELECT count(*) FROM messaging_dead_letters l"));
    let count = |rows: Vec<(i64,)>| rows.first().map_or(0, |(count,)| *count);
    Ok(Preview {
        total: count(fetch_page!(tx, counting(), (i64,))?),
        already_applied: count(fetch_page!(tx, counting().and(APPLIED, []), (i64,))?),
        refused: count(fetch_page!(tx, counting().and("l.reason = ?", [TOO_OLD.into()]), (i64,))?),
        groups: dead_letters::list_groups(tx, letters.open(GROUPS_MAX)).await?,
        sample: dead_letters::list(tx, letters.open(SAMPLE_MAX)).await?,
        already_applied_sample: dead_letters::list_where(tx, letters.open(SAMPLE_MAX), APPLIED).await?,
    })
}

/// Freezes the set and begins with it once this transaction commits.
pub async fn start_redrive(tx: &mut Tx, letters: &Letters, order: &Order) -> sqlx::Result<Uuid> {
    let id = insert(tx, Kind::Redrive, &serde_json::json!(letters), order).await?;
    let freeze = "INSERT INTO messaging_job_letters (job_id, letter_id) SELECT j.id, l.id \
         FROM messaging_jobs j CROSS JOIN messaging_dead_letters l";
    let filter = letters.open(0).narrow(Filter::new(freeze).and("j.id = ?", [id.into()]));
    fetch_page!(tx, filter, (i64,))?;
    let total: i64 = crate::on!(tx, c => {
        sqlx::query_scalar("SELECT count(*) FROM messaging_job_letters WHERE job_id = $1").bind(id).fetch_one(c).await
    })?;
    set_total(tx, id, total).await?;
    Ok(id)
}

/// The next batch.
pub(super) async fn step(tx: &mut Tx, due: &Due) -> sqlx::Result<Step> {
    let ids: Vec<Uuid> = crate::on!(tx, c => {
        sqlx::query_scalar("SELECT letter_id FROM messaging_job_letters WHERE job_id = $1 ORDER BY letter_id LIMIT $2")
            .bind(due.id)
            .bind(due.batch())
            .fetch_all(c)
            .await
    })?;
    let mut letters = dead_letters::find_many(tx, &ids).await?;
    // One that retention removed meanwhile had been resolved before.
    let mut progress = Progress { skipped: count(&ids) - count(&letters), ..Progress::default() };
    let before = letters.len();
    letters.retain(|letter| letter.row.reason != TOO_OLD);
    progress.refused = count(&ids[..before - letters.len()]);
    for redriven in dead_letters::redrive_many(tx, &letters, Some(due.id)).await? {
        match redriven {
            Redriven::Sent => progress.sent += 1,
            Redriven::AlreadyApplied => progress.already_applied += 1,
            Redriven::NotOpen => progress.skipped += 1,
        }
    }
    forget_letters(tx, due.id, &ids).await?;
    Ok(Step { progress, reached: None, finished: count(&ids) < due.batch() })
}

fn count<T>(rows: &[T]) -> i64 {
    i64::try_from(rows.len()).unwrap_or(i64::MAX)
}
