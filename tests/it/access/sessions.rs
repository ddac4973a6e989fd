//! Browsers: a key exchanged for a cookie, in a real one too.

use reqwest::{Response, StatusCode};
use serde_json::{Value, json};

use super::Keyed;
use crate::support::{App, Browser, Engine, TestDb, each_database, problem};

each_database!(a_session_stands_for_its_key_until_it_ends);

fn cookie_of(response: &Response) -> String {
    let cookie = response.headers()["set-cookie"].to_str().unwrap();
    for needed in ["HttpOnly", "SameSite=Strict", "Path=/", "Max-Age="] {
        assert!(cookie.contains(needed), "{cookie}");
    }
    cookie.split(';').next().unwrap().to_owned()
}

async fn a_session_stands_for_its_key_until_it_ends(db: TestDb) {
    let mut keys = Keyed::new();
    let (operator, platform) = (keys.key("operator", "acme"), keys.key("admin", "*"));
    let app = App::start_with(&db, &["--api-keys", &keys.setting()]).await;
    let log_in = async |key: &str, group: Option<&str>| {
        app.post("/v1/session", &json!({ "key": key, "group_id": group })).send().await.unwrap()
    };
    problem(log_in("stk_wrong", None).await, 401, "token-invalid").await;
    problem(log_in(&operator, Some("rival")).await, 403, "role-insufficient").await;
    let response = log_in(&operator, None).await;
    assert_eq!(response.status(), StatusCode::OK);
    let cookie = cookie_of(&response);
    assert!(!cookie.contains(&operator), "the key is not in the cookie");
    let session: Value = response.json().await.unwrap();
    assert_eq!((&session["role"], &session["group_id"]), (&json!("operator"), &json!("acme")));
    let with = |path: &str| app.get(path).header("cookie", &cookie);
    assert_eq!(with("/v1/orders").send().await.unwrap().status(), StatusCode::OK);
    assert_eq!(with("/v1/session").send().await.unwrap().json::<Value>().await.unwrap(), session);
    problem(with("/v1/queues").send().await.unwrap(), 403, "role-insufficient").await;

    // What a page of another site would have the browser send.
    let put = || app.put("/v1/stock/A", &json!({ "on_hand": 5 })).header("cookie", &cookie);
    for (name, value) in
        [("sec-fetch-site", "cross-site"), ("sec-fetch-site", "same-site"), ("origin", "http://evil.example")]
    {
        problem(put().header(name, value).send().await.unwrap(), 403, "cross-site-blocked").await;
    }
    assert_eq!(put().header("sec-fetch-site", "same-origin").send().await.unwrap().status(), StatusCode::OK);

    // The group of a platform's session is the one that was asked for.
    let acting = cookie_of(&log_in(&platform, Some("acme")).await);
    let stock = app.get("/v1/stock/A").header("cookie", &acting).send().await.unwrap();
    assert_eq!(stock.json::<Value>().await.unwrap()["on_hand"], 5);

    let end = app.client.delete(format!("{}/v1/session", app.url)).header("cookie", &cookie).send().await.unwrap();
    assert_eq!(end.status(), StatusCode::NO_CONTENT);
    assert!(end.headers()["set-cookie"].to_str().unwrap().contains("Max-Age=0"));
    problem(with("/v1/orders").send().await.unwrap(), 401, "token-invalid").await;
    app.stop().await;
    // Its key is gone with the settings, and the session with it.
    let mut others = Keyed::new();
    others.key("admin", "*");
    let app = App::start_with(&db, &["--api-keys", &others.setting()]).await;
    let response = app.get("/v1/orders").header("cookie", &acting).send().await.unwrap();
    problem(response, 401, "token-invalid").await;
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_session_ends_by_itself_and_there_is_none_on_an_open_server() {
    let db = TestDb::new(Engine::Sqlite).await;
    let mut keys = Keyed::new();
    let key = keys.key("viewer", "acme");
    let app = App::start_with(&db, &["--api-keys", &keys.setting(), "--session-ttl", "1s"]).await;
    let response = app.post("/v1/session", &json!({ "key": key })).send().await.unwrap();
    let cookie = cookie_of(&response);
    crate::support::eventually("the session to end", async || {
        let response = app.get("/v1/orders").header("cookie", &cookie).send().await.unwrap();
        (response.status() == StatusCode::UNAUTHORIZED).then_some(())
    })
    .await;
    app.stop().await;
    let db = TestDb::new(Engine::Sqlite).await;
    let app = App::start(&db).await;
    let response = app.post("/v1/session", &json!({ "key": key })).send().await.unwrap();
    problem(response, 409, "no-keys").await;
    assert_eq!(app.read("/v1/session").await["open"], true);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn the_dashboard_sends_strangers_to_the_login_and_back() {
    let db = TestDb::new(Engine::Sqlite).await;
    let mut keys = Keyed::new();
    let key = keys.key("admin", "*");
    let app = App::start_with(&db, &["--api-keys", &keys.setting()]).await;
    let browser = Browser::open(&app.url).await;
    browser.visit("/stock").await;
    browser.until_reads("label", "API key").await;
    browser.click("#key").await;
    browser.press("stk_wrong\n").await;
    browser.until_reads("#error", "there is no such key").await;
    browser.press(&format!("{key}\n")).await;
    browser.until_reads("main", "WIDGET-A").await;
    assert_eq!(browser.run("return location.pathname").await, "/stock", "back where it was going");
    assert_eq!(browser.run("return document.cookie").await, "", "no script sees the session");
    browser.until("the live picture", "return document.querySelector('#live').dataset.state === 'live'").await;
    browser.click("#log-out").await;
    browser.until_reads("label", "API key").await;
    assert_eq!(browser.recorded().await, json!([]), "no refusal by the page's own policy");
    browser.close().await;
    app.stop().await;
}
