//! Short fixed workloads, each around one mechanism, made to be crashed at every boundary.

use std::fmt;
use std::str::FromStr;

use ringfence_engine::batch::TimestampType;
use ringfence_engine::config::StoreConfig;
use ringfence_engine::io::sim::{Crash, When};
use ringfence_engine::store::LogSettings;
use ringfence_engine::types::ShardId;

use super::rot::Rot;
use super::runner::Runner;
use super::{Profile, Violation};
use crate::batch::{self, Producer};

/// Grains of a journal file.
const JOURNAL_GRAINS: u64 = 193;

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
    /// Small frames of two partitions, two of them in flight at a time.
    Frames,
    /// As `Append`, on a disk whose physical blocks are larger than a frame.
    LargeBlocks,
    /// Retries of batches that are not durable yet.
    Retry,
    /// Checkpoints whose snapshots are of equal length.
    Snapshots,
    /// The newer snapshot rots after laps of the journal.
    RottenSnapshot,
    /// The last frame rots after a quiet time.
    RottenFrame,
    /// Two journal files that claim the same addresses.
    TwoLives,
}

impl Script {
    /// All of them.
    pub const ALL: [Script; 14] = [
        Script::Append,
        Script::Roll,
        Script::Truncate,
        Script::Retain,
        Script::Drop,
        Script::Lap,
        Script::Stop,
        Script::Frames,
        Script::LargeBlocks,
        Script::Retry,
        Script::Snapshots,
        Script::RottenSnapshot,
        Script::RottenFrame,
        Script::TwoLives,
    ];

    /// The faults whose contract holds.
    pub(super) fn profile(self) -> Profile {
        match self {
            Script::RottenFrame => Profile::Decay,
            _ => Profile::Calm,
        }
    }

    /// What the disk writes as one.
    pub(super) fn grain(self) -> usize {
        match self {
            Script::LargeBlocks => 8 << 10,
            _ => 4 << 10,
        }
    }

    pub(super) fn play(self, runner: &mut Runner) -> Result<(), Violation> {
        match self {
            Script::Append | Script::LargeBlocks => append(runner),
            Script::Roll => roll(runner),
            Script::Truncate => truncate(runner),
            Script::Retain => retain(runner),
            Script::Drop => drop_and_make_again(runner),
            Script::Lap => lap(runner),
            Script::Stop => stop(runner),
            Script::Frames => frames(runner),
            Script::Retry => retry(runner),
            Script::Snapshots => snapshots(runner),
            Script::RottenSnapshot => rotten_snapshot(runner),
            Script::RottenFrame => rotten_frame(runner),
            Script::TwoLives => two_lives(runner),
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
        if back > 1 {
            // From here on what is below the cut is in the segment only.
            runner.checkpoint()?;
        }
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
    runner.pass_time(20_000_000)?;
    // The name is taken again before the drop is answered.
    runner.drop_partition(again)?;
    let once_more = runner.create_as("a", settings())?;
    runner.append_values(once_more, &[bytes(6_000, 3)], -1)?;
    runner.drain()?;
    runner.pass_time(200_000_000)
}

/// Frames 10 and 11 in flight; the crash tears 10 and leaves 11; the next life writes a 10' of the same size; a second
/// crash: 11 must not be replayed.
fn frames(runner: &mut Runner) -> Result<(), Violation> {
    let a = runner.create_as("a", settings())?;
    let b = runner.create_as("b", settings())?;
    runner.append_values(a, &[bytes(50, 0)], -1)?;
    runner.append_values(b, &[bytes(50, 0)], -1)?;
    runner.drain()?;
    for round in 1..4 {
        for id in [a, b] {
            runner.append_values(id, &[bytes(100, round)], -1)?;
            runner.end_turn()?;
        }
        runner.drain()?;
    }
    Ok(())
}

/// A retry is recognised while the original is on its way; power goes; the producer was told that it is stored.
fn retry(runner: &mut Runner) -> Result<(), Violation> {
    let a = runner.create_as("a", settings())?;
    runner.append_values(a, &[bytes(50, 0)], 1)?;
    runner.drain()?;
    for round in 1..4 {
        runner.append_values(a, &[bytes(100, round)], 1)?;
        runner.end_turn()?;
        runner.retry_newest(a)?;
        runner.drain()?;
    }
    Ok(())
}

/// A snapshot goes over the last but one, which is as long; of its blocks the header survives a power cut, the body does
/// not.
fn snapshots(runner: &mut Runner) -> Result<(), Violation> {
    let a = runner.create_as("a", settings())?;
    let value = value_of_batch(1024);
    runner.checkpoint()?;
    for _ in 0..4 {
        // Whole blocks, so that no snapshot has a tail of another length.
        for _ in 0..4 {
            runner.append_values(a, &[bytes(value, 1)], -1)?;
            runner.drain()?;
        }
        runner.checkpoint()?;
    }
    Ok(())
}

/// The newer snapshot rots; the older one must find its journal.
fn rotten_snapshot(runner: &mut Runner) -> Result<(), Violation> {
    lap(runner)?;
    runner.rot_after_quiet(Rot::NewestSnapshot)?;
    lap(runner)?;
    runner.rot_after_quiet(Rot::NewestSnapshot)
}

/// The last frame before a quiet time rots: nothing but a Mark says that it is no torn tail.
fn rotten_frame(runner: &mut Runner) -> Result<(), Violation> {
    let a = runner.create_as("a", settings())?;
    runner.append_values(a, &[bytes(500, 1)], -1)?;
    runner.drain()?;
    runner.append_values(a, &[bytes(600, 2)], -1)?;
    runner.rot_after_quiet(Rot::LastFrame)
}

/// A file is begun while the last frame of the file before it hangs; meanwhile a checkpoint frees a file with a lower
/// number; power goes, and the hanging frame never was. The next life takes the freed file for the same addresses: now
/// two files claim them.
fn two_lives(runner: &mut Runner) -> Result<(), Violation> {
    const HANGS_NS: u64 = 400_000_000;
    let file = JOURNAL_GRAINS * 4096;
    let a = runner.create_as("a", settings())?;
    let mut begun = 0;
    // Until little of the second file is left.
    while runner.journal()? < (1, begun + file - 60_000) {
        runner.append_values(a, &[bytes(9_000, 1)], -1)?;
        runner.drain()?;
        let (files, bytes) = runner.journal()?;
        begun = if files == 0 { bytes } else { begun };
    }
    runner.checkpoint()?;
    runner.begin_checkpoint()?;
    runner.stall_journal(When::Nth(0), HANGS_NS)?;
    runner.append_values(a, &[bytes(9_000, 2)], -1)?;
    runner.end_turn()?;
    runner.append_values(a, &[bytes(60_000, 3)], -1)?;
    runner.end_turn()?;
    runner.pass_time(HANGS_NS / 4)?;
    runner.restart(Crash::Power, false)?;
    for round in 0..4 {
        runner.append_values(a, &[bytes(40_000, round)], -1)?;
        runner.drain()?;
    }
    Ok(())
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

/// Length of the only value of a batch of `len` bytes.
fn value_of_batch(len: usize) -> usize {
    let batch = |value: &usize| batch::build(&[&vec![0; *value]], 1_700_000_000_000, Producer::NONE).len();
    let found = (0..len).find(|value| batch(value) == len);
    found.expect("every length but a few after a varint grows")
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
pub(super) fn store_config(script: Script) -> StoreConfig {
    // So many files that no checkpoint begins on its own before two of them are full.
    let (journal_files, checkpoint_bytes) = match script {
        Script::TwoLives => (12, 4 << 20),
        _ => (5, 400 << 10),
    };
    StoreConfig {
        journal_file_bytes: JOURNAL_GRAINS * script.grain() as u64,
        journal_files,
        frame_bytes: 32 << 10,
        checkpoint_bytes,
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
            Script::Frames => "frames",
            Script::LargeBlocks => "large-blocks",
            Script::Retry => "retry",
            Script::Snapshots => "snapshots",
            Script::RottenSnapshot => "rotten-snapshot",
            Script::RottenFrame => "rotten-frame",
            Script::TwoLives => "two-lives",
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
