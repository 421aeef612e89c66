//! The journal's byte layout: file headers, frames, records; encoding and decoding, no I/O.
//!
//! Invariants: a frame starts and ends at a multiple of the grain; a record's bytes never span frames, a frame never
//! spans files; every part of a frame is under one of four checksums (header, directory, copy of the previous
//! directory, body). Decoders are total: any bytes give a value or a typed error. Layout to the byte:
//! `engine/README.md`, section "Journal".

use thiserror::Error;

use crate::codec::{Put, Reader};
use crate::io::buf::{AppendBuf, BufSlice};
use crate::limits::{BLOCK, FORMAT_VERSION};
use crate::types::{LeaderEpoch, Lsn, Offset, PartitionId, Pos, Term, TopicId};

const FILE_MAGIC: u32 = u32::from_le_bytes(*b"RFJH");
const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"RFJF");
/// Bytes of a journal file's header that carry content; the rest of block 0 is zero.
pub const FILE_HEADER_BYTES: usize = 96;
/// Bytes of a frame header.
pub const FRAME_HEADER_BYTES: usize = 128;
/// Most records in one frame; bounds the directory.
pub const MAX_RECORDS: usize = 16_384;

/// Why journal bytes are not what they should be. None of these is an error by itself: recovery judges it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum JournalError {
    #[error("not a journal structure (wrong magic)")]
    Magic,
    #[error("unknown journal format version {0}")]
    Version(u32),
    #[error("checksum of the {0} does not match")]
    Checksum(&'static str),
    #[error("a length or count of the {0} is out of range")]
    Length(&'static str),
    #[error("unknown record kind {0}")]
    Kind(u8),
}

/// Header of a journal file; synced before a frame in the file counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileHeader {
    /// Node that owns the journal.
    pub node: u32,
    /// Generation of the journal set.
    pub generation: u64,
    /// Shard that owns the file.
    pub shard: u16,
    /// Life of this file; every reuse takes a higher one. Frames of another life do not count.
    pub incarnation: u64,
    /// lsn of the first frame position in this file.
    pub first_lsn: Lsn,
    /// Where the frames of the previous file ended.
    pub prev_end: Lsn,
    /// lsn of the older valid checkpoint when the file was (re)used; a start without a checkpoint at least this new is
    /// damage, never a cut.
    pub checkpoint_lsn: Lsn,
    /// Frame grain of the file.
    pub grain: u32,
    /// Length of the file.
    pub file_bytes: u64,
}

impl FileHeader {
    /// Encodes into one block of `grain` bytes.
    #[must_use]
    pub fn encode(&self) -> BufSlice {
        let mut bytes = Vec::with_capacity(FILE_HEADER_BYTES);
        bytes.put_u32(FILE_MAGIC);
        bytes.put_u32(FORMAT_VERSION);
        bytes.put_u32(self.node);
        bytes.put_u16(self.shard);
        bytes.put_u16(0);
        bytes.put_u64(self.generation);
        bytes.put_u64(self.incarnation);
        bytes.put_u64(self.first_lsn.0);
        bytes.put_u64(self.prev_end.0);
        bytes.put_u64(self.checkpoint_lsn.0);
        bytes.put_u64(self.file_bytes);
        bytes.put_u32(self.grain);
        bytes.resize(FILE_HEADER_BYTES - 4, 0);
        let crc = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&crc.to_le_bytes());
        let mut block = AppendBuf::with_capacity(self.grain as usize);
        block.append(&bytes);
        block.append_zeros(self.grain as usize - bytes.len());
        block.freeze()
    }

    /// Decodes block 0 of a journal file.
    ///
    /// # Errors
    /// [`JournalError`] when the bytes are not a header of this format.
    pub fn decode(bytes: &[u8]) -> Result<FileHeader, JournalError> {
        let bytes = bytes
            .get(..FILE_HEADER_BYTES)
            .ok_or(JournalError::Length("file header"))?;
        let mut reader = Reader::new(bytes);
        if reader.u32() != Some(FILE_MAGIC) {
            return Err(JournalError::Magic);
        }
        let version = reader.u32().unwrap_or(0);
        if version != FORMAT_VERSION {
            return Err(JournalError::Version(version));
        }
        let (content, crc) = bytes.split_at(FILE_HEADER_BYTES - 4);
        if crc32fast::hash(content).to_le_bytes() != crc {
            return Err(JournalError::Checksum("file header"));
        }
        let parse = |reader: &mut Reader<'_>| {
            let (node, shard, _) = (reader.u32()?, reader.u16()?, reader.u16()?);
            Some(FileHeader {
                node,
                shard,
                generation: reader.u64()?,
                incarnation: reader.u64()?,
                first_lsn: Lsn(reader.u64()?),
                prev_end: Lsn(reader.u64()?),
                checkpoint_lsn: Lsn(reader.u64()?),
                file_bytes: reader.u64()?,
                grain: reader.u32()?,
            })
        };
        parse(&mut reader).ok_or(JournalError::Length("file header"))
    }
}

/// One physical redo record. Replay is idempotent and does not depend on history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// Bytes of one batch at their place.
    Append {
        partition: PartitionId,
        base: Offset,
        next: Offset,
        segment: Offset,
        pos: Pos,
        /// Length of the bytes.
        len: u32,
        /// Where the bytes begin, counted from the start of the frame.
        body_at: u32,
    },
    /// Leader epoch `epoch` begins at `start`; also makes a partition exist.
    EpochStart {
        partition: PartitionId,
        epoch: LeaderEpoch,
        start: Offset,
    },
    /// The log ends at `offset`, which is at `pos` of `segment`; `prefix` repeats the cut block's bytes before `pos`.
    Truncate {
        partition: PartitionId,
        offset: Offset,
        segment: Offset,
        pos: Pos,
        prefix: Vec<u8>,
    },
    /// The log starts at `offset`.
    LogStart { partition: PartitionId, offset: Offset },
    /// The partition is gone.
    Drop { partition: PartitionId },
    /// A process start.
    Start { term: Term },
    /// Carries a durable_lsn and nothing else.
    Mark,
}

const KIND_APPEND: u8 = 1;
const KIND_EPOCH: u8 = 2;
const KIND_TRUNCATE: u8 = 3;
const KIND_LOG_START: u8 = 4;
const KIND_DROP: u8 = 5;
const KIND_START: u8 = 6;
const KIND_MARK: u8 = 7;
// Kind 8 is kept for Extent (STORAGE.md section 2, second step).

impl Record {
    /// The partition the record is about.
    #[must_use]
    pub fn partition(&self) -> Option<PartitionId> {
        match self {
            Record::Append { partition, .. }
            | Record::EpochStart { partition, .. }
            | Record::Truncate { partition, .. }
            | Record::LogStart { partition, .. }
            | Record::Drop { partition } => Some(*partition),
            Record::Start { .. } | Record::Mark => None,
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Record::Append { .. } => KIND_APPEND,
            Record::EpochStart { .. } => KIND_EPOCH,
            Record::Truncate { .. } => KIND_TRUNCATE,
            Record::LogStart { .. } => KIND_LOG_START,
            Record::Drop { .. } => KIND_DROP,
            Record::Start { .. } => KIND_START,
            Record::Mark => KIND_MARK,
        }
    }

    /// Bytes of the record in a directory.
    #[must_use]
    pub fn dir_bytes(&self) -> usize {
        24 + match self {
            Record::Append { .. } => 40,
            Record::EpochStart { .. } => 12,
            Record::Truncate { prefix, .. } => 28 + prefix.len(),
            Record::LogStart { .. } | Record::Start { .. } => 8,
            Record::Drop { .. } | Record::Mark => 0,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let partition = self.partition().unwrap_or_default();
        out.put([self.kind(), 0, 0, 0]);
        out.put_u32(partition.index);
        out.put(partition.topic.0);
        match self {
            Record::Append {
                base,
                next,
                segment,
                pos,
                len,
                body_at,
                ..
            } => {
                out.put_u64(base.0);
                out.put_u64(next.0);
                out.put_u64(segment.0);
                out.put_u64(pos.0);
                out.put_u32(*len);
                out.put_u32(*body_at);
            }
            Record::EpochStart { epoch, start, .. } => {
                out.put_u32(epoch.0);
                out.put_u64(start.0);
            }
            Record::Truncate {
                offset,
                segment,
                pos,
                prefix,
                ..
            } => {
                out.put_u64(offset.0);
                out.put_u64(segment.0);
                out.put_u64(pos.0);
                out.put_u32(prefix.len() as u32);
                out.extend_from_slice(prefix);
            }
            Record::LogStart { offset, .. } => out.put_u64(offset.0),
            Record::Start { term } => out.put_u64(term.0),
            Record::Drop { .. } | Record::Mark => {}
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Record, JournalError> {
        const SHORT: JournalError = JournalError::Length("directory");
        let kind = reader.u8().ok_or(SHORT)?;
        let _reserved = reader.bytes(3).ok_or(SHORT)?;
        let index = reader.u32().ok_or(SHORT)?;
        let partition = PartitionId {
            topic: TopicId(reader.array().ok_or(SHORT)?),
            index,
        };
        Record::decode_rest(kind, partition, reader)
            .ok_or(SHORT)?
            .ok_or(JournalError::Kind(kind))
    }

    /// Outer `None`: bytes ran out; inner `None`: unknown kind.
    fn decode_rest(kind: u8, partition: PartitionId, reader: &mut Reader<'_>) -> Option<Option<Record>> {
        Some(Some(match kind {
            KIND_APPEND => Record::Append {
                partition,
                base: Offset(reader.u64()?),
                next: Offset(reader.u64()?),
                segment: Offset(reader.u64()?),
                pos: Pos(reader.u64()?),
                len: reader.u32()?,
                body_at: reader.u32()?,
            },
            KIND_EPOCH => Record::EpochStart {
                partition,
                epoch: LeaderEpoch(reader.u32()?),
                start: Offset(reader.u64()?),
            },
            KIND_TRUNCATE => Record::Truncate {
                partition,
                offset: Offset(reader.u64()?),
                segment: Offset(reader.u64()?),
                pos: Pos(reader.u64()?),
                prefix: {
                    let len = reader.u32()? as usize;
                    reader.bytes(len)?.to_vec()
                },
            },
            KIND_LOG_START => Record::LogStart {
                partition,
                offset: Offset(reader.u64()?),
            },
            KIND_DROP => Record::Drop { partition },
            KIND_START => Record::Start {
                term: Term(reader.u64()?),
            },
            KIND_MARK => Record::Mark,
            _ => return Some(None),
        }))
    }
}

/// Header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Process life that wrote it.
    pub term: Term,
    /// Life of the file it was written into.
    pub incarnation: u64,
    /// Its own address.
    pub lsn: Lsn,
    /// End of the unbroken prefix of completed frames when this one was issued: everything below it was durable.
    pub durable_lsn: Lsn,
    /// Address of the frame before it.
    pub prev_lsn: Lsn,
    /// Bytes of the whole frame, a multiple of the grain.
    pub frame_len: u32,
    dir_len: u32,
    prev_dir_len: u32,
    records: u32,
    prev_records: u32,
    dir_crc: u32,
    prev_dir_crc: u32,
    body_crc: u32,
}

impl FrameHeader {
    fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        let mut bytes = Vec::with_capacity(FRAME_HEADER_BYTES);
        bytes.put_u32(FRAME_MAGIC);
        bytes.put_u32(FORMAT_VERSION);
        bytes.put_u64(self.term.0);
        bytes.put_u64(self.incarnation);
        bytes.put_u64(self.lsn.0);
        bytes.put_u64(self.durable_lsn.0);
        bytes.put_u64(self.prev_lsn.0);
        bytes.put_u32(self.frame_len);
        bytes.put_u32(self.dir_len);
        bytes.put_u32(self.prev_dir_len);
        bytes.put_u32(self.records);
        bytes.put_u32(self.prev_records);
        bytes.put_u32(self.dir_crc);
        bytes.put_u32(self.prev_dir_crc);
        bytes.put_u32(self.body_crc);
        let mut out = [0; FRAME_HEADER_BYTES];
        out[..bytes.len()].copy_from_slice(&bytes);
        let crc = crc32fast::hash(&out[..FRAME_HEADER_BYTES - 4]);
        out[FRAME_HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Decodes the first bytes of a frame and checks its lengths against `room`, the bytes left in the file.
    ///
    /// # Errors
    /// [`JournalError`] when there is no frame header here.
    pub fn decode(bytes: &[u8], room: u64) -> Result<FrameHeader, JournalError> {
        let bytes = bytes
            .get(..FRAME_HEADER_BYTES)
            .ok_or(JournalError::Length("frame header"))?;
        let mut reader = Reader::new(bytes);
        if reader.u32() != Some(FRAME_MAGIC) {
            return Err(JournalError::Magic);
        }
        let (content, crc) = bytes.split_at(FRAME_HEADER_BYTES - 4);
        if crc32fast::hash(content).to_le_bytes() != crc {
            return Err(JournalError::Checksum("frame header"));
        }
        let version = reader.u32().unwrap_or(0);
        if version != FORMAT_VERSION {
            return Err(JournalError::Version(version));
        }
        let header = FrameHeader::parse(&mut reader).ok_or(JournalError::Length("frame header"))?;
        let dirs = header.dirs_end() as u64;
        let fits = dirs <= u64::from(header.frame_len) && u64::from(header.frame_len) <= room;
        let counted = header.records as usize <= MAX_RECORDS && header.prev_records as usize <= MAX_RECORDS;
        if !fits || !counted {
            return Err(JournalError::Length("frame"));
        }
        Ok(header)
    }

    fn parse(reader: &mut Reader<'_>) -> Option<FrameHeader> {
        Some(FrameHeader {
            term: Term(reader.u64()?),
            incarnation: reader.u64()?,
            lsn: Lsn(reader.u64()?),
            durable_lsn: Lsn(reader.u64()?),
            prev_lsn: Lsn(reader.u64()?),
            frame_len: reader.u32()?,
            dir_len: reader.u32()?,
            prev_dir_len: reader.u32()?,
            records: reader.u32()?,
            prev_records: reader.u32()?,
            dir_crc: reader.u32()?,
            prev_dir_crc: reader.u32()?,
            body_crc: reader.u32()?,
        })
    }

    /// Where the body begins: after header, directory and copy of the previous directory.
    fn dirs_end(&self) -> usize {
        FRAME_HEADER_BYTES + self.dir_len as usize + self.prev_dir_len as usize
    }
}

/// Bytes of one record as the frame will carry them.
#[derive(Debug, Clone)]
pub enum Body {
    /// No bytes (control records).
    None,
    /// Copied into the frame's head.
    Inline(Vec<BufSlice>),
    /// Whole blocks taken from the tail without copying.
    Blocks(Blocks),
}

/// Whole blocks that hold a record's bytes.
#[derive(Debug, Clone)]
pub struct Blocks {
    /// The blocks, one after the other.
    pub slices: Vec<BufSlice>,
    /// Where in the first block the record begins.
    pub lead: u32,
    /// Bytes of the record.
    pub len: u32,
    /// Checksum of exactly the record's bytes, taken when they were accepted: they are not read again for the frame.
    pub sum: crc32fast::Hasher,
}

impl Blocks {
    fn bytes(&self) -> usize {
        self.slices.iter().map(|slice| slice.len()).sum()
    }

    /// Adds all bytes of the blocks to `crc`.
    fn add_to(&self, crc: &mut crc32fast::Hasher) {
        let lead = self.lead as usize;
        let record = lead..lead + self.len as usize;
        let mut at = 0;
        for slice in &self.slices {
            let before = record.start.saturating_sub(at).min(slice.len());
            crc.update(&slice[..before]);
            if (at..at + slice.len()).contains(&record.start) {
                crc.combine(&self.sum);
            }
            let after = record.end.saturating_sub(at).clamp(before, slice.len());
            crc.update(&slice[after..]);
            at += slice.len();
        }
    }
}

impl Body {
    fn inline_bytes(&self) -> usize {
        match self {
            Body::Inline(slices) => slices.iter().map(|s| s.len()).sum(),
            _ => 0,
        }
    }

    /// Bytes the record adds to a frame, without its directory entry.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Body::None => 0,
            Body::Inline(_) => self.inline_bytes(),
            Body::Blocks(blocks) => blocks.bytes(),
        }
    }
}

/// What a frame is stamped with.
#[derive(Debug, Clone, Copy)]
pub struct FrameStamp {
    pub term: Term,
    pub incarnation: u64,
    pub lsn: Lsn,
    pub durable_lsn: Lsn,
    pub prev_lsn: Lsn,
}

/// A directory in its encoded form, kept to be repeated in the next frame.
#[derive(Debug, Clone, Default)]
pub struct Directory {
    bytes: Vec<u8>,
    records: u32,
}

impl Directory {
    /// Bytes the copy takes in the next frame.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is nothing to repeat.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Encodes `records` for recovery's first frame.
    #[must_use]
    pub fn of(records: &[Record]) -> Directory {
        let mut bytes = Vec::new();
        records.iter().for_each(|record| record.encode(&mut bytes));
        Directory {
            bytes,
            records: records.len() as u32,
        }
    }
}

/// Length of the frame that `records` with a previous directory of `prev_dir` bytes will reader.
#[must_use]
pub fn frame_len(records: &[(Record, Body)], prev_dir: usize, grain: usize) -> usize {
    let dir: usize = records.iter().map(|(record, _)| record.dir_bytes()).sum();
    let inline: usize = records.iter().map(|(_, body)| body.inline_bytes()).sum();
    let blocks: usize = records
        .iter()
        .map(|(_, body)| {
            if matches!(body, Body::Blocks(_)) {
                body.bytes()
            } else {
                0
            }
        })
        .sum();
    let head = (FRAME_HEADER_BYTES + dir + prev_dir + inline).next_multiple_of(BLOCK);
    (head + blocks).next_multiple_of(grain)
}

/// Encodes one frame; sets `body_at` of each `Append`. Returns the buffers to write, in order, and the directory.
#[must_use]
pub fn encode_frame(
    stamp: FrameStamp,
    records: &mut [(Record, Body)],
    prev: &Directory,
    grain: usize,
) -> (Vec<BufSlice>, Directory) {
    assert!(
        records.len() <= MAX_RECORDS,
        "the group is split before it has too many records"
    );
    let total = frame_len(records, prev.len(), grain);
    let dir_len: usize = records.iter().map(|(record, _)| record.dir_bytes()).sum();
    let dirs_end = FRAME_HEADER_BYTES + dir_len + prev.len();
    let head_len = place_bodies(records, dirs_end);

    let mut dir = Vec::with_capacity(dir_len);
    records.iter().for_each(|(record, _)| record.encode(&mut dir));
    let mut head = AppendBuf::with_capacity(head_len);
    head.append_zeros(FRAME_HEADER_BYTES);
    head.append(&dir);
    head.append(&prev.bytes);
    for (_, body) in records.iter() {
        if let Body::Inline(slices) = body {
            slices.iter().for_each(|slice| head.append(slice));
        }
    }
    head.append_zeros(head_len - head.len());
    let mut body_crc = crc32fast::Hasher::new();
    body_crc.update(&head[dirs_end..]);
    let mut blocks = Vec::new();
    for (_, body) in records.iter() {
        if let Body::Blocks(body) = body {
            body.add_to(&mut body_crc);
            blocks.extend(body.slices.iter().cloned());
        }
    }
    let padding = total - head_len - blocks.iter().map(|b| b.len()).sum::<usize>();
    if padding > 0 {
        let mut zeros = AppendBuf::with_capacity(padding);
        zeros.append_zeros(padding);
        body_crc.update(&zeros);
        blocks.push(zeros.freeze());
    }
    let header = FrameHeader {
        term: stamp.term,
        incarnation: stamp.incarnation,
        lsn: stamp.lsn,
        durable_lsn: stamp.durable_lsn,
        prev_lsn: stamp.prev_lsn,
        frame_len: total as u32,
        dir_len: dir_len as u32,
        prev_dir_len: prev.len() as u32,
        records: records.len() as u32,
        prev_records: prev.records,
        dir_crc: crc32fast::hash(&dir),
        prev_dir_crc: crc32fast::hash(&prev.bytes),
        body_crc: body_crc.finalize(),
    };
    head.patch(0, &header.encode());
    let mut bufs = vec![head.freeze()];
    bufs.append(&mut blocks);
    (
        bufs,
        Directory {
            bytes: dir,
            records: header.records,
        },
    )
}

/// Gives every `Append` its place in the frame; returns the length of the head (header, directories, inline bytes).
fn place_bodies(records: &mut [(Record, Body)], dirs_end: usize) -> usize {
    let mut inline_at = dirs_end;
    let inline: usize = records.iter().map(|(_, body)| body.inline_bytes()).sum();
    let head_len = (dirs_end + inline).next_multiple_of(BLOCK);
    let mut blocks_at = head_len;
    for (record, body) in records {
        let at = match body {
            Body::None => continue,
            Body::Inline(_) => {
                let at = inline_at;
                inline_at += body.inline_bytes();
                at
            }
            Body::Blocks(Blocks { lead, .. }) => {
                let at = blocks_at + *lead as usize;
                blocks_at += body.bytes();
                at
            }
        };
        if let Record::Append { body_at, .. } = record {
            *body_at = at as u32;
        }
    }
    head_len
}

/// A frame read back; `bytes` is exactly the frame.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// Its header, already checked.
    pub header: FrameHeader,
    bytes: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Takes the frame whose checked header is `header` out of `bytes`, which begin with it.
    ///
    /// # Errors
    /// When `bytes` are shorter than the frame.
    pub fn new(header: FrameHeader, bytes: &'a [u8]) -> Result<Frame<'a>, JournalError> {
        let bytes = bytes
            .get(..header.frame_len as usize)
            .ok_or(JournalError::Length("frame"))?;
        Ok(Frame { header, bytes })
    }

    /// The frame's own records.
    ///
    /// # Errors
    /// When the directory is damaged.
    pub fn directory(&self) -> Result<Vec<Record>, JournalError> {
        let h = &self.header;
        let end = FRAME_HEADER_BYTES + h.dir_len as usize;
        decode_directory(&self.bytes[FRAME_HEADER_BYTES..end], h.records, h.dir_crc)
    }

    /// The records of the frame before this one.
    ///
    /// # Errors
    /// When the copy is damaged.
    pub fn previous_directory(&self) -> Result<Vec<Record>, JournalError> {
        let h = &self.header;
        let start = FRAME_HEADER_BYTES + h.dir_len as usize;
        decode_directory(&self.bytes[start..h.dirs_end()], h.prev_records, h.prev_dir_crc)
    }

    /// Checks the body's checksum.
    ///
    /// # Errors
    /// When it does not match.
    pub fn check_body(&self) -> Result<(), JournalError> {
        if crc32fast::hash(&self.bytes[self.header.dirs_end()..]) == self.header.body_crc {
            Ok(())
        } else {
            Err(JournalError::Checksum("body"))
        }
    }

    /// The bytes of an `Append` of this frame.
    ///
    /// # Errors
    /// When the directory points outside the frame.
    pub fn body(&self, body_at: u32, len: u32) -> Result<&'a [u8], JournalError> {
        let start = body_at as usize;
        let end = start
            .checked_add(len as usize)
            .ok_or(JournalError::Length("body"))?;
        if start < self.header.dirs_end() {
            return Err(JournalError::Length("body"));
        }
        self.bytes.get(start..end).ok_or(JournalError::Length("body"))
    }
}

fn decode_directory(bytes: &[u8], count: u32, crc: u32) -> Result<Vec<Record>, JournalError> {
    if crc32fast::hash(bytes) != crc {
        return Err(JournalError::Checksum("directory"));
    }
    let mut reader = Reader::new(bytes);
    let mut records = Vec::with_capacity((count as usize).min(bytes.len() / 24 + 1));
    for _ in 0..count {
        records.push(Record::decode(&mut reader)?);
    }
    if reader.rest().is_empty() {
        Ok(records)
    } else {
        Err(JournalError::Length("directory"))
    }
}

#[cfg(test)]
mod tests;
