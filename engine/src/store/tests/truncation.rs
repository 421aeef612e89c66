//! Cuts: in memory, on disk, across segments; then appends, then crashes before and after the cut is durable.

use super::*;
use crate::io::FileClass;
use crate::io::sim::{Fault, FaultKind, OpKind, When};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Crashes {
    /// Before the record could be written.
    Before,
    /// When the cut was answered.
    After,
    /// When appends behind it were acknowledged.
    Behind,
}

#[test]
fn a_cut_keeps_exactly_what_lies_below_it() {
    // Records, restart before the cut (so that bytes come from files), offset of the cut.
    let table = [
        (10, false, 5),
        (10, false, 0),
        (10, false, 10),
        (40, false, 3),
        (40, false, 39),
        (40, true, 3),
        (40, true, 11),
        (40, true, 25),
        (40, true, 40),
        (40, true, 0),
    ];
    for (count, restarted, cut) in table {
        for crashes in [Crashes::Before, Crashes::After, Crashes::Behind] {
            for crash in [Crash::Kill, Crash::Power] {
                let case =
                    format!("{count} records, restarted {restarted}, cut at {cut}, {crashes:?}, {crash:?}");
                cut_case(count, restarted, cut, crashes, crash, &case);
            }
        }
    }
}

fn cut_case(count: usize, restarted: bool, cut: usize, crashes: Crashes, crash: Crash, case: &str) {
    let mut rig = Rig::new();
    let all: Vec<_> = (0..count).map(value).collect();
    for value in &all {
        rig.append(value);
        rig.turn();
    }
    rig.settle();
    if restarted {
        rig.checkpoint();
        rig = rig.restart(Crash::Power);
    }
    let mut expect = all[..cut].to_vec();
    rig.call(|store, now, out| store.truncate(now, 42, P, Offset(cut as u64), out));
    if crashes == Crashes::Before {
        let mut rig = rig.restart(crash);
        let found = rig.read_all();
        assert!(found == all || found == expect, "{case}: {} records", found.len());
        return;
    }
    assert_eq!(rig.done(42), Ok(()), "{case}");
    assert_eq!(rig.view(P).log_end, Offset(cut as u64), "{case}");
    if crashes == Crashes::Behind {
        for i in 100..112 {
            rig.append(&value(i));
            expect.push(value(i));
        }
        rig.settle();
        assert_eq!(rig.view(P).durable_end.0, expect.len() as u64, "{case}");
    }
    assert_eq!(rig.read_all(), expect, "{case}");
    let mut rig = rig.restart(crash);
    assert_eq!(rig.read_all(), expect, "{case}: first restart");
    rig.append_durably(&value(7));
    expect.push(value(7));
    rig.checkpoint();
    rig.checkpoint();
    let mut rig = rig.restart(Crash::Power);
    assert_eq!(rig.read_all(), expect, "{case}: second restart");
}

/// Cut mid-block, rewrite, power tears the block: the prefix in the record keeps the acknowledged half.
#[test]
fn the_prefix_of_a_cut_block_survives_a_torn_rewrite() {
    for seed in 0..20 {
        let mut rig =
            Rig::with(SimDisk::new(seed, SimConfig::default()), 1, config(), settings()).expect("recovery");
        (0..40).for_each(|i| rig.append(&small(i)));
        rig.settle();
        rig.checkpoint();
        rig.call(|store, now, out| store.truncate(now, 42, P, Offset(20), out));
        assert_eq!(rig.done(42), Ok(()));
        (0..60).for_each(|i| rig.append(&small(100 + i)));
        while rig.view(P).durable_end < Offset(80) {
            rig.turn();
        }
        // Write-back of the cut block may be in flight.
        (0..seed).for_each(|_| {
            rig.turn();
        });
        let expect: Vec<_> = (0..20)
            .map(small)
            .chain((0..60).map(|i| small(100 + i)))
            .collect();
        assert_eq!(rig.restart(Crash::Power).read_all(), expect, "seed {seed}");
    }
}

/// What was written back before a cut must not be let go from memory as if what took its place were written.
#[test]
fn eviction_after_a_cut_keeps_what_is_in_no_file() {
    let cfg = StoreConfig {
        memory_bytes: 256 << 10,
        ..config()
    };
    let disk = SimDisk::new(1, SimConfig::default());
    let mut rig = Rig::with(disk, 1, cfg, settings()).expect("recovery");
    let mut expect = Vec::new();
    for round in 0..6 {
        for i in 0..8 {
            let value = vec![(round * 10 + i) as u8; 30_000];
            rig.append(&value);
            expect.push(value);
        }
        rig.settle();
        let keep = expect.len() - 6;
        rig.call(|store, now, out| store.truncate(now, 42, P, Offset(keep as u64), out));
        assert_eq!(rig.done(42), Ok(()));
        expect.truncate(keep);
    }
    assert_eq!(rig.read_all(), expect);
    assert_eq!(rig.restart(Crash::Power).read_all(), expect);
}

/// The last thing in flight that a cut waits for may be the rename of a file below the log start.
#[test]
fn a_cut_goes_on_when_the_last_rename_has_ended() {
    let mut rig = Rig::new();
    let all: Vec<_> = (0..40).map(value).collect();
    all.iter().for_each(|value| rig.append_durably(value));
    rig.checkpoint();
    rig.store.set_high_watermark(P, Offset(40));
    rig.call(|store, now, out| store.set_log_start(now, 41, P, Offset(30), out));
    assert_eq!(rig.done(41), Ok(()));
    let no = rig.store.find_no(P).expect("known");
    let renaming = rig.store.log(no).expect("known").renaming;
    assert!(renaming > 0, "files below the log start are being renamed");
    rig.call(|store, now, out| store.truncate(now, 42, P, Offset(35), out));
    assert_eq!(rig.done(42), Ok(()));
    assert_eq!(rig.read_all(), all[30..35]);
}

/// Sends the batch `sequence` of producer 7.
fn produce(rig: &mut Rig, sequence: i32) -> Result<Appended, AppendError> {
    rig.events.retain(|e| !matches!(e, StoreEvent::Appended { .. }));
    let value = vec![sequence as u8; 30_000];
    rig.append_batch(P, &batch_of(&value, 5, Some((7, sequence))));
    rig.appended()
}

/// After a cut the last batches of a producer below it are known again: from the newest `.producers` file below the cut,
/// an older one, or the log alone; in this life and in the next one.
#[test]
fn a_retry_after_a_cut_is_answered_with_the_original() {
    // Offset of the cut, checkpoints before a restart (`None`: no restart), how many `.producers` files are spoilt.
    for (cut, restart, spoilt) in [
        (22, None, 0),
        (22, None, 1),
        (22, None, 9),
        (7, None, 0),
        (10, None, 0),
        (2, None, 0),
        (22, Some(0), 0),
        (22, Some(2), 0),
        (22, Some(2), 1),
        (15, Some(1), 9),
        (0, Some(2), 0),
    ] {
        let case = format!("cut at {cut}, restarted after {restart:?}, {spoilt} files spoilt");
        let mut rig = Rig::new();
        for sequence in 0..25 {
            produce(&mut rig, sequence).expect("in order");
            rig.settle();
        }
        rig.call(|store, now, out| store.truncate(now, 42, P, Offset(cut), out));
        assert_eq!(rig.done(42), Ok(()), "{case}");
        if let Some(checkpoints) = restart {
            (0..checkpoints).for_each(|_| rig.checkpoint());
            rig = rig.restart(Crash::Power);
        }
        let dir = format!("logs/{}", P.dir_name());
        let mut files: Vec<String> = rig
            .disk
            .names(&dir)
            .expect("a directory")
            .into_iter()
            .map(|n| n.name)
            .collect();
        files.retain(|name| name.ends_with(".producers"));
        files.sort_unstable();
        for name in files.iter().rev().take(spoilt) {
            assert!(rig.disk.flip_bit(&format!("{dir}/{name}"), 30, 1), "{case}");
        }
        let cut = cut as i32;
        for sequence in (cut - 5).max(0)..cut {
            let appended = produce(&mut rig, sequence).expect("a retry");
            let expect = (Offset(sequence as u64), Offset(sequence as u64 + 1), true);
            assert_eq!(
                (appended.base, appended.end, appended.duplicate),
                expect,
                "{case}"
            );
        }
        if cut > 0 {
            let gap = produce(&mut rig, cut + 1);
            let expected = cut;
            let refused =
                matches!(gap, Err(AppendError::OutOfOrderSequence { expected: e, .. }) if e == expected);
            assert!(refused, "{case}: {gap:?}");
        }
        let next = produce(&mut rig, cut).expect("the next one");
        assert_eq!((next.base, next.duplicate), (Offset(cut as u64), false), "{case}");
    }
}

/// A cut that comes while the table is built again, and a read that fails on the way.
#[test]
fn a_rebuild_gives_way_to_a_cut_and_is_tried_again_after_a_failure() {
    let mut rig = Rig::new();
    for sequence in 0..25 {
        produce(&mut rig, sequence).expect("in order");
        rig.settle();
    }
    rig.checkpoint();
    let mut rig = rig.restart(Crash::Power);
    rig.call(|store, now, out| store.truncate(now, 42, P, Offset(24), out));
    assert_eq!(rig.done(42), Ok(()));
    rig.settle();
    // The retry waits for the rebuild, the cut for the rebuild's operation, then the retry for another rebuild.
    rig.append_batch(P, &batch_of(&[22; 30_000], 5, Some((7, 22))));
    assert!(rig.disk.in_flight() > 0, "the rebuild reads");
    rig.call(|store, now, out| store.truncate(now, 43, P, Offset(23), out));
    assert_eq!(rig.done(43), Ok(()));
    let retried = rig.appended().expect("a retry");
    assert_eq!((retried.base, retried.duplicate), (Offset(22), true));

    rig.call(|store, now, out| store.truncate(now, 44, P, Offset(12), out));
    assert_eq!(rig.done(44), Ok(()));
    rig = rig.restart(Crash::Power);
    let eio = FaultKind::Error(DiskError::Io(5));
    let fault = Fault::new(eio, When::Nth(0))
        .kind(OpKind::Read)
        .class(FileClass::Segment);
    rig.disk.add_fault(fault);
    let refused = produce(&mut rig, 11);
    assert_eq!(refused.map(|_| ()), Err(AppendError::Place(DiskError::Io(5))));
    let retried = produce(&mut rig, 11).expect("a retry");
    assert_eq!((retried.base, retried.duplicate), (Offset(11), true));
}
