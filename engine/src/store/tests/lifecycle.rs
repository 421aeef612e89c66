//! Rolling, retention, log start, drops, and what happens to their files.

use super::*;

fn files(rig: &SimDisk, partition: PartitionId, ending: &str) -> usize {
    let dir = format!("logs/{}", partition.dir_name());
    let names = rig.names(&dir).unwrap_or_default();
    names.iter().filter(|n| n.name.ends_with(ending)).count()
}

fn fill(settings: LogSettings, count: usize) -> Rig {
    let disk = SimDisk::new(1, SimConfig::default());
    let mut rig = Rig::with(disk, 1, config(), settings).expect("recovery");
    for i in 0..count {
        rig.append_batch(P, &batch_of(&vec![i as u8; 30_000], START_MS, None));
        rig.settle();
    }
    rig
}

#[test]
fn segments_roll_by_bytes_and_by_age() {
    let by_bytes = fill(settings(), 40);
    // Ten batches of 30,000 bytes fit into 300 KiB.
    assert_eq!(files(&by_bytes.disk, P, ".log"), 4);
    let aged = LogSettings {
        segment_ms: 10_000,
        ..settings()
    };
    let mut by_age = fill(aged, 2);
    assert_eq!(files(&by_age.disk, P, ".log"), 1);
    by_age.pass(11_000);
    by_age.append_durably(&small(1));
    assert_eq!(files(&by_age.disk, P, ".log"), 2);
}

/// A segment whose end is a block multiple has nothing left to write when it rolls; it must seal all the same, also
/// when its file was not opened in this life.
#[test]
fn a_segment_that_ends_with_a_block_seals() {
    let overhead = batch_of(&[], START_MS, None).len();
    let mut len = 4096 * 4 - overhead;
    while batch_of(&vec![1; len], START_MS, None).len() > 4096 * 4 {
        len -= 1;
    }
    let value = vec![1; len];
    assert_eq!(batch_of(&value, 5, None).len(), 4096 * 4);
    let small_segments = LogSettings {
        segment_bytes: 4 * 4096 * 4,
        ..settings()
    };
    let disk = SimDisk::new(1, SimConfig::default());
    let mut rig = Rig::with(disk, 1, config(), small_segments).expect("recovery");
    (0..4).for_each(|_| rig.append_durably(&value));
    rig.checkpoint();
    let mut rig = rig.restart(Crash::Power);
    (0..3).for_each(|_| rig.append_durably(&value));
    rig.checkpoint();
    rig.checkpoint();
    assert_eq!(rig.restart(Crash::Power).read_all(), vec![value; 7]);
}

#[test]
fn retention_by_bytes_keeps_at_least_what_it_promises() {
    let limited = LogSettings {
        retention_bytes: Some(500 << 10),
        ..settings()
    };
    let mut rig = fill(limited, 60);
    rig.pass(300);
    assert_eq!(
        rig.view(P).log_start,
        Offset(0),
        "nothing above the high watermark goes"
    );
    rig.store.set_high_watermark(P, Offset(60));
    rig.pass(300);
    let view = rig.view(P);
    // Segments hold ten batches of about 30 KB.
    assert_eq!(view.log_start, Offset(40));
    assert_eq!(rig.read_all().len(), 20);
    let mut rig = rig.restart(Crash::Power);
    assert_eq!(rig.view(P).log_start, Offset(40));
    assert_eq!(rig.read_all().len(), 20);
}

#[test]
fn retention_by_time_takes_the_active_segment_too() {
    let limited = LogSettings {
        retention_ms: Some(60_000),
        ..settings()
    };
    let mut rig = fill(limited, 25);
    rig.store.set_high_watermark(P, Offset(25));
    rig.pass(55_000);
    assert_eq!(rig.view(P).log_start, Offset(0));
    rig.pass(10_000);
    assert_eq!(rig.view(P).log_start, Offset(25));
    let mut rig = rig.restart(Crash::Power);
    assert_eq!(
        (rig.view(P).log_start, rig.view(P).log_end),
        (Offset(25), Offset(25))
    );
    rig.append_durably(&small(3));
    assert_eq!(rig.read_all(), [small(3)]);
}

#[test]
fn the_log_start_moves_up_to_the_high_watermark_and_survives() {
    let mut rig = fill(settings(), 25);
    rig.call(|store, now, out| store.set_log_start(now, 50, P, Offset(13), out));
    assert!(matches!(rig.done(50), Err(CommandError::OutOfRange { .. })));
    rig.store.set_high_watermark(P, Offset(25));
    rig.call(|store, now, out| store.set_log_start(now, 51, P, Offset(13), out));
    assert_eq!(rig.done(51), Ok(()));
    rig.settle();
    assert_eq!(files(&rig.disk, P, ".log"), 2, "the first segment is set aside");
    let early = rig.read(P, Offset(12));
    assert!(matches!(early, Err(ReadError::OutOfRange { .. })));
    let mut rig = rig.restart(Crash::Power);
    assert_eq!(rig.view(P).log_start, Offset(13));
    assert_eq!(rig.read_all().len(), 12);
}

#[test]
fn a_file_set_aside_goes_after_two_checkpoints_and_the_delay() {
    let mut rig = fill(settings(), 25);
    rig.store.set_high_watermark(P, Offset(25));
    rig.call(|store, now, out| store.set_log_start(now, 51, P, Offset(13), out));
    assert_eq!(rig.done(51), Ok(()));
    rig.settle();
    let aside = files(&rig.disk, P, "-delete");
    assert!(aside >= 1);
    rig.checkpoint();
    assert_eq!(
        files(&rig.disk, P, "-delete"),
        aside,
        "one checkpoint is not enough"
    );
    rig.pass(4_000);
    assert_eq!(files(&rig.disk, P, "-delete"), 0);
}

fn directories(disk: &SimDisk) -> Vec<String> {
    let names = disk.names("logs").expect("there");
    names.into_iter().map(|n| n.name).collect()
}

#[test]
fn a_dropped_partition_is_gone_after_a_crash_and_its_files_with_it() {
    for (crash, answered) in [(Crash::Kill, true), (Crash::Power, true), (Crash::Power, false)] {
        let mut rig = fill(settings(), 25);
        rig.append_to(Q, &small(1));
        rig.settle();
        rig.call(|store, now, out| store.drop_partition(now, 60, P, out));
        if answered {
            assert_eq!(rig.done(60), Ok(()));
            assert!(rig.store.view(P).is_none());
        } else {
            // The record is durable, nothing more.
            rig.turn();
        }
        let mut rig = rig.restart(crash);
        if answered {
            assert_eq!(rig.view(P).log_end, Offset(0), "a new, empty one under the id");
            rig.pass(1_000);
            rig.pass(5_000);
            assert_eq!(directories(&rig.disk), [Q.dir_name()], "{crash:?}");
        } else {
            assert!([Offset(0), Offset(25)].contains(&rig.view(P).log_end));
        }
        assert_eq!(rig.survey(Q).0, [(0, small(1))]);
    }
}

#[test]
fn retries_of_idempotent_producers_are_known_after_a_restart() {
    let mut rig = Rig::new();
    for sequence in 0..8 {
        rig.append_batch(P, &batch_of(&small(sequence), 5, Some((77, sequence as i32))));
    }
    rig.settle();
    rig.events.clear();
    for (checkpointed, crash) in [(false, Crash::Power), (true, Crash::Power), (true, Crash::Kill)] {
        if checkpointed {
            rig.checkpoint();
        }
        rig = rig.restart(crash);
        rig.events.clear();
        for sequence in 3..8usize {
            rig.append_batch(P, &batch_of(&small(sequence), 5, Some((77, sequence as i32))));
            let answer = rig.appended().expect("a duplicate");
            assert!(answer.duplicate);
            assert_eq!(answer.base, Offset(sequence as u64));
        }
        rig.append_batch(P, &batch_of(&small(9), 5, Some((77, 9))));
        assert!(matches!(
            rig.appended(),
            Err(AppendError::OutOfOrderSequence { expected: 8, .. })
        ));
    }
    assert_eq!(rig.read_all(), (0..8).map(small).collect::<Vec<_>>());
}

#[test]
fn nothing_is_accepted_while_stopping_and_the_stop_ends() {
    let mut rig = Rig::new();
    rig.append_durably(&small(0));
    rig.events.clear();
    rig.append(&small(1));
    rig.store.begin_stop();
    rig.append(&small(2));
    assert!(rig.appended().is_ok());
    assert_eq!(rig.appended().err(), Some(AppendError::Busy));
    rig.settle();
    assert!(rig.store.is_stopped());
    assert_eq!(rig.restart(Crash::Power).read_all(), [small(0), small(1)]);
}
