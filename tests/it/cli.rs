//! The first minutes with the binary: what it prints, what it creates, what it refuses.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};

use crate::support::Api;

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
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
