//! The process dies at each named point in turn, and the next one finishes what it left.

use serde_json::json;
use stockade_kernel::messaging::faults::POINTS;

use super::Shop;
use crate::support::{Engine, TestDb, Webhooks, each_database, each_database_on_rabbit, eventually, until_finished};

const CONSUMERS: [&str; 4] = ["inventory", "orders", "notifications", "ledger"];

/// Orders at a time: enough for a batch, few enough for one group.
const ORDERS: i64 = 5;

impl Shop<'_> {
    /// Arms a point. The server may get there before it has answered.
    async fn arm(&self, point: &str, consumer: Option<&str>) {
        let _ = self.server.post("/v1/lab/crash", &json!({ "point": point, "consumer": consumer })).send().await;
    }

    /// Publishes what cannot be read. The server may die of it before it has answered.
    async fn poison(&self, queue: &str, body: &str) {
        let _ = self.server.post("/v1/lab/publish", &json!({ "queue": queue, "body": body })).send().await;
    }

    /// Messages that the dead process held for a consumer; a broker does not tell.
    async fn held_by(&self, consumer: &str) -> Option<i64> {
        // A bundle has one comma less than messages, on either database.
        let held = "SELECT (SELECT COUNT(*) FROM messaging_queue WHERE lock_token IS NOT NULL AND queue = $1)
             + (SELECT COALESCE(SUM(LENGTH(refs) - LENGTH(REPLACE(refs, ',', '')) + 1), 0)
                 FROM (SELECT CAST(outbox_refs AS text) AS refs FROM messaging_bundles WHERE queue = $1) b)";
        match self.db.is_on_rabbit() {
            true => None,
            false => Some(self.db.count_of(held, &format!("stockade.{consumer}")).await),
        }
    }

    /// Deliveries that a consumer has dismissed.
    async fn dismissed_by(&self, consumer: &str) -> i64 {
        let sum = "SELECT CAST(COALESCE(SUM(duplicates), 0) AS BIGINT) FROM messaging_inbox WHERE consumer = $1";
        self.db.count_of(sum, consumer).await
    }

    /// Waits for deliveries that a broker repeats: nothing else shows that they are on their way.
    async fn until_dismissed(&self, consumer: &str, count: i64) {
        eventually(&format!("{count} duplicates dismissed by {consumer}"), || async {
            (self.dismissed_by(consumer).await >= count).then_some(())
        })
        .await;
        self.check().await;
    }
}

/// At every named point the process dies, and the next one finishes the work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_server_dies_at_each_point_that_the_api_offers() {
    let db = TestDb::new(Engine::Sqlite).await;
    let receiver = Webhooks::open([]).await;
    let mut shop = Shop::open(&db, &by_webhook(&receiver)).await;
    for (point, _) in POINTS {
        // An order that is relayed, fails once and is notified by webhook; and a message that is rejected.
        shop.server.tell("/v1/consumers/relay/pause", &json!({})).await;
        shop.server.tell("/v1/lab/fail", &json!({ "consumer": "inventory", "times": 1 })).await;
        shop.arm(point, None).await;
        shop.place(1).await;
        shop.poison("inventory", point).await;
        let _ = shop.server.post("/v1/consumers/relay/resume", &json!({})).send().await;
        shop.die_and_reopen().await;
        shop.server.tell("/v1/consumers/relay/resume", &json!({})).await;
        shop.ask_again().await;
        shop.check().await;
    }
}

fn by_webhook(receiver: &Webhooks) -> [&str; 6] {
    ["--notify-channel", "webhook", "--webhook-url", &receiver.url, "--webhook-secret", "a secret for tests"]
}

async fn an_order_that_was_not_committed_is_placed_by_the_repeat(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    shop.arm("orders.before_commit", None).await;
    shop.place(ORDERS).await;
    shop.die_and_reopen().await;
    assert_eq!(db.count("SELECT COUNT(*) FROM orders_orders").await, 0, "nothing was committed");
    assert!(shop.acknowledged.is_empty(), "no client was answered");
    shop.ask_again().await;
    shop.check().await;
}

async fn an_order_that_was_committed_but_not_answered_is_placed_once(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    shop.arm("orders.after_commit", None).await;
    shop.place(1).await;
    shop.die_and_reopen().await;
    assert_eq!(db.count("SELECT COUNT(*) FROM orders_orders").await, 1);
    assert!(shop.acknowledged.is_empty(), "no client was answered");
    shop.ask_again().await;
    shop.check().await;
}

async fn a_relay_that_dies_before_its_mark_publishes_with_one_effect(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    // While it rests, what is placed waits in the outbox; else it would go from hand to hand.
    shop.server.tell("/v1/consumers/relay/pause", &json!({})).await;
    shop.place(ORDERS).await;
    shop.arm("relay.before_mark", None).await;
    // The server may die of it before it has answered.
    let _ = shop.server.post("/v1/consumers/relay/resume", &json!({})).send().await;
    shop.server.ended().await;
    let unmarked = "SELECT COUNT(*) FROM messaging_outbox WHERE status = 'pending' AND event_type = 'placed'";
    assert_eq!(db.count(unmarked).await, ORDERS, "all were on their way and none was marked");
    shop.die_and_reopen().await;
    shop.check().await;
    if db.is_on_rabbit() {
        shop.until_dismissed("inventory", ORDERS).await;
    }
}

async fn a_consumer_that_dies_before_its_commit_has_done_nothing(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    for consumer in CONSUMERS {
        let before = shop.dismissed_by(consumer).await;
        shop.arm("consumer.before_commit", Some(consumer)).await;
        shop.place(ORDERS).await;
        shop.die_and_reopen().await;
        shop.ask_again().await;
        shop.check().await;
        if !db.is_on_rabbit() {
            // On a broker the relay, which died too, may have published some that it had not marked yet.
            assert_eq!(shop.dismissed_by(consumer).await, before, "{consumer}: what left no trace is no duplicate");
        }
    }
}

async fn a_consumer_that_dies_after_its_commit_counts_the_redelivery(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    for consumer in CONSUMERS {
        let before = shop.dismissed_by(consumer).await;
        shop.arm("consumer.after_commit", Some(consumer)).await;
        shop.place(ORDERS).await;
        shop.server.ended().await;
        let held = shop.held_by(consumer).await;
        shop.die_and_reopen().await;
        shop.ask_again().await;
        shop.check().await;
        let dismissed = shop.dismissed_by(consumer).await - before;
        match held {
            // Of what it held, some may have waited in its hands and not been run yet.
            Some(held) => assert!(0 < dismissed && dismissed <= held, "{consumer}: {dismissed} of {held} came again"),
            // The relay died as well, and may have published some that it had not marked yet.
            None => shop.until_dismissed(consumer, before + 1).await,
        }
    }
}

/// The receiver gets a notice again only if the first may have reached it, and then under the same key.
async fn a_call_that_dies_on_either_side_is_made_again_under_its_key(db: TestDb) {
    let receiver = Webhooks::open([]).await;
    let mut shop = Shop::open(&db, &by_webhook(&receiver)).await;
    for (point, repeated) in [("outside.before_call", false), ("outside.before_commit", true)] {
        let before = receiver.posted().len();
        shop.arm(point, Some("notifications")).await;
        shop.place(ORDERS).await;
        shop.die_and_reopen().await;
        shop.ask_again().await;
        shop.check().await;
        let keys: Vec<String> = receiver.posted()[before..].iter().map(|posted| posted.key().to_owned()).collect();
        let distinct = keys.iter().collect::<std::collections::BTreeSet<_>>().len();
        assert_eq!(i64::try_from(distinct).unwrap(), ORDERS, "{point}: each was told");
        assert_eq!(keys.len() > distinct, repeated, "{point}: {keys:?}");
    }
}

async fn a_poison_message_whose_rejection_was_cut_short_is_filed_once(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    for (count, consumer) in CONSUMERS.into_iter().enumerate() {
        shop.arm("consumer.before_reject", Some(consumer)).await;
        shop.poison(consumer, &format!("poison for {consumer}")).await;
        shop.die_and_reopen().await;
        shop.place(ORDERS).await;
        shop.check().await;
        let letters = shop.server.eventually_list("/v1/dead-letters", count + 1).await;
        assert_eq!((&letters[0]["consumer"], &letters[0]["reason"]), (&json!(consumer), &json!("not-json")));
        assert_eq!(db.count("SELECT COUNT(*) FROM messaging_dead_letters WHERE count <> 1").await, 0);
    }
}

/// The verdict is committed, the message not rejected: it comes again, meets the verdict, and is filed once. What
/// was given up on is done once after all when it is redriven.
async fn an_event_whose_rejection_was_cut_short_is_filed_once(db: TestDb) {
    let mut shop = Shop::open(&db, &["--retry-max", "1"]).await;
    for consumer in CONSUMERS {
        shop.server.tell("/v1/lab/fail", &json!({ "consumer": consumer, "times": 1 })).await;
        shop.arm("consumer.before_reject", Some(consumer)).await;
        shop.place(ORDERS).await;
        shop.die_and_reopen().await;
        shop.ask_again().await;
        let letters = shop.server.eventually_list("/v1/dead-letters?state=open", 1).await;
        let letter = &letters[0];
        assert_eq!((&letter["consumer"], &letter["reason"]), (&json!(consumer), &json!("retries-exhausted")));
        assert_eq!(letter["attempts"], 1);
        until_finished(&db).await;
        assert_eq!(shop.letters().await.len(), 1, "and no second letter");
        let dead = shop.server.walk("/v1/inbox?state=dead").await;
        assert_eq!((dead.len(), &dead[0]["event_id"]), (1, &letter["message_id"]));

        let redrive = format!("/v1/dead-letters/{}/redrive", letter["id"].as_str().unwrap());
        let redriven = shop.server.tell(&redrive, &json!({})).await;
        assert_eq!(redriven["already_applied"], false);
        shop.check().await;
        for copy in shop.letters().await {
            // The relay died as well: a broker may deliver a copy that is rejected before the redrive and filed after it.
            assert!(db.is_on_rabbit() && copy["message_id"] == letter["message_id"], "{copy:#}");
            let redrive = format!("/v1/dead-letters/{}/redrive", copy["id"].as_str().unwrap());
            assert_eq!(shop.server.tell(&redrive, &json!({})).await["already_applied"], true);
        }
    }
}

async fn a_retry_that_was_written_but_not_acknowledged_runs_once(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    for consumer in CONSUMERS {
        let before = shop.dismissed_by(consumer).await;
        shop.server.tell("/v1/lab/fail", &json!({ "consumer": consumer, "times": 1 })).await;
        shop.arm("consumer.retry_written", Some(consumer)).await;
        shop.place(1).await;
        shop.die_and_reopen().await;
        shop.ask_again().await;
        shop.check().await;
        let row = shop.server.read(&format!("/v1/inbox?consumer={consumer}&limit=1")).await["data"][0].clone();
        assert_eq!(row["attempts"], 2, "{consumer}: one failed, one did it");
        // The message or its retry came for nothing.
        if db.is_on_rabbit() {
            // The relay, which died too, may have published something that it had not marked yet.
            shop.until_dismissed(consumer, before + 1).await;
        } else {
            assert_eq!(shop.dismissed_by(consumer).await, before + 1, "{consumer}");
        }
    }
}

async fn a_letter_is_filed_once_wherever_the_office_dies(db: TestDb) {
    let mut shop = Shop::open(&db, &[]).await;
    for (count, point) in ["office.before_commit", "office.after_commit"].into_iter().enumerate() {
        shop.arm(point, None).await;
        shop.poison("inventory", point).await;
        shop.die_and_reopen().await;
        shop.place(ORDERS).await;
        shop.check().await;
        assert_eq!(shop.server.eventually_list("/v1/dead-letters", count + 1).await[0]["reason"], "not-json");
        assert_eq!(db.count("SELECT COUNT(*) FROM messaging_dead_letters WHERE count <> 1").await, 0, "{point}");
    }
}

each_database!(
    an_order_that_was_not_committed_is_placed_by_the_repeat,
    an_order_that_was_committed_but_not_answered_is_placed_once,
    a_relay_that_dies_before_its_mark_publishes_with_one_effect,
    a_consumer_that_dies_before_its_commit_has_done_nothing,
    a_consumer_that_dies_after_its_commit_counts_the_redelivery,
    a_poison_message_whose_rejection_was_cut_short_is_filed_once,
    an_event_whose_rejection_was_cut_short_is_filed_once,
    a_retry_that_was_written_but_not_acknowledged_runs_once,
    a_call_that_dies_on_either_side_is_made_again_under_its_key,
    a_letter_is_filed_once_wherever_the_office_dies,
);

each_database_on_rabbit!(
    an_order_that_was_not_committed_is_placed_by_the_repeat,
    an_order_that_was_committed_but_not_answered_is_placed_once,
    a_relay_that_dies_before_its_mark_publishes_with_one_effect,
    a_consumer_that_dies_before_its_commit_has_done_nothing,
    a_consumer_that_dies_after_its_commit_counts_the_redelivery,
    a_poison_message_whose_rejection_was_cut_short_is_filed_once,
    an_event_whose_rejection_was_cut_short_is_filed_once,
    a_retry_that_was_written_but_not_acknowledged_runs_once,
    a_call_that_dies_on_either_side_is_made_again_under_its_key,
    a_letter_is_filed_once_wherever_the_office_dies,
);
