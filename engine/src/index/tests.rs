//! Indexes against the batches they describe, whole, damaged and rebuilt.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::batch::{BatchBuilder, BatchError, BatchHeader, NewRecord, field, stamp, validate};
use crate::epochs::EpochTable;
use crate::limits::BLOCK;
use crate::types::TopicId;

const BASE: u64 = 1000;

fn key() -> SegmentKey {
    SegmentKey {
        partition: PartitionId {
            topic: TopicId(*b"fedcba9876543210"),
            index: 2,
        },
        base: Offset(BASE),
    }
}

/// What a batch of a test segment is made of.
#[derive(Debug, Clone, Copy)]
struct Spec {
    records: u32,
    bytes: usize,
    timestamp: i64,
    epoch_step: u32,
}

fn spec(bytes: usize, timestamp: i64) -> Spec {
    Spec {
        records: 2,
        bytes,
        timestamp,
        epoch_step: 0,
    }
}

/// Bytes of a segment with these batches, and their headers with positions.
fn segment(specs: &[Spec]) -> (Vec<u8>, Vec<(BatchHeader, Pos)>) {
    let (mut bytes, mut headers) = (Vec::new(), Vec::new());
    let (mut next, mut epoch) = (Offset(BASE), 1);
    for spec in specs {
        let mut builder = BatchBuilder::new();
        for at in 0..spec.records {
            let value = vec![at as u8; if at == 0 { spec.bytes } else { 1 }];
            let record = NewRecord {
                timestamp: spec.timestamp,
                value: Some(&value),
                ..NewRecord::default()
            };
            builder.push(record).unwrap();
        }
        let mut batch = builder.finish().unwrap();
        let mut header = validate(&batch).unwrap();
        epoch += spec.epoch_step;
        stamp(&mut batch, &mut header, next, LeaderEpoch(epoch), None);
        next = header.next_offset();
        headers.push((header, Pos(bytes.len() as u64)));
        bytes.extend_from_slice(&batch);
    }
    (bytes, headers)
}

fn build(specs: &[Spec]) -> (IndexBuilder, Vec<u8>) {
    let (bytes, headers) = segment(specs);
    let mut builder = IndexBuilder::new(key());
    for (header, pos) in headers {
        let at = pos.0 as usize;
        builder.add_batch(&header, pos, BatchBytes::All(&bytes[at..at + header.size]));
    }
    (builder, bytes)
}

fn file_of(index: &SegmentIndex, sealed: bool) -> Vec<u8> {
    let mut file: Vec<u8> = (0..index.blocks())
        .flat_map(|n| index.encode_block(n).unwrap())
        .collect();
    if sealed {
        file.extend_from_slice(&index.encode_seal());
    }
    file
}

/// An index of `count` intervals of one batch each.
fn intervals(count: usize) -> SegmentIndex {
    let mut index = SegmentIndex::new(key());
    for at in 0..count as u32 {
        let entry = Entry {
            first: at * 2,
            count: 2,
            pos: at * 100,
            len: 100,
            crc: at,
            epoch: at / 70,
            max_timestamp: 5,
            max_timestamp_base: at * 2,
        };
        assert!(index.push(entry));
    }
    index
}

#[test]
fn intervals_are_whole_batches_of_one_epoch() {
    let k = 1 << 10;
    let mut specs = [20 * k, 20 * k, 50 * k, 4 * k, 4 * k, 40 * k, 7].map(|bytes| spec(bytes, 10));
    specs[4].epoch_step = 1;
    specs[5].epoch_step = 3;
    let (bytes, headers) = segment(&specs);
    let mut builder = IndexBuilder::new(key());
    let mut closed = Vec::new();
    for (header, pos) in &headers {
        let at = pos.0 as usize;
        closed.push(builder.add_batch(header, *pos, BatchBytes::All(&bytes[at..at + header.size])));
    }
    assert_eq!(closed, [0, 1, 1, 0, 1, 2, 0]);
    let shape: Vec<(u64, u64, u32)> = builder
        .index()
        .iter()
        .map(|interval| (interval.first.0 - BASE, interval.next.0 - BASE, interval.epoch.0))
        .collect();
    assert_eq!(shape, [(0, 4, 1), (4, 6, 1), (6, 8, 1), (8, 10, 2), (10, 12, 5)]);
    assert_eq!(builder.open_start(), (headers[6].1, Offset(BASE + 12)));
    assert_eq!(builder.end(), Pos(bytes.len() as u64));
    let (index, seal) = builder.seal();
    assert_eq!(
        (index.len(), index.end(), seal.end),
        (6, seal.end, Pos(bytes.len() as u64))
    );
    assert_eq!(seal.epochs, Some((LeaderEpoch(1), LeaderEpoch(5))));
    let epochs: Vec<(u32, u64)> = index.epochs().map(|e| (e.epoch.0, e.start.0 - BASE)).collect();
    assert_eq!(epochs, [(1, 0), (2, 8), (5, 10)]);
}

#[test]
fn lookups_hit_the_interval_and_nothing_beyond() {
    let (builder, bytes) =
        build(&[(40_000, 30), (50_000, 10), (60_000, 50), (10, 70)].map(|(b, t)| spec(b, t)));
    let index = builder.index();
    let first = |found: Option<Interval>| found.map(|interval| interval.first.0 - BASE);
    let by_offset: Vec<Option<u64>> = (0..8)
        .map(|at| first(index.find_offset(Offset(BASE + at))))
        .collect();
    assert_eq!(
        by_offset,
        [Some(0), Some(0), Some(2), Some(2), Some(4), Some(4), None, None]
    );
    assert_eq!(index.find_offset(Offset(BASE - 1)), None);
    let by_time = [-1, 30, 31, 50, 51].map(|time| first(index.find_time(time)));
    assert_eq!(by_time, [Some(0), Some(0), Some(4), Some(4), None]);
    let second = index.get(1).unwrap();
    for (pos, expect) in [
        (0, Some(0)),
        (second.pos.0 - 1, Some(0)),
        (second.pos.0, Some(2)),
        (second.end.0, Some(4)),
        (index.end().0, None),
    ] {
        assert_eq!(first(index.covering(Pos(pos))), expect, "{pos}");
    }
    let range = |from: u64, to: u64| index.covering_range(Pos(from), Pos(to)).count();
    assert_eq!((range(0, 1), range(second.pos.0 - 1, second.pos.0 + 1)), (1, 2));
    assert_eq!(
        (
            range(second.pos.0, second.end.0),
            range(0, u64::MAX),
            range(index.end().0, u64::MAX)
        ),
        (1, 3, 0)
    );
    let all = index
        .iter()
        .all(|i| key().verify(&i, &bytes[i.pos.0 as usize..i.end.0 as usize]));
    assert!(all);
}

#[test]
fn verification_sees_what_the_batch_crc_does_not() {
    let (builder, bytes) = build(&[spec(40_000, 1), spec(40_000, 1)]);
    let interval = builder.index().get(0).unwrap();
    let good = &bytes[..interval.end.0 as usize];
    assert!(key().verify(&interval, good));
    assert!(!key().verify(&interval, &good[..good.len() - 1]));
    for at in [
        field::BASE_OFFSET + 7,
        field::LEADER_EPOCH + 3,
        field::MAGIC,
        good.len() - 1,
    ] {
        let mut bad = good.to_vec();
        bad[at] ^= 1;
        assert!(!key().verify(&interval, &bad), "byte {at}");
    }
    let other = |change: fn(&mut SegmentKey)| {
        let mut key = key();
        change(&mut key);
        key.verify(&interval, good)
    };
    assert!(!other(|key| key.base.0 += 1));
    assert!(!other(|key| key.partition.index += 1));
    assert!(!other(|key| key.partition.topic.0[0] ^= 1));
    let mut moved = interval;
    moved.pos.0 += 1;
    moved.end.0 += 1;
    assert!(!key().verify(&moved, good));
}

#[test]
fn block_has_these_bytes() {
    let block = intervals(3).encode_block(0).unwrap();
    let head: Vec<u8> = [
        &b"RFix\x01\0\x01\0"[..],
        b"fedcba9876543210",
        &2u32.to_le_bytes(),
        &0u32.to_le_bytes(),
        &BASE.to_le_bytes(),
        &[3, 0],
    ]
    .concat();
    assert_eq!(&block[..42], head);
    assert!(block[42..60].iter().all(|byte| *byte == 0));
    let second: Vec<u8> = [
        &[2u32, 2, 100, 100, 1, 0].map(u32::to_le_bytes).concat()[..],
        &5i64.to_le_bytes(),
        &[2, 0, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    assert_eq!(&block[104..144], second);
    assert_eq!(block.len(), BLOCK);
}

#[test]
fn files_round_trip_at_every_block_boundary() {
    for count in [0, 1, 99, 100, 101, 200, 257] {
        let index = intervals(count);
        assert_eq!(
            (index.blocks(), index.full_blocks()),
            (count.div_ceil(100), count / 100)
        );
        let (seal, number) = (Some(index.seal()), index.blocks());
        assert_eq!(decode_seal(key(), number, &index.encode_seal()), seal);
        let read = |index: SegmentIndex, seal| IndexRead {
            index,
            seal,
            rewrite: false,
        };
        assert_eq!(decode(key(), &file_of(&index, false)), read(index.clone(), None));
        assert_eq!(decode(key(), &file_of(&index, true)), read(index, seal));
    }
}

#[test]
fn a_doubtful_file_yields_the_blocks_before_the_doubt() {
    let index = intervals(250);
    let good = file_of(&index, true);
    let check = |file: &[u8], kept: usize| {
        let read = decode(key(), file);
        assert_eq!(
            (read.index, read.seal, read.rewrite),
            (intervals(kept), None, true)
        );
    };
    let edited = |edit: fn(&mut Vec<u8>)| {
        let mut file = file_of(&intervals(250), true);
        edit(&mut file);
        file
    };
    check(&edited(|file| file[BLOCK + 70] ^= 1), 100);
    check(&edited(|file| file[2 * BLOCK..3 * BLOCK].fill(0)), 200);
    check(&edited(|file| file.copy_within(..BLOCK, BLOCK)), 100);
    check(&edited(|file| file[3 * BLOCK + 64] ^= 1), 250);
    check(&edited(|file| file.truncate(3 * BLOCK + 9)), 250);
    check(&edited(|file| drop(file.drain(BLOCK..2 * BLOCK))), 100);
    check(&[0; 2 * BLOCK], 0);
    // A block that is full in the file but not in the index before it.
    check(
        &[file_of(&intervals(50), false), good[BLOCK..].to_vec()].concat(),
        50,
    );
    // A seal of other intervals.
    check(
        &[good[..3 * BLOCK].to_vec(), intervals(240).encode_seal()].concat(),
        250,
    );
    // Bytes after the seal do not matter but for a rewrite.
    let read = decode(key(), &[good.clone(), vec![0; BLOCK]].concat());
    assert!(read.rewrite && read.seal == Some(index.seal()));
    let foreign = SegmentKey {
        base: Offset(BASE + 1),
        ..key()
    };
    assert!(decode(foreign, &good).index.is_empty());
}

#[test]
fn entries_that_do_not_continue_are_refused() {
    let good = *intervals(2).entries.last().unwrap();
    let check = |change: fn(&mut Entry), expect: bool| {
        let (mut index, mut entry) = (intervals(1), good);
        change(&mut entry);
        assert_eq!(index.push(entry), expect, "{entry:?}");
    };
    check(|_| {}, true);
    check(|entry| entry.first += 1, false);
    check(|entry| entry.pos += 1, false);
    check(|entry| entry.pos -= 1, false);
    check(|entry| entry.count = 0, false);
    check(|entry| entry.count = u32::MAX, false);
    check(|entry| entry.len = 60, false);
    check(|entry| entry.len = u32::MAX, false);
    check(|entry| entry.max_timestamp_base = 1, false);
    check(|entry| entry.max_timestamp_base = 4, false);
    let (mut index, mut falling) = (intervals(71), *intervals(72).entries.last().unwrap());
    falling.epoch = 0;
    assert!(!index.push(falling));
}

#[test]
fn walk_stops_exactly_where_the_log_does() {
    let mut specs = [spec(100, 1); 4];
    specs[2].epoch_step = 1;
    let (bytes, headers) = segment(&specs);
    let third = headers[2].1.0 as usize;
    let check = |bytes: &[u8], table: Option<&EpochTable>, end: usize, stop: WalkStop| {
        let mut builder = IndexBuilder::new(key());
        assert_eq!(walk(&mut builder, bytes, table), stop);
        assert_eq!(builder.end(), Pos(end as u64));
    };
    let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        edit(&mut bytes);
        bytes
    };
    let size = headers[2].0.size;
    check(&bytes, None, bytes.len(), WalkStop::End);
    check(
        &bytes[..third + 9],
        None,
        third,
        WalkStop::Incomplete { needed: 61 },
    );
    check(
        &bytes[..third + 61],
        None,
        third,
        WalkStop::Incomplete { needed: size },
    );
    let fault = |fault: WalkFault| WalkStop::Fault(fault);
    check(
        &edited(&|bytes| bytes[third + 7] ^= 1),
        None,
        third,
        fault(WalkFault::Offset {
            expected: Offset(BASE + 4),
            found: Offset(BASE + 5),
        }),
    );
    let (first, second) = (LeaderEpoch(1), LeaderEpoch(2));
    check(
        &edited(&|bytes| bytes[third + field::LEADER_EPOCH + 3] = 0),
        None,
        third,
        fault(WalkFault::EpochFalls {
            last: first,
            found: LeaderEpoch(0),
        }),
    );
    check(
        &edited(&|bytes| bytes[third + field::LEADER_EPOCH] = 0xff),
        None,
        third,
        fault(WalkFault::NoEpoch),
    );
    let zeroed = edited(&|bytes| bytes[third..].fill(0));
    check(
        &zeroed,
        None,
        third,
        fault(WalkFault::Batch(BatchError::Magic(0))),
    );
    let mut builder = IndexBuilder::new(key());
    let rotten = edited(&|bytes| bytes[third + size - 1] ^= 1);
    let stop = walk(&mut builder, &rotten, None);
    assert!(matches!(
        stop,
        WalkStop::Fault(WalkFault::Batch(BatchError::Crc { .. }))
    ));

    let mut table = EpochTable::default();
    table.assign(first, Offset(0)).unwrap();
    check(
        &bytes,
        Some(&table),
        third,
        fault(WalkFault::EpochTable { found: second }),
    );
    table.assign(second, Offset(BASE + 4)).unwrap();
    check(&bytes, Some(&table), bytes.len(), WalkStop::End);
}

#[test]
fn a_segment_that_cannot_be_indexed_does_not_fit() {
    let max = crate::limits::MAX_SEGMENT_BYTES;
    assert!(key().fits(Pos(max), Offset(BASE + u64::from(u32::MAX))));
    assert!(!key().fits(Pos(max + 1), Offset(BASE)));
    assert!(!key().fits(Pos(0), Offset(BASE + u64::from(u32::MAX) + 1)));
    assert!(!key().fits(Pos(0), Offset(BASE - 1)));
}

fn specs() -> impl Strategy<Value = Vec<Spec>> {
    let spec = (1..4u32, 0..40_000usize, -1..100i64, prop::bool::weighted(0.2)).prop_map(
        |(records, bytes, timestamp, raise)| Spec {
            records,
            bytes,
            timestamp,
            epoch_step: u32::from(raise),
        },
    );
    vec(spec, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn appending_walking_and_reading_the_file_agree(specs in specs(), split in any::<prop::sample::Index>(), cut in any::<prop::sample::Index>()) {
        let (builder, bytes) = build(&specs);
        let mut walked = IndexBuilder::new(key());
        // In two pieces, as read in chunks.
        let at = split.index(bytes.len() + 1);
        if let WalkStop::Fault(fault) = walk(&mut walked, &bytes[..at], None) {
            prop_assert!(false, "{}", fault);
        }
        let rest = walked.end().0 as usize;
        prop_assert_eq!(walk(&mut walked, &bytes[rest..], None), WalkStop::End);
        prop_assert_eq!(walked.index(), builder.index());
        prop_assert_eq!((walked.open_start(), walked.max_timestamp()), (builder.open_start(), builder.max_timestamp()));

        // Cut anywhere, then walk what the index lost.
        let mut index = builder.index().clone();
        let end = cut.index(bytes.len() + 1);
        index.truncate(Pos(end as u64));
        prop_assert!(index.end().0 as usize <= end);
        let mut resumed = IndexBuilder::resume(index);
        let from = resumed.end().0 as usize;
        prop_assert_eq!(walk(&mut resumed, &bytes[from..], None), WalkStop::End);
        let (whole, seal) = builder.seal();
        prop_assert_eq!(resumed.seal(), (whole.clone(), seal));
        prop_assert_eq!(decode(key(), &file_of(&whole, true)).seal, Some(seal));
    }

    #[test]
    fn lookups_agree_with_a_scan(specs in specs(), time in -1..100i64) {
        let (builder, bytes) = build(&specs);
        let (index, seal) = builder.seal();
        for offset in (BASE - 1..seal.next.0 + 2).map(Offset) {
            let scan = index.iter().find(|i| (i.first..i.next).contains(&offset));
            prop_assert_eq!(index.find_offset(offset), scan);
        }
        for pos in (0..bytes.len() as u64 + 100).step_by(997).map(Pos) {
            let scan = index.iter().find(|i| (i.pos..i.end).contains(&pos));
            prop_assert_eq!(index.covering(pos), scan);
        }
        let batches: Vec<BatchHeader> = crate::batch::batches(&bytes).map(|b| b.unwrap().0).collect();
        let scan = batches.iter().find(|header| header.max_timestamp >= time);
        let found = index.find_time(time);
        prop_assert_eq!(found.is_some(), scan.is_some());
        if let (Some(interval), Some(header)) = (found, scan) {
            prop_assert!((interval.first..interval.next).contains(&header.base_offset));
        }
        let max = batches.iter().map(|h| h.max_timestamp).max().unwrap_or(-1);
        prop_assert_eq!(seal.max_timestamp, max);
        if max > -1 {
            let first = batches.iter().find(|h| h.max_timestamp == max).unwrap();
            prop_assert_eq!(seal.max_timestamp_base, first.base_offset);
        }
    }

    #[test]
    fn a_mutated_file_never_yields_a_wrong_interval(
        count in 1..260usize,
        sealed in any::<bool>(),
        edits in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let index = intervals(count);
        let mut file = file_of(&index, sealed);
        for (at, value) in edits {
            let at = at.index(file.len());
            file[at] = value;
        }
        file.truncate(cut.index(file.len() + 1));
        let read = decode(key(), &file);
        prop_assert!(index.entries.starts_with(&read.index.entries));
        prop_assert!(read.seal.is_none_or(|seal| seal == index.seal()));
    }

    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in vec(any::<u8>(), 0..300), block in any::<bool>()) {
        // With a header and a CRC that are right, so that the fields are reached.
        if block {
            let mut good = intervals(3).encode_block(0).unwrap();
            let len = bytes.len();
            good[64..64 + len].copy_from_slice(&bytes);
            let mut crc = crc32fast::Hasher::new();
            crc.update(&good[..60]);
            crc.update(&good[64..]);
            good[60..64].copy_from_slice(&crc.finalize().to_le_bytes());
            bytes = good;
        }
        let read = decode(key(), &bytes);
        prop_assert!(read.seal.is_none() && read.index.len() <= bytes.len() / 40);
        prop_assert_eq!(decode_seal(key(), 0, &bytes), None);
        let mut builder = IndexBuilder::new(key());
        prop_assert!(walk(&mut builder, &bytes, None) != WalkStop::End || bytes.is_empty());
    }
}
