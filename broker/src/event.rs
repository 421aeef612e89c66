//! What a shard's state machine takes and leaves: events, mail, work, outbox.
//!
//! Requests reach the machine in one form whatever listener they came from: the home shard (which has the
//! connection) cuts a request into [`Work`] per owning shard, the owner answers with [`WorkDone`]. For the shard's own
//! partitions the same structures pass without a mailbox. Control speaks in [`Order`]s and hears [`News`].

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use ringfence_engine::error::{CommandError, FenceReason};
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::io::{Completion, NetEvent, NetOp, Socket};
use ringfence_engine::store;
use ringfence_engine::types::{LeaderEpoch, PartitionId, ShardId, TopicId};

use crate::metadata::catalog::Topic;
use crate::native::{
    Acks, EpochEnd, EpochQuestion, FetchPartition, FetchedPartition, HelloRequest, OffsetFound,
    OffsetQuestion, PartitionStanding, ProduceBatch, ProducedPartition, Request, Response, ShardStanding,
};

/// Who sends or gets mail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Peer {
    /// Another shard of this process.
    Shard(ShardId),
    /// The control thread.
    Control,
}

/// Everything that can happen to a shard.
#[derive(Debug)]
pub enum Event<'a> {
    /// On the network.
    Net(NetEvent<'a>),
    /// A disk operation ended.
    Disk(Completion),
    /// A message arrived.
    Mail {
        /// Its sender.
        from: Peer,
        /// What it says.
        mail: Mail,
    },
    /// Time passed: deadlines are looked at.
    Tick,
}

/// What the driver must do after a step.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Operations of the store, in the order they were decided. Its events are consumed within the step.
    pub disk: store::Outbox,
    /// Operations on connections, in order.
    pub net: Vec<NetOp>,
    /// Messages, in order per peer.
    pub mail: Vec<(Peer, Mail)>,
}

/// A message between the threads of the process.
#[derive(Debug)]
pub enum Mail {
    /// A connection changes shards.
    Connection(Box<Handover>),
    /// Home to owner: a part of a request.
    Work(Box<Work>),
    /// Home to owner: stop waiting, answer with what is there.
    Hurry(CallRef),
    /// Owner to home: the answer to `Work`.
    Done(Box<WorkDone>),
    /// Control to shard.
    Order(Order),
    /// Shard to control.
    News(News),
}

/// A connection on its way to the shard its Hello named.
#[derive(Debug)]
pub struct Handover {
    /// The descriptor; closed when dropped.
    pub socket: Socket,
    /// The other end.
    pub peer: SocketAddr,
    /// The Hello; answered by the new shard.
    pub hello: HelloRequest,
    /// Its correlation.
    pub correlation: u64,
    /// Bytes received after the Hello.
    pub rest: Vec<u8>,
}

/// A request at its home shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallRef {
    /// The shard with the connection.
    pub home: ShardId,
    /// Its number there.
    pub call: u64,
}

/// The part of a request that concerns one owning shard. The numbers beside the items are their places in the request.
#[derive(Debug)]
pub struct Work {
    /// Whose work it is.
    pub call: CallRef,
    /// Monotonic nanoseconds at which a wait ends.
    pub deadline: u64,
    /// What to do.
    pub kind: WorkKind,
}

/// Kinds of work.
#[derive(Debug)]
pub enum WorkKind {
    /// Append batches.
    Produce {
        acks: Acks,
        batches: Vec<(u32, ProduceBatch<BufSlice>)>,
    },
    /// Read ranges. `min_bytes` counts the bytes of this work's partitions.
    Fetch {
        min_bytes: usize,
        max_bytes: usize,
        parts: Vec<(u32, FetchPartition)>,
    },
    /// Ends of epochs.
    EpochEnd(Vec<(u32, EpochQuestion)>),
    /// Offsets of times.
    ListOffsets(Vec<(u32, OffsetQuestion)>),
}

/// The answer to [`Work`].
#[derive(Debug)]
pub struct WorkDone {
    /// Whose work it was.
    pub call: CallRef,
    /// What came of it.
    pub result: WorkResult,
}

/// Results by kind of work; each item of the work has exactly one.
#[derive(Debug)]
pub enum WorkResult {
    /// Of [`WorkKind::Produce`].
    Produce(Vec<(u32, ProducedPartition)>),
    /// Of [`WorkKind::Fetch`].
    Fetch(Vec<(u32, FetchedPartition<BufSlice>)>),
    /// Of [`WorkKind::EpochEnd`].
    EpochEnd(Vec<(u32, EpochEnd)>),
    /// Of [`WorkKind::ListOffsets`].
    ListOffsets(Vec<(u32, OffsetFound)>),
}

/// From the control thread to a shard.
#[derive(Debug)]
pub enum Order {
    /// Take these topics over into the catalogue; lead the partitions of this shard from `epoch` on, making missing
    /// ones; apply changed settings. Answered by [`News::Ordered`] when every new epoch is durable.
    Topics {
        token: u64,
        epoch: LeaderEpoch,
        topics: Vec<Arc<Topic>>,
    },
    /// Forget the topic and drop this shard's part of its partitions `0..partitions`. Answered by [`News::Ordered`]
    /// when every drop is durable.
    Drop {
        token: u64,
        topic: TopicId,
        partitions: u32,
    },
    /// Producer ids for this shard alone, already durable as given out.
    ProducerIds(Range<i64>),
    /// No producer ids can be given out now; those who wait are refused.
    NoProducerIds,
    /// The answer to [`News::Admin`].
    Answer {
        call: u64,
        response: Box<Response<BufSlice>>,
    },
    /// Tell how shard and partitions stand, with [`News::Report`].
    Report { token: u64 },
    /// Finish what is begun, then stop the store.
    Stop,
}

/// From a shard to the control thread.
#[derive(Debug)]
pub enum News {
    /// A request that control serves.
    Admin {
        call: u64,
        request: Box<Request<BufSlice>>,
    },
    /// An order is done; these partitions failed.
    Ordered {
        token: u64,
        failed: Vec<(PartitionId, CommandError)>,
    },
    /// The shard needs producer ids.
    ProducerIdsWanted,
    /// The answer to [`Order::Report`].
    Report {
        token: u64,
        shard: ShardStanding,
        partitions: Vec<PartitionStanding>,
    },
    /// The shard takes no writes any more.
    Fenced(FenceReason),
}
