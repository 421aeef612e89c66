//! Reads from segments: lost, damaged and stale indexes, damaged bytes, lookups by time, memory.

use super::*;

/// A log of several sealed segments, in files only; with its values.
fn sealed() -> (Rig, Vec<Vec<u8>>) {
    let mut rig = Rig::new();
    let values: Vec<_> = (0..60).map(value).collect();
    for (i, value) in values.iter().enumerate() {
        rig.append_batch(P, &batch_of(value, 1000 + 10 * i as i64, None));
        rig.settle();
    }
    rig.checkpoint();
    rig.checkpoint();
    (rig, values)
}

fn names(disk: &SimDisk, ending: &str) -> Vec<String> {
    let dir = format!("logs/{}", P.dir_name());
    let names = disk.names(&dir).expect("there").into_iter();
    names
        .filter(|n| n.name.ends_with(ending))
        .map(|n| format!("{dir}/{}", n.name))
        .collect()
}

#[test]
fn an_index_is_rebuilt_whatever_became_of_it() {
    for case in ["good", "missing", "damaged", "another segment's"] {
        let (rig, values) = sealed();
        let touch = |disk: &mut SimDisk| {
            let indexes = names(disk, ".index");
            assert!(indexes.len() >= 3);
            let ops = match case {
                "missing" => indexes
                    .iter()
                    .map(|path| DiskOp::Unlink { path: path.clone() })
                    .collect(),
                "another segment's" => vec![DiskOp::Rename {
                    from: indexes[0].clone(),
                    to: indexes[1].clone(),
                }],
                _ => Vec::new(),
            };
            if case == "damaged" {
                assert!(indexes.iter().all(|path| disk.flip_bit(path, 100, 2)));
            }
            crate::io::Disk::run(disk, ops).expect("the disk runs");
        };
        let mut rig = rig.try_restart(Crash::Power, touch).expect("recovery");
        assert_eq!(rig.read_all(), values, "{case}");
        assert_eq!(rig.store.stats().damage_found, 0, "{case}");
    }
}

#[test]
fn damaged_bytes_of_a_segment_are_refused_and_the_rest_is_served() {
    for with_index in [true, false] {
        let (rig, values) = sealed();
        let touch = |disk: &mut SimDisk| {
            let first = names(disk, ".log").remove(0);
            assert!(disk.flip_bit(&first, 100_000, 5));
            if !with_index {
                let path = names(disk, ".index").remove(0);
                crate::io::Disk::run(disk, vec![DiskOp::Unlink { path }]).expect("the disk runs");
            }
        };
        let mut rig = rig.try_restart(Crash::Power, touch).expect("recovery");
        let (found, damaged) = rig.survey(P);
        assert!(!damaged.is_empty() && rig.store.stats().damage_found > 0);
        if with_index {
            assert_eq!(damaged, [5], "one batch");
        }
        let expect: Vec<_> = (0..60u64)
            .filter(|i| !damaged.contains(i))
            .map(|i| (i, values[i as usize].clone()))
            .collect();
        assert_eq!(found, expect, "with index: {with_index}");
        assert_eq!(rig.view(P).fenced, None);
    }
}

fn lookup(rig: &mut Rig, timestamp: i64) -> Result<Option<(Offset, i64)>, ReadError> {
    let limit = rig.view(P).log_end;
    rig.call(|store, now, out| store.offset_for_time(now, 3, P, timestamp, limit, out));
    rig.wait(|event| match event {
        StoreEvent::TimeFound { result, .. } => Some(result.clone()),
        _ => None,
    })
}

#[test]
fn lookups_by_time_find_the_first_record_in_memory_and_on_disk() {
    let (mut rig, _) = sealed();
    for life in 0..2 {
        for (timestamp, expect) in [
            (0, Some((0, 1000))),
            (1000, Some((0, 1000))),
            (1001, Some((1, 1010))),
            (1235, Some((24, 1240))),
            (1590, Some((59, 1590))),
            (1591, None),
        ] {
            let found = lookup(&mut rig, timestamp).expect("readable");
            let expect = expect.map(|(offset, time)| (Offset(offset), time));
            assert_eq!(found, expect, "time {timestamp} in life {life}");
        }
        rig = rig.restart(Crash::Power);
    }
}

#[test]
fn a_lookup_by_time_over_damage_ends() {
    let (rig, _) = sealed();
    let touch = |disk: &mut SimDisk| {
        let first = names(disk, ".log").remove(0);
        assert!(disk.flip_bit(&first, 100_000, 5));
    };
    let mut rig = rig.try_restart(Crash::Power, touch).expect("recovery");
    let answers: Vec<_> = (0..60).map(|i| lookup(&mut rig, 1000 + 10 * i)).collect();
    // Of the damaged record nothing is known: the first readable one behind it, or the damage, is told.
    let behind = Ok(Some((Offset(6), 1060)));
    assert!(answers[5] == behind || matches!(answers[5], Err(ReadError::Damaged { .. })));
    assert_eq!(answers[0], Ok(Some((Offset(0), 1000))));
    assert_eq!(answers[59], Ok(Some((Offset(59), 1590))));
}

/// A walk that stops at damage leaves the rest of the segment out of the index: a lookup must not pass over it.
#[test]
fn a_lookup_by_time_does_not_pass_over_a_segment_that_cannot_be_walked() {
    let (rig, _) = sealed();
    let touch = |disk: &mut SimDisk| {
        let first = names(disk, ".log").remove(0);
        assert!(disk.flip_bit(&first, 20, 5), "the first batch has another magic");
        let path = names(disk, ".index").remove(0);
        crate::io::Disk::run(disk, vec![DiskOp::Unlink { path }]).expect("the disk runs");
    };
    let mut rig = rig.try_restart(Crash::Power, touch).expect("recovery");
    for life in 0..2 {
        for timestamp in [1000, 1020, 1590, 2000] {
            let found = lookup(&mut rig, timestamp);
            assert!(
                matches!(found, Err(ReadError::Damaged { .. })),
                "{timestamp} in life {life}: {found:?}"
            );
        }
        rig.checkpoint();
        rig = rig.restart(Crash::Power);
    }
}

/// Batches of the same size as those that a cut took lie at the same positions and offsets: the index file of the
/// segment, from before the cut, would pass for theirs.
#[test]
fn a_lookup_by_time_after_a_cut_does_not_believe_the_index_from_before() {
    for crash in [Crash::Kill, Crash::Power] {
        for checkpoints in 0..3 {
            let mut rig = Rig::new();
            let put = |rig: &mut Rig, time: i64, count: usize| {
                for _ in 0..count {
                    rig.append_batch(P, &batch_of(&[7; 40_000], time, None));
                    rig.settle();
                }
            };
            put(&mut rig, 5, 20);
            rig.checkpoint();
            rig.call(|store, now, out| store.truncate(now, 42, P, Offset(3), out));
            assert_eq!(rig.done(42), Ok(()));
            put(&mut rig, 1000, 3);
            (0..checkpoints).for_each(|_| rig.checkpoint());
            let mut rig = rig.restart(crash);
            let case = format!("{crash:?} after {checkpoints} checkpoints");
            assert_eq!(lookup(&mut rig, 500), Ok(Some((Offset(3), 1000))), "{case}");
            assert_eq!(lookup(&mut rig, 0), Ok(Some((Offset(0), 5))), "{case}");
            assert_eq!(lookup(&mut rig, 1001), Ok(None), "{case}");
            // Sealed, and looked at again from its new index.
            put(&mut rig, 2000, 3);
            rig.checkpoint();
            let mut rig = rig.restart(crash);
            assert_eq!(lookup(&mut rig, 500), Ok(Some((Offset(3), 1000))), "{case}");
            assert_eq!(lookup(&mut rig, 1001), Ok(Some((Offset(6), 2000))), "{case}");
        }
    }
}

#[test]
fn memory_stays_within_its_budget_and_what_left_it_is_read_from_disk() {
    let cfg = StoreConfig {
        memory_bytes: 1 << 20,
        ..config()
    };
    let disk = SimDisk::new(1, SimConfig::default());
    let mut rig = Rig::with(disk, 1, cfg, settings()).expect("recovery");
    let values: Vec<_> = (0..200).map(value).collect();
    for value in &values {
        rig.append(value);
        rig.settle();
        assert!(
            rig.store.gauges().memory_bytes <= (1 << 20) + (512 << 10),
            "{:?}",
            rig.store.gauges()
        );
    }
    assert_eq!(rig.read_all(), values);
    assert!(rig.store.stats().disk_reads > 0 && rig.store.stats().memory_reads > 0);
}

#[test]
fn readers_leave_a_bounded_number_of_files_open() {
    let (rig, values) = sealed();
    let mut rig = rig.restart(Crash::Kill);
    for _ in 0..2 {
        assert_eq!(rig.read_all(), values);
        rig.settle();
    }
    let log = rig.store.logs.iter().flatten().next().expect("the partition");
    let sealed = log
        .segments
        .iter()
        .filter(|s| s.state() == crate::segment::SegmentState::Sealed);
    let (open, closed): (Vec<_>, Vec<_>) = sealed.partition(|s| s.file != crate::segment::FileState::Closed);
    assert!(open.len() <= crate::read::MAX_OPEN_SEALED, "{} open", open.len());
    assert!(!closed.is_empty());
}
