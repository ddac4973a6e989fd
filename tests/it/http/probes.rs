//! Is it alive, can it serve, how is it doing.

use serde_json::json;

use crate::support::{App, Engine, TestDb, each_database, eventually, fields};

async fn probes_tell_how_everything_is_doing(db: TestDb) {
    let app = App::start(&db).await;
    assert_eq!(app.read("/livez").await, json!({ "status": "ok" }));
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
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
