//! Group commit: collects records into frames, places them in the ring of journal files, and moves the durable end
//! along the unbroken prefix of completed frames.
//!
//! Invariants: at most [`MAX_FRAMES_IN_FLIGHT`] writes in flight; a file's header is written (and so synced) no later
//! in the prefix than its first frame; effects are handed out in the order of the records; a failed write ends
//! everything: no effect at or behind it is ever handed out.

use std::collections::VecDeque;

use crate::canary::Canary;
use crate::config::StoreConfig;
use crate::io::{DiskOp, FileId, OpId};
use crate::journal::{
    Body, Directory, FRAME_HEADER_BYTES, FileHeader, FrameStamp, MAX_RECORDS, Record, encode_frame, frame_len,
};
use crate::limits::MAX_FRAMES_IN_FLIGHT;
use crate::log::LogNo;
use crate::types::{Lsn, Now, Offset, Pos};

/// Up to this many frames are issued however small they are; more only when the group is worth a write of its own.
const EAGER_FRAMES: usize = 2;
/// A group of this size is worth another frame in flight.
const WORTH_BYTES: usize = 128 << 10;
/// Journal files that only control records and copies may use.
const RESERVED_FILES: u64 = 2;

/// What becomes true when a record is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// A partition's segment is durable up to `pos`, its log up to `next`.
    Appended {
        log: LogNo,
        segment: Offset,
        pos: Pos,
        next: Offset,
    },
    /// A command of the owner is durable.
    Command { log: LogNo, token: u64 },
    /// The log may now drop what lies below its log start.
    LogStart {
        log: LogNo,
        start: Offset,
        token: Option<u64>,
    },
    /// The cut may now be carried out on the files.
    Truncated { log: LogNo },
    /// The partition's files may now be set aside.
    Dropped { log: LogNo },
    /// Nothing.
    None,
}

/// State of one journal file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingState {
    /// May be taken next.
    Free,
    /// Holds frames from `first` to `end` that may still be needed.
    Used { first: Lsn, end: Lsn },
}

/// One file of the ring.
#[derive(Debug, Clone, Copy)]
pub struct RingFile {
    /// Its descriptor.
    pub file: FileId,
    /// Free or used.
    pub state: RingState,
}

/// Where the journal continues after recovery.
#[derive(Debug)]
pub struct Resume {
    /// All files.
    pub files: Vec<RingFile>,
    /// Index of the file that the next frame goes into.
    pub current: usize,
    /// Incarnation of that file's header.
    pub incarnation: u64,
    /// Highest incarnation seen anywhere.
    pub max_incarnation: u64,
    /// Address of the next frame.
    pub next_lsn: Lsn,
    /// Address of the frame before it.
    pub prev_lsn: Lsn,
    /// Directory of the frame before it.
    pub directory: Directory,
}

#[derive(Debug)]
struct InFlight {
    op: OpId,
    end: Lsn,
    done: bool,
    issued_at: u64,
    effects: Vec<Effect>,
    /// Carries more than a durable_lsn.
    data: bool,
}

/// Figures of the journal for metrics.
#[derive(Debug, Clone, Copy, Default)]
pub struct CommitStats {
    /// Frames issued.
    pub frames: u64,
    /// Bytes of frames issued.
    pub bytes: u64,
    /// Bytes of batches in them.
    pub payload_bytes: u64,
    /// Empty frames that carried a durable_lsn.
    pub marks: u64,
    /// Laps: how often a journal file was taken into use.
    pub files_taken: u64,
    /// Turns in which no free file was left.
    pub stalls: u64,
}

/// Group commit of one shard.
#[derive(Debug)]
pub struct Commit {
    cfg: StoreConfig,
    grain: usize,
    files: Vec<RingFile>,
    current: usize,
    incarnation: u64,
    max_incarnation: u64,
    next: Lsn,
    prev_lsn: Lsn,
    prev_dir: Directory,
    group: VecDeque<(Record, Body, Effect)>,
    group_bytes: usize,
    group_since: u64,
    flight: VecDeque<InFlight>,
    durable: Lsn,
    /// Highest durable end that an issued frame carries.
    promised: Lsn,
    /// Durable end of frames that carry more than a durable_lsn.
    durable_data: Lsn,
    last_change: u64,
    /// Older valid checkpoint, for the header of a reused file.
    checkpoint_lsn: Lsn,
    failed: bool,
    /// The next frame found no free file; nothing can be issued until one is recycled.
    stalled: bool,
    /// Records taken into the group, and issued in frames, since the start.
    taken: u64,
    issued: u64,
    /// Figures.
    pub stats: CommitStats,
    /// Latencies (ns) of journal writes completed since the owner last took them.
    pub latencies: Vec<u64>,
}

impl Commit {
    /// Continues the journal at `resume`.
    #[must_use]
    pub fn new(cfg: &StoreConfig, grain: usize, checkpoint_lsn: Lsn, resume: Resume) -> Commit {
        Commit {
            cfg: cfg.clone(),
            grain,
            files: resume.files,
            current: resume.current,
            incarnation: resume.incarnation,
            max_incarnation: resume.max_incarnation,
            next: resume.next_lsn,
            prev_lsn: resume.prev_lsn,
            prev_dir: resume.directory,
            group: VecDeque::new(),
            group_bytes: 0,
            group_since: 0,
            flight: VecDeque::new(),
            durable: resume.next_lsn,
            promised: resume.next_lsn,
            durable_data: resume.next_lsn,
            last_change: 0,
            checkpoint_lsn,
            failed: false,
            stalled: false,
            taken: 0,
            issued: 0,
            stats: CommitStats::default(),
            latencies: Vec::new(),
        }
    }

    /// Bytes of frames that one file holds.
    #[must_use]
    pub fn file_capacity(&self) -> u64 {
        self.cfg.journal_file_bytes - self.grain as u64
    }

    /// Address that the next frame will have (or skip from, at the end of a file).
    #[must_use]
    pub fn next_lsn(&self) -> Lsn {
        self.next
    }

    /// End of the durable prefix.
    #[must_use]
    pub fn durable_lsn(&self) -> Lsn {
        self.durable
    }

    /// Journal writes in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.flight.len()
    }

    /// Whether nothing waits and nothing is in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.group.is_empty() && self.flight.is_empty()
    }

    /// Issue time of the oldest write in flight.
    #[must_use]
    pub fn oldest_issue(&self) -> Option<u64> {
        self.flight.iter().find(|f| !f.done).map(|f| f.issued_at)
    }

    /// Bytes of batches that may still be taken in before the reserve is reached.
    #[must_use]
    pub fn data_room(&self) -> u64 {
        let free = self.files.iter().filter(|f| f.state == RingState::Free).count() as u64;
        let rest = self.file_capacity() - self.used_in_current();
        (rest + free * self.file_capacity())
            .saturating_sub(RESERVED_FILES * self.file_capacity() + self.group_bytes as u64)
    }

    /// Bytes that records of commands may still use, the reserve included.
    #[must_use]
    pub fn control_room(&self) -> u64 {
        let free = self.files.iter().filter(|f| f.state == RingState::Free).count() as u64;
        let rest = self.file_capacity() - self.used_in_current();
        (rest + free * self.file_capacity()).saturating_sub(self.group_bytes as u64)
    }

    /// Bytes of frames that data may use in all.
    #[must_use]
    pub fn data_capacity(&self) -> u64 {
        (self.files.len() as u64 - RESERVED_FILES) * self.file_capacity()
    }

    fn first_of_current(&self) -> Lsn {
        match self.files[self.current].state {
            RingState::Used { first, .. } => first,
            RingState::Free => unreachable!("the current file is in use"),
        }
    }

    fn used_in_current(&self) -> u64 {
        self.next.0 - self.first_of_current().0
    }

    /// Adds a record to the group.
    pub fn push(&mut self, now: Now, record: Record, body: Body, effect: Effect) {
        if self.group.is_empty() {
            self.group_since = now.mono;
        }
        self.group_bytes += record.dir_bytes() + body.bytes();
        self.group.push_back((record, body, effect));
        self.taken += 1;
    }

    /// Number of records taken so far: names the last one.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Whether the record named `seq` is in a frame that was issued.
    #[must_use]
    pub fn is_issued(&self, seq: u64) -> bool {
        self.issued >= seq
    }

    /// Issues what should go now. `new_op` gives ids for the writes.
    pub fn issue(&mut self, now: Now, new_op: &mut dyn FnMut() -> OpId, ops: &mut Vec<(OpId, DiskOp)>) {
        while !self.failed && self.wants_frame(now) {
            let count = self.next_group_len();
            if !self.issue_frame(now, count, new_op, ops) {
                return;
            }
        }
        if self.mark_due(now) {
            self.group.push_back((Record::Mark, Body::None, Effect::None));
            if self.issue_frame(now, 1, new_op, ops) {
                self.stats.marks += 1;
            } else {
                self.group.pop_back();
            }
        }
    }

    fn wants_frame(&self, now: Now) -> bool {
        if self.group.is_empty() || self.flight.len() >= MAX_FRAMES_IN_FLIGHT {
            return false;
        }
        let lingered = now.mono >= self.group_since.saturating_add(self.cfg.linger_ns);
        let worth = self.group_bytes >= WORTH_BYTES;
        worth || (lingered && self.flight.len() < EAGER_FRAMES)
    }

    fn mark_due(&self, now: Now) -> bool {
        !self.failed
            && self.is_idle()
            && self.owes_mark()
            && now.mono >= self.last_change.saturating_add(self.cfg.mark_ns)
    }

    /// Whether the last frames are durable and nothing on the disk says so yet.
    fn owes_mark(&self) -> bool {
        self.promised < self.durable_data && !self.cfg.has(Canary::NoMark)
    }

    /// When [`Commit::issue`] should be called again although nothing happened.
    #[must_use]
    pub fn next_wake(&self) -> Option<u64> {
        if self.failed || self.stalled {
            return None;
        }
        if !self.group.is_empty() && self.flight.len() < EAGER_FRAMES {
            return Some(self.group_since.saturating_add(self.cfg.linger_ns));
        }
        (self.is_idle() && self.owes_mark()).then(|| self.last_change.saturating_add(self.cfg.mark_ns))
    }

    /// How many records of the group go into the next frame.
    fn next_group_len(&self) -> usize {
        let most =
            self.cfg.max_frame_bytes(self.grain) - self.prev_dir.len() - FRAME_HEADER_BYTES - 2 * self.grain;
        let target = self.cfg.frame_bytes.min(most);
        let mut bytes = 0;
        let mut count = 0;
        for (record, body, _) in self.group.iter().take(MAX_RECORDS) {
            bytes += record.dir_bytes() + body.bytes();
            if count > 0 && bytes > target {
                break;
            }
            count += 1;
        }
        count
    }

    /// Issues the first `count` records as one frame; `false` when no file is free for it.
    fn issue_frame(
        &mut self,
        now: Now,
        count: usize,
        new_op: &mut dyn FnMut() -> OpId,
        ops: &mut Vec<(OpId, DiskOp)>,
    ) -> bool {
        let mut records = Vec::with_capacity(count);
        let mut effects = Vec::with_capacity(count);
        for (record, body, effect) in self.group.drain(..count) {
            records.push((record, body));
            effects.push(effect);
        }
        let len = frame_len(&records, self.prev_dir.len(), self.grain) as u64;
        if self.used_in_current() + len > self.file_capacity() && !self.roll(now, new_op, ops) {
            self.stats.stalls += 1;
            self.stalled = true;
            let back = records.into_iter().zip(effects).rev();
            back.for_each(|((record, body), effect)| self.group.push_front((record, body, effect)));
            return false;
        }
        let bytes: usize = records
            .iter()
            .map(|(record, body)| record.dir_bytes() + body.bytes())
            .sum();
        self.group_bytes = self.group_bytes.saturating_sub(bytes);
        self.group_since = now.mono;
        let data = records.iter().any(|(record, _)| *record != Record::Mark);
        let pos = self.grain as u64 + self.used_in_current();
        let stamp = FrameStamp {
            term: self.cfg.term,
            incarnation: self.incarnation,
            lsn: self.next,
            durable_lsn: self.durable,
            prev_lsn: self.prev_lsn,
        };
        self.issued += records
            .iter()
            .filter(|(record, _)| *record != Record::Mark)
            .count() as u64;
        let payload: usize = records.iter().map(|(_, body)| body.bytes()).sum();
        let (bufs, directory) = encode_frame(stamp, &mut records, &self.prev_dir, self.grain);
        self.prev_dir = directory;
        self.prev_lsn = self.next;
        self.promised = self.durable;
        self.next = self.next.plus(len);
        self.stats.frames += 1;
        self.stats.bytes += len;
        self.stats.payload_bytes += payload as u64;
        let file = self.files[self.current].file;
        self.submit(now, DiskOp::Write { file, pos, bufs }, effects, data, new_op, ops);
        true
    }

    fn submit(
        &mut self,
        now: Now,
        write: DiskOp,
        effects: Vec<Effect>,
        data: bool,
        new_op: &mut dyn FnMut() -> OpId,
        ops: &mut Vec<(OpId, DiskOp)>,
    ) {
        let op = new_op();
        let (end, issued_at) = (self.next, now.mono);
        self.flight.push_back(InFlight {
            op,
            end,
            done: false,
            issued_at,
            effects,
            data,
        });
        ops.push((op, write));
    }

    /// Takes a free file into use: its header enters the prefix before its first frame.
    fn roll(&mut self, now: Now, new_op: &mut dyn FnMut() -> OpId, ops: &mut Vec<(OpId, DiskOp)>) -> bool {
        let Some(free) = self.files.iter().position(|f| f.state == RingState::Free) else {
            return false;
        };
        let first = Lsn(self.first_of_current().0 + self.file_capacity());
        let end_of_current = self.next;
        if let RingState::Used { end, .. } = &mut self.files[self.current].state {
            *end = end_of_current;
        }
        self.max_incarnation += u64::from(!self.cfg.has(Canary::NoIncarnation));
        self.incarnation = self.max_incarnation;
        self.files[free].state = RingState::Used {
            first,
            end: Lsn(first.0 + self.file_capacity()),
        };
        self.current = free;
        self.next = first;
        self.stats.files_taken += 1;
        let header = self.header(first, end_of_current);
        let file = self.files[free].file;
        let write = DiskOp::Write {
            file,
            pos: 0,
            bufs: vec![header.encode()],
        };
        self.submit(now, write, Vec::new(), false, new_op, ops);
        true
    }

    fn header(&self, first_lsn: Lsn, prev_end: Lsn) -> FileHeader {
        FileHeader {
            node: self.cfg.node,
            generation: self.cfg.generation,
            shard: self.cfg.shard.0,
            incarnation: self.incarnation,
            first_lsn,
            prev_end,
            checkpoint_lsn: self.checkpoint_lsn,
            grain: self.grain as u32,
            file_bytes: self.cfg.journal_file_bytes,
        }
    }

    /// Takes in a completed journal write; hands out the effects that became true, in order.
    /// A failed write is final: it and everything behind it never become true (D1).
    pub fn completed(&mut self, now: Now, op: OpId, ok: bool, effects: &mut Vec<Effect>) {
        let Some(entry) = self.flight.iter_mut().find(|f| f.op == op) else {
            return;
        };
        if !ok {
            self.failed = true;
            return;
        }
        entry.done = true;
        self.latencies.push(now.mono.saturating_sub(entry.issued_at));
        if self.failed {
            return;
        }
        while self.flight.front().is_some_and(|f| f.done) {
            let Some(front) = self.flight.pop_front() else {
                break;
            };
            self.durable = front.end;
            if front.data {
                self.durable_data = front.end;
            }
            self.last_change = now.mono;
            effects.extend(front.effects);
        }
    }

    /// After a failure: the commands whose records will never be durable. Nothing is issued or handed out again.
    pub fn abandon(&mut self) -> Vec<(LogNo, u64)> {
        self.failed = true;
        let in_flight = self
            .flight
            .iter_mut()
            .flat_map(|f| std::mem::take(&mut f.effects));
        let waiting = self.group.drain(..).map(|(_, _, effect)| effect);
        let token = |effect| match effect {
            Effect::Command { log, token }
            | Effect::LogStart {
                log,
                token: Some(token),
                ..
            } => Some((log, token)),
            _ => None,
        };
        in_flight.chain(waiting).filter_map(token).collect()
    }

    /// Frees the files that lie wholly below `lsn`, the older of the two valid checkpoints.
    pub fn recycle(&mut self, lsn: Lsn) {
        self.checkpoint_lsn = lsn;
        self.stalled = false;
        let current = self.current;
        for (index, file) in self.files.iter_mut().enumerate() {
            if let RingState::Used { end, .. } = file.state
                && index != current
                && end <= lsn
            {
                file.state = RingState::Free;
            }
        }
    }
}
