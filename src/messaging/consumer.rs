//! The consumer loop: takes what has arrived, hands it to a module's reaction, and acknowledges after the commit.
//!
//! A batch is one transaction: inbox rows, effects, outgoing events and retry bookkeeping commit together or not
//! at all, and only then is anything acknowledged, so a crash at any line means a redelivery that the inbox
//! absorbs. If a batch fails as a whole it is halved until the culprit stands alone, and only that one is retried.
//! A database that is away or busy is nobody's fault: the consumer waits with what it holds and tries again, and no
//! attempt is counted.
//!
//! A message delivered for the third time may be killing the process: it runs alone, each run recorded before it
//! starts, and after three runs that never finished it is rejected as `process-killer`.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::FutureExt;
use sqlx::error::DatabaseError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::event::{self, Event, Label, Message, Unreadable};
use super::health::{LoopState, Pulse};
use super::inbox::{self, Action, Arrival, Claim, Mark, Met, State};
use super::outbox::{self, Entry};
use super::tally::{self, Told};
use super::transport::{Delivery, RawMessage, Subscription, Tag, TransportError, Way};
use super::waiting::{self, Ran, Wait, Waking};
use super::{Kernel, Outcome, Pace, Patience, Reaction, retention};
use crate::clock::{Timestamp, in_words, mint_id};
use crate::db::{Trouble, Tx};
use crate::secrets;
use crate::trace::{KeyValue, Span, SpanKind, Traceparent};

/// From this delivery on a message runs alone.
const ALONE_FROM_DELIVERY: u32 = 3;
/// Recorded runs that never finished before a message counts as a process killer.
pub(super) const UNFINISHED_RUNS_MAX: i32 = 3;
/// How often a transaction that lost to another is run again before the batch is given back.
const CONFLICTS_MAX: u32 = 10;
/// How often it is run again after a unique key was violated: numbers are then minted anew.
const REMINTS_MAX: u32 = 2;
/// How often to look for events that have waited for their predecessor too long.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// The header that marks a copy made by the fault lab.
const COPY: &str = "x-lab-copy";
/// Handling that takes less need not say when it ended: an inbox row is written as it begins, and to write it twice would
/// cost every batch more than the difference is worth.
const SLOW: Duration = Duration::from_millis(50);
/// An event this young has not been forgotten by anybody.
const FRESH: Duration = Duration::from_secs(60);
/// Errors are kept short enough to read in a list.
const ERROR_CHARS_MAX: usize = 2000;

pub struct Consumer<R> {
    pub(super) kernel: Kernel,
    pub(super) reaction: R,
    pub(super) queue: String,
    pub(super) pulse: Pulse,
}

/// A message that passed the gate, with the delivery it came in.
pub(super) struct Item<F> {
    pub tag: Tag,
    deliveries: u32,
    /// Set on a retry or redrive: how many attempts went before it.
    retry_after_attempts: Option<i32>,
    pub message: Message<F>,
    taken_at: Timestamp,
    /// Over once the item is dealt with.
    _span: Span,
}

impl<F> Item<F> {
    /// The row as this delivery meets it. The retry that a row waits for is due whatever the clock says by now: it
    /// was the due time that sent it, and a clock stepping back must not leave the event with nobody to run it.
    fn meets(&self, met: Met) -> Met {
        let awaited = self.retry_after_attempts == Some(met.attempts);
        if awaited && met.state == State::Retrying { Met { due_in: Duration::ZERO, ..met } } else { met }
    }
}

/// Deliveries in hand: what is to run, and what is decided already.
struct Hand<F> {
    together: Vec<Item<F>>,
    alone: Vec<Item<F>>,
    settled: Vec<(Tag, Settle)>,
}

impl<F> Hand<F> {
    /// Leaves only what is not decided, to be tried again.
    fn put_down_settled(&mut self) {
        let settled: HashSet<Tag> = self.settled.iter().map(|(tag, _)| *tag).collect();
        for items in [&mut self.together, &mut self.alone] {
            items.retain(|item| !settled.contains(&item.tag));
        }
    }
}

/// What is to be done with a delivery once everything about it is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Settle {
    Ack,
    AckRetry,
    Reject,
}

/// Why a batch did not commit.
pub(super) enum Failure {
    Database(sqlx::Error),
    Panic(String),
    /// Another transaction has meanwhile dealt with an event that was kept: run it again.
    Raced,
    /// An event that waited for this batch fails, and the batch does not.
    Woken(String),
}

impl Failure {
    /// The failure of events that waited, as the batch that wakes them sees it.
    pub(super) fn while_waking(self) -> Self {
        match self {
            Self::Database(error) if !Trouble::of(&error).is_passing() => Self::Woken(error.to_string()),
            Self::Panic(text) => Self::Woken(text),
            passing => passing,
        }
    }

    pub(super) fn blame(self) -> Blame {
        let (reason, last_word, error) = match self {
            Self::Panic(text) => ("handler-panic", "handler-panic", format!("the handler panicked: {text}")),
            Self::Database(error) => ("database", "retries-exhausted", format!("database: {error}")),
            Self::Woken(text) => ("woken-failed", "retries-exhausted", text),
            Self::Raced => ("raced", "retries-exhausted", "another transaction was always first".to_owned()),
        };
        Blame { reason, last_word, error }
    }

    /// How many reruns of the same work it is worth.
    fn reruns_worth(&self) -> u32 {
        match self {
            Self::Raced => CONFLICTS_MAX,
            Self::Database(error) if Trouble::of(error) == Trouble::Conflict => CONFLICTS_MAX,
            Self::Database(error) if error.as_database_error().is_some_and(DatabaseError::is_unique_violation) => {
                REMINTS_MAX
            }
            _ => 0,
        }
    }
}

/// What an event that failed by itself is told.
pub(super) struct Blame {
    /// Why it is tried again.
    pub reason: &'static str,
    /// The reason code, should this have been the last attempt.
    pub last_word: &'static str,
    pub error: String,
}

/// What outcomes have to be written down: marks and waits in the inbox, retries in the outbox.
#[derive(Default)]
pub(super) struct Books {
    pub marks: Vec<Mark>,
    waits: Vec<Wait>,
    retries: Vec<Entry>,
    claims: Vec<Claim>,
    told: Vec<Told>,
    /// New events that are simply done, whose inbox row says so already.
    done_at_once: Vec<Uuid>,
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

/// Reads a delivery through the whole gate, as the consumer and the dead-letter office both do.
pub fn read_delivery<R: Reaction>(delivery: &Delivery, bytes_max: usize) -> Result<Message<R::Fact>, Unreadable> {
    let label = Label { message_id: delivery.message_id.as_deref(), header_event_id: delivery.header("x-event-id") };
    let mut message = event::read(delivery.body.clone(), label, bytes_max, R::KEYS, R::decode)?;
    message.event.traceparent = delivery.header(outbox::TRACEPARENT).and_then(Traceparent::parse);
    Ok(message)
}

impl<R: Reaction> Consumer<R> {
    pub fn new(kernel: Kernel, reaction: R) -> Self {
        let pulse = kernel.health.register(R::NAME);
        let queue = kernel.tuning.queue_name(R::NAME);
        Self { kernel, reaction, queue, pulse }
    }

    /// Consumes until told to stop. Pausing and stopping finish the batch in hand first.
    pub async fn run(self, stop: CancellationToken) {
        let mut gate = self.kernel.pauses.gate(R::NAME);
        let mut patience = Patience::default();
        while !stop.is_cancelled() {
            if gate.is_paused() {
                self.pulse.set(LoopState::Paused);
                tokio::select! { () = gate.until(false) => {} () = stop.cancelled() => {} }
                continue;
            }
            if let Some(why) = self.kernel.transport.obstacle(Way::In) {
                self.pulse.troubled(why, self.kernel.db.clock().now());
                tokio::select! {
                    () = self.kernel.transport.until_open(Way::In) => {}
                    () = gate.until(true) => {}
                    () = stop.cancelled() => {}
                }
                continue;
            }
            let stopping = async {
                tokio::select! { () = gate.until(true) => {} () = stop.cancelled() => {} }
            };
            if let Err(error) = self.consume(stopping, &mut patience).await {
                let pause = patience.next_pause();
                tracing::warn!(consumer = R::NAME, %error, ?pause, "cannot consume just now and waits");
                self.pulse.troubled(error.to_string(), self.kernel.db.clock().now());
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = gate.until(true) => {}
                    () = tokio::time::sleep(pause) => {}
                }
            }
        }
        self.pulse.set(LoopState::Stopped);
    }

    /// Takes batches on one subscription until `stopping` resolves or something is away.
    async fn consume(&self, stopping: impl Future<Output = ()>, patience: &mut Patience) -> Result<(), TransportError> {
        // A broker counts deliveries and gives up on a message after so many: none is taken before the database is seen
        // to work, or an outage would use them up.
        self.check_database().await?;
        let mut subscription = self.kernel.transport.subscribe(&self.queue).await?;
        subscription.open_hatch();
        // Said now: the first batch may make calls that take their time.
        self.pulse.running(self.kernel.db.clock().now());
        let mut swept_at = Instant::now();
        tokio::pin!(stopping);
        let ended = loop {
            tokio::select! {
                biased;
                () = &mut stopping => break self.work_off_rest(&mut subscription).await,
                () = subscription.ready(self.kernel.tuning.poll) => {}
            }
            if swept_at.elapsed() >= SWEEP_EVERY {
                swept_at = Instant::now();
                if let Err(error) = self.sweep().await
                    && !self.wait_out(&error, stopping.as_mut(), patience).await
                {
                    break self.work_off_rest(&mut subscription).await;
                }
            }
            let pace = Pace::start();
            let dealt_with = match self.deal_with_next(&mut subscription, stopping.as_mut(), patience).await {
                Ok((count, done)) => subscription.ack_soon(&done).await.map(|()| count),
                Err(error) => Err(error),
            };
            match dealt_with {
                Ok(count) => {
                    patience.renew();
                    self.pulse.running(self.kernel.db.clock().now());
                    pace.next(count).await;
                }
                Err(error) => break Err(error),
            }
        };
        subscription.close().await;
        ended
    }

    /// Writes something durably, and leaves no trace of it.
    async fn check_database(&self) -> sqlx::Result<()> {
        let mut tx = self.kernel.db.begin().await?;
        let (id, now) = (mint_id(), tx.now());
        crate::on!(tx, c => {
            sqlx::query("INSERT INTO messaging_subscriptions (id, queue, seen_at) VALUES ($1, $2, $3)")
                .bind(id)
                .bind(&self.queue)
                .bind(now)
                .execute(c)
                .await
        .map(drop)})?;
        crate::on!(tx, c => {
            sqlx::query("DELETE FROM messaging_subscriptions WHERE id = $1").bind(id).execute(c).await.map(drop)
        })?;
        tx.commit().await
    }

    /// Works off what a broker has sent already; the rest of the queue is left alone.
    async fn work_off_rest(&self, subscription: &mut Subscription) -> Result<(), TransportError> {
        subscription.wind_down().await;
        while self.try_once(subscription).await? > 0 {}
        Ok(())
    }

    /// Takes what is there, deals with it and acknowledges; returns how many deliveries that was. Does not wait for a
    /// database that is away.
    pub async fn try_once(&self, subscription: &mut Subscription) -> Result<usize, TransportError> {
        let stopping = pin!(std::future::ready(()));
        let (count, done) = self.deal_with_next(subscription, stopping, &mut Patience::default()).await?;
        subscription.ack(&done).await?;
        Ok(count)
    }

    /// Takes what is there and deals with it; returns how many deliveries that was, and those to acknowledge. A database
    /// that is away is waited for until `stopping` resolves: then everything is given back.
    async fn deal_with_next(
        &self,
        subscription: &mut Subscription,
        stopping: Pin<&mut impl Future<Output = ()>>,
        patience: &mut Patience,
    ) -> Result<(usize, Vec<Tag>), TransportError> {
        // In the fault lab a consumer may be told to dawdle; it then takes one at a time, so that each is slow.
        let dawdle = self.kernel.faults.delay(R::NAME);
        let batch = if dawdle.is_some() { 1 } else { self.batch_max() };
        let deliveries = subscription.take(batch).await?;
        let count = deliveries.len();
        if count == 0 {
            return Ok((0, Vec::new()));
        }
        let tags: Vec<Tag> = deliveries.iter().map(|delivery| delivery.tag).collect();
        let (started, taken_at) = (Instant::now(), self.kernel.db.clock().now());
        let settled = {
            let work = async {
                tokio::time::sleep(dawdle.unwrap_or_default()).await;
                self.repeat(&deliveries).await;
                let hand = self.read(deliveries, taken_at);
                self.hold(hand, subscription, stopping, patience).await
            };
            tokio::select! {
                settled = work => settled,
                () = subscription.keep(&tags) => unreachable!("keeping a lease never ends"),
            }
        };
        match settled {
            Ok(settled) => {
                self.kernel.db.metrics().observe_handling(R::NAME, started.elapsed());
                Ok((count, self.settle(subscription, settled).await?))
            }
            Err(error) => {
                // Put it back at once rather than let the lease run out; what was committed of it is a duplicate then.
                // Nothing is to come to this subscription again, least of all what goes back.
                subscription.wind_down().await;
                if let Err(error) = subscription.release(&tags).await {
                    tracing::debug!(consumer = R::NAME, %error, "could not give messages back; their lease will");
                }
                Err(error)
            }
        }
    }

    /// Works off what is in hand, and holds it while the database is away: to give it back and take it anew would cost
    /// every message one of the deliveries that a broker counts.
    async fn hold(
        &self,
        mut hand: Hand<R::Fact>,
        subscription: &Subscription,
        mut stopping: Pin<&mut impl Future<Output = ()>>,
        patience: &mut Patience,
    ) -> Result<Vec<(Tag, Settle)>, TransportError> {
        while let Err(error) = self.work_off(&mut hand).await {
            self.kernel.db.metrics().db_busy.inc();
            if !self.wait_out(&error, stopping.as_mut(), patience).await {
                return Err(error.into());
            }
            // A broker that has taken it back gives it to somebody else.
            subscription.check()?;
            hand.put_down_settled();
        }
        Ok(hand.settled)
    }

    /// Waits before the next try at what the database did not take; `false` if it is time to stop instead.
    async fn wait_out(
        &self,
        error: &sqlx::Error,
        stopping: Pin<&mut impl Future<Output = ()>>,
        patience: &mut Patience,
    ) -> bool {
        let pause = patience.next_pause();
        tracing::warn!(consumer = R::NAME, %error, ?pause, "cannot work just now, and waits with what it holds");
        self.pulse.troubled(error.to_string(), self.kernel.db.clock().now());
        tokio::select! {
            biased;
            () = stopping => false,
            () = tokio::time::sleep(pause) => true,
        }
    }

    /// Puts copies of deliveries into the queue as a broker might, if the fault lab says so.
    async fn repeat(&self, deliveries: &[Delivery]) {
        // A copy is not copied again, or there would be no end to it.
        for delivery in deliveries.iter().filter(|delivery| !delivery.headers.contains_key(COPY)) {
            let times = self.kernel.faults.repeats(R::NAME);
            if times == 0 {
                break;
            }
            let mut headers = delivery.headers.clone();
            headers.insert(COPY.to_owned(), true.into());
            let copy = RawMessage {
                queue: self.queue.clone(),
                routing_key: delivery.routing_key.clone(),
                message_id: delivery.message_id.clone(),
                correlation_id: delivery.correlation_id.clone(),
                headers,
                body: delivery.body.clone(),
            };
            if let Err(error) = self.kernel.transport.publish_raw(&copy, times).await {
                tracing::warn!(consumer = R::NAME, %error, "the fault lab could not repeat a message");
            }
        }
    }

    /// Takes deliveries through the gate; what does not pass is to be rejected.
    fn read(&self, deliveries: Vec<Delivery>, taken_at: Timestamp) -> Hand<R::Fact> {
        let mut settled = Vec::with_capacity(deliveries.len());
        let (mut together, mut alone) = (Vec::new(), Vec::new());
        for delivery in deliveries {
            match read_delivery::<R>(&delivery, self.kernel.tuning.event_bytes_max) {
                Err(unreadable) => {
                    tracing::warn!(
                        consumer = R::NAME,
                        reason = unreadable.code,
                        message.id = delivery.message_id,
                        correlation.id = delivery.correlation_id,
                        "DEAD LETTER {} message {} ({}): {unreadable}",
                        R::NAME,
                        delivery.message_id.as_deref().unwrap_or("without an id"),
                        unreadable.code,
                    );
                    tally::rejected(self.kernel.db.metrics(), R::NAME, unreadable.code.into());
                    settled.push((delivery.tag, Settle::Reject));
                }
                Ok(mut message) => {
                    let span = begin_span::<R>(&message, &self.queue, self.kernel.transport.name());
                    message.event.traceparent = span.carried();
                    let attempts = delivery.headers.get(outbox::X_ATTEMPTS).and_then(serde_json::Value::as_i64);
                    let item = Item {
                        tag: delivery.tag,
                        deliveries: delivery.deliveries,
                        retry_after_attempts: attempts.and_then(|attempts| i32::try_from(attempts).ok()),
                        message,
                        taken_at,
                        _span: span,
                    };
                    let road = if item.deliveries >= ALONE_FROM_DELIVERY { &mut alone } else { &mut together };
                    road.push(item);
                }
            }
        }
        Hand { together, alone, settled }
    }

    /// Decides and commits everything about what is in hand.
    async fn work_off(&self, hand: &mut Hand<R::Fact>) -> sqlx::Result<()> {
        self.join_processed(hand).await?;
        // Rows are written in the order of their keys, so that two instances cannot deadlock.
        hand.together.sort_by_key(|item| item.message.event.event_id);
        self.run_halving(&hand.together, Waking::Now, &mut hand.settled).await?;
        for item in &hand.alone {
            self.run_alone(item, &mut hand.settled).await?;
        }
        Ok(())
    }

    /// What would run alone and is processed already has nothing to run: it is dismissed with the batch.
    async fn join_processed(&self, hand: &mut Hand<R::Fact>) -> sqlx::Result<()> {
        if hand.alone.is_empty() {
            return Ok(());
        }
        let ids: Vec<Uuid> = hand.alone.iter().map(|item| item.message.event.event_id).collect();
        let mut tx = self.kernel.db.begin_relaxed().await?;
        let now = tx.now();
        let met = inbox::meet(&mut tx, R::NAME, &ids, now).await?;
        tx.commit().await?;
        let processed: HashSet<Uuid> =
            met.into_iter().filter(|(_, met)| met.state == State::Processed).map(|(id, _)| id).collect();
        let is_processed = |item: &mut Item<_>| processed.contains(&item.message.event.event_id);
        hand.together.extend(hand.alone.extract_if(.., is_processed));
        Ok(())
    }

    /// Runs a batch; one that fails as a whole is halved until the culprit stands alone.
    async fn run_halving(
        &self,
        items: &[Item<R::Fact>],
        waking: Waking,
        settled: &mut Vec<(Tag, Settle)>,
    ) -> sqlx::Result<()> {
        let mut todo = vec![(items, waking)];
        while let Some((items, waking)) = todo.pop() {
            if items.is_empty() {
                continue;
            }
            match self.run_once(items, waking).await {
                Ok((done, claimed)) => {
                    settled.extend(done);
                    settled.extend(self.call_all(items, &claimed).await);
                }
                Err(Failure::Database(error)) if Trouble::of(&error).is_passing() => return Err(error),
                Err(Failure::Woken(error)) if waking == Waking::Now => {
                    tracing::warn!(consumer = R::NAME, %error, "an event that waited for this batch fails; left to the sweep");
                    todo.push((items, Waking::Later));
                }
                Err(failure) if items.len() == 1 => settled.push(self.blame(&items[0], failure).await?),
                Err(_) => {
                    let (left, right) = items.split_at(items.len() / 2);
                    todo.extend([(right, waking), (left, waking)]);
                }
            }
        }
        Ok(())
    }

    /// Runs a transaction again while it merely loses to others, or may have minted a number that was taken.
    async fn run_once(&self, items: &[Item<R::Fact>], waking: Waking) -> Result<Decided, Failure> {
        let mut reruns = 0;
        loop {
            match self.attempt(items, waking).await {
                Err(failure) if reruns < failure.reruns_worth() => {
                    self.kernel.db.metrics().db_serialization_retries.inc();
                    reruns += 1;
                }
                ended => return ended,
            }
        }
    }

    /// One transaction: inbox, reaction, bookkeeping, what waited for it, commit.
    async fn attempt(&self, items: &[Item<R::Fact>], waking: Waking) -> Result<Decided, Failure> {
        let mut tx = self.kernel.db.begin_chained().await?;
        let mut plan = self.plan(&mut tx, items).await?;
        if !plan.stale.is_empty() {
            self.take_over(&mut tx, items, &mut plan).await?;
        }
        let batch: Vec<&Message<R::Fact>> = plan.run.iter().map(|(index, _)| &items[*index].message).collect();
        let failing = self.kernel.faults.failures(R::NAME, batch.len());
        let mut outcomes = vec![Outcome::retry("the fault lab let it fail"); failing];
        if failing < batch.len() {
            outcomes.extend(self.react(&mut tx, &batch[failing..]).await?);
        }
        let mut settled = plan.settled;
        let (decided, claimed) = self.keep_books(&mut tx, items, &plan.run, &outcomes).await?;
        settled.extend(decided);
        if !plan.duplicates.is_empty() {
            inbox::count_duplicates(&mut tx, R::NAME, &plan.duplicates).await?;
            // Items are in the order of their ids.
            let find = |id| items.binary_search_by_key(id, |item: &Item<_>| item.message.event.event_id).ok();
            let repeated = plan.duplicates.iter().filter_map(find).map(|index| &items[index].message);
            tally::duplicates_on_commit(&mut tx, R::NAME, repeated);
        }
        let woken = self.wake(&mut tx, batch.iter().copied().zip(&outcomes), waking).await?;
        self.kernel.faults.reach("consumer.before_commit", R::NAME);
        tx.commit().await?;
        self.kernel.faults.reach("consumer.after_commit", R::NAME);
        self.reaction.committed(&batch[failing..], &outcomes[failing..]);
        self.tell_committed(woken);
        Ok((settled, claimed))
    }

    /// Tells the reaction of kept events that were run.
    pub(super) fn tell_committed(&self, ran: Vec<Ran<R::Fact>>) {
        if !ran.is_empty() {
            let (messages, outcomes): (Vec<_>, Vec<_>) = ran.into_iter().unzip();
            self.reaction.committed(&messages.iter().collect::<Vec<_>>(), &outcomes);
        }
    }

    pub(super) async fn react(&self, tx: &mut Tx, batch: &[&Message<R::Fact>]) -> Result<Vec<Outcome>, Failure> {
        match AssertUnwindSafe(self.reaction.react(tx, batch)).catch_unwind().await {
            Ok(outcomes) => {
                let outcomes = outcomes?;
                assert_eq!(outcomes.len(), batch.len(), "{} must give one outcome per event", R::NAME);
                Ok(outcomes)
            }
            Err(panic) => Err(Failure::Panic(panic_text(panic.as_ref()))),
        }
    }

    /// Meets the inbox and sorts the batch into what runs and what is already decided.
    async fn plan(&self, tx: &mut Tx, items: &[Item<R::Fact>]) -> sqlx::Result<Plan> {
        let now = tx.now();
        let mut plan = Plan::default();
        let mut firsts: HashMap<Uuid, usize> = HashMap::with_capacity(items.len());
        let mut arrivals = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            match firsts.get(&item.message.event.event_id) {
                None => {
                    firsts.insert(item.message.event.event_id, index);
                    arrivals.push((index, Arrival::from(&item.message)));
                }
                // A second copy within the batch goes by the first one's body, as if it had come later.
                Some(&first) if items[first].message.body_hash != item.message.body_hash => plan.quarantine(item),
                Some(_) => plan.repeats.push(index),
            }
        }
        let rows: Vec<Arrival<'_>> = arrivals.iter().map(|(_, arrival)| arrival.clone()).collect();
        // What runs together was taken together. A clock that steps back must not have it end before it began.
        let taken_at = items.first().map_or(now, |item| item.taken_at.min(now));
        let new: HashSet<Uuid> = inbox::insert_new(tx, R::NAME, &rows, taken_at, now).await?.into_iter().collect();
        let known: Vec<Uuid> = rows.iter().map(|row| row.event.event_id).filter(|id| !new.contains(id)).collect();
        let met: HashMap<Uuid, Met> = match known.as_slice() {
            [] => HashMap::new(),
            known => inbox::meet(tx, R::NAME, known, now).await?.into_iter().collect(),
        };
        let removed_until = removed_until(tx, items, now).await?;
        let (mut too_old, mut later) = (Vec::new(), Vec::new());
        for (index, arrival) in arrivals {
            let item = &items[index];
            let met = met.get(&arrival.event.event_id).map(|met| item.meets(met.clone()));
            match inbox::decide(met.as_ref(), arrival.body_hash) {
                Action::Run if self.may_have_forgotten(arrival.event, met.as_ref(), now, removed_until) => {
                    too_old.push((index, met));
                }
                Action::Run => plan.run.push((index, met)),
                Action::TakeOver => plan.stale.extend(met.map(|met| (index, met))),
                Action::Later => {
                    let delay = met.map(|met| met.due_in).unwrap_or_default();
                    later.push(Entry::again(arrival.event, item.message.body.clone(), &self.queue, delay));
                    plan.settled.push((item.tag, Settle::AckRetry));
                }
                Action::Dismiss => plan.dismiss(item.tag, arrival.event.event_id),
                Action::RejectAgain => plan.settled.push((item.tag, Settle::Reject)),
                Action::Quarantine => plan.quarantine(item),
            }
        }
        tally::quarantined_on_commit(tx, R::NAME, &plan.quarantined);
        outbox::append_many(tx, &later).await?;
        // A repeat shares the fate of the copy before it: dead stays dead, anything else is a duplicate.
        for index in std::mem::take(&mut plan.repeats) {
            let id = items[index].message.event.event_id;
            if met.get(&id).is_some_and(|met| met.state == State::Dead) {
                plan.settled.push((items[index].tag, Settle::Reject));
            } else {
                plan.dismiss(items[index].tag, id);
            }
        }
        if !too_old.is_empty() {
            let memory = in_words(self.kernel.tuning.keep.inbox);
            let error =
                format!("it is older than what the inbox remembers (by now {memory}): it may have been dealt with");
            let outcomes = vec![Outcome::Reject { reason: event::TOO_OLD, error }; too_old.len()];
            plan.settled.extend(self.keep_books(tx, items, &too_old, &outcomes).await?.0);
        }
        Ok(plan)
    }

    /// Is it an event we know nothing of, but so old that we may have dealt with it and forgotten? Rows may have been
    /// kept for a shorter time than they are now.
    fn may_have_forgotten(
        &self,
        event: &Event,
        met: Option<&Met>,
        now: Timestamp,
        removed_until: Option<Timestamp>,
    ) -> bool {
        let unknown = met.is_none_or(|met| met.state == State::Processing && met.attempts == 0);
        let is_old = now.since(event.occurred_at) > self.kernel.tuning.keep.inbox;
        unknown && (is_old || removed_until.is_some_and(|until| event.occurred_at < until))
    }

    /// Writes what the outcomes mean: nothing for a new event that is done, else its mark, its wait, its retry row.
    pub(super) async fn keep_books(
        &self,
        tx: &mut Tx,
        items: &[Item<R::Fact>],
        run: &[(usize, Option<Met>)],
        outcomes: &[Outcome],
    ) -> sqlx::Result<Decided> {
        let mut books = Books::default();
        let mut claimed = Vec::new();
        let token = mint_id();
        let mut settled = Vec::with_capacity(run.len());
        for ((index, met), outcome) in run.iter().zip(outcomes) {
            let item = &items[*index];
            let settle = match (met, outcome) {
                (None, Outcome::Done) => {
                    books.done_at_once.push(item.message.event.event_id);
                    Settle::Ack
                }
                (met, Outcome::Call) => {
                    assert!(self.reaction.outside().is_some(), "{} must say how to call the outside", R::NAME);
                    let (version, attempts) = met.as_ref().map_or((0, 0), |met| (met.version, met.attempts));
                    let event_id = item.message.event.event_id;
                    let claim = Claim { event_id, token, version: version + 1, attempt: attempts + 1 };
                    books.claims.push(claim);
                    claimed.push((*index, claim));
                    continue;
                }
                (met, outcome) => {
                    let attempts = met.as_ref().map_or(0, |met| met.attempts);
                    self.book(&item.message, attempts, outcome, &mut books)
                }
            };
            settled.push((item.tag, settle));
        }
        self.write_books(tx, &books).await?;
        Ok((settled, claimed))
    }

    pub(super) async fn write_books(&self, tx: &mut Tx, books: &Books) -> sqlx::Result<()> {
        tally::on_commit(tx, R::NAME, books.done_at_once.len(), &books.marks, books.waits.len());
        tally::tell_on_commit(tx, R::NAME, &books.told);
        let ended_at = self.kernel.db.clock().now();
        if !books.done_at_once.is_empty() && ended_at.since(tx.now()) >= SLOW {
            inbox::put_end(tx, R::NAME, &books.done_at_once, ended_at).await?;
        }
        if !books.marks.is_empty() {
            let now = tx.now();
            inbox::mark_many(tx, R::NAME, &books.marks, now).await?;
            outbox::append_many(tx, &books.retries).await?;
        }
        if !books.claims.is_empty() {
            let now = tx.now();
            inbox::claim_many(tx, R::NAME, &books.claims, self.kernel.tuning.call_lease, now).await?;
        }
        waiting::keep_many(tx, R::NAME, &books.waits, self.kernel.tuning.wait_deadline).await
    }

    /// Notes what an outcome means for an event that has had `attempts` before this one.
    pub(super) fn book(
        &self,
        message: &Message<R::Fact>,
        attempts: i32,
        outcome: &Outcome,
        books: &mut Books,
    ) -> Settle {
        let event_id = message.event.event_id;
        let attempt = attempts + 1;
        let mark = |state, due_in, reason: Option<&str>, error: Option<&String>| Mark {
            event_id,
            state,
            attempts: attempt,
            due_in,
            reason: reason.map(str::to_owned),
            last_error: error.map(|error| event::without_nul(error).chars().take(ERROR_CHARS_MAX).collect()),
        };
        match outcome {
            Outcome::Done => {
                books.marks.push(mark(State::Processed, None, None, None));
                Settle::Ack
            }
            // Woken within another event's transaction: it gets a delivery of its own, and the call is made then.
            Outcome::Call => {
                books.retries.push(Entry::retry(
                    &message.event,
                    message.body.clone(),
                    &self.queue,
                    attempts,
                    Duration::ZERO,
                ));
                books.marks.push(Mark { attempts, ..mark(State::Retrying, Some(Duration::ZERO), None, None) });
                Settle::AckRetry
            }
            Outcome::Moot { why } => {
                books.marks.push(mark(State::Processed, None, Some("moot"), Some(why)));
                Settle::Ack
            }
            Outcome::Wait { key } => {
                assert!(R::AWAITED.contains(key), "{} must declare that {key} is awaited, or nothing wakes", R::NAME);
                let waiting_for = waiting::name(key, &message.event);
                books.told.push(Told::kept(&message.event, key));
                // To wait is no attempt.
                let (body, traceparent) = (message.body.clone(), message.event.traceparent);
                books.waits.push(Wait { event_id, attempts, waiting_for, body, traceparent });
                Settle::Ack
            }
            Outcome::Reject { reason, error } => {
                books.told.push(Told::dead_letter(&message.event, reason, error));
                books.marks.push(mark(State::Dead, None, Some(reason), Some(error)));
                Settle::Reject
            }
            Outcome::Retry { reason, error, after } => match self.kernel.tuning.retry.delay(attempt.unsigned_abs()) {
                Some(delay) => {
                    let delay = delay.max(*after);
                    books.told.push(Told::retry(&message.event, attempt, delay, error));
                    books.retries.push(Entry::retry(&message.event, message.body.clone(), &self.queue, attempt, delay));
                    books.marks.push(mark(State::Retrying, Some(delay), Some(reason), Some(error)));
                    Settle::AckRetry
                }
                None => {
                    let exhausted = Outcome::Reject { reason: "retries-exhausted", error: error.clone() };
                    self.book(message, attempts, &exhausted, books)
                }
            },
        }
    }

    /// The culprit stands alone: its failure counts as an attempt, and it is retried or rejected.
    async fn blame(&self, item: &Item<R::Fact>, failure: Failure) -> sqlx::Result<(Tag, Settle)> {
        let Blame { reason, last_word, error } = failure.blame();
        let mut tx = self.kernel.db.begin().await?;
        let plan = self.plan(&mut tx, std::slice::from_ref(item)).await?;
        let mut run = plan.run;
        run.extend(plan.stale.into_iter().map(|(index, met)| (index, Some(met))));
        let Some((_, met)) = run.first() else {
            // Another instance has dealt with it since.
            tx.commit().await?;
            return Ok(plan.settled.first().copied().unwrap_or((item.tag, Settle::Ack)));
        };
        let attempts = met.as_ref().map_or(0, |met| met.attempts) + 1;
        let exhausted = self.kernel.tuning.retry.delay(attempts.unsigned_abs()).is_none();
        let outcome =
            if exhausted { Outcome::Reject { reason: last_word, error } } else { Outcome::retry_for(reason, error) };
        let (settled, _) = self.keep_books(&mut tx, std::slice::from_ref(item), &run, &[outcome]).await?;
        tx.commit().await?;
        Ok(settled[0])
    }

    /// Runs a message that has been left unfinished before, recording the run before it starts.
    async fn run_alone(&self, item: &Item<R::Fact>, settled: &mut Vec<(Tag, Settle)>) -> sqlx::Result<()> {
        let mut tx = self.kernel.db.begin().await?;
        let (id, now) = (item.message.event.event_id, tx.now());
        // A row to lock: where there is none, another instance may be inserting it with a copy of its own.
        inbox::insert_begun(&mut tx, R::NAME, &Arrival::from(&item.message)).await?;
        let met = inbox::meet(&mut tx, R::NAME, &[id], now).await?.pop().map(|(_, met)| item.meets(met));
        if inbox::decide(met.as_ref(), &item.message.body_hash) == Action::Run {
            let unfinished = met.as_ref().map_or(0, |met| met.unfinished_runs);
            if unfinished >= UNFINISHED_RUNS_MAX {
                let error = format!("{unfinished} runs of it began and none finished");
                let outcome = Outcome::Reject { reason: "process-killer", error };
                let run = [(0, met)];
                settled.extend(self.keep_books(&mut tx, std::slice::from_ref(item), &run, &[outcome]).await?.0);
                return tx.commit().await;
            }
            inbox::record_run(&mut tx, R::NAME, id).await?;
        }
        tx.commit().await?;
        let ended = self.run_halving(std::slice::from_ref(item), Waking::Later, settled).await;
        if ended.is_err() {
            // The database's trouble is not the message's. Best effort: it may be too far away to say so.
            let mut tx = self.kernel.db.begin().await?;
            inbox::forget_run(&mut tx, R::NAME, id).await?;
            tx.commit().await?;
        }
        ended
    }

    /// Everything is committed: rejects what is to be rejected and returns what is to be acknowledged.
    async fn settle(
        &self,
        subscription: &mut Subscription,
        settled: Vec<(Tag, Settle)>,
    ) -> Result<Vec<Tag>, TransportError> {
        let tags = |wanted: &[Settle]| -> Vec<Tag> {
            settled.iter().filter(|(_, settle)| wanted.contains(settle)).map(|(tag, _)| *tag).collect()
        };
        let rejected = tags(&[Settle::Reject]);
        if !rejected.is_empty() {
            self.kernel.faults.reach("consumer.before_reject", R::NAME);
            subscription.reject(&rejected).await?;
        }
        if settled.iter().any(|(_, settle)| *settle == Settle::AckRetry) {
            self.kernel.faults.reach("consumer.retry_written", R::NAME);
        }
        Ok(tags(&[Settle::Ack, Settle::AckRetry]))
    }
}

/// What a transaction has decided: how deliveries are to be settled, and which items are to be called for first.
pub(super) type Decided = (Vec<(Tag, Settle)>, Vec<(usize, Claim)>);

/// A batch, sorted by what the inbox says of each item.
#[derive(Default)]
pub(super) struct Plan {
    /// Items to run, with the inbox row they met if there was one.
    pub run: Vec<(usize, Option<Met>)>,
    /// Items under a claim whose lease ran out, with that row.
    pub stale: Vec<(usize, Met)>,
    repeats: Vec<usize>,
    duplicates: Vec<Uuid>,
    /// What is to be told of those with another body than the one known.
    quarantined: Vec<Told>,
    pub settled: Vec<(Tag, Settle)>,
}

impl Plan {
    fn dismiss(&mut self, tag: Tag, event_id: Uuid) {
        self.duplicates.push(event_id);
        self.settled.push((tag, Settle::Ack));
    }

    fn quarantine<F>(&mut self, item: &Item<F>) {
        let event = &item.message.event;
        self.quarantined.push(Told::dead_letter(event, event::ID_REUSED, &event::id_reused(event.event_id)));
        self.settled.push((item.tag, Settle::Reject));
    }
}

/// Until when inbox rows have been removed; not asked for a batch that is too young to be forgotten.
async fn removed_until<F>(tx: &mut Tx, items: &[Item<F>], now: Timestamp) -> sqlx::Result<Option<Timestamp>> {
    if items.iter().all(|item| now.since(item.message.event.occurred_at) < FRESH) {
        return Ok(None);
    }
    retention::verdicts_removed_until(tx).await
}

/// The span of handling one message, in the words of OpenTelemetry's conventions.
pub(super) fn begin_span<R: Reaction>(message: &Message<R::Fact>, queue: &str, system: &'static str) -> Span {
    Span::begin(message.event.traceparent, SpanKind::Consumer, || {
        let attributes = vec![
            KeyValue::new("messaging.system", system),
            KeyValue::new("messaging.operation.type", "process"),
            KeyValue::new("messaging.operation.name", "process"),
            KeyValue::new("messaging.destination.name", queue.to_owned()),
            KeyValue::new("messaging.consumer.group.name", R::NAME),
            KeyValue::new("messaging.message.id", message.event.event_id.to_string()),
            KeyValue::new("messaging.message.conversation_id", message.event.correlation_id.clone()),
            KeyValue::new("messaging.rabbitmq.destination.routing_key", message.key.clone()),
        ];
        (format!("process {} {}", R::NAME, message.key).into(), attributes)
    })
}

/// What a handler panicked with, to be kept and shown: without the secrets that somebody may have formatted into it.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.map_or_else(|| "no message".to_owned(), secrets::strike_from)
}
