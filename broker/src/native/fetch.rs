//! Fetch: reads records, for consumers and followers; FetchAck: a follower's progress between fetches.

use ringfence_engine::types::{LeaderEpoch, Offset, PartitionId};

use super::frame::Records;
use super::produce::{Cutter, record_len};
use super::wire::{DecodeError, NodeId, Reader, Wire, choice, layout};
use crate::error::WireError;

choice! {
    /// What a consumer may see. Without transactions both end at the high watermark.
    pub enum Isolation as u8, "isolation" {
        /// Everything below the high watermark.
        Uncommitted = 0,
        /// Everything below the last stable offset.
        Committed = 1,
    }
}

layout! {
    /// Ranges to read; answered when `min_bytes` are there or `max_wait_ms` is over.
    pub struct FetchRequest {
        /// Longest wait in milliseconds for `min_bytes`.
        pub max_wait_ms: u32,
        /// Least number of record bytes worth an answer; 0 answers at once.
        pub min_bytes: u32,
        /// About how many record bytes to answer with; at least one whole batch is served.
        pub max_bytes: u32,
        /// What a consumer may see.
        pub isolation: Isolation,
        /// The fetching node, on a broker's connection; `None` is a consumer.
        pub replica: Option<NodeId>,
        /// Boot generation of that node; 0 for a consumer.
        pub generation: u64,
        /// The ranges, in the order in which `max_bytes` is spent.
        pub partitions: Vec<FetchPartition>,
    }

    /// A range of one partition.
    pub struct FetchPartition {
        /// Where from.
        pub partition: PartitionId,
        /// The leader epoch the requester knows; `None` accepts any.
        pub epoch: Option<LeaderEpoch>,
        /// First offset wanted.
        pub offset: Offset,
        /// About how many bytes of this partition.
        pub max_bytes: u32,
        /// Epoch of the follower's last record, for the divergence check; `None` for a consumer.
        pub last_fetched_epoch: Option<LeaderEpoch>,
        /// Exclusive end of what the follower has synced; `None` for a consumer.
        pub durable_end: Option<Offset>,
    }
}

/// What was read, in the order of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchAnswer<B> {
    /// One per range.
    pub partitions: Vec<FetchedPartition<B>>,
}

/// What was read from one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchedPartition<B> {
    /// The partition.
    pub partition: PartitionId,
    /// Why nothing was read.
    pub error: Option<WireError>,
    /// The leader's epoch.
    pub epoch: Option<LeaderEpoch>,
    /// Exclusive end of what consumers see.
    pub high_watermark: Option<Offset>,
    /// First readable offset.
    pub log_start: Option<Offset>,
    /// Next offset to be assigned.
    pub log_end: Option<Offset>,
    /// When the requester's log diverges: the largest epoch not above its last fetched one.
    pub diverging_epoch: Option<LeaderEpoch>,
    /// When the requester's log diverges: where that epoch ends.
    pub diverging_end: Option<Offset>,
    /// Whole record batches, in order; the first may begin below the offset asked for. A decoded answer holds them
    /// in at most one piece.
    pub records: Vec<B>,
}

impl<B> FetchedPartition<B> {
    /// An answer that carries nothing but an error.
    #[must_use]
    pub fn failed(partition: PartitionId, error: WireError) -> FetchedPartition<B> {
        FetchedPartition {
            partition,
            error: Some(error),
            epoch: None,
            high_watermark: None,
            log_start: None,
            log_end: None,
            diverging_epoch: None,
            diverging_end: None,
            records: Vec::new(),
        }
    }
}

layout! {
    struct FetchedHead {
        partition: PartitionId,
        error: Option<WireError>,
        epoch: Option<LeaderEpoch>,
        high_watermark: Option<Offset>,
        log_start: Option<Offset>,
        log_end: Option<Offset>,
        diverging_epoch: Option<LeaderEpoch>,
        diverging_end: Option<Offset>,
        len: u32,
    }

    /// Reserved for replication: what a follower has synced since its last fetch.
    pub struct FetchAck {
        /// The acknowledging node.
        pub replica: NodeId,
        /// Its boot generation.
        pub generation: u64,
        /// Its durable ends.
        pub partitions: Vec<Ack>,
    }

    /// A follower's durable end of one partition.
    pub struct Ack {
        /// The partition.
        pub partition: PartitionId,
        /// The leader epoch it follows.
        pub epoch: LeaderEpoch,
        /// Exclusive end of what it has synced.
        pub durable_end: Offset,
    }

    /// What the leader made of it.
    pub struct AckedPartition {
        /// The partition.
        pub partition: PartitionId,
        /// Why it was refused.
        pub error: Option<WireError>,
        /// Exclusive end of what consumers see.
        pub high_watermark: Option<Offset>,
    }
}

impl<B: Records> FetchAnswer<B> {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        let head = |read: &FetchedPartition<B>| FetchedHead {
            partition: read.partition,
            error: read.error,
            epoch: read.epoch,
            high_watermark: read.high_watermark,
            log_start: read.log_start,
            log_end: read.log_end,
            diverging_epoch: read.diverging_epoch,
            diverging_end: read.diverging_end,
            len: record_len(read.records.iter().map(|piece| piece.len()).sum()),
        };
        self.partitions.iter().map(head).collect::<Vec<_>>().put(out);
    }

    pub(super) fn take(input: &mut Reader<'_>, tail: &B) -> Result<Self, DecodeError> {
        let heads = Vec::<FetchedHead>::take(input)?;
        let mut cutter = Cutter::new(tail, heads.iter().map(|head| head.len))?;
        let partitions = heads
            .iter()
            .map(|head| FetchedPartition {
                partition: head.partition,
                error: head.error,
                epoch: head.epoch,
                high_watermark: head.high_watermark,
                log_start: head.log_start,
                log_end: head.log_end,
                diverging_epoch: head.diverging_epoch,
                diverging_end: head.diverging_end,
                records: match head.len {
                    0 => Vec::new(),
                    len => vec![cutter.next(len)],
                },
            })
            .collect();
        Ok(FetchAnswer { partitions })
    }
}
