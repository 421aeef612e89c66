//! What a checkpoint and retention do to the tail of the latencies.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ringfence_broker::native::{Acks, AlterTopic, Request, Response, Setting};
use ringfence_tests::native::Native;

use super::Plan;
use super::partitions::MANY;
use crate::batches::batch;
use crate::figure::{Figure, Target};
use crate::latency::{Latencies, Percentiles};
use crate::load::generator::{Ack, Load, Sent};
use crate::load::schedule::{Length, Pace};
use crate::subject::{Outcome, Subject};

type Metrics = BTreeMap<String, f64>;

/// How often the sampler looks at the broker.
const SAMPLE: Duration = Duration::from_millis(20);
const RATE: f64 = 2000.0;
const BATCH: usize = 4 << 10;

/// Both figures.
pub(super) fn figures(plan: &Plan) -> Outcome<Vec<Figure>> {
    Ok(vec![checkpoint(plan)?, retention(plan)?])
}

/// An open-loop load on 10,000 partitions; acknowledgements are split by whether a checkpoint was running.
fn checkpoint(plan: &Plan) -> Outcome<Figure> {
    // A small journal has a checkpoint every few seconds at this rate.
    let subject = Subject::start(plan.dir(), &[("log.journal.bytes", "134217728")])?;
    let targets = subject.topic("steady", MANY, &[])?;
    let load = steady(&subject, targets, plan.scaled(60));
    // Directories and files are made when a partition is first written: not what is measured here.
    subject.measure(&Load {
        pace: Pace::Window(16),
        length: Length::Bytes(plan.scaled(256 << 20)),
        timeline: false,
        ..load.clone()
    })?;
    // A checkpoint begins with slices of capturing and ends with its count; in between it drains, syncs and writes.
    let count = |metrics: &Metrics, name: &str| metrics.get(name).copied().unwrap_or(0.0);
    let mut idle: Option<(f64, f64)> = None;
    let (sent, during) = watch(&subject, &load, move |metrics| {
        let completed = count(metrics, "ringfence_checkpoints_total");
        let slices = count(metrics, "ringfence_checkpoint_slices_total");
        let (idle_completed, idle_slices) = *idle.get_or_insert((completed, slices));
        if completed > idle_completed {
            idle = Some((completed, slices));
        }
        completed > idle_completed || slices > idle_slices
    })?;
    split("while a checkpoint runs", &sent, &during, Vec::new())
}

/// The same load on another topic while retention takes 8 GiB.
fn retention(plan: &Plan) -> Outcome<Figure> {
    let subject = Subject::start(plan.dir(), &[("file.delete.delay.ms", "0")])?;
    let bulk = subject.topic("bulk", 8, &[])?;
    let filled = plan.scaled(8 << 30);
    subject.measure(&Load {
        address: subject.broker.setup.native,
        targets: bulk,
        producers: 4,
        pace: Pace::Window(4),
        // Besides what goes, each partition keeps its active segment.
        length: Length::Bytes(filled + (8 << 30)),
        acks: Acks::All,
        batch: batch(1 << 20, 1 << 10, 0),
        timeline: false,
    })?;
    let targets = subject.topic("steady", 16, &[])?;
    let load = steady(&subject, targets, plan.scaled(60));
    let mut native = subject.connect()?;
    let start = Instant::now();
    let mut altered = false;
    let mut removed_at = f64::NAN;
    let (sent, during) = watch(&subject, &load, move |metrics| {
        let removed = metrics
            .get("ringfence_segments_removed_total")
            .copied()
            .unwrap_or(0.0);
        if !altered && start.elapsed() > Duration::from_secs(10) {
            altered = true;
            removed_at = removed;
            shorten(&mut native);
        }
        // From the new setting until the last of the eight old segments is gone.
        altered && removed < removed_at + 8.0
    })?;
    let removed = subject
        .metrics()
        .get("ringfence_segments_removed_total")
        .copied()
        .unwrap_or(0.0);
    let notes = vec![format!("{removed} segments removed")];
    split("while retention frees 8 GiB", &sent, &during, notes)
}

fn shorten(native: &mut Native) {
    let request = Request::AlterTopic(AlterTopic {
        name: "bulk".into(),
        set: vec![Setting {
            key: "retention.bytes".into(),
            value: "1".into(),
        }],
        unset: Vec::new(),
    });
    let answer = native.call(&request);
    assert!(
        matches!(answer, Ok(Response::AlterTopic)),
        "retention.bytes was not taken: {answer:?}"
    );
}

fn steady(
    subject: &Subject,
    targets: Vec<(
        ringfence_engine::types::PartitionId,
        ringfence_engine::types::ShardId,
    )>,
    seconds: u64,
) -> Load {
    Load {
        address: subject.broker.setup.native,
        targets,
        producers: 4,
        pace: Pace::PerSecond(RATE),
        length: Length::Time(Duration::from_secs(seconds)),
        acks: Acks::All,
        batch: batch(BATCH, 1 << 10, 0),
        timeline: true,
    }
}

/// Runs a load while `disturbed` is asked about the broker's metrics; the moments at which it said yes, as spans.
fn watch(
    subject: &Subject,
    load: &Load,
    mut disturbed: impl FnMut(&Metrics) -> bool + Send,
) -> Outcome<(Sent, Vec<(Instant, Instant)>)> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let mut spans: Vec<(Instant, Instant)> = Vec::new();
            let mut before = Instant::now();
            while !over.load(Ordering::Relaxed) {
                let yes = disturbed(&subject.metrics());
                let now = Instant::now();
                if yes {
                    spans.push((before, now));
                }
                before = now;
                thread::sleep(SAMPLE);
            }
            spans
        });
        let cost = subject.measure(load);
        over.store(true, Ordering::Relaxed);
        let spans = sampler.join().map_err(|_| "the sampler failed")?;
        Ok((cost?.sent, spans))
    })
}

fn split(what: &str, sent: &Sent, during: &[(Instant, Instant)], mut notes: Vec<String>) -> Outcome<Figure> {
    let (mut quiet, mut disturbed) = (Latencies::new(), Latencies::new());
    for Ack { at, latency } in &sent.timeline {
        // An acknowledgement belongs to a span when any moment of its wait does.
        let end = sent.start + *at;
        let begin = end.checked_sub(*latency).unwrap_or(sent.start);
        let hit = during.iter().any(|(from, to)| begin <= *to && end >= *from);
        if hit { &mut disturbed } else { &mut quiet }.record(*latency);
    }
    if quiet.count() == 0 || disturbed.count() == 0 {
        return Err(format!(
            "{what}: the run had no {}",
            if quiet.count() == 0 {
                "quiet part"
            } else {
                "disturbance"
            }
        )
        .into());
    }
    let (quiet, disturbed): (Percentiles, Percentiles) = (quiet.percentiles(), disturbed.percentiles());
    let seconds: f64 = during.iter().map(|(from, to)| (*to - *from).as_secs_f64()).sum();
    notes.push(format!(
        "{RATE} batches of {BATCH} B per second, disturbed for {seconds:.2} s"
    ));
    Ok(Figure {
        name: format!("p99.9 of acks {what}"),
        measured: disturbed.to_string(),
        reference: format!("undisturbed: {quiet}"),
        value: disturbed.p99_9_us / quiet.p99_9_us,
        target: Some(Target::AtMost(3.0)),
        notes,
    })
}
