//! The consumer loop: every event has its effect once, whatever its neighbours, its handler or the database do.

use std::time::Duration;

use serde_json::{Map, Value, json};
use stockade_kernel::clock::{Clock, mint_id};
use stockade_kernel::messaging::Event;
use stockade_kernel::messaging::consumer::Consumer;
use stockade_kernel::messaging::dead_letters::Redriven;
use stockade_kernel::messaging::health::LoopState;
use stockade_kernel::messaging::pause::{self, Pauses};
use stockade_kernel::messaging::transport::Subscription;
use tokio_util::sync::CancellationToken;

use crate::support::kernel::{AGES, ATTEMPTS_MAX, EVENT_BYTES_MAX, LEASE, QUEUE, QUIET, Rig, many, told, told_with};
use crate::support::{
    DEADLINE, Engine, TestDb, Wire, each_database, each_database_in_process, each_database_on_rabbit, eventually, never,
};

async fn a_duplicate_has_no_second_effect_and_is_counted(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = many("note", 5);
    for (event, copies) in events.iter().zip(1..) {
        rig.deliver(event, copies).await;
    }
    assert_eq!(rig.consume().await, 15);
    let batches = rig.probe.batches();
    for event in &events {
        rig.deliver(event, 2).await;
    }
    rig.settle().await;
    for (event, copies) in events.iter().zip(1..) {
        assert_eq!(rig.effects(event).await, 1);
        let row = rig.inbox(event).await.unwrap();
        assert_eq!((row.state.as_str(), row.attempts, row.duplicates), ("processed", 1, copies - 1 + 2));
    }
    assert_eq!(rig.probe.batches(), batches, "a batch of nothing but duplicates never reaches the handler");
}

async fn two_instances_racing_over_copies_apply_each_event_once(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = many("note", 150);
    for _ in 0..3 {
        rig.deliver_all(&events).await;
    }
    let second = Consumer::new(rig.kernel.clone(), rig.probe.clone());
    let work = async |consumer: &Consumer<_>, mut subscription: Subscription| {
        loop {
            subscription.ready(QUIET).await;
            if rig.try_once_as(consumer, &mut subscription).await.unwrap() == 0 {
                return subscription.close().await;
            }
        }
    };
    // The second instance is another process: nothing is delivered to it in memory.
    let (first, other) = (rig.consumer_subscription().await, rig.subscribe(&rig.queue).await);
    tokio::join!(work(&rig.consumer, first), work(&second, other));
    assert_each_once(&rig, &events).await;
    assert_eq!(rig.number("SELECT sum(duplicates) FROM messaging_inbox").await, 300);
    assert_eq!(rig.depth(&rig.queue).await.ready, 0);
    if rig.is_in_process() {
        assert_eq!(rig.depth(&rig.queue).await.in_flight, Some(0), "the deferred deletes are done");
    }
}

async fn each_event_of_a_batch_has_its_own_outcome(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = [told("note"), told("retry"), told("reject"), told("note")];
    rig.deliver_all(&events).await;
    assert_eq!(rig.consume().await, 4);
    let mut seen = Vec::new();
    for event in &events {
        let row = rig.inbox(event).await.unwrap();
        seen.push((row.state, row.attempts, row.last_error, rig.effects(event).await));
    }
    let expected = [
        ("processed", None, 1),
        ("retrying", Some("retry on purpose"), 0),
        ("dead", Some("reject on purpose"), 0),
        ("processed", None, 1),
    ];
    let expected: Vec<_> = expected.map(|(s, e, n)| (s.to_owned(), 1, e.map(str::to_owned), n)).into();
    assert_eq!(seen, expected);
    assert_eq!(rig.probe.batches().concat().len(), 4, "an outcome rolls nothing back");
}

async fn a_batch_that_fails_as_a_whole_is_halved_down_to_the_culprit(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut events = many("note", 100);
    events[37] = told("violate");
    rig.deliver_all(&events).await;
    assert_eq!(rig.consume().await, 100);
    let culprit = events.remove(37);
    assert_each_once(&rig, &events).await;
    let row = rig.inbox(&culprit).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts), ("retrying", 1));
    assert!(row.last_error.unwrap().starts_with("database: "));
    // Halving a hundred takes at most two batches a level over seven levels.
    assert!(rig.probe.batches().len() <= 15, "{}", rig.probe.batches().len());
    for _ in 0..ATTEMPTS_MAX {
        rig.advance(AGES).await;
        rig.settle().await;
    }
    let letters = rig.letters().await;
    assert_eq!(letters.len(), 1);
    assert_eq!((letters[0].reason.as_str(), letters[0].attempts), ("retries-exhausted", ATTEMPTS_MAX));
    assert_eq!(letters[0].message_id, Some(culprit.event_id.to_string()));
    assert_eq!(rig.effects(&culprit).await, 0);
    assert_each_once(&rig, &events).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn an_event_whose_statement_times_out_again_and_again_stops_no_other_and_becomes_a_dead_letter() {
    let db = TestDb::new(Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    let mut events = many("note", 10);
    events[3] = told("timeout");
    rig.deliver_all(&events).await;
    assert_eq!(rig.consume().await, 10);
    let slow = events.remove(3);
    assert_each_once(&rig, &events).await;
    let row = rig.inbox(&slow).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts), ("retrying", 1));
    for _ in 0..ATTEMPTS_MAX {
        rig.advance(AGES).await;
        rig.settle().await;
    }
    let letters = rig.letters().await;
    assert_eq!((letters.len(), letters[0].reason.as_str()), (1, "retries-exhausted"));
    assert!(letters[0].error.contains("statement timeout"), "{}", letters[0].error);
}

/// SQLite has one writer, who loses to nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_batch_that_loses_to_another_transaction_is_run_again_whole_and_counts_no_attempt() {
    for (code, wire) in [("40P01", Wire::Table), ("40001", Wire::Table), ("40001", Wire::InProcess)] {
        let db = TestDb::new(Engine::Postgres).await.over(wire);
        let rig = Rig::new(&db).await;
        rig.lose_twice("probe_effects", code).await;
        let events = many("note", 4);
        rig.deliver_all(&events).await;
        assert_eq!(rig.consume().await, 4);
        assert_each_once(&rig, &events).await;
        let sizes: Vec<usize> = rig.probe.batches().iter().map(Vec::len).collect();
        assert_eq!(sizes, [4, 4, 4], "{code}: twice lost, never halved");
        assert_eq!(rig.number("SELECT sum(attempts) FROM messaging_inbox").await, 4, "{code}");
        assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox WHERE kind = 'retry'").await, 0, "{code}");
    }
}

async fn a_panic_is_retried_and_ends_as_handler_panic(db: TestDb) {
    let rig = Rig::new(&db).await;
    let neighbours = many("note", 3);
    // A NUL in what the handler says: no text column of Postgres takes one, and the books must still be kept.
    let culprit = told_with(json!({ "does": "panic", "text": "boom \u{0} on purpose" }));
    rig.deliver_all(neighbours.iter().chain([&culprit])).await;
    for attempt in 1..=ATTEMPTS_MAX {
        rig.settle().await;
        let row = rig.inbox(&culprit).await.unwrap();
        let state = if attempt < ATTEMPTS_MAX { "retrying" } else { "dead" };
        assert_eq!((row.state.as_str(), row.attempts), (state, attempt));
        assert!(row.last_error.unwrap().contains("boom"));
        rig.advance(AGES).await;
    }
    assert_each_once(&rig, &neighbours).await;
    let letters = rig.letters().await;
    assert_eq!((letters.len(), letters[0].reason.as_str()), (1, "handler-panic"));
    assert!(letters[0].error.contains("the handler panicked: boom"));
    let retries = &rig.db.metrics().consumer_retries;
    let counted = |reason: &'static str| retries.get(&[("consumer", "probe".into()), ("reason", reason.into())]);
    assert!(counted("handler-panic").is_some_and(|count| count.get() > 0), "told from other failures");
    assert!(counted("failed-for-now").is_none());
}

/// A process that died between two would lose the retry, or run the event twice. Postgres keeps the transaction that wrote a
/// row in `xmin`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_retry_and_its_inbox_row_share_a_transaction() {
    let db = TestDb::new(Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    rig.deliver(&told("retry"), 1).await;
    assert_eq!(rig.consume().await, 1);
    let written = "SELECT COUNT(*) FROM messaging_inbox i JOIN messaging_outbox o ON o.event_id = i.event_id
         WHERE i.state = 'retrying' AND o.kind = 'retry' AND i.xmin = o.xmin";
    assert_eq!(rig.number(written).await, 1);
}

async fn retries_go_through_the_outbox_with_backoff_and_keep_id_and_correlation(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("retry");
    let mut body = event.to_body();
    if rig.is_in_process() {
        rig.deliver(&event, 1).await; // the outbox writes the body
    } else {
        body.push(b'\n');
        rig.deliver_raw(&body, Some(&event.event_id.to_string()), Map::new(), 1).await;
    }
    let waiting = "SELECT count(*) FROM messaging_outbox WHERE kind = 'retry' AND status = 'pending' AND target = ";
    let waiting = format!("{waiting}'{}'", rig.queue);
    // 5 s doubled for each attempt, spread between the half and the whole of it.
    for (attempt, longest) in [(1, 10), (2, 20)] {
        assert_eq!(rig.consume().await, 1);
        assert_eq!(
            (rig.number(&waiting).await, rig.depth(&rig.queue).await.ready),
            (1, 0),
            "written, then acknowledged"
        );
        assert_eq!(rig.inbox(&event).await.unwrap().attempts, attempt);
        rig.advance(Duration::from_secs(longest / 2 - 1)).await;
        assert_eq!(rig.relay.try_once().await.unwrap(), 0, "not before half the delay");
        rig.advance(Duration::from_secs(longest / 2 + 1)).await;
        assert_eq!(rig.relay.try_once().await.unwrap(), 1, "but after the whole of it");
        let mut peek = rig.subscribe(&rig.queue).await;
        let delivery = rig.take(&mut peek, 1).await.remove(0);
        assert_eq!(delivery.body, body);
        assert_eq!(delivery.message_id, Some(event.event_id.to_string()));
        assert_eq!(delivery.correlation_id.as_deref(), Some(event.correlation_id.as_str()));
        assert_eq!(delivery.headers["x-attempts"], attempt);
        peek.release(&[delivery.tag]).await.unwrap();
    }
    rig.probe.heal();
    rig.settle().await;
    let row = rig.inbox(&event).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts, row.duplicates), ("processed", 3, 0));
    assert_eq!((rig.effects(&event).await, row.correlation_id), (1, event.correlation_id));
}

async fn poison_is_filed_verbatim_with_its_reason(db: TestDb) {
    let rig = Rig::new(&db).await;
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut value: Value = serde_json::from_slice(&told("note").to_body()).unwrap();
        change(&mut value);
        serde_json::to_vec(&value).unwrap()
    };
    let poison: Vec<(&str, Vec<u8>)> = vec![
        ("too-large", vec![b' '; EVENT_BYTES_MAX + 1]),
        ("not-utf8", b"\xff\xfe\x00\x80".to_vec()),
        ("not-json", Vec::new()),
        ("not-json", b"\x00".to_vec()),
        ("not-json", b"{\"event_id\":".to_vec()),
        ("too-deep", "[".repeat(65).into_bytes()),
        ("no-id", b"{}".to_vec()),
        ("no-id", changed(&|v| v["event_id"] = Value::Null)),
        ("schema", b"[1]".to_vec()),
        ("schema", changed(&|v| v["event_id"] = "\u{0}".into())),
        ("schema", changed(&|v| v["group_id"] = "a\u{0}b".into())),
        ("schema", changed(&|v| v["payload"] = json!({ "does": "\u{0}" }))),
        ("schema", changed(&|v| v["payload"] = Value::Null)),
        ("unknown-type", changed(&|v| v["event_type"] = "vanished".into())),
    ];
    let good = told("note");
    rig.deliver(&good, 1).await;
    for (_, body) in &poison {
        rig.deliver_raw(body, None, Map::new(), 1).await;
    }
    let headers = json!({ "x-event-id": mint_id().to_string() }).as_object().unwrap().clone();
    rig.deliver_raw(&told("note").to_body(), Some("nonsense"), Map::new(), 1).await;
    rig.deliver_raw(&told("note").to_body(), None, headers, 1).await;
    rig.settle().await;
    let letters = rig.letters().await;
    let mut filed = Vec::new();
    for letter in &letters {
        assert_eq!(
            (letter.queue.as_str(), letter.consumer.as_str(), letter.state.as_str()),
            (rig.queue.as_str(), "probe", "open")
        );
        assert!(!letter.error.is_empty(), "{}", letter.reason);
        assert_eq!(letter.x_death[0]["reason"], "rejected");
        filed.push((letter.reason.clone(), rig.letter(letter.id).await.body));
    }
    let (labelled, plain): (Vec<_>, Vec<_>) = filed.into_iter().partition(|(reason, _)| reason == "id-mismatch");
    assert_eq!(labelled.len(), 2);
    let mut expected: Vec<_> = poison.into_iter().map(|(reason, body)| (reason.to_owned(), body)).collect();
    let mut plain = plain;
    plain.sort();
    expected.sort();
    assert!(plain == expected, "{:?}", plain.iter().map(|(reason, _)| reason).collect::<Vec<_>>());
    assert_eq!(rig.effects(&good).await, 1, "the good one among them is none the worse");
    assert_eq!(rig.number("SELECT count(*) FROM messaging_inbox").await, 1);
}

/// Somebody's hand, or a disk's: rows as we never write them. Each is a letter, and what comes behind it is dealt with.
async fn a_row_that_makes_no_sense_is_a_letter_and_holds_nobody_up(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (now, bytes, no_row) = match rig.is_postgres() {
        true => ("now()", "'garbage'", format!("'{}'", mint_id())),
        false => ("1", "CAST('garbage' AS BLOB)", "4711".to_owned()),
    };
    let row = |columns: &str, values: &str| {
        format!("INSERT INTO messaging_queue (queue, enqueued_at, {columns}) VALUES ('{QUEUE}', {now}, {values})")
    };
    let mut rows = vec![
        row("body", bytes),
        row("outbox_ref", &no_row),
        row("body, deliveries, routing_key, headers", &format!("{bytes}, 2147483647, 'a.b', '{{}}'")),
        row("body, headers, x_death", &format!("{bytes}, 'no JSON', 'no JSON'")),
    ];
    if !rig.is_postgres() {
        let odd = "CAST(x'ff' AS TEXT)";
        for deliveries in ["1099511627776", "-1099511627776"] {
            rows.push(row("body, deliveries", &format!("{bytes}, {deliveries}")));
        }
        rows.push(row(
            "body, message_id, routing_key, correlation_id, headers, x_death",
            &format!("{bytes}, {odd}, {odd}, {odd}, {odd}, {odd}"),
        ));
        for refs in ["no JSON", "[\"a\"]", "[99999999999999999999]"] {
            rows.push(format!(
                "INSERT INTO messaging_bundles (queue, outbox_refs, enqueued_at, lock_token, lease_until)
                 VALUES ('{QUEUE}', '{refs}', 1, x'00', 0)"
            ));
        }
    }
    for row in &rows {
        rig.execute(row).await;
    }
    assert!(rig.depth(QUEUE).await.ready > 0, "they can be counted");
    // A letter on its way back whose headers somebody has spoilt.
    rig.deliver_raw(b"poison", None, Map::new(), 1).await;
    rig.settle().await;
    assert_eq!(rig.redrive(rig.letters().await.last().unwrap().id).await, Redriven::Sent);
    rig.execute("UPDATE messaging_outbox SET headers = 'no JSON' WHERE kind = 'redrive'").await;
    let good = told("note");
    rig.deliver(&good, 1).await;
    rig.settle().await;
    assert_eq!(rig.effects(&good).await, 1);
    let letters = rig.letters().await;
    assert_eq!(letters.len(), rows.len() + 2, "{letters:?}");
    assert!(letters.iter().all(|letter| ["not-json", "schema"].contains(&letter.reason.as_str())), "{letters:?}");
    for table in ["messaging_queue", "messaging_bundles"] {
        assert_eq!(rig.number(&format!("SELECT count(*) FROM {table}")).await, 0, "{table}");
    }
}

async fn from_the_third_delivery_on_a_message_runs_alone(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (suspects, fresh) = (many("note", 2), many("note", 3));
    rig.deliver_all(&suspects).await;
    for _ in 0..2 {
        rig.take_and_vanish(2).await;
    }
    rig.deliver_all(&fresh).await;
    assert_eq!(rig.consume().await, 5);
    let batches = rig.probe.batches();
    assert_eq!(batches.concat().len(), 5);
    for event in &suspects {
        assert!(batches.contains(&vec![event.event_id]), "it ran alone");
    }
    if !rig.is_on_rabbit() {
        assert_eq!(batches[0].len(), 3, "the others ran together");
    }
    for event in suspects.iter().chain(&fresh) {
        assert_eq!(rig.effects(event).await, 1);
        let row = rig.inbox(event).await.unwrap();
        assert_eq!((row.state.as_str(), row.attempts), ("processed", 1));
    }
    assert_eq!(rig.number("SELECT sum(unfinished_runs) FROM messaging_inbox").await, 0);
}

/// SQLite has one writer, so that there is no such moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn what_another_instance_is_just_committing_does_not_run_again_alone() {
    let db = TestDb::new(Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    let event = told("hold");
    rig.deliver(&event, 1).await;
    for _ in 0..2 {
        rig.take_and_vanish(1).await;
    }
    // The suspect is kept back while the first instance takes a copy that nobody suspects.
    let mut keeping = rig.subscribe(&rig.queue).await;
    let suspect = rig.take(&mut keeping, 1).await.remove(0);
    rig.deliver(&event, 1).await;
    let (mut one, mut other) = (rig.subscribe(&rig.queue).await, rig.subscribe(&rig.queue).await);
    let second = Consumer::new(rig.kernel.clone(), rig.probe.clone());
    let (first, second) = tokio::join!(rig.consumer.try_once(&mut one), async {
        rig.probe.until_holding().await;
        keeping.release(&[suspect.tag]).await.unwrap();
        let (second, ()) = tokio::join!(second.try_once(&mut other), async {
            let waiting = "SELECT count(*) FROM pg_stat_activity
                           WHERE datname = current_database() AND wait_event_type = 'Lock'";
            eventually("a wait for the first", || async { (rig.number(waiting).await > 0).then_some(()) }).await;
            rig.probe.heal(); // a second run would be seen, not held
            rig.probe.let_go();
        });
        second
    });
    assert_eq!((first.unwrap(), second.unwrap()), (1, 1));
    let row = rig.inbox(&event).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts, row.duplicates), ("processed", 1, 1));
    assert_eq!(rig.effects(&event).await, 1);
}

async fn copies_of_processed_events_are_dismissed_together_however_often_they_came(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = many("note", 20);
    rig.deliver_all(&events).await;
    rig.settle().await;
    rig.deliver_all(&events).await;
    for _ in 0..2 {
        rig.take_and_vanish(20).await;
    }
    assert_eq!(rig.consume().await, 20);
    assert_each_once(&rig, &events).await;
    assert_eq!(rig.number("SELECT sum(duplicates) FROM messaging_inbox").await, 20);
    if rig.is_postgres() {
        // The transaction that wrote each row last.
        assert_eq!(rig.number("SELECT count(DISTINCT xmin::text) FROM messaging_inbox").await, 1);
    }
}

async fn a_message_that_kills_its_consumer_again_and_again_is_rejected(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (killer, bystander) = (told("hang"), told("note"));
    rig.deliver(&killer, 1).await;
    rig.deliver(&bystander, 1).await;
    // Twice in company, then three times alone, each run recorded before it starts.
    for _ in 0..5 {
        die_mid_batch(&rig).await;
        assert!(rig.letters().await.is_empty());
        rig.advance(LEASE + Duration::from_secs(1)).await;
    }
    assert_eq!(rig.number("SELECT CAST(max(unfinished_runs) AS bigint) FROM messaging_inbox").await, 3);
    rig.settle().await;
    let letters = rig.letters().await;
    assert_eq!((letters.len(), letters[0].reason.as_str()), (1, "process-killer"));
    assert_eq!(letters[0].message_id, Some(killer.event_id.to_string()));
    assert_eq!((rig.effects(&killer).await, rig.effects(&bystander).await), (0, 1));
    // Once its handler is mended it goes through.
    rig.probe.heal();
    rig.redrive(letters[0].id).await;
    rig.settle().await;
    assert_eq!(rig.effects(&killer).await, 1);
}

async fn a_database_that_is_away_makes_no_process_killer(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("away");
    rig.deliver(&event, 1).await;
    for _ in 0..2 {
        rig.take_and_vanish(1).await;
    }
    // Alone from here on. The database fails under it far more often than a killer may kill.
    for _ in 0..6 {
        let mut subscription = rig.consumer_subscription().await;
        rig.ready(&mut subscription).await;
        assert!(rig.try_once(&mut subscription).await.is_err());
    }
    rig.probe.heal();
    rig.settle().await;
    assert_eq!((rig.effects(&event).await, rig.letters().await.len()), (1, 0));
    let row = rig.inbox(&event).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts), ("processed", 1));
}

async fn a_database_that_is_away_is_waited_for_and_counts_nothing(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = [told("note"), told("away")];
    if !rig.is_in_process() {
        rig.deliver_all(&events).await;
    }
    let stop = CancellationToken::new();
    let started = tokio::time::Instant::now();
    tokio::join!(rig.run(stop.clone()), async {
        if rig.is_in_process() {
            rig.until_in_process().await;
            rig.deliver_all(&events).await;
        }
        eventually("the fourth try", || async { (rig.probe.batches().len() >= 4).then_some(()) }).await;
        // Pauses of 100, 200 and 400 ms lie between four tries; a hot loop would be there at once.
        assert!(started.elapsed() >= Duration::from_millis(700), "{:?}", started.elapsed());
        let status = eventually("trouble in health", || async {
            let status = rig.kernel.health.statuses()["probe"].clone();
            (status.state == LoopState::Troubled).then_some(status)
        });
        assert!(status.await.last_error.is_some());
        // In process, the loop may have taken the first event before the second was there.
        let rows = if rig.is_in_process() { "state <> 'processed'" } else { "true" };
        assert_eq!(rig.number(&format!("SELECT count(*) FROM messaging_inbox WHERE {rows}")).await, 0);
        rig.probe.heal();
        eventually("both done", || async { (rig.effects(&events[1]).await == 1).then_some(()) }).await;
        stop.cancel();
    });
    for event in &events {
        let row = rig.inbox(event).await.unwrap();
        assert_eq!((row.attempts, row.duplicates, rig.effects(event).await), (1, 0, 1));
    }
}

async fn a_closed_database_loses_no_message(db: TestDb) {
    let event = told("note");
    {
        let rig = Rig::new(&db).await;
        rig.deliver(&event, 1).await;
        rig.db.close().await;
        let mut subscription = rig.consumer_subscription().await;
        rig.ready(&mut subscription).await;
        assert!(rig.try_once(&mut subscription).await.is_err());
        assert!(rig.relay.try_once().await.is_err());
    }
    let rig = Rig::new(&db).await;
    if rig.is_in_process() {
        rig.advance(LEASE + Duration::from_secs(1)).await; // delivered to a process that is gone
    }
    let mut subscription = rig.subscribe(&rig.queue).await;
    let taken = rig.take(&mut subscription, 1).await;
    // RabbitMQ counts a message that was given back as delivered, and an in-process delivery counts as one.
    assert_eq!(taken[0].deliveries, if rig.is_on_rabbit() || rig.is_in_process() { 2 } else { 1 });
    subscription.release(&[taken[0].tag]).await.unwrap();
    subscription.close().await;
    rig.settle().await;
    assert_eq!(rig.effects(&event).await, 1);
}

async fn a_pause_survives_a_restart_and_the_loop_rests_and_resumes(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (before, meanwhile) = (told("note"), told("note"));
    let stop = CancellationToken::new();
    tokio::join!(rig.run(stop.clone()), async {
        rig.until_in_process().await;
        rig.deliver(&before, 1).await;
        eventually("it runs", || async { (rig.effects(&before).await == 1).then_some(()) }).await;
        set_pause(&rig, true).await;
        rig.kernel.health.until_paused("probe", true).await;
        stop.cancel();
    });
    // A new process reads the row and never begins.
    let pauses = Pauses::load(rig.db.clone(), rig.is_in_process()).await.unwrap();
    assert!(pauses.is_paused("probe") && !pauses.is_paused("relay"));
    let rig = rig.restarted(pauses);
    let stop = CancellationToken::new();
    rig.deliver(&meanwhile, 1).await;
    tokio::join!(rig.run(stop.clone()), async {
        rig.kernel.health.until_paused("probe", true).await;
        // A loop that ignores the pause would take the message at its first poll.
        never("an effect of a paused consumer", rig.kernel.tuning.poll * 5, async || {
            (rig.effects(&meanwhile).await > 0).then_some(())
        })
        .await;
        assert_eq!(rig.depth(&rig.queue).await.ready, 1);
        set_pause(&rig, false).await;
        eventually("it resumes", || async { (rig.effects(&meanwhile).await == 1).then_some(()) }).await;
        stop.cancel();
    });
}

async fn pauses_are_followed_by_every_instance(db: TestDb) {
    // The contract allows 2 s, two polls of the pauses; the third is the margin for a loaded machine.
    const WITHIN: Duration = Duration::from_secs(3);
    let rig = Rig::new(&db).await;
    let mut gate = rig.kernel.pauses.gate("probe");
    let work = async {
        for paused in [true, false] {
            let mut tx = rig.db.begin().await.unwrap();
            pause::set(&mut tx, "probe", paused).await.unwrap();
            pause::set(&mut tx, "probe", paused).await.unwrap(); // twice is no error
            tx.commit().await.unwrap();
            tokio::time::timeout(crate::support::DEADLINE, gate.until(paused)).await.expect("the gate follows");
        }
    };
    tokio::select! { () = rig.kernel.pauses.clone().follow() => {} () = work => {} }
    assert!(!rig.kernel.pauses.is_paused("probe"));
    if rig.is_postgres() {
        // Another instance, which gets no notification, follows by polling.
        let other = Pauses::load(db.open(Clock::System).await, false).await.unwrap();
        let mut gate = other.gate("probe");
        let work = async {
            let mut took = Vec::new();
            for paused in [true, false, true] {
                set_pause(&rig, paused).await;
                let began = tokio::time::Instant::now();
                tokio::time::timeout(DEADLINE, gate.until(paused)).await.expect("the other instance follows");
                took.push(began.elapsed());
            }
            took
        };
        let took = tokio::select! { () = other.clone().follow() => unreachable!(), took = work => took };
        // The fastest: a loaded machine is slow now and then, a poll that is too rare is slow each time.
        assert!(took.iter().min().unwrap() <= &WITHIN, "{took:?}");
    }
}

async fn a_soft_stop_finishes_the_batch_in_hand_and_burns_no_attempt(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (held, later) = (told("hold"), told("note"));
    let stop = CancellationToken::new();
    tokio::join!(rig.run(stop.clone()), async {
        rig.until_in_process().await;
        rig.deliver(&held, 1).await;
        rig.probe.until_holding().await;
        stop.cancel();
        rig.probe.let_go();
    });
    assert_eq!(rig.kernel.health.statuses()["probe"].state, LoopState::Stopped);
    let row = rig.inbox(&held).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts, rig.effects(&held).await), ("processed", 1, 1));
    let signed_off = async || (rig.depth(&rig.queue).await.consumers == Some(0)).then_some(());
    eventually("its signing off", signed_off).await;
    let mut next = rig.subscribe(&rig.queue).await;
    rig.take_nothing(&mut next).await; // acknowledged before it stopped
    next.close().await;
    eventually("its signing off", signed_off).await;
    // What comes after the stop is left for the next, untouched.
    rig.deliver(&later, 1).await;
    rig.run(stop).await;
    let mut subscription = rig.subscribe(&rig.queue).await;
    let taken = rig.take(&mut subscription, 1).await;
    assert_eq!(taken[0].deliveries, 1);
    subscription.release(&[taken[0].tag]).await.unwrap();
    subscription.close().await;
    rig.settle().await;
    assert_eq!(rig.effects(&later).await, 1);
}

async fn handling_is_told_from_the_taking_to_the_end(db: TestDb) {
    const LONG: Duration = Duration::from_millis(100);
    let rig = Rig::new(&db).await;
    let (quick, slow, beside) = (told("note"), told("hold"), many("note", 99));
    rig.deliver(&quick, 1).await;
    rig.settle().await;
    let row = rig.inbox(&quick).await.unwrap();
    assert!(row.finished_at.is_some_and(|end| end >= row.started_at), "{row:?}");
    rig.deliver_all(beside.iter().chain([&slow])).await;
    let mut subscription = rig.consumer_subscription().await;
    let ((), took) = tokio::join!(
        async {
            rig.probe.until_holding().await;
            let began = rig.db.clock().now();
            rig.db.clock().advance(LONG); // on SQLite; on Postgres the clock is the system's
            let passed = async || (rig.db.clock().now().since(began) >= LONG).then_some(());
            eventually("the clock to advance", passed).await;
            rig.probe.let_go();
        },
        rig.try_once(&mut subscription)
    );
    assert_eq!(took.unwrap(), 100);
    for event in beside.iter().chain([&slow]) {
        let row = rig.inbox(event).await.unwrap();
        assert!(row.finished_at.unwrap().since(row.started_at) >= LONG, "they end together: {row:?}");
    }
}

async fn a_batch_that_runs_longer_than_its_lease_stays_its_consumers(db: TestDb) {
    let lease = Duration::from_secs(6);
    let rig = Rig::with_lease(&db, lease).await;
    let event = told("hold");
    // With in-process delivery these share a batch row.
    let beside = many("note", if rig.is_in_process() { 9 } else { 0 });
    rig.deliver_all(beside.iter().chain([&event])).await;
    let mut subscription = rig.consumer_subscription().await;
    let (consumed, ()) = tokio::join!(rig.try_once(&mut subscription), async {
        rig.probe.until_holding().await;
        // On SQLite the batch has the only writer, so nobody can take anything while it runs.
        if rig.is_postgres() {
            let table = if rig.is_in_process() { "messaging_bundles" } else { "messaging_queue" };
            let renewed = &format!("SELECT count(*) FROM {table} WHERE lease_until > now() + interval '4 s'");
            rig.advance(lease / 2).await;
            assert_eq!(rig.number(renewed).await, 0);
            eventually("a renewal", || async { (rig.number(renewed).await == 1).then_some(()) }).await;
            rig.advance(lease / 2).await;
            assert_eq!(rig.consume().await, 0, "the lease it began under is over, the renewed one is not");
        }
        rig.probe.let_go();
    });
    assert_eq!(consumed.unwrap(), 1 + beside.len());
    if rig.is_in_process() {
        subscription.close().await; // which makes the deferred deletes
    }
    rig.settle().await;
    assert_each_once(&rig, &beside).await;
    let row = rig.inbox(&event).await.unwrap();
    assert_eq!((row.attempts, row.duplicates, rig.effects(&event).await), (1, 0, 1));
}

async fn the_messages_of_a_consumer_that_died_are_taken_over_after_its_lease(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut events = many("note", 9);
    events.push(told("hang"));
    rig.deliver_all(&events).await;
    die_mid_batch(&rig).await;
    rig.probe.heal();
    if !rig.is_on_rabbit() {
        rig.settle().await;
        for event in &events {
            assert_eq!(rig.effects(event).await, 0, "rolled back, and held until the lease ends");
        }
    }
    rig.advance(LEASE + Duration::from_secs(1)).await;
    rig.settle().await;
    assert_each_once(&rig, &events).await;
    assert_eq!(rig.number("SELECT sum(duplicates) FROM messaging_inbox").await, 0);
}

/// Runs the consumer until its handler hangs, and drops it there.
async fn die_mid_batch(rig: &Rig) {
    {
        let mut subscription = rig.consumer_subscription().await;
        let work = async {
            loop {
                rig.ready(&mut subscription).await;
                assert!(rig.try_once(&mut subscription).await.unwrap() > 0, "nothing hangs");
            }
        };
        tokio::select! {
            () = work => {}
            () = rig.probe.until_holding() => {}
        }
    }
    rig.reopen().await;
}

async fn set_pause(rig: &Rig, paused: bool) {
    let mut tx = rig.db.begin().await.unwrap();
    pause::set(&mut tx, "probe", paused).await.unwrap();
    tx.commit().await.unwrap();
    rig.kernel.pauses.reread().await;
}

async fn assert_each_once(rig: &Rig, events: &[Event]) {
    for event in events {
        assert_eq!(rig.effects(event).await, 1);
        assert_eq!(rig.inbox(event).await.unwrap().state, "processed");
    }
}

each_database!(
    a_duplicate_has_no_second_effect_and_is_counted,
    two_instances_racing_over_copies_apply_each_event_once,
    each_event_of_a_batch_has_its_own_outcome,
    a_batch_that_fails_as_a_whole_is_halved_down_to_the_culprit,
    a_panic_is_retried_and_ends_as_handler_panic,
    retries_go_through_the_outbox_with_backoff_and_keep_id_and_correlation,
    poison_is_filed_verbatim_with_its_reason,
    a_row_that_makes_no_sense_is_a_letter_and_holds_nobody_up,
    from_the_third_delivery_on_a_message_runs_alone,
    copies_of_processed_events_are_dismissed_together_however_often_they_came,
    a_message_that_kills_its_consumer_again_and_again_is_rejected,
    a_database_that_is_away_makes_no_process_killer,
    a_database_that_is_away_is_waited_for_and_counts_nothing,
    a_closed_database_loses_no_message,
    a_pause_survives_a_restart_and_the_loop_rests_and_resumes,
    pauses_are_followed_by_every_instance,
    a_soft_stop_finishes_the_batch_in_hand_and_burns_no_attempt,
    a_batch_that_runs_longer_than_its_lease_stays_its_consumers,
    handling_is_told_from_the_taking_to_the_end,
    the_messages_of_a_consumer_that_died_are_taken_over_after_its_lease,
);

// All of the above, but for rows that only a claim can find (garbage) and for pauses, which deliver nothing.
each_database_in_process!(
    a_duplicate_has_no_second_effect_and_is_counted,
    two_instances_racing_over_copies_apply_each_event_once,
    each_event_of_a_batch_has_its_own_outcome,
    a_batch_that_fails_as_a_whole_is_halved_down_to_the_culprit,
    a_panic_is_retried_and_ends_as_handler_panic,
    retries_go_through_the_outbox_with_backoff_and_keep_id_and_correlation,
    poison_is_filed_verbatim_with_its_reason,
    from_the_third_delivery_on_a_message_runs_alone,
    copies_of_processed_events_are_dismissed_together_however_often_they_came,
    a_message_that_kills_its_consumer_again_and_again_is_rejected,
    a_database_that_is_away_makes_no_process_killer,
    a_database_that_is_away_is_waited_for_and_counts_nothing,
    a_closed_database_loses_no_message,
    a_pause_survives_a_restart_and_the_loop_rests_and_resumes,
    a_soft_stop_finishes_the_batch_in_hand_and_burns_no_attempt,
    a_batch_that_runs_longer_than_its_lease_stays_its_consumers,
    handling_is_told_from_the_taking_to_the_end,
    the_messages_of_a_consumer_that_died_are_taken_over_after_its_lease,
);

// What depends on how a transport delivers, counts and takes back.
each_database_on_rabbit!(
    a_duplicate_has_no_second_effect_and_is_counted,
    two_instances_racing_over_copies_apply_each_event_once,
    each_event_of_a_batch_has_its_own_outcome,
    retries_go_through_the_outbox_with_backoff_and_keep_id_and_correlation,
    poison_is_filed_verbatim_with_its_reason,
    from_the_third_delivery_on_a_message_runs_alone,
    a_message_that_kills_its_consumer_again_and_again_is_rejected,
    a_database_that_is_away_makes_no_process_killer,
    a_closed_database_loses_no_message,
    a_pause_survives_a_restart_and_the_loop_rests_and_resumes,
    a_soft_stop_finishes_the_batch_in_hand_and_burns_no_attempt,
    the_messages_of_a_consumer_that_died_are_taken_over_after_its_lease,
);
