//! What a delivery does, by the state of the inbox row it meets: a test for each line of the table.

use std::time::Duration;

use stockade_kernel::messaging::dead_letters::Redriven;
use stockade_kernel::messaging::inbox::State;

use crate::support::kernel::{AGES, QUEUE, Rig, told, told_with};
use crate::support::{TestDb, each_database};

async fn an_absent_event_runs(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.deliver(&event, 1).await;
    assert_eq!(rig.consume().await, 1);
    assert_eq!(rig.effects(&event).await, 1);
    let row = rig.inbox(&event).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts, row.duplicates), ("processed", 1, 0));
    assert!(row.finished_at.is_some());
    assert_eq!((row.event_type.as_str(), &row.correlation_id), ("probe.told", &event.correlation_id));
    assert_eq!(rig.depth(QUEUE).await.ready, 0, "acknowledged");
}

async fn a_processed_event_is_counted_and_acknowledged(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.deliver(&event, 1).await;
    rig.consume().await;
    rig.deliver(&event, 1).await;
    rig.settle().await;
    assert_dismissed(&rig, &event, "processed", 1).await;
    assert_eq!(rig.probe.batches().len(), 1, "the handler has not seen it again");
}

async fn another_body_under_a_processed_id_is_quarantined_and_the_first_stands(db: TestDb) {
    let rig = Rig::new(&db).await;
    let first = told("note");
    rig.deliver(&first, 1).await;
    rig.consume().await;
    let mut second = told_with(serde_json::json!({ "does": "note", "text": "something else" }));
    second.event_id = first.event_id;
    rig.deliver(&second, 1).await;
    rig.settle().await;
    let row = rig.inbox(&first).await.unwrap();
    assert_eq!((row.state.as_str(), row.duplicates), ("processed", 0));
    assert_eq!(rig.effects(&first).await, 1);
    let letters = rig.letters().await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].reason, "id-reused");
    assert_eq!(rig.letter(letters[0].id).await.body, second.to_body());
    // Two impostors are two letters: each holds other bytes.
    let mut third = told("retry");
    third.event_id = first.event_id;
    rig.deliver(&third, 1).await;
    rig.settle().await;
    assert_eq!(rig.letters().await.len(), 2);
}

async fn two_bodies_under_one_new_id_in_one_batch_run_once(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (first, mut second) = (told("note"), told_with(serde_json::json!({ "does": "note", "text": "another" })));
    second.event_id = first.event_id;
    rig.deliver(&first, 1).await;
    rig.deliver(&second, 1).await;
    assert_eq!(rig.consume().await, 2);
    rig.settle().await;
    assert_eq!(rig.effects(&first).await, 1);
    let reasons: Vec<String> = rig.letters().await.into_iter().map(|letter| letter.reason).collect();
    assert_eq!(reasons, ["id-reused"]);
}

async fn a_waiting_event_is_counted_and_acknowledged(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.plant(&event, State::Waiting, None).await;
    rig.deliver(&event, 1).await;
    rig.settle().await;
    assert_eq!(rig.effects(&event).await, 0);
    assert_dismissed_after(&rig, &event, "waiting", 1).await;
}

async fn a_retrying_event_that_is_not_due_is_counted_and_acknowledged(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.plant(&event, State::Retrying, Some(AGES)).await;
    rig.deliver(&event, 2).await;
    rig.settle().await;
    assert_eq!(rig.effects(&event).await, 0);
    assert_dismissed_after(&rig, &event, "retrying", 2).await;
}

async fn a_retrying_event_that_is_due_runs(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.plant(&event, State::Retrying, Some(Duration::from_secs(30))).await;
    rig.advance(Duration::from_secs(31)).await;
    rig.deliver(&event, 1).await;
    rig.settle().await;
    assert_eq!(rig.effects(&event).await, 1);
    let row = rig.inbox(&event).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts, row.duplicates), ("processed", 2, 0));
}

async fn the_retry_that_a_row_waits_for_runs_whatever_the_clock_says(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.plant(&event, State::Retrying, Some(AGES)).await;
    let after = |attempts: i32| serde_json::Map::from_iter([("x-attempts".to_owned(), attempts.into())]);
    rig.deliver_raw(&event.to_body(), None, after(0), 1).await;
    rig.settle().await;
    assert_eq!(rig.effects(&event).await, 0, "that was an earlier one");
    rig.deliver_raw(&event.to_body(), None, after(1), 1).await;
    rig.settle().await;
    assert_eq!(rig.effects(&event).await, 1);
    let row = rig.inbox(&event).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts, row.duplicates), ("processed", 2, 1));
}

async fn a_dead_event_is_rejected_again_and_keeps_its_one_open_letter(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("reject");
    rig.deliver(&event, 1).await;
    rig.settle().await;
    let first = rig.letters().await;
    assert_eq!(
        (first.len(), first[0].reason.as_str(), first[0].error.as_str()),
        (1, "business-rule", "reject on purpose")
    );
    rig.deliver(&event, 1).await;
    rig.settle().await;
    // Twice within one batch, too.
    rig.deliver(&event, 2).await;
    rig.settle().await;
    let letters = rig.letters().await;
    assert_eq!(letters.len(), 1);
    assert_eq!((letters[0].id, letters[0].state.as_str()), (first[0].id, "open"));
    assert_eq!(rig.number("SELECT sum(count) FROM messaging_dead_letters").await, 4);
    assert_eq!(rig.probe.batches().len(), 1, "the handler has not seen it again");
    assert_eq!(rig.inbox(&event).await.unwrap().state, "dead");
}

async fn a_processing_event_runs_since_its_effect_is_inside(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    // A lease that is still running: for effects inside the database it does not matter.
    rig.plant(&event, State::Processing, Some(AGES)).await;
    rig.deliver(&event, 1).await;
    rig.settle().await;
    assert_eq!(rig.effects(&event).await, 1);
    assert_eq!(rig.inbox(&event).await.unwrap().state, "processed");
}

async fn a_redriven_event_starts_over_and_is_processed(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("retry");
    rig.deliver(&event, 1).await;
    for _ in 0..4 {
        rig.settle().await;
        rig.advance(AGES).await;
    }
    let row = rig.inbox(&event).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts), ("dead", 3));
    let letter = rig.letters().await.remove(0);
    assert_eq!((letter.reason.as_str(), letter.attempts), ("retries-exhausted", 3));
    rig.probe.heal();
    assert_eq!(rig.redrive(letter.id).await, Redriven::Sent);
    let row = rig.inbox(&event).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts), ("retrying", 0));
    rig.settle().await;
    let row = rig.inbox(&event).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts, row.duplicates), ("processed", 1, 0));
    assert_eq!((rig.effects(&event).await, row.last_error), (1, None));
    assert_eq!(rig.redrive(letter.id).await, Redriven::NotOpen);
}

async fn assert_dismissed(rig: &Rig, event: &stockade_kernel::messaging::Event, state: &str, duplicates: i32) {
    assert_eq!(rig.effects(event).await, 1, "one effect");
    assert_dismissed_after(rig, event, state, duplicates).await;
}

/// The row is as it was but for its count, the message is gone, and nothing was filed or sent.
async fn assert_dismissed_after(rig: &Rig, event: &stockade_kernel::messaging::Event, state: &str, duplicates: i32) {
    let row = rig.inbox(event).await.unwrap();
    assert_eq!((row.state.as_str(), row.attempts, row.duplicates), (state, 1, duplicates));
    assert_eq!(rig.depth(QUEUE).await.ready, 0);
    assert!(rig.letters().await.is_empty());
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox").await, 0);
}

each_database!(
    an_absent_event_runs,
    a_processed_event_is_counted_and_acknowledged,
    another_body_under_a_processed_id_is_quarantined_and_the_first_stands,
    two_bodies_under_one_new_id_in_one_batch_run_once,
    a_waiting_event_is_counted_and_acknowledged,
    a_retrying_event_that_is_not_due_is_counted_and_acknowledged,
    a_retrying_event_that_is_due_runs,
    the_retry_that_a_row_waits_for_runs_whatever_the_clock_says,
    a_dead_event_is_rejected_again_and_keeps_its_one_open_letter,
    a_processing_event_runs_since_its_effect_is_inside,
    a_redriven_event_starts_over_and_is_processed,
);
