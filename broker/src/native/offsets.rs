//! EpochEnd, ListOffsets, InitProducer: small questions about positions and identities.

use ringfence_engine::types::{LeaderEpoch, Offset, PartitionId};

use super::wire::layout;
use crate::error::WireError;

/// Asks [`OffsetQuestion`] for the log end that consumers see (the high watermark).
pub const TIMESTAMP_LATEST: i64 = -1;

/// Asks [`OffsetQuestion`] for the log start.
pub const TIMESTAMP_EARLIEST: i64 = -2;

layout! {
    /// Where does an epoch end?
    pub struct EpochQuestion {
        /// The partition.
        pub partition: PartitionId,
        /// The leader epoch the requester knows; `None` accepts any.
        pub current: Option<LeaderEpoch>,
        /// The epoch asked about.
        pub epoch: LeaderEpoch,
    }

    /// Where an epoch ends.
    pub struct EpochEnd {
        /// The partition.
        pub partition: PartitionId,
        /// Why there is no answer.
        pub error: Option<WireError>,
        /// The largest epoch not above the one asked about; `None` when there is none.
        pub epoch: Option<LeaderEpoch>,
        /// Its exclusive end.
        pub end: Option<Offset>,
    }

    /// Which offset belongs to a time?
    pub struct OffsetQuestion {
        /// The partition.
        pub partition: PartitionId,
        /// The leader epoch the requester knows; `None` accepts any.
        pub current: Option<LeaderEpoch>,
        /// Milliseconds since 1970, [`TIMESTAMP_EARLIEST`] or [`TIMESTAMP_LATEST`].
        pub timestamp: i64,
    }

    /// The first offset at or after a time.
    pub struct OffsetFound {
        /// The partition.
        pub partition: PartitionId,
        /// Why there is no answer.
        pub error: Option<WireError>,
        /// Timestamp of the record found; -1 for earliest, latest, and nothing found.
        pub timestamp: i64,
        /// Its offset; `None` when every record is older.
        pub offset: Option<Offset>,
        /// The leader epoch the answer holds for.
        pub epoch: Option<LeaderEpoch>,
    }

    /// An identity for an idempotent producer.
    pub struct ProducerAssigned {
        /// The id; never given out before.
        pub producer_id: i64,
        /// Its epoch, 0 for a new id.
        pub producer_epoch: i16,
    }
}
