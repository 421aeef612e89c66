//! Tests of the tests: the simulator must notice each deliberate bug of the store, and nothing without it.
//!
//! `cargo test -p ringfence-tests --features canary --test canaries -- --nocapture` prints what caught what.

use ringfence_engine::canary::Canary;
use ringfence_engine::io::sim::Crash;
use ringfence_tests::sim::{Plan, Script, replay_command, run};

/// Where a canary is looked for.
struct Hunt {
    /// The timeline that its rule answers.
    script: Script,
    /// How the script ends at each of its boundaries; with none it only plays as it is.
    crashes: &'static [Crash],
    /// Second crashes, so many boundaries after the next start.
    then_after: &'static [u64],
}

const POWER: &[Crash] = &[Crash::Power];
const KILL: &[Crash] = &[Crash::Kill];

fn hunt(canary: Canary) -> Hunt {
    let (script, crashes, then_after): (_, _, &[u64]) = match canary {
        Canary::AckBeforeSync => (Script::Append, POWER, &[]),
        Canary::NoIncarnation => (Script::TwoLives, &[], &[]),
        Canary::NoNewTerm => (Script::Frames, POWER, &[1, 2, 3]),
        Canary::CheckpointBeforeSync => (Script::Lap, POWER, &[]),
        Canary::FreedBelowNewer => (Script::RottenSnapshot, &[], &[]),
        Canary::SmallGrain => (Script::LargeBlocks, POWER, &[]),
        Canary::TruncateWithoutPrefix => (Script::Truncate, POWER, &[]),
        Canary::DuplicateBeforeDurable => (Script::Retry, POWER, &[]),
        Canary::DropByName => (Script::Drop, POWER, &[]),
        Canary::NoMark => (Script::RottenFrame, POWER, &[]),
        Canary::NoDirectorySync => (Script::Append, POWER, &[]),
        Canary::TrustedCache => (Script::Append, KILL, &[]),
        Canary::UnnumberedSnapshot => (Script::Snapshots, POWER, &[]),
    };
    Hunt {
        script,
        crashes,
        then_after,
    }
}

impl Hunt {
    /// The script as it is, then crashed at each boundary.
    fn plans(&self) -> Vec<Plan> {
        let whole = Plan::scripted(self.script, None);
        let boundaries = passes(&whole).script_boundaries;
        let crashes = self
            .crashes
            .iter()
            .map(|kind| (1..=boundaries).map(|at| (at, *kind)));
        let crashed = crashes
            .flatten()
            .map(|crash| Plan::scripted(self.script, Some(crash)));
        let crashed: Vec<Plan> = crashed.collect();
        let twice = self.then_after.iter().flat_map(|after| {
            crashed.iter().map(|plan| Plan {
                then_after: Some(*after),
                ..plan.clone()
            })
        });
        let all = std::iter::once(whole).chain(crashed.clone()).chain(twice);
        all.collect()
    }
}

fn passes(plan: &Plan) -> ringfence_tests::sim::Summary {
    match run(plan) {
        Ok(summary) => summary,
        Err(violation) => panic!("{violation}\nreplay: {}", replay_command(plan)),
    }
}

/// Which run of how many found the canary, and what it saw. Runs before it, and that one, pass without the canary.
fn caught(canary: Canary) -> Option<String> {
    let Hunt { script, .. } = hunt(canary);
    let plans = hunt(canary).plans();
    for (index, plan) in plans.iter().enumerate() {
        passes(plan);
        let broken = Plan {
            canary: Some(canary),
            ..plan.clone()
        };
        if let Err(violation) = run(&broken) {
            let (run, all) = (index + 1, plans.len());
            let replay = replay_command(&broken);
            return Some(format!(
                "{canary}: {script}, run {run} of {all}: {violation:.160}\n    {replay}"
            ));
        }
    }
    None
}

#[test]
fn every_canary_is_caught() {
    let mut missed = Vec::new();
    for canary in Canary::ALL {
        match caught(canary) {
            Some(how) => println!("{how}"),
            None => missed.push(canary),
        }
    }
    assert!(missed.is_empty(), "nothing noticed {missed:?}");
}
