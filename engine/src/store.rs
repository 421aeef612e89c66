//! One shard's storage: every partition's log behind one journal, as a sans-IO state machine.
//!
//! The owner (a shard of the broker, a benchmark, a test) calls commands and feeds completions; the store answers
//! with operations and events in an [`Outbox`]. Answers to commands always come as events, at once or later.

use crate::batch::TimestampType;
use crate::error::{AppendError, CommandError, FenceReason, ReadError};
use crate::io::buf::BufSlice;
use crate::io::{DiskOp, OpId};
use crate::types::{LeaderEpoch, Offset, PartitionId};

/// Settings of one partition's log; from the topic's settings under Kafka's names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// `segment.bytes`: a segment rolls before it would grow beyond this.
    pub segment_bytes: u64,
    /// `segment.ms`: a segment whose first batch is older than this rolls at the next append.
    pub segment_ms: u64,
    /// `retention.bytes` per partition; `None` is unlimited.
    pub retention_bytes: Option<u64>,
    /// `retention.ms`; `None` is unlimited.
    pub retention_ms: Option<u64>,
    /// `max.message.bytes`: the largest batch, header included.
    pub max_message_bytes: usize,
    /// `message.timestamp.type`.
    pub timestamp_type: TimestampType,
    /// `durability=memory`: readers and acks may run ahead of the journal.
    pub memory: bool,
}

/// What the owner must do after a call: execute the operations, look at the events, call again in time.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Operations for the disk driver, in the order they were decided.
    pub ops: Vec<(OpId, DiskOp)>,
    /// Answers and news for the owner.
    pub events: Vec<StoreEvent>,
}

/// One batch to append as the leader.
#[derive(Debug, Clone)]
pub struct AppendRequest {
    /// Comes back in [`StoreEvent::Appended`].
    pub token: u64,
    /// Where to.
    pub partition: PartitionId,
    /// The leader epoch the caller believes in; must be the partition's current one.
    pub epoch: LeaderEpoch,
    /// Exactly one record batch (magic 2). Base offset and leader epoch are stamped by the store.
    pub batch: BufSlice,
}

/// A range to read.
#[derive(Debug, Clone)]
pub struct ReadRequest {
    /// Comes back in [`StoreEvent::Read`].
    pub token: u64,
    /// Where from.
    pub partition: PartitionId,
    /// First offset wanted; the answer may begin with the batch that contains it.
    pub offset: Offset,
    /// Batches at or beyond this offset are not served (high watermark for consumers, `log_end` for replicas).
    pub limit: Offset,
    /// About how much; at least one whole batch is served.
    pub max_bytes: usize,
}

/// A batch that is in memory and on its way to the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appended {
    /// Offset of its first record.
    pub base: Offset,
    /// Exclusive end; the acknowledgement waits until `durable_end` (or the high watermark) reaches it.
    pub end: Offset,
    /// A retry of a batch that is already in the log: nothing was appended, `base` and `end` are the original's.
    pub duplicate: bool,
    /// The stamped time (milliseconds) where the topic uses LogAppendTime, else -1.
    pub log_append_time: i64,
}

/// Bytes read.
#[derive(Debug, Clone)]
pub struct ReadBytes {
    /// Whole batches, contiguous, in order; each slice holds one or more. Empty when nothing lies below the limit.
    pub batches: Vec<BufSlice>,
    /// Offset after the last record served (`offset` of the request when empty).
    pub next: Offset,
}

/// News for the owner.
#[derive(Debug)]
pub enum StoreEvent {
    /// Answer to `append`.
    Appended {
        token: u64,
        partition: PartitionId,
        result: Result<Appended, AppendError>,
    },
    /// Answer to `read`.
    Read {
        token: u64,
        partition: PartitionId,
        result: Result<ReadBytes, ReadError>,
    },
    /// Answer to `offset_for_time`: the first record with a timestamp at or after the one asked
    /// (its offset and timestamp), or `None`.
    TimeFound {
        token: u64,
        partition: PartitionId,
        result: Result<Option<(Offset, i64)>, ReadError>,
    },
    /// Answer to `begin_epoch`, `truncate`, `set_log_start`, `drop_partition`: its record is durable.
    Done {
        token: u64,
        partition: PartitionId,
        result: Result<(), CommandError>,
    },
    /// `durable_end` of a partition moved up to `end`.
    Durable { partition: PartitionId, end: Offset },
    /// Log start moved (retention or a command).
    LogStart { partition: PartitionId, start: Offset },
    /// A partition was fenced.
    PartitionFenced {
        partition: PartitionId,
        reason: FenceReason,
    },
    /// The whole shard was fenced; nothing will be acknowledged again.
    ShardFenced { reason: FenceReason },
}

/// Where a partition stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionView {
    /// First readable offset.
    pub log_start: Offset,
    /// Next offset to assign (`accepted_end`).
    pub log_end: Offset,
    /// End covered by completed journal writes.
    pub durable_end: Offset,
    /// Current leader epoch (that of the last epoch entry).
    pub epoch: LeaderEpoch,
    /// Set when the partition takes no writes.
    pub fenced: Option<FenceReason>,
}
