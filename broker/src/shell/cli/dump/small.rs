//! Files that are read whole: identities, indexes, epoch checkpoints, producer snapshots, checkpoints.

use std::fs;
use std::path::Path;

use ringfence_engine::config::StoreConfig;
use ringfence_engine::epochs::decode_checkpoint;
use ringfence_engine::index::{self, SegmentKey};
use ringfence_engine::limits::BLOCK;
use ringfence_engine::meta::{JournalSet, NodeMeta, PartitionMeta};
use ringfence_engine::producers::decode_file;
use ringfence_engine::snapshot::{Entry, SnapshotHeader, decode_body};
use ringfence_engine::types::{Offset, ShardId};
use serde_json::json;

use super::{Report, Trouble, partition_of};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn node_meta(report: &mut Report, path: &Path) -> Result<(), Trouble> {
    match NodeMeta::decode(&fs::read(path)?) {
        Ok(meta) => report.item(
            "node",
            vec![
                ("cluster", json!(hex(&meta.cluster_id))),
                ("node", json!(meta.node_id)),
                ("disk", json!(hex(&meta.disk_id))),
            ],
        )?,
        Err(error) => report.problem(error)?,
    }
    Ok(())
}

pub(super) fn journal_set(report: &mut Report, path: &Path) -> Result<(), Trouble> {
    match JournalSet::decode(&fs::read(path)?) {
        Ok(set) => report.item(
            "journals",
            vec![
                ("node", json!(set.node_id)),
                ("generation", json!(set.generation)),
                ("shards", json!(set.shards)),
                ("term", json!(set.term.0)),
            ],
        )?,
        Err(error) => report.problem(error)?,
    }
    Ok(())
}

pub(super) fn partition_meta(report: &mut Report, path: &Path) -> Result<(), Trouble> {
    match PartitionMeta::decode(&fs::read(path)?) {
        Ok(meta) => report.item(
            "partition",
            vec![
                ("topic", json!(meta.topic_name)),
                ("topic_id", json!(meta.partition.topic.to_string())),
                ("partition", json!(meta.partition.index)),
                ("node", json!(meta.node_id)),
            ],
        )?,
        Err(error) => report.problem(error)?,
    }
    Ok(())
}

const NO_PARTITION: &str = "its directory is not named after a partition and holds no partition.meta, so that its \
                            checksums cannot be checked";

pub(super) fn epochs(report: &mut Report, path: &Path) -> Result<(), Trouble> {
    let Some(partition) = partition_of(path) else {
        return Ok(report.problem(NO_PARTITION)?);
    };
    let read = decode_checkpoint(partition, &fs::read(path)?);
    for entry in &read.entries {
        report.item(
            "epoch",
            vec![
                ("epoch", json!(entry.epoch.0)),
                ("start_offset", json!(entry.start.0)),
            ],
        )?;
    }
    if read.rewrite {
        report.problem(format!(
            "nothing usable behind the first {} entries",
            read.entries.len()
        ))?;
    }
    Ok(())
}

pub(super) fn producers(report: &mut Report, path: &Path) -> Result<(), Trouble> {
    let Some(partition) = partition_of(path) else {
        return Ok(report.problem(NO_PARTITION)?);
    };
    let (end, table) = match decode_file(partition, &fs::read(path)?, usize::MAX) {
        Ok(read) => read,
        Err(error) => return Ok(report.problem(error)?),
    };
    report.item(
        "producers",
        vec![("log_end", json!(end.0)), ("count", json!(table.len()))],
    )?;
    for (id, producer) in table.iter() {
        for batch in producer.batches() {
            report.item(
                "batch",
                vec![
                    ("producer_id", json!(id)),
                    ("first_sequence", json!(batch.first_sequence)),
                    ("last_sequence", json!(batch.last_sequence)),
                    ("base_offset", json!(batch.base.0)),
                    ("next_offset", json!(batch.end.0)),
                ],
            )?;
        }
    }
    Ok(())
}

pub(super) fn index(report: &mut Report, path: &Path, base: Offset) -> Result<(), Trouble> {
    let Some(partition) = partition_of(path) else {
        return Ok(report.problem(NO_PARTITION)?);
    };
    let read = index::decode(SegmentKey { partition, base }, &fs::read(path)?);
    for interval in read.index.iter() {
        report.item(
            "interval",
            vec![
                ("pos", json!(interval.pos.0)),
                ("end", json!(interval.end.0)),
                ("first_offset", json!(interval.first.0)),
                ("next_offset", json!(interval.next.0)),
                ("epoch", json!(interval.epoch.0)),
                ("max_timestamp", json!(interval.max_timestamp)),
                ("crc", json!(format!("{:08x}", interval.crc))),
            ],
        )?;
    }
    if let Some(seal) = read.seal {
        report.item(
            "seal",
            vec![
                ("end", json!(seal.end.0)),
                ("next_offset", json!(seal.next.0)),
                ("max_timestamp", json!(seal.max_timestamp)),
                ("intervals", json!(seal.intervals)),
            ],
        )?;
    }
    if read.rewrite {
        report.problem(format!(
            "nothing usable behind interval {}; the broker makes it again from the segment",
            read.index.len()
        ))?;
    }
    Ok(())
}

/// Of the two snapshots of a shard one may be half written; damage is when neither can be used.
pub(super) fn snapshot(report: &mut Report, path: &Path) -> Result<(), Trouble> {
    match read_snapshot(path)? {
        Snapshot::Unused => report.item("unused", vec![])?,
        Snapshot::Good(header, entries) => show(report, &header, &entries)?,
        Snapshot::Bad(cause) => {
            let sibling = match path.file_name().and_then(|name| name.to_str()) {
                Some("checkpoint-a") => path.with_file_name("checkpoint-b"),
                _ => path.with_file_name("checkpoint-a"),
            };
            if matches!(read_snapshot(&sibling), Ok(Snapshot::Good(..))) {
                report.item("being written, or torn", vec![("cause", json!(cause))])?;
            } else {
                report.problem(format!("{cause}, and its twin cannot be used either"))?;
            }
        }
    }
    Ok(())
}

enum Snapshot {
    Unused,
    Good(SnapshotHeader, Vec<Entry>),
    Bad(String),
}

fn read_snapshot(path: &Path) -> std::io::Result<Snapshot> {
    let bytes = fs::read(path)?;
    if bytes.iter().take(BLOCK).all(|byte| *byte == 0) {
        return Ok(Snapshot::Unused);
    }
    let header = match SnapshotHeader::decode(&bytes, bytes.len() as u64) {
        Ok(header) => header,
        Err(error) => return Ok(Snapshot::Bad(error.to_string())),
    };
    // The header's check made sure that the body lies within the file.
    let body = &bytes[BLOCK..][..usize::try_from(header.body_bytes).unwrap_or(0)];
    let limits = StoreConfig {
        epoch_entries: usize::MAX,
        producers: usize::MAX,
        ..StoreConfig::new(header.node, ShardId(header.shard))
    };
    Ok(match decode_body(&header, body, &limits) {
        Ok(entries) => Snapshot::Good(header, entries),
        Err(error) => Snapshot::Bad(error.to_string()),
    })
}

fn show(report: &mut Report, header: &SnapshotHeader, entries: &[Entry]) -> Result<(), Trouble> {
    report.item(
        "header",
        vec![
            ("node", json!(header.node)),
            ("generation", json!(header.generation)),
            ("shard", json!(header.shard)),
            ("term", json!(header.term.0)),
            ("number", json!(header.number)),
            ("lsn", json!(header.lsn.0)),
            ("partitions", json!(header.count)),
        ],
    )?;
    for entry in entries {
        let last = entry.segments.last();
        report.item(
            "partition",
            vec![
                ("partition", json!(entry.id.to_string())),
                ("applied_lsn", json!(entry.applied.0)),
                ("log_start", json!(entry.log_start.0)),
                ("high_watermark", json!(entry.high_watermark.0)),
                ("log_end", json!(last.map(|segment| segment.next.0))),
                ("segments", json!(entry.segments.len())),
                ("active_segment", json!(last.map(|segment| segment.base.0))),
                ("active_end", json!(last.map(|segment| segment.end.0))),
                ("tail_bytes", json!(last.map(|segment| segment.tail.len()))),
                ("epochs", json!(entry.epochs.len())),
                ("producers", json!(entry.producers.len())),
                ("damaged_ranges", json!(entry.damage.len())),
            ],
        )?;
    }
    Ok(())
}
