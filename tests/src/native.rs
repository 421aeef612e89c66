//! A plain blocking connection to the native port, for tests that send what no client library would.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use ringfence_broker::error::WireError;
use ringfence_broker::native::{
    Acks, Api, ClusterId, CreateTopic, DEFAULT_MAX_FRAME, DeleteTopic, FetchPartition, FetchRequest,
    FetchedPartition, Frame, Header, HelloAnswer, HelloRequest, Isolation, MetadataRequest, OffsetFound,
    OffsetQuestion, ProduceBatch, ProduceRequest, ProducedPartition, Refusal, Request, Response, Role, Scope,
    Setting, TopicInfo,
};
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::types::{Offset, PartitionId, ShardId, TopicId};

use crate::batch;

/// Longest wait for one answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// One connection after its Hello.
#[derive(Debug)]
pub struct Native {
    stream: TcpStream,
    correlation: u64,
    /// What the broker said about itself.
    pub hello: HelloAnswer,
}

/// Where to read.
#[derive(Debug, Clone, Copy)]
pub struct From {
    /// The partition.
    pub partition: PartitionId,
    /// First offset wanted.
    pub offset: u64,
    /// About how many bytes.
    pub max_bytes: u32,
    /// How many bytes are worth an answer.
    pub min_bytes: u32,
    /// How long to wait for them, milliseconds.
    pub max_wait_ms: u32,
}

impl From {
    /// What is there from `offset` on, at once.
    #[must_use]
    pub fn offset(partition: PartitionId, offset: u64) -> From {
        From {
            partition,
            offset,
            max_bytes: 1 << 20,
            min_bytes: 0,
            max_wait_ms: 0,
        }
    }
}

/// Opens a connection without a Hello.
///
/// # Errors
/// When nobody listens.
pub fn open(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Reads one frame.
///
/// # Errors
/// When the connection ends first or the bytes are no frame.
pub fn read_frame(stream: &mut TcpStream) -> io::Result<Frame<BufSlice>> {
    let mut bytes = vec![0; 4];
    stream.read_exact(&mut bytes)?;
    let length = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
    if length > DEFAULT_MAX_FRAME {
        return Err(io::Error::other(format!("a frame of {length} bytes")));
    }
    bytes.resize(4 + length, 0);
    stream.read_exact(&mut bytes[4..])?;
    Frame::open(BufSlice::copy_of(&bytes), DEFAULT_MAX_FRAME).map_err(io::Error::other)
}

/// The Hello of a client that wants `shard`.
#[must_use]
pub fn hello(shard: Option<u16>) -> Request<BufSlice> {
    Request::Hello(HelloRequest {
        role: Role::Client,
        cluster: ClusterId::default(),
        node: None,
        generation: 0,
        shard: shard.map(ShardId),
        software: "tests".into(),
    })
}

impl Native {
    /// Connects and says Hello.
    ///
    /// # Errors
    /// When the broker does not answer it.
    pub fn connect(address: SocketAddr, shard: Option<u16>) -> io::Result<Native> {
        let mut stream = open(address)?;
        stream.write_all(&hello(shard).encode(0).into_vec())?;
        let answer = decode(Api::Hello, &read_frame(&mut stream)?)?;
        let Response::Hello(hello) = answer else {
            return Err(io::Error::other(format!("Hello was answered with {answer:?}")));
        };
        Ok(Native {
            stream,
            correlation: 1,
            hello,
        })
    }

    /// The socket.
    pub fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    /// Sends a request without waiting; its correlation.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn send(&mut self, request: &Request<BufSlice>) -> io::Result<u64> {
        let correlation = self.correlation;
        self.correlation += 1;
        self.stream.write_all(&request.encode(correlation).into_vec())?;
        Ok(correlation)
    }

    /// The next answer, which must be to a request of `api`.
    ///
    /// # Errors
    /// When the connection ends or the answer is malformed.
    pub fn receive(&mut self, api: Api) -> io::Result<(u64, Response<BufSlice>)> {
        let frame = read_frame(&mut self.stream)?;
        let correlation = frame.header.correlation;
        Ok((correlation, decode(api, &frame)?))
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// When the connection ends or the answer is malformed or another request's.
    pub fn call(&mut self, request: &Request<BufSlice>) -> io::Result<Response<BufSlice>> {
        let sent = self.send(request)?;
        let (answered, response) = self.receive(request.api())?;
        if answered != sent {
            return Err(io::Error::other(format!(
                "request {sent} was answered as {answered}"
            )));
        }
        Ok(response)
    }

    /// Creates a topic; its id.
    ///
    /// # Errors
    /// The broker's refusal.
    pub fn create_topic(
        &mut self,
        name: &str,
        partitions: u32,
        settings: &[(&str, &str)],
    ) -> Result<TopicId, Refusal> {
        let setting = |(key, value): &(&str, &str)| Setting {
            key: (*key).into(),
            value: (*value).into(),
        };
        let request = Request::CreateTopic(CreateTopic {
            name: name.into(),
            partitions,
            replication_factor: 1,
            settings: settings.iter().map(setting).collect(),
            validate_only: false,
        });
        match self.call(&request).expect("an answer to CreateTopic") {
            Response::CreateTopic(created) => Ok(created.id),
            Response::Refused(refusal) => Err(refusal),
            other => panic!("CreateTopic was answered with {other:?}"),
        }
    }

    /// Deletes a topic.
    ///
    /// # Errors
    /// The broker's refusal.
    pub fn delete_topic(&mut self, name: &str) -> Result<(), Refusal> {
        let request = Request::DeleteTopic(DeleteTopic {
            name: name.into(),
            id: TopicId::default(),
        });
        match self.call(&request).expect("an answer to DeleteTopic") {
            Response::DeleteTopic => Ok(()),
            Response::Refused(refusal) => Err(refusal),
            other => panic!("DeleteTopic was answered with {other:?}"),
        }
    }

    /// What the broker knows of a topic.
    pub fn topic(&mut self, name: &str) -> TopicInfo {
        let request = Request::Metadata(MetadataRequest {
            scope: Scope::Listed,
            names: vec![name.into()],
            ids: Vec::new(),
        });
        match self.call(&request).expect("an answer to Metadata") {
            Response::Metadata(mut answer) if answer.topics.len() == 1 => answer.topics.remove(0),
            other => panic!("Metadata was answered with {other:?}"),
        }
    }

    /// Appends one batch with `acks=all`.
    ///
    /// # Errors
    /// When the connection ends or the whole request is refused.
    pub fn try_produce(&mut self, partition: PartitionId, records: &[u8]) -> io::Result<ProducedPartition> {
        match self.call(&produce(partition, records, Acks::All))? {
            Response::Produce(mut answer) if answer.partitions.len() == 1 => Ok(answer.partitions.remove(0)),
            other => Err(io::Error::other(format!("Produce was answered with {other:?}"))),
        }
    }

    /// Appends one batch; the offset of its first record, or the error.
    ///
    /// # Errors
    /// The partition's error.
    pub fn produce(&mut self, partition: PartitionId, records: &[u8]) -> Result<u64, WireError> {
        let answer = self
            .try_produce(partition, records)
            .expect("an answer to Produce");
        match (answer.error, answer.base_offset) {
            (None, Some(Offset(base))) => Ok(base),
            (Some(error), _) => Err(error),
            (None, None) => panic!("neither error nor offset: {answer:?}"),
        }
    }

    /// Reads; the partition's part of the answer.
    ///
    /// # Errors
    /// When the connection ends or the whole request is refused.
    pub fn fetch(&mut self, from: From) -> io::Result<FetchedPartition<BufSlice>> {
        match self.call(&fetch(from))? {
            Response::Fetch(mut answer) if answer.partitions.len() == 1 => Ok(answer.partitions.remove(0)),
            other => Err(io::Error::other(format!("Fetch was answered with {other:?}"))),
        }
    }

    /// Reads everything from `offset` to the high watermark; the bytes as served.
    pub fn read_all(&mut self, partition: PartitionId, offset: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut next = offset;
        loop {
            let mut read = self
                .fetch(From::offset(partition, next))
                .expect("an answer to Fetch");
            let mut tries = 0;
            while read.error == Some(WireError::Overloaded) && tries < 1000 {
                // Retriable by contract: too many reads in flight.
                read = self
                    .fetch(From::offset(partition, next))
                    .expect("an answer to Fetch");
                tries += 1;
            }
            assert_eq!(read.error, None, "reading {partition} at {next}");
            let piece: Vec<u8> = read.records.iter().flat_map(|slice| slice.to_vec()).collect();
            let Some(last) = batch::split(&piece).last().map(|batch| batch.to_vec()) else {
                return bytes;
            };
            let base = batch::i64_at(&last, batch::at::BASE_OFFSET);
            next = base as u64 + batch::i32_at(&last, batch::at::LAST_OFFSET_DELTA) as u64 + 1;
            bytes.extend_from_slice(&piece);
        }
    }

    /// The first offset at or after a time (or `TIMESTAMP_EARLIEST`, `TIMESTAMP_LATEST`).
    pub fn offset_at(&mut self, partition: PartitionId, timestamp: i64) -> OffsetFound {
        let question = OffsetQuestion {
            partition,
            current: None,
            timestamp,
        };
        match self
            .call(&Request::ListOffsets(vec![question]))
            .expect("an answer to ListOffsets")
        {
            Response::ListOffsets(mut found) if found.len() == 1 => found.remove(0),
            other => panic!("ListOffsets was answered with {other:?}"),
        }
    }
}

/// A request that appends one batch.
#[must_use]
pub fn produce(partition: PartitionId, records: &[u8], acks: Acks) -> Request<BufSlice> {
    Request::Produce(ProduceRequest {
        acks,
        timeout_ms: 30_000,
        batches: vec![ProduceBatch {
            partition,
            epoch: None,
            records: BufSlice::copy_of(records),
        }],
    })
}

/// A request that reads one partition.
#[must_use]
pub fn fetch(from: From) -> Request<BufSlice> {
    Request::Fetch(FetchRequest {
        max_wait_ms: from.max_wait_ms,
        min_bytes: from.min_bytes,
        max_bytes: from.max_bytes,
        isolation: Isolation::Uncommitted,
        replica: None,
        generation: 0,
        partitions: vec![FetchPartition {
            partition: from.partition,
            epoch: None,
            offset: Offset(from.offset),
            max_bytes: from.max_bytes,
            last_fetched_epoch: None,
            durable_end: None,
        }],
    })
}

fn decode(api: Api, frame: &Frame<BufSlice>) -> io::Result<Response<BufSlice>> {
    let Header { api: number, .. } = frame.header;
    if number != api.number() {
        return Err(io::Error::other(format!(
            "api {number} in answer to {}",
            api.name()
        )));
    }
    Response::decode(api, frame).map_err(io::Error::other)
}
