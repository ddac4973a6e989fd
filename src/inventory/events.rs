//! The facts of inventory.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::orders::events::{Quantity, Sku};

pub const RESERVED: &str = "inventory.reserved";
pub const FAILED: &str = "inventory.failed";
pub const ADJUSTED: &str = "stock_adjustment.posted";

/// `inventory.reserved`
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct InventoryReserved {
    pub order_id: Uuid,
    pub reservation_id: Uuid,
    pub reservation_number: String,
    pub lines: Vec<ReservedLine>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReservedLine {
    pub sku: Sku,
    pub quantity: Quantity,
}

/// `inventory.failed`
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct InventoryFailed {
    pub order_id: Uuid,
    pub reason: String,
    pub shortages: Vec<Shortage>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    pub sku: Sku,
    pub need: i64,
    pub have: i64,
}

/// `stock_adjustment.posted`
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StockAdjusted {
    pub sku: Sku,
    pub delta: i64,
    pub reason: String,
    pub on_hand: i64,
}
