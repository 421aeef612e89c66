//! Write-back of durable bytes from memory to segments, sealing, and the memory that bytes may keep.
//!
//! Invariants: only durable bytes are written, in whole blocks, each once (the last block of a sealing segment padded
//! with zeros, its file then cut to the exact end); a failed write fences the partition in the same step and is never
//! retried, except that a full disk is waited out, since the same bytes are then written again from memory.

use std::collections::VecDeque;

use crate::epochs::encode_checkpoint;
use crate::error::FenceReason;
use crate::io::{DiskError, DiskOp, Done, FileClass, FileId};
use crate::limits::BLOCK;
use crate::log::{Log, LogNo};
use crate::producers::encode_file;
use crate::segment::{FileState, SegmentState};
use crate::small::SmallKind;
use crate::store::{Outbox, Pending, Store};
use crate::types::{Lsn, Now, Offset, Pos};

/// Largest single write-back.
const PIECE: u64 = 1 << 20;
/// Write-backs in flight while there is time.
const CALM_DEPTH: usize = 2;
/// Bytes that may be written back per journal byte while there is time, and when none is left: in between
/// write-back keeps up.
const CALM_SHARE: f64 = 1.0 / 32.0;
const URGENT_SHARE: f64 = 4.0;
/// Most bytes of write-back that journal writes earn ahead.
const MOST_CREDIT: f64 = (4 * PIECE) as f64;
/// Write-backs of one segment in flight at once.
const PER_SEGMENT: usize = 4;

/// Write-back state of a shard.
#[derive(Debug, Default)]
pub(crate) struct WriteBack {
    /// Logs with something worth writing.
    queue: VecDeque<LogNo>,
    /// Logs whose placing failed with bytes already accepted.
    pub(crate) retry: Vec<LogNo>,
    /// What was accepted met a full disk, and nothing found place since.
    pub(crate) full: bool,
    /// Operations in flight.
    pub(crate) in_flight: usize,
    /// Bytes that may be written back although the journal is busy, earned by its completed writes up to `paid`.
    credit: f64,
    paid: Lsn,
    /// Accepted bytes not yet in segments.
    pub(crate) dirty: u64,
    /// Bytes of tails in memory.
    pub(crate) memory: u64,
    /// Written runs that may leave memory, oldest first.
    cache: VecDeque<(LogNo, Offset, Pos)>,
}

impl Store {
    /// Queues a log for write-back when it has something worth writing.
    pub(crate) fn queue_write_back(&mut self, no: LogNo) {
        let least = self.cfg.write_back_bytes;
        let Some(log) = self.log_mut(no) else { return };
        if log.queued || !log.may_write_back() {
            return;
        }
        let pin = log.pin;
        let mut open = log
            .segments
            .iter()
            .rev()
            .take_while(|s| s.state() != SegmentState::Sealed);
        let worth = open.any(|segment| match segment.state() {
            SegmentState::Active => {
                let ready = segment.writable_end().0.saturating_sub(segment.submitted.0);
                ready >= least
                    || (ready > 0
                        && pin.is_some_and(|(base, pos)| segment.base < base || segment.submitted < pos))
            }
            SegmentState::Sealing => segment.writable_end() > segment.submitted || segment.wants_cut(),
            SegmentState::Sealed => false,
        });
        if worth {
            log.queued = true;
            self.write_back.queue.push_back(no);
        }
    }

    /// Issues write-backs while there is room in flight.
    pub(crate) fn pump_write_back(&mut self, now: Now, out: &mut Outbox) {
        if self.fenced.is_some() {
            return;
        }
        let share = self.write_back_share();
        self.earn_write_back(share);
        let most = self.cfg.write_back_depth;
        let more = most.saturating_sub(CALM_DEPTH) as f64;
        let depth = CALM_DEPTH.min(most) + (more * (share / URGENT_SHARE).sqrt()) as usize;
        while self.write_back.in_flight < depth
            && (self.write_back.credit > 0.0 || self.commit.in_flight() == 0)
        {
            let Some(no) = self.write_back.queue.pop_front() else {
                break;
            };
            if let Some(log) = self.log_mut(no) {
                log.queued = false;
            }
            self.write_back_log(now, no, out);
        }
        self.evict();
    }

    /// Bytes to write back for each byte of the journal: few while more than half of the memory for dirty bytes and
    /// of the journal is free, more as one is used up, and with about half of the journal used as many as let a
    /// checkpoint that waits for write-back end in time.
    fn write_back_share(&self) -> f64 {
        let room = self.commit.data_room() as f64;
        let capacity = self.commit.data_capacity().max(1) as f64;
        let dirty = self.write_back.dirty as f64 / self.cfg.dirty_bytes.max(1) as f64;
        let urgency = (2.0 * dirty - 1.0)
            .max(1.0 - 2.0 * room / capacity)
            .clamp(0.0, 1.0);
        let by_bounds = CALM_SHARE + (URGENT_SHARE - CALM_SHARE) * urgency * urgency;
        let draining = self.checkpoint.left_to_drain(self.stats.written_back_bytes) as f64;
        let by_checkpoint = match room < 0.55 * capacity {
            true => draining / (room - capacity / 8.0).max(1.0),
            false => 0.0,
        };
        by_bounds.max(by_checkpoint).min(URGENT_SHARE)
    }

    /// Write-back shares the device with the journal in proportion: some devices let a synced write wait for as long
    /// as others keep coming, so a bound on what is in flight alone starves acknowledgements.
    fn earn_write_back(&mut self, share: f64) {
        let durable = self.commit.durable_lsn();
        let written = durable.0.saturating_sub(self.write_back.paid.0) as f64;
        self.write_back.paid = durable;
        self.write_back.credit = (self.write_back.credit + written * share).min(MOST_CREDIT);
    }

    fn write_back_log(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log(no) else { return };
        if !log.may_write_back() {
            return;
        }
        let open: Vec<Offset> = log
            .segments
            .iter()
            .rev()
            .take_while(|s| s.state() != SegmentState::Sealed)
            .filter(|s| s.writable_end() > s.submitted || s.wants_cut())
            .map(|s| s.base)
            .collect();
        for base in open.into_iter().rev() {
            self.write_back_segment(now, no, base, out);
        }
    }

    fn write_back_segment(&mut self, now: Now, no: LogNo, base: Offset, out: &mut Outbox) {
        loop {
            let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
                return;
            };
            let end = segment.writable_end();
            if segment.refused || segment.in_flight.len() >= PER_SEGMENT {
                return;
            }
            if segment.submitted >= end && !segment.wants_cut() {
                return;
            }
            let FileState::Open(file) = segment.file else {
                self.advance_place(now, no, base, out);
                return;
            };
            if segment.submitted >= end {
                self.cut_file(no, base, file, out);
                return;
            }
            if segment.allocated < end {
                self.advance_place(now, no, base, out);
                return;
            }
            let from = segment.submitted;
            let to = end.min(from.plus(PIECE));
            let bufs = segment.write_buffers(from, to);
            segment.submitted = to;
            segment.in_flight.push_back((to, false));
            let bytes = to.0 - from.0;
            let op = self.ops.id(Pending::WriteBack {
                log: no,
                base,
                end: to,
                bytes,
            });
            self.write_back.in_flight += 1;
            self.write_back.credit = (self.write_back.credit - bytes as f64).max(-MOST_CREDIT);
            out.ops.push((
                op,
                DiskOp::Write {
                    file,
                    pos: from.0,
                    bufs,
                },
            ));
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one pending operation")]
    pub(crate) fn write_back_done(
        &mut self,
        now: Now,
        no: LogNo,
        base: Offset,
        end: Pos,
        bytes: u64,
        result: Result<Done, DiskError>,
        out: &mut Outbox,
    ) {
        self.write_back.in_flight -= 1;
        let Some(log) = self.log_mut(no) else { return };
        let fenced = log.fenced.is_some();
        let Some(segment) = log.segment_mut(base) else {
            return;
        };
        match result {
            Ok(_) => {
                let before = segment.written.min(segment.end());
                segment.write_completed(end);
                let written = segment.written.min(segment.end());
                if !fenced {
                    self.write_back.dirty = self.write_back.dirty.saturating_sub(written.0 - before.0);
                }
                self.write_back.cache.push_back((no, base, written));
                self.write_back.full = false;
                self.stats.written_back_bytes += bytes;
                self.stats.write_backs += 1;
                self.segment_written(no, base, out);
            }
            Err(DiskError::NoSpace) => {
                // The bytes are in memory and in the journal: they are written again when there is space.
                segment.write_refused(end);
                self.place_failed(now, no, DiskError::NoSpace, out);
            }
            Err(_) => {
                // It is over too: a drop waits until nothing is in flight.
                segment.write_refused(end);
                self.fence_partition(no, FenceReason::SegmentFailed, out);
            }
        }
        self.queue_write_back(no);
    }

    /// Write-back of a segment moved on: seal it, write what follows its bytes, release a waiting checkpoint.
    pub(crate) fn segment_written(&mut self, no: LogNo, base: Offset, out: &mut Outbox) {
        self.write_epochs(no, out);
        self.write_index_blocks(no, base, out);
        let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
            return;
        };
        if segment.wants_cut()
            && let FileState::Open(file) = segment.file
        {
            self.cut_file(no, base, file, out);
        }
        self.unpin(no);
    }

    /// Gives a sealing segment's file its exact length.
    fn cut_file(&mut self, no: LogNo, base: Offset, file: FileId, out: &mut Outbox) {
        // Segments seal in order: what is not sealed is always a suffix of the log.
        if self.log(no).and_then(Log::first_unsealed) != Some(base) {
            return;
        }
        let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
            return;
        };
        segment.cutting = true;
        let len = segment.end().0;
        let op = self.ops.id(Pending::CutFile { log: no, base });
        out.ops.push((op, DiskOp::Resize { file, len }));
    }

    pub(crate) fn file_cut(
        &mut self,
        no: LogNo,
        base: Offset,
        result: Result<Done, DiskError>,
        out: &mut Outbox,
    ) {
        let segment = self.log_mut(no).and_then(|log| log.segment_mut(base));
        let Some(segment) = segment.filter(|s| s.state() == SegmentState::Sealing) else {
            return;
        };
        segment.cutting = false;
        if result.is_err() {
            self.fence_partition(no, FenceReason::SegmentFailed, out);
            return;
        }
        segment.set_state(SegmentState::Sealed);
        self.write_seal(no, base, out);
        self.checkpoint.sealed.push((no, base));
        // The next one may have waited for this one.
        self.queue_write_back(no);
        self.unpin(no);
    }

    /// Closes the active segment for appends and opens the next one in memory; its files follow before the first append.
    pub(crate) fn roll(&mut self, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        let id = log.id;
        let next = log.log_end();
        if next == log.active().base {
            return;
        }
        let producers = encode_file(id, next, &log.producers);
        let path = log.path(next, "producers");
        let base = log.active().base;
        log.active_mut().set_state(SegmentState::Sealing);
        log.push_segment(next);
        let useless = log.producers.is_empty() || log.producers.is_stale();
        if !useless {
            self.write_small(
                no,
                SmallKind::Producers { segment: next },
                FileClass::Epochs,
                path,
                0,
                &producers,
                true,
                out,
            );
        }
        // A segment whose last whole block was already written needs no more than its cut.
        self.segment_written(no, base, out);
        self.queue_write_back(no);
    }

    fn write_epochs(&mut self, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        if !log.epochs_dirty || log.dir != crate::log::DirState::Made {
            return;
        }
        let bytes = encode_checkpoint(log.id, log.epochs.iter());
        let path = format!("{}/leader-epoch-checkpoint", log.dir());
        if self.small.is_writing(no, SmallKind::Epochs) {
            return;
        }
        if let Some(log) = self.log_mut(no) {
            log.epochs_dirty = false;
        }
        self.write_small(
            no,
            SmallKind::Epochs,
            FileClass::Epochs,
            path,
            0,
            &bytes,
            true,
            out,
        );
    }

    /// Lets bytes leave memory that are in their segments, oldest first, while the budget is exceeded.
    fn evict(&mut self) {
        // Half of the budget is kept for bytes that are not written yet.
        let limit = self.cfg.memory_bytes / 2;
        while self.write_back.memory > limit.max(self.write_back.dirty.saturating_add(limit / 4)) {
            let Some((no, base, pos)) = self.write_back.cache.pop_front() else {
                return;
            };
            self.evict_run(no, base, pos);
        }
        self.bound_cache();
    }

    fn evict_run(&mut self, no: LogNo, base: Offset, pos: Pos) {
        let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
            return;
        };
        // A cut may have taken the run back: what was appended there since is in no file yet.
        let floor = pos.min(segment.written).floor(BLOCK as u64);
        let freed = segment.tail.evict(floor) + segment.tail.shrink(floor);
        self.write_back.memory = self.write_back.memory.saturating_sub(freed);
    }

    /// The list of written runs must not outgrow what it describes.
    fn bound_cache(&mut self) {
        const MAX_RUNS: usize = 1 << 16;
        while self.write_back.cache.len() > MAX_RUNS {
            let Some((no, base, pos)) = self.write_back.cache.pop_front() else {
                return;
            };
            self.evict_run(no, base, pos);
        }
    }
}
