//! The messaging kernel by itself: one made-up consumer, the probe, whose events say what its handler is to do.
//!
//! Time is in the test's hand. On SQLite the clock is manual; on Postgres, which goes by its own clock, [`Rig::advance`]
//! moves every lease and due time into the past instead, which comes to the same.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use sqlx::AssertSqlSafe;
use stockade_kernel::clock::{Clock, Timestamp, millis, mint_id};
use stockade_kernel::db::{Conn, Db, Tx};
use stockade_kernel::messaging::consumer::{Consumer, read_delivery};
use stockade_kernel::messaging::dead_letters::{self, Letter, LetterRow};
use stockade_kernel::messaging::event::hash_of;
use stockade_kernel::messaging::faults::Faults;
use stockade_kernel::messaging::health::Health;
use stockade_kernel::messaging::inbox::{self, Arrival, InboxRow, Mark, State};
use stockade_kernel::messaging::office::{Office, Sender};
use stockade_kernel::messaging::outbox;
use stockade_kernel::messaging::pause::Pauses;
use stockade_kernel::messaging::relay::Relay;
use stockade_kernel::messaging::resync::Resyncs;
use stockade_kernel::messaging::retention::Keep;
use stockade_kernel::messaging::retry::Backoff;
use stockade_kernel::messaging::transport::memory::{Chaos, MemoryBroker};
use stockade_kernel::messaging::transport::rabbit::{self, Rabbit};
use stockade_kernel::messaging::transport::table::TableQueue;
use stockade_kernel::messaging::transport::{
    Binding, Delivery, Depth, RawMessage, Subscription, Tag, Topology, Transport, TransportError, Way, dlq_of,
};
use stockade_kernel::messaging::{Event, Kernel, Message, Origin, Outcome, Reaction, Tuning};
use stockade_kernel::on;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{DEADLINE, TestDb, Wire, eventually};

/// Names on the embedded queue; on a broker that others use too they begin otherwise. See [`Rig::queue`].
const PREFIX: &str = "test";
/// The probe's queue on the embedded queue.
pub const QUEUE: &str = "test.probe";
/// A broker that has sent nothing for this long has nothing to send.
pub const QUIET: Duration = Duration::from_millis(300);
pub const KEY: &str = "probe.told";
pub const LEASE: Duration = Duration::from_secs(60);
pub const WAIT_DEADLINE: Duration = Duration::from_secs(300);
/// Longer than any delay or lease of a rig.
pub const AGES: Duration = Duration::from_secs(600);
pub const EVENT_BYTES_MAX: usize = 64 * 1024;
pub const ATTEMPTS_MAX: i32 = 3;
/// Calls that a consumer makes at once.
pub const CALLS_MAX: usize = 4;

/// How long a rig keeps things.
pub const KEEP: Keep = Keep {
    outbox: Duration::from_secs(30 * 86_400),
    archive: Duration::from_secs(45 * 86_400),
    inbox: Duration::from_secs(90 * 86_400),
    dead_letters: Duration::from_secs(30 * 86_400),
    look_every: Duration::from_secs(60),
};

/// What an event asks the probe's handler to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Does {
    /// Write one row, the effect.
    Note,
    Retry,
    Reject,
    Panic,
    /// Break a constraint, which fails the whole batch.
    Violate,
    /// Meet a database that is away.
    Away,
    /// On Postgres, ask for more than a statement may take.
    TimeOut,
    /// Write the row and then never come back.
    Hang,
    /// Write the row and wait for [`Probe::let_go`].
    Hold,
}

#[derive(Debug, Deserialize)]
pub struct Told {
    pub does: Does,
    #[serde(default)]
    pub text: String,
}

/// The handler under test. Clones share what they remember.
#[derive(Clone, Default)]
pub struct Probe {
    inner: Arc<Memory>,
}

#[derive(Default)]
struct Memory {
    batches: Mutex<Vec<Vec<Uuid>>>,
    healed: AtomicBool,
    holding: Notify,
    go: Notify,
}

impl Probe {
    /// From now on every event is simply noted.
    pub fn heal(&self) {
        self.inner.healed.store(true, Ordering::SeqCst);
    }

    /// The batches handed to the handler so far, failed ones included.
    pub fn batches(&self) -> Vec<Vec<Uuid>> {
        self.inner.batches.lock().unwrap().clone()
    }

    /// Waits until an event is being held (or hangs).
    pub async fn until_holding(&self) {
        self.inner.holding.notified().await;
    }

    pub fn let_go(&self) {
        self.inner.go.notify_one();
    }
}

impl Reaction for Probe {
    const NAME: &'static str = "probe";
    const KEYS: &'static [&'static str] = &[KEY];
    type Fact = Told;

    fn decode(_key: &str, payload: &RawValue) -> Result<Told, serde_json::Error> {
        serde_json::from_str(payload.get())
    }

    async fn react(&self, tx: &mut Tx, batch: &[&Message<Told>]) -> sqlx::Result<Vec<Outcome>> {
        self.inner.batches.lock().unwrap().push(batch.iter().map(|message| message.event.event_id).collect());
        let healed = self.inner.healed.load(Ordering::SeqCst);
        let mut outcomes = Vec::with_capacity(batch.len());
        for message in batch {
            let Told { does, text } = &message.fact;
            outcomes.push(match if healed { Does::Note } else { *does } {
                Does::Retry => Outcome::retry(text),
                Does::Reject => Outcome::reject(text),
                Does::Panic => panic!("{text}"),
                Does::Away => return Err(sqlx::Error::PoolTimedOut),
                Does::TimeOut => {
                    let Conn::Postgres(c) = tx.conn() else { panic!("statements on SQLite have no time limit") };
                    sqlx::raw_sql("SET LOCAL statement_timeout = 50; SELECT pg_sleep(60)").execute(&mut **c).await?;
                    Outcome::Done
                }
                does => {
                    note(tx, message.event.event_id, does).await?;
                    if does == Does::Hang || does == Does::Hold {
                        self.inner.holding.notify_one();
                        if does == Does::Hang {
                            std::future::pending::<()>().await;
                        }
                        self.inner.go.notified().await;
                    }
                    Outcome::Done
                }
            });
        }
        Ok(outcomes)
    }
}

async fn note(tx: &mut Tx, event_id: Uuid, does: Does) -> sqlx::Result<()> {
    on!(tx, c => {
        sqlx::query("INSERT INTO probe_effects (event_id, does) VALUES ($1, $2)")
            .bind(event_id.to_string())
            .bind(format!("{does:?}"))
            .execute(c)
            .await
            .map(drop)
    })
}

/// A kernel with the probe as its only consumer.
pub struct Rig {
    pub db: Db,
    /// The probe's queue.
    pub queue: String,
    /// Bound to the same key, and consumed by nobody.
    pub second_queue: String,
    /// Keeps the connections to a broker up.
    _tending: Arc<JoinSet<()>>,
    pub kernel: Kernel,
    pub probe: Probe,
    pub relay: Relay,
    pub consumer: Consumer<Probe>,
    pub office: Office,
    pub sender: Sender,
    in_process: Option<InProcess>,
}

/// The consumer's side of in-process delivery.
#[derive(Default)]
struct InProcess {
    /// The consumer's subscription between two batches: messages are delivered to it in memory meanwhile.
    subscription: Mutex<Option<Subscription>>,
    /// The outbox holds each event once: further copies go straight into the queue.
    appended: Mutex<HashSet<Uuid>>,
}

impl Rig {
    /// Over the transport that goes with the database.
    pub async fn new(db: &TestDb) -> Self {
        Self::with_consumers(db, &[]).await
    }

    /// With queues for more consumers: a broker makes queues as it is connected to.
    pub async fn with_consumers(db: &TestDb, more: &[(&'static str, &'static [&'static str])]) -> Self {
        match &db.wire {
            Wire::Table | Wire::InProcess => {
                let rig = Self::with_lease(db, LEASE).await;
                rig.kernel.transport.declare(&Topology { queues: bindings(PREFIX, more) }).await.unwrap();
                rig
            }
            Wire::Rabbit { url, prefix } => {
                let db = open(db).await;
                let rabbit = Rabbit::try_new(rabbit_options(url, prefix), Resyncs::new(db.clone())).unwrap();
                Self::on_with(db, Transport::Rabbit(rabbit), prefix, more).await
            }
        }
    }

    /// Over the table queue.
    pub async fn with_lease(db: &TestDb, lease: Duration) -> Self {
        let in_process = db.wire == Wire::InProcess;
        let db = open(db).await;
        let transport = Transport::Table(TableQueue::new(db.clone(), lease));
        let mut rig = Self::on(db, transport, PREFIX).await;
        if in_process {
            rig.kernel.pauses = Pauses::load(rig.db.clone(), true).await.unwrap();
            rig.relay = Relay::new(rig.kernel.clone());
            rig.consumer = Consumer::new(rig.kernel.clone(), rig.probe.clone());
            rig.in_process = Some(InProcess::default());
            rig.keep_subscription(rig.open_subscription().await);
        }
        rig
    }

    /// Over the broker in memory.
    pub async fn in_memory(db: &TestDb, seed: u64, chaos: Chaos) -> (Self, MemoryBroker) {
        let db = open(db).await;
        let broker = MemoryBroker::new(seed, chaos, db.clock().clone());
        (Self::on(db, Transport::Memory(broker.clone()), PREFIX).await, broker)
    }

    pub async fn on(db: Db, transport: Transport, prefix: &str) -> Self {
        Self::on_with(db, transport, prefix, &[]).await
    }

    async fn on_with(
        db: Db,
        transport: Transport,
        prefix: &str,
        more: &[(&'static str, &'static [&'static str])],
    ) -> Self {
        let mut tx = db.begin().await.unwrap();
        on!(tx, c => sqlx::query(
            "CREATE TABLE IF NOT EXISTS probe_effects (event_id text NOT NULL, does text NOT NULL CHECK (does <> 'Violate'))",
        ).execute(c).await.map(drop))
        .unwrap();
        tx.commit().await.unwrap();
        let bind = |queue: &str| Binding { consumer: Probe::NAME, queue: queue.to_owned(), keys: Probe::KEYS };
        let (queue, second_queue) = (format!("{prefix}.probe"), format!("{prefix}.shadow"));
        let mut queues = vec![bind(&queue), bind(&second_queue)];
        queues.extend(bindings(prefix, more));
        transport.declare(&Topology { queues }).await.unwrap();
        let mut tending = JoinSet::new();
        if let Transport::Rabbit(rabbit) = &transport {
            tending.spawn(rabbit.clone().tend());
        }
        let open = async { tokio::join!(transport.until_open(Way::Out), transport.until_open(Way::In)) };
        tokio::time::timeout(DEADLINE, open).await.expect("the broker is there");
        let kernel = Kernel {
            pauses: Pauses::load(db.clone(), false).await.unwrap(),
            db: db.clone(),
            transport,
            health: Health::default(),
            faults: Faults::default(),
            tuning: Tuning { queue_prefix: prefix.to_owned(), ..tuning() },
        };
        let probe = Probe::default();
        let sender = Sender {
            consumer: Probe::NAME,
            check: |delivery, bytes_max| read_delivery::<Probe>(delivery, bytes_max).map(drop),
        };
        Self {
            db,
            queue,
            second_queue,
            _tending: Arc::new(tending),
            relay: Relay::new(kernel.clone()),
            consumer: Consumer::new(kernel.clone(), probe.clone()),
            office: Office::new(kernel.clone(), vec![sender.clone()]),
            kernel,
            probe,
            sender,
            in_process: None,
        }
    }

    pub fn is_in_process(&self) -> bool {
        self.in_process.is_some()
    }

    /// The same, seen by another process that has just started.
    pub fn restarted(self, pauses: Pauses) -> Self {
        Self { kernel: Kernel { pauses, ..self.kernel }, ..self }
    }

    pub fn is_postgres(&self) -> bool {
        self.db.engine_name() == "postgres"
    }

    /// Lets time pass, as far as leases and due times are concerned.
    pub async fn advance(&self, span: Duration) {
        self.db.clock().advance(span);
        if self.is_postgres() {
            for shift in [
                "UPDATE messaging_outbox SET available_at = available_at - $1 * interval '1 ms'",
                "UPDATE messaging_queue SET lease_until = lease_until - $1 * interval '1 ms'",
                "UPDATE messaging_bundles SET lease_until = lease_until - $1 * interval '1 ms'",
                "UPDATE messaging_inbox SET lease_until = lease_until - $1 * interval '1 ms',
                     deadline_at = deadline_at - $1 * interval '1 ms'",
                "UPDATE orders_orders SET hold_expires_at = hold_expires_at - $1 * interval '1 ms'",
                "UPDATE orders_holds SET expires_at = expires_at - $1 * interval '1 ms'",
                "UPDATE messaging_jobs SET next_at = next_at - $1 * interval '1 ms'",
            ] {
                let mut tx = self.db.begin().await.unwrap();
                on!(tx, c => sqlx::query(shift).bind(millis(span)).execute(c).await.map(drop)).unwrap();
                tx.commit().await.unwrap();
            }
        }
    }

    /// Writes facts to the outbox, in one commit.
    pub async fn tell(&self, events: &[Event]) {
        let mut tx = self.db.begin().await.unwrap();
        outbox::append_events(&mut tx, events.to_vec()).await.unwrap();
        tx.commit().await.unwrap();
    }

    /// Puts an event's bytes straight into the probe's queue, as a redelivery would. With in-process delivery the first
    /// copy goes through the outbox.
    pub async fn deliver(&self, event: &Event, times: u32) {
        let appended = self.append_new(std::slice::from_ref(event)).await.len();
        let times = times - u32::try_from(appended).unwrap();
        if times > 0 {
            self.deliver_raw(&event.to_body(), None, Map::new(), times).await;
        }
    }

    /// Delivers one copy of each event; with in-process delivery all new ones by one transaction, in one batch row if
    /// they are enough.
    pub async fn deliver_all<'a>(&self, events: impl IntoIterator<Item = &'a Event>) {
        let events: Vec<Event> = events.into_iter().cloned().collect();
        let appended = self.append_new(&events).await;
        for event in events.iter().filter(|event| !appended.contains(&event.event_id)) {
            self.deliver_raw(&event.to_body(), None, Map::new(), 1).await;
        }
    }

    /// With in-process delivery, writes those events to the outbox that are not in it; returns their ids.
    async fn append_new(&self, events: &[Event]) -> Vec<Uuid> {
        let Some(InProcess { appended, .. }) = &self.in_process else { return Vec::new() };
        let is_new = |event: &&Event| appended.lock().unwrap().insert(event.event_id);
        let new: Vec<Event> = events.iter().filter(is_new).cloned().collect();
        if !new.is_empty() {
            self.tell(&new).await;
        }
        new.iter().map(|event| event.event_id).collect()
    }

    pub async fn deliver_raw(&self, body: &[u8], message_id: Option<&str>, headers: Map<String, Value>, times: u32) {
        let message = RawMessage {
            queue: self.queue.clone(),
            routing_key: KEY.to_owned(),
            message_id: message_id.map(str::to_owned),
            correlation_id: None,
            headers,
            body: Bytes::copy_from_slice(body),
        };
        self.kernel.transport.publish_raw(&message, times).await.unwrap();
    }

    pub async fn subscribe(&self, queue: &str) -> Subscription {
        self.kernel.transport.subscribe(queue).await.unwrap()
    }

    /// The probe's subscription: with in-process delivery the one that has been open since the last batch.
    pub async fn consumer_subscription(&self) -> Subscription {
        let open = self.in_process.as_ref().and_then(|in_process| in_process.subscription.lock().unwrap().take());
        match open {
            Some(subscription) => subscription,
            None => self.open_subscription().await,
        }
    }

    async fn open_subscription(&self) -> Subscription {
        let mut subscription = self.subscribe(&self.queue).await;
        if self.is_in_process() {
            subscription.open_hatch();
            // The first take makes room for in-process deliveries. What it finds in the queue is not wanted yet.
            let found = subscription.take(self.kernel.tuning.batch).await.unwrap();
            subscription.release(&tags(&found)).await.unwrap();
        }
        subscription
    }

    /// Keeps the probe's subscription open until the next batch.
    pub fn keep_subscription(&self, subscription: Subscription) {
        if let Some(in_process) = &self.in_process {
            *in_process.subscription.lock().unwrap() = Some(subscription);
        }
    }

    /// Waits until a subscription may have something to take.
    pub async fn ready(&self, subscription: &mut Subscription) {
        // A subscription that has been open for a while finds a lease that ran out only by polling.
        subscription.ready(if self.is_in_process() { self.kernel.tuning.poll } else { DEADLINE }).await;
    }

    /// One batch of the probe. With in-process delivery its rows are deleted later, as in the consumer loop.
    pub async fn try_once(&self, subscription: &mut Subscription) -> Result<usize, TransportError> {
        self.try_once_as(&self.consumer, subscription).await
    }

    pub async fn try_once_as(
        &self,
        consumer: &Consumer<Probe>,
        subscription: &mut Subscription,
    ) -> Result<usize, TransportError> {
        if !self.is_in_process() {
            return consumer.try_once(subscription).await;
        }
        let (count, done) = consumer.try_unacknowledged(subscription).await?;
        subscription.ack_soon(&done).await?;
        Ok(count)
    }

    /// Runs the consumer loop, which has a subscription of its own.
    pub async fn run(&self, stop: CancellationToken) {
        if let Some(in_process) = &self.in_process {
            let open = in_process.subscription.lock().unwrap().take();
            if let Some(open) = open {
                open.close().await;
            }
        }
        Consumer::new(self.kernel.clone(), self.probe.clone()).run(stop).await;
    }

    /// With in-process delivery, waits until the consumer loop takes part in it.
    pub async fn until_in_process(&self) {
        if self.is_in_process() {
            let has_room = async || self.db.hatches().queues.with_room().contains_key(&self.queue).then_some(());
            eventually("in-process delivery", has_room).await;
        }
    }

    pub fn is_on_rabbit(&self) -> bool {
        matches!(self.kernel.transport, Transport::Rabbit(_))
    }

    /// Takes as many deliveries as there ought to be.
    pub async fn take(&self, subscription: &mut Subscription, count: usize) -> Vec<Delivery> {
        let mut taken = Vec::new();
        let all = async {
            while taken.len() < count {
                taken.extend(subscription.take(count - taken.len()).await.unwrap());
                subscription.ready(Duration::from_millis(20)).await;
            }
        };
        let in_time = tokio::time::timeout(DEADLINE, all).await.is_ok();
        assert!(in_time, "{} of {count} messages came", taken.len());
        taken
    }

    /// Sees that there is nothing to take.
    pub async fn take_nothing(&self, subscription: &mut Subscription) {
        self.wait_for_broker(subscription).await;
        assert!(subscription.take(9).await.unwrap().is_empty());
    }

    /// Takes that many messages and is never heard of again.
    pub async fn take_and_vanish(&self, count: usize) {
        let mut subscription = self.consumer_subscription().await;
        self.take(&mut subscription, count).await;
        drop(subscription);
        self.reopen().await;
        self.advance(LEASE + Duration::from_secs(1)).await;
    }

    /// After a consumer vanished, opens the subscription of the process that comes after it: the in-process
    /// deliveries of a process that died do not outlive it.
    pub async fn reopen(&self) {
        if self.is_in_process() {
            self.keep_subscription(self.open_subscription().await);
        }
    }

    /// One batch of the consumer, or all there is on a broker, which sends when it likes; how many deliveries.
    pub async fn consume(&self) -> usize {
        let mut subscription = self.consumer_subscription().await;
        let mut count = 0;
        loop {
            if self.is_in_process() {
                self.ready(&mut subscription).await;
            }
            self.wait_for_broker(&mut subscription).await;
            let batch = self.try_once(&mut subscription).await.unwrap();
            count += batch;
            if batch == 0 || !self.is_on_rabbit() {
                break;
            }
        }
        match self.is_in_process() {
            true => self.keep_subscription(subscription),
            false => self.leave(subscription).await,
        }
        count
    }

    /// The same for the dead-letter office.
    pub async fn file(&self) -> usize {
        let mut subscription = self.subscribe(&dlq_of(&self.queue)).await;
        let mut count = 0;
        loop {
            self.wait_for_broker(&mut subscription).await;
            let batch = self.office.try_once(&self.sender, &mut subscription).await.unwrap();
            count += batch;
            if batch == 0 || !self.is_on_rabbit() {
                break;
            }
        }
        self.leave(subscription).await;
        count
    }

    /// Signs off from a broker, which would go on sending to a consumer that it has not missed yet. The table queue's
    /// subscriptions just end, as those of a process that died would.
    pub async fn leave(&self, subscription: Subscription) {
        if self.is_on_rabbit() {
            subscription.close().await;
        }
    }

    /// Gives a broker time to send what it has.
    async fn wait_for_broker(&self, subscription: &mut Subscription) {
        if self.is_on_rabbit() {
            subscription.ready(QUIET).await;
        }
    }

    /// Relays, consumes and files until there is nothing to do just now.
    pub async fn settle(&self) {
        while self.relay.try_once().await.unwrap() > 0 || self.consume().await > 0 || self.file().await > 0 {}
    }

    pub async fn depth(&self, queue: &str) -> Depth {
        self.kernel.transport.depths(&[queue.to_owned()]).await.unwrap().remove(0)
    }

    /// How often this event has had its effect.
    pub async fn effects(&self, event: &Event) -> i64 {
        let mut tx = self.db.begin().await.unwrap();
        on!(tx, c => {
            sqlx::query_scalar("SELECT count(*) FROM probe_effects WHERE event_id = $1")
                .bind(event.event_id.to_string())
                .fetch_one(c)
                .await
        })
        .unwrap()
    }

    /// The number that a SELECT of one number gives.
    pub async fn number(&self, sql: &str) -> i64 {
        let mut tx = self.db.begin().await.unwrap();
        on!(tx, c => sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(c).await).unwrap()
    }

    pub async fn execute(&self, sql: &str) {
        let mut tx = self.db.begin().await.unwrap();
        on!(tx, c => sqlx::query(AssertSqlSafe(sql.to_owned())).execute(c).await.map(drop)).unwrap();
        tx.commit().await.unwrap();
    }

    /// Has the first two inserts into a table of Postgres fail as those of a transaction that lost to another.
    pub async fn lose_twice(&self, table: &str, code: &str) {
        self.execute("CREATE SEQUENCE lost").await;
        self.execute(&format!(
            "CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 -- What a sequence counts stays counted when the transaction is rolled back.
                 IF nextval('lost') <= 2 THEN RAISE EXCEPTION 'lost' USING ERRCODE = '{code}'; END IF;
                 RETURN NEW;
             END $$"
        ))
        .await;
        self.execute(&format!("CREATE TRIGGER lose BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION lose()"))
            .await;
    }

    pub async fn inbox(&self, event: &Event) -> Option<InboxRow> {
        let mut tx = self.db.begin().await.unwrap();
        let query = inbox::Query { event_id: Some(event.event_id), limit: 2, ..inbox::Query::default() };
        let mut rows = inbox::list(&mut tx, query).await.unwrap();
        assert!(rows.len() <= 1, "one row per consumer and event");
        rows.pop()
    }

    /// Puts the event's inbox row into a state; `due_in` is of `retrying`.
    pub async fn plant(&self, event: &Event, state: State, due_in: Option<Duration>) {
        let mut tx = self.db.begin().await.unwrap();
        let (now, body_hash) = (tx.now(), hash_of(&event.to_body()));
        let arrival = Arrival { event, key: KEY, body_hash: &body_hash };
        inbox::insert_new(&mut tx, Probe::NAME, &[arrival], now, now).await.unwrap();
        let (event_id, attempts) = (event.event_id, 1);
        let mark = Mark { event_id, state, attempts, due_in, reason: Some("planted".into()), last_error: None };
        inbox::mark_many(&mut tx, Probe::NAME, &[mark], now).await.unwrap();
        tx.commit().await.unwrap();
    }

    /// Every dead letter, oldest first.
    pub async fn letters(&self) -> Vec<LetterRow> {
        let mut tx = self.db.begin().await.unwrap();
        let query = dead_letters::Query { limit: 1000, ..dead_letters::Query::default() };
        let mut letters = dead_letters::list(&mut tx, query).await.unwrap();
        letters.reverse();
        letters
    }

    pub async fn letter(&self, id: Uuid) -> Letter {
        let mut tx = self.db.begin().await.unwrap();
        dead_letters::find(&mut tx, None, id).await.unwrap().expect("the letter is there")
    }

    pub async fn redrive(&self, id: Uuid) -> dead_letters::Redriven {
        let letter = self.letter(id).await;
        let mut tx = self.db.begin().await.unwrap();
        let redriven = dead_letters::redrive(&mut tx, &letter).await.unwrap();
        tx.commit().await.unwrap();
        redriven
    }
}

/// The process clock of a rig, years ahead of the database's own: code on Postgres that mixes the two fails.
pub const PROCESS_CLOCK: Timestamp = Timestamp::from_millis(1_950_000_000_000);

async fn open(db: &TestDb) -> Db {
    db.open(Clock::manual(PROCESS_CLOCK)).await
}

fn bindings(prefix: &str, consumers: &[(&'static str, &'static [&'static str])]) -> Vec<Binding> {
    let bind = |(consumer, keys): &(&'static str, &'static [&'static str])| Binding {
        consumer,
        queue: format!("{prefix}.{consumer}"),
        keys,
    };
    consumers.iter().map(bind).collect()
}

pub fn tags(deliveries: &[Delivery]) -> Vec<Tag> {
    deliveries.iter().map(|delivery| delivery.tag).collect()
}

pub fn rabbit_options(url: &str, prefix: &str) -> rabbit::Options {
    rabbit::Options {
        url: url.to_owned(),
        prefix: prefix.to_owned(),
        extra_queues: Vec::new(),
        prefetch: 4096,
        heartbeat: Duration::from_secs(10),
        confirm_timeout: Duration::from_secs(10),
    }
}

pub fn tuning() -> Tuning {
    Tuning {
        queue_prefix: PREFIX.to_owned(),
        outbox_batch: 64,
        outbox_poll: Duration::from_millis(20),
        outbox_backoff: Backoff { base: Duration::from_secs(5), cap: Duration::from_secs(60), attempts_max: 30 },
        outbox_lease: LEASE,
        batch: 128,
        poll: Duration::from_millis(20),
        calls_max: CALLS_MAX,
        call_timeout: Duration::from_secs(5),
        call_lease: LEASE,
        retry: Backoff {
            base: Duration::from_secs(5),
            cap: Duration::from_secs(60),
            attempts_max: ATTEMPTS_MAX.unsigned_abs(),
        },
        wait_deadline: WAIT_DEADLINE,
        event_bytes_max: EVENT_BYTES_MAX,
        keep: KEEP,
    }
}

/// A fact for the probe.
pub fn told(does: &str) -> Event {
    told_with(json!({ "does": does, "text": format!("{does} on purpose") }))
}

pub fn told_with(payload: Value) -> Event {
    event(KEY, payload)
}

pub fn event(key: &'static str, payload: Value) -> Event {
    let origin = Origin {
        group_id: "g".to_owned(),
        subsidiary_id: None,
        correlation_id: mint_id().to_string(),
        causation_id: None,
        traceparent: None,
    };
    Event::new(key, mint_id().to_string(), origin, PROCESS_CLOCK, &payload)
}

pub fn many(does: &str, count: usize) -> Vec<Event> {
    (0..count).map(|_| told(does)).collect()
}
