//! Two forms of a producer table: an entry of a snapshot, and a `.producers` file of its own.
//!
//! Invariant: a form that decodes is a table that fulfils the table's invariants; nothing is allocated beyond what the
//! bytes can hold.

use thiserror::Error;

use super::{CACHED_BATCHES, ProducedBatch, Producer, ProducerTable, next_sequence};
use crate::codec::{Put, Reader};
use crate::limits::FORMAT_VERSION;
use crate::types::{Offset, PartitionId};

const MAGIC: [u8; 8] = *b"RFprod\r\n";

/// Magic, version, CRC, end offset, length of what follows.
const HEAD_BYTES: usize = 28;
/// id, epoch, batches, padding, last_ms.
const PRODUCER_BYTES: usize = 20;

/// Why a `.producers` file is not usable. It is then built again from the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ProducersError {
    #[error("the file is cut short")]
    Truncated,
    #[error("the file does not begin with the mark of .producers")]
    WrongMagic,
    #[error("format version {0} is not {FORMAT_VERSION}")]
    UnsupportedVersion(u32),
    #[error("the checksum does not match: damaged, or of another partition")]
    BadChecksum,
    #[error("the content is no producer table")]
    BadContent,
}

impl ProducerTable {
    /// Appends the snapshot form: u32 count, then per producer (by id) i64 id, i16 epoch, u8 batches, u8 1 when short,
    /// i64 last_ms, and per batch i32 first sequence, i32 last sequence, u64 base, u64 end. The snapshot's checksum
    /// covers it.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        // max_producers bounds the count
        out.put_u32(self.len() as u32);
        for (id, producer) in self.iter() {
            out.put_i64(id);
            out.put(producer.epoch.to_le_bytes());
            out.put([producer.cached, u8::from(producer.short)]);
            out.put_i64(producer.last_ms);
            for batch in producer.batches() {
                out.put(batch.first_sequence.to_le_bytes());
                out.put(batch.last_sequence.to_le_bytes());
                out.put_u64(batch.base.0);
                out.put_u64(batch.end.0);
            }
        }
    }

    /// Reads the snapshot form from the front of `bytes`; the table and the bytes after it. `None` when it is none.
    /// A bound below the number of producers drops those that wrote least recently.
    #[must_use]
    pub fn decode(bytes: &[u8], max_producers: usize) -> Option<(ProducerTable, &[u8])> {
        let mut reader = Reader::new(bytes);
        let count = reader.count(PRODUCER_BYTES)?;
        let mut table = ProducerTable::new(max_producers);
        let mut last_id = -1;
        for _ in 0..count {
            let (id, producer) = decode_producer(&mut reader)?;
            if id <= last_id {
                return None;
            }
            last_id = id;
            table.insert(id, producer);
        }
        table.evict();
        Some((table, reader.rest()))
    }
}

fn decode_producer(reader: &mut Reader<'_>) -> Option<(i64, Producer)> {
    let id = reader.i64()?;
    let epoch = reader.i16().filter(|epoch| *epoch >= 0)?;
    let cached = usize::from(reader.u8()?);
    let short = reader.u8()?;
    if short > 1 || cached > CACHED_BATCHES || (short == 1 && cached == CACHED_BATCHES) {
        return None;
    }
    let mut producer = Producer::new(epoch);
    producer.short = short == 1;
    producer.last_ms = reader.i64()?;
    for _ in 0..cached {
        let batch = ProducedBatch {
            first_sequence: reader.i32()?,
            last_sequence: reader.i32()?,
            base: Offset(reader.u64()?),
            end: Offset(reader.u64()?),
        };
        let positive = batch.first_sequence >= 0 && batch.last_sequence >= 0 && batch.base < batch.end;
        let follows = producer.batches().last().is_none_or(|last| {
            batch.first_sequence == next_sequence(last.last_sequence) && batch.base >= last.end
        });
        if !positive || !follows {
            return None;
        }
        producer.push(batch);
    }
    Some((id, producer))
}

/// A `.producers` file: the table as it is when the log of `partition` ends at `end`.
#[must_use]
pub fn encode_file(partition: PartitionId, end: Offset, table: &ProducerTable) -> Vec<u8> {
    let mut body = Vec::new();
    table.encode_into(&mut body);
    let mut file = Vec::with_capacity(HEAD_BYTES + body.len());
    file.put(MAGIC);
    file.put_u32(FORMAT_VERSION);
    file.put_u32(file_crc(partition, end, &body));
    file.put_u64(end.0);
    // max_producers bounds the length
    file.put_u32(body.len() as u32);
    file.extend_from_slice(&body);
    file
}

/// Reads a `.producers` file of `partition`: the log end it was written at, and the table. Zeros after the content
/// are padding.
pub fn decode_file(
    partition: PartitionId,
    file: &[u8],
    max_producers: usize,
) -> Result<(Offset, ProducerTable), ProducersError> {
    let mut reader = Reader::new(file);
    let magic: [u8; 8] = reader.array().ok_or(ProducersError::Truncated)?;
    if magic != MAGIC {
        return Err(ProducersError::WrongMagic);
    }
    let version = reader.u32().ok_or(ProducersError::Truncated)?;
    if version != FORMAT_VERSION {
        return Err(ProducersError::UnsupportedVersion(version));
    }
    let stated = reader.u32().ok_or(ProducersError::Truncated)?;
    let end = reader.u64().map(Offset).ok_or(ProducersError::Truncated)?;
    let length = reader.u32().ok_or(ProducersError::Truncated)?;
    let body = reader.bytes(length as usize).ok_or(ProducersError::Truncated)?;
    if file_crc(partition, end, body) != stated {
        return Err(ProducersError::BadChecksum);
    }
    if reader.rest().iter().any(|byte| *byte != 0) {
        return Err(ProducersError::BadContent);
    }
    let (table, rest) = ProducerTable::decode(body, max_producers).ok_or(ProducersError::BadContent)?;
    let beyond = table.by_end.last().is_some_and(|(last, _)| *last > end);
    if !rest.is_empty() || beyond {
        return Err(ProducersError::BadContent);
    }
    Ok((end, table))
}

/// CRC over partition, end offset and content.
pub(super) fn file_crc(partition: PartitionId, end: Offset, body: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&partition.topic.0);
    crc.update(&partition.index.to_le_bytes());
    crc.update(&end.0.to_le_bytes());
    crc.update(body);
    crc.finalize()
}
