//! Stockade: orders, stock and notices through messages, every effect exactly once.
//!
//! To build a module of your own on the kernel: implement [`stockade_kernel::messaging::Reaction`], hand it to
//! [`app::Builder::with`], and serve. `examples/loyalty.rs` does it in under a hundred lines.

pub mod access;
pub mod app;
pub mod config;
pub mod http;
pub mod inventory;
pub mod ledger;
pub mod lifecycle;
pub mod money;
pub mod notifications;
pub mod numbers;
pub mod operations;
pub mod orders;
pub mod schema;
pub mod secret_files;
pub mod telemetry;
