//! Reads: from memory where the bytes are there, else by large direct reads whose every byte is checked before it
//! leaves; lookups by offset and by time; listing of segments.
//!
//! A reader is a small job that is looked at again whenever what it waits for has come (level-triggered), so nothing
//! it decided before a wait is trusted after it: offsets, segments and cuts may have moved. Bytes that fail their
//! checks are damage of exactly their offsets, never served, never a cut (STORAGE.md section 6).

use std::collections::{HashMap, VecDeque};

use crate::batch::{self, HEADER_BYTES};
use crate::error::{FenceReason, ReadError};
use crate::index::Interval;
use crate::io::buf::{AppendBuf, BufSlice};
use crate::io::{DirEntry, DiskError, DiskOp, Done};
use crate::limits::BLOCK;
use crate::log::{Damage, Listing, Log, LogNo, LogState};
use crate::removal::DELETE_SUFFIX;
use crate::segment::{FileState, IndexState, Segment, SegmentState};
use crate::store::{Outbox, Pending, ReadBytes, ReadRequest, Store, StoreEvent};
use crate::types::{Now, Offset, PartitionId, Pos};

const B: u64 = BLOCK as u64;
/// Readers at once; more are refused as busy.
const MAX_JOBS: usize = 16_384;
/// Disk reads are at least this large: the next fetch of a sequential reader then finds whole intervals too.
const READ_AHEAD: u64 = 256 << 10;
/// And at most this large, beside one whole interval.
const MAX_READ: u64 = 4 << 20;

/// Files of sealed segments that stay open for further reads; few in unit tests, to reach the bound.
pub(crate) const MAX_OPEN_SEALED: usize = if cfg!(test) { 3 } else { 256 };

/// What a reader wants.
#[derive(Debug, Clone)]
enum Want {
    Bytes(ReadRequest),
    /// Whole batches from any offset that is still there, for a rebuild of the producer table.
    Batches(ReadRequest),
    Time {
        token: u64,
        timestamp: i64,
        limit: Offset,
    },
    /// The start of the batch that contains the offset, for a cut.
    Cut {
        to: Offset,
    },
}

/// What a reader waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocked {
    Nothing,
    Listing,
    Index(Offset),
    File(Offset),
    Disk { segment: Offset, from: Pos, to: Pos },
}

#[derive(Debug)]
struct Job {
    log: LogNo,
    partition: PartitionId,
    want: Want,
    blocked: Blocked,
    /// For a lookup by time: segments below this one were searched.
    searched: Offset,
    /// The index was dropped once because it disagreed with good batches.
    reindexed: bool,
    /// For a cut: bytes of the first block read before the range looked at.
    lead: Vec<u8>,
}

/// Place of a batch, for a cut.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) base: Offset,
    pub(crate) segment: Offset,
    pub(crate) pos: Pos,
    /// Bytes of the block before the position.
    pub(crate) prefix: Vec<u8>,
}

/// Readers of a shard.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    next: u64,
    jobs: HashMap<u64, Job>,
    by_log: HashMap<LogNo, Vec<u64>>,
    /// Sealed segments whose files are open, longest open first.
    open_sealed: VecDeque<(LogNo, Offset)>,
}

impl Reads {
    /// Whether anybody reads this log (or looks for the place of a cut).
    pub(crate) fn is_reading(&self, no: LogNo) -> bool {
        self.by_log.contains_key(&no)
    }

    fn of_log(&self, no: LogNo, wanted: impl Fn(Blocked) -> bool) -> Vec<u64> {
        let ids = self.by_log.get(&no).map_or(&[][..], Vec::as_slice);
        ids.iter()
            .copied()
            .filter(|id| wanted(self.jobs[id].blocked))
            .collect()
    }

    fn add(&mut self, job: Job) -> u64 {
        self.next += 1;
        self.by_log.entry(job.log).or_default().push(self.next);
        self.jobs.insert(self.next, job);
        self.next
    }

    fn remove(&mut self, id: u64) -> Option<Job> {
        let job = self.jobs.remove(&id)?;
        if let Some(ids) = self.by_log.get_mut(&job.log) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_log.remove(&job.log);
            }
        }
        Some(job)
    }
}

/// What a reader should do next.
enum Next {
    Wait(Blocked),
    Range { segment: Offset, from: Pos, to: Pos },
    Answer(Answer),
}

/// How a reader ends.
enum Answer {
    Bytes(ReadBytes),
    Time(Option<(Offset, i64)>),
    Cut(Place),
    Refused(ReadError),
}

impl Store {
    /// Reads whole batches; answered by [`StoreEvent::Read`], at once when the bytes are in memory.
    pub fn read(&mut self, now: Now, request: ReadRequest, out: &mut Outbox) {
        let partition = request.partition;
        self.start_job(now, partition, Want::Bytes(request), out);
    }

    /// Looks the first record below `limit` up whose timestamp is at or after `timestamp`; answered by
    /// [`StoreEvent::TimeFound`]. Of a compressed batch the batch's first offset is told: its records are opaque here.
    pub fn offset_for_time(
        &mut self,
        now: Now,
        token: u64,
        partition: PartitionId,
        timestamp: i64,
        limit: Offset,
        out: &mut Outbox,
    ) {
        self.start_job(
            now,
            partition,
            Want::Time {
                token,
                timestamp,
                limit,
            },
            out,
        );
    }

    /// Reads for a rebuild of the producer table, also below the log start; answered to it.
    pub(crate) fn read_for_rebuild(&mut self, now: Now, request: ReadRequest, out: &mut Outbox) {
        let partition = request.partition;
        self.start_job(now, partition, Want::Batches(request), out);
    }

    /// Looks up where a cut at `to` falls.
    pub(crate) fn locate(&mut self, now: Now, no: LogNo, to: Offset, out: &mut Outbox) {
        if let Some(partition) = self.log(no).map(|log| log.id) {
            self.start_job(now, partition, Want::Cut { to }, out);
        }
    }

    fn start_job(&mut self, now: Now, partition: PartitionId, want: Want, out: &mut Outbox) {
        let no = self.find_no(partition);
        let refused = match no {
            None => Some(ReadError::UnknownPartition(partition)),
            Some(_) if self.reads.jobs.len() >= MAX_JOBS => Some(ReadError::Busy),
            // A cut waits for the readers that are there; new ones would keep it waiting.
            Some(no) if !matches!(want, Want::Cut { .. }) && self.is_locating_cut(no) => {
                Some(ReadError::Busy)
            }
            Some(_) => None,
        };
        let log = no.unwrap_or(LogNo(u32::MAX));
        let job = Job {
            log,
            partition,
            want,
            blocked: Blocked::Nothing,
            searched: Offset(0),
            reindexed: false,
            lead: Vec::new(),
        };
        match refused {
            Some(error) => self.answer(now, &job, Answer::Refused(error), out),
            None => {
                let id = self.reads.add(job);
                self.advance_read(now, id, out);
            }
        }
    }

    fn advance_read(&mut self, now: Now, id: u64, out: &mut Outbox) {
        loop {
            let Some(job) = self.reads.jobs.get(&id) else {
                return;
            };
            let no = job.log;
            match self.next_step(job) {
                Next::Answer(answer) => {
                    let Some(job) = self.reads.remove(id) else { return };
                    self.answer(now, &job, answer, out);
                    return;
                }
                Next::Wait(blocked) => {
                    self.set_blocked(id, blocked);
                    self.provide(no, blocked, out);
                    return;
                }
                Next::Range { segment, from, to } => {
                    if !self.serve_range(now, id, segment, from, to, out) {
                        return;
                    }
                }
            }
        }
    }

    /// Whether the log waits for the place of a cut.
    fn is_locating_cut(&self, no: LogNo) -> bool {
        let state = self.log(no).map(|log| log.state);
        matches!(state, Some(LogState::Cutting { recorded: false, .. }))
    }

    fn set_blocked(&mut self, id: u64, blocked: Blocked) {
        if let Some(job) = self.reads.jobs.get_mut(&id) {
            job.blocked = blocked;
        }
    }

    /// Sets in motion what a reader waits for.
    fn provide(&mut self, no: LogNo, blocked: Blocked, out: &mut Outbox) {
        match blocked {
            Blocked::Listing => self.list_segments(no, out),
            Blocked::Index(base) => self.load_index(no, base, out),
            Blocked::File(base) => {
                let closed = self
                    .log(no)
                    .and_then(|l| l.segment(base))
                    .is_some_and(|s| s.file == FileState::Closed);
                if closed {
                    self.open_segment(no, base, false, out);
                }
            }
            Blocked::Nothing | Blocked::Disk { .. } => {}
        }
    }

    fn next_step(&self, job: &Job) -> Next {
        let Some(log) = self.log(job.log) else {
            return Next::Answer(Answer::Refused(ReadError::UnknownPartition(job.partition)));
        };
        match &job.want {
            Want::Bytes(request) => next_for_bytes(log, request),
            Want::Batches(request) => next_for_offset(log, request.offset, request.max_bytes as u64),
            Want::Time { timestamp, limit, .. } => next_for_time(log, job.searched, *timestamp, *limit),
            Want::Cut { to } => next_for_offset(log, *to, 1),
        }
    }

    /// Serves a range from memory, or starts a disk read for it. Whether the job should be looked at again at once.
    fn serve_range(
        &mut self,
        now: Now,
        id: u64,
        segment: Offset,
        from: Pos,
        to: Pos,
        out: &mut Outbox,
    ) -> bool {
        let Some(job) = self.reads.jobs.get(&id) else {
            return false;
        };
        let no = job.log;
        let Some(log) = self.log(no) else { return false };
        let Some(in_segment) = log.segment(segment) else {
            return false;
        };
        if from >= in_segment.tail.start() {
            self.stats.memory_reads += 1;
            let Some(job) = self.reads.jobs.get(&id) else {
                return false;
            };
            let Some(log) = self.log(no) else { return false };
            let answer = match &job.want {
                Want::Bytes(request) | Want::Batches(request) => memory_bytes(log, segment, from, request),
                _ => {
                    let bytes = copy_range(in_tail(log, segment), from, to);
                    return self.bytes_arrived(now, id, segment, from, &bytes, out);
                }
            };
            let Some(job) = self.reads.remove(id) else {
                return false;
            };
            self.answer(now, &job, answer, out);
            return false;
        }
        let FileState::Open(file) = in_segment.file else {
            self.set_blocked(id, Blocked::File(segment));
            self.provide(no, Blocked::File(segment), out);
            return false;
        };
        let start = from.floor(B);
        let end = to.ceil(B).min(in_segment.tail.start().ceil(B));
        self.set_blocked(id, Blocked::Disk { segment, from, to });
        if let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(segment)) {
            segment.readers += 1;
        }
        let op = self.ops.id(Pending::Read {
            read: id,
            log: no,
            segment,
        });
        out.ops.push((
            op,
            DiskOp::Read {
                file,
                pos: start.0,
                len: (end.0 - start.0) as usize,
            },
        ));
        false
    }

    /// A disk read for a reader came back.
    pub(crate) fn read_done(
        &mut self,
        now: Now,
        id: u64,
        no: LogNo,
        segment: Offset,
        result: Result<Done, DiskError>,
        out: &mut Outbox,
    ) {
        if let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(segment)) {
            segment.readers = segment.readers.saturating_sub(1);
        }
        let Some(job) = self.reads.jobs.get_mut(&id) else {
            return;
        };
        let Blocked::Disk { from, to, .. } = std::mem::replace(&mut job.blocked, Blocked::Nothing) else {
            return;
        };
        let bytes = match result {
            Ok(Done::Read(bytes)) => bytes,
            Ok(_) => return,
            Err(error) => {
                let Some(job) = self.reads.remove(id) else { return };
                self.answer(now, &job, Answer::Refused(ReadError::Disk(error)), out);
                return;
            }
        };
        if matches!(job.want, Want::Cut { .. }) {
            let lead = (from.0 - from.floor(B).0) as usize;
            job.lead = bytes.get(..lead).unwrap_or_default().to_vec();
        }
        self.stats.disk_reads += 1;
        self.stats.read_bytes += bytes.len() as u64;
        let Some(bytes) = self.complete_range(no, segment, from, to, &bytes) else {
            // The segment changed meanwhile: start over.
            self.advance_read(now, id, out);
            return;
        };
        if self.bytes_arrived(now, id, segment, from, &bytes, out) {
            self.advance_read(now, id, out);
        }
    }

    /// The bytes `from..to` out of a disk read and, where the range goes on in memory, the tail.
    fn complete_range(
        &self,
        no: LogNo,
        segment: Offset,
        from: Pos,
        to: Pos,
        read: &BufSlice,
    ) -> Option<BufSlice> {
        let segment = self.log(no)?.segment(segment)?;
        let skip = (from.0 - from.floor(B).0) as usize;
        let len = (to.0 - from.0) as usize;
        if to > segment.end() {
            return None;
        }
        if read.len() >= skip + len {
            return Some(read.slice(skip..skip + len));
        }
        let have = read.len().checked_sub(skip)?;
        let rest_at = from.plus(have as u64);
        if rest_at < segment.tail.start() {
            return None;
        }
        let mut whole = AppendBuf::with_capacity(len);
        whole.append(&read[skip..]);
        segment
            .tail
            .slices(rest_at, to)
            .iter()
            .for_each(|slice| whole.append(slice));
        Some(whole.freeze())
    }

    /// Checks bytes and ends the job with them. Whether the job should be looked at again.
    fn bytes_arrived(
        &mut self,
        now: Now,
        id: u64,
        segment: Offset,
        from: Pos,
        bytes: &BufSlice,
        out: &mut Outbox,
    ) -> bool {
        let Some(job) = self.reads.jobs.get(&id) else {
            return false;
        };
        let (no, reindexed) = (job.log, job.reindexed);
        let Some(log) = self.log(no) else { return false };
        let good = match check_bytes(log, segment, from, bytes) {
            Checked::Good(len) => len,
            // Bad bytes by an index from before a cut may be good ones: the walk decides.
            Checked::StaleIndex | Checked::Bad(_) if !reindexed => {
                self.drop_index(no, segment);
                if let Some(job) = self.reads.jobs.get_mut(&id) {
                    job.reindexed = true;
                }
                return true;
            }
            Checked::StaleIndex => bytes.len(),
            Checked::Bad(damage) => {
                self.note_damage(no, damage);
                return true;
            }
        };
        let Some(job) = self.reads.jobs.get_mut(&id) else {
            return false;
        };
        let Some(log) = self.logs.get(no.0 as usize).and_then(|l| l.as_deref()) else {
            return false;
        };
        let bytes = bytes.slice(0..good);
        let answer = match &job.want {
            Want::Bytes(request) | Want::Batches(request) => disk_bytes(log, request, &bytes),
            Want::Cut { to } => cut_place(log, segment, from, *to, &bytes, &job.lead),
            Want::Time { timestamp, limit, .. } => match find_time(&bytes, log.log_start, *timestamp) {
                Some((offset, time)) => Answer::Time((offset < *limit).then_some((offset, time))),
                None => {
                    // Records below the log start carried the time: go on behind this interval.
                    let after = batch::batches(&bytes)
                        .filter_map(Result::ok)
                        .last()
                        .map(|(h, _)| h.next_offset());
                    job.searched = after.unwrap_or(job.searched).max(job.searched.plus(1));
                    return true;
                }
            },
        };
        let Some(job) = self.reads.remove(id) else {
            return false;
        };
        self.answer(now, &job, answer, out);
        false
    }

    /// Takes note of damage found while reading.
    pub(crate) fn note_damage(&mut self, no: LogNo, damage: Damage) {
        self.stats.damage_found += 1;
        let within = |known: &Damage| {
            known.offsets.start <= damage.offsets.start && damage.offsets.end <= known.offsets.end
        };
        if let Some(log) = self.log_mut(no)
            && !log.damage.iter().any(within)
        {
            tracing::error!(partition = %log.id, from = damage.offsets.start, to = damage.offsets.end, "damaged bytes");
            log.damage.push(damage);
            log.damage.sort_by_key(|d| d.offsets.start);
        }
    }

    fn answer(&mut self, now: Now, job: &Job, answer: Answer, out: &mut Outbox) {
        let partition = job.partition;
        match &job.want {
            Want::Bytes(request) => {
                let result = match answer {
                    Answer::Bytes(bytes) => Ok(bytes),
                    Answer::Refused(error) => Err(error),
                    Answer::Time(_) | Answer::Cut(_) => return,
                };
                out.events.push(StoreEvent::Read {
                    token: request.token,
                    partition,
                    result,
                });
                self.truncate_may_go_on(now, job.log, out);
            }
            Want::Batches(_) => {
                let result = match answer {
                    Answer::Bytes(bytes) => Ok(bytes),
                    Answer::Refused(error) => Err(error),
                    Answer::Time(_) | Answer::Cut(_) => return,
                };
                self.rebuild_read_done(now, job.log, result, out);
            }
            Want::Time { token, .. } => {
                let result = match answer {
                    Answer::Time(found) => Ok(found),
                    Answer::Refused(error) => Err(error),
                    Answer::Bytes(_) | Answer::Cut(_) => return,
                };
                out.events.push(StoreEvent::TimeFound {
                    token: *token,
                    partition,
                    result,
                });
                self.truncate_may_go_on(now, job.log, out);
            }
            Want::Cut { .. } => {
                let result = match answer {
                    Answer::Cut(place) => Ok(place),
                    Answer::Refused(error) => Err(error),
                    Answer::Bytes(_) | Answer::Time(_) => return,
                };
                self.cut_located(now, job.log, result, out);
            }
        }
    }

    /// A sealed segment's file was opened (or stays open) for readers: the longest open ones are closed beyond the bound.
    pub(crate) fn sealed_is_open(&mut self, no: LogNo, base: Offset, out: &mut Outbox) {
        self.reads.open_sealed.push_back((no, base));
        for _ in MAX_OPEN_SEALED..self.reads.open_sealed.len() {
            let Some((no, base)) = self.reads.open_sealed.pop_front() else {
                return;
            };
            let Some(segment) = self.log_mut(no).and_then(|log| log.segment_mut(base)) else {
                continue;
            };
            let FileState::Open(file) = segment.file else {
                continue;
            };
            if segment.state() != SegmentState::Sealed {
                continue;
            }
            if segment.readers > 0 || segment.is_loading() {
                self.reads.open_sealed.push_back((no, base));
            } else {
                segment.file = FileState::Closed;
                self.close_file(file, out);
            }
        }
    }

    // What readers wait for.

    /// Readers of a segment go on: its file is open, or its index is loaded.
    pub(crate) fn resume_reads(&mut self, now: Now, no: LogNo, base: Offset, out: &mut Outbox) {
        for id in self
            .reads
            .of_log(no, |b| b == Blocked::File(base) || b == Blocked::Index(base))
        {
            self.set_blocked(id, Blocked::Nothing);
            self.advance_read(now, id, out);
        }
    }

    /// A segment's file could not be opened: its readers are answered.
    pub(crate) fn reads_of_segment_failed(
        &mut self,
        now: Now,
        no: LogNo,
        base: Offset,
        error: DiskError,
        out: &mut Outbox,
    ) {
        for id in self
            .reads
            .of_log(no, |b| b == Blocked::File(base) || b == Blocked::Index(base))
        {
            let Some(job) = self.reads.remove(id) else {
                continue;
            };
            self.answer(now, &job, Answer::Refused(ReadError::Disk(error)), out);
        }
    }

    /// Answers every reader of a log with `error`.
    pub(crate) fn fail_reads(&mut self, now: Now, no: LogNo, error: &ReadError, out: &mut Outbox) {
        for id in self.reads.of_log(no, |_| true) {
            let Some(job) = self.reads.remove(id) else {
                continue;
            };
            self.answer(now, &job, Answer::Refused(error.clone()), out);
        }
    }

    /// Readers that were waiting when the log was cut look at it anew; disk reads in flight find out by themselves.
    pub(crate) fn reads_were_cut(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        for id in self.reads.of_log(no, |b| !matches!(b, Blocked::Disk { .. })) {
            self.set_blocked(id, Blocked::Nothing);
            self.advance_read(now, id, out);
        }
    }

    /// Lists a partition's directory, to learn of the segments below the active one.
    pub(crate) fn list_segments(&mut self, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        if log.listing != Listing::Unknown {
            return;
        }
        log.listing = Listing::Pending;
        log.relist = true;
        self.list_again(no, out);
    }

    /// Lists the directory again, when that was put off and no name in it is on its way out any more.
    pub(crate) fn list_again(&mut self, no: LogNo, out: &mut Outbox) {
        let due = |log: &Log| log.relist && log.renaming == 0 && !log.is_cut_undecided();
        if self.log(no).is_some_and(due) {
            self.submit_listing(no, out);
        }
    }

    fn submit_listing(&mut self, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        log.relist = false;
        let path = log.dir();
        let op = self.ops.id(Pending::List { log: no });
        out.ops.push((op, DiskOp::List { path }));
    }

    pub(crate) fn listed(&mut self, now: Now, no: LogNo, result: Result<Done, DiskError>, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        // What an undecided cut took from memory would be set aside as a stranger: the listing comes after it.
        if log.relist || log.is_cut_undecided() {
            log.relist = true;
            self.list_again(no, out);
            return;
        }
        let names = match result {
            Ok(Done::Listed(names)) => names,
            Err(DiskError::NotFound) | Ok(_) => Vec::new(),
            Err(error) => {
                log.listing = Listing::Unknown;
                if log.leftovers {
                    self.fence_partition(no, FenceReason::SegmentFailed, out);
                }
                self.place_failed(now, no, error, out);
                for id in self.reads.of_log(no, |b| b == Blocked::Listing) {
                    let Some(job) = self.reads.remove(id) else {
                        continue;
                    };
                    self.answer(now, &job, Answer::Refused(ReadError::Disk(error)), out);
                }
                return;
            }
        };
        log.listing = Listing::Known;
        log.leftovers = false;
        let dir = log.dir();
        let leftovers = adopt_segments(log, &names);
        log.stale_indexes.clear();
        for name in names.iter().filter(|n| n.name.ends_with(DELETE_SUFFIX)) {
            self.doom(format!("{dir}/{}", name.name), false, now.mono);
        }
        // A fenced shard does not know which of its cuts became durable.
        for name in leftovers
            .iter()
            .filter(|_| self.fenced.is_none())
            .collect::<Vec<_>>()
        {
            self.set_aside(no, format!("{dir}/{name}"), false, None, out);
        }
        self.advance_open_segments(now, no, out);
        for id in self.reads.of_log(no, |b| b == Blocked::Listing) {
            self.set_blocked(id, Blocked::Nothing);
            self.advance_read(now, id, out);
        }
    }
}

/// Adds the segments found on disk below the first one known; returns files that belong to none (what a rename that
/// the last crash undid would have set aside).
fn adopt_segments(log: &mut Log, names: &[DirEntry]) -> Vec<String> {
    let first_known = log.segments[0].base;
    let mut found: Vec<(Offset, u64)> = names
        .iter()
        .filter_map(|n| Some((segment_base(&n.name, "log")?, n.len)))
        .filter(|(base, _)| *base < first_known && *base >= log.oldest)
        .collect();
    found.sort_unstable();
    let mut next = first_known;
    for (base, len) in found.into_iter().rev() {
        log.segments.push_front(Segment::sealed(base, next, len));
        next = base;
    }
    let known = |base: Offset| log.segments.iter().any(|s| s.base == base);
    names
        .iter()
        .filter(|n| {
            let stale = |base| log.stale_indexes.contains(&base);
            segment_base(&n.name, "index").is_some_and(stale)
                || ["log", "index", "producers"]
                    .iter()
                    .any(|e| segment_base(&n.name, e).is_some_and(|base| !known(base)))
        })
        .map(|n| n.name.clone())
        .collect()
}

/// Base offset of a file named `<20 digits>.<extension>`; anything else is `None` (F24).
fn segment_base(name: &str, extension: &str) -> Option<Offset> {
    let digits = name.strip_suffix(extension)?.strip_suffix('.')?;
    let canonical = digits.len() == 20 && digits.bytes().all(|b| b.is_ascii_digit());
    canonical.then(|| digits.parse().ok().map(Offset)).flatten()
}

fn refuse(error: ReadError) -> Next {
    Next::Answer(Answer::Refused(error))
}

fn refuse_damaged(damage: &Damage) -> Next {
    refuse(ReadError::Damaged {
        from: Offset(damage.offsets.start),
        to: Offset(damage.offsets.end),
    })
}

fn next_for_bytes(log: &Log, request: &ReadRequest) -> Next {
    let (log_start, log_end) = (log.log_start, log.log_end());
    if request.offset < log_start || request.offset > log_end {
        return refuse(ReadError::OutOfRange { log_start, log_end });
    }
    let limit = request.limit.min(log_end);
    if request.offset >= limit {
        return Next::Answer(Answer::Bytes(ReadBytes {
            batches: Vec::new(),
            next: request.offset,
        }));
    }
    next_for_offset(log, request.offset, request.max_bytes as u64)
}

/// The range to look at for the batch that contains `offset`, with about `wanted` bytes.
fn next_for_offset(log: &Log, offset: Offset, wanted: u64) -> Next {
    if let Some(damage) = log.damage_at(offset) {
        return refuse_damaged(damage);
    }
    if offset < log.segments[0].base {
        return match log.listing {
            Listing::Known => refuse(ReadError::Damaged {
                from: offset,
                to: log.segments[0].base,
            }),
            Listing::Unknown | Listing::Pending => Next::Wait(Blocked::Listing),
        };
    }
    let Some(segment) = log.segment_at(offset).map(|at| &log.segments[at]) else {
        return refuse(ReadError::OutOfRange {
            log_start: log.log_start,
            log_end: log.log_end(),
        });
    };
    let IndexState::Ready(builder) = &segment.index else {
        return Next::Wait(Blocked::Index(segment.base));
    };
    let (open, open_offset) = builder.open_start();
    if offset >= builder.next_offset() {
        // The walk stopped before the segment's end: what lies behind is damaged.
        return refuse(ReadError::Damaged {
            from: builder.next_offset(),
            to: segment.next,
        });
    }
    let from = if offset >= open_offset {
        open
    } else {
        match builder.index().find_offset(offset) {
            Some(interval) => interval.pos,
            None => {
                return refuse(ReadError::Damaged {
                    from: offset,
                    to: open_offset,
                });
            }
        }
    };
    let to = range_end(segment, builder, from, wanted);
    Next::Range {
        segment: segment.base,
        from,
        to,
    }
}

/// End of a read from `from`: whole intervals, about `wanted` bytes, at least one interval.
fn range_end(segment: &Segment, builder: &crate::index::IndexBuilder, from: Pos, wanted: u64) -> Pos {
    let about = from.plus(wanted.clamp(READ_AHEAD, MAX_READ)).min(builder.end());
    let closed = builder.index().end();
    if about >= closed {
        return if about.0 - closed.0.min(about.0) > 0 || from >= closed {
            builder.end()
        } else {
            closed
        };
    }
    builder.index().covering(about).map_or(segment.end(), |interval| {
        if interval.pos > from {
            interval.pos
        } else {
            interval.end
        }
    })
}

fn next_for_time(log: &Log, searched: Offset, timestamp: i64, limit: Offset) -> Next {
    if log.listing != Listing::Known && log.oldest < log.segments[0].base {
        return Next::Wait(Blocked::Listing);
    }
    let from = searched.max(log.log_start);
    if from < log.segments[0].base.min(limit) {
        // A file is missing: what it held may be the record.
        return refuse(ReadError::Damaged {
            from,
            to: log.segments[0].base,
        });
    }
    for segment in log.segments.iter().filter(|s| s.next > from) {
        let IndexState::Ready(builder) = &segment.index else {
            return Next::Wait(Blocked::Index(segment.base));
        };
        if !segment.is_untimed() && builder.max_timestamp() < timestamp {
            continue;
        }
        // An interval without a time may be a hole, whose times are lost with it: the record may have been there.
        let may_hold = |i: &Interval| i.next > from && (i.max_timestamp >= timestamp || i.max_timestamp < 0);
        let found = builder.index().iter().find(may_hold);
        if let Some(interval) = found {
            if interval.first >= limit {
                return Next::Answer(Answer::Time(None));
            }
            if let Some(damage) = log.damage_in(interval.first.max(from), interval.next) {
                return refuse_damaged(damage);
            }
            return Next::Range {
                segment: segment.base,
                from: interval.pos,
                to: interval.end,
            };
        }
        let (open, open_offset) = builder.open_start();
        if open < builder.end() && builder.next_offset() > from && open_offset < limit {
            if let Some(damage) = log.damage_at(open_offset.max(from)) {
                return refuse_damaged(damage);
            }
            return Next::Range {
                segment: segment.base,
                from: open,
                to: builder.end(),
            };
        }
        // The walk stopped before the segment's end: what lies behind is damaged.
        let lost = builder.next_offset().max(from);
        if lost < segment.next.min(limit) {
            return refuse(ReadError::Damaged {
                from: lost,
                to: segment.next,
            });
        }
    }
    Next::Answer(Answer::Time(None))
}

fn in_tail(log: &Log, segment: Offset) -> &crate::segment::Tail {
    &log.segment(segment).expect("the caller found the segment").tail
}

fn copy_range(tail: &crate::segment::Tail, from: Pos, to: Pos) -> BufSlice {
    let mut buf = AppendBuf::with_capacity((to.0 - from.0) as usize);
    tail.slices(from, to).iter().for_each(|slice| buf.append(slice));
    buf.freeze()
}

/// Bytes of a read that lies in memory: nothing is copied, and nothing needs a check that was checked on the way in.
fn memory_bytes(log: &Log, segment: Offset, from: Pos, request: &ReadRequest) -> Answer {
    let tail = in_tail(log, segment);
    let limit = request.limit.min(log.log_end());
    let mut head = [0; HEADER_BYTES];
    let (mut pos, mut start, mut next) = (from, None, request.offset);
    while tail.copy_to(pos, &mut head) == HEADER_BYTES {
        let Some(header) = batch::peek(&head) else { break };
        if header.next_offset() > limit || log.damage_at(header.base_offset).is_some() {
            break;
        }
        let end = pos.plus(header.size as u64);
        if header.next_offset() > request.offset {
            let begin = *start.get_or_insert(pos);
            let too_much = begin < pos && end.0 - begin.0 > request.max_bytes as u64;
            if too_much {
                break;
            }
            next = header.next_offset();
        }
        pos = end;
    }
    let batches = start.map_or_else(Vec::new, |start| tail.slices(start, pos));
    Answer::Bytes(ReadBytes { batches, next })
}

fn disk_bytes(log: &Log, request: &ReadRequest, bytes: &BufSlice) -> Answer {
    let limit = request.limit.min(log.log_end());
    let (mut pos, mut start, mut next) = (0, None, request.offset);
    for (header, batch) in batch::batches(bytes).map_while(Result::ok) {
        if header.next_offset() > limit {
            break;
        }
        let end = pos + batch.len();
        if header.next_offset() > request.offset {
            let begin = *start.get_or_insert(pos);
            if begin < pos && end - begin > request.max_bytes {
                break;
            }
            next = header.next_offset();
        }
        pos = end;
    }
    let batches = start.map_or_else(Vec::new, |start| vec![bytes.slice(start..pos)]);
    Answer::Bytes(ReadBytes { batches, next })
}

/// Where a cut at `to` falls in `bytes`, which begin at `from`; `lead` are the bytes of that block before `from`.
fn cut_place(log: &Log, segment: Offset, from: Pos, to: Offset, bytes: &BufSlice, lead: &[u8]) -> Answer {
    let Some((pos, header)) = crate::truncate::find_batch(bytes, from, to) else {
        return Answer::Refused(ReadError::OutOfRange {
            log_start: log.log_start,
            log_end: log.log_end(),
        });
    };
    let floor = pos.floor(B);
    let tail = in_tail(log, segment);
    let prefix = if tail.start() <= floor {
        copy_range(tail, floor, pos).to_vec()
    } else {
        let skip = (pos.0 - from.0) as usize;
        match floor.0.checked_sub(from.0) {
            Some(begin) => bytes[begin as usize..skip].to_vec(),
            // The cut block begins before the range.
            None => [lead, &bytes[..skip]].concat(),
        }
    };
    Answer::Cut(Place {
        base: header.base_offset,
        segment,
        pos,
        prefix,
    })
}

/// The first record at or after `timestamp` in a run of whole batches, at or above `log_start`.
fn find_time(bytes: &[u8], log_start: Offset, timestamp: i64) -> Option<(Offset, i64)> {
    batch::batches(bytes)
        .map_while(Result::ok)
        .filter(|(h, _)| h.max_timestamp >= timestamp)
        .find_map(|(header, batch)| {
            if header.codec() != 0 || header.timestamp_type() == batch::TimestampType::LogAppendTime {
                // All its records have this time; the log may start in its middle.
                let first = header.base_offset.max(log_start);
                return (first < header.next_offset()).then_some((first, header.max_timestamp));
            }
            batch::records(batch)
                .ok()?
                .map_while(Result::ok)
                .find_map(|record| {
                    let hit = record.timestamp >= timestamp && record.offset >= log_start;
                    hit.then_some((record.offset, record.timestamp))
                })
        })
}

/// What the checks say of bytes from disk.
enum Checked {
    /// The first so many bytes are whole good batches.
    Good(usize),
    /// The batches are good but the index says something else.
    StaleIndex,
    /// The first batches are damaged.
    Bad(Damage),
}

/// Checks every interval of a range, and what no interval covers by offsets, epochs and batch checksums.
fn check_bytes(log: &Log, segment: Offset, from: Pos, bytes: &[u8]) -> Checked {
    let Some(in_segment) = log.segment(segment) else {
        return Checked::StaleIndex;
    };
    let IndexState::Ready(builder) = &in_segment.index else {
        return Checked::StaleIndex;
    };
    let index = builder.index();
    let mut good = 0;
    while good < bytes.len() {
        let pos = from.plus(good as u64);
        let (len, offsets, whole) = match index.covering(pos) {
            Some(interval) if interval.pos == pos && good + interval.len() as usize <= bytes.len() => {
                let len = interval.len() as usize;
                let whole = index.key().verify(&interval, &bytes[good..good + len]);
                (len, interval.first.0..interval.next.0, whole)
            }
            Some(_) => {
                return if good > 0 {
                    Checked::Good(good)
                } else {
                    Checked::StaleIndex
                };
            }
            None => {
                let (_, open_offset) = builder.open_start();
                (bytes.len() - good, open_offset.0..builder.next_offset().0, false)
            }
        };
        let part = &bytes[good..good + len];
        if !whole {
            let chained = batches_are_good(log, part, Offset(offsets.start), Offset(offsets.end));
            let indexed = index.covering(pos).is_some();
            match (chained, good) {
                (true, 0) if indexed => return Checked::StaleIndex,
                (true, _) if indexed => return Checked::Good(good),
                (true, _) => {}
                (false, 0) => {
                    let bytes = pos.0..pos.0 + len as u64;
                    return Checked::Bad(Damage {
                        offsets,
                        segment,
                        bytes,
                    });
                }
                (false, _) => return Checked::Good(good),
            }
        }
        good += len;
    }
    Checked::Good(good)
}

fn batches_are_good(log: &Log, bytes: &[u8], first: Offset, end: Offset) -> bool {
    let mut next = first;
    for batch in batch::batches(bytes) {
        let Ok((header, batch)) = batch else { return false };
        let epoch = header.leader_epoch;
        let chained = header.base_offset == next
            && epoch.is_some_and(|e| log.epochs.allows(header.base_offset, header.last_offset(), e));
        if !chained || !batch::verify_crc(batch) {
            return false;
        }
        next = header.next_offset();
    }
    next == end
}
