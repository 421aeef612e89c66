//! Runs seeds of the storage simulator; see `tests/README.md`.

use clap::Parser;
use ringfence_engine::io::sim::Crash;
use ringfence_tests::sim::{Plan, Profile, Script, replay_command, run};

/// Runs the store on a simulated disk and checks it against a model.
#[derive(Parser)]
struct Args {
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// What may go wrong: calm, enospc, eio, flaky or rot; all of them when not given.
    #[arg(long)]
    profile: Option<Profile>,
    /// How many seeds to run, counting up.
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// Workload steps of each run.
    #[arg(long, default_value_t = 150)]
    ops: u64,
    /// Plays a fixed workload instead of a random one; without a boundary, it is crashed at each.
    #[arg(long)]
    script: Option<Script>,
    /// The boundary at which the process of a script is killed.
    #[arg(long, requires = "script", conflicts_with = "power_cut_at")]
    kill_at: Option<u64>,
    /// The boundary at which the power of a script is cut.
    #[arg(long, requires = "script")]
    power_cut_at: Option<u64>,
    /// Prints only violations and the last line.
    #[arg(long)]
    quiet: bool,
}

impl Args {
    fn plans(&self) -> Vec<Plan> {
        let Some(script) = self.script else {
            let profiles = self
                .profile
                .map_or(Profile::ALL.to_vec(), |profile| vec![profile]);
            let seeds = self.seed..self.seed.saturating_add(self.count);
            return seeds
                .flat_map(|seed| profiles.iter().map(move |p| Plan::random(seed, *p, self.ops)))
                .collect();
        };
        let one = [(self.kill_at, Crash::Kill), (self.power_cut_at, Crash::Power)];
        let one = one.into_iter().find_map(|(at, kind)| Some((at?, kind)));
        if one.is_some() {
            return vec![Plan::scripted(script, one)];
        }
        let whole = Plan::scripted(script, None);
        let boundaries = run(&whole).map_or(0, |summary| summary.script_boundaries);
        let crashes = (1..=boundaries).flat_map(|at| [(at, Crash::Kill), (at, Crash::Power)]);
        let crashed = crashes.map(|crash| Plan::scripted(script, Some(crash)));
        std::iter::once(whole).chain(crashed).collect()
    }
}

fn main() {
    let args = Args::parse();
    // RUST_LOG=error shows what the engine logs on the way, RUST_LOG=trace every operation on the disk.
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .without_time()
        .with_ansi(false)
        .with_target(false)
        .with_writer(std::io::stderr)
        .init();
    let plans = args.plans();
    let mut violations = 0u64;
    for plan in &plans {
        match run(plan) {
            Ok(summary) if args.quiet => drop(summary),
            Ok(summary) => println!("{summary}"),
            Err(violation) => {
                violations += 1;
                println!("VIOLATION: {violation}");
                println!("    {}", replay_command(plan));
            }
        }
    }
    println!("{} runs, {violations} violations", plans.len());
    std::process::exit(i32::from(violations > 0));
}
