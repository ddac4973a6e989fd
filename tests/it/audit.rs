//! The audit: silent while promises are kept, whatever is under way, and loud about each that is broken.

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, SqliteConnection};

use crate::support::{App, Server, TestDb, each_database, eventually};

/// The audit's report, whole.
async fn audit(app: &App) -> Value {
    app.read("/v1/audit").await
}

/// The names of the promises that are broken.
fn broken(report: &Value) -> Vec<&str> {
    let checks = report["checks"].as_array().unwrap().iter();
    checks.filter(|check| check["violations"] != 0).map(|check| check["name"].as_str().unwrap()).collect()
}

async fn assert_kept(app: &App) {
    let report = audit(app).await;
    assert_eq!(report["violations"], 0, "{report:#}");
}

/// Places, pays, cancels and fulfils, so that every table has rows, and waits until all is at rest.
async fn trade(app: &App) -> Value {
    app.put_stock("T", 100).await;
    let priced = |quantity: i64| json!({ "customer_id": "a", "items": [{ "sku": "T", "quantity": quantity, "unit_price_minor": 250 }] });
    let mut orders = Vec::new();
    for quantity in 1..=4 {
        let response = app.post("/v1/orders", &priced(quantity)).header("prefer", "wait=20");
        let response = response.header("idempotency-key", format!("k{quantity}")).send().await.unwrap();
        orders.push(response.json::<Value>().await.unwrap());
    }
    app.place_and_wait("a", &[("T", 1000)]).await;
    let id = |order: &Value| order["id"].as_str().unwrap().to_owned();
    for order in &orders[..2] {
        let payment = json!({ "amount_minor": order["total_minor"], "currency": "USD" });
        app.tell(&format!("/v1/orders/{}/payments", id(order)), &payment).await;
    }
    app.tell(&format!("/v1/orders/{}/fulfil", id(&orders[0])), &json!({})).await;
    app.tell(&format!("/v1/orders/{}/cancel", id(&orders[2])), &json!({})).await;
    at_rest(app).await;
    orders.swap_remove(1)
}

async fn at_rest(app: &App) {
    eventually("rest", || async { (audit(app).await["unsettled"] == 0).then_some(()) }).await;
}

/// Changes rows behind everybody's back, constraints or not.
async fn plant(db: &TestDb, statements: &[&str]) {
    if db.url.starts_with("sqlite") {
        let mut raw = SqliteConnection::connect(&db.url).await.unwrap();
        raw.execute("PRAGMA ignore_check_constraints = ON; PRAGMA busy_timeout = 5000").await.unwrap();
        for sql in statements {
            raw.execute(AssertSqlSafe(*sql)).await.unwrap();
        }
        raw.close().await.unwrap();
    } else {
        let mut raw = PgConnection::connect(&db.url).await.unwrap();
        for sql in statements {
            raw.execute(AssertSqlSafe(*sql)).await.unwrap();
        }
        raw.close().await.unwrap();
    }
}

async fn every_promise_is_kept_by_a_whole_trade(db: TestDb) {
    let app = App::start(&db).await;
    trade(&app).await;
    let report = audit(&app).await;
    assert_eq!(report["violations"], 0, "{report:#}");
    assert!(report["checks"].as_array().unwrap().len() > 15, "{report:#}");
    app.stop().await;
}

async fn what_is_under_way_is_no_violation(db: TestDb) {
    let app = App::start_with(&db, &["--retry-base", "1h", "--retry-cap", "1h"]).await;
    trade(&app).await;
    for name in ["notifications", "ledger"] {
        app.tell(&format!("/v1/consumers/{name}/pause"), &json!({})).await;
    }
    app.tell("/v1/lab/fail", &json!({ "consumer": "orders", "times": 1 })).await;
    for _ in 0..5 {
        app.place("a", &[("T", 1)]).await;
        assert_kept(&app).await;
    }
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    app.place("a", &[("T", 1)]).await;
    let report = audit(&app).await;
    assert_eq!(report["violations"], 0, "{report:#}");
    assert!(report["unsettled"].as_i64().unwrap() > 0, "{report:#}");
    app.stop().await;
}

async fn foreign_events_break_no_promise(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("T", 10).await;
    // Of today: an old one might have been dealt with and forgotten.
    let now = stockade::clock::Clock::System.now();
    let placed = |id: &str, order: &str| {
        json!({
            "event_id": id, "occurred_at": now, "aggregate_type": "order", "aggregate_id": order,
            "event_type": "placed", "group_id": "00000000-0000-0000-0000-000000000001", "correlation_id": "foreign",
            "payload": { "order_id": order, "order_number": "X-1", "customer_id": "c", "currency": "USD",
                "total_minor": 0, "items": [{ "sku": "T", "quantity": 1, "unit_price_minor": 0 }] },
        })
        .to_string()
    };
    let (event, order) = ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-00000000000a");
    let publish = json!({ "routing_key": "order.placed", "body": placed(event, order), "times": 2 });
    app.tell("/v1/lab/publish", &publish).await;
    app.tell("/v1/lab/publish", &json!({ "queue": "orders", "body": "no json" })).await;
    app.eventually_list("/v1/reservations", 1).await;
    app.eventually_list("/v1/dead-letters", 1).await;
    at_rest(&app).await;
    assert_kept(&app).await;
    app.stop().await;
}

/// What breaks each promise, and which others may be broken with it.
const BREACHES: &[(&str, &[&str])] = &[
    ("stock-conserved", &["UPDATE inventory_stock SET on_hand = on_hand + 1 WHERE sku = 'T'"]),
    (
        "stock-never-negative",
        &[
            "ALTER TABLE inventory_stock DROP CONSTRAINT IF EXISTS inventory_stock_available",
            "UPDATE inventory_stock SET reserved = on_hand + 1 WHERE sku = 'T'",
        ],
    ),
    ("reserved-equals-holds", &["UPDATE inventory_stock SET reserved = reserved - 1 WHERE sku = 'T'"]),
    (
        "fulfilled-equals-shipments",
        &["UPDATE inventory_stock SET fulfilled = fulfilled + 1, on_hand = on_hand - 1 WHERE sku = 'T'"],
    ),
    (
        "one-answer-per-order",
        &["UPDATE messaging_outbox SET aggregate_id = (SELECT min(aggregate_id) FROM messaging_outbox
               WHERE aggregate_type = 'inventory') WHERE aggregate_type = 'inventory'"],
    ),
    ("no-order-forgotten", &["UPDATE orders_orders SET status = 'placed' WHERE status = 'rejected'"]),
    ("orders-and-reservations-agree", &["UPDATE orders_orders SET status = 'reserved' WHERE status = 'rejected'"]),
    ("reserved-as-ordered", &["UPDATE orders_lines SET quantity = quantity + 1, unit_price_minor = 0"]),
    ("totals-add-up", &["UPDATE orders_orders SET total_minor = total_minor + 1 WHERE status = 'reserved'"]),
    ("keys-have-orders", &["DELETE FROM orders_orders WHERE status = 'cancelled'"]),
    ("reservations-have-causes", &["DELETE FROM messaging_inbox WHERE consumer = 'inventory'"]),
    ("notices-have-causes", &["DELETE FROM messaging_inbox WHERE consumer = 'notifications'"]),
    ("one-notice-per-outcome", &["DELETE FROM notifications_notices WHERE kind = 'paid'"]),
    ("books-balance", &["UPDATE ledger_entries SET amount_minor = amount_minor * 2 WHERE account = 'cash'"]),
    ("one-credit-per-payment", &["DELETE FROM ledger_entries"]),
    ("only-paid-orders-are-booked", &["UPDATE orders_orders SET status = 'reserved' WHERE status = 'paid'"]),
    ("nothing-unpublishable", &["UPDATE messaging_outbox SET status = 'dead' WHERE event_type = 'cancelled'"]),
    (
        "nothing-lost",
        &[
            "DELETE FROM messaging_inbox WHERE consumer = 'orders'",
            "UPDATE messaging_bound SET since = (SELECT min(created_at) FROM orders_orders)",
        ],
    ),
];

async fn each_planted_breach_is_found_by_its_check(db: TestDb) {
    let sqlite = db.url.starts_with("sqlite");
    let app = App::start(&db).await;
    trade(&app).await;
    assert_kept(&app).await;
    let names: Vec<String> = audit(&app).await["checks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|check| check["name"].as_str().unwrap().to_owned())
        .collect();
    app.stop().await;
    for name in &names {
        assert!(BREACHES.iter().any(|(check, _)| check == name), "a breach for {name}");
    }
    for (name, statements) in BREACHES {
        let copy = Copy::of(&db).await;
        let statements: Vec<&str> =
            statements.iter().copied().filter(|sql| !sqlite || !sql.starts_with("ALTER")).collect();
        plant(&copy.db, &statements).await;
        if *name == "nothing-lost" {
            // What was published a moment ago might still be on its way.
            let earlier = if sqlite { "published_at - 600000" } else { "published_at - interval '10 minutes'" };
            let bound = if sqlite { "0" } else { "'2000-01-01'" };
            let age = format!("UPDATE messaging_outbox SET published_at = {earlier}");
            plant(&copy.db, &[&age, &format!("UPDATE messaging_bound SET since = {bound}")]).await;
        }
        let app = App::start_with(&copy.db, &["--modules", "api"]).await;
        let report = audit(&app).await;
        assert!(broken(&report).contains(name), "{name}: {report:#}");
        let check = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == *name).unwrap();
        assert!(!check["sample"].as_array().unwrap().is_empty(), "{check:#}");
        app.stop().await;
    }
}

/// A copy of a database that nobody has open.
struct Copy {
    db: TestDb,
}

impl Copy {
    async fn of(original: &TestDb) -> Self {
        let db = if let Some(file) = original.url.strip_prefix("sqlite:") {
            let db = TestDb::new(crate::support::Engine::Sqlite).await;
            std::fs::copy(file, db.url.strip_prefix("sqlite:").unwrap()).unwrap();
            db
        } else {
            let (server, name) = original.url.rsplit_once('/').unwrap();
            let (name, query) = name.split_once('?').map_or((name, ""), |(name, query)| (name, query));
            let copy = format!("c{}", stockade::clock::mint_id().simple());
            let url = |name: &str| format!("{server}/{name}{}{query}", if query.is_empty() { "" } else { "?" });
            let mut admin = PgConnection::connect(&url("postgres")).await.unwrap();
            admin.execute(AssertSqlSafe(format!("CREATE DATABASE {copy} TEMPLATE {name}"))).await.unwrap();
            admin.close().await.unwrap();
            TestDb::at(url(&copy))
        };
        Self { db }
    }
}

async fn it_runs_by_itself_and_metrics_tell(db: TestDb) {
    let app = App::start_with(&db, &["--audit-every", "50ms"]).await;
    trade(&app).await;
    let gauge = |page: &str, name: &str| {
        let wanted = format!("stockade_invariant_violations{{name=\"{name}\"}} ");
        page.lines().find_map(|line| line.strip_prefix(&wanted).map(str::to_owned))
    };
    let page = async || app.get("/v1/metrics").send().await.unwrap().text().await.unwrap();
    eventually("a first audit", || async { gauge(&page().await, "totals-add-up").filter(|count| count == "0.0") })
        .await;
    plant(&db, &["UPDATE orders_orders SET total_minor = total_minor + 1 WHERE status = 'reserved'"]).await;
    eventually("the breach in the gauge", || async {
        gauge(&page().await, "totals-add-up").filter(|count| count == "1.0")
    })
    .await;
    assert!(page().await.contains("stockade_invariant_last_check_timestamp_seconds "));
    app.stop().await;
}

async fn the_command_tells_by_its_exit_code(db: TestDb) {
    let server = Server::start(&db, &[]);
    server.place_and_wait("a", &[("WIDGET-A", 1)]).await;
    let run = |more: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_stockade"));
        command.args(["audit", "--database-url", &db.url]).args(more).output().unwrap()
    };
    let kept = run(&[]);
    assert_eq!(kept.status.code(), Some(0), "{kept:?}");
    assert!(String::from_utf8_lossy(&kept.stdout).contains("every promise is kept"), "{kept:?}");
    plant(&db, &["UPDATE orders_orders SET total_minor = total_minor + 1"]).await;
    for more in [&["--json"][..], &["--json", "--url", &server.url]] {
        let broken = run(more);
        assert_eq!(broken.status.code(), Some(3), "{broken:?}");
        let report: Value = serde_json::from_slice(&broken.stdout).unwrap();
        assert_eq!(report["violations"], 1, "{report:#}");
    }
    assert!(server.terminate().await);
}

each_database!(
    every_promise_is_kept_by_a_whole_trade,
    what_is_under_way_is_no_violation,
    foreign_events_break_no_promise,
    each_planted_breach_is_found_by_its_check,
    it_runs_by_itself_and_metrics_tell,
    the_command_tells_by_its_exit_code,
);
