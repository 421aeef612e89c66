//! The command line against a running broker.

use std::fs;
use std::path::{Path, PathBuf};

use ringfence_tests::process::{CliOutput, cli, program};

use super::Fixture;

#[track_caller]
fn done(output: CliOutput) -> String {
    assert_eq!(output.code, 0, "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn lines_go_in_and_come_out() {
    let f = Fixture::new();
    done(
        f.broker
            .cli(&["topics", "create", "lines", "--partitions", "1"], b""),
    );
    let input = b"first\n\nthird with \xff\xfe bytes\nlast without newline";
    done(f.broker.cli(&["produce", "lines"], input));
    let output = f
        .broker
        .cli(&["consume", "lines", "--from", "beginning", "--max", "4"], b"");
    assert_eq!(output.code, 0, "{output:?}");
    assert_eq!(output.stdout, [&input[..], b"\n"].concat());
    let json = done(
        f.broker
            .cli(&["consume", "lines", "--from", "2", "--max", "2", "--json"], b""),
    );
    let records: Vec<serde_json::Value> = json
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON record per line"))
        .collect();
    assert_eq!(records.len(), 2);
    assert_eq!(records[1]["offset"], 3);
    assert_eq!(records[1]["value"], "last without newline");
}

#[test]
fn many_lines_over_many_partitions() {
    let f = Fixture::new();
    done(
        f.broker
            .cli(&["topics", "create", "many", "--partitions", "4"], b""),
    );
    let input: Vec<u8> = (0..50_000)
        .flat_map(|n| format!("line {n}\n").into_bytes())
        .collect();
    done(f.broker.cli(&["produce", "many"], &input));
    let out = done(
        f.broker
            .cli(&["consume", "many", "--from", "beginning", "--max", "50000"], b""),
    );
    let mut found: Vec<&str> = out.lines().collect();
    found.sort_unstable_by_key(|line| {
        line.trim_start_matches("line ")
            .parse::<u32>()
            .unwrap_or(u32::MAX)
    });
    let text = String::from_utf8(input).expect("text");
    assert_eq!(found, text.lines().collect::<Vec<_>>());
}

#[test]
fn topics_are_managed() {
    let f = Fixture::new();
    done(f.broker.cli(
        &[
            "topics",
            "create",
            "managed",
            "--partitions",
            "3",
            "--config",
            "retention.ms=1000000",
        ],
        b"",
    ));
    let list = done(f.broker.cli(&["topics", "list"], b""));
    assert!(list.contains("managed"), "{list}");
    let described = done(f.broker.cli(&["topics", "describe", "managed", "--json"], b""));
    serde_json::from_str::<serde_json::Value>(&described).expect("JSON");
    assert!(
        described.contains("retention.ms") && described.contains("1000000"),
        "{described}"
    );
    done(f.broker.cli(
        &["topics", "alter", "managed", "--config", "retention.ms=2000000"],
        b"",
    ));
    let described = done(f.broker.cli(&["topics", "describe", "managed"], b""));
    assert!(described.contains("2000000"), "{described}");
    let cluster = done(f.broker.cli(&["cluster"], b""));
    assert!(cluster.contains("managed"), "{cluster}");
    done(f.broker.cli(&["topics", "delete", "managed"], b""));
    let list = done(f.broker.cli(&["topics", "list"], b""));
    assert!(!list.contains("managed"), "{list}");
}

#[test]
fn failures_have_status_1_and_a_message() {
    let f = Fixture::new();
    for args in [
        &["consume", "nobody", "--from", "beginning", "--max", "1"][..],
        &["topics", "delete", "nobody"],
        &["topics", "create", "a/b", "--partitions", "1"],
        &[
            "topics",
            "create",
            "x",
            "--partitions",
            "1",
            "--config",
            "nonsense=1",
        ],
    ] {
        let output = f.broker.cli(args, b"");
        assert_eq!(output.code, 1, "{args:?}: {output:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
        assert!(!output.stderr.contains("panicked"), "{output:?}");
    }
    let nobody = cli(program(), &["topics", "list", "--bootstrap", "127.0.0.1:1"], b"");
    assert_eq!(nobody.code, 1, "{nobody:?}");
    assert!(nobody.stderr.contains("127.0.0.1:1"), "{nobody:?}");
    let usage = cli(program(), &["topics", "fly"], b"");
    assert_eq!(usage.code, 2, "{usage:?}");
}

#[test]
fn doctor_looks_at_the_machine() {
    let f = Fixture::new();
    let dir = f.dir.path().to_str().expect("scratch folders have plain names");
    let output = cli(program(), &["doctor", "--data-dir", dir], b"");
    let text = String::from_utf8_lossy(&output.stdout).to_lowercase();
    for word in ["kernel", "memlock", "direct"] {
        assert!(text.contains(word), "{word}: {output:?}");
    }
}

/// All files below `dir`.
fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir)
        .expect("the data directory is readable")
        .flatten()
    {
        let path = entry.path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

#[test]
fn dump_verifies_files_and_finds_a_flipped_bit() {
    let mut f = Fixture::new();
    done(
        f.broker
            .cli(&["topics", "create", "dumped", "--partitions", "1"], b""),
    );
    let line = "x".repeat(999) + "\n";
    done(f.broker.cli(&["produce", "dumped"], line.repeat(2000).as_bytes()));
    assert!(f.broker.stop().success());
    let mut all = Vec::new();
    files(&f.broker.setup.data.join("logs"), &mut all);
    let segment = all.into_iter().find(|path| {
        path.extension().is_some_and(|e| e == "log") && path.metadata().is_ok_and(|m| m.len() > 1 << 20)
    });
    let segment = segment.expect("two megabytes are written back at a clean stop");
    let path = segment.to_str().expect("scratch folders have plain names");
    let good = cli(program(), &["dump", "--verify", path], b"");
    assert_eq!(good.code, 0, "{good:?}");
    let mut bytes = fs::read(&segment).expect("the segment is readable");
    bytes[500_000] ^= 4;
    fs::write(&segment, bytes).expect("the segment is writable");
    let bad = cli(program(), &["dump", "--verify", path], b"");
    assert_eq!(bad.code, 1, "{bad:?}");
}
