//! The reactor's disk operations on real files.

use std::path::Path;

use tempfile::TempDir;

use crate::io::buf::{AppendBuf, BufSlice};
use crate::io::uring::{IoEvent, Reactor, RingConfig, RingError};
use crate::io::{DirEntry, Disk, DiskError, DiskOp, Done, FileClass, FileId, OpId, OpenHow};

const FILE: FileId = FileId(7);

fn reactor(dir: &Path) -> Reactor {
    Reactor::new(&RingConfig::new(dir)).unwrap()
}

fn open(path: &str, class: FileClass) -> DiskOp {
    DiskOp::Open {
        file: FILE,
        path: path.to_owned(),
        how: OpenHow {
            class,
            create: true,
            write: true,
        },
    }
}

fn write(pos: u64, bufs: Vec<BufSlice>) -> DiskOp {
    DiskOp::Write {
        file: FILE,
        pos,
        bufs,
    }
}

fn read(pos: u64, len: usize) -> DiskOp {
    DiskOp::Read { file: FILE, pos, len }
}

fn run(disk: &mut Reactor, op: DiskOp) -> Result<Done, DiskError> {
    disk.run(vec![op]).unwrap().remove(0)
}

#[track_caller]
fn ok(disk: &mut Reactor, op: DiskOp) {
    match run(disk, op.clone()) {
        Ok(Done::Ok) => {}
        other => panic!("{op:?}: {other:?}"),
    }
}

fn opened(disk: &mut Reactor, op: DiskOp) -> u64 {
    match run(disk, op) {
        Ok(Done::Opened { len }) => len,
        other => panic!("{other:?}"),
    }
}

fn bytes(disk: &mut Reactor, op: DiskOp) -> BufSlice {
    match run(disk, op) {
        Ok(Done::Read(bytes)) => bytes,
        other => panic!("{other:?}"),
    }
}

fn names(disk: &mut Reactor, path: &str) -> Vec<DirEntry> {
    match run(
        disk,
        DiskOp::List {
            path: path.to_owned(),
        },
    ) {
        Ok(Done::Listed(entries)) => entries,
        other => panic!("{other:?}"),
    }
}

fn block(byte: u8, count: usize) -> BufSlice {
    let mut buf = AppendBuf::with_capacity(count * 4096);
    buf.spare()[..count * 4096].fill(byte);
    buf.advance(count * 4096);
    buf.freeze()
}

fn round_trip(dir: &Path, class: FileClass) {
    let mut disk = reactor(dir);
    assert_eq!(opened(&mut disk, open("file", class)), 0);
    ok(&mut disk, write(4096, vec![block(2, 1), block(3, 2)]));
    ok(&mut disk, write(0, vec![block(1, 1)]));
    ok(&mut disk, DiskOp::Sync { file: FILE });
    let all = bytes(&mut disk, read(0, 1 << 20));
    assert_eq!(all.len(), 4 * 4096, "{class:?}");
    for (n, byte) in [(0, 1), (1, 2), (2, 3), (3, 3)] {
        assert!(
            all[n * 4096..(n + 1) * 4096].iter().all(|b| *b == byte),
            "{class:?} block {n}"
        );
    }
    assert_eq!(&*bytes(&mut disk, read(4000, 200)), &all[4000..4200]);
    assert!(bytes(&mut disk, read(4 * 4096, 4096)).is_empty());
    assert!(bytes(&mut disk, read(9 * 4096 + 5, 10)).is_empty());
    ok(
        &mut disk,
        DiskOp::Resize {
            file: FILE,
            len: 5000,
        },
    );
    assert_eq!(bytes(&mut disk, read(0, 8192)).len(), 5000);
    assert_eq!(&*bytes(&mut disk, read(4990, 4096)), &[2; 10]);
    ok(&mut disk, DiskOp::Close { file: FILE });
    assert_eq!(opened(&mut disk, open("file", class)), 5000);
    std::fs::remove_file(dir.join("file")).unwrap();
}

#[test]
fn every_class_of_file_round_trips() {
    let dir = TempDir::new().unwrap();
    for class in [
        FileClass::Journal,
        FileClass::Checkpoint,
        FileClass::Segment,
        FileClass::Index,
        FileClass::Epochs,
        FileClass::Meta,
    ] {
        round_trip(dir.path(), class);
    }
}

#[test]
fn memory_backed_file_systems_work_too() {
    let dir = TempDir::new_in("/dev/shm").unwrap();
    round_trip(dir.path(), FileClass::Journal);
    round_trip(dir.path(), FileClass::Meta);
}

#[test]
fn a_vector_longer_than_the_kernel_takes_is_written_whole() {
    let dir = TempDir::new().unwrap();
    let mut disk = reactor(dir.path());
    opened(&mut disk, open("meta", FileClass::Meta));
    let pieces: Vec<BufSlice> = (0..2500u32)
        .map(|n| BufSlice::copy_of(&n.to_le_bytes()))
        .collect();
    ok(&mut disk, write(3, pieces));
    assert_eq!(disk.stats().resubmitted, 2);
    let content = std::fs::read(dir.path().join("meta")).unwrap();
    let expect: Vec<u8> = [0; 3]
        .into_iter()
        .chain((0..2500u32).flat_map(u32::to_le_bytes))
        .collect();
    assert_eq!(content, expect);
}

#[test]
fn names_and_directories() {
    let dir = TempDir::new().unwrap();
    let mut disk = reactor(dir.path());
    let path = |path: &str| path.to_owned();
    ok(&mut disk, DiskOp::MakeDir { path: path("logs") });
    assert!(matches!(
        run(&mut disk, DiskOp::MakeDir { path: path("logs") }),
        Err(DiskError::Exists)
    ));
    opened(&mut disk, open("logs/a.tmp", FileClass::Meta));
    ok(&mut disk, write(0, vec![BufSlice::copy_of(b"hello")]));
    let (from, to) = (path("logs/a.tmp"), path("logs/a"));
    ok(&mut disk, DiskOp::Rename { from, to });
    ok(&mut disk, DiskOp::SyncDir { path: path("logs") });
    ok(&mut disk, DiskOp::SyncDir { path: path("") });
    ok(&mut disk, DiskOp::SyncAll);
    let entry = |name: &str, is_dir, len| DirEntry {
        name: name.to_owned(),
        is_dir,
        len,
    };
    assert_eq!(names(&mut disk, ""), [entry("logs", true, 0)]);
    assert_eq!(names(&mut disk, "logs"), [entry("a", false, 5)]);
    assert!(matches!(
        run(&mut disk, DiskOp::RemoveDir { path: path("logs") }),
        Err(DiskError::Exists)
    ));
    ok(&mut disk, DiskOp::Unlink { path: path("logs/a") });
    for gone in [
        DiskOp::Unlink { path: path("logs/a") },
        DiskOp::List { path: path("none") },
        DiskOp::SyncDir { path: path("none") },
    ] {
        assert!(matches!(run(&mut disk, gone), Err(DiskError::NotFound)));
    }
    ok(&mut disk, DiskOp::RemoveDir { path: path("logs") });
    assert_eq!(names(&mut disk, ""), []);
}

#[test]
fn allocation_extends_the_file() {
    let dir = TempDir::new().unwrap();
    let mut disk = reactor(dir.path());
    opened(&mut disk, open("segment", FileClass::Segment));
    let (pos, len) = (4096, 1 << 20);
    ok(&mut disk, DiskOp::Allocate { file: FILE, pos, len });
    ok(&mut disk, DiskOp::Close { file: FILE });
    assert_eq!(
        opened(&mut disk, open("segment", FileClass::Segment)),
        (1 << 20) + 4096
    );
}

#[test]
fn misuse_is_an_error_of_that_operation() {
    let dir = TempDir::new().unwrap();
    let mut disk = reactor(dir.path());
    let badf = Err(DiskError::Io(libc::EBADF));
    for op in [
        write(0, vec![block(1, 1)]),
        read(0, 1),
        DiskOp::Close { file: FILE },
    ] {
        assert_eq!(run(&mut disk, op).map(|_| ()), badf);
    }
    let escape = run(&mut disk, open("../evil", FileClass::Meta)).map(|_| ());
    assert_eq!(escape, Err(DiskError::Io(libc::EINVAL)));
    opened(&mut disk, open("journal", FileClass::Journal));
    let twice = run(&mut disk, open("journal", FileClass::Journal)).map(|_| ());
    assert_eq!(twice, Err(DiskError::Io(libc::EBUSY)));
    let unaligned = run(&mut disk, write(1, vec![block(1, 1)])).map(|_| ());
    assert_eq!(unaligned, Err(DiskError::Io(libc::EINVAL)));
    ok(&mut disk, write(0, vec![]));
}

#[test]
fn a_missing_directory_is_named() {
    let dir = TempDir::new().unwrap();
    let missing = dir.path().join("missing");
    let error = Reactor::new(&RingConfig::new(&missing)).err().unwrap();
    assert!(matches!(error, RingError::DataDir { .. }));
    assert!(error.to_string().contains("missing"), "{error}");
}

#[test]
fn more_operations_than_the_ring_holds_all_end() {
    let dir = TempDir::new().unwrap();
    let mut cfg = RingConfig::new(dir.path());
    (cfg.sq_entries, cfg.cq_entries, cfg.disk_depth) = (8, 8, 300);
    let mut disk = Reactor::new(&cfg).unwrap();
    opened(&mut disk, open("file", FileClass::Segment));
    let count = 1000u64;
    for n in 0..count {
        disk.submit_disk(OpId(n), write(n * 4096, vec![block(n as u8, 1)]));
    }
    let mut seen = vec![false; count as usize];
    while disk.disk_pending() > 0 {
        disk.turn(None, &mut |event| {
            let IoEvent::Disk(completion) = event else {
                panic!("{event:?}")
            };
            assert!(completion.result.is_ok(), "{completion:?}");
            assert!(!std::mem::replace(&mut seen[completion.op.0 as usize], true));
        })
        .unwrap();
    }
    assert!(seen.iter().all(|seen| *seen));
    assert_eq!(disk.stats().stale, 0);
    let content = bytes(&mut disk, read(0, count as usize * 4096));
    for (n, block) in content.chunks(4096).enumerate() {
        assert!(block.iter().all(|byte| *byte == n as u8), "block {n}");
    }
}

#[test]
fn a_turn_ends_at_its_deadline() {
    let dir = TempDir::new().unwrap();
    let mut disk = reactor(dir.path());
    let until = disk.now().mono + 2_000_000;
    let mut events = 0;
    disk.turn(Some(until), &mut |_| events += 1).unwrap();
    assert_eq!(events, 0);
    assert!(disk.now().mono >= until);
}

#[test]
fn a_reactor_dropped_with_operations_in_flight_keeps_their_buffers_to_the_end() {
    let dir = TempDir::new().unwrap();
    let mut disk = reactor(dir.path());
    opened(&mut disk, open("journal", FileClass::Journal));
    for n in 0..64 {
        disk.submit_disk(OpId(n), write(n * 65536, vec![block(n as u8, 16)]));
    }
    disk.turn(Some(0), &mut |_| {}).unwrap();
    drop(disk);
    let content = std::fs::read(dir.path().join("journal")).unwrap();
    for (n, piece) in content.chunks(65536).enumerate() {
        let whole = |byte: u8| piece.iter().all(|b| *b == byte);
        assert!(whole(n as u8) || whole(0), "piece {n} holds foreign bytes");
    }
}
