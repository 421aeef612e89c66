//! The native protocol: little-endian frames with fixed layouts; `broker/README.md` specifies them to the byte.
//!
//! Pure codec: bytes in, typed requests and answers out, and back. Decoding is total (every length and count is
//! checked before memory is taken, trailing bytes are refused) and never copies records: they stay slices of the
//! frame they came in. A request and its answer are defined side by side, one file per family.

mod frame;
pub mod wire;

mod admin;
mod cluster;
mod fetch;
mod hello;
mod metadata;
mod offsets;
mod produce;
mod request;
mod response;
#[cfg(test)]
mod tests;

pub use admin::{
    AddPartitions, AlterTopic, CreateTopic, DeleteTopic, DescribeTopic, TopicCreated, TopicDescription,
    TopicListed, TopicSetting,
};
pub use cluster::{ClusterInfo, Figure, PartitionStanding, ShardStanding, TopicName};
pub use fetch::{
    Ack, AckedPartition, FetchAck, FetchAnswer, FetchPartition, FetchRequest, FetchedPartition, Isolation,
};
#[cfg(test)]
use frame::seal;
pub use frame::{
    DEFAULT_MAX_FRAME, Encoded, FLAG_ANSWER, FLAG_REFUSED, Frame, FrameError, HEADER, HELLO_MAX_FRAME,
    Header, PREFIX, Records,
};
pub use hello::{ApiVersions, HelloAnswer, HelloRequest, Role};
pub use metadata::{BrokerInfo, MetadataAnswer, MetadataRequest, PartitionInfo, Scope, Setting, TopicInfo};
pub use offsets::{
    EpochEnd, EpochQuestion, OffsetFound, OffsetQuestion, ProducerAssigned, TIMESTAMP_EARLIEST,
    TIMESTAMP_LATEST,
};
pub use produce::{Acks, ProduceAnswer, ProduceBatch, ProduceRequest, ProducedPartition};
pub use request::Request;
pub use response::{Refusal, Response};
pub use wire::{ClusterId, DecodeError, MAX_STRING, NodeId};

use std::ops::RangeInclusive;

macro_rules! apis {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $first:literal..=$last:literal;)*) => {
        /// The kinds of requests: name, number on the wire, versions of the layout. Defined here and nowhere else.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Api {
            $($(#[$doc])* $name = $number,)*
        }

        impl Api {
            /// Every api, by number.
            pub const ALL: &[Api] = &[$(Api::$name),*];

            /// The api with this number.
            #[must_use]
            pub fn from_number(number: u8) -> Option<Api> {
                match number {
                    $($number => Some(Api::$name),)*
                    _ => None,
                }
            }

            /// The name, for logs and metrics.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Api::$name => stringify!($name),)*
                }
            }

            /// The versions of the layout that this build speaks.
            #[must_use]
            pub fn versions(self) -> RangeInclusive<u8> {
                match self {
                    $(Api::$name => $first..=$last,)*
                }
            }
        }
    };
}

apis! {
    /// First on every connection: who asks, and which shard the connection is for.
    Hello = 1, 1..=1;
    /// Topics, partitions, leaders, brokers' addresses.
    Metadata = 2, 1..=1;
    /// Appends record batches.
    Produce = 3, 1..=1;
    /// Reads records: consumers and followers.
    Fetch = 4, 1..=1;
    /// A follower's durable ends between fetches.
    FetchAck = 5, 1..=1;
    /// Where a leader epoch ends.
    EpochEnd = 6, 1..=1;
    /// Earliest, latest, or first offset at a time.
    ListOffsets = 7, 1..=1;
    /// A fresh producer id.
    InitProducer = 8, 1..=1;
    /// Creates a topic.
    CreateTopic = 16, 1..=1;
    /// Deletes a topic.
    DeleteTopic = 17, 1..=1;
    /// Changes settings of a topic.
    AlterTopic = 18, 1..=1;
    /// Names and sizes of all topics.
    ListTopics = 19, 1..=1;
    /// Settings and partitions of one topic.
    DescribeTopic = 20, 1..=1;
    /// Raises the number of partitions of a topic.
    AddPartitions = 21, 1..=1;
    /// How brokers, shards and partitions stand.
    ClusterInfo = 32, 1..=1;
}

impl Api {
    /// The number on the wire.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The version this build writes.
    #[must_use]
    pub fn version(self) -> u8 {
        *self.versions().end()
    }
}
