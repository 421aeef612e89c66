//! Batches: what is built is read back, and every broken one is refused.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;

/// What a test puts into a record.
#[derive(Debug, Clone, PartialEq)]
struct Content {
    timestamp: i64,
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

fn content() -> impl Strategy<Value = Content> {
    let bytes = || vec(any::<u8>(), 0..80);
    let timestamp = prop_oneof![Just(-1), 0..2_000_000_000_000i64, Just(i64::MAX)];
    let headers = vec((bytes(), option::of(bytes())), 0..3);
    (timestamp, option::of(bytes()), option::of(bytes()), headers).prop_map(
        |(timestamp, key, value, headers)| Content {
            timestamp,
            key,
            value,
            headers,
        },
    )
}

fn build(contents: &[Content]) -> Vec<u8> {
    let mut builder = BatchBuilder::new();
    for content in contents {
        let headers: Vec<(&[u8], Option<&[u8]>)> = content
            .headers
            .iter()
            .map(|(key, value)| (key.as_slice(), value.as_deref()))
            .collect();
        builder
            .push(NewRecord {
                timestamp: content.timestamp,
                key: content.key.as_deref(),
                value: content.value.as_deref(),
                headers: &headers,
            })
            .unwrap();
    }
    builder.finish().unwrap()
}

fn read(batch: &[u8]) -> Vec<Content> {
    records(batch)
        .unwrap()
        .map(|record| {
            let record = record.unwrap();
            Content {
                timestamp: record.timestamp,
                key: record.key.map(<[u8]>::to_vec),
                value: record.value.map(<[u8]>::to_vec),
                headers: record
                    .headers
                    .map(|(key, value)| (key.to_vec(), value.map(<[u8]>::to_vec)))
                    .collect(),
            }
        })
        .collect()
}

/// A batch of `count` small records.
fn sample(count: u32) -> Vec<u8> {
    let mut builder = BatchBuilder::new();
    for i in 0..count {
        let record = NewRecord {
            timestamp: 1000 + i64::from(i),
            key: None,
            value: Some(b"value"),
            headers: &[],
        };
        builder.push(record).unwrap();
    }
    builder.finish().unwrap()
}

/// `batch` with `value` at `at` and a CRC to match.
fn with<const N: usize>(mut batch: Vec<u8>, at: usize, value: [u8; N]) -> Vec<u8> {
    put(&mut batch, at, value);
    reseal(batch)
}

fn reseal(mut batch: Vec<u8>) -> Vec<u8> {
    let crc = batch_crc(&batch);
    put(&mut batch, field::CRC, crc.to_be_bytes());
    batch
}

/// A batch with these bytes as records.
fn with_records(count: i32, records: &[u8]) -> Vec<u8> {
    let mut batch = sample(1);
    batch.truncate(HEADER_BYTES);
    batch.extend_from_slice(records);
    let length = (batch.len() - LENGTH_OVERHEAD) as i32;
    put(&mut batch, field::BATCH_LENGTH, length.to_be_bytes());
    put(&mut batch, field::LAST_OFFSET_DELTA, (count - 1).to_be_bytes());
    put(&mut batch, field::RECORD_COUNT, count.to_be_bytes());
    put(&mut batch, field::BASE_TIMESTAMP, 0i64.to_be_bytes());
    reseal(batch)
}

#[test]
fn checksum_is_castagnoli() {
    assert_eq!(crc_fast::crc32_iscsi(b"123456789"), 0xe306_9283);
}

#[test]
fn known_batch_has_these_bytes() {
    let mut builder = BatchBuilder::new();
    builder.producer(7, 1, 42);
    let headers: &[(&[u8], Option<&[u8]>)] = &[(b"h", Some(b"x"))];
    builder
        .push(NewRecord {
            timestamp: 100,
            key: Some(b"k"),
            value: Some(b"v"),
            headers,
        })
        .unwrap();
    builder
        .push(NewRecord {
            timestamp: 99,
            ..NewRecord::default()
        })
        .unwrap();
    let batch = builder.finish().unwrap();
    let record_bytes = [
        // length 12, attributes, timestamp +0, offset +0, key "k", value "v", 1 header "h" = "x"
        24, 0, 0, 0, 2, b'k', 2, b'v', 2, 2, b'h', 2,
        b'x', // length 6, timestamp -1, offset +1, nulls, no header
        12, 0, 1, 2, 1, 1, 0,
    ];
    assert_eq!(&batch[HEADER_BYTES..], record_bytes);
    let header = validate(&batch).unwrap();
    assert_eq!(header.size, batch.len());
    assert_eq!((header.count, header.last_offset_delta), (2, 1));
    assert_eq!((header.base_timestamp, header.max_timestamp), (100, 100));
    assert_eq!((header.producer_id, header.producer_epoch), (7, 1));
    assert_eq!((header.base_sequence, header.last_sequence()), (42, 43));
    assert_eq!(header.leader_epoch, None);
}

#[test]
fn header_faults_are_named() {
    let check = |batch: Vec<u8>, expect: BatchError| assert_eq!(validate(&batch), Err(expect), "{expect}");
    let good = || sample(3);
    let size = good().len();
    check(
        vec![],
        BatchError::TooShort {
            found: 0,
            needed: HEADER_BYTES,
        },
    );
    check(
        good()[..60].to_vec(),
        BatchError::TooShort {
            found: 60,
            needed: HEADER_BYTES,
        },
    );
    check(
        good()[..size - 1].to_vec(),
        BatchError::TooShort {
            found: size - 1,
            needed: size,
        },
    );
    check([good(), vec![0; 3]].concat(), BatchError::TrailingBytes(3));
    check(with(good(), field::MAGIC, [1]), BatchError::Magic(1));
    check(
        with(good(), field::BATCH_LENGTH, (-1i32).to_be_bytes()),
        BatchError::Length(-1),
    );
    check(
        with(good(), field::BATCH_LENGTH, 48i32.to_be_bytes()),
        BatchError::Length(48),
    );
    check(
        with(good(), field::BATCH_LENGTH, i32::MAX.to_be_bytes()),
        BatchError::TooLarge {
            size: i32::MAX as usize + 12,
        },
    );
    check(
        with(good(), field::BASE_OFFSET, (-1i64).to_be_bytes()),
        BatchError::BaseOffset(-1),
    );
    check(
        with(good(), field::RECORD_COUNT, 0i32.to_be_bytes()),
        BatchError::Count(0),
    );
    check(
        with(good(), field::RECORD_COUNT, (-3i32).to_be_bytes()),
        BatchError::Count(-3),
    );
    for bits in [
        attribute::LOG_APPEND_TIME,
        attribute::TRANSACTIONAL,
        attribute::CONTROL,
        1 << 6,
        1 << 15,
    ] {
        check(
            with(good(), field::ATTRIBUTES, bits.to_be_bytes()),
            BatchError::Attributes(bits),
        );
    }
    check(
        with(good(), field::ATTRIBUTES, 5u16.to_be_bytes()),
        BatchError::Codec(5),
    );
    for delta in [-1, 0, 1, 3, i32::MAX] {
        let expect = BatchError::OffsetDelta {
            count: 3,
            last_offset_delta: delta,
        };
        check(
            with(good(), field::LAST_OFFSET_DELTA, delta.to_be_bytes()),
            expect,
        );
    }
    for at in [field::BASE_TIMESTAMP, field::MAX_TIMESTAMP] {
        check(with(good(), at, (-2i64).to_be_bytes()), BatchError::Timestamp(-2));
    }
    let mut huge = with(good(), field::RECORD_COUNT, i32::MAX.to_be_bytes());
    huge = with(huge, field::LAST_OFFSET_DELTA, (i32::MAX - 1).to_be_bytes());
    let bytes = size - HEADER_BYTES;
    check(
        huge,
        BatchError::CountTooLarge {
            count: i32::MAX as u32,
            bytes,
        },
    );
}

#[test]
fn producer_fields_belong_together() {
    let check = |id: i64, epoch: i16, sequence: i32, valid: bool| {
        let mut batch = with(sample(1), field::PRODUCER_ID, id.to_be_bytes());
        batch = with(batch, field::PRODUCER_EPOCH, epoch.to_be_bytes());
        batch = with(batch, field::BASE_SEQUENCE, sequence.to_be_bytes());
        let found = validate(&batch).map(|_| ());
        let expect = BatchError::Producer { id, epoch, sequence };
        assert_eq!(found, if valid { Ok(()) } else { Err(expect) });
    };
    check(-1, -1, -1, true);
    check(-1, -1, 0, true);
    check(0, 0, 0, true);
    check(9, i16::MAX, i32::MAX, true);
    check(-2, 0, 0, false);
    check(9, -1, 0, false);
    check(9, 0, -1, false);
}

#[test]
fn record_faults_are_named() {
    let check = |count: i32, records: &[u8], fault: RecordFault| {
        let index = (count - 1) as u32;
        let found = validate(&with_records(count, records));
        assert_eq!(found, Err(BatchError::Record { index, fault }), "{records:?}");
    };
    let ok = [12, 0, 0, 0, 1, 1, 0];
    validate(&with_records(1, &ok)).unwrap();
    check(1, &[0x80; 7], RecordFault::Varint);
    check(1, &[13, 0, 0, 0, 1, 1, 0], RecordFault::Length);
    check(1, &[14, 0, 0, 0, 1, 1, 0], RecordFault::Length);
    check(1, &[0, 0, 0, 0, 1, 1, 0], RecordFault::Field);
    check(1, &[12, 0, 0, 0, 3, 1, 0], RecordFault::Field);
    check(1, &[12, 0, 0, 0, 4, 1, 0], RecordFault::Varint);
    check(1, &[12, 0, 0, 0, 1, 6, 0], RecordFault::Field);
    check(1, &[14, 0, 0, 0, 1, 1, 0, 0], RecordFault::Trailing);
    check(1, &[12, 0, 0, 2, 1, 1, 0], RecordFault::OffsetDelta(1));
    check(1, &[12, 0, 3, 0, 1, 1, 0], RecordFault::Timestamp(-2));
    check(1, &[12, 0, 0, 0, 1, 1, 1], RecordFault::HeaderCount);
    check(1, &[12, 0, 0, 0, 1, 1, 2], RecordFault::HeaderCount);
    check(1, &[16, 0, 0, 0, 1, 1, 2, 1, 1], RecordFault::HeaderKey);
    check(2, &[ok, ok].concat(), RecordFault::OffsetDelta(0));
    let found = validate(&with_records(1, &[ok, ok].concat()));
    assert_eq!(found, Err(BatchError::BytesAfterRecords(7)));
}

#[test]
fn compressed_payload_passes_untouched() {
    for codec in 1..=4u16 {
        let batch = with(
            with_records(9, b"not records at all"),
            field::ATTRIBUTES,
            codec.to_be_bytes(),
        );
        let header = validate(&batch).unwrap();
        assert_eq!((header.codec(), header.count), (codec, 9));
        assert_eq!(records(&batch).err(), Some(BatchError::Compressed(codec)));
    }
}

#[test]
fn stamp_leaves_the_crc_alone_unless_it_must() {
    let mut batch = sample(3);
    let mut header = validate(&batch).unwrap();
    let before = header.crc;
    stamp(&mut batch, &mut header, Offset(500), LeaderEpoch(7), None);
    assert_eq!(BatchHeader::parse(&batch), Ok(header));
    assert_eq!(
        (header.base_offset, header.next_offset()),
        (Offset(500), Offset(503))
    );
    assert_eq!((header.leader_epoch, header.crc), (Some(LeaderEpoch(7)), before));
    assert!(verify_crc(&batch));

    stamp(&mut batch, &mut header, Offset(500), LeaderEpoch(7), Some(9999));
    assert_eq!(BatchHeader::parse(&batch), Ok(header));
    assert_eq!(header.timestamp_type(), TimestampType::LogAppendTime);
    assert!(header.max_timestamp == 9999 && header.crc != before && verify_crc(&batch));
    assert!(read(&batch).iter().all(|record| record.timestamp == 9999));
}

#[test]
fn wrong_maximum_timestamp_is_corrected() {
    let mut batch = with(sample(3), field::MAX_TIMESTAMP, (-1i64).to_be_bytes());
    let mut header = validate(&batch).unwrap();
    assert_eq!(header.max_timestamp, 1002);
    stamp(&mut batch, &mut header, Offset(0), LeaderEpoch(0), None);
    assert!(verify_crc(&batch));
    assert_eq!(BatchHeader::parse(&batch).unwrap().max_timestamp, 1002);
}

#[test]
fn records_are_found_by_time() {
    let check = |batch: &[u8], timestamp: i64, expect: Option<(u64, i64)>| {
        let found = first_at_or_after(batch, timestamp).unwrap();
        assert_eq!(
            found,
            expect.map(|(offset, time)| (Offset(offset), time)),
            "{timestamp}"
        );
    };
    let mut batch = sample(3);
    let mut header = validate(&batch).unwrap();
    stamp(&mut batch, &mut header, Offset(40), LeaderEpoch(0), None);
    check(&batch, -1, Some((40, 1000)));
    check(&batch, 1001, Some((41, 1001)));
    check(&batch, 1002, Some((42, 1002)));
    check(&batch, 1003, None);
    stamp(&mut batch, &mut header, Offset(40), LeaderEpoch(0), Some(5000));
    check(&batch, 1003, Some((40, 5000)));
    let compressed = with(sample(3), field::ATTRIBUTES, 4u16.to_be_bytes());
    check(&compressed, 1001, Some((0, 1002)));
    check(&compressed, 1003, None);
}

#[test]
fn sequence_wraps_to_zero() {
    let mut header = validate(&sample(3)).unwrap();
    for (first, last) in [(0, 2), (i32::MAX - 2, i32::MAX), (i32::MAX - 1, 0), (i32::MAX, 1)] {
        header.base_sequence = first;
        assert_eq!(header.last_sequence(), last);
    }
}

#[test]
fn batches_stop_at_the_first_that_is_none() {
    let run = [sample(1), sample(2), sample(3)].concat();
    let counts: Vec<u32> = batches(&run).map(|b| b.unwrap().0.count).collect();
    assert_eq!(counts, [1, 2, 3]);
    let cut: Vec<bool> = batches(&run[..run.len() - 1]).map(|b| b.is_ok()).collect();
    assert_eq!(cut, [true, true, false]);
    assert_eq!(batches(&[]).count(), 0);
}

#[test]
fn builder_refuses_what_does_not_fit() {
    let mut builder = BatchBuilder::new();
    assert!(builder.clone().finish().is_none());
    let value = vec![0; MAX_BATCH_BYTES];
    let record = NewRecord {
        value: Some(&value),
        ..NewRecord::default()
    };
    assert!(matches!(builder.push(record), Err(BatchError::TooLarge { .. })));
    assert_eq!((builder.count(), builder.size()), (0, HEADER_BYTES));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn records_round_trip(contents in vec(content(), 1..20)) {
        let batch = build(&contents);
        let header = validate(&batch).unwrap();
        let max = contents.iter().map(|c| c.timestamp).max().unwrap();
        prop_assert_eq!(header.max_timestamp, max);
        prop_assert_eq!(peek(&batch[..HEADER_BYTES]).unwrap().size, batch.len());
        prop_assert_eq!(read(&batch), contents);
    }

    #[test]
    fn any_flipped_bit_below_the_crc_is_found(contents in vec(content(), 1..5), at in any::<prop::sample::Index>(), bit in 0..8u8) {
        let mut batch = build(&contents);
        let at = field::CRC + at.index(batch.len() - field::CRC);
        batch[at] ^= 1u8 << bit;
        prop_assert!(validate(&batch).is_err());
        prop_assert!(!verify_crc(&batch));
    }

    #[test]
    fn mutated_batches_with_a_right_crc_never_panic(
        contents in vec(content(), 1..5),
        edits in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut batch = build(&contents);
        for (at, value) in edits {
            let at = at.index(batch.len());
            batch[at] = value;
        }
        let batch = reseal(batch);
        if validate(&batch).is_ok() && BatchHeader::parse(&batch).unwrap().codec() == 0 {
            // What passed can be read without a fault, and every byte is accounted for.
            prop_assert_eq!(read(&batch).len(), BatchHeader::parse(&batch).unwrap().count as usize);
        }
        for batch in batches(&batch).flatten() {
            if let Ok(records) = records(batch.1) {
                records.for_each(drop);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in vec(any::<u8>(), 0..300), with_magic in any::<bool>()) {
        if with_magic && bytes.len() > field::MAGIC {
            bytes[field::MAGIC] = MAGIC;
            bytes[..12].fill(0);
            let length = (bytes.len().saturating_sub(LENGTH_OVERHEAD)) as u32;
            put(&mut bytes, field::BATCH_LENGTH, length.to_be_bytes());
        }
        let valid = validate(&bytes).is_ok();
        prop_assert!(!valid || verify_crc(&bytes));
        let _ = peek(&bytes);
        batches(&bytes).for_each(drop);
        if let Ok(records) = records(&bytes) {
            prop_assert!(records.count() <= bytes.len());
        }
    }
}
