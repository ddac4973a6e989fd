//! What is on the shelf, what is held of it, and what customers are told.

use serde_json::{Value, json};

use crate::support::{App, TestDb, each_database, fields, problem, wrong_field};

async fn stock_is_put_adjusted_and_listed(db: TestDb) {
    let app = App::start(&db).await;
    for (sku, on_hand) in [("C", 3), ("A", 1), ("B", 2), ("D", 0)] {
        app.put_stock(sku, on_hand).await;
    }
    let stock = app.read("/v1/stock/A").await;
    assert_eq!(fields(&stock), ["available", "on_hand", "reserved", "sku", "updated_at"]);
    assert_eq!((&stock["sku"], &stock["on_hand"], &stock["available"]), (&json!("A"), &json!(1), &json!(1)));

    let response =
        app.post("/v1/stock/A/adjustments", &json!({ "delta": 9, "reason": "delivery" })).send().await.unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["location"]), (201, &"/v1/stock/A".parse().unwrap()));
    assert_eq!(response.json::<Value>().await.unwrap()["on_hand"], 10);
    app.tell("/v1/stock/A/adjustments", &json!({ "delta": -4, "reason": "broken" })).await;
    app.place_and_wait("alice", &[("A", 2)]).await;
    let stock = app.read("/v1/stock/A").await;
    assert_eq!((&stock["on_hand"], &stock["reserved"], &stock["available"]), (&json!(6), &json!(2), &json!(4)));

    let rows = app.walk("/v1/stock?limit=1").await;
    let ours: Vec<&Value> = rows.iter().map(|row| &row["sku"]).filter(|sku| sku.as_str().unwrap().len() == 1).collect();
    assert_eq!(ours, ["A", "B", "C", "D"]);
    assert_eq!(
        db.count("SELECT COUNT(*) FROM inventory_stock").await,
        i64::try_from(rows.len()).unwrap(),
        "each SKU is on one page"
    );
    let explained = "SELECT COUNT(*) FROM inventory_stock s WHERE on_hand <> (SELECT COALESCE(SUM(delta), 0) \
                     FROM inventory_adjustments a WHERE a.group_id = s.group_id AND a.sku = s.sku)";
    assert_eq!(db.count(explained).await, 0, "adjustments explain what is on hand");
    app.stop().await;
}

async fn stock_never_goes_below_what_is_held(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 5).await;
    app.place_and_wait("alice", &[("A", 3)]).await;
    let put = |on_hand: i64| app.put("/v1/stock/A", &json!({ "on_hand": on_hand })).send();
    let adjust = |delta: i64| app.post("/v1/stock/A/adjustments", &json!({ "delta": delta, "reason": "x" })).send();
    problem(put(2).await.unwrap(), 409, "would-go-negative").await;
    problem(adjust(-3).await.unwrap(), 409, "would-go-negative").await;
    problem(adjust(-1_000_000_000).await.unwrap(), 409, "would-go-negative").await;
    assert_eq!(app.stock("A").await, (5, 3), "a refusal changes nothing");
    assert_eq!(adjust(-2).await.unwrap().status(), 201);
    assert_eq!(put(3).await.unwrap().status(), 200, "down to what is held, and putting what is there, are fine");
    assert_eq!(app.stock("A").await, (3, 3));
    app.stop().await;
}

async fn wrong_changes_of_stock_are_refused(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 5).await;
    let put = |body: Value| app.put("/v1/stock/A", &body).send();
    for on_hand in [json!(-1), json!(1_000_000_001), json!(1.5), json!("5"), json!(null), json!(9e18), json!(u64::MAX)]
    {
        wrong_field(put(json!({ "on_hand": on_hand })).await.unwrap(), "/on_hand").await;
    }
    let adjust = |body: Value| app.post("/v1/stock/A/adjustments", &body).send();
    for delta in [json!(0), json!(i64::MIN), json!(i64::MAX), json!(0.5), json!("1")] {
        wrong_field(adjust(json!({ "delta": delta, "reason": "x" })).await.unwrap(), "/delta").await;
    }
    for reason in ["", "a\u{0}b", "line\nbreak", &"x".repeat(201)] {
        wrong_field(adjust(json!({ "delta": 1, "reason": reason })).await.unwrap(), "/reason").await;
    }
    // In range by itself, past the limit together with what is there.
    problem(adjust(json!({ "delta": 1_000_000_000, "reason": "x" })).await.unwrap(), 422, "validation").await;
    let unknown =
        app.post("/v1/stock/NOWHERE/adjustments", &json!({ "delta": 1, "reason": "x" })).send().await.unwrap();
    problem(unknown, 404, "not-found").await;
    problem(app.get("/v1/stock/NOWHERE").send().await.unwrap(), 404, "not-found").await;
    let long = format!("/v1/stock/{}", "x".repeat(65));
    problem(app.put(&long, &json!({ "on_hand": 1 })).send().await.unwrap(), 422, "validation").await;
    assert_eq!(app.stock("A").await, (5, 0));
    app.stop().await;
}

/// SKUs are names that people give: slashes, spaces, percent signs and umlauts included.
async fn any_plain_text_is_a_sku(db: TestDb) {
    let app = App::start(&db).await;
    for (sku, encoded) in [("A/B", "A%2FB"), ("50 %", "50%20%25"), ("Schürze", "Sch%C3%BCrze"), ("a?b#c", "a%3Fb%23c")]
    {
        app.put_stock(encoded, 5).await;
        let adjusted = app.post(&format!("/v1/stock/{encoded}/adjustments"), &json!({ "delta": 1, "reason": "x" }));
        let response = adjusted.send().await.unwrap();
        let location = response.headers()["location"].to_str().expect("an encoded path").to_owned();
        let stock = app.read(&location).await;
        assert_eq!((&stock["sku"], &stock["on_hand"]), (&json!(sku), &json!(6)));
        let order = app.place_and_wait("alice", &[(sku, 2)]).await;
        assert_eq!(order["status"], "reserved");
        let found = app.walk(&format!("/v1/reservations?sku={encoded}")).await;
        assert_eq!(found[0]["lines"], json!([{ "sku": sku, "quantity": 2 }]));
    }
    app.stop().await;
}

async fn reservations_and_notices_are_found_by_what_they_are_for(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 100).await;
    app.put_stock("B", 100).await;
    let mut orders = Vec::new();
    for sku in ["A", "B", "A", "B", "A"] {
        orders.push(app.place_and_wait("alice", &[(sku, 1)]).await);
    }
    app.place_and_wait("bob", &[("NOWHERE", 1)]).await;
    app.eventually_list("/v1/notifications", 6).await;

    let id = orders[0]["id"].as_str().unwrap();
    let reservation = app.read(&format!("/v1/reservations?order_id={id}")).await["data"][0].clone();
    assert_eq!(fields(&reservation), ["created_at", "id", "lines", "number", "order_id", "state", "updated_at"]);
    assert_eq!((&reservation["state"], &reservation["order_id"]), (&json!("held"), &orders[0]["id"]));
    let number = reservation["number"].as_str().unwrap();
    assert!(number.starts_with("RES-") && number.len() == 12, "{number}");
    assert_eq!(app.read(&format!("/v1/reservations/{number}")).await, reservation);
    let path = format!("/v1/reservations/{}", reservation["id"].as_str().unwrap());
    assert_eq!(app.read(&path).await, reservation);
    assert_eq!(app.walk("/v1/reservations?limit=2").await.len(), 5);
    assert_eq!(app.walk("/v1/reservations?limit=2&sku=A").await.len(), 3);
    assert_eq!(app.walk("/v1/reservations?limit=2&state=held").await.len(), 5);
    assert_eq!(app.walk("/v1/reservations?limit=2&state=released").await.len(), 0);

    let notices = app.walk("/v1/notifications?limit=4").await;
    assert_eq!(notices.len(), 6);
    let all = ["channel", "created_at", "event_id", "id", "kind", "last_error", "order_id", "state", "updated_at"];
    assert_eq!(fields(&notices[0]), all);
    assert!(notices.iter().all(|notice| notice["channel"] == "log" && notice["state"] == "sent"));
    assert_eq!(app.walk("/v1/notifications?limit=2&kind=reserved").await.len(), 5);
    assert_eq!(app.walk("/v1/notifications?kind=rejected").await.len(), 1);
    assert_eq!(app.walk("/v1/notifications?state=failed").await.len(), 0);
    let one = app.walk(&format!("/v1/notifications?order_id={id}")).await;
    assert_eq!((one.len(), &one[0]["kind"]), (1, &json!("reserved")));
    app.stop().await;
}

each_database!(
    stock_is_put_adjusted_and_listed,
    stock_never_goes_below_what_is_held,
    wrong_changes_of_stock_are_refused,
    any_plain_text_is_a_sku,
    reservations_and_notices_are_found_by_what_they_are_for,
);
