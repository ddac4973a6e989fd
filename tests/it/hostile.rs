//! Whatever is sent, nothing comes back that should not: no secret, no stack, no control character, no other query.

use std::process::Command;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stockade::access::Secret;
use stockade_kernel::clock::mint_id;

use crate::support::{Api, App, Engine, Server, TestDb, each_database, eventually, order, problem};

each_database!(no_text_is_ever_taken_for_sql, no_text_in_a_whole_request_is_ever_taken_for_sql);

const DOCUMENT: &str = include_str!("../../openapi/stockade.json");

/// Ways out of a string, of an identifier and of a number, on either database.
const CORPUS: [&str; 8] = [
    "' OR '1'='1",
    "'; DROP TABLE orders_orders; --",
    "1; SELECT pg_sleep(30)",
    "' UNION SELECT hash FROM access_keys --",
    "$1",
    "\\'; SELECT 1; --",
    "/**/OR/**/1=1",
    "' || (SELECT group_concat(name) FROM sqlite_master) || '",
];

async fn no_text_is_ever_taken_for_sql(db: TestDb) {
    let app = App::start(&db).await;
    app.place("alice", &[("WIDGET-A", 1)]).await;
    let document: Value = serde_json::from_str(DOCUMENT).unwrap();
    let mut tried = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            // A crash works; a key would close the door.
            if path.starts_with("/v1/lab") || path.starts_with("/v1/keys") || path == "/v1/events" {
                continue;
            }
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            let names_the_engine = ["/v1/health", "/v1/metrics"].contains(&path.as_str());
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            for text in CORPUS {
                for request in requests(&app, &method, path, &parameters, text) {
                    let (status, said) = answer(request).await;
                    let said = if names_the_engine { "" } else { &said };
                    // On a busy machine a probe may rightly answer 503.
                    let status =
                        if ["/readyz", "/startupz"].contains(&path.as_str()) { StatusCode::OK } else { status };
                    harmless(&format!("{method} {path} with {text}"), text, status, said);
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 500, "{tried}");
    assert_eq!(app.walk("/v1/orders").await.len(), 1, "the tables are as they were");
    app.stop().await;
}

/// The text in each parameter by itself; and, where there is a body, in each of its fields.
fn requests(app: &App, method: &Method, path: &str, parameters: &[Value], text: &str) -> Vec<reqwest::RequestBuilder> {
    let escaped = utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let mut filled = path.to_owned();
    for parameter in parameters.iter().filter(|parameter| parameter["in"] == "path") {
        filled = filled.replace(&format!("{{{}}}", parameter["name"].as_str().unwrap()), &escaped);
    }
    let request = |url: String| app.client.request(method.clone(), format!("{}{url}", app.url));
    if *method == Method::GET {
        let query = parameters.iter().filter(|parameter| parameter["in"] == "query");
        let filters = query.map(|parameter| format!("{filled}?{}={escaped}", parameter["name"].as_str().unwrap()));
        return filters.chain([filled.clone()]).map(request).collect();
    }
    let fields = json!({
        "customer_id": text, "items": [{ "sku": text, "quantity": 1 }], "currency": text, "reason": text, "delta": 1,
        "on_hand": 1, "key": text, "consumer": text, "queue": text, "event_type": text, "why": text,
    });
    let fields = fields.as_object().unwrap();
    let single = fields.iter().map(|(name, value)| json!({ name.as_str(): value }));
    let order = json!({ "customer_id": text, "items": [{ "sku": text, "quantity": 1 }] });
    // A whole order of hostile texts is a good order: it is placed in the test of the dashboard, not here.
    let bodies = single.chain((path != "/v1/orders").then_some(order));
    bodies.map(|body| request(filled.clone()).header("idempotency-key", "'--").json(&body)).collect()
}

/// A request that is good but for one hostile text gets past the checks of its form, and to the database.
struct Attempt {
    method: Method,
    path: String,
    body: Value,
}

fn post(path: impl Into<String>, body: Value) -> Attempt {
    Attempt { method: Method::POST, path: path.into(), body }
}

/// Things to do something with, each under its real id.
struct Targets {
    order: String,
    letter: String,
    redrive: String,
    replay: String,
    outbox: String,
    key: String,
}

/// New ones for each text: most can be done something with only once.
async fn targets(app: &Api) -> Targets {
    let id = |row: &Value| row["id"].as_str().unwrap().to_owned();
    let order = app.reserve("WIDGET-A", 5).await;
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "no JSON" })).await;
    let letters = eventually("a letter", || async {
        // By its reason: other letters may show an earlier text.
        let letters = app.read("/v1/dead-letters?state=open&reason=not-json").await;
        (!letters["data"].as_array().unwrap().is_empty()).then_some(letters)
    });
    Targets {
        letter: id(&letters.await["data"][0]),
        redrive: id(&app.tell("/v1/redrives", &json!({ "reason": "none-such" })).await),
        replay: id(&app.tell("/v1/replays", &json!({ "from": "2999-01-01T00:00:00Z" })).await),
        outbox: id(&app.read(&format!("/v1/outbox?aggregate_id={order}")).await["data"][0]),
        key: id(&app.tell("/v1/keys", &json!({ "role": "viewer", "group_id": "acme", "name": "n" })).await),
        order,
    }
}

/// Every body that the API takes, whole, with the text in one field after the other.
fn attempts(at: &Targets, text: &str) -> Vec<Attempt> {
    let items = json!([{ "sku": "WIDGET-A", "quantity": 1 }]);
    let from = "2020-01-01T00:00:00Z";
    let letter = format!("/v1/dead-letters/{}", at.letter);
    let reason = || json!({ "reason": text });
    let event = json!({
        "event_id": mint_id(), "occurred_at": from, "aggregate_type": "order", "event_type": "placed",
        "aggregate_id": mint_id(), "group_id": text, "correlation_id": text, "payload": text,
    });
    let mut all = vec![
        Attempt {
            method: Method::PUT,
            path: format!("/v1/stock/{}", utf8_percent_encode(text, NON_ALPHANUMERIC)),
            body: json!({ "on_hand": 5 }),
        },
        post("/v1/orders", json!({ "customer_id": text, "items": items })),
        post("/v1/orders", json!({ "customer_id": "a", "items": [{ "sku": text, "quantity": 1 }] })),
        post("/v1/orders", json!({ "customer_id": "a", "items": items, "currency": text })),
        post(format!("/v1/orders/{}/payments", at.order), json!({ "amount_minor": 5, "currency": text })),
        post(format!("/v1/orders/{}/cancel", at.order), reason()),
        post("/v1/stock/WIDGET-A/adjustments", json!({ "delta": 1, "reason": text })),
        post("/v1/redrives", json!({ "ids": [text] })),
        post(format!("/v1/redrives/{}/stop", at.redrive), reason()),
        post(format!("/v1/replays/{}/stop", at.replay), reason()),
        post(format!("{letter}/discard"), reason()),
        post(format!("{letter}/restore"), reason()),
        post(format!("{letter}/redrive"), reason()),
        post(format!("/v1/outbox/{}/retry", at.outbox), reason()),
        post(format!("/v1/keys/{}/revoke", at.key), reason()),
        post("/v1/session", json!({ "key": text })),
        post("/v1/lab/publish", json!({ "queue": "orders", "body": text, "message_id": text })),
        post("/v1/lab/publish", json!({ "queue": "inventory", "body": event.to_string() })),
    ];
    let key = json!({ "role": "viewer", "group_id": "acme", "name": "n" });
    for (path, whole, fields) in [
        ("/v1/redrives", json!({}), &["queue", "consumer", "event_type", "reason", "why"][..]),
        ("/v1/replays", json!({ "from": from, "dry_run": true }), &["aggregate_type", "consumer"]),
        ("/v1/replays", json!({ "from": "2999-01-01T00:00:00Z" }), &["why"]),
        ("/v1/outbox/retry", json!({}), &["aggregate_type", "aggregate_id", "reason"]),
        ("/v1/keys", key, &["group_id", "subsidiary_id", "name"]),
    ] {
        for field in fields {
            let mut body = whole.clone();
            body[*field] = text.into();
            all.push(post(path, body));
        }
    }
    all
}

async fn no_text_in_a_whole_request_is_ever_taken_for_sql(db: TestDb) {
    let secret = Secret::random();
    let app = App::start_with(&db, &["--api-keys", &format!("admin:*:{}", secret.hash())]).await;
    let admin = app.with_key(secret.reveal());
    let mut done = 0;
    for text in CORPUS {
        let at = targets(&admin).await;
        for Attempt { method, path, body } in attempts(&at, text) {
            let request = admin.client.request(method.clone(), format!("{}{path}", admin.url)).json(&body);
            let request = request.header("x-operator", text).header("x-request-id", text);
            let (status, said) = answer(request).await;
            harmless(&format!("{method} {path} with {body}"), text, status, &said);
            done += usize::from(status.is_success());
        }
        let body = order("alice", &[("WIDGET-A", 1)]);
        for header in ["idempotency-key", "x-group-id", "x-operator", "x-request-id"] {
            let (status, said) = answer(admin.post("/v1/orders", &body).header(header, text)).await;
            harmless(&format!("an order with {header}"), text, status, &said);
        }
        // Whatever was let in is there under its own name, and brings nothing else along.
        let escaped = utf8_percent_encode(text, NON_ALPHANUMERIC);
        let of_customer = admin.read(&format!("/v1/orders?customer_id={escaped}")).await;
        assert_eq!(of_customer["data"].as_array().unwrap().len(), 1, "{text}");
        let rest = admin.read("/v1/dead-letters?state=open&limit=200").await;
        for letter in rest["data"].as_array().unwrap() {
            let path = format!("/v1/dead-letters/{}/discard", letter["id"].as_str().unwrap());
            // One that was sent back may be filed again at this very moment.
            admin.post(&path, &json!({ "reason": "seen" })).send().await.unwrap();
        }
    }
    assert!(done >= CORPUS.len() * 15, "most were good requests: {done}");
    eventually("rest", || async { (admin.read("/v1/audit").await["unsettled"] == 0).then_some(()) }).await;
    let audit = admin.read("/v1/audit").await;
    assert_eq!(audit["violations"], 0, "{audit:#}");
    assert!(db.count("SELECT count(*) FROM orders_orders").await >= 8 * 3);
    assert!(db.count("SELECT count(*) FROM access_keys").await >= 8);
    app.stop().await;
}

async fn answer(request: reqwest::RequestBuilder) -> (StatusCode, String) {
    let response = request.send().await.unwrap();
    (response.status(), response.text().await.unwrap())
}

/// An answer that tells nothing of any query.
fn harmless(asked: &str, text: &str, status: StatusCode, said: &str) {
    assert!(!status.is_server_error(), "{asked}: {status} {said}");
    // A dead letter of an earlier text may be filed only now.
    let earlier = CORPUS.iter().map(|text| json!(text).to_string());
    let said = earlier.fold(said.to_owned(), |said, quoted| said.replace(&quoted, "\"\""));
    for word in ["syntax error", "sqlite", "SELECT ", "pg_", "src/"] {
        assert!(text.contains(word) || !said.contains(word), "{asked}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn every_answer_tells_browsers_what_not_to_do() {
    let db = TestDb::new(Engine::Sqlite).await;
    let app = App::start(&db).await;
    for path in ["/", "/login", "/docs/", "/v1/orders", "/v1/nothing", "/livez", "/static/style.css", "/openapi.json"] {
        let response = app.get(path).send().await.unwrap();
        let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(header("x-content-type-options").as_deref(), Some("nosniff"), "{path}");
        assert_eq!(header("x-frame-options").as_deref(), Some("DENY"), "{path}");
        assert_eq!(header("referrer-policy").as_deref(), Some("no-referrer"), "{path}");
        let policy = header("content-security-policy").unwrap();
        assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{path}: {policy}");
        assert!(!policy.contains("script-src 'unsafe"), "{path}: {policy}");
        assert_eq!(header("cache-control").as_deref() == Some("no-store"), path.starts_with("/v1/"), "{path}");
        assert!(header("access-control-allow-origin").is_none(), "{path}");
    }
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn swagger_ui_works_under_its_policy() {
    let db = TestDb::new(Engine::Sqlite).await;
    let app = App::start(&db).await;
    let browser = crate::support::Browser::open(&app.url).await;
    browser.open_page("/docs/").await;
    browser.until_reads(".opblock-summary-path", "/v1").await;
    assert_eq!(browser.recorded().await, json!([]));
    browser.close().await;
    app.stop().await;
}

/// Secrets in every setting that can hold one, and a server made to talk about its troubles at the top of its voice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn no_secret_gets_into_logs_errors_or_the_list_of_settings() {
    const CANARY: &str = "canary7Zq";
    let folder = tempfile::tempdir().unwrap();
    let smtp = format!("smtp://me:{CANARY}@127.0.0.1:1");
    let (postgres, amqp) =
        (format!("postgres://me:{CANARY}@127.0.0.1:1/x"), format!("amqp://me:{CANARY}@127.0.0.1:1/x"));
    let said = |args: &[&str], envs: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
        command.args(args).envs(envs.iter().copied()).current_dir(folder.path()).env("STOCKADE_LOG", "trace");
        let output = command.output().unwrap();
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    };
    let secrets = [
        ("STOCKADE_DATABASE_URL", postgres.as_str()),
        ("STOCKADE_BROKER_URL", amqp.as_str()),
        ("METRICS_TOKEN", CANARY),
        ("STOCKADE_WEBHOOK_SECRET", CANARY),
        ("STOCKADE_SMTP_URL", smtp.as_str()),
        ("STOCKADE_API_KEYS", CANARY),
        ("STOCKADE_API_KEY", CANARY),
    ];
    for args in [
        &["config"][..],
        &["config", "--json"],
        &["config", "--check"],
        &["serve"],
        &["migrate"],
        &["doctor"],
        &["audit"],
        &["serve", "--help"],
        &["key", "list"],
    ] {
        let said = said(args, &secrets);
        assert!(!said.is_empty() && !said.contains(CANARY), "{args:?}: {said}");
    }
    assert!(said(&["config"], &secrets).contains("postgres://me:***@127.0.0.1:1/x"));

    let db = TestDb::new(Engine::Sqlite).await;
    let log = folder.path().join("log");
    let secret = format!("stk_{CANARY}");
    let hash = stockade::access::Hash::of(&secret).to_string();
    let entry = format!("admin:*:{hash}");
    let flags = ["--api-keys", &entry, "--broker-url", &amqp, "--log", "trace", "--metrics-token", CANARY];
    let server = Server::start_logging(&db, &flags, &log);
    let api = server.with_key(&secret);
    api.read("/v1/stock").await;
    api.tell("/v1/session", &json!({ "key": secret })).await;
    assert_eq!(api.get("/v1/metrics").header("x-metrics-token", CANARY).send().await.unwrap().status(), 200);
    problem(api.get("/v1/orders?limit=x").send().await.unwrap(), 400, "bad-filter").await;
    let health = api.read("/v1/health").await.to_string();
    assert!(!health.contains(CANARY), "{health}");
    drop(server);
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.len() > 1000, "it did talk");
    let leak = log.lines().find(|line| line.contains(CANARY) || line.contains(&hash));
    assert!(leak.is_none(), "{leak:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn control_characters_reach_neither_the_log_nor_the_terminal() {
    const EVIL: &str = "\u{1b}[2Jfake\u{9b}31m\nline";
    let db = TestDb::new(Engine::Sqlite).await;
    let folder = tempfile::tempdir().unwrap();
    for format in ["json", "pretty"] {
        let log = folder.path().join(format);
        let server = Server::start_logging(&db, &["--log", "debug", "--log-format", format], &log);
        let body =
            json!({ "queue": "inventory", "body": EVIL, "headers": { "x-event-type": EVIL }, "message_id": "m" });
        server.tell("/v1/lab/publish", &body).await;
        server.eventually_list("/v1/dead-letters?state=open", 1).await;
        for field in ["customer_id", "currency"] {
            let mut order = json!({ "customer_id": "a", "items": [{ "sku": "A", "quantity": 1 }] });
            order[field] = EVIL.into();
            problem(server.post("/v1/orders", &order).send().await.unwrap(), 422, "validation").await;
        }
        let id = server.read("/v1/dead-letters?state=open").await["data"][0]["id"].as_str().unwrap().to_owned();
        let stockade = |args: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
            let output = command.args(args).args(["--url", &server.url]).output().unwrap();
            [output.stdout, output.stderr].concat()
        };
        let shown = stockade(&["dead-letters", "list"]);
        let missing = stockade(&["order", "get", EVIL]);
        server.tell(&format!("/v1/dead-letters/{id}/discard"), &json!({ "reason": "seen" })).await;
        drop(server);
        for bytes in [shown, missing, std::fs::read(&log).unwrap()] {
            let text = String::from_utf8(bytes).unwrap();
            assert!(!text.contains(['\u{1b}', '\u{9b}']) && !text.contains("\nline"), "{text}");
        }
    }
}
