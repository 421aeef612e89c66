//! One partition's batches on their way: a plain state machine, driven by `producer/mod.rs`.
//!
//! Invariants:
//! - Batches are sent in the order they were filled; at most `in_flight` of them are unanswered.
//! - After any failure nothing is sent until every unanswered batch has been answered; then all that are not
//!   acknowledged are sent again, in order, with the bytes and sequences of the first time. So the broker can tell a
//!   repetition from a new batch, and no batch overtakes another.
//! - When a batch fails for good, every later one of the lane fails too, and the next gets a fresh producer id: what is
//!   stored is always a prefix of what was handed in, and no sequence number is used for two contents.
//! - "Failed" means "not known to be stored": when the answer to an earlier try was lost, it may be.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use ringfence_engine::batch::{BatchBuilder, BatchError, NewRecord};
use ringfence_engine::types::Offset;

use super::receipt::Receipt;
use crate::client::{Bytes, ClientError, backoff};

/// Bounds of a lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaneConfig {
    /// Unanswered batches at most.
    pub(super) in_flight: usize,
    /// A batch is closed before it grows beyond this.
    pub(super) batch_bytes: usize,
    /// How long a batch that is not full waits for more records.
    pub(super) linger: Duration,
    /// A batch that is not acknowledged this long after it was opened has failed.
    pub(super) delivery_timeout: Duration,
    /// Whether batches carry producer id and sequence.
    pub(super) idempotent: bool,
}

/// A producer id with its epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) id: i64,
    pub(super) epoch: i16,
}

/// Names a batch in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket(u64);

/// How a batch fared.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Outcome {
    /// Acknowledged; the base offset, where the broker told it.
    Stored(Option<Offset>),
    /// Not acknowledged, but may be when it is sent again.
    Again(ClientError),
    /// The broker misses an earlier sequence: the fault of an earlier batch that failed, unless this is the first.
    Gap(ClientError),
    /// Refused for good; it is not stored.
    Refused(ClientError),
}

/// What the driver has to do next.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// Send these bytes; report with [`Lane::answered`].
    Send { ticket: Ticket, batch: Bytes },
    /// Get a producer id; report with [`Lane::identify`].
    Identify,
    /// Ask where the leader is, then [`Lane::resume`]; on failure [`Lane::postpone`].
    Recover,
    /// Nothing until something is reported, or until this moment.
    Wait(Option<Instant>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Sends as batches come.
    Flowing,
    /// A batch failed; waits for the answers of the others in flight. From `Flowing`.
    Draining,
    /// Pauses before the next try. From `Draining`, or from itself when recovering failed.
    Pausing { until: Instant },
}

struct Pending {
    ticket: Ticket,
    batch: Batch,
    receipt: Rc<Receipt>,
    deadline: Instant,
    in_flight: bool,
}

enum Batch {
    Closed(BatchBuilder),
    /// Has been sent at least once; its bytes are fixed.
    Sealed(Bytes),
}

struct Open {
    builder: BatchBuilder,
    receipt: Rc<Receipt>,
    opened: Instant,
}

pub(super) struct Lane {
    config: LaneConfig,
    identity: Option<Identity>,
    next_sequence: i32,
    next_ticket: u64,
    queue: VecDeque<Pending>,
    open: Option<Open>,
    state: State,
    tries: u32,
    last_error: Option<ClientError>,
    flushing: bool,
}

impl Lane {
    pub(super) fn new(config: LaneConfig, identity: Option<Identity>) -> Lane {
        Lane {
            config,
            identity,
            next_sequence: 0,
            next_ticket: 0,
            queue: VecDeque::new(),
            open: None,
            state: State::Flowing,
            tries: 0,
            last_error: None,
            flushing: false,
        }
    }

    /// Closes the open batch as soon as possible, whatever the linger.
    pub(super) fn flush(&mut self) {
        self.flushing = self.open.is_some();
    }

    /// Adds a record; `receipt` makes the receipt of a new batch. Returns the batch's receipt and the record's number
    /// in it.
    pub(super) fn push(
        &mut self,
        now: Instant,
        record: NewRecord<'_>,
        size: usize,
        receipt: impl FnOnce() -> Rc<Receipt>,
    ) -> Result<(Rc<Receipt>, u32), BatchError> {
        let full = |open: &Open| open.builder.size().saturating_add(size) > self.config.batch_bytes;
        if self.open.as_ref().is_some_and(full) {
            self.close();
        }
        if let Some(open) = self.open.as_mut() {
            open.builder.push(record)?;
            open.receipt.grow(1, size);
            return Ok((Rc::clone(&open.receipt), open.builder.count() - 1));
        }
        let mut builder = BatchBuilder::new();
        builder.push(record)?;
        let receipt = receipt();
        receipt.grow(1, size);
        self.open = Some(Open {
            builder,
            receipt: Rc::clone(&receipt),
            opened: now,
        });
        Ok((receipt, 0))
    }

    /// Adds a whole batch (not empty) behind everything pushed before.
    pub(super) fn push_batch(&mut self, now: Instant, builder: BatchBuilder, receipt: Rc<Receipt>) {
        self.close();
        self.enqueue(now, builder, receipt);
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            self.flushing = false;
            self.enqueue(open.opened, open.builder, open.receipt);
        }
    }

    fn enqueue(&mut self, opened: Instant, builder: BatchBuilder, receipt: Rc<Receipt>) {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.queue.push_back(Pending {
            ticket,
            batch: Batch::Closed(builder),
            receipt,
            deadline: opened + self.config.delivery_timeout,
            in_flight: false,
        });
    }

    /// What to do now.
    pub(super) fn step(&mut self, now: Instant) -> Step {
        self.expire(now);
        if self.state == State::Draining && self.in_flight() == 0 {
            self.set_state(State::Pausing {
                until: now + backoff(self.tries),
            });
            self.tries += 1;
        }
        match self.state {
            State::Draining => Step::Wait(self.next_deadline()),
            State::Pausing { until } if until > now => {
                Step::Wait(earliest(Some(until), self.next_deadline()))
            }
            State::Pausing { .. } => Step::Recover,
            State::Flowing => self.flow(now),
        }
    }

    fn flow(&mut self, now: Instant) -> Step {
        let room = self.in_flight() < self.config.in_flight;
        let linger = self.close_when_due(now, room);
        let wait = Step::Wait(earliest(linger, self.next_deadline()));
        let Some(at) = self
            .queue
            .iter()
            .position(|pending| !pending.in_flight)
            .filter(|_| room)
        else {
            return wait;
        };
        let batch = match &self.queue[at].batch {
            Batch::Sealed(bytes) => bytes.clone(),
            Batch::Closed(_) if self.config.idempotent && self.identity.is_none() => {
                // Batches of the old identity go first: with another one the broker could not order them.
                return if at == 0 { Step::Identify } else { wait };
            }
            Batch::Closed(_) => self.seal(at),
        };
        let pending = &mut self.queue[at];
        pending.batch = Batch::Sealed(batch.clone());
        pending.in_flight = true;
        Step::Send {
            ticket: pending.ticket,
            batch,
        }
    }

    /// Closes the open batch when its linger is over (or it is flushed) and there is room to send it; else returns
    /// the moment when its linger is over.
    fn close_when_due(&mut self, now: Instant, room: bool) -> Option<Instant> {
        let due = self.open.as_ref()?.opened + self.config.linger;
        if !self.flushing && due > now {
            return Some(due);
        }
        // While there is no room, the batch may as well go on filling.
        let waiting = self.queue.iter().any(|pending| !pending.in_flight);
        if room && !waiting {
            self.close();
        }
        None
    }

    /// Fixes the bytes of a batch: identity, sequence, checksum.
    fn seal(&mut self, at: usize) -> Bytes {
        let batch = std::mem::replace(&mut self.queue[at].batch, Batch::Sealed(Bytes::default()));
        let mut builder = match batch {
            Batch::Sealed(bytes) => return bytes,
            Batch::Closed(builder) => builder,
        };
        if let Some(identity) = self.identity {
            builder.producer(identity.id, identity.epoch, self.next_sequence);
            // Sequences wrap from i32::MAX to 0, as Kafka's do.
            let next =
                (i64::from(self.next_sequence) + i64::from(builder.count())) % (i64::from(i32::MAX) + 1);
            self.next_sequence = next as i32;
        }
        Bytes::from(
            builder
                .finish()
                .expect("a batch is enqueued only with a record in it"),
        )
    }

    /// A batch was answered, or its connection was lost.
    pub(super) fn answered(&mut self, ticket: Ticket, outcome: Outcome) {
        // Batches that failed together with an earlier one are gone; their late answers say nothing new.
        let Some(at) = self.queue.iter().position(|pending| pending.ticket == ticket) else {
            return;
        };
        self.queue[at].in_flight = false;
        match outcome {
            Outcome::Stored(base) => {
                if let Some(done) = self.queue.remove(at) {
                    done.receipt.settle(Ok(base));
                }
                self.tries = 0;
            }
            Outcome::Again(error) => self.drain(error),
            Outcome::Gap(error) if at > 0 => self.drain(error),
            Outcome::Gap(error) | Outcome::Refused(error) => self.fail_from(at, error),
        }
    }

    fn drain(&mut self, error: ClientError) {
        self.last_error = Some(error);
        self.set_state(State::Draining);
    }

    /// A producer id for the batches that follow.
    pub(super) fn identify(&mut self, identity: Identity) {
        self.identity = Some(identity);
        self.next_sequence = 0;
    }

    /// The leader is known again.
    pub(super) fn resume(&mut self) {
        self.set_state(State::Flowing);
    }

    /// Recovering, or getting an id, failed.
    pub(super) fn postpone(&mut self, error: ClientError) {
        self.drain(error);
    }

    /// Nobody will drive this lane any more.
    pub(super) fn abandon(&mut self) {
        if let Some(open) = self.open.take() {
            open.receipt.settle(Err(ClientError::Closed));
        }
        self.fail_from(0, ClientError::Closed);
    }

    fn expire(&mut self, now: Instant) {
        let Some(at) = self.queue.iter().position(|pending| pending.deadline <= now) else {
            return;
        };
        let last = self.last_error.clone().unwrap_or_else(|| ClientError::Refused {
            error: crate::error::WireError::RequestTimedOut,
            message: "the broker did not answer".to_owned(),
        });
        self.fail_from(at, last.gave_up(self.config.delivery_timeout));
    }

    /// Fails the batch at `at` and all after it, so that none is stored behind a gap.
    fn fail_from(&mut self, at: usize, error: ClientError) {
        let mut failed = self.queue.split_off(at).into_iter();
        if let Some(first) = failed.next() {
            first.receipt.settle(Err(error.clone()));
        }
        let earlier = ClientError::EarlierFailed(Box::new(error));
        let open = self.open.take().map(|open| open.receipt);
        for receipt in failed.map(|pending| pending.receipt).chain(open) {
            receipt.settle(Err(earlier.clone()));
        }
        self.identity = None;
        if self.queue.is_empty() {
            self.set_state(State::Flowing);
        }
    }

    fn in_flight(&self) -> usize {
        self.queue.iter().filter(|pending| pending.in_flight).count()
    }

    /// Deadlines rise along the queue: a batch is enqueued after the ones before it were opened.
    fn next_deadline(&self) -> Option<Instant> {
        self.queue.front().map(|pending| pending.deadline)
    }

    fn set_state(&mut self, next: State) {
        let legal = match next {
            State::Flowing => true,
            State::Draining => true,
            State::Pausing { .. } => self.state == State::Draining,
        };
        assert!(legal, "{next:?} does not follow {:?}", self.state);
        self.state = next;
    }
}

fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
