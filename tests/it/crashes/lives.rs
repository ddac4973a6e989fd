//! The process dies while orders are paid, cancelled and fulfilled: one outcome each, booked once, told once.

use std::collections::BTreeSet;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use reqwest::StatusCode;
use serde_json::json;
use stockade_kernel::clock::{Clock, mint_id};

use super::Shop;
use crate::support::{
    Api, Server, TestDb, assert_audited, each_database, each_database_on_rabbit, eventually, until_finished,
    until_finished_and_audited, witness,
};

const PRICE: i64 = 7;

/// Asks for a step under a key of its own; `None` if there was no answer, else whether it was taken.
async fn step(api: &Api, id: &str, step: &str) -> Option<bool> {
    let body = if step == "payments" { json!({ "amount_minor": PRICE }) } else { json!({}) };
    let request = api.post(&format!("/v1/orders/{id}/{step}"), &body).header("idempotency-key", format!("{step}-{id}"));
    match request.send().await.ok()?.status() {
        StatusCode::OK | StatusCode::CREATED => Some(true),
        StatusCode::CONFLICT => Some(false),
        _ => None,
    }
}

impl Shop<'_> {
    /// Orders that are reserved and cost something.
    async fn reserve(&self, count: usize) -> Vec<String> {
        join_all((0..count).map(|_| self.server.reserve("A", PRICE))).await
    }

    async fn restart(&mut self) {
        self.server.ended().await;
        self.reopen().await;
    }

    /// The answers to a step of each order, in order; the server may die meanwhile.
    async fn take(&self, orders: &[String], what: &str) -> Vec<Option<bool>> {
        join_all(orders.iter().map(|id| step(&self.server, id, what))).await
    }

    /// Every step that was acknowledged has been taken. To be called before a client repeats one: the repeat would hide its
    /// loss.
    async fn check_taken<'o>(&self, acknowledged: impl IntoIterator<Item = (&'o String, &str)>) {
        let orders = self.server.walk("/v1/orders?limit=200").await;
        for (id, what) in acknowledged {
            let order = orders.iter().find(|order| order["id"] == json!(id)).expect("the order exists");
            let taken = if what == "cancel" { "cancelled" } else { "paid" };
            assert_eq!(order["status"], taken, "{what} of order {id} was acknowledged");
        }
    }

    /// Every order is where it was taken, with the stock, the entries and the notices that go with it.
    async fn check_lives(&self) {
        until_finished(self.db).await;
        for (what, sql) in [
            (
                "a reservation that is not where its order is",
                "SELECT COUNT(*) FROM orders_orders o LEFT JOIN inventory_reservations r
                     ON r.group_id = o.group_id AND r.order_id = o.id
                 WHERE COALESCE(r.state, '') <> CASE o.status WHEN 'reserved' THEN 'held' WHEN 'paid' THEN 'committed'
                     WHEN 'fulfilled' THEN 'fulfilled' ELSE 'released' END",
            ),
            (
                "a shelf that its reservations do not explain",
                "SELECT COUNT(*) FROM inventory_stock s WHERE reserved <> (SELECT COALESCE(SUM(l.quantity), 0)
                     FROM inventory_reservation_lines l JOIN inventory_reservations r
                         ON r.group_id = l.group_id AND r.id = l.reservation_id
                     WHERE l.sku = s.sku AND r.state IN ('held', 'committed'))",
            ),
            (
                "a shelf that its adjustments do not explain",
                "SELECT COUNT(*) FROM inventory_stock s WHERE on_hand + fulfilled <>
                     (SELECT COALESCE(SUM(delta), 0) FROM inventory_adjustments a WHERE a.sku = s.sku)",
            ),
            (
                "a payment that is not booked once, or a booking without one",
                "SELECT COUNT(*) FROM orders_orders o WHERE
                     (SELECT COALESCE(SUM(amount_minor), 0) FROM ledger_entries e
                         WHERE e.order_id = o.id AND e.account = 'cash')
                     <> CASE WHEN o.status IN ('paid', 'fulfilled') THEN o.total_minor ELSE 0 END",
            ),
            (
                "books that do not balance",
                "SELECT COUNT(*) FROM (SELECT SUM(amount_minor) AS left_over FROM ledger_entries GROUP BY event_id) AS e
                 WHERE left_over <> 0",
            ),
            (
                "an outcome that was not told once",
                "SELECT COUNT(*) FROM orders_orders o WHERE 1 <> (SELECT COUNT(*) FROM notifications_notices n
                     WHERE n.order_id = o.id AND n.kind = CASE o.status WHEN 'fulfilled' THEN 'paid' ELSE o.status END)",
            ),
            (
                "an order with two outcomes",
                "SELECT COUNT(*) FROM (SELECT aggregate_id FROM messaging_outbox WHERE kind = 'event'
                     AND aggregate_type = 'order' AND event_type IN ('paid', 'cancelled', 'expired')
                     GROUP BY aggregate_id HAVING COUNT(*) > 1) AS twice",
            ),
        ] {
            assert_eq!(self.db.count(sql).await, 0, "{what}");
        }
        witness::check(self.db).await;
        assert_audited(self.db).await;
    }
}

async fn a_payment_cut_short_is_made_once_by_asking_again(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    for (point, paid) in [("orders.before_commit", 0), ("orders.after_commit", 1)] {
        let id = shop.reserve(1).await.remove(0);
        shop.server.tell("/v1/lab/crash", &json!({ "point": point })).await;
        assert_eq!(step(&shop.server, &id, "payments").await, None, "{point}: it died over it");
        shop.restart().await;
        let told = "SELECT COUNT(*) FROM messaging_outbox WHERE event_type = 'paid' AND aggregate_id = $1";
        assert_eq!(db.count_of(told, &id).await, paid, "{point}");
        assert_eq!(step(&shop.server, &id, "payments").await, Some(true), "{point}");
        assert_eq!(db.count_of(told, &id).await, 1, "{point}");
        shop.check_lives().await;
    }
}

async fn what_follows_a_payment_happens_once_wherever_a_consumer_dies(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    for point in ["consumer.before_commit", "consumer.after_commit"] {
        for consumer in ["inventory", "ledger", "notifications"] {
            let orders = shop.reserve(3).await;
            until_finished(&db).await;
            shop.server.tell("/v1/lab/crash", &json!({ "point": point, "consumer": consumer })).await;
            let answers = shop.take(&orders, "payments").await;
            shop.restart().await;
            let acknowledged = orders.iter().zip(answers).filter(|(_, answer)| *answer == Some(true));
            shop.check_taken(acknowledged.map(|(id, _)| (id, "payments"))).await;
            for id in &orders {
                assert_eq!(step(&shop.server, id, "payments").await, Some(true), "{point} {consumer}");
            }
            shop.check_lives().await;
            assert_eq!(step(&shop.server, &orders[0], "fulfil").await, Some(true));
            shop.check_lives().await;
        }
    }
}

/// A payment that waits for its order: the process dies in the very transaction that books it with it.
/// Waits until the batch that a consumer has in hand is acknowledged.
async fn until_batch_ended(server: &Server, consumer: &str) {
    let now = Clock::System.now().to_string();
    let later = async || {
        let ended_at = server.read("/v1/health").await["loops"][consumer]["last_success_at"].as_str()?.to_owned();
        (ended_at > now).then_some(())
    };
    eventually("the end of a batch", later).await;
}

async fn a_kept_event_survives_the_death_of_who_wakes_it(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    let model = shop.reserve(1).await.remove(0);
    assert_eq!(step(&shop.server, &model, "payments").await, Some(true));
    until_finished(&db).await;
    let bodies = [db.event_body(&model, "order.paid").await, db.event_body(&model, "order.placed").await];
    for (point, rounds) in [("consumer.before_commit", 1), ("consumer.after_commit", 2)] {
        // The same of an order from elsewhere, the payment first.
        let order = mint_id().to_string();
        let [paid, placed] = bodies.each_ref().map(|body| {
            let mut event: serde_json::Value = serde_json::from_str(body).unwrap();
            event["event_id"] = json!(mint_id());
            event["aggregate_id"] = json!(order);
            event["payload"]["order_id"] = json!(order);
            json!({ "queue": "ledger", "body": event.to_string() })
        });
        shop.server.tell("/v1/lab/publish", &paid).await;
        shop.server.eventually_list("/v1/inbox?consumer=ledger&state=waiting", 1).await;
        // The batch of the payment must have ended, or it reaches the crash point itself.
        until_batch_ended(&shop.server, "ledger").await;
        shop.server.tell("/v1/lab/crash", &json!({ "point": point, "consumer": "ledger" })).await;
        // It may die of it before it has answered.
        let _ = shop.server.post("/v1/lab/publish", &placed).send().await;
        shop.restart().await;
        until_finished_and_audited(&db).await;
        witness::check(&db).await;
        let entries = db.count("SELECT COUNT(*) FROM ledger_entries").await;
        assert_eq!(entries, 2 + 2 * rounds, "{point}: booked once");
        assert_eq!(shop.letters().await.len(), 0);
    }
}

async fn kills_in_a_burst_of_payments_and_cancellations_leave_one_outcome_each(db: TestDb) {
    let mut shop = Shop::open(&db, &["--batch", "8"]).await;
    let orders = shop.reserve(90).await;
    let steps: Vec<(&String, &str)> =
        orders.iter().enumerate().map(|(n, id)| (id, if n % 3 == 0 { "cancel" } else { "payments" })).collect();
    let mut acknowledged = BTreeSet::new();
    const KILLED_AFTER: usize = 10;
    for _ in 0..3 {
        {
            let ask = async |n: usize| step(&shop.server, steps[n].0, steps[n].1).await.map(|taken| (n, taken));
            // Those without an answer first.
            let mut asked: Vec<usize> = (0..steps.len()).collect();
            asked.sort_by_key(|n| acknowledged.contains(n));
            let mut burst: FuturesUnordered<_> = asked.into_iter().map(ask).collect();
            let mut answered = 0;
            while let Some(answer) = burst.next().await {
                let Some((n, taken)) = answer else { continue };
                assert!(taken, "{:?} is possible", steps[n]);
                acknowledged.insert(n);
                answered += 1;
                if answered == KILLED_AFTER {
                    shop.server.signal("KILL");
                }
            }
            assert!(answered >= KILLED_AFTER, "{answered} answers");
        }
        shop.restart().await;
        shop.check_taken(acknowledged.iter().map(|n| steps[*n])).await;
    }
    let answers = join_all(steps.iter().map(|(id, what)| step(&shop.server, id, what))).await;
    assert!(answers.iter().all(|answer| *answer == Some(true)), "a repeat is answered as the first request was");
    shop.check_lives().await;
    assert_eq!(db.count("SELECT COUNT(*) FROM orders_orders WHERE status = 'paid'").await, 60);
    assert_eq!(db.count("SELECT COUNT(*) FROM ledger_entries").await, 120);
}

each_database!(
    a_payment_cut_short_is_made_once_by_asking_again,
    what_follows_a_payment_happens_once_wherever_a_consumer_dies,
    a_kept_event_survives_the_death_of_who_wakes_it,
    kills_in_a_burst_of_payments_and_cancellations_leave_one_outcome_each,
);

each_database_on_rabbit!(
    a_payment_cut_short_is_made_once_by_asking_again,
    what_follows_a_payment_happens_once_wherever_a_consumer_dies,
    a_kept_event_survives_the_death_of_who_wakes_it,
    kills_in_a_burst_of_payments_and_cancellations_leave_one_outcome_each,
);
