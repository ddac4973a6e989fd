//! The operator's view: queues, pausing, inbox, outbox, dead letters.

use serde_json::{Value, json};

use crate::support::{App, TestDb, each_database, eventually, fields, problem, wrong_field};

const QUEUE_FIELDS: [&str; 9] =
    ["consumers", "dead_letters", "depth", "dlq_depth", "in_flight", "name", "oldest_age_ms", "paused", "stale"];

const OUTBOX_FIELDS: [&str; 12] = [
    "aggregate_id",
    "aggregate_type",
    "attempts",
    "available_at",
    "correlation_id",
    "created_at",
    "event_type",
    "id",
    "last_error",
    "published_at",
    "status",
    "target",
];

const INBOX_FIELDS: [&str; 13] = [
    "attempts",
    "consumer",
    "correlation_id",
    "deadline_at",
    "duplicates",
    "event_id",
    "event_type",
    "fenced",
    "finished_at",
    "last_error",
    "started_at",
    "state",
    "waiting_for",
];

const LETTER_FIELDS: [&str; 12] = [
    "attempts",
    "consumer",
    "correlation_id",
    "created_at",
    "error",
    "event_type",
    "id",
    "message_id",
    "queue",
    "reason",
    "state",
    "x_death",
];

async fn pause(app: &App, consumer: &str) {
    let answer = app.tell(&format!("/v1/consumers/{consumer}/pause"), &json!({})).await;
    assert_eq!(answer, json!({ "name": consumer, "paused": true }));
}

async fn resume(app: &App, consumer: &str) {
    let answer = app.tell(&format!("/v1/consumers/{consumer}/resume"), &json!({})).await;
    assert_eq!(answer, json!({ "name": consumer, "paused": false }));
}

async fn queues_say_how_full_they_are_and_why(db: TestDb) {
    let app = App::start(&db).await;
    let queues = app.read("/v1/queues").await;
    assert_eq!(fields(&queues), ["data", "next_cursor"]);
    let names: Vec<&Value> = queues["data"].as_array().unwrap().iter().map(|queue| &queue["name"]).collect();
    assert_eq!(names, ["stockade.orders", "stockade.inventory", "stockade.notifications", "stockade.ledger"]);
    for queue in queues["data"].as_array().unwrap() {
        assert_eq!(fields(queue), QUEUE_FIELDS);
    }
    let idle = eventually("an idle queue with its consumer", || async {
        Some(app.read("/v1/queues/inventory").await).filter(|queue| queue["consumers"] == 1)
    })
    .await;
    assert_eq!(app.read("/v1/queues/stockade.inventory").await["name"], idle["name"], "by its full name as well");
    assert_eq!((&idle["depth"], &idle["oldest_age_ms"], &idle["stale"]), (&json!(0), &Value::Null, &json!(false)));

    pause(&app, "inventory").await;
    for _ in 0..3 {
        app.place("alice", &[("WIDGET-A", 1)]).await;
    }
    let full = eventually("three messages waiting", || async {
        Some(app.read("/v1/queues/inventory").await).filter(|queue| queue["depth"] == 3)
    })
    .await;
    assert_eq!((&full["paused"], &full["in_flight"], &full["consumers"]), (&json!(true), &json!(0), &json!(0)));
    assert!(full["oldest_age_ms"].as_i64().unwrap() >= 0);
    assert_eq!(app.read("/v1/queues/orders").await["paused"], false);

    resume(&app, "inventory").await;
    eventually("an empty queue", || async {
        let queue = app.read("/v1/queues/inventory").await;
        (queue["depth"] == 0 && queue["in_flight"] == 0 && queue["consumers"] == 1 && queue["paused"] == false)
            .then_some(())
    })
    .await;
    app.eventually_list("/v1/notifications", 3).await;
    app.stop().await;
}

async fn a_rejected_message_is_seen_in_the_dead_letter_queue_and_then_filed(db: TestDb) {
    let app = App::start(&db).await;
    pause(&app, "dead-letters").await;
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "no JSON at all" })).await;
    let queue = eventually("a full dead-letter queue", || async {
        Some(app.read("/v1/queues/inventory").await).filter(|queue| queue["dlq_depth"] == 1)
    })
    .await;
    assert_eq!((&queue["dead_letters"], &queue["depth"]), (&json!(0), &json!(0)));
    resume(&app, "dead-letters").await;
    eventually("a filed letter", || async {
        let queue = app.read("/v1/queues/inventory").await;
        (queue["dlq_depth"] == 0 && queue["dead_letters"] == 1).then_some(())
    })
    .await;
    app.stop().await;
}

async fn a_pause_survives_a_restart(db: TestDb) {
    let app = App::start(&db).await;
    for consumer in ["inventory", "relay", "dead-letters"] {
        pause(&app, consumer).await;
    }
    pause(&app, "inventory").await; // pausing what rests is no error
    app.stop().await;

    let app = App::start(&db).await;
    assert_eq!(app.read("/v1/queues/inventory").await["paused"], true);
    let order = app.place("alice", &[("NOWHERE", 1)]).await;
    let path = format!("/v1/outbox?aggregate_id={}", order["id"].as_str().unwrap());
    assert_eq!(app.read(&path).await["data"][0]["status"], "pending", "the relay rests");
    resume(&app, "relay").await;
    eventually("one message waiting", || async {
        (app.read("/v1/queues/inventory").await["depth"] == 1).then_some(())
    })
    .await;
    for (name, state) in [("inventory", "paused"), ("dead-letters", "paused"), ("relay", "running")] {
        eventually(&format!("{name} {state}"), async || {
            (app.read("/v1/health").await["loops"][name]["state"] == state).then_some(())
        })
        .await;
    }
    resume(&app, "inventory").await;
    app.eventually_list("/v1/notifications", 1).await;
    for path in ["/v1/consumers/nobody/pause", "/v1/consumers/nobody/resume"] {
        problem(app.post(path, &json!({})).send().await.unwrap(), 404, "not-found").await;
    }
    app.tell("/v1/consumers/ledger/pause", &json!({ "reason": "the books are being closed" })).await;
    assert_eq!(app.read("/v1/actions?limit=1").await["data"][0]["why"], "the books are being closed");
    wrong_field(app.post("/v1/consumers/ledger/resume", &json!({ "why": "x" })).send().await.unwrap(), "/why").await;
    assert_eq!(app.read("/v1/queues/ledger").await["paused"], true, "what cannot be read does nothing");
    app.stop().await;
}

async fn the_outbox_shows_what_went_out(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 10).await;
    let order = app.place_and_wait("alice", &[("A", 1)]).await;
    let id = order["id"].as_str().unwrap();
    app.eventually_list(&format!("/v1/notifications?order_id={id}"), 1).await;
    let path = format!("/v1/outbox?aggregate_id={id}&status=published");
    let rows = app.eventually_list(&path, 2).await;
    assert_eq!(fields(&rows[0]), OUTBOX_FIELDS);
    let types: Vec<&Value> = rows.iter().map(|row| &row["event_type"]).collect();
    assert_eq!(types, ["inventory.reserved", "order.placed"], "newest first");
    let placed = &rows[1];
    assert_eq!((&placed["aggregate_type"], &placed["aggregate_id"]), (&json!("order"), &order["id"]));
    assert_eq!((&placed["target"], &placed["attempts"]), (&json!(""), &json!(0)));
    assert_eq!(placed["correlation_id"], order["correlation_id"]);
    assert!(placed["published_at"].is_string() && placed["last_error"].is_null());
    assert_eq!(app.read(&format!("/v1/outbox/{}", placed["id"].as_str().unwrap())).await, *placed);
    assert_eq!(app.walk("/v1/outbox?limit=1&aggregate_type=stock_adjustment").await.len(), app_adjustments(&db).await);
    assert_eq!(app.walk("/v1/outbox?status=dead").await.len(), 0);
    app.stop().await;
}

async fn app_adjustments(db: &TestDb) -> usize {
    usize::try_from(db.count("SELECT COUNT(*) FROM inventory_adjustments").await).unwrap()
}

async fn the_inbox_shows_who_dealt_with_what(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 10).await;
    let order = app.place_and_wait("alice", &[("A", 1)]).await;
    let id = order["id"].as_str().unwrap();
    app.eventually_list(&format!("/v1/notifications?order_id={id}"), 1).await;
    app.eventually_list("/v1/inbox", 4).await;
    let rows = app.walk("/v1/inbox?limit=1").await;
    let consumers: Vec<&Value> = rows.iter().map(|row| &row["consumer"]).collect();
    assert_eq!(consumers, ["orders", "notifications", "ledger", "inventory"]);
    let row = app.read("/v1/inbox?consumer=inventory").await["data"][0].clone();
    assert_eq!(fields(&row), INBOX_FIELDS);
    assert_eq!((&row["event_type"], &row["state"]), (&json!("order.placed"), &json!("processed")));
    assert_eq!((&row["attempts"], &row["duplicates"]), (&json!(1), &json!(0)));
    assert_eq!((&row["correlation_id"], &row["last_error"]), (&order["correlation_id"], &Value::Null));
    assert!(row["started_at"].is_string() && row["finished_at"].is_string());
    let path = format!("/v1/inbox/inventory/{}", row["event_id"].as_str().unwrap());
    assert_eq!(app.read(&path).await, row);
    let by_event = app.read(&format!("/v1/inbox?event_id={}", row["event_id"].as_str().unwrap())).await;
    assert_eq!((&by_event["data"][0]["consumer"], &by_event["data"][1]), (&json!("ledger"), &row));
    assert_eq!(app.walk("/v1/inbox?state=dead").await.len(), 0);

    assert_eq!(app.walk("/v1/inbox?min_duplicates=1").await.len(), 0);
    let body = db.event_body(id, "order.placed").await;
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": body, "times": 3 })).await;
    let row = app.eventually_list("/v1/inbox?min_duplicates=3", 1).await;
    assert_eq!((&row[0]["consumer"], &row[0]["duplicates"]), (&json!("inventory"), &json!(3)));
    assert_eq!(app.stock("A").await, (10, 1), "no copy has an effect");
    app.stop().await;
}

async fn dead_letters_keep_the_bytes_and_the_reason(db: TestDb) {
    let app = App::start(&db).await;
    let text = "{\"no\": \"envelope\", \"ünï\": 1";
    app.tell(
        "/v1/lab/publish",
        &json!({ "queue": "inventory", "body": text, "message_id": "m-1", "headers": { "x-colour": "blue" } }),
    )
    .await;
    // "/4D/AP8=" is bytes that no text has.
    app.tell("/v1/lab/publish", &json!({ "queue": "notifications", "body_base64": "/4D/AP8=" })).await;
    app.eventually_list("/v1/dead-letters", 2).await;
    let rows = app.walk("/v1/dead-letters?limit=1").await;
    assert_eq!(rows.len(), 2);
    let row = app.read("/v1/dead-letters?queue=inventory").await["data"][0].clone();
    assert_eq!(app.read("/v1/dead-letters?queue=stockade.inventory").await["data"][0], row);
    assert_eq!(fields(&row), LETTER_FIELDS);
    assert_eq!((&row["queue"], &row["consumer"]), (&json!("stockade.inventory"), &json!("inventory")));
    assert_eq!((&row["reason"], &row["state"]), (&json!("not-json"), &json!("open")));
    assert_eq!(row["message_id"], "m-1");
    assert!(row["error"].as_str().is_some_and(|error| !error.is_empty()));
    assert_eq!(row["x_death"][0]["queue"], "stockade.inventory");

    let letter = app.read(&format!("/v1/dead-letters/{}", row["id"].as_str().unwrap())).await;
    assert_eq!((&letter["body"], &letter["body_encoding"]), (&json!(text), &json!("utf8")));
    assert_eq!(letter["headers"]["x-colour"], "blue");
    let binary =
        app.read("/v1/dead-letters?consumer=notifications&reason=not-utf8&state=open").await["data"][0].clone();
    let letter = app.read(&format!("/v1/dead-letters/{}", binary["id"].as_str().unwrap())).await;
    assert_eq!((&letter["body"], &letter["body_encoding"]), (&json!("/4D/AP8="), &json!("base64")));
    assert_eq!(app.walk("/v1/dead-letters?state=discarded").await.len(), 0);
    assert_eq!(app.walk("/v1/dead-letters?reason=too-deep").await.len(), 0);

    // The consumer goes on: what comes after the poison is dealt with.
    app.put_stock("A", 1).await;
    assert_eq!(app.place_and_wait("alice", &[("A", 1)]).await["status"], "reserved");
    app.stop().await;
}

async fn rows_that_were_given_up_on_are_published_again(db: TestDb) {
    let app = App::start(&db).await;
    for customer in ["alice", "bob", "carol"] {
        app.place_and_wait(customer, &[("NOWHERE", 1)]).await;
    }
    app.eventually_list("/v1/notifications", 3).await;
    app.stop().await;
    // As a broker leaves them that refused them too often.
    let opened = db.open(stockade_kernel::clock::Clock::System).await;
    let mut tx = opened.begin().await.unwrap();
    stockade_kernel::on!(tx, c => sqlx::query(
        "UPDATE messaging_outbox SET status = 'dead', attempts = 10, published_at = NULL, last_error = 'no route'
         WHERE aggregate_type = 'order'",
    ).execute(c).await.map(drop))
    .unwrap();
    tx.commit().await.unwrap();
    opened.close().await;
    drop(opened);
    let app = App::start(&db).await;
    let dead = app.eventually_list("/v1/outbox?status=dead", 3).await;
    assert_eq!(app.read("/v1/health").await["outbox"]["dead"], 3);
    let retry = format!("/v1/outbox/{}/retry", dead[0]["id"].as_str().unwrap());
    let row = app.tell(&retry, &json!({ "reason": "bound again" })).await;
    assert_eq!(fields(&row), OUTBOX_FIELDS);
    assert_eq!((&row["status"], &row["attempts"]), (&json!("pending"), &json!(0)));
    problem(app.post(&retry, &json!({})).send().await.unwrap(), 409, "not-dead").await;
    problem(app.post("/v1/outbox/none/retry", &json!({})).send().await.unwrap(), 404, "not-found").await;
    let one = json!({ "aggregate_type": "order", "aggregate_id": dead[1]["aggregate_id"] });
    assert_eq!(app.tell("/v1/outbox/retry", &one).await, json!({ "retried": 1 }));
    assert_eq!(app.tell("/v1/outbox/retry", &json!({})).await, json!({ "retried": 1 }));
    assert_eq!(app.tell("/v1/outbox/retry", &json!({})).await, json!({ "retried": 0 }));
    app.eventually_list("/v1/outbox?status=published&aggregate_type=order", 3).await;
    // Who did it, and that consumers which had dealt with them did nothing.
    let done = app.read("/v1/actions?action=outbox.retry").await["data"].as_array().unwrap().clone();
    assert_eq!(done.len(), 3, "not what found nothing: {done:?}");
    assert_eq!(done[2]["why"], "bound again");
    app.eventually_list("/v1/inbox?consumer=inventory&min_duplicates=1", 3).await;
    assert_eq!(app.read("/v1/notifications").await["data"].as_array().unwrap().len(), 3);
    app.stop().await;
}

each_database!(
    rows_that_were_given_up_on_are_published_again,
    queues_say_how_full_they_are_and_why,
    a_rejected_message_is_seen_in_the_dead_letter_queue_and_then_filed,
    a_pause_survives_a_restart,
    the_outbox_shows_what_went_out,
    the_inbox_shows_who_dealt_with_what,
    dead_letters_keep_the_bytes_and_the_reason,
);
