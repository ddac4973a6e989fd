//! The timeline of an order: every hop, and the one sentence.

use std::time::Duration;

use serde_json::{Value, json};
use stockade::access::Secret;
use stockade_kernel::messaging::retention::{Keep, Retention};
use tokio_util::sync::CancellationToken;

use crate::support::{
    Api, App, Engine, Server, TestDb, Wire, each_database, each_database_on_rabbit, eventually, rabbit,
    until_finished_and_audited,
};

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
    eventually_waits(&app, &order, |sentence| sentence.starts_with("reserved, waits for payment")).await;
    // The ledger takes the order in its own time.
    let told = eventually("nothing besides", async || {
        Some(timeline(&app, &order).await).filter(|told| told["also"] == json!([]))
    })
    .await;
    assert_eq!(told["status"], "reserved");
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

/// Waits until nothing is held up about an order, and it is as `sentence` says.
async fn eventually_rests(api: &Api, order: &Value, sentence: &str) -> Value {
    eventually(sentence, || async {
        let told = timeline(api, order).await;
        (told["also"] == json!([]) && told["waiting_for"].as_str().unwrap().starts_with(sentence)).then_some(told)
    })
    .await
}

async fn a_whole_life_is_told(db: TestDb) {
    let app = App::start(&db).await;
    let (paid, cancelled) = (app.reserve("WIDGET-A", 250).await, app.reserve("WIDGET-A", 1).await);
    let of = async |id: &str| app.read(&format!("/v1/orders/{id}")).await;
    assert!(app.pay(&paid, 250).await.status().is_success());
    let order = of(&paid).await;
    eventually_rests(&app, &order, "paid, waits to be fulfilled").await;
    assert!(app.step(&paid, "fulfil").await.status().is_success());
    let told = eventually_rests(&app, &order, "waits for nothing: it is fulfilled").await;
    assert_eq!(
        texts(&told, "request")[1..],
        ["api: took the payment".to_owned(), "api: fulfilled the order".to_owned()]
    );
    let effects = texts(&told, "effect");
    for line in ["ledger: booked 2.50 USD to cash", "ledger: booked -2.50 USD to customer:alice"] {
        assert!(effects.contains(&line.to_owned()), "{line} in {effects:?}");
    }
    assert!(effects.iter().any(|line| line.ends_with(" is fulfilled")), "{effects:?}");
    assert!(effects.contains(&"notifications: notice of paid by log is sent".to_owned()), "{effects:?}");
    assert!(app.step(&cancelled, "cancel").await.status().is_success());
    let told = eventually_rests(&app, &of(&cancelled).await, "waits for nothing: it is cancelled").await;
    assert_eq!(texts(&told, "request")[1], "api: cancelled the order");
    app.stop().await;
}

async fn an_order_that_expired_says_so(db: TestDb) {
    let app = App::start_with(&db, &["--hold-time", "1s"]).await;
    let order = app.place("a", &[("WIDGET-A", 1)]).await;
    let told = eventually_rests(&app, &order, "waits for nothing: it is expired").await;
    assert_eq!(texts(&told, "request")[1], "orders: let the order expire, as it was not paid in time");
    app.stop().await;
}

async fn hops_follow_one_another_in_time(db: TestDb) {
    let app = App::start(&db).await;
    pause(&app, "inventory").await;
    let order = app.place("a", &[("WIDGET-A", 1)]).await;
    let told = eventually_waits(&app, &order, |sentence| sentence.starts_with("waits for inventory")).await;
    let at = |hop: &Value, end: &str| hop[end].as_str().map(str::to_owned);
    assert!(at(hops(&told, "request")[0], "at") <= at(hops(&told, "request")[0], "until"));
    assert_eq!(at(hops(&told, "request")[0], "until"), order["created_at"].as_str().map(str::to_owned));
    let published_at = at(hops(&told, "outbox")[0], "until");
    app.tell("/v1/consumers/inventory/resume", &json!({})).await;
    let told = eventually_waits(&app, &order, |sentence| sentence.starts_with("reserved")).await;
    let of_inventory = |kind| *hops(&told, kind).iter().find(|hop| hop["who"] == "inventory").unwrap();
    let (waited, handled) = (of_inventory("queue"), of_inventory("handling"));
    assert_eq!(at(waited, "at"), published_at, "from its publication");
    assert_eq!(at(waited, "until"), at(handled, "at"), "until inventory began");
    assert!(at(waited, "at") < at(waited, "until") && at(handled, "at") <= at(handled, "until"), "{told:#}");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn on_a_broker_the_wait_in_the_outbox_and_the_publishing_are_told_apart() {
    let db = TestDb::on_rabbit(Engine::Sqlite).await;
    let app = App::start(&db).await;
    // What was written before the queues were made is sent to them once more: let that be over.
    app.place_and_wait("a", &[("WIDGET-A", 1)]).await;
    pause(&app, "relay").await;
    let order = app.place("a", &[("WIDGET-A", 1)]).await;
    let told = timeline(&app, &order).await;
    assert_eq!((&hops(&told, "outbox")[0]["until"], hops(&told, "publish").len()), (&Value::Null, 0));
    app.tell("/v1/consumers/relay/resume", &json!({})).await;
    eventually_waits(&app, &order, |sentence| sentence.starts_with("reserved")).await;
    // The consumers may be quicker than the relay, which writes down the confirm after it has come.
    let told = eventually("the mark of the relay", || async {
        let told = timeline(&app, &order).await;
        hops(&told, "publish").first().is_some_and(|sent| !sent["until"].is_null()).then_some(told)
    })
    .await;
    let (waited, sent) = (hops(&told, "outbox")[0], hops(&told, "publish")[0]);
    assert_eq!(sent["text"], "sent order.placed to the broker, which confirmed it");
    assert_eq!(waited["until"], sent["at"], "one after the other: {told:#}");
    assert!(
        waited["at"].as_str() < waited["until"].as_str() && sent["at"].as_str() <= sent["until"].as_str(),
        "{told:#}"
    );
    app.stop().await;
}

async fn an_event_that_waits_for_its_predecessor_says_so(db: TestDb) {
    let app = App::start_with(&db, &["--retry-base", "1h", "--retry-cap", "1h"]).await;
    app.tell("/v1/lab/fail", &json!({ "consumer": "ledger", "times": 1 })).await;
    let id = app.reserve("WIDGET-A", 5).await;
    assert!(app.pay(&id, 5).await.status().is_success());
    let order = app.read(&format!("/v1/orders/{id}")).await;
    let kept = "its order.paid is kept by ledger until its order.placed has been dealt with, at most until ";
    let again = "waits for ledger, which tries its order.placed again at ";
    eventually("both sentences", || async {
        let told = timeline(&app, &order).await;
        let also: Vec<String> = serde_json::from_value(told["also"].clone()).unwrap();
        let says = |begin: &str| also.iter().any(|sentence| sentence.starts_with(begin));
        (told["waiting_for"] == "paid, waits to be fulfilled" && says(kept) && says(again)).then_some(())
    })
    .await;
    app.stop().await;
}

async fn what_is_replayed_is_told(db: TestDb) {
    let app = App::start(&db).await;
    let order = app.place_and_wait("a", &[("WIDGET-A", 1)]).await;
    let (from, to) = ("2000-01-01T00:00:00Z", "2100-01-01T00:00:00Z");
    let replay = json!({ "aggregate_type": "order", "from": from, "to": to, "consumer": "inventory" });
    app.tell("/v1/replays", &replay).await;
    eventually("the replay", || async {
        let told = timeline(&app, &order).await;
        let replayed = texts(&told, "replay") == ["outbox: sent order.placed to stockade.inventory again (replay)"];
        let line = "inventory: dealt with order.placed, and dismissed 1 duplicate".to_owned();
        (replayed && texts(&told, "handling").contains(&line)).then_some(())
    })
    .await;
    app.stop().await;
}

async fn the_story_outlives_the_outbox(db: TestDb) {
    let app = App::start(&db).await;
    let order = app.place_and_wait("a", &[("WIDGET-A", 1)]).await;
    let before = eventually_rests(&app, &order, "reserved, waits for payment until ").await;
    let mut kernel = app.running.kernel.clone();
    let day = Duration::from_secs(86_400);
    let mut keep = Keep { outbox: Duration::ZERO, archive: day, inbox: day, dead_letters: day, look_every: day };
    for _ in 0..3 {
        kernel.tuning.keep = keep;
        Retention::new(kernel.clone(), Vec::new()).pass(&CancellationToken::new()).await.unwrap();
        let told = timeline(&app, &order).await;
        assert_eq!((&told["waiting_for"], &told["also"]), (&before["waiting_for"], &before["also"]), "{keep:?}");
        if keep.archive == day {
            assert_eq!(told["hops"], before["hops"], "the archive has it all");
        } else if keep.inbox == day {
            assert_eq!(texts(&told, "handling"), texts(&before, "handling"), "found by what came of them");
            keep.inbox = Duration::ZERO;
        }
        keep.archive = Duration::ZERO;
    }
    assert_eq!(texts(&timeline(&app, &order).await, "effect"), texts(&before, "effect"), "effects stay");
    app.stop().await;
}

async fn an_order_that_nobody_publishes_says_so(db: TestDb) {
    let app = App::start_with(&db, &["--modules", "api,orders,inventory,notifications,ledger,dead-letters"]).await;
    app.until_connected().await;
    let order = app.place("a", &[("WIDGET-A", 1)]).await;
    let expected = "its order.placed waits for a relay, and no instance runs one: start one";
    eventually_waits(&app, &order, |sentence| sentence == expected).await;
    app.stop().await;
}

each_database_on_rabbit!(an_order_that_nobody_publishes_says_so);

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_broker_that_is_away_or_blocked_is_named() {
    let broker = rabbit::faulty().await;
    let db = TestDb::new(Engine::Sqlite).await.over(Wire::on(broker.url()));
    let server = Server::start(&db, &[]);
    server.until_connected().await;
    broker.raise_memory_alarm().await;
    let order = server.place("a", &[("WIDGET-A", 1)]).await;
    let blocked = "its order.placed waits for the broker (the broker takes no messages: ";
    eventually_waits(&server, &order, |sentence| sentence.starts_with(blocked)).await;
    broker.clear_memory_alarm();
    eventually_waits(&server, &order, |sentence| sentence.starts_with("reserved")).await;
    rabbit::until_queues_are_safe().await;
    broker.kill();
    eventually("a broker that is down", || async {
        (server.read("/v1/health").await["broker"]["status"] == "down").then_some(())
    })
    .await;
    let order = server.place("a", &[("WIDGET-A", 1)]).await;
    let away = "its order.placed waits for the broker (";
    let told = eventually_waits(&server, &order, |sentence| sentence.starts_with(away)).await;
    assert!(told["waiting_for"].as_str().unwrap().ends_with("): it goes out once that is over"));
    broker.start_again();
    eventually_waits(&server, &order, |sentence| sentence.starts_with("reserved")).await;
    until_finished_and_audited(&db).await;
    assert!(server.terminate().await);
}

/// An id is whatever a message says it is: a letter under the id of a tenant's event may be anybody's.
async fn letters_of_others_are_no_part_of_a_tenants_story(db: TestDb) {
    let [acme, platform] = [Secret::random(), Secret::random()];
    let keys = format!("admin:acme:{},admin:*:{}", acme.hash(), platform.hash());
    let app = App::start_with(&db, &["--api-keys", &keys]).await;
    let (acme, platform) = (app.with_key(acme.reveal()), app.with_key(platform.reveal()));
    let order = acme.place("a", &[("A", 1)]).await;
    eventually_waits(&acme, &order, |sentence| sentence.starts_with("waits for nothing")).await;
    let sent = acme.read(&format!("/v1/outbox?aggregate_id={}", order["id"].as_str().unwrap())).await;
    let placed = sent["data"].as_array().unwrap().iter().find(|row| row["event_type"] == "order.placed").unwrap();
    let poison = json!({ "queue": "inventory", "body": "no JSON, so nobody's", "message_id": placed["id"] });
    platform.tell("/v1/lab/publish", &poison).await;
    eventually("the letter", || async {
        (platform.read("/v1/dead-letters").await["data"].as_array().unwrap().len() == 1).then_some(())
    })
    .await;
    let letters = |timeline: &Value| timeline.to_string().matches("not-json").count();
    assert_eq!(letters(&timeline(&acme, &order).await), 0);
    let path = format!("/v1/orders/{}/timeline", order["number"].as_str().unwrap());
    let whole = platform.get(&path).header("x-group-id", "acme").send().await.unwrap().json::<Value>().await.unwrap();
    assert!(letters(&whole) > 0, "{whole:#}");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn what_a_broker_says_of_its_troubles_is_not_for_tenants() {
    let [acme, platform] = [Secret::random(), Secret::random()];
    let keys = format!("admin:acme:{},viewer:*:{}", acme.hash(), platform.hash());
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &["--api-keys", &keys, "--broker-url", "amqp://127.0.0.1:1"]);
    let (acme, platform) = (server.with_key(acme.reveal()), server.with_key(platform.reveal()));
    let order = acme.place("a", &[("A", 1)]).await;
    let for_tenants =
        "its order.placed waits for the broker (it cannot be used just now): it goes out once that is over";
    eventually_waits(&acme, &order, |sentence| sentence == for_tenants).await;
    let path = format!("/v1/orders/{}/timeline", order["number"].as_str().unwrap());
    let whole = platform.get(&path).header("x-group-id", "acme").send().await.unwrap().json::<Value>().await.unwrap();
    let sentence = whole["waiting_for"].as_str().unwrap();
    assert!(sentence.contains("waits for the broker (") && sentence != for_tenants, "{sentence}");
    assert!(server.terminate().await);
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
    a_whole_life_is_told,
    an_order_that_expired_says_so,
    hops_follow_one_another_in_time,
    an_event_that_waits_for_its_predecessor_says_so,
    what_is_replayed_is_told,
    the_story_outlives_the_outbox,
    an_order_that_is_not_there_has_no_timeline,
    letters_of_others_are_no_part_of_a_tenants_story,
);
