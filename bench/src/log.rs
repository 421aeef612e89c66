//! `ringfence-bench log`: the engine without network, beside the device.

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use ringfence_engine::config::StoreConfig;
use ringfence_engine::types::ShardId;
use tempfile::TempDir;

use crate::batches::batch;
use crate::device::{Device, Synced};
use crate::engine::{Done, Engine, Work};
use crate::figure::{Figure, Report, Target};
use crate::host::Host;
use crate::subject::broker_core;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Frame size of the throughput figures.
const FRAME: usize = 512 << 10;
/// Writes in flight of the device's stream: as many as the journal has.
const DEPTH: usize = 8;

/// Which figures to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// 1 GiB at once into a journal that holds it.
    Burst,
    /// Many laps of the journal, with everything written back.
    Sustained,
    /// One writer, one batch of 4 KiB at a time.
    Single,
    /// 16 partitions against 10,000.
    Partitions,
}

/// Options of `log`.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// Directory on the device to measure; a folder is made in it and removed.
    #[arg(long, default_value = ".")]
    pub data_dir: PathBuf,
    /// Only these figures; default: all.
    #[arg(long, value_enum)]
    pub only: Vec<Scenario>,
    /// Laps of the journal that count as sustained.
    #[arg(long, default_value_t = 10)]
    pub laps: u64,
    /// Sizes of a batch for `partitions`, in KiB.
    #[arg(long, num_args = 1.., default_values_t = [1, 4])]
    pub batch_kib: Vec<usize>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Runs the command.
///
/// # Errors
/// When the device or the engine fails.
pub fn run(args: &LogArgs) -> Outcome<()> {
    let report = Report {
        host: Host::of(&args.data_dir),
        figures: figures(args)?,
    };
    report.print(args.json);
    Ok(())
}

/// Takes the figures.
///
/// # Errors
/// When the device or the engine fails.
pub fn figures(args: &LogArgs) -> Outcome<Vec<Figure>> {
    affinity::set_thread_affinity([broker_core()]).map_err(|error| error.to_string())?;
    let wanted = |scenario| args.only.is_empty() || args.only.contains(&scenario);
    let dir = folder(&args.data_dir)?;
    let mut figures = Vec::new();
    if wanted(Scenario::Burst) {
        figures.extend(burst(dir.path())?);
    }
    if wanted(Scenario::Sustained) {
        figures.push(sustained(dir.path(), args.laps)?);
    }
    if wanted(Scenario::Single) {
        figures.push(single(dir.path())?);
    }
    if wanted(Scenario::Partitions) {
        for kib in &args.batch_kib {
            figures.extend(partitions(dir.path(), kib << 10, args.laps)?);
        }
    }
    Ok(figures)
}

/// The first burst finds memory that the process never touched, the third one what those before it used: touching
/// memory costs what the host makes of it, and says nothing about the engine.
fn burst(dir: &Path) -> Outcome<Vec<Figure>> {
    let mut cfg = config(64 * MIB, 32);
    cfg.dirty_bytes = 3 * GIB / 2;
    cfg.memory_bytes = 2 * GIB;
    let (runs, device) = beside_stream(dir, cfg, 16, &[GIB, GIB, GIB])?;
    let figure = |run, memory, target| {
        let name = format!("log: burst of 1 GiB, 512 KiB frames, memory {memory}");
        throughput(&name, run, device, target)
    };
    Ok(vec![
        figure(&runs[0], "never used before", None),
        figure(&runs[2], "in use", Some(Target::AtLeast(0.8))),
    ])
}

fn sustained(dir: &Path, laps: u64) -> Outcome<Figure> {
    let cfg = config(64 * MIB, 16);
    let total = laps * cfg.journal_capacity(4096);
    let (runs, device) = beside_stream(dir, cfg, 16, &[total])?;
    Ok(throughput(
        "log: sustained, 512 KiB frames",
        &runs[0],
        device,
        Some(Target::AtLeast(0.45)),
    ))
}

/// Runs of large batches on one store, between two measurements of the device.
fn beside_stream(
    dir: &Path,
    mut cfg: StoreConfig,
    window: usize,
    totals: &[u64],
) -> Outcome<(Vec<Run>, f64)> {
    cfg.frame_bytes = FRAME;
    let before = stream(dir)?;
    let work = |total: &u64| Work {
        // Frame header and directories take the rest of the frame.
        batches: (0..8).map(|number| batch(FRAME - 8192, 1024, number)).collect(),
        window,
        total: *total,
    };
    let works: Vec<Work> = totals.iter().map(work).collect();
    let runs = measure(dir, cfg, 16, &works)?;
    let after = stream(dir)?;
    Ok((runs, (before.mb_per_s + after.mb_per_s) / 2.0))
}

fn stream(dir: &Path) -> Outcome<Synced> {
    Ok(Device::open(dir, 512 * MIB)?.stream(FRAME, DEPTH, 2 * GIB)?)
}

fn single(dir: &Path) -> Outcome<Figure> {
    let work = Work {
        batches: vec![batch(4096, 1024, 0)],
        window: 1,
        total: 20_000 * 4096,
    };
    let run = measure_one(dir, config(64 * MIB, 5), 1, work)?;
    let frame = run.frame_bytes.next_multiple_of(4096) as usize;
    let device = Device::open(dir, 512 * MIB)?.stream(frame, 1, 20_000 * frame as u64)?;
    let own = run.done.latencies.percentiles();
    Ok(Figure {
        name: "log: one writer, 4 KiB batches, p50".into(),
        measured: own.to_string(),
        reference: format!("device write of {frame} bytes: {}", device.latency),
        value: own.p50_us / device.latency.p50_us,
        target: Some(Target::AtMost(1.25)),
        notes: run.notes(),
    })
}

/// 64 batches in flight on 16 and on 10,000 partitions, with the journal that a broker has by default; throughput and
/// p99 of the many by those of the few.
fn partitions(dir: &Path, size: usize, laps: u64) -> Outcome<Vec<Figure>> {
    let go = |partitions: u32| {
        let cfg = config(64 * MIB, 16);
        let work = Work {
            batches: vec![batch(size, size, 0)],
            window: 64,
            total: laps * cfg.journal_capacity(4096),
        };
        // The first lap makes directories and files, and touches memory.
        let warm_up = Work {
            total: cfg.journal_capacity(4096),
            ..work.clone()
        };
        let mut runs = measure(dir, cfg, partitions, &[warm_up, work])?;
        Ok::<_, Box<dyn Error>>(runs.pop().expect("one run per work"))
    };
    let (few, many) = (go(16)?, go(10_000)?);
    let (few_p, many_p) = (
        few.done.latencies.percentiles(),
        many.done.latencies.percentiles(),
    );
    let name = format!("log: 10,000 partitions, {} KiB batches, 64 in flight", size >> 10);
    let throughput = Figure {
        name: format!("{name}: throughput"),
        measured: format!("{:.0} MB/s", many.mb_per_s()),
        reference: format!("16 partitions: {:.0} MB/s", few.mb_per_s()),
        value: many.mb_per_s() / few.mb_per_s(),
        target: Some(Target::AtLeast(0.8)),
        notes: many.notes(),
    };
    let p99 = Figure {
        name: format!("{name}: p99"),
        measured: many_p.to_string(),
        reference: format!("16 partitions: {few_p}"),
        value: many_p.p99_us / few_p.p99_us,
        target: Some(Target::AtMost(3.0)),
        notes: few.notes(),
    };
    Ok(vec![throughput, p99])
}

fn throughput(name: &str, run: &Run, device: f64, target: Option<Target>) -> Figure {
    Figure {
        name: name.into(),
        measured: format!("{:.0} MB/s", run.mb_per_s()),
        reference: format!("device stream {device:.0} MB/s (512 KiB, {DEPTH} in flight)"),
        value: run.mb_per_s() / device,
        target,
        notes: run.notes(),
    }
}

/// One workload on a fresh store.
struct Run {
    done: Done,
    bytes: u64,
    laps: f64,
    written_back: f64,
    frame_bytes: u64,
    checkpoints: u64,
}

impl Run {
    fn mb_per_s(&self) -> f64 {
        self.bytes as f64 / self.done.elapsed.as_secs_f64() / 1e6
    }

    fn notes(&self) -> Vec<String> {
        vec![
            format!("acknowledgements: {}", self.done.latencies.percentiles()),
            format!(
                "{:.1} laps of the journal, {:.3} of the accepted bytes written back at the last acknowledgement, \
                 {} checkpoints, mean frame {} bytes",
                self.laps, self.written_back, self.checkpoints, self.frame_bytes
            ),
        ]
    }
}

/// Work after work on one fresh store; before each, what the last one left to do is done.
fn measure(dir: &Path, cfg: StoreConfig, partitions: u32, works: &[Work]) -> Outcome<Vec<Run>> {
    let folder = folder(dir)?;
    let capacity = cfg.journal_capacity(4096);
    let mut engine = Engine::open(folder.path(), cfg, partitions)?;
    works
        .iter()
        .map(|work| {
            engine.settle()?;
            one_run(&mut engine, capacity, work)
        })
        .collect()
}

fn measure_one(dir: &Path, cfg: StoreConfig, partitions: u32, work: Work) -> Outcome<Run> {
    let mut runs = measure(dir, cfg, partitions, &[work])?;
    Ok(runs.pop().expect("one run per work"))
}

fn one_run(engine: &mut Engine, journal_capacity: u64, work: &Work) -> Outcome<Run> {
    let (before, frames_before) = (*engine.store().stats(), *engine.store().commit_stats());
    let done = engine.run(work)?;
    let (stats, frames) = (engine.store().stats(), engine.store().commit_stats());
    let accepted = stats.accepted_bytes - before.accepted_bytes;
    let journal = frames.bytes - frames_before.bytes;
    Ok(Run {
        done,
        bytes: accepted,
        laps: journal as f64 / journal_capacity as f64,
        written_back: (stats.written_back_bytes - before.written_back_bytes) as f64 / accepted as f64,
        frame_bytes: journal / (frames.frames - frames_before.frames).max(1),
        checkpoints: stats.checkpoints - before.checkpoints,
    })
}

fn config(journal_file_bytes: u64, journal_files: usize) -> StoreConfig {
    let mut cfg = StoreConfig::new(1, ShardId(0));
    cfg.journal_file_bytes = journal_file_bytes;
    cfg.journal_files = journal_files;
    cfg.checkpoint_bytes = cfg
        .checkpoint_bytes
        .min(journal_file_bytes * journal_files as u64 / 4);
    cfg
}

/// A folder on the device to measure that goes with its owner.
fn folder(parent: &Path) -> Outcome<TempDir> {
    Ok(tempfile::Builder::new()
        .prefix("ringfence-bench-")
        .tempdir_in(parent)?)
}
