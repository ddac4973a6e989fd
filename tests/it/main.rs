//! The tests that need a database, a server or a process of their own.

mod smoke;
mod support;
