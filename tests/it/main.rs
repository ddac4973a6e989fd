//! The tests that need a database, a server or a process of their own.

mod architecture;
mod arrival;
mod bench;
mod chaos;
mod cli;
mod compose;
mod consumers;
mod crashes;
mod dead_letters;
mod demos;
mod http;
mod idempotency;
mod inbox;
mod jobs;
mod ledger;
mod loyalty;
mod openapi;
mod operating;
mod outbox;
mod rabbit;
mod retention;
mod smoke;
mod stores;
mod support;
mod transports;
mod waiting;
