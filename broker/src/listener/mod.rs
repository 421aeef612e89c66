//! Connections of a shard: framing, limits, order of answers.
//!
//! Bytes arrive in any chunks and leave as whole frames; answers leave in the order of their requests whatever the
//! order they were ready in. The machine knows frames, not requests.
//!
//! Limits. Memory for a frame is reserved in full before its first byte is kept, within a budget per connection and
//! per shard; where there is none, the connection is not read from until there is. A reserved frame must arrive
//! within a deadline that grows with its length, so that no one holds a reservation by dripping bytes. Memory itself
//! grows with the bytes that came; a frame that misses much is filled in place by the driver ([`NetOp::Fill`]). Every path that ends a connection gives back what it held.

mod assembler;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use ringfence_engine::io::buf::{AppendBuf, BufSlice};
use ringfence_engine::io::{ConnId, NetOp};
use ringfence_engine::types::Now;

use crate::config::Limits;
use crate::native::{Encoded, FrameError, HELLO_MAX_FRAME};
use crate::stats::ShardStats;
use assembler::{Assembler, Step};

/// Slowest honest sender of a frame: beyond the base time, a frame has one second per this many bytes.
const SLOWEST_BYTES_PER_SECOND: u64 = 1 << 20;

/// Part of the shard's budget (1/4) that frames above [`LARGE_FRAME`] leave alone, so that a few large frames never
/// keep all small ones out.
const LARGE_FRAME: usize = 1 << 20;

/// Place of a request in the order of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seq(pub u64);

/// Where a connection stands. Legal predecessors: Greeting and Open begin; Open follows Greeting; Leaving follows
/// Greeting; Closing follows any. Set only by [`Conn::enter`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No Hello yet; its deadline.
    Greeting { deadline: u64 },
    /// Requests are taken.
    Open,
    /// On its way to another shard.
    Leaving,
    /// No request is taken any more; answers already there are sent.
    Closing,
}

/// An answer on its way out.
#[derive(Debug)]
enum Slot {
    /// Not ready; the request's reservation.
    Waiting { reserved: usize },
    /// Ready, blocked by an earlier one.
    Ready(Vec<BufSlice>),
    /// There will be none (acks=0).
    Silent,
}

#[derive(Debug)]
struct Conn {
    peer: SocketAddr,
    stage: Stage,
    assembler: Assembler,
    /// Whole frames not handed out yet.
    frames: VecDeque<BufSlice>,
    /// Answers from `first` on, in order.
    slots: VecDeque<Slot>,
    first: u64,
    /// Requests handed out and not answered, and frames not handed out.
    in_flight: usize,
    /// Bytes reserved for requests, held by answers, and in the backlog.
    held: usize,
    paused: bool,
    starved: bool,
    /// Frames wait because more answers are unsent than a connection may hold.
    deaf: bool,
    last_activity: u64,
    /// Deadline of the frame being received.
    frame_deadline: Option<u64>,
    /// The moment in the timer set.
    armed: u64,
}

impl Conn {
    fn enter(&mut self, stage: Stage) {
        let legal = matches!(
            (self.stage, stage),
            (Stage::Greeting { .. }, Stage::Open | Stage::Leaving) | (_, Stage::Closing)
        );
        assert!(legal, "connection may not go from {:?} to {stage:?}", self.stage);
        self.stage = stage;
    }

    fn deadline(&self, limits: &Limits) -> u64 {
        let idle = self
            .last_activity
            .saturating_add(limits.idle_ms.saturating_mul(1_000_000));
        match self.stage {
            Stage::Greeting { deadline } => deadline,
            _ => self.frame_deadline.unwrap_or(idle),
        }
    }
}

/// A whole frame and its place in the order of answers.
#[derive(Debug)]
pub struct Incoming {
    /// Its connection.
    pub conn: ConnId,
    /// Its place.
    pub seq: Seq,
    /// Its bytes, from the length field on.
    pub frame: BufSlice,
    /// Whether Hello was taken on this connection.
    pub greeted: bool,
}

/// A connection that left: what goes to its new shard.
#[derive(Debug)]
pub struct Left {
    /// The other end.
    pub peer: SocketAddr,
    /// Bytes received and not taken as frames.
    pub rest: Vec<u8>,
}

/// The connections of one shard.
#[derive(Debug)]
pub struct Listener {
    limits: Limits,
    max_connections: usize,
    conns: HashMap<ConnId, Conn>,
    /// Connections with whole frames to hand out.
    runnable: VecDeque<ConnId>,
    /// Connections whose frame may be worth filling in place.
    large: Vec<ConnId>,
    /// Connections waiting for the shard's budget.
    starved: VecDeque<ConnId>,
    timers: BTreeSet<(u64, ConnId)>,
    held: usize,
    accepting: bool,
    stats: Arc<ShardStats>,
}

impl Listener {
    /// No connections yet. `shards` share `limits.max_connections`.
    #[must_use]
    pub fn new(limits: Limits, shards: u16, stats: Arc<ShardStats>) -> Listener {
        let max_connections = limits.max_connections.div_ceil(usize::from(shards.max(1)));
        Listener {
            limits,
            max_connections,
            conns: HashMap::new(),
            runnable: VecDeque::new(),
            large: Vec::new(),
            starved: VecDeque::new(),
            timers: BTreeSet::new(),
            held: 0,
            accepting: true,
            stats,
        }
    }

    /// Number of connections.
    #[must_use]
    pub fn len(&self) -> usize {
        self.conns.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    /// Bytes of the shard's budget still free.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.limits.max_shard_bytes.saturating_sub(self.held)
    }

    /// Whether any answer is owed or not sent yet.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.conns
            .values()
            .all(|conn| conn.slots.is_empty() && conn.held == 0)
    }

    /// The other end of a connection.
    #[must_use]
    pub fn peer(&self, conn: ConnId) -> Option<SocketAddr> {
        self.conns.get(&conn).map(|conn| conn.peer)
    }

    /// The next deadline, in monotonic nanoseconds.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.timers.first().map(|(deadline, _)| *deadline)
    }

    /// Takes a new connection from the network.
    pub fn accepted(&mut self, now: Now, id: ConnId, peer: SocketAddr, net: &mut Vec<NetOp>) {
        let deadline = now.after_ms(self.limits.handshake_ms);
        self.insert(now, id, peer, Stage::Greeting { deadline }, net);
    }

    /// Takes a connection over from another shard, its Hello done, and returns the place of the Hello's answer;
    /// `None` when it was closed because of the limit. `rest` must be fed with [`Listener::received`] afterwards.
    pub fn adopted(&mut self, now: Now, id: ConnId, peer: SocketAddr, net: &mut Vec<NetOp>) -> Option<Seq> {
        self.insert(now, id, peer, Stage::Open, net);
        let conn = self.conns.get_mut(&id).filter(|conn| conn.stage == Stage::Open)?;
        conn.in_flight += 1;
        conn.slots.push_back(Slot::Waiting { reserved: 0 });
        self.stats.requests_in_flight.add(1);
        Some(Seq(conn.first))
    }

    fn insert(&mut self, now: Now, id: ConnId, peer: SocketAddr, stage: Stage, net: &mut Vec<NetOp>) {
        let full = self.conns.len() >= self.max_connections || !self.accepting;
        let mut conn = Conn {
            peer,
            stage,
            assembler: Assembler::default(),
            frames: VecDeque::new(),
            slots: VecDeque::new(),
            first: 0,
            in_flight: 0,
            held: 0,
            paused: false,
            starved: false,
            deaf: false,
            last_activity: now.mono,
            frame_deadline: None,
            armed: 0,
        };
        if full {
            self.stats.connections_refused.add(1);
            conn.enter(Stage::Closing);
            net.push(NetOp::Close {
                conn: id,
                abort: true,
            });
        } else {
            self.stats.connections_accepted.add(1);
        }
        conn.armed = conn.deadline(&self.limits);
        self.timers.insert((conn.armed, id));
        self.conns.insert(id, conn);
        self.stats.connections.set(self.conns.len() as u64);
    }

    /// Takes bytes from the network (or, after a handover, the rest).
    pub fn received(&mut self, now: Now, id: ConnId, data: &[u8], net: &mut Vec<NetOp>) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        self.stats.received_bytes.add(data.len() as u64);
        conn.last_activity = now.mono;
        if conn.stage == Stage::Closing {
            return;
        }
        if conn.paused || conn.stage == Stage::Leaving || conn.assembler.has_backlog() {
            conn.assembler.keep(data);
            conn.held += data.len();
            self.hold(data.len());
            return;
        }
        self.feed(now, id, data, net);
    }

    /// Takes a buffer back that [`Listener::lend_buffers`] lent out. `buf` ends with what arrived.
    pub fn filled(&mut self, now: Now, id: ConnId, buf: AppendBuf, net: &mut Vec<NetOp>) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.last_activity = now.mono;
        if conn.stage == Stage::Closing {
            return;
        }
        let (arrived, step) = conn.assembler.filled(buf);
        self.stats.received_bytes.add(arrived as u64);
        if let Step::Whole(frame) = step {
            self.complete(id, frame);
        }
        self.feed(now, id, &[], net);
    }

    /// Lets the driver fill what is missing of large frames. To be called when all events of a turn are taken: a
    /// buffer that is lent out takes no bytes here.
    pub fn lend_buffers(&mut self, net: &mut Vec<NetOp>) {
        for id in self.large.drain(..) {
            let Some(conn) = self.conns.get_mut(&id) else {
                continue;
            };
            if conn.stage != Stage::Open {
                continue;
            }
            if let Some((buf, len)) = conn.assembler.lend() {
                net.push(NetOp::Fill { conn: id, buf, len });
            }
        }
    }

    fn complete(&mut self, id: ConnId, frame: BufSlice) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.frame_deadline = None;
        conn.in_flight += 1;
        if conn.frames.is_empty() {
            self.runnable.push_back(id);
        }
        conn.frames.push_back(frame);
        self.stats.requests_in_flight.add(1);
    }

    /// Cuts frames out of `data` until it is used up or a limit is met; what is left goes to the backlog.
    fn feed(&mut self, now: Now, id: ConnId, mut data: &[u8], net: &mut Vec<NetOp>) {
        let limits = self.limits.clone();
        loop {
            let free = self.free_bytes();
            let Some(conn) = self.conns.get_mut(&id) else {
                return;
            };
            let max = match conn.stage {
                Stage::Greeting { .. } => HELLO_MAX_FRAME,
                _ => limits.max_request_bytes,
            };
            // Before Hello one frame is taken; what follows may belong to another shard.
            let most = match conn.stage {
                Stage::Greeting { .. } => 1,
                _ => limits.max_in_flight,
            };
            // A first frame is small and must get through however busy the shard is.
            let greeting = matches!(conn.stage, Stage::Greeting { .. });
            let step = if conn.in_flight >= most {
                Step::Blocked
            } else {
                conn.assembler.feed(&mut data, max, |len| {
                    let room = limits.max_connection_bytes.saturating_sub(conn.held);
                    greeting || (len <= room && fits(len, free, limits.max_shard_bytes))
                })
            };
            match step {
                Step::More => {
                    if conn.assembler.wants_fill() {
                        self.large.push(id);
                    }
                    break;
                }
                Step::Started { len } => {
                    conn.held += len;
                    let seconds = (len as u64).div_ceil(SLOWEST_BYTES_PER_SECOND);
                    let deadline = now.after_ms(limits.handshake_ms.saturating_add(seconds * 1000));
                    conn.frame_deadline = Some(deadline);
                    self.hold(len);
                }
                Step::Whole(frame) => self.complete(id, frame),
                Step::Blocked => {
                    conn.assembler.keep(data);
                    conn.held += data.len();
                    let starved = conn.in_flight < most && !conn.starved;
                    if starved {
                        conn.starved = true;
                        self.starved.push_back(id);
                    }
                    let kept = data.len();
                    self.hold(kept);
                    self.pause(id, net);
                    return;
                }
                Step::Garbage(error) => {
                    self.refuse(id, error, net);
                    return;
                }
            }
        }
        self.arm(id);
    }

    fn refuse(&mut self, id: ConnId, error: FrameError, net: &mut Vec<NetOp>) {
        self.stats.malformed.add(1);
        if let Some(conn) = self.conns.get(&id) {
            tracing::debug!(peer = %conn.peer, %error, "closing a connection: its bytes are no frame");
        }
        self.close(id, true, net);
    }

    fn pause(&mut self, id: ConnId, net: &mut Vec<NetOp>) {
        if let Some(conn) = self.conns.get_mut(&id).filter(|conn| !conn.paused) {
            conn.paused = true;
            self.stats.paused_connections.add(1);
            net.push(NetOp::Pause { conn: id });
        }
    }

    /// Makes sure that the timer fires no later than the connection's deadline.
    fn arm(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let deadline = conn.deadline(&self.limits);
        if deadline < conn.armed {
            self.timers.remove(&(conn.armed, id));
            conn.armed = deadline;
            self.timers.insert((deadline, id));
        }
    }

    /// The next whole frame of any connection, in turn.
    pub fn next_frame(&mut self) -> Option<Incoming> {
        while let Some(id) = self.runnable.pop_front() {
            let Some(conn) = self.conns.get_mut(&id) else {
                continue;
            };
            if conn.held > self.limits.max_connection_bytes {
                // Its answers pile up: whoever does not read is not served on, or it would use up the shard's budget.
                conn.deaf = true;
                continue;
            }
            let Some(frame) = conn.frames.pop_front() else {
                continue;
            };
            if !conn.frames.is_empty() {
                self.runnable.push_back(id);
            }
            let seq = Seq(conn.first + conn.slots.len() as u64);
            conn.slots.push_back(Slot::Waiting {
                reserved: frame.len(),
            });
            return Some(Incoming {
                conn: id,
                seq,
                frame,
                greeted: matches!(conn.stage, Stage::Open),
            });
        }
        None
    }

    /// Hello was taken: larger frames and requests are allowed from now on.
    pub fn greeted(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.enter(Stage::Open);
        }
    }

    /// Answers a request.
    pub fn answer(
        &mut self,
        now: Now,
        id: ConnId,
        seq: Seq,
        answer: Encoded<BufSlice>,
        net: &mut Vec<NetOp>,
    ) {
        let bytes = answer.frame_len();
        let mut bufs = Vec::with_capacity(1 + answer.tail.len());
        bufs.push(BufSlice::copy_of(&answer.head));
        bufs.extend(answer.tail.into_iter().filter(|piece| !piece.is_empty()));
        self.settle(now, id, seq, Slot::Ready(bufs), bytes, net);
    }

    /// Notes that a request gets no answer.
    pub fn skip(&mut self, now: Now, id: ConnId, seq: Seq, net: &mut Vec<NetOp>) {
        self.settle(now, id, seq, Slot::Silent, 0, net);
    }

    fn settle(&mut self, now: Now, id: ConnId, seq: Seq, with: Slot, bytes: usize, net: &mut Vec<NetOp>) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let Some(slot) = seq
            .0
            .checked_sub(conn.first)
            .and_then(|at| conn.slots.get_mut(usize::try_from(at).ok()?))
        else {
            return;
        };
        let Slot::Waiting { reserved } = *slot else { return };
        *slot = with;
        conn.in_flight -= 1;
        conn.held = conn.held - reserved + bytes;
        conn.last_activity = now.mono;
        let mut ready = Vec::new();
        while let Some(Slot::Ready(_) | Slot::Silent) = conn.slots.front() {
            conn.first += 1;
            if let Some(Slot::Ready(bufs)) = conn.slots.pop_front() {
                ready.extend(bufs);
            }
        }
        if !ready.is_empty() {
            net.push(NetOp::Send {
                conn: id,
                bufs: ready,
            });
        }
        self.hold(bytes);
        self.release(reserved);
        self.stats.requests_in_flight.sub(1);
        self.proceed(now, id, net);
    }

    /// Bytes left for the peer.
    pub fn sent(&mut self, now: Now, id: ConnId, bytes: usize, net: &mut Vec<NetOp>) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let freed = bytes.min(conn.held);
        conn.held -= freed;
        conn.last_activity = now.mono;
        if conn.deaf && conn.held <= self.limits.max_connection_bytes {
            conn.deaf = false;
            self.runnable.push_back(id);
        }
        self.stats.sent_bytes.add(bytes as u64);
        self.release(freed);
        self.proceed(now, id, net);
    }

    /// Goes on with a paused connection, and with others that wait for the shard's budget.
    fn proceed(&mut self, now: Now, id: ConnId, net: &mut Vec<NetOp>) {
        self.unpause(now, id, net);
        for _ in 0..self.starved.len() {
            let Some(next) = self.starved.pop_front() else {
                break;
            };
            if let Some(conn) = self.conns.get_mut(&next) {
                conn.starved = false;
                self.unpause(now, next, net);
            }
            if self.conns.get(&next).is_some_and(|conn| conn.starved) {
                break;
            }
        }
    }

    fn unpause(&mut self, now: Now, id: ConnId, net: &mut Vec<NetOp>) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        if !conn.paused || !matches!(conn.stage, Stage::Open) || conn.in_flight >= self.limits.max_in_flight {
            return;
        }
        let backlog = conn.assembler.take_backlog();
        conn.held -= backlog.len();
        self.release(backlog.len());
        self.feed(now, id, &backlog, net);
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        if conn.paused && !conn.assembler.has_backlog() && conn.stage == Stage::Open {
            conn.paused = false;
            self.stats.paused_connections.sub(1);
            net.push(NetOp::Resume { conn: id });
        }
    }

    /// Begins to give a connection up for another shard; [`Listener::left`] ends it. The Hello's slot is dropped.
    pub fn leave(&mut self, id: ConnId, net: &mut Vec<NetOp>) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.enter(Stage::Leaving);
        net.push(NetOp::Release { conn: id });
    }

    /// The connection is released: what goes along with it.
    pub fn left(&mut self, id: ConnId) -> Option<Left> {
        let mut conn = self.forget(id)?;
        Some(Left {
            peer: conn.peer,
            rest: conn.assembler.take_backlog(),
        })
    }

    /// Closes a connection: `abort` at once, else when its answers are sent.
    pub fn close(&mut self, id: ConnId, abort: bool, net: &mut Vec<NetOp>) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.enter(Stage::Closing);
        conn.frame_deadline = None;
        net.push(NetOp::Close { conn: id, abort });
    }

    /// The connection is gone; true when requests of it may still be in work.
    pub fn closed(&mut self, id: ConnId) -> bool {
        self.forget(id).is_some_and(|conn| conn.in_flight > 0)
    }

    fn forget(&mut self, id: ConnId) -> Option<Conn> {
        let conn = self.conns.remove(&id)?;
        self.timers.remove(&(conn.armed, id));
        if conn.paused {
            self.stats.paused_connections.sub(1);
        }
        self.release(conn.held);
        self.stats.requests_in_flight.sub(conn.in_flight as u64);
        self.stats.connections.set(self.conns.len() as u64);
        Some(conn)
    }

    /// Takes no new connections from now on.
    pub fn stop_accepting(&mut self) {
        self.accepting = false;
    }

    /// Closes every connection: `abort` at once, else when its answers are sent.
    pub fn close_all(&mut self, abort: bool, net: &mut Vec<NetOp>) {
        let ids: Vec<ConnId> = self.conns.keys().copied().collect();
        for id in ids {
            self.close(id, abort, net);
        }
    }

    /// Closes connections whose deadline passed.
    pub fn tick(&mut self, now: Now, net: &mut Vec<NetOp>) {
        while let Some((due, id)) = self.timers.first().copied().filter(|(due, _)| *due <= now.mono) {
            self.timers.remove(&(due, id));
            let Some(conn) = self.conns.get_mut(&id) else {
                continue;
            };
            let busy = conn.in_flight > 0 && conn.frame_deadline.is_none() && conn.stage == Stage::Open;
            let deadline = conn.deadline(&self.limits);
            let expired = deadline <= now.mono && !busy;
            let idle = self.limits.idle_ms.max(1);
            conn.armed = if deadline <= now.mono {
                now.after_ms(idle)
            } else {
                deadline
            };
            self.timers.insert((conn.armed, id));
            if expired {
                self.stats.connections_expired.add(1);
                self.close(id, true, net);
            }
        }
    }

    fn hold(&mut self, bytes: usize) {
        self.held += bytes;
        self.stats.held_bytes.set(self.held as u64);
    }

    fn release(&mut self, bytes: usize) {
        self.held -= bytes;
        self.stats.held_bytes.set(self.held as u64);
    }
}

/// Whether a frame of `len` bytes may be reserved with `free` of `budget` bytes left. A large frame leaves a quarter
/// of the budget alone; one that can never fit beside others is taken when nothing else is held.
fn fits(len: usize, free: usize, budget: usize) -> bool {
    let keep = if len > LARGE_FRAME { budget / 4 } else { 0 };
    free == budget || len.saturating_add(keep) <= free
}
