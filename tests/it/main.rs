//! The tests that need a database, a server or a process of their own.

mod architecture;
mod cli;
mod crashes;
mod http;
mod idempotency;
mod loyalty;
mod openapi;
mod smoke;
mod support;
