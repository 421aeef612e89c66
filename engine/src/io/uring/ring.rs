//! The ring itself: set-up with fallbacks, the submission backlog, one enter per turn, completions by tag.
//!
//! Invariants: `in_flight` counts every request given to the kernel or waiting in the backlog until its final
//! completion, so zero means that the kernel holds no pointer of ours. Nothing is ever dropped silently: a full
//! submission queue goes to the backlog, an overflown completion queue is flushed by the kernel at the next enter,
//! and completions lost for good are an error that ends the process.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};

use super::slab::{GENERATION_MASK, Key};
use super::{RingConfig, RingError};

const ENTER_GETEVENTS: u32 = 1 << 0;
const ENTER_EXT_ARG: u32 = 1 << 3;
const ENTER_REGISTERED_RING: u32 = 1 << 4;
const REGISTER_RING_FDS: u32 = 20;
const UNREGISTER_RING_FDS: u32 = 21;

/// Whose completion it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Nobody waits for it: a cancellation, say.
    Ignored = 1,
    /// A disk operation.
    Disk,
    /// The eventfd of the helper thread.
    Helper,
    /// The eventfd of the mailbox.
    Bell,
    /// Another ring woke this one.
    Mail,
    /// This ring's wake of another one was delivered or failed.
    WakeSent,
    /// A listener's multishot accept.
    Accept,
    /// A connection's multishot receive.
    Receive,
    /// A connection's send.
    Send,
}

impl Kind {
    fn from_bits(bits: u8) -> Option<Kind> {
        const ALL: [Kind; 9] = [
            Kind::Ignored,
            Kind::Disk,
            Kind::Helper,
            Kind::Bell,
            Kind::Mail,
            Kind::WakeSent,
            Kind::Accept,
            Kind::Receive,
            Kind::Send,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == bits)
    }
}

/// User data of a request: kind (8 bits), generation (24), slot (32).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tag {
    pub(super) kind: Kind,
    pub(super) key: Key,
}

impl Tag {
    pub(super) fn new(kind: Kind, key: Key) -> Tag {
        Tag { kind, key }
    }

    /// A tag for requests of which there is one at a time.
    pub(super) fn single(kind: Kind) -> Tag {
        let key = Key {
            slot: 0,
            generation: 0,
        };
        Tag { kind, key }
    }

    pub(super) fn bits(self) -> u64 {
        u64::from(self.kind as u8) << 56
            | u64::from(self.key.generation & GENERATION_MASK) << 32
            | u64::from(self.key.slot)
    }

    fn from_bits(bits: u64) -> Option<Tag> {
        let key = Key {
            slot: bits as u32,
            generation: (bits >> 32) as u32 & GENERATION_MASK,
        };
        Kind::from_bits((bits >> 56) as u8).map(|kind| Tag { kind, key })
    }
}

/// A completion taken off the queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cqe {
    pub(super) tag: Tag,
    /// Result, or a negated errno.
    pub(super) result: i32,
    flags: u32,
}

impl Cqe {
    /// Whether the request will complete again.
    pub(super) fn more(self) -> bool {
        cqueue::more(self.flags)
    }

    /// The provided buffer that the kernel filled.
    pub(super) fn buffer(self) -> Option<u16> {
        cqueue::buffer_select(self.flags)
    }
}

/// What this kernel offers beyond the required; each has a slower substitute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingFeatures {
    /// Completion work runs when the shard asks, not by interrupting it (SINGLE_ISSUER and DEFER_TASKRUN, Linux 6.1).
    pub deferred: bool,
    /// The ring's descriptor is registered, which saves a look-up per enter (5.18).
    pub registered: bool,
    /// Ftruncate is a ring operation (6.9).
    pub ftruncate: bool,
    /// A ring can wake another one (5.18).
    pub msg_ring: bool,
}

#[repr(C)]
struct KernelTimespec {
    seconds: i64,
    nanoseconds: i64,
}

#[repr(C)]
struct GeteventsArg {
    sigmask: u64,
    sigmask_size: u32,
    min_wait_usec: u32,
    timespec: u64,
}

#[repr(C)]
struct RsrcUpdate {
    offset: u32,
    reserved: u32,
    data: u64,
}

/// Counters of the ring, since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingStats {
    /// System calls that entered the ring.
    pub enters: u64,
    /// Requests given to the ring.
    pub submitted: u64,
    /// Completions taken.
    pub completions: u64,
    /// Completions whose request is not known (any more); always 0 unless something is broken.
    pub stale: u64,
    /// Operations submitted again after EINTR, EAGAIN or a short transfer.
    pub resubmitted: u64,
    /// Receives that ended because no buffer was free.
    pub out_of_buffers: u64,
    /// Accepts that failed.
    pub accept_errors: u64,
}

/// The ring and its backlog.
pub(super) struct Ring {
    ring: IoUring,
    backlog: VecDeque<squeue::Entry>,
    in_flight: usize,
    /// Index of the registered ring descriptor of this thread.
    registered: Option<u32>,
    pub(super) features: RingFeatures,
    pub(super) stats: RingStats,
}

impl Ring {
    pub(super) fn new(cfg: &RingConfig) -> Result<Ring, RingError> {
        let (ring, deferred) = build(cfg)?;
        let probe = required(&ring)?;
        let registered = register_ring_fd(ring.as_raw_fd());
        let features = RingFeatures {
            deferred,
            registered: registered.is_some(),
            ftruncate: probe.is_supported(opcode::Ftruncate::CODE),
            msg_ring: probe.is_supported(opcode::MsgRingData::CODE),
        };
        Ok(Ring {
            ring,
            backlog: VecDeque::new(),
            in_flight: 0,
            registered,
            features,
            stats: RingStats::default(),
        })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    pub(super) fn submitter(&self) -> io_uring::Submitter<'_> {
        self.ring.submitter()
    }

    /// Requests whose final completion has not been taken.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Queues a request for the next enter.
    ///
    /// # Safety
    /// Everything that `entry` points to stays where it is, and alive, until the final completion of `tag`.
    pub(super) unsafe fn push(&mut self, tag: Tag, entry: squeue::Entry) {
        self.in_flight += 1;
        self.stats.submitted += 1;
        self.backlog.push_back(entry.user_data(tag.bits()));
    }

    /// Cancels the requests of `tag`, whenever they were submitted.
    pub(super) fn cancel(&mut self, tag: Tag) {
        let entry = opcode::AsyncCancel::new(tag.bits()).build();
        // SAFETY: a cancellation points to nothing.
        unsafe { self.push(Tag::single(Kind::Ignored), entry) };
    }

    /// Moves as much of the backlog into the submission queue as fits.
    fn fill(&mut self) -> u32 {
        let mut queue = self.ring.submission();
        while let Some(entry) = self.backlog.front() {
            // SAFETY: the promise of `push` holds for everything in the backlog.
            if unsafe { queue.push(entry) }.is_err() {
                break;
            }
            self.backlog.pop_front();
        }
        queue.len() as u32
    }

    /// Submits what is queued and waits for a completion: not at all with `Some(0)`, forever with `None`.
    pub(super) fn enter(&mut self, wait: Option<Duration>) -> Result<(), RingError> {
        loop {
            let to_submit = self.fill();
            let more = !self.backlog.is_empty();
            let wait = if more { Some(Duration::ZERO) } else { wait };
            match self.enter_once(to_submit, wait) {
                Ok(count) if more && count > 0 => {}
                Ok(_) => return Ok(()),
                // EBUSY and EAGAIN: completions must be taken before the kernel takes more; the caller does now.
                Err(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => return Ok(()),
                Err(libc::EBADR) => return Err(RingError::CompletionsLost),
                Err(errno) => return Err(RingError::Enter { errno }),
            }
        }
    }

    fn enter_once(&mut self, to_submit: u32, wait: Option<Duration>) -> Result<u32, i32> {
        self.stats.enters += 1;
        let timespec = wait.map(|wait| KernelTimespec {
            seconds: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: i64::from(wait.subsec_nanos()),
        });
        let min_complete = u32::from(wait != Some(Duration::ZERO));
        let arg = GeteventsArg {
            sigmask: 0,
            sigmask_size: 0,
            min_wait_usec: 0,
            timespec: timespec.as_ref().map_or(0, |t| std::ptr::from_ref(t) as u64),
        };
        let (fd, registered) = match self.registered {
            Some(index) => (index as RawFd, ENTER_REGISTERED_RING),
            None => (self.ring.as_raw_fd(), 0),
        };
        let flags = ENTER_GETEVENTS | ENTER_EXT_ARG | registered;
        // SAFETY: the descriptor is this ring's; `arg` and the timespec it points to live across the call; what the
        // submitted entries point to lives by the promise of `push`.
        let count = unsafe {
            libc::syscall(
                libc::SYS_io_uring_enter,
                fd,
                to_submit,
                min_complete,
                flags,
                std::ptr::from_ref(&arg),
                std::mem::size_of::<GeteventsArg>(),
            )
        };
        if count < 0 {
            return Err(last_errno());
        }
        Ok(count as u32)
    }

    /// Moves all ready completions into `into`. `Err` when the kernel dropped some.
    pub(super) fn reap(&mut self, into: &mut VecDeque<Cqe>) -> Result<(), RingError> {
        let mut queue = self.ring.completion();
        if queue.overflow() > 0 {
            return Err(RingError::CompletionsLost);
        }
        for entry in &mut queue {
            self.stats.completions += 1;
            let Some(tag) = Tag::from_bits(entry.user_data()) else {
                self.stats.stale += 1;
                continue;
            };
            let cqe = Cqe {
                tag,
                result: entry.result(),
                flags: entry.flags(),
            };
            // A wake from another ring answers no request of this one.
            if !cqe.more() && tag.kind != Kind::Mail {
                self.in_flight = self.in_flight.saturating_sub(1);
            }
            into.push_back(cqe);
        }
        Ok(())
    }

    /// Cancels everything and takes completions until the kernel holds nothing more. False when it still does
    /// after the patience of `rounds` waits of 50 ms. `taken` were reaped and will not be dispatched.
    pub(super) fn drain(&mut self, mut taken: VecDeque<Cqe>, rounds: u32) -> bool {
        self.in_flight -= self.backlog.len();
        self.backlog.clear();
        let everything = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build();
        // SAFETY: a cancellation points to nothing.
        unsafe { self.push(Tag::single(Kind::Ignored), everything) };
        for _ in 0..rounds {
            if self.enter(Some(Duration::from_millis(50))).is_err() || self.reap(&mut taken).is_err() {
                return false;
            }
            // An accepted connection nobody will hear of.
            for cqe in taken.drain(..) {
                if cqe.tag.kind == Kind::Accept && cqe.result >= 0 {
                    close_fd(cqe.result);
                }
            }
            if self.in_flight == 0 {
                return true;
            }
        }
        false
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if let Some(index) = self.registered {
            let update = RsrcUpdate {
                offset: index,
                reserved: 0,
                data: 0,
            };
            // SAFETY: the argument is one update structure, read only during the call.
            unsafe {
                libc::syscall(
                    libc::SYS_io_uring_register,
                    self.ring.as_raw_fd(),
                    UNREGISTER_RING_FDS,
                    std::ptr::from_ref(&update),
                    1u32,
                )
            };
        }
    }
}

pub(super) fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn close_fd(fd: RawFd) {
    // SAFETY: the kernel just gave this descriptor to us and nobody else knows it.
    unsafe { libc::close(fd) };
}

/// Sets the ring up with the best flags that this kernel takes; whether completion work is deferred.
fn build(cfg: &RingConfig) -> Result<(IoUring, bool), RingError> {
    type Flags = fn(&mut io_uring::Builder);
    let attempts: [(bool, Flags); 3] = [
        (true, |b| {
            b.setup_single_issuer().setup_defer_taskrun().setup_no_sqarray();
        }),
        (true, |b| {
            b.setup_single_issuer().setup_defer_taskrun();
        }),
        (false, |b| {
            b.setup_coop_taskrun();
        }),
    ];
    let mut errno = libc::EINVAL;
    for (deferred, flags) in attempts {
        let mut builder = IoUring::builder();
        builder
            .dontfork()
            .setup_clamp()
            .setup_submit_all()
            .setup_cqsize(cfg.cq_entries.max(cfg.sq_entries));
        flags(&mut builder);
        match builder.build(cfg.sq_entries) {
            Ok(ring) => return Ok((ring, deferred)),
            Err(error) => errno = error.raw_os_error().unwrap_or(libc::EIO),
        }
        if errno != libc::EINVAL {
            break;
        }
    }
    Err(RingError::Setup { errno })
}

/// Refuses a kernel that lacks something there is no substitute for.
fn required(ring: &IoUring) -> Result<Probe, RingError> {
    let params = ring.params();
    if !params.is_feature_nodrop() || !params.is_feature_ext_arg() {
        return Err(RingError::Unsupported {
            what: "completion queues that never drop (NODROP) and timed waits (EXT_ARG)",
        });
    }
    let mut probe = Probe::new();
    ring.submitter()
        .register_probe(&mut probe)
        .map_err(|error| RingError::Setup {
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        })?;
    if let Some((_, what)) = REQUIRED_OPCODES
        .iter()
        .find(|(code, _)| !probe.is_supported(*code))
    {
        return Err(RingError::Unsupported { what });
    }
    Ok(probe)
}

/// Operations without which the reactor cannot work.
const REQUIRED_OPCODES: [(u8, &str); 15] = [
    (opcode::Read::CODE, "READ"),
    (opcode::Write::CODE, "WRITE"),
    (opcode::Writev::CODE, "WRITEV"),
    (opcode::Fsync::CODE, "FSYNC"),
    (opcode::Fallocate::CODE, "FALLOCATE"),
    (opcode::OpenAt::CODE, "OPENAT"),
    (opcode::Close::CODE, "CLOSE"),
    (opcode::RenameAt::CODE, "RENAMEAT"),
    (opcode::UnlinkAt::CODE, "UNLINKAT"),
    (opcode::MkDirAt::CODE, "MKDIRAT"),
    (opcode::Accept::CODE, "ACCEPT"),
    (opcode::Recv::CODE, "RECV"),
    (opcode::Send::CODE, "SEND"),
    (opcode::SendMsg::CODE, "SENDMSG"),
    (opcode::AsyncCancel::CODE, "ASYNC_CANCEL"),
];

/// Registers the ring's descriptor for this thread (5.18), which saves a look-up per enter. `None` where refused.
fn register_ring_fd(fd: RawFd) -> Option<u32> {
    let mut update = RsrcUpdate {
        offset: u32::MAX,
        reserved: 0,
        data: fd as u64,
    };
    // SAFETY: the argument is one update structure, which the kernel reads and writes during the call.
    let count = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            fd,
            REGISTER_RING_FDS,
            std::ptr::from_mut(&mut update),
            1u32,
        )
    };
    (count == 1).then_some(update.offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_survives_the_kernel() {
        let key = Key {
            slot: u32::MAX,
            generation: GENERATION_MASK,
        };
        for kind in [Kind::Ignored, Kind::Disk, Kind::Send] {
            let tag = Tag::new(kind, key);
            assert_eq!(Tag::from_bits(tag.bits()), Some(tag));
        }
        assert_eq!(Tag::from_bits(0), None);
    }
}
