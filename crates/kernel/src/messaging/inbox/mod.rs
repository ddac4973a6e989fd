//! The inbox: which events a consumer has dealt with, one row per (consumer, event).
//!
//! It is written in the transaction of the effect it vouches for. A new event is inserted as `processed`
//! outright: if its effects do not commit, neither does the row, so the common case costs one statement. Whatever
//! else a delivery may meet is decided by [`decide`], a pure function over the state it met.
//!
//! An effect outside the database is claimed first: the row is `processing` under a [`Claim`], and what came of it is
//! written only by whoever still holds that claim.

mod pg;
mod sqlite;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use uuid::Uuid;

use super::event::{BodyHash, Event, Message};
use crate::clock::Timestamp;
use crate::db::{Filter, Tx, dialects, fetch_page};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Processing,
    Processed,
    Waiting,
    Retrying,
    Dead,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Processing => "processing",
            Self::Processed => "processed",
            Self::Waiting => "waiting",
            Self::Retrying => "retrying",
            Self::Dead => "dead",
        }
    }

    fn from_column(text: &str) -> sqlx::Result<Self> {
        [Self::Processing, Self::Processed, Self::Waiting, Self::Retrying, Self::Dead]
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| sqlx::Error::Decode(format!("unknown inbox state {text:?}").into()))
    }
}

/// Where the effect of a run happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// In the transaction of the inbox row.
    Inside,
    /// At somebody else's, under a lease.
    Outside,
}

/// A row that a delivery met, locked for the rest of the transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Met {
    pub state: State,
    /// Of a run that is claimed: the attempt under way included.
    pub attempts: i32,
    pub unfinished_runs: i32,
    pub body_hash: BodyHash,
    /// `processing`: until the lease has run out. `retrying`: until the retry is due.
    pub due_in: Duration,
    /// `processing`: where. A run that is claimed is outside.
    pub effect: Effect,
    pub version: i64,
}

/// Of [`Met`], with the event's id first and `lock_token IS NOT NULL`, the version and the milliseconds left last.
type MetColumns = (Uuid, String, i32, i32, Vec<u8>, bool, i64, i64);

impl Met {
    fn from_columns(columns: MetColumns) -> sqlx::Result<(Uuid, Self)> {
        let (event_id, state, attempts, unfinished_runs, body_hash, claimed, version, millis_left) = columns;
        let met = Self {
            state: State::from_column(&state)?,
            attempts,
            unfinished_runs,
            body_hash: hash_from_column(&body_hash)?,
            due_in: Duration::from_millis(u64::try_from(millis_left).unwrap_or(0)),
            effect: if claimed { Effect::Outside } else { Effect::Inside },
            version,
        };
        Ok((event_id, met))
    }

    pub fn is_due(&self) -> bool {
        self.due_in.is_zero()
    }
}

/// The right to write what came of an outside effect: a row's lock token and version, for as long as the row has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    pub event_id: Uuid,
    pub token: Uuid,
    pub version: i64,
    /// Which attempt this is, from 1.
    pub attempt: i32,
}

/// What to do with a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Run,
    /// An outside effect whose worker's lease ran out: run it under the next version.
    TakeOver,
    /// An outside effect that is running elsewhere: look again when its lease ends; counts as no attempt.
    Later,
    /// Count it as a duplicate and acknowledge.
    Dismiss,
    /// Already given up on: reject it again, which files nothing new.
    RejectAgain,
    /// Another body under a known id: the first wins, this one is put aside.
    Quarantine,
}

/// The state table: what a delivery does, by the row it meets.
pub fn decide(met: Option<&Met>, body_hash: &BodyHash) -> Action {
    let Some(met) = met else { return Action::Run };
    if met.body_hash != *body_hash {
        return Action::Quarantine;
    }
    match (met.state, met.effect) {
        (State::Processed | State::Waiting, _) => Action::Dismiss,
        (State::Retrying, _) if met.is_due() => Action::Run,
        (State::Retrying, _) => Action::Dismiss,
        (State::Dead, _) => Action::RejectAgain,
        (State::Processing, Effect::Inside) => Action::Run,
        (State::Processing, Effect::Outside) if met.is_due() => Action::TakeOver,
        (State::Processing, Effect::Outside) => Action::Later,
    }
}

/// What is written about one event.
#[derive(Debug, Clone)]
pub struct Arrival<'a> {
    pub event: &'a Event,
    pub key: &'a str,
    pub body_hash: &'a BodyHash,
}

impl<'a, F> From<&'a Message<F>> for Arrival<'a> {
    fn from(message: &'a Message<F>) -> Self {
        Self { event: &message.event, key: message.key, body_hash: &message.body_hash }
    }
}

/// A change to a row that is not simply `processed` at first sight.
#[derive(Debug, Clone)]
pub struct Mark {
    pub event_id: Uuid,
    pub state: State,
    pub attempts: i32,
    /// `retrying`: how long until the retry is due.
    pub due_in: Option<Duration>,
    pub reason: Option<String>,
    pub last_error: Option<String>,
}

/// Did another transaction write down an event first that this one was writing down?
pub fn lost_race(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.constraint() == Some("messaging_inbox_pkey"))
}

dialects! {
    /// Inserts arrivals that were taken at `taken_at` as processed and returns the ids that were new. Ids must be
    /// distinct and in order.
    pub async fn insert_new(
        consumer: &str,
        arrivals: &[Arrival<'_>],
        taken_at: Timestamp,
        now: Timestamp,
    ) -> Vec<Uuid>;
    /// Inserts arrivals as processed that are all new; one that is not fails the transaction.
    pub async fn insert_all(
        consumer: &str,
        arrivals: &[Arrival<'_>],
        taken_at: Timestamp,
        now: Timestamp,
    ) -> ();
    /// Puts the end of handling, which the insert had to guess, where it was.
    pub async fn put_end(consumer: &str, ids: &[Uuid], ended_at: Timestamp) -> ();
    /// Locks and returns the rows of `ids`, in the order of their ids.
    pub async fn meet(consumer: &str, ids: &[Uuid], now: Timestamp) -> Vec<(Uuid, Met)>;
    pub async fn mark_many(consumer: &str, marks: &[Mark], now: Timestamp) -> ();
    /// Marks rows that this transaction has inserted or met as `processing` under these claims.
    pub async fn claim_many(consumer: &str, claims: &[Claim], lease: Duration, now: Timestamp) -> ();
    /// Locks the rows that nobody has taken over from these claims, in the order of their ids. Says of each whether its
    /// claim is still open: if not, what came of it has been written already.
    pub async fn hold_many(consumer: &str, claims: &[Claim]) -> Vec<(Uuid, bool)>;
    /// Extends the lease of what is still held.
    pub async fn renew_many(consumer: &str, claims: &[Claim], lease: Duration, now: Timestamp) -> ();
    /// Adds one to each row's count of writes that came too late.
    pub async fn count_fenced(consumer: &str, ids: &[Uuid]) -> ();
    /// Adds to the duplicate counts: one per id given, so an id seen twice counts twice.
    pub async fn count_duplicates(consumer: &str, ids: &[Uuid]) -> ();
}

/// Inserts an arrival that is to run alone as `processing`, with no run of it yet. A row that is there, or that another
/// transaction is just writing, stays as it is.
pub async fn insert_begun(tx: &mut Tx, consumer: &str, arrival: &Arrival<'_>) -> sqlx::Result<()> {
    let now = tx.now();
    crate::on!(tx, c => {
        sqlx::query(
            "INSERT INTO messaging_inbox (consumer, event_id, state, attempts, started_at, event_type, aggregate_id,
                 correlation_id, group_id, body_hash)
             VALUES ($1, $2, 'processing', 0, $3, $4, $5, $6, $7, $8)
             ON CONFLICT DO NOTHING",
        )
        .bind(consumer)
        .bind(arrival.event.event_id)
        .bind(now)
        .bind(arrival.key)
        .bind(&arrival.event.aggregate_id)
        .bind(&arrival.event.correlation_id)
        .bind(&arrival.event.group_id)
        .bind(arrival.body_hash.as_slice())
        .execute(c)
        .await
        .map(drop)
    })
}

/// Records that a run starts, before it does, for a message that may kill the process. The row must have been met.
pub async fn record_run(tx: &mut Tx, consumer: &str, event_id: Uuid) -> sqlx::Result<()> {
    let now = tx.now();
    crate::on!(tx, c => {
        sqlx::query(
            "UPDATE messaging_inbox SET state = 'processing', started_at = $3, finished_at = NULL,
                 unfinished_runs = unfinished_runs + 1
             WHERE consumer = $1 AND event_id = $2",
        )
        .bind(consumer)
        .bind(event_id)
        .bind(now)
        .execute(c)
        .await
        .map(drop)
    })
}

/// Takes back a recorded run that the database, not the message, cut short.
pub async fn forget_run(tx: &mut Tx, consumer: &str, event_id: Uuid) -> sqlx::Result<()> {
    crate::on!(tx, c => {
        sqlx::query(
            "UPDATE messaging_inbox SET unfinished_runs = unfinished_runs - 1
             WHERE consumer = $1 AND event_id = $2 AND unfinished_runs > 0",
        )
        .bind(consumer)
        .bind(event_id)
        .execute(c)
        .await
        .map(drop)
    })
}

/// Moves dead rows to `retrying`, due at once, with their attempts forgotten; only a redrive does this. Says for each
/// wanted event and body which state its row was in: `None` if there is no row, or one that knows another body.
pub async fn revive_many(tx: &mut Tx, consumer: &str, wanted: &[(Uuid, BodyHash)]) -> sqlx::Result<Vec<Option<State>>> {
    let now = tx.now();
    let ids: Vec<Uuid> = wanted.iter().map(|(id, _)| *id).collect();
    let met: HashMap<Uuid, Met> = meet(tx, consumer, &ids, now).await?.into_iter().collect();
    let state_of =
        |(id, hash): &(Uuid, BodyHash)| met.get(id).filter(|met| met.body_hash == *hash).map(|met| met.state);
    let states: Vec<Option<State>> = wanted.iter().map(state_of).collect();
    let dead: BTreeSet<Uuid> =
        ids.into_iter().zip(&states).filter(|(_, state)| **state == Some(State::Dead)).map(|(id, _)| id).collect();
    if !dead.is_empty() {
        let revived = |event_id| Mark {
            event_id,
            state: State::Retrying,
            attempts: 0,
            due_in: Some(Duration::ZERO),
            reason: None,
            last_error: None,
        };
        mark_many(tx, consumer, &dead.into_iter().map(revived).collect::<Vec<_>>(), now).await?;
    }
    Ok(states)
}

/// A verdict as the dead-letter office needs it.
#[derive(Debug, Clone)]
pub struct Verdict {
    pub state: State,
    pub attempts: i32,
    pub body_hash: BodyHash,
    pub reason: Option<String>,
    pub last_error: Option<String>,
}

pub async fn find_verdict(tx: &mut Tx, consumer: &str, event_id: Uuid) -> sqlx::Result<Option<Verdict>> {
    let row: Option<(String, i32, Vec<u8>, Option<String>, Option<String>)> = crate::on!(tx, c => {
        sqlx::query_as(
            "SELECT state, attempts, body_hash, reason, last_error FROM messaging_inbox
             WHERE consumer = $1 AND event_id = $2",
        )
        .bind(consumer)
        .bind(event_id)
        .fetch_optional(c)
        .await
    })?;
    row.map(|(state, attempts, body_hash, reason, last_error)| {
        let (state, body_hash) = (State::from_column(&state)?, hash_from_column(&body_hash)?);
        Ok(Verdict { state, attempts, body_hash, reason, last_error })
    })
    .transpose()
}

fn hash_from_column(bytes: &[u8]) -> sqlx::Result<BodyHash> {
    bytes.try_into().map_err(|_| sqlx::Error::Decode("a body hash must have 32 bytes".into()))
}

/// How many rows of a consumer are in a state, and the highest version (fencing token) among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Count {
    pub consumer: String,
    pub state: String,
    pub rows: i64,
    pub version_max: i64,
}

/// Counts what is not processed: few rows, found by their index.
pub async fn count_unsettled(tx: &mut Tx) -> sqlx::Result<Vec<Count>> {
    let counts: Vec<(String, String, i64, i64)> = crate::on!(tx, c => {
        sqlx::query_as(
            "SELECT consumer, state, count(*), CAST(max(version) AS bigint) FROM messaging_inbox
             WHERE state <> 'processed' GROUP BY consumer, state",
        )
        .fetch_all(c)
        .await
    })?;
    let count = |(consumer, state, rows, version_max)| Count { consumer, state, rows, version_max };
    Ok(counts.into_iter().map(count).collect())
}

/// Counts what is processed, which takes the longer the more there is.
pub async fn count_processed(tx: &mut Tx) -> sqlx::Result<Vec<(String, i64)>> {
    crate::on!(tx, c => {
        sqlx::query_as("SELECT consumer, count(*) FROM messaging_inbox WHERE state = 'processed' GROUP BY consumer")
            .fetch_all(c)
            .await
    })
}

/// A consumer's inbox in figures; events that were processed once and never came again count for nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Tally {
    pub consumer: String,
    pub processing: i64,
    pub waiting: i64,
    pub retrying: i64,
    pub dead: i64,
    /// Deliveries that were dismissed because their event had been dealt with.
    pub duplicates: i64,
    /// When the next retry is due.
    pub next_retry_at: Option<Timestamp>,
}

/// One tally for each consumer that has something to count.
pub async fn tally(tx: &mut Tx) -> sqlx::Result<Vec<Tally>> {
    // Each reads a partial index, so that neither grows with what went well.
    let unsettled: Vec<(String, String, i64, Option<Timestamp>)> = crate::on!(tx, c => {
        sqlx::query_as(
            "SELECT consumer, state, count(*), min(lease_until) FROM messaging_inbox WHERE state <> 'processed'
             GROUP BY consumer, state",
        )
        .fetch_all(c)
        .await
    })?;
    let duplicates: Vec<(String, i64)> = crate::on!(tx, c => {
        sqlx::query_as(
            "SELECT consumer, CAST(sum(duplicates) AS bigint) FROM messaging_inbox WHERE duplicates > 0 GROUP BY consumer",
        )
        .fetch_all(c)
        .await
    })?;
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    for (consumer, state, count, due) in unsettled {
        let tally = tallies.entry(consumer).or_default();
        match State::from_column(&state)? {
            State::Processing => tally.processing = count,
            State::Waiting => tally.waiting = count,
            State::Retrying => (tally.retrying, tally.next_retry_at) = (count, due),
            State::Dead => tally.dead = count,
            State::Processed => {}
        }
    }
    for (consumer, count) in duplicates {
        tallies.entry(consumer).or_default().duplicates = count;
    }
    Ok(tallies.into_iter().map(|(consumer, tally)| Tally { consumer, ..tally }).collect())
}

/// A row as operators see it.
#[derive(Debug, Clone, serde::Serialize, utoipa::ToSchema)]
pub struct InboxRow {
    #[schema(example = "inventory")]
    pub consumer: String,
    pub event_id: Uuid,
    #[schema(example = "order.placed")]
    pub event_type: String,
    #[schema(example = "processed")]
    pub state: String,
    pub attempts: i32,
    /// How many further deliveries of this event were dismissed.
    pub duplicates: i32,
    /// Writes about an outside effect that came after it had been taken over, and were turned away.
    pub fenced: i32,
    pub started_at: Timestamp,
    pub finished_at: Option<Timestamp>,
    pub correlation_id: String,
    /// Why the last attempt failed, or why there was nothing to do.
    pub last_error: Option<String>,
    /// Of a waiting event: the event it waits for, and the aggregate both are about.
    #[schema(example = "order.placed 019a0000-0000-7000-8000-000000000000")]
    pub waiting_for: Option<String>,
    /// Of a waiting event: when it is given up on.
    pub deadline_at: Option<Timestamp>,
}

type Columns = (
    String,
    Uuid,
    String,
    String,
    i32,
    i32,
    i32,
    Timestamp,
    Option<Timestamp>,
    String,
    Option<String>,
    Option<String>,
    Option<Timestamp>,
);

const SELECT_ROWS: &str = "SELECT consumer, event_id, event_type, state, attempts, duplicates, fenced, started_at, \
     finished_at, correlation_id, last_error, waiting_for, deadline_at FROM messaging_inbox";

impl From<Columns> for InboxRow {
    fn from(columns: Columns) -> Self {
        let (consumer, event_id, event_type, state, attempts, ..) = columns;
        let (.., duplicates, fenced, started_at, finished_at, correlation_id, last_error, waiting_for, deadline_at) =
            columns;
        Self {
            consumer,
            event_id,
            event_type,
            state,
            attempts,
            duplicates,
            fenced,
            started_at,
            finished_at,
            correlation_id,
            last_error,
            waiting_for,
            deadline_at,
        }
    }
}

/// Which rows to list; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct Query {
    pub group_id: Option<String>,
    pub consumer: Option<String>,
    pub state: Option<String>,
    pub event_id: Option<Uuid>,
    pub duplicates_min: Option<i64>,
    pub before: Option<(String, Uuid)>,
    pub limit: i64,
}

/// By consumer, and within each the newest events first: the order of the primary key, read backwards.
pub async fn list(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<InboxRow>> {
    let mut filter = Filter::new(SELECT_ROWS)
        .and_some("group_id = ?", query.group_id)
        .and_some("consumer = ?", query.consumer)
        .and_some("state = ?", query.state)
        .and_some("event_id = ?", query.event_id)
        .and_some("duplicates >= ?", query.duplicates_min);
    if let Some((consumer, event_id)) = query.before {
        filter = filter.and("(consumer, event_id) < (?, ?)", [consumer.into(), event_id.into()]);
    }
    let filter = filter.page("consumer DESC, event_id DESC", query.limit);
    Ok(fetch_page!(tx, filter, Columns)?.into_iter().map(InboxRow::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: BodyHash = [1; 32];
    const OTHER: BodyHash = [2; 32];

    fn met(state: State, due: bool, effect: Effect) -> Met {
        let due_in = if due { Duration::ZERO } else { Duration::from_secs(1) };
        Met { state, attempts: 1, unfinished_runs: 0, body_hash: BODY, due_in, effect, version: 1 }
    }

    #[test]
    fn an_unknown_event_runs() {
        assert_eq!(decide(None, &BODY), Action::Run);
    }

    #[test]
    fn each_state_has_its_action() {
        use Effect::{Inside, Outside};
        use State::{Dead, Processed, Processing, Retrying, Waiting};
        let table = [
            (Processed, false, Inside, Action::Dismiss),
            (Waiting, false, Inside, Action::Dismiss),
            (Retrying, true, Inside, Action::Run),
            (Retrying, false, Inside, Action::Dismiss),
            (Dead, false, Inside, Action::RejectAgain),
            (Processing, false, Inside, Action::Run),
            (Processing, true, Inside, Action::Run),
            (Processing, true, Outside, Action::TakeOver),
            (Processing, false, Outside, Action::Later),
            (Processed, false, Outside, Action::Dismiss),
            (Retrying, true, Outside, Action::Run),
            (Dead, false, Outside, Action::RejectAgain),
        ];
        for (state, due, effect, action) in table {
            assert_eq!(decide(Some(&met(state, due, effect)), &BODY), action, "{state:?} {due} {effect:?}");
        }
    }

    #[test]
    fn another_body_under_a_known_id_is_put_aside_in_every_state() {
        for state in [State::Processing, State::Processed, State::Waiting, State::Retrying, State::Dead] {
            assert_eq!(decide(Some(&met(state, true, Effect::Inside)), &OTHER), Action::Quarantine, "{state:?}");
        }
    }
}
