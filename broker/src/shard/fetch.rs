//! Fetch at the owner: read what is there, park until there is enough or the wait is over, answer.
//!
//! Bytes read stay with the task while it waits for more, so a long `min_bytes` wait never reads a range twice.
//! `max_bytes` is spent in turn: the first range served changes from fetch to fetch, so that one busy partition
//! starves no other. At least one whole batch is served, however large.

use ringfence_engine::error::ReadError;
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::store::{ReadBytes, ReadRequest};
use ringfence_engine::types::{LeaderEpoch, Now, Offset, PartitionId};

use super::{Shard, StoreCall, Task};
use crate::error::WireError;
use crate::event::{CallRef, Outbox, WorkResult};
use crate::native::{FetchPartition, FetchedPartition};
use crate::replica::leader::divergence;

/// Ranges of one request that are read here.
#[derive(Debug)]
pub(super) struct FetchTask {
    call: CallRef,
    deadline: u64,
    min_bytes: usize,
    max_bytes: usize,
    /// Bytes read so far, and bytes that reads under way may bring.
    got: usize,
    reserved: usize,
    /// Reads under way.
    reading: usize,
    /// Answer as soon as no read is under way.
    hurry: bool,
    parked: bool,
    /// Part to begin with.
    first: usize,
    parts: Vec<FetchPart>,
}

#[derive(Debug)]
struct FetchPart {
    /// Place in the request.
    index: u32,
    partition: PartitionId,
    epoch: Option<LeaderEpoch>,
    /// The partition's number for waiters; `None` when there is nothing to wait for.
    slot: Option<u32>,
    next: Offset,
    max_bytes: usize,
    got: usize,
    /// What the read under way may bring.
    reserved: usize,
    /// Not to be read again before the partition moves.
    rest: bool,
    error: Option<WireError>,
    diverging: Option<(LeaderEpoch, Offset)>,
    records: Vec<BufSlice>,
}

impl FetchTask {
    pub(super) fn new(call: CallRef, deadline: u64, min_bytes: usize, max_bytes: usize) -> FetchTask {
        FetchTask {
            call,
            deadline,
            min_bytes: min_bytes.min(max_bytes),
            max_bytes,
            got: 0,
            reserved: 0,
            reading: 0,
            hurry: false,
            parked: false,
            first: 0,
            parts: Vec::new(),
        }
    }

    /// No more waiting.
    pub(super) fn hurry(&mut self) {
        self.hurry = true;
    }

    /// How much the part may read now; `None` when nothing.
    fn allowance(&self, part: &FetchPart) -> Option<usize> {
        let left = self.max_bytes.saturating_sub(self.got + self.reserved);
        let own = part.max_bytes.saturating_sub(part.got);
        let nothing_yet = self.got + self.reserved == 0;
        match left.min(own) {
            0 if nothing_yet => Some(1),
            0 => None,
            bytes => Some(bytes),
        }
    }

    fn is_due(&self, now: Now) -> bool {
        self.hurry || self.got >= self.min_bytes || self.deadline <= now.mono
    }
}

impl Shard {
    pub(super) fn begin_fetch(
        &mut self,
        now: Now,
        mut task: FetchTask,
        parts: Vec<(u32, FetchPartition)>,
        out: &mut Outbox,
    ) {
        task.parts = parts
            .into_iter()
            .map(|(index, asked)| self.fetch_part(index, &asked))
            .collect();
        task.hurry |= task.parts.iter().any(|part| part.slot.is_none());
        let (call, deadline, count) = (task.call, task.deadline, task.parts.len());
        let key = self.tasks.insert(Task::Fetch(task));
        if let Some(Task::Fetch(task)) = self.tasks.get_mut(key) {
            // Numbers of tasks differ from fetch to fetch; so does the part that may spend first.
            task.first = key as usize % count.max(1);
        }
        self.fetches.insert(call, key);
        self.deadlines.insert((deadline, key));
        self.pump_fetch(now, key, None, out);
    }

    /// Looks at a range before anything is read: role, epoch, divergence, bounds (REPLICATION.md section 2).
    fn fetch_part(&self, index: u32, asked: &FetchPartition) -> FetchPart {
        let mut part = FetchPart {
            index,
            partition: asked.partition,
            epoch: asked.epoch,
            slot: None,
            next: asked.offset,
            max_bytes: asked.max_bytes as usize,
            got: 0,
            reserved: 0,
            rest: false,
            error: None,
            diverging: None,
            records: Vec::new(),
        };
        match self.leading(asked.partition, asked.epoch) {
            Err(error) => part.error = Some(error),
            Ok(state) => {
                let slot = state.slot();
                let own = asked
                    .last_fetched_epoch
                    .and_then(|last| Some((last, self.store.end_offset_for(asked.partition, last)?)));
                part.diverging = own.and_then(|(last, own)| divergence(last, asked.offset, own));
                if part.diverging.is_none() {
                    match self.store.view(asked.partition) {
                        None => part.error = Some(WireError::UnknownTopicOrPartition),
                        Some(view) if asked.offset < view.log_start || asked.offset > view.log_end => {
                            part.error = Some(WireError::OffsetOutOfRange);
                        }
                        Some(_) => part.slot = Some(slot),
                    }
                }
            }
        }
        part
    }

    /// Reads what can be read, then answers or parks. With `moved` only the partition with that number is looked at.
    pub(super) fn pump_fetch(&mut self, now: Now, key: u64, moved: Option<u32>, out: &mut Outbox) {
        let Some(Task::Fetch(task)) = self.tasks.get_mut(key) else {
            return;
        };
        let count = task.parts.len();
        let first = task.first;
        for step in 0..count {
            let at = (first + step) % count;
            self.pump_part(now, key, at, moved, out);
        }
        let Some(Task::Fetch(task)) = self.tasks.get_mut(key) else {
            return;
        };
        if task.reading > 0 {
            return;
        }
        if task.is_due(now) {
            self.finish_fetch(now, key, out);
        } else if !task.parked {
            task.parked = true;
            self.stats.parked_fetches.add(1);
            self.waiters
                .extend(task.parts.iter().filter_map(|part| Some((part.slot?, key))));
        }
    }

    /// Begins to read one range, if there is something to read and room for it.
    fn pump_part(&mut self, now: Now, key: u64, at: usize, moved: Option<u32>, out: &mut Outbox) {
        let Some(Task::Fetch(task)) = self.tasks.get_mut(key) else {
            return;
        };
        let Some(part) = task.parts.get(at) else { return };
        let Some(slot) = part.slot else { return };
        if moved.is_some_and(|moved| moved != slot) || part.reserved > 0 || (part.rest && moved.is_none()) {
            return;
        }
        let (id, epoch, next) = (part.partition, part.epoch, part.next);
        let Some(max_bytes) = task.allowance(part) else {
            return;
        };
        let limit = match self.leading(id, epoch) {
            Ok(state) => state.leader().map_or(next, |leader| leader.high_watermark()),
            Err(error) => {
                self.fail_part(key, at, error);
                return;
            }
        };
        if limit <= next {
            return;
        }
        let token = self.store_calls.insert(StoreCall::Read {
            task: key,
            part: at as u32,
        });
        if let Some(Task::Fetch(task)) = self.tasks.get_mut(key) {
            task.reading += 1;
            task.reserved += max_bytes;
            task.parts[at].reserved = max_bytes;
            task.parts[at].rest = false;
        }
        let request = ReadRequest {
            token,
            partition: id,
            offset: next,
            limit,
            max_bytes,
        };
        self.store.read(now, request, &mut out.disk);
    }

    fn fail_part(&mut self, key: u64, at: usize, error: WireError) {
        if let Some(Task::Fetch(task)) = self.tasks.get_mut(key) {
            task.hurry = true;
            let part = &mut task.parts[at];
            part.error = Some(error);
            if let Some(slot) = part.slot.take() {
                self.waiters.remove(&(slot, key));
            }
        }
    }

    pub(super) fn on_read(
        &mut self,
        now: Now,
        token: u64,
        result: Result<ReadBytes, ReadError>,
        out: &mut Outbox,
    ) {
        let Some(StoreCall::Read { task: key, part: at }) = self.store_calls.remove(token) else {
            return;
        };
        let at = at as usize;
        let Some(Task::Fetch(task)) = self.tasks.get_mut(key) else {
            return;
        };
        let reserved = std::mem::take(&mut task.parts[at].reserved);
        task.reading -= 1;
        task.reserved -= reserved;
        match result {
            Err(error) => self.fail_part(key, at, WireError::from(&error)),
            Ok(read) => {
                let bytes: usize = read.batches.iter().map(|piece| piece.len()).sum();
                let part = &mut task.parts[at];
                // A first batch larger than what was left is served only when nothing else is.
                let oversize = bytes > reserved && task.got > 0;
                part.rest = bytes == 0 || oversize;
                if !part.rest {
                    part.got += bytes;
                    part.next = read.next;
                    part.records.extend(read.batches);
                    task.got += bytes;
                }
            }
        }
        self.pump_fetch(now, key, None, out);
    }

    pub(super) fn on_hurry(&mut self, now: Now, call: CallRef, out: &mut Outbox) {
        let Some(key) = self.fetches.get(&call).copied() else {
            return;
        };
        if let Some(Task::Fetch(task)) = self.tasks.get_mut(key) {
            task.hurry();
            self.pump_fetch(now, key, None, out);
        }
    }

    fn finish_fetch(&mut self, now: Now, key: u64, out: &mut Outbox) {
        let Some(Task::Fetch(task)) = self.tasks.remove(key) else {
            return;
        };
        self.fetches.remove(&task.call);
        self.deadlines.remove(&(task.deadline, key));
        if task.parked {
            self.stats.parked_fetches.sub(1);
            for slot in task.parts.iter().filter_map(|part| part.slot) {
                self.waiters.remove(&(slot, key));
            }
        }
        self.stats.fetched_bytes.add(task.got as u64);
        let results = task
            .parts
            .into_iter()
            .map(|part| (part.index, self.fetched(part)))
            .collect();
        self.finish(now, task.call, WorkResult::Fetch(results), out);
    }

    fn fetched(&self, part: FetchPart) -> FetchedPartition<BufSlice> {
        let leader = self
            .partitions
            .get(&part.partition)
            .and_then(|state| state.leader());
        let view = self.store.view(part.partition);
        FetchedPartition {
            partition: part.partition,
            error: part.error,
            epoch: leader.map(|leader| leader.epoch()),
            high_watermark: leader.map(|leader| leader.high_watermark()),
            log_start: view.map(|view| view.log_start),
            log_end: view.map(|view| view.log_end),
            diverging_epoch: part.diverging.map(|(epoch, _)| epoch),
            diverging_end: part.diverging.map(|(_, end)| end),
            records: part.records,
        }
    }
}
