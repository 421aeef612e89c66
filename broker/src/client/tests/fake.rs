//! A broker of one process thread per connection, with a log in memory and a script of faults.

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use ringfence_engine::batch;
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::types::{LeaderEpoch, Offset, PartitionId, ShardId, TopicId};

use crate::error::WireError;
use crate::native::*;

pub(super) const TOPIC: TopicId = TopicId(*b"topic-identity-1");
pub(super) const SHARDS: u16 = 2;
const MAX: usize = 16 << 20;

/// What happens to the next Produce instead of the usual.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// Nothing.
    None,
    /// Not stored; this error is answered.
    Refuse(WireError),
    /// Stored; this error is answered all the same.
    StoreAndRefuse(WireError),
    /// Not stored; the connection is closed.
    Close,
    /// Stored; the connection is closed before the answer.
    StoreAndClose,
}

/// The state that survives a restart.
#[derive(Default)]
pub(super) struct Model {
    /// Per partition: the batches, stamped.
    pub(super) logs: HashMap<u32, Vec<Vec<u8>>>,
    pub(super) faults: VecDeque<Fault>,
    /// Per partition and producer.
    producers: HashMap<(u32, i64), Sequences>,
    next_producer: i64,
    pub(super) partitions: u32,
    /// Answers fetches with a flipped bit.
    pub(super) rot: bool,
    pub(super) connections: u32,
}

/// What a broker remembers of a producer.
#[derive(Default)]
struct Sequences {
    next: i32,
    /// The last five: sequence and base offset.
    last: VecDeque<(i32, u64)>,
}

impl Model {
    fn end(&self, partition: u32) -> u64 {
        let last = self.logs.get(&partition).and_then(|log| log.last());
        last.map_or(0, |bytes| batch::validate(bytes).unwrap().next_offset().0)
    }

    /// Appends a batch as a broker does: duplicates are recognised, gaps refused.
    fn append(&mut self, partition: u32, bytes: &[u8]) -> Result<u64, WireError> {
        let mut header = batch::validate(bytes).map_err(|error| WireError::from(&error))?;
        let base = self.end(partition);
        if header.has_producer() {
            let state = self.producers.entry((partition, header.producer_id)).or_default();
            let sequence = header.base_sequence;
            if let Some((_, old)) = state.last.iter().find(|(known, _)| *known == sequence) {
                return Ok(*old);
            }
            if sequence != state.next {
                return Err(WireError::OutOfOrderSequenceNumber);
            }
            state.next = header.last_sequence() + 1;
            state.last.push_back((sequence, base));
            if state.last.len() > 5 {
                state.last.pop_front();
            }
        }
        let mut bytes = bytes.to_vec();
        batch::stamp(&mut bytes, &mut header, Offset(base), LeaderEpoch(1), None);
        self.logs.entry(partition).or_default().push(bytes);
        Ok(base)
    }

    /// Values of all records of a partition, in order.
    pub(super) fn values(&self, partition: u32) -> Vec<String> {
        let batches = self.logs.get(&partition).into_iter().flatten();
        batches
            .flat_map(|bytes| batch::records(bytes).unwrap())
            .map(|record| String::from_utf8(record.unwrap().value.unwrap().to_vec()).unwrap())
            .collect()
    }
}

/// A running broker; killed when dropped.
pub(super) struct FakeBroker {
    pub(super) address: SocketAddr,
    pub(super) model: Arc<Mutex<Model>>,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    stopped: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

impl FakeBroker {
    pub(super) fn start(partitions: u32) -> FakeBroker {
        let model = Model {
            partitions,
            ..Model::default()
        };
        FakeBroker::listen("127.0.0.1:0".parse().unwrap(), Arc::new(Mutex::new(model)))
    }

    /// Starts on an address with the state of an earlier life.
    pub(super) fn listen(address: SocketAddr, model: Arc<Mutex<Model>>) -> FakeBroker {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            stopped: AtomicBool::new(false),
            open: Mutex::default(),
        });
        let accepting = {
            let (shared, model) = (Arc::clone(&shared), Arc::clone(&model));
            std::thread::spawn(move || accept(&listener, address, &shared, &model))
        };
        FakeBroker {
            address,
            model,
            shared,
            accepting: Some(accepting),
        }
    }

    /// Closes every connection and the port, as a killed process does.
    pub(super) fn kill(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        // Wakes the accepting thread; it may be gone already.
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            accepting.join().unwrap();
        }
    }
}

impl Drop for FakeBroker {
    fn drop(&mut self) {
        self.kill();
    }
}

fn accept(listener: &TcpListener, address: SocketAddr, shared: &Arc<Shared>, model: &Arc<Mutex<Model>>) {
    let mut serving = Vec::new();
    for stream in listener.incoming() {
        let stream = stream.unwrap();
        if shared.stopped.load(Ordering::SeqCst) {
            break;
        }
        shared.open.lock().unwrap().push(stream.try_clone().unwrap());
        model.lock().unwrap().connections += 1;
        let model = Arc::clone(model);
        serving.push(std::thread::spawn(move || serve(stream, address, &model)));
    }
    for stream in shared.open.lock().unwrap().drain(..) {
        // Closed by the client already, perhaps.
        let _ = stream.shutdown(Shutdown::Both);
    }
    for thread in serving {
        thread.join().unwrap();
    }
}

fn serve(mut stream: TcpStream, address: SocketAddr, model: &Mutex<Model>) {
    while let Some(bytes) = read_frame(&mut stream) {
        let frame = Frame::open(BufSlice::copy_of(&bytes), MAX).unwrap();
        let api = frame.header.api().unwrap();
        let request = Request::decode(api, &frame).unwrap();
        let Some(answer) = answer(request, address, &mut model.lock().unwrap()) else {
            break;
        };
        let bytes = answer.encode(api, frame.header.correlation).into_vec();
        if stream.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
}

fn read_frame(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut bytes = vec![0; HEADER];
    stream.read_exact(&mut bytes).ok()?;
    let header = Header::peek(&bytes, MAX).unwrap().unwrap();
    bytes.resize(header.frame_len(), 0);
    stream.read_exact(&mut bytes[HEADER..]).ok()?;
    Some(bytes)
}

/// The answer, or `None` to close the connection.
fn answer(request: Request<BufSlice>, address: SocketAddr, model: &mut Model) -> Option<Response<BufSlice>> {
    Some(match request {
        Request::Hello(hello) => Response::Hello(HelloAnswer {
            shard: hello.shard.unwrap_or_default(),
            shards: SHARDS,
            ..HelloAnswer::nobody()
        }),
        Request::Metadata(request) => Response::Metadata(metadata(&request, address, model)),
        Request::InitProducer => {
            model.next_producer += 1;
            Response::InitProducer(ProducerAssigned {
                producer_id: model.next_producer,
                producer_epoch: 0,
            })
        }
        Request::Produce(produce) => Response::Produce(ProduceAnswer {
            partitions: vec![store(&produce.batches[0], model)?],
        }),
        Request::Fetch(fetch) => Response::Fetch(FetchAnswer {
            partitions: fetch.partitions.iter().map(|range| read(range, model)).collect(),
        }),
        Request::ListOffsets(questions) => {
            let found = |question: &OffsetQuestion| OffsetFound {
                partition: question.partition,
                error: None,
                timestamp: -1,
                offset: Some(match question.timestamp {
                    TIMESTAMP_EARLIEST => Offset(0),
                    _ => Offset(model.end(question.partition.index)),
                }),
                epoch: None,
            };
            Response::ListOffsets(questions.iter().map(found).collect())
        }
        _ => Response::Refused(Refusal::of(WireError::UnsupportedVersion)),
    })
}

fn metadata(request: &MetadataRequest, address: SocketAddr, model: &Model) -> MetadataAnswer {
    let partition = |index| PartitionInfo {
        error: None,
        index,
        leader: Some(NodeId(0)),
        leader_epoch: LeaderEpoch(1),
        partition_epoch: 0,
        shard: ShardId((index % u32::from(SHARDS)) as u16),
        replicas: vec![NodeId(0)],
        isr: vec![NodeId(0)],
    };
    let topic = |name: &String| {
        let known = name == "events";
        TopicInfo {
            error: (!known).then_some(WireError::UnknownTopicOrPartition),
            name: name.clone(),
            id: if known { TOPIC } else { TopicId::default() },
            settings: Vec::new(),
            partitions: (0..model.partitions).filter(|_| known).map(partition).collect(),
        }
    };
    MetadataAnswer {
        cluster: ClusterId::default(),
        controller: Some(NodeId(0)),
        brokers: vec![BrokerInfo {
            node: NodeId(0),
            generation: 1,
            host: address.ip().to_string(),
            port: address.port(),
            shards: SHARDS,
        }],
        topics: request.names.iter().map(topic).collect(),
    }
}

fn store(batch: &ProduceBatch<BufSlice>, model: &mut Model) -> Option<ProducedPartition> {
    let index = batch.partition.index;
    let result = match model.faults.pop_front().unwrap_or(Fault::None) {
        Fault::None => model.append(index, &batch.records),
        Fault::Refuse(error) => Err(error),
        Fault::StoreAndRefuse(error) => model.append(index, &batch.records).and(Err(error)),
        Fault::Close => return None,
        Fault::StoreAndClose => {
            // Stored or not, nobody is told.
            let _ = model.append(index, &batch.records);
            return None;
        }
    };
    Some(ProducedPartition {
        partition: batch.partition,
        error: result.err(),
        base_offset: result.ok().map(Offset),
        log_append_time: -1,
        log_start: Some(Offset(0)),
        message: String::new(),
    })
}

fn read(range: &FetchPartition, model: &Model) -> FetchedPartition<BufSlice> {
    let PartitionId { index, .. } = range.partition;
    let end = model.end(index);
    if range.offset.0 > end {
        return FetchedPartition::failed(range.partition, WireError::OffsetOutOfRange);
    }
    let log = model.logs.get(&index).into_iter().flatten();
    let wanted = log.filter(|bytes| batch::validate(bytes).unwrap().next_offset() > range.offset);
    let mut bytes: Vec<u8> = wanted.take(2).flatten().copied().collect();
    if model.rot && !bytes.is_empty() {
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
    }
    let mut read = FetchedPartition::failed(range.partition, WireError::UnknownServerError);
    read.error = None;
    read.high_watermark = Some(Offset(end));
    read.records = vec![BufSlice::copy_of(&bytes)];
    read
}
