//! Publishing with confirms: a window of messages under way, and one verdict for each.
//!
//! Only a confirm without a return counts as accepted. A message that comes back unroutable, or that the broker
//! refuses, has its verdict; one whose confirm never came has none, and goes out again under the same id.
//!
//! lapin hands a returned message to whichever confirm it resolves next, which need not be that message's own when
//! the broker confirms many at once. So a return is matched to its message by what it carries, never by the confirm it
//! came with, and a channel has one pass at a time: no return can then end up in another pass.
//!
//! A broker may also close the channel over a message: one that it will not have (no permission, too large), or one for an
//! exchange that is gone. Either way it takes the rest of the pass along and does not say which it was. An exchange is
//! declared again; else the rest goes out one by one, so that only the culprit is refused.

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
use tokio::time::{Instant, timeout, timeout_at};

use super::declare::Declarations;
use super::link::Link;
use super::shape::{Shape, is_not_found, short};
use super::wire;
use crate::messaging::outbox::Claimed;
use crate::messaging::transport::{Published, RawMessage, TransportError, Verdict};

/// Messages under way at once. More would only wait in the broker's memory.
const WINDOW: usize = 2048;
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a queue that is gone is left for its consumer to declare again.
const LEFT_TO_CONSUMERS: Duration = Duration::from_secs(1);
/// How many times its patience a pass may last, however slowly confirms come: a relay's claim holds for one more.
const PATIENCES: u32 = 2;

/// Channels in confirm mode, each used by one pass at a time.
#[derive(Default)]
pub struct Publisher {
    idle: Mutex<Vec<Channel>>,
    /// Since when messages find no exchange, or come back that a queue should take.
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
    /// How long each confirm may be waited for, and until when any of them.
    patience: Duration,
    until: Instant,
    /// Why it ended before everything was confirmed.
    cut_short: Option<CutShort>,
    /// Once a full queue has refused, RabbitMQ may let that channel's messages be refused for ever, room or no room, if the
    /// limit was lifted by a policy (seen with 3.10): the next pass has another channel.
    any_refused: bool,
}

/// What is left of a pass.
struct Ended {
    verdicts: Vec<Verdict>,
    any_returned: bool,
    cut_short: Option<CutShort>,
}

enum CutShort {
    /// The channel is gone.
    Lost(lapin::Error),
    /// No confirm came for as long as one may take.
    Silent,
    /// Confirms came, but too few of them.
    TooLong,
}

/// What a pass came to.
struct Sent {
    verdicts: Vec<Verdict>,
    /// The word with which the broker closed the channel, if it did.
    closed: Option<lapin::Error>,
}

impl Publisher {
    /// One verdict per row, in order. Never waits longer than `patience` for the broker's next word.
    pub async fn publish(
        &self,
        link: &Link,
        declarations: &Declarations,
        rows: &[Claimed],
        patience: Duration,
    ) -> Published {
        let shape = &declarations.shape();
        let outgoing = rows.iter().map(|row| Outgoing::of_row(row, shape)).collect();
        let (verdicts, trouble) = match self.send(link, declarations, outgoing, patience).await {
            Ok(Sent { verdicts, closed: None }) => (verdicts, None),
            Ok(Sent { mut verdicts, closed: Some(error) }) => {
                if !is_not_found(&error) {
                    self.send_one_by_one(link, declarations, rows, &mut verdicts, patience).await;
                }
                let trouble = verdicts.contains(&Verdict::Unknown).then(|| format!("a channel was closed: {error}"));
                (verdicts, trouble)
            }
            Err(error) => (vec![Verdict::Unknown; rows.len()], Some(error.to_string())),
        };
        // Of a link that is down it is the link that tells.
        Published { verdicts, trouble: trouble.filter(|_| link.connection().is_ok()) }
    }

    /// Sends what has no verdict yet, for a while. What the broker closes a channel over now, it was that.
    async fn send_one_by_one(
        &self,
        link: &Link,
        declarations: &Declarations,
        rows: &[Claimed],
        verdicts: &mut [Verdict],
        patience: Duration,
    ) {
        let until = Instant::now() + patience;
        let shape = &declarations.shape();
        for (row, verdict) in rows.iter().zip(verdicts).filter(|(_, verdict)| **verdict == Verdict::Unknown) {
            if Instant::now() >= until {
                return;
            }
            match self.send(link, declarations, vec![Outgoing::of_row(row, shape)], patience).await {
                Ok(Sent { closed: Some(error), .. }) if !is_not_found(&error) => {
                    *verdict = Verdict::Refused(format!("the broker closed the channel over it: {error}"));
                }
                Ok(Sent { mut verdicts, closed: None }) if verdicts != [Verdict::Unknown] => {
                    *verdict = verdicts.remove(0);
                }
                _ => return,
            }
        }
    }

    pub async fn publish_raw(
        &self,
        link: &Link,
        declarations: &Declarations,
        message: &RawMessage,
        times: u32,
        patience: Duration,
    ) -> Result<(), TransportError> {
        let shape = &declarations.shape();
        let outgoing = (0..times).map(|_| Outgoing::of_raw(message, shape)).collect();
        let Sent { verdicts, closed } = self.send(link, declarations, outgoing, patience).await?;
        if let Some(error) = closed {
            return Err(TransportError::Broker(format!("it closed the channel: {error}")));
        }
        for verdict in verdicts {
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
        declarations: &Declarations,
        outgoing: Vec<Result<Outgoing<'_>, String>>,
        patience: Duration,
    ) -> Result<Sent, TransportError> {
        let channel = self.channel(link).await?;
        let mut pass = Pass::new(&channel, outgoing.len(), patience);
        tokio::select! {
            () = pass.run(outgoing) => {}
            // Lost or blocked: there will be no confirm while that lasts.
            () = link.until_up(false) => {}
        }
        let fit = pass.waiting.is_empty() && pass.cut_short.is_none() && !pass.any_refused;
        let Ended { verdicts, any_returned, cut_short } = pass.end();
        if fit {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(channel);
        } else if matches!(cut_short, Some(CutShort::Silent)) {
            link.give_up_on("it confirms nothing");
        }
        let closed = match cut_short {
            Some(CutShort::Lost(error)) if error.is_amqp_soft_error() => Some(error),
            _ => None,
        };
        if self.is_missing_for_long(any_returned || closed.as_ref().is_some_and(is_not_found))
            && let Ok(connection) = link.connection()
            && let Ok(Err(error)) = timeout(OPEN_TIMEOUT, declarations.declare_all(&connection)).await
        {
            tracing::warn!(error, "what took no message could not be declared again");
        }
        Ok(Sent { verdicts, closed })
    }

    /// Has something that should take messages been away for a while, a queue, a binding or the exchange? A consumer
    /// declares its queue again on its own, and must find out first: declared at once, RabbitMQ hands the new queue to the
    /// old consumer, which then drops messages as seen before, because the new queue counts from the start (seen with
    /// 3.10).
    fn is_missing_for_long(&self, is_missing: bool) -> bool {
        let mut since = self.missing_since.lock().unwrap_or_else(PoisonError::into_inner);
        let declare = is_missing && since.is_some_and(|since| since.elapsed() >= LEFT_TO_CONSUMERS);
        *since = if is_missing && !declare { since.or_else(|| Some(Instant::now())) } else { None };
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
    fn new(channel: &'a Channel, count: usize, patience: Duration) -> Self {
        Self {
            channel,
            waiting: VecDeque::with_capacity(count.min(WINDOW)),
            verdicts: vec![Verdict::Unknown; count],
            addresses: (0..count).map(|_| None).collect(),
            returned: Vec::new(),
            patience,
            until: Instant::now() + patience * PATIENCES,
            cut_short: None,
            any_refused: false,
        }
    }

    /// Sends everything and waits for every confirm, unless it is cut short.
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
            if self.cut_short.is_some() {
                return;
            }
        }
        while !self.waiting.is_empty() && self.cut_short.is_none() {
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
        let Some((_, sending)) = self.waiting.front_mut() else { return };
        let silent_at = Instant::now() + self.patience;
        match timeout_at(silent_at.min(self.until), sending).await {
            Ok(()) => drop(self.settle_oldest()),
            Err(_) if silent_at <= self.until => self.cut_short = Some(CutShort::Silent),
            Err(_) => self.cut_short = Some(CutShort::TooLong),
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
            // The first one knows why.
            Err(error) if self.cut_short.is_none() => self.cut_short = Some(CutShort::Lost(error)),
            Err(_) => {}
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

    /// Cut short or not, every confirm that is there is looked at: it may bring the return of a message that looked
    /// accepted.
    fn end(mut self) -> Ended {
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
        Ended { verdicts: self.verdicts, any_returned: !self.returned.is_empty(), cut_short: self.cut_short }
    }
}
