//! What can go wrong with stock, for whoever asked.

use crate::http::problem::{FieldError, Problem};

#[derive(Debug, thiserror::Error)]
pub enum InventoryError {
    #[error("{rule}")]
    Invalid { pointer: &'static str, rule: String },
    #[error("there is no {what} {id}")]
    NotFound { what: &'static str, id: String },
    #[error("on hand would be {on_hand} with {reserved} reserved")]
    WouldGoNegative { on_hand: i64, reserved: i64 },
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

impl From<InventoryError> for Problem {
    fn from(error: InventoryError) -> Self {
        match error {
            InventoryError::Invalid { pointer, rule } => {
                Self::validation(vec![FieldError { pointer: pointer.to_owned(), detail: rule }])
            }
            InventoryError::NotFound { .. } => Self::not_found(error.to_string()),
            InventoryError::WouldGoNegative { .. } => Self::new(409, "would-go-negative", error.to_string()),
            InventoryError::Database(error) => Self::from(error),
        }
    }
}
