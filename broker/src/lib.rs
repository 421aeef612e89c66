//! The Ringfence broker: protocol listeners, shards, metadata, client library and command line.
//!
//! Effects live only in [`shell`] and [`client`]; everything else is sans-IO. `broker/README.md` is the code map.

#![forbid(unsafe_code)]

pub mod client;
pub mod config;
pub mod error;
pub mod event;
pub mod listener;
pub mod metadata;
pub mod native;
pub mod replica;
pub mod shard;
pub mod shell;
pub mod stats;
