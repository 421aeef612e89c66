//! EpochEnd and ListOffsets at the owner.

use ringfence_engine::error::ReadError;
use ringfence_engine::types::{LeaderEpoch, Now, Offset};

use super::{Shard, StoreCall, Task};
use crate::error::WireError;
use crate::event::{CallRef, Outbox, WorkResult};
use crate::native::{
    EpochEnd, EpochQuestion, OffsetFound, OffsetQuestion, TIMESTAMP_EARLIEST, TIMESTAMP_LATEST,
};

/// Questions of one request about offsets of times.
#[derive(Debug)]
pub(super) struct LookupTask {
    call: CallRef,
    /// Answers missing.
    left: usize,
    /// Places in the request and answers.
    parts: Vec<(u32, OffsetFound)>,
}

impl Shard {
    pub(super) fn answer_epoch_ends(
        &mut self,
        now: Now,
        call: CallRef,
        questions: Vec<(u32, EpochQuestion)>,
        out: &mut Outbox,
    ) {
        let answers = questions
            .into_iter()
            .map(|(index, question)| {
                let partition = question.partition;
                let found = self
                    .leading(partition, question.current)
                    .map(|_| self.store.end_offset_for(partition, question.epoch));
                let answer = EpochEnd {
                    partition,
                    error: found.as_ref().err().copied(),
                    epoch: found.ok().flatten().map(|(epoch, _)| epoch),
                    end: found.ok().flatten().map(|(_, end)| end),
                };
                (index, answer)
            })
            .collect();
        self.finish(now, call, WorkResult::EpochEnd(answers), out);
    }

    pub(super) fn begin_lookup(
        &mut self,
        now: Now,
        call: CallRef,
        questions: Vec<(u32, OffsetQuestion)>,
        out: &mut Outbox,
    ) {
        let parts = questions
            .iter()
            .map(|(index, question)| {
                let blank = OffsetFound {
                    partition: question.partition,
                    error: None,
                    timestamp: -1,
                    offset: None,
                    epoch: None,
                };
                (*index, blank)
            })
            .collect();
        let key = self.tasks.insert(Task::Lookup(LookupTask {
            call,
            left: questions.len(),
            parts,
        }));
        for (part, (_, question)) in (0u32..).zip(questions) {
            self.begin_question(now, key, part, &question, out);
        }
    }

    fn begin_question(
        &mut self,
        now: Now,
        task: u64,
        part: u32,
        question: &OffsetQuestion,
        out: &mut Outbox,
    ) {
        let id = question.partition;
        let known = self.leading(id, question.current).and_then(|state| {
            let leader = state.leader().ok_or(WireError::LeaderNotAvailable)?;
            let view = self.store.view(id).ok_or(WireError::UnknownTopicOrPartition)?;
            Ok((leader.epoch(), leader.high_watermark(), view.log_start))
        });
        match known {
            Err(error) => self.settle_lookup(now, task, part, Err(error), None, out),
            Ok((epoch, high_watermark, log_start)) => {
                let at_once = match question.timestamp {
                    TIMESTAMP_LATEST => Some(high_watermark),
                    TIMESTAMP_EARLIEST => Some(log_start),
                    _ => None,
                };
                if let Some(offset) = at_once {
                    self.settle_lookup(now, task, part, Ok(Some((offset, -1))), Some(epoch), out);
                    return;
                }
                let token = self.store_calls.insert(StoreCall::Time { task, part });
                self.store
                    .offset_for_time(now, token, id, question.timestamp, high_watermark, &mut out.disk);
            }
        }
    }

    pub(super) fn on_time_found(
        &mut self,
        now: Now,
        token: u64,
        result: Result<Option<(Offset, i64)>, ReadError>,
        out: &mut Outbox,
    ) {
        let Some(StoreCall::Time { task, part }) = self.store_calls.remove(token) else {
            return;
        };
        let Some(Task::Lookup(lookup)) = self.tasks.get_mut(task) else {
            return;
        };
        let partition = lookup.parts.get(part as usize).map(|(_, found)| found.partition);
        let epoch = partition
            .and_then(|id| self.partitions.get(&id)?.leader())
            .map(|leader| leader.epoch());
        let result = result.map_err(|error| WireError::from(&error));
        self.settle_lookup(now, task, part, result, epoch, out);
    }

    fn settle_lookup(
        &mut self,
        now: Now,
        key: u64,
        part: u32,
        result: Result<Option<(Offset, i64)>, WireError>,
        epoch: Option<LeaderEpoch>,
        out: &mut Outbox,
    ) {
        let Some(Task::Lookup(task)) = self.tasks.get_mut(key) else {
            return;
        };
        let Some((_, answer)) = task.parts.get_mut(part as usize) else {
            return;
        };
        answer.error = result.err();
        answer.offset = result.ok().flatten().map(|(offset, _)| offset);
        answer.timestamp = result.ok().flatten().map_or(-1, |(_, timestamp)| timestamp);
        answer.epoch = epoch;
        task.left -= 1;
        if task.left == 0
            && let Some(Task::Lookup(task)) = self.tasks.remove(key)
        {
            self.finish(now, task.call, WorkResult::ListOffsets(task.parts), out);
        }
    }
}
