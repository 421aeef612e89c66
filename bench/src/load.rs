//! `ringfence-bench load`: a broker under load, open loop or saturated; latency from the intended send time.

pub mod generator;
pub mod schedule;
pub mod wire;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use ringfence_broker::native::Acks;
use ringfence_engine::types::{PartitionId, ShardId};
use ringfence_tests::native::Native;
use ringfence_tests::process::cpu_time;

use crate::batches::batch;
use crate::device::Device;
use crate::figure::{Figure, Report};
use crate::host::Host;
use crate::subject::{Outcome, Subject, broker_core, load_core, pin};
use generator::{Load, Sent};
use schedule::{Length, Pace};

/// Acknowledgement to ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AcksArg {
    /// Synced on every in-sync replica.
    All,
    /// Synced on the leader.
    #[value(name = "1")]
    Leader,
    /// No answer.
    #[value(name = "0")]
    None,
}

/// Options of `load`.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Start a broker with its data in a new folder here, removed afterwards.
    #[arg(long, default_value = ".")]
    pub data_dir: PathBuf,
    /// Load this broker instead of starting one; its topic stays.
    #[arg(long, value_name = "ADDR:PORT")]
    pub bootstrap: Option<SocketAddr>,
    /// Process id of the broker given with --bootstrap, to count its CPU time.
    #[arg(long, requires = "bootstrap")]
    pub pid: Option<u32>,
    /// Producers, each with its own connections.
    #[arg(long, default_value_t = 4)]
    pub producers: usize,
    /// Bytes of a record's value.
    #[arg(long, default_value_t = 1024)]
    pub record_bytes: usize,
    /// Bytes of a batch, about.
    #[arg(long, default_value_t = 1 << 20)]
    pub batch_bytes: usize,
    /// Partitions of the topic.
    #[arg(long, default_value_t = 16)]
    pub partitions: u32,
    /// When a batch counts.
    #[arg(long, value_enum, default_value_t = AcksArg::All)]
    pub acks: AcksArg,
    /// Batches per second in all; without it, as many as --window allows.
    #[arg(long)]
    pub rate: Option<f64>,
    /// Batches in flight per connection, without --rate.
    #[arg(long, default_value_t = 4)]
    pub window: usize,
    /// Length of the run in seconds.
    #[arg(long, default_value_t = 10.0)]
    pub seconds: f64,
    /// Length of the run in bytes of batches, instead.
    #[arg(long)]
    pub bytes: Option<u64>,
    /// Setting of the topic.
    #[arg(long, value_name = "KEY=VALUE")]
    pub topic_config: Vec<String>,
    /// Setting of the broker to start; the value in TOML.
    #[arg(long, value_name = "KEY=VALUE", conflicts_with = "bootstrap")]
    pub config: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// When broker, load or device fail.
pub fn run(args: &LoadArgs) -> Outcome<()> {
    let topic_config = pairs(&args.topic_config)?;
    let figure = match args.bootstrap {
        Some(address) => given(args, address, &topic_config)?,
        None => started(args, &topic_config)?,
    };
    let mut host = Host::of(&args.data_dir);
    if topic_config.contains(&("durability", "memory")) {
        host.sync_mode = "durability=memory: acknowledged before it is synced".into();
    }
    Report {
        host,
        figures: vec![figure],
    }
    .print(args.json);
    Ok(())
}

fn started(args: &LoadArgs, topic_config: &[(&str, &str)]) -> Outcome<Figure> {
    let device = Device::open(&args.data_dir, 512 << 20)?.stream(512 << 10, 8, 2 << 30)?;
    let subject = Subject::start(&args.data_dir, &pairs(&args.config)?)?;
    let targets = subject.topic("load", args.partitions, topic_config)?;
    let cost = subject.measure(&load(args, subject.broker.setup.native, targets))?;
    let mut figure = figure(args, &cost.sent, Some(cost.cpu));
    figure.value = cost.sent.mb_per_s() / device.mb_per_s;
    figure.reference = format!("device stream {:.0} MB/s (512 KiB, 8 in flight)", device.mb_per_s);
    figure.notes.push(format!(
        "largest resident memory of the broker {} MiB",
        cost.peak >> 20
    ));
    Ok(figure)
}

fn given(args: &LoadArgs, address: SocketAddr, topic_config: &[(&str, &str)]) -> Outcome<Figure> {
    pin(load_core())?;
    let mut native = Native::connect(address, None)?;
    let name = format!("load-{}", std::process::id());
    let topic = native
        .create_topic(&name, args.partitions, topic_config)
        .map_err(|refusal| refusal.message)?;
    let shards = native.hello.shards;
    let target = |index| {
        let partition = PartitionId { topic, index };
        (partition, partition.shard(shards))
    };
    let targets = (0..args.partitions).map(target).collect();
    let before = args.pid.map(cpu_time).transpose()?;
    let sent = generator::run(&load(args, address, targets))?;
    let after = args.pid.map(cpu_time).transpose()?;
    let cpu = after.zip(before).map(|(after, before)| after - before);
    let mut figure = figure(args, &sent, cpu);
    figure.value = sent.mb_per_s();
    Ok(figure)
}

fn load(args: &LoadArgs, address: SocketAddr, targets: Vec<(PartitionId, ShardId)>) -> Load {
    Load {
        address,
        targets,
        producers: args.producers,
        pace: args.rate.map_or(Pace::Window(args.window), Pace::PerSecond),
        length: args
            .bytes
            .map_or(Length::Time(Duration::from_secs_f64(args.seconds)), Length::Bytes),
        acks: match args.acks {
            AcksArg::All => Acks::All,
            AcksArg::Leader => Acks::Leader,
            AcksArg::None => Acks::None,
        },
        batch: batch(args.batch_bytes, args.record_bytes, 0),
        timeline: false,
    }
}

fn figure(args: &LoadArgs, sent: &Sent, cpu: Option<Duration>) -> Figure {
    let pace = match args.rate {
        Some(rate) => format!("{rate} batches/s open loop"),
        None => format!("{} in flight per connection", args.window),
    };
    let batches = sent.batches as f64 / sent.elapsed.as_secs_f64();
    let mut notes = vec![
        format!("acknowledgements: {}", sent.latencies.percentiles()),
        format!(
            "{} bytes in {:.2} s, {} refused and sent again",
            sent.bytes,
            sent.elapsed.as_secs_f64(),
            sent.retries
        ),
        format!(
            "broker on core {} when started here, load on core {}",
            broker_core(),
            load_core()
        ),
    ];
    if let Some(cpu) = cpu {
        let per_gb = cpu.as_secs_f64() / (sent.bytes as f64 / 1e9);
        notes.push(format!(
            "CPU of the broker {:.2} s, {per_gb:.3} s per GB",
            cpu.as_secs_f64()
        ));
    }
    Figure {
        name: format!(
            "load: {} producers, {} partitions, {} B records in {} B batches, acks={:?}, {pace}",
            args.producers, args.partitions, args.record_bytes, args.batch_bytes, args.acks
        ),
        measured: format!("{:.1} MB/s, {batches:.0} batches/s", sent.mb_per_s()),
        reference: String::new(),
        value: 0.0,
        target: None,
        notes,
    }
}

/// Splits `KEY=VALUE` arguments.
fn pairs(arguments: &[String]) -> Outcome<Vec<(&str, &str)>> {
    let pair = |argument| {
        let split = str::split_once(argument, '=');
        split.ok_or_else(|| format!("'{argument}' is not KEY=VALUE").into())
    };
    arguments.iter().map(|argument| pair(argument.as_str())).collect()
}
