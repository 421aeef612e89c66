//! Commands to the node: what a run does, chosen by the seed or by a script.

use ringfence_engine::batch::TimestampType;
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::io::sim::{Fault, FaultKind, OpKind, Rng, When};
use ringfence_engine::io::{Disk, FileClass};
use ringfence_engine::store::{AppendRequest, LogSettings, ReadRequest};
use ringfence_engine::types::{LeaderEpoch, Offset, PartitionId, TopicId};

use super::{Node, PATIENCE_NS, Runner, Waiting};
use crate::batch::{self, Producer, at};
use crate::sim::Violation;
use crate::sim::model::{Batch, Change, Partition, Sequence};

impl Runner {
    /// A partition that lives and is not being dropped.
    pub(super) fn some_partition(&mut self) -> Option<PartitionId> {
        let live = self.partitions.values().filter(|p| !p.is_dropping());
        let live: Vec<PartitionId> = live.map(|p| p.id).collect();
        (!live.is_empty()).then(|| *self.rng.pick(&live))
    }

    fn has_waiting_append(&self, id: PartitionId) -> bool {
        let mut waiting = self.waiting.values();
        waiting.any(|(_, w)| matches!(w, Waiting::Append { partition, .. } if *partition == id))
    }

    pub(super) fn create(&mut self) -> Result<(), Violation> {
        if self.partitions.len() >= 8 {
            return Ok(());
        }
        let settings = self.settings();
        // Few names, so that a dropped topic's name comes back soon.
        let name = format!("topic-{}", self.rng.below(4));
        self.create_as(&name, settings).map(|_| ())
    }

    /// Makes a partition and begins its first epoch.
    pub(in crate::sim) fn create_as(
        &mut self,
        name: &str,
        settings: LogSettings,
    ) -> Result<PartitionId, Violation> {
        let mut topic = [0; 16];
        topic[..8].copy_from_slice(&self.rng.bits().to_be_bytes());
        topic[8..].copy_from_slice(&self.next_topic.to_be_bytes());
        self.next_topic += 1;
        let id = PartitionId {
            topic: TopicId(topic),
            index: self.rng.below(3) as u32,
        };
        let mut partition = Partition::new(id, name, settings.clone());
        partition.may_lose_times = self.plan.profile.may_damage();
        self.partitions.insert(id, partition);
        self.node()?
            .call(id, |store, _, _| store.create(id, name, settings));
        self.begin_epoch(id)?;
        Ok(id)
    }

    fn settings(&mut self) -> LogSettings {
        let rng = &mut self.rng;
        LogSettings {
            segment_bytes: *rng.pick(&[16 << 10, 40_000, 128 << 10, 1 << 20]),
            segment_ms: *rng.pick(&[u64::MAX, u64::MAX, 200, 3_600_000]),
            retention_bytes: *rng.pick(&[None, None, None, Some(0), Some(60_000), Some(300_000)]),
            retention_ms: *rng.pick(&[None, None, None, Some(500), Some(60_000)]),
            max_message_bytes: 1 << 20,
            timestamp_type: *rng.pick(&[
                TimestampType::CreateTime,
                TimestampType::CreateTime,
                TimestampType::LogAppendTime,
            ]),
            memory: rng.odds(1, 6),
        }
    }

    pub(super) fn begin_epoch_somewhere(&mut self) -> Result<(), Violation> {
        match self.some_partition() {
            Some(id) => self.begin_epoch(id),
            None => Ok(()),
        }
    }

    pub(in crate::sim) fn begin_epoch(&mut self, id: PartitionId) -> Result<(), Violation> {
        let what = "begin_epoch";
        if self.has_waiting_append(id) {
            return Ok(());
        }
        let epoch = self.next_epoch;
        self.next_epoch += 1;
        let token = self.token(Waiting::Command { what })?;
        self.change(id, Change::Epoch(epoch), token);
        self.node()?.call(id, |store, now, out| {
            store.begin_epoch(now, token, id, LeaderEpoch(epoch), out);
        });
        self.called()
    }

    fn change(&mut self, id: PartitionId, change: Change, token: u64) {
        if let Some(partition) = self.partitions.get_mut(&id) {
            partition.accept(change, Some(token));
        }
    }

    pub(super) fn append_burst(&mut self) -> Result<(), Violation> {
        let Some(id) = self.some_partition() else {
            return Ok(());
        };
        for _ in 0..self.rng.between(1, 5) {
            if self.waiting.len() > 40 {
                break;
            }
            self.append(id)?;
        }
        self.called()
    }

    pub(super) fn append(&mut self, id: PartitionId) -> Result<(), Violation> {
        let grain = self.node()?.disk.grain();
        let max = self.config.max_batch_bytes(grain);
        let values = values(&mut self.rng, max.min(200_000));
        let producer = self.rng.below(4) as i64 - 1;
        self.append_values(id, &values, producer)
    }

    /// Appends one batch of `values`, from the producer of that id (-1: from nobody).
    pub(in crate::sim) fn append_values(
        &mut self,
        id: PartitionId,
        values: &[Vec<u8>],
        producer_id: i64,
    ) -> Result<(), Violation> {
        let Some(partition) = self.partitions.get(&id) else {
            return Ok(());
        };
        let epoch = partition.state.epoch();
        // A producer sends its next sequence; what it has under way counts.
        let newest = partition.state.newest_of(producer_id);
        let under_way = self.waiting.values().any(|(_, waiting)| {
            matches!(waiting, Waiting::Append { partition, sequence: Some(s), .. }
                if *partition == id && s.id == producer_id)
        });
        let producer = match producer_id {
            0.. if !under_way => {
                let raise = self.rng.odds(1, 30) || self.forgotten.remove(&(id, producer_id));
                next_sequence(producer_id, newest, raise)
            }
            _ => Producer::NONE,
        };
        let now = self.node()?.now();
        let time = now.wall_ms - self.rng.below(2_000) as i64;
        let values: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
        let bytes = batch::build(&values, time, producer);
        let sequence = (producer.id >= 0).then(|| Sequence {
            id: producer.id,
            epoch: producer.epoch,
            first: producer.sequence,
            last: producer.sequence + values.len() as i32 - 1,
        });
        self.send(id, epoch, bytes, time, sequence, None)
    }

    fn send(
        &mut self,
        id: PartitionId,
        epoch: u32,
        bytes: Vec<u8>,
        time: i64,
        sequence: Option<Sequence>,
        original: Option<(u64, u64)>,
    ) -> Result<(), Violation> {
        let batch = BufSlice::copy_of(&bytes);
        let token = self.token(Waiting::Append {
            partition: id,
            bytes,
            time,
            sequence,
            original,
        })?;
        let request = AppendRequest {
            token,
            partition: id,
            epoch: LeaderEpoch(epoch),
            batch,
        };
        self.node()?
            .call(id, |store, now, out| store.append(now, request, out));
        self.take_events()
    }

    /// Sends a batch again that is in the log already: an answer must have got lost.
    pub(super) fn retry_an_old_batch(&mut self) -> Result<(), Violation> {
        let Some(id) = self.some_partition() else {
            return Ok(());
        };
        if self.has_waiting_append(id) {
            return Ok(());
        }
        let Some(partition) = self.partitions.get(&id) else {
            return Ok(());
        };
        let producer_id = self.rng.below(3) as i64;
        let batches = partition.state.batches.iter().rev();
        let own = batches.filter(|b| b.sequence.is_some_and(|s| s.id == producer_id));
        let own: Vec<Batch> = own.take(5).cloned().collect();
        if own.is_empty() {
            return Ok(());
        }
        if partition.damaged {
            // Whether the original is remembered is not known.
            return Ok(());
        }
        let batch = self.rng.pick(&own).clone();
        let newest = own[0].sequence.map(|s| s.epoch);
        match batch.sequence.map(|s| s.epoch) == newest {
            true => self.send_again(id, &batch),
            false => Ok(()),
        }
    }

    /// Sends the newest batch of a partition again.
    pub(in crate::sim) fn retry_newest(&mut self, id: PartitionId) -> Result<(), Violation> {
        let partition = self.partitions.get(&id);
        match partition.and_then(|p| p.state.batches.last().cloned()) {
            Some(batch) => self.send_again(id, &batch),
            None => Ok(()),
        }
    }

    fn send_again(&mut self, id: PartitionId, batch: &Batch) -> Result<(), Violation> {
        let epoch = self.partitions.get(&id).map_or(0, |p| p.state.epoch());
        // As the producer sent it: without offset and epoch.
        let mut bytes = batch.bytes.to_vec();
        batch::put(&mut bytes, at::BASE_OFFSET, &[0; 8]);
        batch::put(&mut bytes, at::LEADER_EPOCH, &[0xff; 4]);
        batch::put(&mut bytes, at::ATTRIBUTES, &[0; 2]);
        let time = batch::i64_at(&bytes, at::BASE_TIMESTAMP);
        batch::put(&mut bytes, at::MAX_TIMESTAMP, &time.to_be_bytes());
        batch::seal(&mut bytes);
        let original = Some((batch.base, batch.end));
        self.send(id, epoch, bytes, batch.time, batch.sequence, original)?;
        self.called()
    }

    pub(super) fn read(&mut self) -> Result<(), Violation> {
        let Some(id) = self.some_partition() else {
            return Ok(());
        };
        let Some(view) = self.node()?.store_of(id).view(id) else {
            return Ok(());
        };
        let (start, end) = (view.log_start.0, view.log_end.0);
        let offset = match self.rng.below(10) {
            0 => end + self.rng.below(3),
            1 => start.saturating_sub(self.rng.below(3)),
            _ => self.rng.between(start, end),
        };
        let limit = match self.rng.odds(1, 3) {
            true => end,
            false => view.durable_end.0,
        };
        let max_bytes = *self.rng.pick(&[1, 5_000, 70_000, 1 << 20]);
        self.issue_read(id, offset, limit, max_bytes)?;
        self.called()
    }

    pub(super) fn issue_read(
        &mut self,
        id: PartitionId,
        offset: u64,
        limit: u64,
        max_bytes: usize,
    ) -> Result<u64, Violation> {
        let token = self.token(Waiting::Read {
            partition: id,
            offset,
            limit,
        })?;
        let request = ReadRequest {
            token,
            partition: id,
            offset: Offset(offset),
            limit: Offset(limit),
            max_bytes,
        };
        self.node()?
            .call(id, |store, now, out| store.read(now, request, out));
        Ok(token)
    }

    pub(super) fn seek_time(&mut self) -> Result<(), Violation> {
        let Some(id) = self.some_partition() else {
            return Ok(());
        };
        let Some(view) = self.node()?.store_of(id).view(id) else {
            return Ok(());
        };
        let now = self.node()?.now().wall_ms;
        let timestamp = now - self.rng.below(4_000) as i64 + 100;
        let limit = view.durable_end.0;
        let token = self.token(Waiting::Time {
            partition: id,
            timestamp,
            limit,
        })?;
        self.node()?.call(id, |store, now, out| {
            store.offset_for_time(now, token, id, timestamp, Offset(limit), out);
        });
        self.called()
    }

    pub(super) fn truncate(&mut self) -> Result<(), Violation> {
        let Some(id) = self.some_partition() else {
            return Ok(());
        };
        if self.has_waiting_append(id) {
            return Ok(());
        }
        let Some(view) = self.node()?.store_of(id).view(id) else {
            return Ok(());
        };
        // Mostly near the end, always at a batch's start: that is where replicas part.
        let (start, end) = (view.log_start.0, view.log_end.0);
        let Some(partition) = self.partitions.get(&id) else {
            return Ok(());
        };
        let bases = partition.state.batches.iter().map(|batch| batch.base);
        let mut bases: Vec<u64> = bases.filter(|base| *base >= start).collect();
        bases.push(end);
        let back = match self.rng.odds(3, 4) {
            true => self.rng.index(bases.len().min(4)),
            false => self.rng.index(bases.len()),
        };
        let offset = bases[bases.len() - 1 - back];
        self.truncate_to(id, offset)?;
        // A leader that was cut begins a reign of its own.
        if self.rng.odds(3, 4) && self.partitions.contains_key(&id) {
            self.begin_epoch(id)?;
        }
        Ok(())
    }

    pub(in crate::sim) fn truncate_to(&mut self, id: PartitionId, offset: u64) -> Result<(), Violation> {
        let token = self.token(Waiting::Command { what: "truncate" })?;
        self.change(id, Change::Truncate(offset), token);
        self.node()?.call(id, |store, now, out| {
            store.truncate(now, token, id, Offset(offset), out);
        });
        self.called()
    }

    pub(super) fn set_log_start(&mut self) -> Result<(), Violation> {
        let Some(id) = self.some_partition() else {
            return Ok(());
        };
        let Some(view) = self.node()?.store_of(id).view(id) else {
            return Ok(());
        };
        let memory = self.partitions.get(&id).is_some_and(|p| p.settings.memory);
        let most = if memory { view.log_end } else { view.durable_end };
        let offset = self.rng.between(view.log_start.0, most.max(view.log_start).0);
        self.raise_log_start(id, offset)
    }

    pub(in crate::sim) fn raise_log_start(&mut self, id: PartitionId, offset: u64) -> Result<(), Violation> {
        let token = self.token(Waiting::Command {
            what: "set_log_start",
        })?;
        if let Some(partition) = self.partitions.get_mut(&id) {
            partition.start_asked = partition.start_asked.max(offset);
        }
        self.node()?.call(id, |store, now, out| {
            store.set_log_start(now, token, id, Offset(offset), out);
        });
        self.called()
    }

    pub(super) fn drop_one(&mut self) -> Result<(), Violation> {
        match self.some_partition() {
            Some(id) if !self.has_waiting_append(id) => self.drop_partition(id),
            _ => Ok(()),
        }
    }

    pub(in crate::sim) fn drop_partition(&mut self, id: PartitionId) -> Result<(), Violation> {
        let token = self.token(Waiting::Command { what: "drop" })?;
        self.change(id, Change::Drop, token);
        self.node()?
            .call(id, |store, now, out| store.drop_partition(now, token, id, out));
        self.called()
    }

    pub(super) fn let_time_pass(&mut self) -> Result<(), Violation> {
        let wait = *self
            .rng
            .pick(&[3_000_000, 50_000_000, 1_000_000_000, 70_000_000_000]);
        self.pass_time(wait)
    }

    /// Drives the node for `ns` of simulated time.
    pub(in crate::sim) fn pass_time(&mut self, ns: u64) -> Result<(), Violation> {
        let until = self.node()?.disk.now() + ns;
        self.drive_until(until)
    }

    /// The end of a partition as the model has it; 0 when it does not exist.
    pub(in crate::sim) fn end_of(&self, id: PartitionId) -> u64 {
        self.partitions
            .get(&id)
            .map_or(0, |partition| partition.state.end)
    }

    fn drive_until(&mut self, until: u64) -> Result<(), Violation> {
        while self.node()?.disk.now() < until {
            self.node()?.turn(until);
            self.take_events()?;
            self.watch()?;
        }
        Ok(())
    }

    /// Ends a turn of the node: what the group holds becomes a frame.
    pub(in crate::sim) fn end_turn(&mut self) -> Result<(), Violation> {
        self.node()?.end_turn();
        self.take_events()?;
        self.watch()
    }

    /// Runs until every store has completed a checkpoint that begins now.
    pub(in crate::sim) fn checkpoint(&mut self) -> Result<(), Violation> {
        let starts = self.summary.starts;
        let completed =
            |node: &Node| -> Vec<u64> { node.stores().iter().map(|s| s.stats().checkpoints).collect() };
        let before = completed(self.node()?);
        self.node()?.call_all(|store, _, _| store.request_checkpoint());
        let until = self.node()?.disk.now() + PATIENCE_NS;
        while self.summary.starts == starts {
            let node = self.node()?;
            if completed(node)
                .iter()
                .zip(&before)
                .all(|(now, before)| now > before)
            {
                break;
            }
            if node.disk.now() >= until {
                return Err(Violation("a checkpoint does not end".to_owned()));
            }
            node.turn(until);
            self.take_events()?;
            self.watch()?;
        }
        Ok(())
    }

    /// Begins a checkpoint and lets it take what it holds.
    pub(in crate::sim) fn begin_checkpoint(&mut self) -> Result<(), Violation> {
        self.node()?.call_all(|store, _, _| store.request_checkpoint());
        self.end_turn()?;
        self.end_turn()
    }

    /// Journal files taken into use, and bytes of frames, by the first shard in this life.
    pub(in crate::sim) fn journal(&mut self) -> Result<(u64, u64), Violation> {
        let stats = self.node()?.stores()[0].commit_stats();
        Ok((stats.files_taken, stats.bytes))
    }

    /// Writes to the journal take `ns` longer.
    pub(in crate::sim) fn stall_journal(&mut self, when: When, ns: u64) -> Result<(), Violation> {
        let stall = Fault::new(FaultKind::Stall(ns), when);
        let stall = stall.class(FileClass::Journal).kind(OpKind::Write);
        self.node()?.disk.add_fault(stall);
        Ok(())
    }

    pub(super) fn fill_or_free_disk(&mut self) -> Result<(), Violation> {
        if !self.plan.profile.may_fill() {
            return Ok(());
        }
        let room = self.rng.below(600_000);
        let fill = self.rng.odds(2, 3);
        let disk = &mut self.node()?.disk;
        let capacity = disk.used() + room;
        disk.set_capacity(fill.then_some(capacity));
        Ok(())
    }

    pub(super) fn crash_soon(&mut self) -> Result<(), Violation> {
        let ahead = *self.rng.pick(&[0, 1, 2, 3, 5, 8, 13, 30, 80]);
        let disk = &mut self.node()?.disk;
        let at = disk.boundaries() + ahead;
        disk.stop_at(Some(at));
        self.watch()
    }
}

fn next_sequence(id: i64, newest: Option<Sequence>, raise_epoch: bool) -> Producer {
    match newest {
        None => Producer {
            id,
            epoch: 0,
            sequence: 0,
        },
        Some(newest) if raise_epoch => Producer {
            id,
            epoch: newest.epoch + 1,
            sequence: 0,
        },
        Some(newest) => Producer {
            id,
            epoch: newest.epoch,
            sequence: newest.last + 1,
        },
    }
}

/// Values of a batch: mostly small, sometimes many, sometimes beyond a block or beyond 64 KiB; at most `max` in all.
fn values(rng: &mut Rng, max: usize) -> Vec<Vec<u8>> {
    let max = max.saturating_sub(1_000);
    let (count, size) = match rng.below(20) {
        0..10 => (rng.between(1, 3), rng.between(0, 200)),
        10..14 => (rng.between(5, 40), rng.between(0, 100)),
        14..18 => (rng.between(1, 4), rng.between(1_000, 6_000)),
        18 => (1, rng.between(8_000, 30_000)),
        _ => (1, rng.between(60_000, 150_000)),
    };
    let size = (size as usize).min(max / count as usize);
    let mut value = |_| {
        let word = rng.bits().to_le_bytes();
        (0..size).map(|i| word[i % 8] ^ (i / 8) as u8).collect()
    };
    (0..count).map(&mut value).collect()
}
