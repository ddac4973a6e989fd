//! Inventory: what is on the shelf, and what of it is held for whom.
//!
//! A reservation is all or nothing, lines of one SKU are summed, and nothing is ever oversold: the decision is made
//! in memory over rows locked in SKU order, and a CHECK in the table would refuse it otherwise.
//!
//! A reservation then follows its order: `held → committed` when it is paid, `→ fulfilled` when the goods go, or
//! `released` when it is cancelled or expires. The events may come in any order and any number of times and end the
//! same: what comes before its predecessor waits, and a cancellation that overtakes its order leaves a tombstone, so
//! that the order reserves nothing when it comes.

pub mod error;
pub mod events;
pub mod http;
pub mod model;
pub mod reactions;
pub mod service;
pub mod store;
