//! Files made by the engine's encoders pass; the same files with one bit flipped do not.

use std::path::Path;

use ringfence_engine::batch::{self, BatchBuilder, NewRecord};
use ringfence_engine::epochs::{EpochEntry, encode_checkpoint};
use ringfence_engine::index::{IndexBuilder, SegmentKey, WalkStop, walk};
use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::journal::{Body, Directory, FileHeader, FrameStamp, Record, encode_frame};
use ringfence_engine::limits::BLOCK;
use ringfence_engine::meta::{NodeMeta, PartitionMeta};
use ringfence_engine::types::{LeaderEpoch, Lsn, Offset, PartitionId, Term, TopicId};

use super::*;

const PARTITION: PartitionId = PartitionId {
    topic: TopicId([7; 16]),
    index: 3,
};

const LOG: &str = "00000000000000000000.log";
const INDEX: &str = "00000000000000000000.index";

/// Verifies a path; the number of problems.
fn problems(path: &Path) -> u64 {
    let mut report = Report {
        out: BufWriter::new(Box::new(std::io::sink())),
        json: false,
        verify: true,
        records: false,
        path: PathBuf::new(),
        problems: 0,
        files: 0,
    };
    for (path, kind) in collect(path).unwrap() {
        report.file(&path, kind).unwrap();
    }
    report.problems
}

/// Writes `bytes` under `name` in a partition's directory.
fn put(root: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let dir = root.join(PARTITION.dir_name());
    fs::create_dir_all(&dir).unwrap();
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

/// Checks that `bytes` are in order, and that a flip of each of `bits` is found.
fn check(name: &str, bytes: &[u8], bits: impl Iterator<Item = usize>) {
    let root = tempfile::tempdir().unwrap();
    let path = put(root.path(), name, bytes);
    assert_eq!(problems(&path), 0, "{name}");
    for bit in bits {
        let mut flipped = bytes.to_vec();
        flipped[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &flipped).unwrap();
        assert!(problems(&path) > 0, "{name}, bit {bit}");
    }
}

/// `count` batches of two records each, stamped.
fn segment(count: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for number in 0..count {
        let mut builder = BatchBuilder::new();
        for value in [b"first value".as_slice(), b"second"] {
            builder
                .push(NewRecord {
                    timestamp: 5,
                    value: Some(value),
                    ..NewRecord::default()
                })
                .unwrap();
        }
        let mut whole = builder.finish().unwrap();
        let mut header = batch::validate(&whole).unwrap();
        batch::stamp(&mut whole, &mut header, Offset(number * 2), LeaderEpoch(1), None);
        bytes.extend(whole);
    }
    bytes
}

/// The whole index file of a sealed segment.
fn sealed_index(segment: &[u8]) -> Vec<u8> {
    let mut builder = IndexBuilder::new(SegmentKey {
        partition: PARTITION,
        base: Offset(0),
    });
    assert_eq!(walk(&mut builder, segment, None), WalkStop::End);
    let (index, _) = builder.seal();
    let mut file: Vec<u8> = (0..index.blocks())
        .flat_map(|number| index.encode_block(number).unwrap())
        .collect();
    file.extend(index.encode_seal());
    file
}

fn journal() -> (Vec<u8>, Vec<usize>) {
    const GRAIN: usize = BLOCK;
    let file_bytes = 8 * GRAIN;
    let header = FileHeader {
        node: 1,
        generation: 1,
        shard: 0,
        incarnation: 4,
        first_lsn: Lsn(1 << 20),
        prev_end: Lsn(1 << 20),
        checkpoint_lsn: Lsn(0),
        grain: GRAIN as u32,
        file_bytes: file_bytes as u64,
    };
    let mut file = header.encode().to_vec();
    let mut starts = Vec::new();
    let mut previous = Directory::default();
    let mut durable = header.first_lsn;
    for number in 0..3u64 {
        let lsn = header.first_lsn.plus((file.len() - GRAIN) as u64);
        starts.push(file.len());
        let append = Record::Append {
            partition: PARTITION,
            base: Offset(number),
            next: Offset(number + 1),
            segment: Offset(0),
            pos: ringfence_engine::types::Pos(number * 100),
            len: 100,
            body_at: 0,
        };
        let stamp = FrameStamp {
            term: Term(2),
            incarnation: 4,
            lsn,
            durable_lsn: lsn,
            prev_lsn: durable,
        };
        durable = lsn;
        let mut records = [(append, Body::Inline(vec![BufSlice::copy_of(&[9; 100])]))];
        let (frame, directory) = encode_frame(stamp, &mut records, &previous, GRAIN);
        previous = directory;
        frame.iter().for_each(|piece| file.extend_from_slice(piece));
    }
    file.resize(file_bytes, 0);
    (file, starts)
}

#[test]
fn a_flipped_bit_in_an_identity_file_is_found() {
    let meta = PartitionMeta {
        topic_name: "events".to_owned(),
        partition: PARTITION,
        node_id: 1,
    };
    check("partition.meta", &meta.encode(), [0, 200, 4000].into_iter());
    let node = NodeMeta {
        cluster_id: [1; 16],
        node_id: 1,
        disk_id: [2; 16],
    };
    check("node.meta", &node.encode(), [0, 200, 4000].into_iter());
}

#[test]
fn a_flipped_bit_in_an_epoch_checkpoint_is_found() {
    let entry = |epoch, start| EpochEntry {
        epoch: LeaderEpoch(epoch),
        start: Offset(start),
    };
    let file = encode_checkpoint(PARTITION, [entry(1, 0), entry(4, 100)].into_iter());
    check("leader-epoch-checkpoint", &file, 0..file.len() * 8);
}

#[test]
fn a_flipped_bit_in_a_sealed_segment_is_found_with_its_index() {
    let segment = segment(3);
    let root = tempfile::tempdir().unwrap();
    put(root.path(), INDEX, &sealed_index(&segment));
    let path = put(root.path(), LOG, &segment);
    assert_eq!(problems(root.path()), 0);
    for bit in (0..segment.len() * 8).step_by(7) {
        let mut flipped = segment.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &flipped).unwrap();
        assert!(problems(root.path()) > 0, "bit {bit}");
    }
    fs::write(&path, &segment[..segment.len() - 1]).unwrap();
    assert!(problems(root.path()) > 0, "a cut file");
}

#[test]
fn a_flipped_bit_in_an_index_is_found() {
    let index = sealed_index(&segment(3));
    check(INDEX, &index, (0..index.len() * 8).step_by(31));
}

#[test]
fn an_active_segment_may_end_inside_a_batch_at_a_block() {
    let whole = segment(100);
    assert!(whole.len() > 2 * BLOCK);
    let mut written = whole[..2 * BLOCK].to_vec();
    written.resize(8 * BLOCK, 0);
    check(LOG, &written, [300 * 8, BLOCK * 8].into_iter());
    // All written, and allocated space behind.
    let mut written = whole.clone();
    written.resize(16 * BLOCK, 0);
    check(LOG, &written, [(whole.len() - 20) * 8].into_iter());
}

#[test]
fn journal_damage_is_told_from_a_torn_tail() {
    let (file, starts) = journal();
    // The first two frames lie below what the third promises.
    check(
        "000",
        &file,
        [(starts[0] + 200) * 8, (starts[1] + 10) * 8, 50 * 8].into_iter(),
    );
    let root = tempfile::tempdir().unwrap();
    let mut torn = file;
    torn[starts[2] + 200] ^= 1;
    let path = put(root.path(), "000", &torn);
    assert_eq!(problems(&path), 0, "nothing promises the last frame");
}

#[test]
fn files_are_known_by_name() {
    for (name, kind) in [
        ("00000000000000000012.log", Some(Kind::Segment(Offset(12)))),
        ("00000000000000000012.index", Some(Kind::Index(Offset(12)))),
        ("12.log", None),
        ("007", Some(Kind::Journal)),
        ("007.bad", None),
        ("checkpoint-b", Some(Kind::Snapshot)),
        ("metadata.redb", None),
    ] {
        assert_eq!(Kind::of(Path::new(name)), kind, "{name}");
    }
}
