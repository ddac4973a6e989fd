use sqlx::PgConnection;

use super::NewNotice;
use crate::clock::Timestamp;

pub async fn insert_many(c: &mut PgConnection, notices: &[NewNotice], now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO notifications_notices (group_id, id, order_id, kind, channel, state, event_id, created_at)
         SELECT group_id, id, order_id, kind, channel, state, event_id, $8
         FROM UNNEST($1::text[], $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::uuid[])
             AS row(group_id, id, order_id, kind, channel, state, event_id)
         ON CONFLICT (group_id, order_id, kind) DO NOTHING",
    )
    .bind(notices.iter().map(|notice| notice.group_id.as_str()).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.id).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.order_id).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.kind.as_str()).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.channel).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.state).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.event_id).collect::<Vec<_>>())
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}
