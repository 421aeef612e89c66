//! The reactor: one io_uring per shard for files, sockets, timers and mailbox.
//!
//! A shard's loop is: give the reactor what the core's outbox holds, then [`Reactor::turn`], which enters the kernel
//! once, waits for a completion or a deadline, and delivers everything that is ready. The reactor decides nothing.
//!
//! Invariants: everything the kernel may read or write is owned by the reactor until the final completion; a
//! completion of an unknown request is counted and does nothing; lost completions end the reactor with an error, and
//! the process with it. A reactor lives and dies on the thread that made it.

#![allow(unsafe_code)]

mod clock;
mod disk;
mod helper;
mod net;
mod recv_buffers;
mod ring;
mod slab;
mod socket;

use std::collections::VecDeque;
use std::fs::File;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{opcode, types};
use thiserror::Error;

pub use clock::now;
pub(super) use helper::eventfd;
pub use ring::{RingFeatures, RingStats};

use super::mailbox::{self, Endpoint};
use super::probe;
use super::{Completion, Disk, DiskError, DiskGone, DiskOp, Done, NetEvent, NetOp, OpId};
use crate::types::Now;
use disk::DiskDriver;
use net::NetDriver;
use recv_buffers::RecvBuffers;
use ring::{Cqe, Kind, Ring, Tag};
use slab::{Key, Slab};

/// Waits of 50 ms for the kernel to let go at the end.
const DRAIN_ROUNDS: u32 = 100;

/// Settings of a reactor.
#[derive(Debug, Clone)]
pub struct RingConfig {
    /// The data directory; must exist. Paths of disk operations are relative to it.
    pub data_dir: PathBuf,
    /// Submission queue entries; a power of two. More wait in user space.
    pub sq_entries: u32,
    /// Completion queue entries; a power of two. More wait in the kernel.
    pub cq_entries: u32,
    /// Disk operations given to the kernel at once; those on the journal are not counted.
    pub disk_depth: usize,
    /// Receive buffers of the reactor; a power of two up to 32768.
    pub recv_buffers: u16,
    /// Size of a receive buffer, in bytes.
    pub recv_buffer_bytes: u32,
    /// A turn that has delivered this many bytes from sockets leaves the rest to the next one, so that what they set
    /// off is submitted before more is taken in.
    pub turn_bytes: usize,
}

impl RingConfig {
    /// Defaults for a shard on `data_dir`.
    #[must_use]
    pub fn new(data_dir: impl Into<PathBuf>) -> RingConfig {
        RingConfig {
            data_dir: data_dir.into(),
            sq_entries: 256,
            cq_entries: 4096,
            disk_depth: 256,
            recv_buffers: 128,
            recv_buffer_bytes: 64 << 10,
            turn_bytes: 512 << 10,
        }
    }
}

/// Why a reactor could not start or cannot go on. The second kind ends the process.
#[derive(Debug, Error)]
pub enum RingError {
    /// The kernel refused a ring.
    #[error("io_uring set-up failed (errno {errno}): {}", setup_hint(*errno))]
    Setup {
        /// The errno.
        errno: i32,
    },
    /// The kernel is too old.
    #[error("this kernel's io_uring lacks {what}; Linux 6.1 or newer is needed")]
    Unsupported {
        /// What is missing.
        what: &'static str,
    },
    /// The data directory cannot be used.
    #[error("data directory {path}: {source}")]
    DataDir {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// An auxiliary descriptor or buffer could not be made.
    #[error("{what} failed (errno {errno})")]
    Resource {
        /// What was asked of the kernel.
        what: &'static str,
        /// The errno.
        errno: i32,
    },
    /// Entering the ring failed.
    #[error("the ring is dead: io_uring_enter failed (errno {errno})")]
    Enter {
        /// The errno.
        errno: i32,
    },
    /// The kernel dropped completions for lack of memory: operations would hang for ever.
    #[error("the ring is dead: the kernel lost completions")]
    CompletionsLost,
}

fn setup_hint(errno: i32) -> &'static str {
    match errno {
        libc::ENOMEM => "locked memory is short; raise RLIMIT_MEMLOCK (systemd: LimitMEMLOCK=infinity)",
        libc::EPERM => {
            "forbidden; set sysctl kernel.io_uring_disabled=0 and allow io_uring in the seccomp profile"
        }
        libc::ENOSYS => "not in this kernel, or hidden by a seccomp profile",
        libc::EMFILE | libc::ENFILE => "too many open files; raise RLIMIT_NOFILE (systemd: LimitNOFILE)",
        libc::EINVAL => "the kernel knows none of the flags needed; Linux 6.1 or newer is needed",
        _ => "unexpected error",
    }
}

/// What a turn delivers.
#[derive(Debug)]
pub enum IoEvent<'a> {
    /// A disk operation ended.
    Disk(Completion),
    /// Something happened on the network.
    Net(NetEvent<'a>),
    /// There may be messages in the mailbox.
    Mail,
}

/// An eventfd being read through the ring.
struct Event {
    kind: Kind,
    fd: i32,
    /// Where the kernel puts the counter.
    counter: Box<u64>,
}

impl Event {
    fn new(kind: Kind, fd: i32) -> Event {
        Event {
            kind,
            fd,
            counter: Box::new(0),
        }
    }

    fn arm(&mut self, ring: &mut Ring) {
        let into = std::ptr::from_mut::<u64>(&mut self.counter).cast();
        let entry = opcode::Read::new(types::Fd(self.fd), into, 8).build();
        // SAFETY: the counter is on the heap and lives until the ring is drained, or for ever.
        unsafe { ring.push(Tag::single(self.kind), entry) };
    }

    /// Keeps the counter alive for ever: the kernel may still write it.
    fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.counter));
    }
}

/// The mailbox as the reactor sees it.
struct Mailbox {
    bell: Arc<mailbox::Bell>,
    event: Event,
}

/// One shard's ring and everything in flight on it.
pub struct Reactor {
    ring: Ring,
    disk: DiskDriver,
    helper: Event,
    net: NetDriver,
    mailbox: Option<Mailbox>,
    /// Wakes of other rings that are on their way.
    wakes: Slab<Arc<mailbox::Bell>>,
    /// Completions taken from the ring and not dispatched yet.
    cqes: VecDeque<Cqe>,
    turn_bytes: usize,
    grain: usize,
    direct_warned: bool,
    /// Mail was noticed by a turn that had nobody to tell.
    mail_kept: bool,
    /// A ring belongs to the thread that made it.
    not_send: PhantomData<*const ()>,
}

impl Reactor {
    /// Sets up a ring on the calling thread, which is the only one that may use it.
    ///
    /// # Errors
    /// When the kernel or its limits refuse ([`RingError`] says what to change), or the data directory is missing.
    pub fn new(cfg: &RingConfig) -> Result<Reactor, RingError> {
        let data_dir = |source| RingError::DataDir {
            path: cfg.data_dir.clone(),
            source,
        };
        let root = OwnedFd::from(File::open(&cfg.data_dir).map_err(data_dir)?);
        let grain = probe::block_sizes(&cfg.data_dir).map_err(data_dir)?.grain();
        let mut ring = Ring::new(cfg)?;
        let disk = DiskDriver::new(root, grain, cfg.disk_depth).map_err(|errno| RingError::Resource {
            what: "eventfd",
            errno,
        })?;
        let buffers = RecvBuffers::new(&ring, cfg.recv_buffers, cfg.recv_buffer_bytes)?;
        let mut helper = Event::new(Kind::Helper, disk.helper_bell());
        helper.arm(&mut ring);
        Ok(Reactor {
            ring,
            disk,
            helper,
            net: NetDriver::new(buffers),
            mailbox: None,
            wakes: Slab::new(),
            cqes: VecDeque::new(),
            turn_bytes: cfg.turn_bytes.max(1),
            grain,
            direct_warned: false,
            mail_kept: false,
            not_send: PhantomData,
        })
    }

    /// Makes this reactor the one that wakes for `endpoint`'s mail ([`IoEvent::Mail`]) and sends its wakes.
    ///
    /// # Panics
    /// When the reactor has an endpoint already.
    pub fn attach<M>(&mut self, endpoint: &Endpoint<M>) {
        assert!(self.mailbox.is_none(), "a reactor serves one endpoint");
        let bell = Arc::clone(endpoint.bell());
        if self.ring.features.msg_ring {
            bell.set_ring(Some(self.ring.fd()));
        }
        let mut event = Event::new(Kind::Bell, bell.event_fd());
        event.arm(&mut self.ring);
        self.mailbox = Some(Mailbox { bell, event });
    }

    /// Listens on `addr` with SO_REUSEPORT; the number of the listener and the address bound.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn listen(&mut self, addr: SocketAddr) -> std::io::Result<(u16, SocketAddr)> {
        self.net.listen(&mut self.ring, addr)
    }

    /// Accepts nothing more; connections live on.
    pub fn stop_listening(&mut self) {
        self.net.stop_listening(&mut self.ring);
    }

    /// Takes a network operation; the next turn submits it. Operations on dead connections do nothing.
    pub fn submit_net(&mut self, op: NetOp) {
        self.net.submit(&mut self.ring, op);
    }

    /// Connections that live.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.net.connections()
    }

    /// The time now.
    #[must_use]
    pub fn now(&self) -> Now {
        now()
    }

    /// Counters since the start.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        self.ring.stats
    }

    /// What this kernel offers.
    #[must_use]
    pub fn features(&self) -> RingFeatures {
        self.ring.features
    }

    /// Whether some file of a direct class had to be opened buffered, because the file system refuses O_DIRECT. The
    /// journal is then still written with O_DSYNC. Asked once by the broker, which warns.
    #[must_use]
    pub fn direct_io_refused(&self) -> bool {
        self.disk.direct_refused()
    }

    /// Disk operations that have not completed.
    #[must_use]
    pub fn disk_pending(&self) -> usize {
        self.disk.pending()
    }

    /// Takes a disk operation; it is submitted by the next turn and completes in this or a later one.
    pub fn submit_disk(&mut self, op: OpId, disk_op: DiskOp) {
        self.disk.submit(&mut self.ring, op, disk_op);
    }

    /// One turn: submits everything taken since the last one, waits until something completed or the monotonic time
    /// `wait_until` (for ever with `None`) has come, and gives all that is ready to `handler`.
    ///
    /// # Errors
    /// The ring is dead; nothing more will complete and the process must stop.
    pub fn turn(
        &mut self,
        wait_until: Option<u64>,
        handler: &mut dyn FnMut(IoEvent<'_>),
    ) -> Result<(), RingError> {
        self.send_wakes();
        self.net.end_lull(&mut self.ring);
        let mut wait = self.patience(wait_until);
        let mut mail = std::mem::take(&mut self.mail_kept);
        if mail {
            wait = Some(Duration::ZERO);
        }
        if let Some(mailbox) = &self.mailbox
            && wait != Some(Duration::ZERO)
            && !mailbox.bell.begin_wait()
        {
            wait = Some(Duration::ZERO);
        }
        self.ring.enter(wait)?;
        if let Some(mailbox) = &self.mailbox {
            mail |= mailbox.bell.end_wait();
        }
        self.deliver_ready(handler);
        let reaped = self.ring.reap(&mut self.cqes);
        self.dispatch_some(handler);
        if mail {
            handler(IoEvent::Mail);
        }
        self.warn_once();
        reaped
    }

    /// How long this turn may wait.
    fn patience(&mut self, wait_until: Option<u64>) -> Option<Duration> {
        if self.disk.has_ready() || self.net.has_ready() || !self.cqes.is_empty() {
            return Some(Duration::ZERO);
        }
        let retry = self.net.next_retry();
        let until = match (wait_until, retry) {
            (Some(until), Some(retry)) => until.min(retry),
            (until, retry) => until.or(retry)?,
        };
        let now = now().mono;
        self.net.retry_accepts(&mut self.ring, now);
        Some(Duration::from_nanos(until.saturating_sub(now)))
    }

    /// Turns the wakes that the mailbox's owner caused into requests.
    fn send_wakes(&mut self) {
        let Some(mailbox) = &self.mailbox else {
            return;
        };
        for bell in mailbox.bell.take_outgoing() {
            let Some(fd) = bell.ring_fd() else {
                bell.wake_by_event();
                continue;
            };
            let key = self.wakes.insert(bell);
            let mail = Tag::single(Kind::Mail).bits();
            let entry = opcode::MsgRingData::new(types::Fd(fd), 0, mail, None).build();
            // SAFETY: the request points to nothing.
            unsafe { self.ring.push(Tag::new(Kind::WakeSent, key), entry) };
        }
    }

    fn wake_sent(&mut self, key: Key, result: i32) {
        match self.wakes.remove(key) {
            // The other ring ended or cannot take it: its owner is still asleep.
            Some(bell) if result < 0 => bell.wake_by_event(),
            Some(_) => {}
            None => self.ring.stats.stale += 1,
        }
    }

    fn deliver_ready(&mut self, handler: &mut dyn FnMut(IoEvent<'_>)) {
        while let Some(completion) = self.disk.pop_ready() {
            handler(IoEvent::Disk(completion));
        }
        self.net.deliver_ready(&mut |event| handler(IoEvent::Net(event)));
    }

    /// Dispatches completions until they are used up or have brought as many bytes as a turn takes.
    fn dispatch_some(&mut self, handler: &mut dyn FnMut(IoEvent<'_>)) {
        let mut bytes = 0;
        while bytes < self.turn_bytes
            && let Some(cqe) = self.cqes.pop_front()
        {
            if cqe.tag.kind == Kind::Receive {
                bytes += usize::try_from(cqe.result).unwrap_or(0);
            }
            self.dispatch(cqe, handler);
            self.deliver_ready(handler);
        }
    }

    fn dispatch(&mut self, cqe: Cqe, handler: &mut dyn FnMut(IoEvent<'_>)) {
        let Tag { kind, key } = cqe.tag;
        let ring = &mut self.ring;
        let mut net = |event: NetEvent<'_>| handler(IoEvent::Net(event));
        match kind {
            Kind::Receive => self.net.received(ring, cqe, &mut net),
            Kind::Send => self.net.sent(ring, cqe, &mut net),
            Kind::Accept => self.net.accepted(ring, cqe, &mut net),
            Kind::Disk => {
                if let Some(completion) = self.disk.complete(ring, key, cqe.result) {
                    handler(IoEvent::Disk(completion));
                }
            }
            Kind::Helper => {
                self.helper.arm(ring);
                for completion in self.disk.complete_helped(ring) {
                    handler(IoEvent::Disk(completion));
                }
            }
            Kind::Bell => {
                if let Some(mailbox) = &mut self.mailbox {
                    mailbox.event.arm(ring);
                }
            }
            Kind::WakeSent => self.wake_sent(key, cqe.result),
            // Nothing but the end of the wait.
            Kind::Mail | Kind::Ignored => {}
        }
    }

    fn warn_once(&mut self) {
        if self.disk.direct_refused() && !self.direct_warned {
            self.direct_warned = true;
            tracing::warn!("the file system of the data directory refuses O_DIRECT; files are buffered");
        }
    }
}

impl Disk for Reactor {
    /// # Panics
    /// When operations of [`Reactor::submit_disk`] or connections are still under way.
    fn run(&mut self, ops: Vec<DiskOp>) -> Result<Vec<Result<Done, DiskError>>, DiskGone> {
        let idle = self.disk.pending() == 0 && self.net.is_idle();
        assert!(idle, "the start-up disk runs before the shard serves");
        let mut results: Vec<Option<Result<Done, DiskError>>> = ops.iter().map(|_| None).collect();
        for (index, disk_op) in ops.into_iter().enumerate() {
            self.disk.submit(&mut self.ring, OpId(index as u64), disk_op);
        }
        let mut mail = false;
        while self.disk.pending() > 0 {
            self.turn(None, &mut |event| match event {
                IoEvent::Disk(completion) => results[completion.op.0 as usize] = Some(completion.result),
                IoEvent::Mail => mail = true,
                IoEvent::Net(event) => unreachable!("no socket was idle before: {event:?}"),
            })
            .map_err(|error| DiskGone(error.to_string()))?;
        }
        self.mail_kept |= mail;
        let results: Option<Vec<_>> = results.into_iter().collect();
        results.ok_or_else(|| DiskGone("an operation vanished".to_owned()))
    }

    fn grain(&self) -> usize {
        self.grain
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        if let Some(mailbox) = &self.mailbox {
            mailbox.bell.set_ring(None);
            // Whoever was to be woken by this ring must still wake.
            let outgoing = mailbox.bell.take_outgoing();
            outgoing.iter().for_each(|bell| bell.wake_by_event());
            for key in self.wakes.keys() {
                if let Some(bell) = self.wakes.get(key) {
                    bell.wake_by_event();
                }
            }
        }
        if !self.ring.drain(std::mem::take(&mut self.cqes), DRAIN_ROUNDS) {
            tracing::error!(
                in_flight = self.ring.in_flight(),
                "the kernel did not finish all operations; their buffers are kept for ever"
            );
            self.disk.leak();
            self.net.leak();
            self.helper.leak();
            if let Some(mailbox) = &mut self.mailbox {
                mailbox.event.leak();
            }
        }
    }
}

#[cfg(test)]
mod tests;
