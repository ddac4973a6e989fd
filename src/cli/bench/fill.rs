//! A database that has been at work for a while: rows published yesterday, and a snapshot that somebody holds open.

use indicatif::ProgressBar;
use sqlx::{Connection, Executor, PgConnection};
use stockade::http::caller::DEFAULT_GROUP;
use stockade_kernel::db::{Conn, Db, Tx, sqlite};

/// Rows written in one transaction.
const CHUNK: i64 = 50_000;

/// Adds published outbox rows of about 600 bytes, a millisecond apart, from a day ago on.
pub async fn publish_yesterday(db: &Db, rows: i64) -> anyhow::Result<()> {
    let bar = ProgressBar::new(rows.unsigned_abs());
    for start in (0..rows).step_by(usize::try_from(CHUNK)?) {
        let end = (start + CHUNK).min(rows);
        let mut tx = db.begin_relaxed().await?;
        match tx.conn() {
            Conn::Postgres(c) => {
                sqlx::query(
                    "INSERT INTO messaging_outbox (id, event_id, kind, group_id, aggregate_type, aggregate_id, event_type,
                         body, headers, status, available_at, created_at, published_at, correlation_id)
                     SELECT id, id, 'event', $1, 'order', id::text, 'placed', convert_to(repeat('x', 600), 'UTF8'), '{}',
                         'published', t, t, t, id::text
                     FROM (SELECT t, (lpad(to_hex((extract(epoch FROM t) * 1000)::bigint), 12, '0') || '7'
                             || substr(md5(random()::text), 1, 3) || '8' || substr(md5(random()::text), 1, 15))::uuid AS id
                         FROM (SELECT now() - interval '1 day' + n * interval '1 ms' AS t
                             FROM generate_series($2::bigint, $3::bigint - 1) AS n) AS times) AS ids",
                )
                .bind(DEFAULT_GROUP)
                .bind(start)
                .bind(end)
                .execute(&mut **c)
                .await?;
            }
            Conn::Sqlite(c) => {
                sqlite::query(
                    "WITH RECURSIVE n(i) AS (SELECT $2 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < $3),
                     ids(t, id) AS MATERIALIZED (
                         SELECT CAST(unixepoch() AS INTEGER) * 1000 - 86400000 + i,
                             unhex(printf('%012x', unixepoch() * 1000 - 86400000 + i) || '7'
                                 || substr(hex(randomblob(2)), 1, 3) || '8' || substr(hex(randomblob(8)), 1, 15))
                         FROM n)
                     INSERT INTO messaging_outbox (id, event_id, kind, group_id, aggregate_type, aggregate_id, event_type,
                         body, headers, status, available_at, created_at, published_at, correlation_id)
                     SELECT id, id, 'event', $1, 'order', hex(id), 'placed', CAST(printf('%0600d', 0) AS BLOB), '{}',
                         'published', t, t, t, hex(id) FROM ids",
                )
                .bind(DEFAULT_GROUP)
                .bind(start)
                .bind(end)
                .execute(c)
                .await?;
            }
        }
        tx.commit().await?;
        bar.set_position(end.unsigned_abs());
    }
    bar.finish_and_clear();
    Ok(())
}

/// Lets Postgres do what it would have done since yesterday, so that it is not measured doing it.
pub async fn tidy_up(database_url: &str, rows: i64) -> anyhow::Result<()> {
    if rows > 0 && database_url.starts_with("postgres") {
        let mut connection = PgConnection::connect(database_url).await?;
        connection.execute("VACUUM ANALYZE messaging_outbox").await?;
        // For whoever may: it is not every user's.
        let _ = connection.execute("CHECKPOINT").await;
        connection.close().await?;
    }
    Ok(())
}

/// A transaction that has looked and does not end: while it is held, nothing that is deleted can be cleared away.
pub async fn hold_snapshot(db: &Db) -> anyhow::Result<Tx> {
    let mut tx = db.read().await?;
    let _: i64 =
        stockade_kernel::on!(tx, c => sqlx::query_scalar("SELECT count(*) FROM messaging_pauses").fetch_one(c).await)?;
    Ok(tx)
}
