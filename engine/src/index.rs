//! Sparse index of a segment: where an offset or a time lies, and a checksum over every byte it leads to.
//!
//! One `.index` file per segment serves offsets and times. The largest timestamp is a field of each entry instead of
//! a second `.timeindex` file: with 10,000 partitions every file per segment is 10,000 files to open, sync and lose.
//!
//! The unit is the **interval**: whole batches, contiguous, closed by the batch that brings it to
//! [`INTERVAL_BYTES`] (a larger batch is an interval of its own) or by a change of leader epoch. So every interval has
//! one epoch, and the epoch slice of a segment can be read off its intervals.
//!
//! Kafka's CRC-32C does not cover base offset, length, epoch and magic of a batch, and says nothing about which
//! segment the bytes belong to. The CRC of an interval covers its exact bytes, seeded with (topic id, partition,
//! segment base, position), so a misdirected or stale write does not pass (STORAGE.md section 6).
//!
//! Invariants:
//! - Intervals cover the segment from position 0 and its base offset on without gap or overlap, in positions and in
//!   offsets; epochs do not fall.
//! - An index is derived from the log, may be missing or behind, and is never evidence about the log: [`decode`]
//!   keeps the good prefix, [`walk`] makes the rest.
//!
//! Example: batches of 20 KiB, 20 KiB, 50 KiB, 4 KiB: interval 1 is the first two (40 KiB), interval 2 the third, the
//! fourth is open: no entry leads to it yet, and readers check it by the offset chain, the epoch table and batch CRCs.

mod build;
mod file;
#[cfg(test)]
mod tests;

use crate::epochs::EpochEntry;
use crate::limits::MAX_SEGMENT_BYTES;
use crate::types::{LeaderEpoch, Offset, PartitionId, Pos};

pub use build::{BatchBytes, IndexBuilder, WalkFault, WalkStop, walk};
pub use file::{BLOCK_ENTRIES, IndexRead, decode, decode_seal};

/// An interval closes once it holds this many bytes.
pub const INTERVAL_BYTES: u64 = 32 << 10;

/// Which segment of which partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentKey {
    /// The partition.
    pub partition: PartitionId,
    /// Offset of the segment's first record; names its files.
    pub base: Offset,
}

impl SegmentKey {
    /// Whether a segment that then ends at `end` and `next` can still be indexed: entries hold 32-bit positions and
    /// offsets relative to the base. A segment rolls before a batch that would not fit.
    #[must_use]
    pub fn fits(self, end: Pos, next: Offset) -> bool {
        let span = next.0.checked_sub(self.base.0);
        end.0 <= MAX_SEGMENT_BYTES && span.is_some_and(|span| span <= u64::from(u32::MAX))
    }

    /// A checksum that has seen the segment's identity and the position of the interval.
    fn hasher(self, pos: Pos) -> crc32fast::Hasher {
        let mut crc = crc32fast::Hasher::new();
        crc.update(&self.partition.topic.0);
        crc.update(&self.partition.index.to_le_bytes());
        crc.update(&self.base.0.to_le_bytes());
        crc.update(&pos.0.to_le_bytes());
        crc
    }

    /// Whether `bytes` are exactly those of `interval` in this segment.
    #[must_use]
    pub fn verify(self, interval: &Interval, bytes: &[u8]) -> bool {
        if bytes.len() as u64 != interval.len() {
            return false;
        }
        let mut crc = self.hasher(interval.pos);
        crc.update(bytes);
        crc.finalize() == interval.crc
    }
}

/// A closed run of whole batches of one epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interval {
    /// Position of its first byte.
    pub pos: Pos,
    /// Position after its last byte.
    pub end: Pos,
    /// Offset of its first record.
    pub first: Offset,
    /// Offset after its last record.
    pub next: Offset,
    /// Leader epoch of all its batches.
    pub epoch: LeaderEpoch,
    /// Largest timestamp in it (milliseconds since 1970, -1 for none).
    pub max_timestamp: i64,
    /// Base offset of the first batch that has this timestamp.
    pub max_timestamp_base: Offset,
    /// Checksum, see [`SegmentKey::verify`].
    pub crc: u32,
}

impl Interval {
    /// Bytes in it.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an interval is never empty")]
    pub fn len(&self) -> u64 {
        self.end.0 - self.pos.0
    }
}

/// An interval as it is kept and stored: relative to the segment base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    first: u32,
    count: u32,
    pos: u32,
    len: u32,
    crc: u32,
    epoch: u32,
    max_timestamp: i64,
    max_timestamp_base: u32,
}

impl Entry {
    /// Exclusive end in bytes.
    fn end(&self) -> u64 {
        u64::from(self.pos) + u64::from(self.len)
    }

    /// Exclusive end in offsets, relative to the segment base.
    fn next(&self) -> u64 {
        u64::from(self.first) + u64::from(self.count)
    }
}

/// What a segment holds as a whole; stored in the last block of a sealed segment's index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seal {
    /// Exact end of the segment's bytes.
    pub end: Pos,
    /// Offset after its last record.
    pub next: Offset,
    /// Largest timestamp, -1 for none.
    pub max_timestamp: i64,
    /// Base offset of the first batch that has it (the segment's base when there is no batch).
    pub max_timestamp_base: Offset,
    /// First and last leader epoch; `None` when there is no batch.
    pub epochs: Option<(LeaderEpoch, LeaderEpoch)>,
    /// Number of intervals.
    pub intervals: u32,
}

/// The closed intervals of one segment; see the module's invariants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentIndex {
    key: SegmentKey,
    entries: Vec<Entry>,
}

impl SegmentIndex {
    /// The index of a segment without a closed interval.
    #[must_use]
    pub fn new(key: SegmentKey) -> SegmentIndex {
        SegmentIndex {
            key,
            entries: Vec::new(),
        }
    }

    /// The segment.
    #[must_use]
    pub fn key(&self) -> SegmentKey {
        self.key
    }

    /// Position up to which the intervals reach.
    #[must_use]
    pub fn end(&self) -> Pos {
        Pos(self.entries.last().map_or(0, Entry::end))
    }

    /// Offset up to which the intervals reach.
    #[must_use]
    pub fn next_offset(&self) -> Offset {
        self.key.base.plus(self.entries.last().map_or(0, Entry::next))
    }

    /// Number of intervals.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no interval.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The `at`-th interval.
    #[must_use]
    pub fn get(&self, at: usize) -> Option<Interval> {
        self.entries.get(at).map(|entry| self.interval(entry))
    }

    /// All intervals, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Interval> {
        self.entries.iter().map(|entry| self.interval(entry))
    }

    /// The interval that holds the record at `offset`; `None` outside the closed intervals.
    #[must_use]
    pub fn find_offset(&self, offset: Offset) -> Option<Interval> {
        let delta = offset.0.checked_sub(self.key.base.0)?;
        let after = self
            .entries
            .partition_point(|entry| u64::from(entry.first) <= delta);
        let entry = &self.entries[after.checked_sub(1)?];
        (delta < entry.next()).then(|| self.interval(entry))
    }

    /// The first interval with a timestamp at or after `timestamp`. Timestamps need not rise, so this looks at the
    /// intervals one after the other.
    #[must_use]
    pub fn find_time(&self, timestamp: i64) -> Option<Interval> {
        let found = self
            .entries
            .iter()
            .find(|entry| entry.max_timestamp >= timestamp)?;
        Some(self.interval(found))
    }

    /// The interval that holds the byte at `pos`; `None` beyond the closed intervals.
    #[must_use]
    pub fn covering(&self, pos: Pos) -> Option<Interval> {
        let after = self
            .entries
            .partition_point(|entry| u64::from(entry.pos) <= pos.0);
        let entry = &self.entries[after.checked_sub(1)?];
        (pos.0 < entry.end()).then(|| self.interval(entry))
    }

    /// The intervals that hold bytes of `from..to`, in order.
    pub fn covering_range(&self, from: Pos, to: Pos) -> impl Iterator<Item = Interval> {
        let first = self.entries.partition_point(|entry| entry.end() <= from.0);
        self.entries[first..]
            .iter()
            .take_while(move |entry| u64::from(entry.pos) < to.0)
            .map(|entry| self.interval(entry))
    }

    /// Keeps the intervals that end at or below `end` (the segment was cut there). Bytes between the new
    /// [`SegmentIndex::end`] and `end` are to be walked again.
    pub fn truncate(&mut self, end: Pos) {
        let keep = self.entries.partition_point(|entry| entry.end() <= end.0);
        self.entries.truncate(keep);
    }

    /// The epochs of the intervals with their start offsets: the segment's slice of the epoch table.
    pub fn epochs(&self) -> impl Iterator<Item = EpochEntry> {
        let mut last = None;
        self.iter().filter_map(move |interval| {
            let new = last != Some(interval.epoch);
            last = Some(interval.epoch);
            new.then_some(EpochEntry {
                epoch: interval.epoch,
                start: interval.first,
            })
        })
    }

    /// What the intervals hold as a whole.
    #[must_use]
    pub fn seal(&self) -> Seal {
        let mut seal = Seal {
            end: self.end(),
            next: self.next_offset(),
            max_timestamp: -1,
            max_timestamp_base: self.key.base,
            epochs: None,
            // A segment is below 4 GiB and an interval at least a batch header.
            intervals: self.entries.len() as u32,
        };
        for entry in &self.entries {
            let epoch = LeaderEpoch(entry.epoch);
            seal.epochs = Some((seal.epochs.map_or(epoch, |(first, _)| first), epoch));
            if entry.max_timestamp > seal.max_timestamp {
                seal.max_timestamp = entry.max_timestamp;
                seal.max_timestamp_base = self.key.base.plus(u64::from(entry.max_timestamp_base));
            }
        }
        seal
    }

    fn interval(&self, entry: &Entry) -> Interval {
        Interval {
            pos: Pos(u64::from(entry.pos)),
            end: Pos(entry.end()),
            first: self.key.base.plus(u64::from(entry.first)),
            next: self.key.base.plus(entry.next()),
            epoch: LeaderEpoch(entry.epoch),
            max_timestamp: entry.max_timestamp,
            max_timestamp_base: self.key.base.plus(u64::from(entry.max_timestamp_base)),
            crc: entry.crc,
        }
    }

    /// Adds an entry if it continues the intervals; the same check serves builder and decoder.
    fn push(&mut self, entry: Entry) -> bool {
        let (pos, first, epoch) = self
            .entries
            .last()
            .map_or((0, 0, 0), |last| (last.end(), last.next(), last.epoch));
        let own = u64::from(entry.max_timestamp_base);
        let good = u64::from(entry.pos) == pos
            && u64::from(entry.first) == first
            && entry.epoch >= epoch
            && entry.len >= crate::batch::HEADER_BYTES as u32
            && entry.count >= 1
            && (first..entry.next()).contains(&own)
            && self
                .key
                .base
                .0
                .checked_add(entry.next())
                .is_some_and(|next| self.key.fits(Pos(entry.end()), Offset(next)));
        if good {
            self.entries.push(entry);
        }
        good
    }
}
