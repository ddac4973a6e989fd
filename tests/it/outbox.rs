//! The outbox and its relay: what is committed goes out, what is not does not, and no claim outlives its lease.

use std::time::Duration;

use serde_json::{Value, json};
use stockade_kernel::clock::{Clock, mint_id};
use stockade_kernel::messaging::outbox::{self, Backlog, Claim, Claimed, Entry, OutboxRow, Settlement};
use stockade_kernel::messaging::relay::Relay;
use stockade_kernel::messaging::transport::memory::Chaos;
use uuid::Uuid;

use crate::support::kernel::{AGES, LEASE, Rig, event, many, told};
use crate::support::{DEADLINE, Engine, TestDb, each_database};

async fn an_event_exists_only_if_its_transaction_commits(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (kept, dropped) = (told("note"), told("note"));
    rig.tell(std::slice::from_ref(&kept)).await;
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_events(&mut tx, vec![dropped.clone()]).await.unwrap();
    drop(tx);
    rig.settle().await;
    assert_eq!((rig.effects(&kept).await, rig.effects(&dropped).await), (1, 0));
    let row = find(&rig, kept.event_id).await.unwrap();
    assert_eq!((row.status.as_str(), row.event_type.as_str()), ("published", "probe.told"));
    assert!(row.published_at.is_some());
    assert!(find(&rig, dropped.event_id).await.is_none());
}

/// On Postgres alone: the one writer of SQLite cannot hold a transaction open beside another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_row_committed_late_is_not_skipped() {
    let db = TestDb::new(Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    let (older, newer) = (told("note"), told("note"));
    assert!(older.event_id < newer.event_id);
    // The older row is written first and committed after the newer one has been published.
    let mut slow = rig.db.begin().await.unwrap();
    outbox::append_events(&mut slow, vec![older.clone()]).await.unwrap();
    rig.tell(std::slice::from_ref(&newer)).await;
    rig.settle().await;
    assert_eq!((rig.effects(&older).await, rig.effects(&newer).await), (0, 1));
    slow.commit().await.unwrap();
    rig.settle().await;
    assert_eq!((rig.effects(&older).await, rig.effects(&newer).await), (1, 1));
}

async fn a_row_with_a_lower_id_than_a_published_one_is_not_skipped(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (older, newer) = (told("note"), told("note"));
    assert!(older.event_id < newer.event_id);
    rig.tell(std::slice::from_ref(&newer)).await;
    rig.settle().await;
    assert_eq!(rig.effects(&newer).await, 1);
    rig.tell(std::slice::from_ref(&older)).await;
    rig.settle().await;
    assert_eq!((rig.effects(&older).await, rig.effects(&newer).await), (1, 1));
}

async fn an_event_goes_to_every_queue_bound_to_its_key(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.tell(&many("note", 3)).await;
    assert_eq!(rig.relay.try_once().await.unwrap(), 3);
    assert_eq!((rig.depth(&rig.queue).await.ready, rig.depth(&rig.second_queue).await.ready), (3, 3));
    assert_eq!(rig.relay.try_once().await.unwrap(), 0, "each goes out once");
}

async fn an_event_goes_into_its_queues_with_the_commit_that_writes_it(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.db.set_hands_on(true);
    let (told, undone) = (told("note"), told("note"));
    rig.tell(std::slice::from_ref(&told)).await;
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_events(&mut tx, vec![undone.clone()]).await.unwrap();
    drop(tx);
    let row = find(&rig, told.event_id).await.unwrap();
    assert_eq!((row.status.as_str(), row.published_at.is_some()), ("published", true));
    assert_eq!((rig.depth(&rig.queue).await.ready, rig.depth(&rig.second_queue).await.ready), (1, 1));
    assert_eq!(rig.relay.try_once().await.unwrap(), 0, "nothing is left for the relay");
    assert_eq!(rig.consume().await, 1);
    assert_eq!((rig.effects(&told).await, rig.effects(&undone).await), (1, 0));
    // What has a delay waits for the relay all the same.
    let mut tx = rig.db.begin().await.unwrap();
    let later = Entry::retry(&told, told.to_body(), &rig.queue, 1, Duration::from_secs(30));
    outbox::append_many(&mut tx, &[later]).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(rig.depth(&rig.queue).await.ready, 0);
    rig.advance(Duration::from_secs(31)).await;
    assert_eq!(rig.relay.try_once().await.unwrap(), 1);
    assert_eq!(rig.depth(&rig.queue).await.ready, 1);
}

async fn an_event_no_queue_is_bound_to_is_published_to_nobody(db: TestDb) {
    let rig = Rig::new(&db).await;
    let lonely = event("probe.ignored", json!({}));
    rig.tell(std::slice::from_ref(&lonely)).await;
    assert_eq!(rig.relay.try_once().await.unwrap(), 1);
    assert_eq!(find(&rig, lonely.event_id).await.unwrap().status, "published");
    assert_eq!(rig.number("SELECT count(*) FROM messaging_queue").await, 0);
}

async fn a_pass_takes_a_batch_and_the_next_one_goes_on(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.tell(&many("note", 100)).await;
    let mut passes = Vec::new();
    for _ in 0..3 {
        passes.push(rig.relay.try_once().await.unwrap());
    }
    assert_eq!(passes, [64, 36, 0]);
    assert_eq!(rig.depth(&rig.queue).await.ready, 100);
}

async fn a_claimed_row_is_skipped_by_others_until_its_lease_ends(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.tell(&many("note", 3)).await;
    let (first, second) = (mint_id(), mint_id());
    assert_eq!(claim(&rig, first, 2).await.len(), 2);
    assert_eq!(claim(&rig, second, 9).await.len(), 1, "only what the first left");
    assert!(claim(&rig, second, 9).await.is_empty());
    rig.advance(LEASE + Duration::from_secs(1)).await;
    assert_eq!(claim(&rig, second, 9).await.len(), 3);
}

async fn two_relays_claiming_at_once_share_the_rows(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.tell(&many("note", 40)).await;
    let (first, second) = tokio::join!(claim(&rig, mint_id(), 30), claim(&rig, mint_id(), 30));
    let mut ids: Vec<Uuid> = first.iter().chain(&second).map(|claimed| claimed.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), first.len() + second.len(), "no row is claimed twice");
    assert!(ids.len() >= 30);
}

async fn two_relays_at_once_publish_each_row_once(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.tell(&many("note", 500)).await;
    let second = Relay::new(rig.kernel.clone());
    let work = async |relay: &Relay| while relay.try_once().await.unwrap() > 0 {};
    tokio::join!(work(&rig.relay), work(&second));
    // A pass that met only rows the other was moving has ended early.
    work(&rig.relay).await;
    assert_eq!(rig.depth(&rig.queue).await.ready, 500);
    assert_eq!(rig.number("SELECT count(DISTINCT outbox_ref) FROM messaging_queue").await, 500);
}

async fn settling_is_fenced_by_the_claim(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.tell(std::slice::from_ref(&event)).await;
    let (late, owner) = (mint_id(), mint_id());
    claim(&rig, late, 1).await;
    rig.advance(LEASE + Duration::from_secs(1)).await;
    assert_eq!(claim(&rig, owner, 1).await.len(), 1);
    let failed = Settlement::Failed { id: event.event_id, retry_after: None, error: "late".into() };
    for verdict in [Settlement::Published(event.event_id), failed, Settlement::Released(event.event_id)] {
        settle(&rig, late, verdict).await;
        let row = find(&rig, event.event_id).await.unwrap();
        assert_eq!((row.status.as_str(), row.attempts, row.last_error), ("pending", 0, None));
    }
    assert!(claim(&rig, mint_id(), 1).await.is_empty(), "the owner's lease has not been touched");
    settle(&rig, owner, Settlement::Published(event.event_id)).await;
    let row = find(&rig, event.event_id).await.unwrap();
    assert_eq!(row.status, "published");
    assert!(row.published_at.is_some());
}

async fn a_refusal_counts_waits_and_in_the_end_is_dead(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.tell(std::slice::from_ref(&event)).await;
    let by = mint_id();
    claim(&rig, by, 1).await;
    let refused = |retry_after| Settlement::Failed { id: event.event_id, retry_after, error: "no room".into() };
    settle(&rig, by, refused(Some(Duration::from_secs(30)))).await;
    let row = find(&rig, event.event_id).await.unwrap();
    assert_eq!((row.status.as_str(), row.attempts, row.last_error.as_deref()), ("failed", 1, Some("no room")));
    assert!(claim(&rig, by, 1).await.is_empty(), "not before the delay is over");
    rig.advance(Duration::from_secs(31)).await;
    let claimed = claim(&rig, by, 1).await;
    assert_eq!((claimed.len(), claimed[0].attempts), (1, 1));
    settle(&rig, by, refused(None)).await;
    let row = find(&rig, event.event_id).await.unwrap();
    assert_eq!((row.status.as_str(), row.attempts), ("dead", 2));
    rig.advance(AGES).await;
    assert!(claim(&rig, by, 1).await.is_empty(), "dead is for good");
    assert_eq!(backlog(&rig).await, Backlog { pending: 0, dead: 1, attempts_max: 0, oldest_due_ms: None });
}

async fn a_released_row_is_due_at_once_and_counts_nothing(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.tell(std::slice::from_ref(&event)).await;
    let by = mint_id();
    claim(&rig, by, 1).await;
    settle(&rig, by, Settlement::Released(event.event_id)).await;
    let row = find(&rig, event.event_id).await.unwrap();
    assert_eq!((row.status.as_str(), row.attempts), ("pending", 0));
    assert_eq!(claim(&rig, mint_id(), 1).await.len(), 1);
}

async fn the_backlog_says_how_much_waits_and_since_when(db: TestDb) {
    let rig = Rig::new(&db).await;
    assert_eq!(backlog(&rig).await, Backlog { pending: 0, dead: 0, attempts_max: 0, oldest_due_ms: None });
    rig.tell(&many("note", 2)).await;
    append(&rig, Entry { delay: AGES * 10, id: mint_id(), ..Entry::from(&told("note")) }).await;
    rig.advance(Duration::from_secs(30)).await;
    let seen = backlog(&rig).await;
    assert_eq!((seen.pending, seen.dead), (3, 0));
    assert!((30_000..60_000).contains(&seen.oldest_due_ms.unwrap()), "{seen:?}");
}

async fn a_retry_row_keeps_its_bytes_and_goes_to_its_queue_alone(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    // Not how we would write it, but how it came: spaces and all.
    let body = format!(" {} \n", String::from_utf8(event.to_body()).unwrap()).into_bytes();
    append(&rig, Entry::retry(&event, body.clone(), &rig.queue, 2, Duration::from_secs(30))).await;
    assert_eq!(rig.relay.try_once().await.unwrap(), 0, "not yet due");
    rig.advance(Duration::from_secs(31)).await;
    assert_eq!(rig.relay.try_once().await.unwrap(), 1);
    assert_eq!(rig.depth(&rig.second_queue).await.ready, 0);
    let delivery = rig.subscribe(&rig.queue).await.take(9).await.unwrap().remove(0);
    assert_eq!(delivery.body, body);
    assert_eq!(delivery.message_id, Some(event.event_id.to_string()));
    assert_eq!(delivery.correlation_id.as_deref(), Some(event.correlation_id.as_str()));
    assert_eq!((delivery.routing_key.as_str(), &delivery.headers["x-attempts"]), ("probe.told", &Value::from(2)));
}

async fn any_bytes_survive_the_outbox(db: TestDb) {
    let rig = Rig::new(&db).await;
    let bodies: [&[u8]; 4] = [b"", b"\x00\xff\xfe", "\u{2603}".as_bytes(), &[0x80; 100_000]];
    for body in bodies {
        let entry = Entry {
            id: mint_id(),
            body: body.to_vec().into(),
            target: rig.queue.clone(),
            ..Entry::from(&told("note"))
        };
        append(&rig, entry).await;
    }
    // Together in one statement, too.
    let mut tx = rig.db.begin().await.unwrap();
    let entry = |body: &[u8]| Entry {
        id: mint_id(),
        body: body.to_vec().into(),
        target: rig.queue.clone(),
        ..Entry::from(&told("note"))
    };
    let together: Vec<Entry> = bodies.into_iter().map(entry).collect();
    outbox::append_many(&mut tx, &together).await.unwrap();
    tx.commit().await.unwrap();
    rig.relay.try_once().await.unwrap();
    let mut seen: Vec<Vec<u8>> =
        rig.subscribe(&rig.queue).await.take(99).await.unwrap().into_iter().map(|d| d.body.to_vec()).collect();
    let mut sent: Vec<Vec<u8>> = bodies.iter().chain(&bodies).map(|body| body.to_vec()).collect();
    seen.sort();
    sent.sort();
    assert!(seen == sent, "the bytes have changed");
}

async fn a_broker_that_says_nothing_counts_nothing_and_nothing_is_lost(db: TestDb) {
    let silent = Chaos { lose_confirm: 1.0, ..Chaos::default() };
    let (rig, broker) = Rig::in_memory(&db, 1, silent).await;
    let events = many("note", 5);
    rig.tell(&events).await;
    for _ in 0..3 {
        assert_eq!(rig.relay.try_once().await.unwrap(), 0, "no word is no progress");
    }
    for event in &events {
        let row = find(&rig, event.event_id).await.unwrap();
        assert_eq!((row.status.as_str(), row.attempts), ("pending", 0));
    }
    broker.heal();
    rig.settle().await;
    for event in &events {
        assert_eq!(find(&rig, event.event_id).await.unwrap().status, "published");
        assert_eq!(rig.effects(event).await, 1);
        assert_eq!(rig.inbox(event).await.unwrap().duplicates, 3, "stored four times, run once");
    }
}

async fn a_broker_that_refuses_is_asked_again_until_the_row_is_dead(db: TestDb) {
    let (rig, _) = Rig::in_memory(&db, 1, Chaos { refuse: 1.0, ..Chaos::default() }).await;
    let event = told("note");
    rig.tell(std::slice::from_ref(&event)).await;
    for attempts in 1..=30 {
        assert_eq!(rig.relay.try_once().await.unwrap(), 1);
        assert_eq!(rig.relay.try_once().await.unwrap(), 0, "backing off");
        assert_eq!(find(&rig, event.event_id).await.unwrap().attempts, attempts);
        rig.advance(AGES).await;
    }
    assert_eq!(find(&rig, event.event_id).await.unwrap().status, "dead");
    assert_eq!(rig.relay.try_once().await.unwrap(), 0);
}

async fn a_commit_wakes_the_relay_of_every_instance(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut here = rig.db.wakes().bell(outbox::BELL);
    rig.tell(&many("note", 1)).await;
    here.rung().await;
    if !rig.is_postgres() {
        return; // one process serves a file
    }
    let other = db.open(Clock::System).await;
    let mut there = other.wakes().bell(outbox::BELL);
    let wakes = async { tokio::join!(rig.db.clone().exchange_wakes(), other.clone().exchange_wakes()) };
    // The listeners need a moment to connect, and a bell rung before that is not heard: ring until it is.
    let ringing = async {
        let mut pace = tokio::time::interval(Duration::from_millis(50));
        loop {
            rig.tell(&many("note", 1)).await;
            pace.tick().await;
        }
    };
    let heard = tokio::time::timeout(DEADLINE, there.rung());
    tokio::select! {
        _ = wakes => unreachable!("exchanging wakes never ends"),
        () = ringing => {}
        heard = heard => heard.expect("the other instance hears the bell"),
    }
}

async fn claim(rig: &Rig, by: Uuid, limit: i64) -> Vec<Claimed> {
    let mut tx = rig.db.begin().await.unwrap();
    let now = tx.now();
    let claimed = outbox::claim_many(&mut tx, Claim { by, lease: LEASE }, limit, now).await.unwrap();
    tx.commit().await.unwrap();
    claimed
}

async fn settle(rig: &Rig, by: Uuid, settlement: Settlement) {
    let mut tx = rig.db.begin().await.unwrap();
    let now = tx.now();
    outbox::settle_many(&mut tx, by, &[settlement], now, now).await.unwrap();
    tx.commit().await.unwrap();
}

async fn append(rig: &Rig, entry: Entry) {
    let mut tx = rig.db.begin().await.unwrap();
    outbox::append_many(&mut tx, &[entry]).await.unwrap();
    tx.commit().await.unwrap();
}

async fn find(rig: &Rig, id: Uuid) -> Option<OutboxRow> {
    let mut tx = rig.db.read().await.unwrap();
    outbox::find(&mut tx, None, id).await.unwrap()
}

async fn backlog(rig: &Rig) -> Backlog {
    let mut tx = rig.db.read().await.unwrap();
    let now = tx.now();
    outbox::backlog(&mut tx, now).await.unwrap()
}

each_database!(
    an_event_exists_only_if_its_transaction_commits,
    a_row_with_a_lower_id_than_a_published_one_is_not_skipped,
    an_event_goes_to_every_queue_bound_to_its_key,
    an_event_goes_into_its_queues_with_the_commit_that_writes_it,
    an_event_no_queue_is_bound_to_is_published_to_nobody,
    a_pass_takes_a_batch_and_the_next_one_goes_on,
    a_claimed_row_is_skipped_by_others_until_its_lease_ends,
    two_relays_claiming_at_once_share_the_rows,
    two_relays_at_once_publish_each_row_once,
    settling_is_fenced_by_the_claim,
    a_refusal_counts_waits_and_in_the_end_is_dead,
    a_released_row_is_due_at_once_and_counts_nothing,
    the_backlog_says_how_much_waits_and_since_when,
    a_retry_row_keeps_its_bytes_and_goes_to_its_queue_alone,
    any_bytes_survive_the_outbox,
    a_broker_that_says_nothing_counts_nothing_and_nothing_is_lost,
    a_broker_that_refuses_is_asked_again_until_the_row_is_dead,
    a_commit_wakes_the_relay_of_every_instance,
);
