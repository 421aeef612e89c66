//! Topic administration.

use ringfence_engine::types::TopicId;

use super::metadata::{PartitionInfo, Setting};
use super::wire::layout;

layout! {
    /// Creates a topic.
    pub struct CreateTopic {
        /// Its name.
        pub name: String,
        /// Number of partitions; 0 is the broker's default.
        pub partitions: u32,
        /// Replicas of each partition; 0 is the broker's default.
        pub replication_factor: u16,
        /// Settings that differ from the defaults.
        pub settings: Vec<Setting>,
        /// Only check whether it could be created.
        pub validate_only: bool,
    }

    /// The topic is durable in the metadata (or would be, with `validate_only`).
    pub struct TopicCreated {
        /// Its id; zero with `validate_only`.
        pub id: TopicId,
    }

    /// Deletes a topic and its records.
    pub struct DeleteTopic {
        /// Its name.
        pub name: String,
        /// The id it must have; zero is any.
        pub id: TopicId,
    }

    /// Changes settings; the others keep their values.
    pub struct AlterTopic {
        /// The topic's name.
        pub name: String,
        /// New values.
        pub set: Vec<Setting>,
        /// Keys that go back to their defaults.
        pub unset: Vec<String>,
    }

    /// Raises the number of partitions.
    pub struct AddPartitions {
        /// The topic's name.
        pub name: String,
        /// The new total.
        pub total: u32,
    }

    /// Asks for one topic.
    pub struct DescribeTopic {
        /// Its name.
        pub name: String,
    }

    /// One topic of the list, sorted by name.
    pub struct TopicListed {
        /// Its name.
        pub name: String,
        /// Its id.
        pub id: TopicId,
        /// Number of partitions.
        pub partitions: u32,
        /// Replicas of each partition.
        pub replication_factor: u16,
    }

    /// Everything about one topic.
    pub struct TopicDescription {
        /// Its name.
        pub name: String,
        /// Its id.
        pub id: TopicId,
        /// Replicas of each partition.
        pub replication_factor: u16,
        /// All settings with their effective values.
        pub settings: Vec<TopicSetting>,
        /// Its partitions, by index.
        pub partitions: Vec<PartitionInfo>,
    }

    /// A setting and where it comes from.
    pub struct TopicSetting {
        /// For instance `retention.ms`.
        pub key: String,
        /// For instance `604800000`.
        pub value: String,
        /// Whether the topic sets it itself; else it is the default.
        pub own: bool,
    }
}
