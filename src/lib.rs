//! Stockade: orders, stock and notices through messages, every effect exactly once.
//!
//! To build a module of your own on the kernel: implement [`messaging::Reaction`], hand it to
//! [`app::Builder::with`], and serve. `examples/loyalty.rs` does it in under a hundred lines.

pub mod access;
pub mod app;
pub mod clock;
pub mod config;
#[doc(hidden)]
pub mod crash_points;
pub mod db;
pub mod http;
pub mod inventory;
pub mod ledger;
pub mod lifecycle;
pub mod messaging;
pub mod metrics;
pub mod money;
pub mod notifications;
pub mod numbers;
pub mod operations;
pub mod orders;
pub mod secrets;
pub mod telemetry;
pub mod trace;
