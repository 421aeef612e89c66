//! Leader epochs of a partition: the table (epoch, start offset) and its `leader-epoch-checkpoint` file.
//!
//! The table answers the one question that log matching needs: where does epoch `e` end in this log? Rules:
//! REPLICATION.md section 1. The truth is `EpochStart` in the journal and the table in the snapshot; the checkpoint
//! file is a copy that may be lost, and is never evidence against them.
//!
//! Invariants of the table:
//! - Entries rise strictly in epoch and in start offset. An epoch ends where the next one starts; the last ends at
//!   log_end.
//! - Two epochs never start at one offset: an epoch that starts where an empty one starts replaces it, so that crash
//!   loops do not grow the table.
//! - At most `max_entries` entries. When the bound drops the oldest, the table remembers that ([`EpochTable::bounded`])
//!   and says "older than I know" instead of answering for an epoch it dropped; segments keep the answer.
//!
//! Example: entries (1, 0) (3, 10) (4, 25), log_end 30. Epoch 1 ends at 10; 2 was never seen here, the largest below
//! it is 1, so the answer is (1, 10); 3 ends at 25; 4 and anything later is (4, 30).

mod checkpoint;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;

use thiserror::Error;

use crate::codec::{Put, Reader};
use crate::types::{LeaderEpoch, Offset};

pub use checkpoint::{CheckpointRead, SLOT_BYTES, decode_checkpoint, encode_checkpoint, encode_slot};

/// `leader.epoch.checkpoint.max.entries`: default bound of a table.
pub const DEFAULT_MAX_ENTRIES: usize = 100;

/// Bytes of an entry in a snapshot.
const ENTRY_BYTES: usize = 12;

/// An epoch and the offset of its first record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EpochEntry {
    /// The epoch.
    pub epoch: LeaderEpoch,
    /// Offset of the first record written in it (or that will be, for the last entry).
    pub start: Offset,
}

impl EpochEntry {
    /// Whether `self` may follow `before` in a table.
    pub(crate) fn follows(self, before: EpochEntry) -> bool {
        self.epoch > before.epoch && self.start > before.start
    }
}

/// What [`EpochTable::assign`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Assigned {
    /// The epoch is the last one already.
    Unchanged,
    /// A new entry at the end.
    Added,
    /// The last entry was an epoch without records at the same start offset; the new one took its place.
    Replaced,
}

/// Why [`EpochTable::assign`] refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum AssignError {
    /// The epoch lies below the last: the reign of a deposed leader.
    #[error("epoch {asked} is below the last epoch {last}")]
    StaleEpoch { asked: LeaderEpoch, last: LeaderEpoch },
    /// The epoch would start below the last entry: the caller's log and table disagree.
    #[error("epoch {epoch} would start at {start}, below the last start {last_start}")]
    StartBelowLast {
        epoch: LeaderEpoch,
        start: Offset,
        last_start: Offset,
    },
}

/// Answer of [`EpochTable::end_offset_for`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EpochEnd {
    /// Exact: `epoch` is the largest one here at or below the epoch asked (the epoch asked itself when it lies below
    /// everything the log holds), and ends at `end` (exclusive).
    Known { epoch: LeaderEpoch, end: Offset },
    /// The epoch lies below the table, and the bound dropped entries there: ask the segments' epoch slices.
    /// What remains of the table starts at `first_start`.
    Older { first_start: Offset },
    /// The table is empty: this log never saw an epoch.
    Empty,
}

/// The table; see the module's invariants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EpochTable {
    entries: VecDeque<EpochEntry>,
    max_entries: usize,
    bounded: bool,
}

impl Default for EpochTable {
    fn default() -> EpochTable {
        EpochTable::new(DEFAULT_MAX_ENTRIES)
    }
}

impl EpochTable {
    /// An empty table of at most `max_entries` (at least 1) entries.
    #[must_use]
    pub fn new(max_entries: usize) -> EpochTable {
        EpochTable {
            entries: VecDeque::new(),
            max_entries: max_entries.max(1),
            bounded: false,
        }
    }

    /// Enters that records from `start` on belong to `epoch`. Called for an `EpochStart` and for each batch.
    ///
    /// # Errors
    /// See [`AssignError`]; the table is unchanged.
    pub fn assign(&mut self, epoch: LeaderEpoch, start: Offset) -> Result<Assigned, AssignError> {
        let new = EpochEntry { epoch, start };
        let done = match self.entries.back_mut() {
            None => Assigned::Added,
            Some(last) if epoch < last.epoch => {
                return Err(AssignError::StaleEpoch {
                    asked: epoch,
                    last: last.epoch,
                });
            }
            Some(last) if start < last.start => {
                return Err(AssignError::StartBelowLast {
                    epoch,
                    start,
                    last_start: last.start,
                });
            }
            Some(last) if epoch == last.epoch => Assigned::Unchanged,
            Some(last) if start == last.start => {
                *last = new;
                Assigned::Replaced
            }
            Some(_) => Assigned::Added,
        };
        if done == Assigned::Added {
            self.entries.push_back(new);
            self.enforce_bound();
        }
        Ok(done)
    }

    fn enforce_bound(&mut self) {
        while self.entries.len() > self.max_entries {
            self.entries.pop_front();
            self.bounded = true;
        }
    }

    /// The log was cut to end at `end`: drops the epochs that start at or beyond it. Called also when no byte was
    /// cut (an empty epoch at the log's end goes). Whether the table changed.
    ///
    /// When this empties a [`EpochTable::bounded`] table while the log still holds records, the table must be
    /// rebuilt from the segments.
    pub fn truncate_from_end(&mut self, end: Offset) -> bool {
        let keep = self.entries.partition_point(|entry| entry.start < end);
        self.cut_to(keep)
    }

    /// Recovery: drops entries beyond `log_end`, which no record can belong to. An empty epoch that starts at
    /// `log_end` stays. Whether the table changed.
    pub fn drop_above(&mut self, log_end: Offset) -> bool {
        let keep = self.entries.partition_point(|entry| entry.start <= log_end);
        self.cut_to(keep)
    }

    fn cut_to(&mut self, keep: usize) -> bool {
        let changed = keep < self.entries.len();
        self.entries.truncate(keep);
        changed
    }

    /// The log now starts at `start`: keeps the newest entry at or below it, moved to it, and all after.
    /// Whether the table changed.
    pub fn truncate_from_start(&mut self, start: Offset) -> bool {
        let below = self.entries.partition_point(|entry| entry.start <= start);
        let Some(newest) = below.checked_sub(1) else {
            return false;
        };
        self.entries.drain(..newest);
        // What the bound dropped lies below the log's start now.
        let was_bounded = std::mem::take(&mut self.bounded);
        let mut moved = false;
        if let Some(first) = self.entries.front_mut() {
            moved = first.start != start;
            first.start = start;
        }
        moved || newest > 0 || was_bounded
    }

    /// Where `epoch` ends in this log; see [`EpochEnd`].
    #[must_use]
    pub fn end_offset_for(&self, epoch: LeaderEpoch, log_end: Offset) -> EpochEnd {
        let Some(first) = self.entries.front() else {
            return EpochEnd::Empty;
        };
        let above = self.entries.partition_point(|entry| entry.epoch <= epoch);
        let Some(at) = above.checked_sub(1) else {
            let first_start = first.start;
            return if self.bounded {
                EpochEnd::Older { first_start }
            } else {
                EpochEnd::Known {
                    epoch,
                    end: first_start,
                }
            };
        };
        EpochEnd::Known {
            epoch: self.entries[at].epoch,
            end: self.entries.get(above).map_or(log_end, |next| next.start),
        }
    }

    /// Epoch of the record at `offset`, or that it would have at the log's end. `None` below the first entry.
    #[must_use]
    pub fn epoch_at(&self, offset: Offset) -> Option<LeaderEpoch> {
        let above = self.entries.partition_point(|entry| entry.start <= offset);
        let at = above.checked_sub(1)?;
        Some(self.entries[at].epoch)
    }

    /// Whether a batch with these offsets may carry `epoch`: all of it lies within that epoch. Below the first entry,
    /// where the bound dropped entries or the log start moved the first one up, any epoch up to the first is possible:
    /// a segment is walked from its base, also where the log starts in its middle.
    #[must_use]
    pub fn allows(&self, first: Offset, last: Offset, epoch: LeaderEpoch) -> bool {
        match (self.epoch_at(first), self.first()) {
            (Some(found), _) => found == epoch && self.epoch_at(last) == Some(epoch),
            (None, Some(oldest)) if last < oldest.start => epoch <= oldest.epoch,
            (None, Some(oldest)) => epoch == oldest.epoch && self.epoch_at(last) == Some(epoch),
            (None, None) => true,
        }
    }

    /// The entries that matter to offsets `from..to` (of a segment), the first one moved up to `from` so that the
    /// slice stands on its own.
    pub fn slice(&self, from: Offset, to: Offset) -> impl Iterator<Item = EpochEntry> {
        let first = self
            .entries
            .partition_point(|entry| entry.start <= from)
            .saturating_sub(1);
        self.entries
            .range(first..)
            .take_while(move |entry| entry.start < to && from < to)
            .map(move |entry| EpochEntry {
                epoch: entry.epoch,
                start: entry.start.max(from),
            })
    }

    /// The current epoch and its start.
    #[must_use]
    pub fn last(&self) -> Option<EpochEntry> {
        self.entries.back().copied()
    }

    /// The oldest entry.
    #[must_use]
    pub fn first(&self) -> Option<EpochEntry> {
        self.entries.front().copied()
    }

    /// All entries, oldest first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = EpochEntry> {
        self.entries.iter().copied()
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether the bound dropped epochs that the log still holds.
    #[must_use]
    pub fn bounded(&self) -> bool {
        self.bounded
    }

    /// Appends the table's snapshot form: u32 count, u8 bounded, then (u32 epoch, u64 start) each. The snapshot's
    /// checksum covers it.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        // max_entries bounds the length; a table beyond 4 Gi entries is out of reach of memory.
        out.put_u32(self.entries.len() as u32);
        out.put([u8::from(self.bounded)]);
        for entry in &self.entries {
            out.put_u32(entry.epoch.0);
            out.put_u64(entry.start.0);
        }
    }

    /// Reads the snapshot form from the front of `bytes`; the table and the bytes after it. `None` when it is none.
    /// A bound below the number of entries drops the oldest.
    #[must_use]
    pub fn decode(bytes: &[u8], max_entries: usize) -> Option<(EpochTable, &[u8])> {
        let mut reader = Reader::new(bytes);
        let count = reader.u32()? as usize;
        let bounded = match reader.u8()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let mut entries = Reader::new(reader.bytes(count.checked_mul(ENTRY_BYTES)?)?);
        let mut table = EpochTable::new(max_entries);
        for _ in 0..count {
            let entry = EpochEntry {
                epoch: LeaderEpoch(entries.u32()?),
                start: Offset(entries.u64()?),
            };
            if table.last().is_some_and(|last| !entry.follows(last)) {
                return None;
            }
            table.entries.push_back(entry);
        }
        table.bounded = bounded;
        table.enforce_bound();
        Some((table, reader.rest()))
    }

    /// Rebuilds a table from entries found elsewhere (checkpoint file, segment slices); entries that do not rise are
    /// where the good ones end. `bounded`: whether older epochs may exist in the log.
    #[must_use]
    pub fn from_entries(
        entries: impl IntoIterator<Item = EpochEntry>,
        max_entries: usize,
        bounded: bool,
    ) -> EpochTable {
        let mut table = EpochTable::new(max_entries);
        table.bounded = bounded;
        for entry in entries {
            if table.last().is_some_and(|last| !entry.follows(last)) {
                break;
            }
            table.entries.push_back(entry);
            table.enforce_bound();
        }
        table
    }
}

/// One line `epoch start_offset` per entry, oldest first.
impl fmt::Display for EpochTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entries
            .iter()
            .try_for_each(|entry| writeln!(f, "{} {}", entry.epoch, entry.start))
    }
}
