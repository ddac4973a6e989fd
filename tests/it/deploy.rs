//! What is shipped to watch a server with names only what a server exports.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};

use crate::support::{App, Engine, TestDb, eventually};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Metric names in a query: words of our two prefixes.
fn names_in(query: &str) -> BTreeSet<String> {
    let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let ours = |word: &&str| word.starts_with("stockade_") || word.starts_with("http_server_");
    words.filter(ours).map(str::to_owned).collect()
}

fn named_by_the_dashboard() -> BTreeSet<String> {
    let text = fs::read_to_string(format!("{ROOT}/deploy/grafana/stockade.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    for panel in panels {
        assert!(!panel["description"].as_str().unwrap().is_empty(), "a description for {}", panel["title"]);
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
    }
    let queries = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    queries.flat_map(|target| names_in(target["expr"].as_str().unwrap())).collect()
}

fn named_by_the_alerts() -> BTreeSet<String> {
    let text = fs::read_to_string(format!("{ROOT}/deploy/prometheus/alerts.yml")).unwrap();
    let rules: Value = serde_saphyr::from_str(&text).unwrap();
    let rules = rules["groups"][0]["rules"].as_array().unwrap();
    for rule in rules {
        assert!(rule["annotations"]["description"].is_string(), "what to do about {}", rule["alert"]);
    }
    rules.iter().flat_map(|rule| names_in(rule["expr"].as_str().unwrap())).collect()
}

/// What docs/observing.md promises: the names in the first column of its table, each `_more` after the name before it.
fn named_by_the_docs() -> BTreeSet<String> {
    let text = fs::read_to_string(format!("{ROOT}/docs/observing.md")).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| `stockade_") || line.starts_with("| `http_server_"));
    let mut names = BTreeSet::new();
    for row in rows {
        let mut whole = String::new();
        for word in row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2) {
            let word = word.split('{').next().unwrap();
            // `stockade_queue_depth`, `_in_flight`: the same family with another last word.
            let name = match word.strip_prefix('_') {
                Some(end) => format!("{}_{end}", family(&whole)),
                None => word.to_owned(),
            };
            whole.clone_from(&name);
            names.insert(name);
        }
    }
    names
}

fn family(name: &str) -> String {
    name.split('_').take(2).collect::<Vec<_>>().join("_")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn every_metric_of_the_docs_the_dashboard_and_the_alerts_is_exported() {
    let db = TestDb::new(Engine::Sqlite).await;
    let app = App::start_with(&db, &["--retry-max", "2", "--retry-base", "1ms", "--audit-every", "50ms"]).await;
    // Something of everything: done, duplicate, retried, rejected.
    let order = app.place_and_wait("a", &[("WIDGET-A", 1)]).await;
    let body = db.event_body(order["id"].as_str().unwrap(), "order.placed").await;
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": body })).await;
    app.tell("/v1/lab/fail", &json!({ "consumer": "inventory", "times": 2 })).await;
    app.place("a", &[("WIDGET-A", 1)]).await;
    app.eventually_list("/v1/dead-letters", 1).await;
    // A counter has no sample before it has counted: its family on the page will do.
    let shown: BTreeSet<String> = named_by_the_dashboard().union(&named_by_the_alerts()).cloned().collect();
    assert!(shown.len() > 30, "{shown:?}");
    let promised = named_by_the_docs();
    assert!(promised.len() > 35, "{promised:?}");
    let wanted: BTreeSet<String> = shown.union(&promised).cloned().collect();
    eventually("every metric", || async {
        let page = app.get("/v1/metrics").send().await.unwrap().text().await.unwrap();
        let families: BTreeSet<&str> =
            page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        let exported = |name: &&String| {
            let bare = ["_total", "_bucket", "_count", "_sum", "_info"].iter().find_map(|end| name.strip_suffix(end));
            families.contains(name.as_str()) || bare.is_some_and(|bare| families.contains(bare))
        };
        let missing: Vec<&String> = wanted.iter().filter(|name| !exported(name)).collect();
        println!("missing: {missing:?}");
        missing.is_empty().then_some(())
    })
    .await;
    app.stop().await;
}
