//! Loading and writing of segment indexes: the file's good prefix first, then a walk over the segment's bytes.
//!
//! An index is derived from the log and never evidence about it: missing or bad parts cost a walk. Full blocks are
//! written when write-back has passed them; a sealed segment's last block and seal follow its last byte.

use crate::index::{self, IndexBuilder, SegmentIndex, SegmentKey, WalkStop};
use crate::io::{DiskError, DiskOp, Done, FileClass, FileId, OpenHow};
use crate::limits::BLOCK;
use crate::log::{Damage, LogNo};
use crate::segment::{FileState, IndexState, Segment, SegmentState};
use crate::small::SmallKind;
use crate::store::{Outbox, Pending, Store};
use crate::types::{Now, Offset, Pos};

const B: u64 = BLOCK as u64;
/// Bytes of one read of a walk.
const STEP: u64 = 1 << 20;
/// No index file of a segment is larger.
const MAX_INDEX_FILE: u64 = 16 << 20;

/// What a load waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Open {
        file: FileId,
    },
    Read {
        file: FileId,
    },
    /// The segment's file is being opened.
    Segment,
    /// Bytes of the segment from this block on.
    Walk {
        from: Pos,
    },
}

/// A load under way.
#[derive(Debug)]
pub struct Load {
    builder: IndexBuilder,
    step: Step,
    /// Bytes that the next read must bring at least.
    needed: u64,
    /// The builder began with what the index file, or the index before a cut, said.
    from_file: bool,
}

impl Load {
    /// End of the window that the next step of the walk looks at.
    fn window_end(&self, end: Pos) -> Pos {
        self.builder.end().plus(STEP.max(self.needed)).min(end)
    }
}

impl Store {
    /// Starts loading the index of a segment, unless it is loaded or being loaded.
    pub(crate) fn load_index(&mut self, no: LogNo, base: Offset, out: &mut Outbox) {
        let Some(log) = self.log(no) else { return };
        let key = SegmentKey {
            partition: log.id,
            base,
        };
        let path = log.path(base, "index");
        let segment = self.log_mut(no).and_then(|log| log.segment_mut(base));
        let Some(segment) = segment.filter(|s| matches!(s.index, IndexState::Unloaded)) else {
            return;
        };
        let kept = segment.index_kept.take();
        let file = self.ops.file();
        let load = Load {
            from_file: kept.is_some(),
            builder: kept.map_or_else(|| IndexBuilder::new(key), IndexBuilder::resume),
            step: Step::Open { file },
            needed: 0,
        };
        self.set_index(no, base, IndexState::Loading(Box::new(load)));
        let how = OpenHow {
            class: FileClass::Index,
            create: false,
            write: false,
        };
        let op = self.ops.id(Pending::IndexLoad { log: no, base });
        out.ops.push((op, DiskOp::Open { file, path, how }));
    }

    fn set_index(&mut self, no: LogNo, base: Offset, index: IndexState) {
        if let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) {
            segment.index = index;
        }
    }

    /// Forgets an index that disagrees with good bytes; it is rebuilt by a walk from the segment's start.
    pub(crate) fn drop_index(&mut self, no: LogNo, base: Offset) {
        let segment = self.log_mut(no).and_then(|log| log.segment_mut(base));
        if let Some(segment) = segment
            && let IndexState::Ready(builder) = &segment.index
        {
            segment.index_hint = Some(builder.index().clone());
            segment.index = IndexState::Unloaded;
            segment.index_distrusted = true;
            segment.index_blocks = 0;
        }
    }

    /// Takes in the end of a step of a load.
    pub(crate) fn index_step(
        &mut self,
        now: Now,
        no: LogNo,
        base: Offset,
        result: Result<Done, DiskError>,
        out: &mut Outbox,
    ) {
        let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
            return;
        };
        let IndexState::Loading(load) = &mut segment.index else {
            return;
        };
        match (load.step, result) {
            (Step::Open { file }, Ok(Done::Opened { len })) if len > 0 && !segment.index_distrusted => {
                load.step = Step::Read { file };
                let len = len.min(MAX_INDEX_FILE) as usize;
                let op = self.ops.id(Pending::IndexLoad { log: no, base });
                out.ops.push((op, DiskOp::Read { file, pos: 0, len }));
            }
            (Step::Open { file }, Ok(_)) => {
                self.close_file(file, out);
                self.walk_on(now, no, base, out);
            }
            (Step::Open { file }, Err(_)) => {
                self.ops.free_file(file);
                self.walk_on(now, no, base, out);
            }
            (Step::Read { file }, result) => {
                self.close_file(file, out);
                if let Ok(Done::Read(bytes)) = result {
                    self.take_index_file(no, base, &bytes);
                }
                self.walk_on(now, no, base, out);
            }
            (Step::Walk { from }, Ok(Done::Read(bytes))) => self.walked(now, no, base, from, &bytes, out),
            (Step::Walk { .. }, Err(error)) => {
                self.set_index(no, base, IndexState::Unloaded);
                self.reads_of_segment_failed(now, no, base, error, out);
            }
            (Step::Segment | Step::Walk { .. }, _) => {}
        }
    }

    fn take_index_file(&mut self, no: LogNo, base: Offset, bytes: &[u8]) {
        let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
            return;
        };
        let (end, next) = (segment.end(), segment.next);
        let IndexState::Loading(load) = &mut segment.index else {
            return;
        };
        let mut read = index::decode(load.builder.key(), bytes);
        read.index.truncate(end);
        if read.index.next_offset() > next {
            // It tells of another end of the segment.
            return;
        }
        segment.index_blocks = read.index.full_blocks();
        segment.index_sealed = read.seal.is_some() && read.index.end() == end;
        load.builder = IndexBuilder::resume(read.index);
        load.from_file = true;
    }

    /// Walks on from the builder's end: over the file below the tail, then over memory.
    pub(crate) fn walk_on(&mut self, now: Now, no: LogNo, base: Offset, out: &mut Outbox) {
        let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
            return;
        };
        let (file, end, tail_start) = (segment.file, segment.end(), segment.tail.start());
        let IndexState::Loading(load) = &mut segment.index else {
            return;
        };
        let at = load.builder.end();
        if at >= tail_start || at >= end {
            self.walk_memory(now, no, base, out);
            return;
        }
        match file {
            FileState::Open(file) => {
                let from = at.floor(B);
                let to = load.window_end(end).min(tail_start).ceil(B);
                load.step = Step::Walk { from };
                let op = self.ops.id(Pending::IndexLoad { log: no, base });
                out.ops.push((
                    op,
                    DiskOp::Read {
                        file,
                        pos: from.0,
                        len: (to.0 - from.0) as usize,
                    },
                ));
            }
            FileState::Closed => {
                load.step = Step::Segment;
                self.open_segment(no, base, false, out);
            }
            FileState::Opening => load.step = Step::Segment,
        }
    }

    /// A load that waits for its segment's file has waited in vain: the next reader begins anew.
    pub(crate) fn give_up_load(&mut self, no: LogNo, base: Offset) {
        if let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base))
            && matches!(&segment.index, IndexState::Loading(load) if load.step == Step::Segment)
        {
            segment.index = IndexState::Unloaded;
        }
    }

    /// A load that waits for its segment's file goes on.
    pub(crate) fn resume_load(&mut self, now: Now, no: LogNo, base: Offset, out: &mut Outbox) {
        let segment = self.log(no).and_then(|log| log.segment(base));
        if segment
            .is_some_and(|s| matches!(&s.index, IndexState::Loading(load) if load.step == Step::Segment))
        {
            self.walk_on(now, no, base, out);
        }
    }

    /// Bytes of the file came back: walks them, with what follows in memory when the window reaches there.
    fn walked(&mut self, now: Now, no: LogNo, base: Offset, from: Pos, read: &[u8], out: &mut Outbox) {
        let Some(log) = self.logs.get_mut(no.0 as usize).and_then(|l| l.as_deref_mut()) else {
            return;
        };
        let Some(at) = log.segment_at(base) else { return };
        let Some(segment) = log.segments.get_mut(at).filter(|s| s.base == base) else {
            return;
        };
        let (end, tail_start) = (segment.end(), segment.tail.start());
        let IndexState::Loading(load) = &mut segment.index else {
            return;
        };
        let (at, to) = (load.builder.end(), load.window_end(end));
        // The tail may have moved while the read was in flight: bytes it no longer holds are read again.
        let in_file = to
            .min(tail_start.max(at))
            .min(from.plus(read.len() as u64))
            .max(at);
        let skip = (at.0 - from.0) as usize;
        let mut bytes = read
            .get(skip..(in_file.0 - from.0) as usize)
            .unwrap_or_default()
            .to_vec();
        if in_file >= tail_start && to > in_file {
            bytes.extend(
                segment
                    .tail
                    .slices(in_file, to)
                    .iter()
                    .flat_map(|s| s.iter().copied()),
            );
        }
        let had = bytes.len();
        load.builder.set_limit(segment.next);
        let stop = index::walk(&mut load.builder, &bytes, Some(&log.epochs));
        let moved = load.builder.end() > at;
        match stop {
            WalkStop::Fault(fault) => self.walk_failed(now, no, base, &fault.to_string(), out),
            WalkStop::Incomplete { needed } if load.builder.end().plus(needed as u64) > end => {
                self.walk_failed(now, no, base, "the last batch is cut short", out);
            }
            WalkStop::Incomplete { needed } if moved || needed as u64 > load.needed => {
                load.needed = needed as u64;
                self.walk_on(now, no, base, out);
            }
            WalkStop::End if had > 0 => {
                load.needed = 0;
                self.walk_on(now, no, base, out);
            }
            WalkStop::End | WalkStop::Incomplete { .. } => {
                self.walk_failed(now, no, base, "the file ends too early", out);
            }
        }
    }

    /// Walks what is in memory, which ends the load.
    fn walk_memory(&mut self, now: Now, no: LogNo, base: Offset, out: &mut Outbox) {
        let Some(log) = self.logs.get_mut(no.0 as usize).and_then(|l| l.as_deref_mut()) else {
            return;
        };
        let Some(at) = log.segment_at(base) else { return };
        let Some(segment) = log.segments.get_mut(at).filter(|s| s.base == base) else {
            return;
        };
        let end = segment.end();
        let IndexState::Loading(load) = &mut segment.index else {
            return;
        };
        load.builder.set_limit(segment.next);
        let mut window = vec![0; STEP as usize];
        let mut fault = None;
        while load.builder.end() < end && fault.is_none() {
            let had = segment.tail.copy_to(load.builder.end(), &mut window);
            match index::walk(&mut load.builder, &window[..had], Some(&log.epochs)) {
                WalkStop::End => {}
                WalkStop::Incomplete { needed } if load.builder.end().plus(needed as u64) <= end => {
                    window.resize(window.len().max(needed), 0);
                }
                WalkStop::Incomplete { .. } => fault = Some("the last batch is cut short".to_owned()),
                WalkStop::Fault(found) => fault = Some(found.to_string()),
            }
        }
        match fault {
            Some(why) => self.walk_failed(now, no, base, &why, out),
            None => self.index_loaded(now, no, base, out),
        }
    }

    /// Skips bytes that are known to be damaged and begin where the walk stands. Whether there were any.
    fn skip_known_damage(&mut self, no: LogNo, base: Offset) -> bool {
        let Some(log) = self.log_mut(no) else { return false };
        let Some(at) = log.segment_at(base) else {
            return false;
        };
        let segment = &mut log.segments[at];
        let IndexState::Loading(load) = &mut segment.index else {
            return false;
        };
        let (pos, first) = (load.builder.end(), load.builder.next_offset());
        let hint = segment.index_hint.as_ref().and_then(|hint| hint.covering(pos));
        let known = log
            .damage
            .iter()
            .find(|d| d.segment == base && d.bytes.start == pos.0 && d.offsets.start == first.0);
        let skipped = known.is_some_and(|d| {
            let (end, next) = (Pos(d.bytes.end), Offset(d.offsets.end));
            // Lookups by time pass over what an index of these bytes knows to be too old.
            let told = hint.filter(|i| i.first <= first && next <= i.next && end <= i.end);
            load.builder
                .add_hole(end, next, told.map_or(-1, |i| i.max_timestamp))
        });
        if skipped {
            load.needed = 0;
        }
        skipped
    }

    /// The bytes from the builder's end on are no continuation: they are damaged up to the segment's end, unless it is
    /// known, or told by an index that is no longer believed, how far the damage reaches. What follows is walked, so a
    /// wrong hint costs nothing.
    fn walk_failed(&mut self, now: Now, no: LogNo, base: Offset, why: &str, out: &mut Outbox) {
        if self.skip_known_damage(no, base) {
            self.walk_on(now, no, base, out);
            return;
        }
        let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
            return;
        };
        let (end, next) = (segment.end(), segment.next);
        let IndexState::Loading(load) = &mut segment.index else {
            return;
        };
        if std::mem::take(&mut load.from_file) {
            // An index file from before a cut may reach anywhere: it is no evidence about the segment.
            let rebuilt = IndexBuilder::new(load.builder.key());
            let distrusted = std::mem::replace(&mut load.builder, rebuilt);
            load.needed = 0;
            segment.index_hint = Some(distrusted.into_index());
            segment.index_blocks = 0;
            segment.index_sealed = false;
            self.walk_on(now, no, base, out);
            return;
        }
        let (at, first) = (load.builder.end(), load.builder.next_offset());
        tracing::error!(segment = base.0, at = at.0, "walking a segment stopped: {why}");
        let hinted = segment
            .index_hint
            .as_ref()
            .and_then(|hint| hint.covering(at))
            .filter(|i| (i.first..i.next).contains(&first) && i.next <= next && i.end <= end);
        let (next, end) = hinted.map_or((next, end), |i| (i.next, i.end));
        let damage = Damage {
            offsets: first.0..next.0,
            segment: base,
            bytes: at.0..end.0,
        };
        self.note_damage(no, damage);
        if hinted.is_some() && self.skip_known_damage(no, base) {
            self.walk_on(now, no, base, out);
        } else {
            self.index_loaded(now, no, base, out);
        }
    }

    fn index_loaded(&mut self, now: Now, no: LogNo, base: Offset, out: &mut Outbox) {
        let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
            return;
        };
        let index = std::mem::replace(&mut segment.index, IndexState::Unloaded);
        if let IndexState::Loading(load) = index {
            segment.index = IndexState::Ready(load.builder);
        }
        segment.index_distrusted = false;
        segment.index_hint = None;
        if segment.state() == SegmentState::Sealed {
            self.write_seal(no, base, out);
        }
        self.resume_reads(now, no, base, out);
    }

    /// Writes the full index blocks that write-back has passed.
    pub(crate) fn write_index_blocks(&mut self, no: LogNo, base: Offset, out: &mut Outbox) {
        let Some(segment) = self.log(no).and_then(|log| log.segment(base)) else {
            return;
        };
        let IndexState::Ready(builder) = &segment.index else {
            return;
        };
        let index = builder.index();
        let from = segment.index_blocks;
        let passed = |block: &usize| {
            index
                .get((block + 1) * index::BLOCK_ENTRIES - 1)
                .is_some_and(|last| last.end <= segment.written)
        };
        let to = (from..index.full_blocks())
            .take_while(passed)
            .last()
            .map_or(from, |block| block + 1);
        self.write_blocks(no, base, from, to, false, out);
    }

    /// Writes the seals that waited for renames to end.
    pub(crate) fn write_seals(&mut self, no: LogNo, out: &mut Outbox) {
        let sealed = |s: &&Segment| s.state() == SegmentState::Sealed && !s.index_sealed;
        let bases: Vec<Offset> = self.log(no).map_or_else(Vec::new, |log| {
            log.segments.iter().filter(sealed).map(|s| s.base).collect()
        });
        for base in bases {
            self.write_seal(no, base, out);
        }
    }

    /// Writes the rest of a sealed segment's index, and its seal.
    pub(crate) fn write_seal(&mut self, no: LogNo, base: Offset, out: &mut Outbox) {
        let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
            return;
        };
        let end = segment.end();
        let IndexState::Ready(builder) = &mut segment.index else {
            return;
        };
        if segment.index_sealed || builder.end() < end {
            return;
        }
        builder.close();
        let (from, to) = (segment.index_blocks, builder.index().blocks());
        self.write_blocks(no, base, from, to, true, out);
    }

    fn write_blocks(
        &mut self,
        no: LogNo,
        base: Offset,
        from: usize,
        to: usize,
        seal: bool,
        out: &mut Outbox,
    ) {
        let kind = SmallKind::Index { segment: base };
        if (from == to && !seal) || self.small.is_writing(no, kind) {
            return;
        }
        let Some(log) = self.log_mut(no) else { return };
        // A file of the same name may be on its way out.
        if log.renaming > 0 || log.stale_indexes.contains(&base) {
            return;
        }
        let path = log.path(base, "index");
        let Some(segment) = log.segment_mut(base) else {
            return;
        };
        let IndexState::Ready(builder) = &segment.index else {
            return;
        };
        let index = builder.index();
        let mut bytes: Vec<u8> = (from..to)
            .filter_map(|block| index.encode_block(block))
            .flatten()
            .collect();
        if seal {
            bytes.extend(index.encode_seal());
        }
        segment.index_blocks = index.full_blocks().min(to);
        segment.index_sealed = seal;
        self.write_small(
            no,
            kind,
            FileClass::Index,
            path,
            from as u64 * B,
            &bytes,
            seal,
            out,
        );
    }
}

/// The largest timestamp of a segment whose index is loaded.
#[must_use]
pub fn newest_time(index: &IndexState) -> Option<i64> {
    match index {
        IndexState::Ready(builder) => Some(builder.max_timestamp()),
        IndexState::Unloaded | IndexState::Loading(_) => None,
    }
}

/// An empty index for a new segment.
#[must_use]
pub fn empty_index(key: SegmentKey) -> IndexState {
    IndexState::Ready(IndexBuilder::resume(SegmentIndex::new(key)))
}
