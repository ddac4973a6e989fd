//! The tests that need a database, a server or a process of their own.

mod loyalty;
mod smoke;
mod support;
