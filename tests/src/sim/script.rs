//! Short fixed workloads, each around one mechanism, made to be crashed at every boundary.

use std::fmt;
use std::str::FromStr;

use ringfence_engine::batch::TimestampType;
use ringfence_engine::config::StoreConfig;
use ringfence_engine::store::LogSettings;
use ringfence_engine::types::ShardId;

use super::Violation;
use super::runner::Runner;

/// A fixed workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Script {
    /// Appends of all sizes to two partitions.
    Append,
    /// Segments that roll with nearly every batch.
    Roll,
    /// Cuts in the middle of a block and of a segment, each followed by other bytes at the same offsets.
    Truncate,
    /// Log start by command and by retention, and the removal of what lies below.
    Retain,
    /// A drop, and a new partition under the same name.
    Drop,
    /// Enough bytes to lap the journal, so that checkpoints and recycled files are in play.
    Lap,
    /// A clean stop between appends.
    Stop,
}

impl Script {
    /// All of them.
    pub const ALL: [Script; 7] = [
        Script::Append,
        Script::Roll,
        Script::Truncate,
        Script::Retain,
        Script::Drop,
        Script::Lap,
        Script::Stop,
    ];

    pub(super) fn play(self, runner: &mut Runner) -> Result<(), Violation> {
        match self {
            Script::Append => append(runner),
            Script::Roll => roll(runner),
            Script::Truncate => truncate(runner),
            Script::Retain => retain(runner),
            Script::Drop => drop_and_make_again(runner),
            Script::Lap => lap(runner),
            Script::Stop => stop(runner),
        }
    }
}

fn append(runner: &mut Runner) -> Result<(), Violation> {
    let a = runner.create_as("a", settings())?;
    let b = runner.create_as("b", settings())?;
    for (round, size) in [1, 100, 4_000, 4_096, 9_000, 70_000].into_iter().enumerate() {
        runner.append_values(a, &[bytes(size, round)], 1)?;
        runner.append_values(b, &[bytes(10, round), bytes(size / 2, round)], -1)?;
        if round % 2 == 1 {
            runner.drain()?;
        }
    }
    runner.begin_epoch(a)?;
    runner.append_values(a, &[bytes(50, 9)], 1)?;
    runner.drain()?;
    // Write-back and marks.
    runner.pass_time(100_000_000)
}

fn roll(runner: &mut Runner) -> Result<(), Violation> {
    let small = LogSettings {
        segment_bytes: 16 << 10,
        ..settings()
    };
    let a = runner.create_as("a", small)?;
    for round in 0..6 {
        runner.append_values(a, &[bytes(6_000, round)], 1)?;
        runner.append_values(a, &[bytes(300, round)], -1)?;
    }
    runner.drain()?;
    runner.pass_time(100_000_000)
}

fn truncate(runner: &mut Runner) -> Result<(), Violation> {
    let small = LogSettings {
        segment_bytes: 16 << 10,
        ..settings()
    };
    let a = runner.create_as("a", small)?;
    for back in [1, 2, 5] {
        for round in 0..4 {
            runner.append_values(a, &[bytes(3_000, round + back)], 1)?;
            runner.append_values(a, &[bytes(700, round)], -1)?;
        }
        runner.drain()?;
        runner.pass_time(20_000_000)?;
        runner.truncate_to(a, runner.end_of(a).saturating_sub(back as u64))?;
        runner.begin_epoch(a)?;
        runner.append_values(a, &[bytes(5_000, 77)], -1)?;
    }
    runner.drain()?;
    runner.pass_time(100_000_000)
}

fn retain(runner: &mut Runner) -> Result<(), Violation> {
    let small = LogSettings {
        segment_bytes: 16 << 10,
        retention_bytes: Some(20_000),
        ..settings()
    };
    let a = runner.create_as("a", small)?;
    for round in 0..8 {
        runner.append_values(a, &[bytes(6_000, round)], -1)?;
    }
    runner.drain()?;
    runner.pass_time(200_000_000)?;
    runner.raise_log_start(a, runner.end_of(a).saturating_sub(1))?;
    runner.append_values(a, &[bytes(6_000, 1)], -1)?;
    runner.drain()?;
    runner.pass_time(200_000_000)
}

fn drop_and_make_again(runner: &mut Runner) -> Result<(), Violation> {
    let a = runner.create_as("a", settings())?;
    runner.append_values(a, &[bytes(6_000, 1)], -1)?;
    runner.drain()?;
    runner.pass_time(20_000_000)?;
    runner.append_values(a, &[bytes(90, 1)], -1)?;
    runner.drain()?;
    runner.drop_partition(a)?;
    let again = runner.create_as("a", settings())?;
    runner.append_values(again, &[bytes(6_000, 2)], -1)?;
    runner.drain()?;
    runner.pass_time(200_000_000)
}

fn lap(runner: &mut Runner) -> Result<(), Violation> {
    let small = LogSettings {
        segment_bytes: 128 << 10,
        ..settings()
    };
    let a = runner.create_as("a", small.clone())?;
    let b = runner.create_as("b", small)?;
    for round in 0..110 {
        runner.append_values(a, &[bytes(20_000, round)], 1)?;
        runner.append_values(b, &[bytes(200, round)], -1)?;
        if round % 4 == 3 {
            runner.drain()?;
        }
    }
    runner.drain()?;
    runner.pass_time(100_000_000)
}

fn stop(runner: &mut Runner) -> Result<(), Violation> {
    let a = runner.create_as("a", settings())?;
    runner.append_values(a, &[bytes(5_000, 1)], 1)?;
    runner.append_values(a, &[bytes(500, 2)], 1)?;
    runner.stop_cleanly()?;
    runner.append_values(a, &[bytes(500, 3)], 1)?;
    runner.drain()
}

fn bytes(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| (i + i / 251 + salt * 7) as u8).collect()
}

fn settings() -> LogSettings {
    LogSettings {
        segment_bytes: 1 << 20,
        segment_ms: u64::MAX,
        retention_bytes: None,
        retention_ms: None,
        max_message_bytes: 1 << 20,
        timestamp_type: TimestampType::CreateTime,
        memory: false,
    }
}

/// A small store without anything random.
pub(super) fn store_config() -> StoreConfig {
    StoreConfig {
        journal_file_bytes: 193 * 4096,
        journal_files: 5,
        frame_bytes: 32 << 10,
        checkpoint_bytes: 400 << 10,
        memory_bytes: 16 << 20,
        dirty_bytes: 1 << 20,
        write_back_bytes: 16 << 10,
        write_back_depth: 4,
        delete_delay_ms: 10,
        retention_check_ms: 20,
        ..StoreConfig::new(7, ShardId(0))
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Script::Append => "append",
            Script::Roll => "roll",
            Script::Truncate => "truncate",
            Script::Retain => "retain",
            Script::Drop => "drop",
            Script::Lap => "lap",
            Script::Stop => "stop",
        })
    }
}

impl FromStr for Script {
    type Err = String;

    fn from_str(text: &str) -> Result<Script, String> {
        let found = Script::ALL.into_iter().find(|script| script.to_string() == text);
        found.ok_or_else(|| format!("unknown script {text}"))
    }
}
