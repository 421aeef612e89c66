//! Ringfence storage engine: bytes on one machine.
//!
//! Knows no network protocol, no replication and no topic names. All logic is sans-IO: plain single-threaded
//! code that takes events and leaves operations in an [`store::Outbox`]; two drivers execute them, the real
//! ring ([`io::uring`]) and the seeded simulator ([`io::sim`]). `engine/README.md` is the code map.

pub mod batch;
pub mod checkpoint;
mod codec;
pub mod commit;
pub mod config;
pub mod epochs;
pub mod error;
pub mod index;
pub mod io;
pub mod journal;
pub mod limits;
pub mod log;
pub mod meta;
pub mod producers;
pub mod recovery;
pub mod retention;
pub mod segment;
pub mod store;
pub mod types;
pub mod writeback;
