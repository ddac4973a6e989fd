//! Notices over HTTP.

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::model::{Kind, State as NoticeState};
use super::store::{self, Notice};
use crate::http::caller::Caller;
use crate::http::extract::{Params, bad_filter};
use crate::http::page::{Page, fetch_limit, limit, read_uuid_cursor};
use crate::http::problem::Problem;
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::Db;

pub fn routes() -> OpenApiRouter<Db> {
    OpenApiRouter::new().routes(routes!(list_notifications))
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Notification)]
pub struct NoticeBody {
    id: Uuid,
    order_id: Uuid,
    #[schema(example = "reserved")]
    kind: String,
    #[schema(example = "log")]
    channel: String,
    #[schema(example = "sent")]
    state: String,
    /// What brought it about, and how often it was tried: `/v1/inbox/notifications/{event_id}`.
    event_id: Uuid,
    /// Why it is not sent, or not known to be.
    last_error: Option<String>,
    created_at: Timestamp,
    /// Since when it is in this state.
    updated_at: Timestamp,
}

impl From<Notice> for NoticeBody {
    fn from(notice: Notice) -> Self {
        Self {
            id: notice.id,
            order_id: notice.order_id,
            kind: notice.kind,
            channel: notice.channel,
            state: notice.state,
            event_id: notice.event_id,
            last_error: notice.last_error,
            created_at: notice.created_at,
            updated_at: notice.updated_at,
        }
    }
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListNotifications {
    id: Option<Uuid>,
    order_id: Option<Uuid>,
    #[param(inline)]
    kind: Option<Kind>,
    /// pending, sending, sent, failed or unknown
    state: Option<String>,
    /// 1 to 200; 50 if not given.
    limit: Option<i64>,
    cursor: Option<String>,
}

/// List notices, newest first.
#[utoipa::path(get, path = "/v1/notifications", tag = "notifications", security(("key" = ["viewer"])), params(ListNotifications), responses(
    (status = 200, body = Page<NoticeBody>),
    (status = 400, body = Problem, content_type = "application/problem+json"),
))]
async fn list_notifications(
    State(db): State<Db>,
    caller: Caller,
    Params(params): Params<ListNotifications>,
) -> Result<Page<NoticeBody>, Problem> {
    let limit = limit(params.limit)?;
    let states = NoticeState::ALL.map(NoticeState::as_str);
    if params.state.as_deref().is_some_and(|state| !states.contains(&state)) {
        return Err(bad_filter(format!("state must be one of {}", states.join(", "))));
    }
    let query = store::Query {
        group_id: caller.group_id,
        id: params.id,
        order_id: params.order_id,
        kind: params.kind,
        state: params.state,
        before: read_uuid_cursor(params.cursor.as_deref())?,
        limit: fetch_limit(limit),
    };
    let notices = store::list(&mut db.read().await?, query).await?;
    Ok(Page::new(notices, limit, |notice| notice.id.to_string()))
}
