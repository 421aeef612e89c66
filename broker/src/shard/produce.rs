//! Produce at the owner: append, wait for what the acks demand, answer.

use ringfence_engine::error::AppendError;
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::store::{AppendRequest, Appended};
use ringfence_engine::types::{Now, PartitionId};

use super::{Shard, StoreCall, Task};
use crate::error::WireError;
use crate::event::{CallRef, Outbox, WorkResult};
use crate::native::{Acks, ProduceBatch, ProducedPartition};

/// Batches of one request that are appended here.
#[derive(Debug)]
pub(super) struct ProduceTask {
    call: CallRef,
    acks: Acks,
    deadline: u64,
    /// Parts without a result.
    left: usize,
    parts: Vec<ProducePart>,
}

#[derive(Debug)]
struct ProducePart {
    /// Place in the request.
    index: u32,
    partition: PartitionId,
    bytes: usize,
    appended: Option<Appended>,
    result: Option<ProducedPartition>,
}

impl ProduceTask {
    /// Gives a part its result, once; true when it was the last.
    fn settle(&mut self, part: u32, result: ProducedPartition) -> bool {
        let Some(part) = self
            .parts
            .get_mut(part as usize)
            .filter(|part| part.result.is_none())
        else {
            return false;
        };
        part.result = Some(result);
        self.left -= 1;
        self.left == 0
    }
}

fn refused(partition: PartitionId, error: WireError, message: String) -> ProducedPartition {
    ProducedPartition {
        partition,
        error: Some(error),
        base_offset: None,
        log_append_time: -1,
        log_start: None,
        message,
    }
}

impl Shard {
    pub(super) fn begin_produce(
        &mut self,
        now: Now,
        call: CallRef,
        deadline: u64,
        acks: Acks,
        batches: Vec<(u32, ProduceBatch<BufSlice>)>,
        out: &mut Outbox,
    ) {
        let parts = batches
            .iter()
            .map(|(index, batch)| ProducePart {
                index: *index,
                partition: batch.partition,
                bytes: batch.records.len(),
                appended: None,
                result: None,
            })
            .collect();
        let key = self.tasks.insert(Task::Produce(ProduceTask {
            call,
            acks,
            deadline,
            left: batches.len(),
            parts,
        }));
        self.deadlines.insert((deadline, key));
        for (part, (_, batch)) in (0u32..).zip(batches) {
            self.begin_append(now, key, part, acks, batch, out);
        }
    }

    fn begin_append(
        &mut self,
        now: Now,
        task: u64,
        part: u32,
        acks: Acks,
        batch: ProduceBatch<BufSlice>,
        out: &mut Outbox,
    ) {
        let partition = batch.partition;
        let admitted = self.leading(partition, batch.epoch).and_then(|state| {
            let leader = state.leader().ok_or(WireError::LeaderNotAvailable)?;
            leader.admit(acks)?;
            Ok(leader.epoch())
        });
        match admitted {
            Ok(epoch) => {
                let token = self.store_calls.insert(StoreCall::Append { task, part });
                let request = AppendRequest {
                    token,
                    partition,
                    epoch,
                    batch: batch.records,
                };
                self.store.append(now, request, &mut out.disk);
            }
            Err(error) => self.settle_produce(now, task, part, refused(partition, error, String::new()), out),
        }
    }

    pub(super) fn on_appended(
        &mut self,
        now: Now,
        token: u64,
        partition: PartitionId,
        result: Result<Appended, AppendError>,
        out: &mut Outbox,
    ) {
        let Some(StoreCall::Append { task, part }) = self.store_calls.remove(token) else {
            return;
        };
        let appended = match result {
            Ok(appended) => appended,
            Err(error) => {
                let answer = refused(partition, WireError::from(&error), error.to_string());
                self.settle_produce(now, task, part, answer, out);
                return;
            }
        };
        let moved = self
            .partitions
            .get_mut(&partition)
            .and_then(|state| state.leader_mut())
            .is_some_and(|leader| leader.accepted(appended.end));
        self.count_append(task, part, appended);
        self.await_ack(now, task, part, partition, appended, out);
        self.advanced(now, partition, moved, out);
    }

    fn count_append(&mut self, task: u64, part: u32, appended: Appended) {
        if appended.duplicate {
            self.stats.produced_duplicates.add(1);
            return;
        }
        self.stats.produced_batches.add(1);
        if let Some(Task::Produce(task)) = self.tasks.get_mut(task)
            && let Some(part) = task.parts.get(part as usize)
        {
            self.stats.produced_bytes.add(part.bytes as u64);
        }
    }

    /// Parks a batch; what is acknowledged already leaves with the next look at the partition.
    fn await_ack(
        &mut self,
        now: Now,
        key: u64,
        part: u32,
        partition: PartitionId,
        appended: Appended,
        out: &mut Outbox,
    ) {
        let Some(Task::Produce(task)) = self.tasks.get_mut(key) else {
            return;
        };
        if let Some(part) = task.parts.get_mut(part as usize) {
            part.appended = Some(appended);
        }
        let acks = task.acks;
        match self.partitions.get_mut(&partition) {
            _ if acks == Acks::None => self.acknowledged(now, key, part, out),
            Some(state) => {
                state.park(acks, appended.end, key, part);
                self.stats.parked_produces.add(1);
                for (task, part) in state.acknowledge() {
                    self.acknowledged(now, task, part, out);
                }
            }
            None => {
                let answer = refused(partition, WireError::UnknownTopicId, String::new());
                self.settle_produce(now, key, part, answer, out);
            }
        }
    }

    /// What the acks of a batch demand is reached.
    pub(super) fn acknowledged(&mut self, now: Now, key: u64, part: u32, out: &mut Outbox) {
        let Some(Task::Produce(task)) = self.tasks.get_mut(key) else {
            self.stats.parked_produces.sub(1);
            return;
        };
        if task.acks != Acks::None {
            self.stats.parked_produces.sub(1);
        }
        let Some((partition, Some(appended))) = task
            .parts
            .get(part as usize)
            .map(|part| (part.partition, part.appended))
        else {
            return;
        };
        let answer = ProducedPartition {
            partition,
            error: None,
            base_offset: Some(appended.base),
            log_append_time: appended.log_append_time,
            log_start: self.store.view(partition).map(|view| view.log_start),
            message: String::new(),
        };
        self.settle_produce(now, key, part, answer, out);
    }

    /// Every batch of the partition that waits fails with `error`.
    pub(super) fn fail_parked(&mut self, now: Now, id: PartitionId, error: WireError, out: &mut Outbox) {
        let Some(partition) = self.partitions.get_mut(&id) else {
            return;
        };
        for (task, part) in partition.take_parked() {
            self.stats.parked_produces.sub(1);
            self.settle_produce(now, task, part, refused(id, error, String::new()), out);
        }
    }

    /// The request's timeout passed: what is not acknowledged may still become durable.
    pub(super) fn produce_timed_out(&mut self, now: Now, key: u64, out: &mut Outbox) {
        let Some(Task::Produce(task)) = self.tasks.get_mut(key) else {
            return;
        };
        for part in task.parts.iter_mut().filter(|part| part.result.is_none()) {
            self.stats.timed_out_produces.add(1);
            part.result = Some(refused(part.partition, WireError::RequestTimedOut, String::new()));
        }
        self.finish_produce(now, key, out);
    }

    fn settle_produce(&mut self, now: Now, key: u64, part: u32, result: ProducedPartition, out: &mut Outbox) {
        if let Some(Task::Produce(task)) = self.tasks.get_mut(key)
            && task.settle(part, result)
        {
            self.finish_produce(now, key, out);
        }
    }

    fn finish_produce(&mut self, now: Now, key: u64, out: &mut Outbox) {
        let Some(Task::Produce(task)) = self.tasks.remove(key) else {
            return;
        };
        self.deadlines.remove(&(task.deadline, key));
        let results = task
            .parts
            .into_iter()
            .filter_map(|part| Some((part.index, part.result?)))
            .collect();
        self.finish(now, task.call, WorkResult::Produce(results), out);
    }
}
