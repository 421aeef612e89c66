//! All requests.

use super::frame::{Encoded, Frame, Records, frame_head};
use super::wire::{DecodeError, Reader, Wire};
use super::{
    AddPartitions, AlterTopic, Api, CreateTopic, DeleteTopic, DescribeTopic, EpochQuestion, FetchAck,
    FetchRequest, HelloRequest, MetadataRequest, OffsetQuestion, ProduceRequest,
};

/// A request; `B` is how it holds record bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request<B> {
    /// See [`HelloRequest`].
    Hello(HelloRequest),
    /// See [`MetadataRequest`].
    Metadata(MetadataRequest),
    /// See [`ProduceRequest`].
    Produce(ProduceRequest<B>),
    /// See [`FetchRequest`].
    Fetch(FetchRequest),
    /// See [`FetchAck`].
    FetchAck(FetchAck),
    /// Ends of epochs.
    EpochEnd(Vec<EpochQuestion>),
    /// Offsets of times.
    ListOffsets(Vec<OffsetQuestion>),
    /// A fresh producer id.
    InitProducer,
    /// See [`CreateTopic`].
    CreateTopic(CreateTopic),
    /// See [`DeleteTopic`].
    DeleteTopic(DeleteTopic),
    /// See [`AlterTopic`].
    AlterTopic(AlterTopic),
    /// All topics.
    ListTopics,
    /// See [`DescribeTopic`].
    DescribeTopic(DescribeTopic),
    /// See [`AddPartitions`].
    AddPartitions(AddPartitions),
    /// The whole picture.
    ClusterInfo,
}

impl<B: Records> Request<B> {
    /// Its api.
    #[must_use]
    pub fn api(&self) -> Api {
        match self {
            Request::Hello(_) => Api::Hello,
            Request::Metadata(_) => Api::Metadata,
            Request::Produce(_) => Api::Produce,
            Request::Fetch(_) => Api::Fetch,
            Request::FetchAck(_) => Api::FetchAck,
            Request::EpochEnd(_) => Api::EpochEnd,
            Request::ListOffsets(_) => Api::ListOffsets,
            Request::InitProducer => Api::InitProducer,
            Request::CreateTopic(_) => Api::CreateTopic,
            Request::DeleteTopic(_) => Api::DeleteTopic,
            Request::AlterTopic(_) => Api::AlterTopic,
            Request::ListTopics => Api::ListTopics,
            Request::DescribeTopic(_) => Api::DescribeTopic,
            Request::AddPartitions(_) => Api::AddPartitions,
            Request::ClusterInfo => Api::ClusterInfo,
        }
    }

    /// The frame of this request.
    #[must_use]
    pub fn encode(&self, correlation: u64) -> Encoded<B> {
        let tail: Vec<B> = match self {
            Request::Produce(produce) => produce
                .batches
                .iter()
                .map(|batch| batch.records.clone())
                .collect(),
            _ => Vec::new(),
        };
        let tail_len = tail.iter().map(|records| records.len()).sum();
        let head = frame_head(self.api(), 0, correlation, tail_len, |out| self.put(out));
        Encoded { head, tail }
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Request::Hello(request) => request.put(out),
            Request::Metadata(request) => request.put(out),
            Request::Produce(request) => request.put(out),
            Request::Fetch(request) => request.put(out),
            Request::FetchAck(request) => request.put(out),
            Request::EpochEnd(questions) => questions.put(out),
            Request::ListOffsets(questions) => questions.put(out),
            Request::InitProducer | Request::ListTopics | Request::ClusterInfo => {}
            Request::CreateTopic(request) => request.put(out),
            Request::DeleteTopic(request) => request.put(out),
            Request::AlterTopic(request) => request.put(out),
            Request::DescribeTopic(request) => request.put(out),
            Request::AddPartitions(request) => request.put(out),
        }
    }

    /// Reads the request of `api` (see [`super::Header::api`]) out of a frame.
    pub fn decode(api: Api, frame: &Frame<B>) -> Result<Request<B>, DecodeError> {
        let mut input = Reader::new(frame.head());
        let tail = frame.tail();
        if api != Api::Produce && !tail.is_empty() {
            return Err(DecodeError::Trailing(tail.len()));
        }
        let request = match api {
            Api::Hello => Request::Hello(Wire::take(&mut input)?),
            Api::Metadata => Request::Metadata(Wire::take(&mut input)?),
            Api::Produce => Request::Produce(ProduceRequest::take(&mut input, &tail)?),
            Api::Fetch => Request::Fetch(Wire::take(&mut input)?),
            Api::FetchAck => Request::FetchAck(Wire::take(&mut input)?),
            Api::EpochEnd => Request::EpochEnd(Wire::take(&mut input)?),
            Api::ListOffsets => Request::ListOffsets(Wire::take(&mut input)?),
            Api::InitProducer => Request::InitProducer,
            Api::CreateTopic => Request::CreateTopic(Wire::take(&mut input)?),
            Api::DeleteTopic => Request::DeleteTopic(Wire::take(&mut input)?),
            Api::AlterTopic => Request::AlterTopic(Wire::take(&mut input)?),
            Api::ListTopics => Request::ListTopics,
            Api::DescribeTopic => Request::DescribeTopic(Wire::take(&mut input)?),
            Api::AddPartitions => Request::AddPartitions(Wire::take(&mut input)?),
            Api::ClusterInfo => Request::ClusterInfo,
        };
        input.finish()?;
        Ok(request)
    }
}
