//! The epoch table and its file against a plain list of (epoch, start offset).

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::types::{PartitionId, TopicId};

fn table(entries: &[(u32, u64)]) -> EpochTable {
    let mut table = EpochTable::default();
    for (epoch, start) in entries {
        assert_eq!(
            table.assign(LeaderEpoch(*epoch), Offset(*start)),
            Ok(Assigned::Added)
        );
    }
    table
}

fn entries(table: &EpochTable) -> Vec<(u32, u64)> {
    table.iter().map(|entry| (entry.epoch.0, entry.start.0)).collect()
}

fn known(epoch: u32, end: u64) -> EpochEnd {
    EpochEnd::Known {
        epoch: LeaderEpoch(epoch),
        end: Offset(end),
    }
}

fn partition() -> PartitionId {
    PartitionId {
        topic: TopicId(*b"0123456789abcdef"),
        index: 3,
    }
}

#[test]
fn assign_follows_the_rules() {
    let check = |epoch: u32, start: u64, expect: Result<Assigned, AssignError>, after: &[(u32, u64)]| {
        let mut table = table(&[(0, 0), (3, 10)]);
        assert_eq!(table.assign(LeaderEpoch(epoch), Offset(start)), expect);
        assert_eq!(entries(&table), after);
    };
    let same = &[(0, 0), (3, 10)];
    check(3, 10, Ok(Assigned::Unchanged), same);
    check(3, 50, Ok(Assigned::Unchanged), same);
    check(4, 11, Ok(Assigned::Added), &[(0, 0), (3, 10), (4, 11)]);
    check(4, 10, Ok(Assigned::Replaced), &[(0, 0), (4, 10)]);
    let stale = AssignError::StaleEpoch {
        asked: LeaderEpoch(2),
        last: LeaderEpoch(3),
    };
    check(2, 99, Err(stale), same);
    for epoch in [3, 4] {
        let below = AssignError::StartBelowLast {
            epoch: LeaderEpoch(epoch),
            start: Offset(9),
            last_start: Offset(10),
        };
        check(epoch, 9, Err(below), same);
    }
}

#[test]
fn crash_loops_do_not_grow_the_table() {
    let mut table = table(&[(0, 0)]);
    for boot in 1..1000 {
        table.assign(LeaderEpoch(boot), Offset(7)).unwrap();
    }
    assert_eq!(entries(&table), [(0, 0), (999, 7)]);
}

#[test]
fn epoch_ends_are_exact() {
    let table = table(&[(1, 0), (3, 10), (4, 25)]);
    let check = |asked: u32, expect: EpochEnd| {
        assert_eq!(table.end_offset_for(LeaderEpoch(asked), Offset(30)), expect);
    };
    check(0, known(0, 0));
    check(1, known(1, 10));
    check(2, known(1, 10));
    check(3, known(3, 25));
    check(4, known(4, 30));
    check(9, known(4, 30));
    assert_eq!(
        EpochTable::default().end_offset_for(LeaderEpoch(1), Offset(30)),
        EpochEnd::Empty
    );
}

#[test]
fn truncation_at_both_ends() {
    let check = |cut: fn(&mut EpochTable, Offset) -> bool, at: u64, after: &[(u32, u64)]| {
        let before = table(&[(1, 5), (3, 10), (4, 25)]);
        let mut table = before.clone();
        assert_eq!(cut(&mut table, Offset(at)), table != before, "at {at}");
        assert_eq!(entries(&table), after, "at {at}");
    };
    check(EpochTable::truncate_from_end, 26, &[(1, 5), (3, 10), (4, 25)]);
    check(EpochTable::truncate_from_end, 25, &[(1, 5), (3, 10)]);
    check(EpochTable::truncate_from_end, 11, &[(1, 5), (3, 10)]);
    check(EpochTable::truncate_from_end, 0, &[]);
    check(EpochTable::drop_above, 25, &[(1, 5), (3, 10), (4, 25)]);
    check(EpochTable::drop_above, 24, &[(1, 5), (3, 10)]);
    check(EpochTable::truncate_from_start, 4, &[(1, 5), (3, 10), (4, 25)]);
    check(EpochTable::truncate_from_start, 5, &[(1, 5), (3, 10), (4, 25)]);
    check(EpochTable::truncate_from_start, 7, &[(1, 7), (3, 10), (4, 25)]);
    check(EpochTable::truncate_from_start, 10, &[(3, 10), (4, 25)]);
    check(EpochTable::truncate_from_start, 12, &[(3, 12), (4, 25)]);
    check(EpochTable::truncate_from_start, 90, &[(4, 90)]);
}

#[test]
fn the_bound_is_honest_about_what_it_dropped() {
    let mut table = EpochTable::new(2);
    for (epoch, start) in [(0, 0), (1, 10), (2, 20)] {
        table.assign(LeaderEpoch(epoch), Offset(start)).unwrap();
    }
    assert_eq!(entries(&table), [(1, 10), (2, 20)]);
    let older = EpochEnd::Older {
        first_start: Offset(10),
    };
    assert!(table.bounded());
    assert_eq!(table.end_offset_for(LeaderEpoch(0), Offset(30)), older);
    assert_eq!(table.end_offset_for(LeaderEpoch(1), Offset(30)), known(1, 20));
    // Below the first entry nothing moves: the dropped epoch still holds offsets.
    assert!(!table.truncate_from_start(Offset(9)));
    assert_eq!(table.end_offset_for(LeaderEpoch(0), Offset(30)), older);
    // Once the log starts at a known epoch the answer is exact again.
    assert!(table.truncate_from_start(Offset(10)));
    assert_eq!(table.end_offset_for(LeaderEpoch(0), Offset(30)), known(0, 10));
}

#[test]
fn epochs_by_offset() {
    let table = table(&[(1, 5), (3, 10)]);
    let found: Vec<Option<u32>> = [4, 5, 9, 10, 99]
        .map(|offset| table.epoch_at(Offset(offset)).map(|e| e.0))
        .into();
    assert_eq!(found, [None, Some(1), Some(1), Some(3), Some(3)]);
    let check = |from: u64, to: u64, expect: &[(u32, u64)]| {
        let found: Vec<(u32, u64)> = table
            .slice(Offset(from), Offset(to))
            .map(|entry| (entry.epoch.0, entry.start.0))
            .collect();
        assert_eq!(found, expect, "{from}..{to}");
    };
    check(0, 20, &[(1, 5), (3, 10)]);
    check(7, 20, &[(1, 7), (3, 10)]);
    check(7, 10, &[(1, 7)]);
    check(15, 20, &[(3, 15)]);
    check(15, 15, &[]);
    check(0, 5, &[]);
}

#[test]
fn a_batch_lies_within_one_epoch() {
    let check = |table: &EpochTable, first: u64, last: u64, epoch: u32, expect: bool| {
        let found = table.allows(Offset(first), Offset(last), LeaderEpoch(epoch));
        assert_eq!(found, expect, "{first}..={last} in {epoch}");
    };
    let mut exact = table(&[(1, 5), (3, 10)]);
    check(&exact, 5, 9, 1, true);
    check(&exact, 5, 10, 1, false);
    check(&exact, 10, 10, 3, true);
    check(&exact, 10, 10, 1, false);
    // Below the first entry lies what the bound or the log start took out of the table.
    check(&exact, 4, 4, 0, true);
    check(&exact, 4, 4, 1, true);
    check(&exact, 4, 4, 3, false);
    check(&EpochTable::default(), 0, 0, 0, true);
    exact.truncate_from_start(Offset(12));
    check(&exact, 4, 9, 1, true);
    check(&exact, 10, 13, 3, true);
    check(&exact, 9, 13, 1, false);
    check(&exact, 4, 9, 4, false);
}

#[test]
fn text_form_is_one_line_each() {
    assert_eq!(table(&[(0, 0), (3, 10)]).to_string(), "0 0\n3 10\n");
}

#[test]
fn snapshot_form_has_these_bytes() {
    let mut bytes = Vec::new();
    table(&[(2, 258)]).encode_into(&mut bytes);
    assert_eq!(bytes, [1, 0, 0, 0, 0, 2, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn snapshot_form_refuses_what_is_no_table() {
    let mut good = Vec::new();
    table(&[(1, 5), (3, 10)]).encode_into(&mut good);
    let check = |at: usize, value: u8| {
        let mut bad = good.clone();
        bad[at] = value;
        assert_eq!(EpochTable::decode(&bad, 100), None, "byte {at} = {value}");
    };
    check(0, 3); // count beyond the bytes
    check(3, 0xff);
    check(4, 2); // no flag
    check(5, 3); // epochs do not rise
    check(9, 10); // starts do not rise
    assert_eq!(EpochTable::decode(&good[..good.len() - 1], 100), None);
    let (bounded, _) = EpochTable::decode(&good, 1).unwrap();
    assert!(bounded.bounded() && entries(&bounded) == [(3, 10)]);
}

#[test]
fn every_damage_to_the_checkpoint_costs_a_rewrite_only() {
    let all = table(&[(0, 0), (3, 10), (4, 25)]);
    let file = encode_checkpoint(partition(), all.iter());
    let check = |file: &[u8], kept: usize, rewrite: bool| {
        let read = decode_checkpoint(partition(), file);
        let expect: Vec<EpochEntry> = all.iter().take(kept).collect();
        assert_eq!(
            read,
            CheckpointRead {
                entries: expect,
                rewrite
            }
        );
    };
    check(&file, 3, false);
    check(&[file.clone(), vec![0; 4096 - file.len()]].concat(), 3, false);
    check(&file[..SLOT_BYTES], 0, false); // a table without entries
    check(&[], 0, true);
    check(&file[..10], 0, true);
    check(&[0; 4096], 0, true);
    check(&file[..40], 1, true); // half a slot
    check(&[file.clone(), vec![7; SLOT_BYTES]].concat(), 3, true);
    let mut rotten = file.clone();
    rotten[2 * SLOT_BYTES] ^= 1;
    check(&rotten, 1, true);
    let mut hole = file.clone();
    hole[2 * SLOT_BYTES..3 * SLOT_BYTES].fill(0);
    check(&hole, 1, true);
    let mut misplaced = file.clone();
    misplaced.copy_within(3 * SLOT_BYTES.., 2 * SLOT_BYTES);
    check(&misplaced, 1, true);
    let other = PartitionId {
        index: 4,
        ..partition()
    };
    check(&encode_checkpoint(other, all.iter()), 0, true);
    let falling = [all.last().unwrap(), all.first().unwrap()];
    let falling = decode_checkpoint(partition(), &encode_checkpoint(partition(), falling.into_iter()));
    assert!(falling.rewrite && falling.entries == [all.last().unwrap()]);
}

#[test]
fn a_slot_appended_later_is_the_same_file() {
    let all = table(&[(0, 0), (3, 10)]);
    let mut file = encode_checkpoint(partition(), all.iter().take(1));
    file.extend_from_slice(&encode_slot(partition(), 1, all.last().unwrap()));
    assert_eq!(file, encode_checkpoint(partition(), all.iter()));
}

/// What a table is about: the epoch of each offset.
#[derive(Debug, Clone)]
enum Step {
    Append { raise: u32, records: u64 },
    CutEnd(prop::sample::Index),
    CutStart(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u32, 0..5u64).prop_map(|(raise, records)| Step::Append { raise, records }),
        1 => any::<prop::sample::Index>().prop_map(Step::CutEnd),
        1 => any::<prop::sample::Index>().prop_map(Step::CutStart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Against a model that stores the epoch of every record.
    #[test]
    fn table_agrees_with_a_log_that_stores_each_epoch(steps in vec(step(), 1..60), max in 1..8usize) {
        let mut table = EpochTable::new(max);
        let mut exact = EpochTable::new(usize::MAX);
        let (mut log, mut start, mut epoch): (Vec<u32>, u64, u32) = (Vec::new(), 0, 0);
        for step in steps {
            let end = start + log.len() as u64;
            match step {
                Step::Append { raise, records } => {
                    epoch += raise;
                    for table in [&mut table, &mut exact] {
                        table.assign(LeaderEpoch(epoch), Offset(end)).unwrap();
                    }
                    log.extend((0..records).map(|_| epoch));
                }
                Step::CutEnd(at) => {
                    log.truncate(at.index(log.len() + 1));
                    for table in [&mut table, &mut exact] {
                        table.truncate_from_end(Offset(start + log.len() as u64));
                    }
                }
                Step::CutStart(at) => {
                    let gone = at.index(log.len() + 1);
                    log.drain(..gone);
                    start += gone as u64;
                    for table in [&mut table, &mut exact] {
                        table.truncate_from_start(Offset(start));
                    }
                }
            }
            let end = Offset(start + log.len() as u64);
            prop_assert!(table.len() <= max);
            for (offset, epoch) in (start..).zip(&log) {
                prop_assert_eq!(exact.epoch_at(Offset(offset)), Some(LeaderEpoch(*epoch)));
                let found = table.epoch_at(Offset(offset));
                prop_assert!(found == Some(LeaderEpoch(*epoch)) || (found.is_none() && table.bounded()));
            }
            for asked in (0..epoch + 2).map(LeaderEpoch) {
                let expect = exact.end_offset_for(asked, end);
                // The model: the largest epoch at or below the one asked ends where a larger one begins.
                let model_end = log.iter().position(|e| *e > asked.0).map(|at| Offset(start + at as u64));
                if let EpochEnd::Known { end: found, .. } = expect {
                    let empty_last = exact.last().is_some_and(|last| last.start == end && last.epoch > asked);
                    prop_assert!(Some(found) == model_end || (model_end.is_none() && (found == end || empty_last)));
                }
                let found = table.end_offset_for(asked, end);
                let unknown = matches!(found, EpochEnd::Older { .. } | EpochEnd::Empty);
                prop_assert!(found == expect || (table.bounded() && unknown));
            }
            let mut bytes = Vec::new();
            table.encode_into(&mut bytes);
            bytes.push(9);
            let (decoded, rest) = EpochTable::decode(&bytes, max).unwrap();
            prop_assert_eq!((&decoded, rest), (&table, &[9u8][..]));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..200)) {
        if let Some((table, _)) = EpochTable::decode(&bytes, 100) {
            prop_assert!(table.len() <= bytes.len());
        }
        let read = decode_checkpoint(partition(), &bytes);
        prop_assert!(read.rewrite && read.entries.is_empty());
    }

    #[test]
    fn a_mutated_checkpoint_never_yields_a_wrong_entry(
        starts in vec(1..50u64, 1..30),
        edits in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut at = 0;
        let entries: Vec<EpochEntry> = (0..)
            .zip(starts)
            .map(|(epoch, step)| {
                at += step;
                EpochEntry { epoch: LeaderEpoch(epoch), start: Offset(at) }
            })
            .collect();
        let mut file = encode_checkpoint(partition(), entries.iter().copied());
        for (at, value) in edits {
            let at = at.index(file.len());
            file[at] = value;
        }
        file.truncate(cut.index(file.len() + 1));
        let read = decode_checkpoint(partition(), &file);
        prop_assert!(entries.starts_with(&read.entries));
        // All of the file was read, or a rewrite is due, or what follows is zeros.
        prop_assert!(read.rewrite || file.len().div_ceil(SLOT_BYTES) <= read.entries.len() + 1
            || file[(read.entries.len() + 1) * SLOT_BYTES..].iter().all(|byte| *byte == 0));
    }
}
