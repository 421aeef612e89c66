//! Environments that a broker cannot or should not serve in: a clear message, a non-zero exit, unchanged data.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ringfence_tests::process::{Setup, is_root, program, scratch, skip};
use tempfile::TempDir;

use super::{Fixture, partition, plain, setup, values};

/// A user without rights.
const NOBODY: [&str; 5] = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--inh-caps=-all",
];

/// A start that is refused, with every word of `words` in what it prints.
#[track_caller]
fn assert_refused(setup: &Setup, words: &[&str]) {
    let (status, output) = setup.refused();
    assert!(!status.success(), "it served:\n{output}");
    assert!(
        status.code().is_some_and(|code| code != 101),
        "it did not say why: {status}\n{output}"
    );
    let lower = output.to_lowercase();
    for word in words {
        assert!(
            lower.contains(&word.to_lowercase()),
            "the message names '{word}':\n{output}"
        );
    }
}

/// A stopped broker with one record in it.
struct Stopped {
    f: Fixture,
    partition: ringfence_engine::types::PartitionId,
}

impl Stopped {
    fn new() -> Stopped {
        let mut f = Fixture::new();
        let mut native = f.connect();
        let partition = partition(native.create_topic("kept", 1, &[]).expect("a good topic"), 0);
        native
            .produce(partition, &plain(&[b"kept"]))
            .expect("a good batch");
        assert!(f.broker.stop().success());
        Stopped { f, partition }
    }

    fn data(&self) -> &Path {
        &self.f.broker.setup.data
    }

    /// The right broker still serves the record.
    fn serves_unchanged(mut self) {
        self.f.broker = self.f.broker.setup.start();
        assert_eq!(values(&mut self.f.connect(), self.partition), [b"kept"]);
    }
}

#[test]
fn data_directory_in_use() {
    let f = Fixture::new();
    let dir = scratch();
    let mut second = setup(&dir);
    second.data = f.broker.setup.data.clone();
    assert_refused(&second, &["in use"]);
    assert_eq!(f.connect().topic("x").name, "x", "the first broker still serves");
}

#[test]
fn data_directory_of_another_node() {
    let stopped = Stopped::new();
    let other = stopped.f.broker.setup.clone().config("node.id", "77");
    assert_refused(&other, &["node", "77"]);
    stopped.serves_unchanged();
}

/// Rewrites the version of `node.meta`, with a matching checksum.
fn set_version(path: &Path, version: u32) {
    let mut meta = fs::read(path).expect("the data directory has an identity");
    meta[8..12].copy_from_slice(&version.to_le_bytes());
    let end = meta.len() - 4;
    let crc = crc32fast::hash(&meta[..end]);
    meta[end..].copy_from_slice(&crc.to_le_bytes());
    fs::write(path, meta).expect("the data directory is writable");
}

#[test]
fn data_directory_of_another_version() {
    let stopped = Stopped::new();
    let meta = stopped.data().join("node.meta");
    let original = fs::read(&meta).expect("the data directory has an identity");
    set_version(&meta, 900);
    assert_refused(&stopped.f.broker.setup, &["version", "900"]);
    fs::write(&meta, original).expect("the data directory is writable");
    stopped.serves_unchanged();
}

#[test]
fn a_damaged_identity_is_never_taken_for_a_new_directory() {
    let stopped = Stopped::new();
    for name in ["node.meta", "journal-set"] {
        let path = stopped.data().join(name);
        let original = fs::read(&path).expect("the data directory has an identity");
        for damaged in [Vec::new(), vec![0; original.len()], original[..100].to_vec()] {
            fs::write(&path, damaged).expect("the data directory is writable");
            assert_refused(&stopped.f.broker.setup, &[name]);
        }
        fs::remove_file(&path).expect("the data directory is writable");
        assert_refused(&stopped.f.broker.setup, &[name]);
        fs::write(&path, original).expect("the data directory is writable");
    }
    stopped.serves_unchanged();
}

#[test]
fn a_file_where_the_data_directory_should_be() {
    let dir = scratch();
    let setup = setup(&dir);
    fs::write(&setup.data, b"not a directory").expect("the scratch folder is writable");
    assert_refused(&setup, &["data"]);
    assert_eq!(
        fs::read(&setup.data).expect("it is still there"),
        b"not a directory"
    );
}

#[test]
fn a_wrong_setting() {
    let dir = scratch();
    assert_refused(&setup(&dir).config("log.no.such.key", "1"), &["log.no.such.key"]);
    assert_refused(
        &setup(&dir).config("log.segment.bytes", "\"many\""),
        &["log.segment.bytes", "many"],
    );
}

#[test]
fn an_address_in_use() {
    let f = Fixture::new();
    let dir = scratch();
    let mut second = setup(&dir);
    second.native = f.broker.setup.native;
    assert_refused(&second, &[&f.broker.setup.native.to_string()]);
}

/// A broker that another user may run: program, data and output where that user can reach them.
fn for_nobody(dir: &TempDir, wrapper: &[&str]) -> Setup {
    let open = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("the folder is ours");
    };
    open(dir.path(), 0o777);
    let copy = dir.path().join("ringfence");
    fs::copy(program(), &copy).expect("the program can be copied");
    open(&copy, 0o755);
    let mut setup = setup(dir).wrapper(wrapper);
    setup.program = copy;
    setup
}

#[test]
fn missing_permission() {
    let dir = TempDir::new().expect("a folder for temporary files");
    let mut setup = for_nobody(&dir, if is_root() { &NOBODY } else { &["env"] });
    setup.data = dir.path().join("locked/data");
    let locked = dir.path().join("locked");
    fs::create_dir(&locked).expect("the folder is ours");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o500)).expect("the folder is ours");
    assert_refused(&setup, &["permission", "locked"]);
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o700)).expect("the folder is ours");
}

#[test]
fn low_memlock() {
    let dir = TempDir::new().expect("a folder for temporary files");
    let mut wrapper: Vec<&str> = if is_root() { NOBODY.to_vec() } else { Vec::new() };
    wrapper.extend(["prlimit", "--memlock=4096:4096"]);
    let setup = for_nobody(&dir, &wrapper);
    assert_refused(&setup, &["memlock"]);
}

#[test]
fn io_uring_disabled() {
    let dir = scratch();
    let wrapper = [env!("CARGO_BIN_EXE_without-io-uring")];
    assert_refused(&setup(&dir).wrapper(&wrapper), &["io_uring", "seccomp"]);
}

/// Without direct I/O the broker works, and says what that costs.
#[test]
fn tmpfs_works_with_a_warning() {
    const MOUNT: &str = r#"mount -t tmpfs -o size=512m ringfence "$0" && exec "$@""#;
    let dir = scratch();
    let mount = dir.path().join("mount");
    fs::create_dir(&mount).expect("the scratch folder is writable");
    let path = mount.to_str().expect("scratch folders have plain names");
    let wrapper = ["unshare", "--mount", "sh", "-c", MOUNT, path];
    let probe = std::process::Command::new(wrapper[0])
        .args(&wrapper[1..])
        .arg("true")
        .status();
    if !probe.is_ok_and(|status| status.success()) {
        skip("tmpfs_works_with_a_warning", "mounting a tmpfs needs root");
        return;
    }
    let mut setup = setup(&dir).wrapper(&wrapper);
    setup.data = mount.join("data");
    let broker = setup.start();
    let f = Fixture { broker, dir };
    let mut native = f.connect();
    let p = partition(native.create_topic("light", 1, &[]).expect("a good topic"), 0);
    let big = vec![b't'; 300_000];
    for _ in 0..40 {
        native.produce(p, &plain(&[&big])).expect("a good batch");
    }
    assert_eq!(values(&mut native, p).len(), 40);
    let output = f.broker.output();
    assert!(
        output.contains("WARN") && output.contains("tmpfs"),
        "a warning names tmpfs:\n{output}"
    );
}
