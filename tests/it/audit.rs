//! The audit: silent while promises are kept, whatever is under way, and loud about each that is broken.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use stockade::inventory::reactions::Inventory;
use stockade::ledger::reactions::Ledger;
use stockade::notifications::reactions::Notifications;
use stockade::operations::audit::{self, Queues, Report, Scope, Window};
use stockade::orders::reactions::Orders;
use stockade_kernel::db::Conn;
use stockade_kernel::messaging::retention::{Keep, Retention};
use stockade_kernel::messaging::transport::Binding;
use stockade_kernel::messaging::{Kernel, Reaction};
use tokio_util::sync::CancellationToken;

use crate::support::{App, Server, TestDb, each_database, each_database_on_rabbit, eventually, eventually_within};

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

/// A statement in the SQL of either database: `{N minutes}` is a span of time.
fn translated(sql: &str, is_sqlite: bool) -> String {
    ["10", "20"].iter().fold(sql.to_owned(), |sql, count| {
        let span = if is_sqlite { format!("{count} * 60000") } else { format!("interval '{count} minutes'") };
        sql.replace(&format!("{{{count} minutes}}"), &span)
    })
}

/// SQLite cannot drop a constraint, but it can ignore all of them.
const IGNORE_CONSTRAINTS: &str = "PRAGMA ignore_check_constraints = ON";

/// Commits changes of rows beside the server, constraints or not.
pub async fn plant(db: &TestDb, statements: &[&str]) {
    if db.url.starts_with("sqlite") {
        let raw = db.sqlite();
        raw.execute_batch(IGNORE_CONSTRAINTS).unwrap();
        for sql in statements {
            raw.execute_batch(&translated(sql, true)).unwrap();
        }
    } else {
        let mut raw = PgConnection::connect(&db.url).await.unwrap();
        for sql in statements {
            raw.execute(AssertSqlSafe(translated(sql, false))).await.unwrap();
        }
        raw.close().await.unwrap();
    }
}

/// What an audit finds in these rows after the statements, none of which is ever committed.
async fn report_after(kernel: &Kernel, queues: &Queues<'_>, scope: Scope, statements: &[&str]) -> Report {
    let mut tx = kernel.db.begin().await.unwrap();
    let is_sqlite = matches!(tx.conn(), Conn::Sqlite(_));
    let ignore = is_sqlite.then_some(IGNORE_CONSTRAINTS);
    let statements = statements.iter().copied().filter(|sql| !(is_sqlite && sql.starts_with("ALTER")));
    for sql in ignore.into_iter().chain(statements) {
        let sql = AssertSqlSafe(translated(sql, is_sqlite));
        stockade_kernel::on!(tx, c => sqlx::query(sql).execute(c).await.map(drop)).unwrap();
    }
    let now = kernel.db.clock().now();
    audit::run_in(&mut tx, queues, now, scope, |_, _| true).await.unwrap()
}

const DAY: Duration = Duration::from_secs(86_400);
const NOTHING_FORGOTTEN: Keep =
    Keep { outbox: DAY, archive: DAY, inbox: DAY, dead_letters: DAY, look_every: Duration::from_secs(60) };

/// Lets retention run once, as if `keep` were its settings.
async fn forget(app: &App, keep: Keep) {
    let mut kernel = app.running.kernel.clone();
    kernel.tuning.keep = keep;
    Retention::new(kernel, Vec::new()).pass(&CancellationToken::new()).await.unwrap();
}

/// Each stage of forgetting: to the archive, out of it, verdicts too, letters too.
fn stages() -> [Keep; 4] {
    let archived = Keep { outbox: Duration::ZERO, ..NOTHING_FORGOTTEN };
    let removed = Keep { archive: Duration::ZERO, ..archived };
    let verdicts = Keep { inbox: Duration::ZERO, ..removed };
    [archived, removed, verdicts, Keep { dead_letters: Duration::ZERO, ..verdicts }]
}

async fn what_retention_has_forgotten_is_no_violation(db: TestDb) {
    let app = App::start_with(&db, &["--retry-max", "1"]).await;
    trade(&app).await;
    // A letter that is put aside, and an order whose events a paused consumer has still to take.
    app.tell("/v1/lab/fail", &json!({ "consumer": "notifications", "times": 1 })).await;
    app.place_and_wait("a", &[("T", 1)]).await;
    let letter = app.eventually_list("/v1/dead-letters", 1).await.remove(0);
    app.tell(&format!("/v1/dead-letters/{}/discard", letter["id"].as_str().unwrap()), &json!({ "reason": "a test" }))
        .await;
    app.tell("/v1/consumers/ledger/pause", &json!({})).await;
    let order = app.place_and_wait("a", &[("T", 1)]).await;
    app.tell(&format!("/v1/orders/{}/cancel", order["id"].as_str().unwrap()), &json!({})).await;
    for (stage, keep) in stages().into_iter().enumerate() {
        forget(&app, keep).await;
        let report = audit(&app).await;
        assert_eq!(report["violations"], 0, "stage {stage}: {report:#}");
    }
    assert_eq!(db.count("SELECT count(*) FROM messaging_outbox_archive").await, 0, "all of it was forgotten");
    app.tell("/v1/consumers/ledger/resume", &json!({})).await;
    at_rest(&app).await;
    assert_kept(&app).await;
    app.stop().await;
}

async fn a_breach_is_found_in_the_archive_too(db: TestDb) {
    let app = App::start(&db).await;
    trade(&app).await;
    forget(&app, stages()[0]).await;
    assert_eq!(db.count("SELECT count(*) FROM messaging_outbox").await, 0);
    assert_kept(&app).await;
    plant(
        &db,
        &[
            "UPDATE messaging_outbox_archive SET aggregate_id = (SELECT min(aggregate_id) FROM messaging_outbox_archive
                  WHERE aggregate_type = 'inventory') WHERE aggregate_type = 'inventory'",
            "DELETE FROM notifications_notices WHERE kind = 'paid'",
            "DELETE FROM ledger_entries",
        ],
    )
    .await;
    let report = audit(&app).await;
    for name in ["one-answer-per-order", "one-notice-per-outcome", "one-credit-per-payment"] {
        assert!(broken(&report).contains(&name), "{name}: {report:#}");
    }
    app.stop().await;
}

async fn it_is_silent_under_load(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("T", 40).await;
    let trading = async {
        for _ in 0..3 {
            let shop = |n: i64| {
                let app = &app;
                async move {
                    let id = app.reserve("T", 100 + n).await;
                    match n % 3 {
                        0 => assert!(app.step(&id, "cancel").await.status().is_success()),
                        1 => assert!(app.pay(&id, 100 + n).await.status().is_success()),
                        _ => {
                            assert!(app.pay(&id, 100 + n).await.status().is_success());
                            assert!(app.step(&id, "fulfil").await.status().is_success());
                        }
                    }
                }
            };
            futures_util::future::join_all((0..12).map(shop)).await;
        }
    };
    let looking = async {
        loop {
            assert_kept(&app).await;
        }
    };
    tokio::select! { () = trading => {} () = looking => unreachable!("it looks until the trading is over") }
    at_rest(&app).await;
    assert_kept(&app).await;
    app.stop().await;
}

async fn every_promise_is_kept_by_a_whole_trade(db: TestDb) {
    let app = App::start(&db).await;
    trade(&app).await;
    let report = audit(&app).await;
    assert_eq!(report["violations"], 0, "{report:#}");
    assert!(report["checks"].as_array().unwrap().len() > 20, "{report:#}");
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
    // A retry that is overdue but still to be sent is only late.
    assert_eq!(db.count("SELECT count(*) FROM messaging_inbox WHERE state = 'retrying'").await, 1);
    plant(&db, &["UPDATE messaging_inbox SET lease_until = started_at - {20 minutes} WHERE state = 'retrying'"]).await;
    assert_kept(&app).await;
    plant(&db, &["DELETE FROM messaging_outbox WHERE kind = 'retry'"]).await;
    assert_eq!(broken(&audit(&app).await), ["nothing-lost"]);
    app.stop().await;
}

async fn foreign_events_break_no_promise(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("T", 10).await;
    // Of today: an old one might have been dealt with and forgotten.
    let now = stockade_kernel::clock::Clock::System.now();
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
    // The announcement of an order that waits, gone with everything about it.
    (
        "orders-have-events",
        &[
            "DELETE FROM messaging_outbox WHERE aggregate_id = (SELECT min(aggregate_id) FROM messaging_outbox
                 WHERE event_type = 'cancelled')",
            "UPDATE orders_orders SET status = 'placed' WHERE status = 'cancelled'",
        ],
    ),
    // The answer on an order that has moved on.
    ("orders-have-events", &["DELETE FROM messaging_outbox WHERE aggregate_type = 'inventory' AND event_type = 'reserved'"]),
    ("orders-have-events", &["DELETE FROM messaging_outbox WHERE aggregate_type = 'inventory' AND event_type = 'failed'"]),
    ("no-phantoms", &["DELETE FROM messaging_outbox WHERE event_type = 'paid'"]),
    (
        "one-body-per-event",
        &["UPDATE messaging_inbox SET body_hash = (SELECT body_hash FROM messaging_inbox ORDER BY event_id LIMIT 1)
           WHERE consumer = 'ledger' AND event_type = 'order.paid'"],
    ),
    // Without its primary key.
    (
        "one-order-per-key",
        &[
            "CREATE TABLE kept AS SELECT * FROM orders_idempotency",
            "DROP TABLE orders_idempotency",
            "CREATE TABLE orders_idempotency AS SELECT * FROM kept",
            "INSERT INTO orders_idempotency SELECT * FROM kept",
        ],
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
        // What was published a moment ago might still be on its way.
        "nothing-lost",
        &[
            "DELETE FROM messaging_inbox WHERE consumer = 'orders'",
            "UPDATE messaging_outbox SET published_at = published_at - {10 minutes}",
            "UPDATE messaging_bindings SET since = since - {20 minutes}",
        ],
    ),
    (
        // And so might what was rejected a moment ago.
        "nothing-lost",
        &[
            "UPDATE messaging_inbox SET state = 'dead', finished_at = finished_at - {10 minutes} WHERE consumer = 'orders'",
            "UPDATE messaging_forgotten SET until = until - {20 minutes}",
        ],
    ),
    (
        // A retry that was due long ago, and nothing that would bring it.
        "nothing-lost",
        &["UPDATE messaging_inbox SET state = 'retrying', lease_until = finished_at - {10 minutes}, finished_at = NULL
           WHERE consumer = 'orders'"],
    ),
    (
        // A run that nobody is at, under a lease and without.
        "nothing-lost",
        &["UPDATE messaging_inbox SET state = 'processing', lease_until = finished_at - {10 minutes}, finished_at = NULL,
               lock_token = event_id WHERE consumer = 'notifications'"],
    ),
    (
        "nothing-lost",
        &["UPDATE messaging_inbox SET state = 'processing', started_at = started_at - {10 minutes}, finished_at = NULL
           WHERE consumer = 'ledger'"],
    ),
    ("answers-are-true", &["DELETE FROM inventory_reservations WHERE state = 'held'"]),
    (
        "answers-are-true",
        &["UPDATE messaging_outbox SET event_type = 'failed' WHERE aggregate_type = 'inventory'"],
    ),
    ("orders-took-legal-steps", &["UPDATE orders_orders SET status = 'expired' WHERE status = 'cancelled'"]),
    ("orders-took-legal-steps", &["UPDATE orders_orders SET status = 'paid' WHERE status = 'reserved'"]),
    ("orders-took-legal-steps", &["UPDATE messaging_outbox SET event_type = 'paid' WHERE event_type = 'fulfilled'"]),
    ("orders-took-legal-steps", &["DELETE FROM messaging_outbox WHERE event_type = 'paid'"]),
    ("orders-and-reservations-agree", &["UPDATE inventory_reservations SET state = 'held' WHERE state = 'committed'"]),
    ("orders-and-reservations-agree", &["UPDATE inventory_reservations SET state = 'held' WHERE state = 'released'"]),
    (
        "orders-and-reservations-agree",
        &["UPDATE inventory_reservations SET state = 'committed' WHERE state = 'fulfilled'"],
    ),
    (
        "one-effect-per-event",
        &["UPDATE inventory_reservations SET cause_event_id =
               (SELECT cause_event_id FROM inventory_reservations ORDER BY id LIMIT 1)"],
    ),
    (
        "one-effect-per-event",
        &["UPDATE notifications_notices SET event_id = (SELECT event_id FROM notifications_notices ORDER BY id LIMIT 1)"],
    ),
    ("books-balance", &["DELETE FROM ledger_entries WHERE account = 'cash'"]),
    (
        "one-booking-per-order",
        &["UPDATE ledger_orders SET paid_event_id = NULL"],
    ),
    ("entries-have-causes", &["DELETE FROM messaging_inbox WHERE consumer = 'ledger'"]),
    (
        "no-wake-up-lost",
        &["UPDATE messaging_inbox SET state = 'waiting', waiting_for = 'order.placed ' || aggregate_id,
               deadline_at = finished_at, lease_until = finished_at, finished_at = NULL
           WHERE consumer = 'ledger' AND event_type = 'order.paid'"],
    ),
    (
        "nothing-waits-for-ever",
        &[
            "UPDATE messaging_inbox SET finished_at = finished_at - {10 minutes} WHERE consumer = 'ledger' AND event_id =
                 (SELECT event_id FROM messaging_inbox WHERE consumer = 'ledger' ORDER BY event_id LIMIT 1)",
            "UPDATE messaging_inbox SET state = 'waiting', waiting_for = 'order.placed it',
                 deadline_at = finished_at - {20 minutes}, lease_until = finished_at, finished_at = NULL
             WHERE consumer = 'ledger' AND event_type = 'order.paid'",
        ],
    ),
];

async fn each_planted_breach_is_found_by_its_check(db: TestDb) {
    let app = App::start(&db).await;
    trade(&app).await;
    assert_kept(&app).await;
    app.stop().await;
    // Without consumers nothing else writes to the tables.
    let app = App::start_with(&db, &["--modules", "api"]).await;
    let kernel = app.running.kernel.clone();
    let bind = |consumer, keys| Binding { consumer, queue: kernel.tuning.queue_name(consumer), keys };
    let bindings = [
        bind(Orders::NAME, Orders::KEYS),
        bind(Inventory::NAME, Inventory::KEYS),
        bind(Ledger::NAME, Ledger::KEYS),
        bind(Notifications::NAME, Notifications::KEYS),
    ];
    let queues = Queues::look(&kernel.transport, &bindings, &kernel.tuning).await.unwrap();
    // The window of the audit that runs by itself.
    let now = kernel.db.clock().now();
    let recent = Scope::Within(Window { from: now.minus(DAY), to: now.plus(DAY) });
    for scope in [Scope::Whole, recent] {
        let kept = report_after(&kernel, &queues, scope, &[]).await;
        assert_eq!(kept.violations, 0, "{kept:#?}");
        for check in &kept.checks {
            assert!(BREACHES.iter().any(|(name, _)| *name == check.name), "a breach for {}", check.name);
        }
        for (name, statements) in BREACHES {
            let report = report_after(&kernel, &queues, scope, statements).await;
            let check = report.checks.iter().find(|check| check.name == *name).unwrap();
            assert!(check.violations > 0, "{name} in {scope:?} after {statements:?}: {report:#?}");
            assert!(!check.sample.is_empty(), "{check:?}");
        }
    }
    // All of it was rolled back.
    assert_kept(&app).await;
    app.stop().await;
}

/// Waits for an audit that runs by itself. It pauses for 20 times as long as a round took, so a busy machine needs longer
/// than [`DEADLINE`](crate::support::DEADLINE) for a few rounds, and polling the metrics faster only slows them down.
async fn eventually_in_rounds<T, F: Future<Output = Option<T>>>(what: &str, look: impl FnMut() -> F) -> T {
    eventually_within(Duration::from_secs(120), Duration::from_millis(250), what, look).await
}

async fn it_runs_by_itself_and_metrics_tell(db: TestDb) {
    let app = App::start_with(&db, &["--audit-every", "50ms"]).await;
    trade(&app).await;
    let gauge = |page: &str, name: &str| {
        let wanted = format!("stockade_invariant_violations{{name=\"{name}\"}} ");
        page.lines().find_map(|line| line.strip_prefix(&wanted).map(str::to_owned))
    };
    let page = async || app.get("/v1/metrics").send().await.unwrap().text().await.unwrap();
    eventually_in_rounds("a first audit", || async {
        gauge(&page().await, "totals-add-up").filter(|count| count == "0.0")
    })
    .await;
    plant(&db, &["UPDATE orders_orders SET total_minor = total_minor + 1 WHERE status = 'reserved'"]).await;
    eventually_in_rounds("the breach in the gauge", || async {
        gauge(&page().await, "totals-add-up").filter(|count| count == "1.0")
    })
    .await;
    assert!(page().await.contains("stockade_invariant_last_check_timestamp_seconds "));
    // What a whole audit found too is asked again until it is mended.
    assert_eq!(broken(&audit(&app).await), ["totals-add-up"]);
    plant(&db, &["UPDATE orders_orders SET total_minor = total_minor - 1 WHERE status = 'reserved'"]).await;
    eventually_in_rounds("the gauge to be back", || async {
        gauge(&page().await, "totals-add-up").filter(|count| count == "0.0")
    })
    .await;
    app.stop().await;
}

async fn it_goes_through_what_is_much_in_small_windows(db: TestDb) {
    let app = App::start_with(&db, &["--audit-every", "50ms", "--audit-window", "7"]).await;
    trade(&app).await;
    // The first order and the last are in no window together, nor are two answers on one order.
    plant(
        &db,
        &[
            "UPDATE orders_orders SET total_minor = total_minor + 1
             WHERE id = (SELECT id FROM orders_orders ORDER BY id LIMIT 1)
                 OR id = (SELECT id FROM orders_orders ORDER BY id DESC LIMIT 1)",
            "UPDATE messaging_outbox SET aggregate_id = (SELECT o.aggregate_id FROM messaging_outbox o
                 WHERE o.aggregate_type = 'inventory' ORDER BY o.id LIMIT 1)
             WHERE aggregate_type = 'inventory' AND event_type = 'failed'",
        ],
    )
    .await;
    for (name, wanted) in [("totals-add-up", "2.0"), ("one-answer-per-order", "1.0")] {
        eventually_in_rounds(name, || async {
            let page = app.get("/v1/metrics").send().await.unwrap().text().await.unwrap();
            let gauge = format!("stockade_invariant_violations{{name=\"{name}\"}} {wanted}");
            page.contains(&gauge).then_some(())
        })
        .await;
    }
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
    what_retention_has_forgotten_is_no_violation,
    a_breach_is_found_in_the_archive_too,
    it_is_silent_under_load,
    each_planted_breach_is_found_by_its_check,
    it_runs_by_itself_and_metrics_tell,
    it_goes_through_what_is_much_in_small_windows,
    the_command_tells_by_its_exit_code,
);

each_database_on_rabbit!(every_promise_is_kept_by_a_whole_trade, it_is_silent_under_load,);
