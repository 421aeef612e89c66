//! Truncation: removes a suffix of a partition's log, for a follower whose leader's log parts from its own.
//!
//! Order of effects: writes in flight are drained; the cut's place is found (reading the segment when needed); the
//! lowered ends are published; the `Truncate` record with the cut block's prefix becomes durable; only then are
//! segments above set aside and appends taken again (STORAGE.md section 3, D10, F7).

use crate::batch::BatchHeader;
use crate::canary::Canary;
use crate::commit::Effect;
use crate::error::{CommandError, FenceReason, ReadError};
use crate::io::DiskError;
use crate::journal::{Body, Record};
use crate::limits::BLOCK;
use crate::log::{LogNo, LogState};
use crate::read::Place;
use crate::store::{Outbox, Store, StoreEvent};
use crate::types::{Now, Offset, PartitionId, Pos};

/// Room in the journal without which no cut is begun on a full disk: its record, and the frame around it.
const CUT_RECORD_ROOM: u64 = 256 << 10;

impl Store {
    /// Cuts the log at `offset` (moved down to the start of the batch that contains it); `Done` when the cut is
    /// durable. Until then appends wait.
    pub fn truncate(
        &mut self,
        now: Now,
        token: u64,
        partition: PartitionId,
        offset: Offset,
        out: &mut Outbox,
    ) {
        let result = self.command_target(partition).and_then(|no| {
            let log = self
                .log_mut(no)
                .ok_or(CommandError::UnknownPartition(partition))?;
            if let Some(reason) = log.fenced {
                return Err(CommandError::Fenced(reason));
            }
            let (log_start, log_end) = (log.log_start, log.log_end());
            if offset < log_start || offset > log_end {
                return Err(CommandError::OutOfRange {
                    asked: offset,
                    log_start,
                    log_end,
                });
            }
            log.state = LogState::Cutting {
                token,
                to: offset,
                recorded: false,
            };
            Ok(no)
        });
        match result {
            Ok(no) => {
                self.cuts.retain(|other| *other != no);
                self.cuts.push(no);
                self.truncate_may_go_on(now, no, out);
            }
            Err(error) => out.events.push(StoreEvent::Done {
                token,
                partition,
                result: Err(error),
            }),
        }
    }

    /// Goes on with a cut once nothing of the partition is in flight.
    pub(crate) fn truncate_may_go_on(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log(no) else { return };
        let LogState::Cutting {
            to, recorded: false, ..
        } = log.state
        else {
            return;
        };
        let drained = log.durable_end >= log.log_end()
            && !log.is_busy_on_disk()
            && !log.is_sealing()
            && !self.small.is_writing_any(no)
            && !self.reads.is_reading(no);
        // What is half written is finished first: a sealing segment gets its exact length.
        if log.is_sealing() {
            self.queue_write_back(no);
            return;
        }
        if drained && self.is_out_of_space() && self.commit.control_room() < CUT_RECORD_ROOM {
            // Refused at the end of the turn: once carried out in memory it could only wait.
            return;
        }
        if drained {
            if to == log.log_end() {
                let (segment, pos) = (log.active().base, log.active().end());
                self.record_cut(now, no, to, segment, pos, &[], out);
            } else {
                self.locate(now, no, to, out);
            }
        }
    }

    /// The cut's place is known: `place` is where the batch that contains the offset begins.
    pub(crate) fn cut_located(
        &mut self,
        now: Now,
        no: LogNo,
        result: Result<Place, ReadError>,
        out: &mut Outbox,
    ) {
        let Some(log) = self.log_mut(no) else { return };
        let LogState::Cutting {
            token,
            recorded: false,
            ..
        } = log.state
        else {
            return;
        };
        let partition = log.id;
        match result {
            Ok(place) => {
                self.record_cut(now, no, place.base, place.segment, place.pos, &place.prefix, out);
            }
            Err(error) => {
                log.state = LogState::Open;
                out.events.push(StoreEvent::Done {
                    token,
                    partition,
                    result: Err(CommandError::Unreadable(error)),
                });
                self.drain_waiting(now, no, out);
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one record")]
    fn record_cut(
        &mut self,
        now: Now,
        no: LogNo,
        offset: Offset,
        segment: Offset,
        pos: Pos,
        prefix: &[u8],
        out: &mut Outbox,
    ) {
        let Some(log) = self.log_mut(no) else { return };
        let LogState::Cutting { token, to, .. } = log.state else {
            return;
        };
        log.state = LogState::Cutting {
            token,
            to,
            recorded: true,
        };
        let floor = pos.floor(BLOCK as u64);
        let from_memory = log.segment(segment).filter(|s| s.tail.start() <= floor).map(|s| {
            s.tail
                .slices(floor, pos)
                .iter()
                .flat_map(|b| b.iter().copied())
                .collect::<Vec<u8>>()
        });
        let prefix = from_memory.unwrap_or_else(|| prefix.to_vec());
        debug_assert_eq!(prefix.len() as u64, pos.0 - floor.0);
        let partition = log.id;
        let (dirty, memory) = (log.dirty(), log.memory());
        let gone = log.cut(offset, segment, pos, &prefix);
        // With those goes all that belongs to them.
        log.stale_indexes
            .retain(|base| !gone.iter().any(|s| s.base == *base));
        let (dirty_after, memory_after) = (log.dirty(), log.memory());
        self.write_back.dirty = (self.write_back.dirty + dirty_after).saturating_sub(dirty);
        self.write_back.memory = (self.write_back.memory + memory_after).saturating_sub(memory);
        self.set_aside_after(no, gone);
        self.reads_were_cut(now, no, out);
        self.unpin(no);
        let prefix = match self.cfg.has(Canary::TruncateWithoutPrefix) {
            true => vec![0; prefix.len()],
            false => prefix,
        };
        let record = Record::Truncate {
            partition,
            offset,
            segment,
            pos,
            prefix,
        };
        self.commit
            .push(now, record, Body::None, Effect::Truncated { log: no });
        self.removal.cutting.push((no, self.commit.taken()));
    }

    /// The cut is durable: files above it are set aside, appends go on.
    pub(crate) fn truncate_durable(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        let LogState::Cutting {
            token,
            recorded: true,
            ..
        } = log.state
        else {
            return;
        };
        let partition = log.id;
        let end = log.log_end();
        log.durable_end = end;
        log.state = LogState::Open;
        let stale = std::mem::take(&mut log.stale_indexes);
        let stale: Vec<String> = stale.into_iter().map(|base| log.path(base, "index")).collect();
        self.removal.cutting.retain(|(other, _)| *other != no);
        self.set_aside_cut(no, out);
        for path in stale {
            self.set_aside(no, path, false, None, out);
        }
        self.list_again(no, out);
        out.events.push(StoreEvent::Done {
            token,
            partition,
            result: Ok(()),
        });
        self.drain_waiting(now, no, out);
        self.queue_write_back(no);
    }

    /// On a full disk: gives up a cut that waits for bytes which find no place, or whose record would. One that can go
    /// on is kept.
    pub(crate) fn refuse_cut_for_space(&mut self, now: Now, no: LogNo, out: &mut Outbox) {
        let no_record = self.commit.control_room() < CUT_RECORD_ROOM;
        let Some(log) = self.log(no) else { return };
        let LogState::Cutting {
            token,
            recorded: false,
            ..
        } = log.state
        else {
            return;
        };
        let no_place =
            log.is_sealing() && log.place_error == DiskError::NoSpace && now.mono < log.place_retry_at;
        // A place that is being looked for comes, and must not be taken for that of a later cut.
        if self.reads.is_reading(no) || !(no_place || no_record) {
            self.cuts.push(no);
            return;
        }
        let partition = log.id;
        if let Some(log) = self.log_mut(no) {
            log.state = LogState::Open;
        }
        out.events.push(StoreEvent::Done {
            token,
            partition,
            result: Err(CommandError::NoSpace),
        });
        self.drain_waiting(now, no, out);
    }

    /// Gives up a cut whose place is not found yet: the partition was fenced.
    pub(crate) fn refuse_cut(&mut self, no: LogNo, reason: FenceReason, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        if let LogState::Cutting {
            token,
            recorded: false,
            ..
        } = log.state
        {
            log.state = LogState::Open;
            out.events.push(StoreEvent::Done {
                token,
                partition: log.id,
                result: Err(CommandError::Fenced(reason)),
            });
        }
    }
}

/// Position of the batch that contains `offset` in a run of batches that begins at `at`; with its base offset.
pub(crate) fn find_batch(bytes: &[u8], at: Pos, offset: Offset) -> Option<(Pos, BatchHeader)> {
    let mut pos = at;
    let mut rest = bytes;
    while let Ok(header) = BatchHeader::parse(rest) {
        if header.next_offset() > offset {
            return (header.base_offset <= offset).then_some((pos, header));
        }
        pos = pos.plus(header.size as u64);
        rest = rest.get(header.size..)?;
    }
    None
}
