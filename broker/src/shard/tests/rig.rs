//! A whole broker without threads, sockets or clocks: shards on simulated disks, mail and connections in memory.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use ringfence_engine::batch::{BatchBuilder, NewRecord};
use ringfence_engine::config::StoreConfig;
use ringfence_engine::io::buf::{AppendBuf, BufSlice};
use ringfence_engine::io::sim::{SimConfig, SimDisk};
use ringfence_engine::io::{ConnId, NetEvent, NetOp};
use ringfence_engine::store::Store;
use ringfence_engine::types::{LeaderEpoch, Now, Offset, PartitionId, ShardId, Term, TopicId};

use crate::config::{Config, Layer, Limits, TopicConfig};
use crate::event::{Event, Mail, News, Order, Outbox, Peer};
use crate::metadata::catalog::Topic;
use crate::metadata::records::PartitionRecord;
use crate::native::{
    Acks, Api, ClusterId, FetchPartition, FetchRequest, Frame, Header, HelloRequest, Isolation, NodeId,
    ProduceBatch, ProduceRequest, Request, Response, Role,
};
use crate::shard::{NodeInfo, Shard};
use crate::stats::ShardStats;

pub(super) const MS: u64 = 1_000_000;
const STEP: u64 = 50_000;

pub(super) fn limits() -> Limits {
    let flags = Layer::flags(vec![("log.dirs".into(), "unused".into())]);
    Config::from_layers(&[flags]).unwrap().limits
}

/// A client by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Client(usize);

struct Wire {
    /// Where the connection lives now; `None` while it moves or is closed.
    at: Option<(usize, ConnId)>,
    closed: bool,
    /// Bytes the broker sent and the client has not decoded.
    inbox: Vec<u8>,
    /// Apis of requests without an answer, by correlation.
    asked: HashMap<u64, Api>,
    correlation: u64,
    /// A buffer that the shard lent out, and how much of it is to come.
    fill: Option<(AppendBuf, usize)>,
}

struct Seat {
    disk: SimDisk,
    shard: Shard,
    stats: Arc<ShardStats>,
    out: Outbox,
    connections: u32,
}

pub(super) struct Rig {
    seats: Vec<Seat>,
    mail: VecDeque<(Peer, usize, Mail)>,
    pub(super) news: Vec<(usize, News)>,
    wires: Vec<Wire>,
    /// Connections between two shards, by descriptor.
    moving: HashMap<i32, Client>,
    time: u64,
    token: u64,
    topics: HashMap<TopicId, Arc<Topic>>,
}

impl Rig {
    pub(super) fn new(shards: u16) -> Rig {
        Rig::with(shards, limits())
    }

    pub(super) fn with(shards: u16, limits: Limits) -> Rig {
        let seats = (0..shards)
            .map(|shard| seat(ShardId(shard), shards, &limits))
            .collect();
        let mut rig = Rig {
            seats,
            mail: VecDeque::new(),
            news: Vec::new(),
            wires: Vec::new(),
            moving: HashMap::new(),
            time: 0,
            token: 0,
            topics: HashMap::new(),
        };
        // Recovery took different time on each disk.
        rig.time = rig.seats.iter().map(|seat| seat.disk.now()).max().unwrap();
        rig
    }

    pub(super) fn now(&self) -> Now {
        Now {
            mono: self.time,
            wall_ms: 1_000_000 + (self.time / MS) as i64,
        }
    }

    pub(super) fn disk(&mut self, shard: usize) -> &mut SimDisk {
        &mut self.seats[shard].disk
    }

    pub(super) fn stats(&self, shard: usize) -> &ShardStats {
        &self.seats[shard].stats
    }

    pub(super) fn shard(&self, shard: usize) -> &Shard {
        &self.seats[shard].shard
    }

    fn step(&mut self, shard: usize, event: Event<'_>) {
        let now = self.now();
        let seat = &mut self.seats[shard];
        seat.shard.step(now, event, &mut seat.out);
    }

    /// Executes what a shard decided.
    fn flush(&mut self, shard: usize) {
        let seat = &mut self.seats[shard];
        for (op, disk_op) in seat.out.disk.ops.drain(..) {
            seat.disk.submit(op, disk_op);
        }
        assert!(
            seat.out.disk.events.is_empty(),
            "the machine consumes the store's events"
        );
        for (peer, mail) in std::mem::take(&mut seat.out.mail) {
            match (peer, mail) {
                (Peer::Shard(to), mail) => {
                    self.mail
                        .push_back((Peer::Shard(ShardId(shard as u16)), usize::from(to.0), mail));
                }
                (Peer::Control, Mail::News(news)) => self.news.push((shard, news)),
                (Peer::Control, mail) => panic!("control gets news only, not {mail:?}"),
            }
        }
        for op in std::mem::take(&mut self.seats[shard].out.net) {
            self.net(shard, op);
        }
    }

    fn client_at(&self, shard: usize, conn: ConnId) -> Option<Client> {
        self.wires
            .iter()
            .position(|wire| wire.at == Some((shard, conn)))
            .map(Client)
    }

    fn net(&mut self, shard: usize, op: NetOp) {
        match op {
            NetOp::Send { conn, bufs } => {
                let Some(client) = self.client_at(shard, conn) else {
                    return;
                };
                let bytes: usize = bufs.iter().map(|buf| buf.len()).sum();
                let inbox = &mut self.wires[client.0].inbox;
                bufs.iter().for_each(|buf| inbox.extend_from_slice(buf));
                self.step(shard, Event::Net(NetEvent::Sent { conn, bytes }));
            }
            NetOp::Close { conn, .. } => self.lose(shard, conn),
            NetOp::Release { conn } => {
                let Some(client) = self.client_at(shard, conn) else {
                    return;
                };
                let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
                let socket = OwnedFd::from(socket);
                self.moving.insert(socket.as_raw_fd(), client);
                self.wires[client.0].at = None;
                self.step(shard, Event::Net(NetEvent::Released { conn, socket }));
            }
            NetOp::Adopt { socket, tag } => {
                let client = self.moving.remove(&socket.as_raw_fd()).unwrap();
                let conn = self.next_conn(shard);
                self.wires[client.0].at = Some((shard, conn));
                self.step(shard, Event::Net(NetEvent::Adopted { conn, tag }));
            }
            NetOp::Fill { conn, buf, len } => {
                if let Some(client) = self.client_at(shard, conn) {
                    let before = self.wires[client.0].fill.replace((buf, len));
                    assert!(before.is_none(), "one fill at a time");
                }
            }
            NetOp::Pause { .. } | NetOp::Resume { .. } => {}
        }
    }

    fn lose(&mut self, shard: usize, conn: ConnId) {
        if let Some(client) = self.client_at(shard, conn) {
            let wire = &mut self.wires[client.0];
            wire.at = None;
            wire.closed = true;
            self.step(shard, Event::Net(NetEvent::Closed { conn }));
        }
    }

    fn next_conn(&mut self, shard: usize) -> ConnId {
        self.seats[shard].connections += 1;
        ConnId {
            slot: self.seats[shard].connections,
            generation: 1,
        }
    }

    /// Delivers mail and everything that follows from it at this moment.
    fn settle(&mut self) {
        for shard in 0..self.seats.len() {
            self.flush(shard);
        }
        while let Some((from, to, mail)) = self.mail.pop_front() {
            self.step(to, Event::Mail { from, mail });
            self.flush(to);
        }
        for shard in 0..self.seats.len() {
            let now = self.now();
            let seat = &mut self.seats[shard];
            seat.shard.turn_end(now, &mut seat.out);
            self.flush(shard);
        }
        if !self.mail.is_empty() {
            self.settle();
        }
    }

    /// Lets time pass.
    pub(super) fn run(&mut self, nanos: u64) {
        self.settle();
        let end = self.time + nanos;
        while self.time < end {
            self.time = (self.time + STEP).min(end);
            for shard in 0..self.seats.len() {
                while let Some(completion) = self.seats[shard].disk.step(self.time) {
                    self.step(shard, Event::Disk(completion));
                    self.flush(shard);
                }
                if self.seats[shard]
                    .shard
                    .next_wake()
                    .is_some_and(|due| due <= self.time)
                {
                    self.step(shard, Event::Tick);
                }
            }
            self.settle();
        }
    }

    /// An order to every shard, done; what failed.
    pub(super) fn order(&mut self, make: impl Fn(u64) -> Order) -> usize {
        self.token += 1;
        let token = self.token;
        for shard in 0..self.seats.len() {
            let mail = Mail::Order(make(token));
            self.mail.push_back((Peer::Control, shard, mail));
        }
        let mut done = 0;
        let mut failures = 0;
        for _ in 0..200 {
            self.run(MS);
            self.news.retain(|(_, news)| match news {
                News::Ordered { token: found, failed } if *found == token => {
                    done += 1;
                    failures += failed.len();
                    false
                }
                _ => true,
            });
            if done == self.seats.len() {
                return failures;
            }
        }
        panic!("{done} of {} shards did the order", self.seats.len());
    }

    /// A topic, served from epoch 1.
    pub(super) fn topic(&mut self, id: u8, partitions: u32, settings: &[(&str, &str)]) -> TopicId {
        let topic = topic(id, partitions, settings);
        let id = topic.id;
        self.topics.insert(id, Arc::clone(&topic));
        let failed = self.order(|token| Order::Topics {
            token,
            epoch: LeaderEpoch(1),
            topics: vec![Arc::clone(&topic)],
        });
        assert_eq!(failed, 0);
        id
    }

    /// A connection to a shard that has not said Hello.
    pub(super) fn dial(&mut self, shard: usize) -> Client {
        let conn = self.next_conn(shard);
        self.wires.push(Wire {
            at: Some((shard, conn)),
            closed: false,
            inbox: Vec::new(),
            fill: None,
            asked: HashMap::new(),
            correlation: 0,
        });
        let peer = "127.0.0.1:9".parse().unwrap();
        self.step(
            shard,
            Event::Net(NetEvent::Accepted {
                conn,
                listener: 0,
                peer,
            }),
        );
        self.settle();
        Client(self.wires.len() - 1)
    }

    /// A connection past its Hello.
    pub(super) fn connect(&mut self, shard: usize) -> Client {
        let client = self.dial(shard);
        self.send(client, &hello(None));
        assert!(matches!(self.answers(client)[..], [Response::Hello(_)]));
        client
    }

    pub(super) fn is_closed(&self, client: Client) -> bool {
        self.wires[client.0].closed
    }

    /// The client goes away.
    pub(super) fn hang_up(&mut self, client: Client) {
        if let Some((shard, conn)) = self.wires[client.0].at {
            self.lose(shard, conn);
        }
        self.settle();
    }

    /// The bytes of a request, noted as asked.
    pub(super) fn bytes(&mut self, client: Client, request: &Request<BufSlice>) -> Vec<u8> {
        let wire = &mut self.wires[client.0];
        wire.correlation += 1;
        wire.asked.insert(wire.correlation, request.api());
        request.encode(wire.correlation).into_vec()
    }

    pub(super) fn send(&mut self, client: Client, request: &Request<BufSlice>) {
        let bytes = self.bytes(client, request);
        self.send_bytes(client, &bytes);
    }

    pub(super) fn send_bytes(&mut self, client: Client, mut data: &[u8]) {
        if let Some((shard, conn)) = self.wires[client.0].at {
            if let Some((mut buf, left)) = self.wires[client.0].fill.take() {
                let (ours, rest) = data.split_at(data.len().min(left));
                buf.append(ours);
                data = rest;
                if left > ours.len() {
                    self.wires[client.0].fill = Some((buf, left - ours.len()));
                } else {
                    self.step(shard, Event::Net(NetEvent::Filled { conn, buf }));
                }
            }
            if !data.is_empty() {
                self.step(shard, Event::Net(NetEvent::Received { conn, data }));
            }
        }
        self.settle();
    }

    /// Answers that arrived since the last look, in order.
    pub(super) fn answers(&mut self, client: Client) -> Vec<Response<BufSlice>> {
        let wire = &mut self.wires[client.0];
        let mut answers = Vec::new();
        while let Ok(Some(header)) = Header::peek(&wire.inbox, 1 << 30) {
            let bytes: Vec<u8> = wire.inbox.drain(..header.frame_len()).collect();
            let frame = Frame::open(BufSlice::copy_of(&bytes), 1 << 30).unwrap();
            let api = wire.asked.remove(&header.correlation).unwrap_or(Api::Hello);
            answers.push(Response::decode(api, &frame).unwrap());
        }
        answers
    }

    /// The one answer that arrived.
    pub(super) fn answer(&mut self, client: Client) -> Response<BufSlice> {
        let mut answers = self.answers(client);
        assert_eq!(answers.len(), 1, "{answers:?}");
        answers.remove(0)
    }

    /// Asks and waits for the one answer.
    pub(super) fn ask(&mut self, client: Client, request: &Request<BufSlice>) -> Response<BufSlice> {
        self.send(client, request);
        self.run(20 * MS);
        self.answer(client)
    }
}

fn seat(id: ShardId, shards: u16, limits: &Limits) -> Seat {
    let mut disk = SimDisk::new(u64::from(id.0) + 1, SimConfig::default());
    let config = StoreConfig {
        term: Term(1),
        journal_file_bytes: 1 << 20,
        journal_files: 8,
        frame_bytes: 64 << 10,
        checkpoint_bytes: 1 << 20,
        ..StoreConfig::new(1, id)
    };
    let (store, _) = Store::recover(&mut disk, config, Now::default()).unwrap();
    let stats = Arc::new(ShardStats::default());
    let node = NodeInfo {
        cluster: ClusterId([3; 16]),
        node: NodeId(1),
        generation: 1,
        host: "broker".into(),
        port: 9192,
        shards,
    };
    Seat {
        disk,
        shard: Shard::new(id, node, limits.clone(), store, Arc::clone(&stats)),
        stats,
        out: Outbox::default(),
        connections: 0,
    }
}

pub(super) fn topic(id: u8, partitions: u32, settings: &[(&str, &str)]) -> Arc<Topic> {
    let config = TopicConfig::new(settings.iter().copied()).unwrap();
    let defaults = crate::config::TopicSettings::default();
    Arc::new(Topic {
        id: TopicId([id; 16]),
        name: format!("topic-{id}"),
        replication_factor: 1,
        settings: config.over(&defaults),
        config,
        partitions: vec![PartitionRecord::single(1, LeaderEpoch(1)); partitions as usize],
    })
}

pub(super) fn hello(shard: Option<u16>) -> Request<BufSlice> {
    Request::Hello(HelloRequest {
        role: Role::Client,
        cluster: ClusterId([0; 16]),
        node: None,
        generation: 0,
        shard: shard.map(ShardId),
        software: "test".into(),
    })
}

pub(super) fn at(topic: TopicId, index: u32) -> PartitionId {
    PartitionId { topic, index }
}

/// A batch with one record of `len` bytes.
pub(super) fn batch(len: usize) -> BufSlice {
    batch_of(len, None)
}

pub(super) fn batch_of(len: usize, producer: Option<(i64, i32)>) -> BufSlice {
    let mut builder = BatchBuilder::new();
    if let Some((id, sequence)) = producer {
        builder.producer(id, 0, sequence);
    }
    let value = vec![7; len];
    let record = NewRecord {
        value: Some(&value),
        timestamp: 5,
        ..NewRecord::default()
    };
    builder.push(record).unwrap();
    BufSlice::copy_of(&builder.finish().unwrap())
}

pub(super) fn produce(acks: Acks, batches: Vec<(PartitionId, BufSlice)>) -> Request<BufSlice> {
    let batches = batches
        .into_iter()
        .map(|(partition, records)| ProduceBatch {
            partition,
            epoch: None,
            records,
        })
        .collect();
    Request::Produce(ProduceRequest {
        acks,
        timeout_ms: 1_000,
        batches,
    })
}

pub(super) fn fetch(wait_ms: u32, min_bytes: u32, ranges: &[(PartitionId, u64)]) -> Request<BufSlice> {
    let partitions = ranges
        .iter()
        .map(|(partition, offset)| FetchPartition {
            partition: *partition,
            epoch: None,
            offset: Offset(*offset),
            max_bytes: 1 << 20,
            last_fetched_epoch: None,
            durable_end: None,
        })
        .collect();
    Request::Fetch(FetchRequest {
        max_wait_ms: wait_ms,
        min_bytes,
        max_bytes: 4 << 20,
        isolation: Isolation::Uncommitted,
        replica: None,
        generation: 0,
        partitions,
    })
}

/// Error, base offset of each part of a produce answer.
pub(super) fn produced(response: Response<BufSlice>) -> Vec<(Option<crate::error::WireError>, Option<u64>)> {
    let Response::Produce(answer) = response else {
        panic!("{response:?}")
    };
    let parts = answer.partitions.into_iter();
    parts
        .map(|part| (part.error, part.base_offset.map(|offset| offset.0)))
        .collect()
}

/// Error, bytes, high watermark of each part of a fetch answer.
pub(super) fn fetched(
    response: Response<BufSlice>,
) -> Vec<(Option<crate::error::WireError>, usize, Option<u64>)> {
    let Response::Fetch(answer) = response else {
        panic!("{response:?}")
    };
    let parts = answer.partitions.into_iter();
    parts
        .map(|part| {
            let bytes = part.records.iter().map(|piece| piece.len()).sum();
            (part.error, bytes, part.high_watermark.map(|offset| offset.0))
        })
        .collect()
}

impl Rig {
    /// An order to every shard, not waited for.
    pub(super) fn post(&mut self, order: Order) {
        let copies: Vec<Order> = match order {
            Order::Topics { token, epoch, topics } => self
                .seats
                .iter()
                .map(|_| Order::Topics {
                    token,
                    epoch,
                    topics: topics.clone(),
                })
                .collect(),
            Order::Stop => self.seats.iter().map(|_| Order::Stop).collect(),
            single => vec![single],
        };
        for (shard, order) in copies.into_iter().enumerate() {
            self.mail.push_back((Peer::Control, shard, Mail::Order(order)));
        }
    }

    /// A message to shard 0.
    pub(super) fn post_mail(&mut self, mail: Mail) {
        self.mail.push_back((Peer::Shard(ShardId(0)), 0, mail));
    }
}
