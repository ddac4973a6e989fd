//! Every function of the stores, run on both databases: the SQL differs, the results must not.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use stockade::inventory::model::State as ReservationState;
use stockade::inventory::store::{self as inventory, Adjustment, Moved, NewReservation};
use stockade::ledger::model::Side;
use stockade::ledger::store::{self as ledger, BalanceQuery, NewEntry, Paid};
use stockade::lifecycle::{Lifecycle, Stage};
use stockade::notifications::model::{Kind, State as NoticeState};
use stockade::notifications::store::{self as notifications, Attempt, NewNotice};
use stockade::numbers::Numbers;
use stockade::orders::desk::Desk;
use stockade::orders::events::{Item, Price, Quantity, Sku};
use stockade::orders::expiry::Expiry;
use stockade::orders::model::{Order, OrderId, Placing, Request, Status, Step};
use stockade::orders::service::{self, Answer, Placed, StepRequest, Stepped, Submission};
use stockade::orders::store::{self as orders, Key, KeyUse, StepKey, Taken};
use stockade_kernel::clock::{Timestamp, mint_id};
use stockade_kernel::db::sqlite::query_as;
use stockade_kernel::db::{Conn, Db, Tx};
use stockade_kernel::messaging::dead_letters;
use stockade_kernel::messaging::event::hash_of;
use stockade_kernel::messaging::faults::Faults;
use stockade_kernel::messaging::health::Health;
use stockade_kernel::messaging::inbox::{self, Arrival, Claim, Effect, Mark, State};
use stockade_kernel::messaging::outbox::{self, Entry};
use stockade_kernel::trace::Traceparent;
use uuid::Uuid;

use crate::support::kernel::{AGES, KEY, QUEUE, Rig, event, many, told};
use crate::support::{DEADLINE, Engine, TestDb, each_database, eventually};

const NOW: Timestamp = Timestamp::from_millis(1_800_000_000_000);
const HOLD: Duration = Duration::from_secs(900);

// Orders.

async fn orders_are_listed_by_each_filter_newest_first(db: TestDb) {
    let mut tx = begin(&db).await;
    let placed = [
        order("g", "alice", 1, &[("A", 2, 250), ("B", 1, 99)]),
        order("g", "bob", 2, &[("B", 3, 0)]),
        order("g", "alice", 3, &[("C", 1, 5), ("C", 2, 7)]),
        order("other", "alice", 1, &[("A", 1, 1)]),
    ];
    orders::insert_many(&mut tx, &placed).await.unwrap();
    let all = orders::list(&mut tx, of_group(10)).await.unwrap();
    assert_eq!(ids(&all), [placed[2].id, placed[1].id, placed[0].id]);
    let (written, read) = (&placed[0], &all[2]);
    assert_eq!(read.items, written.items, "with their lines, in their order");
    assert_eq!((read.total_minor, read.number.as_str(), read.status), (599, "ORD-1", Status::Placed));
    assert_eq!((read.created_at, read.updated_at, read.hold_expires_at), (NOW, NOW, None));
    assert_eq!((&read.subsidiary_id, &read.currency, &read.reason), (&Some("s".to_owned()), &"USD".to_owned(), &None));
    assert_eq!(all[0].items.len(), 2, "two lines of one SKU stay two lines");
    let narrowed = [
        (orders::Query { id: Some(placed[1].id.0), ..of_group(10) }, vec![placed[1].id]),
        (orders::Query { number: Some("ORD-3".into()), ..of_group(10) }, vec![placed[2].id]),
        (orders::Query { customer_id: Some("alice".into()), ..of_group(10) }, vec![placed[2].id, placed[0].id]),
        (orders::Query { sku: Some("B".into()), ..of_group(10) }, vec![placed[1].id, placed[0].id]),
        (orders::Query { status: Some(Status::Reserved), ..of_group(10) }, vec![]),
        (orders::Query { status: Some(Status::Placed), sku: Some("C".into()), ..of_group(10) }, vec![placed[2].id]),
        (orders::Query { before: Some(placed[2].id.0), ..of_group(1) }, vec![placed[1].id]),
        (orders::Query { before: Some(placed[0].id.0), ..of_group(1) }, vec![]),
        (orders::Query { group_id: "other".into(), ..of_group(10) }, vec![placed[3].id]),
    ];
    for (query, expected) in narrowed {
        let text = format!("{query:?}");
        assert_eq!(ids(&orders::list(&mut tx, query).await.unwrap()), expected, "{text}");
    }
}

/// SQLite takes 32, 8 and 1 rows to a statement.
async fn a_batch_of_any_size_is_written_whole(db: TestDb) {
    let mut tx = begin(&db).await;
    for (size, group) in [(1, "a"), (7, "b"), (8, "c"), (9, "d"), (31, "e"), (32, "f"), (33, "g"), (73, "h")] {
        let placed: Vec<Order> = (0..size).map(|number| order(group, "alice", number, &[("A", 1, 5)])).collect();
        orders::insert_many(&mut tx, &placed).await.unwrap();
        let query = orders::Query { group_id: group.into(), ..of_group(100) };
        let mut read = orders::list(&mut tx, query).await.unwrap();
        read.reverse();
        assert_eq!(ids(&read), ids(&placed), "{size}");
        assert!(read.iter().zip(&placed).all(|(read, placed)| read.number == placed.number), "{size}");
        assert!(read.iter().zip(&placed).all(|(read, placed)| read.items == placed.items), "{size}");
    }
}

async fn an_order_is_answered_once(db: TestDb) {
    let mut tx = begin(&db).await;
    let placed = [order("g", "a", 1, &[("A", 1, 0)]), order("g", "a", 2, &[("A", 1, 0)]), order("h", "a", 1, &[])];
    orders::insert_many(&mut tx, &placed).await.unwrap();
    let answer = |order: &Order, group: &str, status, reason: Option<&str>| Answer {
        group_id: group.into(),
        order_id: order.id,
        status,
        reason: reason.map(str::to_owned),
    };
    let first = [
        answer(&placed[0], "g", Status::Reserved, None),
        answer(&placed[1], "g", Status::Rejected, Some("Insufficient A: need 1, have 0")),
        answer(&placed[2], "g", Status::Reserved, None), // another tenant's order
    ];
    let later = NOW.plus(Duration::from_secs(1));
    assert_eq!(orders::answer_many(&mut tx, &first, HOLD, later).await.unwrap(), 2);
    let second = [answer(&placed[0], "g", Status::Rejected, Some("too late"))];
    assert_eq!(orders::answer_many(&mut tx, &second, HOLD, later.plus(AGES)).await.unwrap(), 0);
    let all = orders::list(&mut tx, of_group(10)).await.unwrap();
    assert_eq!((all[1].status, &all[1].reason, all[1].updated_at), (Status::Reserved, &None, later));
    assert!(all[1].hold_expires_at.is_some() && all[0].hold_expires_at.is_none(), "only what is reserved is held");
    assert_eq!((all[0].status, all[0].reason.as_deref()), (Status::Rejected, Some("Insufficient A: need 1, have 0")));
    let foreign = orders::list(&mut tx, orders::Query { group_id: "h".into(), ..of_group(1) }).await.unwrap();
    assert_eq!((foreign[0].status, foreign[0].updated_at), (Status::Placed, NOW));
}

async fn a_key_stands_for_its_first_use(db: TestDb) {
    let mut tx = begin(&db).await;
    let uses: Vec<KeyUse> = (1..=4u8).map(|n| KeyUse { fingerprint: [n; 32], order_id: OrderId(mint_id()) }).collect();
    let key = |group_id, key, first_use| Key { group_id, route: "POST /v1/orders", key, first_use };
    let first = [key("g", "one", &uses[0]), key("g", "two", &uses[1])];
    assert_eq!(orders::claim_keys(&mut tx, &first, NOW).await.unwrap(), uses[..2]);
    let second = [key("g", "two", &uses[2]), key("g", "three", &uses[2]), key("other", "two", &uses[3])];
    let standing = orders::claim_keys(&mut tx, &second, NOW).await.unwrap();
    assert_eq!(standing, [uses[1].clone(), uses[2].clone(), uses[3].clone()], "by tenant and key, in order");
    let elsewhere = Key { route: "POST /v1/elsewhere", ..key("g", "two", &uses[3]) };
    assert_eq!(orders::claim_keys(&mut tx, &[elsewhere], NOW).await.unwrap(), uses[3..], "and by route");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn retention_leaves_a_key_alone_while_a_request_uses_it() {
    let db = TestDb::new(Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    let first_use = KeyUse { fingerprint: [1; 32], order_id: OrderId(mint_id()) };
    let key = [Key { group_id: "g", route: "POST /v1/orders", key: "old", first_use: &first_use }];
    let mut tx = rig.db.begin().await.unwrap();
    orders::claim_keys(&mut tx, &key, NOW).await.unwrap();
    tx.commit().await.unwrap();
    let mut request = rig.db.begin().await.unwrap();
    assert_eq!(orders::claim_keys(&mut request, &key, NOW).await.unwrap(), std::slice::from_ref(&first_use));
    let mut retention = rig.db.begin().await.unwrap();
    let mut forgetting = Box::pin(orders::forget_keys(&mut retention, NOW.plus(AGES), 10));
    let early = tokio::time::timeout(Duration::from_millis(200), &mut forgetting).await;
    assert!(early.is_err(), "the key was deleted: {early:?}");
    request.commit().await.unwrap();
    assert_eq!(forgetting.await.unwrap(), 1);
}

async fn an_order_moves_only_from_the_state_it_was_met_in(db: TestDb) {
    let mut tx = begin(&db).await;
    let placed = [order("g", "a", 1, &[("A", 1, 5)]), order("g", "a", 2, &[("A", 1, 0)]), order("h", "a", 1, &[])];
    orders::insert_many(&mut tx, &placed).await.unwrap();
    let mut keys = [("g", placed[1].id), ("g", placed[0].id), ("h", placed[0].id), ("g", OrderId(mint_id()))];
    keys.sort_unstable();
    let locked = orders::lock_many(&mut tx, &keys).await.unwrap();
    assert_eq!(locked.iter().map(|(order, _)| order.id).collect::<Vec<_>>(), [placed[0].id, placed[1].id]);
    let (standing, changed) = &locked[0];
    assert_eq!((standing.status, standing.total.get(), *changed), (Status::Placed, 5, NOW));
    assert_eq!((standing.customer_id.as_str(), standing.currency.as_str()), ("a", "USD"));
    assert_eq!((&standing.subsidiary_id, standing.correlation_id.as_str()), (&Some("s".to_owned()), "c"));

    let taken = |n: usize, from, to, reason| Taken { group_id: "g", id: placed[n].id, from, to, reason };
    let later = NOW.plus(AGES);
    let moves =
        [taken(0, Status::Placed, Status::Cancelled, Some("why")), taken(1, Status::Placed, Status::Reserved, None)];
    orders::take_many(&mut tx, &moves, later).await.unwrap();
    let all = orders::list(&mut tx, of_group(10)).await.unwrap();
    assert_eq!((all[1].status, all[1].reason.as_deref(), all[1].updated_at), (Status::Cancelled, Some("why"), later));
    assert_eq!((all[0].status, &all[0].reason), (Status::Reserved, &None));
    let late = [taken(0, Status::Placed, Status::Paid, None), taken(1, Status::Reserved, Status::Paid, None)];
    let refused = orders::take_many(&mut tx, &late, later).await.unwrap_err();
    assert!(matches!(refused, sqlx::Error::RowNotFound), "{refused}");
}

async fn a_step_key_is_written_once_per_scope(db: TestDb) {
    let rig = Rig::new(&db).await;
    let key = |group_id, route, key, n: u8| StepKey {
        group_id,
        route,
        key,
        fingerprint: [n; 32],
        order_id: OrderId(mint_id()),
    };
    let keys = [key("g", "pay", "one", 1), key("g", "cancel", "one", 2), key("h", "pay", "one", 3)];
    let mut tx = rig.db.begin().await.unwrap();
    orders::insert_step_keys(&mut tx, &keys, NOW).await.unwrap();
    orders::insert_step_keys(&mut tx, &[], NOW).await.unwrap();
    tx.commit().await.unwrap();
    let again = fails(&rig.db, async |tx| orders::insert_step_keys(tx, &[key("g", "pay", "one", 4)], NOW).await).await;
    assert!(again.is_unique_violation(), "{again}");
    let mut tx = rig.db.begin().await.unwrap();
    let asked = [key("g", "pay", "one", 9), key("g", "cancel", "one", 9), key("g", "fulfil", "one", 9)];
    let found = orders::find_step_keys(&mut tx, &asked).await.unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!((found[&asked[0].scope()], found[&asked[1].scope()]), ([1; 32], [2; 32]));
    assert!(orders::find_step_keys(&mut tx, &[]).await.unwrap().is_empty());
}

/// Reserved orders, each held for `HOLD` from now on.
async fn held(db: &Db, count: u32) -> Vec<Order> {
    let placed: Vec<Order> = (0..count).map(|n| order("g", "a", n, &[("A", 1, 5)])).collect();
    let mut tx = db.begin().await.unwrap();
    orders::insert_many(&mut tx, &placed).await.unwrap();
    let answers: Vec<Answer> = placed
        .iter()
        .map(|order| Answer { group_id: "g".into(), order_id: order.id, status: Status::Reserved, reason: None })
        .collect();
    let now = tx.now();
    assert_eq!(orders::answer_many(&mut tx, &answers, HOLD, now).await.unwrap(), u64::from(count));
    tx.commit().await.unwrap();
    placed
}

async fn holds_end_in_their_time_and_only_of_orders_still_reserved(db: TestDb) {
    let rig = Rig::new(&db).await;
    let placed = held(&rig.db, 5).await;
    let expiry = Expiry::new(rig.db.clone(), &Health::default());
    assert_eq!(expiry.try_once().await.unwrap(), 0, "nothing is over yet");
    rig.advance(HOLD - Duration::from_secs(30)).await;
    assert_eq!(expiry.try_once().await.unwrap(), 0);
    let steps = [
        Step::Pay { amount: 5.try_into().unwrap(), currency: "USD".to_owned().try_into().unwrap() },
        Step::Cancel { reason: None },
    ];
    let mut tx = rig.db.begin().await.unwrap();
    for (order, step) in placed.iter().zip(steps) {
        let request = StepRequest { group_id: "g".into(), order_id: order.id, step, key: None, traceparent: None };
        assert_eq!(service::step_many(&mut tx, &[&request]).await.unwrap(), [Stepped::Done]);
    }
    tx.commit().await.unwrap();
    rig.advance(Duration::from_secs(31)).await;
    assert_eq!(expiry.try_once().await.unwrap(), 3);
    assert_eq!(expiry.try_once().await.unwrap(), 0);
    let mut tx = rig.db.begin().await.unwrap();
    let all = orders::list(&mut tx, of_group(10)).await.unwrap();
    let expired: Vec<&Order> = all.iter().filter(|order| order.status == Status::Expired).collect();
    assert_eq!(expired.len(), 3);
    assert!(expired.iter().all(|order| order.hold_expires_at.is_some() && order.reason.is_some()));
    drop(tx);
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox WHERE event_type = 'expired'").await, 3);
}

async fn several_sweeps_at_once_expire_each_order_once(db: TestDb) {
    let rig = Rig::new(&db).await;
    held(&rig.db, 1200).await;
    rig.advance(HOLD + Duration::from_secs(1)).await;
    let health = Health::default();
    let sweeps: Vec<Expiry> = (0..3).map(|_| Expiry::new(rig.db.clone(), &health)).collect();
    let expired = futures_util::future::join_all(sweeps.iter().map(async |sweep| {
        let mut expired = 0;
        // One that passes by what others hold finds nothing, and looks again.
        for _ in 0..20 {
            expired += sweep.try_once().await.unwrap();
        }
        expired
    }))
    .await;
    assert_eq!(expired.iter().sum::<usize>(), 1200);
    let told = "SELECT count(DISTINCT aggregate_id) FROM messaging_outbox WHERE event_type = 'expired'";
    assert_eq!(rig.number(told).await, 1200);
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox WHERE event_type = 'expired'").await, 1200);
}

async fn an_order_number_that_is_taken_is_minted_again(db: TestDb) {
    let db = db.open(stockade_kernel::clock::Clock::System).await;
    let lifecycle = Lifecycle::new().unwrap();
    let mut numbers = Vec::new();
    for _ in 0..2 {
        // Both clerks begin with the same number.
        let minted = Arc::new(Numbers::starting_at("ORD", 31));
        let (desk, clerk) = Desk::open(db.clone(), Faults::default(), &Health::default(), minted);
        lifecycle.spawn(Stage::Work, "desk", |stop| clerk.run(stop));
        let request = Request::try_new("alice".into(), "USD".into(), vec![item("A", 1, 0)], 9).unwrap();
        let submission = Submission { placing: placing("g"), request, key: None };
        let Placed::New(order) = desk.place(Box::new(submission)).await.unwrap() else { panic!("a new order") };
        numbers.push(order.number);
    }
    assert_eq!(numbers[0], "ORD-0000000Z");
    assert_ne!(numbers[1], numbers[0]);
    let mut tx = db.read().await.unwrap();
    let found = service::get(&mut tx, "g", "ord-0000000z").await.unwrap();
    assert_eq!(found.number, numbers[0]);
    assert_eq!(orders::list(&mut tx, of_group(10)).await.unwrap().len(), 2);
    // One event each: the try that failed left none behind.
    let query = outbox::Query { limit: 10, ..outbox::Query::default() };
    assert_eq!(outbox::list(&mut tx, query).await.unwrap().len(), 2);
    drop(tx);
    assert!(lifecycle.shut_down(Duration::from_secs(5)).await);
}

/// SQLite has one writer, who loses to nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_group_of_orders_that_loses_to_another_transaction_is_placed_once() {
    let db = TestDb::new(Engine::Postgres).await;
    let (rig, lifecycle) = (Rig::new(&db).await, Lifecycle::new().unwrap());
    rig.lose_twice("orders_orders", "40001").await;
    let (desk, clerk) =
        Desk::open(rig.db.clone(), Faults::default(), &Health::default(), Arc::new(Numbers::new("ORD")));
    lifecycle.spawn(Stage::Work, "desk", |stop| clerk.run(stop));
    let request = Request::try_new("alice".into(), "USD".into(), vec![item("A", 1, 0)], 9).unwrap();
    let submission = Submission { placing: placing("g"), request, key: None };
    assert!(matches!(desk.place(Box::new(submission)).await, Ok(Placed::New(_))));
    for table in ["orders_orders", "orders_lines", "messaging_outbox"] {
        assert_eq!(rig.number(&format!("SELECT count(*) FROM {table}")).await, 1, "{table}");
    }
    assert!(lifecycle.shut_down(Duration::from_secs(5)).await);
}

// Inventory.

async fn stock_is_created_adjusted_locked_and_listed(db: TestDb) {
    let mut tx = begin(&db).await;
    assert!(inventory::is_empty(&mut tx).await.unwrap());
    for (group, name, on_hand) in [("g", "B", 5), ("g", "A", 7), ("g", "C", 0), ("other", "A", 1)] {
        stock(&mut tx, group, name, on_hand).await;
    }
    inventory::create_stock(&mut tx, "g", &sku("A"), NOW.plus(AGES)).await.unwrap();
    assert!(!inventory::is_empty(&mut tx).await.unwrap());
    let list = inventory::list_stock(&mut tx, "g", None, None, 10).await.unwrap();
    let seen: Vec<_> = list.iter().map(|row| (row.sku.as_str(), row.on_hand, row.reserved, row.available())).collect();
    assert_eq!(seen, [("A", 7, 0, 7), ("B", 5, 0, 5), ("C", 0, 0, 0)], "creating again changes nothing");
    let page = inventory::list_stock(&mut tx, "g", None, Some("A".into()), 1).await.unwrap();
    assert_eq!(page.iter().map(|row| row.sku.as_str()).collect::<Vec<_>>(), ["B"]);
    let one = inventory::list_stock(&mut tx, "g", Some("C"), None, 10).await.unwrap();
    assert_eq!((one.len(), one[0].sku.as_str()), (1, "C"));
    let (a, b, unknown) = (sku("A"), sku("B"), sku("Z"));
    let locked = inventory::lock_stock(&mut tx, &[("g", &a), ("g", &b), ("g", &unknown), ("other", &a)]).await.unwrap();
    let seen: Vec<_> = locked.iter().map(|row| (row.group_id.as_str(), row.sku.as_str(), row.on_hand)).collect();
    assert_eq!(seen, [("g", "A", 7), ("g", "B", 5), ("other", "A", 1)], "an unknown SKU is simply not there");
    let explained: (i64, i64) = stockade_kernel::on!(tx, c => {
        sqlx::query_as("SELECT CAST(sum(delta) AS bigint), count(*) FROM inventory_adjustments WHERE group_id = 'g'")
            .fetch_one(c)
            .await
    })
    .unwrap();
    assert_eq!(explained, (12, 2), "what is on hand is the sum of what explains it");
}

async fn holding_takes_stock_and_writes_reservations_with_lines(db: TestDb) {
    let mut tx = begin(&db).await;
    stock(&mut tx, "g", "A", 10).await;
    stock(&mut tx, "g", "B", 10).await;
    let made = [reservation(1, &[("A", 2), ("B", 3)]), reservation(2, &[("B", 1)])];
    let taken = [(("g".to_owned(), sku("A")), 2), (("g".to_owned(), sku("B")), 4)];
    inventory::hold(&mut tx, &taken[..1], &made[..1], NOW).await.unwrap();
    inventory::hold(&mut tx, &[(taken[1].0.clone(), 3)], &made[1..], NOW).await.unwrap();
    inventory::hold(&mut tx, &[(taken[1].0.clone(), 1)], &[], NOW).await.unwrap(); // on top of what is held
    let list = inventory::list_stock(&mut tx, "g", None, None, 10).await.unwrap();
    assert_eq!(list.iter().map(|row| (row.on_hand, row.reserved)).collect::<Vec<_>>(), [(10, 2), (10, 4)]);
    let orders = [("g", made[0].order_id), ("g", mint_id()), ("other", made[1].order_id)];
    let (a, b, unknown) = (sku("A"), sku("B"), sku("Z"));
    let keys = [("g", &a), ("g", &b), ("g", &unknown), ("other", &a)];
    let survey = inventory::survey(&mut tx, &orders, &keys).await.unwrap();
    assert_eq!(survey.reserved.into_iter().collect::<Vec<_>>(), [("g".to_owned(), made[0].order_id)]);
    assert_eq!(survey.stock, inventory::lock_stock(&mut tx, &keys).await.unwrap());
    assert_eq!(survey.stock.iter().map(|row| row.available()).collect::<Vec<_>>(), [8, 6]);
    let of = || inventory::Query { group_id: "g".into(), limit: 10, ..inventory::Query::default() };
    let all = inventory::list_reservations(&mut tx, of()).await.unwrap();
    assert_eq!(all.iter().map(|r| r.id).collect::<Vec<_>>(), [made[1].id, made[0].id]);
    assert_eq!(all[1].lines, [("A".to_owned(), 2), ("B".to_owned(), 3)]);
    assert_eq!((all[1].state.as_str(), all[1].number.as_str(), all[1].created_at), ("held", "RES-1", NOW));
    let narrowed = [
        (inventory::Query { id: Some(made[0].id), ..of() }, vec![made[0].id]),
        (inventory::Query { number: Some("RES-2".into()), ..of() }, vec![made[1].id]),
        (inventory::Query { order_id: Some(made[1].order_id), ..of() }, vec![made[1].id]),
        (inventory::Query { state: Some("released".into()), ..of() }, vec![]),
        (inventory::Query { sku: Some("A".into()), ..of() }, vec![made[0].id]),
        (inventory::Query { before: Some(made[1].id), limit: 1, ..of() }, vec![made[0].id]),
        (inventory::Query { group_id: "other".into(), ..of() }, vec![]),
    ];
    for (query, expected) in narrowed {
        let text = format!("{query:?}");
        let found = inventory::list_reservations(&mut tx, query).await.unwrap();
        assert_eq!(found.iter().map(|r| r.id).collect::<Vec<_>>(), expected, "{text}");
    }
}

/// SQLite has one writer, so that nobody surveys while another takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_survey_that_waited_for_stock_sees_what_was_taken_meanwhile() {
    let db = TestDb::new(Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    let mut tx = rig.db.begin().await.unwrap();
    stock(&mut tx, "g", "A", 10).await;
    tx.commit().await.unwrap();
    let (a, made) = (sku("A"), reservation(1, &[("A", 7)]));
    let mut first = rig.db.begin().await.unwrap();
    inventory::survey(&mut first, &[], &[("g", &a)]).await.unwrap();
    inventory::hold(&mut first, &[(("g".to_owned(), a.clone()), 7)], &[made], NOW).await.unwrap();
    let mut second = rig.db.begin().await.unwrap();
    let (orders, keys) = ([("g", mint_id())], [("g", &a)]);
    let (survey, ()) = tokio::join!(inventory::survey(&mut second, &orders, &keys), async {
        let waiting = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        eventually("a wait for the first", || async { (rig.number(waiting).await > 0).then_some(()) }).await;
        first.commit().await.unwrap();
    });
    assert_eq!(survey.unwrap().stock.iter().map(|row| row.available()).collect::<Vec<_>>(), [3]);
}

async fn reservations_move_on_and_let_go_of_their_stock(db: TestDb) {
    let mut tx = begin(&db).await;
    stock(&mut tx, "g", "A", 10).await;
    stock(&mut tx, "g", "B", 10).await;
    let made = [reservation(1, &[("A", 1), ("B", 2)]), reservation(2, &[("B", 3)]), reservation(3, &[("A", 4)])];
    let taken = [(("g".to_owned(), sku("A")), 5), (("g".to_owned(), sku("B")), 5)];
    inventory::hold(&mut tx, &taken, &made, NOW).await.unwrap();
    let mut orders: Vec<(&str, Uuid)> = made.iter().map(|made| ("g", made.order_id)).collect();
    orders.extend([("g", mint_id()), ("other", made[0].order_id)]);
    orders.sort_unstable();
    inventory::lock_shelves(&mut tx, &orders, &[("g", &sku("B")), ("g", &sku("Z"))]).await.unwrap();
    let standing = inventory::lock_reservations(&mut tx, &orders).await.unwrap();
    assert_eq!(standing.iter().map(|row| row.id).collect::<Vec<_>>(), made.iter().map(|m| m.id).collect::<Vec<_>>());
    assert!(standing.iter().all(|row| row.state == ReservationState::Held && row.group_id == "g"));
    use ReservationState::{Committed, Fulfilled, Held, Released};
    let moved = |n: usize, from, to| Moved { group_id: "g".into(), id: made[n].id, from, to };
    let later = NOW.plus(AGES);
    let shelf = async |tx: &mut Tx| -> Vec<(i64, i64, i64)> {
        stockade_kernel::on!(tx, c => {
            sqlx::query_as("SELECT on_hand, reserved, fulfilled FROM inventory_stock WHERE group_id = 'g' ORDER BY sku")
                .fetch_all(c)
                .await
        })
        .unwrap()
    };
    inventory::move_many(&mut tx, &[moved(0, Held, Committed)], later).await.unwrap();
    assert_eq!(shelf(&mut tx).await, [(10, 5, 0), (10, 5, 0)], "paid is still held");
    inventory::move_many(&mut tx, &[moved(0, Committed, Fulfilled), moved(1, Held, Released)], later).await.unwrap();
    assert_eq!(shelf(&mut tx).await, [(9, 4, 1), (8, 0, 2)], "gone is gone, released is back");
    let states: Vec<_> =
        inventory::lock_reservations(&mut tx, &orders).await.unwrap().into_iter().map(|row| row.state).collect();
    assert_eq!(states, [Fulfilled, Released, Held]);
    let of = inventory::Query { group_id: "g".into(), limit: 10, ..inventory::Query::default() };
    let listed = inventory::list_reservations(&mut tx, of).await.unwrap();
    assert_eq!((listed[1].lines.len(), listed[1].updated_at), (1, later), "what it held stays on record");
}

async fn a_tombstone_takes_the_place_of_an_order_unless_it_is_taken(db: TestDb) {
    let mut tx = begin(&db).await;
    stock(&mut tx, "g", "A", 10).await;
    let held = reservation(1, &[("A", 1)]);
    inventory::hold(&mut tx, &[(("g".to_owned(), sku("A")), 1)], std::slice::from_ref(&held), NOW).await.unwrap();
    let stones = [
        NewReservation { order_id: held.order_id, lines: vec![], ..reservation(2, &[]) },
        reservation(3, &[]),
        reservation(4, &[]),
    ];
    let written = inventory::insert_tombstones(&mut tx, &stones, NOW).await.unwrap();
    assert_eq!(written, [stones[1].id, stones[2].id].into(), "the first order has its reservation");
    inventory::delete_tombstones(&mut tx, &[("g", stones[1].id), ("other", stones[2].id)]).await.unwrap();
    let of = inventory::Query { group_id: "g".into(), limit: 10, ..inventory::Query::default() };
    let all = inventory::list_reservations(&mut tx, of).await.unwrap();
    let seen: Vec<_> = all.iter().map(|row| (row.id, row.state.as_str(), row.lines.len())).collect();
    assert_eq!(seen, [(stones[2].id, "released", 0), (held.id, "held", 1)]);
}

async fn the_database_stops_what_would_oversell(db: TestDb) {
    let db = db.open(stockade_kernel::clock::Clock::System).await;
    let mut tx = db.begin().await.unwrap();
    stock(&mut tx, "g", "A", 5).await;
    tx.commit().await.unwrap();
    let taken = [(("g".to_owned(), sku("A")), 6)];
    let refused = fails(&db, async |tx| inventory::hold(tx, &taken, &[reservation(1, &[("A", 6)])], NOW).await).await;
    assert!(refused.is_check_violation(), "{refused}");
    let below = adjustment("g", "A", -6, -1);
    let refused = fails(&db, async |tx| inventory::adjust(tx, &below, NOW).await).await;
    assert!(refused.is_check_violation(), "{refused}");
    let again = reservation(1, &[("A", 1)]);
    let second = NewReservation { id: mint_id(), number: "RES-9".into(), ..again.clone() };
    let refused = fails(&db, async |tx| inventory::hold(tx, &[], &[again.clone(), second.clone()], NOW).await).await;
    assert!(refused.is_unique_violation(), "one reservation per order: {refused}");
    let mut tx = db.read().await.unwrap();
    let row = inventory::list_stock(&mut tx, "g", Some("A"), None, 1).await.unwrap().remove(0);
    assert_eq!((row.on_hand, row.reserved), (5, 0));
}

// Notifications.

async fn an_order_has_one_notice_of_each_kind(db: TestDb) {
    let mut tx = begin(&db).await;
    let (first, second) = (mint_id(), mint_id());
    let made = [
        notice("g", first, Kind::Reserved),
        notice("g", first, Kind::Paid),
        notice("g", second, Kind::Reserved),
        notice("other", first, Kind::Reserved),
    ];
    notifications::write_many(&mut tx, &made, NOW).await.unwrap();
    let repeats = [notice("g", first, Kind::Reserved), notice("g", second, Kind::Rejected)];
    notifications::write_many(&mut tx, &repeats, NOW.plus(AGES)).await.unwrap();
    let of = || notifications::Query { group_id: "g".into(), limit: 10, ..notifications::Query::default() };
    let all = notifications::list(&mut tx, of()).await.unwrap();
    let expected = [repeats[1].id, made[2].id, made[1].id, made[0].id];
    assert_eq!(all.iter().map(|notice| notice.id).collect::<Vec<_>>(), expected, "the first of a kind stands");
    let oldest = &all[3];
    assert_eq!((oldest.order_id, oldest.kind.as_str(), oldest.channel.as_str()), (first, "reserved", "log"));
    assert_eq!((oldest.state.as_str(), oldest.created_at), ("sent", NOW));
    let narrowed = [
        (notifications::Query { order_id: Some(first), ..of() }, vec![made[1].id, made[0].id]),
        (notifications::Query { kind: Some(Kind::Paid), ..of() }, vec![made[1].id]),
        (notifications::Query { state: Some("failed".into()), ..of() }, vec![]),
        (notifications::Query { before: Some(made[1].id), ..of() }, vec![made[0].id]),
        (notifications::Query { limit: 1, ..of() }, vec![repeats[1].id]),
        (notifications::Query { group_id: "other".into(), ..of() }, vec![made[3].id]),
    ];
    for (query, expected) in narrowed {
        let text = format!("{query:?}");
        let found = notifications::list(&mut tx, query).await.unwrap();
        assert_eq!(found.iter().map(|notice| notice.id).collect::<Vec<_>>(), expected, "{text}");
    }
}

async fn a_notice_in_doubt_stays_so_until_it_is_sent(db: TestDb) {
    let mut tx = begin(&db).await;
    let order_id = mint_id();
    let begun = NewNotice { channel: "webhook", state: NoticeState::Sending, ..notice("g", order_id, Kind::Paid) };
    let other = NewNotice { event_id: mint_id(), ..begun.clone() };
    assert_eq!(notifications::write_many(&mut tx, std::slice::from_ref(&begun), NOW).await.unwrap(), [begun.event_id]);
    assert!(notifications::write_many(&mut tx, &[other], NOW).await.unwrap().is_empty(), "the first event's");
    let new = NewNotice { channel: "webhook", state: NoticeState::Sending, ..notice("h", mint_id(), Kind::Paid) };
    let both = notifications::write_many(&mut tx, &[begun.clone(), new.clone()], NOW).await.unwrap();
    assert_eq!(sorted(both), sorted(vec![begun.event_id, new.event_id]), "one tried again beside a new one");
    for (ended, shown) in [
        (NoticeState::Pending, "pending"),
        (NoticeState::Unknown, "unknown"),
        (NoticeState::Pending, "unknown"),
        (NoticeState::Failed, "unknown"),
        (NoticeState::Sent, "sent"),
    ] {
        assert_eq!(
            notifications::write_many(&mut tx, std::slice::from_ref(&begun), NOW).await.unwrap(),
            [begun.event_id]
        );
        let attempt = |event_id| Attempt {
            group_id: "g".into(),
            order_id,
            kind: Kind::Paid,
            event_id,
            state: ended,
            last_error: Some("what".into()),
        };
        let attempts = [attempt(begun.event_id), attempt(mint_id())];
        notifications::conclude_many(&mut tx, &attempts, NOW.plus(AGES)).await.unwrap();
        let query = notifications::Query { group_id: "g".into(), limit: 10, ..notifications::Query::default() };
        let found = notifications::list(&mut tx, query).await.unwrap().remove(0);
        assert_eq!((found.state.as_str(), found.last_error.as_deref()), (shown, Some("what")), "{ended:?}");
        assert_eq!((found.created_at, found.updated_at), (NOW, NOW.plus(AGES)));
    }
    assert!(notifications::write_many(&mut tx, &[begun], NOW).await.unwrap().is_empty(), "what is sent is sent");
}

// The ledger.

async fn an_order_is_noted_by_whichever_event_comes_first(db: TestDb) {
    let mut tx = begin(&db).await;
    let mut ids = [mint_id(), mint_id(), mint_id()];
    ids.sort_unstable();
    let note =
        |placed: [bool; 3]| ids.into_iter().zip(placed).map(|(id, placed)| ("g", id, placed)).collect::<Vec<_>>();
    ledger::note_and_lock(&mut tx, &note([true, false, true])[..2], NOW).await.unwrap();
    ledger::note_and_lock(&mut tx, &note([false, true, false]), NOW.plus(AGES)).await.unwrap();
    ledger::book(&mut tx, &[Paid { group_id: "g", order_id: ids[1], event_id: mint_id() }], &[], NOW).await.unwrap();
    let asked = [("g", ids[0]), ("g", ids[1]), ("g", ids[2]), ("other", ids[0]), ("g", mint_id())];
    let mut found = ledger::find_orders(&mut tx, &asked).await.unwrap();
    found.sort_unstable();
    let of = |n: usize, placed, paid| ("g".to_owned(), ids[n], placed, paid);
    assert_eq!(found, [of(0, true, false), of(1, true, true), of(2, false, false)]);
    let first: Timestamp = stockade_kernel::on!(tx, c => {
        sqlx::query_scalar("SELECT placed_at FROM ledger_orders WHERE order_id = $1").bind(ids[0]).fetch_one(c).await
    })
    .unwrap();
    assert_eq!(first, NOW, "the first time stands");
}

async fn entries_are_unique_by_event_and_account_and_add_up(db: TestDb) {
    let rig = Rig::new(&db).await;
    let (order_id, event_id) = (mint_id(), mint_id());
    let entry = |account: &str, amount_minor, currency| NewEntry {
        id: mint_id(),
        group_id: "g",
        order_id,
        event_id,
        side: Side { account: account.into(), amount_minor },
        currency,
    };
    let mut tx = rig.db.begin().await.unwrap();
    let entries = [entry("cash", 5, "USD"), entry("customer:a", -5, "USD")];
    ledger::book(&mut tx, &[], &entries, NOW).await.unwrap();
    let foreign = NewEntry { group_id: "other", event_id: mint_id(), ..entry("cash", 9, "EUR") };
    let more = NewEntry { event_id: mint_id(), order_id: mint_id(), ..entry("cash", 7, "USD") };
    let euros = NewEntry { event_id: mint_id(), ..entry("cash", 1, "EUR") };
    ledger::book(&mut tx, &[], &[foreign, more.clone(), euros.clone()], NOW).await.unwrap();
    tx.commit().await.unwrap();
    for wrong in [entry("cash", 1, "USD"), entry("customer:b", 0, "USD")] {
        let refused = fails(&rig.db, async |tx| ledger::book(tx, &[], std::slice::from_ref(&wrong), NOW).await).await;
        assert!(refused.is_unique_violation() || refused.is_check_violation(), "{refused}");
    }
    let mut tx = rig.db.read().await.unwrap();
    let of = || ledger::Query { group_id: "g".into(), limit: 10, ..ledger::Query::default() };
    let narrowed = [
        (of(), vec![euros.id, more.id, entries[1].id, entries[0].id]),
        (ledger::Query { order_id: Some(order_id), ..of() }, vec![euros.id, entries[1].id, entries[0].id]),
        (ledger::Query { event_id: Some(event_id), ..of() }, vec![entries[1].id, entries[0].id]),
        (ledger::Query { account: Some("cash".into()), ..of() }, vec![euros.id, more.id, entries[0].id]),
        (ledger::Query { currency: Some("EUR".into()), ..of() }, vec![euros.id]),
        (ledger::Query { before: Some(more.id), limit: 1, ..of() }, vec![entries[1].id]),
    ];
    for (query, expected) in narrowed {
        let text = format!("{query:?}");
        let found = ledger::list_entries(&mut tx, query).await.unwrap();
        assert_eq!(found.iter().map(|entry| entry.id).collect::<Vec<_>>(), expected, "{text}");
    }
    let of = || BalanceQuery { group_id: "g".into(), limit: 10, ..BalanceQuery::default() };
    let after = Some(("cash".to_owned(), "EUR".to_owned()));
    let narrowed = [
        (of(), vec![("cash", "EUR", 1), ("cash", "USD", 12), ("customer:a", "USD", -5)]),
        (BalanceQuery { account: Some("customer:a".into()), ..of() }, vec![("customer:a", "USD", -5)]),
        (BalanceQuery { currency: Some("EUR".into()), ..of() }, vec![("cash", "EUR", 1)]),
        (BalanceQuery { after, limit: 1, ..of() }, vec![("cash", "USD", 12)]),
    ];
    for (query, expected) in narrowed {
        let text = format!("{query:?}");
        let found = ledger::list_balances(&mut tx, query).await.unwrap();
        let found: Vec<_> = found.iter().map(|b| (b.account.as_str(), b.currency.as_str(), b.balance_minor)).collect();
        assert_eq!(found, expected, "{text}");
    }
}

// The kernel's own.

async fn outbox_rows_are_listed_by_each_filter_newest_first(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = [told("note"), told("note"), event("other.said", serde_json::json!({}))];
    rig.tell(&events[..2]).await;
    rig.relay.try_once().await.unwrap();
    rig.tell(&events[2..]).await;
    let mut tx = rig.db.read().await.unwrap();
    let of = || outbox::Query { limit: 10, ..outbox::Query::default() };
    let id = |n: usize| events[n].event_id;
    let narrowed = [
        (of(), vec![id(2), id(1), id(0)]),
        (outbox::Query { group_id: Some("g".into()), ..of() }, vec![id(2), id(1), id(0)]),
        (outbox::Query { group_id: Some("h".into()), ..of() }, vec![]),
        (outbox::Query { status: Some("published".into()), ..of() }, vec![id(1), id(0)]),
        (outbox::Query { aggregate_type: Some("other".into()), ..of() }, vec![id(2)]),
        (outbox::Query { aggregate_id: Some(events[0].aggregate_id.clone()), ..of() }, vec![id(0)]),
        (outbox::Query { before: Some(id(2)), limit: 1, ..of() }, vec![id(1)]),
    ];
    for (query, expected) in narrowed {
        let text = format!("{query:?}");
        let found = outbox::list(&mut tx, query).await.unwrap();
        assert_eq!(found.iter().map(|row| row.id).collect::<Vec<_>>(), expected, "{text}");
    }
    let row = outbox::find(&mut tx, Some("g".into()), id(2)).await.unwrap().unwrap();
    assert_eq!(
        (row.event_type.as_str(), row.aggregate_type.as_str(), row.status.as_str()),
        ("other.said", "other", "pending")
    );
    assert_eq!(
        (row.aggregate_id, row.correlation_id),
        (events[2].aggregate_id.clone(), events[2].correlation_id.clone())
    );
    assert!(outbox::find(&mut tx, Some("h".into()), id(2)).await.unwrap().is_none());
}

async fn appending_nothing_is_nothing_and_an_event_is_appended_once(db: TestDb) {
    let rig = Rig::new(&db).await;
    let event = told("note");
    rig.tell(&[]).await;
    rig.tell(std::slice::from_ref(&event)).await;
    let twice = fails(&rig.db, async |tx| outbox::append_many(tx, &[Entry::from(&event)]).await).await;
    assert!(twice.is_unique_violation(), "{twice}");
    assert_eq!(rig.number("SELECT count(*) FROM messaging_outbox").await, 1);
}

async fn rows_of_one_batch_keep_what_each_has_alone(db: TestDb) {
    let rig = Rig::new(&db).await;
    let trace = Traceparent::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    let mut events = many("note", 2);
    events.push(event("other.said", serde_json::json!({})));
    (events[0].causation_id, events[0].traceparent) = (Some(mint_id()), trace);
    (events[1].group_id, events[1].subsidiary_id) = ("h".to_owned(), Some("s".to_owned()));
    let entries = [
        Entry::from(&events[0]),
        Entry::from(&events[1]),
        Entry::retry(&events[2], events[2].to_body(), QUEUE, 2, Duration::ZERO),
        Entry::retry(&events[0], events[0].to_body(), QUEUE, 1, Duration::from_secs(3600)),
    ];
    let mut tx = rig.db.begin().await.unwrap();
    let now = tx.now();
    outbox::append_many(&mut tx, &entries).await.unwrap();
    let claim = outbox::Claim { by: mint_id(), lease: AGES };
    let mut claimed = outbox::claim_many(&mut tx, claim, 10, now).await.unwrap();
    claimed.sort_by_key(|row| entries.iter().position(|entry| entry.id == row.id));
    assert_eq!(claimed.len(), 3, "one is due later");
    for (row, entry) in claimed.iter().zip(&entries) {
        assert_eq!((row.id, row.event_id, row.kind.as_str()), (entry.id, entry.event_id, entry.kind.as_str()));
        assert_eq!((&row.group_id, &row.subsidiary_id), (&entry.group_id, &entry.subsidiary_id));
        assert_eq!((&*row.aggregate_type, &*row.event_type), (&*entry.aggregate_type, &*entry.event_type));
        assert_eq!((&row.aggregate_id, &row.correlation_id), (&entry.aggregate_id, &entry.correlation_id));
        assert_eq!((&*row.headers, &row.target, &row.body), (&*entry.headers, &entry.target, &*entry.body));
        assert_eq!(row.traceparent, entry.traceparent.map(|trace| trace.to_string()));
    }
    let caused = "SELECT count(*) FROM messaging_outbox WHERE causation_id IS NOT NULL";
    let caused: i64 = stockade_kernel::on!(tx, c => sqlx::query_scalar(caused).fetch_one(c).await).unwrap();
    assert_eq!(caused, 2, "the event and its retry");

    let hashes: Vec<_> = events.iter().map(|event| hash_of(&event.to_body())).collect();
    let keys = [KEY, KEY, "other.said"];
    let arrivals: Vec<Arrival<'_>> =
        (0..3).map(|n| Arrival { event: &events[n], key: keys[n], body_hash: &hashes[n] }).collect();
    inbox::insert_new(&mut tx, "probe", &arrivals, now, now).await.unwrap();
    inbox::insert_all(&mut tx, "blind", &arrivals, now, now).await.unwrap();
    for consumer in ["probe", "blind"] {
        let of = |group: &str| inbox::Query {
            consumer: Some(consumer.into()),
            group_id: Some(group.into()),
            limit: 10,
            ..inbox::Query::default()
        };
        let of_g = inbox::list(&mut tx, of("g")).await.unwrap();
        let seen: Vec<_> = of_g.iter().map(|row| (row.event_id, row.event_type.as_str())).collect();
        assert_eq!(seen, [(events[2].event_id, "other.said"), (events[0].event_id, KEY)]);
        let of_h = inbox::list(&mut tx, of("h")).await.unwrap();
        assert_eq!(of_h.iter().map(|row| row.event_id).collect::<Vec<_>>(), [events[1].event_id]);
    }

    let mut placed = [order("g", "a", 1, &[("A", 1, 0), ("B", 1, 0)]), order("h", "b", 1, &[("C", 1, 0)])];
    (placed[1].subsidiary_id, placed[1].currency) = (None, "EUR".to_owned());
    orders::insert_many(&mut tx, &placed).await.unwrap();
    let reasons = [None, Some("Insufficient C: need 1, have 0".to_owned())];
    let answers = [(0, Status::Reserved), (1, Status::Rejected)].map(|(n, status)| Answer {
        group_id: placed[n].group_id.clone(),
        order_id: placed[n].id,
        status,
        reason: reasons[n].clone(),
    });
    assert_eq!(orders::answer_many(&mut tx, &answers, HOLD, NOW).await.unwrap(), 2);
    for (written, answer) in placed.iter().zip(&answers) {
        let of = orders::Query { group_id: written.group_id.clone(), ..of_group(10) };
        let read = orders::list(&mut tx, of).await.unwrap().remove(0);
        assert_eq!((read.id, &read.items, &read.currency), (written.id, &written.items, &written.currency));
        assert_eq!((&read.subsidiary_id, read.status), (&written.subsidiary_id, answer.status));
        assert_eq!((&read.reason, &read.customer_id), (&answer.reason, &written.customer_id));
    }

    let mut written = [notice("g", mint_id(), Kind::Reserved), notice("h", mint_id(), Kind::Paid)];
    (written[1].channel, written[1].state) = ("webhook", NoticeState::Sending);
    notifications::write_many(&mut tx, &written, NOW).await.unwrap();
    for notice in &written {
        let of =
            notifications::Query { group_id: notice.group_id.clone(), limit: 10, ..notifications::Query::default() };
        let read = notifications::list(&mut tx, of).await.unwrap().remove(0);
        assert_eq!((read.id, read.order_id, read.kind.as_str()), (notice.id, notice.order_id, notice.kind.as_str()));
        assert_eq!((read.channel.as_str(), read.state.as_str()), (notice.channel, notice.state.as_str()));
    }

    let mut made = [reservation(1, &[("A", 2), ("B", 3)]), reservation(1, &[("B", 1)])];
    made[1].group_id = "h".into();
    inventory::hold(&mut tx, &[], &made, NOW).await.unwrap();
    let wanted = [("g", made[0].order_id), ("h", made[1].order_id), ("g", made[1].order_id)];
    assert_eq!(inventory::survey(&mut tx, &wanted, &[]).await.unwrap().reserved.len(), 2);
    for (made, lines) in made.iter().zip([2, 1]) {
        let of = inventory::Query { group_id: made.group_id.clone(), limit: 10, ..inventory::Query::default() };
        let all = inventory::list_reservations(&mut tx, of).await.unwrap();
        assert_eq!(all.iter().map(|r| (r.id, r.lines.len())).collect::<Vec<_>>(), [(made.id, lines)]);
    }
}

async fn a_claim_holds_until_it_is_taken_over_or_concluded(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = many("note", 3);
    let hashes: Vec<_> = events.iter().map(|event| hash_of(&event.to_body())).collect();
    let arrivals: Vec<Arrival<'_>> =
        events.iter().zip(&hashes).map(|(event, body_hash)| Arrival { event, key: KEY, body_hash }).collect();
    let mut ids: Vec<Uuid> = events.iter().map(|event| event.event_id).collect();
    ids.sort_unstable();
    let claim = |event_id, version, attempt| Claim { event_id, token: mint_id(), version, attempt };
    let first: Vec<Claim> = ids.iter().map(|id| claim(*id, 1, 1)).collect();
    let mut tx = rig.db.begin().await.unwrap();
    let now = tx.now();
    inbox::insert_new(&mut tx, "probe", &arrivals, now, now).await.unwrap();
    inbox::claim_many(&mut tx, "probe", &first, AGES, now).await.unwrap();
    let met = inbox::meet(&mut tx, "probe", &ids, now).await.unwrap();
    for (_, met) in &met {
        assert_eq!((met.state, met.effect, met.is_due()), (State::Processing, Effect::Outside, false));
        assert_eq!((met.attempts, met.unfinished_runs, met.version), (1, 1, 1));
        assert!(met.due_in > AGES - Duration::from_secs(60) && met.due_in <= AGES, "{:?}", met.due_in);
    }
    let held: Vec<(Uuid, bool)> = ids.iter().map(|id| (*id, true)).collect();
    assert_eq!(inbox::hold_many(&mut tx, "probe", &first).await.unwrap(), held);
    assert!(inbox::hold_many(&mut tx, "other", &first).await.unwrap().is_empty(), "each consumer by itself");

    // One is taken over, one concluded; the third goes on.
    inbox::claim_many(&mut tx, "probe", &[claim(ids[0], 2, 2)], AGES, now).await.unwrap();
    let (event_id, state) = (ids[1], State::Processed);
    let done = Mark { event_id, state, attempts: 1, due_in: None, reason: None, last_error: None };
    inbox::mark_many(&mut tx, "probe", &[done], now).await.unwrap();
    assert_eq!(inbox::hold_many(&mut tx, "probe", &first).await.unwrap(), [(ids[1], false), (ids[2], true)]);
    inbox::count_fenced(&mut tx, "probe", &ids[..1]).await.unwrap();
    inbox::renew_many(&mut tx, "probe", &first, AGES * 3, now).await.unwrap();
    let met = inbox::meet(&mut tx, "probe", &ids, now).await.unwrap();
    let seen: Vec<_> = met.iter().map(|(_, met)| (met.version, met.unfinished_runs, met.due_in > AGES)).collect();
    assert_eq!(seen, [(2, 2, false), (1, 0, false), (1, 1, true)], "renewed is what is still held");
    let query = inbox::Query { consumer: Some("probe".into()), limit: 10, ..inbox::Query::default() };
    let fenced: i32 = inbox::list(&mut tx, query).await.unwrap().iter().map(|row| row.fenced).sum();
    assert_eq!(fenced, 1);
}

async fn what_is_written_down_as_new_is_new_or_fails(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = many("note", 4);
    let hashes: Vec<_> = events.iter().map(|event| hash_of(&event.to_body())).collect();
    let arrivals: Vec<Arrival<'_>> =
        events.iter().zip(&hashes).map(|(event, body_hash)| Arrival { event, key: KEY, body_hash }).collect();
    let mut tx = rig.db.begin().await.unwrap();
    let now = tx.now();
    let taken_at = now.minus(AGES);
    inbox::insert_new(&mut tx, "looked", &arrivals, taken_at, now).await.unwrap();
    inbox::insert_all(&mut tx, "blind", &arrivals[..3], taken_at, now).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = rig.db.begin().await.unwrap();
    for event in &events[..3] {
        let query = inbox::Query { event_id: Some(event.event_id), limit: 3, ..inbox::Query::default() };
        let mut rows = inbox::list(&mut tx, query).await.unwrap();
        for row in &mut rows {
            row.consumer.clear();
        }
        assert_eq!(format!("{:?}", rows[0]), format!("{:?}", rows[1]), "the same rows by either way");
    }
    let error = inbox::insert_all(&mut tx, "blind", &arrivals[2..], taken_at, now).await.unwrap_err();
    assert!(error.as_database_error().unwrap().is_unique_violation(), "{error}");
}

async fn inbox_rows_are_met_marked_counted_and_listed(db: TestDb) {
    let rig = Rig::new(&db).await;
    let events = many("note", 3);
    let hashes: Vec<_> = events.iter().map(|event| hash_of(&event.to_body())).collect();
    let arrivals: Vec<Arrival<'_>> =
        events.iter().zip(&hashes).map(|(event, body_hash)| Arrival { event, key: KEY, body_hash }).collect();
    let id = |n: usize| events[n].event_id;
    let mut tx = rig.db.begin().await.unwrap();
    let now = tx.now();
    assert_eq!(sorted(inbox::insert_new(&mut tx, "probe", &arrivals[..2], now, now).await.unwrap()), [id(0), id(1)]);
    assert_eq!(inbox::insert_new(&mut tx, "probe", &arrivals, now, now).await.unwrap(), [id(2)], "only what is new");
    assert_eq!(
        inbox::insert_new(&mut tx, "other", &arrivals[..1], now, now).await.unwrap(),
        [id(0)],
        "each consumer by itself"
    );
    inbox::count_duplicates(&mut tx, "probe", &[id(0), id(1), id(0), mint_id()]).await.unwrap();
    let mark = |n, state, due_in| Mark {
        event_id: id(n),
        state,
        attempts: 2,
        due_in,
        reason: Some("why".into()),
        last_error: Some("what".into()),
    };
    let marks = [mark(1, State::Retrying, Some(AGES)), mark(2, State::Dead, None)];
    inbox::mark_many(&mut tx, "probe", &marks, now).await.unwrap();
    for arrival in &arrivals[..2] {
        inbox::insert_begun(&mut tx, "probe", arrival).await.unwrap(); // changes nothing that is there
    }
    inbox::insert_begun(&mut tx, "third", &arrivals[0]).await.unwrap();
    let begun = inbox::meet(&mut tx, "third", &[id(0)], now).await.unwrap().remove(0).1;
    assert_eq!((begun.state, begun.attempts, begun.unfinished_runs), (State::Processing, 0, 0));
    stockade_kernel::on!(tx, c => sqlx::query("DELETE FROM messaging_inbox WHERE consumer = 'third'").execute(c).await.map(drop))
        .unwrap();
    inbox::record_run(&mut tx, "probe", id(0)).await.unwrap();
    inbox::record_run(&mut tx, "probe", id(0)).await.unwrap();
    inbox::forget_run(&mut tx, "probe", id(0)).await.unwrap();
    let met = inbox::meet(&mut tx, "probe", &[id(2), id(0), id(1), mint_id()], now).await.unwrap();
    let seen: Vec<_> =
        met.iter().map(|(id, met)| (*id, met.state, met.attempts, met.unfinished_runs, met.is_due())).collect();
    let expected = [
        (id(0), State::Processing, 1, 1, true),
        (id(1), State::Retrying, 2, 0, false),
        (id(2), State::Dead, 2, 0, true),
    ];
    assert_eq!(seen, expected, "in the order of their ids, and unknown ids are not there");
    assert!(met.iter().zip(&hashes).all(|((_, met), hash)| met.body_hash == *hash));
    let verdict = inbox::find_verdict(&mut tx, "probe", id(2)).await.unwrap().unwrap();
    assert_eq!((verdict.state, verdict.attempts, verdict.body_hash), (State::Dead, 2, hashes[2]));
    assert_eq!((verdict.reason.as_deref(), verdict.last_error.as_deref()), (Some("why"), Some("what")));
    assert!(inbox::find_verdict(&mut tx, "other", id(2)).await.unwrap().is_none());
    let wanted = [(mint_id(), hashes[0]), (id(1), hashes[1]), (id(2), hashes[1])];
    let states = inbox::revive_many(&mut tx, "probe", &wanted).await.unwrap();
    assert_eq!(states, [None, Some(State::Retrying), None], "unknown, not dead, dead with another body");
    tx.commit().await.unwrap();
    let mut tx = rig.db.begin().await.unwrap();
    let of = || inbox::Query { limit: 10, ..inbox::Query::default() };
    let probe = |n: usize| ("probe".to_owned(), id(n));
    let narrowed = [
        (of(), vec![probe(2), probe(1), probe(0), ("other".to_owned(), id(0))]),
        (inbox::Query { group_id: Some("h".into()), ..of() }, vec![]),
        (inbox::Query { consumer: Some("probe".into()), ..of() }, vec![probe(2), probe(1), probe(0)]),
        (inbox::Query { state: Some("dead".into()), ..of() }, vec![probe(2)]),
        (inbox::Query { event_id: Some(id(0)), ..of() }, vec![probe(0), ("other".to_owned(), id(0))]),
        (inbox::Query { duplicates_min: Some(2), ..of() }, vec![probe(0)]),
        (inbox::Query { before: Some(probe(2)), limit: 2, ..of() }, vec![probe(1), probe(0)]),
        (inbox::Query { before: Some(probe(0)), ..of() }, vec![("other".to_owned(), id(0))]),
    ];
    for (query, expected) in narrowed {
        let text = format!("{query:?}");
        let found = inbox::list(&mut tx, query).await.unwrap();
        assert_eq!(found.into_iter().map(|row| (row.consumer, row.event_id)).collect::<Vec<_>>(), expected, "{text}");
    }
    let twice = [(id(2), hashes[2]), (id(2), hashes[2])];
    let states = inbox::revive_many(&mut tx, "probe", &twice).await.unwrap();
    assert_eq!(states, [Some(State::Dead); 2]);
    let now = tx.now();
    let (_, met) = inbox::meet(&mut tx, "probe", &[id(2)], now).await.unwrap().remove(0);
    assert_eq!((met.state, met.attempts), (State::Retrying, 0));
}

async fn dead_letters_are_listed_by_each_filter_newest_first(db: TestDb) {
    let rig = Rig::new(&db).await;
    rig.deliver(&told("reject"), 1).await;
    rig.deliver_raw(b"no json", None, serde_json::Map::new(), 1).await;
    rig.deliver(&event("probe.unknown", serde_json::json!({})), 1).await;
    rig.settle().await;
    let letters = rig.letters().await;
    let id = |reason: &str| letters.iter().find(|letter| letter.reason == reason).unwrap().id;
    let newest: Vec<Uuid> = letters.iter().rev().map(|letter| letter.id).collect();
    assert!(newest.is_sorted_by(|a, b| a > b));
    rig.redrive(id("business-rule")).await;
    let mut tx = rig.db.read().await.unwrap();
    let of = || dead_letters::Query { limit: 10, ..dead_letters::Query::default() };
    let narrowed = [
        (of(), newest.clone()),
        (dead_letters::Query { group_id: Some("h".into()), ..of() }, vec![]),
        (dead_letters::Query { queue: Some(QUEUE.into()), limit: 1, ..of() }, newest[..1].to_vec()),
        (dead_letters::Query { consumer: Some("nobody".into()), ..of() }, vec![]),
        (dead_letters::Query { reason: Some("not-json".into()), ..of() }, vec![id("not-json")]),
        (dead_letters::Query { event_type: Some("probe.unknown".into()), ..of() }, vec![id("unknown-type")]),
        (dead_letters::Query { state: Some("redriven".into()), ..of() }, vec![id("business-rule")]),
        (dead_letters::Query { before: Some(newest[0]), ..of() }, newest[1..].to_vec()),
    ];
    for (query, expected) in narrowed {
        let text = format!("{query:?}");
        let found = dead_letters::list(&mut tx, query).await.unwrap();
        assert_eq!(found.iter().map(|letter| letter.id).collect::<Vec<_>>(), expected, "{text}");
    }
    assert_eq!(dead_letters::count_open(&mut tx).await.unwrap(), [(QUEUE.to_owned(), 2)]);
    let found = dead_letters::find(&mut tx, Some("g".into()), id("business-rule")).await.unwrap();
    assert_eq!(found.unwrap().row.state, "redriven");
    let foreign = dead_letters::find(&mut tx, Some("h".into()), id("business-rule")).await.unwrap();
    assert!(foreign.is_none(), "a letter of another tenant is not there");
}

// The schema.

async fn the_database_knows_every_state_there_is(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut tx = rig.db.begin().await.unwrap();
    let event = told("note");
    outbox::append_events(&mut tx, vec![event.clone()]).await.unwrap();
    let arrival = Arrival { event: &event, key: KEY, body_hash: &hash_of(&event.to_body()) };
    inbox::insert_all(&mut tx, "probe", &[arrival], NOW, NOW).await.unwrap();
    orders::insert_many(&mut tx, &[order("g", "alice", 1, &[("A", 1, 1)])]).await.unwrap();
    inventory::hold(&mut tx, &[], &[reservation(1, &[("A", 1)])], NOW).await.unwrap();
    notifications::write_many(&mut tx, &[notice("g", mint_id(), Kind::Paid)], NOW).await.unwrap();
    tx.commit().await.unwrap();
    let states: [(&'static str, &[&str]); 7] = [
        ("UPDATE messaging_outbox SET kind = $1", &["event", "retry", "redrive", "replay"]),
        ("UPDATE messaging_outbox SET status = $1", &["pending", "published", "failed", "dead"]),
        ("UPDATE messaging_inbox SET state = $1", &["processing", "processed", "waiting", "retrying", "dead"]),
        (
            "UPDATE orders_orders SET status = $1",
            &["placed", "reserved", "rejected", "paid", "cancelled", "expired", "fulfilled"],
        ),
        ("UPDATE inventory_reservations SET state = $1", &["held", "committed", "fulfilled", "released"]),
        ("UPDATE notifications_notices SET kind = $1", &["reserved", "rejected", "paid", "cancelled", "expired"]),
        ("UPDATE notifications_notices SET state = $1", &["pending", "sending", "sent", "failed", "unknown"]),
    ];
    for (update, known) in states {
        let put = async |tx: &mut Tx, state: &str| stockade_kernel::on!(tx, c => sqlx::query(update).bind(state).execute(c).await.map(|done| done.rows_affected()));
        let mut tx = rig.db.begin().await.unwrap();
        for state in known {
            assert_eq!(put(&mut tx, state).await.unwrap(), 1, "{update}: {state}");
        }
        drop(tx);
        let refused = fails(&rig.db, async |tx| put(tx, "lost").await.map(drop)).await;
        assert!(refused.is_check_violation(), "{update}: {refused}");
    }
}

/// As a CHECK with IN would have it do: a tenth of all that an order took.
#[tokio::test(crate = "crate::support::schedule")]
async fn sqlite_makes_no_table_to_check_a_row_of_an_order() {
    let db = TestDb::new(Engine::Sqlite).await;
    let mut tx = begin(&db).await;
    let Conn::Sqlite(c) = tx.conn() else { panic!("that is no SQLite") };
    for insert in [
        "EXPLAIN INSERT INTO messaging_outbox DEFAULT VALUES",
        "EXPLAIN INSERT INTO messaging_inbox DEFAULT VALUES",
        "EXPLAIN INSERT INTO messaging_queue DEFAULT VALUES",
        "EXPLAIN INSERT INTO messaging_bundles DEFAULT VALUES",
        "EXPLAIN INSERT INTO orders_orders DEFAULT VALUES",
        "EXPLAIN INSERT INTO orders_lines DEFAULT VALUES",
        "EXPLAIN INSERT INTO orders_holds DEFAULT VALUES",
        "EXPLAIN INSERT INTO inventory_stock DEFAULT VALUES",
        "EXPLAIN INSERT INTO inventory_reservations DEFAULT VALUES",
        "EXPLAIN INSERT INTO inventory_reservation_lines DEFAULT VALUES",
        "EXPLAIN INSERT INTO notifications_notices DEFAULT VALUES",
        "EXPLAIN INSERT INTO ledger_entries DEFAULT VALUES",
    ] {
        let steps: Vec<(i64, String)> = query_as(insert).fetch_all(&mut *c).await.unwrap();
        let steps: Vec<&str> = steps.iter().map(|(_, step)| step.as_str()).collect();
        assert!(steps.contains(&"IdxInsert") || steps.contains(&"Insert"), "{insert}: {steps:?}");
        assert!(!steps.contains(&"OpenEphemeral"), "{insert}: {steps:?}");
    }
}

async fn begin(db: &TestDb) -> Tx {
    db.open(stockade_kernel::clock::Clock::System).await.begin().await.unwrap()
}

/// The database's refusal of what must fail, in a transaction of its own.
async fn fails(db: &Db, work: impl AsyncFnOnce(&mut Tx) -> sqlx::Result<()>) -> Box<dyn sqlx::error::DatabaseError> {
    let mut tx = db.begin().await.unwrap();
    match work(&mut tx).await {
        Err(sqlx::Error::Database(error)) => error,
        other => panic!("the database must refuse, not {other:?}"),
    }
}

fn sku(name: &str) -> Sku {
    Sku::try_from(name.to_owned()).unwrap()
}

fn item(name: &str, quantity: i64, price: i64) -> Item {
    let (quantity, unit_price_minor) = (Quantity::try_from(quantity).unwrap(), Price::try_from(price).unwrap());
    Item { sku: sku(name), quantity, unit_price_minor }
}

fn placing(group_id: &str) -> Placing {
    Placing {
        group_id: group_id.into(),
        subsidiary_id: Some("s".into()),
        correlation_id: "c".into(),
        traceparent: None,
    }
}

fn order(group: &str, customer: &str, number: u32, lines: &[(&str, i64, i64)]) -> Order {
    let mut items: Vec<Item> = lines.iter().map(|(name, quantity, price)| item(name, *quantity, *price)).collect();
    if items.is_empty() {
        items.push(item("A", 1, 0));
    }
    let request = Request::try_new(customer.into(), "USD".into(), items, 9).unwrap();
    Order::place(&request, &placing(group), format!("ORD-{number}"), NOW)
}

fn of_group(limit: i64) -> orders::Query {
    orders::Query { group_id: "g".into(), limit, ..orders::Query::default() }
}

fn ids(orders: &[Order]) -> Vec<OrderId> {
    orders.iter().map(|order| order.id).collect()
}

fn sorted(mut ids: Vec<Uuid>) -> Vec<Uuid> {
    ids.sort_unstable();
    ids
}

fn adjustment(group: &str, name: &str, delta: i64, on_hand: i64) -> Adjustment {
    Adjustment { id: mint_id(), group_id: group.into(), sku: sku(name), delta, reason: "count".into(), on_hand }
}

async fn stock(tx: &mut Tx, group: &str, name: &str, on_hand: i64) {
    inventory::create_stock(tx, group, &sku(name), NOW).await.unwrap();
    if on_hand > 0 {
        inventory::adjust(tx, &adjustment(group, name, on_hand, on_hand), NOW).await.unwrap();
    }
}

fn reservation(number: u32, lines: &[(&str, i64)]) -> NewReservation {
    NewReservation {
        id: mint_id(),
        number: format!("RES-{number}"),
        group_id: "g".into(),
        order_id: mint_id(),
        cause_event_id: mint_id(),
        lines: lines.iter().map(|(name, quantity)| (sku(name), *quantity)).collect(),
    }
}

fn notice(group: &str, order_id: Uuid, kind: Kind) -> NewNotice {
    let (id, event_id) = (mint_id(), mint_id());
    NewNotice { id, group_id: group.into(), order_id, kind, channel: "log", state: NoticeState::Sent, event_id }
}

async fn a_commit_whose_caller_is_cancelled_runs_its_hooks(db: TestDb) {
    let rig = Rig::new(&db).await;
    let mut tx = rig.db.begin().await.unwrap();
    let (event, (done, is_done)) = (told("note"), tokio::sync::oneshot::channel());
    outbox::append_events(&mut tx, vec![event.clone()]).await.unwrap();
    tx.after_commit(move || done.send(()).unwrap());
    // Polled once, and dropped.
    let _ = tx.commit().now_or_never();
    tokio::time::timeout(DEADLINE, is_done).await.unwrap().expect("the hook ran");
    let mut tx = rig.db.read().await.unwrap();
    assert!(outbox::find(&mut tx, None, event.event_id).await.unwrap().is_some());
}

each_database!(
    a_commit_whose_caller_is_cancelled_runs_its_hooks,
    orders_are_listed_by_each_filter_newest_first,
    a_batch_of_any_size_is_written_whole,
    an_order_is_answered_once,
    a_key_stands_for_its_first_use,
    an_order_moves_only_from_the_state_it_was_met_in,
    a_step_key_is_written_once_per_scope,
    holds_end_in_their_time_and_only_of_orders_still_reserved,
    several_sweeps_at_once_expire_each_order_once,
    an_order_number_that_is_taken_is_minted_again,
    stock_is_created_adjusted_locked_and_listed,
    holding_takes_stock_and_writes_reservations_with_lines,
    reservations_move_on_and_let_go_of_their_stock,
    a_tombstone_takes_the_place_of_an_order_unless_it_is_taken,
    the_database_stops_what_would_oversell,
    an_order_has_one_notice_of_each_kind,
    an_order_is_noted_by_whichever_event_comes_first,
    entries_are_unique_by_event_and_account_and_add_up,
    outbox_rows_are_listed_by_each_filter_newest_first,
    appending_nothing_is_nothing_and_an_event_is_appended_once,
    what_is_written_down_as_new_is_new_or_fails,
    inbox_rows_are_met_marked_counted_and_listed,
    rows_of_one_batch_keep_what_each_has_alone,
    a_claim_holds_until_it_is_taken_over_or_concluded,
    a_notice_in_doubt_stays_so_until_it_is_sent,
    dead_letters_are_listed_by_each_filter_newest_first,
    the_database_knows_every_state_there_is,
);
