//! The process dies once before and once after every commit, publish and acknowledgement that a server gets to, and the
//! next one finishes the work. The points are found by running, not named: see `stockade_kernel::crash_points`.
//!
//! A tour uses everything that writes: the lives of orders, stock, retries, poison, deferred events, redrives, replays,
//! pauses, keys, sessions, a deleted queue, events that kill the process. Each new point on the way kills the server, so
//! a tour begins again and again until one gets through. A step in the sources that no tour reaches fails the test.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::LazyLock;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use stockade::access::Secret;
use stockade_kernel::clock::mint_id;
use tokio::time::Instant;

use super::is_abort;
use crate::rabbit::Stranger;
use crate::support::{
    Api, DEADLINE, Reply, Server, TestDb, Webhooks, assert_audited, each_database, each_database_on_rabbit, eventually,
    under_way, until_finished_and_audited, witness,
};

/// How long a step of a tour waits for what it needs; the server may be dead, and the next tour has another try.
const PATIENCE: Duration = Duration::from_secs(3);

/// Leases so short that a server renews them.
const FLAGS: [&str; 10] =
    ["--poll", "200ms", "--outbox-poll", "200ms", "--lease", "1s", "--retry-base", "50ms", "--retry-cap", "200ms"];

/// The messages per second of the replay to be made unreadable; no other job has this rate.
const UNREADABLE_RATE: i64 = 2;

/// More deaths than there are points.
const DEATHS_MAX: usize = 300;

/// Events that the witness fails to handle, by their customer, and the commits that they lead to.
const FAULTS: &[(&str, &[&str])] = &[
    (
        witness::KILLS,
        &[
            "crates/kernel/src/messaging/consumer/batch.rs run_alone#1",
            "crates/kernel/src/messaging/consumer/batch.rs run_alone#3",
        ],
    ),
    (witness::DEFERRED_PANICS, &["crates/kernel/src/messaging/waiting/mod.rs blame_kept#1"]),
    (witness::DEFERRED_KILLS, &["crates/kernel/src/messaging/waiting/mod.rs attempt_due#1"]),
    (witness::DEFERRED_UNAVAILABLE, &["crates/kernel/src/messaging/waiting/mod.rs run_due#1"]),
];

/// Times that all tours are made, if need be.
const ROUNDS_MAX: usize = 4;

/// The commits that redrives and replays lead to.
const JOBS: &[&str] = &[
    "crates/kernel/src/messaging/jobs/runner.rs",
    "src/operations/jobs.rs",
    "src/operations/redrives.rs",
    "src/operations/replays.rs",
];

/// Steps of the embedded queue, and those of a broker.
const EMBEDDED_ONLY: &[&str] =
    &["crates/kernel/src/messaging/transport/table/", "crates/kernel/src/messaging/relay.rs hand_on"];
const BROKER_ONLY: &[&str] = &[
    "crates/kernel/src/messaging/resync.rs",
    "crates/kernel/src/messaging/relay.rs publish_due",
    "crates/kernel/src/messaging/relay.rs publish#",
    "crates/kernel/src/messaging/relay.rs settle",
];

/// The database of a tour is migrated already; migrations have a test of their own below.
const MIGRATING: &str = "crates/kernel/src/db/migrate.rs migrate#1";

struct Tours<'a> {
    db: &'a TestDb,
    /// The points at which a server has died, one a line.
    deaths: PathBuf,
    log: PathBuf,
    key: String,
    flags: Vec<String>,
    /// Answers no call at first, so that its caller has to renew its claim.
    receiver: Webhooks,
    tour: usize,
    /// The id that each idempotency key was answered with.
    acknowledged: RefCell<BTreeMap<String, String>>,
    /// The events of [`FAULTS`] under way, by their customer, and whether each is published.
    faulty: RefCell<BTreeMap<&'static str, (Value, bool)>>,
}

impl<'a> Tours<'a> {
    async fn new(db: &'a TestDb, folder: &Path) -> Self {
        let secret = Secret::random();
        let entry = format!("admin:*:{}:tours", secret.hash());
        let flags = ["--api-keys", &entry, "--retry-max", "2"].map(str::to_owned).to_vec();
        let [deaths, log] = ["deaths", "log"].map(|name| folder.join(name));
        let receiver = Webhooks::open([Reply::Hold; 1000]).await;
        let (acknowledged, faulty) = Default::default();
        Self { db, deaths, log, key: secret.reveal().to_owned(), flags, receiver, tour: 0, acknowledged, faulty }
    }

    fn command(&self, more: &[&str]) -> Command {
        let own = self.flags.iter().map(String::as_str);
        let flags: Vec<&str> = FLAGS.into_iter().chain(own).chain(more.iter().copied()).collect();
        witness::command(self.db, &flags)
    }

    /// Starts servers until one lives long enough to serve.
    async fn start(&self, more: &[&str]) -> Server {
        self.db.end_leases_of_dead_servers().await;
        for _ in 0..DEATHS_MAX {
            let mut command = self.command(more);
            command.env(witness::DEATHS, &self.deaths);
            match Server::try_spawn(command, &self.log) {
                Ok(server) => return server,
                Err(status) => self.assert_abort(status),
            }
        }
        panic!("no server gets through its start");
    }

    /// Have servers died before and after every step whose name begins with `name`?
    fn has_died_twice_at(&self, name: &str) -> bool {
        let died_at = self.died_at();
        let sites: Vec<&String> =
            STEPS.iter().filter(|(_, found)| found.starts_with(name)).map(|(site, _)| site).collect();
        assert!(!sites.is_empty(), "no step is called {name}");
        sites.iter().all(|site| ["Before", "After"].iter().all(|phase| died_at.contains(&format!("{phase} {site}"))))
    }

    fn assert_abort(&self, status: ExitStatus) {
        let log = || std::fs::read_to_string(&self.log).unwrap_or_default();
        assert!(is_abort(status), "{status}, at none of the points:\n{}", log());
    }

    fn died_at(&self) -> BTreeSet<String> {
        std::fs::read_to_string(&self.deaths).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    /// Runs `tour` on one server after another until one lives through it, finishes all work and stops when asked to.
    async fn until_survived(&mut self, more: &[&str], tour: impl AsyncFn(&Self, &Api)) {
        for _ in 0..DEATHS_MAX {
            let mut server = self.start(more).await;
            let api = server.with_key(&self.key);
            self.tour += 1;
            tokio::select! {
                () = tour(self, &api) => {}
                () = death_of(&server) => {}
            }
            if self.is_settled(&server, &api).await {
                server.signal("TERM");
            }
            let status = server.ended().await;
            if status.success() {
                return;
            }
            self.assert_abort(status);
        }
        panic!("the server dies on and on: {:#?}", self.died_at());
    }

    /// Waits until all work is finished, or the server has died.
    async fn is_settled(&self, server: &Server, api: &Api) -> bool {
        let began = Instant::now();
        while began.elapsed() < DEADLINE {
            if server.has_ended() {
                return false;
            }
            if under_way(self.db).await == 0 {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let mut left = String::new();
        for path in ["queues", "outbox?status=pending", "inbox?state=retrying", "inbox?state=waiting", "health"] {
            left += &format!("{path}: {:#}\n", api.read(&format!("/v1/{path}")).await);
        }
        panic!("not finished within {DEADLINE:?}: {left}");
    }

    /// Everything that writes, at the same time: the sooner a new point is reached, the shorter the tour.
    async fn see_everything(&self, api: &Api) {
        let tour = self.tour;
        if self.has_died_twice_at("crates/kernel/src/messaging/outside.rs keep_claims#1") {
            self.receiver.let_go();
        }
        let connected = async || {
            let health: Value = api.get("/v1/health").send().await.ok()?.json().await.ok()?;
            (health["broker"]["status"] == "up").then_some(())
        };
        eventually("a broker that is up", connected).await;
        let lives = ["payments", "cancel", ""].map(|step| self.life(api, format!("{tour}-{step}"), step));
        tokio::join!(
            join_all(lives),
            failures(api),
            letters(api),
            self.jobs(api),
            deferred(api),
            access(api, &self.key),
            stock(api),
            self.lose_a_queue(api),
            join_all(FAULTS.iter().map(|(customer, sites)| self.fault(api, customer, sites))),
            self.unreadable_job(api),
            self.dead_outbox_rows(api),
        );
    }

    /// Publishes an event that the witness fails to handle: again only once it is finished, as another copy of one that
    /// aborts the process would abort it without the record of the first. Killed elsewhere, an event may finish before
    /// it has led to all its commits; then another one is published.
    async fn fault(&self, api: &Api, customer: &'static str, sites: &[&str]) -> Option<()> {
        let known = self.faulty.borrow().get(customer).cloned();
        let finished = "SELECT COUNT(*) FROM messaging_inbox
             WHERE consumer = 'witness' AND aggregate_id = $1 AND state IN ('processed', 'dead')";
        let (event, published) = match known {
            Some((event, published)) if self.db.count_of(finished, id_of(&event)).await == 0 => (event, published),
            _ if sites.iter().all(|site| self.has_died_twice_at(site)) => return None,
            _ => (foreign("order.paid", customer), false),
        };
        let keep = |published| drop(self.faulty.borrow_mut().insert(customer, (event.clone(), published)));
        if !published {
            keep(false);
            let publish = json!({ "queue": "witness", "body": event.to_string() });
            keep(post(api, "/v1/lab/publish", &publish).await?.get("published").is_some());
        }
        // Until it has a row, an event in the queue of a broker is not counted as under way.
        let row = "SELECT COUNT(*) FROM messaging_inbox WHERE consumer = 'witness' AND aggregate_id = $1";
        let taken = async || (self.db.count_of(row, id_of(&event)).await > 0).then_some(());
        let _ = tokio::time::timeout(PATIENCE, eventually("a row of the event", taken)).await;
        if customer == witness::DEFERRED_KILLS {
            // Each of its runs takes the second after which a server looks for deferred events: only the third aborts.
            let runs = "UPDATE messaging_inbox SET unfinished_runs = 2
                 WHERE consumer = 'witness' AND aggregate_id = $1 AND state = 'waiting' AND unfinished_runs < 2";
            self.db.execute(runs, &[id_of(&event)]).await;
        }
        Some(())
    }

    /// A redrive and a replay to their end, and one of each that is stopped. Each sends what all tours so far have left,
    /// so none begins once the servers have died of them.
    async fn jobs(&self, api: &Api) {
        if JOBS.iter().all(|name| self.has_died_twice_at(name)) {
            return;
        }
        let redrive = json!({ "consumer": "inventory", "reason": "not-json" });
        let replay = json!({ "from": "2020-01-01T00:00:00Z", "consumer": "notifications" });
        for (path, body) in [("/v1/redrives", redrive), ("/v1/replays", replay)] {
            post(api, path, &body).await;
            let mut slow = body;
            slow["rate"] = json!(1);
            if let Some(id) = post(api, path, &slow).await.as_ref().and_then(|job| job["id"].as_str()) {
                post(api, &format!("{path}/{id}/stop"), &json!({})).await;
            }
        }
    }

    /// A replay whose criteria are overwritten while it runs.
    async fn unreadable_job(&self, api: &Api) {
        if self.has_died_twice_at("crates/kernel/src/messaging/jobs/runner.rs give_up#1") {
            return;
        }
        post(api, "/v1/replays", &json!({ "from": "2020-01-01T00:00:00Z", "rate": UNREADABLE_RATE })).await;
        let overwrite = "UPDATE messaging_jobs SET criteria = 'not JSON' WHERE state = 'running' AND rate = 2";
        self.db.execute(overwrite, &[]).await;
    }

    /// Outbox rows that count as dead, as if a broker had refused them: one is retried by itself, another with all others.
    async fn dead_outbox_rows(&self, api: &Api) -> Option<()> {
        let sites = ["retry_outbox_row", "retry_outbox"].map(|site| format!("src/operations/outbox.rs {site}#1"));
        if !sites.iter().all(|site| self.has_died_twice_at(site)) {
            for number in 1..=2 {
                let order = self.life(api, format!("{}-dead-{number}", self.tour), "").await?;
                let kill = "UPDATE messaging_outbox SET status = 'dead' WHERE kind = 'event' AND status = 'published'
                     AND aggregate_type = 'order' AND event_type = 'placed' AND aggregate_id = $1";
                let killed = async || (self.db.execute(kill, &[&order]).await > 0).then_some(());
                tokio::time::timeout(PATIENCE, eventually("a published row", killed)).await.ok()?;
            }
            let dead = list(api, "/v1/outbox?status=dead").await;
            post(api, &format!("/v1/outbox/{}/retry", dead.first()?["id"].as_str()?), &json!({})).await;
        }
        // Rows that an earlier tour has left, too.
        post(api, "/v1/outbox/retry", &json!({})).await;
        Some(())
    }

    /// Redrives the events that were taken for process killers, or that failed too often.
    async fn redrive(&self, api: &Api) {
        for reason in ["process-killer", "retries-exhausted"] {
            post(api, "/v1/redrives", &json!({ "reason": reason })).await;
        }
        post(api, "/v1/redrives", &json!({ "consumer": "notifications" })).await;
        let done = async || list(api, "/v1/redrives?state=running").await.is_empty().then_some(());
        let _ = tokio::time::timeout(PATIENCE, eventually("the end of the redrives", done)).await;
    }

    /// The id of an order that is placed under a key, and then paid and fulfilled, cancelled, or left to expire.
    async fn life(&self, api: &Api, key: String, step: &str) -> Option<String> {
        let body = json!({ "customer_id": key, "items": [{ "sku": "A", "quantity": 1, "unit_price_minor": 7 }] });
        let request = api.post("/v1/orders", &body).header("idempotency-key", &key).header("prefer", "wait=1");
        let response = request.send().await.ok()?;
        if response.status() != 201 {
            return None;
        }
        let order: Value = response.json().await.ok()?;
        let id = order["id"].as_str().unwrap().to_owned();
        self.acknowledged.borrow_mut().insert(key, id.clone());
        match step {
            "" => {}
            "payments" => {
                post(api, &format!("/v1/orders/{id}/payments"), &json!({ "amount_minor": 7 })).await;
                post(api, &format!("/v1/orders/{id}/fulfil"), &json!({})).await;
            }
            step => drop(post(api, &format!("/v1/orders/{id}/{step}"), &json!({})).await),
        }
        Some(id)
    }

    /// On a broker: the queue of a paused consumer is deleted together with a new event and a retry in it.
    async fn lose_a_queue(&self, api: &Api) {
        if !self.db.is_on_rabbit() {
            return;
        }
        post(api, "/v1/lab/fail", &json!({ "consumer": "notifications", "times": 1 })).await;
        self.life(api, format!("{}-of-a-lost-retry", self.tour), "").await;
        let retrying =
            async || (!list(api, "/v1/inbox?state=retrying&consumer=notifications").await.is_empty()).then_some(());
        let _ = tokio::time::timeout(PATIENCE, eventually("a retry", retrying)).await;
        post(api, "/v1/consumers/notifications/pause", &json!({})).await;
        self.life(api, format!("{}-of-a-lost-queue", self.tour), "").await;
        let both = async || {
            let queue: Value = api.get("/v1/queues/notifications").send().await.ok()?.json().await.ok()?;
            (queue["depth"].as_i64()? > 1).then_some(())
        };
        // On a slow machine the retry has run before the pause.
        let _ = tokio::time::timeout(PATIENCE / 3, eventually("two messages in the queue", both)).await;
        Stranger::on(self.db).await.delete("notifications").await;
        post(api, "/v1/consumers/notifications/resume", &json!({})).await;
    }

    /// Lets retention delete every finished row. Only when all work is done: the row of an event on its way must not go.
    async fn expire_all_rows(&mut self) {
        let at_once = ["--outbox-retention", "--archive-retention", "--dlq-retention", "--wait-deadline"];
        let mut old: Vec<&str> = at_once.iter().flat_map(|flag| [*flag, "1s"]).collect();
        old.extend(["--outbox-max-attempts", "1", "--inbox-retention", "15s", "--retention-every", "100ms"]);
        self.until_survived(&old, async |tours, api| {
            let rows = "SELECT COUNT(*) FROM messaging_inbox WHERE state = 'processed'";
            let began = Instant::now();
            // Rows become old after 15 seconds.
            while tours.db.count(rows).await > 0 {
                if began.elapsed() > DEADLINE * 3 {
                    panic!("{} old rows left, {}", tours.db.count(rows).await, tours.what_keeps_rows(api).await);
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        assert_audited(self.db).await;
        // What counts the rows that are gone.
        for sql in ["DELETE FROM witness_effects", "DELETE FROM messaging_jobs"] {
            self.db.execute(sql, &[]).await;
        }
        self.faulty.borrow_mut().clear();
    }

    /// Why retention leaves inbox rows alone.
    async fn what_keeps_rows(&self, api: &Api) -> String {
        let with = |what: &str, more: &str| -> &'static str {
            format!(
                "SELECT COUNT(*) FROM messaging_inbox i WHERE state = 'processed'
                     AND EXISTS (SELECT 1 FROM {what} x WHERE x.event_id = i.event_id{more})"
            )
            .leak()
        };
        let letters = self.db.count(with("messaging_dead_letters", "")).await;
        let open = self.db.count(with("messaging_dead_letters", " AND x.state = 'open'")).await;
        let outbox = self.db.count(with("messaging_outbox", "")).await;
        let unpublished = self.db.count(with("messaging_outbox", " AND x.status <> 'published'")).await;
        let health = api.read("/v1/health").await;
        format!(
            "{letters} with letters, {open} of them open, {outbox} with outbox rows, {unpublished} of them unpublished: {health:#}"
        )
    }

    /// The steps at which no server has died yet.
    fn missed(&self) -> Vec<String> {
        let died_at = self.died_at();
        let other = if self.db.is_on_rabbit() { EMBEDDED_ONLY } else { BROKER_ONLY };
        let elsewhere = |name: &str| name == MIGRATING || other.iter().any(|place| name.starts_with(place));
        let expected = STEPS.iter().filter(|(_, name)| !elsewhere(name));
        let points =
            expected.flat_map(|(site, name)| ["Before", "After"].map(|phase| (format!("{phase} {site}"), name)));
        points.filter(|(point, _)| !died_at.contains(point)).map(|(point, name)| format!("{point} {name}")).collect()
    }

    async fn check(&self, api: &Api) {
        witness::check(self.db).await;
        assert_eq!(
            self.db.count("SELECT COUNT(*) FROM orders_orders WHERE status = 'placed'").await,
            0,
            "orders stuck"
        );
        let miscounted = "SELECT COUNT(*) FROM messaging_jobs j WHERE kind = 'redrive'
             AND sent + already_applied <> (SELECT COUNT(*) FROM messaging_dead_letters d WHERE d.job_id = j.id)";
        assert_eq!(
            self.db.count(miscounted).await,
            0,
            "redrive jobs whose count differs from the letters they redrove"
        );
        let acknowledged = self.acknowledged.borrow().clone();
        for (key, id) in &acknowledged {
            let found = api.read(&format!("/v1/orders/{id}")).await;
            assert_eq!(found["customer_id"], json!(key), "this order was acknowledged");
        }
        assert_audited(self.db).await;
    }
}

/// The tour beside it has a deadline for each of its steps.
async fn death_of(server: &Server) {
    while !server.has_ended() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The answer of a server that may be dead. One that is alive takes every request, or says what is in its way.
async fn post(api: &Api, path: &str, body: &Value) -> Option<Value> {
    let response = api.post(path, body).send().await.ok()?;
    let status = response.status();
    let answer = response.json().await.ok()?;
    assert!(status.is_success() || status == 409 || status.is_server_error(), "POST {path} {body}: {answer}");
    Some(answer)
}

async fn list(api: &Api, path: &str) -> Vec<Value> {
    let Ok(response) = api.get(path).send().await else { return Vec::new() };
    let page: Value = response.json().await.unwrap_or_default();
    page["data"].as_array().cloned().unwrap_or_default()
}

/// A retry, copies, a message that nobody can read, and a handler that panics.
async fn failures(api: &Api) {
    post(api, "/v1/lab/fail", &json!({ "consumer": "inventory", "times": 1 })).await;
    post(api, "/v1/lab/duplicate", &json!({ "consumer": "orders", "deliveries": 1, "copies": 2 })).await;
    post(api, "/v1/lab/publish", &json!({ "queue": "inventory", "body": "not JSON" })).await;
    let panics = foreign("order.placed", witness::PANICS);
    post(api, "/v1/lab/publish", &json!({ "queue": "witness", "body": panics.to_string() })).await;
}

/// Redrives one dead letter of no order, discards another and restores it.
async fn letters(api: &Api) {
    for _ in 0..2 {
        post(api, "/v1/lab/publish", &json!({ "queue": "orders", "body": "not JSON" })).await;
    }
    let two = async || {
        let open = list(api, "/v1/dead-letters?state=open&consumer=orders&limit=2").await;
        (open.len() == 2).then_some(open)
    };
    let open = eventually("two dead letters", two).await;
    for (letter, actions) in open.iter().zip([["redrive"].as_slice(), &["discard", "restore"]]) {
        for action in actions {
            post(
                api,
                &format!("/v1/dead-letters/{}/{action}", letter["id"].as_str().unwrap()),
                &json!({ "reason": "tour" }),
            )
            .await;
        }
    }
}

/// A payment before its order, whose order comes, and one whose order never comes. The consumer is slow at first, so that
/// it renews the lease of what it holds.
async fn deferred(api: &Api) {
    let slow = async |each: u64| post(api, "/v1/lab/slow", &json!({ "consumer": "ledger", "ms": each })).await;
    slow(500).await;
    let order = mint_id().to_string();
    let lone = mint_id().to_string();
    for event in [of_order("order.paid", &lone), of_order("order.paid", &order), of_order("order.placed", &order)] {
        post(api, "/v1/lab/publish", &json!({ "queue": "ledger", "body": event.to_string() })).await;
    }
    let handled = async || {
        let open: Value = api.get("/v1/queues/ledger").send().await.ok()?.json().await.ok()?;
        (open["depth"] == 0).then_some(())
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), eventually("an empty queue", handled)).await;
    slow(0).await;
}

/// A key that is made and revoked; a session that begins and ends; a consumer that is paused and resumed.
async fn access(api: &Api, key: &str) {
    let made = post(api, "/v1/keys", &json!({ "role": "viewer", "group_id": "*", "name": "tour" })).await;
    if let Some(id) = made.as_ref().and_then(|made| made["id"].as_str()) {
        post(api, &format!("/v1/keys/{id}/revoke"), &json!({})).await;
    }
    if let Ok(response) = api.post("/v1/session", &json!({ "key": key })).send().await
        && let Some(cookie) = response.headers().get("set-cookie")
    {
        let cookie = cookie.to_str().unwrap().split(';').next().unwrap().to_owned();
        let _ = api.client.delete(format!("{}/v1/session", api.url)).header("cookie", cookie).send().await;
    }
    for action in ["pause", "resume"] {
        post(api, &format!("/v1/consumers/orders/{action}"), &json!({})).await;
    }
}

async fn stock(api: &Api) {
    let _ = api.put("/v1/stock/A", &json!({ "on_hand": super::STOCK })).send().await;
    post(api, "/v1/stock/A/adjustments", &json!({ "delta": 1, "reason": "delivery" })).await;
}

/// An event of another program.
fn foreign(key: &str, customer: &str) -> Value {
    let mut event = of_order(key, &mint_id().to_string());
    event["payload"]["customer_id"] = json!(customer);
    event
}

fn id_of(event: &Value) -> &str {
    event["aggregate_id"].as_str().unwrap()
}

fn of_order(key: &str, order_id: &str) -> Value {
    let (aggregate_type, event_type) = key.split_once('.').unwrap();
    let items = json!([{ "sku": "A", "quantity": 1, "unit_price_minor": 7 }]);
    json!({
        "event_id": mint_id(), "occurred_at": "2026-11-16T09:30:00Z", "aggregate_type": aggregate_type,
        "aggregate_id": order_id, "event_type": event_type, "group_id": "00000000-0000-0000-0000-000000000001",
        "correlation_id": "theirs", "payload": {
            "order_id": order_id, "order_number": "ORD-00000001", "customer_id": "bob", "currency": "USD",
            "total_minor": 7, "amount_minor": 7, "items": items,
        },
    })
}

/// The calls that are crash points, and the step that each reports. `release` is left out: it only returns a claim.
const CALLS: &[(&str, &str)] = &[
    ("tx.commit()", "Commit"),
    ("transport.publish(", "Publish"),
    ("transport.publish_raw(", "Publish"),
    ("subscription.ack(", "Acknowledge"),
    ("subscription.ack_soon(", "Acknowledge"),
    ("subscription.reject(", "Reject"),
];

/// The commits, publishes and acknowledgements in the sources: `Commit file:line`, and `file function#number` for the
/// place of each in its function.
static STEPS: LazyLock<BTreeMap<String, String>> = LazyLock::new(find_steps);

fn find_steps() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![PathBuf::from("src"), PathBuf::from("crates/kernel/src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let path = folder.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                // A command that fills a database before a server starts.
                if path != Path::new("src/cli") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                steps_of(&path, &mut found);
            }
        }
    }
    found
}

fn steps_of(path: &Path, found: &mut BTreeMap<String, String>) {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let (mut function, mut number) = (String::new(), 0);
    for (line, code) in (1..).zip(text.lines()) {
        if code.contains("#[cfg(test)]") {
            return;
        }
        if let Some((_, name)) = code.split_once("fn ").filter(|_| !code.trim_start().starts_with("//")) {
            (function, number) = (name.split(['(', '<']).next().unwrap().to_owned(), 0);
        }
        // The wrapped step itself, not a call of it.
        if function == "commit_now" {
            continue;
        }
        for (call, step) in CALLS {
            if code.contains(call) {
                number += 1;
                let file = path.display();
                found.insert(format!("{step} {file}:{line}"), format!("{file} {function}#{number}"));
            }
        }
    }
}

async fn every_point_of_a_server_can_be_its_last(db: TestDb) {
    let folder = tempfile::tempdir().unwrap();
    let mut tours = Tours::new(&db, folder.path()).await;
    let url = tours.receiver.url.clone();
    let webhook = ["--notify-channel", "webhook", "--webhook-url", &url, "--webhook-secret", "a secret for tests"];
    let more = ["--handler-timeout", "900ms", "--hold-time", "1s", "--wait-deadline", "1s"];
    let flags = [webhook.as_slice(), &more].concat();
    for round in 1.. {
        tours.until_survived(&flags, Tours::see_everything).await;
        tours.until_survived(&flags, Tours::redrive).await;
        let server = Server::spawn(tours.command(&flags), &tours.log);
        tours.check(&server.with_key(&tours.key)).await;
        assert!(server.terminate().await);
        tours.expire_all_rows().await;
        // On a busy machine a tour may finish without reaching every step; then all tours are repeated.
        let missed = tours.missed();
        if missed.is_empty() {
            break;
        }
        assert!(round < ROUNDS_MAX, "no server died at {missed:#?}");
    }
}

/// The queue is deleted once, and the servers that follow die at every step of its resync.
async fn a_deleted_queue_is_resynced_whenever_a_server_dies(db: TestDb) {
    const RESYNC: &str = "crates/kernel/src/messaging/resync.rs";
    let folder = tempfile::tempdir().unwrap();
    let mut tours = Tours::new(&db, folder.path()).await;
    // A retry so late that the pause comes first.
    let late = ["--retry-base", "3s", "--retry-cap", "3s"];
    let keys = tours.flags.iter().map(String::as_str);
    let flags: Vec<&str> = FLAGS[..6].iter().copied().chain(late).chain(keys).collect();
    let server = Server::spawn(witness::command(&db, &flags), &tours.log);
    let api = server.with_key(&tours.key);
    api.until_connected().await;
    post(&api, "/v1/lab/fail", &json!({ "consumer": "notifications", "times": 1 })).await;
    tours.life(&api, "lost-retry".to_owned(), "").await.unwrap();
    let retrying = async || db.count("SELECT COUNT(*) FROM messaging_inbox WHERE state = 'retrying'").await;
    eventually("a retry", async || (retrying().await == 1).then_some(())).await;
    post(&api, "/v1/consumers/notifications/pause", &json!({})).await;
    tours.life(&api, "lost-event".to_owned(), "").await.unwrap();
    let unpublished = "SELECT COUNT(*) FROM messaging_outbox WHERE status <> 'published'";
    eventually("no unpublished row", async || (db.count(unpublished).await == 0).then_some(())).await;
    server.kill();
    Stranger::on(&db).await.delete("notifications").await;
    db.execute("DELETE FROM messaging_pauses", &[]).await;
    let (resync, others): (Vec<_>, Vec<_>) = STEPS.iter().partition(|(_, name)| name.starts_with(RESYNC));
    let elsewhere: String = others.iter().map(|(site, _)| format!("Before {site}\nAfter {site}\n")).collect();
    std::fs::write(&tours.deaths, elsewhere).unwrap();
    let finished = async || (db.count("SELECT COUNT(*) FROM messaging_resyncs").await == 0).then_some(());
    tours.until_survived(&[], async |_, _| eventually("no request of a resync", finished).await).await;
    let died_at = tours.died_at();
    for (site, name) in resync {
        for phase in ["Before", "After"] {
            assert!(died_at.contains(&format!("{phase} {site}")), "no server died {phase} {name}");
        }
    }
    let server = Server::spawn(tours.command(&[]), &tours.log);
    tours.check(&server.with_key(&tours.key)).await;
    assert!(server.terminate().await);
}

/// On an empty database each server gets one migration further than the one before.
async fn a_server_that_dies_after_any_migration_is_followed_by_the_next(db: TestDb) {
    let (site, _) = STEPS.iter().find(|(_, name)| *name == MIGRATING).expect("the commit of a migration");
    let migrated = format!("After {site}\n");
    let folder = tempfile::tempdir().unwrap();
    let deaths = folder.path().join("deaths");
    let log = folder.path().join("log");
    let mut died = 0;
    let server = loop {
        let mut command = witness::command(&db, &FLAGS);
        command.env(witness::DEATHS, &deaths);
        match Server::try_spawn(command, &log) {
            Ok(server) => break server,
            Err(status) => {
                assert!(is_abort(status), "{status}:\n{}", std::fs::read_to_string(&log).unwrap());
            }
        }
        assert!(died < DEATHS_MAX, "no server gets through its migrations");
        let points = std::fs::read_to_string(&deaths).unwrap();
        died += points.matches(&migrated).count();
        std::fs::write(&deaths, points.replace(&migrated, "")).unwrap();
    };
    server.kill();
    let count_of = |folder| std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap().count();
    let migrations = count_of("crates/kernel/migrations/sqlite") + count_of("migrations/sqlite");
    assert_eq!(died, migrations, "one death after each migration");
    let server = witness::start(&db, &FLAGS);
    server.put_stock("A", 1).await;
    assert_eq!(server.place_and_wait("alice", &[("A", 1)]).await["status"], "reserved");
    until_finished_and_audited(&db).await;
    assert!(server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_server_that_dies_after_any_migration_is_followed_by_the_next_on_sqlite() {
    a_server_that_dies_after_any_migration_is_followed_by_the_next(TestDb::empty_sqlite()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_server_that_dies_after_any_migration_is_followed_by_the_next_on_postgres() {
    a_server_that_dies_after_any_migration_is_followed_by_the_next(TestDb::empty_postgres().await).await;
}

each_database!(every_point_of_a_server_can_be_its_last);

each_database_on_rabbit!(every_point_of_a_server_can_be_its_last, a_deleted_queue_is_resynced_whenever_a_server_dies);
