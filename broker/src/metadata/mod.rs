//! The metadata store port: versioned records, read and changed by guarded transactions.
//!
//! A record is bytes under a key, with a version that changes at every write. A transaction names the versions it
//! was decided on and applies as a whole or not at all (compare-and-set), so a decision on stale records cannot be
//! written. What was committed is durable before `commit` returns. Records and their meaning: [`records`]; decisions
//! on topics: [`catalog`].

pub mod catalog;
pub mod embedded;
pub mod records;

use thiserror::Error;

/// Version of a record: the store's revision at its last write; 0 is "does not exist".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Version(pub u64);

/// A record as read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned {
    /// Its version.
    pub version: Version,
    /// Its bytes.
    pub value: Vec<u8>,
}

/// A change that applies only when every guard holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Transaction {
    /// Keys and the versions they must have; version 0 demands absence.
    pub guards: Vec<(String, Version)>,
    /// Keys and their new values; `None` removes the record.
    pub writes: Vec<(String, Option<Vec<u8>>)>,
}

impl Transaction {
    /// Adds a guard.
    pub fn guard(&mut self, key: impl Into<String>, version: Version) {
        self.guards.push((key.into(), version));
    }

    /// Adds a write.
    pub fn put(&mut self, key: impl Into<String>, value: Vec<u8>) {
        self.writes.push((key.into(), Some(value)));
    }

    /// Adds a removal.
    pub fn remove(&mut self, key: impl Into<String>) {
        self.writes.push((key.into(), None));
    }
}

/// What became of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Commit {
    /// Applied and durable; the records written have this version.
    Applied(Version),
    /// A guard did not hold: nothing was changed. Read again and decide again.
    Conflict {
        /// The first key whose version differed.
        key: String,
    },
}

/// Why the store cannot answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MetadataError {
    /// The medium failed or is full; nothing may be concluded about the last commit.
    #[error("the metadata store failed: {0}")]
    Storage(String),
    /// Another process holds the store.
    #[error("the metadata store is in use by another process")]
    InUse,
    /// A record does not hold what its key promises.
    #[error("metadata record '{key}' is damaged: {reason}")]
    Damaged { key: String, reason: String },
}

/// Where cluster metadata live.
pub trait MetadataStore {
    /// The record under `key`.
    ///
    /// # Errors
    /// When the store fails.
    fn read(&self, key: &str) -> Result<Option<Versioned>, MetadataError>;

    /// All records whose key begins with `prefix`, sorted by key.
    ///
    /// # Errors
    /// When the store fails.
    fn list(&self, prefix: &str) -> Result<Vec<(String, Versioned)>, MetadataError>;

    /// Applies `transaction` when its guards hold.
    ///
    /// # Errors
    /// When the store fails; then the transaction may or may not have been applied.
    fn commit(&mut self, transaction: Transaction) -> Result<Commit, MetadataError>;
}
