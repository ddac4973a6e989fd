//! The document says what the server does, and Swagger UI comes out of the binary.

use reqwest::{Method, StatusCode};
use serde_json::{Map, Value, json};
use stockade::app::Builder;

use crate::support::{App, Engine, TestDb, eventually, settings};

const DOCUMENT: &str = include_str!("../../openapi/stockade.json");

async fn start(demo: bool) -> (App, TestDb) {
    let db = TestDb::new(Engine::Sqlite).await;
    let app = App::start_built(Builder::new(settings(&db, &[])).demo(demo)).await;
    (app, db)
}

/// (method, path, operation) of everything in the document.
fn operations(document: &Value) -> Vec<(Method, String, Value)> {
    let paths = document["paths"].as_object().unwrap();
    let of_path = |(path, item): (&String, &Value)| {
        let item = item.as_object().unwrap().clone();
        let path = path.clone();
        item.into_iter().map(move |(method, operation)| {
            (Method::from_bytes(method.to_uppercase().as_bytes()).unwrap(), path.clone(), operation)
        })
    };
    paths.iter().flat_map(of_path).collect()
}

/// The path with its parameters as the document's examples have them.
fn example_path(path: &str, operation: &Value) -> String {
    let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
    parameters.iter().filter(|parameter| parameter["in"] == "path").fold(path.to_owned(), |path, parameter| {
        let example = parameter["example"].as_str().unwrap_or("019a0000-0000-7000-8000-000000000000");
        path.replace(&format!("{{{}}}", parameter["name"].as_str().unwrap()), example)
    })
}

/// What Swagger UI fills in as the body: the schema's example, or its fields' examples.
fn example_body(document: &Value, operation: &Value) -> Option<Value> {
    let schema = operation.pointer("/requestBody/content/application~1json/schema")?;
    // A body that may be left out is its schema or null.
    let schema = schema.pointer("/oneOf/0").unwrap_or(schema);
    let reference = schema.get("$ref")?.as_str()?;
    let schema = document.pointer(reference.strip_prefix('#')?)?;
    if let Some(example) = schema.get("example") {
        return Some(example.clone());
    }
    let fields = schema["properties"].as_object()?.iter();
    Some(Value::Object(fields.map(|(name, field)| (name.clone(), field["example"].clone())).collect::<Map<_, _>>()))
}

#[tokio::test(crate = "crate::support::schedule")]
async fn the_document_served_is_the_one_in_the_repository() {
    let written: Value = serde_json::from_str(DOCUMENT).unwrap();
    for demo in [true, false] {
        let (app, _db) = start(demo).await;
        assert!(
            app.read("/openapi.json").await == written,
            "openapi/stockade.json is out of date: cargo run -- openapi > openapi/stockade.json"
        );
        app.stop().await;
    }
}

#[test]
fn the_command_prints_the_document() {
    let printed = std::process::Command::new(env!("CARGO_BIN_EXE_stockade")).arg("openapi").output().unwrap();
    assert!(printed.status.success());
    assert!(String::from_utf8(printed.stdout).unwrap() == DOCUMENT);
}

#[tokio::test(crate = "crate::support::schedule")]
async fn every_operation_of_the_document_is_served() {
    let (app, _db) = start(true).await;
    eventually("the start", || async {
        app.get("/startupz").send().await.unwrap().status().is_success().then_some(())
    })
    .await;
    let document = app.read("/openapi.json").await;
    let operations = operations(&document);
    assert!(operations.len() > 20, "{}", operations.len());
    for (method, path, operation) in operations {
        let url = format!("{}{}", app.url, example_path(&path, &operation));
        let request = app.client.request(method.clone(), &url);
        let request = if method == Method::GET { request } else { request.json(&json!({})) };
        let response = request.send().await.unwrap();
        let status = response.status();
        assert_ne!(status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
        assert!(!status.is_server_error(), "{method} {path}: {status}");
        let documented = operation["responses"].as_object().unwrap();
        assert!(documented.contains_key(status.as_str()), "{method} {path} answers {status}, which it does not say");
        if response.headers().get("content-type").is_some_and(|kind| kind == "text/event-stream") {
            continue; // it has no end to wait for
        }
        let body: Value = response.json().await.unwrap_or_default();
        let detail = body["detail"].as_str().unwrap_or_default();
        assert!(!detail.contains("nothing at this path"), "{method} {path} is documented but not there");
        for words in ["operationId", "summary"] {
            assert!(operation[words].as_str().is_some_and(|text| !text.is_empty()), "{method} {path} lacks {words}");
        }
        assert_eq!(operation["tags"].as_array().map(Vec::len), Some(1), "{method} {path}");
    }
    app.stop().await;
}

/// "Try it out" without an edit: what the page fills in is accepted.
#[tokio::test(crate = "crate::support::schedule")]
async fn the_examples_of_the_document_work() {
    let (app, _db) = start(true).await;
    let document = app.read("/openapi.json").await;
    let mut tried = 0;
    for (method, path, operation) in operations(&document) {
        let Some(body) = example_body(&document, &operation) else { continue };
        // Some work all too well: one ends the process, others close the server to whoever has no key. One takes a row
        // that a broker has refused too often.
        let untried = ["/v1/lab/crash", "/v1/outbox/{id}/retry", "/v1/session"];
        if untried.contains(&path.as_str()) || path.starts_with("/v1/keys") {
            continue;
        }
        // What is done to an order is tried on one placed as the example of placing has it.
        // What is done to a letter or a job is tried on one that it can be done to.
        let path = match path.split_once("/{id}/") {
            Some(("/v1/orders", _)) => path.replace("{id}", &place_the_example(&app, &document).await),
            Some(("/v1/dead-letters", verb)) => path.replace("{id}", &file_a_letter(&app, verb == "restore").await),
            Some((jobs @ ("/v1/redrives" | "/v1/replays"), _)) => path.replace("{id}", &start_slowly(&app, jobs).await),
            _ => path,
        };
        let url = format!("{}{}", app.url, example_path(&path, &operation));
        let response = app.client.request(method.clone(), url).json(&body).send().await.unwrap();
        let status = response.status();
        assert!(status.is_success(), "{method} {path} with {body}: {status} {}", response.text().await.unwrap());
        tried += 1;
    }
    assert!(
        tried >= 14,
        "orders and their steps, stock, the lab, letters, redrives and replays have bodies; {tried} were tried"
    );
    app.stop().await;
}

async fn place_the_example(app: &App, document: &Value) -> String {
    let body = example_body(document, &document["paths"]["/v1/orders"]["post"]).unwrap();
    let response = app.post("/v1/orders", &body).header("prefer", "wait=20").send().await.unwrap();
    let order: Value = response.json().await.unwrap();
    assert_eq!(order["status"], "reserved");
    order["id"].as_str().unwrap().to_owned()
}

/// Starts a redrive or a replay that will not have ended by the next call.
async fn start_slowly(app: &App, path: &str) -> String {
    for _ in 0..3 {
        app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "no JSON", "times": 10 })).await;
    }
    app.eventually_list("/v1/dead-letters?state=open&limit=10", 10).await;
    let asked = match path {
        "/v1/redrives" => json!({ "rate": 1 }),
        _ => json!({ "rate": 1, "from": "2000-01-01T00:00:00Z" }),
    };
    app.tell(path, &asked).await["id"].as_str().unwrap().to_owned()
}

async fn file_a_letter(app: &App, discarded: bool) -> String {
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "no JSON" })).await;
    let letter = app.eventually_list("/v1/dead-letters?state=open&limit=1", 1).await.remove(0);
    let id = letter["id"].as_str().unwrap().to_owned();
    if discarded {
        app.tell(&format!("/v1/dead-letters/{id}/discard"), &json!({ "reason": "an example" })).await;
    }
    id
}

#[tokio::test(crate = "crate::support::schedule")]
async fn the_fault_lab_is_not_there_unless_asked_for() {
    let (app, _db) = start(false).await;
    for path in ["/v1/lab/publish", "/v1/lab/crash", "/v1/lab/fail", "/v1/lab/slow", "/v1/lab/duplicate"] {
        let response = app.post(path, &json!({})).send().await.unwrap();
        crate::support::problem(response, 404, "not-found").await;
    }
    app.stop().await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn swagger_ui_is_served_whole_from_the_binary() {
    let (app, _db) = start(false).await;
    for path in ["/docs", "/docs/"] {
        let response = app.get(path).send().await.unwrap();
        assert_eq!((response.status(), response.url().path()), (StatusCode::OK, "/docs/"));
        assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/html"));
        let page = response.text().await.unwrap();
        let assets: Vec<&str> = page
            .split(['"', '\''])
            .filter(|text| text.ends_with(".js") || text.ends_with(".css") || text.ends_with(".png"))
            .collect();
        assert!(assets.len() >= 4, "{assets:?}");
        for asset in assets {
            assert!(!asset.contains("//"), "{asset} would be fetched from elsewhere");
            let response = app.get(&format!("/docs/{}", asset.trim_start_matches("./"))).send().await.unwrap();
            assert_eq!(response.status(), StatusCode::OK, "{asset}");
            let content_type = response.headers()["content-type"].to_str().unwrap().to_owned();
            let kind = asset.rsplit('.').next().unwrap().replace("js", "javascript");
            assert!(content_type.contains(&kind), "{asset}: {content_type}");
            assert!(!response.bytes().await.unwrap().is_empty());
        }
    }
    let initializer = app.get("/docs/swagger-initializer.js").send().await.unwrap().text().await.unwrap();
    assert!(initializer.contains("/openapi.json") && initializer.contains("tryItOutEnabled"), "{initializer}");
    let home = app.get("/").send().await.unwrap();
    assert_eq!(home.status(), StatusCode::OK);
    assert!(home.text().await.unwrap().contains("/docs"));
    app.stop().await;
}
