//! Wire errors: what a client or peer may see, each defined once in the table below.
//!
//! Where Kafka has the error, the number and the meaning of "retriable" are Kafka's; numbers of our own begin at
//! 1000. A number never changes its meaning; new ones are appended.

use ringfence_engine::batch::BatchError;
use ringfence_engine::error::{AppendError, CommandError, FenceReason, ReadError};
use ringfence_engine::io::DiskError;

macro_rules! wire_errors {
    ($($variant:ident $code:literal $name:ident $retry:ident $text:literal;)*) => {
        /// An error on the wire.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(i16)]
        pub enum WireError {
            $(#[doc = $text] $variant = $code,)*
        }

        impl WireError {
            /// Every error, in the order of the table.
            pub const ALL: &[WireError] = &[$(WireError::$variant),*];

            /// The error with this number; `None` for 0 (no error) and for numbers this version does not know.
            #[must_use]
            pub fn from_code(code: i16) -> Option<WireError> {
                match code {
                    $($code => Some(WireError::$variant),)*
                    _ => None,
                }
            }

            /// The name in Kafka's spelling.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(WireError::$variant => stringify!($name),)*
                }
            }

            /// Cause and next step, for people.
            #[must_use]
            pub fn message(self) -> &'static str {
                match self {
                    $(WireError::$variant => $text,)*
                }
            }

            /// Whether the same request may succeed later, perhaps at another broker after a metadata refresh.
            #[must_use]
            pub fn retriable(self) -> bool {
                match self {
                    $(WireError::$variant => wire_errors!(@$retry),)*
                }
            }
        }
    };
    (@retry) => { true };
    (@final) => { false };
}

wire_errors! {
    UnknownServerError -1 UNKNOWN_SERVER_ERROR final "the broker failed in an unforeseen way; its log says how";
    OffsetOutOfRange 1 OFFSET_OUT_OF_RANGE final "the offset is outside the log; ask for its earliest or latest offset";
    CorruptMessage 2 CORRUPT_MESSAGE retry "the record batch failed its checks on the way in; send it again";
    UnknownTopicOrPartition 3 UNKNOWN_TOPIC_OR_PARTITION retry "no such topic or partition; see `ringfence topics list`";
    LeaderNotAvailable 5 LEADER_NOT_AVAILABLE retry "the partition has no leader at the moment; retry";
    NotLeaderOrFollower 6 NOT_LEADER_OR_FOLLOWER retry "this broker does not lead the partition; refresh the metadata";
    RequestTimedOut 7 REQUEST_TIMED_OUT retry "the acknowledgement did not arrive within the request's timeout; retry";
    MessageTooLarge 10 MESSAGE_TOO_LARGE final "the batch exceeds the topic's max.message.bytes; send smaller batches";
    InvalidTopic 17 INVALID_TOPIC final "a topic name has 1 to 249 of the characters a-z A-Z 0-9 . _ - and is not . or ..";
    NotEnoughReplicas 19 NOT_ENOUGH_REPLICAS retry "fewer replicas are in sync than min.insync.replicas; retry";
    NotEnoughReplicasAfterAppend 20 NOT_ENOUGH_REPLICAS_AFTER_APPEND retry "replicas left the in-sync set after the append; retry";
    InvalidRequiredAcks 21 INVALID_REQUIRED_ACKS final "acks must be all, 1 or 0";
    UnsupportedVersion 35 UNSUPPORTED_VERSION final "the broker does not speak this version of the request; Hello tells which";
    TopicAlreadyExists 36 TOPIC_ALREADY_EXISTS final "a topic of this name exists";
    InvalidPartitions 37 INVALID_PARTITIONS final "the number of partitions is out of range, or not above the present one";
    InvalidReplicationFactor 38 INVALID_REPLICATION_FACTOR final "the replication factor is out of range for this cluster";
    InvalidConfig 40 INVALID_CONFIG final "a setting is unknown or its value is out of range";
    NotController 41 NOT_CONTROLLER retry "this broker is not the controller; refresh the metadata";
    InvalidRequest 42 INVALID_REQUEST final "the request is malformed or not allowed on this connection";
    UnsupportedForMessageFormat 43 UNSUPPORTED_FOR_MESSAGE_FORMAT final "only record batches of magic 2 are taken";
    OutOfOrderSequenceNumber 45 OUT_OF_ORDER_SEQUENCE_NUMBER final "the producer's sequence has a gap; start a new producer";
    InvalidProducerEpoch 47 INVALID_PRODUCER_EPOCH final "a newer instance of this producer is at work";
    StorageError 56 KAFKA_STORAGE_ERROR retry "the disk of this replica failed or is fenced; see the broker's log";
    UnknownProducerId 59 UNKNOWN_PRODUCER_ID final "the producer id is not known; start a new producer";
    FencedLeaderEpoch 74 FENCED_LEADER_EPOCH retry "the leader epoch is older than the partition's; refresh the metadata";
    UnknownLeaderEpoch 75 UNKNOWN_LEADER_EPOCH retry "the leader epoch is newer than this broker knows; retry";
    InvalidRecord 87 INVALID_RECORD final "counts, offsets or lengths inside the record batch disagree";
    UnknownTopicId 100 UNKNOWN_TOPIC_ID retry "no topic has this id (deleted, or not known yet); refresh the metadata";
    InconsistentClusterId 104 INCONSISTENT_CLUSTER_ID final "the broker belongs to another cluster; check --bootstrap";
    DiskFull 1000 DISK_FULL retry "the broker's disk is full; free space or lower retention, produce resumes by itself";
    Overloaded 1001 OVERLOADED retry "the shard is over its memory or journal budget; retry";
    DamagedRange 1002 DAMAGED_RANGE final "these offsets are damaged on this replica and are not served";
    ShuttingDown 1003 SHUTTING_DOWN retry "the broker is stopping; reconnect";
    HelloRequired 1004 HELLO_REQUIRED final "the first request of a connection must be Hello";
}

impl WireError {
    /// The number on the wire.
    #[must_use]
    pub fn code(self) -> i16 {
        self as i16
    }
}

impl std::fmt::Display for WireError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.name(), self.message())
    }
}

impl std::error::Error for WireError {}

impl From<FenceReason> for WireError {
    fn from(reason: FenceReason) -> WireError {
        match reason {
            FenceReason::JournalFailed
            | FenceReason::SegmentFailed
            | FenceReason::SyncFailed
            | FenceReason::Damaged
            | FenceReason::FilesMissing => WireError::StorageError,
        }
    }
}

impl From<DiskError> for WireError {
    fn from(error: DiskError) -> WireError {
        match error {
            DiskError::NoSpace => WireError::DiskFull,
            DiskError::TooManyFiles => WireError::Overloaded,
            DiskError::NotFound | DiskError::Exists | DiskError::Denied(_) | DiskError::Io(_) => {
                WireError::StorageError
            }
        }
    }
}

impl From<&BatchError> for WireError {
    fn from(error: &BatchError) -> WireError {
        match error {
            BatchError::Crc { .. } | BatchError::TooShort { .. } => WireError::CorruptMessage,
            BatchError::Magic(_) => WireError::UnsupportedForMessageFormat,
            BatchError::TooLarge { .. } => WireError::MessageTooLarge,
            _ => WireError::InvalidRecord,
        }
    }
}

impl From<&AppendError> for WireError {
    fn from(error: &AppendError) -> WireError {
        match error {
            AppendError::UnknownPartition(_) => WireError::UnknownTopicOrPartition,
            AppendError::Fenced(reason) => (*reason).into(),
            AppendError::InvalidBatch(batch) => batch.into(),
            AppendError::TooLarge { .. } => WireError::MessageTooLarge,
            AppendError::WrongEpoch { asked, current } if asked < current => WireError::FencedLeaderEpoch,
            AppendError::WrongEpoch { .. } => WireError::UnknownLeaderEpoch,
            AppendError::OutOfOrderSequence { .. } => WireError::OutOfOrderSequenceNumber,
            AppendError::InvalidProducerEpoch { .. } => WireError::InvalidProducerEpoch,
            AppendError::NoSpace => WireError::DiskFull,
            AppendError::Busy => WireError::Overloaded,
            AppendError::Place(disk) => (*disk).into(),
        }
    }
}

impl From<&ReadError> for WireError {
    fn from(error: &ReadError) -> WireError {
        match error {
            ReadError::UnknownPartition(_) => WireError::UnknownTopicOrPartition,
            ReadError::OutOfRange { .. } => WireError::OffsetOutOfRange,
            ReadError::Damaged { .. } => WireError::DamagedRange,
            ReadError::Disk(disk) => (*disk).into(),
            ReadError::Busy => WireError::Overloaded,
        }
    }
}

impl From<&CommandError> for WireError {
    fn from(error: &CommandError) -> WireError {
        match error {
            CommandError::UnknownPartition(_) => WireError::UnknownTopicOrPartition,
            CommandError::Fenced(reason) => (*reason).into(),
            CommandError::StaleEpoch { .. } => WireError::FencedLeaderEpoch,
            CommandError::OutOfRange { .. } => WireError::OffsetOutOfRange,
            CommandError::NoSpace => WireError::DiskFull,
            CommandError::Unreadable(read) => read.into(),
            CommandError::Busy => WireError::Overloaded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_engine::types::LeaderEpoch;

    #[test]
    fn codes_are_unique_and_come_back() {
        for error in WireError::ALL {
            assert_eq!(WireError::from_code(error.code()), Some(*error));
        }
        let mut codes: Vec<i16> = WireError::ALL.iter().map(|error| error.code()).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), WireError::ALL.len());
        assert_eq!(WireError::from_code(0), None);
        assert_eq!(WireError::from_code(32_000), None);
    }

    #[test]
    fn an_old_epoch_is_fenced_and_a_future_one_unknown() {
        let error = |asked, current| {
            WireError::from(&AppendError::WrongEpoch {
                asked: LeaderEpoch(asked),
                current: LeaderEpoch(current),
            })
        };
        assert_eq!(error(1, 2), WireError::FencedLeaderEpoch);
        assert_eq!(error(3, 2), WireError::UnknownLeaderEpoch);
        assert!(WireError::from(&AppendError::NoSpace).retriable());
    }
}
