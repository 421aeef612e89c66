//! Placing: a partition's directory, its segment files and their allocation, made before bytes are accepted for them.
//!
//! Level-triggered: `Store::advance_place` looks at what a segment has and issues the next missing step; every
//! completion calls it again. So a full disk meets new produces, never acknowledged bytes (STORAGE.md section 3).

use crate::error::{AppendError, FenceReason};
use crate::io::{DiskError, DiskOp, Done, FileClass, FileId, OpenHow};
use crate::limits::{BLOCK, MAX_SEGMENT_BYTES};
use crate::log::{DirState, Listing, LogNo, LogState};
use crate::meta::PartitionMeta;
use crate::segment::{FileState, Segment, SegmentState};
use crate::small::SmallKind;
use crate::store::{Outbox, Pending, Store};
use crate::types::{Now, Offset, Pos};

const B: u64 = BLOCK as u64;
/// Largest step by which a segment is allocated ahead of need.
const MAX_STEP: u64 = 16 << 20;
/// Smallest step.
const MIN_STEP: u64 = 64 << 10;
/// How long a refused allocation is not tried again.
const RETRY_MS: u64 = 100;

/// What a segment needs next before it can take (or write back) its bytes.
enum Need {
    Directory,
    /// What the directory holds is not known, and a new segment must not meet an old file.
    Listing,
    File {
        create: bool,
    },
    Room {
        from: Pos,
        to: Pos,
    },
    Nothing,
}

impl Store {
    /// Issues the next missing step for the active segment and whatever waits to be appended to it.
    pub(crate) fn advance_active_place(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        if let Some(base) = self.log(no).map(|log| log.active().base) {
            self.advance_place(now, no, base, out);
        }
    }

    /// Issues the next missing step for the segment at `base`.
    pub(crate) fn advance_place(&mut self, now: Now, no: LogNo, base: Offset, out: &mut Outbox) {
        match self.place_need(no, base) {
            Need::Directory => self.make_directory(no, out),
            Need::Listing => self.list_segments(no, out),
            Need::File { create } => self.open_segment(no, base, create, out),
            Need::Room { from, to } => self.allocate(now, no, base, from, to, out),
            Need::Nothing => {}
        }
    }

    fn place_need(&self, no: LogNo, base: Offset) -> Need {
        let Some(log) = self.log(no) else {
            return Need::Nothing;
        };
        let Some(segment) = log.segment(base) else {
            return Need::Nothing;
        };
        let waits = matches!(log.state, LogState::Cutting { .. }) && !log.is_sealing();
        if log.is_dropping() || waits || self.fenced.is_some() {
            return Need::Nothing;
        }
        match (log.dir, segment.file) {
            (DirState::Unknown, _) => Need::Directory,
            (DirState::Making, _) | (_, FileState::Opening) => Need::Nothing,
            (DirState::Made, FileState::Closed)
                if segment.written == Pos(0) && log.listing != Listing::Known =>
            {
                Need::Listing
            }
            // A file of the same name may be on its way out (F30).
            (DirState::Made, FileState::Closed) if log.renaming > 0 => Need::Nothing,
            // A segment with bytes in its file must be there; one without may be new.
            (DirState::Made, FileState::Closed) => Need::File {
                create: segment.written == Pos(0),
            },
            (DirState::Made, FileState::Open(_)) => {
                let next = log.waiting.front().filter(|_| base == log.active().base);
                let waiting: u64 = next.map_or(0, |w| w.request.batch.len() as u64);
                room_need(segment, waiting, log.place_step, log.settings.segment_bytes)
            }
        }
    }

    fn make_directory(&mut self, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        log.dir = DirState::Making;
        let path = log.dir();
        let op = self.ops.id(Pending::MakeDir { log: no });
        out.ops.push((op, DiskOp::MakeDir { path }));
    }

    pub(crate) fn directory_made(
        &mut self,
        now: Now,
        no: LogNo,
        result: Result<Done, DiskError>,
        out: &mut Outbox,
    ) {
        let node = self.cfg.node;
        let Some(log) = self.log_mut(no) else { return };
        match result {
            // Snapshot or journal know files in it, and it was not there.
            Ok(_) if log.expects_dir => {
                log.dir = DirState::Unknown;
                self.fence_partition(no, FenceReason::FilesMissing, out);
            }
            Err(DiskError::Exists) if log.expects_dir => self.directory_ready(now, no, out),
            // A crash may have left the directory without its name.
            Ok(_) | Err(DiskError::Exists) => {
                // The owner has not named a stray, or not yet; its bytes go to their place all the same.
                let topic_name = match &*log.name {
                    "" => log.id.topic.to_string(),
                    name => name.to_owned(),
                };
                let meta = PartitionMeta {
                    topic_name,
                    partition: log.id,
                    node_id: node,
                };
                let path = format!("{}/partition.meta", log.dir());
                self.write_small(
                    no,
                    SmallKind::PartitionMeta,
                    FileClass::Meta,
                    path,
                    0,
                    &meta.encode(),
                    true,
                    out,
                );
            }
            Err(error) => {
                log.dir = DirState::Unknown;
                self.place_failed(now, no, error, out);
            }
        }
    }

    /// The directory exists and names its partition.
    pub(crate) fn directory_ready(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        if let Some(log) = self.log_mut(no) {
            log.dir = DirState::Made;
        }
        self.advance_open_segments(now, no, out);
    }

    /// Advances every segment that is not sealed.
    pub(crate) fn advance_open_segments(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log(no) else { return };
        let bases: Vec<Offset> = log
            .segments
            .iter()
            .filter(|s| s.state() != SegmentState::Sealed)
            .map(|s| s.base)
            .collect();
        for base in bases {
            self.advance_place(now, no, base, out);
        }
    }

    pub(crate) fn open_segment(&mut self, no: LogNo, base: Offset, create: bool, out: &mut Outbox) {
        let file = self.ops.file();
        let Some(log) = self.log_mut(no) else { return };
        let path = log.path(base, "log");
        if let Some(segment) = log.segment_mut(base) {
            segment.file = FileState::Opening;
        }
        let how = OpenHow {
            class: FileClass::Segment,
            create,
            write: true,
        };
        let op = self.ops.id(Pending::OpenSegment { log: no, base, file });
        out.ops.push((op, DiskOp::Open { file, path, how }));
    }

    pub(crate) fn segment_opened(
        &mut self,
        now: Now,
        no: LogNo,
        base: Offset,
        file: FileId,
        result: Result<Done, DiskError>,
        out: &mut Outbox,
    ) {
        let segment = self.log_mut(no).and_then(|log| log.segment_mut(base));
        let Some(segment) = segment else {
            // The segment went away meanwhile (retention, truncation, drop).
            match result {
                Ok(_) => self.close_file(file, out),
                Err(_) => self.ops.free_file(file),
            }
            return;
        };
        match result {
            Ok(_) => {
                segment.file = FileState::Open(file);
                if segment.state() == SegmentState::Sealed {
                    self.sealed_is_open(no, base, out);
                }
                self.advance_place(now, no, base, out);
                self.file_became_ready(now, no, base, out);
            }
            Err(error) => {
                segment.file = FileState::Closed;
                self.ops.free_file(file);
                self.segment_open_failed(now, no, base, error, out);
            }
        }
    }

    fn segment_open_failed(&mut self, now: Now, no: LogNo, base: Offset, error: DiskError, out: &mut Outbox) {
        self.give_up_load(no, base);
        self.reads_of_segment_failed(now, no, base, error, out);
        if error == DiskError::NotFound {
            self.fence_partition(no, FenceReason::FilesMissing, out);
        } else {
            self.place_failed(now, no, error, out);
        }
    }

    fn allocate(&mut self, now: Now, no: LogNo, base: Offset, from: Pos, to: Pos, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        if now.mono < log.place_retry_at {
            return;
        }
        log.place_step = (log.place_step * 2).min(MAX_STEP);
        let Some(segment) = log.segment_mut(base) else {
            return;
        };
        let FileState::Open(file) = segment.file else {
            return;
        };
        segment.allocating = Some(to);
        let op = self.ops.id(Pending::Allocate { log: no, base, to });
        out.ops.push((
            op,
            DiskOp::Allocate {
                file,
                pos: from.0,
                len: to.0 - from.0,
            },
        ));
    }

    pub(crate) fn allocated(
        &mut self,
        now: Now,
        no: LogNo,
        base: Offset,
        to: Pos,
        result: Result<Done, DiskError>,
        out: &mut Outbox,
    ) {
        let segment = self.log_mut(no).and_then(|log| log.segment_mut(base));
        let Some(segment) = segment else { return };
        segment.allocating = None;
        match result {
            Ok(_) => {
                segment.allocated = segment.allocated.max(to);
                self.write_back.full = false;
                self.segment_written(no, base, out);
                self.file_became_ready(now, no, base, out);
            }
            Err(error) => self.place_failed(now, no, error, out),
        }
    }

    /// A segment's file is open or has more room: whatever waited for that goes on.
    fn file_became_ready(&mut self, now: Now, no: LogNo, base: Offset, out: &mut Outbox) {
        self.queue_write_back(no);
        self.drain_waiting(now, no, out);
        self.resume_load(now, no, base, out);
        self.resume_reads(now, no, base, out);
    }

    /// Something of the log is no longer in flight: a cut, a drop or a removal may have waited for that. Called once
    /// for every completion that belongs to a log, after it was handled.
    pub(crate) fn something_ended(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        self.truncate_may_go_on(now, no, out);
        self.drop_may_go_on(now, no, out);
        self.set_aside_below(now, no, out);
        self.rebuild_producers(now, no, out);
    }

    /// Placing failed: what waits to be appended is refused, what is already accepted waits for another try.
    pub(crate) fn place_failed(&mut self, now: Now, no: LogNo, error: DiskError, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        log.place_retry_at = now.after_ms(RETRY_MS);
        log.place_error = error;
        log.place_step = MIN_STEP;
        let accepted = log.segments.iter().any(|s| s.dirty() > 0 || !s.is_written());
        self.write_back.full |= accepted && error == DiskError::NoSpace;
        self.refuse_waiting(no, &AppendError::of_place(error), out);
        self.write_back.retry.push(no);
    }

    /// Tries again what is accepted but could not be placed.
    pub(crate) fn retry_places(&mut self, now: Now, out: &mut Outbox) {
        let due = std::mem::take(&mut self.write_back.retry);
        for no in due {
            match self.log(no) {
                Some(log) if now.mono < log.place_retry_at => self.write_back.retry.push(no),
                Some(log) if log.segments.iter().any(|s| s.dirty() > 0 || !s.is_written()) => {
                    self.advance_open_segments(now, no, out);
                    self.queue_write_back(no);
                }
                _ => {}
            }
        }
    }

    /// Allocates the next step of a busy segment before it is needed.
    pub(crate) fn allocate_ahead(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log(no) else { return };
        let active = log.active();
        let left = active.allocated.0.saturating_sub(active.end().0);
        let wants = left < log.place_step / 2
            && active.allocating.is_none()
            && active.allocated.0 < log.settings.segment_bytes.min(MAX_SEGMENT_BYTES)
            && log.state == LogState::Open;
        if wants && let FileState::Open(_) = active.file {
            let (base, from) = (active.base, active.allocated);
            let to = step_to(from, from.plus(log.place_step), log.settings.segment_bytes);
            if to > from {
                self.allocate(now, no, base, from, to, out);
            }
        }
    }

    pub(crate) fn close_file(&mut self, file: FileId, out: &mut Outbox) {
        let op = self.ops.id(Pending::Close { file });
        out.ops.push((op, DiskOp::Close { file }));
    }
}

/// `to`, cut to what the segment can ever need, as a whole number of blocks.
fn step_to(from: Pos, to: Pos, segment_bytes: u64) -> Pos {
    let most = Pos(segment_bytes.min(MAX_SEGMENT_BYTES)).ceil(B);
    to.ceil(B).min(most.max(from))
}

fn room_need(segment: &Segment, waiting: u64, step: u64, segment_bytes: u64) -> Need {
    if segment.allocating.is_some() || segment.cutting || segment.state() == SegmentState::Sealed {
        return Need::Nothing;
    }
    let needed = segment.end().plus(waiting).ceil(B);
    if segment.allocated >= needed {
        return Need::Nothing;
    }
    // After a start the place below the written bytes is known to be there; the rest is made sure of.
    let from = segment.allocated.max(segment.written.floor(B));
    let ahead = if segment.state() == SegmentState::Active {
        from.plus(step)
    } else {
        needed
    };
    let to = step_to(from, ahead, segment_bytes).max(needed);
    if from >= to {
        return Need::Nothing;
    }
    Need::Room { from, to }
}
