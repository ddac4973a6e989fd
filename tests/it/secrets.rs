//! Secrets come from files if that is wanted, and get out by no panic and no failed start.

use std::process::{Command, Output};
use std::time::Duration;

use serde_json::value::RawValue;
use serde_json::{Value, json};
use stockade::app::Builder;
use stockade::config::Settings;
use stockade::lifecycle::{Lifecycle, Stage};
use stockade::orders::events::PLACED;
use stockade::telemetry::{self, LogFormat};
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::{Message, Outcome, Reaction};
use utoipa_axum::router::OpenApiRouter;

use crate::support::{App, Engine, TestDb, settings};

const CANARY: &str = "canary7Zq";
/// Set for the process that panics: the hook is the process's, and other tests have theirs.
const PANICS: &str = "STOCKADE_TEST_PANICS";

/// A handler, a reaction, a task and a thread panic with all they know, before there is a log and after.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn panics_tell_no_secret() {
    match std::env::var(PANICS).as_deref() {
        Ok("json") => return panic_everywhere(LogFormat::Json).await,
        Ok(_) => return panic_everywhere(LogFormat::Pretty).await,
        Err(_) => {}
    }
    for format in ["json", "pretty"] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "secrets::panics_tell_no_secret", "--nocapture"]);
        let output = command.env(PANICS, format).env("RUST_BACKTRACE", "0").output().unwrap();
        let said = both(&output);
        assert!(output.status.success(), "{said}");
        let leak = said.lines().find(|line| line.contains(CANARY));
        assert!(leak.is_none(), "{format}: {leak:?}");
        assert!(!said.contains(['\u{1b}', '\u{9b}']) && !said.contains("\nforged"), "{said}");
        let count = |text: &str| said.matches(text).count();
        // Four in the log; a letter, in the log and by the API; and one before there was a log.
        assert!(count("panicked: cannot log in with ***, *** or stk_***") >= 6, "{said}");
        assert_eq!(count("panicked at tests/it/secrets.rs"), 1, "{said}");
    }
}

/// What somebody may format into a panic.
fn everything(settings: &Settings) -> String {
    let (broker, token) = (settings.broker_url.to_string(), settings.metrics_token.as_deref().unwrap());
    let password = broker.split([':', '@']).nth(2).unwrap();
    format!("cannot log in with {password}, {token} or stk_{CANARY}\u{1b}[2J\u{9b}31m\nforged")
}

async fn panic_everywhere(format: LogFormat) {
    let token = format!("token-{CANARY}");
    let broker = format!("amqp://me:pass-{CANARY}@127.0.0.1:1/x");
    let said = everything(&Settings::from_flags(["--broker-url", &broker, "--metrics-token", &token]).unwrap());
    telemetry::report_panics();
    let panics = |said: &str| {
        let said = said.to_owned();
        std::thread::spawn(move || panic!("{said}")).join().unwrap_err();
    };
    panics(&said);
    telemetry::init("info", format).unwrap();
    panics(&said);

    let db = TestDb::new(Engine::Sqlite).await;
    let route = said.clone();
    let builder = Builder::new(settings(&db, &["--retry-max", "1", "--metrics-token", &token]))
        .with(Doomed(said.clone()))
        .with_routes(|_| {
            let doomed = async move || -> String { panic!("{route}") };
            OpenApiRouter::new().route("/v1/doomed", axum::routing::get(doomed))
        });
    let app = App::start_built(builder.demo(true)).await;
    let response = app.get("/v1/doomed").send().await.unwrap();
    assert_eq!(response.status(), 500);
    assert_eq!(response.json::<Value>().await.unwrap()["code"], "internal");
    app.place("alice", &[("WIDGET-A", 1)]).await;
    let letters = app.eventually_list("/v1/dead-letters?state=open", 1).await;
    assert_eq!(letters[0]["reason"], "handler-panic");
    println!("{}", letters[0]["error"].as_str().unwrap().escape_debug());
    app.stop().await;

    let lifecycle = Lifecycle::new().unwrap();
    lifecycle.spawn(Stage::Work, "doomed", |_| async move { panic!("{said}") });
    lifecycle.ending().await;
    assert!(!lifecycle.shut_down(Duration::from_secs(5)).await);
}

struct Doomed(String);

impl Reaction for Doomed {
    const NAME: &'static str = "doomed";
    const KEYS: &'static [&'static str] = &[PLACED];
    type Fact = Value;

    fn decode(_key: &str, payload: &RawValue) -> Result<Value, serde_json::Error> {
        serde_json::from_str(payload.get())
    }

    async fn react(&self, _tx: &mut Tx, _batch: &[&Message<Value>]) -> sqlx::Result<Vec<Outcome>> {
        panic!("{}", self.0)
    }
}

fn both(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn stockade(args: &[&str], envs: &[(&str, &str)]) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stockade"));
    let output = command.args(args).envs(envs.iter().copied()).current_dir(folder.path()).output().unwrap();
    (output.status.code(), both(&output))
}

/// People forget to escape what is in a password, or a part of the URL.
#[test]
fn no_shape_of_a_url_gives_its_password_away() {
    for url in [
        format!("me:{CANARY}?x@127.0.0.1:1/x"),
        format!("me:x?{CANARY}@127.0.0.1:1/x"),
        format!("me:{CANARY}/x@127.0.0.1:1/x"),
        format!("me:x/{CANARY}@127.0.0.1:1/x"),
        format!("me:{CANARY}#x@127.0.0.1:1/x"),
        format!("me:{CANARY}%zz@127.0.0.1:1/x"),
        format!("me:{CANARY}"),
        format!("me:x@127.0.0.1:1/x?password={CANARY}"),
        format!("me:{CANARY}@127.0.0.1:port/x"),
        format!("me:{CANARY}@[127.0.0.1/x"),
    ] {
        let (postgres, amqp) = (format!("postgres://{url}"), format!("amqp://{url}"));
        let (smtp, http) = (format!("smtp://{url}"), format!("http://{url}"));
        let mail = ["--smtp-from", "a@b.example", "--smtp-to", "a@b.example"];
        for (flags, env) in [
            (&[][..], ("STOCKADE_DATABASE_URL", &postgres)),
            (&[], ("STOCKADE_BROKER_URL", &amqp)),
            (&[&["--notify-channel", "smtp"][..], &mail].concat(), ("STOCKADE_SMTP_URL", &smtp)),
            (&["--notify-channel", "webhook", "--webhook-secret", "0123456789abcdef"], ("STOCKADE_WEBHOOK_URL", &http)),
        ] {
            // An address that is taken by nobody and cannot be listened on: a server that would start does not.
            let serve = [&["serve", "--listen", "192.0.2.1:1", "--insecure-no-auth"], flags].concat();
            let (code, said) = stockade(&serve, &[(env.0, env.1)]);
            assert!(code == Some(1) && !said.contains(CANARY), "{} {}: {code:?} {said}", env.0, env.1);
            let (_, said) = stockade(&["config"], &[(env.0, env.1)]);
            assert!(said.contains(env.0) && !said.contains(CANARY), "{} {}: {said}", env.0, env.1);
        }
    }
}

#[test]
fn a_secret_may_come_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let url = write("url", format!("postgres://me:{CANARY}@db.example/x\r\n").as_bytes());
    let shown = |args: &[&str], envs: &[(&str, &str)]| {
        let (code, said) = stockade(&[&["config", "--json", "--"], args].concat(), envs);
        assert!(code == Some(0) && !said.contains(CANARY), "{code:?} {said}");
        let settings: Value = serde_json::from_str(&said).unwrap();
        let found = settings.as_array().unwrap().iter().find(|row| row["name"] == "STOCKADE_DATABASE_URL").unwrap();
        (found["value"].clone(), found["origin"].clone())
    };
    let held = (json!("postgres://me:***@db.example/x"), json!("file"));
    assert_eq!(shown(&[], &[("STOCKADE_DATABASE_URL_FILE", &url)]), held);
    assert_eq!(shown(&["--database-url-file", &url], &[]), held);
    // A flag is over the environment, whichever of the two names the file.
    assert_eq!(shown(&["--database-url-file", &url], &[("STOCKADE_DATABASE_URL", "sqlite:x.db")]), held);
    let flag = (json!("sqlite:x.db"), json!("flag"));
    assert_eq!(shown(&["--database-url", "sqlite:x.db"], &[("STOCKADE_DATABASE_URL_FILE", &url)]), flag);

    let (empty, binary) = (write("empty", b"\n"), write("binary", &[b"canary7Zq", &[0xff, 0xfe][..]].concat()));
    let missing = folder.path().join("missing").to_str().unwrap().to_owned();
    let serve = |envs: &[(&str, &str)]| stockade(&["serve", "--listen", "127.0.0.1:0"], envs);
    for (envs, hint) in [
        (
            &[("METRICS_TOKEN", CANARY), ("METRICS_TOKEN_FILE", &url)][..],
            "METRICS_TOKEN and METRICS_TOKEN_FILE are both given",
        ),
        (&[("STOCKADE_BROKER_URL_FILE", &missing)], "STOCKADE_BROKER_URL_FILE: cannot read"),
        (&[("STOCKADE_SMTP_URL_FILE", folder.path().to_str().unwrap())], "STOCKADE_SMTP_URL_FILE: cannot read"),
        (&[("STOCKADE_WEBHOOK_SECRET_FILE", &binary)], "STOCKADE_WEBHOOK_SECRET_FILE: cannot read"),
        (&[("STOCKADE_WEBHOOK_URL_FILE", &empty)], "STOCKADE_WEBHOOK_URL_FILE:"),
    ] {
        let (code, said) = serve(envs);
        assert!(code == Some(2) && said.contains(hint) && !said.contains(CANARY), "{envs:?}: {code:?} {said}");
        assert_eq!(stockade(&["config"], envs).0, Some(2), "{envs:?}");
    }
    let (code, said) = serve(&[("METRICS_TOKEN", "")]);
    assert!(code == Some(1) && said.contains("METRICS_TOKEN is empty"), "{code:?} {said}");
}
