//! The simulator: a store on a seeded disk, driven by a seeded workload and checked against a plain model.
//!
//! `tests/README.md` says what is simulated and how to replay a seed.

mod model;
mod node;
mod profile;
mod rot;
mod runner;
mod script;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

pub use profile::Profile;
pub use runner::Plan;
pub use script::Script;

use ringfence_engine::io::sim::Crash;
use runner::Runner;

/// Something a store must never do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation(pub String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What happened in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    pub seed: u64,
    pub profile: Profile,
    /// Batches accepted.
    pub appended: u64,
    /// Appends refused with a typed error.
    pub refused: u64,
    /// Retries answered with the original offsets.
    pub duplicates: u64,
    /// Reads served and compared.
    pub reads: u64,
    pub time_lookups: u64,
    /// Epochs, cuts and log starts that were answered.
    pub commands: u64,
    pub drops: u64,
    pub log_start_moves: u64,
    pub fences: u64,
    pub starts: u64,
    pub stops: u64,
    pub kills: u64,
    pub power_cuts: u64,
    pub crashes_in_recovery: u64,
    pub failed_starts: u64,
    /// Starts with another number of shards than the one before.
    pub reshards: u64,
    /// Faults that fired.
    pub faults: BTreeMap<String, u64>,
    /// Operations on the disk that could have been crashed at.
    pub boundaries: u64,
    /// The same at the end of the script.
    pub script_boundaries: u64,
    pub simulated_ns: u64,
    /// Equal for equal runs.
    pub trace: u64,
}

impl Summary {
    fn new(seed: u64, profile: Profile) -> Summary {
        Summary {
            seed,
            profile,
            appended: 0,
            refused: 0,
            duplicates: 0,
            reads: 0,
            time_lookups: 0,
            commands: 0,
            drops: 0,
            log_start_moves: 0,
            fences: 0,
            starts: 0,
            stops: 0,
            kills: 0,
            power_cuts: 0,
            crashes_in_recovery: 0,
            failed_starts: 0,
            reshards: 0,
            faults: BTreeMap::new(),
            boundaries: 0,
            script_boundaries: 0,
            simulated_ns: 0,
            trace: 0,
        }
    }

    fn count(&mut self, kind: Crash) {
        match kind {
            Crash::Kill => self.kills += 1,
            Crash::Power => self.power_cuts += 1,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {} {}: {} appended, {} refused, {} duplicates, {} reads, {} lookups, {} commands, {} drops, \
             {} starts, {} kills, {} power cuts, {} crashes in recovery, {} failed starts, {} reshards, {} fences, {} faults, \
             {} boundaries, {:.1} s, trace {:016x}",
            self.seed,
            self.profile,
            self.appended,
            self.refused,
            self.duplicates,
            self.reads,
            self.time_lookups,
            self.commands,
            self.drops,
            self.starts,
            self.kills,
            self.power_cuts,
            self.crashes_in_recovery,
            self.failed_starts,
            self.reshards,
            self.fences,
            self.faults.values().sum::<u64>(),
            self.boundaries,
            self.simulated_ns as f64 / 1e9,
            self.trace
        )
    }
}

thread_local! {
    /// Where the run on this thread panicked; `None` outside of a run.
    static PANICKED_AT: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs one plan. A panic, ours or the disk's, is a violation too.
pub fn run(plan: &Plan) -> Result<Summary, Violation> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |info| {
            let place = info.location().map(ToString::to_string);
            let quiet =
                PANICKED_AT.with_borrow_mut(|at| at.as_mut().map(|at| *at = place.unwrap_or_default()));
            if quiet.is_none() {
                usual(info);
            }
        }));
    });
    PANICKED_AT.set(Some(String::new()));
    let run = || Runner::new(plan.clone()).and_then(Runner::run);
    let result = catch_unwind(AssertUnwindSafe(run));
    let place = PANICKED_AT.take().unwrap_or_default();
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("without a message");
        Err(Violation(format!("panic at {place}: {text}")))
    })
}

/// The command that replays a plan.
#[must_use]
pub fn replay_command(plan: &Plan) -> String {
    let Plan {
        seed, profile, ops, ..
    } = plan;
    let run = "cargo run -p ringfence-tests --bin sim --";
    #[cfg(feature = "canary")]
    let run = &plan.canary.map_or(run.to_owned(), |canary| {
        format!("cargo run -p ringfence-tests --features canary --bin sim -- --canary {canary}")
    });
    match (plan.script, plan.crash_at) {
        (None, _) => format!("{run} --seed {seed} --profile {profile} --ops {ops}"),
        (Some(script), crash) => {
            let mut command = format!("{run} --script {script} --seed {seed}");
            if let Some((at, kind)) = crash {
                let kind = if kind == Crash::Kill { "kill" } else { "power-cut" };
                command += &format!(" --{kind}-at {at}");
            }
            if let Some(after) = plan.then_after {
                command += &format!(" --then-after {after}");
            }
            command
        }
    }
}
