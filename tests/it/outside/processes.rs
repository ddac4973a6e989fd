//! Workers that are stopped, or die, in the middle of a call.

use serde_json::json;

use super::{by_webhook, inbox_row, until_letter, until_notice, until_sent};
use crate::support::{
    Engine, Reply, TestDb, Webhooks, each_database, eventually, under_way, until_finished_and_audited, witness,
};

const FENCED: &str = "stockade_fenced_writes_total";

each_database!(
    a_call_that_died_is_unknown_and_made_again,
    a_call_that_died_is_unknown_and_left_alone_if_told_so,
    what_kills_the_process_at_every_call_is_given_up_on,
);

mod zombies {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
    async fn on_the_embedded_queue() {
        a_worker_that_was_stopped_writes_nothing_late(TestDb::new(Engine::Postgres).await).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
    async fn on_rabbitmq() {
        a_worker_that_was_stopped_writes_nothing_late(TestDb::on_rabbit(Engine::Postgres).await).await;
    }
}

async fn a_worker_that_was_stopped_writes_nothing_late(db: TestDb) {
    let receiver = Webhooks::open([Reply::Hold]).await;
    // A broker soon misses a server that is stopped.
    let flags = by_webhook(&receiver, &["--amqp-heartbeat", "1s"]);
    let first = witness::start(&db, &flags);
    first.until_connected().await;
    first.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    receiver.until_posted(1).await;
    // A lock that the stopped server held would block the other.
    let call = if db.is_on_rabbit() { 1 } else { 2 };
    eventually("nothing under way but the call", async || (under_way(&db).await == call).then_some(())).await;
    first.signal("STOP");
    db.end_leases().await;
    let second = witness::start(&db, &flags);
    second.until_connected().await;
    // The second takes over what the first seems to have left, and its call is answered at once.
    let (notice, row) = until_sent(&second).await;
    assert_eq!((&row["attempts"], &row["fenced"]), (&json!(2), &json!(0)));
    let posted = receiver.until_posted(2).await;
    assert_eq!(posted[0].key(), posted[1].key(), "the receiver can tell that it is the same");
    let metrics = second.counter(FENCED).await;

    first.signal("CONT");
    receiver.let_go();
    let row = eventually("a late write that was turned away", async || {
        let row = inbox_row(&second, &notice).await;
        (row["fenced"] == 1).then_some(row)
    })
    .await;
    assert_eq!((&row["state"], &row["attempts"], &row["last_error"]), (&json!("processed"), &json!(2), &json!(null)));
    eventually("the count of it", async || (first.counter(FENCED).await > 0).then_some(())).await;
    assert_eq!(second.counter(FENCED).await, metrics, "it is the first's write that came too late");
    assert_eq!(until_notice(&second, "sent").await, notice, "the second's word stands");
    receiver.until_posted(2).await;
    assert_sound(&db).await;
}

/// All work is finished, with one effect each.
async fn assert_sound(db: &TestDb) {
    until_finished_and_audited(db).await;
    witness::check(db).await;
}

async fn a_call_that_died_is_unknown_and_made_again(db: TestDb) {
    let receiver = Webhooks::open([Reply::Hold]).await;
    let server = witness::start(&db, &by_webhook(&receiver, &[]));
    server.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    receiver.until_posted(1).await;
    server.kill();
    db.end_leases_of_dead_servers().await;
    let server = witness::start(&db, &by_webhook(&receiver, &[]));
    let (_, row) = until_sent(&server).await;
    assert_eq!(row["attempts"], 2);
    let posted = receiver.until_posted(2).await;
    assert_eq!(posted[0].key(), posted[1].key());
    assert_sound(&db).await;
}

async fn a_call_that_died_is_unknown_and_left_alone_if_told_so(db: TestDb) {
    let receiver = Webhooks::open([Reply::Hold]).await;
    let flags = ["--notify-repeat-unknown", "false"];
    let server = witness::start(&db, &by_webhook(&receiver, &flags));
    server.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    receiver.until_posted(1).await;
    server.kill();
    db.end_leases_of_dead_servers().await;
    let server = witness::start(&db, &by_webhook(&receiver, &flags));
    let letter = until_letter(&server).await;
    assert_eq!((&letter["reason"], &letter["attempts"]), (&json!("outcome-unknown"), &json!(1)));
    let notice = until_notice(&server, "unknown").await;
    assert_eq!(inbox_row(&server, &notice).await["state"], "dead");
    receiver.until_posted(1).await;
    assert_sound(&db).await;
}

async fn what_kills_the_process_at_every_call_is_given_up_on(db: TestDb) {
    let receiver = Webhooks::open([]).await;
    let flags = by_webhook(&receiver, &[]);
    let mut server = witness::start(&db, &flags);
    server.tell("/v1/consumers/notifications/pause", &json!({})).await;
    server.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    for _ in 0..3 {
        let point = json!({ "point": "outside.before_call", "consumer": "notifications" });
        server.tell("/v1/lab/crash", &point).await;
        // It may die before it has answered.
        let _ = server.post("/v1/consumers/notifications/resume", &json!({})).send().await;
        server.ended().await;
        db.end_leases_of_dead_servers().await;
        // The next server must not make the call before the crash point is set.
        let pause = "INSERT INTO messaging_pauses (name, paused_at) SELECT 'notifications', MAX(created_at) FROM messaging_outbox";
        db.execute(pause, &[]).await;
        server = witness::start(&db, &flags);
    }
    server.tell("/v1/consumers/notifications/resume", &json!({})).await;
    assert_eq!(until_letter(&server).await["reason"], "process-killer");
    until_notice(&server, "unknown").await;
    assert_eq!(receiver.posted().len(), 0, "it never came to a call");
    assert_sound(&db).await;
}
