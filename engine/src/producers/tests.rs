//! Producer state: what is new, what is a retry, what is refused, across its two encodings.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::batch::{BatchBuilder, NewRecord, validate};
use crate::types::{PartitionId, TopicId};

fn header(id: i64, epoch: i16, sequence: i32, records: u32) -> BatchHeader {
    let mut builder = BatchBuilder::new();
    builder.producer(id, epoch, sequence);
    for _ in 0..records {
        builder.push(NewRecord::default()).unwrap();
    }
    validate(&builder.finish().unwrap()).unwrap()
}

fn partition() -> PartitionId {
    PartitionId {
        topic: TopicId([5; 16]),
        index: 1,
    }
}

/// Producer 7 at epoch 2 with batches of 10 records from offset 100 and sequence `first` on.
fn with_batches(count: u64, first: i32) -> ProducerTable {
    let mut table = ProducerTable::default();
    let mut sequence = first;
    for batch in 0..count {
        let header = header(7, 2, sequence, 10);
        table.record(&header, Offset(100 + 10 * batch), 1000);
        sequence = next_sequence(header.last_sequence());
    }
    table
}

fn duplicate(base: u64) -> Verdict {
    Verdict::Duplicate {
        base: Offset(base),
        end: Offset(base + 10),
    }
}

#[test]
fn verdicts_are_kafkas() {
    let table = with_batches(7, 0);
    let check = |id: i64, epoch: i16, sequence: i32, records: u32, expect: Verdict| {
        assert_eq!(
            table.check(&header(id, epoch, sequence, records)),
            expect,
            "{id} {epoch} {sequence}"
        );
    };
    check(-1, -1, -1, 1, Verdict::Append);
    // unknown producer
    check(8, 0, 0, 1, Verdict::Append);
    check(8, 0, 5, 1, Verdict::OutOfOrder { expected: 0 });
    // next, gap, overlap
    check(7, 2, 70, 3, Verdict::Append);
    check(7, 2, 71, 3, Verdict::OutOfOrder { expected: 70 });
    check(7, 2, 65, 10, Verdict::OutOfOrder { expected: 70 });
    // the last five are known, older ones are not
    for batch in 2..7u64 {
        check(7, 2, 10 * batch as i32, 10, duplicate(100 + 10 * batch));
    }
    check(7, 2, 10, 10, Verdict::OutOfOrder { expected: 70 });
    // same start, other length
    check(7, 2, 60, 9, Verdict::OutOfOrder { expected: 70 });
    // epochs
    check(7, 1, 70, 10, Verdict::Fenced { current: 2 });
    check(7, 1, 60, 10, Verdict::Fenced { current: 2 });
    check(7, 3, 0, 10, Verdict::Append);
    check(7, 3, 70, 10, Verdict::OutOfOrder { expected: 0 });
}

#[test]
fn sequences_wrap_to_zero() {
    let table = with_batches(1, i32::MAX - 9);
    assert_eq!(table.check(&header(7, 2, 0, 1)), Verdict::Append);
    let table = with_batches(1, i32::MAX - 4);
    assert_eq!(table.check(&header(7, 2, i32::MAX - 4, 10)), duplicate(100));
    assert_eq!(table.check(&header(7, 2, 5, 1)), Verdict::Append);
    assert_eq!(
        table.check(&header(7, 2, 6, 1)),
        Verdict::OutOfOrder { expected: 5 }
    );
}

#[test]
fn a_new_epoch_forgets_the_old_batches() {
    let mut table = with_batches(3, 0);
    table.record(&header(7, 3, 0, 10), Offset(500), 2000);
    assert_eq!(table.check(&header(7, 3, 0, 10)), duplicate(500));
    assert_eq!(table.get(7).unwrap().batches().len(), 1);
    assert_eq!(table.check(&header(7, 2, 20, 10)), Verdict::Fenced { current: 3 });
}

#[test]
fn silent_producers_expire() {
    let mut table = with_batches(1, 0);
    let day = DEFAULT_EXPIRATION_MS;
    assert_eq!(table.expire(1000 + day as i64 - 1, day), 0);
    assert_eq!(table.expire(i64::MIN, day), 0);
    assert_eq!(table.expire(1000 + day as i64, day), 1);
    assert!(table.is_empty());
    // What expired must not be taken for new.
    assert_eq!(
        table.check(&header(7, 2, 10, 1)),
        Verdict::OutOfOrder { expected: 0 }
    );
}

#[test]
fn the_bound_evicts_whoever_wrote_least_recently() {
    let mut table = ProducerTable::new(3);
    for (offset, id) in [(0, 1), (1, 2), (2, 3), (3, 1), (4, 4)] {
        let sequence = table
            .get(id)
            .map_or(0, |p| next_sequence(p.batches()[0].last_sequence));
        table.record(&header(id, 0, sequence, 1), Offset(offset), 0);
    }
    let ids: Vec<i64> = table.iter().map(|(id, _)| id).collect();
    assert_eq!(ids, [1, 3, 4]);
}

#[test]
fn truncation_forgets_what_lies_above() {
    let check = |end: u64, stale: bool, cached: usize| {
        let mut table = with_batches(7, 0);
        table.truncate(Offset(end));
        assert_eq!(table.is_stale(), stale, "cut at {end}");
        assert_eq!(
            table.get(7).map_or(0, |p| p.batches().len()),
            cached,
            "cut at {end}"
        );
    };
    check(200, false, 5);
    check(170, false, 5);
    check(169, true, 4);
    check(160, true, 4);
    check(130, true, 1);
    check(129, true, 0);
    check(120, true, 0);
    check(0, true, 0);
    let mut table = with_batches(2, 0);
    table.truncate(Offset(110));
    assert!(!table.is_stale(), "all that it wrote was known");
    assert_eq!(table.check(&header(7, 2, 10, 10)), Verdict::Append);
}

#[test]
fn file_has_these_bytes() {
    let file = encode_file(partition(), Offset(300), &with_batches(1, 3));
    assert_eq!(&file[..12], b"RFprod\r\n\x01\0\0\0");
    assert_eq!(file[16..24], 300u64.to_le_bytes());
    assert_eq!(file[24..28], 48u32.to_le_bytes());
    let body: Vec<u8> = [
        &1u32.to_le_bytes()[..],
        &7i64.to_le_bytes(),
        &[2, 0, 1, 0],
        &1000i64.to_le_bytes(),
        &3i32.to_le_bytes(),
        &12i32.to_le_bytes(),
        &100u64.to_le_bytes(),
        &110u64.to_le_bytes(),
    ]
    .concat();
    assert_eq!(&file[28..], body);
}

#[test]
fn damaged_files_are_told_apart() {
    let file = encode_file(partition(), Offset(300), &with_batches(3, 0));
    let check = |file: &[u8], expect: ProducersError| {
        assert_eq!(decode_file(partition(), file, 10), Err(expect), "{expect}");
    };
    let padded = [file.clone(), vec![0; 99]].concat();
    let read = decode_file(partition(), &padded, DEFAULT_MAX_PRODUCERS);
    assert_eq!(read, Ok((Offset(300), with_batches(3, 0))));
    check(&[], ProducersError::Truncated);
    check(&file[..file.len() - 1], ProducersError::Truncated);
    check(&[0; 4096], ProducersError::WrongMagic);
    check(&[file.clone(), vec![1]].concat(), ProducersError::BadContent);
    let mut newer = file.clone();
    newer[8] = 9;
    check(&newer, ProducersError::UnsupportedVersion(9));
    let other = PartitionId {
        index: 2,
        ..partition()
    };
    check(
        &encode_file(other, Offset(300), &with_batches(3, 0)),
        ProducersError::BadChecksum,
    );
    // Batches above the end it claims.
    check(
        &encode_file(partition(), Offset(129), &with_batches(3, 0)),
        ProducersError::BadContent,
    );
}

/// Appends by a few producers, retries and cuts, against a log that is replayed from its start.
#[derive(Debug, Clone)]
enum Step {
    Append { id: i64, raise: bool, records: u32 },
    Retry(prop::sample::Index),
    Cut(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4i64, prop::bool::weighted(0.1), 1..4u32)
            .prop_map(|(id, raise, records)| Step::Append { id, raise, records }),
        2 => any::<prop::sample::Index>().prop_map(Step::Retry),
        1 => any::<prop::sample::Index>().prop_map(Step::Cut),
    ]
}

fn replay(log: &[(BatchHeader, Offset)]) -> ProducerTable {
    let mut table = ProducerTable::default();
    for (header, base) in log {
        table.record(header, *base, 0);
    }
    table
}

fn log_end(log: &[(BatchHeader, Offset)]) -> Offset {
    log.last()
        .map_or(Offset(0), |(header, base)| base.plus(u64::from(header.count)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn table_agrees_with_a_replay_of_the_log(steps in vec(step(), 1..80)) {
        let mut table = ProducerTable::default();
        let mut log: Vec<(BatchHeader, Offset)> = Vec::new();
        for step in steps {
            match step {
                Step::Append { id, raise, records } => {
                    let (epoch, sequence) = match table.get(id) {
                        None => (0, 0),
                        Some(producer) if raise => (producer.epoch + 1, 0),
                        Some(producer) => {
                            (producer.epoch, next_sequence(producer.batches().last().unwrap().last_sequence))
                        }
                    };
                    let header = header(id, epoch, sequence, records);
                    prop_assert_eq!(table.check(&header), Verdict::Append);
                    let base = log_end(&log);
                    table.record(&header, base, 0);
                    log.push((header, base));
                }
                Step::Retry(at) if !log.is_empty() => {
                    let (header, base) = log[at.index(log.len())];
                    // Never appended a second time; when known, its own offsets.
                    match table.check(&header) {
                        Verdict::Append => prop_assert!(false, "appended twice"),
                        Verdict::Duplicate { base: found, .. } => prop_assert_eq!(found, base),
                        Verdict::OutOfOrder { .. } | Verdict::Fenced { .. } => {}
                    }
                }
                Step::Cut(at) => {
                    log.truncate(at.index(log.len() + 1));
                    let full = replay(&log);
                    table.truncate(log_end(&log));
                    // Also in a snapshot it is known that something is missing.
                    let mut bytes = Vec::new();
                    table.encode_into(&mut bytes);
                    let (decoded, _) = ProducerTable::decode(&bytes, DEFAULT_MAX_PRODUCERS).unwrap();
                    prop_assert_eq!(&decoded, &table);
                    if table.is_stale() {
                        table = full.clone();
                    }
                    // Without a rebuild, what is left is the whole truth.
                    prop_assert_eq!(&table, &full);
                }
                Step::Retry(_) => {}
            }
            prop_assert_eq!(table.by_end.len(), table.producers.len());
        }
        let mut bytes = Vec::new();
        table.encode_into(&mut bytes);
        bytes.push(1);
        let (decoded, rest) = ProducerTable::decode(&bytes, DEFAULT_MAX_PRODUCERS).unwrap();
        prop_assert_eq!((&decoded, rest), (&table, &[1u8][..]));
    }

    #[test]
    fn arbitrary_bytes_never_panic(
        bytes in vec(any::<u8>(), 0..300),
        edits in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        prop_assert!(decode_file(partition(), &bytes, 10).is_err());
        let mut snapshot = Vec::new();
        with_batches(5, 0).encode_into(&mut snapshot);
        for (at, value) in edits {
            let at = at.index(snapshot.len());
            snapshot[at] = value;
        }
        for bytes in [&bytes, &snapshot] {
            if let Some((table, rest)) = ProducerTable::decode(bytes, usize::MAX) {
                let mut again = Vec::new();
                table.encode_into(&mut again);
                prop_assert_eq!(&again[..], &bytes[..bytes.len() - rest.len()]);
            }
        }
        // The same with a checksum that is right.
        let end = Offset(u64::MAX);
        let mut file = encode_file(partition(), end, &ProducerTable::default());
        file[12..16].copy_from_slice(&codec::file_crc(partition(), end, &snapshot).to_le_bytes());
        file.truncate(24);
        file.extend_from_slice(&(snapshot.len() as u32).to_le_bytes());
        file.extend_from_slice(&snapshot);
        let valid = ProducerTable::decode(&snapshot, 10).is_some_and(|(_, rest)| rest.is_empty());
        prop_assert_eq!(decode_file(partition(), &file, 10).is_ok(), valid);
    }
}
