//! The messaging kernel: events from one transaction to another, each effect exactly once. See [`messaging`].

pub mod clock;
#[doc(hidden)]
pub mod crash_points;
pub mod db;
pub mod messaging;
pub mod metrics;
pub mod secrets;
pub mod trace;
