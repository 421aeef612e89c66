//! Builds a segment's index as batches are appended, or again from the segment's bytes.

use thiserror::Error;

use super::{Entry, INTERVAL_BYTES, Seal, SegmentIndex, SegmentKey};
use crate::batch::{self, BatchError, BatchHeader, HEADER_BYTES};
use crate::epochs::EpochTable;
use crate::types::{LeaderEpoch, Offset, Pos};

/// The interval that is not closed yet.
#[derive(Debug, Clone)]
struct Open {
    pos: Pos,
    first: Offset,
    epoch: LeaderEpoch,
    max_timestamp: i64,
    max_timestamp_base: Offset,
    crc: crc32fast::Hasher,
}

/// The bytes of a batch, for the interval's checksum.
#[derive(Debug, Clone, Copy)]
pub enum BatchBytes<'a> {
    /// All of them.
    All(&'a [u8]),
    /// All of them, in two pieces.
    Split(&'a [u8], &'a [u8]),
    /// Their checksum, already taken.
    Summed(&'a crc32fast::Hasher),
}

/// A [`SegmentIndex`] that grows, and the interval at its end that is still open.
///
/// Invariant: `end` and `next` continue the closed intervals and the open one; there is an open interval exactly when
/// they lie beyond the closed ones.
#[derive(Debug, Clone)]
pub struct IndexBuilder {
    index: SegmentIndex,
    open: Option<Open>,
    end: Pos,
    next: Offset,
    max_timestamp: i64,
    /// An interval has no time: it is a hole, or its producer gave none.
    untimed: bool,
    /// A walk goes no further than this offset.
    limit: Option<Offset>,
}

impl IndexBuilder {
    /// For a new segment.
    #[must_use]
    pub fn new(key: SegmentKey) -> IndexBuilder {
        IndexBuilder::resume(SegmentIndex::new(key))
    }

    /// Continues where the intervals of `index` end; [`walk`] the bytes from there to the segment's end.
    #[must_use]
    pub fn resume(index: SegmentIndex) -> IndexBuilder {
        IndexBuilder {
            end: index.end(),
            next: index.next_offset(),
            max_timestamp: index.seal().max_timestamp,
            untimed: index.entries.iter().any(|entry| entry.max_timestamp < 0),
            index,
            open: None,
            limit: None,
        }
    }

    /// Where the segment is known to end: a batch beyond it ends a walk, however good it looks. It may lie there from
    /// before a cut.
    pub fn set_limit(&mut self, next: Offset) {
        self.limit = Some(next);
    }

    /// Adds the batch at `pos`: `bytes` are exactly the batch, as stored. Returns how many intervals closed (the last
    /// ones of [`IndexBuilder::index`]): none, one, or two when the epoch changed and the batch is large.
    ///
    /// # Panics
    /// When the batch does not continue the segment (position, offset, epoch) or does not fit it
    /// ([`SegmentKey::fits`]): the caller's log is then wrong already.
    pub fn add_batch(&mut self, header: &BatchHeader, pos: Pos, bytes: BatchBytes<'_>) -> usize {
        let epoch = header
            .leader_epoch
            .expect("a batch is stamped before it is appended");
        if let BatchBytes::All(bytes) = bytes {
            assert_eq!(bytes.len(), header.size, "bytes are not the header's batch");
        }
        assert_eq!(
            (pos, header.base_offset),
            (self.end, self.next),
            "the batch does not continue the segment"
        );
        assert!(
            self.last_epoch().is_none_or(|last| epoch >= last),
            "the epoch falls"
        );
        let end = pos.plus(header.size as u64);
        assert!(
            self.index.key().fits(end, header.next_offset()),
            "the segment had to roll"
        );

        let closed_before = self.index.len();
        if self.open.as_ref().is_some_and(|open| open.epoch != epoch) {
            self.close();
        }
        let open = self.open.get_or_insert_with(|| Open {
            pos,
            first: header.base_offset,
            epoch,
            max_timestamp: header.max_timestamp,
            max_timestamp_base: header.base_offset,
            crc: self.index.key().hasher(pos),
        });
        match bytes {
            BatchBytes::All(bytes) => open.crc.update(bytes),
            BatchBytes::Split(head, rest) => {
                open.crc.update(head);
                open.crc.update(rest);
            }
            BatchBytes::Summed(sum) => open.crc.combine(sum),
        }
        if header.max_timestamp > open.max_timestamp {
            open.max_timestamp = header.max_timestamp;
            open.max_timestamp_base = header.base_offset;
        }
        let full = end.0 - open.pos.0 >= INTERVAL_BYTES;
        self.max_timestamp = self.max_timestamp.max(header.max_timestamp);
        self.untimed |= header.max_timestamp < 0;
        (self.end, self.next) = (end, header.next_offset());
        if full {
            self.close();
        }
        self.index.len() - closed_before
    }

    /// Adds a run of bytes that are lost, up to `end` and `next`, as an interval whose checksum no zeros have: what
    /// follows it is found, and a reader of it meets damage. `max_timestamp` is the largest time in it, -1 when that is
    /// not known. `false`, and nothing added, when it cannot be an interval.
    pub fn add_hole(&mut self, end: Pos, next: Offset, max_timestamp: i64) -> bool {
        self.close();
        let (pos, first) = (self.end, self.next);
        let base = self.index.key().base.0;
        let (Some(len), Some(count)) = (end.0.checked_sub(pos.0), next.0.checked_sub(first.0)) else {
            return false;
        };
        let narrow = |n: u64| u32::try_from(n).ok();
        let (Some(len), Some(count), Some(at), Some(relative)) =
            (narrow(len), narrow(count), narrow(pos.0), narrow(first.0 - base))
        else {
            return false;
        };
        let mut crc = self.index.key().hasher(pos);
        crc.update(&vec![0; len as usize]);
        let entry = Entry {
            first: relative,
            count,
            pos: at,
            len,
            crc: !crc.finalize(),
            epoch: self.last_epoch().unwrap_or_default().0,
            max_timestamp,
            max_timestamp_base: relative,
        };
        let added = self.index.push(entry);
        if added {
            self.max_timestamp = self.max_timestamp.max(max_timestamp);
            self.untimed |= max_timestamp < 0;
            (self.end, self.next) = (end, next);
        }
        added
    }

    /// Closes the open interval, if there is one: before a seal, when its last bytes are final.
    pub fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        let base = self.index.key().base.0;
        // add_batch demanded SegmentKey::fits, so every difference is below 2^32.
        let entry = Entry {
            first: (open.first.0 - base) as u32,
            count: (self.next.0 - open.first.0) as u32,
            pos: open.pos.0 as u32,
            len: (self.end.0 - open.pos.0) as u32,
            crc: open.crc.finalize(),
            epoch: open.epoch.0,
            max_timestamp: open.max_timestamp,
            max_timestamp_base: (open.max_timestamp_base.0 - base) as u32,
        };
        let continues = self.index.push(entry);
        assert!(continues, "an interval does not continue the index");
    }

    /// Closes the open interval and returns index and summary of the whole segment.
    #[must_use]
    pub fn seal(mut self) -> (SegmentIndex, Seal) {
        self.close();
        let seal = self.index.seal();
        (self.index, seal)
    }

    /// The closed intervals.
    #[must_use]
    pub fn index(&self) -> &SegmentIndex {
        &self.index
    }

    /// The closed intervals, without the open one: for a cut, see [`SegmentIndex::truncate`].
    #[must_use]
    pub fn into_index(self) -> SegmentIndex {
        self.index
    }

    /// The segment.
    #[must_use]
    pub fn key(&self) -> SegmentKey {
        self.index.key()
    }

    /// Where the segment ends.
    #[must_use]
    pub fn end(&self) -> Pos {
        self.end
    }

    /// Offset after the segment's last record.
    #[must_use]
    pub fn next_offset(&self) -> Offset {
        self.next
    }

    /// Position and offset where the open interval starts; the segment's end when none is open.
    #[must_use]
    pub fn open_start(&self) -> (Pos, Offset) {
        self.open
            .as_ref()
            .map_or((self.end, self.next), |open| (open.pos, open.first))
    }

    /// Largest timestamp in the segment, -1 for none.
    #[must_use]
    pub fn max_timestamp(&self) -> i64 {
        self.max_timestamp
    }

    /// Whether some interval has no time: the largest timestamp then says nothing of it.
    #[must_use]
    pub fn is_untimed(&self) -> bool {
        self.untimed
    }

    /// Leader epoch of the last batch.
    #[must_use]
    pub fn last_epoch(&self) -> Option<LeaderEpoch> {
        let open = self.open.as_ref().map(|open| open.epoch);
        open.or_else(|| self.index.entries.last().map(|entry| LeaderEpoch(entry.epoch)))
    }
}

/// Why bytes do not continue a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WalkFault {
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error("base offset {found} does not continue at {expected}")]
    Offset { expected: Offset, found: Offset },
    #[error("the batch carries no leader epoch")]
    NoEpoch,
    #[error("leader epoch {found} falls below {last}")]
    EpochFalls { last: LeaderEpoch, found: LeaderEpoch },
    #[error("leader epoch {found} is not the epoch table's at this offset")]
    EpochTable { found: LeaderEpoch },
    #[error("the batch goes beyond what a segment can hold")]
    BeyondSegment,
}

/// Where a walk stopped. Everything before is in the builder, whose `end` is the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WalkStop {
    /// All bytes were whole, good batches.
    End,
    /// The last batch is not all there: at least `needed` bytes from the builder's `end` on are necessary.
    Incomplete { needed: usize },
    /// What follows is no continuation of the segment.
    Fault(WalkFault),
}

/// Adds batch after batch of `bytes`, which start at the builder's `end`, and stops at the first that is not whole or
/// not good: CRC-32C, unbroken offsets, epochs that do not fall and, with a `table`, are the table's. The table is
/// never overruled by what the bytes say. To be called again with more bytes after [`WalkStop::Incomplete`].
pub fn walk(builder: &mut IndexBuilder, bytes: &[u8], table: Option<&EpochTable>) -> WalkStop {
    let mut rest = bytes;
    while !rest.is_empty() {
        if rest.len() < HEADER_BYTES {
            return WalkStop::Incomplete { needed: HEADER_BYTES };
        }
        let checked = batch::parse_head(rest)
            .map_err(WalkFault::from)
            .and_then(|header| check_head(builder, &header, table).map(|()| header));
        let header = match checked {
            Ok(header) => header,
            Err(fault) => return WalkStop::Fault(fault),
        };
        let Some((batch, after)) = rest.split_at_checked(header.size) else {
            return WalkStop::Incomplete { needed: header.size };
        };
        if let Err(error) = batch::check_crc(batch, header.crc) {
            return WalkStop::Fault(error.into());
        }
        builder.add_batch(&header, builder.end(), BatchBytes::All(batch));
        rest = after;
    }
    WalkStop::End
}

fn check_head(
    builder: &IndexBuilder,
    header: &BatchHeader,
    table: Option<&EpochTable>,
) -> Result<(), WalkFault> {
    let (expected, found) = (builder.next_offset(), header.base_offset);
    if expected != found {
        return Err(WalkFault::Offset { expected, found });
    }
    let epoch = header.leader_epoch.ok_or(WalkFault::NoEpoch)?;
    if let Some(last) = builder.last_epoch().filter(|last| epoch < *last) {
        return Err(WalkFault::EpochFalls { last, found: epoch });
    }
    if table.is_some_and(|table| !table.allows(header.base_offset, header.last_offset(), epoch)) {
        return Err(WalkFault::EpochTable { found: epoch });
    }
    let end = builder.end().plus(header.size as u64);
    let beyond = builder.limit.is_some_and(|limit| header.next_offset() > limit);
    if beyond || !builder.key().fits(end, header.next_offset()) {
        return Err(WalkFault::BeyondSegment);
    }
    Ok(())
}
