//! The fault lab's own promises: what is armed happens, as often as it was asked for, and can be taken back.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{App, TestDb, each_database, eventually, problem, wrong_field};

each_database!(
    a_delivery_told_to_repeat_comes_again_and_changes_nothing,
    a_slow_consumer_takes_its_time_over_each_event,
    what_is_armed_can_be_taken_back,
    the_lab_refuses_what_it_cannot_do,
);

async fn a_delivery_told_to_repeat_comes_again_and_changes_nothing(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 100).await;
    app.tell("/v1/lab/duplicate", &json!({ "consumer": "inventory", "deliveries": 2, "copies": 4 })).await;
    for customer in ["alice", "bob", "carol"] {
        assert_eq!(app.place_and_wait(customer, &[("WIDGET-A", 5)]).await["status"], "reserved");
    }
    let duplicates = eventually("the copies of two deliveries", || async {
        let rows = app.read("/v1/inbox?consumer=inventory").await["data"].as_array().unwrap().clone();
        let counts: Vec<i64> = rows.iter().map(|row| row["duplicates"].as_i64().unwrap()).collect();
        (counts.iter().sum::<i64>() >= 8).then_some(counts)
    })
    .await;
    let mut sorted = duplicates.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [0, 4, 4], "two deliveries four times more, and a copy is not copied");
    assert_eq!(app.stock("WIDGET-A").await, (100, 15));
    app.stop().await;
}

async fn a_slow_consumer_takes_its_time_over_each_event(db: TestDb) {
    const EACH: Duration = Duration::from_millis(300);
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 100).await;
    app.tell("/v1/lab/slow", &json!({ "consumer": "inventory", "ms": 300 })).await;
    let start = Instant::now();
    for customer in ["alice", "bob", "carol"] {
        app.place(customer, &[("WIDGET-A", 1)]).await;
    }
    eventually("three slow reservations", || async { (app.stock("WIDGET-A").await.1 == 3).then_some(()) }).await;
    assert!(start.elapsed() >= EACH * 3, "one after the other: {:?}", start.elapsed());
    app.tell("/v1/lab/slow", &json!({ "consumer": "inventory", "ms": 0 })).await;
    assert_eq!(app.place_and_wait("dora", &[("WIDGET-A", 1)]).await["status"], "reserved");
    app.stop().await;
}

async fn what_is_armed_can_be_taken_back(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 100).await;
    app.tell("/v1/lab/crash", &json!({ "point": "consumer.before_commit" })).await;
    app.tell("/v1/lab/slow", &json!({ "consumer": "orders", "ms": 9000 })).await;
    let lab = app.read("/v1/lab").await;
    assert_eq!(lab["armed"]["slow_ms"], json!({ "orders": 9000 }));
    let points = lab["crash_points"].as_array().unwrap();
    assert!(points.iter().any(|point| point["point"] == "consumer.before_commit" && point["meaning"].is_string()));
    let armed = app.tell("/v1/lab/reset", &json!({})).await;
    assert_eq!(armed["crash"]["point"], "consumer.before_commit");
    assert_eq!(armed["slow_ms"], json!({ "orders": 9000 }));
    // This process is still here to say so.
    assert_eq!(app.place_and_wait("alice", &[("WIDGET-A", 1)]).await["status"], "reserved");
    assert_eq!(app.tell("/v1/lab/reset", &json!({})).await["crash"], json!(null));
    app.stop().await;
}

async fn the_lab_refuses_what_it_cannot_do(db: TestDb) {
    let app = App::start(&db).await;
    for (path, body) in
        [("duplicate", json!({ "consumer": "nobody" })), ("slow", json!({ "consumer": "nobody", "ms": 1 }))]
    {
        problem(app.post(&format!("/v1/lab/{path}"), &body).send().await.unwrap(), 404, "not-found").await;
    }
    let slow = json!({ "consumer": "inventory", "ms": 10_001 });
    wrong_field(app.post("/v1/lab/slow", &slow).send().await.unwrap(), "/ms").await;
    let none = json!({ "consumer": "inventory", "copies": 0 });
    wrong_field(app.post("/v1/lab/duplicate", &none).send().await.unwrap(), "/copies").await;
    // A message larger than any consumer takes gets in, and becomes a dead letter there.
    let huge = json!({ "queue": "inventory", "body": "x".repeat(300_000) });
    assert_eq!(app.post("/v1/lab/publish", &huge).send().await.unwrap().status(), 202);
    let letters = app.eventually_list("/v1/dead-letters", 1).await;
    assert_eq!(letters[0]["reason"], "too-large");
    app.stop().await;
}
