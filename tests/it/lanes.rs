//! Connections that belong to one loop each, on Postgres.

use std::time::Duration;

use stockade::orders::model::{OrderId, Status};
use stockade::orders::service::Answer;
use stockade::orders::store as orders;
use stockade_kernel::clock::{Clock, mint_id};
use stockade_kernel::db::{Db, Tx};
use stockade_kernel::messaging::Event;
use stockade_kernel::messaging::event::hash_of;
use stockade_kernel::messaging::inbox::{self, Arrival};
use stockade_kernel::on;

use crate::support::kernel::many;
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

#[tokio::test(crate = "crate::support::schedule")]
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

#[tokio::test(crate = "crate::support::schedule")]
async fn each_statement_sees_what_is_committed_whatever_the_database_does_by_default() {
    let test = TestDb::new(Engine::Postgres).await;
    let mut tx = test.open(Clock::System).await.begin().await.unwrap();
    let strict = "DO $$ BEGIN EXECUTE
         format('ALTER DATABASE %I SET default_transaction_isolation TO serializable', current_database()); END $$";
    on!(tx, c => sqlx::query(strict).execute(c).await.map(drop)).unwrap();
    tx.commit().await.unwrap();
    let db = test.open(Clock::System).await;
    for db in [&db, &db.on_a_lane()] {
        let mut tx = db.begin_chained().await.unwrap();
        let level: String = on!(tx, c => sqlx::query_scalar("SHOW transaction_isolation").fetch_one(c).await).unwrap();
        assert_eq!(level, "read committed");
    }
}

/// The tables that a batch of the loops looks into, in a transaction that did so.
async fn read_from_end_to_end(tx: &mut Tx) -> Vec<String> {
    let scanned = "SELECT relname::text FROM pg_stat_xact_user_tables WHERE seq_scan > 0
         AND relname IN ('orders_orders', 'messaging_inbox', 'inventory_reservations', 'notifications_notices')";
    on!(tx, c => sqlx::query_scalar(scanned).fetch_all(c).await).unwrap()
}

#[tokio::test(crate = "crate::support::schedule")]
async fn a_loop_on_a_lane_finds_rows_by_their_keys_however_few_there_are() {
    let test = TestDb::new(Engine::Postgres).await;
    let db = test.open(Clock::System).await;
    let lane = db.on_a_lane();
    for round in 0..8 {
        let mut tx = lane.begin_chained().await.unwrap();
        let now = tx.now();
        let events: Vec<Event> = many("note", 20);
        let hashes: Vec<_> = events.iter().map(|event| hash_of(&event.to_body())).collect();
        let arrivals: Vec<Arrival<'_>> = events
            .iter()
            .zip(&hashes)
            .map(|(event, body_hash)| Arrival { event, key: "test.told", body_hash })
            .collect();
        inbox::insert_new(&mut tx, "probe", &arrivals, now, now).await.unwrap();
        let order = |_| OrderId(mint_id());
        let ids: Vec<OrderId> = (0..20).map(order).collect();
        for (index, id) in ids.iter().enumerate() {
            let insert = "INSERT INTO orders_orders (group_id, id, number, customer_id, status, currency, total_minor,
                     correlation_id, created_at, updated_at)
                 VALUES ('g', $1, $2, 'c', 'placed', 'USD', 0, 'c', now(), now())";
            let number = format!("ORD-{round}-{index}");
            on!(tx, c => sqlx::query(insert).bind(id.0).bind(&number).execute(c).await.map(drop)).unwrap();
        }
        let answer =
            |id: &OrderId| Answer { group_id: "g".into(), order_id: *id, status: Status::Reserved, reason: None };
        let answers: Vec<Answer> = ids.iter().map(answer).collect();
        assert_eq!(orders::answer_many(&mut tx, &answers, Duration::from_secs(60), now).await.unwrap(), 20);
        assert_eq!(read_from_end_to_end(&mut tx).await, [""; 0], "in round {round}");
        tx.commit().await.unwrap();
        // Statistics that say how few there are.
        let mut tx = db.begin().await.unwrap();
        on!(tx, c => sqlx::query("ANALYZE").execute(c).await.map(drop)).unwrap();
        tx.commit().await.unwrap();
    }
}

#[tokio::test(crate = "crate::support::schedule")]
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
