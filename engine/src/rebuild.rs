//! Rebuilding of a producer table that a cut left incomplete.
//!
//! A table remembers the last batches of each producer. A cut takes some of them, and what the producer wrote before is
//! in the log only: without it a retry of a batch below the cut would be refused, and a producer that lost all of its
//! batches could not go on. So the table is read again from the newest `.producers` file at or below the cut and the
//! batches behind it, before a batch of an idempotent producer is looked at (STORAGE.md section 7). It is done when the
//! first such batch comes: a replica that is only cut again and again never reads.
//!
//! A producer of which nothing is found, where something may be gone (below the log start, or damaged), stays known and
//! is refused until it takes a new epoch: its retry would else be stored twice.
//!
//! Invariants: the old table serves until the new one is whole; a cut, a drop or a fence ends the attempt; a file counts
//! only when this life wrote it or a snapshot names it, since after a crash a file may tell of batches that never became
//! durable. Memory: one table and one read of about [`STEP`] bytes.

use crate::batch;
use crate::error::{AppendError, ReadError};
use crate::io::{DiskError, DiskOp, Done, FileClass, FileId, OpenHow};
use crate::log::{Listing, Log, LogNo, LogState};
use crate::producers::{ProducerTable, decode_file};
use crate::store::{Outbox, Pending, ReadBytes, ReadRequest, Store};
use crate::types::{Now, Offset};

/// Bytes of one read of the log.
const STEP: usize = 1 << 20;
/// No `.producers` file is larger.
const MAX_FILE: u64 = 16 << 20;
/// Files that a log remembers as good; a cut below the oldest of them reads from its first segment on.
const MAX_TRUSTED: usize = 8;

/// What a rebuild waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Open { file: FileId },
    Read { file: FileId },
    Batches,
}

/// A rebuild under way.
#[derive(Debug)]
pub struct Rebuild {
    step: Step,
    table: ProducerTable,
    /// Batches below are in the table.
    next: Offset,
    /// Up to here: no batch of a producer is taken meanwhile.
    end: Offset,
    /// It begins at the log's first batch ever or with a good file, and passed over nothing: who is not in it wrote
    /// nothing that is left.
    complete: bool,
    /// What the last read brought, when it was answered while the one before was still being taken in.
    arrived: Option<Result<ReadBytes, ReadError>>,
    taking: bool,
}

impl Rebuild {
    /// Whether an operation on a file of it is in flight.
    #[must_use]
    pub fn is_in_file(&self) -> bool {
        self.step != Step::Batches
    }
}

impl Log {
    /// The `.producers` file at `base` was written in full.
    pub(crate) fn trust_producers(&mut self, base: Offset) {
        let oldest = self.oldest;
        self.trusted_producers
            .retain(|other| *other >= oldest && *other != base);
        self.trusted_producers.push(base);
        self.trusted_producers.sort_unstable();
        let surplus = self.trusted_producers.len().saturating_sub(MAX_TRUSTED);
        self.trusted_producers.drain(..surplus);
    }

    /// Whether appends wait for a rebuild that could begin.
    fn wants_rebuild(&self) -> bool {
        self.rebuild.is_none()
            && self.producers.is_stale()
            && self.state == LogState::Open
            && self.fenced.is_none()
            && self.waiting.iter().any(|w| w.header.has_producer())
    }
}

impl Store {
    /// Begins to rebuild the producer table when appends wait for it.
    pub(crate) fn rebuild_producers(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        let most = self.cfg.producers;
        let Some(log) = self.log_mut(no).filter(|log| log.wants_rebuild()) else {
            return;
        };
        if log.listing != Listing::Known && log.oldest < log.segments[0].base {
            self.list_segments(no, out);
            return;
        }
        log.rebuild = Some(Box::new(Rebuild {
            step: Step::Batches,
            table: ProducerTable::new(most),
            next: log.segments[0].base,
            end: log.log_end(),
            complete: log.segments[0].base == Offset(0),
            arrived: None,
            taking: false,
        }));
        self.rebuild_from_newest_file(now, no, out);
    }

    /// Opens the newest good file, or begins with an empty table at the first segment.
    fn rebuild_from_newest_file(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        let file = self.ops.file();
        let Some(log) = self.log_mut(no) else { return };
        let first = log.segments[0].base;
        let newest = log.trusted_producers.last().filter(|base| **base > first);
        let path = newest.map(|base| log.path(*base, "producers"));
        let Some(rebuild) = log.rebuild.as_mut() else {
            return;
        };
        let Some(path) = path else {
            rebuild.step = Step::Batches;
            self.ops.free_file(file);
            self.rebuild_read_on(now, no, out);
            return;
        };
        rebuild.step = Step::Open { file };
        let how = OpenHow {
            class: FileClass::Epochs,
            create: false,
            write: false,
        };
        let op = self.ops.id(Pending::Rebuild { log: no });
        out.ops.push((op, DiskOp::Open { file, path, how }));
    }

    /// A step on a `.producers` file came to its end.
    pub(crate) fn rebuild_file_step(
        &mut self,
        now: Now,
        no: LogNo,
        result: Result<Done, DiskError>,
        out: &mut Outbox,
    ) {
        let Some(log) = self.log_mut(no) else { return };
        let going_on = log.state == LogState::Open && log.fenced.is_none();
        let Some(rebuild) = log.rebuild.as_mut() else {
            return;
        };
        let step = std::mem::replace(&mut rebuild.step, Step::Batches);
        match (step, result) {
            (Step::Open { file }, Ok(Done::Opened { len })) if going_on && (1..=MAX_FILE).contains(&len) => {
                rebuild.step = Step::Read { file };
                let op = self.ops.id(Pending::Rebuild { log: no });
                let len = len as usize;
                out.ops.push((op, DiskOp::Read { file, pos: 0, len }));
                return;
            }
            (Step::Open { file }, Err(_)) => self.ops.free_file(file),
            (Step::Open { file }, Ok(_)) => self.close_file(file, out),
            (Step::Read { file }, read) => {
                self.close_file(file, out);
                if let Ok(Done::Read(bytes)) = read
                    && going_on
                    && self.take_producers_file(no, &bytes)
                {
                    self.rebuild_read_on(now, no, out);
                    return;
                }
            }
            (Step::Batches, _) => return,
        }
        if !going_on {
            self.abandon_rebuild(no);
            return;
        }
        // The file is missing or damaged: the one before it, and more of the log, do as well.
        if let Some(log) = self.log_mut(no) {
            log.trusted_producers.pop();
        }
        self.rebuild_from_newest_file(now, no, out);
    }

    /// Begins with what a file says. Whether it is good.
    fn take_producers_file(&mut self, no: LogNo, bytes: &[u8]) -> bool {
        let most = self.cfg.producers;
        let Some(log) = self.log_mut(no) else { return false };
        let Some(base) = log.trusted_producers.last().copied() else {
            return false;
        };
        let Ok((end, table)) = decode_file(log.id, bytes, most) else {
            return false;
        };
        let Some(rebuild) = log.rebuild.as_mut() else {
            return false;
        };
        let good = end == base && base <= rebuild.end && !table.is_stale();
        if good {
            rebuild.table = table;
            rebuild.next = base;
            rebuild.complete = true;
        }
        good
    }

    /// Reads on, until a read has to wait or the table is whole.
    fn rebuild_read_on(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        loop {
            let Some(log) = self.log_mut(no) else { return };
            let partition = log.id;
            let going_on = log.state == LogState::Open && log.fenced.is_none();
            let Some(rebuild) = log.rebuild.as_mut() else {
                return;
            };
            if !going_on {
                self.abandon_rebuild(no);
                return;
            }
            if rebuild.next >= rebuild.end {
                self.rebuild_done(now, no, out);
                return;
            }
            rebuild.taking = true;
            let request = ReadRequest {
                token: 0,
                partition,
                offset: rebuild.next,
                limit: rebuild.end,
                max_bytes: STEP,
            };
            self.read_for_rebuild(now, request, out);
            let Some(rebuild) = self.log_mut(no).and_then(|log| log.rebuild.as_mut()) else {
                return;
            };
            rebuild.taking = false;
            let Some(result) = rebuild.arrived.take() else {
                return;
            };
            if let Err(error) = rebuild.take_in(now, result) {
                self.rebuild_failed(no, &error, out);
                return;
            }
        }
    }

    /// A read of the log came to its end.
    pub(crate) fn rebuild_read_done(
        &mut self,
        now: Now,
        no: LogNo,
        result: Result<ReadBytes, ReadError>,
        out: &mut Outbox,
    ) {
        let Some(rebuild) = self.log_mut(no).and_then(|log| log.rebuild.as_mut()) else {
            return;
        };
        if rebuild.taking {
            rebuild.arrived = Some(result);
            return;
        }
        match rebuild.take_in(now, result) {
            Ok(()) => self.rebuild_read_on(now, no, out),
            Err(error) => self.rebuild_failed(no, &error, out),
        }
    }

    fn rebuild_done(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        if let Some(log) = self.log_mut(no)
            && let Some(rebuild) = log.rebuild.take()
        {
            let mut table = rebuild.table;
            if !rebuild.complete {
                table.keep_known(&log.producers);
            }
            log.producers = table;
        }
        self.drain_waiting(now, no, out);
    }

    /// What waits is refused; the next append of a producer tries again.
    fn rebuild_failed(&mut self, no: LogNo, error: &ReadError, out: &mut Outbox) {
        self.abandon_rebuild(no);
        let error = match error {
            ReadError::Disk(disk) => AppendError::of_place(*disk),
            _ => AppendError::Busy,
        };
        self.refuse_waiting(no, &error, out);
    }

    fn abandon_rebuild(&mut self, no: LogNo) {
        if let Some(log) = self.log_mut(no) {
            log.rebuild = None;
        }
    }
}

impl Rebuild {
    /// Enters the batches of one read. Damaged ones are passed over: nobody can read them, so nobody's retry of them is
    /// a second copy.
    fn take_in(&mut self, now: Now, result: Result<ReadBytes, ReadError>) -> Result<(), ReadError> {
        let read = match result {
            Ok(read) if read.next > self.next => read,
            Ok(_) => return Err(ReadError::Busy),
            Err(ReadError::Damaged { to, .. }) => {
                self.next = to.max(self.next.plus(1));
                self.complete = false;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let bytes: Vec<u8> = read.batches.iter().flat_map(|b| b.iter().copied()).collect();
        for (header, _) in batch::batches(&bytes).map_while(Result::ok) {
            if header.base_offset >= self.next {
                self.table.record(&header, header.base_offset, now.wall_ms);
            }
        }
        self.next = read.next;
        Ok(())
    }
}
