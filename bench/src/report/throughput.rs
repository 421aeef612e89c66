//! Four producers at full speed, and one at a low rate.

use ringfence_broker::native::Acks;

use super::Plan;
use crate::batches::batch;
use crate::device::Device;
use crate::figure::{Figure, Target};
use crate::load::generator::Load;
use crate::load::schedule::{Length, Pace};
use crate::loopback::{self, Trips};
use crate::subject::{Cost, Outcome, Subject, broker_core, load_core, pin};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Journal of the broker's shard.
const JOURNAL: u64 = GIB;

/// Share of accepted bytes that were written back, and laps of the journal, in a load's time.
pub(super) fn sustained(cost: &Cost, journal: u64) -> String {
    let of = |name: &str| cost.grown.get(name).copied().unwrap_or(f64::NAN);
    format!(
        "{:.1} laps of the journal, {:.3} of the accepted bytes written back at the last acknowledgement, {} \
         checkpoints",
        of("ringfence_journal_bytes_total") / journal as f64,
        of("ringfence_written_back_bytes_total") / of("ringfence_produced_bytes_total"),
        of("ringfence_checkpoints_total")
    )
}

/// 4 producers, 1 KiB records in 1 MiB batches: throughput by the device's, and CPU.
pub(super) fn saturated(plan: &Plan) -> Outcome<Vec<Figure>> {
    let mut figures = Vec::new();
    for durability in ["sync", "memory"] {
        let stream = || -> Outcome<f64> {
            pin(broker_core())?;
            Ok(Device::open(plan.dir(), 512 * MIB)?
                .stream(512 << 10, 8, 2 * GIB)?
                .mb_per_s)
        };
        let before = stream()?;
        let cost = saturate(plan, durability)?;
        let device = (before + stream()?) / 2.0;
        figures.extend(judge(&cost, device, durability));
    }
    Ok(figures)
}

fn saturate(plan: &Plan, durability: &str) -> Outcome<Cost> {
    let journal = JOURNAL.to_string();
    let subject = Subject::start(plan.dir(), &[("log.journal.bytes", &journal)])?;
    let targets = subject.topic("load", 16, &[("durability", durability)])?;
    let mut load = Load {
        address: subject.broker.setup.native,
        targets,
        producers: 4,
        pace: Pace::Window(4),
        length: Length::Bytes(plan.scaled(2 * JOURNAL)),
        acks: Acks::All,
        batch: batch(MIB as usize, 1024, 0),
        timeline: false,
    };
    // The first laps touch memory and make files; sustained is what comes after them.
    subject.measure(&load)?;
    load.length = Length::Bytes(plan.scaled(10 * JOURNAL));
    subject.measure(&load)
}

fn judge(cost: &Cost, device: f64, durability: &str) -> [Figure; 2] {
    let name = format!("load: 4 producers, 1 KiB records in 1 MiB batches, durability={durability}");
    let target = |target| (durability == "sync").then_some(target);
    let throughput = Figure {
        name: format!("{name}: sustained throughput"),
        measured: format!("{:.0} MB/s", cost.sent.mb_per_s()),
        reference: format!("device stream {device:.0} MB/s (512 KiB, 8 in flight)"),
        value: cost.sent.mb_per_s() / device,
        target: target(Target::AtLeast(0.40)),
        notes: vec![
            format!("acknowledgements: {}", cost.sent.latencies.percentiles()),
            sustained(cost, JOURNAL),
            "after 2 laps that do not count".into(),
            format!("{} batches refused as busy and sent again", cost.sent.retries),
            format!("largest resident memory of the broker {} MiB", cost.peak / MIB),
        ],
    };
    let cpu = Figure {
        name: format!("{name}: CPU of the broker"),
        measured: format!(
            "{:.2} s for {:.1} GB",
            cost.cpu.as_secs_f64(),
            cost.sent.bytes as f64 / 1e9
        ),
        reference: String::new(),
        value: cost.cpu_per_gb(),
        target: target(Target::AtMost(0.45)),
        notes: vec!["the value is CPU seconds per GB, user and system".into()],
    };
    [throughput, cpu]
}

/// One producer, 1 KiB at a low rate: p50 by device write plus loopback round trip, all at the same rate and size.
pub(super) fn low_rate(plan: &Plan) -> Outcome<Vec<Figure>> {
    const RATE: f64 = 200.0;
    const BYTES: usize = 1 << 10;
    // A batch of 1 KiB with its frame's header and directories fills one block of the journal.
    const FRAME: usize = 4096;
    let count = plan.scaled(6000);
    pin(broker_core())?;
    let device = Device::open(plan.dir(), 256 * MIB)?
        .paced(FRAME, RATE, count)?
        .latency;
    pin(load_core())?;
    let network = loopback::round_trips(Trips {
        request: BYTES,
        // About what an acknowledgement has.
        answer: 90,
        per_second: RATE,
        count,
        core: Some(broker_core()),
    })?;
    let subject = Subject::start(plan.dir(), &[])?;
    let cost = subject.measure(&Load {
        address: subject.broker.setup.native,
        targets: subject.topic("slow", 1, &[])?,
        producers: 1,
        pace: Pace::PerSecond(RATE),
        length: Length::Bytes(count * BYTES as u64),
        acks: Acks::All,
        batch: batch(BYTES, BYTES, 0),
        timeline: false,
    })?;
    let own = cost.sent.latencies.percentiles();
    Ok(vec![Figure {
        name: format!("load: one producer, 1 KiB, {RATE} per second: p50 of a durable ack"),
        measured: own.to_string(),
        reference: format!(
            "device write {:.0} us + loopback {:.0} us, p50 each",
            device.p50_us, network.p50_us
        ),
        value: own.p50_us / (device.p50_us + network.p50_us),
        target: Some(Target::AtMost(1.3)),
        notes: vec![
            format!("device, {FRAME} B at the same rate: {device}"),
            format!("loopback, {BYTES} B at the same rate: {network}"),
        ],
    }])
}
