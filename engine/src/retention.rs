//! Retention by bytes and time, the log start, and the end of a partition.
//!
//! Order of effects: the `LogStart`, `Truncate` or `Drop` record is durable before a file is set aside under a
//! `-delete` name (see [`crate::removal`]). `log_start` never passes the high watermark (F43).

use crate::commit::Effect;
use crate::error::ReadError;
use crate::journal::{Body, Record};
use crate::log::{Listing, Log, LogNo, LogState};
use crate::segment::{FileState, Segment, SegmentState};
use crate::store::{Outbox, Store, StoreEvent};
use crate::types::{Now, Offset};

/// Partitions looked at in one tick.
const CHECK_SLICE: usize = 256;
/// Extensions of the files that belong to a segment.
const EXTENSIONS: [&str; 3] = ["log", "index", "producers"];

/// When retention looks at which partition.
#[derive(Debug)]
pub(crate) struct Retention {
    next: usize,
    due: u64,
}

impl Retention {
    pub(crate) fn new() -> Retention {
        Retention { next: 0, due: 0 }
    }

    pub(crate) fn next_wake(&self) -> Option<u64> {
        Some(self.due)
    }
}

impl Store {
    /// Looks at the next partitions when it is time.
    pub(crate) fn run_retention(&mut self, now: Now, out: &mut Outbox) {
        if now.mono < self.retention.due || self.fenced.is_some() {
            return;
        }
        let from = self.retention.next;
        let to = (from + CHECK_SLICE).min(self.logs.len());
        for no in from..to {
            self.check_retention(now, LogNo(no as u32), out);
        }
        let done = to == self.logs.len();
        self.retention.next = if done { 0 } else { to };
        self.retention.due = if done {
            now.after_ms(self.cfg.retention_check_ms)
        } else {
            now.mono
        };
    }

    fn check_retention(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        let expiry = self.cfg.producer_expiry_ms;
        let Some(log) = self.log_mut(no) else { return };
        log.producers.expire(now.wall_ms, expiry);
        let limited = log.settings.retention_bytes.is_some() || log.settings.retention_ms.is_some();
        if !limited || !log.served || log.fenced.is_some() || log.state != LogState::Open {
            return;
        }
        if log.listing != Listing::Known && log.oldest < log.segments[0].base {
            self.list_segments(no, out);
            return;
        }
        if log.active_expired(now.wall_ms)
            && self
                .log(no)
                .is_some_and(|log| log.high_watermark == log.log_end())
        {
            self.roll(no, out);
        }
        let start = match self.retention_start(now, no) {
            Ok(start) => start,
            Err(base) => {
                // The index of the oldest segment tells its newest time.
                self.load_index(no, base, out);
                return;
            }
        };
        if let Some(log) = self.log(no)
            && start > log.log_start
        {
            self.raise_log_start(now, no, start, None);
        }
    }

    /// The log start that retention asks for; `Err` with a segment whose index must be loaded first.
    fn retention_start(&self, now: Now, no: LogNo) -> Result<Offset, Offset> {
        let Some(log) = self.log(no) else {
            return Ok(Offset(0));
        };
        let mut start = log.log_start;
        let mut total: u64 = log.segments.iter().map(|s| s.end().0).sum();
        for segment in log
            .segments
            .iter()
            .take_while(|s| s.state() == SegmentState::Sealed)
        {
            let too_much = log
                .settings
                .retention_bytes
                .is_some_and(|most| total.saturating_sub(segment.end().0) >= most);
            if !too_much && !Store::segment_expired(log, segment.base, now)? {
                break;
            }
            if segment.next > log.high_watermark {
                break;
            }
            total -= segment.end().0;
            start = start.max(segment.next);
        }
        Ok(start)
    }

    fn segment_expired(log: &Log, base: Offset, now: Now) -> Result<bool, Offset> {
        let Some(keep) = log.settings.retention_ms else {
            return Ok(false);
        };
        // A segment of whose records not all times are known goes when the one behind it goes: it is older.
        let (mut newest, mut known) = (-1, false);
        for segment in log.segments.iter().filter(|s| s.base >= base) {
            newest = segment.max_timestamp().ok_or(segment.base)?.max(newest);
            known = segment.next > segment.base && !segment.is_untimed();
            if known {
                break;
            }
        }
        if !known {
            return Ok(false);
        }
        // A client's clock may be absurd: a time in the far future would keep a segment for ever, so it counts as now.
        let age = now.wall_ms.saturating_sub(newest.min(now.wall_ms));
        Ok(u64::try_from(age).is_ok_and(|age| age > keep))
    }

    /// Raises the log start in memory and in the journal; files follow when the record is durable.
    pub(crate) fn raise_log_start(&mut self, now: Now, no: LogNo, start: Offset, token: Option<u64>) {
        let Some(log) = self.log_mut(no) else { return };
        log.raise_start(start);
        let record = Record::LogStart {
            partition: log.id,
            offset: start,
        };
        self.commit.push(
            now,
            record,
            Body::None,
            Effect::LogStart {
                log: no,
                start,
                token,
            },
        );
    }

    pub(crate) fn log_start_durable(
        &mut self,
        now: Now,
        no: LogNo,
        start: Offset,
        token: Option<u64>,
        out: &mut Outbox,
    ) {
        let Some(log) = self.log_mut(no) else { return };
        // A later raise may be under way, and a cut may have come between.
        log.durable_start = log.durable_start.max(start.min(log.log_start));
        let (partition, start) = (log.id, log.durable_start);
        out.events.push(StoreEvent::LogStart { partition, start });
        if let Some(token) = token {
            out.events.push(StoreEvent::Done {
                token,
                partition,
                result: Ok(()),
            });
        }
        self.set_aside_below(now, no, out);
    }

    /// Sets the files of segments aside that lie wholly below the log start.
    pub(crate) fn set_aside_below(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        loop {
            let Some(log) = self.log_mut(no) else { return };
            let start = log.durable_start;
            let gone = log.segments.len() > 1
                && log.segments.front().is_some_and(|s| {
                    s.next <= start
                        && s.state() == SegmentState::Sealed
                        && s.in_flight.is_empty()
                        && s.file != FileState::Opening
                        && s.readers == 0
                        && !s.is_loading()
                });
            if !gone {
                return;
            }
            let Some(segment) = log.segments.pop_front() else {
                return;
            };
            log.oldest = segment.next;
            self.write_back.memory = self.write_back.memory.saturating_sub(segment.tail.memory());
            self.reads_were_cut(now, no, out);
            if let FileState::Open(file) = segment.file {
                self.close_file(file, out);
            }
            self.rename_segment(no, segment.base, out);
        }
    }

    fn rename_segment(&mut self, no: LogNo, base: Offset, out: &mut Outbox) {
        self.stats.segments_removed += 1;
        for extension in EXTENSIONS {
            let Some(path) = self.log(no).map(|log| log.path(base, extension)) else {
                return;
            };
            self.set_aside(no, path, false, None, out);
        }
    }

    /// Remembers the segments that a cut removed; their files go when the cut is durable.
    pub(crate) fn set_aside_after(&mut self, no: LogNo, gone: Vec<Segment>) {
        self.removal
            .cut
            .extend(gone.into_iter().map(|segment| (no, segment.base, segment.file)));
    }

    /// The cut of `no` is durable: its segments' files go.
    pub(crate) fn set_aside_cut(&mut self, no: LogNo, out: &mut Outbox) {
        let all = std::mem::take(&mut self.removal.cut);
        for (owner, base, file) in all {
            if owner != no {
                self.removal.cut.push((owner, base, file));
                continue;
            }
            if let FileState::Open(file) = file {
                self.close_file(file, out);
            }
            self.rename_segment(no, base, out);
        }
    }

    /// The drop is durable: the partition's directory is set aside as soon as nothing of it is in flight.
    pub(crate) fn drop_durable(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        if let Some(log) = self.log_mut(no) {
            log.dropped = true;
        }
        self.drop_may_go_on(now, no, out);
    }

    /// Goes on with a drop once its record is durable and nothing of the partition is in flight.
    pub(crate) fn drop_may_go_on(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log(no) else { return };
        let LogState::Dropping { token } = log.state else {
            return;
        };
        if !log.dropped || log.is_busy_on_disk() || self.small.is_writing_any(no) {
            return;
        }
        let (partition, dir) = (log.id, log.dir());
        self.fail_reads(now, no, &ReadError::UnknownPartition(partition), out);
        if let Some(log) = self.log_mut(no)
            && log.pin.take().is_some()
        {
            self.checkpoint.release_pin();
        }
        let Some(log) = self.logs[no.0 as usize].take() else {
            return;
        };
        self.by_id.remove(&partition);
        self.write_back.dirty = self.write_back.dirty.saturating_sub(log.counted_dirty());
        self.write_back.memory = self.write_back.memory.saturating_sub(log.memory());
        for segment in &log.segments {
            if let FileState::Open(file) = segment.file {
                self.close_file(file, out);
            }
        }
        self.removal.dropping.retain(|other| *other != no);
        self.set_aside(no, dir, true, Some((token, partition)), out);
    }
}
