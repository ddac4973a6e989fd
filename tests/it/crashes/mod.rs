//! The real binary, dying in every way we know, on each database: nothing is lost and nothing is done twice.

mod brokers;
mod databases;
mod lives;
mod points;
mod processes;

use futures_util::future::join_all;
use reqwest::StatusCode;
use serde_json::Value;

use crate::support::{Api, Server, TestDb, eventually, order};

/// Takes over from the dead in a second rather than a minute.
const QUICK: [&str; 10] =
    ["--lease", "1s", "--poll", "50ms", "--outbox-poll", "50ms", "--retry-base", "50ms", "--retry-cap", "200ms"];

const STOCK: i64 = 1000;

/// A server that may die, and the orders placed with it, each one unit of `A` under a key of its own.
struct Shop<'a> {
    db: &'a TestDb,
    flags: Vec<&'a str>,
    server: Server,
    orders: i64,
}

impl<'a> Shop<'a> {
    async fn open(db: &'a TestDb, more: &[&'a str]) -> Self {
        let flags = [QUICK.as_slice(), more].concat();
        let server = Server::start(db, &flags);
        server.until_connected().await;
        server.put_stock("A", STOCK).await;
        Self { db, flags, server, orders: 0 }
    }

    /// Starts another server in place of one that is gone.
    async fn reopen(&mut self) {
        self.server = Server::start(self.db, &self.flags);
        self.server.until_connected().await;
    }

    /// Places orders at once. The server may die over them: whoever got no answer asks again with the same key.
    async fn place(&mut self, count: i64) {
        let keys: Vec<i64> = (self.orders..self.orders + count).collect();
        self.orders += count;
        join_all(keys.into_iter().map(|key| place(&self.server, key))).await;
    }

    /// Waits for the server to die where it was told to, and starts another.
    async fn die_and_reopen(&mut self) {
        use std::os::unix::process::ExitStatusExt;
        const SIGABRT: i32 = 6;
        let status = self.server.ended().await;
        assert_eq!(status.signal(), Some(SIGABRT), "it died at the point it was told to: {status}");
        self.reopen().await;
    }

    /// Asks for every order again, as clients that heard nothing do.
    async fn ask_again(&self) {
        let answers = join_all((0..self.orders).map(|key| place(&self.server, key))).await;
        assert!(answers.iter().all(Option::is_some), "every order is taken in the end");
    }

    /// Waits until nothing is under way any more.
    async fn settle(&self) {
        eventually("everything settled", || async { (self.under_way().await == 0).then_some(()) }).await;
    }

    /// How much there is still to do. A broker's queues are not ours to count: there, every event published must have
    /// been met by all who take it.
    async fn under_way(&self) -> i64 {
        let waiting = "SELECT (SELECT COUNT(*) FROM messaging_queue) + (SELECT COUNT(*) FROM messaging_bundles)
             + (SELECT COUNT(*) FROM messaging_outbox WHERE status <> 'published')
             + (SELECT COUNT(*) FROM messaging_inbox WHERE state NOT IN ('processed', 'dead'))";
        let unmet = "SELECT 2 * (SELECT COUNT(*) FROM messaging_outbox
                 WHERE kind = 'event' AND aggregate_type = 'order' AND event_type = 'placed')
             - (SELECT COUNT(*) FROM messaging_inbox
                 WHERE consumer IN ('inventory', 'ledger') AND event_type = 'order.placed')
             + 2 * (SELECT COUNT(*) FROM messaging_outbox WHERE kind = 'event' AND aggregate_type = 'inventory')
             - (SELECT COUNT(*) FROM messaging_inbox
                 WHERE consumer IN ('orders', 'notifications') AND event_type LIKE 'inventory.%')";
        self.db.count(waiting).await + if self.db.is_on_rabbit() { self.db.count(unmet).await } else { 0 }
    }

    /// Every order is reserved, held and told of once, and the shelf adds up.
    async fn check(&self) {
        self.settle().await;
        assert_sound(self.db).await;
        for (what, sql) in [
            ("orders", "SELECT COUNT(*) FROM orders_orders"),
            ("reserved", "SELECT COUNT(*) FROM orders_orders WHERE status = 'reserved'"),
            ("notices", "SELECT COUNT(*) FROM notifications_notices WHERE kind = 'reserved' AND state = 'sent'"),
        ] {
            assert_eq!(self.db.count(sql).await, self.orders, "{what}");
        }
    }

    async fn letters(&self) -> Vec<Value> {
        self.server.walk("/v1/dead-letters?state=open").await
    }
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
}
