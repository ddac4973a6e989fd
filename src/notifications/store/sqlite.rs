use sqlx::SqliteConnection;
use sqlx::types::Json;

use super::NewNotice;
use crate::clock::Timestamp;

pub async fn insert_many(c: &mut SqliteConnection, notices: &[NewNotice], now: Timestamp) -> sqlx::Result<()> {
    let rows: Vec<_> = notices
        .iter()
        .map(|notice| {
            let (id, order_id, event_id) = (notice.id.simple(), notice.order_id.simple(), notice.event_id.simple());
            (&notice.group_id, id, order_id, notice.kind.as_str(), notice.channel, notice.state, event_id)
        })
        .collect();
    sqlx::query(
        // `WHERE true`: without it, ON CONFLICT would parse as a join condition
        "INSERT INTO notifications_notices (group_id, id, order_id, kind, channel, state, event_id, created_at)
         SELECT value ->> 0, unhex(value ->> 1), unhex(value ->> 2), value ->> 3, value ->> 4, value ->> 5,
             unhex(value ->> 6), $2
         FROM jsonb_each($1) WHERE true ON CONFLICT (group_id, order_id, kind) DO NOTHING",
    )
    .bind(Json(rows))
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}
