//! Drives all connections of a load from one pinned thread.
//!
//! The loop sleeps in the kernel until a socket is ready or a batch is nearly due, and spins only for the last moments
//! before that: a timer that wakes late would be measured as the broker's latency, and a loop that never sleeps keeps
//! the kernel's own threads, which complete synced writes, from the core for milliseconds (measured).

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ringfence_broker::native::Acks;
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::types::{PartitionId, ShardId};
use rustix::event::{Timespec, poll};
use rustix::io::Errno;
use thiserror::Error;

use super::schedule::{Length, Pace, Schedule};
use super::wire::{Answer, Wire};
use crate::latency::Latencies;

/// A refused batch is sent again this much later.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// Before a due time the loop spins for this long instead of sleeping: more than a timer is late.
const SPIN: Duration = Duration::from_micros(150);

/// The longest sleep.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// A batch without its acknowledgement for this long ends the run.
const STALLED: Duration = Duration::from_secs(60);

/// What to send.
#[derive(Debug, Clone)]
pub struct Load {
    /// Native address of the broker.
    pub address: SocketAddr,
    /// Partitions and their shards; every producer goes through all of them in turn.
    pub targets: Vec<(PartitionId, ShardId)>,
    /// Producers, each with a connection to every shard it needs.
    pub producers: usize,
    /// When batches leave.
    pub pace: Pace,
    /// When the run is over.
    pub length: Length,
    /// Acknowledgement asked for.
    pub acks: Acks,
    /// The batch, as often as needed.
    pub batch: BufSlice,
    /// Whether to keep every acknowledgement's moment, for figures about parts of a run.
    pub timeline: bool,
}

/// One acknowledgement of a run.
#[derive(Debug, Clone, Copy)]
pub struct Ack {
    /// When it arrived, since the start of the run.
    pub at: Duration,
    /// How long it took.
    pub latency: Duration,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Sent {
    /// Acknowledged batches (sent ones with `acks=0`).
    pub batches: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Batches refused with a retriable error and sent again.
    pub retries: u64,
    /// From the first due batch to the last answer.
    pub elapsed: Duration,
    /// From due time (or sending, in a window) to acknowledgement.
    pub latencies: Latencies,
    /// When the run began.
    pub start: Instant,
    /// Every acknowledgement, when asked for.
    pub timeline: Vec<Ack>,
}

impl Sent {
    /// Bytes per second / 10^6.
    #[must_use]
    pub fn mb_per_s(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64() / 1e6
    }
}

/// Why a load ended early.
#[derive(Debug, Error)]
pub enum LoadError {
    #[error("a connection of the load failed: {0}")]
    Connection(#[from] io::Error),
    #[error("the broker refused a batch for good: {0}")]
    Refused(ringfence_broker::error::WireError),
    #[error("a batch was not acknowledged within {STALLED:?}")]
    Stalled,
    #[error("there is no partition to send to")]
    NoTargets,
}

/// A refused batch on its way back.
struct Retry {
    due: Instant,
    wire: usize,
    target: usize,
    since: Instant,
}

/// The connections of a run and what came of it so far.
struct Generator<'a> {
    load: &'a Load,
    /// One row per producer; the index of a shard's connection in `wires`.
    routes: Vec<Vec<Option<usize>>>,
    wires: Vec<Wire>,
    retries: VecDeque<Retry>,
    sent: Sent,
}

/// Runs a load to its end.
///
/// # Errors
/// See [`LoadError`].
pub fn run(load: &Load) -> Result<Sent, LoadError> {
    let mut generator = Generator::connect(load)?;
    generator.run()?;
    Ok(generator.sent)
}

impl Generator<'_> {
    fn connect(load: &Load) -> Result<Generator<'_>, LoadError> {
        let shards = load
            .targets
            .iter()
            .map(|(_, shard)| usize::from(shard.0) + 1)
            .max();
        let shards = shards.ok_or(LoadError::NoTargets)?;
        let mut wires = Vec::new();
        let mut routes = vec![vec![None; shards]; load.producers];
        for row in &mut routes {
            for (_, shard) in &load.targets {
                let slot = &mut row[usize::from(shard.0)];
                if slot.is_none() {
                    *slot = Some(wires.len());
                    wires.push(Wire::connect(load.address, *shard, load.acks)?);
                }
            }
        }
        Ok(Generator {
            load,
            routes,
            wires,
            retries: VecDeque::new(),
            sent: Sent {
                batches: 0,
                bytes: 0,
                retries: 0,
                elapsed: Duration::ZERO,
                latencies: Latencies::new(),
                start: Instant::now(),
                timeline: Vec::new(),
            },
        })
    }

    fn run(&mut self) -> Result<(), LoadError> {
        let load = self.load;
        self.sent.start = Instant::now();
        let mut schedule = Schedule::new(load.pace, load.length, load.batch.len() as u64, self.sent.start);
        let mut scratch = vec![0; 256 << 10];
        let mut answers = Vec::new();
        let mut last_answer = self.sent.start;
        loop {
            let now = Instant::now();
            self.issue(&mut schedule, now);
            for index in 0..self.wires.len() {
                let wire = &mut self.wires[index];
                wire.flush()?;
                wire.poll(&mut scratch, &mut answers)?;
                if !answers.is_empty() {
                    last_answer = Instant::now();
                    self.take(index, &mut answers, last_answer)?;
                }
            }
            if schedule.finished(now) && self.idle() {
                self.sent.elapsed = last_answer.max(now) - self.sent.start;
                return Ok(());
            }
            if self.wires.iter().any(|wire| wire.stalled(now, STALLED)) {
                return Err(LoadError::Stalled);
            }
            self.wait(&schedule)?;
        }
    }

    /// Sleeps until a socket is ready or something is nearly due.
    fn wait(&self, schedule: &Schedule) -> io::Result<()> {
        let retry = self.retries.front().map(|retry| retry.due);
        let now = Instant::now();
        let due = schedule.due().filter(|_| !schedule.finished(now));
        let until = due.into_iter().chain(retry).min();
        let sleep = until.map_or(LONGEST_SLEEP, |until| {
            until
                .saturating_duration_since(now)
                .saturating_sub(SPIN)
                .min(LONGEST_SLEEP)
        });
        if sleep.is_zero() {
            std::hint::spin_loop();
            return Ok(());
        }
        let mut interests: Vec<_> = self.wires.iter().map(Wire::interest).collect();
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: sleep.as_nanos() as i64,
        };
        match poll(&mut interests, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn idle(&self) -> bool {
        self.retries.is_empty()
            && self
                .wires
                .iter()
                .all(|wire| wire.in_flight() == 0 && wire.unsent() == 0)
    }

    /// Queues what is due: retries first, then new batches.
    fn issue(&mut self, schedule: &mut Schedule, now: Instant) {
        while self.retries.front().is_some_and(|retry| retry.due <= now) {
            let Some(retry) = self.retries.pop_front() else {
                break;
            };
            self.push(retry.wire, retry.target, retry.since);
        }
        match self.load.pace {
            Pace::PerSecond(_) => {
                while let Some((number, due)) = schedule.next(now) {
                    self.send(number, due);
                }
            }
            Pace::Window(window) => {
                // A batch that waits to be sent again keeps its place in the window, or refusals would multiply.
                let out: usize = self
                    .wires
                    .iter()
                    .map(|wire| wire.in_flight().max(wire.unsent()))
                    .sum();
                let room = (window * self.wires.len()).saturating_sub(out + self.retries.len());
                // At most one window's worth per turn, so that answers are read in between.
                for _ in 0..room {
                    let Some((number, due)) = schedule.next(now) else {
                        return;
                    };
                    self.send(number, due);
                }
            }
        }
    }

    /// Batch `number` goes to producer `number % producers`, who takes the partitions in turn.
    fn send(&mut self, number: u64, since: Instant) {
        let target = (number % self.load.targets.len() as u64) as usize;
        let producer = (number % self.load.producers as u64) as usize;
        let shard = self.load.targets[target].1;
        let wire = self.routes[producer][usize::from(shard.0)];
        self.push(
            wire.expect("connect made a route to the shard of every target"),
            target,
            since,
        );
        if self.load.acks == Acks::None {
            self.count(since, since);
        }
    }

    fn push(&mut self, wire: usize, target: usize, since: Instant) {
        let partition = self.load.targets[target].0;
        self.wires[wire].push(target, partition, &self.load.batch, since);
    }

    fn take(&mut self, wire: usize, answers: &mut Vec<Answer>, now: Instant) -> Result<(), LoadError> {
        for Answer { pending, error } in answers.drain(..) {
            match error {
                None => self.count(pending.since, now),
                Some(error) if !error.retriable() => return Err(LoadError::Refused(error)),
                Some(_) if now > pending.since + STALLED => return Err(LoadError::Stalled),
                Some(_) => {
                    self.sent.retries += 1;
                    self.retries.push_back(Retry {
                        due: now + RETRY_AFTER,
                        wire,
                        target: pending.target,
                        since: pending.since,
                    });
                }
            }
        }
        Ok(())
    }

    fn count(&mut self, since: Instant, now: Instant) {
        let bytes = self.load.batch.len() as u64;
        self.sent.batches += 1;
        self.sent.bytes += bytes;
        self.sent.latencies.record(now.saturating_duration_since(since));
        if self.load.timeline {
            self.sent.timeline.push(Ack {
                at: now - self.sent.start,
                latency: now.saturating_duration_since(since),
            });
        }
    }
}
