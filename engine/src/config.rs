//! Settings of one shard's store. Relations between them are checked once, at recovery.

use thiserror::Error;

use crate::limits::{BLOCK, MAX_BATCH_BYTES};
use crate::types::{ShardId, Term};

/// Settings of one shard's store.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Node id, stamped into every file.
    pub node: u32,
    /// Generation of the journal set (from `journal-set`).
    pub generation: u64,
    /// This shard.
    pub shard: ShardId,
    /// Term of this process start (from `journal-set`, raised durably before use).
    pub term: Term,
    /// Bytes of one journal file, header block included; a multiple of the grain. A file holds at least 4 frames.
    pub journal_file_bytes: u64,
    /// Number of journal files.
    pub journal_files: usize,
    /// A group is cut into frames of about this size.
    pub frame_bytes: usize,
    /// Nanoseconds that a group waits for company (default 0).
    pub linger_ns: u64,
    /// A checkpoint begins at the latest after this many bytes of journal (or 16 times the snapshot's size).
    pub checkpoint_bytes: u64,
    /// Budget for tails, caches and snapshots in memory.
    pub memory_bytes: u64,
    /// Accepted bytes not yet written to segments beyond which appends wait for write-back.
    pub dirty_bytes: u64,
    /// Write-back pieces are at least this large unless a smaller one pins the checkpoint.
    pub write_back_bytes: u64,
    /// Write-back operations in flight at once.
    pub write_back_depth: usize,
    /// An empty frame carries durable_lsn when no frame did for this long.
    pub mark_ns: u64,
    /// Time between a file's rename to `-delete` and its unlinking.
    pub delete_delay_ms: u64,
    /// How often retention looks at the partitions.
    pub retention_check_ms: u64,
    /// Entries kept in a partition's epoch table (`leader.epoch.checkpoint.max.entries`).
    pub epoch_entries: usize,
    /// Idempotent producers remembered per partition.
    pub producers: usize,
    /// A producer is forgotten after this long without a batch (`producer.id.expiration.ms`).
    pub producer_expiry_ms: u64,
    /// The deliberate bug of this store, in builds that test the tests.
    #[cfg(feature = "canary")]
    pub canary: Option<crate::canary::Canary>,
}

/// A setting that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConfigError {
    #[error("journal files need at least {0} bytes and a multiple of the grain {1}")]
    JournalFile(u64, u64),
    #[error("a journal needs at least 5 files")]
    JournalFiles,
}

impl StoreConfig {
    /// Defaults for a shard: 1 GiB of journal, 1 GiB of memory.
    #[must_use]
    pub fn new(node: u32, shard: ShardId) -> StoreConfig {
        StoreConfig {
            node,
            generation: 1,
            shard,
            term: Term(1),
            journal_file_bytes: 64 << 20,
            journal_files: 16,
            frame_bytes: 1 << 20,
            linger_ns: 0,
            checkpoint_bytes: 256 << 20,
            memory_bytes: 1 << 30,
            dirty_bytes: 768 << 20,
            write_back_bytes: 512 << 10,
            write_back_depth: 32,
            mark_ns: 2_000_000,
            delete_delay_ms: 60_000,
            retention_check_ms: 5_000,
            epoch_entries: 100,
            producers: 10_000,
            producer_expiry_ms: 86_400_000,
            #[cfg(feature = "canary")]
            canary: None,
        }
    }

    /// Largest frame: a file holds at least four of them.
    #[must_use]
    pub fn max_frame_bytes(&self, grain: usize) -> usize {
        ((self.journal_file_bytes as usize - grain) / 4) / grain * grain
    }

    /// Largest batch that fits into a frame with its directory and the copy of a full previous one.
    #[must_use]
    pub fn max_batch_bytes(&self, grain: usize) -> usize {
        (self.max_frame_bytes(grain) / 2)
            .saturating_sub(2 * BLOCK)
            .min(MAX_BATCH_BYTES)
    }

    /// Bytes of frames that the whole journal can hold.
    #[must_use]
    pub fn journal_capacity(&self, grain: usize) -> u64 {
        (self.journal_file_bytes - grain as u64) * self.journal_files as u64
    }

    /// Checks the relations.
    ///
    /// # Errors
    /// The first one that does not hold.
    pub fn check(&self, grain: usize) -> Result<(), ConfigError> {
        let grain = grain as u64;
        let least = 65 * grain;
        if self.journal_file_bytes < least || !self.journal_file_bytes.is_multiple_of(grain) {
            return Err(ConfigError::JournalFile(least, grain));
        }
        if self.journal_files < 5 {
            return Err(ConfigError::JournalFiles);
        }
        Ok(())
    }
}
