//! The table of notices.

mod pg;
mod sqlite;

use uuid::Uuid;

use super::model::{Kind, State};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::{Filter, Tx, dialects, fetch_page};

#[derive(Debug, Clone)]
pub struct NewNotice {
    pub id: Uuid,
    pub group_id: String,
    pub order_id: Uuid,
    pub kind: Kind,
    pub channel: &'static str,
    pub state: State,
    pub event_id: Uuid,
}

impl NewNotice {
    /// What there is one notice for.
    pub fn key(&self) -> (&str, Uuid, &'static str) {
        (&self.group_id, self.order_id, self.kind.as_str())
    }
}

/// What came of an attempt to send a notice.
#[derive(Debug, Clone)]
pub struct Attempt {
    pub group_id: String,
    pub order_id: Uuid,
    pub kind: Kind,
    pub event_id: Uuid,
    pub state: State,
    pub last_error: Option<String>,
}

impl Attempt {
    pub fn key(&self) -> (&str, Uuid, &'static str) {
        (&self.group_id, self.order_id, self.kind.as_str())
    }
}

dialects! {
    /// Writes notices of distinct keys and returns the events of those that were written. One that exists stays as it is,
    /// unless it is the same event's and not yet sent.
    pub async fn write_many(notices: &[NewNotice], now: Timestamp) -> Vec<Uuid>;
    /// Writes what came of attempts. A notice in doubt stays `unknown` until it is sent.
    pub async fn conclude_many(attempts: &[Attempt], now: Timestamp) -> ();
}

#[derive(Debug, Clone)]
pub struct Notice {
    pub id: Uuid,
    pub order_id: Uuid,
    pub kind: String,
    pub channel: String,
    pub state: String,
    pub event_id: Uuid,
    pub last_error: Option<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// Which notices to list; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct Query {
    pub group_id: String,
    pub id: Option<Uuid>,
    pub order_id: Option<Uuid>,
    pub kind: Option<Kind>,
    pub state: Option<String>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

const SELECT: &str = "SELECT id, order_id, kind, channel, state, event_id, last_error, created_at, \
     COALESCE(updated_at, created_at) FROM notifications_notices";

/// Newest first.
pub async fn list(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<Notice>> {
    let filter = Filter::new(SELECT)
        .and("group_id = ?", [query.group_id.into()])
        .and_some("id = ?", query.id)
        .and_some("order_id = ?", query.order_id)
        .and_some("kind = ?", query.kind.map(Kind::as_str))
        .and_some("state = ?", query.state)
        .and_some("id < ?", query.before)
        .page("id DESC", query.limit);
    let rows =
        fetch_page!(tx, filter, (Uuid, Uuid, String, String, String, Uuid, Option<String>, Timestamp, Timestamp))?;
    Ok(rows
        .into_iter()
        .map(|(id, order_id, kind, channel, state, event_id, last_error, created_at, updated_at)| Notice {
            id,
            order_id,
            kind,
            channel,
            state,
            event_id,
            last_error,
            created_at,
            updated_at,
        })
        .collect())
}
