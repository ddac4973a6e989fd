//! Limits that RabbitMQ enforces: the consumer timeout, the delivery limit and a message TTL.

use serde_json::json;

use super::Shop;
use super::brokers::shop_on;
use crate::rabbit::Stranger;
use crate::support::rabbit::{self, Rabbit};
use crate::support::{Api, Engine, TestDb, Wire, eventually, under_way};

/// Closes channels whose consumer holds a message for more than a second, until it is dropped.
struct ConsumerTimeout<'a>(&'a Rabbit);

impl<'a> ConsumerTimeout<'a> {
    fn of_a_second(broker: &'a Rabbit) -> Self {
        Self::set(broker, 500, 1000);
        Self(broker)
    }

    fn set(broker: &Rabbit, tick: u32, timeout: u32) {
        let set = |name: &str, ms: u32| format!("application:set_env(rabbit, {name}, {ms})");
        broker.eval(&format!("{}, {}", set("channel_tick_interval", tick), set("consumer_timeout", timeout)));
    }
}

impl Drop for ConsumerTimeout<'_> {
    fn drop(&mut self) {
        Self::set(self.0, 60_000, 1_800_000);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_message_held_past_the_consumer_timeout_comes_again_and_has_one_effect() {
    let broker = rabbit::faulty().await;
    let _timeout = ConsumerTimeout::of_a_second(&broker);
    let db = TestDb::new(Engine::Postgres).await.over(Wire::on(broker.url()));
    let mut shop = Shop::open(&db, &[]).await;
    let api = shop.api();
    let processed = "SELECT COUNT(*) FROM messaging_inbox WHERE consumer = 'inventory' AND state = 'processed'";
    let repeated = "SELECT COUNT(*) FROM messaging_inbox WHERE consumer = 'inventory' AND duplicates > 0";
    let slow = async |ms: u32| {
        api.tell("/v1/lab/slow", &json!({ "consumer": "inventory", "ms": ms })).await;
    };
    slow(2500).await;
    shop.place_during(async {
        eventually("a slow batch", || async { (db.count(processed).await > 0).then_some(()) }).await;
        slow(0).await;
        eventually("a second delivery", || async { (db.count(repeated).await > 0).then_some(()) }).await;
    })
    .await;
    shop.recover_and_stop().await;
}

/// Checks dead letters that the broker made, for `reason`. Redrives them until every order is processed.
async fn recover(shop: &Shop<'_>, reason: &str) {
    shop.server.tell("/v1/consumers/inventory/resume", &json!({})).await;
    eventually("every dead letter redriven", || async {
        for letter in shop.letters().await {
            assert_eq!(
                (&letter["reason"], &letter["consumer"]),
                (&json!("broker-limit"), &json!("inventory")),
                "{letter}"
            );
            let death = &letter["x_death"][0];
            assert_eq!((&death["reason"], &death["count"]), (&json!(reason), &json!(1)), "{letter}");
            let redrive = format!("/v1/dead-letters/{}/redrive", letter["id"].as_str().unwrap());
            shop.server.tell(&redrive, &json!({})).await;
        }
        (under_way(shop.db).await == 0).then_some(())
    })
    .await;
    shop.check().await;
}

/// Does `meanwhile` again and again until there are five dead letters.
async fn until_letters(api: &Api, meanwhile: impl AsyncFn()) {
    eventually("five dead letters", async || {
        meanwhile().await;
        let letters = api.walk("/v1/dead-letters?state=open").await;
        (letters.len() >= 5).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_message_past_its_delivery_limit_becomes_a_dead_letter() {
    let db = TestDb::on_rabbit(Engine::Sqlite).await;
    let mut shop = Shop::open(&db, &[]).await;
    let api = shop.api();
    api.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let stranger = Stranger::on(&db).await;
    // Returned messages go back to the head of the queue, so these are the same ones each time.
    let take_and_return = async || stranger.take_and_return("inventory", 5).await;
    shop.place_during(until_letters(&api, take_and_return)).await;
    recover(&shop, "delivery_limit").await;
    assert!(shop.server.terminate().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_message_that_expires_in_its_queue_becomes_a_dead_letter() {
    let broker = rabbit::faulty().await;
    let db = TestDb::new(Engine::Postgres).await.over(Wire::on(broker.url()));
    let mut shop = shop_on(&db, &[]).await;
    let api = shop.api();
    api.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let Wire::Rabbit { prefix, .. } = &db.wire else { unreachable!() };
    broker.limit_queue(&format!("{prefix}.inventory"), "message-ttl", 100);
    shop.place_during(until_letters(&api, async || {})).await;
    broker.clear_limit();
    recover(&shop, "expired").await;
    assert!(shop.server.terminate().await);
}
