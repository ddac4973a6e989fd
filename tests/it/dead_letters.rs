//! The dead-letter office and the way back: any bytes are filed once, and a redrive repeats nothing.

use bytes::Bytes;
use serde_json::{Map, Value, json};
use stockade_kernel::clock::mint_id;
use stockade_kernel::messaging::dead_letters::{self, NewLetter, Redriven};
use stockade_kernel::messaging::health::LoopState;
use stockade_kernel::messaging::inbox::State;
use stockade_kernel::messaging::office::Office;
use stockade_kernel::messaging::pause;
use stockade_kernel::messaging::transport::{RawMessage, dlq_of};
use tokio_util::sync::CancellationToken;

use crate::support::kernel::{KEY, QUEUE, Rig, told, told_with};
use crate::support::{Engine, TestDb, each_database, each_database_on_rabbit, eventually};

async fn filing_the_same_delivery_again_changes_nothing(db: TestDb) {
    let rig = Rig::new(&db).await;
    for _ in 0..3 {
        file(&rig, &letter("event", "delivery 1")).await;
    }
    assert_eq!(counts(&rig).await, (1, 1));
    file(&rig, &letter("event", "delivery 2")).await;
    assert_eq!(counts(&rig).await, (1, 2), "another copy of an event that is dead counts onto its open letter");
    file(&rig, &letter("other", "delivery 3")).await;
    assert_eq!(counts(&rig).await, (2, 3));
}

async fn an_office_that_crashed_before_its_ack_files_nothing_twice(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.deliver(&told("reject"), 1).await;
    rig.deliver_raw(b"no json", None, Map::new(), 1).await;
    rig.consume().await;
    // What the acknowledgement takes away is put back, as if the crash had come before it.
    rig.execute("CREATE TABLE kept AS SELECT * FROM messaging_queue").await;
    for _ in 0..3 {
        assert_eq!(rig.file().await, 2);
        assert_eq!(rig.number("SELECT count(*) FROM messaging_queue").await, 0);
        let overriding = if rig.is_postgres() { "OVERRIDING SYSTEM VALUE" } else { "" };
        rig.execute(&format!("INSERT INTO messaging_queue {overriding} SELECT * FROM kept")).await;
    }
    assert_eq!(counts(&rig).await, (2, 2));
}

async fn a_late_copy_of_a_redriven_letter_does_not_stop_the_office(db: TestDb) {
    let rig = Rig::new(&db).await;
    file(&rig, &letter("event", "delivery 1")).await;
    let first = rig.letters().await[0].id;
    assert_eq!(rig.redrive(first).await, Redriven::Sent);
    file(&rig, &letter("event", "delivery 2")).await;
    // The first delivery was filed but not acknowledged, and comes again after all this.
    file(&rig, &letter("event", "delivery 1")).await;
    assert_eq!(counts(&rig).await, (2, 2), "it was filed before and is not news");
    let states: Vec<String> = rig.letters().await.into_iter().map(|letter| letter.state).collect();
    assert_eq!(states, ["redriven", "open"]);
}

async fn what_the_broker_gave_up_on_is_filed_as_such(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    let message = RawMessage {
        queue: dlq_of(&rig.queue),
        routing_key: KEY.into(),
        message_id: None,
        correlation_id: None,
        headers: Map::new(),
        body: event.to_body().into(),
    };
    rig.kernel.transport.publish_raw(&message, 1).await.unwrap();
    assert_eq!(rig.file().await, 1);
    let letter = rig.letters().await.remove(0);
    assert_eq!((letter.reason.as_str(), letter.queue.as_str()), ("broker-limit", rig.queue.as_str()));
    assert_eq!(letter.message_id, Some(event.event_id.to_string()));
    assert_eq!(letter.correlation_id, Some(event.correlation_id.clone()));
    assert_eq!(letter.event_type.as_deref(), Some(KEY));
    rig.redrive(letter.id).await;
    rig.settle().await;
    assert_eq!(rig.effects(&event).await, 1);
}

async fn a_copy_of_what_was_done_is_no_letter(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.tell(std::slice::from_ref(&event)).await;
    rig.settle().await;
    let mut other = event.clone();
    other.correlation_id = "another".to_owned();
    for body in [event.to_body(), other.to_body()] {
        let message = RawMessage {
            queue: dlq_of(&rig.queue),
            routing_key: KEY.into(),
            message_id: None,
            correlation_id: None,
            headers: Map::new(),
            body: body.into(),
        };
        rig.kernel.transport.publish_raw(&message, 1).await.unwrap();
    }
    rig.settle().await;
    let reasons: Vec<String> = rig.letters().await.into_iter().map(|letter| letter.reason).collect();
    assert_eq!(reasons, ["id-reused"], "another body under its id is one");
    assert_eq!((rig.effects(&event).await, rig.inbox(&event).await.unwrap().duplicates), (1, 1));
}

async fn a_redrive_keeps_bytes_id_correlation_and_headers(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("reject");
    let body = [b" ", event.to_body().as_slice(), b"\n"].concat();
    let headers = json!({ "x-event-id": event.event_id, "traceparent": "00-aa-bb-01" }).as_object().unwrap().clone();
    rig.deliver_raw(&body, Some(&event.event_id.to_string()), headers.clone(), 1).await;
    rig.settle().await;
    let id = rig.letters().await[0].id;
    assert_eq!(rig.letter(id).await.headers, Value::Object(headers.clone()));
    assert_eq!(rig.redrive(id).await, Redriven::Sent);
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox WHERE kind = 'redrive' AND attempts = 0").await, 1);
    rig.relay.try_once().await.unwrap();
    let delivery = rig.take(&mut rig.subscribe(&rig.queue).await, 1).await.remove(0);
    assert_eq!(delivery.body, body);
    assert_eq!(delivery.message_id, Some(event.event_id.to_string()));
    assert_eq!(delivery.correlation_id, Some(event.correlation_id));
    assert_eq!(delivery.header("traceparent"), Some("00-aa-bb-01"));
}

async fn a_redrive_that_fails_again_is_a_letter_of_its_own(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("reject");
    rig.deliver(&event, 1).await;
    rig.settle().await;
    rig.redrive(rig.letters().await[0].id).await;
    rig.settle().await;
    let states: Vec<String> = rig.letters().await.into_iter().map(|letter| letter.state).collect();
    assert_eq!(states, ["redriven", "open"]);
    assert_eq!(rig.inbox(&event).await.unwrap().state, "dead");
}

async fn any_bytes_can_be_redriven(db: TestDb) {
    let rig = Rig::new(&db).await;
    let nul = json!({ "strange": "a\u{0}b" }).as_object().unwrap().clone();
    let poison: [(&[u8], Map<String, Value>); 3] = [(b"", Map::new()), (b"\xff\x00\xfe", Map::new()), (b"text", nul)];
    for (body, headers) in &poison {
        rig.deliver_raw(body, None, headers.clone(), 1).await;
    }
    rig.settle().await;
    let open = rig.letters().await;
    assert_eq!(open.len(), 3);
    for letter in &open {
        assert_eq!(rig.redrive(letter.id).await, Redriven::Sent);
    }
    // They are no better than before, so they come back; and a good one behind them is not held up.
    let good = told("note");
    rig.tell(std::slice::from_ref(&good)).await;
    rig.settle().await;
    assert_eq!(rig.effects(&good).await, 1);
    let mut again = Vec::new();
    for letter in rig.letters().await.iter().filter(|letter| letter.state == "open") {
        assert_eq!(letter.message_id, None, "none is made up for a message that had none");
        again.push(rig.letter(letter.id).await.body);
    }
    again.sort();
    assert_eq!(again, [b"".to_vec(), b"text".to_vec(), b"\xff\x00\xfe".to_vec()]);
}

async fn a_letter_without_a_type_comes_back_without_one(db: TestDb) {
    let rig = Rig::new(&db).await;
    let message = RawMessage {
        queue: rig.queue.clone(),
        routing_key: String::new(),
        message_id: None,
        correlation_id: None,
        headers: Map::new(),
        body: Bytes::from_static(b"poison"),
    };
    rig.kernel.transport.publish_raw(&message, 1).await.unwrap();
    rig.settle().await;
    assert_eq!(rig.redrive(rig.letters().await[0].id).await, Redriven::Sent);
    rig.settle().await;
    let types: Vec<Option<String>> = rig.letters().await.into_iter().map(|letter| letter.event_type).collect();
    assert_eq!(types, [None, None]);
}

async fn a_redrive_of_what_was_applied_already_says_so_and_sends_nothing(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("reject");
    rig.deliver(&event, 1).await;
    rig.settle().await;
    rig.plant(&event, State::Processed, None).await;
    let id = rig.letters().await[0].id;
    assert_eq!(rig.redrive(id).await, Redriven::AlreadyApplied);
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox").await, 0);
    assert_eq!(rig.letters().await[0].state, "redriven");
    assert_eq!(rig.redrive(id).await, Redriven::NotOpen);
}

async fn redriving_an_impostor_leaves_the_dead_first_as_it_is(db: TestDb) {
    let rig = Rig::new(&db).await;
    let first = told("reject");
    let mut impostor = told_with(json!({ "does": "note", "text": "another" }));
    impostor.event_id = first.event_id;
    rig.deliver(&first, 1).await;
    rig.settle().await;
    rig.deliver(&impostor, 1).await;
    rig.settle().await;
    let letters = rig.letters().await;
    let reasons: Vec<&str> = letters.iter().map(|letter| letter.reason.as_str()).collect();
    assert_eq!(reasons, ["business-rule", "id-reused"]);
    rig.redrive(letters[1].id).await;
    assert_eq!(rig.inbox(&first).await.unwrap().state, "dead", "its own letter is still open");
    rig.settle().await;
    assert_eq!(rig.effects(&first).await, 0);
    let open = rig.letters().await.into_iter().filter(|letter| letter.state == "open").count();
    assert_eq!(open, 2, "the impostor came back");
}

async fn a_redrive_of_a_letter_that_was_redriven_meanwhile_sends_nothing(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.deliver(&told("reject"), 1).await;
    rig.settle().await;
    let stale = rig.letter(rig.letters().await[0].id).await;
    assert_eq!(rig.redrive(rig.letters().await[0].id).await, Redriven::Sent);
    let mut tx = rig.db.begin().await.unwrap();
    assert_ne!(dead_letters::redrive(&mut tx, &stale).await.unwrap(), Redriven::Sent);
    tx.commit().await.unwrap();
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox").await, 1);
}

/// On Postgres alone: SQLite has one writer, so one redrive would end before the other begins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn two_redrives_of_one_letter_send_it_once() {
    let db = TestDb::new(Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    rig.deliver(&told("reject"), 1).await;
    rig.settle().await;
    let id = rig.letters().await[0].id;
    let (first, second) = tokio::join!(rig.redrive(id), rig.redrive(id));
    let sent = [first, second].into_iter().filter(|redriven| *redriven == Redriven::Sent).count();
    assert_eq!(sent, 1);
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox").await, 1);
}

async fn a_redrive_that_does_not_commit_has_not_happened(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("reject");
    rig.deliver(&event, 1).await;
    rig.settle().await;
    let letter = rig.letter(rig.letters().await[0].id).await;
    let mut tx = rig.db.begin().await.unwrap();
    assert_eq!(dead_letters::redrive(&mut tx, &letter).await.unwrap(), Redriven::Sent);
    drop(tx);
    assert_eq!(rig.letters().await[0].state, "open");
    assert_eq!(rig.inbox(&event).await.unwrap().state, "dead");
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox").await, 0);
}

async fn a_paused_office_lets_the_queue_fill_and_files_it_afterwards(db: TestDb) {
    let rig = Rig::new(&db).await;
    set_pause(&rig, true).await;
    for _ in 0..3 {
        rig.deliver_raw(b"poison", None, Map::new(), 1).await;
    }
    rig.consume().await;
    let stop = CancellationToken::new();
    let office = Office::new(rig.kernel.clone(), vec![rig.sender.clone()]);
    tokio::join!(office.run(stop.clone()), async {
        rig.kernel.health.until_paused("dead-letters", true).await;
        eventually("three in the queue", || async { (rig.depth(&dlq_of(&rig.queue)).await.ready == 3).then_some(()) })
            .await;
        assert_eq!(rig.letters().await.len(), 0);
        set_pause(&rig, false).await;
        eventually("three letters", || async { (rig.letters().await.len() == 3).then_some(()) }).await;
        stop.cancel();
    });
    assert_eq!(rig.kernel.health.statuses()["dead-letters"].state, LoopState::Stopped);
    assert_eq!(rig.number("SELECT count(*) FROM messaging_queue").await, 0);
}

async fn a_letter_that_cannot_be_stored_stays_behind_and_keeps_no_other_from_being_filed(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (refuse, allow) = match rig.is_postgres() {
        true => (
            "ALTER TABLE messaging_dead_letters ADD CONSTRAINT unstorable CHECK (body <> 'unstorable'::bytea)",
            "ALTER TABLE messaging_dead_letters DROP CONSTRAINT unstorable",
        ),
        false => (
            "CREATE TRIGGER unstorable BEFORE INSERT ON messaging_dead_letters
             WHEN NEW.body = CAST('unstorable' AS BLOB) BEGIN SELECT RAISE(ABORT, 'unstorable'); END",
            "DROP TRIGGER unstorable",
        ),
    };
    rig.execute(refuse).await;
    for body in ["poison", "unstorable", "more poison"] {
        rig.deliver_raw(body.as_bytes(), None, Map::new(), 1).await;
    }
    rig.consume().await;
    let stop = CancellationToken::new();
    let office = Office::new(rig.kernel.clone(), vec![rig.sender.clone()]);
    let status = || rig.kernel.health.statuses()["dead-letters"].clone();
    tokio::join!(office.run(stop.clone()), async {
        eventually("the other two", || async { (rig.letters().await.len() == 2).then_some(()) }).await;
        let troubled = async || status().last_error.filter(|error| error.contains("unstorable"));
        eventually("a word of the one", troubled).await;
        assert_eq!(status().state, LoopState::Troubled);
        let left = async || {
            let depth = rig.depth(&dlq_of(&rig.queue)).await;
            (depth.ready + depth.in_flight.unwrap_or(0) == 1).then_some(())
        };
        eventually("that one alone in the queue", left).await;
        rig.execute(allow).await;
        eventually("all three", || async { (rig.letters().await.len() == 3).then_some(()) }).await;
        eventually("an office that is well", async || (status().state == LoopState::Running).then_some(())).await;
        stop.cancel();
    });
    let mut bodies = Vec::new();
    for letter in rig.letters().await {
        bodies.push(rig.letter(letter.id).await.body);
    }
    bodies.sort_unstable();
    assert_eq!(bodies, [&b"more poison"[..], b"poison", b"unstorable"], "each once");
}

async fn set_pause(rig: &Rig, paused: bool) {
    let mut tx = rig.db.begin().await.unwrap();
    pause::set(&mut tx, "dead-letters", paused).await.unwrap();
    tx.commit().await.unwrap();
    rig.kernel.pauses.reread().await;
}

async fn file(rig: &Rig, letter: &NewLetter) {
    let mut tx = rig.db.begin().await.unwrap();
    dead_letters::file(&mut tx, letter).await.unwrap();
    tx.commit().await.unwrap();
}

/// How many letters there are, and what they count in all.
async fn counts(rig: &Rig) -> (i64, i64) {
    let letters = rig.number("SELECT count(*) FROM messaging_dead_letters").await;
    (letters, rig.number("SELECT COALESCE(sum(count), 0) FROM messaging_dead_letters").await)
}

fn letter(filing_key: &str, delivery_key: &str) -> NewLetter {
    NewLetter {
        queue: QUEUE.into(),
        consumer: "probe".into(),
        message_id: Some(mint_id().to_string()),
        event_type: Some(KEY.into()),
        correlation_id: None,
        group_id: Some("g".into()),
        reason: "business-rule".into(),
        error: "never".into(),
        attempts: 1,
        headers: json!({}),
        body: b"whatever".to_vec(),
        x_death: json!([]),
        filing_key: filing_key.into(),
        delivery_key: delivery_key.into(),
    }
}

each_database!(
    filing_the_same_delivery_again_changes_nothing,
    an_office_that_crashed_before_its_ack_files_nothing_twice,
    a_late_copy_of_a_redriven_letter_does_not_stop_the_office,
    what_the_broker_gave_up_on_is_filed_as_such,
    a_copy_of_what_was_done_is_no_letter,
    a_redrive_keeps_bytes_id_correlation_and_headers,
    a_redrive_that_fails_again_is_a_letter_of_its_own,
    any_bytes_can_be_redriven,
    a_letter_without_a_type_comes_back_without_one,
    a_redrive_of_what_was_applied_already_says_so_and_sends_nothing,
    redriving_an_impostor_leaves_the_dead_first_as_it_is,
    a_redrive_of_a_letter_that_was_redriven_meanwhile_sends_nothing,
    a_redrive_that_does_not_commit_has_not_happened,
    a_paused_office_lets_the_queue_fill_and_files_it_afterwards,
    a_letter_that_cannot_be_stored_stays_behind_and_keeps_no_other_from_being_filed,
);

each_database_on_rabbit!(
    what_the_broker_gave_up_on_is_filed_as_such,
    a_copy_of_what_was_done_is_no_letter,
    a_redrive_keeps_bytes_id_correlation_and_headers,
    a_redrive_that_fails_again_is_a_letter_of_its_own,
    any_bytes_can_be_redriven,
    a_paused_office_lets_the_queue_fill_and_files_it_afterwards,
    a_letter_that_cannot_be_stored_stays_behind_and_keeps_no_other_from_being_filed,
);
