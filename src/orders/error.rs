//! What can go wrong with an order, for whoever asked.

use crate::db::Trouble;
use crate::http::problem::{FieldError, Problem};

#[derive(Debug, thiserror::Error)]
pub enum OrderError {
    #[error("{pointer}: {rule}")]
    Invalid { pointer: &'static str, rule: String },
    #[error("there is no order {0}")]
    NotFound(String),
    #[error("the idempotency key was used for another request (fingerprint {first_fingerprint})")]
    KeyReused { first_fingerprint: String },
    #[error("the server is shutting down")]
    Draining,
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

impl From<OrderError> for Problem {
    fn from(error: OrderError) -> Self {
        match error {
            OrderError::Invalid { pointer, rule } => {
                Self::validation(vec![FieldError { pointer: pointer.to_owned(), detail: rule }])
            }
            OrderError::NotFound(_) => Self::not_found(error.to_string()),
            OrderError::KeyReused { .. } => Self::new(422, "idempotency-key-reused", error.to_string()),
            OrderError::Draining => Self::new(503, "draining", error.to_string()).retry_after(1),
            OrderError::GroupFailed { trouble, cause } => Self::from_trouble(trouble, cause),
            OrderError::Database(error) => Self::from(error),
        }
    }
}
