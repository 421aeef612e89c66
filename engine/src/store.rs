//! One shard's storage: every partition's log behind one journal, as a sans-IO state machine.
//!
//! The owner (a shard of the broker, a benchmark, a test) calls commands and feeds completions; the store answers
//! with operations and events in an [`Outbox`]. Answers to commands always come as events, at once or later.

use std::collections::{HashMap, VecDeque};

use crate::batch::TimestampType;
use crate::checkpoint::Checkpointer;
use crate::commit::{Commit, CommitStats, Effect};
use crate::config::StoreConfig;
use crate::epochs::{EpochEnd, EpochTable};
use crate::error::{AppendError, CommandError, FenceReason, ReadError};
use crate::io::buf::BufSlice;
use crate::io::{Completion, DiskError, DiskOp, Done, FileId, OpId};
use crate::journal::{Body, Record};
use crate::log::{Log, LogNo, LogState};
use crate::producers::ProducerTable;
use crate::read::Reads;
use crate::removal::Removal;
use crate::retention::Retention;
use crate::small::SmallFiles;
use crate::types::{LeaderEpoch, Now, Offset, PartitionId, Pos};
use crate::writeback::WriteBack;

/// Settings of one partition's log; from the topic's settings under Kafka's names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// `segment.bytes`: a segment rolls before it would grow beyond this.
    pub segment_bytes: u64,
    /// `segment.ms`: a segment whose first batch is older than this rolls at the next append.
    pub segment_ms: u64,
    /// `retention.bytes` per partition; `None` is unlimited.
    pub retention_bytes: Option<u64>,
    /// `retention.ms`; `None` is unlimited.
    pub retention_ms: Option<u64>,
    /// `max.message.bytes`: the largest batch, header included.
    pub max_message_bytes: usize,
    /// `message.timestamp.type`.
    pub timestamp_type: TimestampType,
    /// `durability=memory`: readers and acks may run ahead of the journal.
    pub memory: bool,
}

impl Default for LogSettings {
    /// Kafka's defaults.
    fn default() -> LogSettings {
        LogSettings {
            segment_bytes: 1 << 30,
            segment_ms: 7 * 86_400_000,
            retention_bytes: None,
            retention_ms: Some(7 * 86_400_000),
            max_message_bytes: 1_048_588,
            timestamp_type: TimestampType::CreateTime,
            memory: false,
        }
    }
}

/// What the owner must do after a call: execute the operations, look at the events, call again in time.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Operations for the disk driver, in the order they were decided.
    pub ops: Vec<(OpId, DiskOp)>,
    /// Answers and news for the owner.
    pub events: Vec<StoreEvent>,
}

/// One batch to append as the leader.
#[derive(Debug, Clone)]
pub struct AppendRequest {
    /// Comes back in [`StoreEvent::Appended`].
    pub token: u64,
    /// Where to.
    pub partition: PartitionId,
    /// The leader epoch the caller believes in; must be the partition's current one.
    pub epoch: LeaderEpoch,
    /// Exactly one record batch (magic 2). Base offset and leader epoch are stamped by the store.
    pub batch: BufSlice,
}

/// A range to read.
#[derive(Debug, Clone)]
pub struct ReadRequest {
    /// Comes back in [`StoreEvent::Read`].
    pub token: u64,
    /// Where from.
    pub partition: PartitionId,
    /// First offset wanted; the answer may begin with the batch that contains it.
    pub offset: Offset,
    /// Batches at or beyond this offset are not served (high watermark for consumers, `log_end` for replicas).
    pub limit: Offset,
    /// About how much; at least one whole batch is served.
    pub max_bytes: usize,
}

/// A batch that is in memory and on its way to the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appended {
    /// Offset of its first record.
    pub base: Offset,
    /// Exclusive end; the acknowledgement waits until `durable_end` (or the high watermark) reaches it.
    pub end: Offset,
    /// A retry of a batch that is already in the log: nothing was appended, `base` and `end` are the original's.
    pub duplicate: bool,
    /// The stamped time (milliseconds) where the topic uses LogAppendTime, else -1.
    pub log_append_time: i64,
}

/// Bytes read.
#[derive(Debug, Clone)]
pub struct ReadBytes {
    /// Pieces that, one after the other, are whole batches, contiguous and in order; a piece may begin or end inside a
    /// batch. Empty when nothing lies below the limit.
    pub batches: Vec<BufSlice>,
    /// Offset after the last record served (`offset` of the request when empty).
    pub next: Offset,
}

/// News for the owner.
#[derive(Debug)]
pub enum StoreEvent {
    /// Answer to `append`.
    Appended {
        token: u64,
        partition: PartitionId,
        result: Result<Appended, AppendError>,
    },
    /// Answer to `read`.
    Read {
        token: u64,
        partition: PartitionId,
        result: Result<ReadBytes, ReadError>,
    },
    /// Answer to `offset_for_time`: the first record with a timestamp at or after the one asked
    /// (its offset and timestamp), or `None`.
    TimeFound {
        token: u64,
        partition: PartitionId,
        result: Result<Option<(Offset, i64)>, ReadError>,
    },
    /// Answer to `begin_epoch`, `truncate`, `set_log_start`, `drop_partition`: its record is durable.
    Done {
        token: u64,
        partition: PartitionId,
        result: Result<(), CommandError>,
    },
    /// `durable_end` of a partition moved up to `end`.
    Durable { partition: PartitionId, end: Offset },
    /// Log start moved (retention or a command).
    LogStart { partition: PartitionId, start: Offset },
    /// A partition was fenced.
    PartitionFenced {
        partition: PartitionId,
        reason: FenceReason,
    },
    /// The whole shard was fenced; nothing will be acknowledged again.
    ShardFenced { reason: FenceReason },
}

/// Where a partition stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionView {
    /// First readable offset.
    pub log_start: Offset,
    /// Next offset to assign (`accepted_end`).
    pub log_end: Offset,
    /// End covered by completed journal writes.
    pub durable_end: Offset,
    /// Current leader epoch (that of the last epoch entry).
    pub epoch: LeaderEpoch,
    /// Set when the partition takes no writes.
    pub fenced: Option<FenceReason>,
}

/// What an operation in flight was for; its completion continues there.
#[derive(Debug)]
pub(crate) enum Pending {
    /// A journal frame or file header.
    Journal,
    /// Making a partition's directory.
    MakeDir { log: LogNo },
    /// Opening a segment file.
    OpenSegment { log: LogNo, base: Offset, file: FileId },
    /// Allocating a segment's place up to `to`.
    Allocate { log: LogNo, base: Offset, to: Pos },
    /// Write-back of a segment up to `end`.
    WriteBack {
        log: LogNo,
        base: Offset,
        end: Pos,
        bytes: u64,
    },
    /// Cutting a sealing segment's file to its exact end.
    CutFile { log: LogNo, base: Offset },
    /// A step of a small file's writing.
    Small { file: FileId },
    /// Closing a descriptor; nothing waits for it.
    Close { file: FileId },
    /// A step of a checkpoint.
    Checkpoint,
    /// Listing a partition's directory.
    List { log: LogNo },
    /// A step of an index load.
    IndexLoad { log: LogNo, base: Offset },
    /// A read for a reader.
    Read { read: u64, log: LogNo, segment: Offset },
    /// Renaming a file or directory to its `-delete` name.
    SetAside {
        log: LogNo,
        from: String,
        to: String,
        is_dir: bool,
        answer: Option<(u64, PartitionId)>,
    },
    /// A step on a `.producers` file for a rebuild of the producer table.
    Rebuild { log: LogNo },
    /// A step of the removal of a name set aside.
    Remove,
}

/// Operations in flight and the numbers given to operations and files.
#[derive(Debug, Default)]
pub(crate) struct Ops {
    next_op: u64,
    next_file: u32,
    free_files: Vec<FileId>,
    pending: HashMap<OpId, Pending>,
}

impl Ops {
    /// An id for an operation that continues with `pending`.
    pub(crate) fn id(&mut self, pending: Pending) -> OpId {
        self.next_op += 1;
        let op = OpId(self.next_op);
        self.pending.insert(op, pending);
        op
    }

    /// Forgets an operation whose end was handled elsewhere.
    pub(crate) fn forget(&mut self, op: OpId) {
        self.pending.remove(&op);
    }

    /// A free file id.
    pub(crate) fn file(&mut self) -> FileId {
        self.free_files.pop().unwrap_or_else(|| {
            self.next_file += 1;
            FileId(self.next_file - 1)
        })
    }

    /// Returns a file id after its close (or failed open) completed.
    pub(crate) fn free_file(&mut self, file: FileId) {
        self.free_files.push(file);
    }
}

/// Counters and gauges of a store.
#[derive(Debug, Clone, Copy, Default)]
pub struct StoreStats {
    /// Batches accepted.
    pub batches: u64,
    /// Bytes accepted.
    pub accepted_bytes: u64,
    /// Bytes written back to segments.
    pub written_back_bytes: u64,
    /// Write-back operations completed.
    pub write_backs: u64,
    /// Retries answered from the producer table.
    pub duplicates: u64,
    /// Appends refused because the disk is full.
    pub no_space: u64,
    /// Appends refused because a budget was used up.
    pub busy: u64,
    /// Checkpoints completed.
    pub checkpoints: u64,
    /// Bytes of the last snapshot.
    pub snapshot_bytes: u64,
    /// Longest slice of checkpoint work, nanoseconds of the driver's clock are not visible here: partitions per slice.
    pub checkpoint_slices: u64,
    /// Segment files removed.
    pub segments_removed: u64,
    /// Bytes read from segments.
    pub read_bytes: u64,
    /// Reads answered from memory.
    pub memory_reads: u64,
    /// Reads answered from disk.
    pub disk_reads: u64,
    /// Intervals or batches that failed their checks.
    pub damage_found: u64,
}

/// Gauges of a store, computed when asked.
#[derive(Debug, Clone, Copy, Default)]
pub struct StoreGauges {
    /// Accepted bytes not yet in segments.
    pub dirty_bytes: u64,
    /// Bytes of tails in memory.
    pub memory_bytes: u64,
    /// Journal writes in flight.
    pub frames_in_flight: usize,
    /// Write-backs in flight.
    pub write_backs_in_flight: usize,
    /// Bytes of batches the journal can still take.
    pub journal_room: u64,
    /// Partitions known; of them not asked for by the owner (strays); of them fenced.
    pub partitions: usize,
    pub strays: usize,
    pub fenced: usize,
    /// Appends waiting for a place or for room.
    pub waiting: usize,
}

/// One shard's storage.
#[derive(Debug)]
pub struct Store {
    pub(crate) cfg: StoreConfig,
    pub(crate) grain: usize,
    pub(crate) logs: Vec<Option<Box<Log>>>,
    pub(crate) by_id: HashMap<PartitionId, LogNo>,
    pub(crate) commit: Commit,
    pub(crate) ops: Ops,
    pub(crate) write_back: WriteBack,
    pub(crate) checkpoint: Checkpointer,
    pub(crate) small: SmallFiles,
    pub(crate) reads: Reads,
    pub(crate) removal: Removal,
    pub(crate) retention: Retention,
    /// Logs whose waiting appends wait for room in the journal or in memory, in order.
    pub(crate) admission: VecDeque<LogNo>,
    /// Cuts that wait for what is in flight.
    pub(crate) cuts: Vec<LogNo>,
    /// Bytes of waiting appends.
    pub(crate) waiting_bytes: u64,
    pub(crate) fenced: Option<FenceReason>,
    pub(crate) stopping: bool,
    effects: Vec<Effect>,
    pub(crate) stats: StoreStats,
}

impl Store {
    pub(crate) fn assemble(
        cfg: StoreConfig,
        grain: usize,
        commit: Commit,
        ops: Ops,
        checkpoint: Checkpointer,
    ) -> Store {
        Store {
            retention: Retention::new(),
            cfg,
            grain,
            logs: Vec::new(),
            by_id: HashMap::new(),
            commit,
            ops,
            write_back: WriteBack::default(),
            checkpoint,
            small: SmallFiles::default(),
            reads: Reads::default(),
            removal: Removal::default(),
            admission: VecDeque::new(),
            cuts: Vec::new(),
            waiting_bytes: 0,
            fenced: None,
            stopping: false,
            effects: Vec::new(),
            stats: StoreStats::default(),
        }
    }

    // Getters.

    /// Where a partition stands; `None` when it is unknown, dropped, or was not created in this life.
    #[must_use]
    pub fn view(&self, partition: PartitionId) -> Option<PartitionView> {
        let log = self.find(partition).ok()?;
        Some(PartitionView {
            fenced: self.fenced.or(log.fenced),
            ..log.view()
        })
    }

    /// (Largest own epoch at or below `epoch`, its exclusive end), for a follower that asks where logs part
    /// (REPLICATION.md section 1).
    #[must_use]
    pub fn end_offset_for(
        &self,
        partition: PartitionId,
        epoch: LeaderEpoch,
    ) -> Option<(LeaderEpoch, Offset)> {
        let log = self.find(partition).ok()?;
        match log.epochs.end_offset_for(epoch, log.log_end()) {
            EpochEnd::Known { epoch, end } => Some((epoch, end)),
            // Epochs that the table's bound dropped are answered from the segments once replication asks for them.
            EpochEnd::Older { .. } | EpochEnd::Empty => None,
        }
    }

    /// Partitions that were recovered or created, with whether the owner asked for them in this life.
    pub fn partitions(&self) -> impl Iterator<Item = (PartitionId, bool)> + '_ {
        self.logs.iter().flatten().map(|log| (log.id, log.served))
    }

    /// Counters since the start.
    #[must_use]
    pub fn stats(&self) -> &StoreStats {
        &self.stats
    }

    /// Counters of the journal since the start.
    #[must_use]
    pub fn commit_stats(&self) -> &CommitStats {
        &self.commit.stats
    }

    /// Latencies (ns) of journal writes completed since the last call.
    pub fn take_journal_latencies(&mut self) -> std::vec::Drain<'_, u64> {
        self.commit.latencies.drain(..)
    }

    /// Mono time at which the oldest journal write in flight was issued.
    #[must_use]
    pub fn oldest_journal_write(&self) -> Option<u64> {
        self.commit.oldest_issue()
    }

    /// Gauges; walks the partitions.
    #[must_use]
    pub fn gauges(&self) -> StoreGauges {
        let mut gauges = StoreGauges {
            dirty_bytes: self.write_back.dirty,
            memory_bytes: self.write_back.memory,
            frames_in_flight: self.commit.in_flight(),
            write_backs_in_flight: self.write_back.in_flight,
            journal_room: self.commit.data_room(),
            ..StoreGauges::default()
        };
        for log in self.logs.iter().flatten() {
            gauges.partitions += 1;
            gauges.strays += usize::from(!log.served);
            gauges.fenced += usize::from(log.fenced.is_some());
            gauges.waiting += log.waiting.len();
        }
        gauges
    }

    /// Why the shard takes no writes, if so.
    #[must_use]
    pub fn fenced(&self) -> Option<FenceReason> {
        self.fenced
    }

    fn find(&self, partition: PartitionId) -> Result<&Log, PartitionId> {
        let no = self.by_id.get(&partition).ok_or(partition)?;
        self.logs[no.0 as usize]
            .as_deref()
            .filter(|log| log.served && !log.is_dropping())
            .ok_or(partition)
    }

    /// Number of a partition that the owner may use.
    pub(crate) fn find_no(&self, partition: PartitionId) -> Option<LogNo> {
        self.find(partition).ok()?;
        self.by_id.get(&partition).copied()
    }

    pub(crate) fn log(&self, no: LogNo) -> Option<&Log> {
        self.logs.get(no.0 as usize)?.as_deref()
    }

    pub(crate) fn log_mut(&mut self, no: LogNo) -> Option<&mut Log> {
        self.logs.get_mut(no.0 as usize)?.as_deref_mut()
    }

    pub(crate) fn add_log(&mut self, log: Log) -> LogNo {
        #[cfg(feature = "canary")]
        let log = Log {
            dir_by_name: self.cfg.has(crate::canary::Canary::DropByName),
            ..log
        };
        let no = LogNo(self.logs.len() as u32);
        self.by_id.insert(log.id, no);
        self.logs.push(Some(Box::new(log)));
        no
    }

    // Commands.

    /// Makes a partition known under `name` with `settings`; new ones start empty. No I/O: an empty partition becomes
    /// durable with its first `begin_epoch`. Repeating it changes the settings.
    pub fn create(&mut self, partition: PartitionId, name: &str, settings: LogSettings) {
        let no = self.by_id.get(&partition).copied().unwrap_or_else(|| {
            let epochs = EpochTable::new(self.cfg.epoch_entries);
            let producers = ProducerTable::new(self.cfg.producers);
            self.add_log(Log::new(partition, name, settings.clone(), epochs, producers))
        });
        if let Some(log) = self.log_mut(no) {
            log.name = name.into();
            log.settings = settings;
            log.served = true;
        }
    }

    /// Changes the settings of a partition; they count from the next append and retention check on.
    pub fn alter(&mut self, partition: PartitionId, settings: LogSettings) {
        if let Some(log) = self.find_no(partition).and_then(|no| self.log_mut(no)) {
            log.settings = settings;
        }
    }

    /// Starts leader epoch `epoch` at the log's end; `Done` when durable. Appends of the epoch may follow at once: the
    /// journal keeps the order.
    pub fn begin_epoch(
        &mut self,
        now: Now,
        token: u64,
        partition: PartitionId,
        epoch: LeaderEpoch,
        out: &mut Outbox,
    ) {
        let result = self.try_begin_epoch(now, token, partition, epoch);
        answer(token, partition, result, out);
    }

    fn try_begin_epoch(
        &mut self,
        now: Now,
        token: u64,
        partition: PartitionId,
        epoch: LeaderEpoch,
    ) -> Result<(), CommandError> {
        let no = self.command_target(partition)?;
        let Some(log) = self.log_mut(no) else {
            return Err(CommandError::UnknownPartition(partition));
        };
        let start = log.log_end();
        let current = log.epoch();
        if log.epochs.assign(epoch, start).is_err() {
            return Err(CommandError::StaleEpoch {
                asked: epoch,
                current,
            });
        }
        log.epochs_dirty = true;
        let record = Record::EpochStart {
            partition,
            epoch,
            start,
        };
        self.commit
            .push(now, record, Body::None, Effect::Command { log: no, token });
        Ok(())
    }

    /// The log that a command is for, when it may change it.
    pub(crate) fn command_target(&self, partition: PartitionId) -> Result<LogNo, CommandError> {
        if let Some(reason) = self.fenced {
            return Err(CommandError::Fenced(reason));
        }
        let no = self
            .find_no(partition)
            .ok_or(CommandError::UnknownPartition(partition))?;
        match self.log(no).map(|log| log.state) {
            Some(LogState::Open) => Ok(no),
            Some(_) => Err(CommandError::Busy),
            None => Err(CommandError::UnknownPartition(partition)),
        }
    }

    /// Raises the high watermark; lower values are ignored. Bounds what retention may delete.
    pub fn set_high_watermark(&mut self, partition: PartitionId, offset: Offset) {
        if let Some(log) = self.find_no(partition).and_then(|no| self.log_mut(no)) {
            log.high_watermark = log.high_watermark.max(offset.min(log.log_end()));
        }
    }

    /// Moves the log start up to `offset` (at most the high watermark); `Done` when durable.
    pub fn set_log_start(
        &mut self,
        now: Now,
        token: u64,
        partition: PartitionId,
        offset: Offset,
        out: &mut Outbox,
    ) {
        let result = self.command_target(partition).and_then(|no| {
            let log = self.log(no).ok_or(CommandError::UnknownPartition(partition))?;
            let (log_start, log_end) = (log.log_start, log.high_watermark);
            if offset > log_end {
                return Err(CommandError::OutOfRange {
                    asked: offset,
                    log_start,
                    log_end,
                });
            }
            let start = offset.max(log_start);
            self.raise_log_start(now, no, start, Some(token));
            Ok(())
        });
        answer(token, partition, result, out);
    }

    /// Drops a partition; `Done` when that is durable and its directory is set aside.
    pub fn drop_partition(&mut self, now: Now, token: u64, partition: PartitionId, out: &mut Outbox) {
        let known = self.by_id.get(&partition).copied();
        let result = match (
            self.fenced,
            known.and_then(|no| self.log_mut(no).map(|log| (no, log))),
        ) {
            (Some(reason), _) => Err(CommandError::Fenced(reason)),
            (None, Some((no, log))) if log.state == LogState::Open => {
                log.state = LogState::Dropping { token };
                self.commit.push(
                    now,
                    Record::Drop { partition },
                    Body::None,
                    Effect::Dropped { log: no },
                );
                let seq = self.commit.taken();
                if let Some(log) = self.log_mut(no) {
                    log.drop_seq = seq;
                }
                self.removal.dropping.push(no);
                self.refuse_waiting(no, &AppendError::UnknownPartition(partition), out);
                Ok(())
            }
            (None, Some(_)) => Err(CommandError::Busy),
            (None, None) => Err(CommandError::UnknownPartition(partition)),
        };
        answer(token, partition, result, out);
    }

    // Driving.

    /// Takes in the end of an operation.
    pub fn handle(&mut self, now: Now, completion: Completion, out: &mut Outbox) {
        let Some(pending) = self.ops.pending.remove(&completion.op) else {
            return;
        };
        let result = completion.result;
        let owner = self.owner_of(&pending);
        match pending {
            Pending::Journal => self.journal_done(now, completion.op, result, out),
            Pending::MakeDir { log } => self.directory_made(now, log, result, out),
            Pending::OpenSegment { log, base, file } => {
                self.segment_opened(now, log, base, file, result, out);
            }
            Pending::Allocate { log, base, to } => self.allocated(now, log, base, to, result, out),
            Pending::WriteBack {
                log,
                base,
                end,
                bytes,
            } => {
                self.write_back_done(now, log, base, end, bytes, result, out);
            }
            Pending::CutFile { log, base } => self.file_cut(log, base, result, out),
            Pending::Small { file } => self.small_step(now, file, result, out),
            Pending::Close { file } => self.ops.free_file(file),
            Pending::Checkpoint => self.checkpoint_step(now, result, out),
            Pending::List { log } => self.listed(now, log, result, out),
            Pending::IndexLoad { log, base } => self.index_step(now, log, base, result, out),
            Pending::Rebuild { log } => self.rebuild_file_step(now, log, result, out),
            Pending::Read { read, log, segment } => self.read_done(now, read, log, segment, result, out),
            Pending::SetAside {
                log,
                from,
                to,
                is_dir,
                answer,
            } => {
                self.removal.under_way.remove(&from);
                self.was_set_aside(now, log, to, is_dir, answer, result, out);
            }
            Pending::Remove => self.removal_step(now, result, out),
        }
        // Here and not in each handler: what waits for the end of all of them must not miss one (a rename did).
        if let Some(no) = owner {
            self.something_ended(now, no, out);
        }
    }

    /// The log on whose files an operation works; effects of the journal find theirs by themselves.
    fn owner_of(&self, pending: &Pending) -> Option<LogNo> {
        match pending {
            Pending::MakeDir { log }
            | Pending::OpenSegment { log, .. }
            | Pending::Allocate { log, .. }
            | Pending::WriteBack { log, .. }
            | Pending::CutFile { log, .. }
            | Pending::List { log }
            | Pending::IndexLoad { log, .. }
            | Pending::Rebuild { log }
            | Pending::Read { log, .. }
            | Pending::SetAside { log, .. } => Some(*log),
            Pending::Small { file } => self.small.owner(*file),
            Pending::Journal | Pending::Close { .. } | Pending::Checkpoint | Pending::Remove => None,
        }
    }

    fn journal_done(&mut self, now: Now, op: OpId, result: Result<Done, DiskError>, out: &mut Outbox) {
        let mut effects = std::mem::take(&mut self.effects);
        self.commit.completed(now, op, result.is_ok(), &mut effects);
        if result.is_err() {
            self.fence_shard(FenceReason::JournalFailed, out);
        }
        for effect in effects.drain(..) {
            self.apply(now, effect, out);
        }
        self.effects = effects;
    }

    fn apply(&mut self, now: Now, effect: Effect, out: &mut Outbox) {
        match effect {
            Effect::Appended {
                log,
                segment,
                pos,
                next,
            } => {
                self.became_durable(log, segment, pos, next, out);
                self.truncate_may_go_on(now, log, out);
            }
            Effect::Command { log, token } => {
                if let Some(partition) = self.log(log).map(|l| l.id) {
                    out.events.push(StoreEvent::Done {
                        token,
                        partition,
                        result: Ok(()),
                    });
                }
            }
            Effect::LogStart { log, start, token } => self.log_start_durable(now, log, start, token, out),
            Effect::Truncated { log } => self.truncate_durable(now, log, out),
            Effect::Dropped { log } => self.drop_durable(now, log, out),
            Effect::None => {}
        }
    }

    fn became_durable(&mut self, no: LogNo, segment: Offset, pos: Pos, next: Offset, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        let partition = log.id;
        log.durable_end = log.durable_end.max(next);
        let end = log.durable_end;
        if let Some(segment) = log.segment_mut(segment) {
            segment.durable = segment.durable.max(pos);
        }
        match out.events.last_mut() {
            Some(StoreEvent::Durable {
                partition: last,
                end: moved,
            }) if *last == partition => *moved = end,
            _ => out.events.push(StoreEvent::Durable { partition, end }),
        }
        self.queue_write_back(no);
    }

    /// To be called once per loop turn, after all events: issues the next journal frames, write-back, and a slice of a
    /// checkpoint.
    pub fn turn_end(&mut self, now: Now, out: &mut Outbox) {
        self.refuse_for_space(now, out);
        self.drain_admission(now, out);
        if self.fenced.is_none() {
            let ops = &mut self.ops;
            self.commit
                .issue(now, &mut || ops.id(Pending::Journal), &mut out.ops);
        }
        // A checkpoint says what must be written back, so write-back comes after it.
        self.pump_checkpoint(now, out);
        self.pump_write_back(now, out);
        self.pump_removal(now, out);
    }

    /// Whether room in journal or memory waits for space on the disk: it may be long in coming.
    pub(crate) fn is_out_of_space(&self) -> bool {
        self.checkpoint.is_full() || self.write_back.full
    }

    /// Nothing waits for somebody to free space: appends without room, and cuts that cannot go on, are refused.
    fn refuse_for_space(&mut self, now: Now, out: &mut Outbox) {
        if !self.is_out_of_space() {
            return;
        }
        if !self.has_room(0) {
            for no in std::mem::take(&mut self.admission) {
                if let Some(log) = self.log_mut(no) {
                    log.awaits_room = false;
                }
                self.refuse_waiting(no, &AppendError::NoSpace, out);
            }
        }
        for no in std::mem::take(&mut self.cuts) {
            self.refuse_cut_for_space(now, no, out);
        }
    }

    fn drain_admission(&mut self, now: Now, out: &mut Outbox) {
        for _ in 0..self.admission.len() {
            if !self.has_room(0) {
                return;
            }
            let Some(no) = self.admission.pop_front() else {
                return;
            };
            if let Some(log) = self.log_mut(no) {
                log.awaits_room = false;
                self.drain_waiting(now, no, out);
            }
        }
    }

    /// To be called when [`Store::next_wake`] has passed: retention and whatever waits for time.
    pub fn tick(&mut self, now: Now, out: &mut Outbox) {
        self.run_retention(now, out);
        self.retry_places(now, out);
    }

    /// Mono time (ns) at which `tick` and `turn_end` should be called although nothing happened.
    #[must_use]
    pub fn next_wake(&self) -> Option<u64> {
        let wakes = [
            self.commit.next_wake(),
            self.checkpoint.next_wake().filter(|_| self.fenced.is_none()),
            self.retention.next_wake().filter(|_| self.fenced.is_none()),
            self.removal.next_wake(),
        ];
        wakes.into_iter().flatten().min()
    }

    /// Begins a clean stop: nothing more is accepted; what is accepted becomes durable.
    pub fn begin_stop(&mut self) {
        self.stopping = true;
    }

    /// Whether everything accepted is durable and nothing that matters is in flight.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopping
            && (self.fenced.is_some() || (self.commit.is_idle() && self.commit.next_wake().is_none()))
            && self.write_back.in_flight == 0
    }

    /// Fences the whole shard, in the step that saw the failure.
    pub(crate) fn fence_shard(&mut self, reason: FenceReason, out: &mut Outbox) {
        if self.fenced.is_some() {
            return;
        }
        self.fenced = Some(reason);
        // First, so that the owner knows that what is refused now may be in the journal all the same.
        out.events.push(StoreEvent::ShardFenced { reason });
        for no in 0..self.logs.len() {
            self.refuse_waiting(LogNo(no as u32), &AppendError::Fenced(reason), out);
            self.refuse_command(LogNo(no as u32), reason, out);
        }
        for (no, token) in self.commit.abandon() {
            if let Some(partition) = self.log(no).map(|log| log.id) {
                answer(token, partition, Err(CommandError::Fenced(reason)), out);
            }
        }
    }

    /// Answers a cut or drop that cannot become durable any more; whether it did is for the next start to find out.
    fn refuse_command(&mut self, no: LogNo, reason: FenceReason, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        let token = match log.state {
            LogState::Cutting { token, .. } => token,
            LogState::Dropping { token } if !log.dropped => token,
            LogState::Dropping { .. } | LogState::Open => return,
        };
        log.state = LogState::Open;
        let partition = log.id;
        answer(token, partition, Err(CommandError::Fenced(reason)), out);
        self.list_again(no, out);
    }

    /// Fences one partition.
    pub(crate) fn fence_partition(&mut self, no: LogNo, reason: FenceReason, out: &mut Outbox) {
        let Some(log) = self.log_mut(no) else { return };
        if log.fenced.is_some() {
            return;
        }
        let dirty = log.counted_dirty();
        log.fenced = Some(reason);
        let partition = log.id;
        let pinned = log.pin.is_some();
        self.write_back.dirty = self.write_back.dirty.saturating_sub(dirty);
        if pinned {
            self.restart_checkpoint();
        }
        self.refuse_cut(no, reason, out);
        self.refuse_waiting(no, &AppendError::Fenced(reason), out);
        out.events.push(StoreEvent::PartitionFenced { partition, reason });
    }
}

fn answer(token: u64, partition: PartitionId, result: Result<(), CommandError>, out: &mut Outbox) {
    if let Err(error) = result {
        out.events.push(StoreEvent::Done {
            token,
            partition,
            result: Err(error),
        });
    }
}

#[cfg(test)]
mod tests;
