//! The shard's state machine: connections, requests, partitions, one store.
//!
//! `step(now, event, outbox)` takes one event to its end; nothing in it waits. A request lives at its *home* shard
//! (which has the connection) as a call, and at the *owners* of its partitions as tasks; see [`crate::event`].
//! A task waits for a watermark or a deadline by being parked: it costs memory only, and is found by the partition
//! that moves or the deadline that passes, never by a scan.
//!
//! Invariants: an acknowledgement is given only by [`Partition::acknowledge`], from what the leader counts; every
//! task ends in exactly one `WorkDone`; every call in exactly one answer (or none, for acks=0).

mod fetch;
mod handover;
mod home;
mod offsets;
mod order;
mod partition;
mod produce;
mod table;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use ringfence_engine::error::FenceReason;
use ringfence_engine::io::NetEvent;
use ringfence_engine::store::{Store, StoreEvent};
use ringfence_engine::types::{Now, PartitionId, ShardId, TopicId};

use crate::config::Limits;
use crate::error::WireError;
use crate::event::{CallRef, Event, Mail, News, Outbox, Peer, Work, WorkDone, WorkKind, WorkResult};
use crate::listener::Listener;
use crate::metadata::catalog::Topic;
use crate::native::{ClusterId, NodeId};
use crate::stats::ShardStats;
use fetch::FetchTask;
use handover::Handovers;
use home::Home;
pub(crate) use home::{broker_info, partition_infos};
use offsets::LookupTask;
use order::Orders;
use partition::{Partition, Role};
use produce::ProduceTask;
use table::Table;

/// Milliseconds that connections get to take their last answers during a stop.
const STOP_PATIENCE_MS: u64 = 5_000;

/// Nanoseconds between two publications of the store's figures.
const PUBLISH_EVERY: u64 = 500_000_000;

/// What a shard knows about its node.
#[derive(Debug, Clone)]
pub struct NodeInfo {
    /// The cluster.
    pub cluster: ClusterId,
    /// The node.
    pub node: NodeId,
    /// Its boot generation.
    pub generation: u64,
    /// Host that clients dial.
    pub host: String,
    /// Native port that clients dial.
    pub port: u16,
    /// Shards of the node.
    pub shards: u16,
}

/// What the store was asked for, by token.
#[derive(Debug)]
enum StoreCall {
    /// An append of a produce task's part.
    Append { task: u64, part: u32 },
    /// A read of a fetch task's part.
    Read { task: u64, part: u32 },
    /// A time lookup of a lookup task's part.
    Time { task: u64, part: u32 },
    /// A leader epoch, of an order.
    Epoch { order: u64 },
    /// A drop, of an order.
    Drop { order: u64 },
}

/// Work of an owner.
#[derive(Debug)]
enum Task {
    Produce(ProduceTask),
    Fetch(FetchTask),
    Lookup(LookupTask),
}

/// Topics by id and name.
#[derive(Debug, Default)]
struct Catalogue {
    by_id: HashMap<TopicId, Arc<Topic>>,
    by_name: HashMap<String, TopicId>,
}

impl Catalogue {
    fn put(&mut self, topic: Arc<Topic>) {
        self.by_name.insert(topic.name.clone(), topic.id);
        self.by_id.insert(topic.id, topic);
    }

    fn remove(&mut self, id: TopicId) {
        if let Some(topic) = self.by_id.remove(&id)
            && self.by_name.get(&topic.name) == Some(&id)
        {
            self.by_name.remove(&topic.name);
        }
    }

    fn named(&self, name: &str) -> Option<&Arc<Topic>> {
        self.by_id.get(self.by_name.get(name)?)
    }
}

/// How far the shard is on its way to a stop. Running, then Draining, then Stopping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Life {
    /// Serving.
    Running,
    /// New requests are refused; those in work end.
    Draining,
    /// The store ends its work.
    Stopping,
}

/// One shard.
#[derive(Debug)]
pub struct Shard {
    id: ShardId,
    node: NodeInfo,
    limits: Limits,
    store: Store,
    listener: Listener,
    topics: Catalogue,
    partitions: HashMap<PartitionId, Partition>,
    /// By the number that waiters use; `None` once dropped.
    next_slot: u32,
    tasks: Table<Task>,
    /// Fetch tasks by call, for `Hurry`.
    fetches: HashMap<CallRef, u64>,
    store_calls: Table<StoreCall>,
    /// (deadline, task).
    deadlines: BTreeSet<(u64, u64)>,
    /// (partition slot, fetch task), of parked fetches.
    waiters: BTreeSet<(u32, u64)>,
    /// (fetch task, partition slot) to be looked at again in this step.
    woken: VecDeque<(u64, u32)>,
    home: Home,
    handovers: Handovers,
    orders: Orders,
    producer_ids: Range<i64>,
    life: Life,
    /// When connections that do not close by themselves are aborted during a stop.
    abort_at: u64,
    publish_at: u64,
    events: Vec<StoreEvent>,
    stats: Arc<ShardStats>,
}

impl Shard {
    /// A shard over a recovered store; it leads nothing until it is ordered to.
    #[must_use]
    pub fn new(id: ShardId, node: NodeInfo, limits: Limits, store: Store, stats: Arc<ShardStats>) -> Shard {
        Shard {
            id,
            listener: Listener::new(limits.clone(), node.shards, Arc::clone(&stats)),
            home: Home::new(node.shards),
            node,
            limits,
            store,
            topics: Catalogue::default(),
            partitions: HashMap::new(),
            next_slot: 0,
            tasks: Table::default(),
            fetches: HashMap::new(),
            store_calls: Table::default(),
            deadlines: BTreeSet::new(),
            waiters: BTreeSet::new(),
            woken: VecDeque::new(),
            handovers: Handovers::default(),
            orders: Orders::default(),
            producer_ids: 0..0,
            life: Life::Running,
            abort_at: u64::MAX,
            publish_at: 0,
            events: Vec::new(),
            stats,
        }
    }

    /// When [`Event::Tick`] is due although nothing happened, in monotonic nanoseconds.
    #[must_use]
    pub fn next_wake(&self) -> Option<u64> {
        let deadline = self.deadlines.first().map(|(deadline, _)| *deadline);
        [
            deadline,
            self.listener.next_deadline(),
            self.store.next_wake(),
            Some(self.publish_at),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Whether everything accepted is durable, every answer sent, and nothing more will be done.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.life == Life::Stopping && self.store.is_stopped() && self.listener.is_empty()
    }

    /// Takes one event.
    pub fn step(&mut self, now: Now, event: Event<'_>, out: &mut Outbox) {
        match event {
            Event::Net(event) => self.on_net(now, event, out),
            Event::Disk(completion) => self.store.handle(now, completion, &mut out.disk),
            Event::Mail { from, mail } => self.on_mail(now, from, mail, out),
            Event::Tick => self.on_tick(now, out),
        }
        self.pump(now, out);
    }

    /// To be called once per loop turn, after all its events: lets the store issue what it collected.
    pub fn turn_end(&mut self, now: Now, out: &mut Outbox) {
        self.store.turn_end(now, &mut out.disk);
        self.pump(now, out);
        self.listener.lend_buffers(&mut out.net);
        self.proceed_to_stop(now, out);
        self.stats.turned_at.set(now.mono);
        for nanos in self.store.take_journal_latencies() {
            self.stats.journal_write_latency.record(nanos);
        }
    }

    /// Follows everything that the last input set off to its end.
    fn pump(&mut self, now: Now, out: &mut Outbox) {
        loop {
            if !out.disk.events.is_empty() {
                std::mem::swap(&mut self.events, &mut out.disk.events);
                let mut events = std::mem::take(&mut self.events);
                for event in events.drain(..) {
                    self.on_store(now, event, out);
                }
                self.events = events;
            } else if let Some((task, slot)) = self.woken.pop_front() {
                self.pump_fetch(now, task, Some(slot), out);
            } else if let Some(incoming) = self.listener.next_frame() {
                self.on_frame(now, incoming, out);
            } else {
                return;
            }
        }
    }

    fn on_net(&mut self, now: Now, event: NetEvent<'_>, out: &mut Outbox) {
        match event {
            NetEvent::Accepted { conn, peer, .. } => self.listener.accepted(now, conn, peer, &mut out.net),
            NetEvent::Received { conn, data } => self.listener.received(now, conn, data, &mut out.net),
            NetEvent::Filled { conn, buf } => self.listener.filled(now, conn, buf, &mut out.net),
            NetEvent::Sent { conn, bytes } => self.listener.sent(now, conn, bytes, &mut out.net),
            NetEvent::Closed { conn } => self.on_closed(conn, out),
            NetEvent::Released { conn, socket } => self.on_released(conn, socket, out),
            NetEvent::Adopted { conn, tag } => self.on_adopted(now, conn, tag, out),
        }
    }

    fn on_mail(&mut self, now: Now, from: Peer, mail: Mail, out: &mut Outbox) {
        match mail {
            Mail::Connection(handover) => self.on_handover(*handover, out),
            Mail::Work(work) => self.begin(now, *work, out),
            Mail::Hurry(call) => self.on_hurry(now, call, out),
            Mail::Done(done) => self.deliver(now, *done, out),
            Mail::Order(order) => self.on_order(now, order, out),
            // Only control gets news; a shard that does has been wired wrongly.
            Mail::News(news) => tracing::error!(?from, ?news, "news sent to a shard"),
        }
    }

    fn on_store(&mut self, now: Now, event: StoreEvent, out: &mut Outbox) {
        match event {
            StoreEvent::Appended {
                token,
                partition,
                result,
            } => {
                self.on_appended(now, token, partition, result, out);
            }
            StoreEvent::Read { token, result, .. } => self.on_read(now, token, result, out),
            StoreEvent::TimeFound { token, result, .. } => self.on_time_found(now, token, result, out),
            StoreEvent::Done {
                token,
                partition,
                result,
            } => self.on_done(now, token, partition, result, out),
            StoreEvent::Durable { partition, end } => {
                if let Some(state) = self.partitions.get_mut(&partition) {
                    let moved = state.leader_mut().is_some_and(|leader| leader.durable(end));
                    self.advanced(now, partition, moved, out);
                }
            }
            // Answers look the log start up when they are put together.
            StoreEvent::LogStart { .. } => {}
            StoreEvent::PartitionFenced { partition, reason } => {
                tracing::error!(%partition, %reason, "partition fenced");
                self.fail_parked(now, partition, WireError::from(reason), out);
            }
            StoreEvent::ShardFenced { reason } => self.on_shard_fenced(now, reason, out),
        }
    }

    fn on_shard_fenced(&mut self, now: Now, reason: FenceReason, out: &mut Outbox) {
        tracing::error!(shard = self.id.0, %reason, "shard fenced: it takes no writes until the process restarts");
        self.stats.shard_fenced.set(1);
        out.mail.push((Peer::Control, Mail::News(News::Fenced(reason))));
        let all: Vec<PartitionId> = self.partitions.keys().copied().collect();
        for partition in all {
            self.fail_parked(now, partition, WireError::from(reason), out);
        }
    }

    fn on_tick(&mut self, now: Now, out: &mut Outbox) {
        self.listener.tick(now, &mut out.net);
        if self.store.next_wake().is_some_and(|due| due <= now.mono) {
            self.store.tick(now, &mut out.disk);
        }
        while let Some((due, task)) = self
            .deadlines
            .first()
            .copied()
            .filter(|(due, _)| *due <= now.mono)
        {
            self.deadlines.remove(&(due, task));
            self.on_deadline(now, task, out);
        }
        if self.abort_at <= now.mono {
            self.abort_at = u64::MAX;
            self.listener.close_all(true, &mut out.net);
        }
        if self.publish_at <= now.mono {
            self.publish_at = now.mono.saturating_add(PUBLISH_EVERY);
            self.retry_drops(now, out);
            self.publish();
        }
    }

    fn on_deadline(&mut self, now: Now, key: u64, out: &mut Outbox) {
        match self.tasks.get_mut(key) {
            Some(Task::Produce(_)) => self.produce_timed_out(now, key, out),
            Some(Task::Fetch(task)) => {
                task.hurry();
                self.pump_fetch(now, key, None, out);
            }
            // A lookup waits for the disk only, whose answer always comes.
            Some(Task::Lookup(_)) | None => {}
        }
    }

    /// Begins the part of a request that concerns this shard.
    fn begin(&mut self, now: Now, work: Work, out: &mut Outbox) {
        let Work { call, deadline, kind } = work;
        match kind {
            WorkKind::Produce { acks, batches } => {
                self.begin_produce(now, call, deadline, acks, batches, out);
            }
            WorkKind::Fetch {
                min_bytes,
                max_bytes,
                parts,
            } => self.begin_fetch(
                now,
                FetchTask::new(call, deadline, min_bytes, max_bytes),
                parts,
                out,
            ),
            WorkKind::EpochEnd(questions) => self.answer_epoch_ends(now, call, questions, out),
            WorkKind::ListOffsets(questions) => self.begin_lookup(now, call, questions, out),
        }
    }

    /// Sends the answer to a part of a request home.
    fn finish(&mut self, now: Now, call: CallRef, result: WorkResult, out: &mut Outbox) {
        let done = WorkDone { call, result };
        if call.home == self.id {
            self.deliver(now, done, out);
        } else {
            out.mail
                .push((Peer::Shard(call.home), Mail::Done(Box::new(done))));
        }
    }

    /// The partition, when this shard leads it and the requester's epoch is the leader's.
    fn leading(
        &self,
        id: PartitionId,
        epoch: Option<ringfence_engine::types::LeaderEpoch>,
    ) -> Result<&Partition, WireError> {
        let Some(partition) = self.partitions.get(&id) else {
            return Err(match self.topics.by_id.contains_key(&id.topic) {
                true => WireError::UnknownTopicOrPartition,
                false => WireError::UnknownTopicId,
            });
        };
        match partition.role() {
            Role::Leading => {}
            Role::Opening => return Err(WireError::LeaderNotAvailable),
            Role::Failed => return Err(WireError::StorageError),
            Role::Dropping => return Err(WireError::UnknownTopicId),
        }
        let leader = partition.leader().ok_or(WireError::LeaderNotAvailable)?;
        leader.check_epoch(epoch)?;
        Ok(partition)
    }

    /// What moved with a partition's watermarks: acknowledgements, parked fetches.
    fn advanced(&mut self, now: Now, id: PartitionId, watermark_moved: bool, out: &mut Outbox) {
        let Some(partition) = self.partitions.get_mut(&id) else {
            return;
        };
        let slot = partition.slot();
        if watermark_moved && let Some(leader) = partition.leader() {
            self.store.set_high_watermark(id, leader.high_watermark());
            let waiting = self.waiters.range((slot, 0)..=(slot, u64::MAX));
            self.woken.extend(waiting.map(|(_, task)| (*task, slot)));
        }
        for (task, part) in partition.acknowledge() {
            self.acknowledged(now, task, part, out);
        }
    }

    fn publish(&mut self) {
        let gauges = self.store.gauges();
        let leading = self
            .partitions
            .values()
            .filter(|state| state.role() == Role::Leading);
        let (mut count, mut memory) = (0, 0);
        for state in leading {
            count += 1;
            memory += u64::from(
                state
                    .leader()
                    .is_some_and(crate::replica::leader::Leader::is_memory),
            );
        }
        self.stats.partitions.set(self.partitions.len() as u64);
        self.stats.partitions_leading.set(count);
        self.stats.partitions_memory.set(memory);
        self.stats.publish_store(&self.store, &gauges);
    }
}
