//! Append, truncate, roll, retain, delete, crash, reopen: the store against a plain model on a simulated disk.
//!
//! `RINGFENCE_SIM_SEED` and `RINGFENCE_SIM_RUNS` widen the search; a failure prints the command that replays it.

use ringfence_engine::io::sim::Crash;
use ringfence_tests::sim::{Plan, Profile, Script, Summary, replay_command, run};

const STEPS: u64 = 120;

fn number_from(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

fn check(plan: &Plan) -> Summary {
    match run(plan) {
        Ok(summary) => summary,
        Err(violation) => panic!("{violation}\nreplay: {}", replay_command(plan)),
    }
}

/// Runs many seeds and adds up what happened.
fn check_profile(profile: Profile) -> Vec<Summary> {
    let first = number_from("RINGFENCE_SIM_SEED", 1);
    let runs = number_from("RINGFENCE_SIM_RUNS", 60);
    (first..first + runs)
        .map(|seed| check(&Plan::random(seed, profile, STEPS)))
        .collect()
}

fn total(summaries: &[Summary], count: impl Fn(&Summary) -> u64) -> u64 {
    summaries.iter().map(count).sum()
}

/// A workload that exercises little proves little.
fn assert_work_was_done(summaries: &[Summary]) {
    let runs = summaries.len() as u64;
    assert!(total(summaries, |s| s.appended) > 40 * runs);
    assert!(total(summaries, |s| s.reads) > 5 * runs);
    assert!(total(summaries, |s| s.kills) > runs / 2);
    assert!(total(summaries, |s| s.power_cuts) > runs);
    assert!(total(summaries, |s| s.crashes_in_recovery) > runs / 4);
    assert!(total(summaries, |s| s.duplicates) > runs / 2);
    assert!(total(summaries, |s| s.drops) > runs / 4);
    assert!(total(summaries, |s| s.log_start_moves) > runs / 4);
}

#[test]
fn nothing_acknowledged_is_lost_by_crashes() {
    assert_work_was_done(&check_profile(Profile::Calm));
}

#[test]
fn a_full_disk_refuses_produce_and_nothing_else() {
    let summaries = check_profile(Profile::Enospc);
    assert_work_was_done(&summaries);
    assert!(total(&summaries, |s| s.refused) > summaries.len() as u64 / 2);
}

#[test]
fn failed_operations_fence_and_lose_nothing() {
    let summaries = check_profile(Profile::Eio);
    assert!(total(&summaries, |s| s.faults.values().sum()) > summaries.len() as u64);
    assert!(total(&summaries, |s| s.fences) > 0);
}

#[test]
fn all_honest_failures_together_lose_nothing() {
    let summaries = check_profile(Profile::Flaky);
    assert!(total(&summaries, |s| s.faults.values().sum()) > summaries.len() as u64);
}

#[test]
fn rotten_bytes_are_never_served() {
    let summaries = check_profile(Profile::Rot);
    assert!(total(&summaries, |s| s.faults.values().sum()) > summaries.len() as u64 / 2);
}

/// Crashes a script at every `stride`-th boundary, by kill and by power cut.
fn crash_everywhere(script: Script, stride: usize) {
    let whole = check(&Plan::scripted(script, None));
    assert!(whole.appended > 0 && whole.script_boundaries > 50, "{whole}");
    for at in (1..=whole.script_boundaries).step_by(stride) {
        for kind in [Crash::Kill, Crash::Power] {
            let crashed = check(&Plan::scripted(script, Some((at, kind))));
            assert!(
                crashed.kills + crashed.power_cuts + crashed.crashes_in_recovery > 1,
                "{crashed}"
            );
        }
    }
}

#[test]
fn a_crash_at_every_boundary_of_appends() {
    crash_everywhere(Script::Append, 1);
}

#[test]
fn a_crash_at_every_boundary_of_rolls() {
    crash_everywhere(Script::Roll, 1);
}

#[test]
fn a_crash_at_every_boundary_of_truncations() {
    crash_everywhere(Script::Truncate, 1);
}

#[test]
fn a_crash_at_every_boundary_of_retention() {
    crash_everywhere(Script::Retain, 1);
}

#[test]
fn a_crash_at_every_boundary_of_a_drop() {
    crash_everywhere(Script::Drop, 1);
}

#[test]
fn a_crash_at_every_boundary_of_a_clean_stop() {
    crash_everywhere(Script::Stop, 1);
}

/// Long, so only some of the boundaries; the random runs visit the others.
#[test]
fn a_crash_at_boundaries_of_a_journal_lap() {
    crash_everywhere(Script::Lap, 5);
}

#[test]
fn a_crash_at_every_boundary_of_small_frames() {
    crash_everywhere(Script::Frames, 1);
}

#[test]
fn a_crash_at_every_boundary_on_a_disk_with_large_blocks() {
    crash_everywhere(Script::LargeBlocks, 1);
}

#[test]
fn a_crash_at_every_boundary_of_retries() {
    crash_everywhere(Script::Retry, 1);
}

#[test]
fn a_crash_at_every_boundary_of_checkpoints() {
    crash_everywhere(Script::Snapshots, 1);
}

#[test]
fn a_crash_at_every_boundary_around_a_rotten_frame() {
    crash_everywhere(Script::RottenFrame, 1);
}

#[test]
fn a_crash_at_boundaries_around_a_rotten_snapshot() {
    crash_everywhere(Script::RottenSnapshot, 29);
}

#[test]
fn a_crash_at_boundaries_of_two_lives_of_one_address() {
    crash_everywhere(Script::TwoLives, 7);
}

#[test]
fn one_rotten_bit_of_the_journal_is_never_a_silent_loss() {
    let summaries = check_profile(Profile::Decay);
    assert!(total(&summaries, |s| s.faults.values().sum()) > summaries.len() as u64 / 2);
    assert!(total(&summaries, |s| s.reshards) > summaries.len() as u64 / 4);
}

#[test]
fn equal_seeds_give_equal_runs() {
    for profile in Profile::ALL {
        let plan = Plan::random(4711, profile, STEPS);
        assert_eq!(check(&plan), check(&plan), "{}", replay_command(&plan));
    }
    let traces = [1, 2].map(|seed| check(&Plan::random(seed, Profile::Calm, STEPS)).trace);
    assert_ne!(traces[0], traces[1]);
}

/// One line of `regressions.txt`.
fn recorded(line: &str) -> Plan {
    let words: Vec<&str> = line.split_whitespace().collect();
    let plan = match words[..] {
        [script, "kill", at, ..] => script.parse().map(|s| Plan::scripted(s, crash(at, Crash::Kill))),
        [script, "power", at, ..] => script.parse().map(|s| Plan::scripted(s, crash(at, Crash::Power))),
        [seed, profile, steps, ..] => profile
            .parse()
            .map(|p| Plan::random(seed.parse().expect("a seed"), p, steps.parse().expect("steps"))),
        _ => panic!("a line of regressions.txt: {line}"),
    };
    plan.unwrap_or_else(|error| panic!("{error}: {line}"))
}

fn crash(at: &str, kind: Crash) -> Option<(u64, Crash)> {
    Some((at.parse().expect("a boundary"), kind))
}

#[test]
fn recorded_regressions_stay_fixed() {
    let table = include_str!("../regressions.txt");
    let lines = table
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    for plan in lines.map(recorded) {
        check(&plan);
    }
}
