//! The gate: a delivery becomes an item in hand, or is to be rejected.
//!
//! Reading asks nothing of the database, so that a delivery that is refused is refused for the same reason when the
//! dead-letter office reads it again. What passes is sorted: a message delivered so often that it may be killing the
//! process goes to those that run alone.

use std::collections::HashSet;
use std::time::Duration;

use super::{Consumer, Settle};
use crate::clock::Timestamp;
use crate::messaging::event::{self, Label, Message, Unreadable};
use crate::messaging::inbox::{Met, State};
use crate::messaging::transport::{Delivery, RawMessage, Tag};
use crate::messaging::{Reaction, outbox, tally};
use crate::trace::{KeyValue, Span, SpanKind, Traceparent};

/// From this delivery on a message runs alone.
const ALONE_FROM_DELIVERY: u32 = 3;
/// The header that marks a copy made by the fault lab.
const COPY: &str = "x-lab-copy";

/// A message that passed the gate, with the delivery it came in.
pub(in crate::messaging) struct Item<F> {
    pub tag: Tag,
    deliveries: u32,
    pub(super) handed_over: bool,
    /// Set on a retry or redrive: how many attempts went before it.
    retry_after_attempts: Option<i32>,
    pub message: Message<F>,
    pub(super) taken_at: Timestamp,
    /// Over once the item is dealt with.
    _span: Span,
}

impl<F> Item<F> {
    /// The row as this delivery meets it. The retry that a row waits for is due whatever the clock says by now: it
    /// was the due time that sent it, and a clock stepping back must not leave the event with nobody to run it.
    pub(super) fn meets(&self, met: Met) -> Met {
        let awaited = self.retry_after_attempts == Some(met.attempts);
        if awaited && met.state == State::Retrying { Met { due_in: Duration::ZERO, ..met } } else { met }
    }
}

/// Deliveries in hand: what is to run, and what is decided already.
pub(super) struct Hand<F> {
    pub together: Vec<Item<F>>,
    pub alone: Vec<Item<F>>,
    pub settled: Vec<(Tag, Settle)>,
}

impl<F> Hand<F> {
    /// Leaves only what is not decided, to be tried again.
    pub fn put_down_settled(&mut self) {
        let settled: HashSet<Tag> = self.settled.iter().map(|(tag, _)| *tag).collect();
        for items in [&mut self.together, &mut self.alone] {
            items.retain(|item| !settled.contains(&item.tag));
        }
    }
}

/// Reads a delivery through the whole gate, as the consumer and the dead-letter office both do.
pub fn read_delivery<R: Reaction>(delivery: &Delivery, bytes_max: usize) -> Result<Message<R::Fact>, Unreadable> {
    let event = match &delivery.written {
        Some(event) => {
            event::check_envelope(event, &delivery.body, bytes_max)?;
            event.clone()
        }
        None => {
            let (message_id, header_event_id) = (delivery.message_id.as_deref(), delivery.header("x-event-id"));
            let mut event = event::read_envelope(&delivery.body, Label { message_id, header_event_id }, bytes_max)?;
            event.traceparent = delivery.header(outbox::TRACEPARENT).and_then(Traceparent::parse);
            event.into()
        }
    };
    event::open(event, delivery.body.clone(), R::KEYS, R::decode)
}

impl<R: Reaction> Consumer<R> {
    /// Takes deliveries through the gate; what does not pass is to be rejected.
    pub(super) fn read(&self, deliveries: Vec<Delivery>, taken_at: Timestamp) -> Hand<R::Fact> {
        let mut settled = Vec::with_capacity(deliveries.len());
        let (mut together, mut alone) = (Vec::with_capacity(deliveries.len()), Vec::new());
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
                    message.trace(span.carried());
                    let attempts = delivery.headers.get(outbox::X_ATTEMPTS).and_then(serde_json::Value::as_i64);
                    let item = Item {
                        tag: delivery.tag,
                        deliveries: delivery.deliveries,
                        handed_over: delivery.handed_over,
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

    /// Puts copies of deliveries into the queue as a broker might, if the fault lab says so.
    pub(super) async fn repeat(&self, deliveries: &[Delivery]) {
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
}

/// The span of handling one message, in the words of OpenTelemetry's conventions.
pub(in crate::messaging) fn begin_span<R: Reaction>(
    message: &Message<R::Fact>,
    queue: &str,
    system: &'static str,
) -> Span {
    Span::begin(message.event.traceparent, SpanKind::Consumer, || {
        let attributes = vec![
            KeyValue::new("messaging.system", system),
            KeyValue::new("messaging.operation.type", "process"),
            KeyValue::new("messaging.operation.name", "process"),
            KeyValue::new("messaging.destination.name", queue.to_owned()),
            KeyValue::new("messaging.consumer.group.name", R::NAME),
            KeyValue::new("messaging.message.id", message.event.event_id.to_string()),
            KeyValue::new("messaging.message.conversation_id", message.event.correlation_id.clone()),
            KeyValue::new("messaging.rabbitmq.destination.routing_key", message.key),
        ];
        (format!("process {} {}", R::NAME, message.key).into(), attributes)
    })
}
