//! The command line against a running server: data for people and for programs, and exit codes that tell.

use std::fs::File;
use std::process::{Command, Stdio};
use std::sync::Arc;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::ServerConfig;
use rustls::pki_types::PrivatePkcs8KeyDer;
use serde_json::{Value, json};
use stockade::access::Secret;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::support::{Engine, Server, TestDb, eventually};

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {} {}", self.out, self.err))
    }
}

fn stockade(server: &Server, args: &[&str]) -> Ran {
    stockade_with(&[], &[args, &["--url", &server.url]].concat())
}

fn stockade_with(envs: &[(&str, &str)], args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
    let output = command.args(args).envs(envs.iter().copied()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_list_that_is_cut_short_says_so() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    let poison = json!({ "queue": "inventory", "body": "no json", "times": 3 });
    server.tell("/v1/lab/publish", &poison).await;
    server.eventually_list("/v1/dead-letters", 3).await;
    let cut = stockade(&server, &["dead-letters", "list", "--limit", "2", "--json"]);
    assert_eq!(cut.json().as_array().unwrap().len(), 2, "{}", cut.out);
    assert!(cut.err.contains("There are more"), "{}", cut.err);
    let whole = stockade(&server, &["dead-letters", "list", "--limit", "3", "--json"]);
    assert_eq!((whole.json().as_array().unwrap().len(), whole.err.as_str()), (3, ""));
    let redriven = stockade(&server, &["redrive", "--queue", "inventory", "--yes", "--no-wait", "--json"]).json();
    assert!(redriven["filter"]["to"].is_string(), "pinned when it was looked at: {redriven:#}");
    server.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn an_order_can_be_placed_watched_paid_and_fulfilled() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    let placed = stockade(&server, &["order", "place", "alice", "WIDGET-A=2@1250", "--json"]);
    assert_eq!(placed.code, Some(0), "{}", placed.err);
    let order = placed.json();
    let number = order["number"].as_str().unwrap();
    let watched = stockade(&server, &["order", "watch", number]);
    assert_eq!(watched.code, Some(0), "{}", watched.err);
    assert!(watched.out.contains("took the order") && watched.out.contains("inventory"), "{}", watched.out);
    assert!(watched.err.contains(&format!("{number} is reserved")), "{}", watched.err);
    let hops = stockade(&server, &["order", "watch", number, "--json"]);
    assert!(hops.out.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{}", hops.out);
    let wrong = stockade(&server, &["order", "pay", number, "--amount", "1"]);
    assert_ne!(wrong.code, Some(0));
    let paid = stockade(&server, &["order", "pay", number, "--json"]);
    assert_eq!(paid.code, Some(0), "{}", paid.err);
    assert_eq!(stockade(&server, &["order", "cancel", number]).code, Some(5), "not any more");
    assert_eq!(stockade(&server, &["order", "fulfil", number, "--json"]).json()["status"], "fulfilled");
    assert_eq!(stockade(&server, &["order", "get", "ORD-00000000"]).code, Some(4));
    assert_eq!(stockade(&server, &["order", "place", "alice", "WIDGET-A"]).code, Some(2), "usage");
    let listed = stockade(&server, &["order", "list", "--customer", "alice"]);
    assert!(listed.out.contains(number) && listed.out.contains("WIDGET-A × 2"), "{}", listed.out);
    let cancelled = stockade(&server, &["order", "place", "bob", "WIDGET-B=1", "--wait", "20s", "--json"]).json();
    assert_eq!(cancelled["status"], "reserved");
    let cancelled =
        stockade(&server, &["order", "cancel", cancelled["id"].as_str().unwrap(), "--reason", "too late", "--json"]);
    assert_eq!(cancelled.json()["status"], "cancelled", "{}", cancelled.err);
    server.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn stock_and_messages_can_be_looked_at_and_put_right() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    assert_eq!(stockade(&server, &["stock", "set", "NEW/SKU", "5", "--json"]).json()[0]["on_hand"], 5);
    let adjusted = stockade(&server, &["stock", "adjust", "NEW/SKU", "-2", "--reason", "broken", "--json"]);
    assert_eq!(adjusted.json()[0]["on_hand"], 3, "{}", adjusted.err);
    assert_eq!(stockade(&server, &["stock", "adjust", "NEW/SKU", "-9", "--reason", "no"]).code, Some(5));
    let listed = stockade(&server, &["stock", "list"]);
    assert!(listed.out.contains("NEW/SKU") && listed.out.starts_with("SKU"), "{}", listed.out);
    let order = stockade(&server, &["order", "place", "alice", "WIDGET-A=1", "--wait", "20s", "--json"]).json();
    let about = ["outbox", "--aggregate-id", order["id"].as_str().unwrap(), "--json"];
    assert!(!stockade(&server, &about).json().as_array().unwrap().is_empty());
    let inbox = stockade(&server, &["inbox", "--consumer", "inventory", "--json"]).json();
    assert_eq!(inbox[0]["consumer"], "inventory");
    assert_eq!(stockade(&server, &["inbox", "--state", "odd"]).code, Some(2));
    let url = server.url.clone();
    server.terminate().await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
    let gone = command.args(["order", "list", "--url", &url]).output().unwrap();
    assert_eq!(gone.status.code(), Some(6), "no server");
}

#[test]
fn shells_can_complete_every_command() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let output = Command::new(env!("CARGO_BIN_EXE_stockade")).args(["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && script.contains("dead-letters"), "{shell}");
    }
}

#[test]
fn a_reader_may_leave_early_and_a_full_disk_is_a_failure() {
    for args in [&["openapi"][..], &["config"], &["config", "--json"], &["completions", "bash"], &[]] {
        let stockade = |stdout: Stdio| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
            let output = command.args(args).stdout(stdout).stderr(Stdio::piped()).spawn().unwrap();
            let output = output.wait_with_output().unwrap();
            (output.status.code(), String::from_utf8(output.stderr).unwrap())
        };
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(stockade(writer.into()), (Some(0), String::new()), "{args:?}");
        let (code, said) = stockade(File::options().write(true).open("/dev/full").unwrap().into());
        assert!(code == Some(1) && said.starts_with("stockade: cannot write to stdout"), "{args:?}: {code:?} {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn exit_codes_tell_what_to_do_next() {
    let db = TestDb::new(Engine::Sqlite).await;
    let secret = Secret::random();
    let entry = format!("admin:*:{}", secret.hash());
    let server = Server::start(&db, &["--api-keys", &entry, "--rate-limit", "1", "--rate-limit-burst", "1"]);
    let orders = |key: &str, url: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
        let output = command.args(["order", "list", "--url", url]).env("STOCKADE_API_KEY", key).output().unwrap();
        output.status.code()
    };
    assert_eq!(orders("stk_wrong", &server.url), Some(1), "a retry would not help");
    assert_eq!(orders(secret.reveal(), &server.url), Some(0), "the first request of a key is within its rate");
    // Requests that never stop use up every token of the key; a command between them is rate limited.
    let flooding = server.with_key(secret.reveal());
    let flood = async {
        loop {
            flooding.get("/v1/stock").send().await.unwrap();
        }
    };
    let limited = eventually("a command that is rate limited", async || {
        let (secret, url) = (secret.reveal().to_owned(), server.url.clone());
        let ran = tokio::task::spawn_blocking(move || {
            stockade_with(&[("STOCKADE_API_KEY", &secret)], &["order", "list", "--url", &url])
        });
        let ran = ran.await.unwrap();
        assert!([Some(0), Some(6)].contains(&ran.code), "{:?} {}", ran.code, ran.err);
        (ran.code == Some(6)).then_some(ran)
    });
    let limited = tokio::select! {
        () = flood => unreachable!("the flood never ends"),
        limited = limited => limited,
    };
    assert!(limited.err.contains("429 Too Many Requests"), "{}", limited.err);
    assert_eq!(orders(secret.reveal(), "ftp://127.0.0.1"), Some(2), "no address");
    let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
    assert_eq!(command.args(["config", "--", "--bogus"]).output().unwrap().status.code(), Some(2), "no setting");
    server.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn every_command_that_asks_a_server_takes_its_url_from_the_environment() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    for args in [&["queues"][..], &["healthcheck"], &["order", "list"], &["dead-letters", "list"], &["replay", "list"]]
    {
        let ran = stockade_with(&[("STOCKADE_URL", &server.url), ("STOCKADE_LISTEN", "127.0.0.1:1")], args);
        assert_eq!(ran.code, Some(0), "{args:?}: {}", ran.err);
    }
    server.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn an_id_is_never_a_path() {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    for args in [
        &["dead-letters", "show", "../orders?limit=1"][..],
        &["dead-letters", "redrive", "../dead-letters/x"],
        &["redrive", "show", "../orders?limit=1"],
        &["replay", "stop", "../redrives/x"],
        &["key", "revoke", "../keys/x"],
    ] {
        let ran = stockade(&server, args);
        assert_eq!((ran.code, ran.out.as_str()), (Some(4), ""), "{args:?}: {}", ran.err);
    }
    server.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_migration_tells_programs_what_it_came_to() {
    let db = TestDb::new(Engine::Sqlite).await;
    let migrated = stockade_with(&[], &["migrate", "--json", "--database-url", &db.url]);
    assert_eq!(migrated.code, Some(0), "{}", migrated.err);
    let migrated = migrated.json();
    assert_eq!((&migrated["database"], &migrated["migrations_missing"]), (&"sqlite".into(), &0.into()));
}

#[test]
fn an_audit_of_a_database_that_is_away_says_so() {
    let ran = stockade_with(&[], &["audit", "--database-url", "postgres://nobody@127.0.0.1:1/x"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(6), ""), "{}", ran.err);
    assert!(ran.err.contains("cannot connect to Postgres"), "{}", ran.err);
}

/// What speaks TLS before a server, as a proxy would: its URL, and the certificate it shows.
async fn tls_before(server: &Server) -> (String, String) {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![cert.der().clone()], key.into()).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let behind = server.url.strip_prefix("http://").unwrap().to_owned();
    #[expect(clippy::disallowed_methods, reason = "ends with the test, whose runtime it runs on")]
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // Whoever does not like the certificate hangs up.
            let Ok(mut front) = acceptor.accept(stream).await else { continue };
            let mut back = TcpStream::connect(&behind).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut front, &mut back).await;
        }
    });
    (url, cert.pem())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn commands_speak_tls_with_whom_the_machine_trusts() {
    let db = TestDb::new(Engine::Sqlite).await;
    let secret = Secret::random();
    let server = Server::start(&db, &["--api-keys", &format!("viewer:acme:{}", secret.hash())]);
    let (url, certificate) = tls_before(&server).await;
    let trusted = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(trusted.path(), certificate).unwrap();
    let envs = [("STOCKADE_API_KEY", secret.reveal()), ("SSL_CERT_FILE", trusted.path().to_str().unwrap())];
    let list = ["order", "list", "--json", "--url", &url];
    let asked = stockade_with(&envs, &list);
    assert_eq!((asked.code, asked.out.as_str()), (Some(0), "[]\n"), "{}", asked.err);
    let stranger = stockade_with(&envs[..1], &list);
    assert_eq!((stranger.code, stranger.out.as_str()), (Some(6), ""));
    assert!(stranger.err.contains("certificate"), "{}", stranger.err);
    server.terminate().await;
}
