//! What an order is, and which moves it may make. Pure: no I/O.

use uuid::Uuid;

use super::error::OrderError;
use super::events::{Amount, Currency, Customer, Item, OrderPlaced};
use stockade_kernel::clock::{Timestamp, mint_id};
use stockade_kernel::trace::Traceparent;

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
    customer_id: Customer,
    currency: Currency,
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
        let customer_id = Customer::try_from(customer_id).map_err(|rule| OrderError::invalid("/customer_id", rule))?;
        let currency = Currency::try_from(currency).map_err(|rule| OrderError::invalid("/currency", rule))?;
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
    pub traceparent: Option<Traceparent>,
}

impl Order {
    pub fn place(request: &Request, placing: &Placing, number: String, now: Timestamp) -> Self {
        Self {
            id: OrderId(mint_id()),
            number,
            customer_id: request.customer_id.as_str().to_owned(),
            status: Status::Placed,
            reason: None,
            items: request.items.clone(),
            total_minor: request.total_minor,
            currency: request.currency.as_str().to_owned(),
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

/// What may be done to an order once it is placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Pay { amount: Amount, currency: Currency },
    Cancel { reason: Option<String> },
    Expire,
    Fulfil,
}

/// Why an order does not take a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Not from the state it is in.
    State { status: Status, rule: &'static str },
    /// A payment of another amount than the order comes to.
    Amount { total: Amount },
    /// A payment in another currency than the order's.
    Currency { currency: Currency },
}

/// Why a hold that ran out ended.
pub const NOT_PAID_IN_TIME: &str = "It was not paid while it was held";

impl Step {
    /// The state it leads to.
    pub fn to(&self) -> Status {
        match self {
            Self::Pay { .. } => Status::Paid,
            Self::Cancel { .. } => Status::Cancelled,
            Self::Expire => Status::Expired,
            Self::Fulfil => Status::Fulfilled,
        }
    }

    /// The states it may be taken from, and the same in words.
    fn from(&self) -> (&'static [Status], &'static str) {
        match self {
            Self::Pay { .. } => (&[Status::Reserved], "only a reserved order can be paid"),
            Self::Cancel { .. } => {
                (&[Status::Placed, Status::Reserved], "only an order that is placed or reserved can be cancelled")
            }
            Self::Expire => (&[Status::Reserved], "only a reserved order can expire"),
            Self::Fulfil => (&[Status::Paid], "only a paid order can be fulfilled"),
        }
    }

    /// Why the order is in the state it leads to, for people.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Cancel { reason } => reason.as_deref(),
            Self::Expire => Some(NOT_PAID_IN_TIME),
            Self::Pay { .. } | Self::Fulfil => None,
        }
    }

    /// Is it only too early for this step, so that waiting may help?
    pub fn is_early(&self, status: Status) -> bool {
        match self {
            Self::Pay { .. } => status == Status::Placed,
            Self::Fulfil => matches!(status, Status::Placed | Status::Reserved),
            Self::Cancel { .. } | Self::Expire => false,
        }
    }
}

/// An order as far as its next step is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub group_id: String,
    pub id: OrderId,
    pub number: String,
    pub subsidiary_id: Option<String>,
    pub correlation_id: String,
    pub status: Status,
    pub customer_id: Customer,
    pub total: Amount,
    pub currency: Currency,
}

impl Standing {
    /// The state that `step` leads this order to, if it may be taken.
    pub fn decide(&self, step: &Step) -> Result<Status, Refusal> {
        let (from, rule) = step.from();
        if !from.contains(&self.status) {
            return Err(Refusal::State { status: self.status, rule });
        }
        match step {
            Step::Pay { amount, .. } if *amount != self.total => Err(Refusal::Amount { total: self.total }),
            Step::Pay { currency, .. } if *currency != self.currency => {
                Err(Refusal::Currency { currency: self.currency.clone() })
            }
            _ => Ok(step.to()),
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

    fn usd(amount: i64) -> Step {
        let currency = Currency::try_from("USD".to_owned()).unwrap();
        Step::Pay { amount: Amount::try_from(amount).unwrap(), currency }
    }

    fn standing(status: Status) -> Standing {
        Standing {
            group_id: "g".into(),
            id: OrderId(mint_id()),
            number: "ORD-7K2M9QXA".into(),
            subsidiary_id: None,
            correlation_id: "c".into(),
            status,
            customer_id: Customer::try_from("alice".to_owned()).unwrap(),
            total: Amount::try_from(2500).unwrap(),
            currency: Currency::try_from("USD".to_owned()).unwrap(),
        }
    }

    #[test]
    fn each_step_may_be_taken_from_its_states_and_from_no_other() {
        use Status::{Cancelled, Expired, Fulfilled, Paid, Placed, Rejected, Reserved};
        let steps = [
            (usd(2500), vec![Reserved], Paid),
            (Step::Cancel { reason: None }, vec![Placed, Reserved], Cancelled),
            (Step::Expire, vec![Reserved], Expired),
            (Step::Fulfil, vec![Paid], Fulfilled),
        ];
        for (step, from, to) in steps {
            for status in [Placed, Reserved, Rejected, Paid, Cancelled, Expired, Fulfilled] {
                match standing(status).decide(&step) {
                    Ok(reached) => assert!(from.contains(&status) && reached == to, "{step:?} from {status:?}"),
                    Err(Refusal::State { status: named, .. }) => {
                        assert!(!from.contains(&status) && named == status, "{step:?} from {status:?}");
                    }
                    Err(other) => panic!("{other:?}"),
                }
                assert!(!(from.contains(&status) && step.is_early(status)), "{step:?} from {status:?}");
            }
        }
    }

    #[test]
    fn a_payment_is_the_total_in_the_orders_currency() {
        let order = standing(Status::Reserved);
        for wrong in [0, 2499, 2501] {
            assert_eq!(order.decide(&usd(wrong)), Err(Refusal::Amount { total: order.total }));
        }
        let euros = Step::Pay { amount: order.total, currency: Currency::try_from("EUR".to_owned()).unwrap() };
        assert_eq!(order.decide(&euros), Err(Refusal::Currency { currency: order.currency.clone() }));
        let free = Standing { total: Amount::try_from(0).unwrap(), ..order };
        assert_eq!(free.decide(&usd(0)), Ok(Status::Paid), "an order that costs nothing may be paid");
    }
}
