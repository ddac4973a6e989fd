//! Retention: what is old goes, and nothing goes that is still needed.

use std::time::Duration;

use stockade::orders;
use stockade_kernel::clock::{first_id_at, mint_id};
use stockade_kernel::messaging::Event;
use stockade_kernel::messaging::retention::{Retention, Sweep, Swept};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::kernel::{KEY, QUEUE, Rig, many, told};
use crate::support::{App, TestDb, each_database, each_database_on_rabbit, eventually, order, settings};

const DAY: Duration = Duration::from_secs(86_400);

/// The id of an event that was minted that long ago.
fn id_of_age(rig: &Rig, age: Duration) -> Uuid {
    let random = mint_id().as_u128() & ((1 << 80) - 1);
    Uuid::from_u128(first_id_at(rig.db.clock().now().minus(age)).as_u128() | random)
}

fn aged(rig: &Rig, age: Duration, does: &str) -> Event {
    Event { event_id: id_of_age(rig, age), occurred_at: rig.db.clock().now().minus(age), ..told(does) }
}

/// Moves everything written so far that long into the past.
async fn age(rig: &Rig, span: Duration) {
    for (table, columns) in [
        ("messaging_outbox", ["created_at", "published_at"].as_slice()),
        ("messaging_outbox_archive", &["created_at", "published_at"]),
        ("messaging_inbox", &["started_at", "finished_at"]),
        ("messaging_dead_letters", &["created_at", "updated_at", "resolved_at"]),
    ] {
        let days = span.as_secs() / 86_400;
        let shift = |column: &&str| match rig.is_postgres() {
            true => format!("{column} = {column} - interval '{days} days'"),
            false => format!("{column} = {column} - {days} * 86400000"),
        };
        let set: Vec<String> = columns.iter().map(shift).collect();
        rig.execute(&format!("UPDATE {table} SET {}", set.join(", "))).await;
    }
}

async fn pass(rig: &Rig) -> Swept {
    Retention::new(rig.kernel.clone(), Vec::new()).pass(&CancellationToken::new()).await.unwrap()
}

/// Events of that age, published and processed then. Their ids are old enough for a little more ageing.
async fn processed(rig: &Rig, count: usize, old: Duration) -> Vec<Event> {
    let events: Vec<Event> = many("note", count)
        .into_iter()
        .map(|event| Event { event_id: id_of_age(rig, old + DAY * 15), ..event })
        .collect();
    rig.tell(&events).await;
    rig.settle().await;
    rig.execute("DELETE FROM messaging_queue").await; // the shadow queue's, which nobody takes
    age(rig, old).await;
    events
}

async fn published_rows_go_to_the_archive_and_then_away(db: TestDb) {
    let rig = Rig::new(&db).await;
    processed(&rig, 3, DAY * 31).await;
    let fresh = many("note", 2);
    rig.tell(&fresh).await;
    rig.settle().await;
    rig.execute("DELETE FROM messaging_queue").await;
    assert_eq!(pass(&rig).await, Swept { outbox: 3, ..Swept::default() });
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox").await, 2);
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox_archive").await, 3);
    assert_eq!(pass(&rig).await, Swept::default(), "nothing more is old");
    age(&rig, DAY * 15).await;
    assert_eq!(pass(&rig).await.archive, 3, "after 45 days in all");
    assert_eq!(rig.number("SELECT count(*) FROM messaging_inbox").await, 5, "what was done is remembered for longer");
}

async fn more_than_a_batch_goes_in_one_pass(db: TestDb) {
    let rig = Rig::new(&db).await;
    processed(&rig, 1203, DAY * 100).await;
    let swept = pass(&rig).await;
    assert_eq!((swept.outbox, swept.inbox), (1203, 1203));
    assert_eq!(swept.archive, 1203, "too old for the archive as well");
}

async fn a_row_that_a_queue_still_points_at_stays(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events: Vec<Event> = (0..4).map(|_| aged(&rig, DAY * 40, "note")).collect();
    rig.tell(&events).await;
    while rig.relay.try_once().await.unwrap() > 0 {}
    age(&rig, DAY * 40).await;
    assert_eq!(pass(&rig).await.outbox, 0, "all of them wait in a queue");
    rig.execute("DELETE FROM messaging_queue WHERE queue <> 'test.probe'").await;
    assert_eq!(pass(&rig).await.outbox, 0);
    rig.settle().await;
    for event in &events {
        assert_eq!(rig.effects(event).await, 1, "delivered whole, forty days on");
    }
    assert_eq!(pass(&rig).await.outbox, 4, "and then they may go");
}

async fn a_row_that_a_bundle_still_points_at_stays(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.db.set_hands_on(true);
    let mut open = rig.subscribe(&rig.queue).await;
    open.open_hatch();
    assert!(open.take(20).await.unwrap().is_empty());
    let events: Vec<Event> = (0..20).map(|_| aged(&rig, DAY * 40, "note")).collect();
    rig.tell(&events).await;
    rig.execute("DELETE FROM messaging_queue").await; // the shadow queue's, which nobody takes
    age(&rig, DAY * 40).await;
    assert_eq!(pass(&rig).await.outbox, 0, "all of them are in somebody's hands");
    let taken: Vec<_> = rig.take(&mut open, 20).await.iter().map(|delivery| delivery.tag).collect();
    open.ack(&taken).await.unwrap();
    assert_eq!(pass(&rig).await.outbox, 20, "and then they may go");
}

async fn what_was_not_published_stays_however_old(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.tell(&[aged(&rig, DAY * 200, "note"), aged(&rig, DAY * 200, "note")]).await;
    rig.execute("UPDATE messaging_outbox SET status = 'dead' WHERE id = (SELECT id FROM messaging_outbox LIMIT 1)")
        .await;
    age(&rig, DAY * 200).await;
    assert_eq!(pass(&rig).await, Swept::default());
}

async fn copies_are_removed_and_not_archived(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.deliver(&aged(&rig, Duration::ZERO, "reject"), 1).await;
    rig.settle().await;
    rig.probe.heal();
    rig.redrive(rig.letters().await[0].id).await;
    rig.settle().await;
    let old = id_of_age(&rig, DAY * 31).simple().to_string();
    let old = if rig.is_postgres() { format!("'{old}'::uuid") } else { format!("x'{old}'") };
    rig.execute(&format!("UPDATE messaging_outbox SET id = {old}")).await;
    age(&rig, DAY * 31).await;
    let swept = pass(&rig).await;
    assert_eq!((swept.outbox, swept.dead_letters), (1, 1));
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox_archive").await, 0);
}

async fn what_was_processed_is_forgotten_only_when_no_copy_can_come(db: TestDb) {
    let rig = Rig::new(&db).await;
    let old = DAY * 100;
    let events = processed(&rig, 4, old).await;
    // One has a letter, one a retry on its way, one is in the outbox still; nothing speaks for the fourth.
    rig.deliver_raw(&[events[0].to_body(), b" ".to_vec()].concat(), None, serde_json::Map::new(), 1).await;
    rig.settle().await;
    assert_eq!(rig.letters().await[0].reason, "id-reused");
    rig.execute("DELETE FROM messaging_outbox WHERE kind = 'event'").await;
    rig.tell(&events[2..3]).await;
    let retry = stockade_kernel::messaging::outbox::Entry::retry(&events[1], events[1].to_body(), QUEUE, 1, DAY);
    let mut tx = rig.db.begin().await.unwrap();
    stockade_kernel::messaging::outbox::append_many(&mut tx, &[retry]).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(pass(&rig).await.inbox, 1);
    for (event, kept) in events.iter().zip([true, true, true, false]) {
        assert_eq!(rig.inbox(event).await.is_some(), kept);
    }
    // A discarded letter can be restored, so it counts; once it is gone, so may the row be.
    rig.execute("UPDATE messaging_dead_letters SET state = 'discarded', resolved_at = created_at").await;
    assert_eq!(pass(&rig).await.inbox, 0);
    rig.execute("DELETE FROM messaging_dead_letters").await;
    assert_eq!(pass(&rig).await.inbox, 1);
}

async fn foreign_ids_are_forgotten_too(db: TestDb) {
    let rig = Rig::new(&db).await;
    let foreign: Vec<Event> = many("note", 3)
        .into_iter()
        .map(|event| Event {
            event_id: Uuid::from_u128((event.event_id.as_u128() & !(0xf << 76)) | (0x4 << 76) | (0xf << 124)),
            ..event
        })
        .collect();
    for event in &foreign {
        assert_eq!(event.event_id.get_version_num(), 4);
        rig.deliver(event, 1).await;
    }
    rig.settle().await;
    assert_eq!(pass(&rig).await.inbox, 0);
    age(&rig, DAY * 91).await;
    assert_eq!(pass(&rig).await.inbox, 3);
}

async fn rows_that_are_not_settled_are_never_forgotten(db: TestDb) {
    let rig = Rig::new(&db).await;
    let retrying = aged(&rig, DAY * 80, "retry");
    rig.deliver(&retrying, 1).await;
    rig.settle().await;
    age(&rig, DAY * 100).await;
    rig.execute("DELETE FROM messaging_outbox").await;
    assert_eq!(pass(&rig).await.inbox, 0);
    assert_eq!(rig.inbox(&retrying).await.unwrap().state, "retrying");
}

async fn resolved_letters_are_removed_and_open_ones_are_not(db: TestDb) {
    let rig = Rig::new(&db).await;
    for _ in 0..3 {
        rig.deliver_raw(b"no json", None, serde_json::Map::new(), 1).await;
    }
    rig.settle().await;
    let letters = rig.letters().await;
    rig.redrive(letters[0].id).await;
    let mut tx = rig.db.begin().await.unwrap();
    stockade_kernel::messaging::dead_letters::discard(&mut tx, letters[1].id).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(pass(&rig).await.dead_letters, 0);
    age(&rig, DAY * 31).await;
    assert_eq!(pass(&rig).await.dead_letters, 2);
    assert_eq!(rig.letters().await[0].id, letters[2].id);
}

async fn an_event_that_may_have_been_forgotten_is_too_old(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (old, young) = (aged(&rig, DAY * 91, "note"), aged(&rig, DAY * 89, "note"));
    for event in [&old, &young] {
        rig.deliver(event, 1).await;
    }
    rig.settle().await;
    assert_eq!((rig.effects(&old).await, rig.effects(&young).await), (0, 1));
    let letter = rig.letters().await.remove(0);
    assert_eq!((letter.reason.as_str(), letter.event_type.as_deref()), ("too-old", Some(KEY)));
    assert!(letter.error.contains("90d"), "{}", letter.error);
    // What is remembered is a duplicate, whatever its age.
    age(&rig, DAY * 5).await;
    rig.execute("UPDATE messaging_inbox SET state = 'processed', reason = NULL").await;
    rig.deliver(&old, 1).await;
    rig.settle().await;
    assert_eq!((rig.letters().await.len(), rig.inbox(&old).await.unwrap().duplicates), (1, 1));
}

async fn what_was_forgotten_stays_too_old_when_more_is_remembered(db: TestDb) {
    let mut rig = Rig::new(&db).await;
    let old = aged(&rig, DAY * 40, "note");
    rig.deliver(&old, 1).await;
    rig.settle().await;
    assert_eq!(rig.effects(&old).await, 1, "nothing was ever forgotten, so this is a new one");
    age(&rig, DAY * 40).await;
    let keep = rig.kernel.tuning.keep;
    rig.kernel.tuning.keep.inbox = DAY * 30;
    assert_eq!(pass(&rig).await.inbox, 1);
    rig.kernel.tuning.keep = keep;
    let (older, younger) = (aged(&rig, DAY * 35, "note"), aged(&rig, DAY * 25, "note"));
    for event in [&old, &older, &younger] {
        rig.deliver(event, 1).await;
    }
    rig.settle().await;
    let effects = (rig.effects(&old).await, rig.effects(&older).await, rig.effects(&younger).await);
    assert_eq!(effects, (1, 0, 1), "what may have been forgotten is not done again");
    assert!(rig.letters().await.iter().all(|letter| letter.reason == "too-old"));
    assert_eq!(rig.letters().await.len(), 2);
}

async fn a_redrive_by_hand_overrides_too_old(db: TestDb) {
    let rig = Rig::new(&db).await;
    let old = aged(&rig, DAY * 91, "note");
    rig.deliver(&old, 1).await;
    rig.settle().await;
    rig.redrive(rig.letters().await[0].id).await;
    rig.settle().await;
    assert_eq!(rig.effects(&old).await, 1, "somebody looked and decided");
}

/// Whoever holds the turn works; the other leaves it alone and comes back later.
/// On Postgres alone: SQLite has one writer, and one process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn one_instance_works_at_a_time() {
    let db = TestDb::new(crate::support::Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    processed(&rig, 3, DAY * 31).await;
    let mut busy = rig.db.begin().await.unwrap();
    stockade_kernel::on!(busy, c => sqlx::query("SELECT pg_advisory_xact_lock(125780069804398)").execute(c).await.map(drop))
        .unwrap();
    assert_eq!(pass(&rig).await, Swept::default());
    busy.commit().await.unwrap();
    let (left, right) = tokio::join!(pass(&rig), pass(&rig));
    assert_eq!(left.outbox + right.outbox, 3);
}

async fn idempotency_keys_are_forgotten_after_a_day(db: TestDb) {
    let app = App::start(&db).await;
    let place = || async {
        let request = app.post("/v1/orders", &order("alice", &[("NOWHERE", 1)])).header("idempotency-key", "k");
        let response = request.send().await.unwrap();
        response.headers().contains_key("idempotent-replayed")
    };
    assert_eq!((place().await, place().await), (false, true));
    let sweep = |keep| {
        let sweep = Sweep {
            name: "idempotency keys",
            keep,
            sweep: |tx, before, limit| Box::pin(orders::store::forget_keys(tx, before, limit)),
        };
        Retention::new(app.running.kernel.clone(), vec![sweep])
    };
    let stop = CancellationToken::new();
    assert_eq!(sweep(DAY).pass(&stop).await.unwrap().others, 0);
    assert!(place().await);
    // A key expires once the clock is past the millisecond of its last use.
    let forgotten = eventually("a key that is forgotten", async || {
        let others = sweep(Duration::ZERO).pass(&stop).await.unwrap().others;
        (others > 0).then_some(others)
    });
    assert_eq!(forgotten.await, 1);
    assert!(!place().await, "the key is free again");
    app.stop().await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn a_memory_that_is_too_short_is_refused_with_the_sum() {
    let db = TestDb::new(crate::support::Engine::Sqlite).await;
    let refused = |flags: &[&str]| settings(&db, flags).validate().map_err(|error| error.to_string());
    assert_eq!(refused(&[]), Ok(()));
    let sum =
        ["--inbox-retention", "10d", "--dlq-retention", "5d", "--archive-retention", "4d", "--outbox-retention", "3d"];
    assert_eq!(refused(&sum), Ok(()));
    let sum =
        ["--inbox-retention", "9d", "--dlq-retention", "5d", "--archive-retention", "4d", "--outbox-retention", "3d"];
    let said = refused(&sum).unwrap_err();
    for term in [
        "is 9d,",
        " 5d  dead letters",
        " 4d  replays",
        "51m 10s  publishing",
        "50s  retries",
        "15m  waiting",
        "9d 1h 7m",
    ] {
        assert!(said.contains(term), "{term:?} in {said}");
    }
    assert!(refused(&["--archive-retention", "1d"]).unwrap_err().contains("STOCKADE_OUTBOX_RETENTION"));
}

each_database!(
    published_rows_go_to_the_archive_and_then_away,
    more_than_a_batch_goes_in_one_pass,
    a_row_that_a_bundle_still_points_at_stays,
    a_row_that_a_queue_still_points_at_stays,
    what_was_not_published_stays_however_old,
    copies_are_removed_and_not_archived,
    what_was_processed_is_forgotten_only_when_no_copy_can_come,
    foreign_ids_are_forgotten_too,
    rows_that_are_not_settled_are_never_forgotten,
    resolved_letters_are_removed_and_open_ones_are_not,
    an_event_that_may_have_been_forgotten_is_too_old,
    what_was_forgotten_stays_too_old_when_more_is_remembered,
    a_redrive_by_hand_overrides_too_old,
    idempotency_keys_are_forgotten_after_a_day,
);

each_database_on_rabbit!(published_rows_go_to_the_archive_and_then_away,);
