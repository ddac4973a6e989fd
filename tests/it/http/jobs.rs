//! Redrives and replays as an operator sees them: tried dry, started, followed, stopped, and on record.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use stockade_kernel::clock::{Clock, Timestamp};

use crate::support::{
    Api, App, TestDb, each_database, eventually, fields, problem, until_finished_and_audited, witness, wrong_field,
};

const JOB_FIELDS: [&str; 16] = [
    "already_applied",
    "created_at",
    "filter",
    "finished_at",
    "id",
    "kind",
    "last_error",
    "rate",
    "refused",
    "remaining",
    "sent",
    "skipped",
    "state",
    "total",
    "who",
    "why",
];

/// Files letters that nobody can read.
async fn poison(api: &Api, count: usize) {
    api.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "no JSON", "times": count })).await;
    eventually("the letters", || async {
        (api.read("/v1/queues/inventory").await["dead_letters"] == count).then_some(())
    })
    .await;
}

async fn until_ended(api: &Api, path: &str) -> Value {
    eventually(&format!("the end of {path}"), || async {
        Some(api.read(path).await).filter(|job| job["state"] != "running")
    })
    .await
}

async fn a_redrive_is_tried_dry_started_and_followed(db: TestDb) {
    let app = App::start(&db).await;
    poison(&app, 3).await;
    let dry = app.tell("/v1/redrives", &json!({ "queue": "inventory", "dry_run": true })).await;
    assert_eq!(
        fields(&dry),
        ["already_applied", "already_applied_sample", "dry_run", "groups", "refused", "sample", "to", "total"]
    );
    assert_eq!((&dry["total"], &dry["already_applied"], &dry["dry_run"]), (&json!(3), &json!(0), &json!(true)));
    assert_eq!((dry["sample"].as_array().unwrap().len(), &dry["groups"][0]["count"]), (3, &json!(3)));
    assert_eq!(app.walk("/v1/redrives").await.len(), 0, "nothing was started");
    assert_eq!(app.walk("/v1/actions").await.len(), 0);
    // What is filed after the look is not in what the look is for.
    let before = json!({ "queue": "inventory", "dry_run": true, "to": dry["to"] });
    let to: Timestamp = serde_json::from_value(dry["to"].clone()).unwrap();
    eventually("a millisecond after the dry run", async || (Clock::System.now() > to).then_some(())).await;
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "no json" })).await;
    let letters = app.eventually_list("/v1/dead-letters?limit=200", 4).await;
    assert_eq!(app.tell("/v1/redrives", &before).await["total"], 3);
    let discard = format!("/v1/dead-letters/{}/discard", letters[0]["id"].as_str().unwrap());
    app.tell(&discard, &json!({ "reason": "one too many" })).await;

    let start = app.post("/v1/redrives", &json!({ "reason": "not-json", "rate": 50, "why": "the parser was mended" }));
    let response = start.header("x-operator", "alice").send().await.unwrap();
    assert_eq!(response.status(), 201);
    let path = response.headers()["location"].to_str().unwrap().to_owned();
    let job: Value = response.json().await.unwrap();
    assert_eq!(fields(&job), JOB_FIELDS);
    assert_eq!((&job["total"], &job["rate"], &job["kind"]), (&json!(3), &json!(50), &json!("redrive")));
    assert_eq!((&job["who"], &job["why"]), (&json!("alice"), &json!("the parser was mended")));
    assert_eq!(job["filter"]["reason"], "not-json");
    let done = until_ended(&app, &path).await;
    assert_eq!((&done["state"], &done["sent"], &done["remaining"]), (&json!("done"), &json!(3), &json!(0)));
    assert_eq!(app.read("/v1/redrives?state=done").await["data"], json!([done]));
    let sent = app.walk(&format!("/v1/dead-letters?redrive={}", done["id"].as_str().unwrap())).await;
    assert!(sent.len() == 3 && sent.iter().all(|letter| letter["state"] == "redriven"));
    // They are no better than before.
    eventually("three new letters", || async {
        (app.read("/v1/queues/inventory").await["dead_letters"] == 3).then_some(())
    })
    .await;
    let acted = app.walk(&format!("/v1/actions?subject={}", done["id"].as_str().unwrap())).await;
    assert_eq!((acted.len(), &acted[0]["action"], &acted[0]["who"]), (1, &json!("redrive.start"), &json!("alice")));
    assert_eq!(acted[0]["details"], json!({ "filter": done["filter"], "rate": 50 }));
    let stop = app.post(&format!("{path}/stop"), &json!({})).send().await.unwrap();
    problem(stop, 409, "not-running").await;
    app.stop().await;
}

async fn a_running_redrive_can_be_stopped(db: TestDb) {
    let app = App::start(&db).await;
    poison(&app, 5).await;
    let job = app.tell("/v1/redrives", &json!({ "rate": 1 })).await;
    let path = format!("/v1/redrives/{}", job["id"].as_str().unwrap());
    let stopped = app.tell(&format!("{path}/stop"), &json!({ "reason": "too soon" })).await;
    assert_eq!(stopped["state"], "stopped");
    assert!(stopped["sent"].as_i64().unwrap() < 5 && stopped["remaining"].as_i64().unwrap() > 0);
    let stops = app.read("/v1/actions?action=redrive.stop").await["data"].clone();
    assert_eq!((&stops[0]["subject"], &stops[0]["why"]), (&job["id"], &json!("too soon")));
    app.stop().await;
}

async fn what_cannot_be_done_is_refused(db: TestDb) {
    let app = App::start(&db).await;
    for (path, body, pointer) in [
        ("/v1/redrives", json!({ "rate": 0 }), "/rate"),
        ("/v1/redrives", json!({ "rate": 10_001 }), "/rate"),
        ("/v1/redrives", json!({ "why": "" }), "/why"),
        ("/v1/replays", json!({ "from": "2026-01-01T00:00:00Z", "to": "2025-01-01T00:00:00Z" }), "/from"),
        ("/v1/replays", json!({ "from": "2026-01-01T00:00:00Z", "consumer": "nobody" }), "/consumer"),
        ("/v1/replays", json!({ "from": "yesterday" }), "/from"),
    ] {
        wrong_field(app.post(path, &body).send().await.unwrap(), pointer).await;
    }
    let nothing = "019a0000-0000-7000-8000-000000000000";
    for path in [format!("/v1/redrives/{nothing}"), format!("/v1/replays/{nothing}"), "/v1/redrives/x".to_owned()] {
        problem(app.get(&path).send().await.unwrap(), 404, "not-found").await;
        problem(app.post(&format!("{path}/stop"), &json!({})).send().await.unwrap(), 404, "not-found").await;
    }
    problem(app.get("/v1/replays?state=lost").send().await.unwrap(), 400, "bad-filter").await;
    app.stop().await;
}

/// A redrive outlives the process: kill -9 in the midst of it, and the next start goes on where it was.
async fn a_redrive_survives_the_process(db: TestDb) {
    const LETTERS: usize = 60;
    let server = witness::start(&db, &[]);
    poison(&server, LETTERS).await;
    let job = server.tell("/v1/redrives", &json!({ "rate": 30 })).await;
    let path = format!("/v1/redrives/{}", job["id"].as_str().unwrap());
    eventually("a few sent", || async { (server.read(&path).await["sent"].as_i64() > Some(0)).then_some(()) }).await;
    server.kill();
    db.end_leases_of_dead_servers().await;
    let server = witness::start(&db, &[]);
    let done = until_ended(&server, &path).await;
    assert_eq!((&done["state"], &done["sent"], &done["skipped"]), (&json!("done"), &json!(LETTERS), &json!(0)));
    let sent = db.count("SELECT count(*) FROM messaging_outbox WHERE kind = 'redrive'").await;
    assert_eq!(sent, i64::try_from(LETTERS).unwrap(), "each once");
    until_finished_and_audited(&db).await;
    witness::check(&db).await;
    assert!(server.terminate().await);
}

async fn a_replay_of_a_whole_run_moves_nothing(db: TestDb) {
    const ORDERS: usize = 40;
    let app = App::start(&db).await;
    app.put_stock("A", 30).await;
    app.put_stock("B", 1000).await;
    for n in 0..ORDERS {
        match n % 3 {
            0 => app.place("alice", &[("A", 2), ("B", 1)]).await,
            1 => app.place("bob", &[("B", 3)]).await,
            _ => app.place("carol", &[("NOWHERE", 1)]).await,
        };
    }
    app.eventually_list("/v1/notifications?limit=200", ORDERS).await;
    until_quiet(&app).await;
    let before = everything(&db).await;
    assert!(before.len() >= 8, "{:?}", before.keys());

    let dry = app.tell("/v1/replays", &json!({ "from": "2000-01-01T00:00:00Z", "dry_run": true })).await;
    assert_eq!(fields(&dry), ["by_type", "consumer", "dry_run", "from", "to", "total"]);
    assert!(dry["total"].as_i64().unwrap() >= 2 * ORDERS as i64, "{dry}");
    let one =
        json!({ "from": "2000-01-01T00:00:00Z", "aggregate_type": "order", "consumer": "inventory", "dry_run": true });
    let one = app.tell("/v1/replays", &one).await;
    assert_eq!(one["by_type"], json!([{ "event_type": "order.placed", "count": ORDERS }]));

    let asked = json!({ "from": "2000-01-01T00:00:00Z", "rate": 10_000, "why": "to see that it changes nothing" });
    let replay = app.tell("/v1/replays", &asked).await;
    assert_eq!(fields(&replay), JOB_FIELDS);
    let done = until_ended(&app, &format!("/v1/replays/{}", replay["id"].as_str().unwrap())).await;
    assert_eq!((&done["state"], &done["sent"]), (&json!("done"), &dry["total"]));
    until_quiet(&app).await;
    let after = everything(&db).await;
    for (table, rows) in &before {
        assert!(rows == &after[table], "{table} has changed");
    }
    let again = db.count("SELECT CAST(sum(duplicates) AS bigint) FROM messaging_inbox").await;
    assert!(again >= 2 * ORDERS as i64, "they did arrive: {again}");
    assert_eq!(app.walk("/v1/dead-letters").await.len(), 0);
    app.stop().await;
}

async fn until_quiet(app: &App) {
    eventually("empty queues", || async {
        let queues = app.read("/v1/queues").await["data"].as_array().unwrap().clone();
        queues.iter().all(|queue| queue["depth"] == 0 && queue["in_flight"] == 0).then_some(())
    })
    .await;
}

/// Every row of every table of every module, as text.
async fn everything(db: &TestDb) -> BTreeMap<String, Vec<String>> {
    let opened = db.look().await;
    let sqlite = db.url.starts_with("sqlite:");
    let columns = match sqlite {
        true => "SELECT m.name, c.name FROM sqlite_master m JOIN pragma_table_info(m.name) c WHERE m.type = 'table'",
        false => {
            "SELECT table_name::text, column_name::text FROM information_schema.columns WHERE table_schema = 'public'"
        }
    };
    let mut tx = opened.read().await.unwrap();
    let columns: Vec<(String, String)> =
        stockade_kernel::on!(tx, c => sqlx::query_as(columns).fetch_all(c).await).unwrap();
    let mut tables: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (table, column) in columns {
        if !["messaging_", "_sqlx", "sqlite_"].iter().any(|prefix| table.starts_with(prefix)) {
            tables.entry(table).or_default().push(column);
        }
    }
    let mut rows = BTreeMap::new();
    for (table, columns) in tables {
        let quoted = |column: &String| match sqlite {
            true => format!("quote({column})"),
            false => format!("quote_nullable({column}::text)"),
        };
        let row = columns.iter().map(quoted).collect::<Vec<_>>().join(" || ', ' || ");
        let sql = format!("SELECT {row} FROM {table} ORDER BY 1");
        let found: Vec<String> =
            stockade_kernel::on!(tx, c => sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(c).await).unwrap();
        rows.insert(table, found);
    }
    drop(tx);
    opened.close().await;
    rows
}

each_database!(
    a_redrive_is_tried_dry_started_and_followed,
    a_running_redrive_can_be_stopped,
    what_cannot_be_done_is_refused,
    a_redrive_survives_the_process,
    a_replay_of_a_whole_run_moves_nothing,
);
