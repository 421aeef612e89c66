//! Segments: batch after batch, from position 0 to the first that is not one.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ringfence_engine::batch::{self, BatchHeader, HEADER_BYTES};
use ringfence_engine::index::{self, IndexBuilder, Seal, SegmentKey, WalkStop};
use ringfence_engine::limits::{BLOCK, MAX_BATCH_BYTES};
use ringfence_engine::types::{Offset, PartitionId};
use serde_json::json;

use super::{Report, Trouble, bytes_value, partition_of};

pub(super) fn dump(report: &mut Report, path: &Path, base: Offset) -> Result<(), Trouble> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let partition = partition_of(path);
    // Without a partition the batches can still be walked; only the index cannot be compared.
    let key = SegmentKey {
        partition: partition.unwrap_or_default(),
        base,
    };
    let mut walk = Walk {
        file: &file,
        len,
        builder: IndexBuilder::new(key),
    };
    let fault = walk.run(report)?;
    let (end, next) = (walk.builder.end(), walk.builder.next_offset());
    report.item(
        "end",
        vec![
            ("pos", json!(end.0)),
            ("next_offset", json!(next.0)),
            ("file_bytes", json!(len)),
        ],
    )?;
    let index = partition.and_then(|partition| read_index(path, partition, base));
    if let Some(fault) = fault {
        let sealed = index.as_ref().and_then(|read| read.seal);
        judge(report, &walk, sealed, &fault)?;
    }
    if let (Some(read), true) = (&index, report.verify) {
        compare_index(report, &file, key, read, len)?;
    }
    Ok(())
}

struct Walk<'a> {
    file: &'a File,
    len: u64,
    builder: IndexBuilder,
}

impl Walk<'_> {
    /// Walks to the end of the file; returns why it stopped before.
    fn run(&mut self, report: &mut Report) -> Result<Option<String>, Trouble> {
        while self.builder.end().0 < self.len {
            let pos = self.builder.end().0;
            let head = self.read(pos, HEADER_BYTES)?;
            let size = match batch::peek(&head) {
                Some(header) => header.size,
                None => HEADER_BYTES,
            };
            let bytes = self.read(pos, size)?;
            match index::walk(&mut self.builder, &bytes, None) {
                WalkStop::End => show(report, pos, &bytes)?,
                WalkStop::Incomplete { needed } => {
                    return Ok(Some(format!("a batch of {needed} bytes goes beyond the file")));
                }
                WalkStop::Fault(fault) => return Ok(Some(fault.to_string())),
            }
        }
        Ok(None)
    }

    /// Up to `len` bytes at `pos`; fewer only at the end of the file. A batch bounds `len`.
    fn read(&self, pos: u64, len: usize) -> std::io::Result<Vec<u8>> {
        let left = self.len.saturating_sub(pos);
        let len = len.min(MAX_BATCH_BYTES) as u64;
        let mut bytes = vec![0; len.min(left) as usize];
        self.file.read_exact_at(&mut bytes, pos)?;
        Ok(bytes)
    }

    /// Whether everything from `pos` on is zero: allocated, never written.
    fn is_zero_from(&self, pos: u64) -> std::io::Result<bool> {
        let mut pos = pos;
        while pos < self.len {
            let bytes = self.read(pos, 1 << 20)?;
            if bytes.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
            pos += bytes.len() as u64;
        }
        Ok(true)
    }
}

fn show(report: &mut Report, pos: u64, bytes: &[u8]) -> Result<(), Trouble> {
    let Ok(header) = BatchHeader::parse(bytes) else {
        return Ok(());
    };
    report.item(
        "batch",
        vec![
            ("pos", json!(pos)),
            ("base_offset", json!(header.base_offset.0)),
            ("last_offset", json!(header.last_offset().0)),
            ("count", json!(header.count)),
            ("bytes", json!(header.size)),
            ("leader_epoch", json!(header.leader_epoch.map(|epoch| epoch.0))),
            ("codec", json!(header.codec())),
            ("max_timestamp", json!(header.max_timestamp)),
            ("producer_id", json!(header.producer_id)),
            ("producer_epoch", json!(header.producer_epoch)),
            ("base_sequence", json!(header.base_sequence)),
            ("crc", json!(format!("{:08x}", header.crc))),
        ],
    )?;
    if !report.records || header.codec() != 0 {
        return Ok(());
    }
    let records = match batch::records(bytes) {
        Ok(records) => records,
        Err(error) => return Ok(report.problem(error)?),
    };
    for record in records {
        match record {
            Ok(record) => report.item(
                "record",
                vec![
                    ("offset", json!(record.offset.0)),
                    ("timestamp", json!(record.timestamp)),
                    ("key", bytes_value(record.key)),
                    ("value", bytes_value(record.value)),
                ],
            )?,
            Err(error) => report.problem(error)?,
        }
    }
    Ok(())
}

/// Decides whether bytes that are no batch are damage or a segment that is not written to its end yet.
fn judge(report: &mut Report, walk: &Walk<'_>, sealed: Option<Seal>, fault: &str) -> Result<(), Trouble> {
    let end = walk.builder.end();
    match sealed {
        Some(seal) if seal.end > end => {
            let cause = format!(
                "at {end}, where the sealed segment goes on to {}: {fault}",
                seal.end
            );
            return Ok(report.problem(cause)?);
        }
        Some(_) => return Ok(report.item("unused", vec![("from", json!(end.0))])?),
        None => {}
    }
    // An active segment is written in whole blocks: its last batch may be cut at a block, with nothing written behind.
    let block = BLOCK as u64;
    let head = walk.read(end.0, HEADER_BYTES)?;
    let size = batch::peek(&head).map_or(1, |header| header.size as u64);
    let last_block = end.plus(size.saturating_sub(1)).floor(block);
    let unwritten = last_block.max(end.ceil(block));
    let open = match batch::peek(&head) {
        Some(_) => walk.is_zero_from(last_block.0.max(end.0))?,
        None => walk.is_zero_from(unwritten.0)?,
    };
    if open {
        report.item("open end", vec![("from", json!(end.0))])?;
    } else {
        report.problem(format!("at {end}, with more bytes behind: {fault}"))?;
    }
    Ok(())
}

fn read_index(path: &Path, partition: PartitionId, base: Offset) -> Option<index::IndexRead> {
    let file = fs::read(path.with_extension("index")).ok()?;
    Some(index::decode(SegmentKey { partition, base }, &file))
}

/// Checks the bytes of every indexed interval against the index's checksum, which covers what a batch's CRC does not.
fn compare_index(
    report: &mut Report,
    file: &File,
    key: SegmentKey,
    read: &index::IndexRead,
    len: u64,
) -> Result<(), Trouble> {
    for interval in read.index.iter() {
        if interval.end.0 > len {
            report.problem(format!(
                "the index goes on to {}, the file ends at {len}",
                interval.end
            ))?;
            break;
        }
        let mut bytes = vec![0; usize::try_from(interval.len()).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut bytes, interval.pos.0)?;
        if !key.verify(&interval, &bytes) {
            report.problem(format!(
                "bytes {}..{} (offsets {}..{}) do not match the index",
                interval.pos, interval.end, interval.first, interval.next
            ))?;
        }
    }
    Ok(())
}
