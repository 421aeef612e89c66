//! The store on the simulated disk, rule by rule of STORAGE.md. Random workloads with crashes at every boundary live in
//! the tests crate.

mod damage;
mod faults;
mod lifecycle;
mod plain;
mod progress;
mod reading;
mod truncation;

use super::*;
use crate::batch::{self, BatchBuilder, NewRecord};
use crate::io::sim::{Crash, SimConfig, SimDisk};
use crate::recovery::{RecoverError, RecoveryReport};
use crate::types::{ShardId, Term, TopicId};

const P: PartitionId = PartitionId {
    topic: TopicId([5; 16]),
    index: 3,
};
const Q: PartitionId = PartitionId {
    topic: TopicId([6; 16]),
    index: 0,
};
const START_MS: i64 = 1_000_000;

fn config() -> StoreConfig {
    StoreConfig {
        journal_file_bytes: 1 << 20,
        journal_files: 8,
        frame_bytes: 64 << 10,
        checkpoint_bytes: 1 << 20,
        memory_bytes: 4 << 20,
        dirty_bytes: 2 << 20,
        write_back_bytes: 64 << 10,
        delete_delay_ms: 1_000,
        retention_check_ms: 100,
        ..StoreConfig::new(1, ShardId(0))
    }
}

fn settings() -> LogSettings {
    LogSettings {
        segment_bytes: 300 << 10,
        ..LogSettings::default()
    }
}

/// A store and its disk. Tests are its event loop.
struct Rig {
    disk: SimDisk,
    store: Store,
    report: RecoveryReport,
    events: Vec<StoreEvent>,
    cfg: StoreConfig,
    settings: LogSettings,
}

impl Rig {
    fn new() -> Rig {
        Rig::start(SimDisk::new(1, SimConfig::default()), 1)
    }

    fn start(disk: SimDisk, term: u64) -> Rig {
        Rig::with(disk, term, config(), settings()).expect("recovery")
    }

    /// Starts a store and makes `P` and `Q` known to it, in a new epoch.
    fn with(
        mut disk: SimDisk,
        term: u64,
        cfg: StoreConfig,
        settings: LogSettings,
    ) -> Result<Rig, RecoverError> {
        let cfg = StoreConfig {
            term: Term(term),
            ..cfg
        };
        let now = now_of(&disk);
        let (store, report) = Store::recover(&mut disk, cfg.clone(), now)?;
        let mut rig = Rig {
            disk,
            store,
            report,
            events: Vec::new(),
            cfg,
            settings,
        };
        for id in [P, Q] {
            rig.store.create(id, "topic", rig.settings.clone());
            rig.call(|store, now, out| store.begin_epoch(now, 1, id, LeaderEpoch(term as u32), out));
        }
        rig.settle();
        Ok(rig)
    }

    /// Ends the process and starts the next one.
    fn restart(self, crash: Crash) -> Rig {
        self.try_restart(crash, |_| ()).expect("recovery")
    }

    /// The same, with the disk touched in between.
    fn try_restart(self, crash: Crash, touch: impl FnOnce(&mut SimDisk)) -> Result<Rig, RecoverError> {
        let Rig {
            disk, cfg, settings, ..
        } = self;
        let term = cfg.term.0 + 1;
        let mut disk = disk.crash(crash, term);
        touch(&mut disk);
        Rig::with(disk, term, cfg, settings)
    }

    fn now(&self) -> Now {
        now_of(&self.disk)
    }

    fn take(&mut self, out: Outbox) {
        out.ops
            .into_iter()
            .for_each(|(op, disk_op)| self.disk.submit(op, disk_op));
        self.events.extend(out.events);
    }

    /// Runs one command and hands its operations to the disk.
    fn call(&mut self, command: impl FnOnce(&mut Store, Now, &mut Outbox)) {
        let mut out = Outbox::default();
        let now = self.now();
        command(&mut self.store, now, &mut out);
        self.take(out);
    }

    fn turn(&mut self) -> bool {
        self.call(|store, now, out| store.turn_end(now, out));
        let limit = self.disk.now() + 10_000_000;
        let Some(completion) = self.disk.step(limit) else {
            return false;
        };
        self.call(|store, now, out| store.handle(now, completion, out));
        true
    }

    /// Runs until nothing is in flight and nothing waits to be issued.
    fn settle(&mut self) {
        for _ in 0..100_000 {
            self.call(|store, now, out| store.tick(now, out));
            if !self.turn()
                && self.disk.in_flight() == 0
                && self.store.commit.is_idle()
                && self.store.commit.next_wake().is_none()
            {
                return;
            }
        }
        panic!("the store does not settle");
    }

    /// Lets time pass, with the ticks that fall into it.
    fn pass(&mut self, ms: u64) {
        let end = self.disk.now() + ms * 1_000_000;
        while self.disk.now() < end {
            let next = (self.disk.now() + 50_000_000).min(end);
            self.disk.pass_time(next);
            self.settle();
        }
    }

    fn checkpoint(&mut self) {
        let before = self.store.stats().checkpoints;
        self.store.request_checkpoint();
        for _ in 0..10_000 {
            if self.store.stats().checkpoints > before {
                return self.settle();
            }
            self.turn();
        }
        panic!("the checkpoint does not end");
    }

    fn view(&self, partition: PartitionId) -> PartitionView {
        self.store.view(partition).expect("known")
    }

    fn append(&mut self, value: &[u8]) {
        self.append_to(P, value);
    }

    fn append_to(&mut self, partition: PartitionId, value: &[u8]) {
        self.append_batch(partition, &batch_of(value, 5, None));
    }

    fn append_batch(&mut self, partition: PartitionId, batch: &[u8]) {
        let request = AppendRequest {
            token: 9,
            partition,
            epoch: self.view(partition).epoch,
            batch: BufSlice::copy_of(batch),
        };
        self.call(|store, now, out| store.append(now, request, out));
    }

    /// Appends and waits until everything in flight has ended.
    fn append_durably(&mut self, value: &[u8]) {
        self.append(value);
        self.settle();
    }

    /// Takes the first event that `pick` wants, running until it comes.
    fn wait<T>(&mut self, pick: impl Fn(&StoreEvent) -> Option<T>) -> T {
        for _ in 0..10_000 {
            if let Some(at) = self.events.iter().position(|e| pick(e).is_some()) {
                let event = self.events.remove(at);
                return pick(&event).expect("it was picked");
            }
            self.turn();
        }
        panic!("the event never comes");
    }

    fn appended(&mut self) -> Result<Appended, AppendError> {
        self.wait(|event| match event {
            StoreEvent::Appended { result, .. } => Some(result.clone()),
            _ => None,
        })
    }

    fn done(&mut self, asked: u64) -> Result<(), CommandError> {
        self.wait(|event| match event {
            StoreEvent::Done { token, result, .. } if *token == asked => Some(result.clone()),
            _ => None,
        })
    }

    fn read(&mut self, partition: PartitionId, offset: Offset) -> Result<ReadBytes, ReadError> {
        let request = ReadRequest {
            token: 7,
            partition,
            offset,
            limit: self.view(partition).log_end,
            max_bytes: 100_000,
        };
        self.call(|store, now, out| store.read(now, request, out));
        self.wait(|event| match event {
            StoreEvent::Read { result, .. } => Some(result.clone()),
            _ => None,
        })
    }

    /// Reads the whole log: values by offset, and the offsets of damaged ranges.
    fn survey(&mut self, partition: PartitionId) -> (Vec<(u64, Vec<u8>)>, Vec<u64>) {
        let PartitionView {
            log_start, log_end, ..
        } = self.view(partition);
        let (mut offset, mut values, mut damaged) = (log_start, Vec::new(), Vec::new());
        while offset < log_end {
            match self.read(partition, offset) {
                Ok(bytes) => {
                    assert!(bytes.next > offset, "a read below the end brings something");
                    let run: Vec<u8> = bytes.batches.iter().flat_map(|b| b.iter().copied()).collect();
                    for item in batch::batches(&run) {
                        let (_, bytes) = item.expect("whole batches");
                        assert!(batch::verify_crc(bytes));
                        for record in batch::records(bytes).expect("uncompressed") {
                            let record = record.expect("good");
                            values.push((record.offset.0, record.value.expect("a value").to_vec()));
                        }
                    }
                    offset = bytes.next;
                }
                Err(ReadError::Damaged { from, to }) => {
                    assert!(from <= offset && offset < to);
                    damaged.extend(offset.0..to.0.min(log_end.0));
                    offset = to;
                }
                Err(other) => panic!("reading {partition} at {offset}: {other}"),
            }
        }
        (values, damaged)
    }

    fn read_all(&mut self) -> Vec<Vec<u8>> {
        let (values, damaged) = self.survey(P);
        assert_eq!(damaged, [0u64; 0]);
        let start = self.view(P).log_start.0;
        let offsets = values.iter().map(|(offset, _)| *offset);
        assert!(
            offsets.eq(start..start + values.len() as u64),
            "offsets are unbroken"
        );
        values.into_iter().map(|(_, value)| value).collect()
    }
}

fn now_of(disk: &SimDisk) -> Now {
    Now {
        mono: disk.now(),
        wall_ms: START_MS + (disk.now() / 1_000_000) as i64,
    }
}

/// A batch of one record; with a producer id and sequence for retries.
fn batch_of(value: &[u8], timestamp: i64, producer: Option<(i64, i32)>) -> Vec<u8> {
    let mut builder = BatchBuilder::new();
    if let Some((id, sequence)) = producer {
        builder.producer(id, 0, sequence);
    }
    let record = NewRecord {
        value: Some(value),
        timestamp,
        ..NewRecord::default()
    };
    builder.push(record).expect("it fits");
    builder.finish().expect("a record")
}

fn value(i: usize) -> Vec<u8> {
    vec![i as u8; 1 + (i * 7919) % 60_000]
}

fn small(i: usize) -> Vec<u8> {
    vec![i as u8; 1500 + i]
}
