//! The conformance suite of transports: written once, and every transport is held to it.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, json};
use stockade::messaging::transport::memory::Chaos;
use stockade::messaging::transport::{Delivery, RawMessage, Subscription, Tag, dlq_of};

use crate::support::kernel::{KEY, LEASE, QUEUE, Rig, SECOND_QUEUE, many, told};
use crate::support::{TestDb, eventually};

async fn what_is_published_is_delivered(rig: Rig) {
    let events = many("note", 100);
    rig.tell(&events).await;
    while rig.relay.try_once().await.unwrap() > 0 {}
    let mut subscription = rig.subscribe(QUEUE).await;
    let mut seen = HashSet::new();
    loop {
        let batch = subscription.take(30).await.unwrap();
        assert!(batch.len() <= 30);
        if batch.is_empty() {
            break;
        }
        for delivery in &batch {
            assert_eq!((delivery.deliveries, delivery.routing_key.as_str()), (1, KEY));
            assert!(delivery.x_death.is_null());
            seen.insert(delivery.message_id.clone().unwrap());
        }
        subscription.ack(&tags(&batch)).await.unwrap();
    }
    assert_eq!(seen, events.iter().map(|event| event.event_id.to_string()).collect());
}

async fn a_key_routes_to_every_bound_queue_and_a_queue_name_to_one(rig: Rig) {
    publish(&rig, "", b"to all").await;
    publish(&rig, SECOND_QUEUE, b"to one").await;
    let take = async |queue: &str| -> Vec<Bytes> {
        let taken = rig.subscribe(queue).await.take(9).await.unwrap();
        taken.into_iter().map(|delivery| delivery.body).collect()
    };
    assert_eq!(take(QUEUE).await, ["to all"]);
    assert_eq!(take(SECOND_QUEUE).await, ["to all", "to one"]);
}

async fn a_key_bound_to_nothing_reaches_nobody(rig: Rig) {
    let message = RawMessage { routing_key: "probe.unheard".into(), ..raw("", b"lost") };
    rig.kernel.transport.publish_raw(&message, 1).await.unwrap();
    assert_eq!((rig.depth(QUEUE).await.ready, rig.depth(SECOND_QUEUE).await.ready), (0, 0));
}

async fn the_label_travels_with_the_message(rig: Rig) {
    let headers = json!({ "x-event-id": "e", "nested": { "n": [1, null, "\u{0}"] } }).as_object().unwrap().clone();
    let message = RawMessage {
        message_id: Some("not a uuid".into()),
        correlation_id: Some("because".into()),
        headers: headers.clone(),
        ..raw(QUEUE, b"x")
    };
    rig.kernel.transport.publish_raw(&message, 2).await.unwrap();
    let taken = rig.subscribe(QUEUE).await.take(9).await.unwrap();
    assert_eq!(taken.len(), 2, "as many copies as asked for");
    for delivery in taken {
        assert_eq!(delivery.message_id.as_deref(), Some("not a uuid"));
        assert_eq!(delivery.correlation_id.as_deref(), Some("because"));
        assert_eq!((delivery.header("x-event-id"), &delivery.headers), (Some("e"), &headers));
    }
}

async fn an_acknowledged_message_is_gone(rig: Rig) {
    publish(&rig, QUEUE, b"a").await;
    publish(&rig, QUEUE, b"b").await;
    let mut subscription = rig.subscribe(QUEUE).await;
    let taken = subscription.take(2).await.unwrap();
    subscription.ack(&tags(&taken[..1])).await.unwrap();
    let former = lose(&rig, subscription).await;
    let again = rig.subscribe(QUEUE).await.take(9).await.unwrap();
    assert_eq!(bodies(&again), bodies(&taken[1..]), "only what was not acknowledged comes back");
    drop(former);
}

async fn what_is_acknowledged_soon_is_gone_after_the_next_take_or_on_closing(rig: Rig) {
    for body in [b"a", b"b", b"c"] {
        publish(&rig, QUEUE, body).await;
    }
    let mut subscription = rig.subscribe(QUEUE).await;
    let first = subscription.take(1).await.unwrap();
    subscription.ack_soon(&tags(&first)).await.unwrap();
    // What is owed is a reason to come back at once, not to wait for news.
    tokio::time::timeout(Duration::from_secs(5), subscription.ready(Duration::from_secs(3600))).await.unwrap();
    let second = subscription.take(1).await.unwrap();
    assert_eq!(bodies(&second), ["b"]);
    let depth = rig.depth(QUEUE).await;
    assert_eq!(depth.ready + depth.in_flight.unwrap_or(1), 2, "the first is gone");
    subscription.ack_soon(&tags(&second)).await.unwrap();
    subscription.close().await;
    let rest = rig.subscribe(QUEUE).await.take(9).await.unwrap();
    assert_eq!(bodies(&rest), ["c"], "and so is the second");
}

async fn a_rejected_message_moves_to_the_dead_letter_queue_with_its_history(rig: Rig) {
    publish(&rig, QUEUE, b"bad").await;
    let mut subscription = rig.subscribe(QUEUE).await;
    let taken = subscription.take(9).await.unwrap();
    subscription.reject(&tags(&taken)).await.unwrap();
    assert_eq!((rig.depth(QUEUE).await.ready, rig.depth(&dlq_of(QUEUE)).await.ready), (0, 1));
    let mut office = rig.subscribe(&dlq_of(QUEUE)).await;
    let dead = office.take(9).await.unwrap();
    assert_eq!((bodies(&dead), dead[0].deliveries, dead[0].routing_key.as_str()), (bodies(&taken), 1, KEY));
    let death = &dead[0].x_death[0];
    assert_eq!((&death["reason"], &death["queue"]), (&json!("rejected"), &json!(QUEUE)));
    assert_eq!(death["routing-keys"], json!([KEY]));
    assert!(death["time"].is_string());
    // Rejected there too, it keeps the earlier death behind the new one.
    office.reject(&tags(&dead)).await.unwrap();
    let twice = rig.subscribe(&dlq_of(&dlq_of(QUEUE))).await.take(9).await.unwrap();
    assert_eq!(twice[0].x_death.as_array().unwrap().len(), 2);
    assert_eq!(twice[0].x_death[1], *death);
}

async fn a_released_message_comes_back_uncounted(rig: Rig) {
    publish(&rig, QUEUE, b"later").await;
    let mut subscription = rig.subscribe(QUEUE).await;
    for _ in 0..3 {
        let taken = subscription.take(9).await.unwrap();
        assert_eq!((taken.len(), taken[0].deliveries), (1, 1));
        subscription.release(&tags(&taken)).await.unwrap();
    }
    assert_eq!(rig.depth(QUEUE).await.ready, 1);
}

async fn a_message_is_nobody_elses_while_it_is_held(rig: Rig) {
    publish(&rig, QUEUE, b"mine").await;
    let (mut first, mut second) = (rig.subscribe(QUEUE).await, rig.subscribe(QUEUE).await);
    assert_eq!(first.take(9).await.unwrap().len(), 1);
    assert!(second.take(9).await.unwrap().is_empty());
    assert!(first.take(9).await.unwrap().is_empty(), "nor given to the same one twice");
    rig.advance(LEASE / 2).await;
    assert!(second.take(9).await.unwrap().is_empty());
}

async fn a_lost_hold_brings_the_message_back_counted(rig: Rig) {
    publish(&rig, QUEUE, b"again").await;
    let mut formers = Vec::new();
    for deliveries in 1..=4 {
        let mut subscription = rig.subscribe(QUEUE).await;
        let taken = subscription.take(9).await.unwrap();
        assert_eq!((taken.len(), taken[0].deliveries), (1, deliveries));
        formers.push(lose(&rig, subscription).await);
    }
}

async fn a_former_holder_can_settle_nothing(rig: Rig) {
    publish(&rig, QUEUE, b"contested").await;
    let mut first = rig.subscribe(QUEUE).await;
    let late = tags(&first.take(9).await.unwrap());
    let former = lose(&rig, first).await;
    let mut owner = rig.subscribe(QUEUE).await;
    let held = owner.take(9).await.unwrap();
    assert_eq!(held.len(), 1);
    if let Some(mut former) = former {
        former.ack(&late).await.unwrap();
        former.reject(&late).await.unwrap();
        former.release(&late).await.unwrap();
    }
    // Nor does the late tag work on the owner's subscription.
    owner.ack(&late).await.unwrap();
    owner.reject(&late).await.unwrap();
    owner.release(&late).await.unwrap();
    assert_eq!((rig.depth(QUEUE).await.ready, rig.depth(&dlq_of(QUEUE)).await.ready), (0, 0));
    owner.release(&tags(&held)).await.unwrap();
    assert_eq!(owner.take(9).await.unwrap().len(), 1, "it was the owner's all along");
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
        publish(&rig, QUEUE, body).await;
    }
    let mut subscription = rig.subscribe(QUEUE).await;
    let taken = subscription.take(9).await.unwrap();
    assert!(taken.iter().map(|delivery| delivery.body.to_vec()).eq(sent.iter().cloned()));
    subscription.reject(&tags(&taken)).await.unwrap();
    let dead = rig.subscribe(&dlq_of(QUEUE)).await.take(9).await.unwrap();
    let (mut dead, mut sent): (Vec<_>, Vec<_>) = (dead.iter().map(|d| d.body.to_vec()).collect(), sent);
    dead.sort();
    sent.sort();
    assert!(dead == sent);
}

async fn depths_say_what_waits_and_what_is_held(rig: Rig) {
    let empty = rig.depth(QUEUE).await;
    assert_eq!((empty.queue.as_str(), empty.ready, empty.oldest_enqueued_at), (QUEUE, 0, None));
    let before = rig.db.clock().now();
    publish(&rig, QUEUE, b"first").await;
    let after = rig.db.clock().now();
    rig.advance(Duration::from_secs(5)).await;
    publish(&rig, QUEUE, b"second").await;
    publish(&rig, QUEUE, b"third").await;
    let depth = rig.depth(QUEUE).await;
    assert_eq!(depth.ready, 3);
    assert!((before..=after).contains(&depth.oldest_enqueued_at.unwrap()), "{depth:?}");
    let mut subscription = rig.subscribe(QUEUE).await;
    let taken = subscription.take(2).await.unwrap();
    let depth = rig.depth(QUEUE).await;
    assert_eq!((depth.ready, depth.in_flight.unwrap_or(2), depth.consumers.unwrap_or(1)), (1, 2, 1));
    subscription.ack(&tags(&taken)).await.unwrap();
    let depth = rig.depth(QUEUE).await;
    assert_eq!((depth.ready, depth.in_flight.unwrap_or(0)), (1, 0));
    let _other = rig.subscribe(QUEUE).await.take(9).await.unwrap();
    assert_eq!(rig.depth(QUEUE).await.consumers.unwrap_or(2), 2);
    subscription.close().await;
    assert_eq!(rig.depth(QUEUE).await.consumers.unwrap_or(1), 1);
    let both = rig.kernel.transport.depths(&[SECOND_QUEUE.into(), QUEUE.into(), "nowhere".into()]).await.unwrap();
    let names: Vec<&str> = both.iter().map(|depth| depth.queue.as_str()).collect();
    assert_eq!(names, [SECOND_QUEUE, QUEUE, "nowhere"], "in the order asked for");
}

async fn a_subscription_that_waits_is_woken_by_what_arrives(rig: Rig) {
    let mut subscription = rig.subscribe(QUEUE).await;
    assert!(subscription.take(9).await.unwrap().is_empty());
    let never = Duration::from_secs(3600);
    let (woken, ()) = tokio::join!(
        tokio::time::timeout(crate::support::DEADLINE, subscription.ready(never)),
        publish(&rig, QUEUE, b"knock"),
    );
    assert!(woken.is_ok(), "it slept on");
    assert_eq!(subscription.take(9).await.unwrap().len(), 1);
}

async fn two_consumers_at_once_never_get_the_same_message(rig: Rig) {
    let message = raw(QUEUE, b"one of many");
    rig.kernel.transport.publish_raw(&message, 2000).await.unwrap();
    let work = async || -> Vec<i64> {
        let mut subscription = rig.subscribe(QUEUE).await;
        let mut ids = Vec::new();
        loop {
            let batch = subscription.take(37).await.unwrap();
            if batch.is_empty() && rig.depth(QUEUE).await.ready == 0 {
                return ids;
            }
            ids.extend(batch.iter().map(|delivery| delivery.tag.id));
            subscription.ack(&tags(&batch)).await.unwrap();
            tokio::task::yield_now().await;
        }
    };
    let (first, second) = tokio::join!(work(), work());
    assert!(!first.is_empty() && !second.is_empty(), "both had their share");
    let distinct: HashSet<i64> = first.iter().chain(&second).copied().collect();
    assert_eq!((first.len() + second.len(), distinct.len()), (2000, 2000));
    assert_eq!(rig.number("SELECT count(*) FROM messaging_queue").await, 0);
}

/// Takes the hold on what a subscription took from it. A lease can be lost with the holder none the wiser; a link
/// that breaks takes the holder with it.
async fn lose(rig: &Rig, subscription: Subscription) -> Option<Subscription> {
    match subscription {
        Subscription::Table(_) => {
            rig.advance(LEASE + Duration::from_secs(1)).await;
            Some(subscription)
        }
        Subscription::Memory(_) => {
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
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let db = super::TestDb::new(crate::support::Engine::Sqlite).await;
                let (rig, _) = super::Rig::in_memory(&db, 1, super::Chaos::default()).await;
                super::$name(rig).await;
            })+
        }
        mod table {
            $(async fn $name(db: crate::support::TestDb) {
                super::$name(super::Rig::new(&db).await).await;
            })+
            crate::support::each_database!($($name),+);
        }
    };
}

each_transport!(
    what_is_published_is_delivered,
    a_key_routes_to_every_bound_queue_and_a_queue_name_to_one,
    a_key_bound_to_nothing_reaches_nobody,
    the_label_travels_with_the_message,
    an_acknowledged_message_is_gone,
    what_is_acknowledged_soon_is_gone_after_the_next_take_or_on_closing,
    a_rejected_message_moves_to_the_dead_letter_queue_with_its_history,
    a_released_message_comes_back_uncounted,
    a_message_is_nobody_elses_while_it_is_held,
    a_lost_hold_brings_the_message_back_counted,
    a_former_holder_can_settle_nothing,
    any_bytes_pass_unchanged,
    depths_say_what_waits_and_what_is_held,
    a_subscription_that_waits_is_woken_by_what_arrives,
    two_consumers_at_once_never_get_the_same_message,
);

/// What only leases have.
mod leases {
    use stockade::messaging::transport::table::TableQueue;

    use super::*;
    use crate::support::each_database;

    async fn keeping_renews_the_lease(db: TestDb) {
        let lease = Duration::from_secs(6);
        let rig = Rig::with_lease(&db, lease).await;
        rig.deliver(&told("note"), 1).await;
        let (mut holder, mut other) = (rig.subscribe(QUEUE).await, rig.subscribe(QUEUE).await);
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
        let mut former = rig.subscribe(QUEUE).await;
        let late = tags(&former.take(9).await.unwrap());
        // Another instance takes it over, with a longer lease.
        rig.advance(LEASE).await;
        let mut owner = TableQueue::new(rig.db.clone(), LEASE).subscribe(QUEUE);
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
        assert_eq!(rig.subscribe(QUEUE).await.take(9).await.unwrap().len(), 1);
        if !rig.is_postgres() {
            rig.advance(lease).await;
        }
        let again =
            eventually("the message comes back", || async { rig.subscribe(QUEUE).await.take(9).await.unwrap().pop() })
                .await;
        assert_eq!(again.deliveries, 2);
        assert!(!rig.is_postgres() || started.elapsed() >= lease - Duration::from_millis(50));
    }

    async fn a_message_far_below_the_newest_taken_is_found_again(db: TestDb) {
        let rig = Rig::new(&db).await;
        let (old, new) = (told("note"), told("note"));
        rig.deliver(&old, 1).await;
        let mut subscription = rig.subscribe(QUEUE).await;
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
        while found.len() < 2 {
            let taken = tokio::time::timeout(Duration::from_secs(30), async {
                loop {
                    let taken = subscription.take(9).await.unwrap();
                    if !taken.is_empty() {
                        return taken;
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            });
            found.extend(taken.await.expect("both come back on the same subscription"));
        }
        assert_eq!(found.len(), 2);
    }

    /// The SELECT for the end of the one lease there is, in milliseconds.
    fn lease_until(rig: &Rig) -> String {
        let column = if rig.is_postgres() { "extract(epoch FROM lease_until) * 1000" } else { "lease_until" };
        format!("SELECT CAST({column} AS bigint) FROM messaging_queue")
    }

    each_database!(
        keeping_renews_the_lease,
        a_lost_lease_cannot_be_renewed_back,
        a_lease_runs_out_by_itself,
        a_message_far_below_the_newest_taken_is_found_again,
    );
}
