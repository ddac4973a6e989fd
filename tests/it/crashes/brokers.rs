//! A broker that is killed, frozen, full or short of memory: orders are taken all the same, and when it is well again
//! everything goes on by itself, with nothing lost and nothing done twice.

use std::sync::Arc;
use std::time::Duration;

use lapin::BasicProperties;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::Shop;
use crate::rabbit::{Stranger, foreign_order};
use crate::support::rabbit::{self, Rabbit};
use crate::support::{
    Api, DEADLINE, Engine, OwnPostgres, TestDb, Wire, eventually, never, until_finished_and_audited, witness,
};

/// A shop on the node that may be taken away, all of whose queues have been there for a while.
pub(super) async fn shop_on<'a>(db: &'a TestDb, more: &[&'static str]) -> Shop<'a> {
    let mut shop = Shop::open(db, more).await;
    shop.place(10).await;
    shop.check().await;
    rabbit::until_queues_are_safe().await;
    shop
}

async fn ground(engine: Engine, broker: &Rabbit) -> TestDb {
    TestDb::new(engine).await.over(Wire::on(broker.url()))
}

async fn broker_status(api: &Api) -> String {
    api.read("/v1/health").await["broker"]["status"].as_str().unwrap().to_owned()
}

pub(super) async fn until_broker_is(api: &Api, status: &str) {
    eventually(&format!("a broker that is {status}"), || async { (broker_status(api).await == status).then_some(()) })
        .await;
}

/// The server is ready and says that it is not well; the figures it gives of queues are old and said to be.
async fn assert_degraded(api: &Api, status: &str) {
    let health = api.read("/v1/health").await;
    assert_eq!((&health["status"], &health["broker"]["status"]), (&json!("degraded"), &json!(status)), "{health}");
    assert!(!health["broker"]["error"].as_str().unwrap().is_empty(), "it says why");
    let ready = api.read("/readyz").await; // 200: orders are taken
    assert_eq!((&ready["status"], &ready["checks"]["broker"]), (&json!("degraded"), &json!(status)));
    let queues = api.read("/v1/queues").await;
    let stale: Vec<&Value> = queues["data"].as_array().unwrap().iter().map(|queue| &queue["stale"]).collect();
    assert!(stale.len() >= 4, "{queues}");
    // A broker that merely takes no messages can still be asked.
    assert_eq!(stale, vec![&json!(status == "down"); stale.len()], "{queues}");
}

/// Nothing has counted as an attempt and nothing was given up on.
async fn assert_no_attempt_was_counted(db: &TestDb) {
    let counted = "SELECT COUNT(*) FROM messaging_outbox WHERE attempts > 0 OR status IN ('failed', 'dead')";
    assert_eq!(db.count(counted).await, 0);
}

const PENDING: &str = "SELECT COUNT(*) FROM messaging_outbox WHERE status = 'pending'";

async fn until_published(db: &TestDb, pending: i64) {
    eventually("rows being published", || async { (db.count(PENDING).await < pending).then_some(()) }).await;
}

/// Counts connection attempts on the port of a broker that is down. A client that does not back off makes all of them
/// within a few milliseconds.
async fn assert_backs_off(broker: &Rabbit) {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", broker.port())).await.unwrap();
    let began = Instant::now();
    for _ in 0..6 {
        tokio::time::timeout(DEADLINE, listener.accept()).await.expect("it tries to connect").unwrap();
    }
    assert!(began.elapsed() > Duration::from_millis(200), "six attempts in {:?}", began.elapsed());
}

/// The broker dies while orders are being placed, published and consumed.
async fn survive_a_kill(engine: Engine) {
    let broker = rabbit::faulty().await;
    let db = ground(engine, &broker).await;
    let mut shop = shop_on(&db, &[]).await;
    for _ in 0..2 {
        let before = shop.orders;
        tokio::join!(shop.place(100), async {
            let orders = "SELECT COUNT(*) FROM orders_orders";
            eventually("a few orders", || async { (db.count(orders).await > before).then_some(()) }).await;
            broker.kill();
        });
        until_broker_is(&shop.server, "down").await;
        shop.place(50).await;
        shop.ask_again().await;
        assert_eq!(db.count("SELECT COUNT(*) FROM orders_orders").await, before + 150, "every order is accepted");
        assert_degraded(&shop.server, "down").await;
        assert_backs_off(&broker).await;
        assert_no_attempt_was_counted(&db).await;
        let pending = db.count(PENDING).await;
        assert!(pending >= 50);
        broker.start_again();
        until_published(&db, pending).await;
        shop.check().await;
        assert_no_attempt_was_counted(&db).await;
        rabbit::until_queues_are_safe().await;
    }
    assert!(shop.letters().await.is_empty());
    assert!(shop.server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_broker_killed_and_started_again_costs_nothing_on_sqlite() {
    survive_a_kill(Engine::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_broker_killed_and_started_again_costs_nothing_on_postgres() {
    survive_a_kill(Engine::Postgres).await;
}

/// The broker closes every connection in an orderly way, unlike a kill.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_broker_restarted_under_load_costs_nothing_and_consumers_keep_their_prefetch() {
    const PREFETCH: i64 = 8;
    let broker = Arc::new(rabbit::faulty().await);
    let db = ground(Engine::Postgres, &broker).await;
    let mut shop = shop_on(&db, &["--prefetch", "8", "--batch", "8"]).await;
    let api = shop.api();
    let eval = async |expression: &'static str| {
        let broker = broker.clone();
        tokio::task::spawn_blocking(move || broker.eval(expression)).await.unwrap();
    };
    shop.place_during(async {
        eval("rabbit:stop()").await;
        until_broker_is(&api, "down").await;
        eval("rabbit:start()").await;
        api.until_connected().await;
    })
    .await;
    shop.ask_again().await;
    shop.check().await;
    shop.assert_no_attempt_was_counted().await;

    // Without a prefetch the broker would deliver the whole queue to the slow consumer.
    api.tell("/v1/lab/slow", &json!({ "consumer": "inventory", "ms": 2000 })).await;
    shop.place(20).await;
    let ready = async || api.read("/v1/queues/inventory").await["depth"].as_i64().unwrap();
    eventually("as much delivered as the prefetch", async || (ready().await == 20 - PREFETCH).then_some(())).await;
    let more = async || (ready().await < 20 - PREFETCH).then_some(());
    never("more delivered than the prefetch", Duration::from_secs(1), more).await;
    api.tell("/v1/lab/reset", &json!({})).await;
    shop.check().await;
    assert!(shop.server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_server_starts_and_stops_while_its_broker_is_away() {
    let broker = rabbit::faulty().await;
    let db = ground(Engine::Sqlite, &broker).await;
    broker.kill();
    let server = witness::start(&db, &super::QUICK);
    server.put_stock("A", super::STOCK).await;
    assert_eq!(server.place("alice", &[("A", 1)]).await["status"], "placed");
    assert_degraded(&server, "down").await;
    assert!(server.terminate().await, "nothing to wait for");
    let server = witness::start(&db, &super::QUICK);
    broker.start_again();
    server.until_connected().await;
    until_finished_and_audited(&db).await;
    witness::check(&db).await;
    assert_eq!(db.count("SELECT COUNT(*) FROM notifications_notices").await, 1);
    assert_no_attempt_was_counted(&db).await;
    assert!(server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_broker_that_hangs_is_found_out_and_connections_it_cuts_are_made_again() {
    let broker = rabbit::faulty().await;
    let db = ground(Engine::Postgres, &broker).await;
    let mut shop = shop_on(&db, &["--amqp-heartbeat", "1s"]).await;
    broker.freeze();
    shop.place(20).await;
    shop.server.read("/v1/queues").await;
    until_broker_is(&shop.server, "down").await;
    shop.place(20).await;
    assert_degraded(&shop.server, "down").await;
    broker.thaw();
    shop.check().await;

    broker.eval("[rabbit_networking:close_connection(P, <<\"test\">>) || P <- rabbit_networking:connections()]");
    shop.place(20).await;
    shop.check().await;
    assert_no_attempt_was_counted(&db).await;
    assert!(shop.server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_channel_that_the_broker_closes_takes_no_connection_along() {
    let broker = rabbit::faulty().await;
    let db = ground(Engine::Sqlite, &broker).await;
    let mut shop = shop_on(&db, &[]).await;
    // Their processes, of which there is a new one for each new connection.
    let connections = || {
        broker.eval(
            r#"lists:sort([pid_to_list(proplists:get_value(pid, I)) ||
                 I <- rabbit_networking:connection_info_all([pid, client_properties]),
                 {<<"connection_name">>, _, <<"stockade", _/binary>>} <- proplists:get_value(client_properties, I)])"#,
        )
    };
    let before = connections();
    assert_eq!(before.matches('<').count(), 2, "one to publish and one to consume: {before}");
    // Looking for a queue that is gone costs the channel that asks.
    Stranger::on(&db).await.delete("notifications").await;
    shop.place(5).await;
    shop.check().await;
    assert_eq!(connections(), before);
    assert!(shop.server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_broker_short_of_memory_stops_neither_the_api_nor_the_consumers() {
    let broker = rabbit::faulty().await;
    let db = ground(Engine::Postgres, &broker).await;
    let mut shop = shop_on(&db, &[]).await;
    // Something for a consumer to do while nothing can be published.
    shop.server.tell("/v1/consumers/inventory/pause", &json!({})).await;
    shop.place(10).await;
    eventually("published", || async { (db.count(PENDING).await == 0).then_some(()) }).await;
    broker.raise_memory_alarm().await;
    shop.place(10).await;
    until_broker_is(&shop.server, "blocked").await;
    shop.server.tell("/v1/consumers/inventory/resume", &json!({})).await;
    let handled = "SELECT COUNT(*) FROM messaging_inbox WHERE consumer = 'inventory' AND event_type = 'order.placed'";
    eventually("consuming goes on", || async { (db.count(handled).await == 20).then_some(()) }).await;
    assert_eq!(shop.server.read("/v1/queues/inventory").await["depth"], 0, "and acknowledging too");
    shop.place(10).await;
    assert_degraded(&shop.server, "blocked").await;
    assert_no_attempt_was_counted(&db).await;
    let pending = db.count(PENDING).await;
    assert!(pending >= 20, "{pending}");
    broker.clear_memory_alarm();
    until_published(&db, pending).await;
    shop.check().await;
    assert_no_attempt_was_counted(&db).await;
    assert_eq!(broker_status(&shop.server).await, "up");
    assert!(shop.server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_full_queue_refuses_and_is_asked_again() {
    let broker = rabbit::faulty().await;
    let db = ground(Engine::Sqlite, &broker).await;
    let backoff = ["--outbox-backoff-base", "100ms", "--outbox-backoff-max", "200ms", "--outbox-max-attempts", "1000"];
    let mut shop = shop_on(&db, &backoff).await;
    let Wire::Rabbit { prefix, .. } = &db.wire else { unreachable!() };
    shop.server.tell("/v1/consumers/inventory/pause", &json!({})).await;
    broker.limit_queue(&format!("{prefix}.inventory"), "max-length", 1);
    let refused = "SELECT COUNT(*) FROM messaging_outbox WHERE attempts > 0 AND last_error LIKE '%full%'";
    let began = Instant::now();
    // The broker takes a moment to refuse: what is sent to it in one go may all get in.
    while db.count(refused).await == 0 {
        assert!(began.elapsed() < DEADLINE, "nothing is refused");
        shop.place(10).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    broker.clear_limit();
    shop.server.tell("/v1/consumers/inventory/resume", &json!({})).await;
    shop.check().await;
    assert!(shop.server.terminate().await);
}

/// The broker counts deliveries and would give up on messages; an outage of the database must not use them up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_database_that_goes_away_costs_no_message_on_a_broker() {
    let postgres = OwnPostgres::start();
    let url = tokio::task::spawn_blocking(rabbit::url).await.unwrap();
    let db = TestDb::at(postgres.url()).over(Wire::on(url));
    let shop = Shop::open(&db, &["--db-acquire-timeout", "1s"]).await;
    let stranger = Stranger::on(&db).await;
    postgres.crash();
    for _ in 0..20 {
        let (_, event) = foreign_order("A", 1);
        stranger.publish("order.placed", event.to_string().as_bytes(), BasicProperties::default()).await;
    }
    eventually("a consumer in trouble", || async {
        (shop.server.read("/v1/health").await["loops"]["inventory"]["state"] == "troubled").then_some(())
    })
    .await;
    // Several rounds of a consumer that does not wait for it.
    shop.until_tried(12).await;
    postgres.start_again();
    eventually("all of them held", || async {
        (db.count("SELECT COUNT(*) FROM inventory_reservations").await == 20).then_some(())
    })
    .await;
    until_finished_and_audited(&db).await;
    witness::check(&db).await;
    assert_eq!(shop.server.stock("A").await, (super::STOCK, 20), "each once");
    assert!(shop.letters().await.is_empty());
    // Given back once or twice, not once a round: they are not even suspected of killing their consumer.
    let alone = "SELECT COUNT(*) FROM messaging_inbox WHERE attempts <> 1 OR unfinished_runs <> 0";
    assert_eq!(db.count(alone).await, 0);
    assert!(shop.server.terminate().await);
}
