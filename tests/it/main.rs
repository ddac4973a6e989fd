//! The tests that need a database, a server or a process of their own.

mod architecture;
mod arrival;
mod audit;
mod chaos;
mod cli;
mod compose;
mod consumers;
mod crashes;
mod dead_letters;
mod demos;
mod deploy;
mod http;
mod idempotency;
mod inbox;
mod ledger;
mod loyalty;
mod openapi;
mod outbox;
mod rabbit;
mod smoke;
mod stores;
mod support;
mod tracing;
mod transports;
mod waiting;
