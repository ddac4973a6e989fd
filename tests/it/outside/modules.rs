//! An outside effect of a module's own, and what becomes of one that misbehaves.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::BoxFuture;
use serde_json::json;
use serde_json::value::RawValue;
use stockade::app::Builder;
use stockade::inventory::events::{InventoryReserved, RESERVED};
use stockade_kernel::db::Tx;
use stockade_kernel::messaging::outside::{Answer, Concluded, Outside};
use stockade_kernel::messaging::{Message, Outcome, Reaction};

use super::QUICK;
use crate::support::{App, Engine, TestDb, each_database, eventually};

each_database!(a_call_that_panics_has_an_unknown_outcome, a_call_that_cannot_be_concluded_is_not_made_again);

/// How the courier misbehaves.
#[derive(Clone, Copy, PartialEq)]
enum Flaw {
    PanicsOnce,
    CannotConclude,
    Waits,
}

#[derive(Clone)]
struct Courier {
    flaw: Flaw,
    calls: Arc<AtomicUsize>,
    go: Arc<tokio::sync::Semaphore>,
}

impl Courier {
    fn new(flaw: Flaw) -> Self {
        Self { flaw, calls: Arc::default(), go: Arc::new(tokio::sync::Semaphore::new(0)) }
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    async fn start(&self, db: &TestDb) -> App {
        let settings = crate::support::settings(db, &QUICK);
        App::start_built(Builder::new(settings).with(self.clone()).demo(true)).await
    }
}

impl Reaction for Courier {
    const NAME: &'static str = "courier";
    const KEYS: &'static [&'static str] = &[RESERVED];
    type Fact = InventoryReserved;

    fn decode(_key: &str, payload: &RawValue) -> Result<InventoryReserved, serde_json::Error> {
        serde_json::from_str(payload.get())
    }

    async fn react(&self, _tx: &mut Tx, batch: &[&Message<InventoryReserved>]) -> sqlx::Result<Vec<Outcome>> {
        Ok(vec![Outcome::Call; batch.len()])
    }

    fn outside(&self) -> Option<&dyn Outside<InventoryReserved>> {
        Some(self)
    }
}

impl Outside<InventoryReserved> for Courier {
    fn call<'a>(&'a self, _message: &'a Message<InventoryReserved>) -> BoxFuture<'a, Answer> {
        Box::pin(async {
            let earlier = self.calls.fetch_add(1, Ordering::SeqCst);
            assert!(self.flaw != Flaw::PanicsOnce || earlier > 0, "out of fuel");
            if self.flaw == Flaw::Waits {
                self.go.acquire().await.unwrap().forget();
            }
            Answer::Done
        })
    }

    fn conclude<'a>(
        &'a self,
        tx: &'a mut Tx,
        _calls: &'a [Concluded<'a, InventoryReserved>],
    ) -> BoxFuture<'a, sqlx::Result<()>> {
        Box::pin(async move {
            if self.flaw == Flaw::CannotConclude {
                stockade_kernel::on!(tx, c => sqlx::query("SELECT 1 FROM no_such_table").execute(c).await.map(drop))?;
            }
            Ok(())
        })
    }

    fn repeats_unknown(&self) -> bool {
        true
    }
}

async fn a_call_that_panics_has_an_unknown_outcome(db: TestDb) {
    let courier = Courier::new(Flaw::PanicsOnce);
    let app = courier.start(&db).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let row = app.eventually_list("/v1/inbox?consumer=courier&state=processed", 1).await.remove(0);
    assert_eq!((courier.calls(), &row["attempts"]), (2, &json!(2)));
    app.stop().await;
}

async fn a_call_that_cannot_be_concluded_is_not_made_again(db: TestDb) {
    let courier = Courier::new(Flaw::CannotConclude);
    let app = courier.start(&db).await;
    for _ in 0..2 {
        app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    }
    let letters = app.eventually_list("/v1/dead-letters?state=open", 2).await;
    for letter in letters {
        assert_eq!(letter["reason"], "not-concluded");
        let error = letter["error"].as_str().unwrap();
        assert!(error.contains("Done") && error.contains("no_such_table"), "{error}");
    }
    assert_eq!(courier.calls(), 2);
    app.stop().await;
}

/// Two instances: a copy that comes to one while the other makes the call is put off until that one's lease ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_copy_of_what_is_called_for_elsewhere_comes_again_later() {
    let db = TestDb::new(Engine::Postgres).await;
    let courier = Courier::new(Flaw::Waits);
    let first = courier.start(&db).await;
    let order = first.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    eventually("a call under way", async || (courier.calls() == 1).then_some(())).await;
    let second = courier.start(&db).await;
    let event = db.event_body(order["id"].as_str().unwrap(), RESERVED).await;
    second.tell("/v1/lab/publish", &json!({ "queue": "courier", "body": event })).await;
    let put_off = second.eventually_list("/v1/outbox?status=pending", 1).await.remove(0);
    assert_eq!(put_off["target"], "stockade.courier");
    let row = second.read("/v1/inbox?consumer=courier").await["data"][0].clone();
    let until = |row: &serde_json::Value| (row["state"].clone(), row["attempts"].clone(), row["duplicates"].clone());
    assert_eq!(until(&row), (json!("processing"), json!(1), json!(0)), "neither an attempt nor a duplicate");
    courier.go.add_permits(1);
    let row = second.eventually_list("/v1/inbox?consumer=courier&state=processed", 1).await.remove(0);
    assert_eq!((courier.calls(), &row["attempts"]), (1, &json!(1)));
    first.stop().await;
    second.stop().await;
}
