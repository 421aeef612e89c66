//! `ringfence-bench report`: every figure the project has set itself, measured in one go and written down.

mod disturbance;
mod partitions;
mod restart;
mod throughput;

use std::path::{Path, PathBuf};

use clap::Args;

use crate::figure::{Figure, Report};
use crate::host::Host;
use crate::log::{self, LogArgs};
use crate::subject::Outcome;

/// Options of `report`.
#[derive(Debug, Clone, Args)]
pub struct ReportArgs {
    /// Directory on the device to measure; needs about 40 GiB for a while.
    #[arg(long, default_value = ".")]
    pub data_dir: PathBuf,
    /// Where the report goes: NAME.md and NAME.json.
    #[arg(long, default_value = "bench/results/report")]
    pub out: PathBuf,
    /// Only the groups whose name contains this.
    #[arg(long)]
    pub only: Option<String>,
    /// A tenth of the bytes: to see that everything runs, not for figures to quote.
    #[arg(long)]
    pub quick: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// What the groups of figures share.
pub(crate) struct Plan {
    pub(crate) dir: PathBuf,
    quick: bool,
}

impl Plan {
    /// `amount`, or a tenth of it in a quick run.
    pub(crate) fn scaled(&self, amount: u64) -> u64 {
        if self.quick { amount.div_ceil(10) } else { amount }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }
}

type Group = fn(&Plan) -> Outcome<Vec<Figure>>;

const GROUPS: [(&str, Group); 7] = [
    ("engine", engine),
    ("throughput", throughput::saturated),
    ("latency", throughput::low_rate),
    ("partitions", partitions::many_against_few),
    ("memory", partitions::idle),
    ("disturbance", disturbance::figures),
    ("restart", restart::figures),
];

/// Runs the command.
///
/// # Errors
/// When a measurement cannot be made; figures that miss their targets are no error.
pub fn run(args: &ReportArgs) -> Outcome<()> {
    let plan = Plan {
        dir: args.data_dir.clone(),
        quick: args.quick,
    };
    let mut report = Report {
        host: Host::of(&args.data_dir),
        figures: Vec::new(),
    };
    let wanted = |name: &str| args.only.as_deref().is_none_or(|part| name.contains(part));
    for (name, group) in GROUPS.iter().filter(|(name, _)| wanted(name)) {
        eprintln!("measuring: {name}");
        report.figures.extend(group(&plan)?);
        // Written after every group, so that an interrupted run keeps what it has.
        write(&args.out, &report, args.quick)?;
    }
    report.print(args.json);
    Ok(())
}

fn write(out: &Path, report: &Report, quick: bool) -> Outcome<()> {
    if let Some(parent) = out.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let title = if quick {
        "Ringfence figures (quick run, not for quoting)"
    } else {
        "Ringfence figures"
    };
    std::fs::write(out.with_extension("md"), report.markdown(title))?;
    std::fs::write(out.with_extension("json"), report.json())?;
    Ok(())
}

fn engine(plan: &Plan) -> Outcome<Vec<Figure>> {
    log::figures(&LogArgs {
        data_dir: plan.dir.clone(),
        only: Vec::new(),
        batch_kib: vec![1, 4],
        laps: plan.scaled(10),
        json: false,
    })
}
