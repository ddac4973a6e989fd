//! The dead-letter office: takes what was rejected from the dead-letter queues and files it in SQL.
//!
//! It files any bytes: there is no inbox and no gate here, and it never rejects. What it cannot store stays in
//! the dead-letter queue, in nobody's way, and health says so. Why a letter died is asked in this order: the verdict in the
//! consumer's inbox; another body under a processed id (`id-reused`); the consumer's own gate, run again; and if
//! all of these are content, the broker gave up on it by itself (`broker-limit`). Only a copy of what its consumer has
//! done is no letter: it is counted among the duplicates, as it would be in the queue.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, PoisonError};

use futures_util::future::join_all;
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::dead_letters::{self, NewLetter};
use super::event::{self, Label, Unreadable};
use super::health::{LoopState, Pulse};
use super::inbox::{self, State};
use super::transport::{Delivery, Subscription, Tag, TransportError, Way, dlq_of};
use super::{Kernel, Patience};
use crate::clock::mint_id;
use crate::db::{Trouble, Tx};

pub const NAME: &str = "dead-letters";

/// A consumer whose letters are filed here, with its gate.
#[derive(Clone)]
pub struct Sender {
    pub consumer: &'static str,
    pub check: fn(&Delivery, usize) -> Result<(), Unreadable>,
}

pub struct Office {
    kernel: Kernel,
    senders: Vec<Sender>,
    pulse: Pulse,
    /// Of the consumers whose letters cannot be filed just now.
    troubles: Mutex<BTreeMap<&'static str, String>>,
}

impl Office {
    pub fn new(kernel: Kernel, senders: Vec<Sender>) -> Self {
        let pulse = kernel.health.register(NAME);
        Self { kernel, senders, pulse, troubles: Mutex::default() }
    }

    /// Files until told to stop.
    pub async fn run(self, stop: CancellationToken) {
        let mut gate = self.kernel.pauses.gate(NAME);
        while !stop.is_cancelled() {
            if gate.is_paused() {
                self.pulse.set(LoopState::Paused);
                tokio::select! { () = gate.until(false) => {} () = stop.cancelled() => {} }
                continue;
            }
            let rest = CancellationToken::new();
            let desks = join_all(self.senders.iter().map(|sender| self.keep_desk(sender, &rest)));
            let resting = async {
                tokio::select! { () = gate.until(true) => {} () = stop.cancelled() => {} }
                rest.cancel();
            };
            tokio::join!(desks, resting);
        }
        self.pulse.set(LoopState::Stopped);
    }

    /// Files the letters of one consumer until told to rest; what is wrong with them is no other's business.
    async fn keep_desk(&self, sender: &Sender, rest: &CancellationToken) {
        let mut patience = Patience::default();
        while !rest.is_cancelled() {
            if let Some(why) = self.kernel.transport.obstacle(Way::In) {
                self.tell(sender, Some(why));
                tokio::select! {
                    () = self.kernel.transport.until_open(Way::In) => {}
                    () = rest.cancelled() => {}
                }
                continue;
            }
            if let Err(error) = self.serve(sender, rest, &mut patience).await {
                let pause = patience.next_pause();
                let consumer = sender.consumer;
                tracing::warn!(consumer, %error, ?pause, "the dead-letter office cannot file just now and waits");
                self.tell(sender, Some(error.to_string()));
                tokio::select! { () = rest.cancelled() => {} () = tokio::time::sleep(pause) => {} }
            }
        }
    }

    /// Notes how the desk of one consumer is doing: the office is well when all of them are.
    fn tell(&self, sender: &Sender, trouble: Option<String>) {
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        match trouble {
            Some(why) => drop(troubles.insert(sender.consumer, why)),
            // Another one's trouble is as old as it is.
            None if troubles.remove(sender.consumer).is_none() && !troubles.is_empty() => return,
            None => {}
        }
        let now = self.kernel.db.clock().now();
        match troubles.first_key_value() {
            Some((consumer, why)) => self.pulse.troubled(format!("letters of {consumer}: {why}"), now),
            None => self.pulse.running(now),
        }
    }

    /// Works one dead-letter queue off until told to rest.
    async fn serve(
        &self,
        sender: &Sender,
        rest: &CancellationToken,
        patience: &mut Patience,
    ) -> Result<(), TransportError> {
        let queue = dlq_of(&self.kernel.tuning.queue_name(sender.consumer));
        let mut subscription = self.kernel.transport.subscribe(&queue).await?;
        let ended = loop {
            tokio::select! {
                biased;
                () = rest.cancelled() => break self.work_off_rest(sender, &mut subscription).await,
                () = subscription.ready(self.kernel.tuning.poll) => {}
            }
            if let Err(error) = self.try_once(sender, &mut subscription).await {
                break Err(error);
            }
            patience.renew();
            self.tell(sender, None);
        };
        subscription.close().await;
        ended
    }

    /// Files what a broker has sent already; the rest of the queue is left alone.
    async fn work_off_rest(&self, sender: &Sender, subscription: &mut Subscription) -> Result<(), TransportError> {
        subscription.wind_down().await;
        while self.try_once(sender, subscription).await? > 0 {}
        Ok(())
    }

    /// Files what is there; returns how many letters that was. What cannot be filed goes back, and is an error.
    pub async fn try_once(&self, sender: &Sender, subscription: &mut Subscription) -> Result<usize, TransportError> {
        let deliveries = subscription.take(self.kernel.tuning.batch).await?;
        if deliveries.is_empty() {
            return Ok(0);
        }
        let tags: Vec<Tag> = deliveries.iter().map(|delivery| delivery.tag).collect();
        let letters = match self.name(sender, deliveries).await {
            Ok(letters) => letters,
            Err(error) => return self.give_back(subscription, &tags, error).await,
        };
        let (mut filed, mut refused, mut trouble) = (Vec::new(), Vec::new(), None);
        match self.file(sender, &letters).await {
            Ok(()) => filed = tags,
            // One of them is at fault: each for itself, so that only that one stays behind.
            Err(error) if letters.len() > 1 && !Trouble::of(&error).is_passing() => {
                for letter in &letters {
                    let tag = letter.0.tag;
                    if trouble.as_ref().is_some_and(|error| Trouble::of(error).is_passing()) {
                        refused.push(tag);
                        continue;
                    }
                    match self.file(sender, std::slice::from_ref(letter)).await {
                        Ok(()) => filed.push(tag),
                        Err(error) => {
                            refused.push(tag);
                            trouble = Some(error);
                        }
                    }
                }
            }
            Err(error) => (refused, trouble) = (tags, Some(error)),
        }
        subscription.ack(&filed).await?;
        match trouble {
            None => Ok(filed.len()),
            Some(error) => self.give_back(subscription, &refused, error).await,
        }
    }

    /// Gives letters back that cannot be filed, and says why.
    async fn give_back<T>(
        &self,
        subscription: &mut Subscription,
        refused: &[Tag],
        error: sqlx::Error,
    ) -> Result<T, TransportError> {
        subscription.wind_down().await;
        if let Err(error) = subscription.release(refused).await {
            tracing::debug!(%error, "could not give letters back; their lease will");
        }
        Err(error.into())
    }

    /// Each delivery with the name it is filed under.
    async fn name(&self, sender: &Sender, deliveries: Vec<Delivery>) -> sqlx::Result<Vec<(Delivery, String)>> {
        let queue = self.kernel.tuning.queue_name(sender.consumer);
        let keys = delivery_keys(&mut self.kernel.db.read().await?, &queue, &deliveries).await?;
        Ok(deliveries.into_iter().zip(keys).collect())
    }

    async fn file(&self, sender: &Sender, letters: &[(Delivery, String)]) -> sqlx::Result<()> {
        let mut tx = self.kernel.db.begin().await?;
        for (delivery, key) in letters {
            match self.read(&mut tx, sender, delivery, key.clone()).await? {
                Filing::Letter(letter) => dead_letters::file(&mut tx, &letter).await?,
                Filing::Copy(event_id) => inbox::count_duplicates(&mut tx, sender.consumer, &[event_id]).await?,
            }
        }
        self.kernel.faults.reach("office.before_commit", NAME);
        tx.commit().await?;
        self.kernel.faults.reach("office.after_commit", NAME);
        Ok(())
    }

    async fn read(
        &self,
        tx: &mut Tx,
        sender: &Sender,
        delivery: &Delivery,
        delivery_key: String,
    ) -> sqlx::Result<Filing> {
        let event = event::read_envelope(&delivery.body, Label::default(), usize::MAX).ok();
        let mut letter = NewLetter {
            queue: self.kernel.tuning.queue_name(sender.consumer),
            consumer: sender.consumer.to_owned(),
            message_id: delivery
                .message_id
                .as_deref()
                .and_then(printable)
                .or_else(|| event.as_ref().map(|event| event.event_id.to_string())),
            event_type: event
                .as_ref()
                .map(event::Event::routing_key)
                .or_else(|| printable(&delivery.routing_key).filter(|key| key != dead_letters::UNREADABLE)),
            correlation_id: event
                .as_ref()
                .map(|event| event.correlation_id.clone())
                .or_else(|| delivery.correlation_id.as_deref().and_then(printable)),
            group_id: event.as_ref().map(|event| event.group_id.clone()),
            reason: String::new(),
            error: String::new(),
            attempts: 0,
            headers: delivery.headers.clone().into(),
            body: delivery.body.to_vec(),
            x_death: delivery.x_death.clone(),
            filing_key: delivery_key.clone(),
            delivery_key,
        };
        if let Some(event) = &event
            && let Some(verdict) = inbox::find_verdict(tx, sender.consumer, event.event_id).await?
        {
            letter.attempts = verdict.attempts;
            if verdict.body_hash != event::hash_of(&delivery.body) {
                letter.reason = event::ID_REUSED.to_owned();
                letter.error = event::id_reused(event.event_id);
                return Ok(Filing::Letter(Box::new(letter)));
            }
            if verdict.state == State::Processed {
                // A broker may take its time to carry a rejected copy here, and a redrive of another overtake it.
                return Ok(Filing::Copy(event.event_id));
            }
            if verdict.state == State::Dead {
                letter.filing_key = event.event_id.to_string();
                letter.reason = verdict.reason.unwrap_or_else(|| "business-rule".to_owned());
                letter.error = verdict.last_error.unwrap_or_default();
                return Ok(Filing::Letter(Box::new(letter)));
            }
        }
        (letter.reason, letter.error) = match (sender.check)(delivery, self.kernel.tuning.event_bytes_max) {
            Err(unreadable) => (unreadable.code.to_owned(), unreadable.error),
            Ok(()) => ("broker-limit".to_owned(), "the broker gave up delivering it".to_owned()),
        };
        Ok(Filing::Letter(Box::new(letter)))
    }
}

/// What a message in a dead-letter queue turns out to be.
enum Filing {
    Letter(Box<NewLetter>),
    /// The event has been processed.
    Copy(Uuid),
}

/// Names each rejected delivery for ever, so that filing it again changes nothing.
///
/// In the table queue a message keeps its row id, and one that was rejected, redriven and rejected again is told apart
/// by the time of its death. A broker's message has no such name, so it goes by what it is and when it died. Two that
/// agree in all of that are told apart by this: only one that is delivered again can have been filed before.
async fn delivery_keys(tx: &mut Tx, queue: &str, deliveries: &[Delivery]) -> sqlx::Result<Vec<String>> {
    let mut keys = Vec::with_capacity(deliveries.len());
    let mut taken = HashSet::new();
    for delivery in deliveries {
        if let Some(id) = delivery.lasting_id {
            keys.push(format!("{id} {}", died_at(delivery)));
            continue;
        }
        let looks = fingerprint(delivery);
        // All of them are looked up before any is filed, so this finds what earlier batches filed.
        let filed_before = dead_letters::is_filed(tx, queue, &looks).await?;
        let is_another = if filed_before { delivery.deliveries == 1 } else { !taken.insert(looks.clone()) };
        keys.push(if is_another { format!("{looks} {}", mint_id()) } else { looks });
    }
    Ok(keys)
}

fn fingerprint(delivery: &Delivery) -> String {
    let mut hash = Sha256::new();
    for part in [delivery.message_id.as_deref().unwrap_or_default(), &delivery.routing_key, died_at(delivery)] {
        hash.update(part.len().to_be_bytes());
        hash.update(part);
    }
    hash.update(&delivery.body);
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn died_at(delivery: &Delivery) -> &str {
    let time = delivery.x_death.get(0).and_then(|death| death.get("time"));
    time.and_then(serde_json::Value::as_str).unwrap_or_default()
}

/// Text columns of Postgres take no NUL, and nothing foreign goes into one unchecked.
fn printable(text: &str) -> Option<String> {
    event::is_plain_text(text, 255).then(|| text.to_owned())
}
