//! Damage in the journal and in snapshots: what is cut, what is fenced, what still counts (STORAGE.md sections 2, 4, 5).

use super::*;
use crate::journal::{FileHeader, FrameHeader};

/// A frame on the disk.
struct OnDisk {
    path: String,
    pos: u64,
    header: FrameHeader,
}

const DIR: &str = "journal/1/0";

/// The frames of the journal's latest life, by address.
fn frames(disk: &SimDisk) -> Vec<OnDisk> {
    let grain = config().journal_file_bytes.min(4096);
    let mut found = Vec::new();
    for name in disk.names(DIR).expect("a journal") {
        let path = format!("{DIR}/{}", name.name);
        let bytes = disk.peek(&path).expect("a file");
        let Ok(file) = FileHeader::decode(&bytes) else {
            continue;
        };
        let mut pos = grain;
        while pos < bytes.len() as u64 {
            let header = FrameHeader::decode(&bytes[pos as usize..], bytes.len() as u64 - pos);
            let ours = |h: &FrameHeader| {
                h.lsn.0 == file.first_lsn.0 + pos - grain && h.incarnation == file.incarnation
            };
            match header.ok().filter(ours) {
                Some(header) => {
                    let len = u64::from(header.frame_len);
                    let path = path.clone();
                    found.push(OnDisk { path, pos, header });
                    pos += len;
                }
                None => break,
            }
        }
    }
    found.sort_by_key(|f| f.header.lsn);
    found
}

/// A log of `count` records, one frame each, nothing in segments; and the number of frames before them.
fn one_frame_each(count: usize) -> (Rig, usize) {
    let mut rig = Rig::new();
    let before = frames(&rig.disk).len();
    for i in 0..count {
        rig.append(&small(i));
        // The first append waits for its place; then each turn issues one frame.
        while rig.view(P).durable_end.0 <= i as u64 {
            rig.turn();
        }
    }
    (rig, before)
}

/// Flips a bit of the part of the frame that `part` names.
fn damage(disk: &mut SimDisk, frame: &OnDisk, part: &str) {
    let at = match part {
        "header" => 40,
        "directory" => 128 + 30,
        "body" => u64::from(frame.header.frame_len) - 2500,
        other => panic!("{other}"),
    };
    assert!(disk.flip_bit(&frame.path, frame.pos + at, 3));
}

#[test]
fn damage_below_the_promise_is_fenced_to_its_offsets() {
    // (frames damaged, the part), the damaged offsets.
    type Case<'a> = (&'a [(usize, &'a str)], &'a [u64]);
    let table: &[Case<'_>] = &[
        (&[(4, "header")], &[4]),
        (&[(4, "directory")], &[4]),
        (&[(4, "body")], &[4]),
        (&[(0, "body")], &[0]),
        (&[(4, "body"), (5, "body")], &[4, 5]),
        (&[(4, "body"), (5, "header")], &[4, 5]),
        (&[(4, "header"), (5, "body")], &[4, 5]),
        (&[(4, "header"), (5, "header")], &[4, 5]),
        (&[(4, "directory"), (5, "directory")], &[4, 5]),
        (&[(2, "header"), (3, "header"), (4, "header")], &[2, 3, 4]),
        // The Mark behind the last record promises it.
        (&[(9, "header")], &[9]),
        (&[(9, "body")], &[9]),
    ];
    for (parts, lost) in table {
        let (mut rig, before) = one_frame_each(10);
        rig.settle();
        let mut rig = rig
            .try_restart(Crash::Kill, |disk| {
                let frames = frames(disk);
                for (index, part) in *parts {
                    damage(disk, &frames[before + index], part);
                }
            })
            .expect("recovery");
        assert!(rig.report.damaged_frames > 0, "{parts:?}: {:?}", rig.report);
        assert_eq!(rig.view(P).log_end, Offset(10), "{parts:?}");
        for _ in 0..2 {
            let (values, damaged) = rig.survey(P);
            assert_eq!(damaged, *lost, "{parts:?}");
            let kept: Vec<(u64, Vec<u8>)> = (0..10)
                .filter(|i| !lost.contains(i))
                .map(|i| (i, small(i as usize)))
                .collect();
            assert_eq!(values, kept, "{parts:?}");
            // Later it comes from the segment and from a snapshot that knows the damage.
            rig.checkpoint();
            rig = rig.restart(Crash::Power);
        }
    }
}

#[test]
fn a_torn_tail_is_cut_and_nothing_is_fenced() {
    for part in ["header", "directory", "body"] {
        let (rig, before) = one_frame_each(6);
        // No frame promises the last record: it may be torn.
        let mut rig = rig
            .try_restart(Crash::Kill, |disk| {
                let frames = frames(disk);
                assert_eq!(frames.len(), before + 6, "no Mark yet");
                damage(disk, &frames[before + 5], part);
            })
            .expect("recovery");
        assert_eq!((rig.report.damaged_frames, rig.report.fenced), (0, 0), "{part}");
        assert_eq!(rig.view(P).log_end, Offset(5), "{part}");
        rig.append_durably(&small(77));
        let mut expect: Vec<_> = (0..5).map(small).collect();
        expect.push(small(77));
        assert_eq!(rig.read_all(), expect);
        assert_eq!(rig.restart(Crash::Power).read_all(), expect, "{part}");
    }
}

#[test]
fn a_damaged_file_header_loses_nothing() {
    let (mut rig, _) = one_frame_each(10);
    rig.settle();
    let flip = |disk: &mut SimDisk| assert!(disk.flip_bit(&format!("{DIR}/000"), 20, 1));
    let mut rig = rig.try_restart(Crash::Kill, flip).expect("recovery");
    assert_eq!(rig.read_all(), (0..10).map(small).collect::<Vec<_>>());
}

/// Frames 10 and 11 in flight; the crash tears 10 and leaves 11; the next life writes a 10' of the same size; a second
/// crash: 11 must not be replayed behind 10'.
#[test]
fn a_frame_of_an_earlier_term_is_not_replayed() {
    let (mut rig, before) = one_frame_each(10);
    rig.append(&small(10));
    rig.call(|store, now, out| store.turn_end(now, out));
    rig.append(&small(11));
    rig.call(|store, now, out| store.turn_end(now, out));
    while rig.view(P).durable_end < Offset(12) {
        rig.turn();
    }
    let mut rig = rig
        .try_restart(Crash::Kill, |disk| {
            let frames = frames(disk);
            let (ten, eleven) = (&frames[before + 10], &frames[before + 11]);
            assert!(eleven.header.durable_lsn <= ten.header.lsn, "both were in flight");
            damage(disk, ten, "header");
        })
        .expect("recovery");
    assert_eq!(rig.view(P).log_end, Offset(10));
    rig.append_durably(&vec![99; small(10).len()]);
    let mut rig = rig.restart(Crash::Power);
    let values = rig.read_all();
    assert_eq!(values.len(), 11);
    assert_eq!(values[10], vec![99; small(10).len()]);
}

/// Appends until the journal has gone round several times, checkpoints included.
fn laps(rig: &mut Rig, from: usize, count: usize) {
    for i in from..from + count {
        rig.append(&value(i));
        rig.settle();
    }
}

fn flip_snapshot(disk: &mut SimDisk, name: &str) {
    assert!(disk.flip_bit(&format!("{DIR}/{name}"), 50, 0));
}

/// Name of the snapshot with the higher number.
fn newer(disk: &SimDisk) -> &'static str {
    let number = |name: &str| {
        let bytes = disk.peek(&format!("{DIR}/{name}")).unwrap_or_default();
        crate::snapshot::SnapshotHeader::decode(&bytes, bytes.len() as u64).map_or(0, |h| h.number)
    };
    if number("checkpoint-a") > number("checkpoint-b") {
        "checkpoint-a"
    } else {
        "checkpoint-b"
    }
}

#[test]
fn the_journal_wraps_and_the_older_snapshot_is_enough() {
    let mut rig = Rig::new();
    laps(&mut rig, 0, 900);
    assert!(rig.store.commit_stats().files_taken > 3 * 8, "several laps");
    assert!(rig.store.stats().checkpoints > 3);
    let expect: Vec<_> = (0..900).map(value).collect();
    let mut rig = rig
        .try_restart(Crash::Power, |disk| flip_snapshot(disk, newer(disk)))
        .expect("recovery");
    assert!(rig.report.older_snapshot || rig.report.snapshot > 0);
    assert_eq!(rig.read_all(), expect);
    // After a restart the older one counts too: what lies between the two must not be recycled.
    laps(&mut rig, 900, 30);
    let mut rig = rig
        .try_restart(Crash::Power, |disk| flip_snapshot(disk, newer(disk)))
        .expect("recovery");
    assert_eq!(rig.read_all(), (0..930).map(value).collect::<Vec<_>>());
}

#[test]
fn both_snapshots_lost_after_recycling_is_an_error_and_never_a_cut() {
    let mut rig = Rig::new();
    laps(&mut rig, 0, 600);
    let lost = rig.try_restart(Crash::Power, |disk| {
        flip_snapshot(disk, "checkpoint-a");
        flip_snapshot(disk, "checkpoint-b");
    });
    assert!(matches!(lost.err(), Some(RecoverError::Damaged { shard: 0, .. })));
}

#[test]
fn a_snapshot_promises_the_frames_below_it() {
    let (mut rig, before) = one_frame_each(10);
    rig.settle();
    rig.checkpoint();
    let damaged_before = |disk: &mut SimDisk| {
        // The last frames before the snapshot rot; nothing newer promises them.
        let frames = frames(disk);
        frames[before + 9..]
            .iter()
            .for_each(|frame| damage(disk, frame, "header"));
    };
    let mut rig = rig.try_restart(Crash::Kill, damaged_before).expect("recovery");
    assert_eq!(rig.view(P).log_end, Offset(10), "the snapshot holds it");
    rig.append_durably(&small(10));
    let mut rig = rig.restart(Crash::Power);
    assert_eq!(rig.read_all(), (0..11).map(small).collect::<Vec<_>>());
}

#[test]
fn a_linger_does_not_keep_the_store_from_starting() {
    let cfg = StoreConfig {
        linger_ns: 5_000_000,
        ..config()
    };
    let disk = SimDisk::new(1, SimConfig::default());
    let mut rig = Rig::with(disk, 1, cfg, settings()).expect("recovery");
    rig.append_durably(&small(0));
    assert_eq!(rig.restart(Crash::Power).read_all(), [small(0)]);
}
