//! The server against its API document: `scripts/contract` sends requests with schemathesis, good and bad, to a server
//! without keys on the embedded combination and to one with keys on Postgres and RabbitMQ.

use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{CONNECTIONS_MAX, Engine, TestDb, Wire, eventually_within};

/// The first run also installs schemathesis. The script has shorter limits for its own steps.
const LIMIT: Duration = Duration::from_secs(540);

/// On SIGTERM the script ends the servers and schemathesis; SIGKILL would leave them running.
struct Script(Child);

impl Drop for Script {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
            let _ = self.0.wait();
        }
    }
}

/// Prints the output of the script if the test fails, also at the deadline.
struct Output(File);

impl Drop for Output {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut bytes = Vec::new();
            let _ = self.0.rewind().and_then(|()| self.0.read_to_end(&mut bytes));
            println!("{}", String::from_utf8_lossy(&bytes));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn every_answer_is_one_that_the_document_describes() {
    let db = TestDb::on_rabbit(Engine::Postgres).await;
    let Wire::Rabbit { url, prefix } = &db.wire else { unreachable!("on_rabbit") };
    // Declared before the script, so dropped after it: the output is complete by then.
    let output = Output(tempfile::tempfile().unwrap());
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/contract"));
    command
        .arg(env!("CARGO_BIN_EXE_stockade"))
        .env("CONTRACT_DATABASE_URL", &db.url)
        .env("CONTRACT_BROKER_URL", url)
        .env("CONTRACT_QUEUE_PREFIX", prefix)
        .env("STOCKADE_DB_MAX_CONNECTIONS", CONNECTIONS_MAX.to_string())
        .stdin(Stdio::null())
        .stdout(output.0.try_clone().unwrap())
        .stderr(output.0.try_clone().unwrap());
    let script = std::cell::RefCell::new(Script(command.spawn().unwrap()));
    let ended = async || script.borrow_mut().0.try_wait().unwrap();
    let status = eventually_within(LIMIT, Duration::from_millis(200), "the end of scripts/contract", ended).await;
    assert!(status.success(), "scripts/contract: {status}; its output follows");

    // An unreachable broker fails no request, so look whether the server with keys used this database and this broker.
    let events = db.count("SELECT COUNT(*) FROM messaging_inbox").await;
    assert!(events > 0, "no consumer of the server with keys has processed an event in {}", db.url);
    let broker = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let queue = format!("{prefix}.inventory");
    let channel = broker.create_channel().await.unwrap();
    channel.queue_declare(queue.into(), passive, FieldTable::default()).await.expect("the queue is on the broker");
    broker.close(200, "".into()).await.unwrap();
}
