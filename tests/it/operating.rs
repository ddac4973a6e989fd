//! The commands of an operator, as a script and a person run them.

use std::process::Output;

use serde_json::{Value, json};

use crate::support::{Api, App, Engine, TestDb, eventually};

/// Runs the binary against the server.
async fn stockade(api: &Api, args: &[&str]) -> Output {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_stockade"));
    command.args(args).env("STOCKADE_URL", &api.url).env("USER", "alice").stdin(std::process::Stdio::null());
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

/// What it printed, of a run that went well.
async fn said(api: &Api, args: &[&str]) -> String {
    let output = stockade(api, args).await;
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

async fn json_of(api: &Api, args: &[&str]) -> Value {
    serde_json::from_str(&said(api, &[args, &["--json"]].concat()).await).unwrap()
}

async fn refused(api: &Api, args: &[&str]) -> (Option<i32>, String) {
    let output = stockade(api, args).await;
    assert!(output.stdout.is_empty(), "{args:?}: talk is for stderr");
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

async fn poisoned(count: usize) -> (App, TestDb) {
    let db = TestDb::new(Engine::Sqlite).await;
    let app = App::start(&db).await;
    let body = "\u{1b}[2J no JSON";
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": body, "times": count })).await;
    eventually("the letters", || async {
        (app.read("/v1/queues/inventory").await["dead_letters"] == count).then_some(())
    })
    .await;
    (app, db)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn dead_letters_are_looked_at_sent_back_and_put_aside() {
    let (app, _db) = poisoned(3).await;
    let groups = said(&app, &["dead-letters", "groups"]).await;
    let lines: Vec<Vec<&str>> = groups.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][..2], ["CONSUMER", "REASON"]);
    assert_eq!((lines.len(), &lines[1][..2], lines[1][3]), (2, ["inventory", "not-json"].as_slice(), "3"));
    assert_eq!(json_of(&app, &["dead-letters", "groups"]).await[0]["count"], 3);

    assert_eq!(said(&app, &["dead-letters", "list", "--limit", "2"]).await.lines().count(), 3, "a head and two");
    assert_eq!(json_of(&app, &["dead-letters", "list", "--since", "1h"]).await.as_array().unwrap().len(), 3);
    assert_eq!(json_of(&app, &["dead-letters", "list", "--until", "1h"]).await, json!([]));
    let letters = json_of(&app, &["dead-letters", "list", "--reason", "not-json"]).await;
    let ids: Vec<&str> = letters.as_array().unwrap().iter().map(|letter| letter["id"].as_str().unwrap()).collect();

    let shown = said(&app, &["dead-letters", "show", ids[0]]).await;
    assert!(shown.contains(ids[0]) && shown.ends_with("\n\n\u{1b}[2J no JSON\n"), "the bytes as they are: {shown}");
    assert_eq!(json_of(&app, &["dead-letters", "show", ids[0]]).await["body_encoding"], "utf8");

    let discarded = json_of(&app, &["dead-letters", "discard", ids[0], ids[1], "--reason", "a test"]).await;
    assert!(discarded.as_array().unwrap().iter().all(|letter| letter["state"] == "discarded"));
    let (code, talk) = refused(&app, &["dead-letters", "redrive", ids[0]]).await;
    assert!(code == Some(5) && talk.contains("discarded"), "{code:?} {talk}");
    said(&app, &["dead-letters", "restore", ids[0]]).await;
    let redriven = said(&app, &["dead-letters", "redrive", ids[0], "--reason", "mended"]).await;
    assert!(redriven.contains(ids[0]) && redriven.contains("sent"), "{redriven}");
    let acts = app.walk(&format!("/v1/actions?subject={}", ids[0])).await;
    assert!(acts.len() == 3 && acts.iter().all(|act| act["who"] == "alice"), "{acts:?}");

    let nothing = "019a0000-0000-7000-8000-000000000000";
    assert_eq!(refused(&app, &["dead-letters", "show", nothing]).await.0, Some(4));
    assert_eq!(refused(&app, &["dead-letters", "discard", ids[2]]).await.0, Some(2), "without a reason");
    assert_eq!(refused(&app, &["dead-letters", "list", "--state", "lost"]).await.0, Some(2));
    assert_eq!(refused(&app, &["dead-letters", "groups", "--url", "http://127.0.0.1:1"]).await.0, Some(6));
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_redrive_is_followed_to_its_end() {
    let (app, _db) = poisoned(4).await;
    let dry = said(&app, &["redrive", "--reason", "not-json", "--dry-run"]).await;
    assert!(dry.contains("inventory") && dry.ends_with("4 letters.\n"), "{dry}");
    assert_eq!(json_of(&app, &["redrive", "--dry-run"]).await["total"], 4);
    let (code, talk) = refused(&app, &["redrive"]).await;
    assert!(code == Some(2) && talk.contains("--yes"), "a script must say so: {talk}");
    assert_eq!(app.walk("/v1/redrives").await.len(), 0);
    let done = json_of(&app, &["redrive", "--yes", "--rate", "50/s", "--why", "mended"]).await;
    assert_eq!((&done["state"], &done["sent"], &done["who"]), (&json!("done"), &json!(4), &json!("alice")));
    let id = done["id"].as_str().unwrap();
    assert!(said(&app, &["redrive", "list"]).await.contains(id));
    assert!(said(&app, &["redrive", "show", id]).await.contains("4"));
    assert_eq!(refused(&app, &["redrive", "stop", id]).await.0, Some(5), "it has ended");

    let slow = said(&app, &["redrive", "--yes", "--rate", "1", "--no-wait"]).await;
    let stopped = json_of(&app, &["redrive", "stop", slow.trim()]).await;
    assert_eq!(stopped["state"], "stopped");
    assert_eq!(
        stockade(&app, &["redrive", "follow", slow.trim()]).await.status.code(),
        Some(1),
        "it did not get there"
    );
    let none = stockade(&app, &["redrive", "--consumer", "nobody", "--yes"]).await;
    assert!(none.status.success() && none.stdout.is_empty());
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_replay_is_followed_to_its_end() {
    let db = TestDb::new(Engine::Sqlite).await;
    let app = App::start(&db).await;
    app.place("alice", &[("WIDGET-A", 1)]).await;
    app.eventually_list("/v1/notifications", 1).await;
    let dry = said(&app, &["replay", "--since", "1h", "--consumer", "inventory", "--dry-run"]).await;
    assert!(dry.contains("order.placed") && dry.contains("1 events"), "{dry}");
    let done = json_of(&app, &["replay", "--since", "1h", "--consumer", "inventory", "--yes"]).await;
    assert_eq!((&done["state"], &done["sent"]), (&json!("done"), &json!(1)));
    assert_eq!(json_of(&app, &["replay", "list"]).await[0]["id"], done["id"]);
    app.eventually_list("/v1/inbox?min_duplicates=1", 1).await;
    assert_eq!(refused(&app, &["replay"]).await.0, Some(2), "since when?");
    assert_eq!(refused(&app, &["replay", "--since", "1h", "--consumer", "nobody", "--yes"]).await.0, Some(2));
    let none = stockade(&app, &["replay", "--since", "1h", "--aggregate-type", "nothing", "--yes"]).await;
    assert!(none.status.success() && none.stdout.is_empty());
    app.stop().await;
}
