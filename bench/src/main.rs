//! The `ringfence-bench` command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ringfence_bench::{disk, load, log, report, subject};

/// Measures the device, the engine and the broker, and prints them side by side
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Core of a broker or engine under measurement; the load takes another
    #[arg(long, global = true, default_value_t = 0)]
    broker_core: usize,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Ceiling of the device: synced writes by size and depth, alone and paced; loopback round trips
    Disk(disk::DiskArgs),
    /// The engine without network, beside the device
    Log(log::LogArgs),
    /// Every figure, written to a Markdown and a JSON file
    Report(report::ReportArgs),
    /// A broker under load: open-loop rate or saturation, beside the device
    Load(load::LoadArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    subject::set_broker_core(cli.broker_core);
    let result = match cli.command {
        Command::Disk(args) => disk::run(&args),
        Command::Log(args) => log::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Load(args) => load::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ringfence-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
