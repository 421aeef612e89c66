//! A failing disk: what is fenced, what goes on, what a full disk meets.

use super::*;
use crate::io::sim::{Fault, FaultKind, OpKind, When};
use crate::io::{DiskError, FileClass};

const EIO: FaultKind = FaultKind::Error(DiskError::Io(5));

fn of_partition(what: FaultKind, kind: OpKind, partition: PartitionId) -> Fault {
    Fault::new(what, When::From(0))
        .kind(kind)
        .path(&partition.dir_name())
}

#[test]
fn a_failed_segment_write_fences_only_its_partition_and_checkpoints_go_on() {
    // Whether the checkpoint is under way when the write fails.
    for during in [false, true] {
        let mut rig = Rig::new();
        rig.append_durably(&small(0));
        rig.disk
            .add_fault(of_partition(EIO, OpKind::Write, P).class(FileClass::Segment));
        if during {
            // Less than a piece of write-back: only the checkpoint wants it written.
            (1..30).for_each(|i| rig.append(&small(i)));
            rig.store.request_checkpoint();
        } else {
            (1..30).for_each(|i| rig.append(&value(i)));
        }
        rig.settle();
        assert_eq!(rig.view(P).fenced, Some(FenceReason::SegmentFailed));
        assert!(rig.store.fenced().is_none());
        // Acknowledged all the same: the journal has it, and snapshots carry it on.
        let accepted = rig.view(P).durable_end.0 as usize;
        assert!(accepted > 3 && rig.view(P).log_end.0 as usize == accepted);
        rig.events.clear();
        rig.append(&small(31));
        assert!(matches!(rig.appended(), Err(AppendError::Fenced(_))));
        for i in 0..700 {
            rig.append_to(Q, &value(i));
            rig.settle();
        }
        assert!(
            rig.store.stats().checkpoints > 3,
            "the bad segment does not pin the journal"
        );
        assert!(rig.store.commit_stats().files_taken > 16);
        let of_p = |i: usize| if during || i == 0 { small(i) } else { value(i) };
        let expect: Vec<_> = (0..accepted).map(of_p).collect();
        assert_eq!(rig.read_all(), expect);
        rig.disk.clear_faults();
        let mut rig = rig.restart(Crash::Power);
        assert_eq!(rig.view(P).fenced, None);
        assert_eq!(rig.read_all(), expect, "during a checkpoint: {during}");
        assert_eq!(rig.survey(Q).0.len(), 700);
        rig.append_durably(&small(32));
        assert_eq!(rig.view(P).durable_end.0 as usize, accepted + 1);
    }
}

#[test]
fn a_failed_sync_fences_the_shard_and_the_next_start_has_everything() {
    let mut rig = Rig::new();
    (0..40).for_each(|i| rig.append(&value(i)));
    rig.settle();
    rig.disk
        .add_fault(Fault::new(EIO, When::From(0)).kind(OpKind::SyncAll));
    rig.store.request_checkpoint();
    let reason = rig.wait(|event| match event {
        StoreEvent::ShardFenced { reason } => Some(*reason),
        _ => None,
    });
    assert_eq!(reason, FenceReason::SyncFailed);
    assert_eq!(rig.store.fenced(), Some(reason));
    let completed = rig.store.stats().checkpoints;
    (0..1000).for_each(|_| {
        rig.turn();
    });
    assert_eq!(
        rig.store.stats().checkpoints,
        completed,
        "a failed sync is not tried again"
    );
    rig.disk.clear_faults();
    let mut rig = rig.restart(Crash::Kill);
    assert_eq!(rig.read_all(), (0..40).map(value).collect::<Vec<_>>());
}

#[test]
fn a_failed_journal_write_fences_the_shard_and_acknowledges_nothing_more() {
    let mut rig = Rig::new();
    rig.append_durably(&small(0));
    rig.disk.add_fault(
        Fault::new(EIO, When::Nth(0))
            .kind(OpKind::Write)
            .class(FileClass::Journal),
    );
    rig.append(&small(1));
    rig.settle_fenced();
    assert_eq!(rig.store.fenced(), Some(FenceReason::JournalFailed));
    assert_eq!(rig.view(P).durable_end, Offset(1));
    rig.events.clear();
    rig.append(&small(2));
    assert!(matches!(
        rig.appended(),
        Err(AppendError::Fenced(FenceReason::JournalFailed))
    ));
    rig.disk.clear_faults();
    let mut rig = rig.restart(Crash::Kill);
    let found = rig.read_all();
    assert!(
        found == [small(0)] || found == [small(0), small(1)],
        "acked is there, unacked may be"
    );
}

impl Rig {
    /// A fenced shard never gets its journal to rest.
    fn settle_fenced(&mut self) {
        for _ in 0..1000 {
            if !self.turn() && self.disk.in_flight() == 0 {
                return;
            }
        }
        panic!("operations never end");
    }
}

#[test]
fn a_full_disk_refuses_appends_and_recovers_by_itself() {
    for restarted in [false, true] {
        let mut rig = Rig::new();
        rig.append_durably(&small(0));
        rig.disk.set_capacity(Some(rig.disk.used()));
        let mut accepted = 1usize;
        rig.events.clear();
        loop {
            rig.append(&vec![accepted as u8; 30_000]);
            match rig.appended() {
                Ok(_) => accepted += 1,
                Err(error) => {
                    assert_eq!(error, AppendError::NoSpace);
                    break;
                }
            }
        }
        rig.settle();
        assert!(rig.store.fenced().is_none() && rig.view(P).fenced.is_none());
        assert_eq!(rig.view(P).durable_end.0 as usize, accepted);
        if restarted {
            // Acknowledged bytes have their place although the disk is full.
            rig = rig.restart(Crash::Power);
            assert_eq!(rig.view(P).durable_end.0 as usize, accepted);
        }
        rig.disk.set_capacity(None);
        rig.pass(500);
        rig.events.clear();
        rig.append(&small(7));
        assert!(rig.appended().is_ok(), "restarted: {restarted}");
        rig.settle();
        rig.checkpoint();
        let mut rig = rig.restart(Crash::Power);
        let values = rig.read_all();
        assert_eq!(values.len(), accepted + 1);
        assert_eq!(values[accepted], small(7));
    }
}

#[test]
fn a_directory_that_is_gone_fences_and_is_never_made_anew() {
    let mut rig = Rig::new();
    (0..30).for_each(|i| rig.append(&value(i)));
    rig.settle();
    rig.checkpoint();
    let gone = |disk: &mut SimDisk| {
        let from = format!("logs/{}", P.dir_name());
        let to = format!("{from}-elsewhere");
        crate::io::Disk::run(disk, vec![DiskOp::Rename { from, to }]).expect("the disk runs");
    };
    let mut rig = rig.try_restart(Crash::Power, gone).expect("recovery");
    rig.events.clear();
    rig.append(&small(1));
    assert!(matches!(
        rig.appended(),
        Err(AppendError::Fenced(FenceReason::FilesMissing))
    ));
    rig.append_to(Q, &small(1));
    assert!(rig.appended().is_ok());
}
