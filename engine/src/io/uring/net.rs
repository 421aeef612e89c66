//! Connections and listeners on the ring.
//!
//! Invariants: a connection has at most one receive and one send with the kernel, and its slot is freed only after
//! both are over; so no completion meets another connection. Bytes go out in the order they were queued. Bytes that
//! arrived before a pause, a release or the peer's end are delivered before what follows them. After `Closed` or
//! `Released` an id is dead; operations on dead ids do nothing, since the event may still be on its way to the caller.
//!
//! A receive is one of three. Usually a multishot one into provided buffers serves. A fill goes straight into the
//! caller's buffer, which saves copying a large request once more (measured: a fifth of the processor time of a
//! broker that takes batches of 1 MiB). After a fill one short receive looks at what follows, so that the next fill
//! finds nothing to cancel; when that was not the beginning of a fill, multishot serves again.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use io_uring::{opcode, squeue, types};

use super::recv_buffers::{GROUP, RecvBuffers};
use super::ring::{Cqe, Kind, Ring, Tag};
use super::slab::{Key, Slab};
use super::{clock, socket};
use crate::io::buf::{AppendBuf, BufSlice};
use crate::io::{ConnId, NetEvent, NetOp, Socket};

/// Most slices one send takes (UIO_MAXIOV is 1024; a shorter vector costs less to import).
const MAX_SLICES: usize = 256;

/// A send takes slices until it has this many bytes, so that `Sent` keeps coming while much is queued.
const SEND_BYTES: usize = 1 << 20;

/// Most bytes of the short receive after a fill: a request's head, and all of a small request.
const PEEK_BYTES: u32 = 4096;

/// Pause after an accept that failed for lack of descriptors or memory, in nanoseconds.
const ACCEPT_PAUSE: u64 = 100_000_000;

/// Where a connection is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Serves.
    Open,
    /// Sends what is queued, then closes; receives nothing more.
    Flushing,
    /// Sends what is queued and delivers what arrived, then leaves for another shard.
    Releasing,
    /// Waits for the kernel to let go.
    Closing,
}

impl Phase {
    /// Whether a connection may move from this phase to `next`.
    fn leads_to(self, next: Phase) -> bool {
        match next {
            Phase::Open => false,
            Phase::Flushing | Phase::Releasing => self == Phase::Open,
            Phase::Closing => self != Phase::Closing,
        }
    }
}

/// The state of the one receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Receive {
    /// Not with the kernel.
    Off,
    /// The kernel delivers into provided buffers.
    Armed,
    /// The kernel writes into the buffer of the connection's fill.
    Filling,
    /// Cancelled; its last completion is to come.
    Stopping,
}

/// How the next bytes are received when no fill takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// By a multishot receive.
    Multishot,
    /// By one short receive: a fill was just over, and more may come.
    Short,
    /// The short receive is with the kernel, or over and the caller has not said yet whether a fill follows.
    Looking,
}

/// A buffer to be filled: `left` more bytes, for which it has room.
struct Fill {
    buf: AppendBuf,
    left: usize,
}

impl Fill {
    /// Takes bytes that arrived in a provided buffer; returns what is left of them.
    fn take<'d>(&mut self, data: &'d [u8]) -> &'d [u8] {
        let (ours, rest) = data.split_at(data.len().min(self.left));
        self.buf.append(ours);
        self.left -= ours.len();
        rest
    }
}

/// What the kernel reads while a send is in flight.
struct SendFlight {
    bufs: VecDeque<BufSlice>,
    /// Bytes of the first slice already sent.
    skip: usize,
    iovecs: Vec<libc::iovec>,
    message: libc::msghdr,
    in_flight: bool,
}

impl SendFlight {
    fn new() -> Box<SendFlight> {
        // SAFETY: all-zero is a valid `msghdr`.
        let message = unsafe { std::mem::zeroed() };
        Box::new(SendFlight {
            bufs: VecDeque::new(),
            skip: 0,
            iovecs: Vec::new(),
            message,
            in_flight: false,
        })
    }

    /// Points the vector at the next bytes to send; false when there are none.
    fn fill(&mut self) -> bool {
        self.iovecs.clear();
        let (mut skip, mut bytes) = (self.skip, 0);
        for buf in self.bufs.iter().take(MAX_SLICES) {
            let rest = &buf[skip..];
            skip = 0;
            let len = rest.len().min(SEND_BYTES - bytes);
            self.iovecs.push(libc::iovec {
                iov_base: rest.as_ptr().cast_mut().cast(),
                iov_len: len,
            });
            bytes += len;
            if bytes == SEND_BYTES {
                break;
            }
        }
        self.message.msg_iov = self.iovecs.as_mut_ptr();
        self.message.msg_iovlen = self.iovecs.len();
        !self.iovecs.is_empty()
    }

    /// Takes off `count` bytes that were sent.
    fn advance(&mut self, mut count: usize) {
        while let Some(first) = self.bufs.front() {
            let rest = first.len() - self.skip;
            if count < rest {
                self.skip += count;
                return;
            }
            count -= rest;
            self.skip = 0;
            self.bufs.pop_front();
        }
    }
}

struct Conn {
    fd: OwnedFd,
    phase: Phase,
    receive: Receive,
    /// Where the next bytes go, while the kernel or a provided buffer still owes some.
    fill: Option<Fill>,
    manner: Manner,
    paused: bool,
    send: Box<SendFlight>,
}

impl Conn {
    fn set_phase(&mut self, next: Phase) {
        assert!(
            self.phase.leads_to(next),
            "a connection goes from {:?} to {next:?}",
            self.phase
        );
        self.phase = next;
    }

    /// Drops what is queued and makes what the kernel has complete.
    fn begin_close(&mut self) {
        if self.phase == Phase::Closing {
            return;
        }
        self.set_phase(Phase::Closing);
        socket::shut_down(&self.fd);
        if !self.send.in_flight {
            self.send.bufs.clear();
        }
    }

    fn all_sent(&self) -> bool {
        self.send.bufs.is_empty() && !self.send.in_flight
    }

    /// Whether the caller may well ask for a fill next, so that nothing else is armed before it could.
    fn awaits_caller(&self) -> bool {
        self.manner == Manner::Looking
            && self.phase == Phase::Open
            && self.receive == Receive::Off
            && self.fill.is_none()
    }

    fn idle(&self) -> bool {
        self.receive == Receive::Off && !self.send.in_flight
    }
}

struct Listener {
    fd: OwnedFd,
    armed: bool,
    open: bool,
    /// Accepts again at this time, after a failure.
    retry_at: Option<u64>,
}

/// An event that needs no completion of the kernel.
enum Ready {
    Adopted { conn: ConnId, tag: u64 },
    Closed { conn: ConnId },
    Released { conn: ConnId, socket: Socket },
}

/// The sockets of one reactor.
pub(super) struct NetDriver {
    conns: Slab<Conn>,
    listeners: Vec<Listener>,
    buffers: RecvBuffers,
    ready: VecDeque<Ready>,
    /// Connections whose next receive waits for what the caller says to the last one.
    lull: Vec<Key>,
}

type Handler<'h> = dyn FnMut(NetEvent<'_>) + 'h;

fn conn_id(key: Key) -> ConnId {
    ConnId {
        slot: key.slot,
        generation: key.generation,
    }
}

fn key_of(conn: ConnId) -> Key {
    Key {
        slot: conn.slot,
        generation: conn.generation,
    }
}

impl NetDriver {
    pub(super) fn new(buffers: RecvBuffers) -> NetDriver {
        NetDriver {
            conns: Slab::new(),
            listeners: Vec::new(),
            buffers,
            ready: VecDeque::new(),
            lull: Vec::new(),
        }
    }

    /// Receives again on the connections that waited for the caller; to be called before the ring is entered.
    pub(super) fn end_lull(&mut self, ring: &mut Ring) {
        while let Some(key) = self.lull.pop() {
            if let Some(conn) = self.conns.get_mut(key).filter(|conn| conn.awaits_caller()) {
                conn.manner = Manner::Multishot;
            }
            self.settle(ring, key);
        }
    }

    /// Connections that live.
    pub(super) fn connections(&self) -> usize {
        self.conns.len()
    }

    /// Whether nothing here can cause an event.
    pub(super) fn is_idle(&self) -> bool {
        self.conns.len() == 0 && self.listeners.iter().all(|l| !l.armed) && self.ready.is_empty()
    }

    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Delivers what came about without the kernel.
    pub(super) fn deliver_ready(&mut self, handler: &mut Handler<'_>) {
        while let Some(ready) = self.ready.pop_front() {
            handler(match ready {
                Ready::Adopted { conn, tag } => NetEvent::Adopted { conn, tag },
                Ready::Closed { conn } => NetEvent::Closed { conn },
                Ready::Released { conn, socket } => NetEvent::Released { conn, socket },
            });
        }
    }

    pub(super) fn listen(
        &mut self,
        ring: &mut Ring,
        addr: SocketAddr,
    ) -> Result<(u16, SocketAddr), std::io::Error> {
        let index = u16::try_from(self.listeners.len())
            .map_err(|_| std::io::Error::from(std::io::ErrorKind::QuotaExceeded))?;
        let fd = socket::listen(addr)?;
        let bound = socket::local_addr(&fd)?;
        self.listeners.push(Listener {
            fd,
            armed: false,
            open: true,
            retry_at: None,
        });
        self.arm_accept(ring, index);
        Ok((index, bound))
    }

    /// Accepts nothing more on any listener; connections live on.
    pub(super) fn stop_listening(&mut self, ring: &mut Ring) {
        for (index, listener) in self.listeners.iter_mut().enumerate() {
            listener.retry_at = None;
            if std::mem::replace(&mut listener.open, false) {
                // Without this the kernel completes more connections and leaves them waiting.
                socket::shut_down(&listener.fd);
                if listener.armed {
                    ring.cancel(accept_tag(index as u16));
                }
            }
        }
    }

    /// When a listener accepts again after a failure.
    pub(super) fn next_retry(&self) -> Option<u64> {
        self.listeners
            .iter()
            .filter_map(|listener| listener.retry_at)
            .min()
    }

    /// Accepts again where the pause is over.
    pub(super) fn retry_accepts(&mut self, ring: &mut Ring, now: u64) {
        for index in 0..self.listeners.len() {
            if self.listeners[index].retry_at.is_some_and(|at| at <= now) {
                self.listeners[index].retry_at = None;
                self.arm_accept(ring, index as u16);
            }
        }
    }

    fn arm_accept(&mut self, ring: &mut Ring, index: u16) {
        let listener = &mut self.listeners[usize::from(index)];
        listener.armed = true;
        let entry = opcode::AcceptMulti::new(types::Fd(listener.fd.as_raw_fd()))
            .flags(libc::SOCK_CLOEXEC)
            .build();
        // SAFETY: the request points to nothing; the kernel holds the socket itself.
        unsafe { ring.push(accept_tag(index), entry) };
    }

    pub(super) fn submit(&mut self, ring: &mut Ring, op: NetOp) {
        match op {
            NetOp::Adopt { socket, tag } => {
                let key = self.insert(socket);
                let conn = conn_id(key);
                self.ready.push_back(Ready::Adopted { conn, tag });
                self.settle(ring, key);
            }
            NetOp::Send { conn, bufs } => self.change(ring, conn, |conn| {
                if conn.phase != Phase::Closing {
                    conn.send
                        .bufs
                        .extend(bufs.into_iter().filter(|buf| !buf.is_empty()));
                }
            }),
            NetOp::Pause { conn } => self.change(ring, conn, |conn| conn.paused = true),
            NetOp::Resume { conn } => self.change(ring, conn, |conn| conn.paused = false),
            NetOp::Fill { conn, buf, len } => {
                assert!(
                    len > 0 && len <= buf.remaining(),
                    "the buffer has room for the fill"
                );
                self.change(ring, conn, |conn| {
                    assert!(conn.fill.is_none(), "one fill at a time");
                    conn.fill = Some(Fill { buf, left: len });
                });
            }
            NetOp::Close { conn, abort } => self.change(ring, conn, |conn| {
                if abort {
                    conn.begin_close();
                } else if conn.phase == Phase::Open {
                    conn.set_phase(Phase::Flushing);
                }
            }),
            NetOp::Release { conn } => self.change(ring, conn, |conn| {
                if conn.phase == Phase::Open {
                    conn.set_phase(Phase::Releasing);
                }
            }),
        }
    }

    fn change(&mut self, ring: &mut Ring, conn: ConnId, change: impl FnOnce(&mut Conn)) {
        let key = key_of(conn);
        if let Some(conn) = self.conns.get_mut(key) {
            change(conn);
            self.settle(ring, key);
        }
    }

    fn insert(&mut self, fd: OwnedFd) -> Key {
        // Refused only by sockets that are not TCP, which then have no delay to switch off.
        if let Err(error) = socket::set_no_delay(&fd) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        self.conns.insert(Conn {
            fd,
            phase: Phase::Open,
            receive: Receive::Off,
            fill: None,
            manner: Manner::Multishot,
            paused: false,
            send: SendFlight::new(),
        })
    }

    /// Brings what the kernel has to do for a connection in line with the connection's state.
    fn settle(&mut self, ring: &mut Ring, key: Key) {
        let Some(conn) = self.conns.get_mut(key) else {
            return;
        };
        if conn.phase == Phase::Flushing && conn.all_sent() {
            conn.begin_close();
        }
        let open = conn.phase == Phase::Open;
        let wanted = open && !conn.paused;
        let stale = match conn.receive {
            Receive::Armed => !wanted || conn.fill.is_some(),
            Receive::Filling => !open,
            Receive::Off | Receive::Stopping => false,
        };
        if stale {
            conn.receive = Receive::Stopping;
            ring.cancel(Tag::new(Kind::Receive, key));
        } else if conn.receive == Receive::Off && open && conn.fill.is_some() {
            arm_fill(ring, key, conn);
        } else if conn.receive == Receive::Off && wanted && !conn.awaits_caller() {
            arm_receive(ring, key, conn);
        }
        if conn.phase != Phase::Closing && !conn.send.in_flight {
            arm_send(ring, key, conn);
        }
        let leaving = match conn.phase {
            Phase::Closing => conn.idle(),
            Phase::Releasing => conn.idle() && conn.all_sent(),
            Phase::Open | Phase::Flushing => false,
        };
        if leaving && let Some(gone) = self.conns.remove(key) {
            let conn = conn_id(key);
            self.ready.push_back(match gone.phase {
                Phase::Releasing => Ready::Released {
                    conn,
                    socket: gone.fd,
                },
                _ => Ready::Closed { conn },
            });
        }
    }

    /// Takes the completion of an accept.
    pub(super) fn accepted(&mut self, ring: &mut Ring, cqe: Cqe, handler: &mut Handler<'_>) {
        // SAFETY: a result that is not negative is a connection that the kernel just opened for us.
        let socket = (cqe.result >= 0).then(|| unsafe { OwnedFd::from_raw_fd(cqe.result as RawFd) });
        let index = cqe.tag.key.slot;
        let Some(listener) = self.listeners.get_mut(index as usize) else {
            ring.stats.stale += 1;
            return;
        };
        listener.armed = cqe.more();
        if socket.is_none() && cqe.result != -libc::ECANCELED {
            ring.stats.accept_errors += 1;
        }
        if !listener.armed && listener.open {
            match -cqe.result {
                errno @ (libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                    tracing::warn!(errno, "no connection can be accepted for a moment");
                    listener.retry_at = Some(clock::now().mono.saturating_add(ACCEPT_PAUSE));
                }
                _ => self.arm_accept(ring, index as u16),
            }
        }
        // A peer that is gone already needs no connection.
        if let Some(fd) = socket
            && let Ok(peer) = socket::peer_addr(&fd)
        {
            let key = self.insert(fd);
            let (conn, listener) = (conn_id(key), index as u16);
            handler(NetEvent::Accepted { conn, listener, peer });
            self.settle(ring, key);
        }
    }

    /// Takes a completion of a receive.
    pub(super) fn received(&mut self, ring: &mut Ring, cqe: Cqe, handler: &mut Handler<'_>) {
        let key = cqe.tag.key;
        let Some(conn) = self.conns.get_mut(key) else {
            ring.stats.stale += 1;
            self.give_back(cqe);
            return;
        };
        let filling = cqe.buffer().is_none() && conn.fill.is_some();
        if !cqe.more() {
            conn.receive = Receive::Off;
        }
        let phase = conn.phase;
        match cqe.result {
            count if count > 0 && filling => take_fill(key, conn, count as usize, handler),
            count if count > 0 => {
                let data = cqe
                    .buffer()
                    .and_then(|id| self.buffers.filled(id, count as usize));
                if let Some(data) = data
                    && matches!(phase, Phase::Open | Phase::Releasing)
                {
                    take_data(key, conn, data, handler);
                }
            }
            // The peer sends no more. What it asked for before is still answered.
            0 if phase == Phase::Open => conn.set_phase(Phase::Flushing),
            0 if phase == Phase::Flushing => {}
            errno if errno == -libc::ENOBUFS => ring.stats.out_of_buffers += 1,
            errno if [-libc::ECANCELED, -libc::EINTR, -libc::EAGAIN].contains(&errno) => {}
            _ => conn.begin_close(),
        }
        self.give_back(cqe);
        if self.conns.get(key).is_some_and(Conn::awaits_caller) {
            self.lull.push(key);
        } else {
            self.settle(ring, key);
        }
    }

    fn give_back(&mut self, cqe: Cqe) {
        if let Some(id) = cqe.buffer() {
            self.buffers.give_back(id);
        }
    }

    /// Takes the completion of a send.
    pub(super) fn sent(&mut self, ring: &mut Ring, cqe: Cqe, handler: &mut Handler<'_>) {
        let key = cqe.tag.key;
        let Some(conn) = self.conns.get_mut(key) else {
            ring.stats.stale += 1;
            return;
        };
        conn.send.in_flight = false;
        match cqe.result {
            count if count >= 0 => {
                conn.send.advance(count as usize);
                handler(NetEvent::Sent {
                    conn: conn_id(key),
                    bytes: count as usize,
                });
            }
            errno if errno == -libc::EINTR || errno == -libc::EAGAIN => ring.stats.resubmitted += 1,
            _ => conn.begin_close(),
        }
        if conn.phase == Phase::Closing {
            conn.send.bufs.clear();
        }
        self.settle(ring, key);
    }

    /// Keeps everything the kernel may still use alive for ever.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.conns, Slab::new()));
        self.buffers.leak();
    }
}

fn accept_tag(index: u16) -> Tag {
    Tag::new(
        Kind::Accept,
        Key {
            slot: u32::from(index),
            generation: 0,
        },
    )
}

/// Arms the multishot receive, or after a fill the short one.
fn arm_receive(ring: &mut Ring, key: Key, conn: &mut Conn) {
    conn.receive = Receive::Armed;
    let fd = types::Fd(conn.fd.as_raw_fd());
    let entry = if conn.manner == Manner::Short {
        conn.manner = Manner::Looking;
        opcode::Recv::new(fd, std::ptr::null_mut(), PEEK_BYTES)
            .buf_group(GROUP)
            .build()
            .flags(squeue::Flags::BUFFER_SELECT)
    } else {
        opcode::RecvMulti::new(fd, GROUP).build()
    };
    // SAFETY: the request points to nothing; the buffers it picks live until the ring is drained.
    unsafe { ring.push(Tag::new(Kind::Receive, key), entry) };
}

fn arm_fill(ring: &mut Ring, key: Key, conn: &mut Conn) {
    let Some(fill) = &mut conn.fill else { return };
    conn.receive = Receive::Filling;
    let fd = types::Fd(conn.fd.as_raw_fd());
    let len = u32::try_from(fill.left).unwrap_or(1 << 30);
    let target = fill.buf.spare().as_mut_ptr();
    // With MSG_WAITALL the kernel itself goes on until all has come.
    let entry = opcode::Recv::new(fd, target, len)
        .flags(libc::MSG_WAITALL)
        .build();
    // SAFETY: the buffer has room for `left` bytes and is neither written nor dropped while `Filling` or, after
    // that, `Stopping`: only the completion touches it, and the slot is freed after the completion.
    unsafe { ring.push(Tag::new(Kind::Receive, key), entry) };
}

/// Takes `count` bytes that the kernel wrote into the fill.
fn take_fill(key: Key, conn: &mut Conn, count: usize, handler: &mut Handler<'_>) {
    if let Some(fill) = &mut conn.fill {
        fill.buf.advance(count);
        fill.left -= count;
    }
    end_fill(key, conn, handler);
}

/// Takes bytes of a provided buffer: what a fill still wants goes there, the rest is delivered.
fn take_data(key: Key, conn: &mut Conn, data: &[u8], handler: &mut Handler<'_>) {
    let rest = match &mut conn.fill {
        Some(fill) => fill.take(data),
        None => data,
    };
    end_fill(key, conn, handler);
    if !rest.is_empty() {
        handler(NetEvent::Received {
            conn: conn_id(key),
            data: rest,
        });
    }
}

fn end_fill(key: Key, conn: &mut Conn, handler: &mut Handler<'_>) {
    if let Some(fill) = conn.fill.take_if(|fill| fill.left == 0) {
        conn.manner = Manner::Short;
        handler(NetEvent::Filled {
            conn: conn_id(key),
            buf: fill.buf,
        });
    }
}

fn arm_send(ring: &mut Ring, key: Key, conn: &mut Conn) {
    if !conn.send.fill() {
        return;
    }
    conn.send.in_flight = true;
    let fd = types::Fd(conn.fd.as_raw_fd());
    // With MSG_WAITALL the kernel itself goes on after a short send.
    let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
    let entry = match conn.send.iovecs.as_slice() {
        [one] => opcode::Send::new(fd, one.iov_base.cast(), one.iov_len as u32)
            .flags(flags)
            .build(),
        _ => opcode::SendMsg::new(fd, &raw const conn.send.message)
            .flags(flags as u32)
            .build(),
    };
    // SAFETY: slices, vector and message header are on the heap, owned by the connection, and neither changed nor
    // dropped while `in_flight`: new slices are only added behind (`VecDeque` moves the handles, not the bytes), and
    // the slot is freed after the completion.
    unsafe { ring.push(Tag::new(Kind::Send, key), entry) };
}
