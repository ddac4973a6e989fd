//! Publishing with confirms: a window of messages under way, and one verdict for each.
//!
//! Only a confirm without a return counts as accepted. A message that comes back unroutable, or that the broker
//! refuses, has its verdict; one whose confirm never came has none, and goes out again under the same id.
//!
//! lapin hands a returned message to whichever confirm it resolves next, which need not be that message's own when
//! the broker confirms many at once. So a return is matched to its message by what it carries, never by the confirm it
//! came with, and a channel has one pass at a time: no return can then end up in another pass.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{MaybeDone, maybe_done};
use lapin::message::BasicReturnMessage;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation};
use tokio::time::{Instant, timeout};

use super::link::Link;
use super::shape::{Shape, short};
use super::wire;
use crate::messaging::outbox::Claimed;
use crate::messaging::transport::{RawMessage, TransportError, Verdict};

/// Messages under way at once. More would only wait in the broker's memory.
const WINDOW: usize = 2048;
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a queue that is gone is left for its consumer to declare again.
const LEFT_TO_CONSUMERS: Duration = Duration::from_secs(1);

/// Channels in confirm mode, each used by one pass at a time.
#[derive(Default)]
pub struct Publisher {
    idle: Mutex<Vec<Channel>>,
    /// Since when messages come back that a queue should take.
    missing_since: Mutex<Option<Instant>>,
}

/// What to send, ready for the wire.
struct Outgoing<'a> {
    exchange: ShortString,
    routing_key: ShortString,
    mandatory: bool,
    properties: BasicProperties,
    body: &'a [u8],
}

impl<'a> Outgoing<'a> {
    fn of_row(row: &'a Claimed, shape: &Shape) -> Result<Self, String> {
        let key = row.routing_key();
        let properties = wire::properties_of(row, &key)?;
        Self::addressed(&row.target, &key, properties, &row.body, shape)
    }

    fn of_raw(message: &'a RawMessage, shape: &Shape) -> Result<Self, String> {
        let properties = wire::properties_of_raw(message)?;
        Self::addressed(&message.queue, &message.routing_key, properties, &message.body, shape)
    }

    /// To one queue through the default exchange, or to the events' exchange under the key. A key that nobody is
    /// bound to may reach nobody.
    fn addressed(
        queue: &str,
        key: &str,
        properties: BasicProperties,
        body: &'a [u8],
        shape: &Shape,
    ) -> Result<Self, String> {
        let (exchange, routing_key, mandatory) = match queue {
            "" => (shape.exchange.as_str(), key, shape.is_bound(key)),
            queue => ("", queue, true),
        };
        Ok(Self { exchange: short(exchange)?, routing_key: short(routing_key)?, mandatory, properties, body })
    }
}

/// Tells a returned message apart from the others of its pass.
#[derive(PartialEq)]
struct Address {
    message_id: Option<ShortString>,
    exchange: ShortString,
    routing_key: ShortString,
}

type Sending<'a> = MaybeDone<Pin<Box<dyn Future<Output = lapin::Result<Confirmation>> + Send + 'a>>>;

/// One pass over one channel.
struct Pass<'a> {
    channel: &'a Channel,
    waiting: VecDeque<(usize, Sending<'a>)>,
    verdicts: Vec<Verdict>,
    addresses: Vec<Option<Address>>,
    returned: Vec<(Address, String)>,
    lost: Option<lapin::Error>,
    /// Once a full queue has refused, RabbitMQ may let that channel's messages be refused for ever, room or no room, if the
    /// limit was lifted by a policy (seen with 3.10): the next pass has another channel.
    any_refused: bool,
}

impl Publisher {
    /// One verdict per row, in order. Never waits longer than `patience` for the broker's word.
    pub async fn publish(&self, link: &Link, shape: &Shape, rows: &[Claimed], patience: Duration) -> Vec<Verdict> {
        let outgoing = rows.iter().map(|row| Outgoing::of_row(row, shape)).collect();
        match self.send(link, shape, outgoing, patience).await {
            Ok(verdicts) => verdicts,
            Err(error) => {
                tracing::debug!(%error, "nothing could be published");
                vec![Verdict::Unknown; rows.len()]
            }
        }
    }

    pub async fn publish_raw(
        &self,
        link: &Link,
        shape: &Shape,
        message: &RawMessage,
        times: u32,
        patience: Duration,
    ) -> Result<(), TransportError> {
        let outgoing = (0..times).map(|_| Outgoing::of_raw(message, shape)).collect();
        for verdict in self.send(link, shape, outgoing, patience).await? {
            match verdict {
                Verdict::Accepted => {}
                Verdict::Refused(why) => return Err(TransportError::Broker(why)),
                Verdict::Unknown => return Err(TransportError::Broker("the broker did not confirm it".to_owned())),
            }
        }
        Ok(())
    }

    async fn send(
        &self,
        link: &Link,
        shape: &Shape,
        outgoing: Vec<Result<Outgoing<'_>, String>>,
        patience: Duration,
    ) -> Result<Vec<Verdict>, TransportError> {
        let channel = self.channel(link).await?;
        let mut pass = Pass::new(&channel, outgoing.len());
        let in_time = tokio::select! {
            in_time = timeout(patience, pass.run(outgoing)) => in_time.is_ok(),
            // Lost or blocked: there will be no confirm while that lasts.
            () = link.until_up(false) => true,
        };
        let whole = pass.waiting.is_empty() && pass.lost.is_none();
        let fit = whole && !pass.any_refused;
        let (verdicts, any_returned) = pass.end();
        if fit {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(channel);
        } else if !in_time {
            link.give_up_on("it confirms nothing");
        }
        if self.is_missing_for_long(any_returned)
            && let Ok(connection) = link.connection()
            && let Ok(Err(error)) = timeout(OPEN_TIMEOUT, shape.declare(&connection)).await
        {
            tracing::warn!(error, "what took no message could not be declared again");
        }
        Ok(verdicts)
    }

    /// Has something that should take messages been away for a while, a queue or a binding? Its consumer declares it
    /// again on its own, and must find out first: declared at once, RabbitMQ hands the new queue to the old consumer,
    /// which then drops messages as seen before, because the new queue counts from the start (seen with 3.10).
    fn is_missing_for_long(&self, any_returned: bool) -> bool {
        let mut since = self.missing_since.lock().unwrap_or_else(PoisonError::into_inner);
        let declare = any_returned && since.is_some_and(|since| since.elapsed() >= LEFT_TO_CONSUMERS);
        *since = if any_returned && !declare { since.or_else(|| Some(Instant::now())) } else { None };
        declare
    }

    async fn channel(&self, link: &Link) -> Result<Channel, TransportError> {
        let connection = link.connection()?;
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                Some(channel) if channel.status().connected() => return Ok(channel),
                Some(_) => {}
                None => break,
            }
        }
        let opening = async {
            let channel = connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok::<_, lapin::Error>(channel)
        };
        match timeout(OPEN_TIMEOUT, opening).await {
            Ok(Ok(channel)) => Ok(channel),
            Ok(Err(error)) => Err(TransportError::Broker(format!("no channel to publish on: {error}"))),
            Err(_) => {
                link.give_up_on("it opens no channel");
                Err(TransportError::Broker(format!("no channel to publish on within {OPEN_TIMEOUT:?}")))
            }
        }
    }
}

impl<'a> Pass<'a> {
    fn new(channel: &'a Channel, count: usize) -> Self {
        Self {
            channel,
            waiting: VecDeque::with_capacity(count.min(WINDOW)),
            verdicts: vec![Verdict::Unknown; count],
            addresses: (0..count).map(|_| None).collect(),
            returned: Vec::new(),
            lost: None,
            any_refused: false,
        }
    }

    /// Sends everything and waits for every confirm, until the channel is lost.
    async fn run(&mut self, outgoing: Vec<Result<Outgoing<'a>, String>>) {
        for (index, outgoing) in outgoing.into_iter().enumerate() {
            match outgoing {
                Ok(outgoing) => {
                    if self.waiting.len() >= WINDOW {
                        self.wait_for_oldest().await;
                    }
                    self.start(index, outgoing);
                }
                Err(why) => self.verdicts[index] = Verdict::Refused(format!("it cannot be sent: {why}")),
            }
            if self.lost.is_some() {
                return;
            }
        }
        while !self.waiting.is_empty() && self.lost.is_none() {
            self.wait_for_oldest().await;
        }
    }

    fn start(&mut self, index: usize, outgoing: Outgoing<'a>) {
        let Outgoing { exchange, routing_key, mandatory, properties, body } = outgoing;
        if mandatory {
            self.addresses[index] = Some(Address {
                message_id: properties.message_id().clone(),
                exchange: exchange.clone(),
                routing_key: routing_key.clone(),
            });
        }
        let options = BasicPublishOptions { mandatory, ..BasicPublishOptions::default() };
        let channel = self.channel;
        let mut sending: Sending<'a> = maybe_done(Box::pin(async move {
            channel.basic_publish(exchange, routing_key, options, body, properties).await?.await
        }));
        // The first poll hands the frames over. Waiting for each to be written would cost a thread switch per message.
        let _ = (&mut sending).now_or_never();
        self.waiting.push_back((index, sending));
    }

    async fn wait_for_oldest(&mut self) {
        if let Some((_, sending)) = self.waiting.front_mut() {
            sending.await;
            self.settle_oldest();
        }
    }

    /// Takes the oldest one's confirm if it is there; `false` if not.
    fn settle_oldest(&mut self) -> bool {
        let Some((index, sending)) = self.waiting.front_mut() else { return false };
        let Some(confirmation) = Pin::new(sending).take_output() else { return false };
        let index = *index;
        self.waiting.pop_front();
        match confirmation {
            Ok(Confirmation::Ack(returned)) => {
                self.verdicts[index] = Verdict::Accepted;
                self.note(returned);
            }
            Ok(Confirmation::Nack(returned)) => {
                self.verdicts[index] = Verdict::Refused("the broker refused it: a queue it goes to is full".to_owned());
                self.any_refused = true;
                self.note(returned);
            }
            Ok(Confirmation::NotRequested) => {
                self.verdicts[index] = Verdict::Refused("the channel has no confirms".to_owned());
            }
            Err(error) => self.lost = Some(error),
        }
        true
    }

    fn note(&mut self, returned: Option<BasicReturnMessage>) {
        if let Some(returned) = returned {
            let why = format!("no queue took it: {} {}", returned.reply_code, returned.reply_text);
            let address = Address {
                message_id: returned.delivery.properties.message_id().clone(),
                exchange: returned.delivery.exchange,
                routing_key: returned.delivery.routing_key,
            };
            self.returned.push((address, why));
        }
    }

    /// The verdicts, and whether anything came back. Cut short or not, every confirm that is there is looked at: it may
    /// bring the return of a message that looked accepted.
    fn end(mut self) -> (Vec<Verdict>, bool) {
        for (index, mut sending) in std::mem::take(&mut self.waiting) {
            let _ = (&mut sending).now_or_never();
            self.waiting.push_front((index, sending));
            if !self.settle_oldest() {
                self.waiting.clear();
            }
        }
        for (address, why) in &self.returned {
            for (verdict, known) in self.verdicts.iter_mut().zip(&self.addresses) {
                if *verdict == Verdict::Accepted && known.as_ref() == Some(address) {
                    *verdict = Verdict::Refused(why.clone());
                }
            }
        }
        (self.verdicts, !self.returned.is_empty())
    }
}
