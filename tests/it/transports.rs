//! The conformance suite of transports: written once, and every transport is held to it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, json};
use stockade_kernel::messaging::transport::memory::Chaos;
use stockade_kernel::messaging::transport::{Delivery, RawMessage, Subscription, Tag, Transport, dlq_of};

use crate::support::kernel::{KEY, LEASE, Rig, many, told};
use crate::support::{TestDb, eventually};

async fn what_is_published_is_delivered(rig: Rig) {
    let events = many("note", 100);
    rig.tell(&events).await;
    while rig.relay.try_once().await.unwrap() > 0 {}
    let mut subscription = rig.subscribe(&rig.queue).await;
    let mut seen = HashSet::new();
    for size in [30, 30, 30, 10] {
        let batch = rig.take(&mut subscription, size).await;
        for delivery in &batch {
            assert_eq!((delivery.deliveries, delivery.routing_key.as_str()), (1, KEY));
            assert!(delivery.x_death.is_null());
            seen.insert(delivery.message_id.clone().unwrap());
        }
        subscription.ack(&tags(&batch)).await.unwrap();
    }
    rig.take_nothing(&mut subscription).await;
    assert_eq!(seen, events.iter().map(|event| event.event_id.to_string()).collect());
}

async fn no_more_is_taken_than_was_asked_for(rig: Rig) {
    rig.kernel.transport.publish_raw(&raw(&rig.queue, b"one of many"), 20).await.unwrap();
    let mut subscription = rig.subscribe(&rig.queue).await;
    let mut count = 0;
    while count < 20 {
        subscription.ready(crate::support::DEADLINE).await;
        let batch = subscription.take(7).await.unwrap();
        assert!(batch.len() <= 7);
        count += batch.len();
    }
    assert_eq!(count, 20);
}

async fn a_key_routes_to_every_bound_queue_and_a_queue_name_to_one(rig: Rig) {
    publish(&rig, "", b"to all").await;
    publish(&rig, &rig.second_queue, b"to one").await;
    let take = async |queue: &str, count| -> Vec<Bytes> {
        let mut subscription = rig.subscribe(queue).await;
        let taken = rig.take(&mut subscription, count).await;
        rig.take_nothing(&mut subscription).await;
        taken.into_iter().map(|delivery| delivery.body).collect()
    };
    assert_eq!(take(&rig.queue, 1).await, ["to all"]);
    assert_eq!(take(&rig.second_queue, 2).await, ["to all", "to one"]);
}

async fn a_key_bound_to_nothing_reaches_nobody(rig: Rig) {
    let message = RawMessage { routing_key: "probe.unheard".into(), ..raw("", b"lost") };
    rig.kernel.transport.publish_raw(&message, 1).await.unwrap();
    assert_eq!((rig.depth(&rig.queue).await.ready, rig.depth(&rig.second_queue).await.ready), (0, 0));
}

async fn the_label_travels_with_the_message(rig: Rig) {
    let headers = json!({ "x-event-id": "e", "nested": { "n": [1, null, "\u{0}"] } }).as_object().unwrap().clone();
    let message = RawMessage {
        message_id: Some("not a uuid".into()),
        correlation_id: Some("because".into()),
        headers: headers.clone(),
        ..raw(&rig.queue, b"x")
    };
    rig.kernel.transport.publish_raw(&message, 2).await.unwrap();
    let mut subscription = rig.subscribe(&rig.queue).await;
    let taken = rig.take(&mut subscription, 2).await;
    rig.take_nothing(&mut subscription).await;
    for delivery in taken {
        assert_eq!(delivery.message_id.as_deref(), Some("not a uuid"));
        assert_eq!(delivery.correlation_id.as_deref(), Some("because"));
        assert_eq!((delivery.header("x-event-id"), &delivery.headers), (Some("e"), &headers));
    }
}

async fn an_acknowledged_message_is_gone(rig: Rig) {
    publish(&rig, &rig.queue, b"a").await;
    publish(&rig, &rig.queue, b"b").await;
    let mut subscription = rig.subscribe(&rig.queue).await;
    let taken = rig.take(&mut subscription, 2).await;
    subscription.ack(&tags(&taken[..1])).await.unwrap();
    let former = lose(&rig, subscription).await;
    let mut next = rig.subscribe(&rig.queue).await;
    let again = rig.take(&mut next, 1).await;
    assert_eq!(bodies(&again), bodies(&taken[1..]), "only what was not acknowledged comes back");
    rig.take_nothing(&mut next).await;
    drop(former);
}

async fn messages_are_settled_in_any_order(rig: Rig) {
    for number in 0..10u8 {
        publish(&rig, &rig.queue, &[number]).await;
    }
    let mut subscription = rig.subscribe(&rig.queue).await;
    let taken = rig.take(&mut subscription, 10).await;
    let pick = |wanted: &[usize]| -> Vec<Tag> { wanted.iter().map(|index| taken[*index].tag).collect() };
    subscription.ack(&pick(&[7, 3])).await.unwrap();
    subscription.reject(&pick(&[5])).await.unwrap();
    subscription.ack(&pick(&[2, 0, 1])).await.unwrap();
    subscription.ack(&pick(&[6, 8])).await.unwrap();
    let former = lose(&rig, subscription).await;
    let mut next = rig.subscribe(&rig.queue).await;
    let mut rest: Vec<u8> = rig.take(&mut next, 2).await.iter().map(|delivery| delivery.body[0]).collect();
    rest.sort_unstable();
    assert_eq!(rest, [4, 9], "what was settled stays settled, and nothing else does");
    rig.take_nothing(&mut next).await;
    drop(former);
}

async fn what_is_acknowledged_soon_is_gone_after_the_next_take_or_on_closing(rig: Rig) {
    for body in [b"a", b"b", b"c"] {
        publish(&rig, &rig.queue, body).await;
    }
    let mut subscription = rig.subscribe(&rig.queue).await;
    let first = rig.take(&mut subscription, 1).await;
    subscription.ack_soon(&tags(&first)).await.unwrap();
    // What is owed is a reason to come back at once, not to wait for news.
    tokio::time::timeout(crate::support::DEADLINE, subscription.ready(Duration::from_secs(3600))).await.unwrap();
    let second = rig.take(&mut subscription, 1).await;
    assert_eq!(bodies(&second), ["b"]);
    subscription.ack_soon(&tags(&second)).await.unwrap();
    subscription.close().await;
    rig.advance(LEASE + Duration::from_secs(1)).await;
    let rest = rig.take(&mut rig.subscribe(&rig.queue).await, 1).await;
    assert_eq!(bodies(&rest), ["c"], "neither comes back");
}

async fn a_rejected_message_moves_to_the_dead_letter_queue_with_its_history(rig: Rig) {
    publish(&rig, "", b"bad").await;
    let mut subscription = rig.subscribe(&rig.queue).await;
    let taken = rig.take(&mut subscription, 1).await;
    subscription.reject(&tags(&taken)).await.unwrap();
    let dlq = dlq_of(&rig.queue);
    eventually("it moves", || async { (rig.depth(&dlq).await.ready == 1).then_some(()) }).await;
    assert_eq!(rig.depth(&rig.queue).await.ready, 0);
    let mut office = rig.subscribe(&dlq).await;
    let dead = rig.take(&mut office, 1).await;
    assert_eq!((bodies(&dead), dead[0].deliveries, dead[0].routing_key.as_str()), (bodies(&taken), 1, KEY));
    let death = &dead[0].x_death[0];
    assert_eq!((&death["reason"], &death["queue"]), (&json!("rejected"), &json!(rig.queue)));
    assert_eq!(death["routing-keys"], json!([KEY]));
    assert!(death["time"].is_string());
}

async fn a_released_message_comes_back(rig: Rig) {
    publish(&rig, &rig.queue, b"later").await;
    let mut subscription = rig.subscribe(&rig.queue).await;
    for round in 1..=3 {
        let taken = rig.take(&mut subscription, 1).await;
        // RabbitMQ counts it as a delivery.
        assert_eq!(taken[0].deliveries, if rig.is_on_rabbit() { round } else { 1 });
        subscription.release(&tags(&taken)).await.unwrap();
    }
    subscription.close().await;
    eventually("it is back", || async { (rig.depth(&rig.queue).await.ready == 1).then_some(()) }).await;
}

async fn a_message_is_nobody_elses_while_it_is_held(rig: Rig) {
    publish(&rig, &rig.queue, b"mine").await;
    let mut first = rig.subscribe(&rig.queue).await;
    assert_eq!(rig.take(&mut first, 1).await.len(), 1);
    let mut second = rig.subscribe(&rig.queue).await;
    rig.take_nothing(&mut second).await;
    rig.take_nothing(&mut first).await;
    rig.advance(LEASE / 2).await;
    rig.take_nothing(&mut second).await;
}

async fn a_lost_hold_brings_the_message_back_counted(rig: Rig) {
    publish(&rig, &rig.queue, b"again").await;
    let mut formers = Vec::new();
    for deliveries in 1..=4 {
        let mut subscription = rig.subscribe(&rig.queue).await;
        let taken = rig.take(&mut subscription, 1).await;
        assert_eq!(taken[0].deliveries, deliveries);
        formers.push(lose(&rig, subscription).await);
    }
}

async fn a_former_holder_can_settle_nothing(rig: Rig) {
    publish(&rig, &rig.queue, b"contested").await;
    let mut first = rig.subscribe(&rig.queue).await;
    let late = tags(&rig.take(&mut first, 1).await);
    let former = lose(&rig, first).await;
    let mut owner = rig.subscribe(&rig.queue).await;
    let held = rig.take(&mut owner, 1).await;
    if let Some(mut former) = former {
        former.ack(&late).await.unwrap();
        former.reject(&late).await.unwrap();
        former.release(&late).await.unwrap();
    }
    // Nor does the late tag work on the owner's subscription.
    owner.ack(&late).await.unwrap();
    owner.reject(&late).await.unwrap();
    owner.release(&late).await.unwrap();
    let dlq = dlq_of(&rig.queue);
    assert_eq!((rig.depth(&rig.queue).await.ready, rig.depth(&dlq).await.ready), (0, 0));
    owner.release(&tags(&held)).await.unwrap();
    rig.take(&mut owner, 1).await; // it was the owner's all along
}

async fn any_bytes_pass_unchanged(rig: Rig) {
    let sent: Vec<Vec<u8>> = vec![
        Vec::new(),
        vec![0],
        b"\xff\xfe\x80".to_vec(),
        b"{\"a\": \"\\u0000\"}\x00".to_vec(),
        (0..1024 * 1024).map(|byte| (byte % 251) as u8).collect(),
    ];
    for body in &sent {
        publish(&rig, &rig.queue, body).await;
    }
    let mut subscription = rig.subscribe(&rig.queue).await;
    let taken = rig.take(&mut subscription, sent.len()).await;
    assert!(taken.iter().map(|delivery| delivery.body.to_vec()).eq(sent.iter().cloned()));
    subscription.reject(&tags(&taken)).await.unwrap();
    let mut office = rig.subscribe(&dlq_of(&rig.queue)).await;
    let dead = rig.take(&mut office, sent.len()).await;
    let (mut dead, mut sent): (Vec<_>, Vec<_>) = (dead.iter().map(|d| d.body.to_vec()).collect(), sent);
    dead.sort();
    sent.sort();
    assert!(dead == sent);
}

async fn depths_say_what_waits_and_who_consumes(rig: Rig) {
    // The memory broker counts neither; a passive declaration on RabbitMQ counts consumers alone.
    let (counts_in_flight, counts_consumers) = match rig.kernel.transport {
        Transport::Memory(_) => (false, false),
        Transport::Table(_) => (true, true),
        Transport::Rabbit(_) => (false, true),
    };
    let in_flight = |count: i64| counts_in_flight.then_some(count);
    let consumers = |count: i64| counts_consumers.then_some(count);
    let empty = rig.depth(&rig.queue).await;
    assert_eq!((empty.queue.as_str(), empty.ready, empty.oldest_enqueued_at), (rig.queue.as_str(), 0, None));
    assert!(!empty.stale);
    for body in [b"first".as_slice(), b"second", b"third"] {
        publish(&rig, &rig.queue, body).await;
    }
    assert_eq!(rig.depth(&rig.queue).await.ready, 3);
    let mut subscription = rig.subscribe(&rig.queue).await;
    let taken = rig.take(&mut subscription, 3).await;
    let depth = rig.depth(&rig.queue).await;
    assert_eq!((depth.ready, depth.in_flight, depth.consumers), (0, in_flight(3), consumers(1)));
    subscription.ack(&tags(&taken)).await.unwrap();
    let depth = rig.depth(&rig.queue).await;
    assert_eq!((depth.ready, depth.in_flight), (0, in_flight(0)));
    let mut other = rig.subscribe(&rig.queue).await;
    rig.take_nothing(&mut other).await;
    assert_eq!(rig.depth(&rig.queue).await.consumers, consumers(2));
    subscription.close().await;
    let left = async || (rig.depth(&rig.queue).await.consumers == consumers(1)).then_some(());
    eventually("one consumer left", left).await;
    let both = [rig.second_queue.clone(), rig.queue.clone(), "nowhere".into()];
    let depths = rig.kernel.transport.depths(&both).await.unwrap();
    let names: Vec<&str> = depths.iter().map(|depth| depth.queue.as_str()).collect();
    assert_eq!(names, both, "in the order asked for");
}

async fn a_subscription_that_waits_is_woken_by_what_arrives(rig: Rig) {
    let mut subscription = rig.subscribe(&rig.queue).await;
    rig.take_nothing(&mut subscription).await;
    let never = Duration::from_secs(3600);
    let (woken, ()) = tokio::join!(
        tokio::time::timeout(crate::support::DEADLINE, subscription.ready(never)),
        publish(&rig, &rig.queue, b"knock"),
    );
    assert!(woken.is_ok(), "it slept on");
    assert_eq!(subscription.take(9).await.unwrap().len(), 1);
}

async fn a_subscription_that_winds_down_takes_no_more(rig: Rig) {
    publish(&rig, &rig.queue, b"before").await;
    let mut subscription = rig.subscribe(&rig.queue).await;
    let held = rig.take(&mut subscription, 1).await;
    subscription.wind_down().await;
    publish(&rig, &rig.queue, b"after").await;
    rig.take_nothing(&mut subscription).await;
    subscription.ack(&tags(&held)).await.unwrap();
    subscription.close().await;
    let mut next = rig.subscribe(&rig.queue).await;
    assert_eq!(bodies(&rig.take(&mut next, 1).await), ["after"]);
}

async fn two_consumers_at_once_never_get_the_same_message(rig: Rig) {
    let events = many("note", 2000);
    let (mut one, mut other) = (rig.subscribe(&rig.queue).await, rig.subscribe(&rig.queue).await);
    rig.tell(&events).await;
    while rig.relay.try_once().await.unwrap() > 0 {}
    let total = AtomicUsize::new(0);
    let work = async |subscription: &mut Subscription| -> Vec<String> {
        let mut ids = Vec::new();
        while total.load(Ordering::SeqCst) < events.len() {
            subscription.ready(Duration::from_millis(20)).await;
            let batch = subscription.take(37).await.unwrap();
            total.fetch_add(batch.len(), Ordering::SeqCst);
            ids.extend(batch.iter().map(|delivery| delivery.message_id.clone().unwrap()));
            subscription.ack(&tags(&batch)).await.unwrap();
            tokio::task::yield_now().await;
        }
        ids
    };
    let both = async { tokio::join!(work(&mut one), work(&mut other)) };
    let (first, second) = tokio::time::timeout(crate::support::DEADLINE, both).await.expect("all of them come");
    assert!(!first.is_empty() && !second.is_empty(), "both had their share");
    let distinct: HashSet<&String> = first.iter().chain(&second).collect();
    assert_eq!((first.len() + second.len(), distinct.len()), (2000, 2000));
    rig.take_nothing(&mut rig.subscribe(&rig.queue).await).await;
}

/// Takes the hold on what a subscription took from it. A lease can be lost with the holder none the wiser; a link
/// that breaks takes the holder with it.
async fn lose(rig: &Rig, subscription: Subscription) -> Option<Subscription> {
    match subscription {
        Subscription::Table(_) => {
            rig.advance(LEASE + Duration::from_secs(1)).await;
            Some(subscription)
        }
        Subscription::Memory(_) | Subscription::Rabbit(_) => {
            drop(subscription);
            None
        }
    }
}

fn raw(queue: &str, body: &[u8]) -> RawMessage {
    RawMessage {
        queue: queue.to_owned(),
        routing_key: KEY.to_owned(),
        message_id: None,
        correlation_id: None,
        headers: Map::new(),
        body: Bytes::copy_from_slice(body),
    }
}

async fn publish(rig: &Rig, queue: &str, body: &[u8]) {
    rig.kernel.transport.publish_raw(&raw(queue, body), 1).await.unwrap();
}

fn tags(deliveries: &[Delivery]) -> Vec<Tag> {
    deliveries.iter().map(|delivery| delivery.tag).collect()
}

fn bodies(deliveries: &[Delivery]) -> Vec<&Bytes> {
    deliveries.iter().map(|delivery| &delivery.body).collect()
}

macro_rules! each_transport {
    ($($name:ident),+ $(,)?) => {
        mod memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
            async fn $name() {
                let db = super::TestDb::new(crate::support::Engine::Sqlite).await;
                let (rig, _) = super::Rig::in_memory(&db, 1, super::Chaos::default()).await;
                super::$name(rig).await;
            })+
        }
        mod on {
            $(async fn $name(db: crate::support::TestDb) {
                super::$name(super::Rig::new(&db).await).await;
            })+
            crate::support::each_database!($($name),+);
            crate::support::each_database_on_rabbit!($($name),+);
        }
    };
}

each_transport!(
    what_is_published_is_delivered,
    no_more_is_taken_than_was_asked_for,
    a_key_routes_to_every_bound_queue_and_a_queue_name_to_one,
    a_key_bound_to_nothing_reaches_nobody,
    the_label_travels_with_the_message,
    an_acknowledged_message_is_gone,
    what_is_acknowledged_soon_is_gone_after_the_next_take_or_on_closing,
    messages_are_settled_in_any_order,
    a_rejected_message_moves_to_the_dead_letter_queue_with_its_history,
    a_released_message_comes_back,
    a_message_is_nobody_elses_while_it_is_held,
    a_lost_hold_brings_the_message_back_counted,
    a_former_holder_can_settle_nothing,
    any_bytes_pass_unchanged,
    depths_say_what_waits_and_who_consumes,
    a_subscription_that_waits_is_woken_by_what_arrives,
    a_subscription_that_winds_down_takes_no_more,
    two_consumers_at_once_never_get_the_same_message,
);

/// What only the table queue has: leases, and exact figures.
mod leases {
    use stockade_kernel::messaging::transport::table::TableQueue;

    use super::*;
    use crate::support::each_database;

    async fn depths_say_what_is_held_and_since_when_the_oldest_waits(db: TestDb) {
        let rig = Rig::new(&db).await;
        let before = rig.db.clock().now();
        publish(&rig, &rig.queue, b"first").await;
        let after = rig.db.clock().now();
        rig.advance(Duration::from_secs(5)).await;
        publish(&rig, &rig.queue, b"second").await;
        publish(&rig, &rig.queue, b"third").await;
        let depth = rig.depth(&rig.queue).await;
        assert!((before..=after).contains(&depth.oldest_enqueued_at.unwrap()), "{depth:?}");
        let mut subscription = rig.subscribe(&rig.queue).await;
        let taken = subscription.take(2).await.unwrap();
        let depth = rig.depth(&rig.queue).await;
        assert_eq!((depth.ready, depth.in_flight, depth.consumers), (1, Some(2), Some(1)));
        subscription.ack(&tags(&taken[..1])).await.unwrap();
        subscription.release(&tags(&taken[1..])).await.unwrap();
        let depth = rig.depth(&rig.queue).await;
        assert_eq!((depth.ready, depth.in_flight), (2, Some(0)));
    }

    async fn a_message_rejected_twice_keeps_both_deaths(db: TestDb) {
        let rig = Rig::new(&db).await;
        publish(&rig, &rig.queue, b"bad").await;
        let mut queue = rig.queue.clone();
        for _ in 0..2 {
            let mut subscription = rig.subscribe(&queue).await;
            let taken = subscription.take(9).await.unwrap();
            subscription.reject(&tags(&taken)).await.unwrap();
            queue = dlq_of(&queue);
        }
        let twice = rig.subscribe(&queue).await.take(9).await.unwrap();
        let queues: Vec<_> = twice[0].x_death.as_array().unwrap().iter().map(|death| &death["queue"]).collect();
        assert_eq!(queues, [&json!(dlq_of(&rig.queue)), &json!(rig.queue)], "the earlier one behind the new one");
    }

    async fn keeping_renews_the_lease(db: TestDb) {
        let lease = Duration::from_secs(6);
        let rig = Rig::with_lease(&db, lease).await;
        rig.deliver(&told("note"), 1).await;
        let (mut holder, mut other) = (rig.subscribe(&rig.queue).await, rig.subscribe(&rig.queue).await);
        let held = tags(&holder.take(9).await.unwrap());
        rig.advance(lease / 2).await;
        let before = rig.number(&lease_until(&rig)).await;
        tokio::select! {
            () = holder.keep(&held) => unreachable!("keeping a lease never ends"),
            () = eventually("a renewal", || async { (rig.number(&lease_until(&rig)).await > before).then_some(()) }) => {}
        }
        // By now the lease it was taken under would be over.
        rig.advance(lease / 2 + lease / 10).await;
        assert!(other.take(9).await.unwrap().is_empty());
        holder.ack(&held).await.unwrap();
        assert_eq!(rig.number("SELECT count(*) FROM messaging_queue").await, 0, "the tag is as good as ever");
    }

    async fn a_lost_lease_cannot_be_renewed_back(db: TestDb) {
        let lease = Duration::from_millis(300);
        let rig = Rig::with_lease(&db, lease).await;
        rig.deliver(&told("note"), 1).await;
        let mut former = rig.subscribe(&rig.queue).await;
        let late = tags(&former.take(9).await.unwrap());
        // Another instance takes it over, with a longer lease.
        rig.advance(LEASE).await;
        let mut owner = TableQueue::new(rig.db.clone(), LEASE).subscribe(&rig.queue);
        assert_eq!(owner.take(9).await.unwrap().len(), 1);
        let before = rig.number(&lease_until(&rig)).await;
        // The former holder's keeping goes on for a few rounds and must leave the owner's lease alone.
        assert!(tokio::time::timeout(lease, former.keep(&late)).await.is_err());
        assert_eq!(rig.number(&lease_until(&rig)).await, before);
    }

    async fn a_lease_runs_out_by_itself(db: TestDb) {
        // The real clock on Postgres: nobody helps it along.
        let lease = Duration::from_secs(1);
        let rig = Rig::with_lease(&db, lease).await;
        rig.deliver(&told("note"), 1).await;
        let started = tokio::time::Instant::now();
        assert_eq!(rig.subscribe(&rig.queue).await.take(9).await.unwrap().len(), 1);
        if !rig.is_postgres() {
            rig.advance(lease).await;
        }
        let again = eventually("the message comes back", || async {
            rig.subscribe(&rig.queue).await.take(9).await.unwrap().pop()
        })
        .await;
        assert_eq!(again.deliveries, 2);
        assert!(!rig.is_postgres() || started.elapsed() >= lease - Duration::from_millis(50));
    }

    async fn a_message_far_below_the_newest_taken_is_found_again(db: TestDb) {
        let rig = Rig::new(&db).await;
        let (old, new) = (told("note"), told("note"));
        rig.deliver(&old, 1).await;
        let mut subscription = rig.subscribe(&rig.queue).await;
        assert_eq!(subscription.take(9).await.unwrap().len(), 1);
        // Far more messages have come and gone than a claim looks back over.
        rig.execute(match rig.is_postgres() {
            true => "ALTER TABLE messaging_queue ALTER COLUMN id RESTART WITH 1000000",
            false => "UPDATE sqlite_sequence SET seq = 1000000 WHERE name = 'messaging_queue'",
        })
        .await;
        rig.deliver(&new, 1).await;
        assert_eq!(subscription.take(9).await.unwrap().len(), 1);
        rig.advance(LEASE * 2).await;
        let mut found = Vec::new();
        let both = async {
            while found.len() < 2 {
                subscription.ready(Duration::from_millis(20)).await;
                found.extend(subscription.take(9).await.unwrap());
            }
        };
        let in_time = tokio::time::timeout(crate::support::DEADLINE, both).await.is_ok();
        assert!(in_time, "{} of 2 came back on the same subscription", found.len());
        assert_eq!(found.len(), 2);
    }

    /// The SELECT for the end of the one lease there is, in milliseconds.
    fn lease_until(rig: &Rig) -> String {
        let column = if rig.is_postgres() { "extract(epoch FROM lease_until) * 1000" } else { "lease_until" };
        format!("SELECT CAST({column} AS bigint) FROM messaging_queue")
    }

    each_database!(
        depths_say_what_is_held_and_since_when_the_oldest_waits,
        a_message_rejected_twice_keeps_both_deaths,
        keeping_renews_the_lease,
        a_lost_lease_cannot_be_renewed_back,
        a_lease_runs_out_by_itself,
        a_message_far_below_the_newest_taken_is_found_again,
    );
}
