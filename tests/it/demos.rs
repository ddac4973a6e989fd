//! Each demo, with the real binary: proven on each database and on a server that is there already, and not proven
//! when the server does not keep the promise. A demo leaves nothing behind, however it ends.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use axum::body::Bytes;
use axum::http::{HeaderMap, Method, Uri, header};
use axum::response::IntoResponse;
use serde_json::{Value, json};
use stockade::access::Secret;
use stockade::app::Builder;
use stockade_kernel::clock::mint_id;

use crate::support::{App, Engine, Server, TestDb, each_database, eventually, http_client, rabbit, settings};

/// A finished run: how it ended, what it printed, and what it said meanwhile.
struct Ran {
    status: ExitStatus,
    printed: String,
    said: String,
}

impl Ran {
    fn report(&self) -> Value {
        serde_json::from_str(&self.printed).unwrap_or_else(|_| panic!("one JSON object: {}{}", self.printed, self.said))
    }

    /// Proven, exit code 0; returns the figures.
    fn proven(&self) -> Value {
        assert_eq!(self.status.code(), Some(0), "{}{}", self.printed, self.said);
        let report = self.report();
        assert_eq!(report["proven"], true, "{report}");
        let proofs = report["proofs"].as_array().unwrap();
        assert!(proofs.len() >= 6 && proofs.iter().all(|proof| proof["holds"] == true), "{report}");
        report["figures"].clone()
    }

    /// Not proven, exit code 3; returns the claims that did not hold.
    fn not_proven(&self) -> Vec<String> {
        assert_eq!(self.status.code(), Some(3), "{}{}", self.printed, self.said);
        let report = self.report();
        assert_eq!(report["proven"], false, "{report}");
        let proofs = report["proofs"].as_array().unwrap().iter();
        proofs
            .filter(|proof| proof["holds"] == false)
            .map(|proof| proof["claim"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Refused, with nothing printed.
    fn refused(&self, code: i32, hint: &str) {
        assert_eq!(self.status.code(), Some(code), "{}", self.said);
        assert!(self.said.contains(hint), "{}", self.said);
        assert!(self.printed.is_empty(), "{}", self.printed);
    }
}

/// `stockade demo …`, with its temporary files in a folder of the test's.
fn command(temporary: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
    command.arg("demo").args(args).env("TMPDIR", temporary).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

async fn run(args: &[&str], envs: &[(&str, &str)]) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let mut command = command(folder.path(), args);
    command.envs(envs.iter().copied());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "it leaves nothing behind");
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { status: output.status, printed: text(output.stdout), said: text(output.stderr) }
}

/// On a server of its own. What is in `db` already, be it nothing, is not touched.
async fn run_own(db: &TestDb, args: &[&str]) -> Ran {
    let before = tables(db).await;
    let ran = run(&[args, &["--json", "--database-url", &db.url]].concat(), &[]).await;
    assert_eq!(tables(db).await, before, "a schema or a file of its own, dropped");
    ran
}

/// How many tables and schemas of Stockade there are; of a SQLite database, whether there is a file at all.
async fn tables(db: &TestDb) -> (i64, i64) {
    if let Some(file) = db.url.strip_prefix("sqlite:") {
        return (0, i64::from(Path::new(file).exists()));
    }
    let tables =
        "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema NOT IN ('pg_catalog', 'information_schema')";
    let schemas = "SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name LIKE 'stockade%'";
    (db.count(tables).await, db.count(schemas).await)
}

fn engine(db: &TestDb) -> &'static str {
    if db.url.starts_with("sqlite:") { "sqlite" } else { "postgres" }
}

async fn a_backlog_grows_and_drains_and_nothing_is_lost(db: TestDb) {
    let ran = run_own(&db, &["backlog", "--orders", "12", "--rate", "60"]).await;
    let figures = ran.proven();
    assert_eq!((&figures["orders"], &figures["depth_peak"]), (&json!(12), &json!(12)));
    assert_eq!(ran.report()["server"]["database"], engine(&db));
    assert!(ran.said.contains("You should see") && ran.said.contains("depth    12"), "{}", ran.said);
    assert!(!ran.said.contains('\u{1b}'), "no colours but on a terminal");
}

async fn a_duplicate_has_no_second_effect(db: TestDb) {
    let ran = run_own(&db, &["duplicates", "--times", "4"]).await;
    assert_eq!(ran.proven()["published"], 4);
    assert_eq!(ran.report()["server"]["database"], engine(&db));
}

async fn poison_becomes_dead_letters_and_harms_nobody(db: TestDb) {
    let figures = run_own(&db, &["poison"]).await.proven();
    let letters = figures["letters"].as_array().unwrap();
    let reasons: Vec<&str> = letters.iter().map(|letter| letter["reason"].as_str().unwrap()).collect();
    assert_eq!(reasons, ["not-json", "schema", "schema", "not-utf8", "unknown-type", "no-id"]);
}

async fn a_crash_between_commit_and_ack_is_absorbed(db: TestDb) {
    let ran = run_own(&db, &["crash", "--orders", "5"]).await;
    assert_eq!(ran.proven()["orders"], 5);
    assert!(ran.said.contains("SIGABRT"), "{}", ran.said);
}

async fn a_server_that_is_there_is_played_on_and_left_as_it_was(db: TestDb) {
    let server = Server::start(&db, &[]);
    for args in [["backlog", "--orders=5", "--rate=50"].as_slice(), &["duplicates"], &["poison"]] {
        let ran = run(&[args, &["--json", "--url", &server.url]].concat(), &[]).await;
        ran.proven();
        assert_eq!(
            ran.report()["server"],
            json!({ "url": server.url, "own": false, "database": engine(&db), "broker": "embedded" })
        );
    }
    assert_eq!(server.read("/v1/queues/inventory").await["paused"], false);
    server.put_stock("A", 1).await;
    assert_eq!(server.place_and_wait("alice", &[("A", 1)]).await["status"], "reserved");
    let crash = run(&["crash", "--url", &server.url], &[]).await;
    crash.refused(2, "not the demo's to kill");
    crash.refused(2, "--broker-url");
}

each_database!(
    a_backlog_grows_and_drains_and_nothing_is_lost,
    a_duplicate_has_no_second_effect,
    poison_becomes_dead_letters_and_harms_nobody,
    a_crash_between_commit_and_ack_is_absorbed,
    a_server_that_is_there_is_played_on_and_left_as_it_was,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn all_of_them_are_one_command() {
    let db = TestDb::new(Engine::Sqlite).await;
    let ran = run(&["all", "--json"], &[]).await;
    assert_eq!(ran.status.code(), Some(0), "{}", ran.said);
    let names = |report: &Value| -> Vec<String> {
        assert_eq!(report["proven"], true);
        report["demos"].as_array().unwrap().iter().map(|demo| demo["demo"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&ran.report()), ["backlog", "duplicates", "poison", "crash"]);
    let server = Server::start(&db, &[]);
    let ran = run(&["all", "--json", "--url", &server.url], &[]).await;
    assert_eq!(names(&ran.report()), ["backlog", "duplicates", "poison"], "it kills nobody else's server");
    assert!(ran.said.contains("Without the crash"), "{}", ran.said);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn inventory_may_be_a_process_that_is_stopped() {
    let db = TestDb::new(Engine::Postgres).await;
    let ran = run_own(&db, &["backlog", "--stop", "--orders", "10", "--rate", "50"]).await;
    assert_eq!(ran.proven()["depth_peak"], 10);
    assert!(ran.said.contains("Stopping the process of inventory"), "{}", ran.said);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn what_cannot_be_stopped_is_refused() {
    let db = TestDb::new(Engine::Sqlite).await;
    let stop = ["backlog", "--stop", "--database-url", &db.url];
    run(&stop, &[]).await.refused(2, "postgres://");
    run(&["backlog", "--stop", "--url", "http://127.0.0.1:1"], &[]).await.refused(2, "not the demo's to stop");
    run(&["backlog", "--url", "http://127.0.0.1:1"], &[]).await.refused(6, "cannot reach http://127.0.0.1:1");
    run(&["poison", "--database-url", "mysql://localhost/x"], &[]).await.refused(2, "postgres://");
    run(&["poison", "--database-url", "postgres://nobody@127.0.0.1:1/x"], &[]).await.refused(1, "Postgres");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_server_without_the_lab_will_do_for_a_backlog_only() {
    let db = TestDb::new(Engine::Sqlite).await;
    let app = App::start_built(Builder::new(settings(&db, &[]))).await;
    for demo in ["duplicates", "poison"] {
        run(&[demo, "--url", &app.url], &[]).await.refused(1, "stockade serve --demo");
    }
    run(&["backlog", "--orders=3", "--rate=50", "--json", "--url", &app.url], &[]).await.proven();
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_server_with_keys_is_played_on_with_one_in_the_group_it_names() {
    let db = TestDb::new(Engine::Sqlite).await;
    let (secret, viewer) = (Secret::random(), Secret::random());
    let keys = format!("admin:*:{},viewer:*:{}", secret.hash(), viewer.hash());
    let server = Server::start(&db, &["--api-keys", &keys]);
    let key = ("STOCKADE_API_KEY", secret.reveal());
    for (args, envs) in [
        (["backlog", "--orders=5", "--rate=50"].as_slice(), [key].as_slice()),
        (&["duplicates"], &[key, ("STOCKADE_AS_GROUP", "acme")]),
    ] {
        run(&[args, &["--json", "--url", &server.url]].concat(), envs).await.proven();
    }
    run(&["duplicates", "--url", &server.url], &[]).await.refused(1, "wants a key");
    run(&["duplicates", "--url", &server.url], &[("STOCKADE_API_KEY", viewer.reveal())]).await.refused(1, "403");
    // Keys that were set for another server do not close the demo's own.
    run(&["duplicates", "--json"], &[("STOCKADE_API_KEYS", &keys)]).await.proven();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn without_json_the_proofs_are_printed_as_text() {
    let ran = run(&["duplicates"], &[]).await;
    assert_eq!(ran.status.code(), Some(0), "{}", ran.said);
    assert!(ran.printed.contains("✓ copies counted as duplicates in the inbox  1\n"), "{}", ran.printed);
    assert!(ran.printed.ends_with("Proven: duplicates on sqlite with the embedded queue.\n"), "{}", ran.printed);
    assert!(!ran.printed.contains('\u{1b}') && !ran.printed.contains("You should see"), "{}", ran.printed);
}

/// On a server of its own and RabbitMQ.
async fn run_on_rabbit(db: &TestDb, prefix: &str, args: &[&str]) -> Ran {
    let broker = tokio::task::spawn_blocking(rabbit::url).await.unwrap();
    run_own(db, &[args, &["--broker-url", &broker, "--queue-prefix", prefix]].concat()).await
}

async fn every_demo_is_proven_on_rabbitmq(db: TestDb) {
    let prefix = mint_id().to_string();
    for args in [["backlog", "--orders=12", "--rate=60"].as_slice(), &["duplicates"], &["poison"], &["crash"]] {
        let ran = run_on_rabbit(&db, &prefix, args).await;
        ran.proven();
        assert_eq!(ran.report()["server"]["broker"], "rabbitmq");
    }
}

mod on_rabbitmq {
    use super::*;

    each_database!(every_demo_is_proven_on_rabbitmq);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn inventory_may_be_a_process_that_is_stopped_on_rabbitmq_too() {
    let db = TestDb::new(Engine::Postgres).await;
    let stop = ["backlog", "--stop", "--orders=10", "--rate=50"];
    assert_eq!(run_on_rabbit(&db, &mint_id().to_string(), &stop).await.proven()["depth_peak"], 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn queues_that_somebody_consumes_from_are_left_alone() {
    let (db, mine) = (TestDb::new(Engine::Sqlite).await, TestDb::new(Engine::Sqlite).await);
    let (broker, prefix) = (tokio::task::spawn_blocking(rabbit::url).await.unwrap(), mint_id().to_string());
    let server = Server::start(&db, &["--broker-url", &broker, "--queue-prefix", &prefix]);
    let consumed = || async { (server.read("/v1/queues/inventory").await["consumers"] == 1).then_some(()) };
    eventually("its consumer", consumed).await;
    run_on_rabbit(&mine, &prefix, &["duplicates"]).await.refused(5, "--queue-prefix");
}

/// Passes everything on to a real server, and changes what it answers.
async fn liar(truth: &str, lie: fn(&str, &mut Value)) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (truth, client) = (truth.to_owned(), http_client().build().unwrap());
    let router =
        axum::Router::new().fallback(async move |method: Method, uri: Uri, headers: HeaderMap, body: Bytes| {
            let mut request = client.request(method, format!("{truth}{uri}")).body(body);
            for name in ["content-type", "idempotency-key", "prefer"] {
                if let Some(value) = headers.get(name) {
                    request = request.header(name, value);
                }
            }
            let answer = request.send().await.unwrap();
            let (status, mut body) = (answer.status(), answer.json::<Value>().await.unwrap());
            lie(uri.path(), &mut body);
            (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
        });
    #[expect(clippy::disallowed_methods, reason = "ends with the test, whose runtime it runs on")]
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// Runs a demo on a server that answers, but not with the truth: the claims that do not hold.
async fn lied_to(args: &[&str], lie: fn(&str, &mut Value)) -> Vec<String> {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    let url = liar(&server.url, lie).await;
    run(&[args, &["--json", "--patience=2s", "--url", &url]].concat(), &[]).await.not_proven()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_backlog_that_loses_a_reservation_is_not_proven() {
    let broken = lied_to(&["backlog", "--orders=3", "--rate=50"], |path, body| {
        if path == "/v1/reservations" {
            body["data"].as_array_mut().unwrap().pop();
        }
    });
    assert_eq!(broken.await, ["orders reserved", "reservations"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_backlog_that_never_shows_is_not_proven() {
    let broken = lied_to(&["backlog", "--orders=3", "--rate=50"], |path, body| {
        if path == "/v1/queues/inventory" {
            body["depth"] = 0.into();
        }
    });
    assert_eq!(broken.await, [] as [&str; 0], "it breaks off before that proof, and says why");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_duplicate_that_deducts_stock_again_is_not_proven() {
    let broken = lied_to(&["duplicates"], |path, body| {
        if path.starts_with("/v1/stock/") && body["reserved"] == 5 {
            (body["reserved"], body["available"]) = (10.into(), 90.into());
        }
    });
    let claims = ["units reserved after the first copy", "units reserved after all copies", "units available"];
    assert_eq!(broken.await, claims);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn poison_that_is_misfiled_is_not_proven() {
    let broken = lied_to(&["poison"], |path, body| {
        if path == "/v1/dead-letters" {
            for letter in body["data"].as_array_mut().unwrap() {
                match letter["reason"].as_str().unwrap() {
                    "not-json" => letter["reason"] = "broker-limit".into(),
                    "not-utf8" => letter["x_death"][0]["reason"] = "expired".into(),
                    "unknown-type" => letter["error"] = "".into(),
                    _ => {}
                }
            }
        } else if path.starts_with("/v1/dead-letters/") && body["reason"] == "no-id" {
            body["body"] = "{}".into();
        }
    });
    assert_eq!(broken.await, ["invalid JSON", "not UTF-8", "unknown event type", "no event id"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_crash_that_does_not_come_is_not_proven() {
    // No event fits, so inventory rejects them all and never commits one.
    let ran = run(&["crash", "--orders=2", "--patience=2s", "--json"], &[("STOCKADE_MAX_EVENT", "100B")]).await;
    assert_eq!(ran.not_proven(), [] as [&str; 0]);
    assert!(ran.report()["error"].as_str().unwrap().contains("did not reach the point"), "{}", ran.printed);
    assert!(ran.said.contains("too-large"), "with what the server logged: {}", ran.said);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_consumer_that_somebody_paused_stays_paused() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    server.tell("/v1/consumers/inventory/pause", &json!({})).await;
    run(&["backlog", "--url", &server.url], &[]).await.refused(5, "paused already");
    assert_eq!(server.read("/v1/queues/inventory").await["paused"], true);
}

/// Interrupted in the midst of placing orders; returns its exit code once it has ended.
async fn interrupt(signal: &str, args: &[&str]) -> Option<i32> {
    let folder = tempfile::tempdir().unwrap();
    let mut child =
        command(folder.path(), &[&["backlog", "--orders=1000", "--rate=10"], args].concat()).spawn().unwrap();
    let mut said = std::io::BufReader::new(child.stderr.take().unwrap());
    let (child, said) = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        while !line.contains("·  answered ") {
            line.clear();
            assert!(std::io::BufRead::read_line(&mut said, &mut line).unwrap() > 0, "it ended too early");
        }
        (child, said)
    })
    .await
    .unwrap();
    let kill = format!("kill -s {signal} {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    let status = tokio::task::spawn_blocking(move || {
        let status = child.wait_with_output().unwrap().status;
        drop(said); // it has somebody to talk to until its end
        status
    });
    let status = status.await.unwrap();
    assert_eq!(status.signal(), None);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "it leaves nothing behind");
    status.code()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn an_interrupted_demo_resumes_what_it_paused() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    for signal in ["INT", "TERM"] {
        assert_eq!(interrupt(signal, &["--url", &server.url]).await, Some(130));
        assert_eq!(server.read("/v1/queues/inventory").await["paused"], false);
        let path = "/v1/queues/inventory";
        eventually("a drained queue", || async { (server.read(path).await["depth"] == 0).then_some(()) }).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn an_interrupted_demo_takes_its_servers_along() {
    let db = TestDb::new(Engine::Postgres).await;
    assert_eq!(interrupt("INT", &["--stop", "--database-url", &db.url]).await, Some(130));
    let schemas = "SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name LIKE 'stockade%'";
    assert_eq!(db.count(schemas).await, 0, "and its schema");
    // The one that asks is not counted.
    let connections =
        "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    eventually("no connection left", || async { (db.count(connections).await == 0).then_some(()) }).await;
}
