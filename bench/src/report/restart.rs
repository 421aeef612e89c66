//! SIGKILL with a full journal and 10,000 dirty partitions: time until the broker is ready again.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ringfence_broker::native::Acks;

use super::Plan;
use super::partitions::MANY;
use crate::batches::batch;
use crate::figure::{Figure, Target};
use crate::load::generator::Load;
use crate::load::schedule::{Length, Pace};
use crate::subject::{Outcome, Subject, drop_caches};

const JOURNAL: u64 = 1 << 30;

/// Both figures: with both checkpoints, and with the newer one destroyed.
pub(super) fn figures(plan: &Plan) -> Outcome<Vec<Figure>> {
    let mut subject = Subject::start(plan.dir(), &[("log.journal.bytes", &JOURNAL.to_string())])?;
    let load = Load {
        address: subject.broker.setup.native,
        targets: subject.topic("dirty", MANY, &[])?,
        producers: 64,
        pace: Pace::Window(4),
        length: Length::Bytes(plan.scaled(2 * JOURNAL)),
        acks: Acks::All,
        batch: batch(8 << 10, 1 << 10, 0),
        timeline: false,
    };
    let cost = subject.measure(&load)?;
    let records = format!(
        "{:.2} GB acknowledged before the kill",
        cost.sent.bytes as f64 / 1e9
    );
    let (ready, cold) = subject.restart_cold()?;
    let first = figure("both checkpoints", ready, cold, &records);

    subject.measure(&load)?;
    subject.broker.kill();
    let destroyed = destroy_newer_checkpoint(&subject.broker.setup.data)?;
    let cold = drop_caches();
    let (ready, _) = subject.restart_cold()?;
    let name = destroyed.file_name().unwrap_or_default().display();
    let note = format!("{records}; {name} overwritten");
    let second = figure("newer checkpoint destroyed", ready, cold, &note);
    Ok(vec![first, second])
}

fn figure(what: &str, ready: Duration, cold: bool, note: &str) -> Figure {
    let caches = if cold {
        "cold page cache"
    } else {
        "page cache NOT dropped (needs root)"
    };
    Figure {
        name: format!("restart after SIGKILL, {MANY} dirty partitions, {what}"),
        measured: format!(
            "ready {:.0} ms after the start of the process",
            ready.as_secs_f64() * 1e3
        ),
        reference: String::new(),
        value: ready.as_secs_f64(),
        target: Some(Target::AtMost(2.0)),
        notes: vec![format!("the value is seconds; {caches}; {note}")],
    }
}

/// Overwrites the checkpoint written last; its path.
fn destroy_newer_checkpoint(data: &Path) -> Outcome<PathBuf> {
    let mut found: Vec<(SystemTime, PathBuf)> = Vec::new();
    for generation in fs::read_dir(data.join("journal"))? {
        for shard in fs::read_dir(generation?.path())? {
            for name in ["checkpoint-a", "checkpoint-b"] {
                let path = shard
                    .as_ref()
                    .map_err(|error| error.to_string())?
                    .path()
                    .join(name);
                if let Ok(meta) = path.metadata() {
                    found.push((meta.modified()?, path));
                }
            }
        }
    }
    let (_, newest) = found.into_iter().max().ok_or("there is no checkpoint")?;
    let file = fs::File::options().write(true).open(&newest)?;
    file.write_all_at(&vec![0xdb; 1 << 20], 0)?;
    file.sync_all()?;
    Ok(newest)
}
