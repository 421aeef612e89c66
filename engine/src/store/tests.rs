//! The store on the simulated disk: the plain paths. Faults and crashes at every boundary live in the tests crate.

use super::*;
use crate::batch::{BatchBuilder, NewRecord};
use crate::io::sim::{Crash, SimConfig, SimDisk};
use crate::types::{ShardId, TopicId};

const P: PartitionId = PartitionId {
    topic: TopicId([5; 16]),
    index: 3,
};

fn config() -> StoreConfig {
    StoreConfig {
        journal_file_bytes: 1 << 20,
        journal_files: 8,
        frame_bytes: 64 << 10,
        checkpoint_bytes: 1 << 20,
        memory_bytes: 4 << 20,
        dirty_bytes: 2 << 20,
        write_back_bytes: 64 << 10,
        ..StoreConfig::new(1, ShardId(0))
    }
}

struct Rig {
    disk: SimDisk,
    store: Store,
    events: Vec<StoreEvent>,
}

impl Rig {
    fn start(mut disk: SimDisk, term: u64) -> Rig {
        let cfg = StoreConfig {
            term: crate::types::Term(term),
            ..config()
        };
        let now = Now {
            mono: disk.now(),
            wall_ms: 1_000_000,
        };
        let (store, _) = Store::recover(&mut disk, cfg, now).expect("recovery");
        let mut rig = Rig {
            disk,
            store,
            events: Vec::new(),
        };
        rig.store.create(
            P,
            "topic",
            LogSettings {
                segment_bytes: 300 << 10,
                ..LogSettings::default()
            },
        );
        let mut out = Outbox::default();
        rig.store
            .begin_epoch(rig.now(), 1, P, LeaderEpoch(term as u32), &mut out);
        rig.take(out);
        rig.settle();
        rig
    }

    fn now(&self) -> Now {
        Now {
            mono: self.disk.now(),
            wall_ms: 1_000_000 + (self.disk.now() / 1_000_000) as i64,
        }
    }

    fn take(&mut self, out: Outbox) {
        out.ops
            .into_iter()
            .for_each(|(op, disk_op)| self.disk.submit(op, disk_op));
        self.events.extend(out.events);
    }

    fn turn(&mut self) -> bool {
        let mut out = Outbox::default();
        self.store.turn_end(self.now(), &mut out);
        self.take(out);
        let limit = self.disk.now() + 10_000_000;
        let Some(completion) = self.disk.step(limit) else {
            return false;
        };
        let mut out = Outbox::default();
        self.store.handle(self.now(), completion, &mut out);
        self.take(out);
        true
    }

    fn settle(&mut self) {
        for _ in 0..100_000 {
            let mut out = Outbox::default();
            self.store.tick(self.now(), &mut out);
            self.take(out);
            if !self.turn() && self.disk.in_flight() == 0 && self.store.commit.is_idle() {
                return;
            }
        }
        panic!("the store does not settle");
    }

    fn append(&mut self, value: &[u8]) {
        self.append_to(P, value);
    }

    fn append_to(&mut self, partition: PartitionId, value: &[u8]) {
        let mut builder = BatchBuilder::new();
        builder
            .push(NewRecord {
                value: Some(value),
                timestamp: 5,
                ..NewRecord::default()
            })
            .expect("it fits");
        let batch = BufSlice::copy_of(&builder.finish().expect("a record"));
        let epoch = self.store.view(partition).expect("known").epoch;
        let mut out = Outbox::default();
        self.store.append(
            self.now(),
            AppendRequest {
                token: 9,
                partition,
                epoch,
                batch,
            },
            &mut out,
        );
        self.take(out);
    }

    fn read_all(&mut self) -> Vec<Vec<u8>> {
        let mut offset = self.store.view(P).expect("known").log_start;
        let end = self.store.view(P).expect("known").log_end;
        let mut values = Vec::new();
        while offset < end {
            self.events.clear();
            let mut out = Outbox::default();
            let request = ReadRequest {
                token: 7,
                partition: P,
                offset,
                limit: end,
                max_bytes: 100_000,
            };
            self.store.read(self.now(), request, &mut out);
            self.take(out);
            let bytes = loop {
                let found = self.events.iter().find_map(|e| match e {
                    StoreEvent::Read { result, .. } => Some(result.clone()),
                    _ => None,
                });
                match found {
                    Some(result) => break result.expect("readable"),
                    None => assert!(self.turn() || self.disk.in_flight() > 0, "the read hangs"),
                }
            };
            let run: Vec<u8> = bytes.batches.iter().flat_map(|b| b.iter().copied()).collect();
            for item in batch::batches(&run) {
                let (header, bytes) = item.expect("whole batches");
                assert!(batch::verify_crc(bytes));
                assert_eq!(header.base_offset.0, values.len() as u64);
                for record in batch::records(bytes).expect("uncompressed") {
                    values.push(record.expect("good").value.expect("a value").to_vec());
                }
            }
            assert!(bytes.next > offset);
            offset = bytes.next;
        }
        values
    }
}

fn value(i: usize) -> Vec<u8> {
    vec![i as u8; 1 + (i * 7919) % 60_000]
}

#[test]
fn what_was_acknowledged_is_read_back_across_restarts() {
    let mut rig = Rig::start(SimDisk::new(1, SimConfig::default()), 1);
    let mut expect = Vec::new();
    for life in 2..6u64 {
        for _ in 0..60 {
            let i = expect.len();
            rig.append(&value(i));
            expect.push(value(i));
            rig.turn();
        }
        rig.settle();
        assert_eq!(
            rig.store.view(P).expect("known").durable_end,
            Offset(expect.len() as u64)
        );
        assert!(rig.store.fenced().is_none());
        assert_eq!(rig.read_all(), expect);
        let crash = if life % 2 == 0 { Crash::Power } else { Crash::Kill };
        rig = Rig::start(rig.disk.crash(crash, life), life);
        assert_eq!(rig.read_all(), expect, "life {life}");
    }
    assert!(rig.store.stats().disk_reads > 0);
}

#[test]
fn another_number_of_shards_keeps_every_record() {
    let ids: Vec<PartitionId> = (0..6)
        .map(|index| PartitionId {
            topic: TopicId([7; 16]),
            index,
        })
        .collect();
    let mut disk = SimDisk::new(3, SimConfig::default());
    let mut written = 0u64;
    for (life, shards) in [(1u64, 1u16), (2, 3), (3, 2), (4, 2)] {
        let now = Now {
            mono: disk.now(),
            wall_ms: 1000,
        };
        let set = crate::recovery::open_set(&mut disk, &config(), shards, now).expect("the set opens");
        assert_eq!((set.shards, set.term.0), (shards, life));
        for shard in 0..shards {
            let cfg = StoreConfig {
                generation: set.generation,
                shard: ShardId(shard),
                term: set.term,
                ..config()
            };
            let (store, _) = Store::recover(&mut disk, cfg, now).expect("recovery");
            let mut rig = Rig {
                disk,
                store,
                events: Vec::new(),
            };
            for id in ids.iter().filter(|id| id.shard(shards).0 == shard) {
                rig.store.create(*id, "topic", LogSettings::default());
                assert_eq!(
                    rig.store.view(*id).expect("known").log_end.0,
                    written,
                    "{id} in life {life}"
                );
                let mut out = Outbox::default();
                rig.store
                    .begin_epoch(rig.now(), 1, *id, LeaderEpoch(life as u32), &mut out);
                rig.take(out);
                (0..20).for_each(|i| rig.append_to(*id, &value(i)));
            }
            rig.settle();
            disk = rig.disk.crash(Crash::Kill, life);
        }
        written += 20;
        disk = disk.crash(Crash::Power, life);
    }
}
