//! The facts of orders, and the words (SKU, quantity, money) that they share with those who listen.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use stockade_kernel::messaging::event::is_plain_text;

pub const PLACED: &str = "order.placed";
pub const PAID: &str = "order.paid";
pub const CANCELLED: &str = "order.cancelled";
pub const EXPIRED: &str = "order.expired";
pub const FULFILLED: &str = "order.fulfilled";

/// More than anyone orders; keeps sums of a hundred lines within i64.
pub const QUANTITY_MAX: i64 = 1_000_000_000;
pub const PRICE_MINOR_MAX: i64 = 1_000_000_000_000;
pub const SKU_CHARS_MAX: usize = 64;
pub const CUSTOMER_CHARS_MAX: usize = 128;

/// `order.placed`
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OrderPlaced {
    pub order_id: Uuid,
    pub order_number: String,
    pub customer_id: String,
    pub currency: String,
    pub total_minor: i64,
    pub items: Vec<Item>,
}

/// `order.paid`
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OrderPaid {
    pub order_id: Uuid,
    pub customer_id: Customer,
    pub amount_minor: Amount,
    pub currency: Currency,
}

/// `order.cancelled`, `order.expired`, `order.fulfilled`
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OrderMoved {
    pub order_id: Uuid,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    pub sku: Sku,
    pub quantity: Quantity,
    pub unit_price_minor: Price,
}

/// The name of a thing on a shelf. Shared by its copies, of which every order makes several.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Sku(Arc<str>);

impl Sku {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Sku {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        if is_plain_text(&text, SKU_CHARS_MAX) && text.trim() == text {
            Ok(Self(text.into()))
        } else {
            Err(format!("a SKU has 1 to {SKU_CHARS_MAX} characters, no control characters and no space at its ends"))
        }
    }
}

impl std::fmt::Display for Sku {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// How many of a thing: at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "i64")]
pub struct Quantity(i64);

impl Quantity {
    pub fn get(self) -> i64 {
        self.0
    }
}

impl TryFrom<i64> for Quantity {
    type Error = String;

    fn try_from(quantity: i64) -> Result<Self, Self::Error> {
        if (1..=QUANTITY_MAX).contains(&quantity) {
            Ok(Self(quantity))
        } else {
            Err(format!("a quantity is 1 to {QUANTITY_MAX}, not {quantity}"))
        }
    }
}

/// Money in minor units (cents): never negative, never a fraction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "i64")]
pub struct Price(i64);

impl Price {
    pub fn get(self) -> i64 {
        self.0
    }
}

impl TryFrom<i64> for Price {
    type Error = String;

    fn try_from(price: i64) -> Result<Self, Self::Error> {
        if (0..=PRICE_MINOR_MAX).contains(&price) {
            Ok(Self(price))
        } else {
            Err(format!("a price is 0 to {PRICE_MINOR_MAX} minor units, not {price}"))
        }
    }
}

/// A sum of money in minor units: what an order comes to, what is paid for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "i64")]
pub struct Amount(i64);

impl Amount {
    pub fn get(self) -> i64 {
        self.0
    }
}

impl TryFrom<i64> for Amount {
    type Error = String;

    fn try_from(amount: i64) -> Result<Self, Self::Error> {
        if amount >= 0 { Ok(Self(amount)) } else { Err(format!("an amount is 0 or more minor units, not {amount}")) }
    }
}

/// Who ordered, in the words of whoever placed the order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Customer(String);

impl Customer {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Customer {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        if is_plain_text(&text, CUSTOMER_CHARS_MAX) {
            Ok(Self(text))
        } else {
            Err(format!("must have 1 to {CUSTOMER_CHARS_MAX} characters and no control characters"))
        }
    }
}

/// Three capital letters.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Currency(String);

impl Currency {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Currency {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        if text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_uppercase()) {
            Ok(Self(text))
        } else {
            Err("must be three capital letters, as in USD".to_owned())
        }
    }
}
