//! Drives a node through a seeded random workload and compares everything it says with the model.

mod events;
mod reopen;
mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use ringfence_engine::config::StoreConfig;
use ringfence_engine::error::ReadError;
use ringfence_engine::io::sim::{Crash, Rng, SimConfig, SimDisk};
use ringfence_engine::store::ReadBytes;
use ringfence_engine::types::{PartitionId, ShardId};

use super::model::{Partition, Sequence};
use super::node::Node;
use super::rot::Rot;
use super::script::{self, Script};
use super::{Profile, Summary, Violation};

/// Simulated time after which an unanswered command counts as hung.
const PATIENCE_NS: u64 = 120_000_000_000;

/// Time after which the last frame has its promise: the Mark window and a slow write or two.
const QUIET_NS: u64 = 20_000_000;

/// Bytes that a start needs on a full disk.
const START_RESERVE: u64 = 64 << 10;

/// What a run looks like; everything follows from the seed.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// The faults.
    pub profile: Profile,
    /// Number of random workload steps; a script has its own.
    pub ops: u64,
    /// A fixed workload instead of the random one.
    pub script: Option<Script>,
    /// The only crash during a script: at this boundary of the disk.
    pub crash_at: Option<(u64, Crash)>,
    /// A second crash of the script, so many boundaries after the start that follows the first.
    pub then_after: Option<u64>,
    /// A deliberate bug of the store.
    #[cfg(feature = "canary")]
    pub canary: Option<ringfence_engine::canary::Canary>,
}

impl Plan {
    /// A random workload of `ops` steps.
    #[must_use]
    pub fn random(seed: u64, profile: Profile, ops: u64) -> Plan {
        Plan {
            seed,
            profile,
            ops,
            script: None,
            crash_at: None,
            then_after: None,
            #[cfg(feature = "canary")]
            canary: None,
        }
    }

    /// A script without faults, crashed at a boundary.
    #[must_use]
    pub fn scripted(script: Script, crash_at: Option<(u64, Crash)>) -> Plan {
        Plan {
            script: Some(script),
            crash_at,
            ..Plan::random(1, script.profile(), 0)
        }
    }
}

/// A command that was not yet answered.
#[derive(Debug)]
enum Waiting {
    Append {
        partition: PartitionId,
        bytes: Vec<u8>,
        time: i64,
        sequence: Option<Sequence>,
        /// Original offsets, when this is a retry of a batch that is in the log.
        original: Option<(u64, u64)>,
    },
    Read {
        partition: PartitionId,
        offset: u64,
        limit: u64,
    },
    Time {
        partition: PartitionId,
        timestamp: i64,
        limit: u64,
    },
    Command {
        what: &'static str,
    },
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Waiting::Append { partition, bytes, .. } => {
                write!(f, "append of {} bytes to {partition}", bytes.len())
            }
            Waiting::Read {
                partition, offset, ..
            } => write!(f, "read of {partition} at {offset}"),
            Waiting::Time {
                partition, timestamp, ..
            } => write!(f, "lookup of time {timestamp} in {partition}"),
            Waiting::Command { what } => f.write_str(what),
        }
    }
}

/// The workload and its checks.
pub(super) struct Runner {
    plan: Plan,
    rng: Rng,
    /// `None` only while the process is down.
    node: Option<Node>,
    config: StoreConfig,
    shards: u16,
    partitions: BTreeMap<PartitionId, Partition>,
    /// Dropped and answered: must never be seen again.
    gone: BTreeSet<PartitionId>,
    /// Producers that a partition no longer knows after a cut; they go on with a new epoch.
    forgotten: BTreeSet<(PartitionId, i64)>,
    waiting: BTreeMap<u64, (u64, Waiting)>,
    last_read: Option<(u64, Result<ReadBytes, ReadError>)>,
    next_token: u64,
    next_topic: u64,
    next_epoch: u32,
    shard_fenced: bool,
    /// The next life crashes so many boundaries after its start.
    crash_again: Option<u64>,
    /// What rots while the process is down the next time.
    rot: Option<Rot>,
    /// The journal rots once in a run: of two flips one may hide the other.
    has_rotted: bool,
    summary: Summary,
}

impl Runner {
    /// A node on an empty disk.
    pub(super) fn new(plan: Plan) -> Result<Runner, Violation> {
        let mut rng = Rng::new(plan.seed);
        let grain = match plan.script {
            Some(script) => script.grain(),
            None => *rng.pick(&[4096, 4096, 4096, 8192]),
        };
        let disk = SimConfig {
            grain,
            ..SimConfig::default()
        };
        let mut disk = SimDisk::new(rng.bits(), disk);
        disk.stop_at(plan.crash_at.map(|(at, _)| at));
        let (config, shards) = match plan.script {
            Some(script) => (script::store_config(script), 1),
            None => (store_config(&mut rng, grain), *rng.pick(&[1, 1, 1, 2])),
        };
        #[cfg(feature = "canary")]
        let config = StoreConfig {
            canary: plan.canary,
            ..config
        };
        let mut runner = Runner {
            summary: Summary::new(plan.seed, plan.profile),
            plan,
            rng,
            node: None,
            config,
            shards,
            partitions: BTreeMap::new(),
            gone: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            waiting: BTreeMap::new(),
            last_read: None,
            next_token: 1,
            next_topic: 1,
            next_epoch: 1,
            shard_fenced: false,
            crash_again: None,
            rot: None,
            has_rotted: false,
        };
        runner.reopen(disk)?;
        Ok(runner)
    }

    /// The whole run: the workload, then a power cut, then everything must be there and writable on a healthy disk.
    pub(super) fn run(mut self) -> Result<Summary, Violation> {
        match self.plan.script {
            Some(script) => {
                script.play(&mut self)?;
                self.node()?.disk.stop_at(None);
                self.summary.script_boundaries = self.node()?.disk.boundaries();
            }
            None => self.play_random()?,
        }
        self.restart(Crash::Power, true)?;
        self.check_service_returned()?;
        let disk = &self.node()?.disk;
        let (trace, now, boundaries) = (disk.trace(), disk.now(), disk.boundaries());
        self.summary.trace = trace;
        self.summary.simulated_ns = now;
        self.summary.boundaries = boundaries;
        Ok(self.summary)
    }

    fn node(&mut self) -> Result<&mut Node, Violation> {
        self.node
            .as_mut()
            .ok_or_else(|| Violation("the node is down".to_owned()))
    }

    fn token(&mut self, waiting: Waiting) -> Result<u64, Violation> {
        let token = self.next_token;
        self.next_token += 1;
        let now = self.node()?.disk.now();
        self.waiting.insert(token, (now, waiting));
        Ok(token)
    }

    fn play_random(&mut self) -> Result<(), Violation> {
        for _ in 0..self.rng.between(1, 4) {
            self.create()?;
        }
        (0..self.plan.ops).try_for_each(|_| self.step())
    }

    fn step(&mut self) -> Result<(), Violation> {
        match self.rng.below(100) {
            0..55 => self.append_burst()?,
            55..66 => self.read()?,
            66..69 => self.seek_time()?,
            69..72 => self.begin_epoch_somewhere()?,
            72..76 => self.truncate()?,
            76..80 => self.set_log_start()?,
            80..82 => self.create()?,
            82..84 => self.drop_one()?,
            84..88 => self.retry_an_old_batch()?,
            88..92 => self.let_time_pass()?,
            92..94 if self.plan.profile == Profile::Decay => self.rot_journal()?,
            92..94 => self.fill_or_free_disk()?,
            94..95 => self.stop_cleanly()?,
            95..97 => self.drain()?,
            _ => self.crash_soon()?,
        }
        if self.rng.odds(2, 3) {
            let turns = self.rng.between(1, 6);
            for _ in 0..turns {
                self.turn()?;
            }
        }
        Ok(())
    }

    /// One loop turn of the node, with all its checks.
    fn turn(&mut self) -> Result<(), Violation> {
        let node = self.node()?;
        let limit = node.disk.now() + 200_000;
        node.turn(limit);
        self.take_events()?;
        self.watch()
    }

    /// After a call: the turn's end, its events, and a crash when one was planned for about now.
    fn called(&mut self) -> Result<(), Violation> {
        self.take_events()?;
        if self.rng.odds(1, 2) {
            self.node()?.end_turn();
            self.take_events()?;
        }
        self.watch()
    }

    fn watch(&mut self) -> Result<(), Violation> {
        if self.node()?.disk.stopped() {
            let kind = self.crash_kind();
            self.restart(kind, false)?;
        }
        Ok(())
    }

    fn crash_kind(&mut self) -> Crash {
        if let Some((_, kind)) = self.plan.crash_at {
            return kind;
        }
        *self.rng.pick(&[Crash::Kill, Crash::Power])
    }

    /// Full or not, no append and no cut waits for somebody to free space: they are taken or refused.
    fn full_disk_answers(&mut self) -> Result<(), Violation> {
        const SOON_NS: u64 = 30_000_000_000;
        let start = self.node()?.disk.now();
        loop {
            self.node()?.end_turn();
            self.take_events()?;
            let unanswered = self.waiting.values().find(|(_, waiting)| {
                matches!(
                    waiting,
                    Waiting::Append { .. } | Waiting::Command { what: "truncate" }
                )
            });
            let unanswered = unanswered.map(|(_, waiting)| format!("{waiting:.80?}"));
            let node = self.node()?;
            let now = node.disk.now();
            match unanswered {
                Some(_) if !node.disk.stopped() && now <= start + SOON_NS => node.turn(now + SOON_NS),
                Some(waiting) if !node.disk.stopped() => {
                    return Err(Violation(format!("waits for space: {waiting}")));
                }
                _ => return Ok(()),
            }
        }
    }

    /// With room on the disk everything must come to rest: answered, durable.
    pub(super) fn drain(&mut self) -> Result<(), Violation> {
        if self.plan.profile == Profile::Enospc {
            self.full_disk_answers()?;
        }
        // What is accepted may wait for space.
        self.node()?.disk.set_capacity(None);
        let start = self.node()?.disk.now();
        loop {
            self.node()?.end_turn();
            self.take_events()?;
            if self.node()?.disk.stopped() {
                self.watch()?;
                continue;
            }
            if self.is_at_rest() {
                return Ok(());
            }
            let now = self.node()?.disk.now();
            let idle = self.node()?.next_at().is_none();
            if idle || now > start + PATIENCE_NS {
                let waiting: Vec<String> = self.waiting.values().map(|(_, w)| w.to_string()).collect();
                let unsettled = self.partitions.values().filter(|p| !p.is_settled());
                let unsettled: Vec<String> = unsettled.map(|p| p.id.to_string()).collect();
                return Err(Violation(format!(
                    "no rest after {} s (nothing due: {idle}); waiting: {}; not durable: {}",
                    (now - start) / 1_000_000_000,
                    waiting.join("; "),
                    unsettled.join(" ")
                )));
            }
            self.node()?.turn(start + PATIENCE_NS + 1);
        }
    }

    fn is_at_rest(&self) -> bool {
        let fenced = |p: &Partition| p.fence_seen || self.shard_fenced;
        self.waiting.is_empty() && self.partitions.values().all(|p| p.is_settled() || fenced(p))
    }

    pub(super) fn stop_cleanly(&mut self) -> Result<(), Violation> {
        self.drain()?;
        self.node()?.call_all(|store, _, _| store.begin_stop());
        let start = self.node()?.disk.now();
        while !self.node()?.stores().iter().all(|store| store.is_stopped()) {
            let node = self.node()?;
            if node.disk.now() > start + PATIENCE_NS {
                return Err(Violation("a clean stop does not end".to_owned()));
            }
            node.turn(start + PATIENCE_NS + 1);
            self.take_events()?;
            if self.node()?.disk.stopped() {
                return self.watch();
            }
        }
        self.summary.stops += 1;
        self.restart(Crash::Power, false)
    }

    /// Whatever was accepted becomes durable, and what is durable gets its promise on the disk. Then a bit of the journal
    /// flips while the process is down.
    fn rot_journal(&mut self) -> Result<(), Violation> {
        if std::mem::replace(&mut self.has_rotted, true) {
            return Ok(());
        }
        self.rot_after_quiet(Rot::Journal)
    }

    pub(super) fn rot_after_quiet(&mut self, rot: Rot) -> Result<(), Violation> {
        self.drain()?;
        self.pass_time(QUIET_NS)?;
        self.rot = Some(rot);
        let kind = self.crash_kind();
        self.restart(kind, false)
    }

    /// The process dies and comes back. With `heal` the disk has no more faults and room again.
    pub(super) fn restart(&mut self, kind: Crash, heal: bool) -> Result<(), Violation> {
        let Some(node) = self.node.take() else {
            return Err(Violation("the node is down".to_owned()));
        };
        self.summary.count(kind);
        for (what, times) in node.disk.fired() {
            *self.summary.faults.entry(what.clone()).or_default() += times;
        }
        let mut disk = node.crash(kind, self.rng.bits());
        if let Some(rot) = self.rot.take() {
            rot.spoil(&mut disk, &mut self.rng);
            *self.summary.faults.entry(format!("{rot:?}")).or_default() += 1;
        }
        disk.clear_faults();
        if !heal {
            self.crash_again = self.plan.then_after.take();
        }
        if heal {
            disk.set_capacity(None);
        } else {
            for fault in self.plan.profile.faults(&mut self.rng) {
                disk.add_fault(fault);
            }
        }
        self.reopen(disk)
    }

    fn reopen(&mut self, mut disk: SimDisk) -> Result<(), Violation> {
        // A command without an answer may or may not have happened.
        self.waiting.clear();
        self.shard_fenced = false;
        self.partitions.values_mut().for_each(|p| p.fence_seen = false);
        for attempt in 0.. {
            if attempt < 4 && self.plan.script.is_none() && self.rng.odds(1, 4) {
                let ahead = self.rng.between(1, 60);
                disk.stop_at(Some(disk.boundaries() + ahead));
            }
            if attempt >= 4 {
                disk.clear_faults();
                disk.set_capacity(None);
            }
            if self.plan.script.is_none() && self.rng.odds(1, 8) {
                // Another number of shards needs room for journals of their own.
                let before = std::mem::replace(&mut self.shards, *self.rng.pick(&[1, 2, 3]));
                self.summary.reshards += u64::from(before != self.shards && self.summary.starts > 0);
                disk.set_capacity(None);
            }
            // The broker keeps some space back for its start.
            disk.keep_room(START_RESERVE);
            match Node::start(disk, self.shards, &self.config) {
                Ok(node) if node.disk.stopped() => {
                    self.summary.crashes_in_recovery += 1;
                    disk = node.crash(self.crash_kind(), self.rng.bits());
                }
                Ok(mut node) => {
                    if self.plan.script.is_none() {
                        node.disk.stop_at(None);
                    }
                    if let Some(after) = self.crash_again.take() {
                        let at = node.disk.boundaries() + after;
                        node.disk.stop_at(Some(at));
                    }
                    self.node = Some(node);
                    return self.check_reopened();
                }
                Err((failed, error)) => {
                    let died = failed.stopped();
                    if !died && (attempt >= 4 || !self.plan.profile.may_fence()) {
                        return Err(Violation(format!("the node does not start: {error}")));
                    }
                    self.summary.crashes_in_recovery += u64::from(died);
                    self.summary.failed_starts += u64::from(!died);
                    disk = failed.crash(self.crash_kind(), self.rng.bits());
                }
            }
        }
        unreachable!("the attempts end by a start or a violation")
    }
}

/// A store small enough to lap its journal and to checkpoint often.
fn store_config(rng: &mut Rng, grain: usize) -> StoreConfig {
    let journal_file_bytes = *rng.pick(&[65, 129, 257]) * grain as u64;
    let journal_files = rng.between(5, 8) as usize;
    StoreConfig {
        journal_file_bytes,
        journal_files,
        frame_bytes: *rng.pick(&[8 << 10, 32 << 10, 128 << 10]),
        linger_ns: *rng.pick(&[0, 0, 0, 300_000]),
        checkpoint_bytes: journal_file_bytes * rng.between(1, 2),
        memory_bytes: 16 << 20,
        dirty_bytes: 1 << 20,
        write_back_bytes: *rng.pick(&[4 << 10, 64 << 10]),
        write_back_depth: rng.between(1, 8) as usize,
        delete_delay_ms: *rng.pick(&[10, 1_000, 60_000]),
        retention_check_ms: *rng.pick(&[20, 200, 5_000]),
        epoch_entries: *rng.pick(&[3, 100]),
        producers: 100,
        ..StoreConfig::new(7, ShardId(0))
    }
}
