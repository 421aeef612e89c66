//! Measures the device, the engine and the broker, and prints them side by side.
//!
//! Every figure names what it was measured on ([`host::Host`]) and stands beside a figure of the device taken in the
//! same run, because only ratios within one run mean anything.

#![forbid(unsafe_code)]

pub mod batches;
pub mod device;
pub mod disk;
pub mod engine;
pub mod figure;
pub mod host;
pub mod latency;
pub mod load;
pub mod log;
pub mod loopback;
pub mod report;
pub mod subject;
