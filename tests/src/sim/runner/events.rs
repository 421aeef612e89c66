//! Checks of everything a store says while it runs.

use std::sync::Arc;

use ringfence_engine::batch::TimestampType;
use ringfence_engine::error::{AppendError, CommandError, ReadError};
use ringfence_engine::store::{Appended, ReadBytes, StoreEvent};
use ringfence_engine::types::{Offset, PartitionId};

use super::{Runner, Waiting};
use crate::batch::{self, at};
use crate::sim::Violation;
use crate::sim::model::{Batch, Change, Partition, Sequence};

impl Runner {
    pub(super) fn take_events(&mut self) -> Result<(), Violation> {
        let events = self.node()?.take_events();
        events.into_iter().try_for_each(|event| self.on_event(event))
    }

    pub(super) fn on_event(&mut self, event: StoreEvent) -> Result<(), Violation> {
        match event {
            StoreEvent::Appended {
                token,
                partition,
                result,
            } => self.on_appended(token, partition, result),
            StoreEvent::Read { token, result, .. } => match self.waiting.remove(&token) {
                Some((_, waiting)) => self.on_read(waiting, result),
                None => {
                    self.last_read = Some((token, result));
                    Ok(())
                }
            },
            StoreEvent::TimeFound { token, result, .. } => self.on_time(token, result),
            StoreEvent::Done {
                token,
                partition,
                result,
            } => self.on_done(token, partition, result),
            StoreEvent::Durable { partition, end } => {
                self.known(partition)?.durable_to(end.0)?;
                // One node: what is durable here is durable everywhere.
                self.node()?
                    .call(partition, |store, _, _| store.set_high_watermark(partition, end));
                Ok(())
            }
            StoreEvent::LogStart { partition, start } => {
                let wall_ms = self.node()?.now().wall_ms;
                self.summary.log_start_moves += 1;
                self.known(partition)?.log_start_moved(start.0, wall_ms)
            }
            StoreEvent::PartitionFenced { partition, reason } => {
                self.summary.fences += 1;
                if !self.plan.profile.may_fence() {
                    return Err(Violation(format!("{partition} was fenced: {reason}")));
                }
                if let Some(partition) = self.partitions.get_mut(&partition) {
                    partition.fence_seen = true;
                }
                Ok(())
            }
            StoreEvent::ShardFenced { reason } => {
                self.summary.fences += 1;
                self.shard_fenced = true;
                match self.plan.profile.may_fence() {
                    true => Ok(()),
                    false => Err(Violation(format!("the shard was fenced: {reason}"))),
                }
            }
        }
    }

    pub(super) fn known(&mut self, id: PartitionId) -> Result<&mut Partition, Violation> {
        let gone = self.gone.contains(&id);
        self.partitions
            .get_mut(&id)
            .ok_or_else(|| Violation(format!("news of {id}, which does not exist (dropped: {gone})")))
    }

    fn on_appended(
        &mut self,
        token: u64,
        id: PartitionId,
        result: Result<Appended, AppendError>,
    ) -> Result<(), Violation> {
        let Some((
            _,
            Waiting::Append {
                bytes,
                time,
                sequence,
                original,
                ..
            },
        )) = self.waiting.remove(&token)
        else {
            return Err(Violation(format!(
                "append {token} was answered twice or never asked"
            )));
        };
        let appended = match result {
            Ok(appended) => appended,
            Err(error) => return self.on_append_refused(id, error, sequence),
        };
        let partition = self.known(id)?;
        let settings = partition.settings.clone();
        if appended.duplicate || original.is_some() {
            let truncated = partition.state.truncated;
            let found = (appended.base.0, appended.end.0);
            if !appended.duplicate || original != Some(found) {
                return partition.wrong(format!(
                    "retry of {original:?} (truncated before: {truncated}) was answered {appended:?}"
                ));
            }
            self.summary.duplicates += 1;
            return Ok(());
        }
        if appended.base.0 != partition.state.end {
            let end = partition.state.end;
            return partition.wrong(format!("append got base {}, the end is {end}", appended.base));
        }
        let epoch = partition.state.epoch();
        let time = match settings.timestamp_type {
            TimestampType::CreateTime => time,
            TimestampType::LogAppendTime => appended.log_append_time,
        };
        let stamped = stamp(bytes, appended.base.0, epoch, settings.timestamp_type, time);
        let batch = Batch {
            base: appended.base.0,
            end: appended.end.0,
            bytes: Arc::from(stamped),
            time,
            sequence,
        };
        partition.accept(Change::Append(batch), None);
        self.summary.appended += 1;
        if settings.memory {
            // Its consumers do not wait for the journal; a crash may take what they saw.
            self.node()?
                .call(id, |store, _, _| store.set_high_watermark(id, appended.end));
        }
        Ok(())
    }

    fn on_append_refused(
        &mut self,
        id: PartitionId,
        error: AppendError,
        sequence: Option<Sequence>,
    ) -> Result<(), Violation> {
        self.summary.refused += 1;
        let profile = self.plan.profile;
        let forgot = matches!(
            error,
            AppendError::OutOfOrderSequence { .. } | AppendError::InvalidProducerEpoch { .. }
        );
        if let (true, Some(sequence)) = (forgot, sequence) {
            self.forgotten.insert((id, sequence.id));
        }
        let partition = self.known(id)?;
        let allowed = match error {
            AppendError::NoSpace => profile.may_fill(),
            AppendError::Place(_) | AppendError::Fenced(_) => profile.may_fence(),
            // The epoch moved, or a cut or drop was under way.
            AppendError::WrongEpoch { .. } | AppendError::Busy => true,
            AppendError::UnknownPartition(_) => partition.is_dropping(),
            // A cut has the table built again from what the log still holds; a producer whose batches are gone (below the
            // log start, or damaged) is refused, its retry never stored twice.
            AppendError::OutOfOrderSequence { .. } | AppendError::InvalidProducerEpoch { .. } => {
                let in_log = sequence.is_none_or(|sequence| partition.holds_last_batches_of(sequence.id));
                partition.damaged || (partition.state.truncated && (profile.may_damage() || !in_log))
            }
            AppendError::InvalidBatch(_) | AppendError::TooLarge { .. } => false,
        };
        match allowed {
            true => Ok(()),
            false => partition.wrong(format!("append was refused: {error}")),
        }
    }

    fn on_read(&mut self, waiting: Waiting, result: Result<ReadBytes, ReadError>) -> Result<(), Violation> {
        let Waiting::Read {
            partition: id,
            offset,
            limit,
        } = waiting
        else {
            return Err(Violation(format!("a read answers {waiting:?}")));
        };
        let profile = self.plan.profile;
        let Some(partition) = self.partitions.get(&id) else {
            return Ok(());
        };
        match result {
            Ok(bytes) => {
                self.summary.reads += 1;
                check_served(partition, offset, limit, &bytes)
            }
            Err(ReadError::OutOfRange { log_start, log_end }) => {
                // A cut or a log start may have overtaken the read.
                match offset < log_start.0 || offset > log_end.0 {
                    true => Ok(()),
                    false => partition.wrong(format!("read at {offset} refused by {log_start}..{log_end}")),
                }
            }
            Err(ReadError::UnknownPartition(_)) if partition.is_dropping() => Ok(()),
            Err(ReadError::Busy) => Ok(()),
            Err(ReadError::Disk(_)) if profile.may_fence() => Ok(()),
            Err(ReadError::Damaged { .. }) if profile.may_damage() => Ok(()),
            Err(error) => partition.wrong(format!("read at {offset} below {limit}: {error}")),
        }
    }

    fn on_time(
        &mut self,
        token: u64,
        result: Result<Option<(Offset, i64)>, ReadError>,
    ) -> Result<(), Violation> {
        let Some((
            _,
            Waiting::Time {
                partition: id,
                timestamp,
                limit,
            },
        )) = self.waiting.remove(&token)
        else {
            return Err(Violation(format!(
                "time lookup {token} was answered twice or never asked"
            )));
        };
        let profile = self.plan.profile;
        let Some(partition) = self.partitions.get(&id) else {
            return Ok(());
        };
        let found = match result {
            Ok(found) => found,
            Err(ReadError::Disk(_)) if profile.may_fence() => return Ok(()),
            Err(ReadError::Damaged { .. }) if profile.may_damage() => return Ok(()),
            Err(ReadError::Busy) => return Ok(()),
            Err(ReadError::UnknownPartition(_)) if partition.is_dropping() => return Ok(()),
            Err(ReadError::OutOfRange { .. }) => return Ok(()),
            Err(error) => return partition.wrong(format!("lookup of time {timestamp}: {error}")),
        };
        self.summary.time_lookups += 1;
        // Log start may have moved since the question: any start up to the newest explains the answer.
        let expect = |start: u64| {
            let batches = partition.state.batches.iter();
            let mut reachable = batches.filter(|b| b.end > start && b.base < limit && b.time >= timestamp);
            reachable.next().map(|batch| (batch.base.max(start), batch.time))
        };
        let found = found.map(|(offset, time)| (offset.0, time));
        let view = self.node.as_ref().and_then(|node| node.store_of(id).view(id));
        let start = view.map_or(0, |view| view.log_start.0);
        let was_cut = !partition.cut.is_empty();
        let starts = [start, partition.start_known, partition.start_asked];
        match starts.into_iter().any(|start| expect(start) == found) || was_cut {
            true => Ok(()),
            false => {
                let expect = expect(start);
                partition.wrong(format!(
                    "first record at {timestamp} below {limit}: {found:?} instead of {expect:?}"
                ))
            }
        }
    }

    fn on_done(
        &mut self,
        token: u64,
        id: PartitionId,
        result: Result<(), CommandError>,
    ) -> Result<(), Violation> {
        let Some((_, Waiting::Command { what, .. })) = self.waiting.remove(&token) else {
            return Err(Violation(format!(
                "command {token} was answered twice or never asked"
            )));
        };
        let may_fill = self.plan.profile.may_fill();
        let (may_fence, may_damage) = (self.plan.profile.may_fence(), self.plan.profile.may_damage());
        let store = self.node.as_ref().map(|node| node.store_of(id));
        let shard_fenced = store.is_some_and(|store| store.fenced().is_some());
        let partition = self.known(id)?;
        match result {
            Ok(()) if what == "drop" => {
                self.partitions.remove(&id);
                self.gone.insert(id);
                self.summary.drops += 1;
                Ok(())
            }
            Ok(()) => {
                partition.acknowledge(token);
                self.summary.commands += 1;
                Ok(())
            }
            Err(CommandError::Busy) => {
                partition.refuse(token);
                Ok(())
            }
            Err(CommandError::Fenced(_)) if may_fence => {
                // With the whole shard fenced it may have reached the journal all the same.
                if !shard_fenced {
                    partition.refuse(token);
                }
                Ok(())
            }
            Err(CommandError::NoSpace) if what == "truncate" && may_fill => {
                partition.refuse(token);
                Ok(())
            }
            Err(CommandError::Unreadable(ReadError::Disk(_))) if what == "truncate" && may_fence => {
                partition.refuse(token);
                Ok(())
            }
            Err(CommandError::Unreadable(ReadError::Damaged { .. })) if what == "truncate" && may_damage => {
                partition.refuse(token);
                Ok(())
            }
            Err(CommandError::UnknownPartition(_)) if partition.is_dropping() => {
                partition.refuse(token);
                Ok(())
            }
            Err(CommandError::OutOfRange { .. }) if what == "set_log_start" => Ok(()),
            Err(error) => partition.wrong(format!("{what} was refused: {error}")),
        }
    }
}

/// The pieces of an answer, one after the other.
pub(super) fn join(bytes: &ReadBytes) -> Vec<u8> {
    bytes
        .batches
        .iter()
        .flat_map(|piece| piece.iter().copied())
        .collect()
}

/// Checks served bytes against the model.
fn check_served(partition: &Partition, offset: u64, limit: u64, bytes: &ReadBytes) -> Result<(), Violation> {
    let mut next = None;
    let whole = join(bytes);
    for served in batch::split(&whole) {
        let base = batch::i64_at(served, at::BASE_OFFSET) as u64;
        let current = partition.state.batch_at(base);
        let mut candidates = current.into_iter().chain(&partition.cut);
        let Some(expect) = candidates.find(|b| b.base == base && *b.bytes == *served) else {
            return partition.wrong(format!(
                "read at {offset}: the batch served at {base} is not the one written"
            ));
        };
        let first_holds_offset = next.is_some() || (expect.base <= offset && offset < expect.end);
        if !first_holds_offset || next.is_some_and(|next| next != base) || base >= limit {
            return partition.wrong(format!(
                "read at {offset} below {limit} served {}..{} after {next:?}",
                expect.base, expect.end
            ));
        }
        next = Some(expect.end);
    }
    if bytes.next.0 != next.unwrap_or(offset) {
        return partition.wrong(format!(
            "read at {offset} says next {}, served up to {next:?}",
            bytes.next
        ));
    }
    let reachable = partition.state.batch_at(offset).is_some_and(|b| b.base < limit);
    if next.is_none() && reachable && offset < limit && partition.cut.is_empty() {
        return partition.wrong(format!("read at {offset} below {limit} served nothing"));
    }
    Ok(())
}

/// The bytes that the leader must store.
fn stamp(mut bytes: Vec<u8>, base: u64, epoch: u32, kind: TimestampType, time: i64) -> Vec<u8> {
    batch::put(&mut bytes, at::BASE_OFFSET, &base.to_be_bytes());
    batch::put(&mut bytes, at::LEADER_EPOCH, &epoch.to_be_bytes());
    if kind == TimestampType::LogAppendTime {
        batch::put(&mut bytes, at::ATTRIBUTES, &8u16.to_be_bytes());
        batch::put(&mut bytes, at::MAX_TIMESTAMP, &time.to_be_bytes());
        batch::seal(&mut bytes);
    }
    bytes
}
