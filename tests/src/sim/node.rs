//! One node on a simulated disk: a store per shard, driven the way the broker's shards drive theirs.
//!
//! Shards have rings of their own in the real process, so ids of files and operations are kept apart here by the
//! shard's number in their upper bits.

use ringfence_engine::config::StoreConfig;
use ringfence_engine::io::sim::{Crash, SimDisk};
use ringfence_engine::io::{Completion, Disk, DiskError, DiskGone, DiskOp, Done, FileId, OpId};
use ringfence_engine::recovery::{RecoverError, open_set};
use ringfence_engine::store::{Outbox, Store, StoreEvent};
use ringfence_engine::types::{Now, PartitionId, ShardId};

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
    /// Starts `shards` stores on `disk`, whatever their number was before. When it fails the disk comes back with the
    /// reason, as it was then.
    pub(super) fn start(
        mut disk: SimDisk,
        shards: u16,
        config: &StoreConfig,
    ) -> Result<Node, (Box<SimDisk>, RecoverError)> {
        let mut stores = Vec::new();
        let now = now_of(&disk);
        let set = match open_set(&mut disk, config, shards, now) {
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
                calls: 0,
            };
            match Store::recover(&mut port, config, now) {
                Ok((store, _report)) => stores.push(store),
                Err(error) => return Err((Box::new(disk), error)),
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

/// One shard's view of the disk during recovery.
struct ShardPort<'a> {
    disk: &'a mut SimDisk,
    shard: u16,
    calls: u32,
}

impl Disk for ShardPort<'_> {
    fn run(&mut self, ops: Vec<DiskOp>) -> Result<Vec<Result<Done, DiskError>>, DiskGone> {
        self.calls += 1;
        assert!(self.calls < 100_000, "recovery does not end");
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
