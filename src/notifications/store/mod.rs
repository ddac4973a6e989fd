//! The table of notices.

mod pg;
mod sqlite;

use uuid::Uuid;

use super::model::Kind;
use crate::clock::Timestamp;
use crate::db::{Filter, Tx, dialects, fetch_page};

#[derive(Debug, Clone)]
pub struct NewNotice {
    pub id: Uuid,
    pub group_id: String,
    pub order_id: Uuid,
    pub kind: Kind,
    pub channel: &'static str,
    pub state: &'static str,
    pub event_id: Uuid,
}

dialects! {
    /// Writes notices; one that exists for its order and kind stays as it is.
    pub async fn insert_many(notices: &[NewNotice], now: Timestamp) -> ();
}

#[derive(Debug, Clone)]
pub struct Notice {
    pub id: Uuid,
    pub order_id: Uuid,
    pub kind: String,
    pub channel: String,
    pub state: String,
    pub created_at: Timestamp,
}

/// Which notices to list; every field narrows.
#[derive(Debug, Default, Clone)]
pub struct Query {
    pub group_id: String,
    pub order_id: Option<Uuid>,
    pub kind: Option<Kind>,
    pub state: Option<String>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

/// Newest first.
pub async fn list(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<Notice>> {
    let filter = Filter::new("SELECT id, order_id, kind, channel, state, created_at FROM notifications_notices")
        .and("group_id = ?", [query.group_id.into()])
        .and_some("order_id = ?", query.order_id)
        .and_some("kind = ?", query.kind.map(Kind::as_str))
        .and_some("state = ?", query.state)
        .and_some("id < ?", query.before)
        .page("id DESC", query.limit);
    let rows = fetch_page!(tx, filter, (Uuid, Uuid, String, String, String, Timestamp))?;
    Ok(rows
        .into_iter()
        .map(|(id, order_id, kind, channel, state, created_at)| Notice {
            id,
            order_id,
            kind,
            channel,
            state,
            created_at,
        })
        .collect())
}
