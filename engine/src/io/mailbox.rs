//! Messages between shards and from the control thread: a bounded queue per pair of endpoints, and a bell per receiver.
//!
//! No wake-up is lost (F42): a sender pushes first and then moves the receiver's bell to `RUNG`; a receiver falls
//! asleep only by moving its bell from `AWAKE` to `SLEEPING`, which fails when it was rung, and looks into the queues
//! only after moving it back to `AWAKE`. All three are read-modify-writes of one atomic, so each message is either
//! seen by the look that follows or leaves the bell rung for the next. Only the sender that finds the bell
//! `SLEEPING` pays for a wake: through its own ring with its next submission when both sides have one, through an
//! eventfd otherwise.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rtrb::{Consumer, Producer, PushError, RingBuffer};
use thiserror::Error;

use super::uring::eventfd;

const AWAKE: u8 = 0;
const SLEEPING: u8 = 1;
const RUNG: u8 = 2;

/// `ring_fd` of a receiver that is not woken through its ring.
const NO_RING: i32 = -1;

/// The bell of one receiver.
pub(super) struct Bell {
    state: AtomicU8,
    /// The receiver's ring, while it takes wakes from other rings.
    ring_fd: AtomicI32,
    event: File,
    /// Sleepers that the owner of this bell has to wake with its next submission.
    outgoing: Mutex<Vec<Arc<Bell>>>,
}

impl Bell {
    fn new() -> io::Result<Bell> {
        let event = eventfd().map_err(io::Error::from_raw_os_error)?;
        Ok(Bell {
            state: AtomicU8::new(AWAKE),
            ring_fd: AtomicI32::new(NO_RING),
            event: File::from(event),
            outgoing: Mutex::new(Vec::new()),
        })
    }

    /// Notes that there is mail. True when the receiver sleeps and the caller must wake it.
    fn ring(&self) -> bool {
        self.state.swap(RUNG, Ordering::AcqRel) == SLEEPING
    }

    /// Announces sleep; false when there is mail.
    pub(super) fn begin_wait(&self) -> bool {
        self.state
            .compare_exchange(AWAKE, SLEEPING, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Ends sleep; true when there is mail. Call before looking into the queues.
    pub(super) fn end_wait(&self) -> bool {
        self.state.swap(AWAKE, Ordering::AcqRel) == RUNG
    }

    /// Wakes the receiver by its eventfd, from any thread.
    pub(super) fn wake_by_event(&self) {
        // The counter cannot overflow within 2^64 wakes, and nothing else makes the write fail.
        if let Err(error) = (&self.event).write_all(&1u64.to_ne_bytes()) {
            tracing::error!(%error, "a mailbox bell cannot be rung");
        }
    }

    pub(super) fn event_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Where to send a ring-to-ring wake, if the receiver takes them.
    pub(super) fn ring_fd(&self) -> Option<RawFd> {
        let fd = self.ring_fd.load(Ordering::Acquire);
        (fd != NO_RING).then_some(fd)
    }

    /// Tells senders which ring to wake; `None` sends them back to the eventfd.
    pub(super) fn set_ring(&self, fd: Option<RawFd>) {
        self.ring_fd.store(fd.unwrap_or(NO_RING), Ordering::Release);
    }

    /// Sleepers to wake, each once.
    pub(super) fn take_outgoing(&self) -> Vec<Arc<Bell>> {
        std::mem::take(&mut *self.outgoing.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn wake(self: &Arc<Bell>, target: &Arc<Bell>) {
        if self.ring_fd().is_some() && target.ring_fd().is_some() {
            let mut outgoing = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner);
            outgoing.push(Arc::clone(target));
        } else {
            target.wake_by_event();
        }
    }
}

/// Wakes one endpoint from any thread, without a message.
#[derive(Clone)]
pub struct Waker(Arc<Bell>);

impl Waker {
    /// Makes the endpoint's owner look at its mail soon. Many calls before it looks count as one.
    pub fn wake(&self) {
        if self.0.ring() {
            self.0.wake_by_event();
        }
    }
}

/// The receiver's queue is full; the message comes back.
#[derive(Debug, Error)]
#[error("the mailbox is full")]
pub struct Full<M>(pub M);

struct Outbound<M> {
    queue: Producer<M>,
    bell: Arc<Bell>,
}

/// One corner of a [`mesh`]: sends to every corner and receives from every corner, itself included.
pub struct Endpoint<M> {
    bell: Arc<Bell>,
    to: Vec<Outbound<M>>,
    from: Vec<Consumer<M>>,
}

/// Endpoints that can all send to one another, with room for `capacity` messages on each directed pair.
///
/// # Errors
/// When no eventfd can be made (out of descriptors).
pub fn mesh<M: Send>(endpoints: usize, capacity: usize) -> io::Result<Vec<Endpoint<M>>> {
    let bells: Vec<Arc<Bell>> = (0..endpoints)
        .map(|_| Bell::new().map(Arc::new))
        .collect::<io::Result<_>>()?;
    let mut corners: Vec<Endpoint<M>> = bells
        .iter()
        .map(|bell| Endpoint {
            bell: Arc::clone(bell),
            to: Vec::with_capacity(endpoints),
            from: Vec::with_capacity(endpoints),
        })
        .collect();
    for sender in 0..endpoints {
        for (receiver, bell) in bells.iter().enumerate() {
            let (queue, consumer) = RingBuffer::new(capacity);
            let bell = Arc::clone(bell);
            corners[sender].to.push(Outbound { queue, bell });
            corners[receiver].from.push(consumer);
        }
    }
    Ok(corners)
}

impl<M> Endpoint<M> {
    /// Sends `message` to endpoint `to` and sees that its owner wakes.
    ///
    /// # Errors
    /// When the queue is full; nothing was sent.
    ///
    /// # Panics
    /// When the mesh has no endpoint `to`.
    pub fn send(&mut self, to: usize, message: M) -> Result<(), Full<M>> {
        let target = &mut self.to[to];
        target
            .queue
            .push(message)
            .map_err(|PushError::Full(message)| Full(message))?;
        if target.bell.ring() {
            self.bell.wake(&target.bell);
        }
        Ok(())
    }

    /// Messages that still fit into the queue to endpoint `to`, at least.
    #[must_use]
    pub fn room(&self, to: usize) -> usize {
        self.to[to].queue.slots()
    }

    /// Endpoints of the mesh.
    #[must_use]
    pub fn endpoints(&self) -> usize {
        self.to.len()
    }

    /// Takes every message that is there, sender by sender, in the order of sending; how many.
    pub fn drain(&mut self, mut take: impl FnMut(usize, M)) -> usize {
        let mut total = 0;
        for (from, queue) in self.from.iter_mut().enumerate() {
            // Messages that arrive meanwhile ring the bell again; so one fast sender starves nobody.
            for _ in 0..queue.slots() {
                let Ok(message) = queue.pop() else { break };
                take(from, message);
                total += 1;
            }
        }
        total
    }

    /// A handle that wakes this endpoint from any thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.bell))
    }

    /// For an owner without a reactor: announces that it is about to wait for [`Endpoint::event`]; false when there
    /// is mail and it must not wait.
    #[must_use]
    pub fn begin_wait(&self) -> bool {
        self.bell.begin_wait()
    }

    /// For an owner without a reactor: ends the wait; true when there is mail to drain.
    pub fn end_wait(&self) -> bool {
        self.bell.end_wait()
    }

    /// The eventfd that becomes readable when a waiting owner has mail; read eight bytes from it to clear it.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.bell.event.as_fd()
    }

    /// Blocks the calling thread, which has no reactor, until there is mail.
    ///
    /// # Errors
    /// When the eventfd cannot be read.
    pub fn wait(&self) -> io::Result<()> {
        while self.begin_wait() {
            (&self.bell.event).read_exact(&mut [0; 8])?;
            if self.end_wait() {
                return Ok(());
            }
        }
        self.end_wait();
        Ok(())
    }

    pub(super) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_rung_before_sleep_prevents_it() {
        let mut corners = mesh::<u32>(2, 4).unwrap();
        let mut receiver = corners.pop().unwrap();
        let mut sender = corners.pop().unwrap();
        assert!(receiver.begin_wait(), "nothing there: may sleep");
        assert!(!receiver.end_wait());
        sender.send(1, 5).unwrap();
        assert!(!receiver.begin_wait(), "rung between look and sleep");
        assert!(receiver.end_wait());
        let mut got = Vec::new();
        assert_eq!(receiver.drain(|from, message| got.push((from, message))), 1);
        assert_eq!(got, [(0, 5)]);
        assert!(receiver.begin_wait());
    }

    #[test]
    fn a_full_queue_gives_the_message_back() {
        let mut corners = mesh::<u32>(2, 2).unwrap();
        assert!(corners[0].send(1, 1).is_ok() && corners[0].send(1, 2).is_ok());
        assert_eq!(corners[0].room(1), 0);
        assert!(matches!(corners[0].send(1, 3), Err(Full(3))));
        assert!(corners[0].send(0, 9).is_ok(), "other queues are not concerned");
        let mut got = Vec::new();
        corners[1].drain(|from, message| got.push((from, message)));
        assert_eq!(got, [(0, 1), (0, 2)]);
    }

    #[test]
    fn threads_that_sleep_between_messages_lose_none() {
        const COUNT: u64 = 20_000;
        let mut corners = mesh::<u64>(3, 2).unwrap();
        let mut receiver = corners.pop().unwrap();
        let senders: Vec<_> = corners
            .into_iter()
            .map(|mut sender| {
                std::thread::spawn(move || {
                    for n in 0..COUNT {
                        let mut message = n;
                        while let Err(Full(back)) = sender.send(2, message) {
                            message = back;
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut next = [0u64; 3];
        while next[0] < COUNT || next[1] < COUNT {
            receiver.wait().unwrap();
            receiver.drain(|from, message| {
                assert_eq!(message, next[from]);
                next[from] += 1;
            });
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        assert_eq!(next, [COUNT, COUNT, 0]);
    }
}
