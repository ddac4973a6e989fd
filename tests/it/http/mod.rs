//! The API from outside, on each database.

mod operations;
mod orders;
mod probes;
mod problems;
mod stock;
