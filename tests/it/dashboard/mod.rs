//! The dashboard: its files out of the binary, and its pages in a real browser.

mod journeys;
mod pages;

use reqwest::StatusCode;
use serde_json::json;

use crate::support::{App, Browser, Engine, Server, TestDb, problem};

/// The binary with the fault lab open, and a browser to look at it.
async fn start(flags: &[&str]) -> (TestDb, Server, Browser) {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, flags);
    let browser = Browser::open(&server.url).await;
    (db, server, browser)
}

async fn close(server: Server, browser: Browser) {
    assert_eq!(browser.recorded().await, json!([]), "the page had nothing to complain about");
    browser.close().await;
    assert!(server.terminate().await);
}

#[tokio::test(crate = "crate::support::schedule")]
async fn its_files_come_from_the_binary_and_only_from_there() {
    let db = TestDb::new(Engine::Sqlite).await;
    let app = App::start(&db).await;
    let page = app.get("/orders/ORD-ANY").send().await.unwrap();
    assert_eq!(page.status(), StatusCode::OK);
    let policy = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    let html = page.text().await.unwrap();
    assert!(!html.contains("<style") && !html.contains("style=") && !html.contains("onclick"), "nothing inline");

    // Every file that a page or a script names is there, is of this server, and is kept by the browser.
    let mut todo: Vec<String> = quoted(&html).filter(|text| text.starts_with("/static/")).map(str::to_owned).collect();
    let mut seen = Vec::new();
    while let Some(path) = todo.pop() {
        if seen.contains(&path) {
            continue;
        }
        let response = app.get(&path).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        let tag = response.headers()["etag"].clone();
        let again = app.get(&path).header("if-none-match", tag).send().await.unwrap();
        assert_eq!(again.status(), StatusCode::NOT_MODIFIED, "{path}");
        let text = response.text().await.unwrap();
        for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "import("] {
            assert!(!text.contains(word), "{path} has {word}");
        }
        let folder = path.rsplit_once('/').unwrap().0.to_owned();
        todo.extend(quoted(&text).filter(|text| text.ends_with(".js")).map(|name| join(&folder, name)));
        seen.push(path);
    }
    assert!(seen.len() > 25, "{seen:?}");
    problem(app.get("/static/none.js").send().await.unwrap(), 404, "not-found").await;
    problem(app.get("/static/../Cargo.toml").send().await.unwrap(), 404, "not-found").await;
    problem(app.get("/no-such-page").send().await.unwrap(), 404, "not-found").await;
    app.stop().await;
}

fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('"').skip(1).step_by(2)
}

/// What a relative import names.
fn join(folder: &str, name: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').collect();
    for part in name.split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}
