//! Connections that belong to one loop each, on Postgres.

use stockade::clock::Clock;
use stockade::db::{Db, Tx};
use stockade::on;

use crate::support::{CONNECTIONS_MAX, Engine, TestDb};

async fn server_of(tx: &mut Tx) -> i32 {
    on!(tx, c => sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(c).await).unwrap()
}

async fn next_server_of(db: &Db) -> i32 {
    let mut tx = db.begin_chained().await.unwrap();
    let server = server_of(&mut tx).await;
    tx.commit().await.unwrap();
    server
}

#[tokio::test]
async fn a_loop_on_a_lane_always_has_the_same_connection_and_another_when_it_is_taken() {
    let test = TestDb::new(Engine::Postgres).await;
    let db = test.open(Clock::System).await;
    let (one, other) = (db.on_a_lane(), db.on_a_lane());
    let server = next_server_of(&one).await;
    assert_ne!(next_server_of(&other).await, server);
    for _ in 0..3 {
        // Whoever shares connections takes them in turn.
        let held = [db.begin().await.unwrap(), db.begin().await.unwrap()];
        assert_eq!(next_server_of(&one).await, server);
        drop(held);
    }
    let mut work = one.begin_chained().await.unwrap();
    assert_eq!(server_of(&mut work).await, server);
    let mut beside = one.begin_relaxed().await.unwrap();
    assert_ne!(server_of(&mut beside).await, server, "a renewal does not wait for the work");
    drop(beside);
    // Dropped without a commit, it is as good as ever.
    drop(work);
    assert_eq!(next_server_of(&one).await, server);
}

#[tokio::test]
async fn there_are_never_more_connections_than_the_settings_allow() {
    let test = TestDb::new(Engine::Postgres).await;
    let db = test.open(Clock::System).await;
    let many: Vec<Db> = (0..CONNECTIONS_MAX).map(|_| db.on_a_lane()).collect();
    let mut begun = Vec::new();
    for db in &many {
        begun.push(db.begin().await.unwrap());
    }
    let servers =
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'stockade' AND datname = current_database()";
    let count: i64 = on!(begun[0], c => sqlx::query_scalar(servers).fetch_one(c).await).unwrap();
    assert_eq!(count, i64::from(CONNECTIONS_MAX));
}
