//! The API from outside, on each database.

mod dead_letters;
mod jobs;
mod life;
mod metrics;
mod operations;
mod orders;
mod probes;
mod problems;
mod stock;
mod timeline;
