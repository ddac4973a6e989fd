//! One key, one order: however often, however many at once, wherever they arrive.

use std::collections::HashSet;

use futures_util::future::join_all;
use reqwest::Response;
use serde_json::{Value, json};

use crate::support::{
    App, Engine, Server, TestDb, each_database, each_database_on_rabbit, http_client, order, problem,
};

const COPIES: usize = 50;

fn is_replay(response: &Response) -> bool {
    response.headers().get("idempotent-replayed").is_some_and(|value| value == "true")
}

async fn place(app: &App, key: &str, body: &Value) -> Response {
    app.post("/v1/orders", body).header("idempotency-key", key).send().await.unwrap()
}

async fn a_repeat_answers_with_the_first_order_as_it_is_now(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 10).await;
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let body = order("alice", &[("A", 2)]);
    let first = place(&app, "key-1", &body).await;
    assert_eq!((first.status().as_u16(), is_replay(&first)), (201, false));
    let location = first.headers()["location"].clone();
    let first: Value = first.json().await.unwrap();
    assert_eq!(first["status"], "placed");
    app.tell("/v1/consumers/inventory/resume", &json!({})).await;

    let request = app.post("/v1/orders", &body).header("idempotency-key", "key-1").header("prefer", "wait=20");
    let replay = request.send().await.unwrap();
    assert_eq!((replay.status().as_u16(), is_replay(&replay)), (201, true));
    assert_eq!(replay.headers()["location"], location);
    let replay: Value = replay.json().await.unwrap();
    assert_eq!((&replay["id"], &replay["status"]), (&first["id"], &json!("reserved")));
    assert_eq!(replay["correlation_id"], first["correlation_id"], "the order keeps the id of its first request");
    assert_eq!(app.walk("/v1/orders").await.len(), 1);
    assert_eq!(app.stock("A").await, (10, 2));
    app.stop().await;
}

async fn a_key_survives_a_restart(db: TestDb) {
    let app = App::start(&db).await;
    let body = order("alice", &[("A", 1)]);
    let first: Value = place(&app, "key-1", &body).await.json().await.unwrap();
    app.stop().await;
    let app = App::start(&db).await;
    let replay = place(&app, "key-1", &body).await;
    assert!(is_replay(&replay));
    assert_eq!(replay.json::<Value>().await.unwrap()["id"], first["id"]);
    app.stop().await;
}

async fn another_body_under_a_key_is_refused(db: TestDb) {
    let app = App::start(&db).await;
    let first: Value = place(&app, "key-1", &order("alice", &[("A", 1)])).await.json().await.unwrap();
    for other in [order("alice", &[("A", 2)]), order("bob", &[("A", 1)])] {
        let refused = problem(place(&app, "key-1", &other).await, 422, "idempotency-key-reused").await;
        assert!(refused["detail"].as_str().unwrap().contains("fingerprint"), "{refused}");
    }
    // The first use stands.
    let replay = place(&app, "key-1", &order("alice", &[("A", 1)])).await;
    assert!(is_replay(&replay));
    assert_eq!(replay.json::<Value>().await.unwrap()["id"], first["id"]);
    assert_eq!(app.walk("/v1/orders").await.len(), 1);
    app.stop().await;
}

async fn other_keys_and_no_key_place_other_orders(db: TestDb) {
    let app = App::start(&db).await;
    let body = order("alice", &[("A", 1)]);
    for key in ["a", "A", "a "] {
        // A header's value ends where its text does: the third is the first again.
        assert_eq!(is_replay(&place(&app, key, &body).await), key == "a ", "{key:?}");
    }
    app.place("alice", &[("A", 1)]).await;
    app.place("alice", &[("A", 1)]).await;
    assert_eq!(app.walk("/v1/orders").await.len(), 4);
    app.stop().await;
}

async fn a_quoted_key_is_the_bare_one(db: TestDb) {
    let app = App::start(&db).await;
    let body = order("alice", &[("A", 1)]);
    let bare: Value = place(&app, "key-1", &body).await.json().await.unwrap();
    let quoted = place(&app, "\"key-1\"", &body).await;
    assert!(is_replay(&quoted));
    assert_eq!(quoted.json::<Value>().await.unwrap()["id"], bare["id"]);
    app.stop().await;
}

async fn a_request_that_failed_does_not_burn_its_key(db: TestDb) {
    let app = App::start(&db).await;
    problem(place(&app, "key-1", &order("alice", &[("A", 0)])).await, 422, "validation").await;
    problem(place(&app, "key-1", &order("alice", &[])).await, 422, "validation").await;
    let placed = place(&app, "key-1", &order("alice", &[("A", 1)])).await;
    assert_eq!((placed.status().as_u16(), is_replay(&placed)), (201, false));
    app.stop().await;
}

/// All answers to copies of one request: one placed the order, the others tell of it.
async fn check_copies(answers: Vec<Response>) -> Value {
    let first = answers.iter().filter(|answer| !is_replay(answer)).count();
    let created = answers.iter().filter(|answer| answer.status() == 201).count();
    assert_eq!((created, first), (answers.len(), 1), "every copy is a 201 and one is no replay");
    let orders: Vec<Value> = join_all(answers.into_iter().map(|answer| async { answer.json().await.unwrap() })).await;
    let ids: HashSet<&str> = orders.iter().map(|order| order["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 1, "all of them the same order");
    orders[0]["id"].clone()
}

async fn fifty_at_once_with_one_key_place_one_order(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("A", 100).await;
    let body = order("alice", &[("A", 1)]);
    let answers = join_all((0..COPIES).map(|_| place(&app, "key-1", &body))).await;
    let id = check_copies(answers).await;
    let orders = app.walk("/v1/orders").await;
    assert_eq!((orders.len(), &orders[0]["id"]), (1, &id));
    app.eventually_list("/v1/notifications", 1).await;
    assert_eq!(app.stock("A").await, (100, 1));
    app.stop().await;
}

/// Copies with one body, and others with another: whichever came first stands, and only its copies are replays.
async fn fifty_at_once_with_two_bodies_place_one_order(db: TestDb) {
    let app = App::start(&db).await;
    let bodies = [order("alice", &[("A", 1)]), order("bob", &[("A", 2)])];
    let answers = join_all((0..COPIES).map(|copy| place(&app, "key-1", &bodies[copy % 2]))).await;
    let (placed, refused): (Vec<Response>, Vec<Response>) = answers.into_iter().partition(|a| a.status() == 201);
    assert_eq!((placed.len(), refused.len()), (COPIES / 2, COPIES / 2));
    check_copies(placed).await;
    for answer in refused {
        problem(answer, 422, "idempotency-key-reused").await;
    }
    assert_eq!(app.walk("/v1/orders").await.len(), 1);
    app.stop().await;
}

/// One bad order among the copies of a commit group fails by itself.
async fn fifty_keys_at_once_place_fifty_orders(db: TestDb) {
    let app = App::start(&db).await;
    let body = order("alice", &[("A", 1)]);
    let keys: Vec<String> = (0..COPIES).map(|copy| format!("key-{copy}")).collect();
    let answers = join_all(keys.iter().map(|key| place(&app, key, &body))).await;
    assert!(answers.iter().all(|answer| answer.status() == 201 && !is_replay(answer)));
    assert_eq!(app.walk("/v1/orders").await.len(), COPIES);
    app.stop().await;
}

each_database!(
    a_repeat_answers_with_the_first_order_as_it_is_now,
    a_key_survives_a_restart,
    another_body_under_a_key_is_refused,
    other_keys_and_no_key_place_other_orders,
    a_quoted_key_is_the_bare_one,
    a_request_that_failed_does_not_burn_its_key,
    fifty_at_once_with_one_key_place_one_order,
    fifty_at_once_with_two_bodies_place_one_order,
    fifty_keys_at_once_place_fifty_orders,
);

each_database_on_rabbit!(
    a_repeat_answers_with_the_first_order_as_it_is_now,
    a_key_survives_a_restart,
    another_body_under_a_key_is_refused,
    other_keys_and_no_key_place_other_orders,
    a_quoted_key_is_the_bare_one,
    a_request_that_failed_does_not_burn_its_key,
    fifty_at_once_with_one_key_place_one_order,
    fifty_at_once_with_two_bodies_place_one_order,
    fifty_keys_at_once_place_fifty_orders,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn two_servers_on_one_postgres_place_one_order_per_key() {
    let db = TestDb::new(Engine::Postgres).await;
    let servers = [Server::start(&db, &[]), Server::start(&db, &[])];
    let client = http_client().build().unwrap();
    let body = order("alice", &[("A", 1)]);
    for round in 0..5 {
        let key = format!("key-{round}");
        let answers = join_all((0..COPIES).map(|copy| {
            let request = client.post(format!("{}/v1/orders", servers[copy % 2].url)).json(&body);
            async { request.header("idempotency-key", &key).send().await.unwrap() }
        }))
        .await;
        check_copies(answers).await;
    }
    assert_eq!(db.count("SELECT COUNT(*) FROM orders_orders").await, 5);
    for server in servers {
        assert!(server.terminate().await);
    }
}
