//! Journal files: header, then frames until the first that does not belong to this life of the file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ringfence_engine::journal::{
    FILE_HEADER_BYTES, FRAME_HEADER_BYTES, FileHeader, Frame, FrameHeader, Record,
};
use ringfence_engine::limits::BLOCK;
use ringfence_engine::types::{Lsn, Term};
use serde_json::{Value, json};

use super::{Report, Trouble};

pub(super) fn dump(report: &mut Report, path: &Path) -> Result<(), Trouble> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut head = vec![0; FILE_HEADER_BYTES.min(usize::try_from(len).unwrap_or(usize::MAX))];
    file.read_exact_at(&mut head, 0)?;
    if head.iter().all(|byte| *byte == 0) {
        report.item("unused", vec![])?;
        return Ok(());
    }
    let header = match FileHeader::decode(&head) {
        Ok(header) => header,
        Err(error) => return Ok(report.problem(error)?),
    };
    report.item(
        "header",
        vec![
            ("node", json!(header.node)),
            ("generation", json!(header.generation)),
            ("shard", json!(header.shard)),
            ("incarnation", json!(header.incarnation)),
            ("first_lsn", json!(header.first_lsn.0)),
            ("previous_end", json!(header.prev_end.0)),
            ("checkpoint_lsn", json!(header.checkpoint_lsn.0)),
            ("grain", json!(header.grain)),
            ("file_bytes", json!(header.file_bytes)),
        ],
    )?;
    if header.file_bytes != len {
        report.problem(format!(
            "the header says {} bytes, the file has {len}",
            header.file_bytes
        ))?;
    }
    if header.grain < BLOCK as u32 || !header.grain.is_power_of_two() {
        return Ok(report.problem(format!("grain {} is no power of two from {BLOCK}", header.grain))?);
    }
    frames(
        report,
        &Frames {
            file: &file,
            len,
            header,
        },
    )
}

struct Frames<'a> {
    file: &'a File,
    len: u64,
    header: FileHeader,
}

impl Frames<'_> {
    /// Address of the frame at a byte of the file.
    fn lsn(&self, at: u64) -> Lsn {
        self.header.first_lsn.plus(at - u64::from(self.header.grain))
    }

    /// The header of a frame of this life at `at`.
    fn header_at(&self, at: u64, term: Term) -> std::io::Result<Option<FrameHeader>> {
        if at + FRAME_HEADER_BYTES as u64 > self.len {
            return Ok(None);
        }
        let mut head = [0; FRAME_HEADER_BYTES];
        self.file.read_exact_at(&mut head, at)?;
        let header = FrameHeader::decode(&head, self.len - at).ok();
        Ok(header.filter(|header| {
            header.lsn == self.lsn(at) && header.incarnation == self.header.incarnation && header.term >= term
        }))
    }

    /// The frame at `at`: its header and records, or what is wrong with it.
    fn frame_at(&self, at: u64, header: FrameHeader) -> std::io::Result<Result<Vec<Record>, String>> {
        let mut bytes = vec![0; header.frame_len as usize];
        self.file.read_exact_at(&mut bytes, at)?;
        let checked = Frame::new(header, &bytes).and_then(|frame| {
            frame.check_body()?;
            frame.previous_directory()?;
            frame.directory()
        });
        Ok(checked.map_err(|error| error.to_string()))
    }
}

fn frames(report: &mut Report, frames: &Frames<'_>) -> Result<(), Trouble> {
    let grain = u64::from(frames.header.grain);
    let (mut at, mut term) = (grain, Term(0));
    while at + grain <= frames.len {
        let found = frames.header_at(at, term)?;
        let checked = match found {
            Some(header) => frames.frame_at(at, header)?.map(|records| (header, records)),
            None => Err("no frame of this life of the file".to_owned()),
        };
        match checked {
            Ok((header, records)) if header.frame_len > 0 => {
                show(report, &header, &records)?;
                at += u64::from(header.frame_len);
                term = header.term;
            }
            bad => {
                let cause = bad.err().unwrap_or_else(|| "a frame of no length".to_owned());
                match promised_later(frames, at, term)? {
                    Some((next, durable)) if durable > frames.lsn(at) => {
                        let lsn = frames.lsn(at);
                        report.problem(format!(
                            "frame at lsn {lsn}, below the durable end {durable} that a later frame promises: {cause}"
                        ))?;
                        at = next;
                    }
                    _ => {
                        let what = if found.is_some() { "torn tail" } else { "end" };
                        report.item(what, vec![("lsn", json!(frames.lsn(at).0))])?;
                        return Ok(());
                    }
                }
            }
        }
    }
    Ok(())
}

/// The next frame of this life behind `at`, and the highest durable end that any later one promises.
fn promised_later(frames: &Frames<'_>, at: u64, term: Term) -> std::io::Result<Option<(u64, Lsn)>> {
    let grain = u64::from(frames.header.grain);
    let mut found: Option<(u64, Lsn)> = None;
    let mut pos = at + grain;
    while pos + grain <= frames.len {
        if let Some(header) = frames.header_at(pos, term)? {
            let durable = header
                .durable_lsn
                .max(found.map_or(Lsn(0), |(_, durable)| durable));
            found = Some((found.map_or(pos, |(next, _)| next), durable));
        }
        pos += grain;
    }
    Ok(found)
}

fn show(report: &mut Report, header: &FrameHeader, records: &[Record]) -> Result<(), Trouble> {
    report.item(
        "frame",
        vec![
            ("lsn", json!(header.lsn.0)),
            ("bytes", json!(header.frame_len)),
            ("term", json!(header.term.0)),
            ("durable_lsn", json!(header.durable_lsn.0)),
            ("previous_lsn", json!(header.prev_lsn.0)),
            ("records", json!(records.len())),
        ],
    )?;
    for record in records {
        let (what, mut fields) = describe(record);
        if let Some(partition) = record.partition() {
            fields.insert(0, ("partition", json!(partition.to_string())));
        }
        report.item(what, fields)?;
    }
    Ok(())
}

fn describe(record: &Record) -> (&'static str, Vec<(&'static str, Value)>) {
    match record {
        Record::Append {
            base,
            next,
            segment,
            pos,
            len,
            ..
        } => (
            "append",
            vec![
                ("base_offset", json!(base.0)),
                ("next_offset", json!(next.0)),
                ("segment", json!(segment.0)),
                ("pos", json!(pos.0)),
                ("bytes", json!(len)),
            ],
        ),
        Record::EpochStart { epoch, start, .. } => (
            "epoch start",
            vec![("epoch", json!(epoch.0)), ("start_offset", json!(start.0))],
        ),
        Record::Truncate {
            offset,
            segment,
            pos,
            prefix,
            ..
        } => (
            "truncate",
            vec![
                ("offset", json!(offset.0)),
                ("segment", json!(segment.0)),
                ("pos", json!(pos.0)),
                ("prefix_bytes", json!(prefix.len())),
            ],
        ),
        Record::LogStart { offset, .. } => ("log start", vec![("offset", json!(offset.0))]),
        Record::Drop { .. } => ("drop", vec![]),
        Record::Start { term } => ("start", vec![("term", json!(term.0))]),
        Record::Mark => ("mark", vec![]),
    }
}
