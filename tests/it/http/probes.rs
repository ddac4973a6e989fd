//! Is it alive, can it serve, how is it doing.

use serde_json::json;

use crate::support::{App, TestDb, each_database, eventually, fields};

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
    assert_eq!(fields(&health), ["broker", "database", "loops", "outbox", "status", "version"]);
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
