//! Kafka record batch v2: header layout, checks on the way in, stamping.

use thiserror::Error;

/// `message.timestamp.type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TimestampType {
    /// The producer's timestamps are kept.
    #[default]
    CreateTime,
    /// The leader stamps its wall clock on the batch.
    LogAppendTime,
}

/// Why bytes are not one valid record batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BatchError {}
