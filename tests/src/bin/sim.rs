//! Runs seeds of the storage simulator; see `tests/README.md`.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use ringfence_engine::io::sim::Crash;
use ringfence_tests::sim::{Plan, Profile, Script, Summary, Violation, replay_command, run};

/// Runs the store on a simulated disk and checks it against a model.
#[derive(Parser)]
struct Args {
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// What may go wrong: calm, enospc, eio, flaky, rot or decay; all of them when not given.
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
    /// A second crash of a script, so many boundaries after the start that follows the first.
    #[arg(long, requires = "script")]
    then_after: Option<u64>,
    /// Prints only violations and the last line.
    #[arg(long)]
    quiet: bool,
    /// Runs that go on at the same time.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Counts seeds up for so many minutes; `--count` is then not looked at.
    #[arg(long, conflicts_with = "script")]
    minutes: Option<u64>,
    /// Seeds that are known to fail, lines of `seed profile steps`: they are run and told, and are no violations.
    #[arg(long)]
    open: Option<std::path::PathBuf>,
    /// Prints at the end what was simulated: time, crashes, faults by kind.
    #[arg(long)]
    totals: bool,
    /// Switches a deliberate bug of the store on.
    #[cfg(feature = "canary")]
    #[arg(long)]
    canary: Option<ringfence_engine::canary::Canary>,
}

impl Args {
    /// The plans of a script, in order.
    fn scripted(&self, script: Script) -> Vec<Plan> {
        let plan = |crash| Plan {
            seed: self.seed,
            then_after: self.then_after,
            ..Plan::scripted(script, crash)
        };
        let one = [(self.kill_at, Crash::Kill), (self.power_cut_at, Crash::Power)];
        if let Some((at, kind)) = one.into_iter().find_map(|(at, kind)| Some((at?, kind))) {
            return vec![plan(Some((at, kind)))];
        }
        let whole = Plan {
            then_after: None,
            ..plan(None)
        };
        let boundaries = run(&whole).map_or(0, |summary| summary.script_boundaries);
        let crashes = (1..=boundaries).flat_map(|at| [(at, Crash::Kill), (at, Crash::Power)]);
        let crashed = crashes.map(|crash| plan(Some(crash)));
        std::iter::once(whole).chain(crashed).collect()
    }
}

/// Which plans are run: those of a script, or seeds counted up.
enum Plans {
    Listed(Vec<Plan>),
    Seeds {
        first: u64,
        profiles: Vec<Profile>,
        ops: u64,
        runs: usize,
        until: Option<Instant>,
    },
}

impl Plans {
    fn of(args: &Args) -> Plans {
        if let Some(script) = args.script {
            return Plans::Listed(args.scripted(script));
        }
        let profiles = args
            .profile
            .map_or(Profile::ALL.to_vec(), |profile| vec![profile]);
        let until = args
            .minutes
            .map(|minutes| Instant::now() + Duration::from_secs(60 * minutes));
        let runs = match until {
            Some(_) => usize::MAX,
            None => (args.count as usize).saturating_mul(profiles.len()),
        };
        Plans::Seeds {
            first: args.seed,
            profiles,
            ops: args.ops,
            runs,
            until,
        }
    }

    fn get(&self, index: usize) -> Option<Plan> {
        match self {
            Plans::Listed(plans) => plans.get(index).cloned(),
            Plans::Seeds {
                first,
                profiles,
                ops,
                runs,
                until,
            } => {
                let over = index >= *runs || until.is_some_and(|until| Instant::now() >= until);
                let seed = first.saturating_add((index / profiles.len()) as u64);
                (!over).then(|| Plan::random(seed, profiles[index % profiles.len()], *ops))
            }
        }
    }
}

/// The seeds of a file of open ones, as their lines begin.
fn open_seeds(args: &Args) -> Vec<String> {
    let Some(path) = &args.open else {
        return Vec::new();
    };
    let text = std::fs::read_to_string(path);
    let text = text.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let words = |line: &str| -> Vec<String> { line.split_whitespace().take(3).map(str::to_owned).collect() };
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| words(line).join(" ")).collect()
}

/// Sums over all runs.
#[derive(Default)]
struct Totals {
    /// Plans whose violation is known.
    known: Vec<String>,
    runs: u64,
    violations: u64,
    simulated_ns: u64,
    appended: u64,
    starts: u64,
    kills: u64,
    power_cuts: u64,
    crashes_in_recovery: u64,
    reshards: u64,
    faults: BTreeMap<String, u64>,
    shown: Option<Instant>,
}

impl Totals {
    /// Takes in a run; prints it when it failed or when `each` is set.
    fn add(&mut self, plan: &Plan, result: &Result<Summary, Violation>, each: bool) {
        self.runs += 1;
        let name = format!("{} {} {}", plan.seed, plan.profile, plan.ops);
        let is_open = plan.script.is_none() && self.known.contains(&name);
        match result {
            Ok(_) if is_open => println!("open seed {name} passes now: take it off the list"),
            Err(violation) if is_open => println!("open seed {name}: {violation}"),
            Ok(summary) => {
                self.simulated_ns += summary.simulated_ns;
                self.appended += summary.appended;
                self.starts += summary.starts;
                self.kills += summary.kills;
                self.power_cuts += summary.power_cuts;
                self.crashes_in_recovery += summary.crashes_in_recovery;
                self.reshards += summary.reshards;
                for (what, times) in &summary.faults {
                    // Without the numbers of a fault, such as the length of a stall.
                    let kind = what.split('(').next().unwrap_or(what).to_owned();
                    *self.faults.entry(kind).or_default() += times;
                }
                if each {
                    println!("{summary}");
                }
            }
            Err(violation) => {
                self.violations += 1;
                println!("VIOLATION: {violation}");
                println!("    {}", replay_command(plan));
            }
        }
    }

    /// A line now and then for somebody who watches.
    fn show_progress(&mut self, plan: &Plan) {
        let due = self.shown.is_none_or(|at| at.elapsed() >= Duration::from_secs(1));
        if due {
            self.shown = Some(Instant::now());
            let (runs, violations) = (self.runs, self.violations);
            eprint!("\r{runs} runs, {violations} violations, seed {} ", plan.seed);
        }
    }

    fn print(&self) {
        println!(
            "{:.1} h simulated, {} batches appended, {} starts, {} kills, {} power cuts, {} crashes in recovery, \
             {} changes of the number of shards",
            self.simulated_ns as f64 / 3.6e12,
            self.appended,
            self.starts,
            self.kills,
            self.power_cuts,
            self.crashes_in_recovery,
            self.reshards
        );
        for (kind, times) in &self.faults {
            println!("{times:>10}  {kind}");
        }
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
    let plans = Plans::of(&args);
    let next = AtomicUsize::new(0);
    let totals = Mutex::new(Totals {
        known: open_seeds(&args),
        ..Totals::default()
    });
    let watched = args.quiet && std::io::stderr().is_terminal();
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                while let Some(plan) = plans.get(next.fetch_add(1, Ordering::Relaxed)) {
                    #[cfg(feature = "canary")]
                    let plan = Plan {
                        canary: args.canary,
                        ..plan
                    };
                    let result = run(&plan);
                    let mut totals = totals.lock().expect("a run's panic is a violation, not ours");
                    totals.add(&plan, &result, !args.quiet);
                    if watched {
                        totals.show_progress(&plan);
                    }
                }
            });
        }
    });
    let totals = totals.into_inner().expect("no thread is left that could panic");
    if watched {
        eprintln!();
    }
    if args.totals {
        totals.print();
    }
    println!("{} runs, {} violations", totals.runs, totals.violations);
    std::process::exit(i32::from(totals.violations > 0));
}
