//! Databases that are locked, full or away: an honest 503 meanwhile, and work goes on when they are back, without a
//! restart.

use std::sync::Arc;
use std::time::Duration;

use reqwest::{Response, StatusCode};
use serde_json::{Value, json};
use sqlx::{Connection, Executor, PgConnection};

use super::{IMPATIENT, Shop, place, until_more_orders};
use crate::rabbit::Stranger;
use crate::support::{Api, DEADLINE, Engine, OwnPostgres, Server, TestDb, eventually, order};

async fn try_to_place(server: &Api) -> Response {
    server.post("/v1/orders", &order("hopeful", &[("A", 1)])).send().await.unwrap()
}

/// A 503 that says when to come back; nothing was changed.
async fn assert_away(response: Response) {
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    assert!(response.headers()["retry-after"].to_str().unwrap().parse::<u32>().unwrap() > 0);
    let problem: Value = response.json().await.unwrap();
    assert!(["db-busy", "db-unavailable"].contains(&problem["code"].as_str().unwrap()), "{problem}");
    assert_eq!((&problem["status"], problem["request_id"].is_string()), (&json!(503), true));
}

async fn readiness(server: &Api) -> (StatusCode, Value) {
    let response = server.get("/readyz").send().await.unwrap();
    (response.status(), response.json().await.unwrap())
}

/// Ready again, with every loop running.
pub(super) async fn until_well(server: &Api) {
    eventually("a server that is well again", || async {
        let (status, body) = readiness(server).await;
        (status == StatusCode::OK && body["status"] == "ok").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_locked_file_is_waited_for_and_then_said_to_be_busy() {
    let db = TestDb::new(Engine::Sqlite).await;
    let mut shop = Shop::open(&db, &["--sqlite-busy-timeout", "200ms", "--db-acquire-timeout", "1s"]).await;
    shop.place(5).await;
    shop.check().await;

    for lock in ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"] {
        let holder = db.sqlite();
        holder.execute_batch(lock).unwrap();
        for _ in 0..3 {
            assert_away(try_to_place(&shop.server).await).await;
        }
        assert_away(shop.server.put("/v1/stock/A", &json!({ "on_hand": 1 })).send().await.unwrap()).await;
        assert_eq!(shop.server.stock("A").await.0, super::STOCK, "reading goes on");
        let (_, body) = eventually("a server that says so", || async {
            Some(readiness(&shop.server).await).filter(|(_, body)| body["status"] != "ok")
        })
        .await;
        assert!(["degraded", "unavailable"].contains(&body["status"].as_str().unwrap()), "{body}");
        assert_eq!(shop.server.read("/livez").await["status"], "ok");
        holder.execute_batch("ROLLBACK").unwrap();
        holder.close().unwrap();

        until_well(&shop.server).await;
        shop.place(5).await;
        shop.check().await;
    }
    assert!(shop.server.terminate().await);
}

/// A lock shorter than the wait is nobody's business.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_file_locked_for_a_moment_is_waited_for() {
    let db = TestDb::new(Engine::Sqlite).await;
    let shop = Shop::open(&db, &["--sqlite-busy-timeout", "20s", "--db-acquire-timeout", "20s"]).await;
    let holder = db.sqlite();
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut waiting = Box::pin(try_to_place(&shop.server));
    let early = tokio::time::timeout(Duration::from_millis(500), &mut waiting).await;
    assert!(early.is_err(), "it waits while the file is locked");
    holder.execute_batch("ROLLBACK").unwrap();
    assert_eq!(waiting.await.status(), StatusCode::CREATED);
}

/// Writes until the file can grow no more.
fn fill(operator: &rusqlite::Connection, limit: &str) {
    operator.execute_batch(&format!("PRAGMA max_page_count = {limit}")).unwrap();
    operator.execute_batch("CREATE TABLE filler (x BLOB)").unwrap();
    for size in [100_000, 4_000, 100] {
        let full = loop {
            if let Err(error) = operator.execute("INSERT INTO filler VALUES (zeroblob($1))", [size]) {
                break error;
            }
        };
        assert_eq!(full.sqlite_error_code(), Some(rusqlite::ErrorCode::DiskFull), "{full}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_full_disk_is_told_and_survived() {
    let db = TestDb::new(Engine::Sqlite).await;
    assert!(Server::start(&db, &[]).terminate().await);
    // Something in the file that can make room later on.
    let operator = db.sqlite();
    operator.execute_batch("CREATE TABLE ballast (x BLOB)").unwrap();
    operator.execute_batch("INSERT INTO ballast VALUES (zeroblob(2000000))").unwrap();
    let pages: i64 = operator.query_row("PRAGMA page_count", [], |row| row.get(0)).unwrap();
    let limit: &'static str = (pages + 400).to_string().leak();

    // A backlog waits, and there is no room left to work it off.
    let mut shop = Shop::open(&db, &["--sqlite-max-pages", limit]).await;
    shop.server.tell("/v1/consumers/inventory/pause", &json!({})).await;
    shop.place(100).await;
    eventually("the backlog", || async {
        (shop.server.read("/v1/queues/inventory").await["depth"] == 100).then_some(())
    })
    .await;
    fill(&operator, limit);
    shop.server.tell("/v1/consumers/inventory/resume", &json!({})).await;
    eventually("a server that says so", || async {
        let (_, body) = readiness(&shop.server).await;
        (body["status"] != "ok" && body["checks"]["inventory"] == "troubled").then_some(())
    })
    .await;
    let skus: Vec<String> = (0..100).map(|line| format!("{line:064}")).collect();
    let large: Vec<(&str, i64)> = skus.iter().map(|sku| (sku.as_str(), 1)).collect();
    for _ in 0..3 {
        let refused = shop.server.post("/v1/orders", &order("hopeful", &large)).send().await.unwrap();
        assert_away(refused).await;
    }
    assert_eq!(shop.server.read("/livez").await["status"], "ok");
    assert_eq!(shop.server.walk("/v1/orders?limit=200").await.len(), 100, "what was refused is not there");
    assert_eq!(shop.server.stock("A").await, (super::STOCK, 0), "nothing is half done");

    // Room is made, and everything goes on by itself.
    operator.execute_batch("DROP TABLE ballast").unwrap();
    operator.close().unwrap();
    until_well(&shop.server).await;
    shop.check().await;
    shop.place(10).await;
    shop.check().await;
    assert!(shop.server.terminate().await);
}

/// A broker counts deliveries and gives up on messages: what fails for want of room is held, and not given back and taken
/// again each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_full_disk_uses_up_no_deliveries_of_a_broker() {
    let db = TestDb::on_rabbit(Engine::Sqlite).await;
    assert!(Server::start(&db, &[]).terminate().await);
    let operator = db.sqlite();
    let pages: i64 = operator.query_row("PRAGMA page_count", [], |row| row.get(0)).unwrap();
    let limit: &'static str = (pages + 400).to_string().leak();
    let mut shop = Shop::open(&db, &["--sqlite-max-pages", limit]).await;
    shop.server.tell("/v1/consumers/inventory/pause", &json!({})).await;
    shop.place(100).await;
    eventually("the backlog", || async {
        (shop.server.read("/v1/queues/inventory").await["depth"] == 100).then_some(())
    })
    .await;
    fill(&operator, limit);
    operator.close().unwrap();
    shop.server.tell("/v1/consumers/inventory/resume", &json!({})).await;
    eventually("a consumer in trouble", || async {
        (readiness(&shop.server).await.1["checks"]["inventory"] == "troubled").then_some(())
    })
    .await;
    shop.until_tried(4).await;
    shop.server.signal("TERM");
    let stopped = tokio::time::timeout(DEADLINE / 3, shop.server.ended()).await;
    assert!(stopped.is_ok(), "it is not waiting any more");
    // A message that was sent ahead of the others may have fitted into the last free page.
    let returns = Stranger::on(&db).await.returns("inventory").await;
    assert!(returns.len() > 50 && returns.iter().all(|count| *count == 1), "given back once, by the stop: {returns:?}");
    shop.flags = super::QUICK.to_vec();
    shop.reopen().await;
    shop.check().await;
    assert!(shop.letters().await.is_empty());
    assert!(shop.server.terminate().await);
}

/// With a restart: a larger disk, and what the full one had acknowledged is finished.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn what_a_full_disk_left_undone_is_done_on_a_larger_one() {
    let db = TestDb::new(Engine::Sqlite).await;
    assert!(Server::start(&db, &[]).terminate().await);
    let operator = db.sqlite();
    let pages: i64 = operator.query_row("PRAGMA page_count", [], |row| row.get(0)).unwrap();
    operator.close().unwrap();
    let limit: &'static str = (pages + 30).to_string().leak();
    let mut shop = Shop::open(&db, &["--sqlite-max-pages", limit]).await;
    while let Some(id) = place(&shop.server, shop.orders).await {
        shop.acknowledge(shop.orders, id);
        shop.orders += 1;
        assert!(shop.orders < 1000, "the file never fills up");
    }
    shop.server.signal("KILL");
    shop.server.ended().await;
    shop.flags = super::QUICK.to_vec();
    shop.reopen().await;
    shop.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_postgres_that_crashes_or_restarts_under_load_is_waited_for() {
    let postgres = Arc::new(OwnPostgres::start());
    let db = TestDb::at(postgres.url());
    let mut shop = Shop::open(&db, &IMPATIENT).await;
    let api = shop.api();
    let ask = async |what: fn(&OwnPostgres)| {
        let postgres = postgres.clone();
        tokio::task::spawn_blocking(move || what(&postgres)).await.unwrap();
    };
    shop.place_during(async {
        for end in [OwnPostgres::crash, OwnPostgres::stop, OwnPostgres::crash] {
            until_more_orders(&db).await;
            ask(end).await;
            assert_away(try_to_place(&api).await).await;
            assert_away(api.get("/v1/orders").send().await.unwrap()).await;
            let (status, body) = readiness(&api).await;
            assert_eq!((status, &body["status"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("unavailable")), "{body}");
            assert_eq!(api.read("/v1/health").await["database"]["status"], "down");
            assert_eq!(api.read("/livez").await["status"], "ok");
            ask(OwnPostgres::start_again).await;
            until_well(&api).await;
        }
        until_more_orders(&db).await;
    })
    .await;
    shop.recover_and_stop().await;
}

/// Waits until the server refuses a write that would change nothing.
async fn until_refused(api: &Api) {
    let refusal = eventually("a refused write", || async {
        let response = api.put("/v1/stock/A", &json!({ "on_hand": super::STOCK })).send().await.unwrap();
        (response.status() != StatusCode::OK).then_some(response)
    })
    .await;
    assert_away(refusal).await;
}

/// The server's own role, so that its connections can be told apart from those of the tests.
async fn add_role(postgres: &OwnPostgres) -> (TestDb, PgConnection) {
    let mut operator = PgConnection::connect(&postgres.url()).await.unwrap();
    operator.execute("CREATE ROLE stockade LOGIN").await.unwrap();
    operator.execute("ALTER DATABASE postgres OWNER TO stockade").await.unwrap();
    (TestDb::at(postgres.url().replace("postgres@", "stockade@")), operator)
}

/// Ends every connection of the server (57P01); how many there were.
async fn terminate_backends(operator: &mut PgConnection) -> u64 {
    let terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'stockade'";
    operator.execute(terminate).await.unwrap().rows_affected()
}

/// As during a failover: the old primary refuses writes with 25006.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_postgres_that_turns_read_only_is_waited_for() {
    let postgres = OwnPostgres::start();
    let db = TestDb::at(postgres.url());
    let mut shop = Shop::open(&db, &IMPATIENT).await;
    let mut operator = PgConnection::connect(&postgres.url()).await.unwrap();
    let api = shop.api();
    shop.place_during(async {
        until_more_orders(&db).await;
        operator.execute("ALTER SYSTEM SET default_transaction_read_only = on").await.unwrap();
        operator.execute("SELECT pg_reload_conf()").await.unwrap();
        until_refused(&api).await;
        assert_away(try_to_place(&api).await).await;
        assert_eq!(api.stock("A").await.0, super::STOCK, "reads succeed");
        operator.execute("ALTER SYSTEM RESET default_transaction_read_only").await.unwrap();
        operator.execute("SELECT pg_reload_conf()").await.unwrap();
        until_well(&api).await;
        until_more_orders(&db).await;
    })
    .await;
    shop.recover_and_stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn terminated_backends_cost_nothing() {
    let postgres = OwnPostgres::start();
    let (link, mut operator) = add_role(&postgres).await;
    let db = TestDb::at(postgres.url());
    let mut shop = Shop::open_through(&db, &link, &IMPATIENT).await;
    let api = shop.api();
    shop.place_during(async {
        for _ in 0..5 {
            until_more_orders(&db).await;
            assert!(terminate_backends(&mut operator).await > 0);
        }
        until_more_orders(&db).await;
        until_well(&api).await;
    })
    .await;
    shop.recover_and_stop().await;
}

/// New connections fail with 53300, as when other programs use all of `max_connections`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_postgres_without_free_connections_is_waited_for() {
    let postgres = OwnPostgres::start();
    let (link, mut operator) = add_role(&postgres).await;
    let db = TestDb::at(postgres.url());
    let mut shop = Shop::open_through(&db, &link, &IMPATIENT).await;
    let api = shop.api();
    shop.place_during(async {
        until_more_orders(&db).await;
        operator.execute("ALTER ROLE stockade CONNECTION LIMIT 0").await.unwrap();
        terminate_backends(&mut operator).await;
        until_refused(&api).await;
        assert_away(try_to_place(&api).await).await;
        assert_away(api.get("/v1/orders").send().await.unwrap()).await;
        operator.execute("ALTER ROLE stockade CONNECTION LIMIT -1").await.unwrap();
        until_well(&api).await;
        until_more_orders(&db).await;
    })
    .await;
    shop.recover_and_stop().await;
}
