//! The order of arrival: however the events of an order come, and however often, the end is the same.
//!
//! The real consumers of inventory, ledger and notifications, over the table queue. Orders are lives: what is told of
//! them, in the order in which it happened. It is delivered in any other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::json;
use sqlx::{Connection, Executor, PgConnection};
use stockade::inventory::reactions::Inventory;
use stockade::ledger::reactions::Ledger;
use stockade::notifications::reactions::Notifications;
use stockade::numbers::Numbers;
use stockade_kernel::clock::mint_id;
use stockade_kernel::db::Db;
use stockade_kernel::messaging::consumer::Consumer;
use stockade_kernel::messaging::outbox::{self, Entry, Kind};
use stockade_kernel::messaging::transport::{Binding, Topology};
use stockade_kernel::messaging::{Event, Kernel, Origin, Reaction};
use tokio::sync::Barrier;
use uuid::Uuid;

use crate::support::kernel::{PROCESS_CLOCK, Rig};
use crate::support::{DEADLINE, Engine, TestDb, each_database, eventually};

const PRICE: i64 = 300;
const STOCK: i64 = 1_000_000;
const SKUS: [&str; 3] = ["A", "B", "C"];

/// What is told of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Told {
    Placed,
    Paid,
    Fulfilled,
    Cancelled,
    Expired,
}

use Told::{Cancelled, Expired, Fulfilled, Paid, Placed};

/// The lives an order may have.
const LIVES: [&[Told]; 5] =
    [&[Placed], &[Placed, Paid], &[Placed, Paid, Fulfilled], &[Placed, Cancelled], &[Placed, Expired]];

/// An order, the events of its life, and how its reservation must end.
struct Life {
    id: Uuid,
    sku: &'static str,
    quantity: i64,
    told: &'static [Told],
    events: BTreeMap<Told, Event>,
}

impl Life {
    fn new(group_id: &str, told: &'static [Told], number: usize) -> Self {
        let (id, sku, quantity) = (mint_id(), SKUS[number % SKUS.len()], 1 + (number % 4) as i64);
        let total = PRICE * quantity;
        let event = |told: Told| {
            let (key, payload) = match told {
                Placed => {
                    let items = json!([{ "sku": sku, "quantity": quantity, "unit_price_minor": PRICE }]);
                    let payload = json!({
                        "order_id": id, "order_number": format!("ORD-{number}"), "customer_id": "alice",
                        "currency": "USD", "total_minor": total, "items": items,
                    });
                    ("order.placed", payload)
                }
                Paid => {
                    let payload = json!({
                        "order_id": id, "customer_id": "alice", "amount_minor": total, "currency": "USD",
                    });
                    ("order.paid", payload)
                }
                Fulfilled => ("order.fulfilled", json!({ "order_id": id })),
                Cancelled => ("order.cancelled", json!({ "order_id": id, "reason": "a change of mind" })),
                Expired => ("order.expired", json!({ "order_id": id })),
            };
            let origin = Origin {
                group_id: group_id.to_owned(),
                subsidiary_id: None,
                correlation_id: id.to_string(),
                causation_id: None,
                traceparent: None,
            };
            Event::new(key, id.to_string(), origin, PROCESS_CLOCK, &payload)
        };
        let events = told.iter().map(|told| (*told, event(*told))).collect();
        Self { id, sku, quantity, told, events }
    }

    fn ends(&self) -> &'static str {
        match self.told.last() {
            Some(Paid) => "committed",
            Some(Fulfilled) => "fulfilled",
            Some(Cancelled | Expired) => "released",
            _ => "held",
        }
    }
}

/// One instance: a connection of its own to the database, and a consumer of each kind.
struct Instance {
    db: Db,
    kernel: Kernel,
    inventory: Consumer<Inventory>,
    ledger: Consumer<Ledger>,
    notifications: Consumer<Notifications>,
}

impl Instance {
    async fn new(db: &TestDb, batch: usize) -> Self {
        let rig = Rig::new(db).await;
        let mut kernel = rig.kernel.clone();
        kernel.tuning.batch = batch;
        let bind = |consumer, keys| Binding { consumer, queue: kernel.tuning.queue_name(consumer), keys };
        let queues = vec![
            bind(Inventory::NAME, Inventory::KEYS),
            bind(Ledger::NAME, Ledger::KEYS),
            bind(Notifications::NAME, Notifications::KEYS),
        ];
        kernel.transport.declare(&Topology { queues }).await.unwrap();
        Self {
            db: rig.db.clone(),
            inventory: Consumer::new(kernel.clone(), Inventory { numbers: Arc::new(Numbers::new("RES")) }),
            ledger: Consumer::new(kernel.clone(), Ledger),
            notifications: Consumer::new(kernel.clone(), Notifications::default()),
            kernel,
        }
    }

    /// With another size of batch.
    fn taking(&self, batch: usize) -> Self {
        let mut kernel = self.kernel.clone();
        kernel.tuning.batch = batch;
        Self {
            db: self.db.clone(),
            inventory: Consumer::new(kernel.clone(), Inventory { numbers: Arc::new(Numbers::new("RES")) }),
            ledger: Consumer::new(kernel.clone(), Ledger),
            notifications: Consumer::new(kernel.clone(), Notifications::default()),
            kernel,
        }
    }

    async fn stock_up(&self, group_id: &str) {
        let mut tx = self.db.begin().await.unwrap();
        for sku in SKUS {
            let origin = Origin {
                group_id: group_id.to_owned(),
                subsidiary_id: None,
                correlation_id: "stock".to_owned(),
                causation_id: None,
                traceparent: None,
            };
            let change = stockade::inventory::service::Change::Set(STOCK);
            let sku = sku.to_owned().try_into().unwrap();
            stockade::inventory::service::adjust(&mut tx, origin, &sku, change, "test").await.unwrap();
        }
        tx.commit().await.unwrap();
    }

    /// Puts events into the queues bound to them, in this order, as a broker that repeats and reorders would.
    async fn publish(&self, events: &[&Event]) {
        let queues = [
            (self.kernel.tuning.queue_name(Inventory::NAME), Inventory::KEYS),
            (self.kernel.tuning.queue_name(Ledger::NAME), Ledger::KEYS),
            (self.kernel.tuning.queue_name(Notifications::NAME), Notifications::KEYS),
        ];
        let mut entries = Vec::new();
        for event in events {
            let key = event.routing_key();
            for (queue, _) in queues.iter().filter(|(_, keys)| keys.contains(&key.as_str())) {
                entries.push(Entry { id: mint_id(), kind: Kind::Replay, target: queue.clone(), ..Entry::from(*event) });
            }
        }
        // Straight into the queues, as while the relay is not paused.
        self.db.set_hands_on(true);
        for entries in entries.chunks(500) {
            let mut tx = self.db.begin().await.unwrap();
            outbox::append_many(&mut tx, entries).await.unwrap();
            tx.commit().await.unwrap();
        }
    }

    async fn work_off(&self) {
        work_off(&self.inventory, &self.kernel).await;
        work_off(&self.ledger, &self.kernel).await;
        work_off(&self.notifications, &self.kernel).await;
    }

    async fn number(&self, sql: &'static str, group_id: &str) -> i64 {
        let mut tx = self.db.begin().await.unwrap();
        stockade_kernel::on!(tx, c => sqlx::query_scalar(sql).bind(group_id).fetch_one(c).await).unwrap()
    }

    /// Everything is as it would be had each event come once and in its turn.
    async fn check(&self, group_id: &str, lives: &[Life], context: &str) {
        let mut tx = self.db.begin().await.unwrap();
        let rows: Vec<(Uuid, String)> = stockade_kernel::on!(tx, c => {
            sqlx::query_as("SELECT order_id, state FROM inventory_reservations WHERE group_id = $1")
                .bind(group_id)
                .fetch_all(c)
                .await
        })
        .unwrap();
        let states: BTreeMap<Uuid, String> = rows.iter().cloned().collect();
        assert_eq!((rows.len(), states.len()), (lives.len(), lives.len()), "one reservation per order: {context}");
        for life in lives {
            assert_eq!(states[&life.id], life.ends(), "{:?}: {context}", life.told);
        }
        let shelves: Vec<(String, i64, i64, i64)> = stockade_kernel::on!(tx, c => {
            sqlx::query_as("SELECT sku, on_hand, reserved, fulfilled FROM inventory_stock WHERE group_id = $1 ORDER BY sku")
                .bind(group_id)
                .fetch_all(c)
                .await
        })
        .unwrap();
        let expected: Vec<(String, i64, i64, i64)> = SKUS
            .iter()
            .map(|sku| {
                let sum = |ends: &[&str]| -> i64 {
                    lives.iter().filter(|l| l.sku == *sku && ends.contains(&l.ends())).map(|l| l.quantity).sum()
                };
                let gone = sum(&["fulfilled"]);
                ((*sku).to_owned(), STOCK - gone, sum(&["held", "committed"]), gone)
            })
            .collect();
        assert_eq!(shelves, expected, "{context}");
        drop(tx);

        let paid: Vec<&Life> = lives.iter().filter(|life| life.told.contains(&Paid)).collect();
        let owed: i64 = paid.iter().map(|life| life.quantity * PRICE).sum();
        let entries = "SELECT count(*) FROM ledger_entries WHERE group_id = $1";
        let cash = "SELECT CAST(COALESCE(sum(amount_minor), 0) AS bigint) FROM ledger_entries
             WHERE group_id = $1 AND account = 'cash'";
        let balance = "SELECT CAST(COALESCE(sum(amount_minor), 0) AS bigint) FROM ledger_entries WHERE group_id = $1";
        assert_eq!(self.number(entries, group_id).await, paid.len() as i64 * 2, "{context}");
        assert_eq!((self.number(cash, group_id).await, self.number(balance, group_id).await), (owed, 0), "{context}");

        let told = |told: Told| lives.iter().filter(|life| life.told.contains(&told)).count() as i64;
        for (kind, sql) in [
            (Paid, "SELECT count(*) FROM notifications_notices WHERE group_id = $1 AND kind = 'paid'"),
            (Cancelled, "SELECT count(*) FROM notifications_notices WHERE group_id = $1 AND kind = 'cancelled'"),
            (Expired, "SELECT count(*) FROM notifications_notices WHERE group_id = $1 AND kind = 'expired'"),
        ] {
            assert_eq!(self.number(sql, group_id).await, told(kind), "{kind:?}: {context}");
        }
        let unsettled = "SELECT count(*) FROM messaging_inbox WHERE group_id = $1 AND state <> 'processed'";
        assert_eq!(self.number(unsettled, group_id).await, 0, "nothing waits and nothing is dead: {context}");
    }
}

async fn work_off<R: Reaction>(consumer: &Consumer<R>, kernel: &Kernel) {
    let mut subscription = kernel.transport.subscribe(&kernel.tuning.queue_name(R::NAME)).await.unwrap();
    while consumer.try_once(&mut subscription).await.unwrap() > 0 {}
}

/// Every order in which the events of a life can come when each comes `copies` times.
fn arrangements(told: &[Told], copies: usize) -> Vec<Vec<Told>> {
    fn extend(so_far: &mut Vec<Told>, left: &mut BTreeMap<Told, usize>, found: &mut Vec<Vec<Told>>) {
        let next: Vec<Told> = left.iter().filter(|(_, count)| **count > 0).map(|(told, _)| *told).collect();
        if next.is_empty() {
            return found.push(so_far.clone());
        }
        for told in next {
            *left.get_mut(&told).unwrap() -= 1;
            so_far.push(told);
            extend(so_far, left, found);
            so_far.pop();
            *left.get_mut(&told).unwrap() += 1;
        }
    }
    let (mut left, mut found) = (told.iter().map(|told| (*told, copies)).collect(), Vec::new());
    extend(&mut Vec::new(), &mut left, &mut found);
    found
}

#[test]
fn the_arrangements_are_all_there_are() {
    assert_eq!(arrangements(LIVES[2], 1).len(), 6);
    assert_eq!(arrangements(LIVES[2], 3).len(), 1680, "nine events, three of each");
    assert_eq!(arrangements(LIVES[3], 2).len(), 6);
}

/// Every permutation of every life, each event one, two and three times: some 1,900 orders, which all go through
/// their arrival step by step at once.
async fn every_permutation_ends_in_the_same_state(db: TestDb) {
    let instance = Instance::new(&db, 512).await;
    instance.stock_up("g").await;
    let (mut lives, mut arrivals) = (Vec::new(), Vec::new());
    for (told, copies) in LIVES.iter().flat_map(|told| [1, 2, 3].map(|copies| (*told, copies))) {
        for arrival in arrangements(told, copies) {
            lives.push(Life::new("g", told, lives.len()));
            arrivals.push(arrival);
        }
    }
    assert!(lives.len() > 1800, "{}", lives.len());
    for step in 0..9 {
        let events: Vec<&Event> =
            lives.iter().zip(&arrivals).filter_map(|(life, arrival)| Some(&life.events[arrival.get(step)?])).collect();
        instance.publish(&events).await;
        instance.work_off().await;
    }
    instance.check("g", &lives, "every permutation").await;
}

/// Many orders at once, their events shuffled into one another and cut into batches of any size.
async fn any_shuffle_in_batches_of_any_size_ends_in_the_same_state(db: TestDb) {
    let instance = Instance::new(&db, 512).await;
    let runtime = tokio::runtime::Handle::current();
    let cases = tokio::task::spawn_blocking(move || {
        let orders = prop::collection::vec((0..LIVES.len(), prop::collection::vec(1usize..4, 3)), 1..25);
        let case = (orders, any::<u64>(), prop::sample::select(vec![1usize, 2, 3, 7, 20, 512]));
        let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
        TestRunner::new(config).run(&case, |(orders, seed, batch)| {
            runtime.block_on(async {
                let group_id = mint_id().to_string();
                let instance = instance.taking(batch);
                instance.stock_up(&group_id).await;
                let lives: Vec<Life> =
                    orders.iter().enumerate().map(|(n, (life, _))| Life::new(&group_id, LIVES[*life], n)).collect();
                let mut events: Vec<(Uuid, &Event)> = Vec::new();
                for (life, (_, copies)) in lives.iter().zip(&orders) {
                    for (event, copies) in life.events.values().zip(copies) {
                        events.extend(std::iter::repeat_n(event, *copies).map(|event| (Uuid::nil(), event)));
                    }
                }
                // Shuffled by the seed, so that a case that fails can be run again.
                for (place, (key, _)) in events.iter_mut().enumerate() {
                    *key = shuffle_key(seed, place);
                }
                events.sort_by_key(|(key, _)| *key);
                instance.publish(&events.iter().map(|(_, event)| *event).collect::<Vec<_>>()).await;
                instance.work_off().await;
                instance.check(&group_id, &lives, &format!("seed {seed}, batch {batch}, {orders:?}")).await;
            });
            Ok(())
        })
    });
    cases.await.unwrap().unwrap();
}

fn shuffle_key(seed: u64, place: usize) -> Uuid {
    let hash = stockade_kernel::messaging::event::hash_of(format!("{seed} {place}").as_bytes());
    Uuid::from_slice(&hash[..16]).unwrap()
}

each_database!(every_permutation_ends_in_the_same_state, any_shuffle_in_batches_of_any_size_ends_in_the_same_state);

/// Payment and placement of a thousand orders, over two instances that start on them at one moment. No sweep runs: what
/// is not woken by its predecessor would wait for ever.
async fn race(db: &TestDb, batch: usize, arrange: impl Fn(&[Life]) -> Vec<&Event>) {
    let instances = [Instance::new(db, batch).await, Instance::new(db, batch).await];
    instances[0].stock_up("g").await;
    let lives: Vec<Life> = (0..1000).map(|n| Life::new("g", LIVES[1], n)).collect();
    instances[0].publish(&arrange(&lives)).await;
    let barrier = Barrier::new(2);
    let work = async |instance: &Instance| {
        barrier.wait().await;
        tokio::join!(
            work_off(&instance.inventory, &instance.kernel),
            work_off(&instance.ledger, &instance.kernel),
            work_off(&instance.notifications, &instance.kernel),
        );
    };
    tokio::time::timeout(Duration::from_secs(120), async { tokio::join!(work(&instances[0]), work(&instances[1])) })
        .await
        .expect("no two of them wait for each other");
    instances[0].check("g", &lives, "two instances").await;
}

/// One instance gets the orders, the other their payments, a few at a time: each pair is in two hands at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4, crate = "crate::support::schedule")]
async fn payments_and_their_orders_in_two_instances_at_once_leave_nothing_waiting() {
    let db = TestDb::new(Engine::Postgres).await;
    race(&db, 20, |lives| {
        let mut events = Vec::new();
        for lives in lives.chunks(20) {
            for told in [Paid, Placed] {
                events.extend(lives.iter().map(|life| &life.events[&told]));
            }
        }
        events
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4, crate = "crate::support::schedule")]
async fn payments_and_orders_in_any_order_over_two_instances_leave_nothing_waiting() {
    let db = TestDb::new(Engine::Postgres).await;
    race(&db, 64, |lives| {
        let mut events: Vec<&Event> = lives.iter().flat_map(|life| life.events.values()).collect();
        events.sort_by_key(|event| shuffle_key(7, event.event_id.as_u128() as usize));
        events
    })
    .await;
}

/// The same for what frees stock: orders placed and cancelled at once, which is where locks could be taken crosswise.
#[tokio::test(flavor = "multi_thread", worker_threads = 4, crate = "crate::support::schedule")]
async fn placements_and_cancellations_over_two_instances_end_without_a_deadlock() {
    let db = TestDb::new(Engine::Postgres).await;
    let instances = [Instance::new(&db, 40).await, Instance::new(&db, 40).await];
    instances[0].stock_up("g").await;
    let lives: Vec<Life> = (0..600).map(|n| Life::new("g", LIVES[[2, 3, 4, 3][n % 4]], n)).collect();
    let mut events: Vec<&Event> = lives.iter().flat_map(|life| life.events.values()).collect();
    events.sort_by_key(|event| shuffle_key(11, event.event_id.as_u128() as usize));
    instances[0].publish(&events).await;
    tokio::join!(instances[0].work_off(), instances[1].work_off());
    instances[0].check("g", &lives, "two instances").await;
    for instance in instances {
        instance.db.close().await;
    }
    assert_eq!(deadlocks(&db).await, 0);
}

/// The deadlocks that Postgres has counted in this database. A session reports them when it ends at the latest, before
/// it disappears from the list of sessions; so every other session must have ended.
async fn deadlocks(db: &TestDb) -> i64 {
    let mut connection = PgConnection::connect(&db.url).await.unwrap();
    let others =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
            AND pid <> pg_backend_pid()";
    let deadline = tokio::time::Instant::now() + DEADLINE;
    let mut pace = tokio::time::interval(Duration::from_millis(25));
    while sqlx::query_scalar::<_, i64>(others).fetch_one(&mut connection).await.unwrap() > 0 {
        assert!(tokio::time::Instant::now() < deadline, "sessions that do not end");
        pace.tick().await;
    }
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    sqlx::query_scalar(deadlocks).fetch_one(&mut connection).await.unwrap()
}

/// Two transactions that lock crosswise: the count above must see it, or it proves nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_deadlock_is_counted() {
    let db = TestDb::new(Engine::Postgres).await;
    let (mut one, mut other) =
        (PgConnection::connect(&db.url).await.unwrap(), PgConnection::connect(&db.url).await.unwrap());
    for connection in [&mut one, &mut other] {
        connection.execute("BEGIN").await.unwrap();
    }
    let (first, second) = ("SELECT pg_advisory_xact_lock(1)", "SELECT pg_advisory_xact_lock(2)");
    one.execute(first).await.unwrap();
    other.execute(second).await.unwrap();
    let (left, right) =
        tokio::join!(async { (one.execute(second).await.is_err(), one.close().await.unwrap()) }, async {
            (other.execute(first).await.is_err(), other.close().await.unwrap())
        },);
    assert!(left.0 != right.0, "one of the two is cancelled");
    assert_eq!(deadlocks(&db).await, 1);
}

/// A payment changes no stock, an order in the same batch does: whoever cancels locks its stock first and its reservation then,
/// so that nobody may hold a reservation while waiting for stock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_batch_of_payments_and_orders_locks_stock_before_reservations() {
    let db = TestDb::new(Engine::Postgres).await;
    let instance = Instance::new(&db, 512).await;
    instance.stock_up("g").await;
    let lives = [Life::new("g", LIVES[1], 0), Life::new("g", LIVES[0], 1)];
    instance.publish(&[&lives[0].events[&Placed]]).await;
    work_off(&instance.inventory, &instance.kernel).await;
    instance.publish(&[&lives[0].events[&Paid], &lives[1].events[&Placed]]).await;
    let mut other = instance.db.begin().await.unwrap();
    let sku = lives[1].sku.to_owned().try_into().unwrap();
    assert_eq!(stockade::inventory::store::lock_stock(&mut other, &[("g", &sku)]).await.unwrap().len(), 1);
    let look = async {
        let waiting = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event_type = 'Lock' AND $1 <> ''";
        eventually("a wait for stock", async || (instance.number(waiting, "g").await > 0).then_some(())).await;
        let free =
            "SELECT count(*) FROM (SELECT FROM inventory_reservations WHERE group_id = $1 FOR UPDATE SKIP LOCKED) r";
        assert_eq!(instance.number(free, "g").await, 1, "the reservation that is paid for");
        other.commit().await.unwrap();
    };
    tokio::join!(instance.work_off(), look);
    instance.check("g", &lives, "after the wait").await;
}
