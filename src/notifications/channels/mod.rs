//! The ways to the outside: what each needs to be set up, and how it sends one notice.
//!
//! A channel says of every attempt what is known of it and guesses nothing. Only what surely happened before anything
//! was handed over is a failure; whatever breaks later is unknown, unless the receiver said which.

mod smtp;
mod webhook;

use serde::Serialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::model::{Fact, Kind};
use stockade_kernel::clock::Timestamp;
use stockade_kernel::messaging::Message;
use stockade_kernel::messaging::outside::Answer;

pub use smtp::Smtp;
pub use webhook::{Key, Webhook};

/// A channel outside the database.
pub enum Channel {
    Webhook(Webhook),
    Smtp(Smtp),
}

impl Channel {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Webhook(_) => "webhook",
            Self::Smtp(_) => "smtp",
        }
    }

    /// Can a receiver tell that it has had a notice before? Then one that may have gone through is sent again.
    pub fn receiver_tells_repeats(&self) -> bool {
        match self {
            Self::Webhook(_) => true,
            Self::Smtp(_) => false,
        }
    }

    pub async fn send(&self, message: &Message<Fact>) -> Answer {
        match self {
            Self::Webhook(webhook) => webhook.send(message).await,
            Self::Smtp(smtp) => smtp.send(message).await,
        }
    }
}

/// A notice as receivers get it. The same event gives the same bytes, however often it is sent.
#[derive(Serialize)]
struct Notice<'a> {
    event_id: Uuid,
    event_type: &'a str,
    occurred_at: Timestamp,
    group_id: &'a str,
    subsidiary_id: Option<&'a str>,
    correlation_id: &'a str,
    order_id: Uuid,
    kind: Kind,
    text: String,
    payload: &'a RawValue,
}

impl<'a> From<&'a Message<Fact>> for Notice<'a> {
    fn from(message: &'a Message<Fact>) -> Self {
        let (order_id, kind) = message.fact.notice();
        let event = &message.event;
        Self {
            event_id: event.event_id,
            event_type: message.key,
            occurred_at: event.occurred_at,
            group_id: &event.group_id,
            subsidiary_id: event.subsidiary_id.as_deref(),
            correlation_id: &event.correlation_id,
            order_id,
            kind,
            text: message.fact.text(),
            payload: &event.payload,
        }
    }
}

/// An error with what caused it, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
