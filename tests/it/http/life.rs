//! An order's life after it is placed: paid, cancelled, expired, fulfilled, and never two of what excludes the other.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Response;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::support::{
    App, Engine, Server, TestDb, each_database, each_database_on_rabbit, eventually, problem, wrong_field,
};

/// How often each event of an order was told, by type.
async fn told(db: &TestDb, id: &str) -> Vec<String> {
    let db = db.look().await;
    let mut tx = db.read().await.unwrap();
    let told: Vec<String> = stockade_kernel::on!(tx, c => {
        sqlx::query_scalar(
            "SELECT event_type FROM messaging_outbox
             WHERE aggregate_type = 'order' AND aggregate_id = $1 AND kind = 'event' ORDER BY id",
        )
        .bind(id)
        .fetch_all(c)
        .await
    })
    .unwrap();
    drop(tx);
    db.close().await;
    told
}

async fn payload(db: &TestDb, id: &str, key: &str) -> Value {
    let event: Value = serde_json::from_str(&db.event_body(id, key).await).unwrap();
    event["payload"].clone()
}

async fn an_order_is_paid_and_fulfilled_each_step_with_its_event(db: TestDb) {
    let app = App::start(&db).await;
    app.until_connected().await;
    app.put_stock("A", 5).await;
    let id = app.reserve("A", 2500).await;
    let reserved = app.read(&format!("/v1/orders/{id}")).await;
    let (held, ends) = (&reserved["updated_at"], &reserved["hold_expires_at"]);
    let millis =
        |time: &Value| serde_json::from_value::<stockade_kernel::clock::Timestamp>(time.clone()).unwrap().millis();
    assert!((millis(ends) - millis(held) - 15 * 60_000).abs() < 5_000, "held for a quarter of an hour: {reserved}");

    let paid = app.pay(&id, 2500).await;
    assert_eq!(paid.status(), 201);
    assert_eq!(paid.headers()["location"], format!("/v1/orders/{id}"));
    assert!(!paid.headers().contains_key("idempotent-replayed"));
    let paid: Value = paid.json().await.unwrap();
    assert_eq!(
        (&paid["status"], &paid["hold_expires_at"], &paid["reason"]),
        (&json!("paid"), &json!(null), &json!(null))
    );
    let fulfilled = app.step(&id, "fulfil").await;
    assert_eq!(fulfilled.status(), 200);
    let fulfilled: Value = fulfilled.json().await.unwrap();
    assert_eq!((&fulfilled["status"], &fulfilled["id"]), (&json!("fulfilled"), &json!(id)));
    assert_eq!(app.read(&format!("/v1/orders/{id}")).await, fulfilled);

    assert_eq!(told(&db, &id).await, ["placed", "paid", "fulfilled"]);
    let expected = json!({ "order_id": id, "customer_id": "alice", "amount_minor": 2500, "currency": "USD" });
    assert_eq!(payload(&db, &id, "order.paid").await, expected);
    assert_eq!(payload(&db, &id, "order.fulfilled").await, json!({ "order_id": id }));
    let event: Value = serde_json::from_str(&db.event_body(&id, "order.paid").await).unwrap();
    assert_eq!(event["correlation_id"], reserved["correlation_id"], "one id follows the order through its life");
    app.stop().await;
}

async fn an_order_is_cancelled_before_and_after_it_is_reserved(db: TestDb) {
    let app = App::start(&db).await;
    app.until_connected().await;
    app.put_stock("A", 5).await;
    let reserved = app.reserve("A", 100).await;
    let reason = json!({ "reason": "ordered by mistake" });
    let cancelled = app.tell(&format!("/v1/orders/{reserved}/cancel"), &reason).await;
    assert_eq!((&cancelled["status"], &cancelled["reason"]), (&json!("cancelled"), &reason["reason"]));
    assert_eq!(cancelled["hold_expires_at"], Value::Null);
    let expected = json!({ "order_id": reserved, "reason": "ordered by mistake" });
    assert_eq!(payload(&db, &reserved, "order.cancelled").await, expected);

    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let placed = app.place("bob", &[("A", 1)]).await["id"].as_str().unwrap().to_owned();
    let number = app.read(&format!("/v1/orders/{placed}")).await["number"].as_str().unwrap().to_owned();
    let cancelled = app.step(&number, "cancel").await;
    assert_eq!(cancelled.status(), 200, "by its number, without a body");
    let cancelled: Value = cancelled.json().await.unwrap();
    assert_eq!((&cancelled["status"], &cancelled["reason"]), (&json!("cancelled"), &Value::Null));
    assert_eq!(payload(&db, &placed, "order.cancelled").await, json!({ "order_id": placed }));
    wrong_field(
        app.post(&format!("/v1/orders/{placed}/cancel"), &json!({ "reason": "" })).send().await.unwrap(),
        "/reason",
    )
    .await;
    app.stop().await;
}

async fn a_step_that_the_state_forbids_is_a_409_that_tells_the_state(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 10).await;
    let paid = app.reserve("A", 5).await;
    assert_eq!(app.pay(&paid, 5).await.status(), 201);
    let cancelled = app.reserve("A", 5).await;
    assert_eq!(app.step(&cancelled, "cancel").await.status(), 200);
    let reserved = app.reserve("A", 5).await;
    let rejected = app.place_and_wait("carol", &[("NOWHERE", 1)]).await["id"].as_str().unwrap().to_owned();
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let placed = app.place("dora", &[("A", 1)]).await["id"].as_str().unwrap().to_owned();
    let forbidden: [(&str, &str, &[&str]); 5] = [
        (&placed, "placed", &["payments", "fulfil"]),
        (&reserved, "reserved", &["fulfil"]),
        (&paid, "paid", &["payments", "cancel"]),
        (&cancelled, "cancelled", &["payments", "cancel", "fulfil"]),
        (&rejected, "rejected", &["payments", "cancel", "fulfil"]),
    ];
    for (id, state, steps) in forbidden {
        let before = told(&db, id).await;
        for step in steps {
            let answer = if *step == "payments" { app.pay(id, 5).await } else { app.step(id, step).await };
            let refused = problem(answer, 409, "wrong-state").await;
            assert_eq!(refused["state"], state, "{refused}");
            assert!(
                refused["detail"].as_str().unwrap().starts_with(&format!("the order is {state}; only ")),
                "{refused}"
            );
        }
        assert_eq!((app.status(id).await.as_str(), told(&db, id).await), (state, before), "nothing has moved");
    }
    let nowhere = stockade_kernel::clock::mint_id().to_string();
    for step in ["cancel", "fulfil"] {
        problem(app.step(&nowhere, step).await, 404, "not-found").await;
    }
    problem(app.pay("ORD-NOWHERE0", 1).await, 404, "not-found").await;
    app.stop().await;
}

async fn a_payment_must_be_the_total_in_the_orders_currency(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 10).await;
    let id = app.reserve("A", 2500).await;
    let path = format!("/v1/orders/{id}/payments");
    for (body, pointer) in [
        (json!({ "amount_minor": 2499 }), "/amount_minor"),
        (json!({ "amount_minor": 2501, "currency": "USD" }), "/amount_minor"),
        (json!({ "amount_minor": 2500, "currency": "EUR" }), "/currency"),
    ] {
        let refused = problem(app.post(&path, &body).send().await.unwrap(), 422, "payment-mismatch").await;
        assert_eq!(refused["errors"][0]["pointer"], pointer, "{refused}");
    }
    wrong_field(app.post(&path, &json!({ "amount_minor": -1 })).send().await.unwrap(), "/amount_minor").await;
    wrong_field(app.post(&path, &json!({ "amount_minor": 1, "currency": "usd" })).send().await.unwrap(), "/currency")
        .await;
    assert_eq!((app.status(&id).await.as_str(), told(&db, &id).await.len()), ("reserved", 1));
    assert_eq!(app.pay(&id, 2500).await.status(), 201);

    let free = app.reserve("A", 0).await;
    assert_eq!(app.pay(&free, 0).await.status(), 201, "what costs nothing is paid with nothing");
    app.stop().await;
}

/// The state of an order's reservation, once it is this.
async fn reservation(app: &App, id: &str, state: &str) -> Value {
    eventually(&format!("a reservation that is {state}"), || async {
        let rows = app.read(&format!("/v1/reservations?order_id={id}")).await;
        rows["data"].as_array().unwrap().iter().find(|row| row["state"] == state).cloned()
    })
    .await
}

async fn stock_follows_the_order_through_its_life(db: TestDb) {
    let app = App::start_with(&db, &["--hold-time", "8s"]).await;
    app.until_connected().await;
    app.put_stock("A", 10).await;
    let (paid, cancelled, expired) = (app.reserve("A", 5).await, app.reserve("A", 5).await, app.reserve("A", 5).await);
    assert_eq!(app.stock("A").await, (10, 3));
    assert_eq!(app.pay(&paid, 5).await.status(), 201);
    assert_eq!(app.step(&cancelled, "cancel").await.status(), 200);
    reservation(&app, &paid, "committed").await;
    let released = reservation(&app, &cancelled, "released").await;
    assert_eq!(released["lines"], json!([{ "sku": "A", "quantity": 1 }]), "what it held stays on record");
    reservation(&app, &expired, "released").await;
    assert_eq!(app.stock("A").await, (10, 1), "paid stock stays held, the rest is back");
    assert_eq!(app.step(&paid, "fulfil").await.status(), 200);
    reservation(&app, &paid, "fulfilled").await;
    assert_eq!(app.stock("A").await, (9, 0), "the goods have left the shelf");
    let explained = "SELECT count(*) FROM inventory_stock s WHERE sku = 'A' AND on_hand + fulfilled =
         (SELECT sum(delta) FROM inventory_adjustments a WHERE a.sku = s.sku)";
    assert_eq!(db.count(explained).await, 1);
    app.stop().await;
}

async fn a_cancellation_that_overtakes_its_order_keeps_it_from_reserving(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 1).await;
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let id = app.place("alice", &[("A", 1)]).await["id"].as_str().unwrap().to_owned();
    assert_eq!(app.step(&id, "cancel").await.status(), 200);
    // Only the cancellation gets there at first: it is taken out of the queue and put in again in front.
    let (placed, cancelled) = (db.event_body(&id, "order.placed").await, db.event_body(&id, "order.cancelled").await);
    let mut tx = app.running.kernel.db.begin().await.unwrap();
    let empty = "DELETE FROM messaging_queue WHERE queue = 'stockade.inventory'";
    stockade_kernel::on!(tx, c => sqlx::query(empty).execute(c).await.map(drop)).unwrap();
    tx.commit().await.unwrap();
    app.tell("/v1/consumers/inventory/resume", &json!({})).await;
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": cancelled })).await;
    let tombstone = reservation(&app, &id, "released").await;
    assert_eq!(tombstone["lines"], json!([]));
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": placed })).await;
    let event: Value = serde_json::from_str(&placed).unwrap();
    let seen = format!("/v1/inbox?consumer=inventory&event_id={}", event["event_id"].as_str().unwrap());
    let row = app.eventually_list(&seen, 1).await.remove(0);
    assert_eq!(
        (&row["state"], &row["last_error"]),
        (&json!("processed"), &json!("the order has its reservation already"))
    );
    assert_eq!(app.stock("A").await, (1, 0));
    assert_eq!(app.walk(&format!("/v1/outbox?aggregate_type=inventory&aggregate_id={id}")).await, Vec::<Value>::new());
    assert_eq!(app.reserve("A", 0).await.len(), 36, "and the stock is there for the next one");
    app.stop().await;
}

async fn what_contradicts_a_reservation_is_a_dead_letter(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 5).await;
    let id = app.reserve("A", 5).await;
    assert_eq!(app.pay(&id, 5).await.status(), 201);
    reservation(&app, &id, "committed").await;
    let mut forged: Value = serde_json::from_str(&db.event_body(&id, "order.placed").await).unwrap();
    forged["event_id"] = json!(stockade_kernel::clock::mint_id());
    forged["event_type"] = json!("cancelled");
    forged["payload"] = json!({ "order_id": id });
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": forged.to_string() })).await;
    let letter = app.eventually_list("/v1/dead-letters", 1).await.remove(0);
    assert_eq!(letter["reason"], "business-rule");
    assert_eq!(letter["error"], "the reservation is committed, and order.cancelled contradicts that");
    assert_eq!(app.stock("A").await, (5, 1));
    app.stop().await;
}

fn is_replay(response: &Response) -> bool {
    response.headers().get("idempotent-replayed").is_some_and(|value| value == "true")
}

async fn pay_with(app: &App, id: &str, key: &str, amount: i64) -> Response {
    let request = app.post(&format!("/v1/orders/{id}/payments"), &json!({ "amount_minor": amount }));
    request.header("idempotency-key", key).send().await.unwrap()
}

async fn a_key_makes_a_repeated_payment_answer_as_the_first_did(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 10).await;
    let (id, other) = (app.reserve("A", 100).await, app.reserve("A", 100).await);
    problem(pay_with(&app, &id, "k", 99).await, 422, "payment-mismatch").await;
    let first = pay_with(&app, &id, "k", 100).await;
    assert_eq!((first.status().as_u16(), is_replay(&first)), (201, false), "a refusal does not burn its key");
    let number = first.json::<Value>().await.unwrap()["number"].as_str().unwrap().to_owned();
    for name in [&id, &number] {
        let repeat = pay_with(&app, name, "k", 100).await;
        assert_eq!((repeat.status().as_u16(), is_replay(&repeat)), (201, true));
        assert_eq!(repeat.json::<Value>().await.unwrap()["id"], id.as_str());
    }
    problem(pay_with(&app, &id, "k", 99).await, 422, "idempotency-key-reused").await;
    problem(pay_with(&app, &other, "k", 100).await, 422, "idempotency-key-reused").await;
    assert_eq!(app.status(&other).await, "reserved");
    problem(app.pay(&id, 100).await, 409, "wrong-state").await;

    // The same word on another route is another key, and the order as it is now is what a repeat answers with.
    let fulfil = || {
        let request = app.client.post(format!("{}/v1/orders/{id}/fulfil", app.url)).header("idempotency-key", "k");
        async { request.send().await.unwrap() }
    };
    assert!(!is_replay(&fulfil().await));
    let repeat = fulfil().await;
    assert_eq!((repeat.status().as_u16(), is_replay(&repeat)), (200, true));
    let repeat = pay_with(&app, &id, "k", 100).await;
    assert_eq!((is_replay(&repeat), &repeat.json::<Value>().await.unwrap()["status"]), (true, &json!("fulfilled")));
    assert_eq!(told(&db, &id).await, ["placed", "paid", "fulfilled"]);
    app.stop().await;
}

async fn fifty_payments_at_once_pay_once(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 10).await;
    let keyed = app.reserve("A", 100).await;
    let answers = join_all((0..50).map(|_| pay_with(&app, &keyed, "k", 100))).await;
    assert!(answers.iter().all(|answer| answer.status() == 201));
    assert_eq!(answers.iter().filter(|answer| !is_replay(answer)).count(), 1);
    let bare = app.reserve("A", 100).await;
    let answers = join_all((0..50).map(|_| app.pay(&bare, 100))).await;
    let paid = answers.iter().filter(|answer| answer.status() == 201).count();
    let refused = answers.iter().filter(|answer| answer.status() == 409).count();
    assert_eq!((paid, refused), (1, 49));
    for id in [keyed, bare] {
        assert_eq!(told(&db, &id).await, ["placed", "paid"]);
    }
    app.stop().await;
}

/// One key, many orders at once: it stands for one of them.
async fn a_key_raced_over_several_orders_pays_one_of_them(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 100).await;
    let orders = join_all((0..10).map(|_| app.reserve("A", 100))).await;
    let answers = join_all(orders.iter().map(|id| pay_with(&app, id, "k", 100))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status() == 201).count(), 1);
    assert_eq!(answers.iter().filter(|answer| answer.status() == 422).count(), 9);
    assert_eq!(db.count("SELECT count(*) FROM orders_orders WHERE status = 'paid'").await, 1);
    app.stop().await;
}

async fn a_step_that_comes_early_may_wait_for_its_time(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 10).await;
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let id = app.place("alice", &[("A", 1)]).await["id"].as_str().unwrap().to_owned();
    let pay = |wait: &'static str| {
        let request = app.post(&format!("/v1/orders/{id}/payments"), &json!({ "amount_minor": 0 }));
        async move { request.header("prefer", wait).send().await.unwrap() }
    };
    let refused = problem(pay("wait=1").await, 409, "wrong-state").await;
    assert_eq!(refused["state"], "placed", "it waited in vain");
    let fulfil = app.client.post(format!("{}/v1/orders/{id}/fulfil", app.url)).header("prefer", "wait=20");
    let (fulfilled, paid, _) = tokio::join!(fulfil.send(), pay("wait=20"), async {
        app.tell("/v1/consumers/inventory/resume", &json!({})).await
    });
    assert_eq!((paid.status().as_u16(), &paid.headers()["preference-applied"]), (201, &"wait=20".parse().unwrap()));
    let fulfilled = fulfilled.unwrap();
    assert_eq!(
        (fulfilled.status().as_u16(), &fulfilled.headers()["preference-applied"]),
        (200, &"wait=20".parse().unwrap())
    );
    assert_eq!(told(&db, &id).await, ["placed", "paid", "fulfilled"]);
    // What can never be is refused at once, however long one would wait.
    let began = tokio::time::Instant::now();
    problem(pay("wait=20").await, 409, "wrong-state").await;
    assert!(began.elapsed() < Duration::from_secs(10));
    app.stop().await;
}

async fn a_late_answer_changes_nothing_and_is_counted(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 10).await;
    app.tell("/v1/consumers/orders/pause", &json!({})).await;
    let id = app.place("alice", &[("A", 1)]).await["id"].as_str().unwrap().to_owned();
    let reserved = format!("/v1/outbox?aggregate_type=inventory&aggregate_id={id}");
    let event = app.eventually_list(&reserved, 1).await[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(app.step(&id, "cancel").await.status(), 200);
    let before = app.read(&format!("/v1/orders/{id}")).await;
    app.tell("/v1/consumers/orders/resume", &json!({})).await;
    let row = eventually("the answer dealt with", || async {
        let rows = app.read(&format!("/v1/inbox?consumer=orders&event_id={event}")).await;
        rows["data"].as_array().unwrap().first().cloned()
    })
    .await;
    assert_eq!((&row["state"], &row["attempts"]), (&json!("processed"), &json!(1)));
    assert_eq!(row["last_error"], "the order is cancelled already");
    assert_eq!(app.read(&format!("/v1/orders/{id}")).await, before);
    assert_eq!(db.count("SELECT count(*) FROM messaging_inbox WHERE reason = 'moot'").await, 1);
    app.stop().await;
}

async fn an_unpaid_order_expires_and_says_why(db: TestDb) {
    let app = App::start_with(&db, &["--hold-time", "8s"]).await;
    app.until_connected().await;
    app.put_stock("A", 10).await;
    let (left, paid) = (app.reserve("A", 100).await, app.reserve("A", 100).await);
    assert_eq!(app.pay(&paid, 100).await.status(), 201);
    let expired = eventually("the hold to end", || async {
        let order = app.read(&format!("/v1/orders/{left}")).await;
        (order["status"] == "expired").then_some(order)
    })
    .await;
    assert_eq!(expired["reason"], "It was not paid while it was held");
    assert!(expired["updated_at"].as_str() >= expired["hold_expires_at"].as_str(), "not before its time: {expired}");
    assert_eq!(told(&db, &left).await, ["placed", "expired"]);
    let expected = json!({ "order_id": left, "reason": "It was not paid while it was held" });
    assert_eq!(payload(&db, &left, "order.expired").await, expected);
    problem(app.pay(&left, 100).await, 409, "wrong-state").await;
    assert_eq!(app.status(&paid).await, "paid", "what was paid in time stays paid");
    app.stop().await;
}

each_database!(
    an_order_is_paid_and_fulfilled_each_step_with_its_event,
    an_order_is_cancelled_before_and_after_it_is_reserved,
    a_step_that_the_state_forbids_is_a_409_that_tells_the_state,
    a_payment_must_be_the_total_in_the_orders_currency,
    a_key_makes_a_repeated_payment_answer_as_the_first_did,
    fifty_payments_at_once_pay_once,
    a_key_raced_over_several_orders_pays_one_of_them,
    a_step_that_comes_early_may_wait_for_its_time,
    a_late_answer_changes_nothing_and_is_counted,
    an_unpaid_order_expires_and_says_why,
    stock_follows_the_order_through_its_life,
    a_cancellation_that_overtakes_its_order_keeps_it_from_reserving,
    what_contradicts_a_reservation_is_a_dead_letter,
);

each_database_on_rabbit!(
    an_order_is_paid_and_fulfilled_each_step_with_its_event,
    an_order_is_cancelled_before_and_after_it_is_reserved,
    an_unpaid_order_expires_and_says_why,
    stock_follows_the_order_through_its_life,
);

/// Ends the holds of orders on Postgres at `when`, an SQL expression.
async fn end_holds(db: &TestDb, orders: &[String], when: &str) {
    let ids = orders.iter().map(|id| format!("'{id}'")).collect::<Vec<_>>().join(", ");
    let mut connection = PgConnection::connect(&db.url).await.unwrap();
    let sql = format!(
        "WITH held AS (UPDATE orders_orders SET hold_expires_at = {when} WHERE id IN ({ids}) RETURNING id)
         UPDATE orders_holds SET expires_at = {when} WHERE order_id IN (SELECT id FROM held)"
    );
    let ended = sqlx::query(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    assert_eq!(ended.rows_affected(), orders.len() as u64);
}

/// Payment, cancellation and the end of the hold race over each order, through two servers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn of_payment_cancellation_and_expiry_one_wins_however_many_servers_there_are() {
    const RACED: u32 = 24;
    /// More than a second, which is how often the servers look for holds that have ended.
    const AFTER_HOLD: Duration = Duration::from_millis(1500);
    let db = TestDb::new(Engine::Postgres).await;
    let servers = [Server::start(&db, &[]), Server::start(&db, &[])];
    servers[0].put_stock("A", 1000).await;
    let mut winners = BTreeSet::new();
    for round in 1.. {
        // The slower the machine, the longer it takes until the first requests are answered within the hold.
        assert!(round < 20, "only {winners:?} ever win");
        let hold = Duration::from_millis(500) * round;
        let orders = join_all((0..RACED).map(|_| servers[0].reserve("A", 1))).await;
        end_holds(&db, &orders, &format!("now() + interval '{} ms'", hold.as_millis())).await;
        let start = tokio::time::Instant::now();
        let outcomes = join_all((0..RACED).zip(&orders).map(async |(n, id)| {
            tokio::time::sleep_until(start + (hold + AFTER_HOLD) * n / RACED).await;
            let (one, other) = if n % 2 == 0 { (0, 1) } else { (1, 0) };
            let pay = async || servers[one].pay(id, 1).await.status().as_u16();
            let cancel = async || servers[other].step(id, "cancel").await.status().as_u16();
            if n % 4 < 2 {
                tokio::join!(pay(), cancel())
            } else {
                let (cancelled, paid) = tokio::join!(cancel(), pay());
                (paid, cancelled)
            }
        }))
        .await;
        for (id, outcome) in orders.iter().zip(outcomes) {
            let winner = match outcome {
                (201, 409) => "paid",
                (409, 200) => "cancelled",
                (409, 409) => "expired",
                both => panic!("two outcomes: {both:?}"),
            };
            assert_eq!(servers[0].status(id).await, winner);
            assert_eq!(told(&db, id).await, ["placed", winner], "one event for one outcome");
            winners.insert(winner);
        }
        if winners.len() == 3 {
            break;
        }
    }
    for server in servers {
        assert!(server.terminate().await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn one_key_on_two_servers_pays_one_order() {
    let db = TestDb::new(Engine::Postgres).await;
    let servers = [Server::start(&db, &[]), Server::start(&db, &[])];
    servers[0].put_stock("A", 1000).await;
    for round in 0..10 {
        let orders = join_all((0..6).map(|_| servers[0].reserve("A", 7))).await;
        let answers = join_all(orders.iter().enumerate().map(|(n, id)| {
            let path = format!("/v1/orders/{id}/payments");
            let request = servers[n % 2].post(&path, &json!({ "amount_minor": 7 }));
            async move { request.header("idempotency-key", format!("key-{round}")).send().await.unwrap() }
        }))
        .await;
        let mut statuses: Vec<u16> = answers.iter().map(|answer| answer.status().as_u16()).collect();
        statuses.sort_unstable();
        assert_eq!(statuses, [201, 422, 422, 422, 422, 422]);
    }
    assert_eq!(db.count("SELECT count(*) FROM orders_orders WHERE status = 'paid'").await, 10);
    for server in servers {
        assert!(server.terminate().await);
    }
}
