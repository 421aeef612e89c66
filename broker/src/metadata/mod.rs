//! The metadata store port and its records.

pub mod embedded;
