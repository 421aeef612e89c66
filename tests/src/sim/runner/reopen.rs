//! Checks of a node that came back: everything it serves is compared with the model.

use std::sync::Arc;

use ringfence_engine::error::ReadError;
use ringfence_engine::store::ReadBytes;
use ringfence_engine::types::PartitionId;

use super::events::join;
use super::{PATIENCE_NS, Runner, Waiting};
use crate::batch::{self, at};
use crate::sim::Violation;
use crate::sim::model::Observed;

impl Runner {
    /// Compares everything a reopened node serves with the model.
    pub(super) fn check_reopened(&mut self) -> Result<(), Violation> {
        self.summary.starts += 1;
        self.check_gone()?;
        let ids: Vec<PartitionId> = self.partitions.keys().copied().collect();
        for id in &ids {
            let partition = &self.partitions[id];
            let (id, name, settings) = (*id, partition.name.clone(), partition.settings.clone());
            if !partition.is_dropping() {
                self.node()?
                    .call(id, |store, _, _| store.create(id, &name, settings));
            }
        }
        for id in ids {
            if self.partitions[&id].is_dropping() {
                self.finish_drop(id)?;
            } else {
                self.check_partition(id)?;
            }
        }
        let ids: Vec<PartitionId> = self.partitions.keys().copied().collect();
        for id in ids {
            // As at every start of a node.
            self.begin_epoch(id)?;
            if self.partitions.len() > 64 {
                break;
            }
        }
        Ok(())
    }

    fn check_gone(&mut self) -> Result<(), Violation> {
        let known: Vec<PartitionId> = self
            .node()?
            .stores()
            .iter()
            .flat_map(|store| store.partitions().map(|(id, _)| id))
            .collect();
        match known.iter().find(|id| self.gone.contains(id)) {
            Some(id) => Err(Violation(format!("{id} was dropped and is back"))),
            None => Ok(()),
        }
    }

    /// A drop without an answer is ordered again, as the broker does with what its metadata no longer names.
    fn finish_drop(&mut self, id: PartitionId) -> Result<(), Violation> {
        let known = self
            .node()?
            .store_of(id)
            .partitions()
            .any(|(known, _)| known == id);
        if !known {
            self.partitions.remove(&id);
            self.gone.insert(id);
            return Ok(());
        }
        let token = self.token(Waiting::Command { what: "drop" })?;
        self.node()?
            .call(id, |store, now, out| store.drop_partition(now, token, id, out));
        self.take_events()
    }

    fn check_partition(&mut self, id: PartitionId) -> Result<(), Violation> {
        let Some(view) = self.node()?.store_of(id).view(id) else {
            return self.partitions[&id].wrong("not known after reopening".to_owned());
        };
        let fenced = view.fenced.is_some();
        if fenced && !self.plan.profile.may_fence() {
            return self.partitions[&id].wrong(format!("fenced after reopening: {:?}", view.fenced));
        }
        let mut seen = Observed {
            first_start: view.log_start.0,
            known_start: self.partitions[&id].start_known,
            log_start: view.log_start.0,
            log_end: view.log_end.0,
            epoch: view.epoch.0,
            fenced,
            ..Observed::default()
        };
        if view.durable_end != view.log_end && !fenced {
            let (durable, end) = (view.durable_end, view.log_end);
            return self.partitions[&id].wrong(format!("reopened with durable end {durable}, log end {end}"));
        }
        self.read_everything(id, &mut seen)?;
        let lenient = self.plan.profile.may_damage();
        let wall_ms = self.node()?.now().wall_ms;
        let Some(partition) = self.partitions.get_mut(&id) else {
            return Ok(());
        };
        partition.fence_seen = fenced;
        partition.adopt(&seen, lenient, wall_ms)
    }

    fn read_everything(&mut self, id: PartitionId, seen: &mut Observed) -> Result<(), Violation> {
        let mut next = seen.log_start;
        let mut failures = 0;
        while next < seen.log_end {
            let max_bytes = *self.rng.pick(&[1, 30_000, 1 << 20]);
            let token = self.issue_read(id, next, seen.log_end, max_bytes)?;
            // The model does not know yet which state is right, so the answer is not checked against it.
            self.waiting.remove(&token);
            match self.await_read(token)? {
                Ok(bytes) if bytes.batches.is_empty() => {
                    return self.partitions[&id].wrong(format!("nothing served at {next} after reopening"));
                }
                Ok(bytes) => {
                    for batch in batch::split(&join(&bytes)) {
                        seen.batches
                            .push((batch::i64_at(batch, at::BASE_OFFSET) as u64, Arc::from(batch)));
                    }
                    next = bytes.next.0;
                }
                Err(ReadError::Damaged { from, to }) if self.plan.profile.may_damage() => {
                    seen.refused.push((from.0.max(next), to.0));
                    next = to.0.max(next + 1);
                }
                Err(ReadError::Disk(_)) if self.plan.profile.may_fence() && failures < 10 => failures += 1,
                // Retention does not wait for the check.
                Err(ReadError::OutOfRange { log_start, .. }) if log_start.0 > next => {
                    seen.batches.clear();
                    seen.log_start = log_start.0;
                    next = log_start.0;
                }
                Err(error) => {
                    return self.partitions[&id].wrong(format!("read at {next} after reopening: {error}"));
                }
            }
        }
        Ok(())
    }

    fn await_read(&mut self, token: u64) -> Result<Result<ReadBytes, ReadError>, Violation> {
        let start = self.node()?.disk.now();
        loop {
            self.node()?.end_turn();
            self.take_events()?;
            if let Some((_, result)) = self.last_read.take_if(|(answered, _)| *answered == token) {
                return Ok(result);
            }
            let node = self.node()?;
            if node.disk.now() > start + PATIENCE_NS || node.next_at().is_none() {
                return Err(Violation(format!("read {token} is never answered")));
            }
            node.turn(start + PATIENCE_NS + 1);
        }
    }

    /// With a healthy disk every partition takes writes again.
    pub(super) fn check_service_returned(&mut self) -> Result<(), Violation> {
        let ids: Vec<PartitionId> = self.partitions.keys().copied().collect();
        for id in ids {
            if self
                .partitions
                .get(&id)
                .is_some_and(|p| !p.is_dropping() && !p.fence_seen)
            {
                let before = self.summary.appended;
                self.append_values(id, &[vec![7; 300]], -1)?;
                self.drain()?;
                if self.summary.appended == before {
                    return self.partitions[&id].wrong("no append is taken on a healthy disk".to_owned());
                }
            }
        }
        self.drain()
    }
}
