//! The tests that need a database, a server or a process of their own.

mod http;
mod idempotency;
mod loyalty;
mod smoke;
mod support;
