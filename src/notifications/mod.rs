//! Notifications: tells customers what became of their orders, once per outcome.
//!
//! A notice is a row. With the log channel, which is the default, writing the row is the sending, so effect and
//! inbox row are one commit; the line in the log is written after it and stands for nothing. The other channels are
//! outside the database: the row says `sending` while the call is made, and then what came of it. A notice of which an
//! attempt ended nobody knows how is `unknown` until it is known to be sent.
//!
//! Beside the usual files, `channels` holds the ways to the outside.

pub mod channels;
pub mod http;
pub mod model;
pub mod reactions;
pub mod service;
pub mod store;
