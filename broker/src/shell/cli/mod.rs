//! The command line: one file per subcommand, each a clap struct and a `run`.
//!
//! The contract for scripts: results on stdout, everything else on stderr; exit status 0 done, 1 failed with a message that
//! names the cause and the next step, 2 wrong usage. A reader that goes away (broken pipe) ends a command quietly.

mod cluster;
mod completions;
mod consume;
mod doctor;
mod dump;
mod man;
mod output;
mod produce;
mod serve;
#[cfg(test)]
mod tests;
mod topics;

use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::client::{Client, ClientConfig, ClientError};
use output::CliError;

/// Exit status for wrong usage; clap uses the same.
const USAGE: u8 = 2;

#[derive(Debug, Parser)]
#[command(
    name = "ringfence",
    version,
    about = "Replicated log broker that syncs before it acknowledges",
    after_help = "Examples:
  ringfence topics create events --partitions 8
  echo hello | ringfence produce events
  ringfence consume events --from beginning
  ringfence cluster",
    propagate_version = true,
    arg_required_else_help = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::Serve),
    Topics(topics::Topics),
    Produce(produce::Produce),
    Consume(consume::Consume),
    Cluster(cluster::Cluster),
    Dump(dump::Dump),
    Doctor(doctor::Doctor),
    Completions(completions::Completions),
    Man(man::Man),
}

/// How to reach a broker, and how to print.
#[derive(Debug, Clone, Args)]
struct Remote {
    /// A broker to ask first
    #[arg(
        long,
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:9192",
        env = "RINGFENCE_BOOTSTRAP"
    )]
    bootstrap: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Remote {
    async fn connect(&self) -> Result<Client, ClientError> {
        Client::connect(ClientConfig::new(&self.bootstrap)).await
    }
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return wrong_usage(&error),
    };
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(CliError::Gone) => ExitCode::SUCCESS,
        Err(CliError::Usage(message)) => {
            eprintln!("error: {message}");
            ExitCode::from(USAGE)
        }
        Err(CliError::Failed(message)) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
        Err(CliError::Broke { status, message }) => {
            eprintln!("error: {message}");
            ExitCode::from(status)
        }
    }
}

/// Prints help or the usage error.
fn wrong_usage(error: &clap::Error) -> ExitCode {
    // Nobody left to tell when this fails.
    let _ = error.print();
    match error.exit_code() {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(USAGE),
    }
}

fn run(command: Command) -> Result<(), CliError> {
    match command {
        Command::Serve(serve) => serve.run(),
        Command::Topics(topics) => on_runtime(topics.run()),
        Command::Produce(produce) => on_runtime(produce.run()),
        Command::Consume(consume) => on_runtime(consume.run()),
        Command::Cluster(cluster) => on_runtime(cluster.run()),
        Command::Dump(dump) => dump.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Completions(completions) => completions.run(&mut Cli::command()),
        Command::Man(man) => man.run(Cli::command()),
    }
}

/// Runs a client command on a tokio-uring runtime of this thread.
fn on_runtime(command: impl Future<Output = Result<(), CliError>>) -> Result<(), CliError> {
    let runtime = tokio_uring::Runtime::new(&tokio_uring::builder()).map_err(|error| {
        CliError::failed(format!(
            "cannot set up io_uring: {error}; it needs Linux 5.11 or newer, and neither seccomp nor the sysctl \
             kernel.io_uring_disabled may forbid it"
        ))
    })?;
    runtime.block_on(command)
}

/// Reads `KEY=VALUE`.
fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE, for instance retention.ms=3600000".to_owned()),
    }
}
