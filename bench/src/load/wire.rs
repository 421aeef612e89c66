//! One connection of the load generator: a non-blocking socket, frames on their way out, answers on their way in.
//!
//! Batches are built once and shared; only the small head of each request is made per send, so that the generator's
//! core carries as much as the broker's. The client library is for programs; this is for saturating a broker.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use ringfence_broker::error::WireError;
use ringfence_broker::native::{
    Acks, Api, ClusterId, DEFAULT_MAX_FRAME, Encoded, Frame, Header, HelloRequest, ProduceBatch,
    ProduceRequest, Request, Response, Role,
};
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::types::{PartitionId, ShardId};
use rustix::event::{PollFd, PollFlags};

/// Milliseconds after which the broker answers a batch that is still not acknowledged.
const TIMEOUT_MS: u32 = 60_000;

/// A batch sent and not answered yet.
#[derive(Debug, Clone, Copy)]
pub struct Pending {
    /// Correlation of its request.
    pub correlation: u64,
    /// Where it goes: index into the load's targets.
    pub target: usize,
    /// The moment its latency counts from.
    pub since: Instant,
}

/// What became of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Answer {
    /// The batch.
    pub pending: Pending,
    /// Why it was refused.
    pub error: Option<WireError>,
}

/// A connection to one shard.
#[derive(Debug)]
pub struct Wire {
    stream: TcpStream,
    acks: Acks,
    correlation: u64,
    out: VecDeque<Encoded<BufSlice>>,
    /// Bytes of the first frame in `out` that are sent.
    sent: usize,
    input: Vec<u8>,
    /// In the order of sending, which is the order of answers.
    pending: VecDeque<Pending>,
}

impl Wire {
    /// Connects, asks for `shard`, and says Hello.
    ///
    /// # Errors
    /// When the broker does not answer the Hello.
    pub fn connect(address: SocketAddr, shard: ShardId, acks: Acks) -> io::Result<Wire> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let hello: Request<BufSlice> = Request::Hello(HelloRequest {
            role: Role::Client,
            cluster: ClusterId::default(),
            node: None,
            generation: 0,
            shard: Some(shard),
            software: "ringfence-bench".into(),
        });
        stream.write_all(&hello.encode(0).into_vec())?;
        let mut bytes = vec![0; 4];
        stream.read_exact(&mut bytes)?;
        let length = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        bytes.resize(4 + length.min(DEFAULT_MAX_FRAME), 0);
        stream.read_exact(&mut bytes[4..])?;
        let frame = Frame::open(&bytes[..], DEFAULT_MAX_FRAME).map_err(io::Error::other)?;
        match Response::decode(Api::Hello, &frame).map_err(io::Error::other)? {
            Response::Hello(answer) if answer.shard == shard => {}
            other => return Err(io::Error::other(format!("Hello was answered with {other:?}"))),
        }
        stream.set_nonblocking(true)?;
        Ok(Wire {
            stream,
            acks,
            correlation: 1,
            out: VecDeque::new(),
            sent: 0,
            input: Vec::new(),
            pending: VecDeque::new(),
        })
    }

    /// Batches without an answer.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// The socket, and what is waited for on it.
    pub fn interest(&self) -> PollFd<'_> {
        let flags = match self.out.is_empty() {
            true => PollFlags::IN,
            false => PollFlags::IN | PollFlags::OUT,
        };
        PollFd::new(&self.stream, flags)
    }

    /// Frames not handed to the kernel yet.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.out.len()
    }

    /// Whether the oldest batch waits longer than `limit`.
    #[must_use]
    pub fn stalled(&self, now: Instant, limit: Duration) -> bool {
        self.pending
            .front()
            .is_some_and(|oldest| now > oldest.since + limit)
    }

    /// Queues a batch for `partition`, which is number `target` of the load's targets.
    pub fn push(&mut self, target: usize, partition: PartitionId, records: &BufSlice, since: Instant) {
        let request = Request::Produce(ProduceRequest {
            acks: self.acks,
            timeout_ms: TIMEOUT_MS,
            batches: vec![ProduceBatch {
                partition,
                epoch: None,
                records: records.clone(),
            }],
        });
        self.out.push_back(request.encode(self.correlation));
        if self.acks != Acks::None {
            self.pending.push_back(Pending {
                correlation: self.correlation,
                target,
                since,
            });
        }
        self.correlation += 1;
    }

    /// Hands as much to the kernel as it takes.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn flush(&mut self) -> io::Result<()> {
        while !self.out.is_empty() {
            let mut slices = Vec::with_capacity(16);
            let mut skip = self.sent;
            for part in self.out.iter().take(8).flat_map(parts) {
                let skipped = skip.min(part.len());
                skip -= skipped;
                if skipped < part.len() {
                    slices.push(IoSlice::new(&part[skipped..]));
                }
            }
            match self.stream.write_vectored(&slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.advance(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn advance(&mut self, count: usize) {
        self.sent += count;
        while let Some(first) = self.out.front() {
            let length = first.frame_len();
            if self.sent < length {
                return;
            }
            self.sent -= length;
            self.out.pop_front();
        }
    }

    /// Takes in what the kernel has; appends the answers found to `answers`.
    ///
    /// # Errors
    /// When the connection is gone or the broker answers something else.
    pub fn poll(&mut self, scratch: &mut [u8], answers: &mut Vec<Answer>) -> io::Result<()> {
        match self.stream.read(scratch) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.input.extend_from_slice(&scratch[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error),
        }
        let mut start = 0;
        while let Some(length) = next_frame(&self.input[start..])? {
            answers.push(self.answer(start, length)?);
            start += length;
        }
        self.input.drain(..start);
        Ok(())
    }

    /// The answer in the frame at `start` of the input, matched with the oldest batch in flight.
    fn answer(&mut self, start: usize, length: usize) -> io::Result<Answer> {
        let bytes = &self.input[start..start + length];
        let frame = Frame::open(bytes, DEFAULT_MAX_FRAME).map_err(io::Error::other)?;
        let pending = self
            .pending
            .pop_front()
            .ok_or_else(|| io::Error::other("an answer too many"))?;
        if frame.header.correlation != pending.correlation {
            return Err(io::Error::other("an answer out of order"));
        }
        let error = match Response::decode(Api::Produce, &frame).map_err(io::Error::other)? {
            Response::Produce(answer) if answer.partitions.len() == 1 => answer.partitions[0].error,
            Response::Refused(refusal) => refusal.error,
            other => return Err(io::Error::other(format!("Produce was answered with {other:?}"))),
        };
        Ok(Answer { pending, error })
    }
}

fn parts(frame: &Encoded<BufSlice>) -> impl Iterator<Item = &[u8]> {
    let tail = frame.tail.iter().map(|records| &records[..]);
    std::iter::once(&frame.head[..]).chain(tail)
}

/// Length of the whole frame at the beginning of `bytes`, when all of it is there.
fn next_frame(bytes: &[u8]) -> io::Result<Option<usize>> {
    let header = Header::peek(bytes, DEFAULT_MAX_FRAME).map_err(io::Error::other)?;
    Ok(header
        .map(|header| header.frame_len())
        .filter(|length| *length <= bytes.len()))
}
