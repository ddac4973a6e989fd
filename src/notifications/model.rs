//! What a notice is. Pure: no I/O.

use uuid::Uuid;

use crate::inventory::events::{InventoryFailed, InventoryReserved};

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

/// What notifications hear of.
#[derive(Debug)]
pub enum Fact {
    Reserved(InventoryReserved),
    Failed(InventoryFailed),
}

impl Fact {
    /// The order concerned and the notice it calls for.
    pub fn notice(&self) -> (Uuid, Kind) {
        match self {
            Self::Reserved(reserved) => (reserved.order_id, Kind::Reserved),
            Self::Failed(failed) => (failed.order_id, Kind::Rejected),
        }
    }

    /// In a sentence.
    pub fn text(&self) -> String {
        match self {
            Self::Reserved(reserved) => {
                format!("Your order is reserved, reservation {}", reserved.reservation_number)
            }
            Self::Failed(failed) => format!("Your order cannot be filled. {}", failed.reason),
        }
    }
}
