//! Two tenants on one server: whatever is asked, by whichever role, nobody sees or changes what is the other's.
//!
//! The routes come from the API document, so a new one is walked without being named here; but it fails until somebody
//! has said who may use it, and what of the other tenant's to try on it.

use std::collections::BTreeSet;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::Keyed;
use crate::support::{Api, App, TestDb, each_database, eventually, order};

each_database!(no_route_shows_or_changes_what_is_anothers);

const DOCUMENT: &str = include_str!("../../../openapi/stockade.json");
/// In everything of acme's that has a text.
const MARK: &str = "ACME-ONLY";

/// Who may use each operation, apart from what the document says: `platform` stands for keys of every group.
const WHO: [(&str, &str); 61] = [
    ("GET /livez", "anybody"),
    ("GET /readyz", "anybody"),
    ("GET /startupz", "anybody"),
    ("GET /v1/metrics", "anybody"), // has a token of its own
    ("POST /v1/session", "anybody"),
    ("DELETE /v1/session", "anybody"),
    ("GET /v1/session", "viewer"),
    ("GET /v1/health", "viewer"),
    ("GET /v1/events", "viewer"),
    ("GET /v1/orders", "viewer"),
    ("POST /v1/orders", "client"),
    ("GET /v1/orders/{id}", "viewer"),
    ("GET /v1/orders/{id}/timeline", "viewer"),
    ("POST /v1/orders/{id}/payments", "client"),
    ("POST /v1/orders/{id}/cancel", "client operator"),
    ("POST /v1/orders/{id}/fulfil", "client operator"),
    ("GET /v1/stock", "viewer"),
    ("GET /v1/stock/{sku}", "viewer"),
    ("PUT /v1/stock/{sku}", "operator"),
    ("POST /v1/stock/{sku}/adjustments", "operator"),
    ("GET /v1/reservations", "viewer"),
    ("GET /v1/reservations/{id}", "viewer"),
    ("GET /v1/notifications", "viewer"),
    ("GET /v1/ledger/entries", "viewer"),
    ("GET /v1/ledger/balances", "viewer"),
    ("GET /v1/inbox", "viewer"),
    ("GET /v1/inbox/{consumer}/{event_id}", "viewer"),
    ("GET /v1/outbox", "viewer"),
    ("GET /v1/outbox/{id}", "viewer"),
    ("POST /v1/outbox/{id}/retry", "operator"),
    ("POST /v1/outbox/retry", "operator"),
    ("GET /v1/dead-letters", "viewer"),
    ("GET /v1/dead-letters/groups", "viewer"),
    ("GET /v1/dead-letters/{id}", "viewer"),
    ("POST /v1/dead-letters/{id}/redrive", "operator"),
    ("POST /v1/dead-letters/{id}/discard", "operator"),
    ("POST /v1/dead-letters/{id}/restore", "operator"),
    ("GET /v1/redrives", "viewer"),
    ("POST /v1/redrives", "operator"),
    ("GET /v1/redrives/{id}", "viewer"),
    ("POST /v1/redrives/{id}/stop", "operator"),
    ("GET /v1/actions", "viewer"),
    ("GET /v1/keys", "admin"),
    ("POST /v1/keys", "admin"),
    ("POST /v1/keys/{id}/revoke", "admin"),
    ("GET /v1/queues", "viewer platform"),
    ("GET /v1/queues/{name}", "viewer platform"),
    ("GET /v1/audit", "viewer platform"),
    ("POST /v1/consumers/{name}/pause", "operator platform"),
    ("POST /v1/consumers/{name}/resume", "operator platform"),
    ("GET /v1/replays", "viewer platform"),
    ("POST /v1/replays", "operator platform"),
    ("GET /v1/replays/{id}", "viewer platform"),
    ("POST /v1/replays/{id}/stop", "operator platform"),
    ("GET /v1/lab", "operator platform"),
    ("POST /v1/lab/publish", "operator platform"),
    ("POST /v1/lab/crash", "operator platform"),
    ("POST /v1/lab/fail", "operator platform"),
    ("POST /v1/lab/duplicate", "operator platform"),
    ("POST /v1/lab/slow", "operator platform"),
    ("POST /v1/lab/reset", "operator platform"),
];

const ROLES: [&str; 4] = ["viewer", "client", "operator", "admin"];

fn includes(role: &str, needed: &str) -> bool {
    role == needed || role == "admin" || needed == "viewer"
}

/// May the holder of `role` in one group alone?
fn may(role: &str, who: &str) -> bool {
    who == "anybody" || (!who.contains("platform") && who.split(' ').any(|needed| includes(role, needed)))
}

struct Operation {
    method: Method,
    path: String,
    who: &'static str,
    parameters: Vec<Value>,
    takes_body: bool,
}

fn operations() -> Vec<Operation> {
    let document: Value = serde_json::from_str(DOCUMENT).unwrap();
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let name = format!("{} {path}", method.to_uppercase());
            let who = WHO.iter().find(|(known, _)| *known == name).map(|(_, who)| *who);
            let who = who.unwrap_or_else(|| panic!("{name} is new: say in WHO who may use it"));
            assert!(!operation["security"].as_array().unwrap().is_empty(), "{name} says nothing of who may use it");
            found.push(Operation {
                method: Method::from_bytes(method.to_uppercase().as_bytes()).unwrap(),
                path: path.clone(),
                who,
                parameters: operation["parameters"].as_array().cloned().unwrap_or_default(),
                takes_body: operation.get("requestBody").is_some(),
            });
        }
    }
    // What anybody may look at changes nothing, so it goes first.
    found.sort_by_key(|operation| operation.method != Method::GET);
    found
}

/// What acme has, by the parameter that names it.
struct Acme {
    order: Value,
    reservation: String,
    event: String,
    letter: String,
    redrive: String,
    key: String,
    cursors: Vec<String>,
    /// Every id that acme's own lists show.
    ids: BTreeSet<String>,
}

impl Acme {
    fn parameter(&self, path: &str, name: &str) -> String {
        let id = |value: &Value| value["id"].as_str().unwrap().to_owned();
        match (name, path.split('/').nth(2).unwrap()) {
            ("id", "orders") => id(&self.order),
            ("id", "reservations") => self.reservation.clone(),
            ("id", "outbox") | ("event_id", _) => self.event.clone(),
            ("id", "dead-letters") => self.letter.clone(),
            ("id", "redrives") => self.redrive.clone(),
            ("id", "replays") => self.redrive.clone(),
            ("id", "keys") => self.key.clone(),
            ("sku", _) => MARK.to_owned(),
            ("consumer" | "name", _) => "inventory".to_owned(),
            (name, _) => panic!("{path} takes a {name}: which is acme's?"),
        }
    }

    /// Values of acme's for a filter.
    fn filters(&self, name: &str) -> Vec<String> {
        let order = self.order["id"].as_str().unwrap().to_owned();
        match name {
            "cursor" => self.cursors.clone(),
            "order_id" | "aggregate_id" => vec![order],
            "event_id" => vec![self.event.clone()],
            "customer_id" => vec![MARK.to_owned()],
            "sku" => vec![MARK.to_owned()],
            "account" => vec![format!("customer:{MARK}")],
            "subject" => vec![self.letter.clone(), self.redrive.clone()],
            "redrive" => vec![self.redrive.clone()],
            "correlation_id" => vec![self.order["correlation_id"].as_str().unwrap().to_owned(), MARK.to_owned()],
            "who" => vec!["operator-key".to_owned(), "admin-key".to_owned()],
            _ => Vec::new(),
        }
    }

    fn is_in(&self, text: &str) -> Option<String> {
        let ids = self.ids.iter().map(String::as_str);
        ids.chain([MARK]).find(|secret| text.contains(secret)).map(str::to_owned)
    }
}

const LISTS: [&str; 11] = [
    "/v1/orders",
    "/v1/stock",
    "/v1/reservations",
    "/v1/notifications",
    "/v1/ledger/entries",
    "/v1/ledger/balances",
    "/v1/inbox",
    "/v1/outbox",
    "/v1/dead-letters",
    "/v1/redrives",
    "/v1/keys",
];

/// Two orders through to their payment, two letters, a redrive and a key, all of acme's.
async fn fill(acme: &Api, platform: &Api) -> Acme {
    acme.put_stock(MARK, 100).await;
    let mut placed = Vec::new();
    for _ in 0..2 {
        let body = json!({ "customer_id": MARK, "items": [{ "sku": MARK, "quantity": 1, "unit_price_minor": 5 }] });
        let response = acme.post("/v1/orders", &body).header("prefer", "wait=20").send().await.unwrap();
        let order: Value = response.json().await.unwrap();
        assert_eq!(order["status"], "reserved", "{order}");
        assert!(acme.pay(order["id"].as_str().unwrap(), 5).await.status().is_success());
        placed.push(order);
    }
    acme.eventually_list("/v1/ledger/entries", 4).await;
    acme.eventually_list("/v1/notifications", 4).await;
    for id in ["019a0000-0000-7000-8000-00000000aaaa", "019a0000-0000-7000-8000-00000000bbbb"] {
        let envelope = json!({
            "event_id": id, "occurred_at": "2026-11-16T09:30:00Z", "aggregate_type": "order", "aggregate_id": id,
            "event_type": "placed", "group_id": "acme", "subsidiary_id": null, "correlation_id": MARK,
            "causation_id": null, "payload": { "order_id": MARK },
        });
        platform.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": envelope.to_string() })).await;
    }
    let letters = acme.eventually_list("/v1/dead-letters?state=open", 2).await;
    let redrive = acme.tell("/v1/redrives", &json!({ "ids": [letters[1]["id"]], "why": MARK })).await;
    let key = acme.tell("/v1/keys", &json!({ "role": "viewer", "group_id": "acme", "name": MARK })).await;
    acme.eventually_list("/v1/redrives?state=done", 1).await;
    // What was sent back is no better for it, and is filed again.
    acme.eventually_list("/v1/dead-letters?state=open", 2).await;
    let (mut ids, mut cursors) = (BTreeSet::new(), Vec::new());
    for list in LISTS {
        let page = acme.read(&format!("{list}?limit=1")).await;
        cursors.extend(page["next_cursor"].as_str().map(str::to_owned));
        let rows = acme.read(list).await["data"].as_array().unwrap().clone();
        assert!(!rows.is_empty(), "acme has something at {list}");
        let fields = ["id", "event_id", "order_id", "number"];
        ids.extend(rows.iter().flat_map(|row| fields.iter().filter_map(|name| row[name].as_str().map(str::to_owned))));
    }
    assert!(cursors.len() >= 8, "most lists have a second page");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let row = acme.read("/v1/inbox?consumer=inventory&limit=1").await;
    Acme {
        reservation: text(&acme.read("/v1/reservations").await["data"][0]["id"]),
        event: text(&row["data"][0]["event_id"]),
        letter: text(&letters[0]["id"]),
        redrive: text(&redrive["id"]),
        key: text(&key["id"]),
        order: placed.remove(0),
        cursors,
        ids,
    }
}

/// All that acme can see of its own, but for what goes on by itself.
async fn everything_of(acme: &Api) -> Vec<Value> {
    let mut all = Vec::new();
    for list in LISTS.iter().chain(&["/v1/actions"]) {
        all.push(acme.read(&format!("{list}?limit=200")).await);
    }
    all
}

async fn no_route_shows_or_changes_what_is_anothers(db: TestDb) {
    let mut keys = Keyed::new();
    let (acme_admin, platform) = (keys.key("admin", "acme"), keys.key("operator", "*"));
    let rivals = ROLES.map(|role| (role, keys.key(role, "rival")));
    let app = App::start_with(&db, &["--api-keys", &keys.setting()]).await;
    let (acme_api, platform) = (app.with_key(&acme_admin), app.with_key(&platform));
    let rivals = rivals.map(|(role, key)| (role, app.with_key(&key)));
    let acme = fill(&acme_api, &platform).await;
    let before = everything_of(&acme_api).await;
    for operation in operations() {
        let url = operation.parameters.iter().filter(|parameter| parameter["in"] == "path").fold(
            operation.path.clone(),
            |url, parameter| {
                let name = parameter["name"].as_str().unwrap();
                url.replace(&format!("{{{name}}}"), &acme.parameter(&operation.path, name))
            },
        );
        let name = format!("{} {}", operation.method, operation.path);
        let strange = send(&app, &operation, &url).await.0;
        // Metrics have a token of their own, and a login wants a good key.
        let refused = operation.who != "anybody" || ["GET /v1/metrics", "POST /v1/session"].contains(&name.as_str());
        assert_eq!(strange == StatusCode::UNAUTHORIZED, refused, "{name} without a key: {strange}");
        for (role, rival) in &rivals {
            let (status, text) = send(rival, &operation, &url).await;
            let asked = format!("{name} by a rival {role}: {status} {text}");
            if operation.path == "/v1/session" || operation.path == "/v1/metrics" {
                assert!(acme.is_in(&text).is_none(), "{asked}");
                continue;
            }
            assert_eq!(status == StatusCode::FORBIDDEN, !may(role, operation.who), "{asked}");
            assert!(!status.is_server_error(), "{asked}");
            // An id of acme's is none, whatever is to be done with it. A SKU is only a name: whoever writes it makes
            // the rival's own, and whoever reads it before that (they go first) finds none.
            let makes_own = operation.method != Method::GET && url.contains("/v1/stock/");
            if may(role, operation.who) && url != operation.path && !makes_own {
                assert_eq!(status, StatusCode::NOT_FOUND, "{asked}");
            }
            let leaked = acme.is_in(&text.replace(&url, ""));
            let echoes = status == StatusCode::NOT_FOUND || makes_own;
            assert!(leaked.is_none() || echoes, "{asked}: {leaked:?} is acme's");
            filter(rival, &operation, &url, &acme).await;
        }
    }
    assert_eq!(everything_of(&acme_api).await, before, "nothing of acme's has changed");
    let theirs = &rivals[3].1;
    theirs.put_stock("THEIRS", 1).await;
    theirs.place("them", &[("THEIRS", 1)]).await;
    watch(&acme_api, theirs, &acme).await;
    app.stop().await;
}

async fn send(api: &Api, operation: &Operation, url: &str) -> (StatusCode, String) {
    let url = if operation.path == "/v1/events" { format!("{url}?once=true") } else { url.to_owned() };
    let request = api.client.request(operation.method.clone(), format!("{}{url}", api.url));
    let request = match (&operation.method, operation.path.as_str()) {
        (&Method::GET, _) => request,
        // Bodies that would do something if the caller might.
        (_, path) if path.ends_with("/discard") => request.json(&json!({ "reason": "a rival's" })),
        (_, path) if path.ends_with("/payments") => request.json(&json!({ "amount_minor": 5 })),
        (_, path) if path.ends_with("/adjustments") => request.json(&json!({ "delta": 1, "reason": "a rival's" })),
        (&Method::PUT, _) => request.json(&json!({ "on_hand": 1 })),
        (_, "/v1/orders") => request.json(&order("a rival's", &[("THEIRS", 1)])),
        (_, "/v1/redrives") => request.json(&json!({})),
        (_, "/v1/keys") => request.json(&json!({ "role": "viewer", "group_id": "rival", "name": "theirs" })),
        (_, "/v1/session") => request.json(&json!({ "key": "none" })),
        _ if operation.takes_body => request.json(&json!({})),
        _ => request,
    };
    let response = request.send().await.unwrap();
    (response.status(), response.text().await.unwrap())
}

/// Each filter with acme's values: at best an empty page.
async fn filter(rival: &Api, operation: &Operation, url: &str, acme: &Acme) {
    if operation.method != Method::GET || url != operation.path {
        return;
    }
    for parameter in operation.parameters.iter().filter(|parameter| parameter["in"] == "query") {
        let name = parameter["name"].as_str().unwrap();
        for value in acme.filters(name) {
            let escaped = utf8_percent_encode(&value, NON_ALPHANUMERIC);
            let response = rival.get(&format!("{url}?{name}={escaped}")).send().await.unwrap();
            let (status, text) = (response.status(), response.text().await.unwrap());
            assert!(!status.is_server_error(), "{url}?{name}={value}: {status} {text}");
            let leaked = acme.is_in(&text.replace(&value, ""));
            assert!(leaked.is_none(), "{url}?{name}={value} shows {leaked:?} of acme's: {text}");
        }
    }
}

/// The stream shows each tenant its own, and neither what is counted over all.
async fn watch(acme_api: &Api, rival: &Api, acme: &Acme) {
    let frame = async |api: &Api| api.get("/v1/events?once=true").send().await.unwrap().text().await.unwrap();
    eventually("the rival's picture to show its own order", async || {
        frame(rival).await.contains("THEIRS").then_some(())
    })
    .await;
    let (own, theirs) = (frame(acme_api).await, frame(rival).await);
    assert!(own.contains(MARK) && !own.contains("THEIRS"), "{own}");
    assert!(acme.is_in(&theirs).is_none(), "{theirs}");
    for section in ["\"queues\"", "\"inbox\"", "\"instances\":[{"] {
        assert!(!theirs.contains(section), "{section} is everybody's: {theirs}");
    }
}
