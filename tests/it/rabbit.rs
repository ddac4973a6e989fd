//! What RabbitMQ and its other clients see of Stockade, and what it takes from them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{
    BasicConsumeOptions, BasicGetOptions, BasicNackOptions, BasicPublishOptions, ExchangeDeleteOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use serde_json::{Value, json};
use stockade_kernel::clock::{Clock, mint_id};
use stockade_kernel::messaging::Reaction;
use stockade_kernel::messaging::outbox::{self, Entry};
use stockade_kernel::messaging::resync::{self, Resyncs};
use stockade_kernel::messaging::transport::rabbit::{Options, Rabbit};
use stockade_kernel::messaging::transport::{Binding, Topology, Transport, Way};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::audit::plant;
use crate::support::kernel::{KEY, Probe, Rig, event, many, rabbit_options, told, told_with};
use crate::support::{
    App, DEADLINE, Engine, TestDb, Wire, each_database_on_rabbit, eventually, order, rabbit, until_finished,
};

/// Another program on the same broker.
pub struct Stranger {
    prefix: String,
    channel: Channel,
    _connection: Connection,
}

impl Stranger {
    pub async fn on(db: &TestDb) -> Self {
        let Wire::Rabbit { url, prefix } = &db.wire else { panic!("no broker") };
        let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        Self { prefix: prefix.clone(), channel, _connection: connection }
    }

    fn name(&self, last: &str) -> String {
        format!("{}.{last}", self.prefix)
    }

    pub async fn publish(&self, key: &str, body: &[u8], properties: BasicProperties) {
        let exchange = self.name("events");
        self.channel
            .basic_publish(exchange.into(), key.into(), BasicPublishOptions::default(), body, properties)
            .await
            .unwrap();
    }

    pub async fn delete(&self, queue: &str) {
        self.channel.queue_delete(self.name(queue).into(), QueueDeleteOptions::default()).await.unwrap();
    }

    /// How often each message of a queue was delivered and came back.
    pub async fn returns(&self, queue: &str) -> Vec<i64> {
        let mut returns = Vec::new();
        let get = async || self.channel.basic_get(self.name(queue).into(), BasicGetOptions::default()).await.unwrap();
        while let Some(message) = get().await {
            let headers = message.delivery.properties.headers().as_ref();
            returns.push(match headers.and_then(|headers| headers.inner().get("x-delivery-count")) {
                Some(AMQPValue::LongLongInt(count)) => *count,
                Some(other) => panic!("{other:?}"),
                None => 0,
            });
        }
        // Delivery tags begin at 1; 0 stands for all.
        let all = BasicNackOptions { multiple: true, requeue: true };
        self.channel.basic_nack(0, all).await.unwrap();
        returns
    }

    /// Takes the first `count` messages of a queue and returns them.
    pub async fn take_and_return(&self, queue: &str, count: usize) {
        for _ in 0..count {
            self.channel.basic_get(self.name(queue).into(), BasicGetOptions::default()).await.unwrap();
        }
        let all = BasicNackOptions { multiple: true, requeue: true };
        self.channel.basic_nack(0, all).await.unwrap();
    }

    /// The messages of a queue from now on.
    async fn consume(&self, queue: &str) -> lapin::Consumer {
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        self.channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await.unwrap()
    }
}

async fn next(consumer: &mut lapin::Consumer) -> lapin::message::Delivery {
    tokio::time::timeout(DEADLINE, consumer.next()).await.expect("a message").unwrap().unwrap()
}

/// The event of an order that is not ours.
pub fn foreign_order(sku: &str, quantity: i64) -> (String, Value) {
    let order_id = mint_id().to_string();
    let event = json!({
        "event_id": mint_id(), "occurred_at": "2026-11-16T09:30:00Z", "aggregate_type": "order",
        "aggregate_id": order_id, "event_type": "placed", "group_id": "00000000-0000-0000-0000-000000000001",
        "correlation_id": "theirs", "payload": {
            "order_id": order_id, "order_number": "ORD-00000001", "customer_id": "bob", "currency": "USD",
            "total_minor": 0, "items": [{ "sku": sku, "quantity": quantity, "unit_price_minor": 0 }],
        },
    });
    (order_id, event)
}

async fn a_message_carries_every_property_and_header(db: TestDb) {
    let extra = format!("{}-spy=#", prefix(&db));
    let app = App::start_with(&db, &["--extra-queues", &extra]).await;
    app.until_connected().await;
    let stranger = Stranger::on(&db).await;
    let mut spied = stranger.consume(&format!("{}-spy", prefix(&db))).await;
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let request = app.post("/v1/orders", &order("alice", &[("WIDGET-A", 2)])).header("traceparent", traceparent);
    let order: Value = request.send().await.unwrap().json().await.unwrap();
    let mut about = async |key: &str| loop {
        let message = next(&mut spied).await;
        if message.routing_key.as_str() == key {
            break message;
        }
    };
    let message = about("order.placed").await;
    let body: Value = serde_json::from_slice(&message.data).unwrap();
    let properties = &message.properties;
    let text = |value: &Option<lapin::types::ShortString>| value.as_ref().map(|text| text.as_str().to_owned());
    assert_eq!(text(properties.message_id()).as_deref(), body["event_id"].as_str());
    assert_eq!(text(properties.correlation_id()).as_deref(), order["correlation_id"].as_str());
    assert_eq!(text(properties.content_type()).as_deref(), Some("application/json"));
    assert_eq!(text(properties.kind()).as_deref(), Some("order.placed"));
    assert_eq!(*properties.delivery_mode(), Some(2));
    assert!(properties.timestamp().is_some());
    let headers = properties.headers().as_ref().unwrap();
    let header = |name: &str| match &headers.inner()[name] {
        AMQPValue::LongString(text) => text.to_string(),
        other => panic!("{name}: {other:?}"),
    };
    for (name, field) in [
        ("x-event-id", "event_id"),
        ("x-aggregate-type", "aggregate_type"),
        ("x-aggregate-id", "aggregate_id"),
        ("x-event-type", "event_type"),
        ("x-group-id", "group_id"),
    ] {
        assert_eq!(header(name), body[field].as_str().unwrap(), "{name}");
    }
    assert_eq!(headers.inner()["x-attempts"], AMQPValue::LongLongInt(0));
    assert_eq!(header("traceparent"), traceparent);
    let caused = about("inventory.reserved").await;
    let headers = caused.properties.headers().as_ref().unwrap();
    assert_eq!(
        headers.inner()["traceparent"],
        AMQPValue::LongString(traceparent.into()),
        "the consumer goes on with it"
    );
    app.stop().await;
}

async fn what_strangers_publish_is_taken_if_its_envelope_is_good(db: TestDb) {
    let app = App::start(&db).await;
    app.until_connected().await;
    let stranger = Stranger::on(&db).await;
    let (order_id, event) = foreign_order("WIDGET-A", 3);
    for _ in 0..3 {
        stranger.publish("order.placed", event.to_string().as_bytes(), BasicProperties::default()).await;
    }
    let held = app.eventually_list(&format!("/v1/reservations?order_id={order_id}"), 1).await;
    assert_eq!((&held[0]["state"], &held[0]["lines"][0]["quantity"]), (&json!("held"), &json!(3)));
    eventually("two duplicates", || async {
        let rows = app.read("/v1/inbox?consumer=inventory&min_duplicates=2").await;
        (rows["data"].as_array().unwrap().len() == 1).then_some(())
    })
    .await;
    assert_eq!(app.stock("WIDGET-A").await, (100, 3), "taken once");

    // What cannot be read is filed with its reason, and the broker's record of the rejection.
    let wrong_type = BasicProperties::default().with_message_id("somebody else".into());
    let (_, mut typed) = foreign_order("WIDGET-A", 1);
    typed["payload"]["items"] = json!("none");
    stranger.publish("order.placed", b"{\"event_id\":", BasicProperties::default()).await;
    stranger.publish("order.placed", b"{}", BasicProperties::default()).await;
    stranger.publish("order.placed", typed.to_string().as_bytes(), BasicProperties::default()).await;
    stranger.publish("order.placed", foreign_order("A", 1).1.to_string().as_bytes(), wrong_type).await;
    let letters = app.eventually_list("/v1/dead-letters?queue=inventory", 4).await; // the ledger hears of orders too
    let mut reasons: Vec<&str> = letters.iter().map(|letter| letter["reason"].as_str().unwrap()).collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["id-mismatch", "no-id", "not-json", "schema"]);
    for letter in &letters {
        let death = &letter["x_death"][0];
        assert_eq!((&death["reason"], &death["count"]), (&json!("rejected"), &json!(1)));
        assert_eq!(death["queue"], json!(stranger.name("inventory")));
        assert_eq!(letter["event_type"], "order.placed");
    }
    assert_eq!(app.place_and_wait("alice", &[("WIDGET-A", 1)]).await["status"], "reserved", "none the worse for it");
    app.stop().await;
}

async fn extra_queues_get_what_they_are_bound_to_and_have_dead_letter_queues(db: TestDb) {
    let names = [format!("{}-analytics", prefix(&db)), format!("{}-erp", prefix(&db))];
    let extra = format!("{}=#;{}=order.*", names[0], names[1]);
    let app = App::start_with(&db, &["--extra-queues", &extra]).await;
    app.until_connected().await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let stranger = Stranger::on(&db).await;
    let mut all = stranger.consume(&names[0]).await;
    let mut seen = Vec::new();
    while !seen.contains(&"inventory.reserved".to_owned()) {
        seen.push(next(&mut all).await.routing_key.as_str().to_owned());
    }
    assert!(seen.contains(&"order.placed".to_owned()));
    // Rejected by its owner, a message goes to the dead-letter queue and stays there: that is its owner's.
    let options = BasicConsumeOptions::default();
    let mut orders = stranger
        .channel
        .basic_consume(names[1].as_str().into(), "".into(), options, FieldTable::default())
        .await
        .unwrap();
    let order = next(&mut orders).await;
    assert_eq!(order.routing_key.as_str(), "order.placed");
    order.acker.reject(lapin::options::BasicRejectOptions { requeue: false }).await.unwrap();
    let mut dead = stranger.consume(&format!("{}.dlq", names[1])).await;
    assert_eq!(next(&mut dead).await.data, order.data);
    assert!(app.read("/v1/dead-letters").await["data"].as_array().unwrap().is_empty());
    app.stop().await;
}

async fn a_deleted_queue_is_declared_again_and_nothing_is_lost(db: TestDb) {
    let app = App::start_with(&db, &["--outbox-backoff-base", "100ms", "--outbox-backoff-max", "200ms"]).await;
    app.until_connected().await;
    assert_eq!(app.place_and_wait("alice", &[("WIDGET-A", 1)]).await["status"], "reserved");
    app.eventually_list("/v1/notifications", 1).await;
    let stranger = Stranger::on(&db).await;
    // Others take it, so that nothing comes back, and only the inbox knows what is missing.
    for _ in 0..2 {
        stranger.delete("inventory").await;
        assert_eq!(app.place_and_wait("bob", &[("WIDGET-A", 1)]).await["status"], "reserved");
    }
    app.eventually_list("/v1/notifications", 3).await;
    for count in 4..7 {
        stranger.delete("notifications").await;
        app.place("carol", &[("WIDGET-A", 1)]).await;
        app.eventually_list("/v1/notifications", count).await;
    }
    // Deleted with everything in it.
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    for _ in 0..10 {
        app.place("dora", &[("WIDGET-A", 1)]).await;
    }
    until_depth(&app, 10).await;
    stranger.delete("inventory").await;
    app.tell("/v1/consumers/inventory/resume", &json!({})).await;
    app.eventually_list("/v1/notifications", 16).await;
    assert_eq!(app.stock("WIDGET-A").await, (100, 16), "each once");
    app.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "no json" })).await;
    app.eventually_list("/v1/dead-letters", 1).await;
    assert_eq!(app.read("/v1/health").await["outbox"]["dead"], 0);
    app.stop().await;
}

async fn a_pause_makes_no_duplicates(db: TestDb) {
    let app = App::start(&db).await;
    app.until_connected().await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    until_finished(&db).await;
    let repeated = "SELECT COUNT(*) FROM messaging_outbox WHERE kind <> 'event'";
    let before = db.count(repeated).await;
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    for _ in 0..20 {
        app.place("bob", &[("WIDGET-A", 1)]).await;
    }
    until_depth(&app, 20).await;
    // Slow, so that there is time to take what it has not met for lost.
    app.tell("/v1/lab/slow", &json!({ "consumer": "inventory", "ms": 20 })).await;
    app.tell("/v1/consumers/inventory/resume", &json!({})).await;
    app.eventually_list("/v1/notifications", 21).await;
    assert_eq!(db.count(repeated).await, before, "nothing is sent again");
    assert_eq!(db.unexplained_duplicates().await, 0);
    app.stop().await;
}

async fn until_depth(app: &App, depth: i64) {
    let full = async || (app.read("/v1/queues/inventory").await["depth"] == depth).then_some(());
    eventually(&format!("{depth} in the queue"), full).await;
}

async fn until_reserved(app: &App, id: &str) {
    eventually("a reservation", async || (app.status(id).await == "reserved").then_some(())).await;
}

async fn what_a_queue_held_before_its_consumer_met_anything_is_not_lost_with_it(db: TestDb) {
    let app = App::start(&db).await;
    app.until_connected().await;
    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    let order = app.place("alice", &[("WIDGET-A", 1)]).await;
    until_depth(&app, 1).await;
    Stranger::on(&db).await.delete("inventory").await;
    app.tell("/v1/consumers/inventory/resume", &json!({})).await;
    until_reserved(&app, order["id"].as_str().unwrap()).await;
    app.stop().await;
}

/// The consumer has committed that it gives up, and its queue is deleted before it could reject the message.
async fn a_dead_letter_is_not_lost_with_its_queue(db: TestDb) {
    let app = App::start_with(&db, &["--retry-max", "1"]).await;
    app.until_connected().await;
    app.tell("/v1/lab/fail", &json!({ "consumer": "inventory", "times": 2 })).await;
    app.place("alice", &[("WIDGET-A", 1)]).await;
    app.place("bob", &[("WIDGET-A", 1)]).await;
    let letters = app.eventually_list("/v1/dead-letters", 2).await;
    let discarded = letters[0]["id"].as_str().unwrap();
    app.tell(&format!("/v1/dead-letters/{discarded}/discard"), &json!({ "reason": "for the test" })).await;
    // As if the other one had never come.
    plant(&db, &["DELETE FROM messaging_dead_letters WHERE state = 'open'"]).await;
    Stranger::on(&db).await.delete("inventory").await;
    let found = app.eventually_list("/v1/dead-letters", 2).await;
    let of_event = |message_id: &Value| found.iter().find(|letter| letter["message_id"] == *message_id).unwrap();
    assert_eq!(of_event(&letters[0]["message_id"])["state"], "discarded");
    assert_eq!(of_event(&letters[1]["message_id"])["state"], "open");
    app.stop().await;
}

async fn retries_and_redrives_are_not_lost_with_their_queue(db: TestDb) {
    let app = App::start_with(&db, &["--retry-base", "1s", "--retry-max", "2"]).await;
    app.until_connected().await;
    let stranger = Stranger::on(&db).await;
    let fail = async |times: i64| {
        app.tell("/v1/lab/fail", &json!({ "consumer": "inventory", "times": times })).await;
    };
    let pause = async || {
        app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    };
    let lose = async || {
        stranger.delete("inventory").await;
        app.tell("/v1/consumers/inventory/resume", &json!({})).await;
    };
    // One of our own, and one of which the outbox has nothing but the retry.
    fail(2).await;
    let order = app.place("alice", &[("WIDGET-A", 1)]).await;
    let order = order["id"].as_str().unwrap();
    let (theirs, event) = foreign_order("WIDGET-A", 1);
    stranger.publish("order.placed", event.to_string().as_bytes(), BasicProperties::default()).await;
    app.eventually_list("/v1/inbox?consumer=inventory&state=retrying", 2).await;
    pause().await;
    until_depth(&app, 2).await;
    lose().await;
    until_reserved(&app, order).await;
    app.eventually_list(&format!("/v1/reservations?order_id={theirs}"), 1).await;

    fail(2).await;
    let order = app.place("bob", &[("WIDGET-A", 1)]).await;
    let letters = app.eventually_list("/v1/dead-letters?state=open", 1).await;
    pause().await;
    app.tell(&format!("/v1/dead-letters/{}/redrive", letters[0]["id"].as_str().unwrap()), &json!({})).await;
    until_depth(&app, 1).await;
    lose().await;
    until_reserved(&app, order["id"].as_str().unwrap()).await;
    assert_eq!(app.stock("WIDGET-A").await, (100, 3), "each once");
    app.stop().await;
}

async fn a_deleted_exchange_is_told_of_and_declared_again(db: TestDb) {
    let app = App::start(&db).await;
    app.until_connected().await;
    assert_eq!(app.place_and_wait("alice", &[("WIDGET-A", 1)]).await["status"], "reserved");
    let stranger = Stranger::on(&db).await;
    stranger.channel.exchange_delete(stranger.name("events").into(), ExchangeDeleteOptions::default()).await.unwrap();
    for _ in 0..5 {
        app.place("bob", &[("WIDGET-A", 1)]).await;
    }
    let relay = async || app.read("/v1/health").await["loops"]["relay"].clone();
    let troubled = async || Some(relay().await).filter(|relay| relay["state"] == "troubled");
    let status = eventually("a relay in trouble", troubled).await;
    assert!(status["last_error"].as_str().unwrap().contains("no exchange"), "{status}");
    app.eventually_list("/v1/notifications", 6).await;
    eventually("a relay at work", async || (relay().await["state"] == "running").then_some(())).await;
    assert_eq!(
        db.count("SELECT COUNT(*) FROM messaging_outbox WHERE attempts > 0").await,
        0,
        "it was no message's fault"
    );
    assert_eq!(app.stock("WIDGET-A").await, (100, 6), "each once");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_message_that_the_broker_will_not_have_holds_up_no_other() {
    let broker = rabbit::faulty().await;
    let Wire::Rabbit { url, prefix } = Wire::on(broker.url()) else { unreachable!() };
    broker.eval(&format!(
        r#"rabbit_auth_backend_internal:add_user(<<"narrow">>, <<"narrow">>, <<"tests">>),
           rabbit_auth_backend_internal:set_permissions(<<"narrow">>, <<"/">>, <<".*">>, <<".*">>, <<".*">>, <<"tests">>),
           rabbit_auth_backend_internal:set_topic_permissions(
               <<"narrow">>, <<"/">>, <<"{prefix}.events">>, <<"^probe\\.">>, <<".*">>, <<"tests">>)"#
    ));
    let wire = Wire::Rabbit { url: url.replace("//", "//narrow:narrow@"), prefix };
    let db = TestDb::new(Engine::Sqlite).await.over(wire);
    let rig = Rig::new(&db).await;
    let (forbidden, mut events) = (event("secret.kept", json!({})), many("note", 20));
    events.insert(10, forbidden.clone());
    rig.tell(&events).await;
    assert_eq!(rig.relay.try_once().await.unwrap(), 21);
    for event in &events {
        let mut tx = rig.db.read().await.unwrap();
        let row = outbox::find(&mut tx, None, event.event_id).await.unwrap().unwrap();
        if event.event_id == forbidden.event_id {
            assert_eq!((row.status.as_str(), row.attempts), ("failed", 1));
            assert!(row.last_error.unwrap().contains("ACCESS_REFUSED"));
        } else {
            assert_eq!((row.status.as_str(), row.attempts), ("published", 0));
        }
    }
}

/// A road to a broker that carries so many bytes a second to it; its URL.
async fn slow_road(to: &str, bytes_per_second: f64) -> (String, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("amqp://{}", listener.local_addr().unwrap());
    let broker = to.strip_prefix("amqp://").unwrap().to_owned();
    let mut travelling = JoinSet::new();
    travelling.spawn(async move {
        let mut roads = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_broker, mut to_broker) = TcpStream::connect(&broker).await.unwrap().into_split();
            roads.spawn(async move { drop(copy(&mut from_broker, &mut to_client).await) });
            roads.spawn(async move {
                let mut bytes = [0; 1024];
                while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
                    tokio::time::sleep(Duration::from_secs_f64(count as f64 / bytes_per_second)).await;
                    to_broker.write_all(&bytes[..count]).await.unwrap();
                }
            });
        }
    });
    (url, travelling)
}

/// It confirms as messages come in, and that is all that can be asked of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_broker_that_is_slow_is_not_given_up_on() {
    const PATIENCE: Duration = Duration::from_secs(3);
    let db = TestDb::on_rabbit(Engine::Sqlite).await;
    let Wire::Rabbit { url, prefix } = &db.wire else { unreachable!() };
    let (url, _road) = slow_road(url, 50_000.0).await;
    let options = Options { confirm_timeout: PATIENCE, ..rabbit_options(&url, prefix) };
    let kernel_db = db.open(Clock::System).await;
    let rabbit = Rabbit::try_new(options, Resyncs::new(kernel_db.clone())).unwrap();
    let rig = Rig::on(kernel_db, Transport::Rabbit(rabbit), prefix).await;
    let text = "x".repeat(2500);
    let events: Vec<_> = (0..64).map(|_| told_with(json!({ "does": "note", "text": text }))).collect();
    rig.tell(&events).await;
    let began = tokio::time::Instant::now();
    assert_eq!(rig.relay.try_once().await.unwrap(), 64);
    assert!(began.elapsed() > PATIENCE, "the road was not slow: {:?}", began.elapsed());
    assert_eq!(rig.kernel.transport.obstacle(Way::Out), None);
    assert_eq!(rig.depth(&rig.queue).await.ready, 64);
}

async fn a_queue_that_is_not_as_declared_is_told_in_words(db: TestDb) {
    let stranger = Stranger::on(&db).await;
    let inventory = stranger.name("inventory");
    let declare = |name: String, options, arguments| stranger.channel.queue_declare(name.into(), options, arguments);
    declare(inventory.clone(), QueueDeclareOptions::durable(), FieldTable::default()).await.unwrap();
    let mut lower = FieldTable::default();
    lower.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    lower.insert("x-delivery-limit".into(), AMQPValue::LongInt(3));
    declare(stranger.name("orders.dlq"), QueueDeclareOptions::durable(), lower).await.unwrap();
    let app = App::start(&db).await;
    let error = eventually("a word on it", || async {
        let health = app.read("/v1/health").await;
        let error = health["broker"]["error"].as_str().unwrap_or_default().to_owned();
        error.contains(&inventory).then_some(error)
    })
    .await;
    assert!(error.contains("its x-dead-letter-exchange is none, Stockade needs"), "{error}");
    assert!(error.contains("its x-delivery-limit is 3, Stockade needs 1000000"), "both are told at once: {error}");
    assert!(error.contains(&format!("rabbitmqctl -p / delete_queue {inventory}`")), "{error}");
    assert!(error.contains("STOCKADE_QUEUE_PREFIX"), "{error}");
    assert_eq!(app.place("alice", &[("WIDGET-A", 1)]).await["status"], "placed", "orders are taken meanwhile");
    stranger.delete("inventory").await;
    stranger.delete("orders.dlq").await;
    app.eventually_list("/v1/notifications", 1).await;
    app.stop().await;
}

async fn of_a_pass_only_what_no_queue_took_is_refused(db: TestDb) {
    let rig = Rig::new(&db).await;
    let stranger = Stranger::on(&db).await;
    for queue in [&rig.queue, &rig.second_queue] {
        let exchange = stranger.name("events");
        stranger
            .channel
            .queue_unbind(queue.as_str().into(), exchange.into(), KEY.into(), FieldTable::default())
            .await
            .unwrap();
    }
    // Side by side, so that the broker confirms lost and taken ones together.
    let lost = many("note", 32);
    let taken: Vec<Entry> =
        (0..32).map(|_| Entry { id: mint_id(), target: rig.queue.clone(), ..Entry::from(&told("note")) }).collect();
    let mut tx = rig.db.begin().await.unwrap();
    for (event, entry) in lost.iter().zip(&taken) {
        outbox::append_events(&mut tx, vec![event.clone()]).await.unwrap();
        outbox::append_many(&mut tx, std::slice::from_ref(entry)).await.unwrap();
    }
    tx.commit().await.unwrap();
    assert_eq!(rig.relay.try_once().await.unwrap(), 64);
    let status = async |id| {
        let mut tx = rig.db.read().await.unwrap();
        outbox::find(&mut tx, None, id).await.unwrap().unwrap()
    };
    for event in &lost {
        let row = status(event.event_id).await;
        assert_eq!((row.status.as_str(), row.attempts), ("failed", 1));
        assert!(row.last_error.unwrap().contains("NO_ROUTE"));
    }
    for entry in &taken {
        assert_eq!(status(entry.id).await.status, "published");
    }
    // A missing binding is left to its consumer for a second. Then it is declared again, and the refused rows are published.
    eventually("the refused rows to be published", async || {
        rig.advance(Duration::from_secs(120)).await;
        rig.relay.try_once().await.unwrap();
        let left = "SELECT count(*) FROM messaging_outbox WHERE status <> 'published'";
        (rig.number(left).await == 0).then_some(())
    })
    .await;
    rig.settle().await;
    for event in &lost {
        assert_eq!((status(event.event_id).await.status.as_str(), rig.effects(event).await), ("published", 1));
    }
}

/// No server and no audit runs: the kernel resyncs by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn an_instance_whose_clock_is_slow_resyncs_a_deleted_queue() {
    let db = TestDb::on_rabbit(Engine::Postgres).await;
    let rig = Rig::new(&db).await;
    let lost = many("note", 3);
    rig.tell(&lost).await;
    assert_eq!(rig.relay.try_once().await.unwrap(), 3);
    Stranger::on(&db).await.delete("probe").await;
    let Wire::Rabbit { url, prefix } = &db.wire else { unreachable!() };
    let slow = db.open(Clock::manual(rig.db.clock().now().minus(Duration::from_secs(30)))).await;
    let resyncs = Resyncs::new(slow.clone());
    let rabbit = Rabbit::try_new(rabbit_options(url, prefix), resyncs.clone()).unwrap();
    let rig = Rig::on(slow, Transport::Rabbit(rabbit), prefix).await;
    let binding = Binding { consumer: Probe::NAME, queue: rig.queue.clone(), keys: Probe::KEYS };
    let topology = Arc::new(Topology { queues: vec![binding] });
    let mut tasks = JoinSet::new();
    tasks.spawn(resync::run(rig.kernel.clone(), topology, resyncs));
    for event in &lost {
        eventually("the effect of a lost event", async || {
            rig.settle().await;
            (rig.effects(event).await == 1).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn modules_may_run_in_processes_of_their_own() {
    let db = TestDb::on_rabbit(Engine::Postgres).await;
    let front = App::start_with(&db, &["--modules", "api,relay,orders"]).await;
    let back = App::start_with(&db, &["--modules", "inventory,notifications,ledger,dead-letters,relay"]).await;
    front.until_connected().await;
    front.put_stock("A", 5).await;
    assert_eq!(front.place_and_wait("alice", &[("A", 1)]).await["status"], "reserved");
    front.eventually_list("/v1/notifications", 1).await;
    front.tell("/v1/lab/publish", &json!({ "queue": "orders", "body": "no json" })).await;
    front.eventually_list("/v1/dead-letters", 1).await;
    let consumers = front.read("/v1/queues").await;
    for queue in consumers["data"].as_array().unwrap() {
        assert_eq!(queue["consumers"], 1, "{queue}");
    }
    front.stop().await;
    back.stop().await;
}

fn prefix(db: &TestDb) -> &str {
    match &db.wire {
        Wire::Rabbit { prefix, .. } => prefix,
        Wire::Table | Wire::InProcess => panic!("no broker"),
    }
}

each_database_on_rabbit!(
    a_message_carries_every_property_and_header,
    what_strangers_publish_is_taken_if_its_envelope_is_good,
    extra_queues_get_what_they_are_bound_to_and_have_dead_letter_queues,
    a_deleted_queue_is_declared_again_and_nothing_is_lost,
    a_dead_letter_is_not_lost_with_its_queue,
    a_pause_makes_no_duplicates,
    what_a_queue_held_before_its_consumer_met_anything_is_not_lost_with_it,
    retries_and_redrives_are_not_lost_with_their_queue,
    a_deleted_exchange_is_told_of_and_declared_again,
    a_queue_that_is_not_as_declared_is_told_in_words,
    of_a_pass_only_what_no_queue_took_is_refused,
);
