//! The bench measures what it says: a run is verified, also on a database that has been at work for a while.

use std::process::Command;

use serde_json::Value;

use crate::support::{TestDb, each_database};

async fn a_run_on_a_database_with_rows_and_a_held_snapshot_is_verified(db: TestDb) {
    let args = ["bench", "--orders", "40", "--concurrency", "8", "--published", "3000", "--hold-snapshot", "--json"];
    let mut bench = Command::new(env!("CARGO_BIN_EXE_stockade"));
    bench.args(args).args(["--database-url", &db.url]);
    let output = tokio::task::spawn_blocking(move || bench.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["orders"], &report["verified"]), (&40.into(), &true.into()));
    let yesterday = "SELECT count(*) FROM messaging_outbox WHERE status = 'published' AND aggregate_type = 'order'";
    assert_eq!(db.count(yesterday).await, 3040, "beside the orders' own");
}

each_database!(a_run_on_a_database_with_rows_and_a_held_snapshot_is_verified);
