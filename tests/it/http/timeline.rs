//! The timeline of an order: every hop, and the one sentence.

use serde_json::{Value, json};

use crate::support::{Api, App, TestDb, each_database, eventually};

async fn timeline(api: &Api, order: &Value) -> Value {
    api.read(&format!("/v1/orders/{}/timeline", order["number"].as_str().unwrap())).await
}

/// Waits until the sentence is the one expected.
async fn eventually_waits(api: &Api, order: &Value, expected: impl Fn(&str) -> bool) -> Value {
    let last = std::cell::RefCell::new(String::new());
    let found = eventually("the sentence", || async {
        let timeline = timeline(api, order).await;
        let sentence = timeline["waiting_for"].as_str().unwrap().to_owned();
        if *last.borrow() != sentence {
            println!("{sentence}");
            last.replace(sentence.clone());
        }
        expected(&sentence).then_some(timeline)
    });
    found.await
}

fn hops<'a>(timeline: &'a Value, kind: &str) -> Vec<&'a Value> {
    timeline["hops"].as_array().unwrap().iter().filter(|hop| hop["kind"] == kind).collect()
}

fn texts(timeline: &Value, kind: &str) -> Vec<String> {
    hops(timeline, kind)
        .iter()
        .map(|hop| format!("{}: {}", hop["who"].as_str().unwrap(), hop["text"].as_str().unwrap()))
        .collect()
}

async fn pause(api: &Api, name: &str) {
    api.tell(&format!("/v1/consumers/{name}/pause"), &json!({})).await;
}

async fn every_hop_of_a_reserved_order_is_told(db: TestDb) {
    let app = App::start(&db).await;
    let order = app.place_and_wait("a", &[("WIDGET-A", 2)]).await;
    app.eventually_list(&format!("/v1/notifications?order_id={}", order["id"].as_str().unwrap()), 1).await;
    let told = eventually_waits(&app, &order, |sentence| sentence.starts_with("reserved, waits for payment")).await;
    assert_eq!(told["status"], "reserved");
    assert_eq!(told["also"], json!([]));
    assert_eq!(
        texts(&told, "request"),
        [format!("api: took the order and committed it as {}", order["number"].as_str().unwrap())]
    );
    assert_eq!(texts(&told, "outbox"), ["outbox: published order.placed", "outbox: published inventory.reserved"]);
    let handled = texts(&told, "handling");
    for line in [
        "inventory: dealt with order.placed",
        "orders: dealt with inventory.reserved",
        "notifications: dealt with inventory.reserved",
    ] {
        assert!(handled.contains(&line.to_owned()), "{line} in {handled:?}");
    }
    assert_eq!(hops(&told, "queue").len(), handled.len());
    let effects = texts(&told, "effect");
    assert!(effects.iter().any(|line| line.starts_with("inventory: wrote reservation RES-")), "{effects:?}");
    assert!(effects.contains(&"notifications: notice of reserved by log is sent".to_owned()), "{effects:?}");
    let times: Vec<&str> = told["hops"].as_array().unwrap().iter().map(|hop| hop["at"].as_str().unwrap()).collect();
    assert!(times.is_sorted(), "{times:?}");
    app.stop().await;
}

async fn a_rejected_order_waits_for_nothing(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("NONE", 0).await;
    let order = app.place_and_wait("a", &[("NONE", 1)]).await;
    let expected = "waits for nothing: it is rejected: Insufficient NONE: need 1, have 0";
    eventually_waits(&app, &order, |sentence| sentence == expected).await;
    app.stop().await;
}

async fn a_paused_consumer_is_named_with_the_way_out(db: TestDb) {
    let app = App::start(&db).await;
    pause(&app, "inventory").await;
    let order = app.place("a", &[("WIDGET-A", 1)]).await;
    eventually_waits(&app, &order, |sentence| sentence == "waits for inventory, which is paused: resume it").await;
    // What merely tells of the order is said besides.
    pause(&app, "notifications").await;
    app.tell("/v1/consumers/inventory/resume", &json!({})).await;
    let told = eventually_waits(&app, &order, |sentence| sentence.starts_with("reserved, waits for payment")).await;
    assert_eq!(told["also"], json!(["waits for notifications, which is paused: resume it"]));
    app.stop().await;
}

async fn a_paused_relay_is_named(db: TestDb) {
    let app = App::start(&db).await;
    pause(&app, "relay").await;
    let order = app.place("a", &[("WIDGET-A", 1)]).await;
    let expected = "its order.placed waits for the relay, which is paused: resume it";
    eventually_waits(&app, &order, |sentence| sentence == expected).await;
    app.stop().await;
}

async fn a_retry_is_told_with_its_time_and_error(db: TestDb) {
    let app = App::start_with(&db, &["--retry-base", "1h", "--retry-cap", "1h"]).await;
    app.tell("/v1/lab/fail", &json!({ "consumer": "inventory", "times": 1 })).await;
    let order = app.place("a", &[("WIDGET-A", 1)]).await;
    let told = eventually_waits(&app, &order, |sentence| {
        sentence.starts_with("waits for inventory, which tries its order.placed again at ")
            && sentence.ends_with(", after 1 attempt (the fault lab let it fail)")
    })
    .await;
    assert_eq!(texts(&told, "retry"), ["outbox: keeps order.placed to be sent to stockade.inventory again (retry)"]);
    app.stop().await;
}

async fn a_dead_letter_is_named_until_it_is_redriven(db: TestDb) {
    let app = App::start_with(&db, &["--retry-max", "1"]).await;
    app.tell("/v1/lab/fail", &json!({ "consumer": "inventory", "times": 1 })).await;
    let order = app.place("a", &[("WIDGET-A", 1)]).await;
    let letter = app.eventually_list("/v1/dead-letters", 1).await.remove(0);
    let id = letter["id"].as_str().unwrap();
    let expected = format!("its order.placed is dead letter {id} of inventory (retries-exhausted): fix and redrive");
    eventually_waits(&app, &order, |sentence| sentence == expected).await;
    app.tell(&format!("/v1/dead-letters/{id}/redrive"), &json!({})).await;
    let told = eventually_waits(&app, &order, |sentence| sentence.starts_with("reserved")).await;
    let letters = texts(&told, "dead_letter");
    assert_eq!(letters[1], format!("dead-letters: dead letter {id} was redriven"));
    assert_eq!(texts(&told, "redrive"), ["outbox: sent order.placed to stockade.inventory again (redrive)"]);
    app.stop().await;
}

async fn a_letter_that_is_not_filed_names_the_office(db: TestDb) {
    let app = App::start_with(&db, &["--retry-max", "1"]).await;
    pause(&app, "dead-letters").await;
    app.tell("/v1/lab/fail", &json!({ "consumer": "inventory", "times": 1 })).await;
    let order = app.place("a", &[("WIDGET-A", 1)]).await;
    let expected = "its order.placed was rejected by inventory and is not filed, for dead-letters is paused: resume it";
    eventually_waits(&app, &order, |sentence| sentence == expected).await;
    app.stop().await;
}

async fn a_queue_that_nobody_takes_from_is_named(db: TestDb) {
    let app = App::start_with(&db, &["--modules", "api,relay,orders,notifications,dead-letters"]).await;
    let order = app.place("a", &[("WIDGET-A", 1)]).await;
    let expected = "waits for inventory, and nobody takes from stockade.inventory: start it";
    eventually_waits(&app, &order, |sentence| sentence == expected).await;
    app.stop().await;
}

async fn duplicates_are_counted_where_they_were_dismissed(db: TestDb) {
    let app = App::start(&db).await;
    let order = app.place_and_wait("a", &[("WIDGET-A", 1)]).await;
    let body = db.event_body(order["id"].as_str().unwrap(), "order.placed").await;
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": body, "times": 2 })).await;
    let line = "inventory: dealt with order.placed, and dismissed 2 duplicates".to_owned();
    eventually("both duplicates", || async {
        texts(&timeline(&app, &order).await, "handling").contains(&line).then_some(())
    })
    .await;
    app.stop().await;
}

async fn an_order_that_is_not_there_has_no_timeline(db: TestDb) {
    let app = App::start(&db).await;
    let response = app.get("/v1/orders/ORD-00000000/timeline").send().await.unwrap();
    crate::support::problem(response, 404, "not-found").await;
    app.stop().await;
}

each_database!(
    every_hop_of_a_reserved_order_is_told,
    a_rejected_order_waits_for_nothing,
    a_paused_consumer_is_named_with_the_way_out,
    a_paused_relay_is_named,
    a_retry_is_told_with_its_time_and_error,
    a_dead_letter_is_named_until_it_is_redriven,
    a_letter_that_is_not_filed_names_the_office,
    a_queue_that_nobody_takes_from_is_named,
    duplicates_are_counted_where_they_were_dismissed,
    an_order_that_is_not_there_has_no_timeline,
);
