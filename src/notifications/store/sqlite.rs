use sqlx::types::Json;
use uuid::Uuid;

use super::{Attempt, NewNotice};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::sqlite::{SqliteConnection, query};

pub async fn write_many(c: &mut SqliteConnection, notices: &[NewNotice], now: Timestamp) -> sqlx::Result<Vec<Uuid>> {
    let written: Vec<(Uuid,)> = c.insert_returning(
        "notifications_notices AS n (group_id, id, order_id, kind, channel, state, event_id, created_at)",
        notices.iter().map(|notice| {
            let (kind, state) = (notice.kind.as_str(), notice.state.as_str());
            let [id, order_id, event_id] = [&notice.id, &notice.order_id, &notice.event_id].map(Uuid::as_bytes);
            (&notice.group_id, id, order_id, kind, notice.channel, state, event_id, now)
        }),
        "ON CONFLICT (group_id, order_id, kind) DO UPDATE
             SET channel = excluded.channel, state = excluded.state, last_error = NULL, updated_at = excluded.created_at
             WHERE n.event_id = excluded.event_id AND n.state <> 'sent'
         RETURNING event_id",
    )?;
    Ok(written.into_iter().map(|(event_id,)| event_id).collect())
}

pub async fn conclude_many(c: &mut SqliteConnection, attempts: &[Attempt], now: Timestamp) -> sqlx::Result<()> {
    let rows: Vec<_> = attempts
        .iter()
        .map(|attempt| {
            let (order_id, event_id) = (attempt.order_id.simple(), attempt.event_id.simple());
            let (kind, state) = (attempt.kind.as_str(), attempt.state.as_str());
            (&attempt.group_id, order_id, kind, event_id, state, &attempt.last_error)
        })
        .collect();
    query(
        "UPDATE notifications_notices AS n SET
             state = CASE WHEN n.in_doubt AND a.value ->> 4 <> 'sent' THEN 'unknown' ELSE a.value ->> 4 END,
             in_doubt = a.value ->> 4 <> 'sent' AND (n.in_doubt OR a.value ->> 4 = 'unknown'),
             last_error = a.value ->> 5, updated_at = $2
         FROM jsonb_each($1) AS a
         WHERE n.group_id = a.value ->> 0 AND n.order_id = unhex(a.value ->> 1) AND n.kind = a.value ->> 2
             AND n.event_id = unhex(a.value ->> 3)",
    )
    .bind(Json(rows))
    .bind(now)
    .execute(c)
    .await
    .map(drop)
}
