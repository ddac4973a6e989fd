//! `examples/loyalty.rs`, run: a module of one's own earns its effect exactly once.

use serde_json::json;
use stockade::app::Builder;

use crate::support::{App, TestDb, each_database, eventually, settings};

#[expect(dead_code, reason = "the example's own `main` parses the command line; here the tests start it")]
#[path = "../../examples/loyalty.rs"]
pub mod example;

async fn a_module_of_ones_own_earns_points_once(db: TestDb) {
    let app = App::start_built(example::add_to(Builder::new(settings(&db, &[])).demo(true))).await;
    app.put_stock("WIDGET-A", 10).await;
    let order = app.place_and_wait("alice", &[("WIDGET-A", 2), ("WIDGET-A", 1)]).await;
    assert_eq!(order["status"], "reserved");
    let id = order["id"].as_str().unwrap();
    let path = format!("/v1/loyalty/{id}");
    let points = || async { app.read(&path).await["points"].as_i64().unwrap() };
    eventually("three points", || async { (points().await == 3).then_some(()) }).await;

    let body = db.event_body(id, "inventory.reserved").await;
    let again = json!({ "queue": "loyalty", "body": body, "times": 2 });
    assert_eq!(app.post("/v1/lab/publish", &again).send().await.unwrap().status(), 202);
    let seen = app.eventually_list("/v1/inbox?consumer=loyalty&min_duplicates=2", 1).await;
    assert_eq!((&seen[0]["state"], &seen[0]["duplicates"]), (&json!("processed"), &json!(2)));
    assert_eq!(points().await, 3);
    app.stop().await;
}

async fn a_module_whose_name_is_taken_is_refused_at_start(db: TestDb) {
    let twice = example::add_to(example::add_to(Builder::new(settings(&db, &[]))));
    let error = twice.start().await.err().expect("it is refused").to_string();
    assert_eq!(error, "two consumers are named \"loyalty\": rename one");
}

async fn a_rejected_order_earns_nothing(db: TestDb) {
    let app = App::start_built(example::add_to(Builder::new(settings(&db, &[])).demo(true))).await;
    let order = app.place_and_wait("bob", &[("NOWHERE", 1)]).await;
    assert_eq!(order["status"], "rejected");
    assert_eq!(app.read(&format!("/v1/loyalty/{}", order["id"].as_str().unwrap())).await["points"], 0);
    let document = app.read("/openapi.json").await;
    assert!(document["paths"]["/v1/loyalty/{order_id}"]["get"].is_object(), "its route is documented too");
    app.stop().await;
}

async fn its_table_survives_a_second_start(db: TestDb) {
    for points in [2, 4] {
        let app = App::start_built(example::add_to(Builder::new(settings(&db, &[])))).await;
        app.put_stock("WIDGET-A", 10).await;
        let order = app.place_and_wait("alice", &[("WIDGET-A", 2)]).await;
        assert_eq!(order["status"], "reserved");
        let sum = "SELECT CAST(COALESCE(SUM(points), 0) AS BIGINT) FROM loyalty_points";
        eventually("points", || async { (db.count(sum).await == points).then_some(()) }).await;
        app.stop().await;
    }
}

each_database!(
    a_module_whose_name_is_taken_is_refused_at_start,
    a_module_of_ones_own_earns_points_once,
    a_rejected_order_earns_nothing,
    its_table_survives_a_second_start
);
