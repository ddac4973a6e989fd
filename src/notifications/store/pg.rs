use sqlx::PgConnection;
use uuid::Uuid;

use super::{Attempt, NewNotice};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::db::Column;

pub async fn write_many(c: &mut PgConnection, notices: &[NewNotice], now: Timestamp) -> sqlx::Result<Vec<Uuid>> {
    let mut written = insert_new(c, notices, now).await?;
    if written.len() < notices.len() {
        let known = notices.iter().filter(|notice| !written.contains(&notice.event_id)).collect::<Vec<_>>();
        written.extend(write_again(c, &known, now).await?);
    }
    Ok(written)
}

/// Those that there is no notice of yet. A look before each insert, for ON CONFLICT writes every row twice: whoever loses a
/// race to another transaction gets its violation of the key, and is run again. LIMIT keeps the look from being planned as a
/// join.
async fn insert_new(c: &mut PgConnection, notices: &[NewNotice], now: Timestamp) -> sqlx::Result<Vec<Uuid>> {
    let group_id = Column::of(notices.iter().map(|notice| notice.group_id.as_str()));
    let kind = Column::of(notices.iter().map(|notice| notice.kind.as_str()));
    let channel = Column::of(notices.iter().map(|notice| notice.channel));
    let state = Column::of(notices.iter().map(|notice| notice.state.as_str()));
    sqlx::query_scalar(
        "INSERT INTO notifications_notices (group_id, id, order_id, kind, channel, state, event_id, created_at)
         SELECT row.group_id, id, order_id, row.kind, row.channel, row.state, event_id, $12
         FROM (SELECT COALESCE(group_id, $2) AS group_id, id, order_id, COALESCE(kind, $6) AS kind,
                 COALESCE(channel, $8) AS channel, COALESCE(state, $10) AS state, event_id
             FROM UNNEST($1::text[], $3::uuid[], $4::uuid[], $5::text[], $7::text[], $9::text[], $11::uuid[])
                 AS given(group_id, id, order_id, kind, channel, state, event_id)) AS row
         LEFT JOIN LATERAL (SELECT true AS is_there FROM notifications_notices n
             WHERE n.group_id = row.group_id AND n.order_id = row.order_id AND n.kind = row.kind LIMIT 1) AS met ON true
         WHERE met.is_there IS NULL
         RETURNING event_id",
    )
    .bind(group_id.each)
    .bind(group_id.shared)
    .bind(notices.iter().map(|notice| notice.id).collect::<Vec<_>>())
    .bind(notices.iter().map(|notice| notice.order_id).collect::<Vec<_>>())
    .bind(kind.each)
    .bind(kind.shared)
    .bind(channel.each)
    .bind(channel.shared)
    .bind(state.each)
    .bind(state.shared)
    .bind(notices.iter().map(|notice| notice.event_id).collect::<Vec<_>>())
    .bind(now)
    .fetch_all(c)
    .await
}

/// Those that there is a notice of, but for what another event brought about and what is sent.
async fn write_again(c: &mut PgConnection, notices: &[&NewNotice], now: Timestamp) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar(
        "UPDATE notifications_notices n SET channel = r.channel, state = r.state, last_error = NULL, updated_at = $7
         FROM UNNEST($1::text[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::uuid[])
             AS r(group_id, order_id, kind, channel, state, event_id)
         WHERE n.group_id = r.group_id AND n.order_id = r.order_id AND n.kind = r.kind AND n.event_id = r.event_id
             AND n.state <> 'sent'
         RETURNING n.event_id",
    )
    .bind(notices.iter().map(|notice| notice.group_id.as_str()).collect::<Vec<_>>())
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
