//! A consumer's channel: prefetched deliveries in batches, and acknowledgements in as few frames as may be.
//!
//! Delivery tags count up on a channel and die with it, so every tag carries the subscription it belongs to and is
//! ignored anywhere else. When the channel is lost the broker gives everything unsettled to somebody else; a
//! subscription that finds itself lost hands out nothing more of what it had buffered.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use lapin::options::{BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Consumer};
use tokio::time::timeout;
use uuid::Uuid;

use super::declare::Declarations;
use super::shape::short;
use super::wire;
use crate::clock::mint_id;
use crate::messaging::transport::{Delivery, Tag, TransportError};

/// A queue that lost its leader answers no consume; better to ask again than to wait for it.
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(10);
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

pub struct RabbitSubscription {
    queue: String,
    token: Uuid,
    channel: Channel,
    consumer: Consumer,
    /// Arrived and not handed out.
    arrived: VecDeque<Delivery>,
    /// Arrived and not settled, whether handed out or not.
    unsettled: BTreeSet<u64>,
    /// Asked for no more; what was under way still arrives.
    winding_down: bool,
    /// The stream has ended; why, if we did not ask for it.
    ended: Option<String>,
    declarations: Arc<Declarations>,
    _connection: Arc<Connection>,
}

impl RabbitSubscription {
    pub async fn open(
        connection: Arc<Connection>,
        declarations: Arc<Declarations>,
        queue: &str,
        prefetch: u16,
    ) -> Result<Self, TransportError> {
        let opening = async {
            let channel = connection.create_channel().await.map_err(|error| error.to_string())?;
            declarations.declare_one(&connection, &channel, queue).await?;
            channel.basic_qos(prefetch, BasicQosOptions::default()).await.map_err(|error| error.to_string())?;
            let consumer = channel
                .basic_consume(short(queue)?, "".into(), BasicConsumeOptions::default(), FieldTable::default())
                .await
                .map_err(|error| error.to_string())?;
            Ok::<_, String>((channel, consumer))
        };
        let opened = timeout(SUBSCRIBE_TIMEOUT, opening).await;
        let (channel, consumer) = opened
            .unwrap_or_else(|_| Err(format!("no answer within {SUBSCRIBE_TIMEOUT:?}")))
            .map_err(|why| TransportError::Broker(format!("{queue} cannot be consumed: {why}")))?;
        Ok(Self {
            queue: queue.to_owned(),
            token: mint_id(),
            channel,
            consumer,
            arrived: VecDeque::new(),
            unsettled: BTreeSet::new(),
            winding_down: false,
            ended: None,
            declarations,
            _connection: connection,
        })
    }

    pub async fn ready(&mut self, poll: Duration) {
        if self.arrived.is_empty() && self.ended.is_none() {
            // Cancelled, `next` has taken nothing.
            if let Ok(next) = timeout(poll, self.consumer.next()).await {
                self.receive(next);
            }
        }
    }

    pub fn take(&mut self, max: usize) -> Result<Vec<Delivery>, TransportError> {
        while self.arrived.len() < max
            && self.ended.is_none()
            && let Some(next) = self.consumer.next().now_or_never()
        {
            self.receive(next);
        }
        self.check()?;
        let count = self.arrived.len().min(max);
        Ok(self.arrived.drain(..count).collect())
    }

    pub async fn ack(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        let tags = self.own(tags);
        let prefix = self.settled_prefix(&tags);
        if let Some(&last) = prefix.last() {
            self.channel.basic_ack(last, BasicAckOptions { multiple: true }).await.map_err(lost)?;
        }
        for &tag in &tags[prefix.len()..] {
            self.channel.basic_ack(tag, BasicAckOptions::default()).await.map_err(lost)?;
        }
        self.forget(&tags);
        Ok(())
    }

    pub async fn reject(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        self.nack(tags, false).await
    }

    /// The broker counts this as a delivery, as it does for a channel that closes.
    pub async fn release(&mut self, tags: &[Tag]) -> Result<(), TransportError> {
        self.nack(tags, true).await
    }

    async fn nack(&mut self, tags: &[Tag], requeue: bool) -> Result<(), TransportError> {
        let tags = self.own(tags);
        let prefix = self.settled_prefix(&tags);
        if let Some(&last) = prefix.last() {
            self.channel.basic_nack(last, BasicNackOptions { multiple: true, requeue }).await.map_err(lost)?;
        }
        for &tag in &tags[prefix.len()..] {
            self.channel.basic_nack(tag, BasicNackOptions { multiple: false, requeue }).await.map_err(lost)?;
        }
        self.forget(&tags);
        Ok(())
    }

    /// Takes no more from the queue; what has arrived is still to be worked off.
    pub async fn wind_down(&mut self) {
        self.winding_down = true;
        let cancelling = self.channel.basic_cancel(self.consumer.tag(), BasicCancelOptions::default());
        match timeout(GOODBYE_TIMEOUT, cancelling).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.ended = Some(error.to_string()),
            Err(_) => self.ended = Some(format!("no answer within {GOODBYE_TIMEOUT:?}")),
        }
    }

    pub async fn close(self) {
        // Best effort: dropped without it, the channel is closed just the same.
        let _ = timeout(GOODBYE_TIMEOUT, self.channel.close(200, "done".into())).await;
    }

    /// Fails if nothing more can be settled or had on this channel.
    pub fn check(&self) -> Result<(), TransportError> {
        if !self.channel.status().connected() {
            return Err(TransportError::Broker(format!("{}: the channel was lost", self.queue)));
        }
        match &self.ended {
            Some(why) if !self.winding_down => Err(TransportError::Broker(format!("{}: {why}", self.queue))),
            _ => Ok(()),
        }
    }

    fn receive(&mut self, next: Option<lapin::Result<lapin::message::Delivery>>) {
        match next {
            Some(Ok(message)) => {
                self.unsettled.insert(message.delivery_tag);
                self.arrived.push_back(wire::delivery_of(message, self.token));
            }
            Some(Err(error)) => self.ended = Some(format!("the channel was lost: {error}")),
            // The answer to our own goodbye.
            None if self.winding_down => self.ended = Some("the consumer was cancelled".to_owned()),
            None => {
                // It may have been declared again by the time that this consumer subscribes again.
                self.declarations.suspect(&self.queue);
                self.ended = Some("the broker cancelled the consumer; is the queue gone?".to_owned());
            }
        }
    }

    /// Those of `tags` that are ours to settle, in order.
    fn own(&self, tags: &[Tag]) -> Vec<u64> {
        let mut own: Vec<u64> = tags
            .iter()
            .filter(|tag| tag.token == self.token)
            .filter_map(|tag| u64::try_from(tag.id).ok())
            .filter(|tag| self.unsettled.contains(tag))
            .collect();
        if own.len() < tags.len() {
            tracing::warn!(queue = self.queue, strays = tags.len() - own.len(), "not ours to settle any more");
        }
        own.sort_unstable();
        own.dedup();
        own
    }

    /// How far one frame can settle all that is unsettled up to a tag.
    fn settled_prefix<'t>(&self, sorted: &'t [u64]) -> &'t [u64] {
        let count = sorted.iter().zip(&self.unsettled).take_while(|(tag, unsettled)| tag == unsettled).count();
        &sorted[..count]
    }

    fn forget(&mut self, tags: &[u64]) {
        match tags {
            [tag] => drop(self.unsettled.remove(tag)),
            tags => {
                let gone: HashSet<&u64> = tags.iter().collect();
                self.unsettled.retain(|tag| !gone.contains(tag));
            }
        }
    }
}

fn lost(error: lapin::Error) -> TransportError {
    TransportError::Broker(format!("the channel was lost: {error}"))
}
