//! What can go wrong for a client: each message names the cause and the next step.

use std::time::Duration;

use ringfence_engine::batch::BatchError;
use ringfence_engine::types::{Offset, PartitionId};
use thiserror::Error;

use crate::error::WireError;
use crate::native::{DecodeError, FrameError, NodeId, Refusal};

/// An error of the client library.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ClientError {
    /// There is no address to connect to.
    #[error("no bootstrap address is given; name one with --bootstrap HOST:PORT")]
    NoBootstrap,
    /// The address cannot be resolved.
    #[error("cannot resolve {address}: {cause}; give HOST:PORT, for instance 127.0.0.1:9192")]
    Resolve { address: String, cause: String },
    /// Nobody listens, or the network is broken.
    #[error("cannot connect to {address}: {cause}; is a broker running there? `ringfence serve` starts one")]
    Connect { address: String, cause: String },
    /// The connection ended while an answer was awaited.
    #[error("the connection to {address} ended: {cause}")]
    Disconnected { address: String, cause: String },
    /// What came back is not the native protocol.
    #[error("{address} does not speak this native protocol: {cause}; check address, port and versions")]
    Protocol { address: String, cause: String },
    /// The broker refused the request.
    #[error("{}: {message}", error.name())]
    Refused { error: WireError, message: String },
    /// The topic does not exist.
    #[error("topic '{0}' does not exist; `ringfence topics create {0}` makes it")]
    UnknownTopic(String),
    /// The partition does not exist.
    #[error("topic '{topic}' has no partition {partition}; it has {count}, numbered from 0")]
    UnknownPartition {
        topic: String,
        partition: u32,
        count: u32,
    },
    /// Nobody leads the partition at the moment.
    #[error("partition {0} has no leader at the moment; `ringfence cluster` shows why")]
    NoLeader(PartitionId),
    /// Metadata names a broker without an address.
    #[error("broker {0} is not known (down, or just started); `ringfence cluster` lists the live ones")]
    UnknownNode(NodeId),
    /// A record is larger than a batch may be.
    #[error("a record of {size} bytes does not fit into a batch: {cause}")]
    RecordTooLarge { size: usize, cause: BatchError },
    /// Bytes that a broker served are not what they should be.
    #[error("partition {partition}: the batch at offset {offset} is damaged ({cause}); it was not used")]
    Damaged {
        partition: PartitionId,
        offset: Offset,
        cause: String,
    },
    /// Tried again until the deadline.
    #[error("gave up after {} s: {last}", waited.as_secs_f32())]
    GaveUp {
        waited: Duration,
        last: Box<ClientError>,
    },
    /// A batch was not sent because one before it in its partition failed.
    #[error("not sent, to keep the order: an earlier batch of the partition failed ({0})")]
    EarlierFailed(Box<ClientError>),
    /// The producer was dropped while the batch was on its way.
    #[error("the producer was closed before the batch was acknowledged; it may or may not be stored")]
    Closed,
}

impl ClientError {
    /// Whether the same request may succeed later.
    #[must_use]
    pub fn retriable(&self) -> bool {
        match self {
            ClientError::Connect { .. }
            | ClientError::Disconnected { .. }
            | ClientError::NoLeader(_)
            | ClientError::UnknownNode(_) => true,
            // A topic that nobody has heard of is far more often a typing error than a race.
            ClientError::Refused { error, .. } => {
                error.retriable() && *error != WireError::UnknownTopicOrPartition
            }
            _ => false,
        }
    }

    /// The error on the wire, if that is what it was.
    #[must_use]
    pub fn wire(&self) -> Option<WireError> {
        match self {
            ClientError::Refused { error, .. } => Some(*error),
            ClientError::GaveUp { last, .. } | ClientError::EarlierFailed(last) => last.wire(),
            _ => None,
        }
    }

    /// An error of one partition or topic in an answer; `message` may be empty.
    #[must_use]
    pub fn refused(error: WireError, message: &str) -> ClientError {
        let message = if message.is_empty() {
            error.message()
        } else {
            message
        };
        ClientError::Refused {
            error,
            message: message.to_owned(),
        }
    }

    pub(super) fn gave_up(self, waited: Duration) -> ClientError {
        ClientError::GaveUp {
            waited,
            last: Box::new(self),
        }
    }

    pub(super) fn framing(address: &str, error: &FrameError) -> ClientError {
        ClientError::Protocol {
            address: address.to_owned(),
            cause: error.to_string(),
        }
    }

    pub(super) fn layout(address: &str, error: &DecodeError) -> ClientError {
        ClientError::Protocol {
            address: address.to_owned(),
            cause: error.to_string(),
        }
    }
}

impl From<Refusal> for ClientError {
    fn from(refusal: Refusal) -> ClientError {
        let error = refusal.error.unwrap_or(WireError::UnknownServerError);
        ClientError::refused(error, &refusal.message)
    }
}
