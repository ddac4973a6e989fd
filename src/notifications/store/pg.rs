use sqlx::PgConnection;
use uuid::Uuid;

use super::{Attempt, NewNotice};
use crate::clock::Timestamp;

pub async fn insert_many(c: &mut PgConnection, notices: &[NewNotice], now: Timestamp) -> sqlx::Result<()> {
    begin_many(c, notices, now).await.map(drop)
}

pub async fn begin_many(c: &mut PgConnection, notices: &[NewNotice], now: Timestamp) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar(
        "INSERT INTO notifications_notices AS n (group_id, id, order_id, kind, channel, state, event_id, created_at)
         SELECT group_id, id, order_id, kind, channel, state, event_id, $8
         FROM UNNEST($1::text[], $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::uuid[])
             AS row(group_id, id, order_id, kind, channel, state, event_id)
         ON CONFLICT (group_id, order_id, kind) DO UPDATE
             SET channel = excluded.channel, state = excluded.state, last_error = NULL, updated_at = $8
             WHERE n.event_id = excluded.event_id AND n.state <> 'sent'
         RETURNING event_id",
    )
    .bind(notices.iter().map(|notice| notice.group_id.as_str()).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.id).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.order_id).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.kind.as_str()).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.channel).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.state.as_str()).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.event_id).collect::<Vec<_>>())
    .bind(now)
    .fetch_all(c)
    .await
}

pub async fn conclude_many(c: &mut PgConnection, attempts: &[Attempt], now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE notifications_notices n SET
             state = CASE WHEN n.in_doubt AND a.state <> 'sent' THEN 'unknown' ELSE a.state END,
             in_doubt = a.state <> 'sent' AND (n.in_doubt OR a.state = 'unknown'),
             last_error = a.last_error, updated_at = $7
         FROM UNNEST($1::text[], $2::uuid[], $3::text[], $4::uuid[], $5::text[], $6::text[])
             AS a(group_id, order_id, kind, event_id, state, last_error)
         WHERE n.group_id = a.group_id AND n.order_id = a.order_id AND n.kind = a.kind AND n.event_id = a.event_id",
    )
    .bind(attempts.iter().map(|attempt| attempt.group_id.as_str()).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.order_id).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.kind.as_str()).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.event_id).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.state.as_str()).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.last_error.as_deref()).collect::<Vec<_>>())
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}
