//! A database that an earlier version has filled: the schema of then, with rows in it, under the server of now.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqlSafeStr};
use stockade::http::caller::DEFAULT_GROUP;
use stockade_kernel::clock::{Clock, Timestamp, mint_id};
use stockade_kernel::messaging::event::hash_of;
use uuid::Uuid;

use crate::support::{App, Engine, Server, TestDb, each_database, eventually};

/// The first schema with every module in it, and the last one before SQLite's was rewritten in place (0065 to 0068).
const VERSIONS: [i64; 2] = [7, 64];
/// From this one on the ends of holds are in a table of their own.
const HOLDS_APART: i64 = 63;

/// The migrations of one side up to `version`, as the binary of then ran them.
fn migrations_until(version: i64, side: &str) -> Migrator {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations").join(side);
    let mut found: Vec<Migration> = fs::read_dir(folder)
        .unwrap()
        .map(|file| {
            let path = file.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let sql = AssertSqlSafe(fs::read_to_string(&path).unwrap()).into_sql_str();
            Migration::new(name[..4].parse().unwrap(), name.into(), MigrationType::Simple, sql, false)
        })
        .filter(|migration| migration.version <= version)
        .collect();
    found.sort_by_key(|migration| migration.version);
    Migrator::with_migrations(found)
}

/// How a database spells values.
#[derive(Clone, Copy)]
struct Spelling(Engine);

impl Spelling {
    fn bytes(self, bytes: &[u8]) -> String {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self.0 {
            Engine::Sqlite => format!("x'{hex}'"),
            Engine::Postgres => format!("'\\x{hex}'"),
        }
    }

    fn id(self, id: Uuid) -> String {
        match self.0 {
            Engine::Sqlite => self.bytes(id.as_bytes()),
            Engine::Postgres => format!("'{id}'"),
        }
    }

    fn time(self, at: Timestamp) -> String {
        match self.0 {
            Engine::Sqlite => at.millis().to_string(),
            Engine::Postgres => format!("'{at}'"),
        }
    }
}

/// What an earlier version wrote, statement by statement.
struct Past {
    spelling: Spelling,
    now: Timestamp,
    sql: String,
}

impl Past {
    fn new(spelling: Spelling) -> Self {
        Self { spelling, now: Clock::System.now(), sql: String::new() }
    }

    /// An order of `quantity`, told to the world and answered if it is reserved.
    fn order(&mut self, id: Uuid, number: u32, quantity: i64, status: &str) {
        let (spelled, at) = (self.spelling.id(id), self.spelling.time(self.now));
        self.sql += &format!(
            "INSERT INTO orders_orders (group_id, id, number, customer_id, status, currency, total_minor, correlation_id,
                 created_at, updated_at)
             VALUES ('{DEFAULT_GROUP}', {spelled}, 'ORD-{number:08}', 'alice', '{status}', 'USD', {total}, 'old', {at}, {at});
             INSERT INTO orders_lines (group_id, order_id, line, sku, quantity, unit_price_minor)
             VALUES ('{DEFAULT_GROUP}', {spelled}, 1, 'WIDGET-A', {quantity}, 100);",
            total = quantity * 100,
        );
        let items = json!([{ "sku": "WIDGET-A", "quantity": quantity, "unit_price_minor": 100 }]);
        let payload = json!({
            "order_id": id, "order_number": format!("ORD-{number:08}"), "customer_id": "alice", "currency": "USD",
            "total_minor": quantity * 100, "items": items,
        });
        if status == "placed" {
            self.event("order", id, "placed", payload, "pending", &[]);
            return;
        }
        let placed = self.event("order", id, "placed", payload, "published", &["inventory", "ledger"]);
        let reservation = mint_id();
        let payload = json!({
            "order_id": id, "reservation_id": reservation, "reservation_number": format!("RES-{number:08}"),
            "lines": [{ "sku": "WIDGET-A", "quantity": quantity }],
        });
        let reserved = self.event("inventory", id, "reserved", payload, "published", &["orders", "notifications"]);
        let [reservation, placed, reserved, notice] =
            [reservation, placed, reserved, mint_id()].map(|id| self.spelling.id(id));
        self.sql += &format!(
            "INSERT INTO inventory_reservations (group_id, id, number, order_id, state, cause_event_id, created_at, updated_at)
             VALUES ('{DEFAULT_GROUP}', {reservation}, 'RES-{number:08}', {spelled}, 'held', {placed}, {at}, {at});
             INSERT INTO inventory_reservation_lines (group_id, reservation_id, sku, quantity)
             VALUES ('{DEFAULT_GROUP}', {reservation}, 'WIDGET-A', {quantity});
             INSERT INTO ledger_orders (group_id, order_id, placed_at) VALUES ('{DEFAULT_GROUP}', {spelled}, {at});
             INSERT INTO notifications_notices (group_id, id, order_id, kind, channel, state, event_id, created_at)
             VALUES ('{DEFAULT_GROUP}', {notice}, {spelled}, 'reserved', 'log', 'sent', {reserved}, {at});"
        );
    }

    /// An event, and what its consumers have noted of it.
    fn event(&mut self, kind: &str, about: Uuid, what: &str, payload: Value, status: &str, done: &[&str]) -> Uuid {
        let (id, at) = (mint_id(), self.spelling.time(self.now));
        let body = json!({
            "event_id": id, "occurred_at": self.now, "aggregate_type": kind, "aggregate_id": about, "event_type": what,
            "group_id": DEFAULT_GROUP, "subsidiary_id": null, "correlation_id": "old", "causation_id": null,
            "payload": payload,
        });
        let body = body.to_string().into_bytes();
        let published_at = if status == "published" { &at } else { "NULL" };
        let (spelled, hash) = (self.spelling.id(id), self.spelling.bytes(&hash_of(&body)));
        self.sql += &format!(
            "INSERT INTO messaging_outbox (id, event_id, kind, group_id, aggregate_type, aggregate_id, event_type, headers,
                 status, available_at, created_at, published_at, correlation_id, body)
             VALUES ({spelled}, {spelled}, 'event', '{DEFAULT_GROUP}', '{kind}', '{about}', '{what}', '{{}}',
                 '{status}', {at}, {at}, {published_at}, 'old', {body});",
            body = self.spelling.bytes(&body),
        );
        for consumer in done {
            self.sql += &format!(
                "INSERT INTO messaging_inbox (consumer, event_id, state, attempts, started_at, finished_at, event_type,
                     aggregate_id, correlation_id, group_id, body_hash)
                 VALUES ('{consumer}', {spelled}, 'processed', 1, {at}, {at}, '{kind}.{what}', '{about}', 'old',
                     '{DEFAULT_GROUP}', {hash});",
            );
        }
        id
    }

    /// Ten pieces, of which `reserved` are held.
    fn stock(&mut self, reserved: i64) {
        let (id, at) = (self.spelling.id(mint_id()), self.spelling.time(self.now));
        self.sql += &format!(
            "INSERT INTO inventory_stock (group_id, sku, on_hand, reserved, updated_at)
             VALUES ('{DEFAULT_GROUP}', 'WIDGET-A', 10, {reserved}, {at});
             INSERT INTO inventory_adjustments (group_id, id, sku, delta, reason, on_hand, created_at)
             VALUES ('{DEFAULT_GROUP}', {id}, 'WIDGET-A', 10, 'count', 10, {at});"
        );
    }

    /// The hold of an order is over.
    fn hold_is_over(&mut self, order: Uuid, version: i64) {
        let (order, over) = (self.spelling.id(order), self.spelling.time(self.now.minus(Duration::from_secs(1))));
        self.sql += &format!("UPDATE orders_orders SET hold_expires_at = {over} WHERE id = {order};");
        if version >= HOLDS_APART {
            self.sql += &format!(
                "INSERT INTO orders_holds (expires_at, order_id, group_id) VALUES ({over}, {order}, '{DEFAULT_GROUP}');"
            );
        }
    }

    /// A letter of something that was no event and had no id of ours.
    fn letter(&mut self) {
        let (id, at) = (self.spelling.id(mint_id()), self.spelling.time(self.now));
        self.sql += &format!(
            "INSERT INTO messaging_dead_letters (id, queue, consumer, message_id, reason, error, attempts, headers, body,
                 x_death, state, filing_key, delivery_key, created_at, updated_at)
             VALUES ({id}, 'stockade.inventory', 'inventory', 'no uuid', 'not-json', 'it is no JSON', 0, '{{}}', {body},
                 '[]', 'open', 'f', 'd', {at}, {at});",
            body = self.spelling.bytes(b"\xff"),
        );
    }
}

/// An order that has held two of ten pieces for longer than it may, one for three whose event has not gone out yet, and a
/// letter.
fn past(spelling: Spelling, version: i64, held: Uuid, placed: Uuid) -> String {
    let mut past = Past::new(spelling);
    past.stock(2);
    past.order(held, 1, 2, "reserved");
    past.hold_is_over(held, version);
    past.order(placed, 2, 3, "placed");
    past.letter();
    past.sql
}

/// What was held ends, what was on its way arrives, and nothing is lost or found twice.
async fn is_taken_over(db: &TestDb, held: Uuid, placed: Uuid, version: i64) {
    let app = App::start(db).await;
    for (id, status) in [(held, "expired"), (placed, "reserved")] {
        let what = format!("an order of version {version} that is {status}");
        eventually(&what, async || (app.status(&id.to_string()).await == status).then_some(())).await;
    }
    let told = async |id: Uuid, count| {
        let notices = app.eventually_list(&format!("/v1/notifications?order_id={id}"), count).await;
        let mut kinds: Vec<String> = notices.iter().map(|notice| notice["kind"].as_str().unwrap().to_owned()).collect();
        kinds.sort_unstable();
        kinds
    };
    assert_eq!(told(held, 2).await, ["expired", "reserved"]);
    assert_eq!(told(placed, 1).await, ["reserved"]);
    let settled = async || (app.stock("WIDGET-A").await == (10, 3)).then_some(());
    eventually("what was held is back on the shelf", settled).await;
    assert_eq!(app.eventually_list("/v1/dead-letters", 1).await[0]["message_id"], "no uuid");
    let audit = app.read("/v1/audit").await;
    assert_eq!(audit["violations"], 0, "{audit}");
    assert_eq!(app.place_and_wait("carol", &[("WIDGET-A", 7)]).await["status"], "reserved", "all the rest can be had");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_file_of_an_earlier_version_is_brought_up_to_date_with_all_that_is_in_it() {
    for version in VERSIONS {
        let (db, held, placed) = (TestDb::empty_sqlite(), mint_id(), mint_id());
        let mut file = sqlx::SqliteConnection::connect(&format!("{}?mode=rwc", db.url)).await.unwrap();
        migrations_until(version, "sqlite").run(&mut file).await.unwrap();
        let past = past(Spelling(Engine::Sqlite), version, held, placed);
        sqlx::raw_sql(AssertSqlSafe(past)).execute(&mut file).await.unwrap();
        file.close().await.unwrap();
        is_taken_over(&db, held, placed, version).await;
        let look = db.look().await;
        let mut tx = look.read().await.unwrap();
        let stockade_kernel::db::Conn::Sqlite(c) = tx.conn() else { unreachable!("it is a file") };
        let sound: String =
            stockade_kernel::db::sqlite::query_scalar("PRAGMA integrity_check").fetch_one(c).await.unwrap();
        assert_eq!(sound, "ok", "version {version}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_postgres_database_of_an_earlier_version_is_brought_up_to_date_with_all_that_is_in_it() {
    for version in VERSIONS {
        let (db, held, placed) = (TestDb::empty_postgres().await, mint_id(), mint_id());
        let mut connection = PgConnection::connect(&db.url).await.unwrap();
        migrations_until(version, "postgres").run(&mut connection).await.unwrap();
        let past = past(Spelling(Engine::Postgres), version, held, placed);
        sqlx::raw_sql(AssertSqlSafe(past)).execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
        is_taken_over(&db, held, placed, version).await;
    }
}

async fn a_schema_that_a_newer_binary_has_extended_is_served(db: TestDb) {
    let newer = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         SELECT 9999, 'newer', success, checksum, execution_time FROM _sqlx_migrations WHERE version = 1";
    db.execute(newer, &[]).await;
    assert!(Server::start(&db, &[]).terminate().await);
}

async fn a_schema_that_is_half_applied_or_was_changed_is_refused(db: TestDb) {
    db.execute("UPDATE _sqlx_migrations SET success = false WHERE version = 2", &[]).await;
    assert_refused(&db, "migration 2 is partially applied");
    db.execute("UPDATE _sqlx_migrations SET success = true", &[]).await;
    assert!(Server::start(&db, &[]).terminate().await);

    let change = "UPDATE _sqlx_migrations SET checksum = (SELECT checksum FROM _sqlx_migrations WHERE version = 2)
         WHERE version = 1";
    db.execute(change, &[]).await;
    assert_refused(&db, "migration 1 was previously applied but has been modified");
}

fn assert_refused(db: &TestDb, expected: &str) {
    let refused = Server::command(db, &[]).output().unwrap();
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(1) && error.contains(expected), "{error}");
}

each_database!(
    a_schema_that_a_newer_binary_has_extended_is_served,
    a_schema_that_is_half_applied_or_was_changed_is_refused,
);
