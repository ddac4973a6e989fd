//! The ledger: what customers have paid, in double entry.
//!
//! A payment is two entries that sum to zero, one on `cash` and one on the customer's account, written in the
//! transaction of the inbox row. A payment is booked once: an order is paid once, and an entry is unique by event and
//! account. A payment that comes before its order waits for it.
//!
//! The books note what happened; whether it may happen is for orders to say. There are no events of its own.

pub mod http;
pub mod model;
pub mod reactions;
pub mod service;
pub mod store;
