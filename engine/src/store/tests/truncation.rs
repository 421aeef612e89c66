//! Cuts: in memory, on disk, across segments; then appends, then crashes before and after the cut is durable.

use super::*;

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
