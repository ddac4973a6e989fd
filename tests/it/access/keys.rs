//! Who is let in, and to what; keys made, used and revoked.

use std::process::Command;

use reqwest::StatusCode;
use serde_json::{Value, json};
use stockade::access::Secret;
use stockade::app::Builder;

use super::Keyed;
use crate::support::{App, Engine, Server, TestDb, each_database, eventually, order, problem, settings};

each_database!(
    the_first_key_closes_the_server_and_must_be_able_to_make_others,
    a_revoked_or_expired_key_stops_working_on_every_instance,
    an_admin_of_a_group_deals_with_its_keys_alone,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_server_with_keys_wants_one_and_says_how() {
    let db = TestDb::new(Engine::Sqlite).await;
    let mut keys = Keyed::new();
    let (viewer, client) = (keys.key("viewer", "acme"), keys.key("client", "acme"));
    let app = App::start_with(&db, &["--api-keys", &keys.setting()]).await;
    let response = app.get("/v1/orders").send().await.unwrap();
    assert_eq!(response.headers()["www-authenticate"], "Bearer");
    problem(response, 401, "token-missing").await;
    let stranger = app.with_key(Secret::random().reveal());
    problem(stranger.get("/v1/orders").send().await.unwrap(), 401, "token-invalid").await;
    for nonsense in ["Basic YTpi", "Bearer", "Bearer ", "stk_x", &format!("Bearer {viewer} {viewer}")] {
        let response = app.get("/v1/orders").header("authorization", nonsense).send().await.unwrap();
        problem(response, 401, "token-invalid").await;
    }
    let response = app.get(&format!("/v1/orders?key={viewer}")).send().await.unwrap();
    problem(response, 401, "token-missing").await;
    for path in ["/livez", "/readyz", "/", "/docs/", "/openapi.json", "/login"] {
        assert_eq!(app.get(path).send().await.unwrap().status(), StatusCode::OK, "{path} is for anybody");
    }
    let viewer = app.with_key(&viewer);
    viewer.read("/v1/orders").await;
    let placed = viewer.post("/v1/orders", &order("alice", &[("A", 1)])).send().await.unwrap();
    problem(placed, 403, "role-insufficient").await;
    let placed = app.with_key(&client).place("alice", &[("A", 1)]).await;
    assert_eq!(placed["group_id"], "acme", "the tenant is the key's");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn metrics_of_a_closed_server_are_for_the_token_or_for_keys_of_every_group() {
    let db = TestDb::new(Engine::Sqlite).await;
    let mut keys = Keyed::new();
    let (tenant, platform) = (keys.key("admin", "acme"), keys.key("viewer", "*"));
    let app = App::start_with(&db, &["--api-keys", &keys.setting()]).await;
    problem(app.get("/v1/metrics").send().await.unwrap(), 401, "token-missing").await;
    problem(app.with_key(&tenant).get("/v1/metrics").send().await.unwrap(), 401, "token-missing").await;
    assert_eq!(app.with_key(&platform).get("/v1/metrics").send().await.unwrap().status(), 200);
    app.stop().await;
    let app = App::start_with(&db, &["--api-keys", &keys.setting(), "--metrics-token", "t0k"]).await;
    assert_eq!(app.get("/v1/metrics").header("x-metrics-token", "t0k").send().await.unwrap().status(), 200);
    assert_eq!(app.with_key("t0k").get("/v1/metrics").send().await.unwrap().status(), 200);
    assert_eq!(app.with_key(&platform).get("/v1/metrics").send().await.unwrap().status(), 200);
    problem(app.with_key(&tenant).get("/v1/metrics").send().await.unwrap(), 401, "token-invalid").await;
    app.stop().await;
}

/// A page from elsewhere can make a browser send requests to a server on the same machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn an_open_server_obeys_no_other_site() {
    let db = TestDb::new(Engine::Sqlite).await;
    let app = App::start(&db).await;
    let pause = || app.client.post(format!("{}/v1/consumers/ledger/pause", app.url));
    for (name, value) in [("sec-fetch-site", "cross-site"), ("origin", "http://evil.example"), ("origin", "null")] {
        let response = pause().header(name, value).send().await.unwrap();
        problem(response, 403, "cross-site-blocked").await;
    }
    // A name of somebody else's that resolves to this machine is not one of its own.
    let response = app.get("/v1/orders").header("host", "evil.example:8080").send().await.unwrap();
    problem(response, 403, "cross-site-blocked").await;
    assert_eq!(pause().header("origin", &app.url).send().await.unwrap().status(), StatusCode::OK);
    app.stop().await;
}

async fn the_first_key_closes_the_server_and_must_be_able_to_make_others(db: TestDb) {
    let app = App::start(&db).await;
    let new = |role: &str, group: &str| json!({ "role": role, "group_id": group, "name": "n" });
    for (role, group) in [("viewer", "*"), ("admin", "acme")] {
        let response = app.post("/v1/keys", &new(role, group)).send().await.unwrap();
        problem(response, 409, "last-admin").await;
    }
    app.read("/v1/orders").await;
    let made = app.tell("/v1/keys", &new("admin", "*")).await;
    problem(app.get("/v1/orders").send().await.unwrap(), 401, "token-missing").await;
    let secret = made["key"].as_str().unwrap();
    let admin = app.with_key(secret);
    let listed = admin.read("/v1/keys").await;
    assert_eq!(listed["data"].as_array().unwrap().len(), 1);
    assert!(!listed.to_string().contains(secret), "shown once");
    let revoke = format!("/v1/keys/{}/revoke", made["id"].as_str().unwrap());
    problem(admin.post(&revoke, &json!({})).send().await.unwrap(), 409, "last-admin").await;
    let second = admin.tell("/v1/keys", &new("admin", "*")).await;
    admin.tell(&revoke, &json!({ "reason": "replaced" })).await;
    problem(admin.get("/v1/orders").send().await.unwrap(), 401, "token-invalid").await;
    let second = app.with_key(second["key"].as_str().unwrap());
    problem(second.post(&revoke, &json!({})).send().await.unwrap(), 409, "already-revoked").await;
    let actions = second.read("/v1/actions?action=key.revoke").await;
    assert_eq!(actions["data"][0]["who"], "n");
    for wrong in [
        json!({ "role": "boss", "group_id": "a", "name": "n" }),
        json!({ "role": "viewer", "group_id": "a b", "name": "n" }),
        json!({ "role": "viewer", "group_id": "a", "name": "\u{1b}[2J" }),
        json!({ "role": "viewer", "group_id": "*", "subsidiary_id": "s", "name": "n" }),
        json!({ "role": "viewer", "group_id": "a", "name": "n", "expires_in_seconds": 0 }),
    ] {
        problem(second.post("/v1/keys", &wrong).send().await.unwrap(), 422, "validation").await;
    }
    app.stop().await;
}

async fn a_revoked_or_expired_key_stops_working_on_every_instance(db: TestDb) {
    let mut keys = Keyed::new();
    let admin = keys.key("admin", "*");
    let app = App::start_with(&db, &["--api-keys", &keys.setting()]).await;
    // One file has one server; on Postgres the second instance must follow.
    let other = match db.url.starts_with("postgres:") {
        true => Some(App::start_with(&db, &["--api-keys", &keys.setting()]).await),
        false => None,
    };
    let looker = other.as_ref().unwrap_or(&app);
    let admin = app.with_key(&admin);
    let made = admin.tell("/v1/keys", &json!({ "role": "viewer", "group_id": "acme", "name": "n" })).await;
    let viewer = looker.with_key(made["key"].as_str().unwrap());
    let allowed = async || (viewer.get("/v1/stock").send().await.unwrap().status() == 200).then_some(());
    eventually("a new key to work everywhere", allowed).await;
    admin.tell(&format!("/v1/keys/{}/revoke", made["id"].as_str().unwrap()), &json!({})).await;
    let refused = async || (viewer.get("/v1/stock").send().await.unwrap().status() == 401).then_some(());
    eventually("a revoked key to work nowhere", refused).await;
    let brief = json!({ "role": "viewer", "group_id": "acme", "name": "n", "expires_in_seconds": 1 });
    let made = admin.tell("/v1/keys", &brief).await;
    let brief = app.with_key(made["key"].as_str().unwrap());
    let refused = async || (brief.get("/v1/stock").send().await.unwrap().status() == 401).then_some(());
    eventually("an expired key to be refused", refused).await;
    if let Some(other) = other {
        other.stop().await;
    }
    app.stop().await;
}

async fn an_admin_of_a_group_deals_with_its_keys_alone(db: TestDb) {
    let mut keys = Keyed::new();
    let (platform, acme, rival) = (keys.key("admin", "*"), keys.key("admin", "acme"), keys.key("admin", "rival"));
    let app = App::start_with(&db, &["--api-keys", &keys.setting()]).await;
    let (platform, acme, rival) = (app.with_key(&platform), app.with_key(&acme), app.with_key(&rival));
    let own = acme.tell("/v1/keys", &json!({ "role": "client", "group_id": "acme", "name": "till" })).await;
    for group in ["rival", "*"] {
        let response = acme.post("/v1/keys", &json!({ "role": "viewer", "group_id": group, "name": "n" }));
        problem(response.send().await.unwrap(), 403, "role-insufficient").await;
    }
    assert_eq!(rival.read("/v1/keys").await["data"], json!([]));
    let revoke = format!("/v1/keys/{}/revoke", own["id"].as_str().unwrap());
    problem(rival.post(&revoke, &json!({})).send().await.unwrap(), 404, "not-found").await;
    assert_eq!(platform.read("/v1/keys").await["data"].as_array().unwrap().len(), 1);
    acme.tell(&revoke, &json!({})).await;
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_key_for_every_group_acts_in_the_one_it_names() {
    let db = TestDb::new(Engine::Sqlite).await;
    let mut keys = Keyed::new();
    let (platform, acme) = (keys.key("admin", "*"), keys.key("viewer", "acme/north"));
    let app = App::start_with(&db, &["--api-keys", &keys.setting()]).await;
    let platform = app.with_key(&platform);
    let place = platform.post("/v1/orders", &order("alice", &[("A", 1)])).header("x-group-id", "acme");
    let placed: Value = place.send().await.unwrap().json().await.unwrap();
    assert_eq!(placed["group_id"], "acme");
    let path = format!("/v1/orders/{}", placed["id"].as_str().unwrap());
    assert_eq!(platform.get(&path).send().await.unwrap().status(), 404, "by itself it is in the default group");
    app.with_key(&acme).read(&path).await;
    let response = app.with_key(&acme).get(&path).header("x-group-id", "rival").send().await.unwrap();
    problem(response, 403, "role-insufficient").await;
    let response = platform.get(&path).header("x-group-id", "a b").send().await.unwrap();
    problem(response, 400, "bad-filter").await;
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn others_can_reach_a_server_only_with_keys() {
    let db = TestDb::new(Engine::Sqlite).await;
    let everywhere = |flags: &[&str]| {
        let mut settings = settings(&db, flags);
        settings.listen = "0.0.0.0:0".parse().unwrap();
        settings
    };
    let refused = Builder::new(everywhere(&[])).start().await;
    let error = refused.err().expect("no keys, no service").to_string();
    assert!(error.contains("STOCKADE_API_KEYS") && error.contains("stockade key new"), "{error}");
    let mut keys = Keyed::new();
    let key = keys.key("viewer", "acme");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("# ours\n{}\n", keys.setting())).unwrap();
    let flags = ["--api-keys-file", file.path().to_str().unwrap()];
    let app = App::start_built(Builder::new(everywhere(&flags))).await;
    let api = crate::support::Api::new(format!("http://127.0.0.1:{}", app.running.address.port()));
    problem(api.get("/v1/orders").send().await.unwrap(), 401, "token-missing").await;
    api.with_key(&key).read("/v1/orders").await;
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn keys_are_made_listed_and_revoked_on_the_command_line() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    let stockade = |key: &str, args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
        command.args(args).args(["--url", &server.url]).env("STOCKADE_API_KEY", key);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, admin, said) = stockade("", &["key", "new", "--role", "admin", "--group", "*"]);
    assert_eq!(code, Some(0), "{said}");
    let admin = admin.trim();
    let (code, made, _) = stockade(admin, &["key", "new", "--role", "client", "--group", "acme", "--json"]);
    assert_eq!(code, Some(0));
    let made: Value = serde_json::from_str(&made).unwrap();
    assert_eq!(server.with_key(made["key"].as_str().unwrap()).place("alice", &[("A", 1)]).await["group_id"], "acme");
    let (_, listed, _) = stockade(admin, &["key", "list"]);
    assert!(listed.contains("acme") && !listed.contains(admin), "{listed}");
    let id = made["id"].as_str().unwrap();
    assert_eq!(stockade(admin, &["key", "revoke", id]).0, Some(0));
    assert_eq!(stockade(admin, &["key", "revoke", id]).0, Some(5), "already");
    assert_eq!(stockade(admin, &["key", "revoke", "none"]).0, Some(4), "no such key");
    let (code, _, said) = stockade("stk_wrong", &["key", "list"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("401") && !said.contains("stk_wrong"), "{said}");
    // Offline: an entry that a server takes.
    let (_, made, _) = stockade("", &["key", "new", "--offline", "--role", "viewer", "--group", "acme", "--json"]);
    let made: Value = serde_json::from_str(&made).unwrap();
    server.terminate().await;
    let server = Server::start(&db, &["--api-keys", made["entry"].as_str().unwrap()]);
    server.with_key(made["key"].as_str().unwrap()).read("/v1/orders").await;
    assert!(server.terminate().await);
}
