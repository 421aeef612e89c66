//! ClusterInfo: how brokers, shards and partitions stand at the moment of the answer.

use ringfence_engine::types::{LeaderEpoch, Offset, PartitionId, ShardId, TopicId};

use super::metadata::BrokerInfo;
use super::wire::{ClusterId, NodeId, layout};

layout! {
    /// The whole picture.
    pub struct ClusterInfo {
        /// The cluster.
        pub cluster: ClusterId,
        /// The active controller.
        pub controller: Option<NodeId>,
        /// Live brokers.
        pub brokers: Vec<BrokerInfo>,
        /// Names of the topics that `partitions` refers to.
        pub topics: Vec<TopicName>,
        /// The partitions, by topic and index.
        pub partitions: Vec<PartitionStanding>,
        /// Shards of the answering broker.
        pub shards: Vec<ShardStanding>,
    }

    /// Name of a topic.
    pub struct TopicName {
        /// The id.
        pub id: TopicId,
        /// The name.
        pub name: String,
    }

    /// One partition; the offsets are those of its leader, `None` where the answering broker does not know them.
    pub struct PartitionStanding {
        /// The partition.
        pub partition: PartitionId,
        /// Its leader.
        pub leader: Option<NodeId>,
        /// The leader's epoch.
        pub leader_epoch: LeaderEpoch,
        /// Version of leader and in-sync set.
        pub partition_epoch: u32,
        /// The shard of the leader that owns it.
        pub shard: ShardId,
        /// Assigned nodes.
        pub replicas: Vec<NodeId>,
        /// Nodes in sync.
        pub isr: Vec<NodeId>,
        /// First readable offset.
        pub log_start: Option<Offset>,
        /// Exclusive end of what consumers see.
        pub high_watermark: Option<Offset>,
        /// Exclusive end of what is synced on the leader.
        pub durable_end: Option<Offset>,
        /// Next offset to be assigned.
        pub log_end: Option<Offset>,
        /// Why it takes no writes; empty when it does.
        pub fenced: String,
    }

    /// Figures of one shard.
    pub struct ShardStanding {
        /// The broker.
        pub node: NodeId,
        /// The shard.
        pub shard: ShardId,
        /// Why it takes no writes; empty when it does.
        pub fenced: String,
        /// Gauges and counters under their metric names: journal, write-back, memory, connections.
        pub figures: Vec<Figure>,
    }

    /// One number.
    pub struct Figure {
        /// Name with its unit, for instance `journal_used_bytes`.
        pub name: String,
        /// Value.
        pub value: u64,
    }
}
