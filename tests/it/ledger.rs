//! The books: a payment is booked once, in two entries that sum to zero, whatever comes twice or too early.

use serde_json::{Value, json};
use stockade::http::caller::DEFAULT_GROUP;
use stockade_kernel::clock::mint_id;

use crate::support::{App, TestDb, Wire, each_database, each_database_on_rabbit, eventually, fields, problem};

const ENTRY_FIELDS: [&str; 7] = ["account", "amount_minor", "created_at", "currency", "event_id", "id", "order_id"];

/// An event as a foreign program would write it.
fn event(order_id: &str, event_type: &str, payload: Value) -> Value {
    json!({
        "event_id": mint_id(), "occurred_at": "2026-11-16T09:00:00Z", "aggregate_type": "order", "aggregate_id": order_id,
        "event_type": event_type, "group_id": DEFAULT_GROUP, "correlation_id": "from-outside", "payload": payload,
    })
}

fn placed(order_id: &str) -> Value {
    let items = json!([{ "sku": "A", "quantity": 1, "unit_price_minor": 700 }]);
    let payload = json!({
        "order_id": order_id, "order_number": "EXT-1", "customer_id": "dora", "currency": "USD", "total_minor": 700,
        "items": items,
    });
    event(order_id, "placed", payload)
}

fn paid(order_id: &str) -> Value {
    let payload = json!({ "order_id": order_id, "customer_id": "dora", "amount_minor": 700, "currency": "USD" });
    event(order_id, "paid", payload)
}

async fn publish(app: &App, event: &Value) {
    let message = json!({ "queue": "ledger", "body": event.to_string() });
    // A server that has just started may not be connected to its broker yet.
    let published = async || {
        let response = app.post("/v1/lab/publish", &message).send().await.unwrap();
        response.status().is_success().then_some(())
    };
    eventually("the event to be published", published).await;
}

/// The inbox row of an event, once the ledger has one in this state.
async fn seen(app: &App, event: &Value, state: &str) -> Value {
    let path = format!("/v1/inbox?consumer=ledger&state={state}&event_id={}", event["event_id"].as_str().unwrap());
    app.eventually_list(&path, 1).await.remove(0)
}

async fn a_payment_is_booked_in_two_entries_that_sum_to_zero(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 10).await;
    let (first, second, free) = (app.reserve("A", 2500).await, app.reserve("A", 99).await, app.reserve("A", 0).await);
    for (id, amount) in [(&first, 2500), (&second, 99), (&free, 0)] {
        assert_eq!(app.pay(id, amount).await.status(), 201);
    }
    app.eventually_list("/v1/notifications?kind=paid", 3).await;
    eventually("the ledger to have heard of all three", || async {
        (db.count("SELECT count(*) FROM ledger_orders WHERE paid_event_id IS NOT NULL").await == 3).then_some(())
    })
    .await;
    let entries = app.walk("/v1/ledger/entries").await;
    assert_eq!(entries.len(), 4, "and what costs nothing posts nothing");
    assert_eq!(fields(&entries[0]), ENTRY_FIELDS);
    let of_first = app.walk(&format!("/v1/ledger/entries?order_id={first}")).await;
    let seen: Vec<_> = of_first.iter().map(|entry| (&entry["account"], &entry["amount_minor"])).collect();
    assert_eq!(seen, [(&json!("customer:alice"), &json!(-2500)), (&json!("cash"), &json!(2500))]);
    let event: Value = serde_json::from_str(&db.event_body(&first, "order.paid").await).unwrap();
    assert!(of_first.iter().all(|entry| entry["event_id"] == event["event_id"] && entry["currency"] == "USD"));

    let balances = app.walk("/v1/ledger/balances").await;
    let expected = json!([
        { "account": "cash", "currency": "USD", "balance_minor": 2599 },
        { "account": "customer:alice", "currency": "USD", "balance_minor": -2599 },
    ]);
    assert_eq!(json!(balances), expected);
    app.stop().await;
}

async fn the_books_are_listed_by_filter_and_page(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 100).await;
    for (customer, currency) in [("ann", "USD"), ("bob", "EUR"), ("ann", "EUR"), ("cy/d", "USD"), ("ann", "USD")] {
        let body = json!({
            "customer_id": customer, "currency": currency,
            "items": [{ "sku": "A", "quantity": 1, "unit_price_minor": 10 }],
        });
        let order: Value =
            app.post("/v1/orders", &body).header("prefer", "wait=20").send().await.unwrap().json().await.unwrap();
        let path = format!("/v1/orders/{}/payments", order["id"].as_str().unwrap());
        app.tell(&path, &json!({ "amount_minor": 10, "currency": currency })).await;
    }
    app.eventually_list("/v1/ledger/entries", 10).await;
    for (query, count) in [
        ("account=cash", 5),
        ("account=customer:ann", 3),
        ("account=customer:ann&currency=USD", 2),
        ("currency=EUR", 4),
        ("account=nobody", 0),
    ] {
        assert_eq!(app.walk(&format!("/v1/ledger/entries?limit=2&{query}")).await.len(), count, "{query}");
    }
    let entries = app.walk("/v1/ledger/entries?limit=3").await;
    let ids: Vec<&str> = entries.iter().map(|entry| entry["id"].as_str().unwrap()).collect();
    assert!(ids.len() == 10 && ids.is_sorted_by(|a, b| a > b), "newest first, each once");
    let balances = app.walk("/v1/ledger/balances?limit=1").await;
    let seen: Vec<String> = balances
        .iter()
        .map(|row| {
            format!(
                "{} {} {}",
                row["account"].as_str().unwrap(),
                row["currency"].as_str().unwrap(),
                row["balance_minor"]
            )
        })
        .collect();
    let expected = [
        "cash EUR 20",
        "cash USD 30",
        "customer:ann EUR -10",
        "customer:ann USD -20",
        "customer:bob EUR -10",
        "customer:cy/d USD -10",
    ];
    assert_eq!(seen, expected);
    assert_eq!(app.walk("/v1/ledger/balances?account=cash&currency=EUR").await.len(), 1);
    problem(app.get("/v1/ledger/balances?cursor=bm8").send().await.unwrap(), 400, "bad-cursor").await;
    problem(app.get("/v1/ledger/entries?colour=red").send().await.unwrap(), 400, "bad-filter").await;
    app.stop().await;
}

async fn a_payment_before_its_order_waits_and_is_booked_with_it(db: TestDb) {
    let app = App::start(&db).await;
    let id = mint_id().to_string();
    let (placed, paid) = (placed(&id), paid(&id));
    publish(&app, &paid).await;
    let row = seen(&app, &paid, "waiting").await;
    assert_eq!((&row["waiting_for"], &row["attempts"]), (&json!(format!("order.placed {id}")), &json!(0)));
    assert!(row["deadline_at"].is_string() && row["finished_at"].is_null());
    publish(&app, &paid).await;
    eventually("the copy to be counted", || async {
        (seen(&app, &paid, "waiting").await["duplicates"] == 1).then_some(())
    })
    .await;
    assert_eq!(app.walk("/v1/ledger/entries").await, Vec::<Value>::new());

    publish(&app, &placed).await;
    let (row, first) = (seen(&app, &paid, "processed").await, seen(&app, &placed, "processed").await);
    assert_eq!((&row["finished_at"], &row["attempts"]), (&first["finished_at"], &json!(1)), "in one commit");
    assert_eq!(app.walk(&format!("/v1/ledger/entries?order_id={id}")).await.len(), 2);
    assert_eq!(app.walk("/v1/inbox?state=waiting").await, Vec::<Value>::new());
    app.stop().await;
}

async fn a_payment_whose_order_never_comes_is_a_dead_letter(db: TestDb) {
    let app = App::start_with(&db, &["--wait-deadline", "1s"]).await;
    let paid = paid(&mint_id().to_string());
    publish(&app, &paid).await;
    let queue = match &db.wire {
        Wire::Rabbit { prefix, .. } => format!("{prefix}.ledger"),
        Wire::Table | Wire::InProcess => "stockade.ledger".to_owned(),
    };
    let letter = app.eventually_list("/v1/dead-letters?consumer=ledger", 1).await.remove(0);
    assert_eq!((&letter["reason"], &letter["queue"]), (&json!("predecessor-missing"), &json!(queue)));
    assert_eq!(letter["error"], "no order.placed of the same aggregate came within 1s");
    assert_eq!(seen(&app, &paid, "dead").await["attempts"], 1);
    let item = app.read(&format!("/v1/dead-letters/{}", letter["id"].as_str().unwrap())).await;
    assert_eq!(item["body"], paid.to_string());
    assert_eq!(app.walk("/v1/ledger/entries").await, Vec::<Value>::new());
    app.stop().await;
}

async fn an_order_is_credited_once_however_many_payments_are_told(db: TestDb) {
    let app = App::start(&db).await;
    let id = mint_id().to_string();
    let payments = [paid(&id), paid(&id), paid(&id)];
    publish(&app, &payments[0]).await;
    publish(&app, &payments[1]).await;
    publish(&app, &placed(&id)).await;
    publish(&app, &payments[2]).await;
    for payment in &payments {
        seen(&app, payment, "processed").await;
    }
    assert_eq!(app.walk("/v1/ledger/entries").await.len(), 2);
    let moot = "SELECT count(*) FROM messaging_inbox WHERE consumer = 'ledger' AND reason = 'moot'";
    assert_eq!(db.count(moot).await, 2, "the others are counted");
    app.stop().await;
}

/// Everything that was told, told again.
async fn a_days_stream_replayed_leaves_the_books_unchanged(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 100).await;
    for n in 0..30 {
        let id = app.reserve("A", 100 + n).await;
        match n % 3 {
            0 => assert_eq!(app.step(&id, "cancel").await.status(), 200),
            _ => assert_eq!(app.pay(&id, 100 + n).await.status(), 201),
        }
    }
    app.eventually_list("/v1/ledger/entries?limit=200", 40).await;
    let books = async || (app.walk("/v1/ledger/entries").await, app.walk("/v1/ledger/balances").await);
    let before = books().await;

    let stream = "SELECT count(*) FROM messaging_outbox
         WHERE kind = 'event' AND aggregate_type = 'order' AND event_type IN ('placed', 'paid')";
    let told = db.count(stream).await;
    assert_eq!(told, 50);
    // Replays the stream until the ledger has processed all of it, which a query counts.
    let replay = async |processed: &'static str| {
        let mut tx = app.running.kernel.db.begin().await.unwrap();
        // Backwards: every payment comes before its order.
        let bodies: Vec<Vec<u8>> = stockade_kernel::on!(tx, c => {
            sqlx::query_scalar(
                "SELECT body FROM messaging_outbox
                 WHERE kind = 'event' AND aggregate_type = 'order' AND event_type IN ('placed', 'paid')
                 ORDER BY id DESC",
            )
            .fetch_all(c)
            .await
        })
        .unwrap();
        drop(tx);
        for body in bodies {
            let body = String::from_utf8(body).unwrap();
            app.tell("/v1/lab/publish", &json!({ "queue": "ledger", "body": body })).await;
        }
        let all_processed = async || (db.count(processed).await >= told).then_some(());
        eventually("the stream to be processed", all_processed).await;
    };
    replay("SELECT CAST(sum(duplicates) AS bigint) FROM messaging_inbox WHERE consumer = 'ledger'").await;
    assert_eq!(books().await, before);

    // Even if the inbox had forgotten all of it.
    let mut tx = app.running.kernel.db.begin().await.unwrap();
    let forget = "DELETE FROM messaging_inbox WHERE consumer = 'ledger'";
    stockade_kernel::on!(tx, c => sqlx::query(forget).execute(c).await.map(drop)).unwrap();
    tx.commit().await.unwrap();
    replay("SELECT count(*) FROM messaging_inbox WHERE consumer = 'ledger' AND state = 'processed'").await;
    assert_eq!(books().await, before);
    assert_eq!(app.walk("/v1/dead-letters").await, Vec::<Value>::new());
    app.stop().await;
}

each_database!(
    a_payment_is_booked_in_two_entries_that_sum_to_zero,
    the_books_are_listed_by_filter_and_page,
    a_payment_before_its_order_waits_and_is_booked_with_it,
    a_payment_whose_order_never_comes_is_a_dead_letter,
    an_order_is_credited_once_however_many_payments_are_told,
    a_days_stream_replayed_leaves_the_books_unchanged,
);

each_database_on_rabbit!(
    a_payment_is_booked_in_two_entries_that_sum_to_zero,
    the_books_are_listed_by_filter_and_page,
    a_payment_before_its_order_waits_and_is_booked_with_it,
    a_payment_whose_order_never_comes_is_a_dead_letter,
    an_order_is_credited_once_however_many_payments_are_told,
    a_days_stream_replayed_leaves_the_books_unchanged,
);
