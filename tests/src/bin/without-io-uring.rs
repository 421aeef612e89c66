//! Runs a command that may not set up a ring, as below the default seccomp profile of container runtimes.
//!
//! `without-io-uring PROGRAM ARGUMENTS...`: `io_uring_setup` fails with EPERM, everything else works.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

fn filter() -> Result<BpfProgram, Box<dyn std::error::Error>> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let denied = BTreeMap::from([(libc::SYS_io_uring_setup, Vec::new())]);
    let eperm = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter = SeccompFilter::new(denied, SeccompAction::Allow, eperm, arch)?;
    Ok(BpfProgram::try_from(filter)?)
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args_os().skip(1);
    let program = args
        .next()
        .ok_or("usage: without-io-uring PROGRAM ARGUMENTS...")?;
    seccompiler::apply_filter(&filter()?)?;
    Err(Command::new(program).args(args).exec().into())
}

fn main() -> ExitCode {
    if let Err(error) = run() {
        eprintln!("without-io-uring: {error}");
    }
    ExitCode::from(2)
}
