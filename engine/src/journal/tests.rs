//! Round trips and damage of journal structures.

use proptest::prelude::*;

use super::*;

fn partition(index: u32) -> PartitionId {
    PartitionId {
        topic: TopicId([7; 16]),
        index,
    }
}

fn stamp() -> FrameStamp {
    FrameStamp {
        term: Term(3),
        incarnation: 9,
        lsn: Lsn(8192),
        durable_lsn: Lsn(4096),
        prev_lsn: Lsn(4096),
    }
}

fn append(index: u32, bytes: usize) -> (Record, Body) {
    let record = Record::Append {
        partition: partition(index),
        base: Offset(10),
        next: Offset(11),
        segment: Offset(0),
        pos: Pos(100),
        len: bytes as u32,
        body_at: 0,
    };
    (
        record,
        Body::Inline(vec![BufSlice::copy_of(&vec![index as u8; bytes])]),
    )
}

fn blocks(index: u32, lead: u32, bytes: usize) -> (Record, Body) {
    let (record, _) = append(index, bytes);
    let mut buf = AppendBuf::with_capacity(lead as usize + bytes + BLOCK);
    let mut sum = crc32fast::Hasher::new();
    sum.update(&vec![index as u8; bytes]);
    buf.append(&vec![3; lead as usize]);
    buf.append(&vec![index as u8; bytes]);
    buf.append_zeros(buf.len().next_multiple_of(BLOCK) - buf.len());
    (
        record,
        Body::Blocks(Blocks {
            slices: vec![buf.slice(0..BLOCK), buf.slice(BLOCK..buf.len())],
            lead,
            len: bytes as u32,
            sum,
        }),
    )
}

fn join(bufs: &[BufSlice]) -> Vec<u8> {
    bufs.iter().flat_map(|b| b.iter().copied()).collect()
}

#[test]
fn a_frame_round_trips_with_inline_and_block_bodies() {
    let control = Record::Truncate {
        partition: partition(4),
        offset: Offset(5),
        segment: Offset(0),
        pos: Pos(4100),
        prefix: vec![1, 2, 3, 4],
    };
    let mut records = vec![
        append(1, 10),
        blocks(2, 100, 9000),
        append(3, 0),
        (control, Body::None),
    ];
    let prev = Directory::of(&[Record::Start { term: Term(3) }]);
    let (bufs, _) = encode_frame(stamp(), &mut records, &prev, 8192);
    let bytes = join(&bufs);
    assert_eq!(bytes.len() % 8192, 0);
    let header = FrameHeader::decode(&bytes, bytes.len() as u64).expect("a valid header");
    assert_eq!(header.frame_len as usize, bytes.len());
    let frame = Frame::new(header, &bytes).expect("whole");
    frame.check_body().expect("intact");
    let back = frame.directory().expect("intact");
    assert_eq!(back, records.iter().map(|(r, _)| r.clone()).collect::<Vec<_>>());
    assert_eq!(
        frame.previous_directory().expect("intact"),
        [Record::Start { term: Term(3) }]
    );
    for record in &back {
        if let Record::Append {
            partition,
            len,
            body_at,
            ..
        } = record
        {
            assert_eq!(
                frame.body(*body_at, *len).expect("inside"),
                vec![partition.index as u8; *len as usize]
            );
        }
    }
}

#[test]
fn file_header_round_trips() {
    let header = FileHeader {
        node: 1,
        generation: 2,
        shard: 3,
        incarnation: 4,
        first_lsn: Lsn(5),
        prev_end: Lsn(6),
        checkpoint_lsn: Lsn(7),
        grain: 4096,
        file_bytes: 1 << 20,
    };
    let bytes = header.encode();
    assert_eq!(FileHeader::decode(&bytes), Ok(header));
    for bit in 0..FILE_HEADER_BYTES * 8 {
        let mut bad = bytes.to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(FileHeader::decode(&bad).is_err(), "bit {bit}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn one_flipped_bit_anywhere_is_seen(bit in 0usize..16384 * 8) {
        let mut records = vec![append(1, 700), blocks(2, 8, 5000)];
        let (bufs, _) = encode_frame(stamp(), &mut records, &Directory::of(&[Record::Mark]), 4096);
        let mut bytes = join(&bufs);
        prop_assume!(bit < bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        let seen = FrameHeader::decode(&bytes, bytes.len() as u64)
            .and_then(|header| Frame::new(header, &bytes))
            .and_then(|frame| {
                frame.directory()?;
                frame.previous_directory()?;
                frame.check_body()
            });
        // Between the header's content and its checksum lie reserved bytes, which the header's checksum covers too.
        prop_assert!(seen.is_err());
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512), count in any::<u32>()) {
        let _ = FileHeader::decode(&bytes);
        let _ = FrameHeader::decode(&bytes, 1 << 20);
        let crc = crc32fast::hash(&bytes);
        let _ = decode_directory(&bytes, count.min(MAX_RECORDS as u32), crc);
    }
}
