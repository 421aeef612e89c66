//! A store on a real ring without network: what the engine alone can do.
//!
//! The driver is the loop of a broker's shard less its sockets, so its figures are a shard's upper bound.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use ringfence_engine::batch::TimestampType;
use ringfence_engine::config::StoreConfig;
use ringfence_engine::error::{AppendError, CommandError, FenceReason};
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::io::uring::{IoEvent, Reactor, RingConfig, RingError};
use ringfence_engine::recovery::RecoverError;
use ringfence_engine::store::{AppendRequest, LogSettings, Outbox, Store, StoreEvent};
use ringfence_engine::types::{LeaderEpoch, Offset, PartitionId, TopicId};
use thiserror::Error;

use crate::latency::Latencies;

const EPOCH: LeaderEpoch = LeaderEpoch(1);

/// Bytes appended in a turn at most, as a broker's shard bounds it: the device gets work while the rest is taken in.
const TURN_BYTES: u64 = 512 << 10;

/// Why the engine stopped.
#[derive(Debug, Error)]
pub enum EngineError {
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error(transparent)]
    Recover(#[from] RecoverError),
    #[error("an append was refused: {0}")]
    Append(#[from] AppendError),
    #[error("a command was refused: {0}")]
    Command(#[from] CommandError),
    #[error("a fence was set: {0}")]
    Fenced(#[from] FenceReason),
}

/// What to append.
#[derive(Debug, Clone)]
pub struct Work {
    /// Batches, used in turn; all of one size.
    pub batches: Vec<BufSlice>,
    /// Batches waiting for durability at once.
    pub window: usize,
    /// Bytes of batches to append.
    pub total: u64,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Done {
    /// Durable batches.
    pub batches: u64,
    /// From the first append to the last durable end.
    pub elapsed: Duration,
    /// From append to durable end.
    pub latencies: Latencies,
}

/// A running store with `partitions` partitions in epoch 1.
pub struct Engine {
    reactor: Reactor,
    store: Store,
    out: Outbox,
    partitions: Vec<PartitionId>,
    next_partition: usize,
}

/// Batches under way.
#[derive(Default)]
struct Flight {
    /// Appended, not yet answered: by token.
    asked: HashMap<u64, Instant>,
    /// Accepted, not yet durable: by index of the partition, oldest first.
    accepted: Vec<VecDeque<(Offset, Instant)>>,
    count: usize,
    /// Refused for the moment, to be appended again.
    again: Vec<(PartitionId, Instant)>,
    durable: u64,
    latencies: Latencies,
}

impl Engine {
    /// Opens a store in the empty directory `dir`.
    ///
    /// # Errors
    /// When the ring, the directory or the settings are refused.
    pub fn open(dir: &Path, cfg: StoreConfig, partitions: u32) -> Result<Engine, EngineError> {
        let mut reactor = Reactor::new(&RingConfig::new(dir))?;
        let now = reactor.now();
        let (store, _) = Store::recover(&mut reactor, cfg, now)?;
        let topic = TopicId(*b"ringfence-bench!");
        let mut engine = Engine {
            reactor,
            store,
            out: Outbox::default(),
            partitions: (0..partitions)
                .map(|index| PartitionId { topic, index })
                .collect(),
            next_partition: 0,
        };
        engine.begin_epochs()?;
        Ok(engine)
    }

    /// The store's counters and gauges.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    fn begin_epochs(&mut self) -> Result<(), EngineError> {
        for index in 0..self.partitions.len() {
            let partition = self.partitions[index];
            self.store.create(partition, "bench", settings());
            let now = self.reactor.now();
            self.store
                .begin_epoch(now, index as u64, partition, EPOCH, &mut self.out);
        }
        let mut left = self.partitions.len();
        while left > 0 {
            for event in self.turn(true)? {
                match event {
                    StoreEvent::Done { result, .. } => {
                        result?;
                        left -= 1;
                    }
                    other => check(&other)?,
                }
            }
        }
        Ok(())
    }

    /// Runs `work` to its end.
    ///
    /// # Errors
    /// When the store refuses for good or is fenced.
    pub fn run(&mut self, work: &Work) -> Result<Done, EngineError> {
        let size = work.batches[0].len() as u64;
        let total = (work.total / size).max(1);
        let mut flight = Flight {
            accepted: vec![VecDeque::new(); self.partitions.len()],
            ..Flight::default()
        };
        let mut issued = 0u64;
        let start = Instant::now();
        while flight.durable < total {
            for (partition, since) in std::mem::take(&mut flight.again) {
                self.append(partition, &work.batches[0], since, &mut issued, &mut flight);
                issued -= 1;
            }
            let mut taken = 0;
            while issued < total && flight.count < work.window && taken < TURN_BYTES {
                taken += size;
                let partition = self.partitions[self.next_partition];
                self.next_partition = (self.next_partition + 1) % self.partitions.len();
                let batch = &work.batches[issued as usize % work.batches.len()];
                flight.count += 1;
                self.append(partition, batch, Instant::now(), &mut issued, &mut flight);
            }
            let full = flight.count == work.window || issued == total;
            for event in self.turn(full && flight.again.is_empty())? {
                flight.take(&event)?;
            }
        }
        Ok(Done {
            batches: flight.durable,
            elapsed: start.elapsed(),
            latencies: flight.latencies,
        })
    }

    /// Waits until everything is in segments and the journal is free: after two checkpoints.
    ///
    /// # Errors
    /// When the store is fenced.
    pub fn settle(&mut self) -> Result<(), EngineError> {
        let wanted = self.store.stats().checkpoints + 2;
        while self.store.stats().checkpoints < wanted {
            self.store.request_checkpoint();
            let busy = self.reactor.disk_pending() > 0;
            for event in self.turn(busy)? {
                check(&event)?;
            }
        }
        Ok(())
    }

    fn append(
        &mut self,
        partition: PartitionId,
        batch: &BufSlice,
        since: Instant,
        token: &mut u64,
        flight: &mut Flight,
    ) {
        let request = AppendRequest {
            token: *token,
            partition,
            epoch: EPOCH,
            batch: batch.clone(),
        };
        flight.asked.insert(*token, since);
        *token += 1;
        let now = self.reactor.now();
        self.store.append(now, request, &mut self.out);
    }

    /// One turn of the loop: issues what the store decided, takes in what completed, tells what happened.
    fn turn(&mut self, wait: bool) -> Result<Vec<StoreEvent>, EngineError> {
        let now = self.reactor.now();
        self.store.turn_end(now, &mut self.out);
        if self.store.next_wake().is_some_and(|wake| wake <= now.mono) {
            self.store.tick(now, &mut self.out);
        }
        for (op, disk_op) in self.out.ops.drain(..) {
            self.reactor.submit_disk(op, disk_op);
        }
        let until = if wait && self.out.events.is_empty() {
            self.store.next_wake()
        } else {
            Some(now.mono)
        };
        let mut completions = Vec::new();
        self.reactor.turn(until, &mut |event| {
            if let IoEvent::Disk(completion) = event {
                completions.push(completion);
            }
        })?;
        let now = self.reactor.now();
        for completion in completions {
            self.store.handle(now, completion, &mut self.out);
        }
        Ok(std::mem::take(&mut self.out.events))
    }
}

impl Flight {
    fn take(&mut self, event: &StoreEvent) -> Result<(), EngineError> {
        match event {
            StoreEvent::Appended {
                token,
                partition,
                result,
            } => {
                let since = self.asked.remove(token).unwrap_or_else(Instant::now);
                match result {
                    Ok(appended) => {
                        let queue = &mut self.accepted[partition.index as usize];
                        queue.push_back((appended.end, since));
                    }
                    Err(AppendError::Busy) => self.again.push((*partition, since)),
                    Err(error) => return Err(error.clone().into()),
                }
            }
            StoreEvent::Durable { partition, end } => {
                let queue = &mut self.accepted[partition.index as usize];
                let now = Instant::now();
                while let Some((batch_end, since)) = queue.front().copied().filter(|first| first.0 <= *end) {
                    debug_assert!(batch_end <= *end);
                    queue.pop_front();
                    self.latencies.record(now - since);
                    self.durable += 1;
                    self.count -= 1;
                }
            }
            other => check(other)?,
        }
        Ok(())
    }
}

/// A fence ends the run.
fn check(event: &StoreEvent) -> Result<(), EngineError> {
    match event {
        StoreEvent::PartitionFenced { reason, .. } | StoreEvent::ShardFenced { reason } => {
            Err((*reason).into())
        }
        _ => Ok(()),
    }
}

fn settings() -> LogSettings {
    LogSettings {
        segment_bytes: 1 << 30,
        segment_ms: 7 * 86_400_000,
        retention_bytes: None,
        retention_ms: None,
        max_message_bytes: 16 << 20,
        timestamp_type: TimestampType::CreateTime,
        memory: false,
    }
}
