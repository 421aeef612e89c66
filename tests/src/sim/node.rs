//! One node on a simulated disk: a store per shard, driven the way the broker's shards drive theirs.
//!
//! Shards have rings of their own in the real process, so ids of files and operations are kept apart here by the
//! shard's number in their upper bits.

use std::fmt;

use ringfence_engine::config::StoreConfig;
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::io::sim::{Crash, SimDisk};
use ringfence_engine::io::{
    Completion, Disk, DiskError, DiskGone, DiskOp, Done, FileClass, FileId, OpId, OpenHow,
};
use ringfence_engine::meta::{JournalSet, META_BYTES, MetaError};
use ringfence_engine::recovery::RecoverError;
use ringfence_engine::store::{Outbox, Store, StoreEvent};
use ringfence_engine::types::{Now, PartitionId, ShardId, Term};

/// Wall clock at simulated time 0, milliseconds since 1970.
const EPOCH_MS: i64 = 1_700_000_000_000;

const FILE_BITS: u32 = 24;
const OP_BITS: u32 = 48;

/// A running node.
#[derive(Debug)]
pub(super) struct Node {
    /// The disk.
    pub disk: SimDisk,
    stores: Vec<Store>,
    events: Vec<StoreEvent>,
    out: Outbox,
    /// Turns since time last moved.
    turns_at_once: u32,
}

impl Node {
    /// Starts `shards` stores on `disk`. When it fails the disk comes back with the reason, as it was then.
    pub(super) fn start(
        mut disk: SimDisk,
        shards: u16,
        config: &StoreConfig,
    ) -> Result<Node, (Box<SimDisk>, StartError)> {
        let mut stores = Vec::new();
        let set = match raise_term(&mut disk, config.node, shards) {
            Ok(set) => set,
            Err(error) => return Err((Box::new(disk), error)),
        };
        for shard in 0..shards {
            let config = StoreConfig {
                shard: ShardId(shard),
                term: set.term,
                generation: set.generation,
                ..config.clone()
            };
            let now = now_of(&disk);
            let mut port = ShardPort {
                disk: &mut disk,
                shard,
            };
            match Store::recover(&mut port, config, now) {
                Ok((store, _report)) => stores.push(store),
                Err(error) => return Err((Box::new(disk), StartError::Recover(error))),
            }
        }
        Ok(Node {
            disk,
            stores,
            events: Vec::new(),
            out: Outbox::default(),
            turns_at_once: 0,
        })
    }

    /// The moment.
    #[must_use]
    pub(super) fn now(&self) -> Now {
        now_of(&self.disk)
    }

    /// The store that owns `partition`.
    #[must_use]
    pub(super) fn store_of(&self, partition: PartitionId) -> &Store {
        &self.stores[self.shard_of(partition)]
    }

    /// All stores, by shard.
    #[must_use]
    pub(super) fn stores(&self) -> &[Store] {
        &self.stores
    }

    fn shard_of(&self, partition: PartitionId) -> usize {
        usize::from(partition.shard(self.stores.len() as u16).0)
    }

    /// Calls a command of the store that owns `partition`, as part of the current turn.
    pub(super) fn call(
        &mut self,
        partition: PartitionId,
        command: impl FnOnce(&mut Store, Now, &mut Outbox),
    ) {
        let shard = self.shard_of(partition);
        self.with(shard, command);
    }

    /// Calls every store.
    pub(super) fn call_all(&mut self, mut command: impl FnMut(&mut Store, Now, &mut Outbox)) {
        for shard in 0..self.stores.len() {
            self.with(shard, &mut command);
        }
    }

    fn with(&mut self, shard: usize, command: impl FnOnce(&mut Store, Now, &mut Outbox)) {
        let now = self.now();
        command(&mut self.stores[shard], now, &mut self.out);
        self.flush(shard);
    }

    /// What the stores said since the last call.
    pub(super) fn take_events(&mut self) -> Vec<StoreEvent> {
        std::mem::take(&mut self.events)
    }

    /// Events first: whoever crashes while the operations are submitted has already answered.
    fn flush(&mut self, shard: usize) {
        self.events.append(&mut self.out.events);
        for (id, op) in self.out.ops.drain(..) {
            let id = OpId(((shard as u64) << OP_BITS) | id.0);
            self.disk.submit(id, on_shard(op, shard as u16));
        }
    }

    /// When something is due on its own: a completion or a timer. `None`: nothing will ever happen again.
    #[must_use]
    pub(super) fn next_at(&self) -> Option<u64> {
        let wakes = self.stores.iter().filter_map(Store::next_wake);
        wakes
            .chain(self.disk.next_at())
            .min()
            .map(|at| at.max(self.disk.now()))
    }

    /// Ends the turn of every store.
    pub(super) fn end_turn(&mut self) {
        self.call_all(|store, now, out| store.turn_end(now, out));
    }

    /// One loop turn: everything that is due at the next moment something happens, at the latest at `limit`.
    pub(super) fn turn(&mut self, limit: u64) {
        let before = self.disk.now();
        let until = self.next_at().unwrap_or(limit).min(limit);
        // A turn collects what completed close together, as a real loop turn does.
        let mut deadline = until;
        while let Some(done) = self.disk.step(deadline) {
            deadline = self.disk.now() + 2_000;
            let shard = (done.op.0 >> OP_BITS) as usize;
            let op = OpId(done.op.0 & ((1 << OP_BITS) - 1));
            let done = Completion {
                op,
                result: done.result,
            };
            self.with(shard, |store, now, out| store.handle(now, done, out));
        }
        let now = self.disk.now();
        for shard in 0..self.stores.len() {
            if self.stores[shard].next_wake().is_some_and(|at| at <= now) {
                self.with(shard, |store, now, out| store.tick(now, out));
            }
        }
        self.end_turn();
        self.turns_at_once = if now > before { 0 } else { self.turns_at_once + 1 };
        assert!(
            self.turns_at_once < 1_000,
            "a store asks to be woken at once, again and again"
        );
    }

    /// The process ends here; the disk as the next one finds it.
    #[must_use]
    pub(super) fn crash(self, kind: Crash, seed: u64) -> SimDisk {
        self.disk.crash(kind, seed)
    }
}

fn now_of(disk: &SimDisk) -> Now {
    Now {
        mono: disk.now(),
        wall_ms: EPOCH_MS + (disk.now() / 1_000_000) as i64,
    }
}

/// Why a start failed.
#[derive(Debug)]
pub(super) enum StartError {
    /// The journal set could not be read or raised.
    Set(DiskError),
    /// The journal set is damaged.
    BadSet(MetaError),
    /// The process died on the way.
    Gone(DiskGone),
    /// A shard's recovery failed.
    Recover(RecoverError),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Set(error) => write!(f, "journal-set: {error}"),
            StartError::BadSet(error) => write!(f, "journal-set: {error}"),
            StartError::Gone(error) => error.fmt(f),
            StartError::Recover(error) => error.fmt(f),
        }
    }
}

/// Reads the journal set and makes a higher term durable, before anything else, as every start does.
fn raise_term(disk: &mut SimDisk, node: u32, shards: u16) -> Result<JournalSet, StartError> {
    let old = read_set(disk)?;
    let set = JournalSet {
        node_id: node,
        generation: old.map_or(1, |set| set.generation),
        shards,
        term: Term(old.map_or(0, |set| set.term.0) + 1),
    };
    let file = META_FILE;
    let temp = format!("{SET_PATH}.tmp");
    one(disk, open_meta(&temp, true))?;
    let bufs = vec![BufSlice::copy_of(&set.encode())];
    one(disk, DiskOp::Write { file, pos: 0, bufs })?;
    one(disk, DiskOp::Sync { file })?;
    one(disk, DiskOp::Close { file })?;
    let (from, to) = (temp, SET_PATH.to_owned());
    one(disk, DiskOp::Rename { from, to })?;
    let path = String::new();
    one(disk, DiskOp::SyncDir { path })?;
    Ok(set)
}

fn read_set(disk: &mut SimDisk) -> Result<Option<JournalSet>, StartError> {
    let file = META_FILE;
    match one(disk, open_meta(SET_PATH, false)) {
        Err(StartError::Set(DiskError::NotFound)) => return Ok(None),
        other => other?,
    };
    // What only the cache holds must not be believed.
    one(disk, DiskOp::Sync { file })?;
    let len = META_BYTES;
    let read = one(disk, DiskOp::Read { file, pos: 0, len });
    one(disk, DiskOp::Close { file })?;
    match read? {
        Done::Read(bytes) => JournalSet::decode(&bytes).map(Some).map_err(StartError::BadSet),
        _ => Err(StartError::Set(DiskError::Io(5))),
    }
}

const SET_PATH: &str = "journal-set";
const META_FILE: FileId = FileId(u32::MAX);

fn open_meta(path: &str, write: bool) -> DiskOp {
    DiskOp::Open {
        file: META_FILE,
        path: path.to_owned(),
        how: OpenHow {
            class: FileClass::Meta,
            create: write,
            write: true,
        },
    }
}

fn one(disk: &mut SimDisk, op: DiskOp) -> Result<Done, StartError> {
    let mut results = disk.run(vec![op]).map_err(StartError::Gone)?;
    results
        .pop()
        .unwrap_or(Err(DiskError::Io(5)))
        .map_err(StartError::Set)
}

/// One shard's view of the disk during recovery.
struct ShardPort<'a> {
    disk: &'a mut SimDisk,
    shard: u16,
}

impl Disk for ShardPort<'_> {
    fn run(&mut self, ops: Vec<DiskOp>) -> Result<Vec<Result<Done, DiskError>>, DiskGone> {
        let ops = ops.into_iter().map(|op| on_shard(op, self.shard)).collect();
        self.disk.run(ops)
    }

    fn grain(&self) -> usize {
        self.disk.grain()
    }
}

fn on_shard(mut op: DiskOp, shard: u16) -> DiskOp {
    match &mut op {
        DiskOp::Open { file, .. }
        | DiskOp::Close { file }
        | DiskOp::Write { file, .. }
        | DiskOp::Read { file, .. }
        | DiskOp::Sync { file }
        | DiskOp::Resize { file, .. }
        | DiskOp::Allocate { file, .. } => {
            assert!(file.0 < 1 << FILE_BITS, "file ids of a shard stay small");
            *file = FileId((u32::from(shard) << FILE_BITS) | file.0);
        }
        DiskOp::Rename { .. }
        | DiskOp::Unlink { .. }
        | DiskOp::MakeDir { .. }
        | DiskOp::RemoveDir { .. }
        | DiskOp::SyncDir { .. }
        | DiskOp::SyncAll
        | DiskOp::List { .. } => {}
    }
    op
}
