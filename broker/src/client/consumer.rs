//! The consumer: long polls to the owning shards, checked batches in order per partition.
//!
//! One fetch per shard is under way at a time and asks for all partitions that shard leads; answers are prefetched up to
//! a limit. No task runs in the background: [`Consumer::next`] drives everything, dropping the consumer ends it.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use ringfence_engine::batch;
use ringfence_engine::types::{Offset, PartitionId, ShardId};
use tokio::sync::mpsc;

use super::{Bytes, Client, ClientError, Leader, backoff};
use crate::native::{
    FetchPartition, FetchRequest, FetchedPartition, Isolation, NodeId, Request, Response, TIMESTAMP_EARLIEST,
    TIMESTAMP_LATEST,
};

/// How a consumer fetches.
#[derive(Debug, Clone)]
pub struct ConsumerConfig {
    /// Longest wait of the broker for `min_bytes`.
    pub max_wait: Duration,
    /// Least number of bytes worth an answer.
    pub min_bytes: u32,
    /// About how many bytes per answer.
    pub max_bytes: u32,
    /// About how many bytes per partition and answer.
    pub partition_max_bytes: u32,
    /// No more is fetched while this many bytes wait to be taken.
    pub buffer_bytes: usize,
}

impl Default for ConsumerConfig {
    fn default() -> ConsumerConfig {
        ConsumerConfig {
            max_wait: Duration::from_millis(500),
            min_bytes: 1,
            max_bytes: 8 << 20,
            partition_max_bytes: 2 << 20,
            buffer_bytes: 32 << 20,
        }
    }
}

/// Where to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartAt {
    /// The first readable record.
    Beginning,
    /// Behind the last record that consumers see now.
    End,
    /// This offset.
    Offset(Offset),
}

/// Checked batches of one partition.
#[derive(Debug, Clone)]
pub struct Fetched {
    /// The partition.
    pub partition: PartitionId,
    /// First offset wanted; the first batch may begin below it.
    pub from: Offset,
    /// Offset after the last record.
    pub next: Offset,
    /// Whole batches, contiguous, with right checksums.
    pub batches: Bytes,
}

impl Fetched {
    /// The records from `from` on. Records of compressed batches cannot be read here and give an error.
    pub fn records(&self) -> impl Iterator<Item = Result<batch::Record<'_>, ClientError>> {
        let damaged = |error: batch::BatchError| damaged(self.partition, self.from, error.to_string());
        batch::batches(&self.batches)
            .flat_map(move |found| {
                let records = found.and_then(|(_, bytes)| batch::records(bytes));
                let (records, failed) = match records {
                    Ok(records) => (Some(records), None),
                    Err(error) => (None, Some(Err(error))),
                };
                records.into_iter().flatten().chain(failed)
            })
            .map(move |record| record.map_err(damaged))
            .filter(|record| record.as_ref().map_or(true, |record| record.offset >= self.from))
    }
}

fn damaged(partition: PartitionId, offset: Offset, cause: String) -> ClientError {
    ClientError::Damaged {
        partition,
        offset,
        cause,
    }
}

/// Where reading a partition has come to.
#[derive(Debug)]
struct Position {
    next: Offset,
    high_watermark: Option<Offset>,
    /// Since when, how often and why it cannot be read.
    trouble: Option<Trouble>,
}

#[derive(Debug)]
struct Trouble {
    since: Instant,
    tries: u32,
    retry_at: Instant,
}

type Group = (NodeId, ShardId);

/// The answer to the fetch of a group; with the offsets asked for.
struct Event {
    group: Group,
    asked: Vec<(PartitionId, Offset)>,
    answer: Result<Response<Bytes>, ClientError>,
}

/// Reads partitions.
pub struct Consumer {
    client: Client,
    config: ConsumerConfig,
    positions: BTreeMap<PartitionId, Position>,
    busy: HashSet<Group>,
    ready: VecDeque<Fetched>,
    ready_bytes: usize,
    stale: bool,
    events: mpsc::UnboundedReceiver<Event>,
    answered: mpsc::UnboundedSender<Event>,
}

impl Consumer {
    /// A consumer of nothing yet.
    #[must_use]
    pub fn new(client: &Client, config: ConsumerConfig) -> Consumer {
        let (answered, events) = mpsc::unbounded_channel();
        Consumer {
            client: client.clone(),
            config,
            positions: BTreeMap::new(),
            busy: HashSet::new(),
            ready: VecDeque::new(),
            ready_bytes: 0,
            stale: false,
            events,
            answered,
        }
    }

    /// Adds a partition; returns the offset it begins with.
    pub async fn assign(&mut self, partition: PartitionId, start: StartAt) -> Result<Offset, ClientError> {
        let next = match start {
            StartAt::Offset(offset) => offset,
            StartAt::Beginning => self.offset_of(partition, TIMESTAMP_EARLIEST).await?,
            StartAt::End => self.offset_of(partition, TIMESTAMP_LATEST).await?,
        };
        let position = Position {
            next,
            high_watermark: None,
            trouble: None,
        };
        self.positions.insert(partition, position);
        Ok(next)
    }

    async fn offset_of(&self, partition: PartitionId, timestamp: i64) -> Result<Offset, ClientError> {
        let found = self.client.offset_for(partition, timestamp).await?;
        Ok(found.unwrap_or_default())
    }

    /// The offset after the last record fetched of a partition; handed out already or not.
    #[must_use]
    pub fn position(&self, partition: PartitionId) -> Option<Offset> {
        self.positions.get(&partition).map(|position| position.next)
    }

    /// The high watermark of a partition as of the last answer.
    #[must_use]
    pub fn high_watermark(&self, partition: PartitionId) -> Option<Offset> {
        self.positions.get(&partition)?.high_watermark
    }

    /// Takes a partition out; what was fetched of it and not taken yet is dropped.
    pub fn unassign(&mut self, partition: PartitionId) {
        self.positions.remove(&partition);
        self.ready.retain(|fetched| fetched.partition != partition);
        self.ready_bytes = self.ready.iter().map(|fetched| fetched.batches.len()).sum();
    }

    /// The next batches of any partition. Waits as long as there are none; safe to cancel. Passing failures are
    /// retried until the client's retry deadline.
    pub async fn next(&mut self) -> Result<Fetched, ClientError> {
        loop {
            let now = Instant::now();
            while let Ok(event) = self.events.try_recv() {
                self.absorb(event)?;
            }
            if self.ready_bytes < self.config.buffer_bytes {
                self.fetch(now).await?;
            }
            if let Some(fetched) = self.ready.pop_front() {
                self.ready_bytes -= fetched.batches.len();
                return Ok(fetched);
            }
            // What is due already has a fetch under way; its answer is the next thing to happen.
            let retries = self
                .positions
                .values()
                .filter_map(|position| position.trouble.as_ref());
            let retry = retries
                .map(|trouble| trouble.retry_at)
                .filter(|at| *at > now)
                .min();
            let event = match retry {
                None => self.events.recv().await,
                Some(at) => tokio::time::timeout_at(at.into(), self.events.recv())
                    .await
                    .unwrap_or(None),
            };
            if let Some(event) = event {
                self.absorb(event)?;
            }
        }
    }

    /// Sends a fetch to every shard that leads partitions and has none under way.
    async fn fetch(&mut self, now: Instant) -> Result<(), ClientError> {
        let lost = self.due(now).filter(|(_, leader)| self.stale || leader.is_none());
        let lost: Vec<PartitionId> = lost.map(|(partition, _)| partition).collect();
        if !lost.is_empty() {
            self.find_leaders(&lost).await?;
        }
        let mut groups: BTreeMap<Group, Vec<PartitionId>> = BTreeMap::new();
        for (partition, leader) in self.due(now) {
            if let Some(leader) = leader {
                groups
                    .entry((leader.node, leader.shard))
                    .or_default()
                    .push(partition);
            }
        }
        groups.retain(|group, _| !self.busy.contains(group));
        for (group, partitions) in groups {
            self.fetch_from(group, partitions).await?;
        }
        Ok(())
    }

    /// The partitions that may be asked for now, with their leaders.
    fn due(&self, now: Instant) -> impl Iterator<Item = (PartitionId, Option<Leader>)> {
        let waits = move |position: &Position| {
            position
                .trouble
                .as_ref()
                .is_some_and(|trouble| trouble.retry_at > now)
        };
        let due = self
            .positions
            .iter()
            .filter(move |(_, position)| !waits(position));
        due.map(|(partition, _)| (*partition, self.client.topology().leader(*partition)))
    }

    async fn find_leaders(&mut self, lost: &[PartitionId]) -> Result<(), ClientError> {
        let seen = self.client.topology().version();
        match self.client.refresh_topology(seen, &[]).await {
            Ok(()) => {
                self.stale = false;
                let topology = self.client.topology();
                let leaderless: Vec<_> = lost
                    .iter()
                    .copied()
                    .filter(|partition| topology.leader(*partition).is_none())
                    .collect();
                drop(topology);
                for partition in leaderless {
                    self.note_trouble(&[partition], &ClientError::NoLeader(partition))?;
                }
                Ok(())
            }
            Err(error) => self.note_trouble(lost, &error),
        }
    }

    async fn fetch_from(&mut self, group: Group, partitions: Vec<PartitionId>) -> Result<(), ClientError> {
        let connection = match self.client.shard_connection(group.0, group.1).await {
            Ok(connection) => connection,
            Err(error) => return self.note_trouble(&partitions, &error),
        };
        let asked: Vec<(PartitionId, Offset)> = partitions
            .iter()
            .filter_map(|partition| Some((*partition, self.position(*partition)?)))
            .collect();
        let request = Request::Fetch(FetchRequest {
            max_wait_ms: u32::try_from(self.config.max_wait.as_millis()).unwrap_or(u32::MAX),
            min_bytes: self.config.min_bytes,
            max_bytes: self.config.max_bytes,
            isolation: Isolation::Uncommitted,
            replica: None,
            generation: 0,
            partitions: asked.iter().map(|asked| self.range(asked)).collect(),
        });
        self.busy.insert(group);
        let answered = self.answered.clone();
        connection.send(
            &request,
            Box::new(move |answer| {
                // A consumer that was dropped meanwhile needs no answer.
                let _ = answered.send(Event { group, asked, answer });
            }),
        );
        Ok(())
    }

    fn range(&self, &(partition, offset): &(PartitionId, Offset)) -> FetchPartition {
        FetchPartition {
            partition,
            epoch: None,
            offset,
            max_bytes: self.config.partition_max_bytes,
            last_fetched_epoch: None,
            durable_end: None,
        }
    }

    fn absorb(&mut self, event: Event) -> Result<(), ClientError> {
        self.busy.remove(&event.group);
        let partitions: Vec<PartitionId> = event.asked.iter().map(|(partition, _)| *partition).collect();
        let answer = match event.answer {
            Ok(Response::Fetch(answer)) => answer,
            Ok(Response::Refused(refusal)) => return self.note_trouble(&partitions, &refusal.into()),
            Ok(_) => {
                let cause = "the answer is of another kind than the request".to_owned();
                let address = format!("broker {}", event.group.0);
                return Err(ClientError::Protocol { address, cause });
            }
            Err(error) => return self.note_trouble(&partitions, &error),
        };
        for read in answer.partitions {
            let asked = event
                .asked
                .iter()
                .find(|(partition, _)| *partition == read.partition);
            // The position may have moved since the question, or the partition may be gone: then the answer is void.
            if let Some(&(partition, offset)) = asked
                && self.position(partition) == Some(offset)
            {
                self.absorb_partition(offset, read)?;
            }
        }
        Ok(())
    }

    fn absorb_partition(&mut self, from: Offset, read: FetchedPartition<Bytes>) -> Result<(), ClientError> {
        let partition = read.partition;
        if let Some(error) = read.error {
            let message = format!(
                "partition {} at offset {from}: {}",
                partition.index,
                error.message()
            );
            return self.note_trouble(&[partition], &ClientError::refused(error, &message));
        }
        let batches = read.records.into_iter().next().unwrap_or_default();
        let next = check(partition, from, &batches)?;
        let Some(position) = self.positions.get_mut(&partition) else {
            return Ok(());
        };
        position.trouble = None;
        position.high_watermark = read.high_watermark;
        position.next = next;
        if next > from {
            self.ready_bytes += batches.len();
            self.ready.push_back(Fetched {
                partition,
                from,
                next,
                batches,
            });
        }
        Ok(())
    }

    /// Remembers that partitions cannot be read now; fails when the reason will not pass, or has lasted too long.
    fn note_trouble(&mut self, partitions: &[PartitionId], error: &ClientError) -> Result<(), ClientError> {
        let passing = error.retriable() || error.wire().is_some_and(crate::error::WireError::retriable);
        if !passing {
            return Err(error.clone());
        }
        self.stale = true;
        let now = Instant::now();
        let patience = self.client.config().retry_deadline;
        for partition in partitions {
            let Some(position) = self.positions.get_mut(partition) else {
                continue;
            };
            let (since, tries) = position
                .trouble
                .as_ref()
                .map_or((now, 0), |old| (old.since, old.tries + 1));
            if now.duration_since(since) > patience {
                return Err(error.clone().gave_up(patience));
            }
            position.trouble = Some(Trouble {
                since,
                tries,
                retry_at: now + backoff(tries),
            });
        }
        Ok(())
    }
}

/// Checks batches against their checksums and each other; returns the offset after the last record (`from` when there
/// is none).
fn check(partition: PartitionId, from: Offset, bytes: &Bytes) -> Result<Offset, ClientError> {
    let mut next = from;
    for (number, found) in batch::batches(bytes).enumerate() {
        let (header, whole) = found.map_err(|error| damaged(partition, next, error.to_string()))?;
        let fits = match number {
            0 => header.base_offset <= from && from < header.next_offset(),
            _ => header.base_offset == next,
        };
        if !fits {
            let cause = format!("a batch from {} where {next} was expected", header.base_offset);
            return Err(damaged(partition, next, cause));
        }
        if !batch::verify_crc(whole) {
            return Err(damaged(
                partition,
                header.base_offset,
                "its CRC-32C does not fit".to_owned(),
            ));
        }
        next = header.next_offset();
    }
    Ok(next)
}
