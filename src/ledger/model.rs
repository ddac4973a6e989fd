//! What a payment is in the books. Pure: no I/O.

use crate::orders::events::OrderPaid;

/// Where the money is.
pub const CASH: &str = "cash";

/// One side of a booking: plus is a debit, minus a credit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Side {
    pub account: String,
    pub amount_minor: i64,
}

/// The two sides of a payment, which sum to zero. A payment of nothing is none.
pub fn sides_of(paid: &OrderPaid) -> Vec<Side> {
    match paid.amount_minor.get() {
        0 => Vec::new(),
        amount => vec![
            Side { account: CASH.to_owned(), amount_minor: amount },
            Side { account: format!("customer:{}", paid.customer_id.as_str()), amount_minor: -amount },
        ],
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;
    use crate::orders::events::{Amount, Currency, Customer};

    fn paid(customer: &str, amount: i64) -> OrderPaid {
        OrderPaid {
            order_id: Uuid::nil(),
            customer_id: Customer::try_from(customer.to_owned()).unwrap(),
            amount_minor: Amount::try_from(amount).unwrap(),
            currency: Currency::try_from("USD".to_owned()).unwrap(),
        }
    }

    #[test]
    fn a_payment_debits_cash_and_credits_the_customer() {
        let sides = sides_of(&paid("alice", 2500));
        let seen: Vec<_> = sides.iter().map(|side| (side.account.as_str(), side.amount_minor)).collect();
        assert_eq!(seen, [("cash", 2500), ("customer:alice", -2500)]);
        assert_eq!(sides_of(&paid("alice", 0)), []);
    }

    proptest! {
        #[test]
        fn the_sides_of_any_payment_sum_to_zero(amount in 0..=i64::MAX, customer in "[a-z:]{1,20}") {
            let sides = sides_of(&paid(&customer, amount));
            prop_assert_eq!(sides.iter().map(|side| i128::from(side.amount_minor)).sum::<i128>(), 0);
            prop_assert!(sides.iter().all(|side| side.amount_minor != 0));
        }
    }
}
