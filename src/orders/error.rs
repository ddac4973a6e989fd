//! What can go wrong with an order, for whoever asked.

use super::events::{Amount, Currency};
use super::model::{Refusal, Status};
use crate::http::problem::{FieldError, Problem};
use stockade_kernel::db::Trouble;

#[derive(Debug, thiserror::Error)]
pub enum OrderError {
    #[error("{pointer}: {rule}")]
    Invalid { pointer: &'static str, rule: String },
    #[error("there is no order {0}")]
    NotFound(String),
    #[error("the idempotency key was used for another request (fingerprint {first_fingerprint})")]
    KeyReused { first_fingerprint: String },
    #[error("the order is {}; {rule}", status.as_str())]
    WrongState { status: Status, rule: &'static str },
    #[error("the order comes to {} minor units", total.get())]
    WrongAmount { total: Amount },
    #[error("the order is in {}", currency.as_str())]
    WrongCurrency { currency: Currency },
    #[error("the server is shutting down")]
    Draining,
    #[error("too much waits to be published; no more orders are taken until it is")]
    OutboxFull,
    #[error("the group this order was to be committed with failed: {cause}")]
    GroupFailed { trouble: Trouble, cause: String },
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

impl OrderError {
    pub fn invalid(pointer: &'static str, rule: impl Into<String>) -> Self {
        Self::Invalid { pointer, rule: rule.into() }
    }
}

impl From<Refusal> for OrderError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::State { status, rule } => Self::WrongState { status, rule },
            Refusal::Amount { total } => Self::WrongAmount { total },
            Refusal::Currency { currency } => Self::WrongCurrency { currency },
        }
    }
}

impl From<OrderError> for Problem {
    fn from(error: OrderError) -> Self {
        match error {
            OrderError::Invalid { pointer, rule } => {
                Self::validation(vec![FieldError { pointer: pointer.to_owned(), detail: rule }])
            }
            OrderError::NotFound(_) => Self::not_found(error.to_string()),
            OrderError::KeyReused { .. } => Self::new(422, "idempotency-key-reused", error.to_string()),
            OrderError::WrongState { status, .. } => {
                Self::new(409, "wrong-state", error.to_string()).state(status.as_str())
            }
            OrderError::WrongAmount { .. } => payment_mismatch("/amount_minor", &error),
            OrderError::WrongCurrency { .. } => payment_mismatch("/currency", &error),
            OrderError::Draining => Self::new(503, "draining", error.to_string()).retry_after(1),
            OrderError::OutboxFull => Self::new(503, "outbox-full", error.to_string()).retry_after(5),
            OrderError::GroupFailed { trouble, cause } => Self::from_trouble(trouble, cause),
            OrderError::Database(error) => Self::from(error),
        }
    }
}

fn payment_mismatch(pointer: &str, error: &OrderError) -> Problem {
    let wrong = FieldError { pointer: pointer.to_owned(), detail: error.to_string() };
    Problem {
        errors: vec![wrong],
        ..Problem::new(422, "payment-mismatch", format!("a payment must be the order's total: {error}"))
    }
}
