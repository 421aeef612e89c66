//! `ringfence-bench disk`: the ceiling of device and loopback, which every other figure stands beside.

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::device::{Device, Synced};
use crate::host::Host;
use crate::latency::Percentiles;
use crate::loopback::{self, Trips};

const KIB: usize = 1 << 10;
const MIB: u64 = 1 << 20;

/// Fewest and most writes of one cell of the table, whatever its size says.
const WRITES: std::ops::RangeInclusive<u64> = 200..=20_000;

/// Size of the paced writes: one small record batch.
const PACED_BYTES: usize = 4096;

/// Options of `disk`.
#[derive(Debug, Clone, Args)]
pub struct DiskArgs {
    /// Directory on the device to measure; a test file is made in it and removed
    #[arg(long, default_value = ".")]
    pub data_dir: PathBuf,
    /// Size of the test file, in MiB; writes wrap around in it, as in a journal
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(4..=65536))]
    pub file_mib: u64,
    /// Sizes of a write, in KiB
    #[arg(long, value_delimiter = ',', default_values_t = [4, 16, 64, 256, 512, 1024])]
    pub kib: Vec<usize>,
    /// Writes in flight
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16])]
    pub depths: Vec<usize>,
    /// MiB written per size and depth
    #[arg(long, default_value_t = 128)]
    pub cell_mib: u64,
    /// Rates of single 4 KiB writes, per second
    #[arg(long, value_delimiter = ',', default_values_t = [100.0])]
    pub paced: Vec<f64>,
    /// How long each paced measurement takes, in seconds
    #[arg(long, default_value_t = 5.0)]
    pub seconds: f64,
    /// Also measure round trips over loopback TCP at the paced rates
    #[arg(long)]
    pub loopback: bool,
    /// Bytes of a loopback round trip, each way
    #[arg(long, default_value_t = 4096)]
    pub loopback_bytes: usize,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Single operations at a steady rate.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Paced {
    /// Operations per second, as asked for.
    pub per_second: f64,
    /// Bytes of one.
    pub bytes: usize,
    /// From submission to completion.
    pub latency: Percentiles,
}

/// Everything `disk` measured.
#[derive(Debug, Clone, Serialize)]
pub struct DiskReport {
    /// Where.
    pub host: Host,
    /// Size of the test file, in bytes.
    pub file_bytes: u64,
    /// Streams of synced writes, by size and depth.
    pub streams: Vec<Synced>,
    /// Single synced writes.
    pub paced: Vec<Paced>,
    /// Round trips over loopback.
    pub loopback: Vec<Paced>,
}

/// Measures and prints.
///
/// # Errors
/// When the arguments make no sense, or the device, the ring or loopback refuses.
pub fn run(args: &DiskArgs) -> Result<(), Box<dyn Error>> {
    let report = measure(args)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.text());
    }
    Ok(())
}

fn check(args: &DiskArgs) -> Result<(), String> {
    let file_kib = args.file_mib as usize * KIB;
    if args
        .kib
        .iter()
        .any(|kib| *kib == 0 || kib % 4 != 0 || *kib > file_kib)
    {
        return Err("--kib takes multiples of 4 up to the size of the test file".into());
    }
    if args.depths.iter().any(|depth| !(1..=4096).contains(depth)) {
        return Err("--depths takes numbers from 1 to 4096".into());
    }
    if args.paced.iter().any(|rate| !(0.1..=1e6).contains(rate)) {
        return Err("--paced takes rates from 0.1 to 1000000".into());
    }
    if !(0.1..=86_400.0).contains(&args.seconds) {
        return Err("--seconds takes 0.1 to 86400".into());
    }
    if !(1..=64 << 20).contains(&args.loopback_bytes) {
        return Err("--loopback-bytes takes 1 to 67108864".into());
    }
    Ok(())
}

/// Takes all measurements of `args`.
///
/// # Errors
/// As [`run`].
pub fn measure(args: &DiskArgs) -> Result<DiskReport, Box<dyn Error>> {
    check(args)?;
    let cells = args.kib.len() * args.depths.len();
    let loops = if args.loopback { args.paced.len() } else { 0 };
    let progress = progress((1 + cells + args.paced.len() + loops) as u64);
    progress.set_message("zero-fill");
    let file_bytes = args.file_mib * MIB;
    let mut device = Device::open(&args.data_dir, file_bytes)?;
    progress.inc(1);
    let mut streams = Vec::with_capacity(cells);
    for size in args.kib.iter().map(|kib| kib * KIB) {
        for &depth in &args.depths {
            progress.set_message(format!("{} KiB, depth {depth}", size / KIB));
            let writes = (args.cell_mib * MIB / size as u64).clamp(*WRITES.start(), *WRITES.end());
            streams.push(device.stream(size, depth, writes * size as u64)?);
            progress.inc(1);
        }
    }
    let mut paced = Vec::new();
    for &per_second in &args.paced {
        progress.set_message(format!("{per_second} writes/s"));
        let count = (per_second * args.seconds).ceil() as u64;
        let latency = device.paced(PACED_BYTES, per_second, count)?.latency;
        paced.push(Paced {
            per_second,
            bytes: PACED_BYTES,
            latency,
        });
        progress.inc(1);
    }
    let mut loopback = Vec::new();
    for &per_second in args.paced.iter().filter(|_| args.loopback) {
        progress.set_message(format!("{per_second} round trips/s"));
        let count = (per_second * args.seconds).ceil() as u64;
        let trips = Trips {
            request: args.loopback_bytes,
            answer: args.loopback_bytes,
            per_second,
            count,
            core: None,
        };
        loopback.push(Paced {
            per_second,
            bytes: args.loopback_bytes,
            latency: loopback::round_trips(trips)?,
        });
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(DiskReport {
        host: Host::of(&args.data_dir),
        file_bytes,
        streams,
        paced,
        loopback,
    })
}

/// A bar on a terminal; nothing in a pipe.
fn progress(steps: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

impl DiskReport {
    /// A table for a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text: String = self.host.lines().iter().map(|line| format!("{line}\n")).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "\nO_DIRECT|O_DSYNC overwrites of a zero-filled file of {} MiB; latencies in us\n\n\
             {:>7} {:>6} {:>9} {:>10} {:>9} {:>9} {:>9} {:>9}",
            self.file_bytes / MIB,
            "KiB",
            "depth",
            "MB/s",
            "writes/s",
            "p50",
            "p99",
            "p99.9",
            "max"
        );
        for stream in &self.streams {
            let latency = &stream.latency;
            let _ = writeln!(
                text,
                "{:>7} {:>6} {:>9.1} {:>10.0} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
                stream.write_bytes / KIB,
                stream.depth,
                stream.mb_per_s,
                stream.mb_per_s * 1e6 / stream.write_bytes as f64,
                latency.p50_us,
                latency.p99_us,
                latency.p99_9_us,
                latency.max_us
            );
        }
        for (what, paced) in [
            ("synced write", &self.paced),
            ("loopback round trip", &self.loopback),
        ] {
            for paced in paced {
                let Paced {
                    per_second,
                    bytes,
                    latency,
                } = paced;
                let _ = writeln!(text, "\n{what} of {bytes} bytes, {per_second}/s\n  {latency}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: DiskArgs,
    }

    fn args(line: &str) -> DiskArgs {
        Cli::parse_from(std::iter::once("disk").chain(line.split_whitespace())).args
    }

    #[test]
    fn every_cell_is_measured_and_printed() {
        let dir = ringfence_tests::process::scratch();
        let mut args =
            args("--file-mib 8 --kib 4,64 --depths 1,4 --cell-mib 1 --paced 500 --seconds 0.1 --loopback");
        args.data_dir = dir.path().to_path_buf();
        let report = measure(&args).expect("the build's disk takes a file");
        let cells: Vec<_> = report
            .streams
            .iter()
            .map(|s| (s.write_bytes, s.depth, s.latency.count))
            .collect();
        assert_eq!(
            cells,
            [(4096, 1, 256), (4096, 4, 256), (65536, 1, 200), (65536, 4, 200)]
        );
        assert_eq!(report.paced[0].latency.count, 50);
        assert_eq!(report.loopback[0].latency.count, 50);
        let text = report.text();
        assert!(text.contains("kernel") && text.contains("loopback round trip of 4096 bytes, 500/s"));
        let json = serde_json::to_value(&report).expect("a report is JSON");
        assert_eq!(json["streams"][3]["depth"], 4);
    }

    #[test]
    fn senseless_arguments_are_refused_with_their_range() {
        for bad in [
            "--kib 6",
            "--kib 0",
            "--kib 8192 --file-mib 4",
            "--depths 0",
            "--paced 0",
            "--seconds 0",
        ] {
            let message = check(&args(bad)).expect_err(bad);
            assert!(message.starts_with("--"), "{message}");
        }
        assert_eq!(check(&args("")), Ok(()));
    }
}
