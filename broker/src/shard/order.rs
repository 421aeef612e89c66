//! Orders of the control thread: topics to serve, topics to drop, producer ids, reports, stop.

use std::collections::HashMap;
use std::sync::Arc;

use ringfence_engine::error::CommandError;
use ringfence_engine::types::{LeaderEpoch, Now, PartitionId, TopicId};

use super::partition::{Partition, Role};
use super::{Life, STOP_PATIENCE_MS, Shard, StoreCall};
use crate::error::WireError;
use crate::event::{Mail, News, Order, Outbox, Peer};
use crate::metadata::catalog::Topic;
use crate::native::{self, PartitionStanding, ShardStanding};
use crate::replica::leader::Leader;
use crate::stats::METRICS;

/// Orders whose effects are not all durable yet.
#[derive(Debug, Default)]
pub(super) struct Orders {
    /// By the token of the order.
    open: HashMap<u64, Progress>,
    /// Drops that met another cut of their partition and are tried again.
    again: Vec<(u64, PartitionId)>,
}

#[derive(Debug, Default)]
struct Progress {
    epoch: LeaderEpoch,
    left: usize,
    failed: Vec<(PartitionId, CommandError)>,
}

impl Shard {
    pub(super) fn on_order(&mut self, now: Now, order: Order, out: &mut Outbox) {
        match order {
            Order::Topics { token, epoch, topics } => self.serve_topics(now, token, epoch, topics, out),
            Order::Drop {
                token,
                topic,
                partitions,
            } => self.drop_topic(now, token, topic, partitions, out),
            Order::ProducerIds(ids) => self.on_producer_ids(now, ids, out),
            Order::NoProducerIds => self.refuse_producers(now, out),
            Order::Answer { call, response } => self.on_admin_answer(now, call, *response, out),
            Order::Report { token } => self.report(token, out),
            Order::Stop => self.begin_stop(now, out),
        }
    }

    fn owned(&self, topic: TopicId, partitions: u32) -> impl Iterator<Item = PartitionId> + use<> {
        let (me, shards) = (self.id, self.node.shards);
        (0..partitions)
            .map(move |index| PartitionId { topic, index })
            .filter(move |id| id.shard(shards) == me)
    }

    fn serve_topics(
        &mut self,
        now: Now,
        token: u64,
        epoch: LeaderEpoch,
        topics: Vec<Arc<Topic>>,
        out: &mut Outbox,
    ) {
        let progress = Progress {
            epoch,
            ..Progress::default()
        };
        self.orders.open.insert(token, progress);
        for topic in topics {
            for id in self.owned(topic.id, topic.partitions.len() as u32) {
                self.serve_partition(now, token, epoch, id, &topic, out);
            }
            self.topics.put(topic);
        }
        self.close_order(token, out);
    }

    fn serve_partition(
        &mut self,
        now: Now,
        token: u64,
        epoch: LeaderEpoch,
        id: PartitionId,
        topic: &Topic,
        out: &mut Outbox,
    ) {
        let leads = |state: &Partition| {
            state.role() == Role::Leading && state.leader().is_some_and(|leader| leader.epoch() >= epoch)
        };
        if self.partitions.get(&id).is_some_and(leads) {
            self.store.alter(id, topic.settings.log());
            let leader = self.partitions.get_mut(&id).and_then(|state| state.leader_mut());
            let moved = leader.is_some_and(|leader| leader.alter(&topic.settings));
            self.advanced(now, id, moved, out);
            return;
        }
        match self.partitions.get_mut(&id) {
            Some(state) if matches!(state.role(), Role::Leading | Role::Failed) => state.enter(Role::Opening),
            Some(_) => {}
            None => {
                self.partitions.insert(id, Partition::opening(self.next_slot));
                self.next_slot += 1;
            }
        }
        self.store.create(id, &topic.name, topic.settings.log());
        let call = self.store_calls.insert(StoreCall::Epoch { order: token });
        if let Some(progress) = self.orders.open.get_mut(&token) {
            progress.left += 1;
        }
        self.store.begin_epoch(now, call, id, epoch, &mut out.disk);
    }

    fn drop_topic(&mut self, now: Now, token: u64, topic: TopicId, partitions: u32, out: &mut Outbox) {
        self.topics.remove(topic);
        self.orders.open.insert(token, Progress::default());
        for id in self.owned(topic, partitions) {
            self.fail_parked(now, id, WireError::UnknownTopicId, out);
            if let Some(state) = self.partitions.get_mut(&id) {
                state.enter(Role::Dropping);
                let slot = state.slot();
                let waiting = self.waiters.range((slot, 0)..=(slot, u64::MAX));
                self.woken.extend(waiting.map(|(_, task)| (*task, slot)));
            }
            if let Some(progress) = self.orders.open.get_mut(&token) {
                progress.left += 1;
            }
            self.drop_partition(now, token, id, out);
        }
        self.close_order(token, out);
    }

    fn drop_partition(&mut self, now: Now, order: u64, id: PartitionId, out: &mut Outbox) {
        let call = self.store_calls.insert(StoreCall::Drop { order });
        self.store.drop_partition(now, call, id, &mut out.disk);
    }

    /// Tries drops again that met another cut of their partition.
    pub(super) fn retry_drops(&mut self, now: Now, out: &mut Outbox) {
        for (order, id) in std::mem::take(&mut self.orders.again) {
            self.drop_partition(now, order, id, out);
        }
    }

    /// A command of an order ended.
    pub(super) fn on_done(
        &mut self,
        now: Now,
        token: u64,
        id: PartitionId,
        result: Result<(), CommandError>,
        out: &mut Outbox,
    ) {
        match self.store_calls.remove(token) {
            Some(StoreCall::Epoch { order }) => self.on_epoch(now, order, id, result, out),
            Some(StoreCall::Drop { order }) => self.on_dropped(order, id, result, out),
            _ => {}
        }
    }

    fn on_epoch(
        &mut self,
        now: Now,
        order: u64,
        id: PartitionId,
        result: Result<(), CommandError>,
        out: &mut Outbox,
    ) {
        let Some(progress) = self.orders.open.get_mut(&order) else {
            return;
        };
        progress.left -= 1;
        let epoch = progress.epoch;
        let view = self.store.view(id);
        let settings = self.topics.by_id.get(&id.topic).map(|topic| &topic.settings);
        if let Some(state) = self
            .partitions
            .get_mut(&id)
            .filter(|state| state.role() == Role::Opening)
        {
            match (&result, view, settings) {
                (Ok(()), Some(view), Some(settings)) => {
                    state.lead(Leader::new(epoch, view.log_end, view.durable_end, settings));
                }
                _ => state.enter(Role::Failed),
            }
        }
        if let Err(error) = result {
            progress.failed.push((id, error));
        }
        self.advanced(now, id, true, out);
        self.close_order(order, out);
    }

    fn on_dropped(
        &mut self,
        order: u64,
        id: PartitionId,
        result: Result<(), CommandError>,
        out: &mut Outbox,
    ) {
        let Some(progress) = self.orders.open.get_mut(&order) else {
            return;
        };
        match result {
            Err(CommandError::Busy) => {
                self.orders.again.push((order, id));
                return;
            }
            // Unknown here is gone already: the drop of an earlier life was durable.
            Ok(()) | Err(CommandError::UnknownPartition(_)) => {
                self.partitions.remove(&id);
            }
            Err(error) => progress.failed.push((id, error)),
        }
        progress.left -= 1;
        self.close_order(order, out);
    }

    /// Reports an order whose effects are all durable, or failed.
    fn close_order(&mut self, token: u64, out: &mut Outbox) {
        if self
            .orders
            .open
            .get(&token)
            .is_none_or(|progress| progress.left > 0)
        {
            return;
        }
        if let Some(progress) = self.orders.open.remove(&token) {
            let failed = progress.failed;
            out.mail
                .push((Peer::Control, Mail::News(News::Ordered { token, failed })));
        }
    }

    fn report(&mut self, token: u64, out: &mut Outbox) {
        self.publish();
        let figures = METRICS
            .iter()
            .map(|metric| native::Figure {
                name: metric.name.to_owned(),
                value: (metric.get)(&self.stats),
            })
            .collect();
        let shard = ShardStanding {
            node: self.node.node,
            shard: self.id,
            fenced: self
                .store
                .fenced()
                .map_or_else(String::new, |reason| reason.to_string()),
            figures,
        };
        let partitions = self
            .partitions
            .iter()
            .map(|(id, state)| self.standing(*id, state))
            .collect();
        let report = News::Report {
            token,
            shard,
            partitions,
        };
        out.mail.push((Peer::Control, Mail::News(report)));
    }

    fn standing(&self, id: PartitionId, state: &Partition) -> PartitionStanding {
        let view = self.store.view(id);
        let leader = state.leader();
        PartitionStanding {
            partition: id,
            leader: (state.role() == Role::Leading).then_some(self.node.node),
            leader_epoch: leader.map_or(LeaderEpoch(0), |leader| leader.epoch()),
            partition_epoch: 0,
            shard: self.id,
            replicas: vec![self.node.node],
            isr: vec![self.node.node],
            log_start: view.map(|view| view.log_start),
            high_watermark: leader.map(|leader| leader.high_watermark()),
            durable_end: view.map(|view| view.durable_end),
            log_end: view.map(|view| view.log_end),
            fenced: view
                .and_then(|view| view.fenced)
                .map_or_else(String::new, |reason| reason.to_string()),
        }
    }

    fn begin_stop(&mut self, now: Now, out: &mut Outbox) {
        if self.life != Life::Running {
            return;
        }
        self.life = Life::Draining;
        self.listener.stop_accepting();
        let fetches: Vec<_> = self.fetches.keys().copied().collect();
        for call in fetches {
            self.on_hurry(now, call, out);
        }
        self.home.hurry_all(self.id, out);
    }

    /// Draining ends when no request is in work here; then the store stops and connections close.
    pub(super) fn proceed_to_stop(&mut self, now: Now, out: &mut Outbox) {
        if self.life == Life::Draining && self.tasks.len() == 0 && self.home.is_idle() {
            self.life = Life::Stopping;
            self.store.begin_stop();
            self.abort_at = now.after_ms(STOP_PATIENCE_MS);
            self.listener.close_all(false, &mut out.net);
        }
    }

    /// Whether new requests are refused because the process stops.
    pub(super) fn is_stopping(&self) -> bool {
        self.life != Life::Running
    }
}
