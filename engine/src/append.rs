//! Appending: from a request through its checks, and a wait for place or room, to memory and the group of the journal.
//!
//! Invariants: what is checked is not changed afterwards but in the head that the leader stamps; appends of a partition
//! are taken in the order in which they were asked; what is taken is never withdrawn, so everything that can refuse an
//! append does so before.

use crate::batch::{self, BatchHeader, TimestampType};
use crate::canary::Canary;
use crate::commit::Effect;
use crate::error::AppendError;
use crate::index::BatchBytes;
use crate::io::buf::BufSlice;
use crate::journal::{Blocks, Body, Record};
use crate::limits::BLOCK;
use crate::log::{LogNo, LogState};
use crate::producers::Verdict as ProducerVerdict;
use crate::segment::{FileState, Tail};
use crate::store::{AppendRequest, Appended, Outbox, Store, StoreEvent};
use crate::types::{LeaderEpoch, Now, Offset, Pos};

/// Bytes of appends that may wait in the store; beyond it they are refused as busy.
const MAX_WAITING_BYTES: u64 = 64 << 20;

impl Store {
    /// Appends one batch as the leader; answered by `Appended`, at once or when place and room are there.
    pub fn append(&mut self, now: Now, request: AppendRequest, out: &mut Outbox) {
        let (token, partition) = (request.token, request.partition);
        let result = match self.check_append(&request) {
            Ok((no, header)) => self.append_or_wait(now, no, Waiting { request, header }, out),
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            self.count_refusal(&error);
            out.events.push(StoreEvent::Appended {
                token,
                partition,
                result: Err(error),
            });
        }
    }

    fn check_append(&self, request: &AppendRequest) -> Result<(LogNo, BatchHeader), AppendError> {
        if let Some(reason) = self.fenced {
            return Err(AppendError::Fenced(reason));
        }
        if self.stopping {
            return Err(AppendError::Busy);
        }
        let unknown = AppendError::UnknownPartition(request.partition);
        let no = self.find_no(request.partition).ok_or(unknown.clone())?;
        let log = self.log(no).ok_or(unknown)?;
        if let Some(reason) = log.fenced {
            return Err(AppendError::Fenced(reason));
        }
        let max = log
            .settings
            .max_message_bytes
            .min(self.cfg.max_batch_bytes(self.grain));
        if request.batch.len() > max {
            return Err(AppendError::TooLarge {
                size: request.batch.len(),
                max,
            });
        }
        if request.epoch != log.epoch() {
            return Err(AppendError::WrongEpoch {
                asked: request.epoch,
                current: log.epoch(),
            });
        }
        Ok((no, batch::validate(&request.batch)?))
    }

    fn append_or_wait(
        &mut self,
        now: Now,
        no: LogNo,
        waiting: Waiting,
        out: &mut Outbox,
    ) -> Result<(), AppendError> {
        let Some(log) = self.log(no) else {
            return Err(AppendError::UnknownPartition(waiting.request.partition));
        };
        let verdict = if log.waiting.is_empty() && log.state == LogState::Open {
            self.try_accept(now, no, &waiting, out)?
        } else {
            Verdict::WaitForPlace
        };
        if verdict == Verdict::Accepted {
            return Ok(());
        }
        let bytes = waiting.request.batch.len() as u64;
        if self.waiting_bytes + bytes > MAX_WAITING_BYTES {
            return Err(AppendError::Busy);
        }
        self.waiting_bytes += bytes;
        if let Some(log) = self.log_mut(no) {
            log.waiting.push_back(waiting);
            // Behind a cut nothing may be in flight until that is done.
            if log.state == LogState::Open {
                self.wait_for(now, no, verdict, out);
            }
        }
        Ok(())
    }

    fn wait_for(&mut self, now: Now, no: LogNo, verdict: Verdict, out: &mut Outbox) {
        match verdict {
            Verdict::Accepted => {}
            Verdict::WaitForPlace => self.advance_active_place(now, no, out),
            Verdict::WaitForProducers => self.rebuild_producers(now, no, out),
            Verdict::WaitForRoom => {
                if let Some(log) = self.log_mut(no)
                    && !log.awaits_room
                {
                    log.awaits_room = true;
                    self.admission.push_back(no);
                }
            }
        }
    }

    /// Accepts what waits on a log, as far as place and room reach.
    pub(crate) fn drain_waiting(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        while let Some(log) = self.log_mut(no) {
            if log.state != LogState::Open || log.awaits_room {
                return;
            }
            let Some(waiting) = log.waiting.pop_front() else {
                return;
            };
            let bytes = waiting.request.batch.len() as u64;
            // The epoch may have moved while it waited.
            let checked = self.check_append(&waiting.request).map(|_| ());
            match checked.and_then(|()| self.try_accept(now, no, &waiting, out)) {
                Ok(Verdict::Accepted) => self.waiting_bytes -= bytes,
                Ok(verdict) => {
                    if let Some(log) = self.log_mut(no) {
                        log.waiting.push_front(waiting);
                    }
                    self.wait_for(now, no, verdict, out);
                    return;
                }
                Err(error) => {
                    self.waiting_bytes -= bytes;
                    self.count_refusal(&error);
                    let Waiting { request, .. } = waiting;
                    let (token, partition) = (request.token, request.partition);
                    out.events.push(StoreEvent::Appended {
                        token,
                        partition,
                        result: Err(error),
                    });
                }
            }
        }
    }

    /// Refuses everything that waits on a log.
    pub(crate) fn refuse_waiting(&mut self, no: LogNo, error: &AppendError, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        let waiting = std::mem::take(&mut log.waiting);
        for Waiting { request, .. } in waiting {
            self.waiting_bytes -= request.batch.len() as u64;
            self.count_refusal(error);
            let (token, partition) = (request.token, request.partition);
            out.events.push(StoreEvent::Appended {
                token,
                partition,
                result: Err(error.clone()),
            });
        }
    }

    fn count_refusal(&mut self, error: &AppendError) {
        match error {
            AppendError::NoSpace => self.stats.no_space += 1,
            AppendError::Busy => self.stats.busy += 1,
            _ => {}
        }
    }

    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        // The group's directory and padding are small beside the reserve. A frame is never larger than a quarter of a
        // file, so that what is asked for here is there once two checkpoints have freed the journal.
        let frame = self.cfg.frame_bytes.min(self.cfg.max_frame_bytes(self.grain));
        self.commit.data_room() > bytes + frame as u64 && self.has_dirty_room()
    }

    /// Whether more may become dirty. The last block of a log is written when it is full, not before, so it does not
    /// count: as many logs as the bound has blocks would else stop each other for ever.
    pub(crate) fn has_dirty_room(&self) -> bool {
        let last_blocks = (self.logs.len() * BLOCK) as u64;
        self.write_back.dirty < self.cfg.dirty_bytes.saturating_add(last_blocks)
    }

    fn try_accept(
        &mut self,
        now: Now,
        no: LogNo,
        waiting: &Waiting,
        out: &mut Outbox,
    ) -> Result<Verdict, AppendError> {
        let Waiting { request, header } = waiting;
        let (token, partition) = (request.token, request.partition);
        let len = request.batch.len() as u64;
        let room = self.has_room(len);
        let early = self.cfg.has(Canary::DuplicateBeforeDurable);
        let Some(log) = self.log_mut(no) else {
            return Err(AppendError::UnknownPartition(partition));
        };
        if header.has_producer() && log.producers.is_stale() {
            return Ok(Verdict::WaitForProducers);
        }
        let verdict = log.producers.check(header);
        if let Some(appended) = refuse_or_repeat(verdict, header)? {
            if early && appended.end > log.durable_end {
                log.durable_end = appended.end;
                let end = appended.end;
                out.events.push(StoreEvent::Durable { partition, end });
            }
            self.stats.duplicates += 1;
            out.events.push(StoreEvent::Appended {
                token,
                partition,
                result: Ok(appended),
            });
            return Ok(Verdict::Accepted);
        }
        if !room {
            return match self.is_out_of_space() {
                true => Err(AppendError::NoSpace),
                false => Ok(Verdict::WaitForRoom),
            };
        }
        if log.wants_roll(now, header, len) {
            self.roll(no, out);
        }
        let Some(log) = self.log_mut(no) else {
            return Err(AppendError::UnknownPartition(partition));
        };
        let active = log.active();
        if active.allocated < active.end().plus(len) || !matches!(active.file, FileState::Open(_)) {
            if now.mono < log.place_retry_at {
                return Err(AppendError::of_place(log.place_error));
            }
            return Ok(Verdict::WaitForPlace);
        }
        let appended = self.accept(now, no, request, header);
        out.events.push(StoreEvent::Appended {
            token,
            partition,
            result: Ok(appended),
        });
        self.allocate_ahead(now, no, out);
        Ok(Verdict::Accepted)
    }

    /// Takes the batch into memory and into the group: from here on it is never withdrawn.
    fn accept(&mut self, now: Now, no: LogNo, request: &AppendRequest, header: &BatchHeader) -> Appended {
        let partition = request.partition;
        let log = self.logs[no.0 as usize]
            .as_deref_mut()
            .expect("the caller found the log");
        let base = log.log_end();
        let time = match log.settings.timestamp_type {
            TimestampType::CreateTime => None,
            TimestampType::LogAppendTime => Some(now.wall_ms),
        };
        let stamped = stamped(&request.batch, header, base, request.epoch, time);
        let header = batch::peek(&stamped.head).expect("the batch was validated and only stamped");
        let segment = log.active_mut();
        let pos = segment.end();
        let memory = segment.tail.memory();
        let sum = stamped.copy_to(&mut segment.tail);
        let end = segment.end();
        let memory = segment.tail.memory() - memory;
        segment.next = header.next_offset();
        if segment.first_append_ms == 0 {
            segment.first_append_ms = now.wall_ms.max(1);
        }
        let bytes = match &sum {
            Some(sum) => BatchBytes::Summed(sum),
            None => BatchBytes::Split(&stamped.head, &stamped.rest),
        };
        segment.index_batch(partition, &header, pos, bytes);
        let body = match sum {
            Some(sum) => block_body(&segment.tail, pos, end, sum),
            None => Body::Inline(segment.tail.slices(pos, end)),
        };
        let segment_base = segment.base;
        log.producers.record(&header, base, now.wall_ms);

        let next = header.next_offset();
        let record = Record::Append {
            partition,
            base,
            next,
            segment: segment_base,
            pos,
            len: (end.0 - pos.0) as u32,
            body_at: 0,
        };
        let effect = Effect::Appended {
            log: no,
            segment: segment_base,
            pos: end,
            next,
        };
        self.write_back.memory += memory;
        self.write_back.dirty += end.0 - pos.0;
        self.stats.batches += 1;
        self.stats.accepted_bytes += end.0 - pos.0;
        self.commit.push(now, record, body, effect);
        Appended {
            base,
            end: next,
            duplicate: false,
            log_append_time: time.unwrap_or(-1),
        }
    }
}

/// What the producer table says of a batch: `None` when it is new, the original's place when it is a retry.
fn refuse_or_repeat(verdict: ProducerVerdict, header: &BatchHeader) -> Result<Option<Appended>, AppendError> {
    let producer_id = header.producer_id;
    match verdict {
        ProducerVerdict::Append => Ok(None),
        ProducerVerdict::Duplicate { base, end } => Ok(Some(Appended {
            base,
            end,
            duplicate: true,
            log_append_time: -1,
        })),
        ProducerVerdict::OutOfOrder { expected, .. } => Err(AppendError::OutOfOrderSequence {
            producer_id,
            found: header.base_sequence,
            expected,
        }),
        ProducerVerdict::Fenced { current, .. } => Err(AppendError::InvalidProducerEpoch {
            producer_id,
            found: header.producer_epoch,
            current,
        }),
    }
}

/// Whether an append was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Accepted,
    WaitForPlace,
    WaitForRoom,
    WaitForProducers,
}

/// An append that waits, with its checked header.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) request: AppendRequest,
    pub(crate) header: BatchHeader,
}

/// A batch with its offset, epoch and time set: all that changes lies in the head, the rest are the producer's bytes.
struct Stamped {
    head: [u8; batch::HEADER_BYTES],
    rest: BufSlice,
}

impl Stamped {
    /// Appends the batch to `tail`; with the checksum of what was appended when it is large. Index and frame both need
    /// that, and it is taken while the bytes are at hand for copying. Reading a small batch twice costs less than
    /// combining sums.
    fn copy_to(&self, tail: &mut Tail) -> Option<crc32fast::Hasher> {
        tail.append_with(&self.head, self.rest.len());
        if ((self.head.len() + self.rest.len()) as u64) < BLOCK_BODY_BYTES {
            tail.append(&self.rest);
            return None;
        }
        let mut sum = crc32fast::Hasher::new();
        sum.update(&self.head);
        for piece in self.rest.chunks(COPY_BYTES) {
            sum.update(piece);
            tail.append(piece);
        }
        Some(sum)
    }
}

fn stamped(
    bytes: &BufSlice,
    header: &BatchHeader,
    base: Offset,
    epoch: LeaderEpoch,
    time: Option<i64>,
) -> Stamped {
    let mut head = [0; batch::HEADER_BYTES];
    let stated = batch::peek(bytes).map(|h| h.max_timestamp);
    if time.is_some() || stated != Some(header.max_timestamp) {
        let mut whole = bytes.to_vec();
        batch::stamp(&mut whole, &mut header.clone(), base, epoch, time);
        head.copy_from_slice(&whole[..batch::HEADER_BYTES]);
    } else {
        head.copy_from_slice(&bytes[..batch::HEADER_BYTES]);
        let field = batch::field::BASE_OFFSET;
        head[field..field + 8].copy_from_slice(&base.0.to_be_bytes());
        let field = batch::field::LEADER_EPOCH;
        head[field..field + 4].copy_from_slice(&epoch.0.to_be_bytes());
    }
    Stamped {
        head,
        rest: bytes.slice(batch::HEADER_BYTES..bytes.len()),
    }
}

/// Bytes summed and copied together: they stay in the nearest cache in between.
const COPY_BYTES: usize = 16 << 10;

/// Batches of at least this size go to the journal straight from the tail's blocks; smaller ones are copied.
const BLOCK_BODY_BYTES: u64 = 32 << 10;

/// The journal's view of the bytes `from..to` of a tail, as blocks.
fn block_body(tail: &Tail, from: Pos, to: Pos, sum: crc32fast::Hasher) -> Body {
    let first = from.floor(BLOCK as u64);
    let whole = to.floor(BLOCK as u64);
    let mut slices = tail.slices(first, whole);
    // The last block still grows: the frame gets a copy of it.
    slices.extend(tail.partial_block());
    Body::Blocks(Blocks {
        slices,
        lead: (from.0 - first.0) as u32,
        len: (to.0 - from.0) as u32,
        sum,
    })
}
