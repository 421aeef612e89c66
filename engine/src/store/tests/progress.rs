//! A store asks to be called again whenever it can go on without a completion: nothing waits for a timer.

use super::*;

/// More partitions than one slice of a capture takes.
const PARTITIONS: u32 = 200;

/// Runs turns until `wanted` more appends were taken. With nothing in flight the store must say that it is due at once.
fn take_all(rig: &mut Rig, wanted: usize) {
    let (mut accepted, mut turns) = (0, 0);
    while accepted < wanted {
        rig.call(|store, now, out| store.turn_end(now, out));
        if rig.disk.in_flight() == 0 {
            let due = rig.store.next_wake().is_some_and(|at| at <= rig.disk.now());
            assert!(
                due,
                "{accepted} of {wanted} taken, nothing in flight, nothing due"
            );
        } else if let Some(completion) = rig.disk.step(u64::MAX) {
            rig.call(|store, now, out| store.handle(now, completion, out));
        }
        let answered = |event: &StoreEvent| matches!(event, StoreEvent::Appended { result: Ok(_), .. });
        accepted += rig.events.extract_if(.., |event| answered(event)).count();
        turns += 1;
        assert!(turns < 1_000_000, "{accepted} of {wanted} taken");
    }
}

fn more_partitions(rig: &mut Rig, count: u32) -> Vec<PartitionId> {
    let ids: Vec<PartitionId> = (0..count)
        .map(|index| PartitionId {
            topic: P.topic,
            index: 100 + index,
        })
        .collect();
    for id in &ids {
        rig.store.create(*id, "topic", settings());
        rig.call(|store, now, out| store.begin_epoch(now, 1, *id, LeaderEpoch(1), out));
    }
    rig.settle();
    rig.events.clear();
    ids
}

/// A full journal with nothing in flight: only the checkpoint can free it, and no completion sets that off.
#[test]
fn appends_that_wait_for_a_checkpoint_wait_for_nothing_else() {
    let mut rig = Rig::new();
    let ids = more_partitions(&mut rig, PARTITIONS);
    // Several journals' worth, all asked for at once: most of it waits.
    let batch = batch_of(&[7; 20_000], START_MS, None);
    let rounds = 8;
    for _ in 0..rounds {
        ids.iter().for_each(|id| rig.append_batch(*id, &batch));
    }
    take_all(&mut rig, rounds * ids.len());
}

/// The memory for dirty bytes is used up by logs of which none holds a piece worth writing, long before the journal asks
/// for a checkpoint.
#[test]
fn appends_that_wait_for_memory_do_not_wait_for_a_piece_worth_writing() {
    let cfg = StoreConfig {
        dirty_bytes: 64 << 10,
        write_back_bytes: 256 << 10,
        ..config()
    };
    let disk = SimDisk::new(1, SimConfig::default());
    let mut rig = Rig::with(disk, 1, cfg, settings()).expect("recovery");
    let ids = more_partitions(&mut rig, 20);
    let batch = batch_of(&[7; 30_000], START_MS, None);
    ids.iter().for_each(|id| rig.append_batch(*id, &batch));
    take_all(&mut rig, ids.len());
}

/// More last blocks, of which none can be written yet, than the bound on dirty bytes has room for.
#[test]
fn last_blocks_do_not_use_up_the_memory_for_dirty_bytes() {
    let cfg = StoreConfig {
        dirty_bytes: 64 << 10,
        ..config()
    };
    let disk = SimDisk::new(1, SimConfig::default());
    let mut rig = Rig::with(disk, 1, cfg, settings()).expect("recovery");
    let ids = more_partitions(&mut rig, 40);
    let batch = batch_of(&[7; 3_000], START_MS, None);
    for _ in 0..4 {
        ids.iter().for_each(|id| rig.append_batch(*id, &batch));
        take_all(&mut rig, ids.len());
    }
}

/// Whoever asks for a checkpoint may do so when the turn's slice of it is over.
#[test]
fn a_checkpoint_that_was_asked_for_is_due() {
    let mut rig = Rig::new();
    rig.append_durably(&small(1));
    assert_eq!(rig.disk.in_flight(), 0);
    rig.store.request_checkpoint();
    let due = rig.store.next_wake().is_some_and(|at| at <= rig.disk.now());
    assert!(due, "nothing in flight, nothing due");
}
