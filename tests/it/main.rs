//! The tests that need a database, a server or a process of their own.

mod chaos;
mod consumers;
mod dead_letters;
mod inbox;
mod outbox;
mod smoke;
mod stores;
mod support;
mod transports;
