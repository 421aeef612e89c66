//! Requests at their home shard: cut into work per owner, put together again, answered in order.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;

use ringfence_engine::io::ConnId;
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::types::{Now, PartitionId, ShardId};

use super::table::Table;
use super::{NodeInfo, Shard};
use crate::error::WireError;
use crate::event::{CallRef, Mail, News, Outbox, Peer, Work, WorkDone, WorkKind, WorkResult};
use crate::listener::{Incoming, Seq};
use crate::metadata::catalog::Topic;
use crate::native::{
    Acks, Api, ApiVersions, BrokerInfo, EpochEnd, EpochQuestion, FLAG_ANSWER, FetchAnswer, FetchRequest,
    FetchedPartition, Frame, FrameError, Header, HelloAnswer, HelloRequest, MetadataAnswer, MetadataRequest,
    NodeId, OffsetFound, OffsetQuestion, PartitionInfo, ProduceAnswer, ProduceRequest, ProducedPartition,
    ProducerAssigned, Refusal, Request, Response, Role, Scope, Setting, TopicInfo,
};

/// Name and version of this software, as Hello tells.
const SOFTWARE: &str = concat!("ringfence ", env!("CARGO_PKG_VERSION"));

/// Requests of one shard that control may have at once.
const MAX_ADMIN_CALLS: usize = 256;

/// Requests of one shard that wait for producer ids at once.
const MAX_PRODUCER_CALLS: usize = 1024;

/// Parts of requests that one other shard may have at once.
const MAX_FORWARDED: usize = 4096;

/// Bytes an item of a request without records counts for when it is forwarded.
const ITEM_BYTES: usize = 64;

/// A request in work.
#[derive(Debug)]
struct Call {
    conn: ConnId,
    seq: Seq,
    api: Api,
    correlation: u64,
    started: u64,
    /// Owners whose answer is missing, and what was forwarded to them.
    owners: Vec<(ShardId, usize)>,
    kind: CallKind,
}

/// What is known of the answer so far; one place per item of the request.
#[derive(Debug)]
enum CallKind {
    Produce {
        acks: Acks,
        parts: Vec<Option<ProducedPartition>>,
    },
    Fetch {
        min_bytes: usize,
        got: usize,
        parts: Vec<Option<FetchedPartition<BufSlice>>>,
    },
    EpochEnd(Vec<Option<EpochEnd>>),
    ListOffsets(Vec<Option<OffsetFound>>),
    Admin,
    Producer,
}

/// What one other shard has of ours.
#[derive(Debug, Clone, Copy, Default)]
struct Forwarded {
    bytes: usize,
    parts: usize,
}

/// Calls of this shard's connections.
#[derive(Debug)]
pub(super) struct Home {
    calls: Table<Call>,
    /// Fetch calls by connection, to be hurried when it goes.
    fetches: BTreeSet<(ConnId, u64)>,
    /// By owner.
    forwarded: Vec<Forwarded>,
    admin_calls: usize,
    /// Calls that wait for producer ids.
    producers: VecDeque<u64>,
}

impl Home {
    pub(super) fn new(shards: u16) -> Home {
        Home {
            calls: Table::default(),
            fetches: BTreeSet::new(),
            forwarded: vec![Forwarded::default(); usize::from(shards)],
            admin_calls: 0,
            producers: VecDeque::new(),
        }
    }

    /// Whether no request is in work.
    pub(super) fn is_idle(&self) -> bool {
        self.calls.len() == 0
    }

    /// Ends the waits of a connection's fetches: it is gone.
    pub(super) fn hurry_connection(&mut self, me: ShardId, conn: ConnId, out: &mut Outbox) {
        let calls: Vec<u64> = self
            .fetches
            .range((conn, 0)..=(conn, u64::MAX))
            .map(|(_, call)| *call)
            .collect();
        for call in calls {
            self.hurry(me, call, out);
        }
    }

    /// Ends the waits of all fetches.
    pub(super) fn hurry_all(&mut self, me: ShardId, out: &mut Outbox) {
        let calls: Vec<u64> = self.fetches.iter().map(|(_, call)| *call).collect();
        for call in calls {
            self.hurry(me, call, out);
        }
    }

    /// Asks the owners of a fetch to answer. For this shard's own part the mail goes to itself, so that no answer is
    /// delivered while the caller still works on the call.
    fn hurry(&mut self, me: ShardId, call: u64, out: &mut Outbox) {
        let reference = CallRef { home: me, call };
        if let Some(call) = self.calls.get_mut(call) {
            for (owner, _) in &call.owners {
                out.mail.push((Peer::Shard(*owner), Mail::Hurry(reference)));
            }
        }
    }
}

impl Shard {
    /// Takes a whole frame.
    pub(super) fn on_frame(&mut self, now: Now, incoming: Incoming, out: &mut Outbox) {
        let Incoming {
            conn,
            seq,
            frame,
            greeted,
        } = incoming;
        let frame = match Frame::open(frame, self.limits.max_request_bytes) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::debug!(%conn, %error, "closing a connection: its bytes are no frame");
                self.stats.malformed.add(1);
                self.listener.close(conn, true, &mut out.net);
                return;
            }
        };
        let header = frame.header;
        let asker = Asker { conn, seq, header };
        let request = match open_request(&frame) {
            Ok(request) => request,
            Err(refusal) => {
                self.refuse(now, &asker, refusal, out);
                if !greeted {
                    self.listener.close(conn, false, &mut out.net);
                }
                return;
            }
        };
        self.stats.request(request.api());
        match (request, greeted) {
            (Request::Hello(hello), false) => self.on_hello(now, &asker, hello, out),
            (_, false) => {
                self.refuse(now, &asker, Refusal::of(WireError::HelloRequired), out);
                self.listener.close(conn, false, &mut out.net);
            }
            (request, true) if self.is_stopping() => {
                self.refuse(now, &asker, Refusal::of(WireError::ShuttingDown), out);
                drop(request);
            }
            (request, true) => self.on_request(now, &asker, request, out),
        }
    }

    fn on_request(&mut self, now: Now, asker: &Asker, request: Request<BufSlice>, out: &mut Outbox) {
        match request {
            Request::Hello(_) => {
                let refusal = Refusal::because(
                    WireError::InvalidRequest,
                    "this connection has said Hello already",
                );
                self.refuse(now, asker, refusal, out);
            }
            Request::Metadata(request) => {
                let answer = self.metadata(&request);
                self.reply(now, asker, Response::Metadata(answer), out);
            }
            Request::Produce(request) => self.produce(now, asker, request, out),
            Request::Fetch(request) => self.fetch(now, asker, request, out),
            Request::EpochEnd(questions) => self.epoch_ends(now, asker, questions, out),
            Request::ListOffsets(questions) => self.list_offsets(now, asker, questions, out),
            Request::FetchAck(_) => {
                let refusal = Refusal::because(WireError::InvalidRequest, "this cluster has a single node");
                self.refuse(now, asker, refusal, out);
            }
            Request::InitProducer => self.init_producer(now, asker, out),
            request @ (Request::CreateTopic(_)
            | Request::DeleteTopic(_)
            | Request::AlterTopic(_)
            | Request::ListTopics
            | Request::DescribeTopic(_)
            | Request::AddPartitions(_)
            | Request::ClusterInfo) => self.ask_control(now, asker, request, out),
        }
    }

    fn reply(&mut self, now: Now, asker: &Asker, response: Response<BufSlice>, out: &mut Outbox) {
        let answer = response.encode(asker.api(), asker.header.correlation);
        self.listener
            .answer(now, asker.conn, asker.seq, answer, &mut out.net);
    }

    fn refuse(&mut self, now: Now, asker: &Asker, refusal: Refusal, out: &mut Outbox) {
        if let Some(error) = refusal.error {
            self.stats.error(error);
        }
        self.reply(now, asker, Response::Refused(refusal), out);
    }

    fn on_hello(&mut self, now: Now, asker: &Asker, hello: HelloRequest, out: &mut Outbox) {
        let wanted = hello.shard.unwrap_or(self.id);
        let refusal = if hello.cluster.0 != [0; 16] && hello.cluster != self.node.cluster {
            Some(Refusal::of(WireError::InconsistentClusterId))
        } else if hello.role == Role::Broker {
            Some(Refusal::because(
                WireError::InvalidRequest,
                "this cluster has a single node",
            ))
        } else if wanted.0 >= self.node.shards {
            let message = format!(
                "shard {wanted} does not exist; this broker has {}",
                self.node.shards
            );
            Some(Refusal::because(WireError::InvalidRequest, message))
        } else {
            None
        };
        if let Some(refusal) = refusal {
            self.refuse(now, asker, refusal, out);
            self.listener.close(asker.conn, false, &mut out.net);
        } else if wanted == self.id {
            self.listener.greeted(asker.conn);
            let answer = self.hello_answer();
            self.reply(now, asker, answer, out);
        } else {
            self.hand_over(asker.conn, wanted, hello, asker.header.correlation, out);
        }
    }

    pub(super) fn hello_answer(&self) -> Response<BufSlice> {
        Response::Hello(HelloAnswer {
            cluster: self.node.cluster,
            node: self.node.node,
            generation: self.node.generation,
            shard: self.id,
            shards: self.node.shards,
            max_frame: u32::try_from(self.limits.max_request_bytes).unwrap_or(u32::MAX),
            max_in_flight: u16::try_from(self.limits.max_in_flight).unwrap_or(u16::MAX),
            apis: ApiVersions::ours(),
            software: SOFTWARE.to_owned(),
        })
    }

    fn metadata(&self, request: &MetadataRequest) -> MetadataAnswer {
        let topics = match request.scope {
            Scope::All => {
                let mut topics: Vec<&Topic> = self.topics.by_id.values().map(|topic| &**topic).collect();
                topics.sort_unstable_by(|a, b| a.name.cmp(&b.name));
                topics
                    .into_iter()
                    .map(|topic| topic_info(topic, self.node.shards))
                    .collect()
            }
            Scope::Listed => {
                let named = request.names.iter().map(|name| match self.topics.named(name) {
                    Some(topic) => topic_info(topic, self.node.shards),
                    None => TopicInfo {
                        name: name.clone(),
                        ..unknown(WireError::UnknownTopicOrPartition)
                    },
                });
                let identified = request.ids.iter().map(|id| match self.topics.by_id.get(id) {
                    Some(topic) => topic_info(topic, self.node.shards),
                    None => TopicInfo {
                        id: *id,
                        ..unknown(WireError::UnknownTopicId)
                    },
                });
                named.chain(identified).collect()
            }
        };
        MetadataAnswer {
            cluster: self.node.cluster,
            controller: Some(self.node.node),
            brokers: vec![broker_info(&self.node)],
            topics,
        }
    }

    fn produce(&mut self, now: Now, asker: &Asker, request: ProduceRequest<BufSlice>, out: &mut Outbox) {
        let ProduceRequest {
            acks,
            timeout_ms,
            batches,
        } = request;
        let parts = vec![None; batches.len()];
        let call = self.open_call(now, asker, CallKind::Produce { acks, parts });
        let deadline = now.after_ms(u64::from(timeout_ms).min(self.limits.max_request_timeout_ms));
        let shares = self.shares(batches, |batch| (batch.partition, batch.records.len()));
        let make = |batches| WorkKind::Produce { acks, batches };
        self.dispatch(now, call, deadline, shares, make, out);
    }

    fn fetch(&mut self, now: Now, asker: &Asker, request: FetchRequest, out: &mut Outbox) {
        if request.replica.is_some() {
            let refusal = Refusal::because(WireError::InvalidRequest, "this cluster has a single node");
            self.refuse(now, asker, refusal, out);
            return;
        }
        // What is free now is shared with others: one fetch takes a quarter at most.
        let room = (self.listener.free_bytes() / 4).max(1);
        let max_bytes = (request.max_bytes as usize)
            .min(self.limits.max_fetch_bytes)
            .min(room);
        let min_bytes = (request.min_bytes as usize).min(max_bytes);
        let parts = vec![None; request.partitions.len()];
        let kind = CallKind::Fetch {
            min_bytes,
            got: 0,
            parts,
        };
        let call = self.open_call(now, asker, kind);
        self.home.fetches.insert((asker.conn, call));
        let deadline = now.after_ms(u64::from(request.max_wait_ms).min(self.limits.max_fetch_wait_ms));
        let shares = self.shares(request.partitions, |part| (part.partition, ITEM_BYTES));
        let owners = shares.len().max(1);
        let make = |parts| WorkKind::Fetch {
            min_bytes,
            max_bytes: (max_bytes / owners).max(1),
            parts,
        };
        self.dispatch(now, call, deadline, shares, make, out);
    }

    fn epoch_ends(&mut self, now: Now, asker: &Asker, questions: Vec<EpochQuestion>, out: &mut Outbox) {
        let call = self.open_call(now, asker, CallKind::EpochEnd(vec![None; questions.len()]));
        let shares = self.shares(questions, |question| (question.partition, ITEM_BYTES));
        self.dispatch(now, call, u64::MAX, shares, WorkKind::EpochEnd, out);
    }

    fn list_offsets(&mut self, now: Now, asker: &Asker, questions: Vec<OffsetQuestion>, out: &mut Outbox) {
        let call = self.open_call(now, asker, CallKind::ListOffsets(vec![None; questions.len()]));
        let shares = self.shares(questions, |question| (question.partition, ITEM_BYTES));
        self.dispatch(now, call, u64::MAX, shares, WorkKind::ListOffsets, out);
    }

    fn open_call(&mut self, now: Now, asker: &Asker, kind: CallKind) -> u64 {
        self.home.calls.insert(Call {
            conn: asker.conn,
            seq: asker.seq,
            api: asker.api(),
            correlation: asker.header.correlation,
            started: now.mono,
            owners: Vec::new(),
            kind,
        })
    }

    /// Sorts the items of a request by owner, each with its place; and the bytes they count for.
    fn shares<T>(&self, items: Vec<T>, weigh: impl Fn(&T) -> (PartitionId, usize)) -> Shares<T> {
        let mut shares: Shares<T> = HashMap::new();
        for (index, item) in (0u32..).zip(items) {
            let (partition, bytes) = weigh(&item);
            let (total, list) = shares.entry(partition.shard(self.node.shards)).or_default();
            *total += bytes;
            list.push((index, partition, item));
        }
        shares
    }

    /// Gives each owner its share; answers at once for owners that have too much of ours already.
    fn dispatch<T>(
        &mut self,
        now: Now,
        call: u64,
        deadline: u64,
        shares: Shares<T>,
        make: impl Fn(Vec<(u32, T)>) -> WorkKind,
        out: &mut Outbox,
    ) {
        let reference = CallRef { home: self.id, call };
        let mut own = None;
        for (owner, (bytes, items)) in shares {
            let forwarded = &mut self.home.forwarded[usize::from(owner.0)];
            let remote = owner != self.id;
            let full = forwarded.bytes + bytes > self.limits.max_forward_bytes && forwarded.bytes > 0;
            let Some(state) = self.home.calls.get_mut(call) else {
                return;
            };
            if remote && (full || forwarded.parts >= MAX_FORWARDED) {
                items
                    .iter()
                    .for_each(|(index, partition, _)| state.overloaded(*index, *partition));
                continue;
            }
            let work = Work {
                call: reference,
                deadline,
                kind: make(items.into_iter().map(|(index, _, item)| (index, item)).collect()),
            };
            if remote {
                forwarded.bytes += bytes;
                forwarded.parts += 1;
                state.owners.push((owner, bytes));
                self.stats.forwarded.add(1);
                out.mail.push((Peer::Shard(owner), Mail::Work(Box::new(work))));
            } else {
                state.owners.push((owner, 0));
                own = Some(work);
            }
        }
        match own {
            Some(work) => self.begin(now, work, out),
            None => self.settle_call(now, call, out),
        }
    }

    /// Takes an owner's answer.
    pub(super) fn deliver(&mut self, now: Now, done: WorkDone, out: &mut Outbox) {
        let key = done.call.call;
        let owner = done.result.first_partition().map(|id| id.shard(self.node.shards));
        let Some(call) = self.home.calls.get_mut(key) else {
            return;
        };
        if let Some(at) = call.owners.iter().position(|(shard, _)| Some(*shard) == owner) {
            let (shard, bytes) = call.owners.swap_remove(at);
            if shard != self.id {
                let forwarded = &mut self.home.forwarded[usize::from(shard.0)];
                forwarded.bytes -= bytes;
                forwarded.parts -= 1;
            }
        }
        call.take(done.result);
        if call.owners.is_empty() {
            self.settle_call(now, key, out);
        } else if call.has_enough() {
            self.home.hurry(self.id, key, out);
        }
    }

    /// Answers a call when no owner's answer is missing.
    fn settle_call(&mut self, now: Now, key: u64, out: &mut Outbox) {
        if self
            .home
            .calls
            .get_mut(key)
            .is_none_or(|call| !call.owners.is_empty())
        {
            return;
        }
        let Some(call) = self.home.calls.remove(key) else {
            return;
        };
        self.home.fetches.remove(&(call.conn, key));
        if let CallKind::Produce {
            acks: Acks::None,
            parts,
        } = &call.kind
        {
            let refused = parts.iter().flatten().find_map(|part| part.error);
            self.settle_silent(now, &call, refused, out);
            return;
        }
        if matches!(call.kind, CallKind::Produce { .. }) {
            self.stats
                .produce_latency
                .record(now.mono.saturating_sub(call.started));
        }
        let (conn, seq, api, correlation) = (call.conn, call.seq, call.api, call.correlation);
        let response = call.into_response();
        for error in errors(&response) {
            self.stats.error(error);
        }
        let answer = response.encode(api, correlation);
        self.listener.answer(now, conn, seq, answer, &mut out.net);
    }

    /// A produce without acks: no answer; a refused batch closes the connection, which is all its sender can notice.
    fn settle_silent(&mut self, now: Now, call: &Call, refused: Option<WireError>, out: &mut Outbox) {
        self.listener.skip(now, call.conn, call.seq, &mut out.net);
        if let Some(error) = refused {
            self.stats.error(error);
            self.listener.close(call.conn, false, &mut out.net);
        }
    }

    fn ask_control(&mut self, now: Now, asker: &Asker, request: Request<BufSlice>, out: &mut Outbox) {
        if self.home.admin_calls >= MAX_ADMIN_CALLS {
            self.refuse(now, asker, Refusal::of(WireError::Overloaded), out);
            return;
        }
        self.home.admin_calls += 1;
        let call = self.open_call(now, asker, CallKind::Admin);
        let news = News::Admin {
            call,
            request: Box::new(request),
        };
        out.mail.push((Peer::Control, Mail::News(news)));
    }

    pub(super) fn on_admin_answer(
        &mut self,
        now: Now,
        key: u64,
        response: Response<BufSlice>,
        out: &mut Outbox,
    ) {
        let Some(call) = self.home.calls.remove(key) else {
            return;
        };
        self.home.admin_calls -= 1;
        if let Response::Refused(Refusal {
            error: Some(error), ..
        }) = &response
        {
            self.stats.error(*error);
        }
        let answer = response.encode(call.api, call.correlation);
        self.listener
            .answer(now, call.conn, call.seq, answer, &mut out.net);
    }

    fn init_producer(&mut self, now: Now, asker: &Asker, out: &mut Outbox) {
        if self.home.producers.len() >= MAX_PRODUCER_CALLS {
            self.refuse(now, asker, Refusal::of(WireError::Overloaded), out);
            return;
        }
        let call = self.open_call(now, asker, CallKind::Producer);
        self.home.producers.push_back(call);
        if self.producer_ids.is_empty() && self.home.producers.len() == 1 {
            out.mail
                .push((Peer::Control, Mail::News(News::ProducerIdsWanted)));
        }
        self.assign_producers(now, out);
    }

    pub(super) fn on_producer_ids(&mut self, now: Now, ids: Range<i64>, out: &mut Outbox) {
        self.producer_ids = ids;
        self.assign_producers(now, out);
        if !self.home.producers.is_empty() {
            out.mail
                .push((Peer::Control, Mail::News(News::ProducerIdsWanted)));
        }
    }

    fn assign_producers(&mut self, now: Now, out: &mut Outbox) {
        while !self.home.producers.is_empty() {
            let Some(producer_id) = self.producer_ids.next() else {
                return;
            };
            let response = Response::InitProducer(ProducerAssigned {
                producer_id,
                producer_epoch: 0,
            });
            self.answer_producer(now, response, out);
        }
    }

    pub(super) fn refuse_producers(&mut self, now: Now, out: &mut Outbox) {
        while !self.home.producers.is_empty() {
            self.stats.error(WireError::StorageError);
            self.answer_producer(now, Response::Refused(Refusal::of(WireError::StorageError)), out);
        }
    }

    fn answer_producer(&mut self, now: Now, response: Response<BufSlice>, out: &mut Outbox) {
        let call = self.home.producers.pop_front();
        if let Some(call) = call.and_then(|key| self.home.calls.remove(key)) {
            let answer = response.encode(call.api, call.correlation);
            self.listener
                .answer(now, call.conn, call.seq, answer, &mut out.net);
        }
    }
}

/// Items of a request by owner: bytes they count for, and each item with its place and partition.
type Shares<T> = HashMap<ShardId, (usize, Vec<(u32, PartitionId, T)>)>;

/// Who asked: connection, place in its order, header of the frame.
#[derive(Debug, Clone, Copy)]
struct Asker {
    conn: ConnId,
    seq: Seq,
    header: Header,
}

impl Asker {
    /// The api to answer under; a number that is not known is answered as a Hello, found by its correlation.
    fn api(&self) -> Api {
        Api::from_number(self.header.api).unwrap_or(Api::Hello)
    }
}

fn open_request(frame: &Frame<BufSlice>) -> Result<Request<BufSlice>, Refusal> {
    if frame.header.flags & FLAG_ANSWER != 0 {
        return Err(Refusal::because(
            WireError::InvalidRequest,
            "an answer where a request belongs",
        ));
    }
    let api = frame
        .header
        .api()
        .map_err(|error: FrameError| Refusal::because(WireError::UnsupportedVersion, error.to_string()))?;
    Request::decode(api, frame)
        .map_err(|error| Refusal::because(WireError::InvalidRequest, error.to_string()))
}

impl Call {
    /// The owner of an item has too much of ours: the item is answered with a retriable error.
    fn overloaded(&mut self, index: u32, partition: PartitionId) {
        let error = WireError::Overloaded;
        let at = index as usize;
        match &mut self.kind {
            CallKind::Produce { parts, .. } => {
                parts[at] = Some(ProducedPartition {
                    partition,
                    error: Some(error),
                    base_offset: None,
                    log_append_time: -1,
                    log_start: None,
                    message: String::new(),
                });
            }
            CallKind::Fetch { parts, .. } => parts[at] = Some(FetchedPartition::failed(partition, error)),
            CallKind::EpochEnd(parts) => {
                parts[at] = Some(EpochEnd {
                    partition,
                    error: Some(error),
                    epoch: None,
                    end: None,
                });
            }
            CallKind::ListOffsets(parts) => {
                parts[at] = Some(OffsetFound {
                    partition,
                    error: Some(error),
                    timestamp: -1,
                    offset: None,
                    epoch: None,
                });
            }
            CallKind::Admin | CallKind::Producer => {}
        }
    }

    fn take(&mut self, result: WorkResult) {
        match (&mut self.kind, result) {
            (CallKind::Produce { parts, .. }, WorkResult::Produce(results)) => place(parts, results),
            (CallKind::Fetch { parts, got, .. }, WorkResult::Fetch(results)) => {
                let bytes = results.iter().flat_map(|(_, part)| &part.records);
                *got += bytes.map(|piece| piece.len()).sum::<usize>();
                place(parts, results);
            }
            (CallKind::EpochEnd(parts), WorkResult::EpochEnd(results)) => place(parts, results),
            (CallKind::ListOffsets(parts), WorkResult::ListOffsets(results)) => place(parts, results),
            (kind, result) => tracing::error!(?kind, ?result, "an answer of another kind than its request"),
        }
    }

    /// Whether a fetch can be answered although some owners still wait: enough bytes, or an error to tell.
    fn has_enough(&self) -> bool {
        match &self.kind {
            CallKind::Fetch {
                min_bytes,
                got,
                parts,
            } => got >= min_bytes || parts.iter().flatten().any(|part| part.error.is_some()),
            _ => false,
        }
    }

    fn into_response(self) -> Response<BufSlice> {
        match self.kind {
            CallKind::Produce { parts, .. } => Response::Produce(ProduceAnswer {
                partitions: parts.into_iter().flatten().collect(),
            }),
            CallKind::Fetch { parts, .. } => Response::Fetch(FetchAnswer {
                partitions: parts.into_iter().flatten().collect(),
            }),
            CallKind::EpochEnd(parts) => Response::EpochEnd(parts.into_iter().flatten().collect()),
            CallKind::ListOffsets(parts) => Response::ListOffsets(parts.into_iter().flatten().collect()),
            CallKind::Admin | CallKind::Producer => {
                Response::Refused(Refusal::of(WireError::UnknownServerError))
            }
        }
    }
}

fn place<T>(parts: &mut [Option<T>], results: Vec<(u32, T)>) {
    for (index, result) in results {
        if let Some(place) = parts.get_mut(index as usize) {
            *place = Some(result);
        }
    }
}

impl WorkResult {
    /// Some partition of the work; all of them have the same owner.
    fn first_partition(&self) -> Option<PartitionId> {
        match self {
            WorkResult::Produce(parts) => parts.first().map(|(_, part)| part.partition),
            WorkResult::Fetch(parts) => parts.first().map(|(_, part)| part.partition),
            WorkResult::EpochEnd(parts) => parts.first().map(|(_, part)| part.partition),
            WorkResult::ListOffsets(parts) => parts.first().map(|(_, part)| part.partition),
        }
    }
}

/// Errors of single items, for the counters.
fn errors(response: &Response<BufSlice>) -> Vec<WireError> {
    match response {
        Response::Produce(answer) => answer.partitions.iter().filter_map(|part| part.error).collect(),
        Response::Fetch(answer) => answer.partitions.iter().filter_map(|part| part.error).collect(),
        Response::EpochEnd(parts) => parts.iter().filter_map(|part| part.error).collect(),
        Response::ListOffsets(parts) => parts.iter().filter_map(|part| part.error).collect(),
        Response::Refused(refusal) => refusal.error.into_iter().collect(),
        _ => Vec::new(),
    }
}

/// This node, as clients see it.
pub(crate) fn broker_info(node: &NodeInfo) -> BrokerInfo {
    BrokerInfo {
        node: node.node,
        generation: node.generation,
        host: node.host.clone(),
        port: node.port,
        shards: node.shards,
    }
}

/// A topic's settings of its own, as the wire has them.
pub(crate) fn own_settings(topic: &Topic) -> Vec<Setting> {
    let setting = |(key, value): (&str, &str)| Setting {
        key: key.to_owned(),
        value: value.to_owned(),
    };
    topic.config.overrides().map(setting).collect()
}

/// A topic's partitions, as the wire has them.
pub(crate) fn partition_infos(topic: &Topic, shards: u16) -> Vec<PartitionInfo> {
    let nodes = |ids: &[u32]| ids.iter().map(|id| NodeId(*id)).collect();
    (0u32..)
        .zip(&topic.partitions)
        .map(|(index, state)| PartitionInfo {
            error: None,
            index,
            leader: state.leader.map(NodeId),
            leader_epoch: ringfence_engine::types::LeaderEpoch(state.leader_epoch),
            partition_epoch: state.partition_epoch,
            shard: PartitionId {
                topic: topic.id,
                index,
            }
            .shard(shards),
            replicas: nodes(&state.replicas),
            isr: nodes(&state.isr),
        })
        .collect()
}

fn topic_info(topic: &Topic, shards: u16) -> TopicInfo {
    TopicInfo {
        error: None,
        name: topic.name.clone(),
        id: topic.id,
        settings: own_settings(topic),
        partitions: partition_infos(topic, shards),
    }
}

fn unknown(error: WireError) -> TopicInfo {
    TopicInfo {
        error: Some(error),
        name: String::new(),
        id: ringfence_engine::types::TopicId::default(),
        settings: Vec::new(),
        partitions: Vec::new(),
    }
}
