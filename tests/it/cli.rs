//! The first minutes with the binary: what it prints, what it creates, what it refuses.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::support::{Api, Engine, Server, TestDb, Wire, eventually};

/// The binary in a folder of its own, with nothing set.
fn stockade(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
    command.args(args).current_dir(folder).env("STOCKADE_LOG", "warn");
    command
}

fn output(folder: &Path, args: &[&str]) -> Output {
    stockade(folder, args).output().unwrap()
}

/// Ended when the test is.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn by_itself_it_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let help = output(folder.path(), &[]);
    assert!(help.status.success());
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(text.lines().count() <= 15 && text.contains("stockade serve") && text.contains("postgres://"), "{text}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "and leaves nothing behind");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn serve_makes_a_stocked_shop_out_of_nothing_and_says_where_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let mut child =
        stockade(folder.path(), &["serve", "--listen", "127.0.0.1:0"]).stdout(Stdio::piped()).spawn().unwrap();
    let stdout = child.stdout.take().unwrap();
    let _server = Ended(child);
    let banner: Vec<String> = BufReader::new(stdout).lines().take(7).map(Result::unwrap).collect();
    assert!(folder.path().join("stockade.db").exists());
    let urls: Vec<&str> =
        banner.iter().filter_map(|line| line.split_whitespace().find(|w| w.starts_with("http"))).collect();
    assert_eq!(urls.len(), 4, "dashboard, docs, readiness and the order to paste: {banner:?}");
    let api = Api::new(urls[0].trim_end_matches('/').to_owned());
    for url in &urls[..3] {
        assert_eq!(api.client.get(*url).send().await.unwrap().status(), 200, "{url}");
    }
    let stock = api.walk("/v1/stock").await;
    let shelves: Vec<(&Value, &Value)> = stock.iter().map(|row| (&row["sku"], &row["on_hand"])).collect();
    let expected = [("GADGET-X", 10), ("WIDGET-A", 100), ("WIDGET-B", 50), ("WIDGET-C", 25)];
    let expected = expected.map(|(sku, on_hand)| (json!(sku), json!(on_hand)));
    assert_eq!(shelves, expected.iter().map(|(sku, on_hand)| (sku, on_hand)).collect::<Vec<_>>());

    // The command to paste, taken word by word.
    let command = banner[5..].join("\n").replace("\\\n", " ");
    let quoted: Vec<&str> = command.split('\'').skip(1).step_by(2).collect();
    let [content_type, prefer, body] = quoted[..] else { panic!("{command}") };
    let mut request = api.client.post(urls[3]).body(body.to_owned());
    for header in [content_type, prefer] {
        let (name, value) = header.split_once(": ").unwrap();
        request = request.header(name, value);
    }
    let order: Value = request.send().await.unwrap().json().await.unwrap();
    assert_eq!(order["status"], "reserved");
}

#[test]
fn migrate_prepares_a_database_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let migrated = output(folder.path(), &["migrate"]);
        assert!(migrated.status.success() && migrated.stdout.is_empty(), "talk is for stderr");
    }
    assert!(folder.path().join("stockade.db").exists());
}

#[test]
fn what_cannot_work_is_refused_with_what_to_change() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (args, hint) in [
        (["serve", "--listen", "0.0.0.0:0"].as_slice(), "STOCKADE_INSECURE_NO_AUTH"),
        (&["serve", "--demo", "--insecure-no-auth", "--listen", "0.0.0.0:0"], "loopback"),
        (&["serve", "--listen", &taken], "STOCKADE_LISTEN"),
        (&["serve", "--lease", "1ms"], "STOCKADE_LEASE"),
        (&["serve", "--retry-max", "0"], "STOCKADE_RETRY_MAX"),
        (&["serve", "--queue-prefix", "a b"], "STOCKADE_QUEUE_PREFIX"),
        (&["serve", "--broker-url", "rabbit"], "STOCKADE_BROKER_URL"),
        (&["serve", "--extra-queues", "a=#"], "STOCKADE_BROKER_URL"),
        (&["serve", "--broker-url", "amqp://localhost", "--extra-queues", "a"], "STOCKADE_EXTRA_QUEUES"),
        (&["serve", "--broker-url", "amqp://localhost", "--extra-queues", "stockade.a=#"], "STOCKADE_EXTRA_QUEUES"),
        (&["serve", "--broker-url", "amqp://localhost", "--prefetch", "8"], "STOCKADE_PREFETCH"),
        (&["serve", "--broker-url", "amqp://localhost", "--amqp-heartbeat", "1ms"], "STOCKADE_AMQP_HEARTBEAT"),
        (&["serve", "--notify-channel", "webhook"], "STOCKADE_WEBHOOK_URL"),
        (&["serve", "--notify-channel", "webhook", "--webhook-url", "http://h/"], "STOCKADE_WEBHOOK_SECRET"),
        (
            &["serve", "--notify-channel", "webhook", "--webhook-url", "h", "--webhook-secret", "s"],
            "STOCKADE_WEBHOOK_URL takes `https://",
        ),
        (
            &["serve", "--notify-channel", "webhook", "--webhook-url", "http://h/", "--webhook-secret", "s"],
            "STOCKADE_WEBHOOK_SECRET cannot be used: it has 1 bytes",
        ),
        (&["serve", "--notify-channel", "smtp"], "STOCKADE_SMTP_URL"),
        (&["serve", "--notify-channel", "webhook", "--handler-timeout", "60s"], "STOCKADE_HANDLER_TIMEOUT"),
        (&["serve", "--outside-calls", "0"], "STOCKADE_OUTSIDE_CALLS"),
        (&["serve", "--database-url", "mysql://localhost/x"], "sqlite: or postgres://"),
        (&["serve", "--database-url", "sqlite:no/such/folder/x.db"], "no/such/folder"),
        (&["serve", "--database-url", "postgres://nobody@127.0.0.1:1/x"], "cannot connect to Postgres"),
    ] {
        let refused = output(folder.path(), args);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains(hint), "{args:?}: {said}");
        assert!(refused.stdout.is_empty(), "{args:?}");
    }
    assert_eq!(output(folder.path(), &["serve", "--colour", "blue"]).status.code(), Some(2), "usage");
}

/// Asks with nothing but what `envs` and `args` say: its exit code and what it printed.
async fn healthcheck(args: &[&str], envs: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
    command.arg("healthcheck").args(args).envs(envs.iter().copied());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Something else that listens, with the same answer to everything.
async fn answering(status: StatusCode, body: &'static str) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = axum::Router::new().fallback(async move || (status, body));
    #[expect(clippy::disallowed_methods, reason = "ends with the test, whose runtime it runs on")]
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn healthcheck_tells_by_its_exit_code_whether_the_server_is_ready() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    let address = server.url.strip_prefix("http://").unwrap().to_owned();
    let port = address.rsplit(':').next().unwrap();
    let everywhere = format!("0.0.0.0:{port}");
    let proxy = ("HTTP_PROXY", "http://127.0.0.1:1");
    for (args, envs) in [
        (["--url", &server.url].as_slice(), [proxy].as_slice()),
        (&[], &[("STOCKADE_LISTEN", everywhere.as_str())]),
        (&["--listen", &address], &[]),
    ] {
        let (code, said, _) = healthcheck(args, envs).await;
        assert_eq!(code, Some(0), "{args:?} {envs:?}");
        assert!(said.starts_with("ok: ") && said.contains("database up"), "{said}");
    }
    let (code, json, talk) = healthcheck(&["--json", "--url", &server.url], &[]).await;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((code, &json["checks"]["database"], talk.as_str()), (Some(0), &json!("up"), ""));
    server.kill();
    let (code, said, talk) = healthcheck(&["--listen", &address], &[]).await;
    assert_eq!((code, said.as_str()), (Some(6), ""), "nobody is there");
    assert!(talk.contains(&address), "{talk}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn healthcheck_tells_a_server_that_is_not_ready_from_one_that_is_none() {
    let draining =
        answering(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"unavailable","checks":{"draining":"yes"}}"#);
    let (code, said, _) = healthcheck(&["--url", &draining.await], &[]).await;
    assert_eq!((code, said.as_str()), (Some(6), "unavailable: draining yes\n"));
    for (status, body) in [(StatusCode::NOT_FOUND, "who?"), (StatusCode::OK, "<html>welcome</html>")] {
        let other = answering(status, body).await;
        let (code, said, talk) = healthcheck(&["--url", &other], &[]).await;
        assert_eq!((code, said.as_str()), (Some(1), ""), "{status}");
        assert!(talk.contains("/readyz"), "{talk}");
    }
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().unwrap().to_string();
    let (code, _, talk) = healthcheck(&["--listen", &silent, "--timeout", "100ms"], &[]).await;
    assert_eq!(code, Some(6), "{talk}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn queues_show_how_full_they_are_once_or_again_and_again() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    server.tell("/v1/consumers/inventory/pause", &json!({})).await;
    server.place("a", &[("WIDGET-A", 1)]).await;
    let folder = tempfile::tempdir().unwrap();
    let shown = output(folder.path(), &["queues", "--url", &server.url]);
    assert!(shown.status.success(), "{shown:?}");
    let text = String::from_utf8(shown.stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with("stockade.inventory ")).unwrap();
    assert_eq!(line.split_whitespace().nth(1), Some("1"), "{text}");
    assert!(line.ends_with("paused"), "{text}");
    let watched = output(
        folder.path(),
        &["queues", "--url", &server.url, "--watch", "--every", "10ms", "--times", "3", "--json"],
    );
    let looks: Vec<Value> =
        String::from_utf8(watched.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(looks.len(), 3);
    assert!(looks.iter().all(|look| look["queues"].as_array().unwrap().iter().any(|queue| queue["depth"] == 1)));
    assert!(server.terminate().await);
}

async fn findings(db: &TestDb, more: &[&str]) -> (Option<i32>, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let args = [&["doctor", "--json", "--database-url", &db.url], more].concat();
    let told = output(folder.path(), &args);
    let findings = serde_json::from_slice(&told.stdout).unwrap_or_else(|error| panic!("{error}: {told:?}"));
    (told.status.code(), findings)
}

async fn the_doctor_looks_at_everything_a_server_stands_on(db: TestDb) {
    let server = Server::start(&db, &[]);
    let present = async || (server.read("/v1/health").await["instances"].as_array()?.len() == 1).then_some(());
    eventually("the server among the instances", present).await;
    let listen = server.url.strip_prefix("http://").unwrap().to_owned();
    let (code, found) = findings(&db, &["--listen", &listen]).await;
    assert_eq!(code, Some(0), "{found:#?}");
    let about = |what: &str| found.iter().find(|finding| finding["what"] == what).unwrap()["detail"].as_str().unwrap();
    for what in ["version", "settings", "database", "schema", "clock", "broker", "server"] {
        assert!(!about(what).is_empty(), "{what}");
    }
    assert_eq!(about("schema"), "at this version's");
    assert!(about("server").contains("1 instances"), "{}", about("server"));
    if db.url.starts_with("sqlite:") {
        assert_eq!(about("journal_mode"), "wal");
        assert!(about("synchronous").starts_with("full"));
        assert!(about("disk").contains("free"));
    } else {
        assert_eq!(about("fsync"), "on");
    }
    assert!(server.terminate().await);
    let (code, found) = findings(&db, &["--listen", "0.0.0.0:1"]).await;
    assert_eq!(code, Some(1), "settings that a server would refuse: {found:#?}");
}

crate::support::each_database!(the_doctor_looks_at_everything_a_server_stands_on);

async fn the_doctor_tells_the_arguments_of_every_queue(db: TestDb) {
    let server = Server::start(&db, &[]);
    server.until_connected().await;
    let Wire::Rabbit { url, prefix } = &db.wire else { unreachable!("on RabbitMQ") };
    let flags = ["--broker-url", url, "--queue-prefix", prefix];
    let (code, found) = findings(&db, &flags).await;
    assert_eq!(code, Some(0), "{found:#?}");
    let about = |what: &str| found.iter().find(|finding| finding["what"] == what).unwrap()["detail"].as_str().unwrap();
    let version = about("broker").strip_prefix("rabbitmq ").unwrap().split(':').next().unwrap();
    assert!(version.split('.').all(|part| part.parse::<u32>().is_ok()), "{version}");
    let inventory = about(&format!("queue {prefix}.inventory"));
    for argument in [
        "x-queue-type=quorum".to_owned(),
        "x-delivery-limit=50".to_owned(),
        "x-overflow=reject-publish".to_owned(),
        "x-dead-letter-strategy=at-least-once".to_owned(),
        format!("x-dead-letter-exchange={prefix}.events.dlx"),
    ] {
        assert!(inventory.contains(&argument), "{argument} in {inventory}");
    }
    assert!(about(&format!("queue {prefix}.inventory.dlq")).contains("x-queue-type=quorum"));
    let (code, found) = findings(&db, &["--broker-url", "amqp://127.0.0.1:1"]).await;
    assert_eq!(code, Some(1), "a broker that is not there: {found:#?}");
    let (code, found) = findings(&db, &["--broker-url", url, "--queue-prefix", "nobodys"]).await;
    let missing = found.iter().filter(|finding| finding["detail"] == "missing").count();
    assert_eq!((code, missing), (Some(0), 8), "queues that no server has declared yet: {found:#?}");
    assert!(server.terminate().await);
}

crate::support::each_database_on_rabbit!(the_doctor_tells_the_arguments_of_every_queue);
