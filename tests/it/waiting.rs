//! Events that come before their predecessors: kept, run with them, and given up on in the end.
//!
//! A made-up consumer, the saga, hears that something began, went on and ended, in whatever order. Each waits for the
//! one before it. What it has heard of a saga is a row, which every event locks before it decides.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use serde_json::value::RawValue;
use stockade_kernel::clock::mint_id;
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::consumer::{Consumer, read_delivery};
use stockade_kernel::messaging::dead_letters::Redriven;
use stockade_kernel::messaging::inbox::InboxRow;
use stockade_kernel::messaging::office::{Office, Sender};
use stockade_kernel::messaging::transport::{RawMessage, Subscription, dlq_of};
use stockade_kernel::messaging::{Event, Message, Origin, Outcome, Reaction};
use stockade_kernel::on;
use tokio::sync::Notify;

use crate::support::kernel::{AGES, ATTEMPTS_MAX, PROCESS_CLOCK, Rig, WAIT_DEADLINE, tuning};
use crate::support::{DEADLINE, Engine, TestDb, each_database, each_database_on_rabbit};

const BEGAN: &str = "saga.began";
const WENT: &str = "saga.went";
const ENDED: &str = "saga.ended";

/// Clones share what they remember.
#[derive(Clone, Default)]
struct Saga {
    inner: Arc<Memory>,
}

#[derive(Default)]
struct Memory {
    /// How many events each call of the handler was given.
    batches: Mutex<Vec<usize>>,
    /// Let events that have what they waited for panic, or hang.
    panics: AtomicBool,
    hangs: AtomicBool,
    hanging: Notify,
    committed: AtomicUsize,
}

impl Reaction for Saga {
    const NAME: &'static str = "saga";
    const KEYS: &'static [&'static str] = &[BEGAN, WENT, ENDED];
    const AWAITED: &'static [&'static str] = &[BEGAN, WENT];
    type Fact = ();

    fn decode(_key: &str, _payload: &RawValue) -> Result<(), serde_json::Error> {
        Ok(())
    }

    async fn react(&self, tx: &mut Tx, batch: &[&Message<()>]) -> sqlx::Result<Vec<Outcome>> {
        self.inner.batches.lock().unwrap().push(batch.len());
        let mut outcomes = Vec::new();
        for message in batch {
            let step = match message.key {
                BEGAN => 1,
                WENT => 2,
                _ => 3,
            };
            let reached = lock(tx, &message.event.aggregate_id).await?;
            if step > 1 && reached + 1 >= step {
                assert!(!self.inner.panics.load(Ordering::SeqCst), "panics on purpose");
                if self.inner.hangs.load(Ordering::SeqCst) {
                    self.inner.hanging.notify_one();
                    std::future::pending::<()>().await;
                }
            }
            outcomes.push(match (step, reached) {
                (2, 0) => Outcome::wait_for(BEGAN),
                (3, 0 | 1) => Outcome::wait_for(WENT),
                _ => {
                    write(tx, &message.event.aggregate_id, step).await?;
                    Outcome::Done
                }
            });
        }
        Ok(outcomes)
    }

    fn committed(&self, batch: &[&Message<()>], _outcomes: &[Outcome]) {
        self.inner.committed.fetch_add(batch.len(), Ordering::SeqCst);
    }
}

/// Locks the saga's row, written if it is not there, and returns how far the saga has come.
async fn lock(tx: &mut Tx, id: &str) -> sqlx::Result<i64> {
    on!(tx, c => {
        sqlx::query_scalar(
            "INSERT INTO saga_steps (id, reached, effects) VALUES ($1, 0, 0)
             ON CONFLICT (id) DO UPDATE SET reached = saga_steps.reached RETURNING reached",
        )
        .bind(id)
        .fetch_one(c)
        .await
    })
}

async fn write(tx: &mut Tx, id: &str, step: i64) -> sqlx::Result<()> {
    on!(tx, c => {
        sqlx::query(
            "UPDATE saga_steps SET effects = effects + 1, reached = CASE WHEN reached < $2 THEN $2 ELSE reached END
             WHERE id = $1",
        )
        .bind(id)
        .bind(step)
        .execute(c)
        .await
        .map(drop)
    })
}

/// A kernel with the saga as its consumer.
struct Stage {
    rig: Rig,
    queue: String,
    saga: Saga,
    consumer: Consumer<Saga>,
    office: Office,
    sender: Sender,
}

impl Stage {
    async fn new(db: &TestDb) -> Self {
        let rig = Rig::with_consumers(db, &[(Saga::NAME, Saga::KEYS)]).await;
        rig.execute(
            "CREATE TABLE saga_steps (id text NOT NULL PRIMARY KEY, reached bigint NOT NULL, effects bigint NOT NULL)",
        )
        .await;
        let queue = rig.kernel.tuning.queue_name(Saga::NAME);
        let saga = Saga::default();
        let sender = Sender {
            consumer: Saga::NAME,
            check: |delivery, bytes_max| read_delivery::<Saga>(delivery, bytes_max).map(drop),
        };
        Self {
            consumer: Consumer::new(rig.kernel.clone(), saga.clone()),
            office: Office::new(rig.kernel.clone(), vec![sender.clone()]),
            rig,
            queue,
            saga,
            sender,
        }
    }

    /// Puts events into the queue and takes them as one batch.
    async fn deliver(&self, events: &[&Event]) {
        for event in events {
            self.deliver_body(&event.to_body()).await;
        }
        self.consume_all(events.len()).await;
    }

    async fn deliver_body(&self, body: &[u8]) {
        let message = RawMessage {
            queue: self.queue.clone(),
            routing_key: String::new(),
            message_id: None,
            correlation_id: None,
            headers: serde_json::Map::new(),
            body: Bytes::copy_from_slice(body),
        };
        self.rig.kernel.transport.publish_raw(&message, 1).await.unwrap();
    }

    async fn consume(&self) {
        self.consume_all(1).await;
    }

    /// Consumes all there is; from a broker, which sends when it likes, that many deliveries.
    async fn consume_all(&self, count: usize) {
        let mut subscription = self.rig.subscribe(&self.queue).await;
        let mut taken = 0;
        while self.is_more_to_come(&mut subscription, count - taken).await {
            match self.consumer.try_once(&mut subscription).await.unwrap() {
                0 if !self.rig.is_on_rabbit() => break,
                batch => taken = count.min(taken + batch),
            }
        }
        self.rig.leave(subscription).await;
    }

    async fn file(&self) {
        let mut subscription = self.rig.subscribe(&dlq_of(&self.queue)).await;
        self.is_more_to_come(&mut subscription, 1).await;
        while self.office.try_once(&self.sender, &mut subscription).await.unwrap() > 0 {}
        self.rig.leave(subscription).await;
    }

    /// Waits for a broker that still has that many to send.
    async fn is_more_to_come(&self, subscription: &mut Subscription, count: usize) -> bool {
        if self.rig.is_on_rabbit() && count > 0 {
            subscription.ready(DEADLINE).await;
        }
        count > 0 || !self.rig.is_on_rabbit()
    }

    async fn row(&self, event: &Event) -> InboxRow {
        self.rig.inbox(event).await.unwrap()
    }

    async fn states(&self, events: &[&Event]) -> Vec<String> {
        let mut states = Vec::new();
        for event in events {
            states.push(self.row(event).await.state);
        }
        states
    }

    /// (how far it has come, how many effects that took)
    async fn reached(&self, event: &Event) -> (i64, i64) {
        let of = |column| format!("SELECT {column} FROM saga_steps WHERE id = '{}'", event.aggregate_id);
        (self.rig.number(&of("reached")).await, self.rig.number(&of("effects")).await)
    }

    async fn waiting(&self) -> i64 {
        self.rig.number("SELECT count(*) FROM messaging_inbox WHERE state = 'waiting'").await
    }
}

fn about(id: &str, group_id: &str, key: &'static str) -> Event {
    let origin = Origin {
        group_id: group_id.to_owned(),
        subsidiary_id: None,
        correlation_id: mint_id().to_string(),
        causation_id: None,
        traceparent: None,
    };
    Event::new(key, id.to_owned(), origin, PROCESS_CLOCK, &json!({}))
}

/// The three events of one saga.
fn saga() -> [Event; 3] {
    let id = mint_id().to_string();
    [BEGAN, WENT, ENDED].map(|key| about(&id, "g", key))
}

async fn an_event_before_its_predecessor_is_kept_and_runs_with_it(db: TestDb) {
    let stage = Stage::new(&db).await;
    let [began, went, _] = saga();
    stage.deliver(&[&went]).await;
    let row = stage.row(&went).await;
    assert_eq!((row.state.as_str(), row.attempts, row.finished_at), ("waiting", 0, None), "to wait is no attempt");
    assert_eq!(row.waiting_for, Some(format!("{BEGAN} {}", began.aggregate_id)));
    let ahead = match stage.rig.is_postgres() {
        // The deadline is by the database's clock, `started_at` by the process's.
        true => "SELECT CAST(extract(epoch FROM deadline_at - now()) AS bigint) FROM messaging_inbox",
        false => "SELECT (deadline_at - started_at) / 1000 FROM messaging_inbox",
    };
    let ahead = stage.rig.number(ahead).await;
    assert!(0 < ahead && ahead <= 300, "the deadline is {ahead} s ahead");
    assert_eq!(stage.rig.depth(&stage.queue).await.ready, 0, "kept in the inbox, so acknowledged");
    assert_eq!(stage.reached(&went).await, (0, 0));

    stage.deliver(&[&began]).await;
    assert_eq!(stage.reached(&went).await, (2, 2));
    let row = stage.row(&went).await;
    assert_eq!((row.state.as_str(), row.attempts), ("processed", 1));
    assert!(row.finished_at >= stage.row(&began).await.started_at.into(), "run with its predecessor");
    assert_eq!((row.waiting_for, row.deadline_at), (None, None));
    let bodies = "SELECT count(*) FROM messaging_inbox WHERE body IS NOT NULL";
    assert_eq!(stage.rig.number(bodies).await, 0, "and nothing is kept of it");
    assert_eq!(stage.saga.inner.committed.load(Ordering::SeqCst), 3, "told once as waiting, once as done");
}

async fn whatever_the_order_each_runs_once_and_nothing_is_left_waiting(db: TestDb) {
    let stage = Stage::new(&db).await;
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for (together, order) in [true, false].into_iter().flat_map(|together| orders.map(|order| (together, order))) {
        let events = saga();
        let in_order: Vec<&Event> = order.iter().map(|n| &events[*n]).collect();
        if together {
            stage.deliver(&in_order).await;
        } else {
            for event in in_order {
                stage.deliver(&[event]).await;
            }
        }
        assert_eq!(stage.reached(&events[0]).await, (3, 3), "{order:?}");
        assert_eq!(stage.states(&events.each_ref()).await, ["processed"; 3], "{order:?}");
    }
    assert_eq!(stage.waiting().await, 0);
}

async fn tenants_and_aggregates_do_not_wake_each_other(db: TestDb) {
    let stage = Stage::new(&db).await;
    let [began, went, _] = saga();
    let (elsewhere, another) = (about(&began.aggregate_id, "other", WENT), saga()[1].clone());
    // The same aggregate, its id written another way.
    let shouted = about(&began.aggregate_id.to_uppercase(), "g", WENT);
    stage.deliver(&[&went, &elsewhere, &another, &shouted]).await;
    assert_eq!(stage.waiting().await, 4);
    stage.rig.execute(&format!("UPDATE saga_steps SET reached = 1 WHERE id = '{}'", shouted.aggregate_id)).await;
    stage.deliver(&[&began]).await;
    let states = stage.states(&[&went, &elsewhere, &another, &shouted]).await;
    assert_eq!(states, ["processed", "waiting", "waiting", "processed"]);
}

async fn a_copy_of_what_waits_is_a_duplicate(db: TestDb) {
    let stage = Stage::new(&db).await;
    let [began, went, _] = saga();
    stage.deliver(&[&went, &went]).await;
    stage.deliver(&[&went]).await;
    assert_eq!((stage.row(&went).await.duplicates, stage.waiting().await), (2, 1));
    let mut forged: serde_json::Value = serde_json::from_slice(&went.to_body()).unwrap();
    forged["payload"] = json!({ "forged": true });
    stage.deliver_body(&serde_json::to_vec(&forged).unwrap()).await;
    stage.consume().await;
    stage.file().await;
    let letters = stage.rig.letters().await;
    assert_eq!((letters.len(), letters[0].reason.as_str()), (1, "id-reused"));
    stage.deliver(&[&began]).await;
    assert_eq!(stage.reached(&went).await, (2, 2), "the first body ran, once");
}

async fn what_waits_too_long_is_tried_once_more_and_then_a_dead_letter(db: TestDb) {
    let stage = Stage::new(&db).await;
    let [began, went, _] = saga();
    stage.deliver(&[&went]).await;
    assert_eq!(stage.consumer.sweep().await.unwrap(), 0, "its time has not come");
    stage.rig.advance(WAIT_DEADLINE - Duration::from_secs(20)).await;
    assert_eq!(stage.consumer.sweep().await.unwrap(), 0);
    stage.rig.advance(Duration::from_secs(21)).await;
    let runs = stage.saga.inner.batches.lock().unwrap().len();
    assert_eq!(stage.consumer.sweep().await.unwrap(), 1);
    assert_eq!(stage.saga.inner.batches.lock().unwrap().len(), runs + 1, "it had one more chance");
    assert_eq!(stage.consumer.sweep().await.unwrap(), 0);
    let row = stage.row(&went).await;
    assert_eq!((row.state.as_str(), row.attempts), ("dead", 1));
    let error = "no saga.began of the same aggregate came within 5m";
    assert_eq!(row.last_error.as_deref(), Some(error));
    let letters = stage.rig.letters().await;
    assert_eq!(letters.len(), 1, "filed at once: there is no delivery that an office could take");
    let letter = stage.rig.letter(letters[0].id).await;
    assert_eq!((letter.row.reason.as_str(), letter.row.error.as_str()), ("predecessor-missing", error));
    assert_eq!((letter.body.as_slice(), letter.row.queue.as_str()), (went.to_body().as_slice(), stage.queue.as_str()));
    assert_eq!(letter.row.message_id, Some(went.event_id.to_string()));
    assert_eq!(letter.row.correlation_id.as_deref(), Some(went.correlation_id.as_str()));
    assert_eq!(letter.row.event_type.as_deref(), Some(WENT));

    // A late copy is rejected too, and is the same letter.
    stage.deliver(&[&went]).await;
    stage.file().await;
    assert_eq!(stage.rig.letters().await.len(), 1);

    // Redriven, it waits anew; and now its predecessor comes.
    assert_eq!(stage.rig.redrive(letter.row.id).await, Redriven::Sent);
    stage.rig.relay.try_once().await.unwrap();
    stage.consume().await;
    let row = stage.row(&went).await;
    assert_eq!((row.state.as_str(), row.attempts), ("waiting", 0));
    assert!(stage.rig.number("SELECT count(*) FROM messaging_inbox WHERE lease_until < deadline_at").await == 0);
    assert_eq!(stage.consumer.sweep().await.unwrap(), 0, "with all its time before it");
    stage.deliver(&[&began]).await;
    assert_eq!((stage.row(&went).await.state.as_str(), stage.reached(&went).await), ("processed", (2, 2)));
}

async fn the_last_chance_is_a_real_one(db: TestDb) {
    let stage = Stage::new(&db).await;
    let [began, went, ended] = saga();
    stage.deliver(&[&went, &ended]).await;
    // What it waits for has come about by another road, which woke nobody.
    stage.rig.execute(&format!("UPDATE saga_steps SET reached = 1 WHERE id = '{}'", began.aggregate_id)).await;
    stage.rig.advance(WAIT_DEADLINE + Duration::from_secs(1)).await;
    while stage.consumer.sweep().await.unwrap() > 0 {}
    assert_eq!(stage.states(&[&went, &ended]).await, ["processed"; 2]);
    assert_eq!((stage.reached(&went).await, stage.rig.letters().await.len()), ((3, 2), 0));
}

/// On Postgres alone: SQLite has one writer, so one sweep would end before the other begins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn two_sweeps_at_once_run_each_event_once() {
    let db = TestDb::new(Engine::Postgres).await;
    let stage = Stage::new(&db).await;
    let sagas: Vec<[Event; 3]> = (0..40).map(|_| saga()).collect();
    let went: Vec<&Event> = sagas.iter().map(|events| &events[1]).collect();
    stage.deliver(&went).await;
    stage.rig.execute("UPDATE saga_steps SET reached = 1").await;
    stage.rig.advance(WAIT_DEADLINE + Duration::from_secs(1)).await;
    let second = Consumer::new(stage.rig.kernel.clone(), stage.saga.clone());
    let (first, second) = tokio::join!(stage.consumer.sweep(), second.sweep());
    assert_eq!(first.unwrap() + second.unwrap(), 40);
    assert_eq!(stage.rig.number("SELECT CAST(sum(effects) AS bigint) FROM saga_steps").await, 40);
    assert_eq!(stage.waiting().await, 0);
}

async fn a_kept_event_that_fails_is_not_its_predecessors_fault(db: TestDb) {
    let stage = Stage::new(&db).await;
    let [began, went, _] = saga();
    stage.deliver(&[&went]).await;
    stage.saga.inner.panics.store(true, Ordering::SeqCst);
    let neighbours: Vec<Event> = (0..5).map(|_| saga()[0].clone()).collect();
    let mut batch: Vec<&Event> = neighbours.iter().collect();
    batch.push(&began);
    stage.deliver(&batch).await;
    assert_eq!(stage.states(&batch).await, ["processed"; 6]);
    assert_eq!(stage.states(&[&went]).await, ["waiting"], "left to the sweep, which need not wait for the deadline");
    assert_eq!(stage.consumer.sweep().await.unwrap(), 1);
    let row = stage.row(&went).await;
    assert_eq!((row.state.as_str(), row.attempts), ("retrying", 1));
    assert!(row.last_error.unwrap().contains("panics on purpose"));
    for _ in 1..ATTEMPTS_MAX {
        stage.rig.advance(AGES).await;
        stage.rig.relay.try_once().await.unwrap();
        stage.consume().await;
    }
    stage.file().await;
    let letters = stage.rig.letters().await;
    assert_eq!((letters.len(), letters[0].reason.as_str(), letters[0].attempts), (1, "handler-panic", ATTEMPTS_MAX));
    assert_eq!(stage.reached(&began).await, (1, 1));
}

/// Drops a sweep in the middle of its run, as a crash would: only what was committed before the run is left.
async fn sweep_until_it_hangs(stage: &Stage) {
    let hanging = tokio::time::timeout(DEADLINE, stage.saga.inner.hanging.notified());
    tokio::select! {
        swept = stage.consumer.sweep() => panic!("the sweep ended: {swept:?}"),
        hanging = hanging => hanging.expect("the handler runs"),
    }
}

async fn a_kept_event_that_kills_the_process_is_put_aside(db: TestDb) {
    let stage = Stage::new(&db).await;
    let [began, went, _] = saga();
    stage.deliver(&[&went]).await;
    stage.rig.execute(&format!("UPDATE saga_steps SET reached = 1 WHERE id = '{}'", began.aggregate_id)).await;
    stage.saga.inner.hangs.store(true, Ordering::SeqCst);
    stage.rig.advance(WAIT_DEADLINE + Duration::from_secs(1)).await;
    for _ in 0..3 {
        sweep_until_it_hangs(&stage).await;
        assert_eq!(stage.consumer.sweep().await.unwrap(), 0, "nobody takes it over while its lease holds");
        stage.rig.advance(AGES).await;
    }
    assert_eq!(stage.consumer.sweep().await.unwrap(), 1);
    let letters = stage.rig.letters().await;
    assert_eq!((letters.len(), letters[0].reason.as_str()), (1, "process-killer"));
    assert_eq!(letters[0].error, "3 runs of it began and none finished");
    assert_eq!((stage.states(&[&went]).await, stage.reached(&went).await), (vec!["dead".to_owned()], (1, 0)));
}

async fn a_kept_event_that_kills_the_process_takes_no_other_with_it(db: TestDb) {
    let stage = Stage::new(&db).await;
    let [[began, killer, _], [_, left, _], [_, right, _]] = [saga(), saga(), saga()];
    for kept in [&killer, &left, &right] {
        stage.deliver(&[kept]).await;
        stage.rig.advance(Duration::from_secs(1)).await;
    }
    stage.rig.execute(&format!("UPDATE saga_steps SET reached = 1 WHERE id = '{}'", began.aggregate_id)).await;
    stage.saga.inner.hangs.store(true, Ordering::SeqCst);
    stage.rig.advance(WAIT_DEADLINE).await;
    for _ in 0..3 {
        sweep_until_it_hangs(&stage).await;
        stage.rig.advance(AGES).await;
    }
    tokio::time::timeout(DEADLINE, stage.consumer.sweep()).await.expect("none is run a fourth time").unwrap();
    let letters = stage.rig.letters().await;
    for (event, reason) in
        [(&killer, "process-killer"), (&left, "predecessor-missing"), (&right, "predecessor-missing")]
    {
        let id = Some(event.event_id.to_string());
        let told: Vec<&str> =
            letters.iter().filter(|letter| letter.message_id == id).map(|letter| letter.reason.as_str()).collect();
        assert_eq!(told, [reason]);
    }
}

async fn any_number_may_wait_for_one_event(db: TestDb) {
    let stage = Stage::new(&db).await;
    let id = mint_id().to_string();
    let count = tuning().batch * 2 + 10;
    let many: Vec<Event> = (0..count).map(|_| about(&id, "g", WENT)).collect();
    stage.deliver(&many.iter().collect::<Vec<_>>()).await;
    assert_eq!(stage.waiting().await, i64::try_from(count).unwrap());
    stage.deliver(&[&about(&id, "g", BEGAN)]).await;
    while stage.consumer.sweep().await.unwrap() > 0 {}
    assert_eq!(stage.waiting().await, 0);
    assert_eq!(stage.reached(&many[0]).await, (2, i64::try_from(count).unwrap() + 1));
    let largest = stage.saga.inner.batches.lock().unwrap().iter().copied().max();
    assert_eq!(largest, Some(tuning().batch), "no transaction is larger than a batch");
}

async fn a_retry_that_comes_too_early_waits_as_well(db: TestDb) {
    let stage = Stage::new(&db).await;
    let [began, went, _] = saga();
    stage.rig.kernel.faults.arm_failures(Saga::NAME, 1);
    stage.deliver(&[&went]).await;
    assert_eq!(stage.states(&[&went]).await, ["retrying"]);
    stage.rig.advance(AGES).await;
    stage.rig.relay.try_once().await.unwrap();
    stage.consume().await;
    let row = stage.row(&went).await;
    assert_eq!((row.state.as_str(), row.attempts), ("waiting", 1));
    stage.deliver(&[&began]).await;
    let row = stage.row(&went).await;
    assert_eq!((row.state.as_str(), row.attempts, row.last_error), ("processed", 2, None));
}

each_database!(
    an_event_before_its_predecessor_is_kept_and_runs_with_it,
    whatever_the_order_each_runs_once_and_nothing_is_left_waiting,
    tenants_and_aggregates_do_not_wake_each_other,
    a_copy_of_what_waits_is_a_duplicate,
    what_waits_too_long_is_tried_once_more_and_then_a_dead_letter,
    the_last_chance_is_a_real_one,
    a_kept_event_that_fails_is_not_its_predecessors_fault,
    a_kept_event_that_kills_the_process_is_put_aside,
    a_kept_event_that_kills_the_process_takes_no_other_with_it,
    any_number_may_wait_for_one_event,
    a_retry_that_comes_too_early_waits_as_well,
);

each_database_on_rabbit!(
    an_event_before_its_predecessor_is_kept_and_runs_with_it,
    whatever_the_order_each_runs_once_and_nothing_is_left_waiting,
    what_waits_too_long_is_tried_once_more_and_then_a_dead_letter,
);
