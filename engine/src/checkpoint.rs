//! Fuzzy snapshots of a shard: they bound recovery to the journal after them, whatever the number of partitions.
//!
//! Order of effects: every captured partition's whole blocks are written; everything is synced (one syncfs); the
//! captured records are durable in the journal; the snapshot is written and synced; then files of the journal wholly
//! below the **older** of the two snapshots are recycled. So the newer one may rot and the older one still finds its
//! journal. Phases move in one place, `Checkpointer::set_phase`.

use crate::canary::Canary;
use crate::error::FenceReason;
use crate::io::buf::AppendBuf;
use crate::io::{DiskError, DiskOp, Done, FileId};
use crate::limits::BLOCK;
use crate::log::LogNo;
use crate::segment::{FileState, SegmentState};
use crate::snapshot::{SnapshotHeader, encode_entry, entry_seed};
use crate::store::{Outbox, Pending, Store};
use crate::types::{Lsn, Now, Offset};

/// Partitions captured in one slice.
const SLICE: usize = 64;
/// Bytes of one snapshot write.
const PIECE: usize = 1 << 20;
/// A snapshot counts 16 times against the journal between two checkpoints.
const SNAPSHOT_WEIGHT: u64 = 16;

/// Where a checkpoint stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// None is running.
    Idle,
    /// Entries are taken, from this partition on.
    Capturing { next: usize },
    /// Captured bytes are on their way to their segments.
    Draining,
    /// A sync of the whole file system is in flight.
    Syncing,
    /// The snapshot is being allocated and written.
    Writing,
    /// The snapshot's own sync is in flight.
    Closing,
}

impl Phase {
    /// Phases that may come before this one.
    fn follows(self, before: Phase) -> bool {
        match self {
            Phase::Idle => true,
            Phase::Capturing { .. } => matches!(before, Phase::Idle | Phase::Capturing { .. }),
            Phase::Draining => matches!(before, Phase::Capturing { .. }),
            Phase::Syncing => before == Phase::Draining,
            Phase::Writing => before == Phase::Syncing,
            Phase::Closing => before == Phase::Writing,
        }
    }
}

/// Checkpoints of one shard.
#[derive(Debug)]
pub struct Checkpointer {
    files: [FileId; 2],
    /// Bytes allocated in each file.
    allocated: [u64; 2],
    /// Which file holds the newer valid snapshot.
    newer: usize,
    number: u64,
    newer_lsn: Lsn,
    /// lsn of the older valid snapshot: what the journal keeps.
    older_lsn: Lsn,
    phase: Phase,
    body: Vec<u8>,
    count: u32,
    lsn: Lsn,
    applied: Lsn,
    /// Partitions whose write-back the running checkpoint waits for.
    pinned: usize,
    /// About how far write-back (in bytes of this life) is when it ends: what was dirty at the capture is then written.
    drained_at: u64,
    outstanding: usize,
    /// A write of the snapshot found the disk full: it is given up when the others have ended.
    refused: bool,
    /// The last one was given up for that.
    full: bool,
    submitted: usize,
    /// Journal bytes issued when the last checkpoint began.
    began_at: u64,
    /// Asked for by the owner, whatever the amount of journal.
    wanted: bool,
    failed_until: u64,
    /// Segments sealed since the last sync; their descriptors close after the next one.
    pub(crate) sealed: Vec<(LogNo, Offset)>,
    closing: Vec<(LogNo, Offset)>,
    /// Number of the checkpoint that must be the older one before a deletion may unlink: see `Deletions`.
    completed: u64,
}

impl Checkpointer {
    /// Continues after recovery: `newer` is the index of the file with the newest valid snapshot.
    #[must_use]
    pub fn new(files: [FileId; 2], allocated: [u64; 2], newer: usize, number: u64, lsn: Lsn) -> Checkpointer {
        Checkpointer {
            files,
            allocated,
            newer,
            number,
            newer_lsn: lsn,
            // Which of the two the older one is matters only to what may be recycled: nothing, for now.
            older_lsn: Lsn(0),
            phase: Phase::Idle,
            body: Vec::new(),
            count: 0,
            lsn,
            applied: lsn,
            pinned: 0,
            drained_at: 0,
            outstanding: 0,
            refused: false,
            full: false,
            submitted: 0,
            began_at: 0,
            wanted: false,
            failed_until: 0,
            sealed: Vec::new(),
            closing: Vec::new(),
            completed: 0,
        }
    }

    fn set_phase(&mut self, phase: Phase) {
        assert!(
            phase.follows(self.phase),
            "checkpoint phase {:?} -> {phase:?}",
            self.phase
        );
        self.phase = phase;
    }

    /// One partition fewer to wait for.
    pub(crate) fn release_pin(&mut self) {
        self.pinned -= 1;
    }

    /// About how many bytes the running checkpoint waits to see written back; `written` were in this life.
    pub(crate) fn left_to_drain(&self, written: u64) -> u64 {
        match self.phase {
            Phase::Draining if self.pinned > 0 => self.drained_at.saturating_sub(written),
            _ => 0,
        }
    }

    /// Whether the last one was given up because the disk is full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Where it stands.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// When work is due that no completion sets off, in monotonic ns. With a full journal nothing may be in flight: a
    /// capture that waited for something to happen would then wait for the next retention check. So would a checkpoint
    /// that was asked for at the end of a turn, or that waits until a full disk is tried again.
    pub(crate) fn next_wake(&self) -> Option<u64> {
        match self.phase {
            Phase::Capturing { .. } => Some(0),
            Phase::Idle if self.wanted => Some(self.failed_until),
            _ => None,
        }
    }

    /// Checkpoints completed in this life. A record is below both snapshots once two checkpoints that began after it
    /// have completed.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.completed
    }

    /// Checkpoints begun in this life.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.completed + u64::from(self.phase != Phase::Idle)
    }
}

impl Store {
    /// Asks for a checkpoint at the next opportunity.
    pub fn request_checkpoint(&mut self) {
        self.checkpoint.wanted = true;
    }

    /// Does one slice of checkpoint work, when there is any.
    pub(crate) fn pump_checkpoint(&mut self, now: Now, out: &mut Outbox) {
        if self.fenced.is_some() {
            return;
        }
        match self.checkpoint.phase {
            Phase::Idle if self.checkpoint_due(now) => self.begin_checkpoint(),
            Phase::Idle | Phase::Syncing | Phase::Closing => {}
            Phase::Capturing { next } => {
                self.capture(next);
                self.end_draining(out);
            }
            Phase::Draining => self.end_draining(out),
            Phase::Writing => self.write_snapshot(out),
        }
    }

    /// Syncs once what was captured is written; it may all have been before.
    fn end_draining(&mut self, out: &mut Outbox) {
        let checkpoint = &self.checkpoint;
        if checkpoint.phase == Phase::Draining && checkpoint.pinned == 0 && !self.clear_leftovers(out) {
            self.sync_everything(out);
        }
    }

    fn checkpoint_due(&self, now: Now) -> bool {
        let checkpoint = &self.checkpoint;
        if now.mono < checkpoint.failed_until {
            return false;
        }
        let since = self.commit.stats.bytes - checkpoint.began_at;
        let weight = SNAPSHOT_WEIGHT * self.stats.snapshot_bytes;
        // Two intervals and the one under way must fit beside the reserve.
        let most = self.commit.data_capacity() / 4;
        let full = self.commit.data_room() < self.commit.data_capacity() / 2;
        // Two checkpoints free what lies before the first of them.
        let helps =
            self.commit.next_lsn() > checkpoint.newer_lsn || checkpoint.newer_lsn > checkpoint.older_lsn;
        // Many logs may each hold less than is worth writing: only a checkpoint has all of it written.
        let crowded = !self.has_dirty_room();
        checkpoint.wanted
            || crowded
            || since >= self.cfg.checkpoint_bytes.max(weight).min(most)
            || (full && helps)
    }

    fn begin_checkpoint(&mut self) {
        let lsn = self.commit.next_lsn();
        let checkpoint = &mut self.checkpoint;
        checkpoint.wanted = false;
        checkpoint.began_at = self.commit.stats.bytes;
        checkpoint.body.clear();
        checkpoint.count = 0;
        checkpoint.lsn = lsn;
        checkpoint.applied = lsn;
        checkpoint.pinned = 0;
        checkpoint.submitted = 0;
        checkpoint.set_phase(Phase::Capturing { next: 0 });
    }

    fn capture(&mut self, next: usize) {
        let applied = self.commit.next_lsn();
        let last = (next + SLICE).min(self.logs.len());
        for no in next..last {
            self.capture_log(LogNo(no as u32), applied);
        }
        self.stats.checkpoint_slices += 1;
        self.checkpoint.applied = applied;
        let done = last == self.logs.len();
        self.checkpoint.drained_at = self.stats.written_back_bytes + self.write_back.dirty;
        self.checkpoint.set_phase(if done {
            Phase::Draining
        } else {
            Phase::Capturing { next: last }
        });
    }

    fn capture_log(&mut self, no: LogNo, applied: Lsn) {
        let Some(log) = self.logs[no.0 as usize].as_deref_mut() else {
            return;
        };
        if log.is_dropping() && self.commit.is_issued(log.drop_seq) {
            // The snapshot counts only when that frame is durable. A Drop that is not in a frame yet will be replayed.
            return;
        }
        // A fenced partition's bytes are copied forward, so that it never pins the journal.
        let carry = log.fenced.is_some();
        let number = self.checkpoint.number + 1;
        let seed = entry_seed(&self.cfg, number);
        encode_entry(log, seed, applied, carry, &mut self.checkpoint.body);
        self.checkpoint.count += 1;
        if log.fenced.is_none() && !log.is_dropping() && !log.is_written() {
            log.pin = Some((log.active().base, log.active().end().floor(BLOCK as u64)));
            self.checkpoint.pinned += 1;
            self.queue_write_back(no);
        }
    }

    /// Releases a checkpoint that waits for this log, when what was captured is written.
    pub(crate) fn unpin(&mut self, no: LogNo) {
        if let Some(log) = self.log_mut(no)
            && log.pin_satisfied()
        {
            log.pin = None;
            self.checkpoint.release_pin();
        }
    }

    fn sync_everything(&mut self, out: &mut Outbox) {
        self.checkpoint.closing = std::mem::take(&mut self.checkpoint.sealed);
        self.checkpoint.set_phase(Phase::Syncing);
        let op = self.ops.id(Pending::Checkpoint);
        let sync = match self.cfg.has(Canary::CheckpointBeforeSync) {
            true => DiskOp::SyncDir { path: ".".to_owned() },
            false => DiskOp::SyncAll,
        };
        out.ops.push((op, sync));
    }

    /// Takes in the end of a checkpoint operation.
    pub(crate) fn checkpoint_step(&mut self, now: Now, result: Result<Done, DiskError>, out: &mut Outbox) {
        self.checkpoint.outstanding = self.checkpoint.outstanding.saturating_sub(1);
        let full = matches!(result, Err(DiskError::NoSpace));
        if self.checkpoint.phase == Phase::Writing && (full || (self.checkpoint.refused && result.is_ok())) {
            self.checkpoint.refused = true;
            self.abandon_checkpoint(now);
            return;
        }
        match (self.checkpoint.phase, result) {
            (Phase::Syncing, Ok(_)) => {
                self.close_synced(out);
                self.checkpoint.set_phase(Phase::Writing);
                self.write_snapshot(out);
            }
            (Phase::Writing, Ok(_)) => self.write_snapshot(out),
            (Phase::Closing, Ok(_)) => self.checkpoint_completed(),
            // A failed sync may have lost anything written since the last one: the journal still has it all, so the
            // shard stops here and the next start replays it (D1: never retried).
            (_, Err(_)) => self.fence_shard(FenceReason::SyncFailed, out),
            (Phase::Idle | Phase::Capturing { .. } | Phase::Draining, Ok(_)) => {}
        }
    }

    fn abandon_checkpoint(&mut self, now: Now) {
        if self.checkpoint.outstanding == 0 {
            let target = 1 - self.checkpoint.newer;
            // Which part of the place is there is not known any more.
            self.checkpoint.allocated[target] = 0;
            self.checkpoint.refused = false;
            self.checkpoint.full = true;
            self.checkpoint.failed_until = now.after_ms(1000);
            self.checkpoint.wanted = true;
            self.checkpoint.set_phase(Phase::Idle);
        }
    }

    /// A log that the running checkpoint waits for was fenced: what was captured of it will never be in its files, so
    /// the checkpoint begins anew and carries those bytes along.
    pub(crate) fn restart_checkpoint(&mut self) {
        self.logs.iter_mut().flatten().for_each(|log| log.pin = None);
        self.checkpoint.pinned = 0;
        self.checkpoint.wanted = true;
        self.checkpoint.set_phase(Phase::Idle);
    }

    /// Descriptors of segments sealed before the sync are no longer needed.
    fn close_synced(&mut self, out: &mut Outbox) {
        for (no, base) in std::mem::take(&mut self.checkpoint.closing) {
            let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
                continue;
            };
            let FileState::Open(file) = segment.file else {
                continue;
            };
            if segment.state() != SegmentState::Sealed {
                continue;
            }
            if segment.readers == 0 && !segment.is_loading() {
                segment.file = FileState::Closed;
                self.close_file(file, out);
            } else {
                self.sealed_is_open(no, base, out);
            }
        }
    }

    /// Writes body pieces, then header and sync, once the journal covers what was captured.
    fn write_snapshot(&mut self, out: &mut Outbox) {
        let durable = self.commit.durable_lsn();
        let checkpoint = &mut self.checkpoint;
        // Bytes captured from frames that never became durable must not be skipped at replay of other frames that
        // take their addresses after a crash.
        if checkpoint.outstanding > 0 || durable < checkpoint.applied {
            return;
        }
        let target = 1 - checkpoint.newer;
        let file = checkpoint.files[target];
        let len = (BLOCK + checkpoint.body.len()).next_multiple_of(PIECE) as u64;
        if checkpoint.allocated[target] < len {
            let pos = checkpoint.allocated[target];
            checkpoint.allocated[target] = len;
            checkpoint.outstanding += 1;
            let op = self.ops.id(Pending::Checkpoint);
            out.ops.push((
                op,
                DiskOp::Allocate {
                    file,
                    pos,
                    len: len - pos,
                },
            ));
            return;
        }
        if checkpoint.submitted < checkpoint.body.len() || checkpoint.submitted == 0 {
            self.write_pieces(file, out);
            return;
        }
        checkpoint.outstanding += 1;
        checkpoint.set_phase(Phase::Closing);
        let op = self.ops.id(Pending::Checkpoint);
        out.ops.push((op, DiskOp::Sync { file }));
    }

    /// Submits the next pieces of the body; with the last ones the header.
    fn write_pieces(&mut self, file: FileId, out: &mut Outbox) {
        const DEPTH: usize = 4;
        for _ in 0..DEPTH {
            let from = self.checkpoint.submitted;
            let piece = &self.checkpoint.body[from..(from + PIECE).min(self.checkpoint.body.len())];
            if piece.is_empty() {
                break;
            }
            let mut buf = AppendBuf::with_capacity(piece.len());
            buf.append(piece);
            buf.append_zeros(piece.len().next_multiple_of(BLOCK) - piece.len());
            self.checkpoint.submitted += piece.len();
            self.checkpoint.outstanding += 1;
            let op = self.ops.id(Pending::Checkpoint);
            let pos = (BLOCK + from) as u64;
            out.ops.push((
                op,
                DiskOp::Write {
                    file,
                    pos,
                    bufs: vec![buf.freeze()],
                },
            ));
        }
        if self.checkpoint.submitted == self.checkpoint.body.len() {
            self.write_header(file, out);
        }
    }

    fn write_header(&mut self, file: FileId, out: &mut Outbox) {
        let checkpoint = &mut self.checkpoint;
        let header = SnapshotHeader {
            node: self.cfg.node,
            generation: self.cfg.generation,
            shard: self.cfg.shard.0,
            term: self.cfg.term,
            number: checkpoint.number + 1,
            lsn: checkpoint.lsn,
            count: checkpoint.count,
            body_bytes: checkpoint.body.len() as u64,
            body_crc: crc32fast::hash(&checkpoint.body),
        };
        // An empty body has been submitted in full too.
        checkpoint.submitted = checkpoint.submitted.max(1);
        checkpoint.outstanding += 1;
        let op = self.ops.id(Pending::Checkpoint);
        out.ops.push((
            op,
            DiskOp::Write {
                file,
                pos: 0,
                bufs: vec![header.encode()],
            },
        ));
    }

    fn checkpoint_completed(&mut self) {
        let checkpoint = &mut self.checkpoint;
        let older = checkpoint.newer_lsn;
        checkpoint.newer = 1 - checkpoint.newer;
        checkpoint.number += 1;
        checkpoint.older_lsn = older;
        checkpoint.newer_lsn = checkpoint.lsn;
        checkpoint.completed += 1;
        checkpoint.full = false;
        checkpoint.set_phase(Phase::Idle);
        self.stats.checkpoints += 1;
        self.stats.snapshot_bytes = checkpoint.body.len() as u64;
        // The next one is about as large: its memory is kept rather than touched anew.
        checkpoint.body.clear();
        let freed = match self.cfg.has(Canary::FreedBelowNewer) {
            true => checkpoint.newer_lsn,
            false => older,
        };
        self.commit.recycle(freed);
    }
}
