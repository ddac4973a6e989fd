//! Redrives and replays: a frozen set at a rate, each message once, and nothing done again.

use std::sync::Arc;
use std::time::Duration;

use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::dead_letters;
use stockade_kernel::messaging::inbox::State;
use stockade_kernel::messaging::jobs::{self, Events, Job, Kind, Letters, Order, Progress, Runner};
use stockade_kernel::messaging::transport::{Binding, Topology};
use stockade_kernel::messaging::{Event, Reaction};
use uuid::Uuid;

use crate::support::kernel::{KEY, Probe, QUEUE, Rig, event, many, told};
use crate::support::{Engine, TestDb, each_database, each_database_on_rabbit, eventually};

/// Longer than a batch of any rate lasts.
const SECOND: Duration = Duration::from_secs(1);

fn runner(rig: &Rig) -> Runner {
    let probe = Binding { consumer: Probe::NAME, queue: rig.queue.clone(), keys: Probe::KEYS };
    Runner::new(rig.kernel.clone(), Arc::new(Topology { queues: vec![probe] }))
}

fn order(rate: i64) -> Order {
    Order { group_id: None, who: "alice".into(), why: Some("mended".into()), rate }
}

async fn redrive(rig: &Rig, letters: Letters, rate: i64) -> Uuid {
    let mut tx = rig.db.begin().await.unwrap();
    let id = jobs::start_redrive(&mut tx, &letters, &order(rate)).await.unwrap();
    tx.commit().await.unwrap();
    id
}

/// Starts a replay of everything a rig has told.
async fn replay(rig: &Rig, consumer: Option<&str>) -> Uuid {
    let events = everything(consumer);
    let total = rig.number("SELECT count(*) FROM messaging_outbox WHERE kind = 'event'").await;
    let mut tx = rig.db.begin().await.unwrap();
    let id = jobs::start_replay(&mut tx, &events, total, &order(1000)).await.unwrap();
    tx.commit().await.unwrap();
    id
}

fn everything(consumer: Option<&str>) -> Events {
    Events {
        aggregate_type: None,
        from: Timestamp::from_millis(0),
        to: Timestamp::from_millis(2_000_000_000_000),
        consumer: consumer.map(str::to_owned),
    }
}

async fn job(rig: &Rig, kind: Kind, id: Uuid) -> Job {
    let mut tx = rig.db.read().await.unwrap();
    jobs::find(&mut tx, kind, None, id).await.unwrap().expect("the job is there")
}

/// Runs until no job is running, letting time pass between the batches.
async fn finish(rig: &Rig, runner: &Runner) {
    while rig.number("SELECT count(*) FROM messaging_jobs WHERE state = 'running'").await > 0 {
        runner.try_once().await.unwrap();
        rig.advance(SECOND).await;
    }
}

/// Files a letter for each of `count` events that are rejected.
async fn rejected(rig: &Rig, count: usize) -> Vec<Event> {
    let events = many("reject", count);
    for event in &events {
        rig.deliver(event, 1).await;
    }
    rig.settle().await;
    assert_eq!(rig.letters().await.iter().filter(|letter| letter.state == "open").count(), count);
    events
}

async fn a_redrive_sends_the_letters_that_were_open_when_it_was_asked_for(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = rejected(&rig, 7).await;
    let id = redrive(&rig, Letters::default(), 10).await;
    let late = told("reject");
    rig.deliver(&late, 1).await;
    rig.settle().await;
    rig.probe.heal();
    let runner = runner(&rig);
    runner.try_once().await.unwrap();
    let started = job(&rig, Kind::Redrive, id).await;
    assert_eq!(
        (started.state.as_str(), started.total, started.progress.sent),
        ("running", 7, 2),
        "a fifth of a second's"
    );
    assert_eq!((started.who.as_str(), started.why.as_deref()), ("alice", Some("mended")));
    finish(&rig, &runner).await;
    let done = job(&rig, Kind::Redrive, id).await;
    assert_eq!((done.state.as_str(), done.progress), ("done", Progress { sent: 7, ..Progress::default() }));
    assert!(done.finished_at.is_some());
    rig.settle().await;
    for event in &events {
        assert_eq!(rig.effects(event).await, 1);
    }
    assert_eq!(rig.effects(&late).await, 0, "filed after the click");
    let open: Vec<_> = rig.letters().await.into_iter().filter(|letter| letter.state == "open").collect();
    assert_eq!(open.len(), 1);
    let mut tx = rig.db.read().await.unwrap();
    let query = dead_letters::Query { job_id: Some(id), limit: 100, ..dead_letters::Query::default() };
    assert_eq!(dead_letters::list(&mut tx, query).await.unwrap().len(), 7, "each says what sent it");
}

async fn what_fails_again_is_not_sent_again_by_the_same_redrive(db: TestDb) {
    let rig = Rig::new(&db).await;
    rejected(&rig, 3).await;
    let id = redrive(&rig, Letters::default(), 10).await;
    let runner = runner(&rig);
    for _ in 0..4 {
        runner.try_once().await.unwrap();
        rig.settle().await;
        rig.advance(SECOND).await;
    }
    let done = job(&rig, Kind::Redrive, id).await;
    assert_eq!((done.state.as_str(), done.progress.sent), ("done", 3));
    assert_eq!(rig.letters().await.iter().filter(|letter| letter.state == "open").count(), 3, "new letters");
}

async fn a_batch_is_not_due_before_its_time(db: TestDb) {
    let rig = Rig::new(&db).await;
    rejected(&rig, 5).await;
    redrive(&rig, Letters::default(), 1).await;
    let runner = runner(&rig);
    let due_at = match rig.is_postgres() {
        true => "SELECT CAST(extract(epoch FROM next_at) * 1000 AS bigint) FROM messaging_jobs",
        false => "SELECT next_at FROM messaging_jobs",
    };
    let first_due_at = rig.number(due_at).await;
    runner.try_once().await.unwrap();
    assert!(rig.number(due_at).await >= first_due_at + 1000, "one letter a second");
    if !rig.is_postgres() {
        // The clock is in our hand, so nothing can have become due by itself.
        let wait = runner.try_once().await.unwrap();
        assert_eq!(wait, SECOND);
        assert_eq!(rig.number("SELECT sent FROM messaging_jobs").await, 1);
    }
    rig.advance(SECOND).await;
    runner.try_once().await.unwrap();
    assert_eq!(rig.number("SELECT sent FROM messaging_jobs").await, 2);
}

async fn two_operators_redrive_no_letter_twice(db: TestDb) {
    let rig = Rig::new(&db).await;
    rejected(&rig, 40).await;
    let (one, other) = (redrive(&rig, Letters::default(), 1000).await, redrive(&rig, Letters::default(), 1000).await);
    // And two instances at that.
    let (left, right) = (runner(&rig), runner(&rig));
    tokio::join!(finish(&rig, &left), finish(&rig, &right));
    let (one, other) = (job(&rig, Kind::Redrive, one).await.progress, job(&rig, Kind::Redrive, other).await.progress);
    assert_eq!((one.sent + other.sent, one.skipped + other.skipped), (40, 40));
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox WHERE kind = 'redrive'").await, 40);
    assert_eq!(rig.number("SELECT count(DISTINCT event_id) FROM messaging_outbox").await, 40);
}

async fn a_redrive_narrowed_by_a_filter_leaves_the_rest(db: TestDb) {
    let rig = Rig::new(&db).await;
    rejected(&rig, 2).await;
    rig.deliver_raw(b"no json", None, serde_json::Map::new(), 1).await;
    rig.settle().await;
    let newest = rig.letters().await.pop().unwrap();
    for (letters, total) in [
        (Letters { reason: Some("not-json".into()), ..Letters::default() }, 1),
        (Letters { event_type: Some(KEY.into()), ..Letters::default() }, 3),
        (Letters { ids: vec![newest.id], ..Letters::default() }, 1),
        (Letters { consumer: Some("nobody".into()), ..Letters::default() }, 0),
        (Letters { queue: Some(QUEUE.into()), ..Letters::default() }, 3),
        (Letters { from: Some(newest.created_at.plus(SECOND)), ..Letters::default() }, 0),
        (Letters { to: Some(newest.created_at.plus(SECOND)), ..Letters::default() }, 3),
    ] {
        let mut tx = rig.db.begin().await.unwrap();
        let seen = jobs::preview(&mut tx, &letters).await.unwrap();
        let id = jobs::start_redrive(&mut tx, &letters, &order(10)).await.unwrap();
        let frozen = jobs::find(&mut tx, Kind::Redrive, None, id).await.unwrap().unwrap();
        assert_eq!((seen.total, frozen.total), (total, total), "{letters:?}");
    }
}

async fn what_was_applied_already_is_reported_and_not_repeated(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = rejected(&rig, 3).await;
    rig.execute("UPDATE messaging_inbox SET state = 'dead'").await;
    rig.execute(&format!(
        "UPDATE messaging_inbox SET state = 'processed' WHERE aggregate_id = '{}'",
        events[1].aggregate_id
    ))
    .await;
    let mut tx = rig.db.read().await.unwrap();
    let seen = jobs::preview(&mut tx, &Letters::default()).await.unwrap();
    drop(tx);
    assert_eq!((seen.total, seen.already_applied, seen.refused), (3, 1, 0));
    assert_eq!(seen.already_applied_sample[0].message_id, Some(events[1].event_id.to_string()));
    assert_eq!((seen.sample.len(), seen.groups.len(), seen.groups[0].count), (3, 1, 3));
    let id = redrive(&rig, Letters::default(), 100).await;
    finish(&rig, &runner(&rig)).await;
    let done = job(&rig, Kind::Redrive, id).await;
    assert_eq!(done.progress, Progress { sent: 2, already_applied: 1, ..Progress::default() });
}

async fn letters_that_are_too_old_are_not_sent_in_bulk(db: TestDb) {
    let rig = Rig::new(&db).await;
    rejected(&rig, 2).await;
    rig.execute("UPDATE messaging_dead_letters SET reason = 'too-old'").await;
    let id = redrive(&rig, Letters::default(), 100).await;
    finish(&rig, &runner(&rig)).await;
    assert_eq!(job(&rig, Kind::Redrive, id).await.progress, Progress { refused: 2, ..Progress::default() });
    assert!(rig.letters().await.iter().all(|letter| letter.state == "open"), "they wait for somebody to look");
}

async fn a_stopped_redrive_leaves_the_rest_open(db: TestDb) {
    let rig = Rig::new(&db).await;
    rejected(&rig, 4).await;
    let id = redrive(&rig, Letters::default(), 5).await;
    let runner = runner(&rig);
    runner.try_once().await.unwrap();
    let mut tx = rig.db.begin().await.unwrap();
    assert!(jobs::stop(&mut tx, id).await.unwrap());
    tx.commit().await.unwrap();
    rig.advance(SECOND).await;
    runner.try_once().await.unwrap();
    let stopped = job(&rig, Kind::Redrive, id).await;
    assert_eq!((stopped.state.as_str(), stopped.progress.sent), ("stopped", 1));
    assert_eq!(rig.letters().await.iter().filter(|letter| letter.state == "open").count(), 3);
    assert_eq!(rig.number("SELECT count(*) FROM messaging_job_letters").await, 0);
    let mut tx = rig.db.begin().await.unwrap();
    assert!(!jobs::stop(&mut tx, id).await.unwrap(), "once");
}

async fn a_replay_changes_nothing_that_was_done(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = many("note", 12);
    rig.tell(&events).await;
    rig.settle().await;
    until_ready(&rig, 12).await;
    // Some of them are in the archive by now.
    archive_some(&rig).await;
    let id = replay(&rig, Some("probe")).await;
    let shadow = rig.depth(&rig.second_queue).await.ready;
    finish(&rig, &runner(&rig)).await;
    rig.settle().await;
    let done = job(&rig, Kind::Replay, id).await;
    assert_eq!((done.state.as_str(), done.progress.sent), ("done", 12), "the archive is read too");
    for event in &events {
        assert_eq!(rig.effects(event).await, 1);
        assert_eq!(rig.inbox(event).await.unwrap().duplicates, 1);
    }
    assert_eq!(rig.depth(&rig.second_queue).await.ready, shadow, "to that consumer only");
    replay(&rig, None).await;
    finish(&rig, &runner(&rig)).await;
    rig.settle().await;
    until_ready(&rig, shadow + 12).await; // to every queue
    assert_eq!(rig.inbox(&events[0]).await.unwrap().duplicates, 2, "replays are not replayed");
}

/// Waits until the second queue holds that many: the counts of a broker lag.
async fn until_ready(rig: &Rig, count: i64) {
    let ready = async || (rig.depth(&rig.second_queue).await.ready == count).then_some(());
    eventually("the messages in the second queue", ready).await;
}

async fn archive_some(rig: &Rig) {
    rig.execute(
        "INSERT INTO messaging_outbox_archive (id, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type,
             headers, attempts, created_at, published_at, correlation_id, causation_id, traceparent, body)
         SELECT id, group_id, subsidiary_id, aggregate_type, aggregate_id, event_type, headers, attempts, created_at,
             published_at, correlation_id, causation_id, traceparent, body FROM messaging_outbox ORDER BY id LIMIT 5",
    )
    .await;
    rig.execute("DELETE FROM messaging_queue").await;
    rig.execute("DELETE FROM messaging_outbox WHERE id IN (SELECT id FROM messaging_outbox_archive)").await;
}

async fn a_replay_does_what_was_never_done(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = many("note", 3);
    rig.tell(&events).await;
    while rig.relay.try_once().await.unwrap() > 0 {}
    rig.execute("DELETE FROM messaging_queue").await; // a broker that lost its disk
    rig.settle().await;
    assert_eq!(rig.effects(&events[0]).await, 0);
    replay(&rig, Some("probe")).await;
    finish(&rig, &runner(&rig)).await;
    rig.settle().await;
    for event in &events {
        assert_eq!(rig.effects(event).await, 1);
    }
}

async fn a_replay_is_narrowed_by_type_time_and_what_the_consumer_takes(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.tell(&many("note", 2)).await;
    rig.tell(&[event("other.said", serde_json::json!({}))]).await;
    while rig.relay.try_once().await.unwrap() > 0 {}
    rig.tell(&[told("note")]).await; // not published yet, so there is nothing to send again
    let topology =
        Topology { queues: vec![Binding { consumer: Probe::NAME, queue: QUEUE.to_owned(), keys: Probe::KEYS }] };
    let all = everything(None);
    let now = rig.db.clock().now();
    for (events, expected) in [
        (all.clone(), vec![("other.said", 1), (KEY, 2)]),
        (everything(Some("probe")), vec![(KEY, 2)]),
        (Events { aggregate_type: Some("other".into()), ..all.clone() }, vec![("other.said", 1)]),
        (Events { from: now.plus(SECOND * 60), ..all.clone() }, vec![]),
        (Events { to: Timestamp::from_millis(1), ..all.clone() }, vec![]),
    ] {
        let mut tx = rig.db.read().await.unwrap();
        let counted = jobs::count_events(&mut tx, &events, &topology).await.unwrap().unwrap();
        let counted: Vec<(&str, i64)> = counted.iter().map(|of| (of.event_type.as_str(), of.count)).collect();
        assert_eq!(counted, expected, "{events:?}");
    }
    let mut tx = rig.db.read().await.unwrap();
    assert_eq!(jobs::count_events(&mut tx, &everything(Some("nobody")), &topology).await.unwrap(), None);
}

async fn a_replay_to_a_consumer_that_is_gone_fails_with_the_reason(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.tell(&many("note", 2)).await;
    rig.settle().await;
    let id = replay(&rig, Some("retired")).await;
    finish(&rig, &runner(&rig)).await;
    let failed = job(&rig, Kind::Replay, id).await;
    assert_eq!(failed.state, "failed");
    assert!(failed.last_error.unwrap().contains("retired"));
}

async fn an_event_that_is_dead_stays_dead_through_a_replay(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("reject");
    rig.tell(std::slice::from_ref(&event)).await;
    rig.settle().await;
    replay(&rig, Some("probe")).await;
    finish(&rig, &runner(&rig)).await;
    rig.settle().await;
    assert_eq!(rig.inbox(&event).await.unwrap().state, State::Dead.as_str());
    assert_eq!(rig.letters().await.len(), 1, "counted onto the open letter");
}

async fn a_replay_opens_no_letter_about_what_was_discarded(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("reject");
    rig.tell(std::slice::from_ref(&event)).await;
    rig.settle().await;
    let letter = rig.letters().await[0].id;
    let mut tx = rig.db.begin().await.unwrap();
    assert!(dead_letters::discard(&mut tx, letter).await.is_ok());
    tx.commit().await.unwrap();
    replay(&rig, Some("probe")).await;
    finish(&rig, &runner(&rig)).await;
    rig.settle().await;
    let letters = rig.letters().await;
    assert_eq!((letters.len(), letters[0].state.as_str()), (1, "discarded"));
    assert_eq!(rig.number("SELECT CAST(count AS bigint) FROM messaging_dead_letters").await, 2);
    // One that is restored, sent back and rejected again is a new letter.
    let mut tx = rig.db.begin().await.unwrap();
    assert!(dead_letters::restore(&mut tx, letter).await.is_ok());
    tx.commit().await.unwrap();
    rig.redrive(letter).await;
    rig.settle().await;
    assert_eq!(rig.number("SELECT count(*) FROM messaging_dead_letters WHERE state = 'open'").await, 1);
    assert_eq!(rig.letters().await.len(), 2);
}

each_database!(
    a_replay_opens_no_letter_about_what_was_discarded,
    a_redrive_sends_the_letters_that_were_open_when_it_was_asked_for,
    what_fails_again_is_not_sent_again_by_the_same_redrive,
    a_batch_is_not_due_before_its_time,
    two_operators_redrive_no_letter_twice,
    a_redrive_narrowed_by_a_filter_leaves_the_rest,
    what_was_applied_already_is_reported_and_not_repeated,
    letters_that_are_too_old_are_not_sent_in_bulk,
    a_stopped_redrive_leaves_the_rest_open,
    a_replay_changes_nothing_that_was_done,
    a_replay_does_what_was_never_done,
    a_replay_is_narrowed_by_type_time_and_what_the_consumer_takes,
    a_replay_to_a_consumer_that_is_gone_fails_with_the_reason,
    an_event_that_is_dead_stays_dead_through_a_replay,
);

each_database_on_rabbit!(
    a_redrive_sends_the_letters_that_were_open_when_it_was_asked_for,
    a_replay_changes_nothing_that_was_done,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_redrive_and_its_progress_share_a_transaction() {
    let db = TestDb::new(Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    rejected(&rig, 4).await;
    redrive(&rig, Letters::default(), 1000).await;
    runner(&rig).try_once().await.unwrap();
    let letters = "SELECT xmin::text AS x FROM messaging_dead_letters WHERE state = 'redriven'";
    assert_written_at_once(&rig, "redrive", letters, 9).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_replay_and_its_progress_share_a_transaction() {
    let db = TestDb::new(Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    rig.tell(&many("note", 4)).await;
    rig.settle().await;
    replay(&rig, None).await;
    runner(&rig).try_once().await.unwrap();
    assert_written_at_once(&rig, "replay", "SELECT NULL WHERE false", 5).await;
}

/// One transaction wrote the job, what it has sent and `others`: a process that died between two would send a batch again,
/// or not at all. Postgres keeps the transaction that wrote a row in `xmin`.
async fn assert_written_at_once(rig: &Rig, kind: &str, others: &str, count: i64) {
    let rows = format!(
        "SELECT xmin::text AS x FROM messaging_jobs WHERE kind = '{kind}'
         UNION ALL SELECT xmin::text FROM messaging_outbox WHERE kind = '{kind}' UNION ALL {others}"
    );
    assert_eq!(rig.number(&format!("SELECT COUNT(*) FROM ({rows}) written")).await, count);
    assert_eq!(rig.number(&format!("SELECT COUNT(DISTINCT x) FROM ({rows}) written")).await, 1);
}
