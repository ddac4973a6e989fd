//! The whole road once, on each database.

use crate::support::{App, TestDb, each_database};

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

each_database!(an_order_is_reserved_and_notified);
