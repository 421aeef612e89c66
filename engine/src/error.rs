//! Typed errors of the store's operations, one enum per operation.
//!
//! Wire errors live in the broker; environment failures that end the process are [`Fatal`].

use thiserror::Error;

use crate::batch::BatchError;
use crate::types::{LeaderEpoch, Offset, PartitionId};

/// The environment failed in a way the process must not outlive; each has its own exit status.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fatal {
    /// The ring is dead or was set up wrongly (exit status 70).
    #[error("the ring of a shard died: {0}")]
    Ring(String),
    /// A shard panicked (exit status 71).
    #[error("a shard panicked: {0}")]
    Panic(String),
    /// Identity or journal set is damaged (exit status 72).
    #[error("the data directory is damaged: {0}")]
    Identity(String),
}

/// Why a partition or shard takes no more writes. A fence is set in the step that saw the failure and never lifted
/// by a retry (D1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FenceReason {
    /// A journal write or header failed: the whole shard is fenced.
    #[error("a journal write of this shard failed")]
    JournalFailed,
    /// A segment write, sync or rename of this partition failed.
    #[error("a segment write of this partition failed")]
    SegmentFailed,
    /// A sync of the file system failed: what was written since the last one may be lost. The journal has it all, and
    /// the next start replays it.
    #[error("a sync failed; restart the broker to replay the journal")]
    SyncFailed,
    /// Recovery found damage below the promised durable end.
    #[error("recovery found damaged bytes below the durable end")]
    Damaged,
    /// The partition's directory or active segment is missing although snapshot or journal know data in it.
    #[error("files of this partition are missing")]
    FilesMissing,
}

/// Why an append was refused; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AppendError {
    #[error("unknown partition {0}")]
    UnknownPartition(PartitionId),
    #[error("the partition is fenced: {0}")]
    Fenced(FenceReason),
    #[error("invalid record batch: {0}")]
    InvalidBatch(#[from] BatchError),
    #[error("the batch has {size} bytes, more than max.message.bytes {max}")]
    TooLarge { size: usize, max: usize },
    #[error("leader epoch {asked} is not the current epoch {current}")]
    WrongEpoch {
        asked: LeaderEpoch,
        current: LeaderEpoch,
    },
    #[error("sequence {found} of producer {producer_id} is out of order, expected {expected}")]
    OutOfOrderSequence {
        producer_id: i64,
        found: i32,
        expected: i32,
    },
    #[error("producer epoch {found} of producer {producer_id} is below {current}")]
    InvalidProducerEpoch {
        producer_id: i64,
        found: i16,
        current: i16,
    },
    /// Retriable: no space for the partition's next segment bytes.
    #[error("no space left for the segment; free space or add a volume, then retry")]
    NoSpace,
    /// Retriable: the shard's journal or memory budget is used up for the moment.
    #[error("the shard is over its write budget; retry")]
    Busy,
    /// Placing the partition's files failed for another reason than space.
    #[error("placing the segment failed: {0}")]
    Place(crate::io::DiskError),
}

impl AppendError {
    /// The refusal of an append whose placing failed with `error`.
    #[must_use]
    pub fn of_place(error: crate::io::DiskError) -> AppendError {
        match error {
            crate::io::DiskError::NoSpace => AppendError::NoSpace,
            other => AppendError::Place(other),
        }
    }
}

/// Why a read was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ReadError {
    #[error("unknown partition {0}")]
    UnknownPartition(PartitionId),
    #[error("offset is outside {log_start}..={log_end}")]
    OutOfRange { log_start: Offset, log_end: Offset },
    /// Bytes of this range failed their checks; the rest of the partition is served.
    #[error("bytes of offsets {from}..{to} are damaged on this replica")]
    Damaged { from: Offset, to: Offset },
    #[error("reading the segment failed: {0}")]
    Disk(crate::io::DiskError),
    /// Retriable: too many reads in flight.
    #[error("too many reads in flight; retry")]
    Busy,
}

/// Why a partition command (create, epoch, truncate, log start, drop) was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CommandError {
    #[error("unknown partition {0}")]
    UnknownPartition(PartitionId),
    #[error("the shard is fenced: {0}")]
    Fenced(FenceReason),
    #[error("epoch {asked} is below the partition's epoch {current}")]
    StaleEpoch {
        asked: LeaderEpoch,
        current: LeaderEpoch,
    },
    #[error("offset {asked} is outside {log_start}..={log_end}")]
    OutOfRange {
        asked: Offset,
        log_start: Offset,
        log_end: Offset,
    },
    /// Retriable: the disk is full, and what must be written first, or the command's record, finds no place; nothing was
    /// changed.
    #[error("no space left; free space or add a volume, then retry")]
    NoSpace,
    /// The place of a cut could not be found, because the segment could not be read there; nothing was changed.
    #[error("the place of the cut could not be read: {0}")]
    Unreadable(ReadError),
    /// Retriable: another cut or drop of the partition is under way.
    #[error("the partition is busy with another cut; retry")]
    Busy,
}
