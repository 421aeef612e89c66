//! Plain paths: what was acknowledged is there after a restart, also with another number of shards.

use super::*;
use crate::io::FileClass;
use crate::io::sim::{Fault, FaultKind, OpKind, When};

#[test]
fn what_was_acknowledged_is_read_back_across_restarts() {
    let mut rig = Rig::new();
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
        rig = rig.restart(crash);
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
                report: RecoveryReport::default(),
                events: Vec::new(),
                cfg: config(),
                settings: LogSettings::default(),
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

/// A frame behind the cut of one life stays on the disk. A later life writes up to just its address, and a snapshot
/// begins there: replay has no frame before it to compare its term with.
#[test]
fn a_frame_that_an_earlier_life_left_behind_its_cut_does_not_follow_a_snapshot() {
    let mut beyond = 0;
    for appends in 0..6 {
        let mut rig = Rig::new();
        // The log has its place: what follows is in a frame at the end of the turn.
        rig.append_durably(&[0; 100]);
        let start = rig.store.commit.next_lsn();
        let stall = Fault::new(FaultKind::Stall(60_000_000_000), When::Nth(0));
        rig.disk
            .add_fault(stall.kind(OpKind::Write).class(FileClass::Journal));
        rig.append(&vec![1; 20_000]);
        rig.call(|store, now, out| store.turn_end(now, out));
        let ghost = rig.store.commit.next_lsn();
        rig.append(&vec![2; 2_000]);
        for _ in 0..100 {
            rig.turn();
        }
        assert_eq!(
            rig.store.commit.in_flight(),
            2,
            "the second frame waits for the first"
        );
        assert_eq!(rig.disk.in_flight(), 1, "and is on the disk");
        let mut rig = rig.restart(Crash::Power);
        assert_eq!(rig.read_all(), [vec![0; 100]], "the first frame is torn");
        assert!(start < rig.store.commit.next_lsn());
        let mut own = vec![vec![0; 100]];
        for i in 0..appends {
            own.push(vec![3 + i; 1_000]);
            rig.append_durably(&own[own.len() - 1]);
        }
        rig.checkpoint();
        beyond += usize::from(rig.store.commit.next_lsn() == ghost);
        let mut rig = rig.restart(Crash::Power);
        assert_eq!(rig.view(P).fenced, None);
        assert_eq!(rig.read_all(), own);
    }
    assert_eq!(beyond, 1, "one snapshot begins where the frame is");
}
