//! Replay: reads frames from the snapshot's lsn on, judges the first bad one, and applies records to memory.
//!
//! Replay is idempotent: a record below its partition's applied lsn, or whose bytes are already there, changes nothing.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet, VecDeque};

use super::ring::{Rebuilt, Ring};
use super::{Files, RecoverError, RecoveryReport, Snapshots};
use crate::batch::BatchHeader;
use crate::commit::{Resume, RingFile, RingState};
use crate::config::StoreConfig;
use crate::epochs::EpochTable;
use crate::error::FenceReason;
use crate::index::BatchBytes;
use crate::io::buf::BufSlice;
use crate::io::{DiskOp, Done};
use crate::journal::{Directory, FRAME_HEADER_BYTES, FileHeader, Frame, FrameHeader, Record};
use crate::log::{Damage, Log};
use crate::producers::ProducerTable;
use crate::segment::SegmentState;
use crate::snapshot::Entry;
use crate::types::{Lsn, Now, Offset, PartitionId, Pos, Term};

/// Bytes of one read; several run together.
const WINDOW: u64 = 2 << 20;
const WINDOWS: u64 = 8;
/// Address of the frame before the first one.
const NO_FRAME: Lsn = Lsn(u64::MAX);

/// A shard in memory.
pub(crate) struct Replayed {
    pub(crate) logs: Vec<Log>,
    /// Partitions whose end was replayed.
    pub(crate) dropped: Vec<PartitionId>,
    pub(crate) resume: Resume,
    pub(crate) report: RecoveryReport,
    /// Files below this may be recycled.
    pub(crate) checkpoint_lsn: Lsn,
}

/// Reads one journal file front to back, ahead of its user.
struct Window {
    file: usize,
    pieces: VecDeque<(u64, BufSlice)>,
}

impl Window {
    fn new(file: usize) -> Window {
        Window {
            file,
            pieces: VecDeque::new(),
        }
    }

    /// Bytes `pos..pos + len` of the file; shorter only at its end. Bytes below `pos` are let go.
    fn get(
        &mut self,
        files: &mut Files<'_>,
        ring: &Ring,
        pos: u64,
        len: usize,
        file_bytes: u64,
    ) -> Result<Vec<u8>, RecoverError> {
        while self
            .pieces
            .front()
            .is_some_and(|(at, bytes)| at + bytes.len() as u64 <= pos)
        {
            self.pieces.pop_front();
        }
        let end = (pos + len as u64).min(file_bytes);
        while self.end(pos) < end {
            self.fill(files, ring, pos, file_bytes)?;
        }
        let mut out = Vec::with_capacity((end - pos) as usize);
        for (at, bytes) in &self.pieces {
            let from = pos.max(*at).min(at + bytes.len() as u64) - at;
            let to = end.min(at + bytes.len() as u64).max(*at) - at;
            if from < to {
                out.extend_from_slice(&bytes[from as usize..to as usize]);
            }
        }
        Ok(out)
    }

    fn end(&self, pos: u64) -> u64 {
        self.pieces
            .back()
            .map_or(pos / WINDOW * WINDOW, |(at, bytes)| at + bytes.len() as u64)
    }

    fn fill(
        &mut self,
        files: &mut Files<'_>,
        ring: &Ring,
        pos: u64,
        file_bytes: u64,
    ) -> Result<(), RecoverError> {
        let from = self.end(pos);
        let found = &ring.files[self.file];
        let ops: Vec<DiskOp> = (0..WINDOWS)
            .map(|i| from + i * WINDOW)
            .filter(|at| *at < file_bytes)
            .map(|at| DiskOp::Read {
                file: found.file,
                pos: at,
                len: WINDOW.min(file_bytes - at) as usize,
            })
            .collect();
        let starts: Vec<u64> = (0..ops.len() as u64).map(|i| from + i * WINDOW).collect();
        for (at, done) in starts.into_iter().zip(files.all(&found.path, ops)?) {
            let Done::Read(bytes) = done else { continue };
            if bytes.is_empty() {
                let what = format!("{} is shorter than it was", found.path);
                return Err(RecoverError::Damaged { shard: 0, what });
            }
            self.pieces.push_back((at, bytes));
        }
        Ok(())
    }
}

/// A place in the journal.
#[derive(Debug, Clone, Copy)]
struct Cursor {
    file: usize,
    first: Lsn,
    incarnation: u64,
    lsn: Lsn,
}

struct Replay<'a> {
    cfg: &'a StoreConfig,
    grain: u64,
    /// Everything below was durable when the snapshot was written.
    applied: Lsn,
    ring: Ring,
    term: Term,
    prev_lsn: Lsn,
    directory: Directory,
    cursor: Cursor,
    window: Window,
    state: State,
    report: RecoveryReport,
}

/// What stands at the cursor.
enum Seen {
    Frame {
        header: FrameHeader,
        bytes: Vec<u8>,
        records: Vec<Record>,
    },
    Bad {
        header: Option<(FrameHeader, Option<Vec<Record>>)>,
    },
}

/// What follows a bad frame.
struct Later {
    /// The highest durable end that a frame promises.
    promised: Lsn,
    /// The first good frame.
    next: Option<NextFrame>,
}

struct NextFrame {
    cursor: Cursor,
    prev_lsn: Lsn,
    /// The records of the frame before it.
    copy: Option<Vec<Record>>,
}

pub(super) fn run(
    files: &mut Files<'_>,
    cfg: &StoreConfig,
    grain: usize,
    ring: Ring,
    snapshots: &Snapshots,
    entries: Vec<Entry>,
    now: Now,
) -> Result<Replayed, RecoverError> {
    let promised = ring
        .files
        .iter()
        .filter_map(|f| f.header)
        .map(|h| h.checkpoint_lsn)
        .max()
        .unwrap_or(Lsn(0));
    let damaged = |what: String| RecoverError::Damaged {
        shard: cfg.shard.0,
        what,
    };
    // A generation that follows another one begins with snapshots of all there was.
    if snapshots.number == 0 && cfg.generation > 1 {
        return Err(damaged(format!(
            "generation {} has no usable snapshot, and journals of the one before it are gone",
            cfg.generation
        )));
    }
    if snapshots.lsn < promised {
        return Err(damaged(format!(
            "the best snapshot begins at {}, but files were recycled on the word of one at {promised}",
            snapshots.lsn
        )));
    }
    let mut ring = ring;
    if ring.max_incarnation() == 0 {
        first_header(files, cfg, grain, &mut ring)?;
    }
    let capacity = cfg.journal_file_bytes - grain as u64;
    let cursor = start_cursor(&ring, snapshots.lsn, capacity).ok_or_else(|| {
        damaged(format!(
            "no journal file holds the snapshot's lsn {}",
            snapshots.lsn
        ))
    })?;
    let mut report = RecoveryReport {
        fresh: ring.fresh,
        ..RecoveryReport::default()
    };
    report.snapshot = snapshots.number;
    report.older_snapshot = snapshots.older_used;
    let applied = entries.iter().map(|e| e.applied).max().unwrap_or(snapshots.lsn);
    let mut replay = Replay {
        cfg,
        grain: grain as u64,
        applied,
        window: Window::new(cursor.file),
        ring,
        // The first frame has none before it to compare with: one that an earlier life left behind its cut, at just
        // this address, would pass for the first one after the snapshot.
        term: snapshots.term,
        prev_lsn: NO_FRAME,
        directory: Directory::default(),
        cursor,
        state: State::new(cfg, entries, now),
        report,
    };
    replay.frames(files)?;
    Ok(replay.finish(snapshots.keep))
}

/// The very first header of a ring, durable before the first frame.
fn first_header(
    files: &mut Files<'_>,
    cfg: &StoreConfig,
    grain: usize,
    ring: &mut Ring,
) -> Result<(), RecoverError> {
    let header = FileHeader {
        node: cfg.node,
        generation: cfg.generation,
        shard: cfg.shard.0,
        incarnation: 1,
        first_lsn: Lsn(0),
        prev_end: Lsn(0),
        checkpoint_lsn: Lsn(0),
        grain: grain as u32,
        file_bytes: cfg.journal_file_bytes,
    };
    let found = &mut ring.files[0];
    let write = DiskOp::Write {
        file: found.file,
        pos: 0,
        bufs: vec![header.encode()],
    };
    files.one(&found.path, write)?;
    found.header = Some(header);
    Ok(())
}

fn start_cursor(ring: &Ring, lsn: Lsn, capacity: u64) -> Option<Cursor> {
    let at = |first: Lsn| {
        let file = ring.starting_at(first)?;
        let incarnation = ring.files[file].header?.incarnation;
        Some(Cursor {
            file,
            first,
            incarnation,
            lsn,
        })
    };
    let first = Lsn(lsn.0 / capacity * capacity);
    // An lsn at the very end of a file belongs to that file when the next one was never begun.
    at(first).or_else(|| {
        first
            .0
            .checked_sub(capacity)
            .filter(|_| first == lsn)
            .and_then(|before| at(Lsn(before)))
    })
}

impl Replay<'_> {
    fn capacity(&self) -> u64 {
        self.cfg.journal_file_bytes - self.grain
    }

    fn damaged(&self, what: String) -> RecoverError {
        RecoverError::Damaged {
            shard: self.cfg.shard.0,
            what,
        }
    }

    fn frames(&mut self, files: &mut Files<'_>) -> Result<(), RecoverError> {
        loop {
            match self.look(files)? {
                Seen::Frame {
                    header,
                    bytes,
                    records,
                } => {
                    let frame = Frame::new(header, &bytes).map_err(|e| self.damaged(e.to_string()))?;
                    for record in &records {
                        self.state.apply(header.lsn, record, Some(&frame));
                    }
                    self.accept(&header, &records);
                }
                Seen::Bad { header } => {
                    if self.next_file() {
                        continue;
                    }
                    if !self.judge(files, header)? {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn accept(&mut self, header: &FrameHeader, records: &[Record]) {
        self.report.frames += 1;
        self.report.bytes += u64::from(header.frame_len);
        self.term = header.term;
        self.prev_lsn = header.lsn;
        self.directory = Directory::of(records);
        self.cursor.lsn = header.lsn.plus(u64::from(header.frame_len));
    }

    /// Reads what stands at the cursor.
    fn look(&mut self, files: &mut Files<'_>) -> Result<Seen, RecoverError> {
        let Cursor {
            first,
            incarnation,
            lsn,
            ..
        } = self.cursor;
        let pos = self.grain + (lsn.0 - first.0);
        let room = self.cfg.journal_file_bytes.saturating_sub(pos);
        if room < self.grain {
            return Ok(Seen::Bad { header: None });
        }
        let bytes = self.cfg.journal_file_bytes;
        let head = self
            .window
            .get(files, &self.ring, pos, FRAME_HEADER_BYTES, bytes)?;
        let ours = |h: &FrameHeader| h.lsn == lsn && h.incarnation == incarnation && h.term >= self.term;
        let Some(header) = FrameHeader::decode(&head, room).ok().filter(ours) else {
            return Ok(Seen::Bad { header: None });
        };
        let bytes = self
            .window
            .get(files, &self.ring, pos, header.frame_len as usize, bytes)?;
        let Ok(frame) = Frame::new(header, &bytes) else {
            return Ok(Seen::Bad {
                header: Some((header, None)),
            });
        };
        let records = frame.directory().ok();
        if frame.check_body().is_err() {
            return Ok(Seen::Bad {
                header: Some((header, records)),
            });
        }
        Ok(match records {
            Some(records) => Seen::Frame {
                header,
                bytes,
                records,
            },
            None => Seen::Bad {
                header: Some((header, None)),
            },
        })
    }

    /// Moves on to the next file, when frames of the present one ended here on purpose.
    fn next_file(&mut self) -> bool {
        let first = Lsn(self.cursor.first.0 + self.capacity());
        let Some(file) = self.ring.starting_at(first) else {
            return false;
        };
        let Some(header) = self.ring.files[file].header else {
            return false;
        };
        let follows = match self.ring.files[file].rebuilt {
            None => header.prev_end == self.cursor.lsn,
            Some(Rebuilt { prev_lsn }) => self.prev_lsn == NO_FRAME || prev_lsn == Some(self.prev_lsn),
        };
        if !follows {
            return false;
        }
        self.cursor = Cursor {
            file,
            first,
            incarnation: header.incarnation,
            lsn: first,
        };
        self.window = Window::new(file);
        true
    }

    /// Judges a bad frame at the cursor: `false` when it is the torn tail (the journal is cut here), `true` when it was
    /// damage and replay goes on behind it.
    fn judge(
        &mut self,
        files: &mut Files<'_>,
        bad: Option<(FrameHeader, Option<Vec<Record>>)>,
    ) -> Result<bool, RecoverError> {
        let at = self.cursor.lsn;
        let Later { promised, next } = self.scan(files)?;
        if promised.max(self.applied) <= at {
            self.report.torn = bad.is_some() || next.is_some();
            return Ok(false);
        }
        self.report.damaged_frames += 1;
        tracing::error!(
            lsn = at.0,
            promised = promised.0,
            "a journal frame below the promised durable end is damaged"
        );
        let end = bad
            .as_ref()
            .map(|(header, _)| header.lsn.plus(u64::from(header.frame_len)));
        let own = bad.and_then(|(_, records)| records);
        let copy = next
            .as_ref()
            .and_then(|next| Some((next.prev_lsn, next.copy.clone()?)));
        let goes_on = match (end, next) {
            // Its header says where the frame after it begins, which may be bad too.
            (Some(lsn), _) => Cursor { lsn, ..self.cursor },
            (None, Some(next)) => next.cursor,
            // Nothing good follows: what was promised is lost. Strictly ahead, or the same frame is judged for ever.
            (None, None) => {
                let lsn = promised.max(self.applied);
                start_cursor(&self.ring, lsn, self.capacity())
                    .ok_or_else(|| self.damaged(format!("no journal file holds lsn {lsn}")))?
            }
        };
        let known = own
            .map(|records| (at, records))
            .or_else(|| copy.clone().filter(|(lsn, _)| *lsn == at));
        if known.is_none() {
            self.state.doubt_below(goes_on.lsn);
        }
        // Of several frames lost in a row the next good one names the last.
        let last = copy.filter(|(lsn, _)| *lsn > at && *lsn < goes_on.lsn);
        for (lsn, records) in known.into_iter().chain(last) {
            records
                .iter()
                .for_each(|record| self.state.apply(lsn, record, None));
        }
        if goes_on.file != self.cursor.file {
            self.window = Window::new(goes_on.file);
        }
        self.cursor = goes_on;
        Ok(true)
    }

    /// Scans what follows the cursor, at grain, for the highest durable_lsn and the first good frame.
    fn scan(&mut self, files: &mut Files<'_>) -> Result<Later, RecoverError> {
        let mut files_behind: Vec<(usize, FileHeader)> = self
            .ring
            .current()
            .filter(|(_, h)| h.first_lsn >= self.cursor.first)
            .collect();
        files_behind.sort_by_key(|(_, h)| h.first_lsn);
        let mut later = Later {
            promised: Lsn(0),
            next: None,
        };
        for (file, header) in files_behind {
            let start = if header.first_lsn == self.cursor.first {
                self.grain * 2 + (self.cursor.lsn.0 - header.first_lsn.0)
            } else {
                self.grain
            };
            self.scan_file(files, file, &header, start, &mut later)?;
        }
        Ok(later)
    }

    fn scan_file(
        &mut self,
        files: &mut Files<'_>,
        file: usize,
        header: &FileHeader,
        start: u64,
        later: &mut Later,
    ) -> Result<(), RecoverError> {
        let file_bytes = self.cfg.journal_file_bytes;
        let mut window = Window::new(file);
        let mut pos = start;
        while pos + self.grain <= file_bytes {
            let lsn = Lsn(header.first_lsn.0 + pos - self.grain);
            let ours =
                |h: &FrameHeader| h.lsn == lsn && h.incarnation == header.incarnation && h.term >= self.term;
            let head = window.get(files, &self.ring, pos, FRAME_HEADER_BYTES, file_bytes)?;
            let found = FrameHeader::decode(&head, file_bytes - pos).ok().filter(ours);
            if let Some(found) = found {
                later.promised = later.promised.max(found.durable_lsn);
                if later.next.is_none() {
                    let len = found.frame_len as usize;
                    let bytes = window.get(files, &self.ring, pos, len, file_bytes)?;
                    let frame = Frame::new(found, &bytes).ok();
                    let good = frame.filter(|f| f.check_body().is_ok() && f.directory().is_ok());
                    later.next = good.map(|frame| NextFrame {
                        cursor: Cursor {
                            file,
                            first: header.first_lsn,
                            incarnation: header.incarnation,
                            lsn,
                        },
                        prev_lsn: found.prev_lsn,
                        copy: frame.previous_directory().ok(),
                    });
                }
            }
            pos += self.grain;
        }
        Ok(())
    }

    fn finish(mut self, checkpoint_lsn: Lsn) -> Replayed {
        self.report.cut = self.cursor.lsn;
        let capacity = self.capacity();
        let current = self.cursor.file;
        let cut = self.cursor.lsn;
        let needed =
            |h: &FileHeader| h.first_lsn < self.cursor.first && h.first_lsn.0 + capacity > checkpoint_lsn.0;
        let mut states = vec![RingState::Free; self.ring.files.len()];
        for (index, header) in self.ring.current() {
            if index == current || needed(&header) {
                states[index] = RingState::Used {
                    first: header.first_lsn,
                    end: Lsn(header.first_lsn.0 + capacity),
                };
            }
        }
        let files = self.ring.files.iter().zip(states).map(|(found, state)| RingFile {
            file: found.file,
            state,
        });
        let resume = Resume {
            files: files.collect(),
            current,
            incarnation: self.cursor.incarnation,
            max_incarnation: self.ring.max_incarnation(),
            next_lsn: cut,
            prev_lsn: self.prev_lsn,
            directory: self.directory,
        };
        let dropped = std::mem::take(&mut self.state.dropped);
        Replayed {
            logs: self.state.finish(),
            dropped,
            resume,
            report: self.report,
            checkpoint_lsn,
        }
    }
}

/// The partitions in memory.
struct State {
    cfg: StoreConfig,
    logs: HashMap<PartitionId, (Log, Lsn)>,
    /// Partitions whose continuity is in doubt until a later record proves it.
    doubted: HashSet<PartitionId>,
    dropped: Vec<PartitionId>,
    now: Now,
}

impl State {
    fn new(cfg: &StoreConfig, entries: Vec<Entry>, now: Now) -> State {
        let logs = entries
            .into_iter()
            .map(|entry| (entry.id, (Log::restored(&entry), entry.applied)))
            .collect();
        State {
            cfg: cfg.clone(),
            logs,
            doubted: HashSet::new(),
            dropped: Vec::new(),
            now,
        }
    }

    /// Frames below `lsn` are lost: every partition that the snapshot does not hold beyond them is in doubt.
    fn doubt_below(&mut self, lsn: Lsn) {
        let behind = self.logs.iter().filter(|(_, (_, applied))| *applied < lsn);
        self.doubted.extend(behind.map(|(id, _)| *id));
    }

    fn log(&mut self, id: PartitionId) -> &mut (Log, Lsn) {
        let cfg = &self.cfg;
        self.logs.entry(id).or_insert_with(|| {
            let epochs = EpochTable::new(cfg.epoch_entries);
            (
                Log::new(
                    id,
                    "",
                    Default::default(),
                    epochs,
                    ProducerTable::new(cfg.producers),
                ),
                Lsn(0),
            )
        })
    }

    /// Applies one record; without its frame its bytes are lost and their place is damage.
    fn apply(&mut self, lsn: Lsn, record: &Record, frame: Option<&Frame<'_>>) {
        let Some(id) = record.partition() else { return };
        if self.logs.get(&id).is_some_and(|(_, applied)| lsn < *applied) {
            return;
        }
        if *record == (Record::Drop { partition: id }) {
            self.logs.remove(&id);
            self.doubted.remove(&id);
            self.dropped.push(id);
            return;
        }
        let now_ms = self.now.wall_ms;
        let doubted = self.doubted.remove(&id);
        let (log, _) = self.log(id);
        match record {
            Record::Append {
                base,
                next,
                segment,
                pos,
                len,
                body_at,
                ..
            } => {
                let bytes = frame.and_then(|f| f.body(*body_at, *len).ok());
                let append = Append {
                    base: *base,
                    next: *next,
                    segment: *segment,
                    pos: *pos,
                    len: *len,
                    bytes,
                };
                append_to(log, &append, now_ms);
            }
            Record::EpochStart { epoch, start, .. } => {
                let proves = *start == log.log_end();
                // An epoch that is not above the table's was captured by the snapshot already.
                let _known = log.epochs.assign(*epoch, *start);
                log.epochs_dirty = true;
                if doubted && !proves {
                    self.doubted.insert(id);
                }
            }
            Record::Truncate {
                offset,
                segment,
                pos,
                prefix,
                ..
            } => {
                // Segments may begin there again.
                let gone = log.cut(*offset, *segment, *pos, prefix);
                log.leftovers |= !gone.is_empty();
                log.stale_indexes.extend(gone.iter().map(|s| s.base));
            }
            Record::LogStart { offset, .. } => {
                log.raise_start(*offset);
                if doubted {
                    self.doubted.insert(id);
                }
            }
            Record::Drop { .. } | Record::Start { .. } | Record::Mark => {}
        }
    }

    fn finish(self) -> Vec<Log> {
        let State { logs, doubted, .. } = self;
        let mut logs: Vec<Log> = logs.into_values().map(|(log, _)| log).collect();
        logs.sort_by_key(|log| log.id);
        for log in &mut logs {
            let end = log.log_end();
            log.epochs.drop_above(end);
            log.durable_end = end;
            log.recovered();
            log.high_watermark = log.high_watermark.clamp(log.log_start, end);
            if doubted.contains(&log.id) {
                log.fenced = Some(FenceReason::Damaged);
            }
        }
        logs
    }
}

struct Append<'a> {
    base: Offset,
    next: Offset,
    segment: Offset,
    pos: Pos,
    len: u32,
    /// `None`: the bytes are lost.
    bytes: Option<&'a [u8]>,
}

fn append_to(log: &mut Log, append: &Append<'_>, now_ms: i64) {
    let end = log.log_end();
    if append.next <= end && append.segment <= log.active().base {
        return;
    }
    if append.segment > log.active().base {
        if append.segment > end {
            lose(log, append.segment, log.active().end());
        }
        let sealed = log.active_mut();
        if sealed.next > sealed.base {
            sealed.set_state(SegmentState::Sealing);
        }
        log.push_segment(append.segment);
    }
    let start = log.active().end();
    match (append.pos.cmp(&start), append.base.cmp(&log.log_end())) {
        (Ordering::Equal, Ordering::Equal) => {}
        (Ordering::Greater, Ordering::Greater) => lose(log, append.base, append.pos),
        // Two records claim the same place, or one leaves a hole that is none: the journal contradicts itself.
        _ => {
            log.fenced = Some(FenceReason::Damaged);
            return;
        }
    }
    let start = log.active().end();
    match append.bytes {
        Some(bytes) => take_in(log, bytes, append.next, now_ms),
        None => lose(log, append.next, start.plus(u64::from(append.len))),
    }
}

fn take_in(log: &mut Log, bytes: &[u8], next: Offset, now_ms: i64) {
    let id = log.id;
    let Ok(header) = BatchHeader::parse(bytes) else {
        log.fenced = Some(FenceReason::Damaged);
        return;
    };
    let segment = log.active_mut();
    let pos = segment.end();
    segment.tail.append(bytes);
    segment.durable = segment.end();
    segment.next = next;
    segment.index_batch(id, &header, pos, BatchBytes::All(bytes));
    if segment.first_append_ms == 0 {
        segment.first_append_ms = now_ms.max(1);
    }
    log.producers.record(&header, header.base_offset, now_ms);
}

/// Records up to `next` and bytes up to `end` of the active segment are lost: zeros stand in their place, so that what
/// follows keeps its position.
fn lose(log: &mut Log, next: Offset, end: Pos) {
    let first = log.log_end();
    let segment = log.active_mut();
    let (base, start) = (segment.base, segment.end());
    let zeros = vec![0; end.0.saturating_sub(start.0) as usize];
    segment.tail.append(&zeros);
    segment.durable = segment.end();
    segment.next = next.max(first);
    segment.index_hole(start, end, next.max(first));
    if next > first {
        log.damage.push(Damage {
            offsets: first.0..next.0,
            segment: base,
            bytes: start.0..end.0,
        });
    }
}
