//! All answers.

use super::frame::{Encoded, FLAG_ANSWER, FLAG_REFUSED, Frame, Records, frame_head};
use super::wire::{DecodeError, Reader, Wire, layout};
use super::{
    AckedPartition, Api, ClusterInfo, EpochEnd, FetchAnswer, HelloAnswer, MetadataAnswer, OffsetFound,
    ProduceAnswer, ProducerAssigned, TopicCreated, TopicDescription, TopicListed,
};
use crate::error::WireError;

layout! {
    /// Why a request was refused as a whole.
    pub struct Refusal {
        /// What kind of refusal; `None` only when the other end broke the protocol.
        pub error: Option<WireError>,
        /// What exactly was wrong, and what to do.
        pub message: String,
    }
}

impl Refusal {
    /// A refusal in the words of `error` itself.
    #[must_use]
    pub fn of(error: WireError) -> Refusal {
        Refusal::because(error, error.message())
    }

    /// A refusal with its own words.
    #[must_use]
    pub fn because(error: WireError, message: impl Into<String>) -> Refusal {
        Refusal {
            error: Some(error),
            message: message.into(),
        }
    }
}

/// An answer; `B` is how it holds record bytes. [`Response::Refused`] may answer any request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Response<B> {
    /// The request was refused as a whole.
    Refused(Refusal),
    /// See [`HelloAnswer`].
    Hello(HelloAnswer),
    /// See [`MetadataAnswer`].
    Metadata(MetadataAnswer),
    /// See [`ProduceAnswer`].
    Produce(ProduceAnswer),
    /// See [`FetchAnswer`].
    Fetch(FetchAnswer<B>),
    /// One per partition acknowledged.
    FetchAck(Vec<AckedPartition>),
    /// One per question.
    EpochEnd(Vec<EpochEnd>),
    /// One per question.
    ListOffsets(Vec<OffsetFound>),
    /// See [`ProducerAssigned`].
    InitProducer(ProducerAssigned),
    /// See [`TopicCreated`].
    CreateTopic(TopicCreated),
    /// The topic is gone from the metadata; its files follow.
    DeleteTopic,
    /// The new settings are in force.
    AlterTopic,
    /// Sorted by name.
    ListTopics(Vec<TopicListed>),
    /// See [`TopicDescription`].
    DescribeTopic(TopicDescription),
    /// The new partitions are durable in the metadata.
    AddPartitions,
    /// See [`ClusterInfo`].
    ClusterInfo(ClusterInfo),
}

impl<B: Records> Response<B> {
    /// The frame that answers a request of `api`.
    #[must_use]
    pub fn encode(self, api: Api, correlation: u64) -> Encoded<B> {
        let flags = match &self {
            Response::Refused(_) => FLAG_ANSWER | FLAG_REFUSED,
            _ => FLAG_ANSWER,
        };
        let tail_len = match &self {
            Response::Fetch(answer) => answer
                .partitions
                .iter()
                .flat_map(|read| &read.records)
                .map(|piece| piece.len())
                .sum(),
            _ => 0,
        };
        let head = frame_head(api, flags, correlation, tail_len, |out| self.put(out));
        let tail = match self {
            Response::Fetch(answer) => answer
                .partitions
                .into_iter()
                .flat_map(|read| read.records)
                .collect(),
            _ => Vec::new(),
        };
        Encoded { head, tail }
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Response::Refused(refusal) => refusal.put(out),
            Response::Hello(answer) => answer.put(out),
            Response::Metadata(answer) => answer.put(out),
            Response::Produce(answer) => answer.put(out),
            Response::Fetch(answer) => answer.put(out),
            Response::FetchAck(answer) => answer.put(out),
            Response::EpochEnd(answer) => answer.put(out),
            Response::ListOffsets(answer) => answer.put(out),
            Response::InitProducer(answer) => answer.put(out),
            Response::CreateTopic(answer) => answer.put(out),
            Response::DeleteTopic | Response::AlterTopic | Response::AddPartitions => {}
            Response::ListTopics(answer) => answer.put(out),
            Response::DescribeTopic(answer) => answer.put(out),
            Response::ClusterInfo(answer) => answer.put(out),
        }
    }

    /// Reads the answer to a request of `api` out of a frame.
    pub fn decode(api: Api, frame: &Frame<B>) -> Result<Response<B>, DecodeError> {
        let flags = frame.header.flags;
        if flags & FLAG_ANSWER == 0 {
            return Err(DecodeError::Value {
                what: "answer flag",
                value: flags.into(),
            });
        }
        let refused = flags & FLAG_REFUSED != 0;
        let tail = frame.tail();
        if (refused || api != Api::Fetch) && !tail.is_empty() {
            return Err(DecodeError::Trailing(tail.len()));
        }
        let mut input = Reader::new(frame.head());
        let response = if refused {
            Response::Refused(Wire::take(&mut input)?)
        } else {
            Self::take(api, &mut input, &tail)?
        };
        input.finish()?;
        Ok(response)
    }

    fn take(api: Api, input: &mut Reader<'_>, tail: &B) -> Result<Response<B>, DecodeError> {
        Ok(match api {
            Api::Hello => Response::Hello(Wire::take(input)?),
            Api::Metadata => Response::Metadata(Wire::take(input)?),
            Api::Produce => Response::Produce(Wire::take(input)?),
            Api::Fetch => Response::Fetch(FetchAnswer::take(input, tail)?),
            Api::FetchAck => Response::FetchAck(Wire::take(input)?),
            Api::EpochEnd => Response::EpochEnd(Wire::take(input)?),
            Api::ListOffsets => Response::ListOffsets(Wire::take(input)?),
            Api::InitProducer => Response::InitProducer(Wire::take(input)?),
            Api::CreateTopic => Response::CreateTopic(Wire::take(input)?),
            Api::DeleteTopic => Response::DeleteTopic,
            Api::AlterTopic => Response::AlterTopic,
            Api::ListTopics => Response::ListTopics(Wire::take(input)?),
            Api::DescribeTopic => Response::DescribeTopic(Wire::take(input)?),
            Api::AddPartitions => Response::AddPartitions,
            Api::ClusterInfo => Response::ClusterInfo(Wire::take(input)?),
        })
    }
}
