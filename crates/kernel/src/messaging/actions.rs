//! Who did what, when and why: a row for each thing an operator did, written in the transaction that did it. Rows are
//! only ever added.

use serde_json::Value;
use uuid::Uuid;

use crate::clock::{Timestamp, mint_id};
use crate::db::{Filter, Tx, fetch_page};

/// Something an operator does.
#[derive(Debug, Clone)]
pub struct NewAction {
    /// Whose operators did it; `None` if it was done for every group.
    pub group_id: Option<String>,
    pub who: String,
    pub action: &'static str,
    /// What it is done to: the id of a letter, a redrive or a replay, or the name of a consumer.
    pub subject: String,
    pub why: Option<String>,
    pub details: Value,
    pub request_id: String,
}

pub async fn record(tx: &mut Tx, action: &NewAction) -> sqlx::Result<()> {
    let now = tx.now();
    crate::on!(tx, c => {
        sqlx::query(
            "INSERT INTO messaging_actions (id, who, action, subject, why, details, request_id, created_at, group_id)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        )
        .bind(mint_id())
        .bind(&action.who)
        .bind(action.action)
        .bind(&action.subject)
        .bind(&action.why)
        .bind(action.details.to_string())
        .bind(&action.request_id)
        .bind(now)
        .bind(&action.group_id)
        .execute(c)
        .await
        .map(drop)
    })
}

/// Something an operator did.
#[derive(Debug, Clone, serde::Serialize, utoipa::ToSchema)]
pub struct Action {
    pub id: Uuid,
    /// The name of the key, and what its holder said of itself in `X-Operator`.
    #[schema(example = "alice")]
    pub who: String,
    #[schema(example = "dead-letter.discard")]
    pub action: String,
    pub subject: String,
    pub why: Option<String>,
    pub details: Value,
    pub request_id: String,
    pub created_at: Timestamp,
}

#[derive(Debug, Default, Clone)]
pub struct Query {
    /// What was done for this group alone.
    pub group_id: Option<String>,
    pub who: Option<String>,
    pub action: Option<String>,
    pub subject: Option<String>,
    pub before: Option<Uuid>,
    pub limit: i64,
}

/// Newest first.
pub async fn list(tx: &mut Tx, query: Query) -> sqlx::Result<Vec<Action>> {
    let select = "SELECT id, who, action, subject, why, details, request_id, created_at FROM messaging_actions";
    let filter = Filter::new(select)
        .and_some("group_id = ?", query.group_id)
        .and_some("who = ?", query.who)
        .and_some("action = ?", query.action)
        .and_some("subject = ?", query.subject)
        .and_some("id < ?", query.before)
        .page("id DESC", query.limit);
    type Columns = (Uuid, String, String, String, Option<String>, String, String, Timestamp);
    let action = |(id, who, action, subject, why, details, request_id, created_at): Columns| Action {
        id,
        who,
        action,
        subject,
        why,
        details: serde_json::from_str(&details).unwrap_or(Value::Null),
        request_id,
        created_at,
    };
    Ok(fetch_page!(tx, filter, Columns)?.into_iter().map(action).collect())
}
