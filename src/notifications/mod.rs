//! Notifications: tells customers what became of their orders, once per outcome.
//!
//! A notice is a row. With the log channel, which is the default, writing the row is the sending, so effect and
//! inbox row are one commit; the line in the log is written after it and stands for nothing.

pub mod http;
pub mod model;
pub mod reactions;
pub mod service;
pub mod store;
