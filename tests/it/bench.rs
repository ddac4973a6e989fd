//! `stockade bench`: what it measures is real, and a run whose end state is wrong fails.

use std::process::{Command, Output};

use serde_json::{Value, json};

use stockade::access::Secret;

use crate::support::{Api, Engine, Server, TestDb, each_database, eventually};

async fn bench(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
    command.arg("bench").args(args).env_remove("STOCKADE_DATABASE_URL");
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn report(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

async fn the_mix_takes_every_order_to_its_end_and_verifies_it(db: TestDb) {
    let output = bench(&["--mix", "--orders", "60", "--concurrency", "12", "--json", "--database-url", &db.url]).await;
    let report = report(&output);
    assert!(output.status.success(), "{report}");
    assert_eq!((&report["orders"], &report["verified"]), (&60.into(), &true.into()), "{report}");
    let mix = &report["mix"];
    for (end, count) in [("paid", 42), ("cancelled", 6), ("expired", 6), ("rejected", 6)] {
        assert_eq!(mix[end], count, "{report}");
    }
    assert!(mix["pay_ms"]["p50"].as_f64().unwrap() > 0.0);
    assert_eq!(db.count("SELECT count(*) FROM orders_orders WHERE status = 'paid'").await, 42);
    assert_eq!(db.count("SELECT count(*) FROM ledger_entries").await, 84);
}

async fn the_pipeline_runs_without_what_not_every_order_goes_through(db: TestDb) {
    let output = bench(&["--orders", "40", "--concurrency", "8", "--json", "--database-url", &db.url]).await;
    let report = report(&output);
    assert!(output.status.success() && report["verified"] == true, "{report}");
    assert!(report.get("mix").is_none());
    assert_eq!(db.count("SELECT count(*) FROM orders_orders WHERE status = 'reserved'").await, 40);
    assert_eq!(db.count("SELECT count(*) FROM ledger_orders").await, 0);
}

async fn a_run_on_a_database_with_rows_and_a_held_snapshot_is_verified(db: TestDb) {
    let args = ["--orders", "40", "--concurrency", "8", "--published", "3000", "--hold-snapshot", "--json"];
    let output = bench(&[&args[..], &["--database-url", &db.url]].concat()).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report = report(&output);
    assert_eq!((&report["orders"], &report["verified"]), (&40.into(), &true.into()));
    let yesterday = "SELECT count(*) FROM messaging_outbox WHERE status = 'published' AND aggregate_type = 'order'";
    assert_eq!(db.count(yesterday).await, 3040, "beside the orders' own");
}

/// Everything that handling an event could have changed, to the last timestamp.
async fn effects(api: &Api) -> Vec<Value> {
    let mut effects = Vec::new();
    for of in ["orders", "stock", "reservations", "notifications", "ledger/entries", "ledger/balances"] {
        let page = api.read(&format!("/v1/{of}?limit=200")).await;
        assert!(page["next_cursor"].is_null(), "{of}: one page holds them all");
        effects.push(page);
    }
    effects
}

async fn a_replay_of_the_whole_mix_moves_nothing(db: TestDb) {
    let server = Server::start(&db, &["--hold-time", "3s"]);
    let args = ["--mix", "--orders", "60", "--concurrency", "12", "--json", "--url", &server.url];
    let output = bench(&[&args[..], &["--database-url", &db.url]].concat()).await;
    assert!(output.status.success(), "{}", report(&output));
    let before = effects(&server).await;
    let met = db.count("SELECT count(*) FROM messaging_inbox WHERE state = 'processed'").await;
    let again = "SELECT CAST(COALESCE(sum(duplicates), 0) AS bigint) FROM messaging_inbox";
    let known = db.count(again).await;
    assert!(met >= 60 * 4, "orders, inventory, notifications and the ledger have met {met} events");

    let replay = server.tell("/v1/replays", &json!({ "from": "2020-01-01T00:00:00Z", "rate": 10_000 })).await;
    let path = format!("/v1/replays/{}", replay["id"].as_str().unwrap());
    let job = eventually("the end of the replay", || async {
        let job = server.read(&path).await;
        (job["state"] == "done").then_some(job)
    });
    assert_eq!(job.await["sent"], replay["total"]);
    eventually("every event met once more", || async { (db.count(again).await >= known + met).then_some(()) }).await;
    assert_eq!(effects(&server).await, before);
    assert_eq!(db.count(again).await, known + met, "and none twice");
    assert!(server.terminate().await);
}

each_database!(
    a_replay_of_the_whole_mix_moves_nothing,
    a_run_on_a_database_with_rows_and_a_held_snapshot_is_verified,
    the_mix_takes_every_order_to_its_end_and_verifies_it,
    the_pipeline_runs_without_what_not_every_order_goes_through,
);

/// Nobody keeps the books, so what was paid is nowhere to be found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_run_whose_end_state_is_wrong_fails() {
    let db = TestDb::new(Engine::Sqlite).await;
    let modules = "api,relay,orders,inventory,notifications,dead-letters";
    let server = Server::start(&db, &["--modules", modules, "--hold-time", "3s"]);
    let args =
        ["--mix", "--orders", "20", "--concurrency", "4", "--json", "--url", &server.url, "--database-url", &db.url];
    let output = bench(&args).await;
    let report = report(&output);
    assert_eq!((output.status.code(), &report["verified"]), (Some(1), &false.into()), "{report}");
    assert_eq!(report["violations"], json!(["14 orders whose entries in the ledger are not what was paid"]));
    assert!(server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_mix_that_would_wait_for_ever_is_refused() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    let output = bench(&["--mix", "--orders", "20", "--url", &server.url, "--database-url", &db.url]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--hold-time 5s"));
    assert!(server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_server_with_keys_is_measured_with_one() {
    let db = TestDb::new(Engine::Sqlite).await;
    let secret = Secret::random();
    let server = Server::start(&db, &["--api-keys", &format!("admin:acme:{}", secret.hash())]);
    let args = ["--orders", "20", "--concurrency", "4", "--json", "--url", &server.url, "--database-url", &db.url];
    let refused = bench(&args).await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("401"), "{refused:?}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), secret.reveal()).unwrap();
    let output = bench(&[&args[..], &["--api-key-file", file.path().to_str().unwrap()]].concat()).await;
    assert!(output.status.success() && report(&output)["verified"] == true, "{output:?}");
    assert!(server.terminate().await);
}
