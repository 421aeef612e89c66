//! The simulated disk keeps what was promised and may lose everything else.

use super::*;
use crate::io::OpenHow;
use crate::io::buf::AppendBuf;

const A: FileId = FileId(1);
const B: FileId = FileId(2);
const BLOCK_U64: u64 = BLOCK as u64;

fn disk(seed: u64) -> SimDisk {
    SimDisk::new(seed, SimConfig::default())
}

/// Runs one operation to its end.
fn run(disk: &mut SimDisk, op: DiskOp) -> Result<Done, DiskError> {
    disk.run(vec![op]).unwrap().remove(0)
}

fn open(disk: &mut SimDisk, file: FileId, path: &str, class: FileClass) -> u64 {
    let how = OpenHow {
        class,
        create: true,
        write: true,
    };
    let path = path.to_owned();
    match run(disk, DiskOp::Open { file, path, how }) {
        Ok(Done::Opened { len }) => len,
        other => panic!("{other:?}"),
    }
}

fn blocks(byte: u8, count: usize) -> Vec<BufSlice> {
    vec![BufSlice::copy_of(&vec![byte; count * BLOCK])]
}

fn write(file: FileId, pos: u64, byte: u8, count: usize) -> DiskOp {
    let bufs = blocks(byte, count);
    DiskOp::Write { file, pos, bufs }
}

fn read(disk: &mut SimDisk, file: FileId, pos: u64, len: usize) -> Vec<u8> {
    match run(disk, DiskOp::Read { file, pos, len }) {
        Ok(Done::Read(bytes)) => bytes.to_vec(),
        other => panic!("{other:?}"),
    }
}

fn path(path: &str) -> String {
    path.to_owned()
}

fn sync_root(disk: &mut SimDisk) {
    run(disk, DiskOp::SyncDir { path: path("") }).unwrap();
}

/// What `make` left after a power cut, for many seeds of the cut.
fn cuts<T: Ord>(make: impl Fn() -> SimDisk, look: impl Fn(&SimDisk) -> T) -> BTreeSet<T> {
    let disk = make();
    (0..200)
        .map(|seed| look(&disk.clone().crash(Crash::Power, seed)))
        .collect()
}

/// A disk with one durable, named file of 2 blocks of `a`.
fn with_file(class: FileClass) -> SimDisk {
    let mut disk = disk(1);
    open(&mut disk, A, "f", class);
    run(&mut disk, write(A, 0, b'a', 2)).unwrap();
    run(&mut disk, DiskOp::Sync { file: A }).unwrap();
    sync_root(&mut disk);
    disk
}

fn sectors(content: &[u8]) -> String {
    content
        .chunks(SECTOR)
        .map(|s| {
            if s.iter().all(|b| *b == s[0]) {
                s[0] as char
            } else {
                '?'
            }
        })
        .collect()
}

#[test]
fn unsynced_sectors_survive_a_power_cut_one_by_one_and_synced_ones_always() {
    let make = || {
        let mut disk = with_file(FileClass::Segment);
        run(&mut disk, write(A, 4096, b'b', 1)).unwrap();
        assert_eq!(read(&mut disk, A, 4096, 4096), vec![b'b'; 4096]);
        disk
    };
    let seen = cuts(make, |disk| sectors(&disk.peek("f").unwrap()));
    assert!(seen.iter().all(|s| s.starts_with("aaaaaaaa") && !s.contains('?')));
    assert!(seen.contains("aaaaaaaaaaaaaaaa") && seen.contains("aaaaaaaabbbbbbbb"));
    assert!(
        seen.len() > 30,
        "sectors are kept independently: {} outcomes",
        seen.len()
    );

    let synced = || {
        let mut disk = make();
        run(&mut disk, DiskOp::Sync { file: A }).unwrap();
        disk
    };
    let seen = cuts(synced, |disk| sectors(&disk.peek("f").unwrap()));
    assert_eq!(seen, BTreeSet::from(["aaaaaaaabbbbbbbb".to_owned()]));
}

#[test]
fn a_journal_write_is_promised_at_its_completion_and_torn_before() {
    let done = || {
        let mut disk = with_file(FileClass::Journal);
        run(&mut disk, write(A, 0, b'b', 1)).unwrap();
        disk
    };
    let seen = cuts(done, |disk| sectors(&disk.peek("f").unwrap()));
    assert_eq!(seen, BTreeSet::from(["bbbbbbbbaaaaaaaa".to_owned()]));

    let in_flight = || {
        let mut disk = done();
        disk.submit(OpId(1), write(A, 0, b'c', 1));
        disk
    };
    let seen = cuts(in_flight, |disk| sectors(&disk.peek("f").unwrap()));
    assert!(seen.contains("bbbbbbbbaaaaaaaa") && seen.contains("ccccccccaaaaaaaa"));
    assert!(
        seen.iter().any(|s| s.contains('?')),
        "a sector can be torn inside"
    );
    assert!(seen.len() > 30 && seen.iter().all(|s| s.ends_with("aaaaaaaa")));
}

#[test]
fn a_killed_write_may_be_visible_and_still_be_lost_unless_synced() {
    let mut killed = with_file(FileClass::Journal);
    killed.submit(OpId(1), write(A, 0, b'b', 1));
    let mut visible_then_lost = false;
    for seed in 0..100 {
        let mut disk = killed.clone().crash(Crash::Kill, seed);
        assert_eq!(open(&mut disk, B, "f", FileClass::Journal), 8192);
        let seen = sectors(&read(&mut disk, B, 0, 4096));
        let lost = disk.clone().crash(Crash::Power, seed + 1);
        visible_then_lost |= seen.contains('b') && !sectors(&lost.peek("f").unwrap()).contains('b');

        run(&mut disk, DiskOp::Sync { file: B }).unwrap();
        let kept = disk.crash(Crash::Power, seed + 1).peek("f").unwrap();
        assert_eq!(sectors(&kept)[..8], seen, "synced is promised");
    }
    assert!(visible_then_lost);
}

#[test]
fn a_kill_keeps_everything_that_completed() {
    let mut disk = with_file(FileClass::Segment);
    run(&mut disk, write(A, 0, b'b', 1)).unwrap();
    open(&mut disk, B, "g", FileClass::Meta);
    let disk = disk.crash(Crash::Kill, 3);
    assert_eq!(sectors(&disk.peek("f").unwrap()), "bbbbbbbbaaaaaaaa");
    assert!(disk.peek("g").is_some());
}

#[test]
fn names_are_promised_by_a_sync_of_their_directory_only() {
    let make = |sync: Option<DiskOp>| {
        let mut disk = disk(1);
        run(&mut disk, DiskOp::MakeDir { path: path("d") }).unwrap();
        sync_root(&mut disk);
        open(&mut disk, A, "d/f", FileClass::Meta);
        run(&mut disk, write(A, 0, b'a', 1)).unwrap();
        run(&mut disk, DiskOp::Sync { file: A }).unwrap();
        sync.map(|op| run(&mut disk, op).unwrap());
        disk
    };
    let there = |disk: &SimDisk| disk.peek("d/f").is_some();
    assert_eq!(cuts(|| make(None), there), BTreeSet::from([false, true]));
    let root = || make(Some(DiskOp::SyncDir { path: path("") }));
    assert_eq!(cuts(root, there), BTreeSet::from([false, true]));
    let parent = || make(Some(DiskOp::SyncDir { path: path("d") }));
    assert_eq!(cuts(parent, there), BTreeSet::from([true]));
    assert_eq!(
        cuts(|| make(Some(DiskOp::SyncAll)), there),
        BTreeSet::from([true])
    );
}

#[test]
fn a_rename_is_atomic_and_its_target_never_missing() {
    let make = || {
        let mut disk = with_file(FileClass::Meta);
        open(&mut disk, B, "f.tmp", FileClass::Meta);
        run(&mut disk, write(B, 0, b'b', 1)).unwrap();
        run(&mut disk, DiskOp::Sync { file: B }).unwrap();
        let (from, to) = (path("f.tmp"), path("f"));
        run(&mut disk, DiskOp::Rename { from, to }).unwrap();
        disk
    };
    let seen = cuts(make, |disk| {
        let names = disk
            .names("")
            .unwrap()
            .into_iter()
            .map(|e| e.name)
            .collect::<Vec<_>>();
        (names.join(" "), disk.peek("f").unwrap()[0] as char)
    });
    let expect = [("f", 'a'), ("f", 'b'), ("f f.tmp", 'a')];
    let expect = expect.map(|(names, byte)| (names.to_owned(), byte));
    assert_eq!(seen, BTreeSet::from(expect));
}

#[test]
fn an_unpromised_unlink_brings_the_file_back_with_its_bytes() {
    let make = || {
        let mut disk = with_file(FileClass::Segment);
        run(&mut disk, DiskOp::Unlink { path: path("f") }).unwrap();
        let how = OpenHow {
            class: FileClass::Segment,
            create: false,
            write: false,
        };
        let again = DiskOp::Open {
            file: B,
            path: path("f"),
            how,
        };
        assert_eq!(run(&mut disk, again).unwrap_err(), DiskError::NotFound);
        run(&mut disk, DiskOp::Close { file: A }).unwrap();
        disk
    };
    let seen = cuts(make, |disk| disk.peek("f").map(|bytes| sectors(&bytes)));
    assert_eq!(seen, BTreeSet::from([None, Some("a".repeat(16))]));
    let synced = || {
        let mut disk = make();
        sync_root(&mut disk);
        disk
    };
    assert_eq!(cuts(synced, |disk| disk.peek("f").is_some()), [false].into());
}

#[test]
fn later_changes_of_a_name_hold_without_the_earlier_ones() {
    let make = || {
        let mut disk = with_file(FileClass::Meta);
        for (from, to) in [("f", "g"), ("g", "h")] {
            let (from, to) = (path(from), path(to));
            run(&mut disk, DiskOp::Rename { from, to }).unwrap();
        }
        disk
    };
    let seen = cuts(make, |disk| {
        disk.names("")
            .unwrap()
            .into_iter()
            .map(|e| e.name)
            .collect::<Vec<_>>()
    });
    let expect = ["f", "g", "h"].map(|name| vec![name.to_owned()]);
    assert_eq!(
        seen,
        BTreeSet::from(expect),
        "one inode never gets two names or none"
    );
}

#[test]
fn lengths_survive_as_a_prefix_and_cut_bytes_come_back_as_zeros() {
    let make = || {
        let mut disk = with_file(FileClass::Meta);
        run(&mut disk, DiskOp::Resize { file: A, len: 100 }).unwrap();
        run(&mut disk, DiskOp::Resize { file: A, len: 300 }).unwrap();
        disk
    };
    let mut expect = vec![b'a'; 300];
    expect[100..].fill(0);
    assert_eq!(make().peek("f").unwrap(), expect);
    let seen = cuts(make, |disk| {
        let bytes = disk.peek("f").unwrap();
        let zeros = bytes.iter().filter(|b| **b == 0).count();
        (bytes.len(), zeros)
    });
    assert_eq!(seen, BTreeSet::from([(8192, 0), (100, 0), (300, 200)]));
}

#[test]
fn allocated_ranges_read_as_zeros_and_count_against_the_capacity() {
    let mut disk = disk(1);
    disk.set_capacity(Some(4 * BLOCK_U64));
    open(&mut disk, A, "f", FileClass::Segment);
    let allocate = |pos, len| DiskOp::Allocate { file: A, pos, len };
    run(&mut disk, allocate(0, 3 * BLOCK_U64)).unwrap();
    assert_eq!(disk.used(), 3 * BLOCK_U64);
    assert_eq!(read(&mut disk, A, 4096, 4096), vec![0; 4096]);
    run(&mut disk, write(A, 0, b'a', 3)).unwrap();
    let full = run(&mut disk, write(A, 3 * BLOCK_U64, b'a', 2));
    assert_eq!(full.unwrap_err(), DiskError::NoSpace);
    assert_eq!(
        run(&mut disk, allocate(0, 5 * BLOCK_U64)).unwrap_err(),
        DiskError::NoSpace
    );
    run(&mut disk, write(A, 3 * BLOCK_U64, b'a', 1)).unwrap();
    let dir = DiskOp::MakeDir { path: path("d") };
    assert_eq!(run(&mut disk, dir.clone()).unwrap_err(), DiskError::NoSpace);
    run(&mut disk, DiskOp::Resize { file: A, len: 0 }).unwrap();
    run(&mut disk, allocate(0, BLOCK_U64)).unwrap();
    assert_eq!(
        read(&mut disk, A, 0, 4096),
        vec![0; 4096],
        "freed bytes do not come back"
    );
    run(&mut disk, dir).unwrap();
}

#[test]
fn a_sync_covers_only_what_completed_before_it_was_submitted() {
    let make = || {
        let mut disk = with_file(FileClass::Segment);
        disk.submit(OpId(1), DiskOp::Sync { file: A });
        disk.submit(OpId(2), write(A, 0, b'b', 1));
        while disk.step(u64::MAX).is_some() {}
        assert_eq!(disk.in_flight(), 0);
        disk
    };
    let seen = cuts(make, |disk| sectors(&disk.peek("f").unwrap()));
    assert!(seen.contains("aaaaaaaaaaaaaaaa"), "the write is not promised");
}

#[test]
fn after_a_failed_sync_the_next_one_promises_nothing_of_it() {
    let mut lost = 0;
    let mut evicted = 0;
    for seed in 0..50 {
        let mut disk = SimDisk::new(seed, SimConfig::default());
        disk.add_fault(Fault::new(FaultKind::Error(EIO), When::Nth(1)).kind(OpKind::Sync));
        open(&mut disk, A, "f", FileClass::Segment);
        run(&mut disk, write(A, 0, b'a', 2)).unwrap();
        run(&mut disk, DiskOp::Sync { file: A }).unwrap();
        sync_root(&mut disk);
        run(&mut disk, write(A, 0, b'b', 1)).unwrap();
        assert_eq!(run(&mut disk, DiskOp::Sync { file: A }).unwrap_err(), EIO);
        run(&mut disk, DiskOp::Sync { file: A }).unwrap();
        evicted += u32::from(read(&mut disk, A, 0, 4096) != vec![b'b'; 4096]);
        let disk = disk.crash(Crash::Power, seed);
        lost += u32::from(sectors(&disk.peek("f").unwrap()) != "bbbbbbbbaaaaaaaa");
        assert_eq!(disk.fired().values().sum::<u64>(), 1);
    }
    assert!(lost > 40 && (10..40).contains(&evicted), "{lost} {evicted}");
}

fn faulty(what: FaultKind, class: FileClass) -> SimDisk {
    let mut disk = with_file(class);
    disk.add_fault(Fault::new(what, When::Nth(0)).class(class));
    disk
}

#[test]
fn faults_of_a_write_do_what_they_say() {
    let class = FileClass::Segment;
    let before = "aaaaaaaaaaaaaaaa";
    let look = |disk: &SimDisk| sectors(&disk.peek("f").unwrap());

    let mut disk = faulty(FaultKind::Error(DiskError::NoSpace), class);
    assert_eq!(
        run(&mut disk, write(A, 0, b'b', 1)).unwrap_err(),
        DiskError::NoSpace
    );
    assert_eq!(look(&disk), before);
    run(&mut disk, write(A, 0, b'b', 1)).unwrap();
    assert_eq!(look(&disk), "bbbbbbbbaaaaaaaa", "only the first write was hit");

    let mut disk = faulty(FaultKind::Error(EIO), class);
    assert_eq!(run(&mut disk, write(A, 0, b'b', 2)).unwrap_err(), EIO);
    let seen = look(&disk);
    assert!(seen.contains('a') && seen.contains('b'), "some sectors: {seen}");

    let mut disk = faulty(FaultKind::ShortWrite, class);
    assert_eq!(run(&mut disk, write(A, 0, b'b', 2)).unwrap_err(), EIO);
    assert!(
        !look(&disk).contains("ab") && look(&disk) != "b".repeat(16),
        "a prefix"
    );

    let mut disk = faulty(FaultKind::Lose, class);
    run(&mut disk, write(A, 0, b'b', 1)).unwrap();
    assert_eq!(look(&disk), before);

    let mut disk = faulty(FaultKind::FlipOnWrite, class);
    run(&mut disk, write(A, 0, b'b', 1)).unwrap();
    run(&mut disk, DiskOp::Sync { file: A }).unwrap();
    let disk = disk.crash(Crash::Power, 1);
    let bytes = disk.peek("f").unwrap();
    let flipped: u32 = bytes[..4096].iter().map(|b| (b ^ b'b').count_ones()).sum();
    assert_eq!(flipped, 1);

    let mut disk = faulty(FaultKind::Stall(5_000_000_000), class);
    let start = disk.now();
    run(&mut disk, write(A, 0, b'b', 1)).unwrap();
    assert!(disk.now() - start >= 5_000_000_000);
}

#[test]
fn a_misdirected_write_lands_on_a_file_of_its_class() {
    let mut disk = faulty(FaultKind::Misdirect, FileClass::Journal);
    open(&mut disk, B, "other", FileClass::Segment);
    run(&mut disk, write(B, 0, b'x', 4)).unwrap();
    open(&mut disk, FileId(3), "new", FileClass::Journal);
    run(&mut disk, write(FileId(3), 0, b'b', 1)).unwrap();
    assert_eq!(disk.peek("new").unwrap(), b"");
    let found = sectors(&disk.peek("f").unwrap());
    assert!(
        ["bbbbbbbbaaaaaaaa", "aaaaaaaabbbbbbbb"].contains(&found.as_str()),
        "{found}"
    );
    assert_eq!(sectors(&disk.peek("other").unwrap()), "x".repeat(32));
}

#[test]
fn a_flip_on_read_is_gone_at_the_next_read_and_one_at_rest_is_not() {
    let mut disk = faulty(FaultKind::FlipOnRead, FileClass::Segment);
    assert_ne!(read(&mut disk, A, 0, 8192), vec![b'a'; 8192]);
    assert_eq!(read(&mut disk, A, 0, 8192), vec![b'a'; 8192]);
    assert!(disk.flip_bit("f", 5000, 0));
    assert!(!disk.flip_bit("f", 9000, 0) && !disk.flip_bit("g", 0, 0));
    assert_eq!(read(&mut disk, A, 4096, 4096)[904], b'a' ^ 1);
    assert!(disk.flip_random_bit(FileClass::Segment).is_some());
    assert_eq!(disk.flip_random_bit(FileClass::Index), None);
}

#[test]
fn plans_select_by_class_kind_path_and_count() {
    let mut disk = disk(1);
    let fail = |when| Fault::new(FaultKind::Error(EIO), when);
    disk.add_fault(fail(When::From(1)).kind(OpKind::MakeDir).path("x").at_most(2));
    let mut made = |name: &str| run(&mut disk, DiskOp::MakeDir { path: path(name) }).is_ok();
    let results = ["x1", "y", "x2", "x3", "x4"].map(&mut made);
    assert_eq!(results, [true, true, false, false, true]);
}

#[test]
fn listing_and_directory_errors_are_those_of_the_kernel() {
    let mut disk = with_file(FileClass::Meta);
    let mkdir = |p: &str| DiskOp::MakeDir { path: path(p) };
    run(&mut disk, mkdir("d")).unwrap();
    run(&mut disk, mkdir("d/e")).unwrap();
    assert_eq!(run(&mut disk, mkdir("d")).unwrap_err(), DiskError::Exists);
    assert_eq!(run(&mut disk, mkdir("q/e")).unwrap_err(), DiskError::NotFound);
    let rmdir = |p: &str| DiskOp::RemoveDir { path: path(p) };
    assert_eq!(run(&mut disk, rmdir("d")).unwrap_err(), DiskError::Exists);
    assert_eq!(run(&mut disk, rmdir("f")).unwrap_err(), DiskError::Io(20));
    let unlink = DiskOp::Unlink { path: path("g") };
    assert_eq!(run(&mut disk, unlink).unwrap_err(), DiskError::NotFound);
    let (from, to) = (path("d"), path("moved"));
    run(&mut disk, DiskOp::Rename { from, to }).unwrap();
    run(&mut disk, rmdir("moved/e")).unwrap();
    let Ok(Done::Listed(names)) = run(&mut disk, DiskOp::List { path: path("") }) else {
        panic!("the root can be listed");
    };
    let names: Vec<_> = names.iter().map(|e| (e.name.as_str(), e.is_dir, e.len)).collect();
    assert_eq!(names, [("f", false, 8192), ("moved", true, 0)]);
}

#[test]
fn a_run_is_its_seed_and_completions_come_in_any_order() {
    let go = |seed| {
        let mut disk = SimDisk::new(seed, SimConfig::default());
        open(&mut disk, A, "f", FileClass::Segment);
        for i in 0..8 {
            disk.submit(OpId(i), write(A, i * BLOCK_U64, i as u8, 1));
        }
        let order: Vec<u64> = std::iter::from_fn(|| disk.step(u64::MAX))
            .map(|c| c.op.0)
            .collect();
        (disk.trace(), order)
    };
    assert_eq!(go(5), go(5));
    assert_ne!(go(5).0, go(6).0);
    assert!((0..8).any(|seed| !go(seed).1.is_sorted()));
}

#[test]
fn steps_respect_the_time_limit_and_a_stopped_disk_does_nothing() {
    let mut disk = with_file(FileClass::Segment);
    let start = disk.now();
    disk.submit(OpId(1), write(A, 0, b'b', 1));
    let due = disk.next_at().unwrap();
    assert!(due > start && disk.step(due - 1).is_none());
    assert_eq!(disk.now(), due - 1);
    disk.stop_at(Some(disk.boundaries() + 1));
    let clone = disk.clone();
    assert!(disk.step(due).is_some());
    assert!(disk.stopped() && disk.next_at().is_none());
    disk.submit(OpId(2), write(A, 0, b'c', 1));
    assert_eq!(disk.in_flight(), 0);
    assert!(disk.run(vec![DiskOp::SyncAll]).is_err());
    assert_eq!(clone.in_flight(), 1, "a clone goes its own way");
    let mut next = disk.crash(Crash::Kill, 1);
    assert!(!next.stopped() && next.run(vec![DiskOp::SyncAll]).is_ok());
}

#[test]
#[should_panic(expected = "two writes in flight overlap")]
fn overlapping_writes_are_our_bug() {
    let mut disk = with_file(FileClass::Segment);
    disk.submit(OpId(1), write(A, 0, b'b', 2));
    disk.submit(OpId(2), write(A, 4096, b'c', 1));
}

#[test]
#[should_panic(expected = "misaligned write")]
fn a_misaligned_position_is_our_bug() {
    let mut disk = with_file(FileClass::Segment);
    disk.submit(OpId(1), write(A, 512, b'b', 1));
}

#[test]
#[should_panic(expected = "misaligned buffer")]
fn misaligned_memory_is_our_bug() {
    let mut disk = with_file(FileClass::Journal);
    let mut buf = AppendBuf::with_capacity(2 * BLOCK);
    buf.append_zeros(2 * BLOCK);
    let bufs = vec![buf.slice(512..512 + BLOCK)];
    disk.submit(
        OpId(1),
        DiskOp::Write {
            file: A,
            pos: 0,
            bufs,
        },
    );
}

#[test]
#[should_panic(expected = "is closed under")]
fn a_close_under_an_operation_is_our_bug() {
    let mut disk = with_file(FileClass::Segment);
    disk.submit(OpId(1), DiskOp::Sync { file: A });
    disk.submit(OpId(2), DiskOp::Close { file: A });
}

#[test]
#[should_panic(expected = "is in flight")]
fn two_changes_of_one_name_in_flight_are_our_bug() {
    let mut disk = with_file(FileClass::Meta);
    let (from, to) = (path("f"), path("g"));
    disk.submit(OpId(1), DiskOp::Rename { from, to });
    disk.submit(OpId(2), DiskOp::Unlink { path: path("f") });
}

#[test]
#[should_panic(expected = "is not open")]
fn an_operation_on_a_file_that_is_not_open_is_our_bug() {
    disk(1).submit(OpId(1), DiskOp::Sync { file: A });
}
