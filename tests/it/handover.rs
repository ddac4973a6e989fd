//! Messages that go from hand to hand, to a consumer of the table queue or to the relay of a broker: what the memory
//! saves, and that it promises nothing.

use std::time::Duration;

use stockade_kernel::clock::mint_id;
use stockade_kernel::messaging::Event;
use stockade_kernel::messaging::consumer::read_delivery;
use stockade_kernel::messaging::inbox::State;
use stockade_kernel::messaging::outbox::{self, Claim, Claimed};
use stockade_kernel::messaging::relay::{self, Relay};
use stockade_kernel::messaging::transport::memory::Chaos;
use stockade_kernel::messaging::transport::{Delivery, Subscription, Tag, dlq_of};
use stockade_kernel::messaging::{Kernel, Tuning, pause};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::support::kernel::{AGES, LEASE, Probe, Rig, many, told};
use crate::support::{DEADLINE, TestDb, each_database, eventually};

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
    // Whoever gets it from hand to hand need not read it; whoever finds it has the bytes alone.
    assert_eq!(handed[0].written.as_ref().unwrap().to_body(), claimed[0].body);
    assert!(claimed[0].written.is_none());
    for delivery in [&handed[0], &claimed[0]] {
        assert_eq!(read_delivery::<Probe>(delivery, 10_000).unwrap().event.event_id, event.event_id);
        assert_eq!(
            read_delivery::<Probe>(delivery, 10).unwrap_err().code,
            "too-large",
            "the gate is the same for both"
        );
    }
    open.ack(&tags(&handed)).await.unwrap();
    assert_eq!(depth(&rig).await, (0, 1), "too late to settle for its successor");
    stranger.ack(&tags(&claimed)).await.unwrap();
    assert_eq!(depth(&rig).await, (0, 0));
}

async fn what_is_not_committed_is_not_handed_over(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut open = open(&rig, 10).await;
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_events(&mut tx, many("note", 3)).await.unwrap();
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
    outbox::append_events(&mut tx, many("note", 3)).await.unwrap();
    let commit = async {
        tokio::task::yield_now().await;
        tx.commit().await.unwrap();
    };
    tokio::join!(leaving.close(), commit);
    assert_eq!(depth(&rig).await, (3, 0), "handed over while it closed, and given back");
}

/// A reader that was kept from its work, by a lock or a database that was away, takes up what came meanwhile as soon as it can.
async fn what_has_lain_too_long_is_put_back_at_once(db: TestDb) {
    let lease = Duration::from_secs(10);
    let rig = Rig::with_lease(&db, lease).await;
    let mut late = open(&rig, 2 * CROWD).await;
    rig.tell(&many("note", 3)).await;
    rig.tell(&many("note", CROWD)).await;
    assert_eq!(depth(&rig).await, (0, 23));
    tokio::time::sleep(lease / 2).await;
    rig.tell(&many("note", 1)).await;
    let fresh = late.take(2 * CROWD).await.unwrap();
    assert_eq!(fresh.len(), 1, "what is new is dealt with");
    assert_eq!(depth(&rig).await, (23, 1), "the rest is free for all");
    let again = rig.take(&mut late, 23).await;
    assert!(again.iter().all(|delivery| delivery.deliveries == 1 && !delivery.handed_over));
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

const CROWD: usize = 20;

/// A crowd in the hands of one reader, who has taken none of it yet.
async fn bundled(rig: &Rig) -> Subscription {
    let open = open(rig, CROWD).await;
    rig.tell(&many("note", CROWD)).await;
    assert_eq!(rig.number("SELECT count(*) FROM messaging_bundles").await, 1, "one row for all of them");
    assert_eq!(depth(rig).await, (0, 20));
    open
}

async fn a_crowd_is_held_by_one_row_until_the_last_of_it_is_done(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut open = bundled(&rig).await;
    let first = rig.take(&mut open, 12).await;
    open.ack(&tags(&first)).await.unwrap();
    assert_eq!(rig.number("SELECT count(*) FROM messaging_bundles").await, 1);
    let rest = rig.take(&mut open, 8).await;
    open.ack(&tags(&rest[..7])).await.unwrap();
    assert_eq!(rig.number("SELECT count(*) FROM messaging_bundles").await, 1);
    open.ack(&tags(&rest[7..])).await.unwrap();
    assert_eq!(rig.number("SELECT count(*) FROM messaging_bundles").await, 0);
    rig.take_nothing(&mut open).await;
    assert_eq!(depth(&rig).await, (0, 0));
}

async fn what_was_met_before_it_is_handed_over_is_a_duplicate(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut open = open(&rig, CROWD).await;
    let events = many("note", CROWD);
    // As another instance does that got hold of one of them first, and of another with another body.
    rig.plant(&events[3], State::Processed, None).await;
    let other_body = Event { event_id: events[4].event_id, ..told("other") };
    rig.plant(&other_body, State::Processed, None).await;
    rig.tell(&events).await;
    assert_eq!(rig.consumer.try_once(&mut open).await.unwrap(), CROWD);
    for (index, event) in events.iter().enumerate() {
        assert_eq!(rig.effects(event).await, i64::from(index != 3 && index != 4), "event {index}");
    }
    assert_eq!(rig.inbox(&events[3]).await.unwrap().duplicates, 1);
    assert_eq!(rig.number("SELECT count(*) FROM messaging_inbox WHERE state = 'processed'").await, CROWD as i64);
    assert_eq!(rig.depth(&dlq_of(&rig.queue)).await.ready, 1, "the one with another body is put aside");
    assert_eq!(depth(&rig).await, (0, 0));
}

async fn what_a_dead_reader_held_in_a_bundle_comes_back_each_for_itself(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut dead = bundled(&rig).await;
    let handed = rig.take(&mut dead, CROWD).await;
    dead.ack(&tags(&handed[..5])).await.unwrap();
    let mut stranger = rig.subscribe(&rig.queue).await;
    rig.take_nothing(&mut stranger).await;
    rig.advance(LEASE + Duration::from_secs(1)).await;
    assert_eq!(depth(&rig).await, (20, 0), "also what was acknowledged: the bundle was not done");
    let again = rig.take(&mut stranger, CROWD).await;
    let bodies = |deliveries: &[Delivery]| {
        let mut bodies: Vec<_> = deliveries.iter().map(|delivery| delivery.body.clone()).collect();
        bodies.sort_unstable();
        bodies
    };
    assert_eq!(bodies(&handed), bodies(&again));
    assert!(again.iter().all(|delivery| delivery.deliveries == 2));
    dead.ack(&tags(&handed[5..])).await.unwrap();
    assert_eq!(depth(&rig).await, (0, 20), "too late to settle for its successor");
    dead.reject(&tags(&handed[..1])).await.unwrap();
    assert_eq!(rig.depth(&dlq_of(&rig.queue)).await.ready, 0, "nor to reject");
    stranger.ack(&tags(&again)).await.unwrap();
    assert_eq!(depth(&rig).await, (0, 0));
}

async fn one_of_a_bundle_can_be_rejected(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut open = bundled(&rig).await;
    let taken = rig.take(&mut open, CROWD).await;
    let all = tags(&taken);
    let (rejected, done) = all.split_at(3);
    open.reject(rejected).await.unwrap();
    open.ack(done).await.unwrap();
    rig.take_nothing(&mut open).await;
    assert_eq!(rig.number("SELECT count(*) FROM messaging_bundles").await, 0);
    let mut letters = rig.subscribe(&dlq_of(&rig.queue)).await;
    let dead = rig.take(&mut letters, 3).await;
    for (letter, sent) in dead.iter().zip(&taken) {
        assert_eq!((&letter.body, &letter.message_id), (&sent.body, &sent.message_id));
        assert_eq!(letter.x_death[0]["reason"], "rejected");
        assert_eq!(letter.x_death[0]["routing-keys"][0], sent.routing_key);
    }
}

async fn what_is_put_back_from_a_bundle_is_free_for_all(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut open = bundled(&rig).await;
    let taken = rig.take(&mut open, 12).await;
    open.release(&tags(&taken)).await.unwrap();
    assert_eq!(depth(&rig).await, (12, 8), "the bundle holds the others");
    let mut next = rig.subscribe(&rig.queue).await;
    let again = rig.take(&mut next, 12).await;
    assert!(again.iter().all(|delivery| delivery.deliveries == 1), "as if it had never been handed over");
    let rest = rig.take(&mut open, 8).await;
    open.ack(&tags(&rest)).await.unwrap();
    next.ack(&tags(&again)).await.unwrap();
    assert_eq!(depth(&rig).await, (0, 0));
}

async fn what_was_given_back_does_not_come_again_with_its_bundle(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut dead = bundled(&rig).await;
    let given_back = rig.take(&mut dead, 12).await;
    dead.release(&tags(&given_back)).await.unwrap();
    let mut next = rig.subscribe(&rig.queue).await;
    let done = rig.take(&mut next, 12).await;
    next.ack(&tags(&done)).await.unwrap();
    rig.advance(LEASE + Duration::from_secs(1)).await;
    let rest = rig.take(&mut next, 8).await;
    assert!(rest.iter().all(|delivery| given_back.iter().all(|other| other.body != delivery.body)));
    rig.take_nothing(&mut next).await;
}

async fn what_is_done_with_does_not_come_again_though_its_lease_is_over(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut late = bundled(&rig).await;
    let taken = rig.take(&mut late, CROWD).await;
    late.ack_soon(&tags(&taken)).await.unwrap();
    rig.advance(LEASE + Duration::from_secs(1)).await;
    rig.take_nothing(&mut late).await;
    assert_eq!(depth(&rig).await, (0, 0));
}

async fn what_comes_out_of_a_bundle_is_as_old_as_it_was(db: TestDb) {
    let rig = Rig::new(&db).await;
    let dead = bundled(&rig).await;
    let oldest = rig.depth(&rig.queue).await.oldest_enqueued_at;
    rig.advance(Duration::from_secs(10)).await;
    rig.deliver(&told("note"), 1).await;
    drop(dead);
    rig.advance(LEASE).await;
    let mut stranger = rig.subscribe(&rig.queue).await;
    rig.take(&mut stranger, 1).await;
    assert_eq!(rig.number("SELECT count(*) FROM messaging_bundles").await, 0, "it is unpacked, behind what came later");
    assert!(oldest.is_some());
    assert_eq!(rig.depth(&rig.queue).await.oldest_enqueued_at, oldest);
}

async fn a_reader_that_leaves_empties_its_bundles(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut leaving = bundled(&rig).await;
    let taken = rig.take(&mut leaving, 12).await;
    leaving.ack_soon(&tags(&taken)).await.unwrap();
    leaving.close().await;
    assert_eq!(depth(&rig).await, (8, 0));
    assert_eq!(rig.number("SELECT count(*) FROM messaging_bundles").await, 0);
    let mut next = rig.subscribe(&rig.queue).await;
    assert!(rig.take(&mut next, 8).await.iter().all(|delivery| delivery.deliveries == 1));
}

async fn a_bundle_in_work_stays_its_readers(db: TestDb) {
    let lease = Duration::from_secs(6);
    let rig = Rig::with_lease(&db, lease).await;
    let mut open = bundled(&rig).await;
    let taken = tags(&rig.take(&mut open, CROWD).await);
    rig.advance(lease / 2).await;
    let due = match rig.is_postgres() {
        true => "SELECT CAST(EXTRACT(EPOCH FROM lease_until) * 1000 AS bigint) FROM messaging_bundles",
        false => "SELECT lease_until FROM messaging_bundles",
    };
    let before = rig.number(due).await;
    let renewed = eventually("a renewal", async || (rig.number(due).await > before).then_some(()));
    tokio::select! {
        () = open.keep(&taken) => unreachable!("it never ends"),
        () = renewed => {}
    }
    rig.advance(lease / 2).await;
    let mut stranger = rig.subscribe(&rig.queue).await;
    rig.take_nothing(&mut stranger).await;
    open.ack(&taken).await.unwrap();
    assert_eq!(depth(&rig).await, (0, 0));
}

async fn a_crowd_for_several_queues_is_a_bundle_in_each(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut open = open(&rig, 40).await;
    let mut elsewhere = rig.subscribe("elsewhere").await;
    let mut entries: Vec<outbox::Entry> = many("note", CROWD).iter().map(outbox::Entry::from).collect();
    let again = told("note");
    entries.push(outbox::Entry::again(&again, again.to_body(), "elsewhere", Duration::ZERO));
    entries.push(outbox::Entry::again(&again, again.to_body(), &rig.queue, Duration::ZERO));
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_many(&mut tx, &entries).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(depth(&rig).await, (1, 20), "what is sent again to one queue is nobody's yet");
    assert_eq!(rig.take(&mut elsewhere, 1).await[0].body, again.to_body());
    let taken = rig.take(&mut open, 21).await;
    open.ack(&tags(&taken)).await.unwrap();
    assert_eq!(depth(&rig).await, (0, 0));
}

/// A running relay that looks into the table only when it is rung for.
struct Running {
    stop: CancellationToken,
    task: JoinSet<()>,
}

impl Running {
    async fn start(rig: &Rig) -> Self {
        let tuning = Tuning { outbox_poll: AGES, ..rig.kernel.tuning.clone() };
        let relay = Relay::new(Kernel { tuning, ..rig.kernel.clone() });
        let stop = CancellationToken::new();
        let mut running = Self { stop, task: JoinSet::new() };
        running.task.spawn(relay.run(running.stop.clone()));
        eventually("an open hatch", async || (!rig.db.hatches().outbox.with_room().is_empty()).then_some(())).await;
        running
    }

    async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(DEADLINE, self.task.join_all()).await.expect("it stops");
    }
}

/// What a relay elsewhere finds.
async fn claim(rig: &Rig) -> Vec<Claimed> {
    let mut tx = rig.db.begin().await.unwrap();
    let now = tx.now();
    let found = outbox::claim_many(&mut tx, Claim { by: mint_id(), lease: LEASE }, 100, now).await.unwrap();
    tx.commit().await.unwrap();
    found
}

async fn what_is_meant_for_one_queue_goes_to_no_other(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.db.set_hands_on(true);
    let (to_all, again) = (told("note"), told("note"));
    let elsewhere = outbox::Entry::again(&again, again.to_body(), "elsewhere", Duration::ZERO);
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_many(&mut tx, &[outbox::Entry::from(&to_all), elsewhere]).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(depth(&rig).await, (1, 0), "of one type with what goes to all who are bound to it");
    assert_eq!(rig.number("SELECT count(*) FROM messaging_queue WHERE queue = 'elsewhere'").await, 1);
}

async fn until_published(rig: &Rig, count: i64) {
    eventually("all to be published", async || {
        let published = "SELECT count(*) FROM messaging_outbox WHERE status = 'published' AND claimed_by IS NULL
             AND claimed_at >= created_at AND published_at >= claimed_at";
        (rig.number(published).await == count).then_some(())
    })
    .await;
}

async fn what_the_relay_is_handed_is_what_the_row_holds(db: TestDb) {
    let (rig, _) = Rig::in_memory(&db, 1, Chaos::default()).await;
    let mut hatch = rig.db.hatches().outbox.open(relay::NAME, LEASE);
    hatch.take(1, 0);
    rig.tell(&many("note", 3)).await;
    rig.tell(&many("note", 1)).await;
    let handed = hatch.take(1, 10).fresh;
    assert_eq!(handed.len(), 3);
    assert_eq!(claim(&rig).await.len(), 1, "born in the relay's hands, but for what found no room");
    rig.advance(LEASE + Duration::from_secs(1)).await;
    let mut found = claim(&rig).await;
    found.retain(|row| handed.iter().any(|ours| ours.id == row.id));
    found.sort_by_key(|row| row.id);
    assert_eq!(handed, found);
}

async fn the_relay_publishes_what_it_is_handed(db: TestDb) {
    let (rig, _) = Rig::in_memory(&db, 1, Chaos::default()).await;
    let relay = Running::start(&rig).await;
    rig.tell(&many("note", 3)).await;
    until_published(&rig, 3).await;
    assert_eq!(rig.depth(&rig.queue).await.ready, 3, "each once");
    let late = outbox::Entry::again(&told("note"), "late", &rig.queue, Duration::from_secs(5));
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_many(&mut tx, &[late]).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(
        rig.number("SELECT count(*) FROM messaging_outbox WHERE claimed_by IS NOT NULL").await,
        0,
        "not yet due"
    );
    relay.stop().await;
}

async fn what_the_broker_says_nothing_about_is_sent_again(db: TestDb) {
    let (rig, broker) = Rig::in_memory(&db, 1, Chaos { lose_confirm: 1.0, ..Chaos::default() }).await;
    let relay = Running::start(&rig).await;
    let event = told("note");
    rig.tell(std::slice::from_ref(&event)).await;
    eventually("a first attempt", async || (rig.depth(&rig.queue).await.ready > 0).then_some(())).await;
    broker.heal();
    rig.db.wakes().ring(outbox::BELL);
    until_published(&rig, 1).await;
    relay.stop().await;
}

async fn a_relay_that_rests_gives_back_what_it_was_handed(db: TestDb) {
    let (rig, _) = Rig::in_memory(&db, 1, Chaos::default()).await;
    let relay = Running::start(&rig).await;
    let mut tx = rig.db.begin().await.unwrap();
    pause::set(&mut tx, relay::NAME, true).await.unwrap();
    tx.commit().await.unwrap();
    // It hears of the pause, and closes, while a transaction counts on it.
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_events(&mut tx, many("note", 3)).await.unwrap();
    rig.kernel.pauses.reread().await;
    let closes = async || (!rig.db.hatches().outbox.with_room().contains_key(relay::NAME)).then_some(());
    eventually("the relay to close its hatch", closes).await;
    tx.commit().await.unwrap();
    eventually("what was handed over to be free", async || {
        let free = "SELECT count(*) FROM messaging_outbox WHERE status = 'pending' AND claimed_by IS NULL";
        (rig.number(free).await == 3).then_some(())
    })
    .await;
    assert_eq!(claim(&rig).await.len(), 3, "and due at once");
    rig.tell(&many("note", 2)).await;
    assert_eq!(claim(&rig).await.len(), 2, "its hatch is closed");
    relay.stop().await;
}

async fn a_relay_that_stops_sends_what_it_was_handed(db: TestDb) {
    let (rig, _) = Rig::in_memory(&db, 1, Chaos::default()).await;
    let relay = Running::start(&rig).await;
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_events(&mut tx, many("note", 3)).await.unwrap();
    let commit = async {
        tokio::task::yield_now().await;
        tx.commit().await.unwrap();
    };
    tokio::join!(relay.stop(), commit);
    until_published(&rig, 3).await;
}

async fn what_a_dead_relay_was_handed_waits_for_its_lease_or_its_successor(db: TestDb) {
    let (rig, _) = Rig::in_memory(&db, 1, Chaos::default()).await;
    let mut dead = rig.db.hatches().outbox.open(relay::NAME, LEASE);
    dead.take(10, 0);
    rig.tell(&many("note", 3)).await;
    drop(dead);
    assert_eq!(claim(&rig).await.len(), 0);
    let relay = Running::start(&rig).await;
    if rig.is_postgres() {
        // It may be another instance's that is alive.
        rig.advance(LEASE + Duration::from_secs(1)).await;
        rig.db.wakes().ring(outbox::BELL);
    }
    until_published(&rig, 3).await;
    relay.stop().await;
}

each_database!(
    a_relay_that_rests_gives_back_what_it_was_handed,
    a_relay_that_stops_sends_what_it_was_handed,
    the_relay_publishes_what_it_is_handed,
    what_a_dead_relay_was_handed_waits_for_its_lease_or_its_successor,
    what_the_broker_says_nothing_about_is_sent_again,
    what_the_relay_is_handed_is_what_the_row_holds,
    a_bundle_in_work_stays_its_readers,
    a_crowd_for_several_queues_is_a_bundle_in_each,
    a_crowd_is_held_by_one_row_until_the_last_of_it_is_done,
    a_full_hatch_keeps_nobody_else_waiting,
    a_reader_that_leaves_empties_its_bundles,
    one_of_a_bundle_can_be_rejected,
    what_was_met_before_it_is_handed_over_is_a_duplicate,
    what_a_dead_reader_held_in_a_bundle_comes_back_each_for_itself,
    what_comes_out_of_a_bundle_is_as_old_as_it_was,
    what_is_done_with_does_not_come_again_though_its_lease_is_over,
    what_is_put_back_from_a_bundle_is_free_for_all,
    what_was_given_back_does_not_come_again_with_its_bundle,
    a_reader_that_leaves_gives_back_what_it_has_not_taken,
    a_transaction_that_counts_on_a_hatch_keeps_it_open,
    what_has_lain_too_long_is_put_back_at_once,
    what_finds_no_room_is_free_for_all,
    what_is_handed_over_is_what_the_row_holds,
    what_is_meant_for_one_queue_goes_to_no_other,
    what_is_not_committed_is_not_handed_over,
);
