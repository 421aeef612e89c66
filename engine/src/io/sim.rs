//! The seeded simulated disk: executes [`DiskOp`]s in simulated time, with faults, and loses what a crash may lose.
//!
//! Everything is decided by a seed: latencies, the order of completions, faults, what survives a crash. No thread,
//! clock or file is touched. The disk also watches its user: misaligned direct I/O, overlapping writes in flight,
//! operations on a file that is not open and a close under an operation are panics, because they are our bugs.
//!
//! Reads see completed operations, plus any sectors of writes in flight. What a crash leaves is described in
//! `file` (contents) and `tree` (names); [`Crash::Kill`] keeps the caches of kernel and device, [`Crash::Power`]
//! does not.

mod fault;
mod file;
mod rng;
mod tree;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

pub use fault::{Fault, FaultKind, OpKind, When};
pub use rng::Rng;

use fault::FaultPlan;
use file::{SECTOR, mix_sectors};
use tree::{Inode, Tree};

use super::buf::BufSlice;
use super::{Completion, Disk, DiskError, DiskGone, DiskOp, Done, FileClass, FileId, OpId};
use crate::limits::BLOCK;

const EIO: DiskError = DiskError::Io(5);

/// Operation ids of [`Disk::run`]; a core counts from 0 and never gets here.
const RUN_IDS: u64 = 1 << 63;

/// Mean latencies in nanoseconds; each operation takes between half and double, rarely ten times as much.
#[derive(Debug, Clone)]
pub struct Latency {
    pub write: u64,
    pub read: u64,
    /// Added per 4096 bytes written or read.
    pub per_block: u64,
    pub sync: u64,
    pub sync_all: u64,
    /// Open, close, rename, unlink, allocate and the like.
    pub name: u64,
}

impl Default for Latency {
    fn default() -> Latency {
        Latency {
            write: 40_000,
            read: 60_000,
            per_block: 1_200,
            sync: 400_000,
            sync_all: 3_000_000,
            name: 20_000,
        }
    }
}

/// What a simulated disk is like.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// Alignment of direct I/O: a power of two, at least 4096.
    pub alignment: usize,
    /// What the device writes as one, a multiple of the alignment, and so the journal's grain. When power is cut under
    /// a write to a part of such a block of a journal file, the rest of the block is torn with it.
    pub grain: usize,
    /// Bytes of space; `None` is endless.
    pub capacity: Option<u64>,
    /// How long operations take.
    pub latency: Latency,
}

impl Default for SimConfig {
    fn default() -> SimConfig {
        SimConfig {
            alignment: BLOCK,
            grain: BLOCK,
            capacity: None,
            latency: Latency::default(),
        }
    }
}

/// How the process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// The process was killed. What completed stays visible; of what was in flight any sectors or none are visible;
    /// what was not synced is still not promised, and a later [`Crash::Power`] may take it.
    Kill,
    /// Power was cut. Only what was promised stays for sure.
    Power,
}

/// An open file.
#[derive(Debug, Clone)]
struct Handle {
    inode: Inode,
    path: String,
    class: FileClass,
    write: bool,
}

/// An operation that was submitted and has not completed.
#[derive(Debug, Clone)]
struct Flight {
    id: OpId,
    op: DiskOp,
    /// Where file operations go.
    inode: Option<Inode>,
    /// A sync promises changes up to this one: those complete when it was submitted.
    seq: u64,
    fault: Option<FaultKind>,
}

/// The simulated disk. A clone is an independent disk in the same state, made cheaply.
#[derive(Debug, Clone)]
pub struct SimDisk {
    config: SimConfig,
    rng: Rng,
    plan: FaultPlan,
    fired: BTreeMap<String, u64>,
    tree: Tree,
    files: BTreeMap<FileId, Handle>,
    /// Ids of opens in flight; not yet usable.
    opening: BTreeSet<FileId>,
    flights: BTreeMap<(u64, u64), Flight>,
    now: u64,
    serial: u64,
    seq: u64,
    next_run: u64,
    boundaries: u64,
    stop_at: Option<u64>,
    trace: u64,
}

impl SimDisk {
    /// An empty disk with a root directory.
    #[must_use]
    pub fn new(seed: u64, config: SimConfig) -> SimDisk {
        let power = |n: usize| n.is_power_of_two() && n >= BLOCK;
        assert!(power(config.alignment) && power(config.grain), "alignment, grain");
        assert!(config.grain >= config.alignment, "grain");
        SimDisk {
            config,
            rng: Rng::new(seed),
            plan: FaultPlan::default(),
            fired: BTreeMap::new(),
            tree: Tree::new(),
            files: BTreeMap::new(),
            opening: BTreeSet::new(),
            flights: BTreeMap::new(),
            now: 0,
            serial: 0,
            seq: 0,
            next_run: RUN_IDS,
            boundaries: 0,
            stop_at: None,
            trace: seed,
        }
    }

    /// Adds a line to the fault plan.
    pub fn add_fault(&mut self, fault: Fault) {
        self.plan.add(fault);
    }

    /// From now on nothing fails; damage done stays.
    pub fn clear_faults(&mut self) {
        self.plan.clear();
    }

    /// How often each kind of fault fired on each kind of operation.
    #[must_use]
    pub fn fired(&self) -> &BTreeMap<String, u64> {
        &self.fired
    }

    /// Changes the space limit; less than is used only refuses growth.
    pub fn set_capacity(&mut self, capacity: Option<u64>) {
        self.config.capacity = capacity;
    }

    /// Raises the space limit, when there is one, so that at least `bytes` are free.
    pub fn keep_room(&mut self, bytes: u64) {
        let used = self.used();
        self.config.capacity = self.config.capacity.map(|limit| limit.max(used + bytes));
    }

    /// Bytes of space taken.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.tree.used(&self.open_inodes())
    }

    /// Simulated nanoseconds since the first disk of this line was made.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Lets idle time pass, up to `to`. Completions due before are not delivered by this.
    pub fn pass_time(&mut self, to: u64) {
        self.now = self.now.max(to);
    }

    /// Hash over everything submitted and completed: equal for equal runs.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.trace
    }

    /// Submissions and completions so far of operations that change the disk: the moments worth crashing at.
    #[must_use]
    pub fn boundaries(&self) -> u64 {
        self.boundaries
    }

    /// Stops the disk when [`SimDisk::boundaries`] reaches `at`: nothing more is accepted or completes.
    pub fn stop_at(&mut self, at: Option<u64>) {
        self.stop_at = at;
    }

    /// Whether [`SimDisk::stop_at`] was reached; the next thing to do is [`SimDisk::crash`].
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.stop_at.is_some_and(|at| self.boundaries >= at)
    }

    /// Number of operations in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// When the next operation completes.
    #[must_use]
    pub fn next_at(&self) -> Option<u64> {
        let first = self.flights.keys().next();
        first.map(|(at, _)| (*at).max(self.now))
    }

    /// Content of a named file as a reader would see it, for checks and reports.
    #[must_use]
    pub fn peek(&self, path: &str) -> Option<Vec<u8>> {
        let (inode, _) = self.tree.find(path)?;
        let file = self.tree.file(inode);
        Some(file.read(0, file.len() as usize))
    }

    /// Names in a directory, for checks and reports; `None` when it is missing.
    #[must_use]
    pub fn names(&self, path: &str) -> Option<Vec<super::DirEntry>> {
        self.tree.list(path).ok()
    }

    /// Flips one bit of a named file at rest. False when there is no such byte.
    pub fn flip_bit(&mut self, path: &str, pos: u64, bit: u8) -> bool {
        let Some((inode, _)) = self.tree.find(path) else {
            return false;
        };
        let hit = pos < self.tree.file(inode).len();
        if hit {
            self.tree.file_mut(inode).flip(pos, bit % 8);
        }
        hit
    }

    /// Flips a random bit in a random file of `class`; the path is not known, the place within the file is returned.
    pub fn flip_random_bit(&mut self, class: FileClass) -> Option<u64> {
        let files = self.tree.files_of(class);
        let files: Vec<Inode> = files
            .into_iter()
            .filter(|inode| self.tree.file(*inode).len() > 0)
            .collect();
        if files.is_empty() {
            return None;
        }
        let inode = *self.rng.pick(&files);
        let pos = self.rng.below(self.tree.file(inode).len());
        let bit = self.rng.below(8) as u8;
        self.tree.file_mut(inode).flip(pos, bit);
        Some(pos)
    }

    /// Submits an operation; it completes in a later [`SimDisk::step`]. Ignored once the disk stopped.
    ///
    /// # Panics
    /// When the operation breaks the rules of the port: see the module.
    pub fn submit(&mut self, id: OpId, op: DiskOp) {
        if self.stopped() {
            return;
        }
        let inode = self.check(id, &op);
        let kind = OpKind::of(&op);
        let fault = {
            let (class, path) = self.class_and_path(&op);
            self.plan.draw(kind, class, &path, &mut self.rng)
        };
        if let Some(fault) = fault {
            *self.fired.entry(format!("{kind:?}: {fault:?}")).or_default() += 1;
        }
        let at = self.now + self.latency(&op, fault);
        tracing::trace!(id = id.0, now = self.now, at, ?fault, "{}", self.describe(&op));
        self.serial += 1;
        self.note(&[1, id.0, kind as u64, at, hash_of(&op)]);
        let flight = Flight {
            id,
            op,
            inode,
            seq: self.seq,
            fault,
        };
        self.flights.insert((at, self.serial), flight);
        self.boundaries += u64::from(kind.changes_disk());
    }

    /// Executes the next operation that completes at or before `limit` and moves time there; with none, time moves
    /// to `limit`. `None` also once the disk stopped.
    pub fn step(&mut self, limit: u64) -> Option<Completion> {
        if self.stopped() {
            return None;
        }
        match self.next_at() {
            Some(at) if at <= limit => self.now = at,
            _ => {
                self.now = self.now.max(limit);
                return None;
            }
        }
        let (_, flight) = self.flights.pop_first()?;
        let kind = OpKind::of(&flight.op);
        let id = flight.id;
        let result = self.execute(flight);
        tracing::trace!(id = id.0, now = self.now, error = ?result.as_ref().err(), "{kind:?} done");
        self.note(&[2, id.0, self.now, hash_of_result(&result)]);
        self.boundaries += u64::from(kind.changes_disk());
        Some(Completion { op: id, result })
    }

    /// The disk after a crash now, as the next process finds it: no file is open, nothing is in flight. `seed`
    /// decides what survives; faults planned stay planned.
    #[must_use]
    pub fn crash(mut self, kind: Crash, seed: u64) -> SimDisk {
        let mut rng = Rng::new(seed);
        for (_, flight) in std::mem::take(&mut self.flights) {
            self.cut_short(flight, kind, &mut rng);
        }
        self.files.clear();
        self.opening.clear();
        if kind == Crash::Power {
            let keep = *rng.pick(&[0, 1, 2, 3, 4]);
            self.tree.lose_power(keep, &mut rng);
        }
        self.tree.collect(&BTreeSet::new());
        self.stop_at = None;
        self.note(&[3, kind as u64, seed]);
        self
    }

    fn note(&mut self, words: &[u64]) {
        for word in words {
            self.trace = rng::mix(self.trace.rotate_left(5) ^ word);
        }
    }

    fn open_inodes(&self) -> BTreeSet<Inode> {
        self.files.values().map(|handle| handle.inode).collect()
    }

    fn handle(&self, file: FileId) -> &Handle {
        self.files
            .get(&file)
            .unwrap_or_else(|| panic!("{file:?} is not open"))
    }

    fn class_and_path(&self, op: &DiskOp) -> (Option<FileClass>, String) {
        match op {
            DiskOp::Open { path, how, .. } => (Some(how.class), path.clone()),
            DiskOp::Close { file }
            | DiskOp::Write { file, .. }
            | DiskOp::Read { file, .. }
            | DiskOp::Sync { file }
            | DiskOp::Resize { file, .. }
            | DiskOp::Allocate { file, .. } => {
                let handle = self.handle(*file);
                (Some(handle.class), handle.path.clone())
            }
            DiskOp::Rename { from, to } => (self.class_of(from), format!("{from} -> {to}")),
            DiskOp::Unlink { path } => (self.class_of(path), path.clone()),
            DiskOp::MakeDir { path }
            | DiskOp::RemoveDir { path }
            | DiskOp::SyncDir { path }
            | DiskOp::List { path } => (None, path.clone()),
            DiskOp::SyncAll => (None, String::new()),
        }
    }

    /// An operation with the name of its file, for traces.
    fn describe(&self, op: &DiskOp) -> String {
        let (_, path) = self.class_and_path(op);
        let kind = OpKind::of(op);
        match op {
            DiskOp::Write { pos, bufs, .. } => {
                let len: usize = bufs.iter().map(|buf| buf.len()).sum();
                format!("{kind:?} {path} {pos}+{len}")
            }
            DiskOp::Read { pos, len, .. } => format!("{kind:?} {path} {pos}+{len}"),
            DiskOp::Allocate { pos, len, .. } => format!("{kind:?} {path} {pos}+{len}"),
            DiskOp::Resize { len, .. } => format!("{kind:?} {path} to {len}"),
            _ => format!("{kind:?} {path}"),
        }
    }

    fn class_of(&self, path: &str) -> Option<FileClass> {
        self.tree.find(path).map(|(_, class)| class)
    }

    /// Holds the rules of the port; returns the inode of file operations.
    fn check(&mut self, id: OpId, op: &DiskOp) -> Option<Inode> {
        assert!(
            self.flights.values().all(|flight| flight.id != id),
            "{id:?} is already in flight"
        );
        self.check_names(op);
        let file = match op {
            DiskOp::Open { file, path, .. } => {
                assert!(
                    !self.files.contains_key(file) && self.opening.insert(*file),
                    "{file:?} is already open, opening {path}"
                );
                return None;
            }
            DiskOp::Close { file }
            | DiskOp::Write { file, .. }
            | DiskOp::Read { file, .. }
            | DiskOp::Sync { file }
            | DiskOp::Resize { file, .. }
            | DiskOp::Allocate { file, .. } => *file,
            _ => return None,
        };
        let handle = self.handle(file);
        self.check_access(op, handle);
        self.check_overlap(op, file, handle);
        Some(handle.inode)
    }

    /// Which of two changes of one name comes first is not defined.
    fn check_names(&self, op: &DiskOp) {
        for flight in self.flights.values() {
            for name in names_of(op) {
                for other in names_of(&flight.op) {
                    let apart = name.is_empty() || other.is_empty() || name != other;
                    assert!(apart, "{op:?} while {:?} is in flight", flight.op);
                }
            }
            let inside = moves_from(op, &flight.op) || moves_from(&flight.op, op);
            assert!(!inside, "{op:?} while {:?} is in flight", flight.op);
        }
    }

    fn check_access(&self, op: &DiskOp, handle: &Handle) {
        let path = &handle.path;
        let changes = matches!(
            op,
            DiskOp::Write { .. } | DiskOp::Resize { .. } | DiskOp::Allocate { .. }
        );
        assert!(handle.write || !changes, "{path} is open for reading only");
        if !is_direct(handle.class) {
            return;
        }
        let alignment = self.config.alignment as u64;
        let aligned = |n: u64| n.is_multiple_of(alignment);
        match op {
            DiskOp::Write { pos, bufs, .. } => {
                assert!(aligned(*pos), "misaligned write to {path} at {pos}");
                for buf in bufs {
                    let memory = buf.as_ptr() as usize;
                    assert!(
                        aligned(buf.len() as u64) && memory.is_multiple_of(BLOCK),
                        "misaligned buffer of {} bytes for {path} at {pos}",
                        buf.len()
                    );
                }
            }
            DiskOp::Read { pos, len, .. } => {
                assert!(
                    aligned(*pos) && aligned(*len as u64),
                    "misaligned read of {path} at {pos}, {len} bytes"
                );
            }
            _ => {}
        }
    }

    /// Operations of one file that depend on each other must not be in flight together.
    fn check_overlap(&self, op: &DiskOp, file: FileId, handle: &Handle) {
        let path = &handle.path;
        let range = written_range(op);
        for flight in self.flights.values() {
            if flight.inode != Some(handle.inode) {
                continue;
            }
            if let DiskOp::Close { .. } = op {
                let other = match &flight.op {
                    DiskOp::Write { file, .. }
                    | DiskOp::Read { file, .. }
                    | DiskOp::Sync { file }
                    | DiskOp::Resize { file, .. }
                    | DiskOp::Allocate { file, .. }
                    | DiskOp::Close { file } => *file,
                    _ => continue,
                };
                assert!(other != file, "{path} is closed under {:?}", flight.op);
            }
            let resized =
                |a: &DiskOp, b: &DiskOp| matches!((a, b), (DiskOp::Resize { .. }, DiskOp::Allocate { .. }));
            assert!(
                !resized(op, &flight.op) && !resized(&flight.op, op),
                "{path} is resized and allocated at once"
            );
            if let (Some(a), Some(b)) = (&range, written_range(&flight.op)) {
                let apart = a.end <= b.start || b.end <= a.start;
                assert!(apart, "two writes in flight overlap in {path}: {a:?} and {b:?}");
            }
        }
    }

    fn latency(&mut self, op: &DiskOp, fault: Option<FaultKind>) -> u64 {
        let l = &self.config.latency;
        let blocks = |bytes: usize| bytes.div_ceil(BLOCK) as u64 * l.per_block;
        let mean = match op {
            DiskOp::Write { bufs, .. } => l.write + blocks(bufs.iter().map(|b| b.len()).sum()),
            DiskOp::Read { len, .. } => l.read + blocks(*len),
            DiskOp::Sync { .. } | DiskOp::SyncDir { .. } => l.sync,
            DiskOp::SyncAll => l.sync_all,
            _ => l.name,
        };
        let spread = self.rng.between(mean / 2, mean * 2);
        let slow = if self.rng.odds(1, 50) { 10 } else { 1 };
        let stall = match fault {
            Some(FaultKind::Stall(ns)) => ns,
            _ => 0,
        };
        spread * slow + stall
    }

    fn next_seq(&mut self) -> u64 {
        self.seq += 1;
        self.seq
    }

    /// Refuses growth of a file beyond the capacity.
    fn take_space(&self, inode: Inode, pos: u64, len: u64) -> Result<(), DiskError> {
        let Some(capacity) = self.config.capacity else {
            return Ok(());
        };
        let more = self.tree.file(inode).missing(pos, len);
        match more > 0 && self.used() + more > capacity {
            true => Err(DiskError::NoSpace),
            false => Ok(()),
        }
    }

    fn execute(&mut self, flight: Flight) -> Result<Done, DiskError> {
        let seq = self.next_seq();
        let fault = flight.fault;
        if let Some(FaultKind::Error(error)) = fault
            && !matches!(
                flight.op,
                DiskOp::Write { .. } | DiskOp::Sync { .. } | DiskOp::SyncAll
            )
        {
            if let DiskOp::Open { file, .. } = &flight.op {
                self.opening.remove(file);
            }
            return Err(error);
        }
        let inode = flight.inode.unwrap_or_default();
        match flight.op {
            DiskOp::Open { file, path, how } => self.open(seq, file, path, how),
            DiskOp::Close { file } => {
                self.files.remove(&file);
                let open = self.open_inodes();
                self.tree.collect(&open);
                Ok(Done::Ok)
            }
            DiskOp::Write { file, pos, bufs } => self.write(seq, file, pos, &join(&bufs), fault),
            DiskOp::Read { pos, len, .. } => Ok(self.read(inode, pos, len, fault)),
            DiskOp::Sync { .. } => self.sync(inode, flight.seq, fault),
            DiskOp::Resize { len, .. } => {
                self.tree.file_mut(inode).resize(seq, len);
                Ok(Done::Ok)
            }
            DiskOp::Allocate { pos, len, .. } => {
                self.take_space(inode, pos, len)?;
                self.tree.file_mut(inode).allocate(seq, pos, len);
                Ok(Done::Ok)
            }
            DiskOp::SyncAll => match fault {
                Some(FaultKind::Error(error)) => {
                    let evict = self.rng.odds(1, 2);
                    self.tree.sync_all_failed(flight.seq, evict, &mut self.rng);
                    Err(error)
                }
                _ => {
                    self.tree.sync_all(flight.seq);
                    Ok(Done::Ok)
                }
            },
            other => self.name(seq, flight.seq, other),
        }
    }

    fn name(&mut self, seq: u64, upto: u64, op: DiskOp) -> Result<Done, DiskError> {
        match op {
            DiskOp::Rename { from, to } => self.tree.rename(seq, &from, &to)?,
            DiskOp::Unlink { path } => self.tree.unlink(seq, &path)?,
            DiskOp::MakeDir { path } => {
                let full = self
                    .config
                    .capacity
                    .is_some_and(|c| self.used() + BLOCK as u64 > c);
                if full && self.tree.dir_exists(&path).is_err() {
                    return Err(DiskError::NoSpace);
                }
                self.tree.make_dir(seq, &path)?;
            }
            DiskOp::RemoveDir { path } => self.tree.remove_dir(seq, &path)?,
            DiskOp::SyncDir { path } => self.tree.sync_dir(&path, upto)?,
            DiskOp::List { path } => return self.tree.list(&path).map(Done::Listed),
            _ => unreachable!("file operations are executed by `execute`"),
        }
        Ok(Done::Ok)
    }

    fn open(&mut self, seq: u64, file: FileId, path: String, how: super::OpenHow) -> Result<Done, DiskError> {
        self.opening.remove(&file);
        let inode = self.tree.open(seq, &path, how.class, how.create)?;
        let handle = Handle {
            inode,
            path,
            class: how.class,
            write: how.write,
        };
        self.files.insert(file, handle);
        let len = self.tree.file(inode).len();
        Ok(Done::Opened { len })
    }

    fn write(
        &mut self,
        seq: u64,
        file: FileId,
        pos: u64,
        bytes: &[u8],
        fault: Option<FaultKind>,
    ) -> Result<Done, DiskError> {
        let (inode, class) = (self.handle(file).inode, self.handle(file).class);
        self.take_space(inode, pos, bytes.len() as u64)?;
        let durable = class == FileClass::Journal;
        match fault {
            Some(FaultKind::Error(error)) => {
                if error != DiskError::NoSpace {
                    self.write_some_sectors(seq, inode, pos, bytes.to_vec());
                }
                return Err(error);
            }
            Some(FaultKind::ShortWrite) => {
                let landed = self.rng.index(bytes.len() / SECTOR + 1) * SECTOR;
                let landed = &bytes[..landed.min(bytes.len())];
                self.tree.file_mut(inode).write(seq, pos, landed, false);
                return Err(EIO);
            }
            Some(FaultKind::Lose) => {}
            Some(FaultKind::Misdirect) => self.misdirect(seq, class, bytes),
            _ => self.tree.file_mut(inode).write(seq, pos, bytes, durable),
        }
        if fault == Some(FaultKind::FlipOnWrite) && !bytes.is_empty() {
            let at = pos + self.rng.below(bytes.len() as u64);
            let bit = self.rng.below(8) as u8;
            self.tree.file_mut(inode).flip(at, bit);
        }
        Ok(Done::Ok)
    }

    /// A failed write or one cut short: any sectors of it are visible, none promised.
    fn write_some_sectors(&mut self, seq: u64, inode: Inode, pos: u64, mut bytes: Vec<u8>) {
        let file = self.tree.file_mut(inode);
        let mut old = file.read(pos, bytes.len());
        old.resize(bytes.len(), 0);
        mix_sectors(&mut bytes, &old, &mut self.rng);
        file.write_in_flight(seq, pos, &bytes);
    }

    /// Puts a write on a block of another place of the same class, within that file's length.
    fn misdirect(&mut self, seq: u64, class: FileClass, bytes: &[u8]) {
        let files = self.tree.files_of(class);
        let room = |inode: &Inode| self.tree.file(*inode).len() / BLOCK as u64;
        let files: Vec<Inode> = files.into_iter().filter(|inode| room(inode) > 0).collect();
        if files.is_empty() {
            return;
        }
        let inode = *self.rng.pick(&files);
        let block = self.rng.below(room(&inode));
        let pos = block * BLOCK as u64;
        let left = self.tree.file(inode).len() - pos;
        let bytes = &bytes[..bytes.len().min(left as usize)];
        self.tree.file_mut(inode).write(seq, pos, bytes, true);
    }

    fn read(&mut self, inode: Inode, pos: u64, len: usize, fault: Option<FaultKind>) -> Done {
        let mut bytes = self.tree.file(inode).read(pos, len);
        let overlapping = self.flights.values().filter(|f| f.inode == Some(inode));
        for flight in overlapping {
            let DiskOp::Write { pos: at, bufs, .. } = &flight.op else {
                continue;
            };
            let data = join(bufs);
            let start = (*at).max(pos);
            let end = (*at + data.len() as u64).min(pos + bytes.len() as u64);
            if start < end {
                let target = &mut bytes[(start - pos) as usize..(end - pos) as usize];
                mix_sectors(
                    target,
                    &data[(start - at) as usize..(end - at) as usize],
                    &mut self.rng,
                );
            }
        }
        if fault == Some(FaultKind::FlipOnRead) && !bytes.is_empty() {
            let at = self.rng.index(bytes.len());
            bytes[at] ^= 1 << self.rng.below(8);
        }
        Done::Read(BufSlice::copy_of(&bytes))
    }

    fn sync(&mut self, inode: Inode, upto: u64, fault: Option<FaultKind>) -> Result<Done, DiskError> {
        match fault {
            Some(FaultKind::Error(error)) => {
                let evict = self.rng.odds(1, 2);
                let file = self.tree.file_mut(inode);
                file.sync_failed(upto, evict, &mut self.rng);
                Err(error)
            }
            _ => {
                self.tree.file_mut(inode).sync(upto);
                Ok(Done::Ok)
            }
        }
    }

    /// The device reads and writes whole blocks of the grain: what else is in one that was being written is torn too.
    fn tear_neighbours(&mut self, inode: Inode, pos: u64, len: u64, rng: &mut Rng) {
        let grain = self.config.grain as u64;
        let end = pos + len;
        let file = self.tree.file_mut(inode);
        if file.class != FileClass::Journal {
            return;
        }
        for rest in [pos / grain * grain..pos, end..end.next_multiple_of(grain)] {
            for sector in rest.step_by(SECTOR) {
                if rng.odds(1, 4) {
                    file.flip(sector + rng.below(SECTOR as u64), rng.below(8) as u8);
                }
            }
        }
    }

    /// What becomes of an operation that was in flight at a crash: nothing, all, or for a write any of its sectors.
    fn cut_short(&mut self, flight: Flight, kind: Crash, rng: &mut Rng) {
        if rng.odds(1, 4) || matches!(flight.fault, Some(FaultKind::Error(_) | FaultKind::Lose)) {
            return;
        }
        let seq = self.next_seq();
        let inode = flight.inode.unwrap_or_default();
        match flight.op {
            DiskOp::Write { pos, bufs, .. } => {
                let mut bytes = join(&bufs);
                if self.take_space(inode, pos, bytes.len() as u64).is_err() {
                    return;
                }
                let file = self.tree.file_mut(inode);
                if rng.odds(1, 2) {
                    let mut old = file.read(pos, bytes.len());
                    old.resize(bytes.len(), 0);
                    mix_sectors(&mut bytes, &old, rng);
                }
                file.write_in_flight(seq, pos, &bytes);
                if kind == Crash::Power {
                    self.tear_neighbours(inode, pos, bytes.len() as u64, rng);
                }
            }
            DiskOp::Close { .. } | DiskOp::Read { .. } | DiskOp::List { .. } => {}
            op => {
                // Whether it would have succeeded does not matter: nobody waits for the answer any more.
                let _ = self.execute(Flight {
                    op,
                    fault: None,
                    ..flight
                });
            }
        }
    }
}

impl Disk for SimDisk {
    fn run(&mut self, ops: Vec<DiskOp>) -> Result<Vec<Result<Done, DiskError>>, DiskGone> {
        let first = self.next_run;
        self.next_run += ops.len() as u64;
        let mut results: Vec<Option<Result<Done, DiskError>>> = vec![None; ops.len()];
        for (index, op) in ops.into_iter().enumerate() {
            self.submit(OpId(first + index as u64), op);
        }
        let mut waiting = results.len();
        while waiting > 0 {
            let Some(done) = self.step(u64::MAX) else {
                return Err(DiskGone("the simulated process crashed".to_owned()));
            };
            let index = done
                .op
                .0
                .checked_sub(first)
                .expect("nothing else is in flight while the disk runs operations to their end");
            results[index as usize] = Some(done.result);
            waiting -= 1;
        }
        Ok(results.into_iter().flatten().collect())
    }

    fn grain(&self) -> usize {
        self.config.grain
    }
}

fn is_direct(class: FileClass) -> bool {
    match class {
        FileClass::Journal | FileClass::Checkpoint | FileClass::Segment | FileClass::Index => true,
        FileClass::Epochs | FileClass::Meta => false,
    }
}

/// The names an operation makes, moves or removes; "" for none.
fn names_of(op: &DiskOp) -> [&str; 2] {
    match op {
        DiskOp::Unlink { path } | DiskOp::MakeDir { path } | DiskOp::RemoveDir { path } => [path, ""],
        DiskOp::Rename { from, to } => [from, to],
        _ => ["", ""],
    }
}

/// Whether one operation moves or removes a name at or above the segment that the other opens: the open may then find
/// the old file, whose bytes are on their way out. Other classes are rebuilt when they are lost.
fn moves_from(op: &DiskOp, open: &DiskOp) -> bool {
    let (DiskOp::Rename { from: name, .. } | DiskOp::Unlink { path: name }) = op else {
        return false;
    };
    match open {
        DiskOp::Open { path, how, .. } if how.class == FileClass::Segment && path.ends_with(".log") => {
            let rest = path.strip_prefix(name.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        }
        _ => false,
    }
}

/// The byte range an operation writes, moves or cuts away.
fn written_range(op: &DiskOp) -> Option<std::ops::Range<u64>> {
    match op {
        DiskOp::Write { pos, bufs, .. } => {
            let len: usize = bufs.iter().map(|buf| buf.len()).sum();
            Some(*pos..*pos + len as u64)
        }
        DiskOp::Resize { len, .. } => Some(*len..u64::MAX),
        _ => None,
    }
}

fn join(bufs: &[BufSlice]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(bufs.iter().map(|buf| buf.len()).sum());
    bufs.iter().for_each(|buf| bytes.extend_from_slice(buf));
    bytes
}

fn hash_of(op: &DiskOp) -> u64 {
    let text = |a: &str| u64::from(crc32fast::hash(a.as_bytes()));
    match op {
        DiskOp::Open { file, path, how } => text(path) ^ (u64::from(file.0) << 32) ^ how.class as u64,
        DiskOp::Write { file, pos, bufs } => {
            let mut crc = crc32fast::Hasher::new();
            bufs.iter().for_each(|buf| crc.update(buf));
            (u64::from(file.0) << 32) ^ rng::mix(*pos) ^ u64::from(crc.finalize())
        }
        DiskOp::Read { file, pos, len } => (u64::from(file.0) << 32) ^ rng::mix(*pos) ^ *len as u64,
        DiskOp::Close { file } | DiskOp::Sync { file } => u64::from(file.0),
        DiskOp::Resize { file, len } => (u64::from(file.0) << 32) ^ rng::mix(*len),
        DiskOp::Allocate { file, pos, len } => (u64::from(file.0) << 32) ^ rng::mix(*pos ^ rng::mix(*len)),
        DiskOp::Rename { from, to } => text(from) ^ (text(to) << 32),
        DiskOp::Unlink { path }
        | DiskOp::MakeDir { path }
        | DiskOp::RemoveDir { path }
        | DiskOp::SyncDir { path }
        | DiskOp::List { path } => text(path),
        DiskOp::SyncAll => 0,
    }
}

fn hash_of_result(result: &Result<Done, DiskError>) -> u64 {
    match result {
        Ok(Done::Ok) => 1,
        Ok(Done::Opened { len }) => rng::mix(len ^ 2),
        Ok(Done::Read(bytes)) => u64::from(crc32fast::hash(bytes)) << 8 | 3,
        Ok(Done::Listed(entries)) => entries.iter().fold(4, |hash, entry| {
            rng::mix(hash ^ entry.len ^ u64::from(crc32fast::hash(entry.name.as_bytes())))
        }),
        Err(error) => u64::from(crc32fast::hash(error.to_string().as_bytes())) << 8 | 5,
    }
}
