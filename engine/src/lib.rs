//! Ringfence storage engine: bytes on one machine.
//!
//! Knows no network protocol, no replication and no topic names. All logic is sans-IO: plain single-threaded
//! code that takes events and leaves operations in an [`store::Outbox`]; two drivers execute them, the real
//! ring ([`io::uring`]) and the seeded simulator ([`io::sim`]). `engine/README.md` is the code map.

mod append;
pub mod batch;
pub mod canary;
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
pub mod loading;
pub mod log;
pub mod meta;
pub mod place;
pub mod producers;
pub mod read;
pub mod rebuild;
pub mod recovery;
pub mod removal;
pub mod retention;
pub mod segment;
mod small;
pub mod snapshot;
pub mod store;
pub mod truncate;
pub mod types;
pub mod writeback;
