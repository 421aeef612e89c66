//! What a client knows of the cluster: brokers' addresses, topics, leaders.
//!
//! Per topic id the partition entry with the highest partition epoch is kept, so that an older answer never
//! replaces a newer one; a new topic id under the same name replaces the topic.

use std::collections::HashMap;

use ringfence_engine::types::{LeaderEpoch, PartitionId, ShardId, TopicId};

use crate::native::{BrokerInfo, MetadataAnswer, NodeId, PartitionInfo, TopicInfo};

/// A topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topic {
    /// Its name.
    pub name: String,
    /// Its id.
    pub id: TopicId,
    /// Its number of partitions.
    pub partitions: u32,
}

impl Topic {
    /// Partition `index` of this topic.
    #[must_use]
    pub fn partition(&self, index: u32) -> PartitionId {
        PartitionId {
            topic: self.id,
            index,
        }
    }
}

/// Who leads a partition, and which shard of it owns the partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leader {
    /// The broker.
    pub node: NodeId,
    /// Its shard.
    pub shard: ShardId,
    /// Its epoch.
    pub epoch: LeaderEpoch,
}

/// What is known, and a number that rises with every answer.
#[derive(Debug, Default)]
pub struct Topology {
    version: u64,
    brokers: HashMap<NodeId, BrokerInfo>,
    topics: HashMap<String, TopicId>,
    partitions: HashMap<TopicId, Vec<PartitionInfo>>,
}

impl Topology {
    /// Rises with every answer taken in.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The topic with this name.
    #[must_use]
    pub fn topic(&self, name: &str) -> Option<Topic> {
        let id = *self.topics.get(name)?;
        let partitions = self.partitions.get(&id)?.len();
        Some(Topic {
            name: name.to_owned(),
            id,
            partitions: u32::try_from(partitions).unwrap_or(u32::MAX),
        })
    }

    /// Names of the topics known.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.topics.keys().cloned().collect()
    }

    /// The leader of a partition.
    #[must_use]
    pub fn leader(&self, partition: PartitionId) -> Option<Leader> {
        let entries = self.partitions.get(&partition.topic)?;
        let entry = entries.iter().find(|entry| entry.index == partition.index)?;
        Some(Leader {
            node: entry.leader?,
            shard: entry.shard,
            epoch: entry.leader_epoch,
        })
    }

    /// `HOST:PORT` of a broker.
    #[must_use]
    pub fn address(&self, node: NodeId) -> Option<String> {
        self.brokers.get(&node).map(address)
    }

    /// Addresses of all brokers known.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        self.brokers.values().map(address).collect()
    }

    /// Takes an answer in.
    pub fn learn(&mut self, answer: MetadataAnswer) {
        self.version += 1;
        if !answer.brokers.is_empty() {
            self.brokers = answer
                .brokers
                .into_iter()
                .map(|broker| (broker.node, broker))
                .collect();
        }
        for topic in answer.topics {
            self.learn_topic(topic);
        }
    }

    fn learn_topic(&mut self, topic: TopicInfo) {
        if topic.error.is_some() {
            if let Some(gone) = self.topics.remove(&topic.name) {
                self.partitions.remove(&gone);
            }
            return;
        }
        let old = self.topics.insert(topic.name, topic.id);
        if let Some(old) = old.filter(|old| *old != topic.id) {
            self.partitions.remove(&old);
        }
        let known = self.partitions.entry(topic.id).or_default();
        for entry in topic.partitions {
            match known.iter_mut().find(|old| old.index == entry.index) {
                Some(old) if old.partition_epoch > entry.partition_epoch => {}
                Some(old) => *old = entry,
                None => known.push(entry),
            }
        }
        known.sort_unstable_by_key(|entry| entry.index);
    }
}

fn address(broker: &BrokerInfo) -> String {
    if broker.host.contains(':') {
        format!("[{}]:{}", broker.host, broker.port)
    } else {
        format!("{}:{}", broker.host, broker.port)
    }
}
