//! The tests that need a database, a server or a process of their own.

mod architecture;
mod chaos;
mod cli;
mod compose;
mod consumers;
mod crashes;
mod dashboard;
mod dead_letters;
mod demos;
mod http;
mod idempotency;
mod inbox;
mod lab;
mod live;
mod loyalty;
mod openapi;
mod outbox;
mod smoke;
mod stores;
mod support;
mod transports;
