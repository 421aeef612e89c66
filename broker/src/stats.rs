//! Counters, gauges and histograms of a shard.
//!
//! The shard's thread is the only writer; anyone may read at any time, without stopping the data path. All accesses
//! are relaxed: each figure is exact, figures among each other may be a moment apart. Each metric is defined once, in
//! the table below; /metrics and ClusterInfo derive from it.

use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_engine::store::{Store, StoreGauges};

use crate::error::WireError;
use crate::native::Api;

/// A number that its shard changes and others read.
#[derive(Debug, Default)]
pub struct Figure(AtomicU64);

impl Figure {
    /// Adds `n`. Only the owning shard calls this, so load and store need not be one operation.
    pub fn add(&self, n: u64) {
        self.set(self.get().wrapping_add(n));
    }

    /// Takes `n` away, not below 0.
    pub fn sub(&self, n: u64) {
        self.set(self.get().saturating_sub(n));
    }

    /// Sets the value.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One figure per item of a table.
#[derive(Debug)]
pub struct Group<const N: usize>([Figure; N]);

impl<const N: usize> Default for Group<N> {
    fn default() -> Group<N> {
        Group(std::array::from_fn(|_| Figure::default()))
    }
}

impl<const N: usize> std::ops::Deref for Group<N> {
    type Target = [Figure; N];

    fn deref(&self) -> &[Figure; N] {
        &self.0
    }
}

/// Whether a figure only grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// Definition of one figure.
#[derive(Debug)]
pub struct Metric {
    /// Name without prefix; with its unit at the end.
    pub name: &'static str,
    /// Meaning.
    pub help: &'static str,
    /// Counter or gauge.
    pub kind: Kind,
    /// Reads it.
    pub get: fn(&ShardStats) -> u64,
}

macro_rules! figures {
    ($($kind:ident $field:ident $help:literal;)*) => {
        /// Figures of one shard.
        #[derive(Debug, Default)]
        pub struct ShardStats {
            $(#[doc = $help] pub $field: Figure,)*
            /// Monotonic nanoseconds at which the shard last looked at its clock; 0 before it does.
            pub turned_at: Figure,
            /// Requests by api, in the order of [`Api::ALL`].
            pub requests: Group<{ Api::ALL.len() }>,
            /// Errors sent, by code, in the order of [`WireError::ALL`].
            pub errors: Group<{ WireError::ALL.len() }>,
            /// From the whole request received to the answer handed to the socket, for produce with acks.
            pub produce_latency: Histogram,
            /// From submission to completion of journal writes.
            pub journal_write_latency: Histogram,
        }

        /// Every figure of [`ShardStats`] that is a single number.
        pub const METRICS: &[Metric] = &[$(Metric {
            name: stringify!($field),
            help: $help,
            kind: Kind::$kind,
            get: |stats| stats.$field.get(),
        }),*];
    };
}

figures! {
    Gauge connections "Open connections.";
    Counter connections_accepted "Connections accepted or taken over.";
    Counter connections_refused "Connections closed at once because the limit was reached.";
    Counter connections_expired "Connections closed by a deadline: no Hello, half a frame, idle.";
    Counter handovers "Connections handed to the shard their Hello named.";
    Counter malformed "Connections closed because of bytes that are no frame.";
    Counter received_bytes "Bytes received.";
    Counter sent_bytes "Bytes sent.";
    Gauge paused_connections "Connections not read from because a limit is reached.";
    Gauge held_bytes "Bytes of requests in work and of answers not sent yet.";
    Gauge requests_in_flight "Requests in work.";
    Counter forwarded "Parts of requests forwarded to another shard.";
    Counter produced_batches "Record batches appended.";
    Counter produced_bytes "Bytes of record batches appended.";
    Counter produced_duplicates "Batches recognised as retries.";
    Counter fetched_bytes "Bytes of record batches answered to fetches.";
    Gauge parked_produces "Batches waiting for their acknowledgement.";
    Gauge parked_fetches "Fetches waiting for data or their deadline.";
    Counter timed_out_produces "Batches not acknowledged within the request's timeout.";
    Gauge partitions "Partitions of this shard.";
    Gauge partitions_leading "Partitions that this shard leads.";
    Gauge partitions_fenced "Partitions that take no writes because of a fault.";
    Gauge partitions_memory "Partitions with durability=memory.";
    Gauge partitions_stray "Partitions on disk that no metadata name; kept, not served.";
    Gauge shard_fenced "1 when the whole shard takes no writes.";
    Counter refused_no_space "Batches refused because the disk is full.";
    Counter refused_busy "Batches refused because memory or journal was used up.";
    Counter journal_frames "Journal frames written.";
    Counter journal_bytes "Bytes of journal frames written.";
    Counter journal_marks "Empty journal frames that carried the durable end.";
    Counter journal_stalls "Turns in which the journal had no free file.";
    Gauge journal_frames_in_flight "Journal writes in flight.";
    Gauge journal_room_bytes "Bytes of batches that the journal can still take.";
    Gauge appends_waiting "Appends waiting for a place in a segment or for room.";
    Counter write_backs "Write-back operations completed.";
    Counter written_back_bytes "Bytes written back to segments.";
    Gauge write_backs_in_flight "Write-back operations in flight.";
    Gauge dirty_bytes "Accepted bytes not yet in segments: the write-back backlog.";
    Gauge memory_bytes "Bytes of partition tails in memory.";
    Counter checkpoints "Checkpoints completed.";
    Counter checkpoint_slices "Slices of checkpoint work.";
    Gauge snapshot_bytes "Bytes of the last snapshot.";
    Counter segments_removed "Segment files removed.";
    Counter segment_read_bytes "Bytes read from segments.";
    Counter memory_reads "Reads answered from memory.";
    Counter disk_reads "Reads answered from disk.";
    Counter damage_found "Reads that met bytes which failed their checks.";
}

/// Upper bounds of the histogram's buckets, in nanoseconds: 16 us doubling to about 8.6 s.
pub const BOUNDS: [u64; 20] = {
    let mut bounds = [0; 20];
    let mut at = 0;
    while at < 20 {
        bounds[at] = 16_384 << at;
        at += 1;
    }
    bounds
};

/// Counts of durations by size.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [Figure; BOUNDS.len() + 1],
    sum: Figure,
}

impl Histogram {
    /// Counts a duration.
    pub fn record(&self, nanos: u64) {
        let at = BOUNDS.partition_point(|bound| *bound < nanos);
        self.buckets[at].add(1);
        self.sum.add(nanos);
    }

    /// Counts per bucket (not cumulated; the last is "longer than every bound") and the sum in nanoseconds.
    #[must_use]
    pub fn read(&self) -> ([u64; BOUNDS.len() + 1], u64) {
        (std::array::from_fn(|at| self.buckets[at].get()), self.sum.get())
    }
}

impl ShardStats {
    /// Counts a request.
    pub fn request(&self, api: Api) {
        if let Some(at) = Api::ALL.iter().position(|known| *known == api) {
            self.requests[at].add(1);
        }
    }

    /// Counts an error on its way to a client.
    pub fn error(&self, error: WireError) {
        if let Some(at) = WireError::ALL.iter().position(|known| *known == error) {
            self.errors[at].add(1);
        }
        match error {
            WireError::DiskFull => self.refused_no_space.add(1),
            WireError::Overloaded => self.refused_busy.add(1),
            _ => {}
        }
    }
}

impl ShardStats {
    /// Takes the store's figures over.
    pub fn publish_store(&self, store: &Store, gauges: &StoreGauges) {
        let (stats, commit) = (store.stats(), store.commit_stats());
        for (figure, value) in [
            (&self.partitions_fenced, gauges.fenced as u64),
            (&self.partitions_stray, gauges.strays as u64),
            (&self.appends_waiting, gauges.waiting as u64),
            (&self.journal_frames_in_flight, gauges.frames_in_flight as u64),
            (&self.journal_room_bytes, gauges.journal_room),
            (&self.write_backs_in_flight, gauges.write_backs_in_flight as u64),
            (&self.dirty_bytes, gauges.dirty_bytes),
            (&self.memory_bytes, gauges.memory_bytes),
            (&self.journal_frames, commit.frames),
            (&self.journal_bytes, commit.bytes),
            (&self.journal_marks, commit.marks),
            (&self.journal_stalls, commit.stalls),
            (&self.write_backs, stats.write_backs),
            (&self.written_back_bytes, stats.written_back_bytes),
            (&self.checkpoints, stats.checkpoints),
            (&self.checkpoint_slices, stats.checkpoint_slices),
            (&self.snapshot_bytes, stats.snapshot_bytes),
            (&self.segments_removed, stats.segments_removed),
            (&self.segment_read_bytes, stats.read_bytes),
            (&self.memory_reads, stats.memory_reads),
            (&self.disk_reads, stats.disk_reads),
            (&self.damage_found, stats.damage_found),
        ] {
            figure.set(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_the_bucket_that_bounds_them() {
        let histogram = Histogram::default();
        for nanos in [0, 16_384, 16_385, u64::from(u32::MAX), u64::MAX / 4] {
            histogram.record(nanos);
        }
        let (buckets, sum) = histogram.read();
        assert_eq!(buckets[0], 2);
        assert_eq!(buckets[1], 1);
        assert_eq!(buckets[18], 1);
        assert_eq!(buckets[20], 1);
        assert_eq!(sum, 32_769 + u64::from(u32::MAX) + u64::MAX / 4);
    }

    #[test]
    fn every_error_has_its_counter() {
        let stats = ShardStats::default();
        for error in WireError::ALL {
            stats.error(*error);
        }
        assert!(stats.errors.iter().all(|count| count.get() == 1));
        assert_eq!(stats.refused_no_space.get(), 1);
    }
}
