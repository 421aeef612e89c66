//! One partition's log in memory: offsets, segments, tables, and what waits for it.
//!
//! `log_start <= high_watermark <= log_end`, `durable_end <= log_end`, and on a leader without `durability=memory`
//! `high_watermark <= durable_end`. The last segment is the active one and always exists, in memory at least; segments
//! seal in order: sealed ones, then sealing ones, then the active one.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use crate::append::Waiting;
use crate::batch::BatchHeader;
use crate::epochs::EpochTable;
use crate::error::FenceReason;
use crate::index::SegmentKey;
use crate::io::DiskError;
use crate::producers::ProducerTable;
use crate::rebuild::Rebuild;
use crate::segment::{FileState, Segment, SegmentState};
use crate::snapshot::Entry;
use crate::store::{LogSettings, PartitionView};
use crate::types::{LeaderEpoch, Now, Offset, PartitionId, Pos};

/// Number of a log within its store; never reused within a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogNo(pub u32);

/// Whether the segments below the active one are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listing {
    /// Not looked at in this life.
    Unknown,
    /// The directory is being listed.
    Pending,
    /// All segments are in the list.
    Known,
}

/// Whether the partition's directory exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirState {
    /// Not looked at in this life.
    Unknown,
    /// Being made, or its `partition.meta` being written.
    Making,
    /// It exists and names its partition.
    Made,
}

/// What the log is going through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogState {
    /// Appends and reads.
    Open,
    /// A truncation waits for writes in flight, or for its record.
    Cutting { token: u64, to: Offset, recorded: bool },
    /// A drop waits for its record, then for its files.
    Dropping { token: u64 },
}

/// A range whose bytes are damaged on this replica; served never.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Offsets lost.
    pub offsets: Range<u64>,
    /// Segment that held them.
    pub segment: Offset,
    /// Bytes of the segment.
    pub bytes: Range<u64>,
}

/// One partition's log.
#[derive(Debug)]
pub struct Log {
    pub id: PartitionId,
    /// Topic name, for `partition.meta` and people.
    pub name: Box<str>,
    pub settings: LogSettings,
    /// Whether the owner asked for it in this life; others are strays: kept, not served.
    pub served: bool,
    pub log_start: Offset,
    /// Log start whose record is durable: only below it files may go, and only it is news for the owner.
    pub durable_start: Offset,
    pub high_watermark: Offset,
    pub durable_end: Offset,
    pub segments: VecDeque<Segment>,
    pub listing: Listing,
    /// Recovery let segments go whose files may still be there under their own names; a listing sets them aside.
    pub leftovers: bool,
    /// Segments that a cut reopened and whose `.index` files tell of bytes that are gone: set aside like the files of
    /// the segments above, before an index is written again.
    pub stale_indexes: BTreeSet<Offset>,
    /// Renames of its files (or its directory) to names set aside, in flight.
    pub renaming: u32,
    /// A name was set aside while the directory was being listed: it must be listed again.
    pub relist: bool,
    /// Base of the oldest segment that may exist on disk.
    pub oldest: Offset,
    pub epochs: EpochTable,
    /// `epochs` changed since the leader-epoch checkpoint was last written.
    pub epochs_dirty: bool,
    pub producers: ProducerTable,
    pub fenced: Option<FenceReason>,
    pub damage: Vec<Damage>,
    pub dir: DirState,
    /// Files of it are known to be on disk: a missing directory is damage.
    pub expects_dir: bool,
    pub state: LogState,
    /// Appends that wait for a place, for room, or for the end of another step; in order.
    pub(crate) waiting: VecDeque<Waiting>,
    /// In the store's queue for room.
    pub awaits_room: bool,
    /// In the write-back queue.
    pub queued: bool,
    /// A running checkpoint waits until the segments below this one are sealed and it is written up to here.
    pub pin: Option<(Offset, Pos)>,
    /// The drop's record is durable.
    pub dropped: bool,
    /// How many records the group commit had taken when the drop's record was handed to it.
    pub drop_seq: u64,
    /// Bases of the newest segments whose `.producers` files are known to be whole and to tell of this log, rising.
    pub trusted_producers: Vec<Offset>,
    /// The producer table is being built again.
    pub rebuild: Option<Box<Rebuild>>,
    /// Mono time before which a refused allocation is not tried again.
    pub place_retry_at: u64,
    /// Why the last try failed; tells appends until then.
    pub place_error: DiskError,
    /// Bytes of the next allocation.
    pub place_step: u64,
    /// [`crate::canary::Canary::DropByName`].
    #[cfg(feature = "canary")]
    pub dir_by_name: bool,
}

impl Log {
    /// A new, empty log.
    #[must_use]
    pub fn new(
        id: PartitionId,
        name: &str,
        settings: LogSettings,
        epochs: EpochTable,
        producers: ProducerTable,
    ) -> Log {
        Log {
            id,
            name: name.into(),
            settings,
            served: false,
            log_start: Offset(0),
            durable_start: Offset(0),
            high_watermark: Offset(0),
            durable_end: Offset(0),
            segments: VecDeque::from([Segment::empty(id, Offset(0))]),
            listing: Listing::Known,
            leftovers: false,
            stale_indexes: BTreeSet::new(),
            renaming: 0,
            relist: false,
            oldest: Offset(0),
            epochs,
            epochs_dirty: false,
            producers,
            fenced: None,
            damage: Vec::new(),
            dir: DirState::Unknown,
            expects_dir: false,
            state: LogState::Open,
            waiting: VecDeque::new(),
            awaits_room: false,
            queued: false,
            pin: None,
            dropped: false,
            drop_seq: 0,
            trusted_producers: Vec::new(),
            rebuild: None,
            place_retry_at: 0,
            place_error: DiskError::NoSpace,
            place_step: 64 << 10,
            #[cfg(feature = "canary")]
            dir_by_name: false,
        }
    }

    /// The active segment.
    #[must_use]
    pub fn active(&self) -> &Segment {
        self.segments.back().expect("a log always has its active segment")
    }

    /// The active segment.
    pub fn active_mut(&mut self) -> &mut Segment {
        self.segments
            .back_mut()
            .expect("a log always has its active segment")
    }

    /// Next offset to assign.
    #[must_use]
    pub fn log_end(&self) -> Offset {
        self.active().next
    }

    /// Current leader epoch; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> LeaderEpoch {
        self.epochs.last().map(|entry| entry.epoch).unwrap_or_default()
    }

    /// What the owner may know.
    #[must_use]
    pub fn view(&self) -> PartitionView {
        PartitionView {
            log_start: self.log_start,
            log_end: self.log_end(),
            durable_end: self.durable_end,
            epoch: self.epoch(),
            fenced: self.fenced,
        }
    }

    /// Index in `segments` of the segment that holds `offset` (the active one for the end), when it is known.
    #[must_use]
    pub fn segment_at(&self, offset: Offset) -> Option<usize> {
        self.segments
            .partition_point(|segment| segment.base <= offset)
            .checked_sub(1)
    }

    /// The segment that begins at `base`.
    pub fn segment_mut(&mut self, base: Offset) -> Option<&mut Segment> {
        let at = self.segment_at(base)?;
        self.segments.get_mut(at).filter(|segment| segment.base == base)
    }

    /// The segment that begins at `base`.
    #[must_use]
    pub fn segment(&self, base: Offset) -> Option<&Segment> {
        self.segments
            .get(self.segment_at(base)?)
            .filter(|segment| segment.base == base)
    }

    /// Recovery: lets segments go that lie wholly below the log start. Their files may have been set aside already.
    fn forget_below_start(&mut self) {
        let active = self.active();
        if active.next <= self.log_start && active.next > active.base {
            // Retention rolled before it emptied the log; a roll without a batch after it is not in the journal.
            let end = self.log_end();
            self.push_segment(end);
        }
        while self.segments.len() > 1 && self.segments[0].next <= self.log_start {
            self.segments.pop_front();
            self.oldest = self.segments[0].base;
            self.leftovers = true;
        }
    }

    /// Recovery is done: what the directory holds is not known. Where more than one segment is open, files of segments
    /// that were cut or never used may lie between them.
    pub fn recovered(&mut self) {
        self.durable_start = self.log_start;
        self.forget_below_start();
        self.listing = Listing::Unknown;
        self.leftovers |= self.segments.len() > 1 || !self.stale_indexes.is_empty();
    }

    /// Base of the oldest segment that is not sealed.
    #[must_use]
    pub fn first_unsealed(&self) -> Option<Offset> {
        let unsealed = self.segments.iter().rev();
        let unsealed = unsealed.take_while(|s| s.state() != SegmentState::Sealed);
        unsealed.last().map(|s| s.base)
    }

    /// Whether everything that a checkpoint must find in files is there.
    #[must_use]
    pub fn is_written(&self) -> bool {
        self.segments
            .iter()
            .rev()
            .take_while(|s| s.state() != SegmentState::Sealed)
            .all(Segment::is_written)
    }

    /// Whether a write-back or an allocation of its segments is in flight.
    #[must_use]
    pub fn is_writing(&self) -> bool {
        self.segments
            .iter()
            .any(|s| !s.in_flight.is_empty() || s.allocating.is_some())
    }

    /// Whether a segment is between its last append and its exact length on disk.
    #[must_use]
    pub fn is_sealing(&self) -> bool {
        self.segments.iter().any(|s| s.state() == SegmentState::Sealing)
    }

    /// Whether an operation on its files is in flight that must end before they are set aside.
    #[must_use]
    pub fn is_busy_on_disk(&self) -> bool {
        let busy = |s: &Segment| s.file == FileState::Opening || s.readers > 0 || s.cutting || s.is_loading();
        self.is_writing()
            || self.renaming > 0
            || self.dir == DirState::Making
            || self.listing == Listing::Pending
            || self.rebuild.as_ref().is_some_and(|r| r.is_in_file())
            || self.segments.iter().any(busy)
    }

    /// Whether its bytes may be written back: not while the place of a cut is looked for or its record is on its way,
    /// when nothing may be in flight; but what seals must be finished before.
    #[must_use]
    pub fn may_write_back(&self) -> bool {
        let cutting = matches!(self.state, LogState::Cutting { .. });
        self.fenced.is_none() && !self.is_dropping() && (!cutting || self.is_sealing())
    }

    /// Bytes that count against the budget for bytes on their way to files: those of a fenced log go nowhere.
    #[must_use]
    pub fn counted_dirty(&self) -> u64 {
        if self.fenced.is_some() { 0 } else { self.dirty() }
    }

    /// Whether a cut is carried out in memory and its record not durable yet: files above it must stay.
    #[must_use]
    pub fn is_cut_undecided(&self) -> bool {
        matches!(self.state, LogState::Cutting { recorded: true, .. })
    }

    /// Whether it is on its way out.
    #[must_use]
    pub fn is_dropping(&self) -> bool {
        matches!(self.state, LogState::Dropping { .. })
    }

    /// Whether what a checkpoint captured is written.
    #[must_use]
    pub fn pin_satisfied(&self) -> bool {
        let Some((base, pos)) = self.pin else { return false };
        let behind = |s: &Segment| match s.state() {
            SegmentState::Sealed => false,
            SegmentState::Sealing => true,
            SegmentState::Active => s.base < base || (s.base == base && s.written < pos),
        };
        // A cut may have removed what was captured: what is left counts.
        self.fenced.is_some() || !self.segments.iter().rev().filter(|s| s.base <= base).any(behind)
    }

    /// Bytes accepted and not yet in files.
    #[must_use]
    pub fn dirty(&self) -> u64 {
        self.segments.iter().map(Segment::dirty).sum()
    }

    /// Bytes of memory that its tails hold.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.segments.iter().map(|s| s.tail.memory()).sum()
    }

    /// Whether the active segment must be closed before a batch of `len` bytes.
    #[must_use]
    pub fn wants_roll(&self, now: Now, header: &BatchHeader, len: u64) -> bool {
        let active = self.active();
        if active.next == active.base {
            return false;
        }
        let end = active.end().plus(len);
        let next = active.next.plus(header.next_offset().0 - header.base_offset.0);
        let key = SegmentKey {
            partition: self.id,
            base: active.base,
        };
        let age = now.wall_ms.saturating_sub(active.first_append_ms);
        let old =
            active.first_append_ms > 0 && u64::try_from(age).is_ok_and(|age| age >= self.settings.segment_ms);
        end.0 > self.settings.segment_bytes || !key.fits(end, next) || old
    }

    /// Whether every record of the active segment is past `retention.ms`.
    #[must_use]
    pub fn active_expired(&self, wall_ms: i64) -> bool {
        let active = self.active();
        let Some(keep) = self.settings.retention_ms.filter(|_| active.next > active.base) else {
            return false;
        };
        let Some(newest) = active.max_timestamp().filter(|_| !active.is_untimed()) else {
            return false;
        };
        let age = wall_ms.saturating_sub(newest.min(wall_ms));
        u64::try_from(age).is_ok_and(|age| age > keep)
    }

    /// Adds a new active segment that begins at `base`.
    pub fn push_segment(&mut self, base: Offset) {
        self.segments.push_back(Segment::empty(self.id, base));
    }

    /// A log as a snapshot tells it.
    #[must_use]
    pub fn restored(entry: &Entry) -> Log {
        let (epochs, producers) = (entry.epochs.clone(), entry.producers.clone());
        let mut log = Log::new(entry.id, "", LogSettings::default(), epochs, producers);
        log.segments = entry
            .segments
            .iter()
            .map(|s| Segment::resumed(entry.id, s.base, s.next, s.end, &s.tail))
            .collect();
        let last = log.segments.len() - 1;
        log.segments
            .iter_mut()
            .take(last)
            .for_each(|s| s.set_state(SegmentState::Sealing));
        log.log_start = entry.log_start;
        log.high_watermark = entry.high_watermark;
        log.durable_end = log.log_end();
        log.oldest = entry.oldest;
        log.fenced = entry.damaged.then_some(FenceReason::Damaged);
        log.damage = entry.damage.clone();
        log.trusted_producers = entry.trusted_producers.clone();
        log.listing = if log.oldest < log.segments[0].base {
            Listing::Unknown
        } else {
            Listing::Known
        };
        log.expects_dir = log.listing == Listing::Unknown || log.segments.iter().any(|s| s.written > Pos(0));
        log
    }

    /// Raises the log start in memory.
    pub fn raise_start(&mut self, start: Offset) {
        self.log_start = self.log_start.max(start.min(self.log_end()));
        self.high_watermark = self.high_watermark.max(self.log_start);
        self.epochs.truncate_from_start(self.log_start);
        self.epochs_dirty = true;
        let start = self.log_start.0;
        self.damage.retain(|damage| damage.offsets.end > start);
    }

    /// The damaged range that contains `offset`.
    #[must_use]
    pub fn damage_at(&self, offset: Offset) -> Option<&Damage> {
        self.damage
            .iter()
            .find(|damage| damage.offsets.contains(&offset.0))
    }

    /// The first damaged range that meets `from..to`.
    #[must_use]
    pub fn damage_in(&self, from: Offset, to: Offset) -> Option<&Damage> {
        self.damage
            .iter()
            .find(|damage| damage.offsets.start < to.0 && from.0 < damage.offsets.end)
    }

    /// Directory of the partition, relative to the data directory.
    #[must_use]
    pub fn dir(&self) -> String {
        #[cfg(feature = "canary")]
        if self.dir_by_name {
            return format!("logs/{}", self.name);
        }
        format!("logs/{}", self.id.dir_name())
    }

    /// Path of a file that belongs to the segment at `base`.
    #[must_use]
    pub fn path(&self, base: Offset, extension: &str) -> String {
        format!("{}/{:020}.{extension}", self.dir(), base.0)
    }

    /// Applies a replayed or decided cut to memory. `pos` is the byte of `offset` in the segment at `segment`;
    /// `prefix` holds the bytes of its block before it. Segments above are forgotten; returns them.
    pub fn cut(&mut self, offset: Offset, segment: Offset, pos: Pos, prefix: &[u8]) -> Vec<Segment> {
        let last = self.active();
        let nothing_goes = (last.base, last.end()) == (segment, pos) && last.state() == SegmentState::Active;
        let mut gone = Vec::new();
        while self.segments.back().is_some_and(|s| s.base > segment) {
            gone.extend(self.segments.pop_back());
        }
        match self.segments.back_mut().filter(|s| s.base == segment) {
            Some(last) => last.reopen(self.id, pos, offset, prefix),
            None => {
                // Replay: a roll without a batch behind it is not in the journal, a cut at its segment's start is.
                if let Some(last) = self.segments.back_mut().filter(|s| s.next > s.base) {
                    last.set_state(SegmentState::Sealing);
                }
                self.segments
                    .push_back(Segment::resumed(self.id, segment, offset, pos, prefix));
            }
        }
        if !nothing_goes {
            // Entries above the cut would pass for entries of what is appended there: offsets and positions may agree.
            self.active_mut().index_distrusted = true;
            self.stale_indexes.insert(segment);
        }
        self.producers.truncate(offset);
        self.trusted_producers.retain(|base| *base <= segment);
        self.oldest = self.oldest.min(segment);
        self.log_start = self.log_start.min(offset);
        self.durable_start = self.durable_start.min(offset);
        self.high_watermark = self.high_watermark.min(offset);
        self.durable_end = self.durable_end.min(offset);
        self.epochs.truncate_from_end(offset);
        self.epochs_dirty = true;
        self.damage.retain_mut(|damage| {
            damage.offsets.end = damage.offsets.end.min(offset.0);
            !damage.offsets.is_empty()
        });
        gone
    }
}
