//! Placing orders, finding them again, and what becomes of them.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::{App, TestDb, each_database, eventually, fields, order, problem};

const ORDER_FIELDS: [&str; 14] = [
    "correlation_id",
    "created_at",
    "currency",
    "customer_id",
    "group_id",
    "hold_expires_at",
    "id",
    "items",
    "number",
    "reason",
    "status",
    "subsidiary_id",
    "total_minor",
    "updated_at",
];

fn ids(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["id"].as_str().unwrap()).collect()
}

async fn an_order_is_found_by_its_id_and_by_its_number(db: TestDb) {
    let app = App::start(&db).await;
    let body = json!({
        "customer_id": "älice",
        "currency": "EUR",
        "items": [{ "sku": "WIDGET-A", "quantity": 2, "unit_price_minor": 1250 }, { "sku": "GADGET-X", "quantity": 1 }],
    });
    app.put_stock("WIDGET-A", 10).await;
    app.put_stock("GADGET-X", 10).await;
    let response =
        app.post("/v1/orders", &body).header("x-request-id", "req-1").header("prefer", "wait=20").send().await.unwrap();
    assert_eq!(response.status(), 201);
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    assert!(!response.headers().contains_key("idempotent-replayed"));
    let placed: Value = response.json().await.unwrap();
    assert_eq!(fields(&placed), ORDER_FIELDS);
    assert_eq!(location, format!("/v1/orders/{}", placed["id"].as_str().unwrap()));
    assert_eq!((&placed["status"], &placed["reason"]), (&json!("reserved"), &Value::Null));
    assert_eq!((&placed["customer_id"], &placed["currency"]), (&json!("älice"), &json!("EUR")));
    assert_eq!((&placed["total_minor"], &placed["correlation_id"]), (&json!(2500), &json!("req-1")));
    assert_eq!(
        placed["items"],
        json!([
            { "sku": "WIDGET-A", "quantity": 2, "unit_price_minor": 1250 },
            { "sku": "GADGET-X", "quantity": 1, "unit_price_minor": 0 },
        ])
    );
    let number = placed["number"].as_str().unwrap();
    assert!(number.starts_with("ORD-") && number.len() == 12, "{number}");
    assert_eq!(app.read(&location).await, placed);
    assert_eq!(app.read(&format!("/v1/orders/{number}")).await, placed);
    assert_eq!(app.read(&format!("/v1/orders/{}", number.to_lowercase())).await, placed);
    app.stop().await;
}

async fn pages_of_orders_have_no_gaps_and_no_repeats(db: TestDb) {
    let app = App::start(&db).await;
    let orders: Vec<(&str, i64)> = vec![("WIDGET-A", 1)];
    let placed: HashSet<String> = join_all((0..23).map(|_| app.place("alice", &orders)))
        .await
        .iter()
        .map(|order| order["id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(placed.len(), 23);
    for limit in [1, 7, 23, 200] {
        let rows = app.walk(&format!("/v1/orders?limit={limit}")).await;
        let found: HashSet<String> = ids(&rows).into_iter().map(str::to_owned).collect();
        assert_eq!((rows.len(), &found), (23, &placed), "limit {limit}");
        assert!(ids(&rows).is_sorted_by(|a, b| a > b), "newest first");
    }

    // What is placed while somebody pages is newer than every cursor: it neither shifts nor repeats a row.
    let first = app.read("/v1/orders?limit=10").await;
    app.place("bob", &orders).await;
    let cursor = first["next_cursor"].as_str().unwrap();
    let rest = app.walk(&format!("/v1/orders?limit=10&cursor={cursor}")).await;
    let mut seen = ids(first["data"].as_array().unwrap());
    seen.extend(ids(&rest));
    assert_eq!(seen.len(), 23);
    assert_eq!(seen.into_iter().map(str::to_owned).collect::<HashSet<_>>(), placed);
    app.stop().await;
}

async fn filters_narrow_a_list_and_hold_on_every_page(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 100).await;
    for customer in ["alice", "bob", "alice", "bob", "alice"] {
        app.place_and_wait(customer, &[("WIDGET-A", 1)]).await;
        app.place_and_wait(customer, &[("WIDGET-A", 1), ("NOWHERE", 1)]).await;
    }
    let count = async |query: &str| app.walk(&format!("/v1/orders?limit=2&{query}")).await.len();
    assert_eq!(count("status=reserved").await, 5);
    assert_eq!(count("status=rejected").await, 5);
    assert_eq!(count("status=placed").await, 0);
    assert_eq!(count("sku=NOWHERE").await, 5);
    assert_eq!(count("sku=WIDGET-A").await, 10);
    assert_eq!(count("customer_id=alice").await, 6);
    assert_eq!(count("customer_id=alice&status=rejected&sku=WIDGET-A").await, 3);
    assert_eq!(count("customer_id=nobody").await, 0);
    app.stop().await;
}

async fn an_unknown_sku_rejects_the_order_and_not_the_request(db: TestDb) {
    let app = App::start(&db).await;
    let order = app.place_and_wait("alice", &[("NOWHERE", 3)]).await;
    assert_eq!(order["status"], "rejected");
    assert_eq!(order["reason"], "Unknown SKU NOWHERE: need 3, have 0");
    let id = order["id"].as_str().unwrap();
    let notices = app.eventually_list(&format!("/v1/notifications?order_id={id}"), 1).await;
    assert_eq!(notices[0]["kind"], "rejected");
    assert_eq!(app.read(&format!("/v1/reservations?order_id={id}")).await["data"], json!([]));
    app.stop().await;
}

async fn lines_of_one_sku_are_summed(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 5).await;
    let order = app.place_and_wait("alice", &[("WIDGET-A", 3), ("WIDGET-A", 3)]).await;
    assert_eq!(order["reason"], "Insufficient WIDGET-A: need 6, have 5");
    let order = app.place_and_wait("alice", &[("WIDGET-A", 3), ("WIDGET-A", 2)]).await;
    assert_eq!((&order["status"], order["items"].as_array().unwrap().len()), (&json!("reserved"), 2));
    let reservations = app.walk(&format!("/v1/reservations?order_id={}", order["id"].as_str().unwrap())).await;
    assert_eq!(reservations[0]["lines"], json!([{ "sku": "WIDGET-A", "quantity": 5 }]));
    assert_eq!(app.stock("WIDGET-A").await, (5, 5));
    app.stop().await;
}

async fn an_order_is_reserved_as_a_whole_or_not_at_all(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 5).await;
    app.put_stock("WIDGET-B", 1).await;
    let order = app.place_and_wait("alice", &[("WIDGET-A", 2), ("WIDGET-B", 2)]).await;
    assert_eq!(
        (&order["status"], &order["reason"]),
        (&json!("rejected"), &json!("Insufficient WIDGET-B: need 2, have 1"))
    );
    assert_eq!(app.stock("WIDGET-A").await, (5, 0));
    assert_eq!(app.stock("WIDGET-B").await, (1, 0));
    app.stop().await;
}

async fn a_hundred_buyers_racing_for_ten_units_get_ten(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("HOT", 10).await;
    let buyers: Vec<String> = (0..100).map(|buyer| format!("buyer-{buyer}")).collect();
    let orders = join_all(buyers.iter().map(|buyer| app.place_and_wait(buyer, &[("HOT", 1)]))).await;
    let reserved: Vec<&Value> = orders.iter().filter(|order| order["status"] == "reserved").collect();
    let rejected: Vec<&Value> = orders.iter().filter(|order| order["status"] == "rejected").collect();
    assert_eq!((reserved.len(), rejected.len()), (10, 90));
    for order in rejected {
        assert_eq!(order["reason"], "Insufficient HOT: need 1, have 0");
    }
    assert_eq!(app.stock("HOT").await, (10, 10));
    let reservations = app.walk("/v1/reservations?sku=HOT&state=held").await;
    let holders: HashSet<&Value> = reservations.iter().map(|reservation| &reservation["order_id"]).collect();
    assert_eq!(holders, reserved.iter().map(|order| &order["id"]).collect());
    assert_eq!(reservations.len(), 10);
    app.eventually_list("/v1/notifications?kind=reserved&limit=200", 10).await;
    app.eventually_list("/v1/notifications?kind=rejected&limit=200", 90).await;
    app.stop().await;
}

async fn a_caller_who_prefers_to_wait_is_answered_with_the_outcome(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 10).await;
    let place = |prefer: &'static str| {
        let request = app.post("/v1/orders", &order("alice", &[("WIDGET-A", 1)])).header("prefer", prefer);
        async { request.send().await.unwrap() }
    };
    // Twenty seconds were allowed for, and a wait is never longer than a request may take.
    let response = place("respond-async, wait=1000").await;
    assert_eq!(response.headers()["preference-applied"], "wait=25");
    assert_eq!(response.json::<Value>().await.unwrap()["status"], "reserved");

    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let began = Instant::now();
    let response = place("wait=1").await;
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!(
        (response.status().as_u16(), &response.headers()["preference-applied"]),
        (201, &"wait=1".parse().unwrap())
    );
    let waiting: Value = response.json().await.unwrap();
    assert_eq!(waiting["status"], "placed");

    // A GET waits as well, and hears of the outcome as soon as there is one.
    let path = format!("/v1/orders/{}", waiting["id"].as_str().unwrap());
    let (answer, _) = tokio::join!(async { app.get(&path).header("prefer", "wait=20").send().await.unwrap() }, async {
        app.tell("/v1/consumers/inventory/resume", &json!({})).await
    },);
    assert_eq!(answer.headers()["preference-applied"], "wait=20");
    assert_eq!(answer.json::<Value>().await.unwrap()["status"], "reserved");
    for ignored in ["wait=soon", "handling=lenient"] {
        let response = place(ignored).await;
        assert_eq!(response.status(), 201);
        assert!(!response.headers().contains_key("preference-applied"), "{ignored}");
    }
    app.stop().await;
}

async fn a_request_id_is_echoed_or_minted_and_carried_on(db: TestDb) {
    let app = App::start(&db).await;
    let request_id = async |given: Option<&str>| {
        let request = app.get("/v1/orders");
        let request = match given {
            Some(id) => request.header("x-request-id", id),
            None => request,
        };
        request.send().await.unwrap().headers()["x-request-id"].to_str().unwrap().to_owned()
    };
    assert_eq!(request_id(Some("abc-123_X.y:z")).await, "abc-123_X.y:z");
    let minted = [request_id(None).await, request_id(None).await];
    assert_ne!(minted[0], minted[1]);
    for id in &minted {
        assert_eq!(uuid::Uuid::try_parse(id).unwrap().get_version_num(), 7, "{id}");
    }
    for unsafe_id in ["", "a b", "<script>", &"x".repeat(65)] {
        assert!(uuid::Uuid::try_parse(&request_id(Some(unsafe_id)).await).is_ok(), "{unsafe_id:?}");
    }

    let response = app.post("/v1/orders", &order("alice", &[("NOWHERE", 1)])).header("x-request-id", "trail-1");
    let order: Value = response.send().await.unwrap().json().await.unwrap();
    let id = order["id"].as_str().unwrap();
    app.eventually_list(&format!("/v1/notifications?order_id={id}"), 1).await;
    let rows = app.read(&format!("/v1/outbox?aggregate_id={id}")).await["data"].as_array().unwrap().clone();
    assert_eq!(rows.len(), 2, "order.placed and inventory.failed");
    assert!(rows.iter().all(|row| row["correlation_id"] == "trail-1"), "{rows:?}");
    app.stop().await;
}

async fn orders_are_refused_while_too_much_waits_to_go_out(db: TestDb) {
    let app = App::start_with(&db, &["--outbox-max-pending", "3"]).await;
    app.tell("/v1/consumers/relay/pause", &json!({})).await;
    for _ in 0..4 {
        app.place("a", &[("WIDGET-A", 1)]).await;
    }
    let place = async || app.post("/v1/orders", &order("a", &[("WIDGET-A", 1)])).send().await.unwrap();
    let refused = eventually("a full outbox", || async { Some(place().await).filter(|r| r.status() == 503) }).await;
    assert_eq!(refused.headers()["retry-after"], "5");
    problem(refused, 503, "outbox-full").await;
    assert_eq!(app.get("/readyz").send().await.unwrap().status(), 200, "it still serves everything else");
    app.tell("/v1/consumers/relay/resume", &json!({})).await;
    eventually("room", || async { Some(place().await).filter(|response| response.status() == 201) }).await;
    app.stop().await;
}

each_database!(
    orders_are_refused_while_too_much_waits_to_go_out,
    an_order_is_found_by_its_id_and_by_its_number,
    pages_of_orders_have_no_gaps_and_no_repeats,
    filters_narrow_a_list_and_hold_on_every_page,
    an_unknown_sku_rejects_the_order_and_not_the_request,
    lines_of_one_sku_are_summed,
    an_order_is_reserved_as_a_whole_or_not_at_all,
    a_hundred_buyers_racing_for_ten_units_get_ten,
    a_caller_who_prefers_to_wait_is_answered_with_the_outcome,
    a_request_id_is_echoed_or_minted_and_carried_on,
);
