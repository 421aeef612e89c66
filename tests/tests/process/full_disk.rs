//! A full disk: new records are refused with a retriable error, everything else goes on, and it ends by itself.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ringfence_broker::error::WireError;
use ringfence_tests::native::Native;
use ringfence_tests::process::{PATIENCE, Setup, is_root, scratch, skip};
use tempfile::TempDir;

use super::{Fixture, partition, plain, setup, values};

/// A file system of its own in an image file, mounted in a namespace that dies with the broker.
struct SmallDisk {
    mount: PathBuf,
    image: PathBuf,
}

impl SmallDisk {
    /// Makes an ext4 image; `None` where that or mounting is not possible.
    fn new(dir: &TempDir, mib: u64) -> Option<SmallDisk> {
        let disk = SmallDisk {
            mount: dir.path().join("mount"),
            image: dir.path().join("image"),
        };
        fs::create_dir(&disk.mount).expect("the scratch folder is writable");
        let image = File::create(&disk.image).expect("the scratch folder is writable");
        image.set_len(mib << 20).expect("a sparse file takes no space");
        let made = Command::new("mkfs.ext4")
            .args(["-q", "-m", "0"])
            .arg(&disk.image)
            .status();
        let mut probe = Command::new(disk.wrapper()[0]);
        let mounted = probe.args(&disk.wrapper()[1..]).arg("true").status();
        (is_root() && made.is_ok_and(|s| s.success()) && mounted.is_ok_and(|s| s.success())).then_some(disk)
    }

    /// Mounts the image for the command that follows, and for nobody else.
    fn wrapper(&self) -> [&str; 7] {
        const MOUNT: &str = r#"mount -o loop "$0" "$1" && shift && exec "$@""#;
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            MOUNT,
            path_text(&self.image),
            path_text(&self.mount),
        ]
    }

    fn setup(&self, dir: &TempDir) -> Setup {
        let mut setup = setup(dir).wrapper(&self.wrapper());
        setup.data = self.mount.join("data");
        setup
    }
}

fn path_text(path: &Path) -> &str {
    path.to_str().expect("scratch folders have plain names")
}

/// A file on the small disk that takes all space that is left, seen through the broker's namespace.
fn ballast(f: &Fixture, disk: &SmallDisk) -> PathBuf {
    let mount = disk.mount.strip_prefix("/").expect("an absolute path");
    Path::new("/proc")
        .join(f.broker.pid().to_string())
        .join("root")
        .join(mount)
        .join("ballast")
}

fn fill(path: &Path) {
    let mut file = File::create(path).expect("the small disk is writable");
    for size in [1 << 20, 4096, 1] {
        let chunk = vec![0xba; size];
        while file.write_all(&chunk).is_ok() {}
    }
    // The last bytes may be refused only when they are written back.
    let _ = file.sync_all();
}

/// Writes until a batch is refused; the error.
fn write_until_refused(
    native: &mut Native,
    p: ringfence_engine::types::PartitionId,
    written: &mut Vec<Vec<u8>>,
) -> WireError {
    loop {
        let number = written.len();
        assert!(number < 20_000, "400 MiB on a full disk");
        let mut value = format!("{number} ").into_bytes();
        value.resize(20_000, b'd');
        match native.produce(p, &plain(&[&value])) {
            Ok(offset) => assert_eq!(offset, number as u64),
            Err(error) => return error,
        }
        written.push(value);
    }
}

#[test]
fn a_full_disk_refuses_records_and_nothing_else() {
    let dir = scratch();
    let Some(disk) = SmallDisk::new(&dir, 512) else {
        skip(
            "a_full_disk_refuses_records_and_nothing_else",
            "needs root, mkfs.ext4 and loop mounts",
        );
        return;
    };
    let broker = disk.setup(&dir).config("file.delete.delay.ms", "0").start();
    let mut f = Fixture { broker, dir };
    let mut native = f.connect();
    let settings = [("segment.bytes", "4194304")];
    let kept = partition(
        native.create_topic("kept", 1, &settings).expect("a good topic"),
        0,
    );
    let victim = partition(
        native.create_topic("victim", 1, &settings).expect("a good topic"),
        0,
    );
    native
        .produce(victim, &plain(&[&vec![b'v'; 500_000]]))
        .expect("there is space");
    let mut written = Vec::new();
    for n in 0..100u32 {
        let value = [&format!("{n} ").into_bytes()[..], &[b's'; 20_000]].concat();
        native.produce(kept, &plain(&[&value])).expect("there is space");
        written.push(value);
    }

    fill(&ballast(&f, &disk));
    let error = write_until_refused(&mut native, kept, &mut written);
    assert_eq!(error, WireError::DiskFull);
    assert!(error.retriable());

    assert!(values(&mut native, kept) == written, "reads go on");
    f.broker.kill_and_restart();
    let mut native = f.connect();
    assert!(
        values(&mut native, kept) == written,
        "a restart works and loses nothing"
    );
    native.delete_topic("victim").expect("deletion works");
    assert!(
        native.produce(victim, &plain(&[b"late"])).is_err(),
        "it is deleted"
    );

    fs::remove_file(ballast(&f, &disk)).expect("the ballast is there");
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = native.produce(kept, &plain(&[b"again"])) {
        assert!(error.retriable(), "{error}");
        assert!(Instant::now() < deadline, "service did not return: {error}");
        thread::sleep(Duration::from_millis(20));
    }
    written.push(b"again".to_vec());
    f.broker.kill_and_restart();
    assert!(values(&mut f.connect(), kept) == written);
}
