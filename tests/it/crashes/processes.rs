//! Processes that are killed, told to stop, or not alone.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{PATIENT, QUICK, Shop, assert_sound, place};
use crate::support::{
    Engine, Server, TestDb, each_database, each_database_on_rabbit, eventually, order, under_way, until_finished,
    until_finished_and_audited, witness,
};

const BURST: i64 = 300;

/// Fewer than the orders of a burst, so that some must be rejected.
const BURST_STOCK: i64 = 180;

/// Every acknowledged order of a burst exists, each once, and no more is held than there was.
async fn check_burst(shop: &Shop<'_>) {
    until_finished(shop.db).await;
    assert_sound(shop.db).await;
    shop.check_acknowledged().await;
    witness::check(shop.db).await;
    let orders = shop.server.walk("/v1/orders?limit=200").await;
    let with = |status: &str| orders.iter().filter(|order| order["status"] == status).count();
    let placed = i64::try_from(orders.len()).unwrap();
    assert_eq!(i64::try_from(with("reserved")).unwrap(), placed.min(BURST_STOCK));
    assert_eq!(with("reserved") + with("rejected"), orders.len());
    assert_eq!(shop.server.stock("A").await, (BURST_STOCK, placed.min(BURST_STOCK)));
}

async fn a_kill_in_a_burst_loses_no_acknowledged_order(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    shop.server.put_stock("A", BURST_STOCK).await;
    let mut acknowledged = Vec::new();
    {
        let ask = async |key| Some((key, place(&shop.server, key).await?));
        let mut burst: FuturesUnordered<_> = (0..BURST).map(ask).collect();
        while acknowledged.len() < 100 {
            acknowledged.extend(burst.next().await.expect("more orders than that"));
        }
        shop.server.signal("KILL");
        // Those still under way are cut off, or were answered just before.
        while let Some(answer) = burst.next().await {
            acknowledged.extend(answer);
        }
    }
    for (key, id) in acknowledged {
        shop.acknowledge(key, id);
    }
    let status = shop.server.ended().await;
    assert_eq!(status.signal(), Some(9));
    shop.reopen().await;
    check_burst(&shop).await;

    // Clients without an answer ask again, and each has one order.
    shop.orders = BURST;
    shop.ask_again().await;
    check_burst(&shop).await;
    assert_eq!(shop.server.walk("/v1/orders?limit=200").await.len(), usize::try_from(BURST).unwrap());
}

/// Kill after kill while the backlog is worked off: the takeover itself may be cut short as well.
async fn one_kill_after_another_loses_and_doubles_nothing(db: TestDb) {
    let mut shop = Shop::open(&db, &["--batch", "8"]).await;
    shop.place(200).await;
    for _ in 0..4 {
        shop.server.signal("KILL");
        shop.server.ended().await;
        shop.reopen().await;
        // Dies again as soon as it has got anywhere.
        let progress = "SELECT COUNT(*) FROM messaging_inbox WHERE state = 'processed'";
        let before = db.count(progress).await;
        eventually("some progress, or nothing left to do", || async {
            (db.count(progress).await > before || under_way(&db).await == 0).then_some(())
        })
        .await;
    }
    shop.ask_again().await;
    shop.check().await;
}

async fn a_stop_finishes_what_is_in_hand(db: TestDb) {
    let mut shop = Shop::open_patient(&db, &["--batch", "8"]).await;
    shop.place(100).await;
    shop.server.signal("TERM");
    let status = shop.server.ended().await;
    assert_eq!(status.code(), Some(0), "{status}");
    for (what, sql) in [
        ("in hand", "SELECT COUNT(*) FROM messaging_queue WHERE lock_token IS NOT NULL"),
        ("in bundles", "SELECT COUNT(*) FROM messaging_bundles"),
        ("unpublished", "SELECT COUNT(*) FROM messaging_outbox WHERE status <> 'published'"),
        ("subscribed", "SELECT COUNT(*) FROM messaging_subscriptions"),
        ("acknowledged orders missing", "SELECT 100 - COUNT(*) FROM orders_orders"),
    ] {
        assert_eq!(db.count(sql).await, 0, "{what}");
    }
    shop.reopen().await;
    shop.check().await;
    assert_eq!(db.unexplained_duplicates().await, 0, "a clean stop leaves nothing to be delivered again");
}

async fn a_stop_answers_those_who_wait_for_an_outcome(db: TestDb) {
    let mut server = Server::start(&db, &[]);
    server.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let waiting = server.post("/v1/orders", &order("alice", &[("A", 1)])).header("prefer", "wait=25").send();
    let orders = "SELECT COUNT(*) FROM orders_orders";
    let (answer, ()) = tokio::join!(waiting, async {
        eventually("its order", || async { (db.count(orders).await == 1).then_some(()) }).await;
        server.signal("TERM");
    });
    let answer = answer.unwrap();
    assert_eq!(answer.status(), 201);
    assert_eq!(answer.json::<serde_json::Value>().await.unwrap()["status"], "placed");
    assert_eq!(server.ended().await.code(), Some(0));
    let server = Server::start(&db, &[]);
    server.tell("/v1/consumers/inventory/resume", &json!({})).await;
    until_finished_and_audited(&db).await;
    assert!(server.terminate().await);
}

async fn a_second_signal_ends_the_process_at_once(db: TestDb) {
    let mut server = Server::start(&db, &["--shutdown-drain", "1h"]);
    // A request whose body never comes keeps an orderly stop waiting.
    let address = server.url.trim_start_matches("http://");
    let mut stuck = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/orders HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\
         expect: 100-continue\r\n\r\n"
    );
    stuck.write_all(head.as_bytes()).await.unwrap();
    let mut asked = [0; 12];
    stuck.read_exact(&mut asked).await.unwrap();
    assert_eq!(&asked, b"HTTP/1.1 100", "the server waits for the body");
    let knock = reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap();
    let livez = format!("{}/livez", server.url);
    server.signal("INT");
    eventually("closed doors", || async { knock.get(&livez).send().await.is_err().then_some(()) }).await;
    server.signal("INT");
    let status = server.ended().await;
    assert_eq!(status.code(), Some(130), "{status}");
    until_finished_and_audited(&db).await;
}

each_database!(
    a_kill_in_a_burst_loses_no_acknowledged_order,
    one_kill_after_another_loses_and_doubles_nothing,
    a_stop_finishes_what_is_in_hand,
    a_stop_answers_those_who_wait_for_an_outcome,
    a_second_signal_ends_the_process_at_once,
);

each_database_on_rabbit!(
    a_kill_in_a_burst_loses_no_acknowledged_order,
    one_kill_after_another_loses_and_doubles_nothing,
    a_stop_finishes_what_is_in_hand,
    a_stop_answers_those_who_wait_for_an_outcome,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn two_servers_on_one_postgres_share_the_work_and_double_none() {
    share_the_work(TestDb::new(Engine::Postgres).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn two_servers_on_one_postgres_and_one_rabbit_share_the_work_and_double_none() {
    share_the_work(TestDb::on_rabbit(Engine::Postgres).await).await;
}

async fn share_the_work(db: TestDb) {
    let folder = tempfile::tempdir().unwrap();
    let flags = [PATIENT.as_slice(), &["--batch", "4", "--log", "info", "--log-format", "json"]].concat();
    let logs = [folder.path().join("first.log"), folder.path().join("second.log")];
    let servers = logs.each_ref().map(|log| Server::spawn(witness::command(&db, &flags), log));
    for server in &servers {
        server.until_connected().await;
    }
    servers[0].put_stock("A", BURST).await;
    let both = (0..BURST).map(|key| place(&servers[usize::try_from(key % 2).unwrap()], key));
    let placed = futures_util::future::join_all(both).await;
    assert!(placed.iter().all(Option::is_some));
    let notices = "SELECT COUNT(*) FROM notifications_notices";
    eventually("all notices", || async { (db.count(notices).await == BURST).then_some(()) }).await;
    until_finished(&db).await;
    for server in servers {
        assert!(server.terminate().await);
    }
    assert_sound(&db).await;
    witness::check(&db).await;
    // A notice is written by whoever handled it, and said so after its commit.
    let told = logs.map(|log| std::fs::read_to_string(log).unwrap().matches("NOTICE ").count());
    assert!(told[0] > 0 && told[1] > 0, "{told:?}");
    assert_eq!(told[0] + told[1], usize::try_from(BURST).unwrap());
    assert_eq!(db.unexplained_duplicates().await, 0, "no message went to both");
}

/// The survivor takes over what the other held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn of_two_servers_on_one_postgres_one_may_die() {
    lose_one_of_two(TestDb::new(Engine::Postgres).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn of_two_servers_on_one_postgres_and_one_rabbit_one_may_die() {
    lose_one_of_two(TestDb::on_rabbit(Engine::Postgres).await).await;
}

async fn lose_one_of_two(db: TestDb) {
    let mut shop = Shop::open(&db, &["--lease", "10s", "--batch", "4"]).await;
    let other = witness::start(&db, &shop.flags);
    other.until_connected().await;
    shop.place(100).await;
    other.kill();
    shop.place(100).await;
    shop.check().await;
    assert_eq!(shop.orders, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn several_servers_may_start_on_an_empty_postgres_at_once() {
    let db = TestDb::empty_postgres().await;
    let servers = std::thread::scope(|scope| {
        let started: Vec<_> = (0..3).map(|_| scope.spawn(|| Server::start(&db, &QUICK))).collect();
        started.into_iter().map(|server| server.join().unwrap()).collect::<Vec<_>>()
    });
    servers[0].put_stock("A", 10).await;
    assert_eq!(servers[1].place_and_wait("alice", &[("A", 1)]).await["status"], "reserved");
    let demo = "SELECT COUNT(*) FROM inventory_adjustments WHERE reason = 'demo stock'";
    assert_eq!(db.count(demo).await, 4, "the shelves were filled once");
    until_finished_and_audited(&db).await;
    for server in servers {
        assert!(server.terminate().await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_second_server_on_one_sqlite_file_is_refused() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    let second = Server::command(&db, &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(said.contains("another stockade process serves") && said.contains("STOCKADE_DATABASE_URL"), "{said}");
    assert!(second.stdout.is_empty(), "it never said it was ready");
    server.put_stock("A", 1).await;
    assert_eq!(server.place_and_wait("alice", &[("A", 1)]).await["status"], "reserved", "the first is none the worse");
    server.kill();
    let next = Server::start(&db, &[]);
    until_finished_and_audited(&db).await;
    assert!(next.terminate().await, "a dead server's lock is gone with it");
}
