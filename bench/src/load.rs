//! A broker under load: open-loop rate or saturation, latency from the intended send time.

pub mod generator;
pub mod loopback;
pub mod schedule;
pub mod wire;
