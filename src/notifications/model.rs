//! What a notice is. Pure: no I/O.

use uuid::Uuid;

use crate::inventory::events::{InventoryFailed, InventoryReserved};
use crate::orders::events::{OrderMoved, OrderPaid};
use stockade_kernel::messaging::outside::Answer;

/// What a notice is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Reserved,
    Rejected,
    Paid,
    Cancelled,
    Expired,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Rejected => "rejected",
            Self::Paid => "paid",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
        }
    }
}

/// How far a notice is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Not sent, and will be tried again.
    Pending,
    /// Being sent.
    Sending,
    Sent,
    /// Not sent, and given up on.
    Failed,
    /// Perhaps sent: an attempt ended nobody knows how, and none since is known to have gone through.
    Unknown,
}

impl State {
    pub const ALL: [Self; 5] = [Self::Pending, Self::Sending, Self::Sent, Self::Failed, Self::Unknown];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Sending => "sending",
            Self::Sent => "sent",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }

    /// After an attempt that ended like this, and is made `again` or not.
    pub fn after(answer: &Answer, again: bool) -> Self {
        match answer {
            Answer::Done => Self::Sent,
            Answer::Unknown { .. } => Self::Unknown,
            Answer::Failed { .. } | Answer::Refused { .. } if again => Self::Pending,
            Answer::Failed { .. } | Answer::Refused { .. } => Self::Failed,
        }
    }
}

/// What notifications hear of.
#[derive(Debug)]
pub enum Fact {
    Reserved(InventoryReserved),
    Failed(InventoryFailed),
    Paid(OrderPaid),
    Cancelled(OrderMoved),
    Expired(OrderMoved),
}

impl Fact {
    /// The order concerned and the notice it calls for.
    pub fn notice(&self) -> (Uuid, Kind) {
        match self {
            Self::Reserved(reserved) => (reserved.order_id, Kind::Reserved),
            Self::Failed(failed) => (failed.order_id, Kind::Rejected),
            Self::Paid(paid) => (paid.order_id, Kind::Paid),
            Self::Cancelled(cancelled) => (cancelled.order_id, Kind::Cancelled),
            Self::Expired(expired) => (expired.order_id, Kind::Expired),
        }
    }

    /// In a sentence.
    pub fn text(&self) -> String {
        match self {
            Self::Reserved(reserved) => {
                format!("Your order is reserved, reservation {}", reserved.reservation_number)
            }
            Self::Failed(failed) => format!("Your order cannot be filled. {}", failed.reason),
            Self::Paid(paid) => {
                format!("Your payment of {} {} has come in", paid.amount_minor.get(), paid.currency.as_str())
            }
            Self::Cancelled(cancelled) => with_reason("Your order is cancelled", cancelled),
            Self::Expired(expired) => with_reason("Your order has expired", expired),
        }
    }
}

fn with_reason(sentence: &str, moved: &OrderMoved) -> String {
    match &moved.reason {
        Some(reason) => format!("{sentence}. {reason}"),
        None => sentence.to_owned(),
    }
}
