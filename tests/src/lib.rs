//! Shared helpers of tests and benchmarks: starting brokers as processes, the simulator, models.

#![forbid(unsafe_code)]

pub mod batch;
pub mod native;
pub mod process;
pub mod sim;
