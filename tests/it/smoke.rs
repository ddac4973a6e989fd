//! The whole road once, on each database.

use serde_json::{Value, json};

use crate::support::{App, TestDb, each_database, order};

async fn an_order_is_reserved_and_notified(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 5).await;
    let order = app.place_and_wait("alice", &[("WIDGET-A", 2)]).await;
    assert_eq!(order["status"], "reserved");
    let id = order["id"].as_str().unwrap();
    let notices = app.eventually_list(&format!("/v1/notifications?order_id={id}"), 1).await;
    assert_eq!(notices[0]["kind"], "reserved");
    assert_eq!(app.stock("WIDGET-A").await, (5, 2));
    app.stop().await;
}

async fn a_paused_relay_keeps_events_in_the_outbox_until_it_resumes(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 5).await;
    app.post("/v1/consumers/relay/pause", &json!({})).send().await.unwrap().error_for_status().unwrap();
    let placed = app.post("/v1/orders", &order("alice", &[("WIDGET-A", 2)])).send().await.unwrap();
    let order: Value = placed.json().await.unwrap();
    let rows = app.read(&format!("/v1/outbox?aggregate_id={}", order["id"].as_str().unwrap())).await;
    assert_eq!(rows["data"][0]["status"], "pending");
    assert_eq!(app.read("/v1/queues/inventory").await["depth"], 0);
    app.post("/v1/consumers/relay/resume", &json!({})).send().await.unwrap().error_for_status().unwrap();
    app.eventually_list("/v1/reservations", 1).await;
    app.stop().await;
}

each_database!(an_order_is_reserved_and_notified, a_paused_relay_keeps_events_in_the_outbox_until_it_resumes);
