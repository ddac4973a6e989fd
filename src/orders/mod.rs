//! Orders: takes them, and alone decides what state each is in.
//!
//! An order, its lines, its idempotency key and its `order.placed` are one commit. Concurrent requests share
//! commits through `desk.rs`, a file beside the usual ones because the group commit is a loop of its own. States
//! move by compare-and-set: an answer that comes late or twice finds the order moved on and changes nothing.

pub mod desk;
pub mod error;
pub mod events;
pub mod http;
pub mod model;
pub mod reactions;
pub mod service;
pub mod store;
