//! The API from outside, on each database.

mod life;
mod operations;
mod orders;
mod probes;
mod problems;
mod stock;
