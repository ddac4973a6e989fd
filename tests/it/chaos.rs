//! A broker that repeats, reorders, loses confirms and acknowledgements and refuses, and loops that die at their work, by the
//! seed: whatever happens, every event ends in exactly one effect or exactly one open dead letter. A failure names its seed.

use std::future::poll_fn;
use std::ops::RangeInclusive;
use std::pin::pin;
use std::task::Poll;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use stockade::operations::audit::{self, Queues};
use stockade_kernel::messaging::resync::Resyncs;
use stockade_kernel::messaging::transport::memory::{Chaos, MemoryBroker};
use stockade_kernel::messaging::transport::{Binding, Transport};
use stockade_kernel::messaging::{Reaction, outbox};

use crate::support::kernel::{AGES, ATTEMPTS_MAX, Probe, QUEUE, Rig, many};
use crate::support::{Engine, TestDb};

const CHAOS: Chaos = Chaos { duplicate: 0.15, reorder: 0.3, lose_confirm: 0.15, refuse: 0.1, lose_ack: 0.15 };
const GOOD: usize = 192;
/// Two of each of these among the good ones: two hundred in all.
const BAD: [&str; 4] = ["retry", "reject", "violate", "panic"];
/// How often relay and consumer die. Fewer than the three times after which a message counts as their killer.
const DEATHS: usize = 2;
/// Far more rounds than any seed needs to come to rest.
const ROUNDS_MAX: usize = 200;

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn every_seed_ends_in_one_effect_each_on_sqlite() {
    survive_all(Engine::Sqlite, 1..=24).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn every_seed_ends_in_one_effect_each_on_postgres() {
    survive_all(Engine::Postgres, 101..=104).await;
}

async fn survive_all(engine: Engine, seeds: RangeInclusive<u64>) {
    let mut deaths = Deaths::default();
    for seed in seeds {
        let db = TestDb::new(engine).await;
        let died = survive(&db, seed).await;
        deaths = Deaths { relay: deaths.relay + died.relay, consumer: deaths.consumer + died.consumer };
    }
    assert!(deaths.relay > 1 && deaths.consumer > 1, "the seeds killed something: {deaths:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn what_fails_at_first_still_ends_in_one_effect() {
    for (engine, seeds) in [(Engine::Sqlite, 201..=206), (Engine::Postgres, 301..=302)] {
        for seed in seeds {
            recover(&TestDb::new(engine).await, seed).await;
        }
    }
}

async fn recover(db: &TestDb, seed: u64) {
    let (rig, broker) = Rig::in_memory(db, seed, CHAOS).await;
    Resyncs::new(rig.db.clone()).record_bindings(&bindings()).await.unwrap();
    let events = many("retry", 200);
    rig.tell(&events).await;
    die_at_work(&rig, seed).await;
    rig.settle().await;
    assert!(rig.number("SELECT count(*) FROM messaging_inbox WHERE state = 'retrying'").await > 0, "seed {seed}");
    rig.probe.heal();
    settle_all(&rig, seed).await;
    broker.heal();
    settle_all(&rig, seed).await;
    for event in &events {
        assert_eq!(rig.effects(event).await, 1, "seed {seed}: {}", event.event_id);
        assert_eq!(rig.inbox(event).await.unwrap().state, "processed", "seed {seed}: {}", event.event_id);
    }
    assert!(rig.letters().await.is_empty(), "seed {seed}");
    assert_audited(&rig, seed).await;
    rig.db.close().await;
}

/// The probe's binding, for the audit.
fn bindings() -> [Binding; 1] {
    [Binding { consumer: Probe::NAME, queue: QUEUE.to_owned(), keys: Probe::KEYS }]
}

/// Every invariant holds, with no grace for events on their way.
async fn assert_audited(rig: &Rig, seed: u64) {
    // A later moment than the last publication, which counts as settled before it.
    rig.advance(AGES).await;
    let report = audit::run(&rig.db, &Queues::at_rest(&bindings())).await.unwrap();
    let broken: Vec<_> = report.checks.iter().filter(|check| check.violations > 0).collect();
    assert!(broken.is_empty(), "seed {seed}: {broken:#?}");
}

async fn survive(db: &TestDb, seed: u64) -> Deaths {
    let (rig, broker) = Rig::in_memory(db, seed, CHAOS).await;
    Resyncs::new(rig.db.clone()).record_bindings(&bindings()).await.unwrap();
    let good = many("note", GOOD);
    let bad: Vec<_> = BAD.iter().flat_map(|does| many(does, 2)).collect();
    for group in [&good[..GOOD / 2], &bad, &good[GOOD / 2..]] {
        rig.tell(group).await;
    }
    let deaths = die_at_work(&rig, seed).await;
    settle_all(&rig, seed).await;
    broker.heal();
    settle_all(&rig, seed).await;
    for event in &good {
        let row = rig.inbox(event).await.unwrap_or_else(|| panic!("seed {seed}: {} never arrived", event.event_id));
        assert_eq!((row.state.as_str(), row.attempts), ("processed", 1), "seed {seed}: {}", event.event_id);
        assert_eq!(rig.effects(event).await, 1, "seed {seed}: {}", event.event_id);
    }
    let letters = rig.letters().await;
    for (event, does) in bad.iter().zip(BAD.iter().flat_map(|does| [does; 2])) {
        let row = rig.inbox(event).await.unwrap_or_else(|| panic!("seed {seed}: {} never arrived", event.event_id));
        let attempts = if *does == "reject" { 1 } else { ATTEMPTS_MAX };
        assert_eq!((row.state.as_str(), row.attempts), ("dead", attempts), "seed {seed}: {does}");
        assert_eq!(rig.effects(event).await, 0, "seed {seed}: {does}");
        let id = Some(event.event_id.to_string());
        let own: Vec<_> = letters.iter().filter(|letter| letter.message_id == id).collect();
        let reason = match *does {
            "reject" => "business-rule",
            "panic" => "handler-panic",
            _ => "retries-exhausted",
        };
        assert_eq!(own.len(), 1, "seed {seed}: {does}");
        assert_eq!((own[0].reason.as_str(), own[0].state.as_str()), (reason, "open"), "seed {seed}");
    }
    let (mut tx, repeats) = (rig.db.read().await.unwrap(), "SELECT sum(duplicates) FROM messaging_inbox");
    let now = tx.now();
    assert_eq!(outbox::backlog(&mut tx, now).await.unwrap().dead, 0, "seed {seed}");
    drop(tx);
    assert!(rig.number(repeats).await > 0, "seed {seed}: the broker was tame");
    assert_audited(&rig, seed).await;
    rig.db.close().await;
    deaths
}

/// How often each was dropped in the middle of its work.
#[derive(Debug, Default)]
struct Deaths {
    relay: usize,
    consumer: usize,
}

/// Drops relay and consumer in the middle of a pass, wherever that is by the seed.
async fn die_at_work(rig: &Rig, seed: u64) -> Deaths {
    let mut rng = StdRng::seed_from_u64(seed);
    // A pass takes few polls on SQLite, which is called directly, and many on Postgres.
    let most = if rig.is_postgres() { 6 } else { 2 };
    let mut polls = || 1 << rng.random_range(0..most);
    let mut deaths = Deaths::default();
    for _ in 0..DEATHS {
        deaths.relay += usize::from(is_cut_off(rig.relay.try_once(), polls()).await);
        // The claim of a relay that died runs out.
        rig.advance(AGES).await;
        rig.relay.try_once().await.unwrap();
        let mut subscription = rig.subscribe(QUEUE).await;
        deaths.consumer += usize::from(is_cut_off(rig.consumer.try_once(&mut subscription), polls()).await);
    }
    deaths
}

/// Polls a future so often and then drops it; whether it was still at work.
async fn is_cut_off(future: impl Future, polls: u32) -> bool {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(true);
        }
        left -= 1;
        future.as_mut().poll(context).map(|_| false)
    })
    .await
}

/// Works until the outbox has nothing left to send and the broker nothing to deliver, letting time pass.
async fn settle_all(rig: &Rig, seed: u64) {
    for _ in 0..ROUNDS_MAX {
        rig.settle().await;
        let pending = rig.number("SELECT count(*) FROM messaging_outbox WHERE status IN ('pending', 'failed')").await;
        if pending == 0 && rig.depth(QUEUE).await.ready == 0 {
            return;
        }
        rig.advance(AGES).await;
    }
    panic!("seed {seed}: not settled after {ROUNDS_MAX} rounds");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn the_same_seed_misbehaves_the_same_way() {
    let db = TestDb::new(Engine::Sqlite).await;
    let rig = Rig::new(&db).await;
    let mut histories = Vec::new();
    for seed in [7, 7, 8] {
        let broker = MemoryBroker::new(seed, CHAOS, rig.db.clock().clone());
        histories.push(history(Transport::Memory(broker)).await);
    }
    assert_eq!(histories[0], histories[1]);
    assert_ne!(histories[0], histories[2]);
}

/// What a broker hands out for a hundred numbered messages, acknowledged as they come.
async fn history(transport: Transport) -> Vec<String> {
    let mut seen = Vec::new();
    let mut subscription = transport.subscribe(QUEUE).await.unwrap();
    for number in 0..100 {
        let message = stockade_kernel::messaging::transport::RawMessage {
            queue: QUEUE.to_owned(),
            routing_key: String::new(),
            message_id: None,
            correlation_id: None,
            headers: serde_json::Map::new(),
            body: format!("{number}").into(),
        };
        transport.publish_raw(&message, 1).await.unwrap();
        if number % 10 == 9 {
            for delivery in subscription.take(7).await.unwrap() {
                seen.push(String::from_utf8(delivery.body.to_vec()).unwrap());
                subscription.ack(&[delivery.tag]).await.unwrap();
            }
        }
    }
    seen
}
