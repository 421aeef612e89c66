//! The `.index` file: blocks of [`BLOCK`] bytes. Block `n` holds the intervals from `n * BLOCK_ENTRIES` on; the block
//! after the last one of a sealed segment is its seal.
//!
//! A block that is not full yet may be written again with more entries: it is derived data, a torn write of it costs
//! a walk. Invariant: reading never fails; it yields the intervals before the first doubt.

use super::{Entry, Seal, SegmentIndex, SegmentKey};
use crate::codec::{Put, Reader};
use crate::limits::BLOCK;
use crate::types::{LeaderEpoch, Offset, Pos};

/// Bytes of an entry.
const ENTRY_BYTES: usize = 40;
/// Bytes of a block header.
const HEAD_BYTES: usize = 64;
/// Where the block's CRC lies: the last field of the header.
const CRC_AT: usize = HEAD_BYTES - 4;
const MAGIC: [u8; 4] = *b"RFix";
const VERSION: u16 = 1;

/// Entries per block.
pub const BLOCK_ENTRIES: usize = (BLOCK - HEAD_BYTES) / ENTRY_BYTES;

const _: () = assert!(BLOCK_ENTRIES == 100, "part of the on-disk format");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Entries,
    Seal,
}

impl Kind {
    fn code(self) -> u16 {
        match self {
            Kind::Entries => 1,
            Kind::Seal => 2,
        }
    }

    fn from_code(code: u16) -> Option<Kind> {
        [Kind::Entries, Kind::Seal]
            .into_iter()
            .find(|kind| kind.code() == code)
    }
}

impl SegmentIndex {
    /// Blocks that the intervals fill or begin; also the number of the seal block.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.entries.len().div_ceil(BLOCK_ENTRIES)
    }

    /// Blocks that will not change any more.
    #[must_use]
    pub fn full_blocks(&self) -> usize {
        self.entries.len() / BLOCK_ENTRIES
    }

    /// Block `number`, for position `number * BLOCK` of the file. `None` beyond [`SegmentIndex::blocks`].
    #[must_use]
    pub fn encode_block(&self, number: usize) -> Option<Vec<u8>> {
        let entries = self.entries.chunks(BLOCK_ENTRIES).nth(number)?;
        let mut block = begin_block(self.key, Kind::Entries, number, entries.len());
        for entry in entries {
            entry.encode_into(&mut block);
        }
        Some(finish_block(block))
    }

    /// The seal block, for position `blocks() * BLOCK` of the file.
    #[must_use]
    pub fn encode_seal(&self) -> Vec<u8> {
        let seal = self.seal();
        let mut block = begin_block(self.key, Kind::Seal, self.blocks(), 1);
        block.put_u64(seal.end.0);
        block.put_u64(seal.next.0);
        block.put_i64(seal.max_timestamp);
        block.put_u64(seal.max_timestamp_base.0);
        block.put_u32(seal.intervals);
        let (first, last) = seal.epochs.unwrap_or_default();
        block.put_u32(first.0);
        block.put_u32(last.0);
        finish_block(block)
    }
}

impl Entry {
    fn encode_into(&self, out: &mut Vec<u8>) {
        out.put_u32(self.first);
        out.put_u32(self.count);
        out.put_u32(self.pos);
        out.put_u32(self.len);
        out.put_u32(self.crc);
        out.put_u32(self.epoch);
        out.put_i64(self.max_timestamp);
        out.put_u32(self.max_timestamp_base);
        out.put_u32(0);
    }

    fn decode(fields: &mut Reader<'_>) -> Option<Entry> {
        let entry = Entry {
            first: fields.u32()?,
            count: fields.u32()?,
            pos: fields.u32()?,
            len: fields.u32()?,
            crc: fields.u32()?,
            epoch: fields.u32()?,
            max_timestamp: fields.i64()?,
            max_timestamp_base: fields.u32()?,
        };
        fields.u32().filter(|reserved| *reserved == 0)?;
        Some(entry)
    }
}

/// A block header with room for the CRC.
fn begin_block(key: SegmentKey, kind: Kind, number: usize, count: usize) -> Vec<u8> {
    let mut block = Vec::with_capacity(BLOCK);
    block.put(MAGIC);
    block.put_u16(VERSION);
    block.put_u16(kind.code());
    block.put(key.partition.topic.0);
    block.put_u32(key.partition.index);
    // A segment has fewer than 2^32 intervals, a block at most BLOCK_ENTRIES.
    block.put_u32(number as u32);
    block.put_u64(key.base.0);
    block.put_u16(count as u16);
    block.resize(HEAD_BYTES, 0);
    block
}

fn finish_block(mut block: Vec<u8>) -> Vec<u8> {
    block.resize(BLOCK, 0);
    let crc = block_crc(&block);
    block[CRC_AT..HEAD_BYTES].copy_from_slice(&crc.to_le_bytes());
    block
}

/// CRC over the block but for the field it is kept in.
fn block_crc(block: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&block[..CRC_AT]);
    crc.update(&block[HEAD_BYTES..]);
    crc.finalize()
}

/// Kind, number of entries and fields of block `number` of this segment; `None` when it is not exactly that.
fn open_block(key: SegmentKey, number: usize, block: &[u8; BLOCK]) -> Option<(Kind, usize, Reader<'_>)> {
    let mut head = Reader::new(&block[..HEAD_BYTES]);
    let magic: [u8; 4] = head.array()?;
    let version = head.u16()?;
    let kind = Kind::from_code(head.u16()?)?;
    let topic: [u8; 16] = head.array()?;
    let index = head.u32()?;
    let found = head.u32()?;
    let base = head.u64()?;
    let count = usize::from(head.u16()?);
    let stated = u32::from_le_bytes(*block[..HEAD_BYTES].last_chunk()?);
    let same = (magic, version, topic, index) == (MAGIC, VERSION, key.partition.topic.0, key.partition.index)
        && usize::try_from(found) == Ok(number)
        && base == key.base.0;
    let good = same && (1..=BLOCK_ENTRIES).contains(&count) && stated == block_crc(block);
    good.then(|| (kind, count, Reader::new(&block[HEAD_BYTES..])))
}

/// Reads a seal block by itself: block `number` of the index, usually the last of the file. It tells what a whole
/// segment holds without its intervals. `None` when the block is not exactly that.
#[must_use]
pub fn decode_seal(key: SegmentKey, number: usize, block: &[u8]) -> Option<Seal> {
    let (Kind::Seal, 1, mut fields) = open_block(key, number, block.try_into().ok()?)? else {
        return None;
    };
    let mut seal = Seal {
        end: Pos(fields.u64()?),
        next: Offset(fields.u64()?),
        max_timestamp: fields.i64()?,
        max_timestamp_base: Offset(fields.u64()?),
        intervals: fields.u32()?,
        epochs: None,
    };
    let (first, last) = (LeaderEpoch(fields.u32()?), LeaderEpoch(fields.u32()?));
    if seal.intervals > 0 {
        seal.epochs = Some((first, last));
    }
    let belongs = (seal.intervals as usize).div_ceil(BLOCK_ENTRIES) == number;
    (belongs && first <= last && key.fits(seal.end, seal.next)).then_some(seal)
}

/// What an index file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexRead {
    /// The intervals before the first doubt.
    pub index: SegmentIndex,
    /// The seal, when the file is whole and agrees with it.
    pub seal: Option<Seal>,
    /// Something in the file is not what it should be: write it again from here ([`SegmentIndex::full_blocks`]) on.
    pub rewrite: bool,
}

/// Reads the index file of a segment, whatever it holds. Missing blocks are no fault: the file of an active segment
/// trails the log.
#[must_use]
pub fn decode(key: SegmentKey, file: &[u8]) -> IndexRead {
    let mut index = SegmentIndex::new(key);
    let (blocks, partial) = file.as_chunks::<BLOCK>();
    let damaged = |index| IndexRead {
        index,
        seal: None,
        rewrite: true,
    };
    for (number, block) in blocks.iter().enumerate() {
        let fields = open_block(key, number, block);
        match fields {
            Some((Kind::Entries, count, fields)) if index.len() == number * BLOCK_ENTRIES => {
                if !push_all(&mut index, count, fields) {
                    return damaged(index);
                }
            }
            Some((Kind::Seal, ..)) => {
                let seal = decode_seal(key, number, block).filter(|seal| *seal == index.seal());
                let last = number + 1 == blocks.len() && partial.is_empty();
                return IndexRead {
                    rewrite: seal.is_none() || !last,
                    seal,
                    index,
                };
            }
            _ => return damaged(index),
        }
    }
    IndexRead {
        index,
        seal: None,
        rewrite: !partial.is_empty(),
    }
}

/// Adds the entries of a block; false at the first that does not continue the index.
fn push_all(index: &mut SegmentIndex, count: usize, mut fields: Reader<'_>) -> bool {
    (0..count).all(|_| Entry::decode(&mut fields).is_some_and(|entry| index.push(entry)))
        && fields.rest().iter().all(|byte| *byte == 0)
}
