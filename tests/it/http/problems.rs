//! Every error is a problem+json with a stable code, and points at the field that is wrong.

use reqwest::{Method, Response};
use serde_json::{Value, json};
use stockade::app::Builder;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::{App, DEADLINE, TestDb, each_database, order, problem, settings, wrong_field};

const SOME_ID: &str = "019a0000-0000-7000-8000-000000000000";

/// POSTs bytes as they are.
async fn post_raw(app: &App, path: &str, content_type: Option<&str>, body: impl Into<reqwest::Body>) -> Response {
    let request = app.client.post(format!("{}{path}", app.url)).body(body);
    let request = match content_type {
        Some(content_type) => request.header("content-type", content_type),
        None => request,
    };
    request.send().await.unwrap()
}

async fn what_is_not_there_is_not_found(db: TestDb) {
    let app = App::start(&db).await;
    let paths = [
        "/nothing".to_owned(),
        "/v1".to_owned(),
        "/v1/orders/".to_owned(),
        "/v1/unknown/path".to_owned(),
        format!("/v1/orders/{SOME_ID}"),
        "/v1/orders/ORD-00000000".to_owned(),
        "/v1/orders/no-id-at-all".to_owned(),
        "/v1/orders/%00".to_owned(),
        format!("/v1/reservations/{SOME_ID}"),
        "/v1/reservations/RES-00000000".to_owned(),
        "/v1/reservations/%00".to_owned(),
        "/v1/stock/NOWHERE".to_owned(),
        "/v1/stock/%00".to_owned(),
        "/v1/queues/nowhere".to_owned(),
        format!("/v1/inbox/inventory/{SOME_ID}"),
        format!("/v1/inbox/nobody/{SOME_ID}"),
        format!("/v1/inbox/%00/{SOME_ID}"),
        "/v1/inbox/inventory/no-id".to_owned(),
        format!("/v1/outbox/{SOME_ID}"),
        "/v1/outbox/no-id".to_owned(),
        format!("/v1/dead-letters/{SOME_ID}"),
        "/v1/dead-letters/no-id".to_owned(),
    ];
    for path in paths {
        problem(app.get(&path).send().await.unwrap(), 404, "not-found").await;
    }
    let redrive = format!("/v1/dead-letters/{SOME_ID}/redrive");
    problem(app.post(&redrive, &json!({})).send().await.unwrap(), 404, "not-found").await;
    let lab = json!({ "queue": "nowhere", "body": "x" });
    problem(app.post("/v1/lab/publish", &lab).send().await.unwrap(), 404, "not-found").await;
    problem(app.get("/problems/no-such-code").send().await.unwrap(), 404, "not-found").await;
    app.stop().await;
}

async fn a_problem_leads_to_what_is_to_be_said_of_it(db: TestDb) {
    let app = App::start(&db).await;
    let nowhere = problem(app.get("/v1/nowhere").send().await.unwrap(), 404, "not-found").await;
    for path in [nowhere["type"].as_str().unwrap(), "/problems"] {
        let page = app.get(path).send().await.unwrap();
        assert_eq!(page.status(), 200, "{path}");
        assert!(page.text().await.unwrap().contains("Check the id"), "{path}");
    }
    app.stop().await;
}

async fn a_closed_lab_says_how_it_is_opened(db: TestDb) {
    let app = App::start_built(Builder::new(settings(&db, &[]))).await;
    let closed = app.post("/v1/lab/crash", &json!({ "point": "relay.before_mark" })).send().await.unwrap();
    let closed = problem(closed, 404, "not-found").await;
    assert!(closed["detail"].as_str().unwrap().contains("serve --demo"), "{closed}");
    app.stop().await;
}

async fn a_method_that_a_path_does_not_take_is_told_which_it_does(db: TestDb) {
    let app = App::start(&db).await;
    for (method, path, allowed) in [
        (Method::DELETE, "/v1/orders", ["GET", "POST"].as_slice()),
        (Method::PUT, "/v1/orders/ORD-00000000", &["GET"]),
        (Method::POST, "/v1/stock/WIDGET-A", &["GET", "PUT"]),
        (Method::GET, "/v1/stock/WIDGET-A/adjustments", &["POST"]),
        (Method::PATCH, "/v1/inbox", &["GET"]),
        (Method::GET, "/v1/consumers/inventory/pause", &["POST"]),
        (Method::POST, "/livez", &["GET"]),
        (Method::POST, "/", &["GET"]),
    ] {
        let response = app.client.request(method, format!("{}{path}", app.url)).send().await.unwrap();
        let allow = response.headers()["allow"].to_str().unwrap().to_owned();
        assert!(allowed.iter().all(|method| allow.contains(method)), "{path}: {allow}");
        problem(response, 405, "method-not-allowed").await;
    }
    app.stop().await;
}

async fn a_body_must_be_json_and_say_so(db: TestDb) {
    let app = App::start(&db).await;
    let good = order("alice", &[("A", 1)]).to_string();
    for content_type in [None, Some("text/plain"), Some("application/x-www-form-urlencoded"), Some("json")] {
        let response = post_raw(&app, "/v1/orders", content_type, good.clone()).await;
        problem(response, 415, "media-type").await;
    }
    for content_type in ["application/json; charset=utf-8", "Application/JSON", "application/vnd.shop+json"] {
        assert_eq!(post_raw(&app, "/v1/orders", Some(content_type), good.clone()).await.status(), 201);
    }
    for (what, body) in [
        ("empty", Vec::new()),
        ("cut off", b"{\"customer_id\": \"al".to_vec()),
        ("words", b"hello".to_vec()),
        ("trailing data", format!("{good} {good}").into_bytes()),
        ("trailing garbage", format!("{good}]").into_bytes()),
        ("not UTF-8", b"{\"customer_id\": \"\xff\xfe\", \"items\": []}".to_vec()),
        ("a comma too many", b"{\"customer_id\": \"alice\",}".to_vec()),
    ] {
        println!("{what}");
        problem(post_raw(&app, "/v1/orders", Some("application/json"), body).await, 400, "malformed-json").await;
    }
    let deep = format!("{{\"customer_id\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    wrong_field(post_raw(&app, "/v1/orders", Some("application/json"), deep).await, "/customer_id").await;
    assert_eq!(app.walk("/v1/orders").await.len(), 3, "nothing was placed by a bad body");
    app.stop().await;
}

async fn a_body_too_large_is_refused(db: TestDb) {
    let app = App::start_with(&db, &["--max-body", "2KiB"]).await;
    let long = order(&"x".repeat(4096), &[("A", 1)]);
    problem(app.post("/v1/orders", &long).send().await.unwrap(), 413, "body-too-large").await;
    let stock = json!({ "on_hand": 1, "padding": "x".repeat(4096) });
    problem(app.put("/v1/stock/A", &stock).send().await.unwrap(), 413, "body-too-large").await;
    assert_eq!(app.place("alice", &[("A", 1)]).await["status"], "placed");
    // Nothing of it needs to come: that it would be too long is said before.
    let head = "POST /v1/orders HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    let mut socket = TcpStream::connect(app.running.address).await.unwrap();
    socket.write_all(format!("{head}content-length: 99999999999\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    timeout(DEADLINE, socket.read_exact(&mut answer)).await.expect("an answer").unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    app.stop().await;
}

async fn a_wrong_field_of_an_order_is_pointed_at(db: TestDb) {
    let app = App::start_with(&db, &["--max-items", "3"]).await;
    let with = |pointer: &str, value: Value| {
        let mut body = order("alice", &[("A", 1), ("B", 1)]);
        *body.pointer_mut(pointer).unwrap() = value;
        body
    };
    let quantities = [
        json!(0),
        json!(-1),
        json!(1_000_000_001),
        json!(i64::MAX),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1e30),
        json!(1.5),
        json!(1.0),
        json!("1"),
        json!(null),
        json!(true),
        json!([1]),
    ];
    let mut wrong: Vec<(&str, Value)> = quantities.into_iter().map(|value| ("/items/1/quantity", value)).collect();
    wrong.extend([
        ("/customer_id", json!("")),
        ("/customer_id", json!("x".repeat(129))),
        ("/customer_id", json!("a\u{0}b")),
        ("/customer_id", json!(7)),
        ("/customer_id", json!(null)),
        ("/items", json!([])),
        ("/items", json!({})),
        ("/items", json!(null)),
        ("/items", json!(vec![json!({ "sku": "A", "quantity": 1 }); 4])),
        ("/items/0", json!("A")),
        ("/items/0", json!(["A", 1])),
        ("/items/0/sku", json!("")),
        ("/items/0/sku", json!(" A")),
        ("/items/0/sku", json!("A\n")),
        ("/items/0/sku", json!("x".repeat(65))),
        ("/items/0/sku", json!(1)),
    ]);
    for (pointer, value) in wrong {
        wrong_field(app.post("/v1/orders", &with(pointer, value)).send().await.unwrap(), pointer).await;
    }
    for (price, pointer) in [(json!(-1), "/items/0/unit_price_minor"), (json!(9.99), "/items/0/unit_price_minor")] {
        let body = json!({ "customer_id": "a", "items": [{ "sku": "A", "quantity": 1, "unit_price_minor": price }] });
        wrong_field(app.post("/v1/orders", &body).send().await.unwrap(), pointer).await;
    }
    for currency in [json!("usd"), json!("US"), json!("EURO"), json!("€€€"), json!(1)] {
        let body = json!({ "customer_id": "a", "currency": currency, "items": [{ "sku": "A", "quantity": 1 }] });
        wrong_field(app.post("/v1/orders", &body).send().await.unwrap(), "/currency").await;
    }
    // Each line is in range; the total is not.
    let dear = json!({ "sku": "A", "quantity": 1_000_000_000, "unit_price_minor": 1_000_000_000_000i64 });
    let body = json!({ "customer_id": "a", "items": [dear] });
    wrong_field(app.post("/v1/orders", &body).send().await.unwrap(), "/items").await;
    assert_eq!(app.walk("/v1/orders").await.len(), 0, "nothing was placed");
    app.stop().await;
}

async fn a_missing_an_unknown_or_a_doubled_field_is_named(db: TestDb) {
    let app = App::start(&db).await;
    let item = json!({ "sku": "A", "quantity": 1 });
    for (body, named) in [
        (json!({ "items": [item] }), "customer_id"),
        (json!({ "customer_id": "a" }), "items"),
        (json!({ "customer_id": "a", "items": [{ "sku": "A" }] }), "quantity"),
        (json!({ "customer_id": "a", "items": [item], "discount": 1 }), "discount"),
        (json!({ "customer_id": "a", "items": [{ "sku": "A", "quantity": 1, "colour": "red" }] }), "colour"),
    ] {
        let problem = problem(app.post("/v1/orders", &body).send().await.unwrap(), 422, "validation").await;
        assert!(problem["errors"][0]["detail"].as_str().unwrap().contains(named), "{problem}");
        assert!(problem["errors"][0]["pointer"].is_string(), "{problem}");
    }
    let twice = r#"{"customer_id":"a","customer_id":"b","items":[{"sku":"A","quantity":1}]}"#;
    let response = post_raw(&app, "/v1/orders", Some("application/json"), twice).await;
    let doubled = problem(response, 422, "validation").await;
    assert!(doubled["errors"][0]["detail"].as_str().unwrap().contains("customer_id"), "{doubled}");
    for body in ["null", "[]", "7", "\"order\"", "{}", "[\"alice\", [{\"sku\": \"A\", \"quantity\": 1}]]"] {
        let response = post_raw(&app, "/v1/orders", Some("application/json"), body).await;
        problem(response, 422, "validation").await;
    }
    app.stop().await;
}

async fn bad_filters_limits_and_cursors_are_refused_on_every_list(db: TestDb) {
    let app = App::start(&db).await;
    let lists = ["orders", "stock", "reservations", "notifications", "inbox", "outbox", "dead-letters"];
    for list in lists {
        for query in ["limit=0", "limit=201", "limit=-1", "limit=ten", "limit=99999999999999999999", "colour=blue"] {
            let response = app.get(&format!("/v1/{list}?{query}")).send().await.unwrap();
            problem(response, 400, "bad-filter").await;
        }
        // Nonsense, base64 of nonsense, a cursor of another version, and one whose key is empty or has a NUL.
        for cursor in ["%21%21", "bm9uc2Vuc2U", "MjphYmM", "x"] {
            let response = app.get(&format!("/v1/{list}?cursor={cursor}")).send().await.unwrap();
            problem(response, 400, "bad-cursor").await;
        }
        for cursor in ["MTo", "MToA", "MTphYmM"] {
            let response = app.get(&format!("/v1/{list}?cursor={cursor}")).send().await.unwrap();
            // Stock is paged by SKU, where most texts are a place in the list.
            if list != "stock" || response.status() != 200 {
                problem(response, 400, "bad-cursor").await;
            }
        }
    }
    for query in [
        "orders?status=lost",
        "orders?status=",
        "reservations?state=lost",
        "reservations?order_id=7",
        "notifications?kind=lost",
        "notifications?state=lost",
        "notifications?order_id=7",
        "inbox?state=lost",
        "inbox?event_id=7",
        "inbox?min_duplicates=many",
        "outbox?status=lost",
        "dead-letters?state=lost",
        "orders?customer_id=%00",
        "reservations?sku=%00",
        "outbox?aggregate_id=%00",
    ] {
        problem(app.get(&format!("/v1/{query}")).send().await.unwrap(), 400, "bad-filter").await;
    }
    app.stop().await;
}

async fn bad_idempotency_keys_are_refused(db: TestDb) {
    let app = App::start(&db).await;
    let place = || app.post("/v1/orders", &order("alice", &[("A", 1)]));
    for key in ["", "\"\"", "two words", &"x".repeat(256), "naïve"] {
        let response = place().header("idempotency-key", key.as_bytes()).send().await.unwrap();
        problem(response, 400, "idempotency-key-invalid").await;
    }
    let response = place().header("idempotency-key", "one").header("idempotency-key", "two").send().await.unwrap();
    problem(response, 400, "idempotency-key-invalid").await;
    assert_eq!(app.walk("/v1/orders").await.len(), 0);
    let longest = place().header("idempotency-key", "x".repeat(255)).send().await.unwrap();
    assert_eq!(longest.status(), 201);
    app.stop().await;
}

async fn the_fault_lab_checks_what_it_is_given(db: TestDb) {
    let app = App::start(&db).await;
    for (body, pointer) in [
        (json!({ "queue": "inventory", "body": "x", "times": 0 }), "/times"),
        (json!({ "queue": "inventory", "body": "x", "times": 1001 }), "/times"),
        (json!({ "queue": "inventory", "body": "x", "message_id": "a\u{0}" }), "/message_id"),
        (json!({ "queue": "inventory", "body_base64": "***" }), "/body_base64"),
        (json!({ "routing_key": "", "body": "x" }), "/routing_key"),
        (json!({ "body": "x" }), ""),
        (json!({ "queue": "inventory", "routing_key": "order.placed", "body": "x" }), ""),
        (json!({ "queue": "inventory" }), ""),
    ] {
        wrong_field(app.post("/v1/lab/publish", &body).send().await.unwrap(), pointer).await;
    }
    let nobody = app.post("/v1/lab/fail", &json!({ "consumer": "nobody" })).send().await.unwrap();
    problem(nobody, 404, "not-found").await;
    let often = app.post("/v1/lab/fail", &json!({ "consumer": "orders", "times": -1 })).send().await.unwrap();
    wrong_field(often, "/times").await;
    let nowhere = app.post("/v1/lab/crash", &json!({ "point": "nowhere" })).send().await.unwrap();
    let problem = wrong_field(nowhere, "/point").await;
    assert!(problem["detail"].as_str().unwrap().contains("consumer.after_commit"), "it names the points there are");
    app.stop().await;
}

each_database!(
    what_is_not_there_is_not_found,
    a_problem_leads_to_what_is_to_be_said_of_it,
    a_closed_lab_says_how_it_is_opened,
    a_method_that_a_path_does_not_take_is_told_which_it_does,
    a_body_must_be_json_and_say_so,
    a_body_too_large_is_refused,
    a_wrong_field_of_an_order_is_pointed_at,
    a_missing_an_unknown_or_a_doubled_field_is_named,
    bad_filters_limits_and_cursors_are_refused_on_every_list,
    bad_idempotency_keys_are_refused,
    the_fault_lab_checks_what_it_is_given,
);
