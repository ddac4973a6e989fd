//! Messages that go from hand to hand on the table queue: what the memory saves, and that it promises nothing.

use std::time::Duration;

use stockade::messaging::outbox;
use stockade::messaging::transport::{Delivery, Subscription, Tag};

use crate::support::kernel::{LEASE, Rig, many, told};
use crate::support::{DEADLINE, TestDb, each_database};

/// A subscription with its hatch open, whose reader takes `batch` at a time.
async fn open(rig: &Rig, batch: usize) -> Subscription {
    rig.db.set_hands_on(true);
    let mut subscription = rig.subscribe(&rig.queue).await;
    subscription.open_hatch();
    assert!(subscription.take(batch).await.unwrap().is_empty());
    subscription
}

/// Waiting to be taken, and in somebody's hands.
async fn depth(rig: &Rig) -> (i64, i64) {
    let depth = rig.depth(&rig.queue).await;
    (depth.ready, depth.in_flight.unwrap())
}

fn tags(deliveries: &[Delivery]) -> Vec<Tag> {
    deliveries.iter().map(|delivery| delivery.tag).collect()
}

async fn what_is_handed_over_is_what_the_row_holds(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut open = open(&rig, 10).await;
    let event = told("note");
    rig.tell(std::slice::from_ref(&event)).await;
    assert_eq!(depth(&rig).await, (0, 1), "born in the reader's hands");
    let handed = rig.take(&mut open, 1).await;
    // The same row, claimed by a stranger once the lease is over.
    rig.advance(LEASE + Duration::from_secs(1)).await;
    let mut stranger = rig.subscribe(&rig.queue).await;
    let claimed = rig.take(&mut stranger, 1).await;
    let seen = |delivery: &Delivery| {
        let Delivery { lasting_id, message_id, routing_key, correlation_id, headers, body, x_death, .. } =
            delivery.clone();
        (lasting_id, message_id, routing_key, correlation_id, headers, body, x_death)
    };
    assert_eq!(seen(&handed[0]), seen(&claimed[0]));
    assert_eq!((handed[0].deliveries, claimed[0].deliveries), (1, 2));
    open.ack(&tags(&handed)).await.unwrap();
    assert_eq!(depth(&rig).await, (0, 1), "too late to settle for its successor");
    stranger.ack(&tags(&claimed)).await.unwrap();
    assert_eq!(depth(&rig).await, (0, 0));
}

async fn what_is_not_committed_is_not_handed_over(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut open = open(&rig, 10).await;
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_events(&mut tx, &many("note", 3)).await.unwrap();
    drop(tx);
    let event = told("note");
    rig.tell(std::slice::from_ref(&event)).await;
    let taken = rig.take(&mut open, 1).await;
    assert_eq!(taken[0].message_id, Some(event.event_id.to_string()));
    rig.take_nothing(&mut open).await;
}

async fn a_reader_that_leaves_gives_back_what_it_has_not_taken(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut leaving = open(&rig, 10).await;
    rig.tell(&many("note", 5)).await;
    let taken = rig.take(&mut leaving, 2).await;
    leaving.ack_soon(&tags(&taken)).await.unwrap();
    leaving.close().await;
    assert_eq!(depth(&rig).await, (3, 0), "free at once, and what was acknowledged is gone");
    let mut next = rig.subscribe(&rig.queue).await;
    let again = rig.take(&mut next, 3).await;
    assert!(again.iter().all(|delivery| delivery.deliveries == 1), "as if it had never been handed over");
    rig.tell(&many("note", 1)).await;
    assert_eq!(depth(&rig).await, (1, 3), "nobody's hatch is open any more");
}

async fn a_transaction_that_counts_on_a_hatch_keeps_it_open(db: TestDb) {
    let rig = Rig::new(&db).await;
    let leaving = open(&rig, 10).await;
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_events(&mut tx, &many("note", 3)).await.unwrap();
    let commit = async {
        tokio::task::yield_now().await;
        tx.commit().await.unwrap();
    };
    tokio::join!(leaving.close(), commit);
    assert_eq!(depth(&rig).await, (3, 0), "handed over while it closed, and given back");
}

async fn what_finds_no_room_is_free_for_all(db: TestDb) {
    let rig = Rig::new(&db).await;
    let _slow = open(&rig, 2).await;
    for event in many("note", 7) {
        rig.tell(&[event]).await;
    }
    assert_eq!(depth(&rig).await, (3, 4), "two batches in hand, the rest for whoever comes");
}

async fn a_full_hatch_keeps_nobody_else_waiting(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut busy = open(&rig, 2).await;
    rig.tell(&many("note", 4)).await;
    let raw = told("note");
    rig.deliver(&raw, 1).await;
    let first = busy.take(2).await.unwrap();
    assert_eq!(first[0].body, raw.to_body(), "rung for, so looked at first");
    assert_eq!(first.len(), 2);
    // Batch after batch from hand to hand, and still what is acknowledged leaves the queue.
    let deadline = tokio::time::Instant::now() + DEADLINE;
    let mut last = tags(&first);
    let mut acknowledged = 0;
    while rig.number("SELECT count(*) FROM messaging_queue WHERE queue = 'test.probe'").await >= acknowledged {
        assert!(tokio::time::Instant::now() < deadline, "what was acknowledged is still there");
        busy.ack_soon(&last).await.unwrap();
        acknowledged += 2;
        rig.tell(&many("note", 2)).await;
        last = tags(&busy.take(2).await.unwrap());
        assert_eq!(last.len(), 2);
    }
}

each_database!(
    a_full_hatch_keeps_nobody_else_waiting,
    a_reader_that_leaves_gives_back_what_it_has_not_taken,
    a_transaction_that_counts_on_a_hatch_keeps_it_open,
    what_finds_no_room_is_free_for_all,
    what_is_handed_over_is_what_the_row_holds,
    what_is_not_committed_is_not_handed_over,
);
