//! The broker under measurement: started on a folder of its own, pinned to its core, taken down with its data.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ringfence_engine::types::{PartitionId, ShardId};
use ringfence_tests::native::Native;
use ringfence_tests::process::{Broker, Setup};
use tempfile::TempDir;

use crate::host::cpus;
use crate::load::generator::{self, Load, Sent};

/// Result of a benchmark's step; its error is printed and ends the run.
pub type Outcome<T> = Result<T, Box<dyn Error>>;

static BROKER_CORE: AtomicUsize = AtomicUsize::new(0);

/// Core of the broker's only shard. Where the device interrupts one core only, its best place is that core.
#[must_use]
pub fn broker_core() -> usize {
    BROKER_CORE.load(Ordering::Relaxed)
}

/// Moves the broker to another core; before anything is measured.
pub fn set_broker_core(core: usize) {
    BROKER_CORE.store(core, Ordering::Relaxed);
}

/// Core of the load generator: the first that is not the broker's.
#[must_use]
pub fn load_core() -> usize {
    usize::from(broker_core() == 0)
}

/// A broker of one shard with its folder. The broker goes first when both are dropped.
pub struct Subject {
    /// The process.
    pub broker: Broker,
    /// Its settings, data and output.
    pub dir: TempDir,
}

/// What a load cost the broker.
#[derive(Debug)]
pub struct Cost {
    /// The load's side.
    pub sent: Sent,
    /// User and system time of the broker.
    pub cpu: Duration,
    /// Growth of every figure on `/metrics`, summed over labels.
    pub grown: BTreeMap<String, f64>,
    /// Largest resident memory seen, bytes.
    pub peak: u64,
}

impl Cost {
    /// CPU seconds of the broker per 10^9 bytes acknowledged.
    #[must_use]
    pub fn cpu_per_gb(&self) -> f64 {
        self.cpu.as_secs_f64() / (self.sent.bytes as f64 / 1e9)
    }
}

/// The `ringfence` program beside this one.
///
/// # Errors
/// When it is not there.
pub fn program() -> Outcome<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("ringfence");
    if path.exists() {
        return Ok(path);
    }
    Err(format!(
        "{} is missing; build it with: cargo build --release",
        path.display()
    )
    .into())
}

/// Lets the calling thread, and processes it starts, run on every core again.
fn unpin() -> Outcome<()> {
    let all: Vec<usize> = (0..cpus()).collect();
    affinity::set_thread_affinity(all).map_err(|error| format!("unpinning: {error}").into())
}

/// Keeps the calling thread on `core`.
///
/// # Errors
/// When there is no such core.
pub fn pin(core: usize) -> Outcome<()> {
    affinity::set_thread_affinity([core]).map_err(|error| format!("pinning to core {core}: {error}").into())
}

impl Subject {
    /// Starts a broker in a new folder below `parent`, with settings in TOML.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(parent: &Path, settings: &[(&str, &str)]) -> Outcome<Subject> {
        unpin()?;
        let dir = tempfile::Builder::new()
            .prefix("ringfence-bench-")
            .tempdir_in(parent)?;
        let mut setup = Setup::of(program()?, dir.path()).cores(&format!("{0}-{0}", broker_core()));
        for (key, value) in settings {
            setup = setup.config(key, value);
        }
        Ok(Subject {
            broker: setup.start(),
            dir,
        })
    }

    /// A connection for administration.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub fn connect(&self) -> Outcome<Native> {
        Ok(Native::connect(self.broker.setup.native, Some(0))?)
    }

    /// Creates a topic; its partitions with their shards.
    ///
    /// # Errors
    /// When the broker refuses.
    pub fn topic(
        &self,
        name: &str,
        partitions: u32,
        settings: &[(&str, &str)],
    ) -> Outcome<Vec<(PartitionId, ShardId)>> {
        let mut native = self.connect()?;
        let topic = native
            .create_topic(name, partitions, settings)
            .map_err(|refusal| refusal.message)?;
        let shards = native.hello.shards;
        let target = |index| {
            let partition = PartitionId { topic, index };
            (partition, partition.shard(shards))
        };
        Ok((0..partitions).map(target).collect())
    }

    /// Runs a load and watches the broker meanwhile.
    ///
    /// # Errors
    /// When the load or the broker fails.
    pub fn measure(&self, load: &Load) -> Outcome<Cost> {
        pin(load_core())?;
        let before = self.metrics();
        let cpu = self.broker.cpu_time()?;
        let sent = generator::run(load)?;
        let cpu = self.broker.cpu_time()? - cpu;
        let after = self.metrics();
        let grown = after
            .iter()
            .map(|(name, value)| (name.clone(), value - before.get(name).unwrap_or(&0.0)));
        Ok(Cost {
            sent,
            cpu,
            grown: grown.collect(),
            peak: self.broker.memory("VmHWM")?,
        })
    }

    /// Every figure on `/metrics`, summed over labels.
    #[must_use]
    pub fn metrics(&self) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for line in self
            .broker
            .admin("/metrics")
            .lines()
            .filter(|line| !line.starts_with('#'))
        {
            let Some((key, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let name = key.split('{').next().unwrap_or(key);
            if let Ok(value) = value.parse::<f64>() {
                *sums.entry(name.to_string()).or_insert(0.0) += value;
            }
        }
        sums
    }

    /// Kills the broker, empties the page cache where that is allowed, starts it again; the time until it is ready.
    ///
    /// # Errors
    /// When the broker cannot be started again.
    pub fn restart_cold(&mut self) -> Outcome<(Duration, bool)> {
        self.broker.kill();
        let cold = drop_caches();
        unpin()?;
        let start = Instant::now();
        let mut broker = self.broker.setup.spawn()?;
        broker.wait_ready();
        let ready = start.elapsed();
        self.broker = broker;
        Ok((ready, cold))
    }
}

/// Empties the page cache; false without the right to.
#[must_use]
pub fn drop_caches() -> bool {
    let synced = std::process::Command::new("sync")
        .status()
        .is_ok_and(|status| status.success());
    synced && std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}
