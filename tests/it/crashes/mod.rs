//! The real binary, dying in every way we know, on each database: nothing is lost and nothing is done twice.

mod broker_limits;
mod brokers;
mod databases;
mod everywhere;
mod links;
mod lives;
mod points;
mod processes;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use reqwest::StatusCode;
use serde_json::Value;

use crate::support::{Api, Server, TestDb, assert_audited, eventually, order, until_finished, witness};

/// Polls and retries several times a second. Leases keep their default length, because a short lease can expire on a busy
/// machine while its holder is alive. [`TestDb::end_leases_of_dead_servers`] expires the leases of a killed server.
const QUICK: [&str; 8] = ["--poll", "200ms", "--outbox-poll", "200ms", "--retry-base", "50ms", "--retry-cap", "200ms"];

/// Fails fast when the database is away. A claim whose commit lost its connection keeps its rows from everybody until its
/// lease ends, so the lease is short.
const IMPATIENT: [&str; 4] = ["--db-acquire-timeout", "1s", "--lease", "10s"];

const PATIENT: [&str; 4] = ["--lease", "60s", "--amqp-confirm-timeout", "60s"];

const STOCK: i64 = 10_000;

/// Requests at a time: fewer than a server refuses.
const CLIENTS: usize = 100;

/// A server that may die, and the orders placed with it, each one unit of `A` under a key of its own.
struct Shop<'a> {
    db: &'a TestDb,
    flags: Vec<&'a str>,
    server: Server,
    orders: i64,
    /// The id that each key was answered with, by any server so far.
    acknowledged: BTreeMap<i64, String>,
}

impl<'a> Shop<'a> {
    async fn open(db: &'a TestDb, more: &[&'a str]) -> Self {
        Self::open_through(db, db, more).await
    }

    /// The server reaches its database and its broker by the URLs of `link`; the checks use those of `db`.
    async fn open_through(db: &'a TestDb, link: &TestDb, more: &[&'a str]) -> Self {
        Self::open_with(db, link, [QUICK.as_slice(), more].concat()).await
    }

    /// A server on which nothing expires on a busy machine: neither a lease nor the wait for a confirm, either of which
    /// leads to a redelivery.
    async fn open_patient(db: &'a TestDb, more: &[&'a str]) -> Self {
        Self::open_with(db, db, [PATIENT.as_slice(), more].concat()).await
    }

    async fn open_with(db: &'a TestDb, link: &TestDb, flags: Vec<&'a str>) -> Self {
        let server = witness::start(link, &flags);
        server.until_connected().await;
        server.put_stock("A", STOCK).await;
        Self { db, flags, server, orders: 0, acknowledged: BTreeMap::new() }
    }

    /// Starts another server in place of one that is gone.
    async fn reopen(&mut self) {
        self.db.end_leases_of_dead_servers().await;
        self.server = witness::start(self.db, &self.flags);
        self.server.until_connected().await;
    }

    /// Places new orders at the same time. The server may die before it has answered all of them.
    async fn place(&mut self, count: i64) {
        let keys = self.orders..self.orders + count;
        self.orders += count;
        self.request(keys).await;
    }

    /// Places orders continuously until `fault` has ended.
    async fn place_during<T>(&mut self, fault: impl Future<Output = T>) -> T {
        let ended = Cell::new(false);
        let fault = async {
            let output = fault.await;
            ended.set(true);
            output
        };
        let load = async {
            while !ended.get() {
                self.place(8).await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::join!(fault, load).0
    }

    /// A client of the server that does not borrow the shop.
    fn api(&self) -> Api {
        Api::new(self.server.url.clone())
    }

    /// Sends the order of each key and keeps the ids answered; how many keys were answered.
    async fn request(&mut self, keys: std::ops::Range<i64>) -> usize {
        let place = async |key| Some((key, place(&self.server, key).await?));
        let answers: Vec<_> = stream::iter(keys.map(place)).buffer_unordered(CLIENTS).collect().await;
        let answered: Vec<_> = answers.into_iter().flatten().collect();
        let count = answered.len();
        for (key, id) in answered {
            self.acknowledge(key, id);
        }
        count
    }

    /// A key is answered with one id, whichever server answers.
    fn acknowledge(&mut self, key: i64, id: String) {
        let first = self.acknowledged.entry(key).or_insert_with(|| id.clone());
        assert_eq!(*first, id, "key-{key} was answered with another order before");
    }

    /// Waits for the server to die where it was told to, and starts another.
    async fn die_and_reopen(&mut self) {
        let status = self.server.ended().await;
        assert!(is_abort(status), "it died at the point it was told to: {status}");
        self.reopen().await;
    }

    /// Asks for every order again, as clients do that had no answer. Each order that was acknowledged must be there first:
    /// the repeat would repair its loss.
    async fn ask_again(&mut self) {
        self.check_acknowledged().await;
        let answered = self.request(0..self.orders).await;
        assert_eq!(answered, usize::try_from(self.orders).unwrap(), "every order is accepted in the end");
    }

    /// Every order that was acknowledged exists, with the id that its client was given.
    async fn check_acknowledged(&self) {
        let orders = self.server.walk("/v1/orders?limit=200").await;
        let ids: BTreeMap<&str, &str> = orders
            .iter()
            .map(|order| (order["customer_id"].as_str().unwrap(), order["id"].as_str().unwrap()))
            .collect();
        assert_eq!(ids.len(), orders.len(), "no customer has two orders");
        for (key, id) in &self.acknowledged {
            let found = ids.get(format!("customer-{key}").as_str()).copied();
            assert_eq!(found, Some(id.as_str()), "the order of key-{key} was acknowledged");
        }
    }

    /// Every order is reserved, held and told of once, and the shelf adds up.
    async fn check(&self) {
        until_finished(self.db).await;
        assert_sound(self.db).await;
        for (what, sql) in [
            ("orders", "SELECT COUNT(*) FROM orders_orders"),
            ("reserved", "SELECT COUNT(*) FROM orders_orders WHERE status = 'reserved'"),
            ("notices", "SELECT COUNT(*) FROM notifications_notices WHERE kind = 'reserved' AND state = 'sent'"),
        ] {
            assert_eq!(self.db.count(sql).await, self.orders, "{what}");
        }
        self.check_acknowledged().await;
        witness::check(self.db).await;
    }

    /// Clients repeat their orders, all work finishes without a counted attempt, and the server stops cleanly.
    async fn recover_and_stop(mut self) {
        self.ask_again().await;
        self.check().await;
        self.assert_no_attempt_was_counted().await;
        assert!(self.server.terminate().await);
    }

    /// No failure was counted against an event, and none became a dead letter.
    async fn assert_no_attempt_was_counted(&self) {
        for counted in [
            "SELECT COUNT(*) FROM messaging_outbox WHERE attempts > 0 OR status IN ('failed', 'dead')",
            "SELECT COUNT(*) FROM messaging_inbox WHERE attempts > 1 OR state = 'dead'",
        ] {
            assert_eq!(self.db.count(counted).await, 0, "{counted}");
        }
        assert!(self.letters().await.is_empty());
    }

    /// Waits for `count` more failed attempts of the consumers to work with the database.
    async fn until_tried(&self, count: u64) {
        let tries = async || self.server.counter("stockade_db_busy_total").await;
        let enough = tries().await + count;
        eventually(&format!("{count} more tries"), async || (tries().await >= enough).then_some(())).await;
    }

    async fn letters(&self) -> Vec<Value> {
        self.server.walk("/v1/dead-letters?state=open").await
    }
}

/// Did the process die at a point, and not of an error?
fn is_abort(status: ExitStatus) -> bool {
    const SIGABRT: i32 = 6;
    status.signal() == Some(SIGABRT)
}

/// Waits until more orders are committed than now.
async fn until_more_orders(db: &TestDb) {
    let orders = "SELECT COUNT(*) FROM orders_orders";
    let before = db.count(orders).await;
    eventually("more orders", || async { (db.count(orders).await > before + 2).then_some(()) }).await;
}

/// Places the order of a key; its id if it was answered.
async fn place(api: &Api, key: i64) -> Option<String> {
    let request = api.post("/v1/orders", &order(&format!("customer-{key}"), &[("A", 1)]));
    let response = request.header("idempotency-key", format!("key-{key}")).send().await.ok()?;
    if response.status() != StatusCode::CREATED {
        return None;
    }
    let order: Value = response.json().await.ok()?;
    Some(order["id"].as_str().unwrap().to_owned())
}

/// What must hold whenever nothing is under way, however it got there: each query counts what is wrong.
async fn assert_sound(db: &TestDb) {
    for (what, sql) in [
        (
            "a shelf that its reservations do not explain",
            "SELECT COUNT(*) FROM inventory_stock s WHERE reserved <> (SELECT COALESCE(SUM(l.quantity), 0)
                 FROM inventory_reservation_lines l JOIN inventory_reservations r
                     ON r.group_id = l.group_id AND r.id = l.reservation_id
                 WHERE l.group_id = s.group_id AND l.sku = s.sku AND r.state = 'held')",
        ),
        (
            "a shelf that its adjustments do not explain",
            "SELECT COUNT(*) FROM inventory_stock s WHERE on_hand <> (SELECT COALESCE(SUM(delta), 0)
                 FROM inventory_adjustments a WHERE a.group_id = s.group_id AND a.sku = s.sku)",
        ),
        ("an oversold shelf", "SELECT COUNT(*) FROM inventory_stock WHERE reserved > on_hand"),
        (
            "a reserved order without its one reservation, or another one with one",
            "SELECT COUNT(*) FROM orders_orders o WHERE (status = 'reserved') <> (1 = (SELECT COUNT(*)
                 FROM inventory_reservations r WHERE r.group_id = o.group_id AND r.order_id = o.id))",
        ),
        (
            "a reservation that does not hold what was ordered",
            "SELECT COUNT(*) FROM inventory_reservations r WHERE
                 (SELECT SUM(quantity) FROM inventory_reservation_lines l
                     WHERE l.group_id = r.group_id AND l.reservation_id = r.id)
                 <> (SELECT SUM(quantity) FROM orders_lines l
                     WHERE l.group_id = r.group_id AND l.order_id = r.order_id)",
        ),
        (
            "an order without lines",
            "SELECT COUNT(*) FROM orders_orders o WHERE NOT EXISTS (SELECT 1
             FROM orders_lines l WHERE l.group_id = o.group_id AND l.order_id = o.id)",
        ),
        (
            "an order that was not told of once",
            "SELECT COUNT(*) FROM orders_orders o WHERE 1 <> (SELECT COUNT(*)
                 FROM notifications_notices n WHERE n.group_id = o.group_id AND n.order_id = o.id)",
        ),
        (
            "an order that was not announced once",
            "SELECT COUNT(*) FROM orders_orders o WHERE 1 <> (SELECT COUNT(*) FROM messaging_outbox m
                 WHERE m.aggregate_type = 'order' AND m.event_type = 'placed' AND m.kind = 'event'
                 AND m.correlation_id = o.correlation_id)",
        ),
    ] {
        assert_eq!(db.count(sql).await, 0, "{what}");
    }
    assert_audited(db).await;
}
