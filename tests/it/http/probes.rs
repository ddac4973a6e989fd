//! Is it alive, can it serve, how is it doing.

use std::time::{Duration, Instant};

use serde_json::json;
use stockade::access::Secret;

use crate::support::{
    Api, App, Engine, OwnPostgres, Server, TestDb, Wire, each_database, eventually, fields, order, rabbit,
    until_finished_and_audited,
};

async fn probes_tell_how_everything_is_doing(db: TestDb) {
    let app = App::start(&db).await;
    assert_eq!(app.read("/livez").await, json!({ "status": "ok" }));
    eventually("the start", || async {
        app.get("/startupz").send().await.unwrap().status().is_success().then_some(())
    })
    .await;
    let ready = eventually("every loop running", || async {
        let ready = app.read("/readyz").await;
        let loops = ["relay", "orders", "expiry", "inventory", "notifications", "ledger", "dead-letters"];
        loops.iter().all(|name| ready["checks"][name] == "running").then_some(ready)
    })
    .await;
    assert_eq!(ready["status"], "ok");
    assert_eq!((&ready["checks"]["database"], &ready["checks"]["draining"]), (&json!("up"), &json!("no")));

    let health = app.read("/v1/health").await;
    assert_eq!(
        fields(&health),
        ["broker", "consumers", "database", "instances", "loops", "outbox", "relay", "status", "version"]
    );
    let engine = if db.url.starts_with("sqlite:") { "sqlite" } else { "postgres" };
    assert_eq!(health["database"], json!({ "kind": engine, "status": "up", "error": null }));
    assert_eq!(health["broker"], json!({ "kind": "embedded", "status": "up", "error": null }));
    assert_eq!((&health["status"], &health["version"]), (&json!("ok"), &json!(env!("CARGO_PKG_VERSION"))));
    assert_eq!((&health["outbox"]["pending"], &health["outbox"]["dead"]), (&json!(0), &json!(0)));
    assert!(health["loops"]["inventory"]["last_success_at"].is_string());
    app.stop().await;
}

async fn health_counts_what_waits_in_the_outbox(db: TestDb) {
    let app = App::start(&db).await;
    app.tell("/v1/consumers/relay/pause", &json!({})).await;
    for _ in 0..3 {
        app.place("alice", &[("A", 1)]).await;
    }
    let health = app.read("/v1/health").await;
    assert_eq!(health["outbox"]["pending"], 3);
    assert!(health["outbox"]["oldest_due_ms"].as_i64().unwrap() >= 0);
    assert_eq!(health["loops"]["relay"]["state"], "paused");
    app.stop().await;
}

each_database!(probes_tell_how_everything_is_doing, health_counts_what_waits_in_the_outbox);

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn any_instance_tells_the_health_of_all() {
    let db = TestDb::new(Engine::Postgres).await;
    let front = App::start_with(&db, &["--modules", "api,relay,orders,dead-letters"]).await;
    let alone = eventually("health without the others", || async {
        let health = front.read("/v1/health").await;
        (health["instances"].as_array().unwrap().len() == 1).then_some(health)
    })
    .await;
    assert_eq!((&alone["status"], &alone["consumers"]["inventory"]["state"]), (&json!("degraded"), &json!("absent")));
    let back = App::start_with(&db, &["--modules", "inventory,notifications,ledger"]).await;
    let health = eventually("every consumer somewhere", || async {
        let health = front.read("/v1/health").await;
        (health["consumers"]["inventory"]["state"] == "running").then_some(health)
    })
    .await;
    assert_eq!(health["instances"].as_array().unwrap().len(), 2);
    assert_eq!((&health["relay"]["state"], &health["relay"]["instances"]), (&json!("running"), &json!(1)));
    let inventory = &health["consumers"]["inventory"];
    assert_eq!((&inventory["state"], &inventory["instances"]), (&json!("running"), &json!(1)));
    assert!(health["loops"].get("inventory").is_none(), "it runs elsewhere");
    back.stop().await;
    eventually("the other gone", || async {
        let health = front.read("/v1/health").await;
        (health["consumers"]["inventory"]["state"] == "absent").then_some(())
    })
    .await;
    front.stop().await;
}

/// Asserts that every probe can answer within a second: a loaded machine is slow now and then, a probe that waits for
/// something that hangs is slow each time.
async fn all_answer_within_a_second(api: &Api) {
    for path in ["/livez", "/readyz", "/startupz", "/v1/health", "/v1/metrics"] {
        eventually(&format!("an answer of {path} within a second"), async || {
            let began = Instant::now();
            api.get(path).send().await.unwrap().bytes().await.unwrap();
            (began.elapsed() < Duration::from_secs(1)).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn probes_answer_within_a_second_though_the_database_hangs() {
    let postgres = OwnPostgres::start();
    let db = TestDb::at(postgres.url());
    let server = Server::start(&db, &[]);
    server.place_and_wait("a", &[("WIDGET-A", 1)]).await;
    all_answer_within_a_second(&server).await;
    postgres.freeze();
    all_answer_within_a_second(&server).await;
    let health = server.read("/v1/health").await;
    assert_eq!((&health["status"], &health["database"]["status"]), (&json!("unavailable"), &json!("down")));
    assert!(health["database"]["error"].as_str().is_some_and(|error| !error.is_empty()), "{health:#}");
    assert_eq!(server.get("/readyz").send().await.unwrap().status(), 503);
    assert!(server.get("/livez").send().await.unwrap().status().is_success(), "it is alive");
    postgres.thaw();
    eventually("health again", || async { (server.read("/v1/health").await["status"] == "ok").then_some(()) }).await;
    // Whoever meets a connection that broke meanwhile is told to come again.
    eventually("an order taken", || async {
        let answer = server.post("/v1/orders", &order("a", &[("WIDGET-A", 1)])).send().await.unwrap();
        answer.status().is_success().then_some(())
    })
    .await;
    until_finished_and_audited(&db).await;
    assert!(server.terminate().await);
}

/// Whose a session is, only the database knows; no probe waits for it to tell.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn probes_sent_with_a_session_answer_within_a_second_though_the_database_hangs() {
    let postgres = OwnPostgres::start();
    let db = TestDb::at(postgres.url());
    let secret = Secret::random();
    let server = Server::start(&db, &["--api-keys", &format!("viewer:*:{}", secret.hash())]);
    let browser = server.log_in(secret.reveal()).await;
    assert!(!browser.read("/v1/health").await["outbox"].is_null(), "the whole report");
    postgres.freeze();
    all_answer_within_a_second(&browser).await;
    assert!(browser.get("/livez").send().await.unwrap().status().is_success());
    let health = browser.read("/v1/health").await;
    assert_eq!((&health["status"], &health["instances"]), (&json!("unavailable"), &json!([])), "as tenants see it");
    assert_eq!(server.get("/v1/health").send().await.unwrap().status(), 401, "without any session");
    assert_eq!(server.with_session("none").get("/v1/health").send().await.unwrap().status(), 401);
    assert_eq!(browser.get("/v1/metrics").send().await.unwrap().status(), 401, "they are for those who are known");
    postgres.thaw();
    eventually("the whole report", || async { (browser.read("/v1/health").await["status"] == "ok").then_some(()) })
        .await;
    until_finished_and_audited(&db).await;
    assert!(server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn probes_answer_within_a_second_though_the_broker_hangs_or_is_gone() {
    let broker = rabbit::faulty().await;
    let db = TestDb::new(Engine::Sqlite).await.over(Wire::on(broker.url()));
    let server = Server::start(&db, &[]);
    server.until_connected().await;
    server.place_and_wait("a", &[("WIDGET-A", 1)]).await;
    broker.freeze();
    all_answer_within_a_second(&server).await;
    let page = server.get("/v1/metrics").send().await.unwrap().text().await.unwrap();
    assert!(page.contains("stockade_database_up 1.0"), "a broker that hangs is not the database's fault");
    broker.thaw();
    rabbit::until_queues_are_safe().await;
    broker.kill();
    eventually("a broker that is down", || async {
        (server.read("/v1/health").await["broker"]["status"] == "down").then_some(())
    })
    .await;
    all_answer_within_a_second(&server).await;
    assert_eq!(server.read("/readyz").await["status"], "degraded", "orders are taken");
    broker.start_again();
    server.until_connected().await;
    until_finished_and_audited(&db).await;
    assert!(server.terminate().await);
}
