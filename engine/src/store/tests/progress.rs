//! A store asks to be called again whenever it can go on without a completion: nothing waits for a timer.

use super::*;

/// More partitions than one slice of a capture takes.
const PARTITIONS: u32 = 200;

/// A full journal with nothing in flight: only the checkpoint can free it, and no completion sets that off.
#[test]
fn appends_that_wait_for_a_checkpoint_wait_for_nothing_else() {
    let mut rig = Rig::new();
    let ids: Vec<PartitionId> = (0..PARTITIONS)
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
    // Several journals' worth, all asked for at once: most of it waits.
    let batch = batch_of(&[7; 20_000], START_MS, None);
    let rounds = 8;
    for _ in 0..rounds {
        ids.iter().for_each(|id| rig.append_batch(*id, &batch));
    }
    let mut accepted = 0;
    let wanted = rounds * ids.len();
    let mut turns = 0;
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
