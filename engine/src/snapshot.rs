//! The byte layout of a checkpoint snapshot: one header block, then one entry per partition.
//!
//! A snapshot counts only when header and body match their checksums; the header is written with the last bytes, so
//! a torn snapshot is simply not one. Layout to the byte: `engine/README.md`, section "Snapshot".

use thiserror::Error;

use crate::canary::Canary;
use crate::codec::{Put, Reader};
use crate::config::StoreConfig;
use crate::epochs::EpochTable;
use crate::error::FenceReason;
use crate::io::buf::{AppendBuf, BufSlice};
use crate::limits::{BLOCK, FORMAT_VERSION};
use crate::log::{Damage, Log};
use crate::producers::ProducerTable;
use crate::segment::{Segment, SegmentState};
use crate::types::{Lsn, Offset, PartitionId, Pos, Term, TopicId};

const MAGIC: u32 = u32::from_le_bytes(*b"RFCP");
const HEADER_BYTES: usize = 96;
/// Least bytes of an entry; bounds the count before anything is allocated.
const MIN_ENTRY: u64 = 64;

/// Why bytes are not a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SnapshotError {
    #[error("not a snapshot (wrong magic)")]
    Magic,
    #[error("unknown snapshot format version {0}")]
    Version(u32),
    #[error("checksum of the {0} does not match")]
    Checksum(&'static str),
    #[error("a length or count of the {0} is out of range")]
    Length(&'static str),
}

/// Header of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotHeader {
    pub node: u32,
    pub generation: u64,
    pub shard: u16,
    pub term: Term,
    /// Number of the checkpoint; of two valid snapshots the higher one is newer.
    pub number: u64,
    /// Replay begins here: the least of the entries' applied lsns.
    pub lsn: Lsn,
    /// Number of entries.
    pub count: u32,
    /// Bytes of the body, which begins at the second block.
    pub body_bytes: u64,
    /// Checksum of the body.
    pub body_crc: u32,
}

impl SnapshotHeader {
    /// Encodes into one block.
    #[must_use]
    pub fn encode(&self) -> BufSlice {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.put_u32(MAGIC);
        bytes.put_u32(FORMAT_VERSION);
        bytes.put_u32(self.node);
        bytes.put_u32(u32::from(self.shard));
        bytes.put_u64(self.generation);
        bytes.put_u64(self.term.0);
        bytes.put_u64(self.number);
        bytes.put_u64(self.lsn.0);
        bytes.put_u64(self.body_bytes);
        bytes.put_u32(self.count);
        bytes.put_u32(self.body_crc);
        bytes.resize(HEADER_BYTES - 4, 0);
        let crc = crc32fast::hash(&bytes);
        bytes.put_u32(crc);
        let mut block = AppendBuf::with_capacity(BLOCK);
        block.append(&bytes);
        block.append_zeros(BLOCK - bytes.len());
        block.freeze()
    }

    /// Decodes the first block of a snapshot file of `file_bytes`.
    ///
    /// # Errors
    /// [`SnapshotError`] when there is no header.
    pub fn decode(bytes: &[u8], file_bytes: u64) -> Result<SnapshotHeader, SnapshotError> {
        let bytes = bytes.get(..HEADER_BYTES).ok_or(SnapshotError::Length("header"))?;
        let mut reader = Reader::new(bytes);
        if reader.u32() != Some(MAGIC) {
            return Err(SnapshotError::Magic);
        }
        let version = reader.u32().unwrap_or(0);
        if version != FORMAT_VERSION {
            return Err(SnapshotError::Version(version));
        }
        let (content, crc) = bytes.split_at(HEADER_BYTES - 4);
        if crc32fast::hash(content).to_le_bytes() != crc {
            return Err(SnapshotError::Checksum("header"));
        }
        let header = SnapshotHeader::parse(&mut reader).ok_or(SnapshotError::Length("header"))?;
        let fits = header
            .body_bytes
            .checked_add(BLOCK as u64)
            .is_some_and(|end| end <= file_bytes);
        if !fits || u64::from(header.count) * MIN_ENTRY > header.body_bytes {
            return Err(SnapshotError::Length("body"));
        }
        Ok(header)
    }

    fn parse(reader: &mut Reader<'_>) -> Option<SnapshotHeader> {
        let node = reader.u32()?;
        let shard = u16::try_from(reader.u32()?).ok()?;
        Some(SnapshotHeader {
            node,
            shard,
            generation: reader.u64()?,
            term: Term(reader.u64()?),
            number: reader.u64()?,
            lsn: Lsn(reader.u64()?),
            body_bytes: reader.u64()?,
            count: reader.u32()?,
            body_crc: reader.u32()?,
        })
    }
}

/// What the entries of checkpoint `number` are seeded with: the number itself.
pub(crate) fn entry_seed(cfg: &StoreConfig, number: u64) -> u64 {
    if cfg.has(Canary::UnnumberedSnapshot) {
        0
    } else {
        number
    }
}

/// Checksum of an entry, seeded with the number of its checkpoint.
///
/// The seed is what ties a body to its header. An entry followed by its plain checksum leaves a CRC in a state that does
/// not depend on the entry, so the checksum of the whole body says nothing of what is in it: an old body of the same
/// length passed under a new header.
fn entry_crc(seed: u64, content: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&seed.to_le_bytes());
    crc.update(content);
    crc.finalize()
}

/// Appends the entry of `log`, checked with `seed` ([`entry_seed`]), which holds at `applied`: everything the log accepted before that address, and maybe
/// more (replay skips what is there). With `carry`, every byte that is in no file yet goes along; without it the caller
/// sees to it that whole blocks are in their files before the snapshot counts.
pub fn encode_entry(log: &Log, seed: u64, applied: Lsn, carry: bool, out: &mut Vec<u8>) {
    let start = out.len();
    out.put_u32(0);
    out.put(log.id.topic.0);
    out.put_u32(log.id.index);
    out.put_u32(u32::from(log.fenced == Some(FenceReason::Damaged)));
    out.put_u64(applied.0);
    out.put_u64(log.log_start.0);
    out.put_u64(log.high_watermark.0);
    out.put_u64(log.oldest.0);
    log.epochs.encode_into(out);
    log.producers.encode_into(out);
    out.put_u32(log.trusted_producers.len() as u32);
    log.trusted_producers.iter().for_each(|base| out.put_u64(base.0));
    out.put_u32(log.damage.len() as u32);
    for damage in &log.damage {
        out.put_u64(damage.offsets.start);
        out.put_u64(damage.offsets.end);
        out.put_u64(damage.segment.0);
        out.put_u64(damage.bytes.start);
        out.put_u64(damage.bytes.end);
    }
    let open = open_segments(log, carry);
    out.put_u32(open.len() as u32);
    for segment in open {
        encode_segment(segment, carry, out);
    }
    let len = (out.len() - start + 4) as u32;
    out[start..start + 4].copy_from_slice(&len.to_le_bytes());
    let crc = entry_crc(seed, &out[start..]);
    out.put_u32(crc);
}

/// Segments whose bytes are not all in their files when the checkpoint completes: the active one, and those that are
/// carried unsealed.
fn open_segments(log: &Log, carry: bool) -> Vec<&Segment> {
    let last = log.segments.len() - 1;
    let unsealed = |s: &Segment| carry && s.state() != SegmentState::Sealed;
    log.segments
        .iter()
        .enumerate()
        .filter(|(i, s)| *i == last || unsealed(s))
        .map(|(_, s)| s)
        .collect()
}

fn encode_segment(segment: &Segment, carry: bool, out: &mut Vec<u8>) {
    let floor = segment.end().floor(BLOCK as u64);
    let from = if carry {
        segment.written.min(floor).max(segment.tail.start())
    } else {
        floor
    };
    out.put_u64(segment.base.0);
    out.put_u64(segment.next.0);
    out.put_u64(segment.end().0);
    out.put_u64(segment.end().0 - from.0);
    segment
        .tail
        .slices(from, segment.end())
        .iter()
        .for_each(|slice| out.extend_from_slice(slice));
}

/// A segment as a snapshot tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentEntry {
    pub base: Offset,
    pub next: Offset,
    pub end: Pos,
    /// Bytes before `end` that are not (all) in the file.
    pub tail: Vec<u8>,
}

/// A partition as a snapshot tells it.
#[derive(Debug, Clone)]
pub struct Entry {
    pub id: PartitionId,
    /// Fenced because recovery could not name what is lost.
    pub damaged: bool,
    pub applied: Lsn,
    pub log_start: Offset,
    pub high_watermark: Offset,
    pub oldest: Offset,
    pub epochs: EpochTable,
    pub producers: ProducerTable,
    /// Bases of segments whose `.producers` files are good.
    pub trusted_producers: Vec<Offset>,
    pub damage: Vec<Damage>,
    pub segments: Vec<SegmentEntry>,
}

/// Decodes a body whose checksum was already compared.
///
/// # Errors
/// [`SnapshotError`] when an entry does not hold what its lengths say.
pub fn decode_body(
    header: &SnapshotHeader,
    body: &[u8],
    cfg: &StoreConfig,
) -> Result<Vec<Entry>, SnapshotError> {
    if crc32fast::hash(body) != header.body_crc {
        return Err(SnapshotError::Checksum("body"));
    }
    let mut rest = body;
    let mut entries = Vec::with_capacity(header.count as usize);
    for _ in 0..header.count {
        let len = Reader::new(rest).u32().ok_or(SnapshotError::Length("entry"))? as usize;
        let (bytes, after) = rest.split_at_checked(len).ok_or(SnapshotError::Length("entry"))?;
        rest = after;
        let (content, crc) = len
            .checked_sub(4)
            .map(|at| bytes.split_at(at))
            .ok_or(SnapshotError::Length("entry"))?;
        if entry_crc(entry_seed(cfg, header.number), content).to_le_bytes() != crc {
            return Err(SnapshotError::Checksum("entry"));
        }
        entries.push(decode_entry(content, cfg).ok_or(SnapshotError::Length("entry"))?);
    }
    Ok(entries)
}

fn decode_entry(content: &[u8], cfg: &StoreConfig) -> Option<Entry> {
    let mut reader = Reader::new(content);
    let _len = reader.u32()?;
    let topic = TopicId(reader.array()?);
    let id = PartitionId {
        topic,
        index: reader.u32()?,
    };
    let damaged = reader.u32()? & 1 != 0;
    let applied = Lsn(reader.u64()?);
    let (log_start, high_watermark) = (Offset(reader.u64()?), Offset(reader.u64()?));
    let oldest = Offset(reader.u64()?);
    let (epochs, rest) = EpochTable::decode(reader.rest(), cfg.epoch_entries)?;
    let (producers, rest) = ProducerTable::decode(rest, cfg.producers)?;
    let mut reader = Reader::new(rest);
    let count = reader.count(8)?;
    let mut trusted_producers = Vec::with_capacity(count);
    for _ in 0..count {
        trusted_producers.push(Offset(reader.u64()?));
    }
    let count = reader.count(40)?;
    let mut damage = Vec::with_capacity(count);
    for _ in 0..count {
        let offsets = reader.u64()?..reader.u64()?;
        let segment = Offset(reader.u64()?);
        damage.push(Damage {
            offsets,
            segment,
            bytes: reader.u64()?..reader.u64()?,
        });
    }
    let count = reader.count(32)?;
    let mut segments = Vec::with_capacity(count);
    for _ in 0..count {
        segments.push(decode_segment(&mut reader)?);
    }
    (!segments.is_empty() && reader.rest().is_empty()).then_some(Entry {
        id,
        damaged,
        applied,
        log_start,
        high_watermark,
        oldest,
        epochs,
        producers,
        trusted_producers,
        damage,
        segments,
    })
}

fn decode_segment(reader: &mut Reader<'_>) -> Option<SegmentEntry> {
    let (base, next) = (Offset(reader.u64()?), Offset(reader.u64()?));
    let end = Pos(reader.u64()?);
    let len = usize::try_from(reader.u64()?).ok()?;
    let tail = reader.bytes(len)?.to_vec();
    let starts_at_block = (end.0.checked_sub(len as u64)?).is_multiple_of(BLOCK as u64);
    (starts_at_block && base <= next).then_some(SegmentEntry {
        base,
        next,
        end,
        tail,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::LogSettings;
    use crate::types::ShardId;

    fn snapshot(number: u64, offset: u64, partitions: u32) -> (SnapshotHeader, Vec<u8>) {
        let mut body = Vec::new();
        for index in 0..partitions {
            let id = PartitionId {
                topic: TopicId([4; 16]),
                index,
            };
            let mut log = Log::new(
                id,
                "t",
                LogSettings::default(),
                EpochTable::new(4),
                ProducerTable::new(4),
            );
            log.segments[0].base = Offset(offset);
            log.segments[0].next = Offset(offset);
            encode_entry(&log, number, Lsn(offset), false, &mut body);
        }
        let header = SnapshotHeader {
            node: 1,
            generation: 1,
            shard: 0,
            term: Term(1),
            number,
            lsn: Lsn(offset),
            count: partitions,
            body_bytes: body.len() as u64,
            body_crc: crc32fast::hash(&body),
        };
        (header, body)
    }

    #[test]
    fn an_older_body_does_not_pass_under_a_newer_header() {
        let cfg = StoreConfig::new(1, ShardId(0));
        for partitions in 1..4 {
            let (old, old_body) = snapshot(7, 100, partitions);
            let (new, new_body) = snapshot(9, 200, partitions);
            assert_eq!(old_body.len(), new_body.len());
            assert!(decode_body(&old, &old_body, &cfg).is_ok());
            assert!(decode_body(&new, &new_body, &cfg).is_ok());
            assert!(
                decode_body(&new, &old_body, &cfg).is_err(),
                "{partitions} partitions"
            );
        }
    }
}
