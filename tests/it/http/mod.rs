//! The API from outside, on each database.

mod life;
mod metrics;
mod operations;
mod orders;
mod probes;
mod problems;
mod stock;
mod timeline;
