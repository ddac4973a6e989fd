//! Orders: takes them, and alone decides what state each is in.
//!
//! An order, its lines, its idempotency key and its `order.placed` are one commit, and so is every later step with
//! its event. States move by compare-and-set: `placed → reserved | rejected | cancelled`, `reserved → paid | cancelled
//! | expired`, `paid → fulfilled`. Of two that would move an order at once, one wins and the other finds it moved: a
//! request is told so, an answer of inventory that comes late or twice changes nothing.
//!
//! Two files beside the usual ones, since each is a loop of its own: concurrent requests share commits through
//! `desk.rs`, and `expiry.rs` ends the holds of orders that are not paid.

pub mod desk;
pub mod error;
pub mod events;
pub mod expiry;
pub mod http;
pub mod model;
pub mod reactions;
pub mod service;
pub mod store;
