//! Plain paths: what was acknowledged is there after a restart, also with another number of shards.

use super::*;

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
