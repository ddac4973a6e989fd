//! What Prometheus is told.

use reqwest::StatusCode;
use serde_json::json;
use stockade::app::Builder;

use crate::loyalty::example;
use crate::support::{App, TestDb, each_database, eventually, problem, settings};

/// The page of an application.
async fn page(app: &App) -> String {
    let response = app.get("/v1/metrics").send().await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
    assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
    response.text().await.unwrap()
}

/// The value of one sample, `None` if it is not on the page.
fn sample(page: &str, name_and_labels: &str) -> Option<f64> {
    let line = page.lines().find(|line| line.split_once(' ').is_some_and(|(name, _)| name == name_and_labels));
    line.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

async fn eventually_sample(app: &App, name: &str, value: f64) {
    eventually(&format!("{name} {value}"), || async { (sample(&page(app).await, name) == Some(value)).then_some(()) })
        .await;
}

/// The codes in the table of dead-letter reasons in the docs.
fn documented_dead_letter_reasons() -> Vec<&'static str> {
    let docs = include_str!("../../../docs/guarantees.md");
    let section = docs.split("## Dead letters").nth(1).unwrap().split("\n## ").next().unwrap();
    section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect()
}

async fn a_fresh_server_lists_the_counters_of_every_consumer_at_0(db: TestDb) {
    let app = App::start_built(example::add_to(Builder::new(settings(&db, &[])))).await;
    let page = page(&app).await;
    let reasons = documented_dead_letter_reasons();
    assert!(reasons.contains(&"not-json") && reasons.contains(&"broker-limit"), "{reasons:?}");
    for consumer in ["orders", "inventory", "notifications", "ledger", "loyalty"] {
        let is_0 = |name: &str| assert_eq!(sample(&page, name), Some(0.0), "{name}\n{page}");
        is_0(&format!("stockade_consumer_dedup_total{{consumer=\"{consumer}\"}}"));
        for result in ["retried", "rejected", "waiting"] {
            is_0(&format!("stockade_consumer_processed_total{{consumer=\"{consumer}\",result=\"{result}\"}}"));
        }
        for reason in
            ["failed-for-now", "call-failed", "outcome-unknown", "handler-panic", "database", "woken-failed", "raced"]
        {
            is_0(&format!("stockade_consumer_retries_total{{consumer=\"{consumer}\",reason=\"{reason}\"}}"));
        }
        // `broker-limit` is found by the dead-letter collector: no consumer rejected that message.
        for reason in reasons.iter().filter(|reason| **reason != "broker-limit") {
            is_0(&format!("stockade_consumer_dlq_total{{consumer=\"{consumer}\",reason=\"{reason}\"}}"));
        }
    }
    app.stop().await;
}

async fn each_transition_is_counted_once(db: TestDb) {
    let app = App::start_with(&db, &["--retry-max", "1"]).await;
    app.put_stock("M", 1).await;
    app.place_and_wait("a", &[("M", 1)]).await;
    let rejected = app.place_and_wait("b", &[("M", 1)]).await;
    eventually_sample(&app, "stockade_consumer_processed_total{consumer=\"notifications\",result=\"done\"}", 2.0).await;
    // A copy of an event that was dealt with.
    let body = db.event_body(rejected["id"].as_str().unwrap(), "order.placed").await;
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": body, "times": 3 })).await;
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "no json" })).await;
    eventually_sample(&app, "stockade_consumer_dedup_total{consumer=\"inventory\"}", 3.0).await;
    eventually_sample(&app, "stockade_dead_letters{consumer=\"inventory\",reason=\"not-json\"}", 1.0).await;
    let page = page(&app).await;
    for (name, value) in [
        ("stockade_orders_total{outcome=\"placed\"}", 2.0),
        ("stockade_orders_total{outcome=\"reserved\"}", 1.0),
        ("stockade_orders_total{outcome=\"rejected\"}", 1.0),
        ("stockade_order_end_to_end_seconds_count", 2.0),
        ("stockade_consumer_processed_total{consumer=\"inventory\",result=\"done\"}", 2.0),
        ("stockade_consumer_processed_total{consumer=\"orders\",result=\"done\"}", 2.0),
        ("stockade_consumer_dlq_total{consumer=\"inventory\",reason=\"not-json\"}", 1.0),
        ("stockade_outbox_pending", 0.0),
        ("stockade_outbox_dead", 0.0),
        ("stockade_database_up", 1.0),
        ("stockade_broker_connected", 1.0),
        ("stockade_broker_blocked", 0.0),
        ("stockade_consumer_paused{consumer=\"inventory\"}", 0.0),
        ("http_server_request_duration_seconds_count{route=\"/v1/orders\",method=\"POST\",status=\"201\"}", 2.0),
    ] {
        assert_eq!(sample(&page, name), Some(value), "{name}\n{page}");
    }
    app.stop().await;
}

async fn another_body_under_a_known_id_counts_as_rejected(db: TestDb) {
    let app = App::start(&db).await;
    let order = app.place_and_wait("a", &[("WIDGET-A", 1)]).await;
    let body = db.event_body(order["id"].as_str().unwrap(), "order.placed").await;
    let other = body.replacen("\"customer_id\":\"a\"", "\"customer_id\":\"b\"", 1);
    assert_ne!(other, body);
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": other })).await;
    eventually_sample(&app, "stockade_dead_letters{consumer=\"inventory\",reason=\"id-reused\"}", 1.0).await;
    let counted = "stockade_consumer_dlq_total{consumer=\"inventory\",reason=\"id-reused\"}";
    assert_eq!(sample(&page(&app).await, counted), Some(1.0));
    // Two bodies under an id that nobody knows, in one batch: the first stands.
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let (id, fresh) = (stockade_kernel::clock::mint_id().to_string(), stockade_kernel::clock::mint_id().to_string());
    let known = serde_json::from_str::<serde_json::Value>(&body).unwrap();
    let renamed = |body: &str| {
        let body = body.replace(known["event_id"].as_str().unwrap(), &id);
        body.replace(order["id"].as_str().unwrap(), &fresh)
    };
    for body in [renamed(&body), renamed(&other)] {
        app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": body })).await;
    }
    app.tell("/v1/consumers/inventory/resume", &json!({})).await;
    eventually_sample(&app, counted, 2.0).await;
    app.stop().await;
}

async fn an_idle_desk_beats(db: TestDb) {
    let app = App::start(&db).await;
    let beat = async || {
        let name = "stockade_consumer_last_success_timestamp_seconds{consumer=\"desk\"}";
        sample(&page(&app).await, name)
    };
    let first = eventually("the desk", &beat).await;
    eventually("its next beat", || async { beat().await.filter(|at| *at > first) }).await;
    app.stop().await;
}

async fn an_event_given_up_on_counts_as_rejected_under_its_reason(db: TestDb) {
    let app = App::start_with(&db, &["--retry-max", "2", "--retry-base", "1ms"]).await;
    app.tell("/v1/lab/fail", &json!({ "consumer": "inventory", "times": 2 })).await;
    app.place("a", &[("WIDGET-A", 1)]).await;
    eventually_sample(&app, "stockade_dead_letters{consumer=\"inventory\",reason=\"retries-exhausted\"}", 1.0).await;
    let page = page(&app).await;
    for (name, value) in [
        ("stockade_consumer_retries_total{consumer=\"inventory\",reason=\"failed-for-now\"}", 1.0),
        ("stockade_consumer_processed_total{consumer=\"inventory\",result=\"retried\"}", 1.0),
        ("stockade_consumer_processed_total{consumer=\"inventory\",result=\"rejected\"}", 1.0),
        ("stockade_consumer_dlq_total{consumer=\"inventory\",reason=\"retries-exhausted\"}", 1.0),
        ("stockade_inbox_rows{consumer=\"inventory\",state=\"dead\"}", 1.0),
    ] {
        assert_eq!(sample(&page, name), Some(value), "{name}\n{page}");
    }
    app.stop().await;
}

async fn a_paused_consumer_shows_in_its_lag(db: TestDb) {
    let app = App::start(&db).await;
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    for _ in 0..3 {
        app.place("a", &[("WIDGET-A", 1)]).await;
    }
    eventually_sample(&app, "stockade_consumer_lag{consumer=\"inventory\"}", 3.0).await;
    let page = page(&app).await;
    assert_eq!(sample(&page, "stockade_consumer_paused{consumer=\"inventory\"}"), Some(1.0));
    assert_eq!(sample(&page, "stockade_queue_depth{queue=\"stockade.inventory\"}"), Some(3.0));
    app.stop().await;
}

async fn with_a_token_only_those_who_know_it_may_look(db: TestDb) {
    let app = App::start_with(&db, &["--metrics-token", "s3cret"]).await;
    problem(app.get("/v1/metrics").send().await.unwrap(), 401, "token-missing").await;
    let wrong = app.get("/v1/metrics").header("x-metrics-token", "guess").send().await.unwrap();
    problem(wrong, 401, "token-invalid").await;
    for (name, value) in [("x-metrics-token", "s3cret"), ("authorization", "Bearer s3cret")] {
        let response = app.get("/v1/metrics").header(name, value).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{name}");
    }
    app.stop().await;
}

async fn no_id_is_ever_a_label(db: TestDb) {
    let app = App::start(&db).await;
    let order = app.place_and_wait("a", &[("WIDGET-A", 1)]).await;
    app.read(&format!("/v1/orders/{}", order["id"].as_str().unwrap())).await;
    app.get("/no/such/path").send().await.unwrap();
    let page = page(&app).await;
    assert!(!page.contains(order["id"].as_str().unwrap()) && !page.contains("/no/such/path"), "{page}");
    assert!(page.contains("route=\"/v1/orders/{id}\""), "{page}");
    app.stop().await;
}

each_database!(
    a_fresh_server_lists_the_counters_of_every_consumer_at_0,
    each_transition_is_counted_once,
    another_body_under_a_known_id_counts_as_rejected,
    an_idle_desk_beats,
    an_event_given_up_on_counts_as_rejected_under_its_reason,
    a_paused_consumer_shows_in_its_lag,
    with_a_token_only_those_who_know_it_may_look,
    no_id_is_ever_a_label,
);
