use sqlx::SqliteConnection;
use sqlx::types::Json;
use uuid::Uuid;

use super::{Attempt, NewNotice};
use crate::clock::Timestamp;

/// The same statement for both, but that one returns rows: each costs two context switches, and notices by log go
/// without.
macro_rules! upsert {
    ($returning:literal) => {
        concat!(
            "INSERT INTO notifications_notices AS n
                 (group_id, id, order_id, kind, channel, state, event_id, created_at)
             SELECT value ->> 0, unhex(value ->> 1), unhex(value ->> 2), value ->> 3, value ->> 4, value ->> 5,
                 unhex(value ->> 6), $2
             FROM jsonb_each($1)
             WHERE true -- or ON CONFLICT would parse as a join condition
             ON CONFLICT (group_id, order_id, kind) DO UPDATE
                 SET channel = excluded.channel, state = excluded.state, last_error = NULL, updated_at = $2
                 WHERE n.event_id = excluded.event_id AND n.state <> 'sent' ",
            $returning
        )
    };
}

pub async fn insert_many(c: &mut SqliteConnection, notices: &[NewNotice], now: Timestamp) -> sqlx::Result<()> {
    sqlx::query(upsert!("")).bind(json(notices)).bind(now).execute(c).await.map(drop)
}

pub async fn begin_many(c: &mut SqliteConnection, notices: &[NewNotice], now: Timestamp) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar(upsert!("RETURNING event_id")).bind(json(notices)).bind(now).fetch_all(c).await
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
    sqlx::query(
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

fn json(notices: &[NewNotice]) -> Json<Vec<impl serde::Serialize>> {
    let row = |notice: &NewNotice| {
        let (id, order_id, event_id) = (notice.id.simple(), notice.order_id.simple(), notice.event_id.simple());
        let (kind, state) = (notice.kind.as_str(), notice.state.as_str());
        (notice.group_id.clone(), id, order_id, kind, notice.channel, state, event_id)
    };
    Json(notices.iter().map(row).collect())
}
