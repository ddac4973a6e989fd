//! What an order is, and which moves it may make. Pure: no I/O.

use uuid::Uuid;

use super::error::OrderError;
use super::events::{Item, OrderPlaced};
use crate::clock::{Timestamp, mint_id};
use crate::messaging::event::is_plain_text;

pub const CUSTOMER_CHARS_MAX: usize = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OrderId(pub Uuid);

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Placed,
    Reserved,
    Rejected,
    Paid,
    Cancelled,
    Expired,
    Fulfilled,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Placed => "placed",
            Self::Reserved => "reserved",
            Self::Rejected => "rejected",
            Self::Paid => "paid",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
            Self::Fulfilled => "fulfilled",
        }
    }

    pub fn find(text: &str) -> Option<Self> {
        use Status::{Cancelled, Expired, Fulfilled, Paid, Placed, Rejected, Reserved};
        [Placed, Reserved, Rejected, Paid, Cancelled, Expired, Fulfilled]
            .into_iter()
            .find(|status| status.as_str() == text)
    }

    /// Has inventory answered?
    pub fn is_answered(self) -> bool {
        self != Self::Placed
    }
}

/// What a customer asks for, checked: nothing past this type checks it again.
#[derive(Debug, Clone)]
pub struct Request {
    customer_id: String,
    currency: String,
    items: Vec<Item>,
    total_minor: i64,
}

impl Request {
    pub fn try_new(
        customer_id: String,
        currency: String,
        items: Vec<Item>,
        items_max: usize,
    ) -> Result<Self, OrderError> {
        if !is_plain_text(&customer_id, CUSTOMER_CHARS_MAX) {
            let rule = format!("must have 1 to {CUSTOMER_CHARS_MAX} characters and no control characters");
            return Err(OrderError::invalid("/customer_id", rule));
        }
        if currency.len() != 3 || !currency.bytes().all(|byte| byte.is_ascii_uppercase()) {
            return Err(OrderError::invalid("/currency", "must be three capital letters, as in USD"));
        }
        if items.is_empty() || items.len() > items_max {
            return Err(OrderError::invalid(
                "/items",
                format!("must have 1 to {items_max} items, not {}", items.len()),
            ));
        }
        let total_minor =
            total_of(&items).ok_or_else(|| OrderError::invalid("/items", "the total is too large to be counted"))?;
        Ok(Self { customer_id, currency, items, total_minor })
    }
}

fn total_of(items: &[Item]) -> Option<i64> {
    items
        .iter()
        .try_fold(0i64, |total, item| total.checked_add(item.quantity.get().checked_mul(item.unit_price_minor.get())?))
}

#[derive(Debug, Clone)]
pub struct Order {
    pub id: OrderId,
    pub number: String,
    pub customer_id: String,
    pub status: Status,
    pub reason: Option<String>,
    pub items: Vec<Item>,
    pub total_minor: i64,
    pub currency: String,
    pub group_id: String,
    pub subsidiary_id: Option<String>,
    pub correlation_id: String,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub hold_expires_at: Option<Timestamp>,
}

/// On whose behalf.
#[derive(Debug, Clone)]
pub struct Placing {
    pub group_id: String,
    pub subsidiary_id: Option<String>,
    pub correlation_id: String,
}

impl Order {
    pub fn place(request: &Request, placing: &Placing, number: String, now: Timestamp) -> Self {
        Self {
            id: OrderId(mint_id()),
            number,
            customer_id: request.customer_id.clone(),
            status: Status::Placed,
            reason: None,
            items: request.items.clone(),
            total_minor: request.total_minor,
            currency: request.currency.clone(),
            group_id: placing.group_id.clone(),
            subsidiary_id: placing.subsidiary_id.clone(),
            correlation_id: placing.correlation_id.clone(),
            created_at: now,
            updated_at: now,
            hold_expires_at: None,
        }
    }

    pub fn placed(&self) -> OrderPlaced {
        OrderPlaced {
            order_id: self.id.0,
            order_number: self.number.clone(),
            customer_id: self.customer_id.clone(),
            currency: self.currency.clone(),
            total_minor: self.total_minor,
            items: self.items.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::orders::events::{PRICE_MINOR_MAX, Price, QUANTITY_MAX, Quantity, Sku};

    fn item(quantity: i64, price: i64) -> Item {
        Item {
            sku: Sku::try_from("WIDGET-A".to_owned()).unwrap(),
            quantity: Quantity::try_from(quantity).unwrap(),
            unit_price_minor: Price::try_from(price).unwrap(),
        }
    }

    fn request(items: Vec<Item>) -> Result<Request, OrderError> {
        Request::try_new("alice".into(), "USD".into(), items, 3)
    }

    #[test]
    fn the_total_is_quantity_times_price_summed() {
        assert_eq!(request(vec![item(2, 250), item(1, 99)]).unwrap().total_minor, 599);
    }

    #[test]
    fn a_total_past_i64_is_refused_not_wrapped() {
        assert!(request(vec![item(QUANTITY_MAX, PRICE_MINOR_MAX)]).is_err());
    }

    #[test]
    fn no_items_and_too_many_items_are_refused() {
        assert!(request(vec![]).is_err());
        assert!(request(vec![item(1, 0); 4]).is_err());
        assert!(request(vec![item(1, 0); 3]).is_ok());
    }

    #[test]
    fn quantities_below_one_or_absurd_are_refused() {
        for bad in [0, -1, QUANTITY_MAX + 1, i64::MAX, i64::MIN] {
            assert!(Quantity::try_from(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn skus_and_customers_are_plain_text() {
        for bad in ["", " A", "A\n", "A\u{0}", &"x".repeat(65)] {
            assert!(Sku::try_from(bad.to_owned()).is_err(), "{bad:?}");
        }
        assert!(Request::try_new("a\u{7}".into(), "USD".into(), vec![item(1, 0)], 3).is_err());
        assert!(Request::try_new("a".into(), "usd".into(), vec![item(1, 0)], 3).is_err());
    }
}
