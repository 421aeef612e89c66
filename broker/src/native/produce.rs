//! Produce: appends record batches.

use ringfence_engine::types::{LeaderEpoch, Offset, PartitionId};

use super::frame::Records;
use super::wire::{DecodeError, Reader, Wire, choice, layout};
use crate::error::WireError;

choice! {
    /// When a batch is acknowledged.
    pub enum Acks as i8, "acks" {
        /// Synced on every in-sync replica.
        All = -1,
        /// Never; no answer is sent. A refused batch closes the connection, which is all its sender can notice.
        None = 0,
        /// Synced on the leader.
        Leader = 1,
    }
}

/// Batches to append, at most one per partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProduceRequest<B> {
    /// When to answer.
    pub acks: Acks,
    /// After this many milliseconds a batch not acknowledged yet is answered with `RequestTimedOut`; it may still
    /// become durable.
    pub timeout_ms: u32,
    /// The batches.
    pub batches: Vec<ProduceBatch<B>>,
}

/// One batch for one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProduceBatch<B> {
    /// Where to.
    pub partition: PartitionId,
    /// The leader epoch the client knows; `None` accepts any.
    pub epoch: Option<LeaderEpoch>,
    /// Exactly one Kafka record batch of magic 2.
    pub records: B,
}

layout! {
    /// What became of each batch, in the order of the request.
    pub struct ProduceAnswer {
        /// One per batch.
        pub partitions: Vec<ProducedPartition>,
    }

    /// What became of one batch.
    pub struct ProducedPartition {
        /// The partition.
        pub partition: PartitionId,
        /// Why it was not acknowledged.
        pub error: Option<WireError>,
        /// Offset of its first record.
        pub base_offset: Option<Offset>,
        /// The time stamped on it (milliseconds since 1970), or -1 when the producer's times were kept.
        pub log_append_time: i64,
        /// First readable offset of the partition.
        pub log_start: Option<Offset>,
        /// What exactly was wrong; empty without an error.
        pub message: String,
    }

    /// `acks`, `timeout_ms`, then the entries; the records follow as the frame's tail.
    struct ProduceHead {
        acks: Acks,
        timeout_ms: u32,
        entries: Vec<ProduceEntry>,
    }

    struct ProduceEntry {
        partition: PartitionId,
        epoch: Option<LeaderEpoch>,
        len: u32,
    }
}

impl<B: Records> ProduceRequest<B> {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        let entry = |batch: &ProduceBatch<B>| ProduceEntry {
            partition: batch.partition,
            epoch: batch.epoch,
            len: record_len(batch.records.len()),
        };
        ProduceHead {
            acks: self.acks,
            timeout_ms: self.timeout_ms,
            entries: self.batches.iter().map(entry).collect(),
        }
        .put(out);
    }

    pub(super) fn take(input: &mut Reader<'_>, tail: &B) -> Result<Self, DecodeError> {
        let head = ProduceHead::take(input)?;
        let mut cutter = Cutter::new(tail, head.entries.iter().map(|entry| entry.len))?;
        let batches = head
            .entries
            .iter()
            .map(|entry| ProduceBatch {
                partition: entry.partition,
                epoch: entry.epoch,
                records: cutter.next(entry.len),
            })
            .collect();
        Ok(ProduceRequest {
            acks: head.acks,
            timeout_ms: head.timeout_ms,
            batches,
        })
    }
}

/// Length of records as the wire has it; a frame has 32 bits of length, so records in it have too.
pub(super) fn record_len(len: usize) -> u32 {
    u32::try_from(len).expect("records are bounded by max_frame")
}

/// Cuts a tail into consecutive pieces whose lengths are known to add up to it.
pub(super) struct Cutter<'a, B> {
    tail: &'a B,
    at: usize,
}

impl<'a, B: Records> Cutter<'a, B> {
    pub(super) fn new(tail: &'a B, lens: impl Iterator<Item = u32>) -> Result<Self, DecodeError> {
        let expected = lens.map(u64::from).sum::<u64>();
        if expected == tail.len() as u64 {
            Ok(Cutter { tail, at: 0 })
        } else {
            Err(DecodeError::Records {
                expected,
                found: tail.len(),
            })
        }
    }

    pub(super) fn next(&mut self, len: u32) -> B {
        let start = self.at;
        self.at += len as usize;
        self.tail.cut(start..self.at)
    }
}
