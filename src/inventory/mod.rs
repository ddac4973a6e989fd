//! Inventory: what is on the shelf, and what of it is held for whom.
//!
//! A reservation is all or nothing, lines of one SKU are summed, and nothing is ever oversold: the decision is made
//! in memory over rows locked in SKU order, and a CHECK in the table would refuse it otherwise.

pub mod error;
pub mod events;
pub mod http;
pub mod model;
pub mod reactions;
pub mod service;
pub mod store;
