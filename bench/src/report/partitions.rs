//! 10,000 partitions: under load against 16, idle, and their creation.

use std::time::Instant;

use ringfence_broker::native::Acks;

use super::Plan;
use super::throughput::sustained;
use crate::batches::batch;
use crate::figure::{Figure, Target};
use crate::load::generator::Load;
use crate::load::schedule::{Length, Pace};
use crate::subject::{Cost, Outcome, Subject};

pub(super) const MANY: u32 = 10_000;
const FEW: u32 = 16;
const PRODUCERS: usize = 64;
const JOURNAL: u64 = 512 << 20;

/// Throughput and p99 on 10,000 partitions by those on 16, for 1 KiB and 4 KiB batches.
pub(super) fn many_against_few(plan: &Plan) -> Outcome<Vec<Figure>> {
    let mut figures = Vec::new();
    for size in [1usize << 10, 4 << 10] {
        let few = run(plan, FEW, size)?;
        let many = run(plan, MANY, size)?;
        figures.extend(compare(size, &few, &many));
    }
    Ok(figures)
}

fn run(plan: &Plan, partitions: u32, size: usize) -> Outcome<Cost> {
    let subject = Subject::start(plan.dir(), &[("log.journal.bytes", &JOURNAL.to_string())])?;
    let targets = subject.topic("spread", partitions, &[])?;
    let mut load = Load {
        address: subject.broker.setup.native,
        targets,
        producers: PRODUCERS,
        pace: Pace::Window(1),
        length: Length::Bytes(plan.scaled(JOURNAL)),
        acks: Acks::All,
        batch: batch(size, size, 0),
        timeline: false,
    };
    // The first lap makes directories and files.
    subject.measure(&load)?;
    load.length = Length::Bytes(plan.scaled(5 * JOURNAL));
    subject.measure(&load)
}

fn compare(size: usize, few: &Cost, many: &Cost) -> [Figure; 2] {
    let name = format!(
        "load: {MANY} partitions, {PRODUCERS} producers, {} KiB batches",
        size >> 10
    );
    let (few_p, many_p) = (
        few.sent.latencies.percentiles(),
        many.sent.latencies.percentiles(),
    );
    let notes = |cost: &Cost| {
        vec![
            sustained(cost, JOURNAL),
            format!(
                "CPU of the broker {:.3} s per GB, {} refused as busy",
                cost.cpu_per_gb(),
                cost.sent.retries
            ),
            format!("largest resident memory {} MiB", cost.peak >> 20),
        ]
    };
    let throughput = Figure {
        name: format!("{name}: throughput"),
        measured: format!("{:.1} MB/s", many.sent.mb_per_s()),
        reference: format!("{FEW} partitions: {:.1} MB/s", few.sent.mb_per_s()),
        value: many.sent.mb_per_s() / few.sent.mb_per_s(),
        target: Some(Target::AtLeast(0.8)),
        notes: notes(many),
    };
    let p99 = Figure {
        name: format!("{name}: p99"),
        measured: many_p.to_string(),
        reference: format!("{FEW} partitions: {few_p}"),
        value: many_p.p99_us / few_p.p99_us,
        target: Some(Target::AtMost(3.0)),
        notes: notes(few),
    };
    [throughput, p99]
}

/// How long 10,000 partitions take to make, and what they take of memory when nothing happens.
pub(super) fn idle(plan: &Plan) -> Outcome<Vec<Figure>> {
    let mut subject = Subject::start(plan.dir(), &[])?;
    let start = Instant::now();
    subject.topic("idle", MANY, &[])?;
    let created = start.elapsed();
    let fresh = subject.broker.memory("VmRSS")?;
    let (ready, _) = subject.restart_cold()?;
    let again = subject.broker.memory("VmRSS")?;
    let created = Figure {
        name: format!("creation of {MANY} partitions"),
        measured: format!("{:.2} s until they take records", created.as_secs_f64()),
        reference: String::new(),
        value: created.as_secs_f64(),
        target: Some(Target::AtMost(3.0)),
        notes: vec!["the value is seconds".into()],
    };
    let resident = Figure {
        name: format!("resident memory with {MANY} idle partitions"),
        measured: format!(
            "{} MiB after creation, {} MiB after a restart",
            fresh >> 20,
            again >> 20
        ),
        reference: String::new(),
        value: fresh.max(again) as f64 / f64::from(1 << 20),
        target: Some(Target::AtMost(192.0)),
        notes: vec![format!(
            "the value is MiB; the restart took {:.0} ms",
            ready.as_secs_f64() * 1e3
        )],
    };
    Ok(vec![created, resident])
}
