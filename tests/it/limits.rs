//! Too much of anything is refused, cheaply, and keeps nobody else out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use reqwest::StatusCode;
use serde_json::json;
use stockade::access::Secret;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::support::{Api, App, DEADLINE, Engine, Server, TestDb, eventually, order, problem};

async fn start(flags: &[&str]) -> (App, TestDb) {
    let db = TestDb::new(Engine::Sqlite).await;
    (App::start_with(&db, flags).await, db)
}

async fn connect(app: &App) -> TcpStream {
    TcpStream::connect(app.running.address).await.unwrap()
}

/// What comes until the other side closes.
async fn rest(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let read = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut text)).await.expect("it is closed in time");
    read.map(|_| ()).unwrap_or_default();
    String::from_utf8_lossy(&text).into_owned()
}

/// Places an order, whatever comes of it but that there was no place for it just then.
async fn place(api: &Api) {
    let body = order("alice", &[("WIDGET-A", 1)]);
    while api.post("/v1/orders", &body).send().await.unwrap().text().await.unwrap().contains("overloaded") {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn whoever_trickles_headers_or_says_nothing_is_hung_up_on() {
    let (app, _db) = start(&["--http-header-timeout", "2s"]).await;
    let (mut silent, mut slow, mut kept) = (connect(&app).await, connect(&app).await, connect(&app).await);
    slow.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-").await.unwrap();
    kept.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let trickled = async {
        let mut pace = tokio::time::interval(Duration::from_millis(100));
        while slow.write_all(b"a").await.is_ok() {
            pace.tick().await;
        }
    };
    tokio::time::timeout(DEADLINE, trickled).await.expect("a trickle is cut off");
    assert!(!rest(&mut silent).await.contains("200 OK"));
    assert!(rest(&mut kept).await.contains("200 OK"), "answered, and not kept for ever");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn whoever_does_not_read_is_hung_up_on() {
    let (app, _db) = start(&["--http-header-timeout", "1s", "--http-max-connections", "1"]).await;
    let mut deaf = connect(&app).await;
    // More answers than the buffers of both sides hold.
    let asked = "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(500);
    deaf.write_all(asked.as_bytes()).await.unwrap();
    tokio::time::timeout(DEADLINE, app.read("/v1/stock")).await.expect("its place is somebody else's");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn what_is_sent_ahead_of_its_turn_waits_with_the_sender() {
    let (app, _db) = start(&[]).await;
    app.post("/v1/consumers/inventory/pause", &json!({})).send().await.unwrap();
    let body = order("alice", &[("WIDGET-A", 1)]).to_string();
    let ask = |prefer: &str| {
        let head = "POST /v1/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
        format!("{head}\r\n{prefer}Content-Length: {}\r\n\r\n{body}", body.len())
    };
    let socket = TcpSocket::new_v4().unwrap();
    // What the sender's own system keeps for it is not what this is about.
    socket.set_send_buffer_size(4096).unwrap();
    let mut ahead = socket.connect(app.running.address).await.unwrap();
    // Nobody reserves anything, so this one is not answered for a while.
    ahead.write_all(ask("Prefer: wait=20\r\n").as_bytes()).await.unwrap();
    let next = ask("");
    let mut taken = 0;
    while let Ok(sent) = tokio::time::timeout(Duration::from_secs(1), ahead.write(next.as_bytes())).await {
        taken += sent.unwrap();
        assert!(taken < 64 * 1024, "the server's system takes ever more of what it cannot look at yet");
    }
    drop(ahead);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_slow_body_is_given_up_on_and_takes_no_place() {
    let (app, _db) = start(&["--http-header-timeout", "1s", "--http-max-in-flight", "1"]).await;
    let mut slow = connect(&app).await;
    let head =
        "POST /v1/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{";
    slow.write_all(head.as_bytes()).await.unwrap();
    app.read("/v1/stock").await;
    let mut answer = vec![0; 16];
    tokio::time::timeout(DEADLINE, slow.read_exact(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&answer));
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_body_may_take_its_time_while_it_keeps_coming() {
    const TIMEOUT: Duration = Duration::from_secs(3);
    let (app, _db) = start(&["--http-header-timeout", "3s"]).await;
    let body = order("alice", &[("WIDGET-A", 1)]).to_string();
    let head = "POST /v1/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
    let mut steady = connect(&app).await;
    steady.write_all(format!("{head}\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes()).await.unwrap();
    let began = Instant::now();
    // One part each fifth of the timeout, for longer than the timeout.
    let mut pace = tokio::time::interval(TIMEOUT / 5);
    for part in body.as_bytes().chunks(body.len() / 7) {
        pace.tick().await;
        steady.write_all(part).await.unwrap();
    }
    assert!(began.elapsed() > TIMEOUT, "sent within {:?}", began.elapsed());
    let mut answer = vec![0; 12];
    tokio::time::timeout(DEADLINE, steady.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(String::from_utf8_lossy(&answer), "HTTP/1.1 201");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn idle_connections_do_not_slow_an_honest_client() {
    let (app, _db) = start(&["--http-header-timeout", "60s"]).await;
    let idle: Vec<TcpStream> = join_all((0..1000).map(|_| connect(&app))).await;
    let reads = async {
        for _ in 0..20 {
            app.read("/v1/stock").await;
        }
    };
    // Far below the header timeout, at which the idle connections would be closed.
    tokio::time::timeout(DEADLINE, reads).await.expect("twenty reads beside idle connections");
    drop(idle);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn connections_beyond_the_limit_wait_for_a_place() {
    let (app, _db) = start(&["--http-max-connections", "2", "--http-header-timeout", "2s"]).await;
    let began = Instant::now();
    let _taken = [connect(&app).await, connect(&app).await];
    app.read("/v1/stock").await;
    assert!(began.elapsed() >= Duration::from_secs(2), "it had to wait until one was closed: {:?}", began.elapsed());
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn beyond_what_can_be_in_hand_requests_are_told_to_come_again() {
    let (app, _db) = start(&["--http-max-in-flight", "2"]).await;
    app.put_stock("A", 1000).await;
    let customers: Vec<String> = (0..200).map(|n| format!("customer-{n}")).collect();
    let sent =
        join_all(customers.iter().map(|customer| app.post("/v1/orders", &order(customer, &[("A", 1)])).send())).await;
    let (mut placed, mut refused) = (BTreeMap::new(), BTreeSet::new());
    for (customer, response) in customers.iter().zip(sent) {
        let response = response.unwrap();
        if response.status() == StatusCode::CREATED {
            let order: serde_json::Value = response.json().await.unwrap();
            placed.insert(customer.clone(), order["id"].clone());
            continue;
        }
        assert_eq!(
            (response.status(), &response.headers()["retry-after"]),
            (StatusCode::SERVICE_UNAVAILABLE, &"1".parse().unwrap())
        );
        // A busy machine may make the database slow, too; then the client cannot know whether the order exists.
        let problem: serde_json::Value = response.json().await.unwrap();
        if problem["code"] == "overloaded" {
            refused.insert(customer.clone());
        }
    }
    assert!(!placed.is_empty() && !refused.is_empty(), "{} placed, {} refused", placed.len(), refused.len());
    let mut stored: BTreeMap<String, Vec<serde_json::Value>> = BTreeMap::new();
    for order in app.walk("/v1/orders").await {
        stored.entry(order["customer_id"].as_str().unwrap().to_owned()).or_default().push(order["id"].clone());
    }
    for customer in &customers {
        let orders = stored.remove(customer).unwrap_or_default();
        if let Some(id) = placed.get(customer) {
            assert_eq!(orders, std::slice::from_ref(id), "{customer} has the order that was acknowledged");
        } else if refused.contains(customer) {
            assert!(orders.is_empty(), "the order of {customer} was refused: {orders:?}");
        } else {
            assert!(orders.len() <= 1, "{customer}: {orders:?}");
        }
    }
    assert!(stored.is_empty(), "orders that were not placed: {stored:?}");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn whoever_was_refused_and_comes_again_too_soon_is_kept_waiting() {
    let (app, db) = start(&["--http-max-in-flight", "1"]).await;
    // The one place is taken by an order that waits for the lock on the database.
    let raw = db.sqlite();
    raw.execute_batch("BEGIN IMMEDIATE").unwrap();
    let placing = place(&app);
    let asking = async {
        eventually("the place to be taken", async || {
            let response = app.get("/v1/stock").send().await.unwrap();
            (response.status() == StatusCode::SERVICE_UNAVAILABLE).then_some(())
        })
        .await;
        let mut eager = connect(&app).await;
        let mut ask = async |path: &str| {
            let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
            eager.write_all(request.as_bytes()).await.unwrap();
            let mut answer = vec![0; 4096];
            let length = tokio::time::timeout(DEADLINE, eager.read(&mut answer)).await.unwrap().unwrap();
            String::from_utf8_lossy(&answer[..length])[9..12].to_owned()
        };
        let began = Instant::now();
        assert_eq!((ask("/v1/stock").await, ask("/livez").await), ("503".to_owned(), "200".to_owned()));
        assert_eq!(ask("/v1/stock").await, "503");
        assert!(began.elapsed() >= Duration::from_secs(1), "after {:?}", began.elapsed());
        raw.execute_batch("ROLLBACK").unwrap();
    };
    tokio::join!(placing, asking);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_flood_is_not_fed_with_a_line_for_each_refusal() {
    let db = TestDb::new(Engine::Sqlite).await;
    let log = tempfile::NamedTempFile::new().unwrap();
    let server = Server::spawn(Server::command(&db, &["--http-max-in-flight", "1"]), log.path());
    let body = order("alice", &[("A", 1)]);
    let sent = join_all((0..100).map(|_| server.post("/v1/orders", &body).send())).await;
    let refused = sent.iter().flatten().filter(|response| response.status() == StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.count() > 0);
    assert!(server.terminate().await);
    let log = std::fs::read_to_string(log.path()).unwrap();
    assert!(!log.contains("overloaded"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn whoever_only_waits_keeps_nobody_out() {
    let (app, _db) = start(&["--http-max-in-flight", "1"]).await;
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let waiting = app.post("/v1/orders", &order("alice", &[("WIDGET-A", 1)])).header("prefer", "wait=20").send();
    let looking = async {
        // Until the order is committed its request is the one in hand.
        eventually("an order to look at", async || {
            let response = app.get("/v1/orders").send().await.unwrap();
            (response.status() == StatusCode::OK && response.text().await.unwrap().contains("alice")).then_some(())
        })
        .await;
        app.read("/v1/stock").await;
        app.tell("/v1/consumers/inventory/resume", &json!({})).await;
    };
    let (waited, ()) = tokio::join!(waiting, looking);
    let order: serde_json::Value = waited.unwrap().json().await.unwrap();
    assert_eq!(order["status"], "reserved");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn each_key_has_a_rate_of_its_own() {
    let secrets = [Secret::random(), Secret::random()];
    let entries: Vec<String> = secrets.iter().map(|secret| format!("viewer:acme:{}", secret.hash())).collect();
    let (app, _db) = start(&["--api-keys", &entries.join(","), "--rate-limit", "1", "--rate-limit-burst", "3"]).await;
    let [eager, modest] = secrets.map(|secret| app.with_key(secret.reveal()));
    let mut refused = None;
    for _ in 0..20 {
        let response = eager.get("/v1/stock").send().await.unwrap();
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            refused = Some(response);
            break;
        }
    }
    let refused = refused.expect("twenty at once are more than one a second");
    assert!(refused.headers()["ratelimit-policy"].to_str().unwrap().contains("q=3"));
    assert!(refused.headers()["ratelimit"].to_str().unwrap().contains("r=0"));
    assert!(refused.headers()["retry-after"].to_str().unwrap().parse::<u32>().unwrap() >= 1);
    problem(refused, 429, "rate-limited").await;
    modest.read("/v1/stock").await;
    let guesses = join_all((0..20).map(|guess| {
        let guesser = app.with_key(&format!("stk_{guess}"));
        async move { guesser.get("/v1/stock").send().await.unwrap().status().as_u16() }
    }));
    let guesses = guesses.await;
    assert!(guesses.contains(&429) && guesses.iter().all(|status| [401, 429].contains(status)), "{guesses:?}");
    modest.read("/v1/stock").await;
    for _ in 0..20 {
        assert_eq!(app.get("/livez").send().await.unwrap().status(), StatusCode::OK, "probes are not counted");
    }
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn to_look_for_a_session_takes_a_place() {
    let secret = Secret::random();
    let keys = format!("admin:*:{}", secret.hash());
    let (app, db) = start(&["--api-keys", &keys, "--http-max-in-flight", "1"]).await;
    let (holder, browser) = (app.with_key(secret.reveal()), app.log_in(secret.reveal()).await);
    browser.read("/v1/stock").await;
    let stranger = app.with_session(Secret::random().reveal());
    problem(stranger.get("/v1/stock").send().await.unwrap(), 401, "token-invalid").await;
    // The one place is taken by an order that waits for the lock on the database.
    let raw = db.sqlite();
    raw.execute_batch("BEGIN IMMEDIATE").unwrap();
    let placing = place(&holder);
    let asking = async {
        eventually("the place to be taken", async || {
            let response = holder.get("/v1/stock").send().await.unwrap();
            (response.status() == StatusCode::SERVICE_UNAVAILABLE).then_some(())
        })
        .await;
        for api in [&stranger, &browser] {
            problem(api.get("/v1/stock").send().await.unwrap(), 503, "overloaded").await;
            assert_eq!(api.get("/livez").send().await.unwrap().status(), StatusCode::OK);
        }
        browser.read("/v1/health").await;
        // What cannot be one is not looked for.
        for garbage in ["garbage", "stk_garbage", ""] {
            problem(app.with_session(garbage).get("/v1/stock").send().await.unwrap(), 401, "token-invalid").await;
        }
        raw.execute_batch("ROLLBACK").unwrap();
    };
    tokio::join!(placing, asking);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn an_address_may_not_guess_sessions_as_it_likes() {
    let secret = Secret::random();
    let keys = format!("viewer:acme:{}", secret.hash());
    let (app, _db) = start(&["--api-keys", &keys, "--rate-limit", "1", "--rate-limit-burst", "3"]).await;
    for token in [Secret::random().reveal(), "garbage"] {
        let guesser = app.with_session(token);
        let guesses =
            join_all((0..20).map(|_| async { guesser.get("/v1/stock").send().await.unwrap().status() })).await;
        assert!(guesses.contains(&StatusCode::TOO_MANY_REQUESTS), "{guesses:?}");
        assert!(guesses.iter().all(|status| [401, 429].contains(&status.as_u16())), "{guesses:?}");
    }
    app.with_key(secret.reveal()).read("/v1/stock").await;
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn large_heads_and_deep_bodies_are_refused() {
    let (app, _db) = start(&[]).await;
    let sized = |bytes: usize| app.get("/v1/stock").header("x-large", "a".repeat(bytes)).send();
    assert_eq!(sized(32_000).await.unwrap().status(), StatusCode::OK);
    for bytes in [33_000, 40_000, 100_000] {
        // By hand: an HTTP client reports the failed write if the server closes before everything is sent.
        let mut stream = connect(&app).await;
        let head = format!("GET /v1/stock HTTP/1.1\r\nHost: localhost\r\nX-Large: {}\r\n\r\n", "a".repeat(bytes));
        let _ = stream.write_all(head.as_bytes()).await;
        let answer = rest(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 431 "), "{bytes}: {answer}");
    }
    // A field that takes any JSON: what is read of it, however deep, must not go deeper than the stack.
    let deep = async |levels: usize| {
        let nested = format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        let body = format!("{{\"queue\":\"ledger\",\"body\":\"x\",\"headers\":{{\"x-deep\":{nested}}}}}");
        let request = app.client.post(format!("{}/v1/lab/publish", app.url)).header("content-type", "application/json");
        request.body(body).send().await.unwrap()
    };
    assert_ne!(deep(100).await.status(), StatusCode::BAD_REQUEST);
    for levels in [130, 10_000] {
        problem(deep(levels).await, 400, "malformed-json").await;
    }
    let large = json!({ "queue": "ledger", "body": "x".repeat(1024 * 1024) });
    assert_eq!(app.post("/v1/lab/publish", &large).send().await.unwrap().status(), 202, "the lab takes more");
    let response = app.post("/v1/orders", &large).send().await.unwrap();
    problem(response, 413, "body-too-large").await;
    app.stop().await;
}
