//! The trace of a request, followed through messages; and what the log says of each outcome.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::{Value, json};

use crate::support::{App, Engine, Server, TestDb, each_database, each_database_on_rabbit, eventually, order};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

fn traceparent() -> String {
    format!("00-{TRACE}-{PARENT}-01")
}

/// The trace context of each event of an order, by type.
async fn stored(db: &TestDb, order: &Value) -> BTreeMap<String, Option<String>> {
    let db = db.look().await;
    let mut tx = db.read().await.unwrap();
    let rows: Vec<(String, Option<String>)> = stockade_kernel::on!(tx, c => {
        sqlx::query_as("SELECT event_type, traceparent FROM messaging_outbox WHERE aggregate_id = $1")
            .bind(order["id"].as_str().unwrap())
            .fetch_all(c)
            .await
    })
    .unwrap();
    drop(tx);
    db.close().await;
    rows.into_iter().collect()
}

async fn place(api: &crate::support::Api, traceparent: &str) -> Value {
    let request = api.post("/v1/orders", &order("a", &[("WIDGET-A", 1)])).header("prefer", "wait=20");
    request.header("traceparent", traceparent).send().await.unwrap().json().await.unwrap()
}

async fn a_trace_goes_from_a_request_through_every_event_it_causes(db: TestDb) {
    let app = App::start(&db).await;
    let order = place(&app, &traceparent()).await;
    let id = order["id"].as_str().unwrap();
    let payment = json!({ "amount_minor": 0, "currency": "USD" });
    app.post(&format!("/v1/orders/{id}/payments"), &payment).header("traceparent", traceparent()).send().await.unwrap();
    let expected: BTreeMap<String, Option<String>> =
        ["placed", "reserved", "paid"].map(|event| (event.to_owned(), Some(traceparent()))).into();
    assert_eq!(stored(&db, &order).await, expected);
    app.stop().await;
}

async fn a_retry_keeps_its_trace(db: TestDb) {
    let app = App::start_with(&db, &["--retry-base", "1ms"]).await;
    app.tell("/v1/lab/fail", &json!({ "consumer": "inventory", "times": 1 })).await;
    let order = place(&app, &traceparent()).await;
    assert_eq!(order["status"], "reserved");
    assert_eq!(stored(&db, &order).await["reserved"], Some(traceparent()));
    app.stop().await;
}

async fn what_is_no_context_starts_none(db: TestDb) {
    let app = App::start(&db).await;
    let order = place(&app, "00-nonsense").await;
    assert_eq!(stored(&db, &order).await, [("placed".to_owned(), None), ("reserved".to_owned(), None)].into());
    app.stop().await;
}

each_database!(
    a_trace_goes_from_a_request_through_every_event_it_causes,
    a_retry_keeps_its_trace,
    what_is_no_context_starts_none,
);

/// What a collector has received: spans, with the service they came from.
type Received = Arc<Mutex<Vec<(String, Span)>>>;

async fn receive(State(received): State<Received>, body: Bytes) {
    let request = ExportTraceServiceRequest::decode(body).unwrap();
    for resource in request.resource_spans {
        let attributes = resource.resource.unwrap().attributes;
        let service = attributes.iter().find(|attribute| attribute.key == "service.name").unwrap();
        let service = format!("{:?}", service.value);
        let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
        received.lock().unwrap().extend(spans.map(|span| (service.clone(), span)));
    }
}

/// An OTLP receiver on a free port.
async fn collector() -> (String, Received) {
    let received = Received::default();
    let router = Router::new().route("/v1/traces", post(receive)).with_state(received.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    #[expect(clippy::disallowed_methods, reason = "ends with the test's runtime")]
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (url, received)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A payment that overtakes its order in the ledger is met twice: when it is kept, and when it is booked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn an_event_that_was_kept_goes_on_with_its_trace() {
    let (url, received) = collector().await;
    let db = TestDb::new(Engine::Sqlite).await;
    let mut command = Server::command(&db, &["--retry-base", "1s"]);
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &url).env("OTEL_BSP_SCHEDULE_DELAY", "100");
    let server = Server::spawn(command, Path::new("/dev/null"));
    server.tell("/v1/lab/fail", &json!({ "consumer": "ledger", "times": 1 })).await;
    let order = place(&server, "00-nonsense").await;
    let payment = json!({ "amount_minor": 0, "currency": "USD" });
    let path = format!("/v1/orders/{}/payments", order["id"].as_str().unwrap());
    server.post(&path, &payment).header("traceparent", traceparent()).send().await.unwrap();
    eventually("both spans", || async {
        let received = received.lock().unwrap();
        let of_payment = |span: &Span| span.name == "process ledger order.paid" && hex(&span.trace_id) == TRACE;
        (received.iter().filter(|(_, span)| of_payment(span)).count() == 2).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn spans_reach_a_collector_as_one_trace() {
    let (url, received) = collector().await;
    let db = TestDb::new(Engine::Sqlite).await;
    let mut command = Server::command(&db, &[]);
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &url).env("OTEL_BSP_SCHEDULE_DELAY", "100");
    let server = Server::spawn(command, Path::new("/dev/null"));
    place(&server, &traceparent()).await;
    let names = ["POST /v1/orders", "process inventory order.placed", "process notifications inventory.reserved"];
    let spans = eventually("the spans", || async {
        let received = received.lock().unwrap();
        let found = |name: &&str| received.iter().find(|(_, span)| span.name == **name && hex(&span.trace_id) == TRACE);
        names.iter().map(found).map(|span| span.cloned()).collect::<Option<Vec<(String, Span)>>>()
    })
    .await;
    // Each continues the one before it.
    let mut parent = PARENT.to_owned();
    for (service, span) in &spans {
        assert!(service.contains("stockade"), "{service}");
        assert_eq!(hex(&span.parent_span_id), parent, "{}", span.name);
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
        parent = hex(&span.span_id);
    }
    assert!(server.terminate().await, "a collector does not hold up the end");
}

async fn over_a_broker_the_publishing_is_a_span_too(db: TestDb) {
    const PRODUCER: i32 = 4;
    let (url, received) = collector().await;
    let mut command = Server::command(&db, &[]);
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &url).env("OTEL_BSP_SCHEDULE_DELAY", "100");
    let server = Server::spawn(command, Path::new("/dev/null"));
    server.until_connected().await;
    place(&server, &traceparent()).await;
    let span = |name: &'static str| {
        let received = received.clone();
        eventually(name, move || {
            let received = received.lock().unwrap();
            let found = received.iter().find(|(_, span)| span.name == name && hex(&span.trace_id) == TRACE);
            std::future::ready(found.map(|(_, span)| span.clone()))
        })
    };
    let (request, published) = (span("POST /v1/orders").await, span("publish order.placed").await);
    assert_eq!((published.kind, hex(&published.parent_span_id)), (PRODUCER, hex(&request.span_id)));
    assert!(server.terminate().await);
}

each_database_on_rabbit!(over_a_broker_the_publishing_is_a_span_too);

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_collector_that_is_away_holds_up_nothing() {
    let db = TestDb::new(Engine::Sqlite).await;
    let mut command = Server::command(&db, &[]);
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1").env("OTEL_BSP_SCHEDULE_DELAY", "50");
    let server = Server::spawn(command, Path::new("/dev/null"));
    assert_eq!(place(&server, &traceparent()).await["status"], "reserved");
    assert!(server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn each_outcome_is_a_line_that_reads_alone() {
    let db = TestDb::new(Engine::Sqlite).await;
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    // JSON by itself, for a file is no terminal.
    let server = Server::start_logging(&db, &["--log", "info", "--retry-max", "1"], &log);
    server.put_stock("ONE", 1).await;
    let reserved = server.place_and_wait("a", &[("ONE", 1)]).await;
    let rejected = server.place_and_wait("a", &[("ONE", 1)]).await;
    let body = db.event_body(reserved["id"].as_str().unwrap(), "order.placed").await;
    server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": body })).await;
    server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "no json" })).await;
    let line = async |beginning: String| -> Value {
        eventually(&beginning, || async {
            let text = std::fs::read_to_string(&log).unwrap();
            let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            lines
                .map(|line| line["fields"].clone())
                .find(|fields| fields["message"].as_str().is_some_and(|message| message.starts_with(&beginning)))
        })
        .await
    };
    let told = line(format!("RESERVED {} as RES-", reserved["number"].as_str().unwrap())).await;
    assert_eq!((&told["order.id"], &told["correlation.id"]), (&reserved["id"], &reserved["correlation_id"]));
    let told = line(format!("REJECTED {}: Insufficient ONE", rejected["number"].as_str().unwrap())).await;
    assert!(told["event.id"].is_string(), "{told}");
    let id = reserved["id"].as_str().unwrap();
    let told = line(format!("DUPLICATE inventory order.placed of {id}: ")).await;
    assert_eq!((&told["aggregate.id"], &told["correlation.id"]), (&reserved["id"], &reserved["correlation_id"]));
    line("DEAD LETTER inventory message without an id (not-json): ".to_owned()).await;
    let other = body.replacen("\"quantity\":1", "\"quantity\":2", 1);
    server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": other })).await;
    let told = line(format!("DEAD LETTER inventory order.placed of {id} (id-reused): ")).await;
    assert_eq!((&told["reason"], &told["correlation.id"]), (&json!("id-reused"), &reserved["correlation_id"]));
    assert!(server.pay(id, 0).await.status().is_success());
    let told = line(format!("PAID {}", reserved["number"].as_str().unwrap())).await;
    assert_eq!(told["order.id"], reserved["id"]);
    let booked = server.reserve("WIDGET-A", 250).await;
    assert!(server.pay(&booked, 250).await.status().is_success());
    line(format!("BOOKED {booked}: 250 USD")).await;
    // The payments are behind it, or one of them would be what fails.
    let at_rest = async || {
        let queue = server.read("/v1/queues/inventory").await;
        (queue["depth"] == 0 && queue["in_flight"] == 0).then_some(())
    };
    eventually("an empty queue", at_rest).await;
    server.tell("/v1/lab/fail", &json!({ "consumer": "inventory", "times": 1 })).await;
    assert!(server.step(id, "fulfil").await.status().is_success());
    let told = line(format!("DEAD LETTER inventory order.fulfilled of {id} (retries-exhausted): ")).await;
    assert!(told["event.id"].is_string() && told["reason"] == "retries-exhausted", "{told}");
    assert!(server.terminate().await);
}
