//! Metadata: which topics there are and who leads their partitions.

use ringfence_engine::types::{LeaderEpoch, ShardId, TopicId};

use super::wire::{ClusterId, NodeId, choice, layout};
use crate::error::WireError;

choice! {
    /// Which topics are asked for.
    pub enum Scope as u8, "metadata scope" {
        /// All of them; the lists are empty.
        All = 0,
        /// Those in the lists.
        Listed = 1,
    }
}

layout! {
    /// Topics by name, by id, or all.
    pub struct MetadataRequest {
        /// All, or the listed ones.
        pub scope: Scope,
        /// Topics by name.
        pub names: Vec<String>,
        /// Topics by id.
        pub ids: Vec<TopicId>,
    }

    /// Brokers, and the topics asked for: names first, then ids, each in the order of the request.
    pub struct MetadataAnswer {
        /// The cluster.
        pub cluster: ClusterId,
        /// The active controller.
        pub controller: Option<NodeId>,
        /// Live brokers.
        pub brokers: Vec<BrokerInfo>,
        /// The topics.
        pub topics: Vec<TopicInfo>,
    }

    /// A broker's address.
    pub struct BrokerInfo {
        /// Its node.
        pub node: NodeId,
        /// Its boot generation.
        pub generation: u64,
        /// Advertised host name or address of the native port.
        pub host: String,
        /// Advertised native port.
        pub port: u16,
        /// Its number of shards.
        pub shards: u16,
    }

    /// One topic; with an error only `name` or `id` is meaningful, as asked.
    pub struct TopicInfo {
        /// Why there is no more to tell.
        pub error: Option<WireError>,
        /// Its name.
        pub name: String,
        /// Its id.
        pub id: TopicId,
        /// Settings that differ from the defaults.
        pub settings: Vec<Setting>,
        /// Its partitions, by index.
        pub partitions: Vec<PartitionInfo>,
    }

    /// One partition.
    pub struct PartitionInfo {
        /// Why it cannot be used now.
        pub error: Option<WireError>,
        /// Its number.
        pub index: u32,
        /// Leader; `None` while there is none.
        pub leader: Option<NodeId>,
        /// The leader's epoch.
        pub leader_epoch: LeaderEpoch,
        /// Version of leader and in-sync set; clients keep the entry with the highest.
        pub partition_epoch: u32,
        /// The shard of the leader that owns the partition.
        pub shard: ShardId,
        /// Assigned nodes, preferred leader first.
        pub replicas: Vec<NodeId>,
        /// Nodes in sync.
        pub isr: Vec<NodeId>,
    }

    /// A setting, under Kafka's name where Kafka has it.
    pub struct Setting {
        /// For instance `retention.ms`.
        pub key: String,
        /// For instance `604800000`.
        pub value: String,
    }
}
