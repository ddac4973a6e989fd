//! Poison: messages that no consumer can make sense of. Each becomes a dead letter at once, with its bytes and the
//! reason, and the consumer goes on as if nothing had been there.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use serde_json::{Value, json};
use stockade_kernel::clock::mint_id;
use tokio::time::Instant;
use uuid::Uuid;

use super::shop::{DeadLetter, Look, Shop};
use super::stage::Stage;
use super::tell::{self, Live};
use super::{Place, Play};

const INVENTORY: &str = "inventory";
const ON_HAND: i64 = 100;

#[derive(Args)]
pub struct Poison {
    #[command(flatten)]
    place: Place,
}

/// A message that cannot be read.
struct Dose {
    what: &'static str,
    /// The reason its dead letter must give.
    reason: &'static str,
    message_id: Uuid,
    body: Vec<u8>,
}

impl Play for Poison {
    const NAME: &str = "poison";
    const TITLE: &str = "Poison messages";
    const ABOUT: &str = "Bytes that nobody can read get into a queue. They must not stop the consumer, must not come back for\n\
                         ever, and must not get lost: each becomes a dead letter that says what is wrong with it.";

    fn place(&self) -> &Place {
        &self.place
    }

    async fn play(&self, stage: &mut Stage) -> anyhow::Result<()> {
        let shop = stage.open_with_lab().await?;
        shop.stock_up(ON_HAND).await?;
        let doses = doses(&shop);

        stage.step("Placing an order while all is well", "reserved");
        let ms_before = self.order(stage, &shop, "before").await?;
        stage.report.figure("order_before_ms", ms_before);

        stage.step(
            &format!("Putting {} messages that cannot be read into the queue of inventory", doses.len()),
            "each leaves the queue and becomes a dead letter",
        );
        for dose in &doses {
            tell::note(dose.what);
            let body = STANDARD.encode(&dose.body);
            shop.publish(&json!({ "queue": INVENTORY, "message_id": dose.message_id, "body_base64": body })).await?;
        }
        let letters = self.watch(&shop, &doses).await?;

        stage.step("Reading the dead letters", "a reason and an error for each, and its bytes as they were sent");
        let queue = shop.queue(INVENTORY).await?.name;
        let mut figures = Vec::new();
        for dose in &doses {
            let expected = format!("{}, rejected by {queue}, bytes kept", dose.reason);
            let found: Vec<&DeadLetter> = letters.iter().filter(|letter| dose.is_in(letter)).collect();
            let [letter] = found[..] else {
                stage.report.prove(dose.what, expected, format!("{} dead letters", found.len()));
                continue;
            };
            tell::note(&format!("{:<19} {:<13} {}", dose.what, letter.reason, letter.error));
            stage.report.prove(dose.what, expected, self.describe(&shop, dose, letter).await?);
            figures.push(json!({ "what": dose.what, "reason": letter.reason, "error": letter.error }));
        }
        stage.report.figure("letters", figures);

        stage.step("Placing another order", "reserved, as before: the consumer is none the worse");
        let ms_after = self.order(stage, &shop, "after").await?;
        stage.report.figure("order_after_ms", ms_after);
        stage.report.prove("units reserved, by the two orders alone", 2, shop.stock().await?.reserved);
        let left = shop
            .until("the queue to be empty", async || {
                let left = shop.queue(INVENTORY).await?.waiting();
                Ok(if left == 0 { Look::There(left) } else { Look::NotYet(left) })
            })
            .await?;
        stage.report.prove("left in the queue", 0, left);
        if stage.servers.is_empty() {
            tell::note(&format!("The letters stay for you to look at: {}/v1/dead-letters?queue=inventory", shop.url()));
        }
        Ok(())
    }
}

impl Poison {
    pub fn usual(place: Place) -> Self {
        Self { place }
    }

    /// Places an order that must be reserved; how long that took, in milliseconds.
    async fn order(&self, stage: &mut Stage, shop: &Shop, when: &str) -> anyhow::Result<u64> {
        let start = Instant::now();
        let order = shop.place_and_wait(1).await?;
        let took = u64::try_from(start.elapsed().as_millis())?;
        tell::note(&format!("{} within {took} ms", order.status));
        stage.report.prove(format!("an order placed {when} the poison"), "reserved", order.status);
        Ok(took)
    }

    /// Waits until every dose is filed; returns the letters that are about them.
    async fn watch(&self, shop: &Shop, doses: &[Dose]) -> anyhow::Result<Vec<DeadLetter>> {
        let mut live = Live::start();
        let letters = shop
            .until("every message to become a dead letter", async || {
                let mut letters = shop.dead_letters(INVENTORY).await?;
                letters.retain(|letter| doses.iter().any(|dose| dose.is_in(letter)));
                let filed = doses.iter().filter(|dose| letters.iter().any(|letter| dose.is_in(letter))).count();
                let (filed, all) = (i64::try_from(filed)?, i64::try_from(doses.len())?);
                let depth = shop.queue(INVENTORY).await?.waiting();
                live.show(format!("dead letters {}  left in the queue {depth}", tell::gauge(filed, all)));
                Ok(if filed == all { Look::There(letters) } else { Look::NotYet(filed) })
            })
            .await;
        live.end();
        letters
    }

    /// What became of a dose, in the words that the proof expects if all is well.
    async fn describe(&self, shop: &Shop, dose: &Dose, letter: &DeadLetter) -> anyhow::Result<String> {
        let reason = if letter.error.is_empty() { "no error given" } else { &letter.reason };
        let death = match letter.x_death.first() {
            Some(death) => format!("{} by {}", death.reason, death.queue),
            None => "no x_death".to_owned(),
        };
        let bytes = if shop.bytes_of(letter).await? == dose.body { "kept" } else { "changed" };
        Ok(format!("{reason}, {death}, bytes {bytes}"))
    }
}

impl Dose {
    fn is_in(&self, letter: &DeadLetter) -> bool {
        letter.message_id.as_deref() == Some(self.message_id.to_string().as_str())
    }
}

/// One of each kind that the gate of a consumer tells apart and a producer is likely to get wrong.
fn doses(shop: &Shop) -> Vec<Dose> {
    let changed = |what, reason, change: fn(&mut Value)| {
        let message_id = mint_id();
        let mut event = shop.order_placed(message_id, mint_id(), 1);
        change(&mut event);
        Dose { what, reason, message_id, body: event.to_string().into_bytes() }
    };
    let raw = |what, reason, body: &[u8]| Dose { what, reason, message_id: mint_id(), body: body.to_vec() };
    vec![
        raw("invalid JSON", "not-json", br#"{"event_id": "0190a000-0000-7000-8000-000000000001", "payload": {"#),
        changed("missing fields", "schema", |event| {
            event["payload"].as_object_mut().and_then(|payload| payload.remove("items"));
        }),
        changed("wrong type", "schema", |event| event["payload"]["items"][0]["quantity"] = "two".into()),
        raw("not UTF-8", "not-utf8", b"\xff\xfe\x00order"),
        changed("unknown event type", "unknown-type", |event| event["event_type"] = "teleported".into()),
        changed("no event id", "no-id", |event| event["event_id"] = Value::Null),
    ]
}
