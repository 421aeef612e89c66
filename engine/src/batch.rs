//! Kafka record batch v2 (magic 2): header layout, checks on the way in, stamping, iteration.
//!
//! Invariants:
//! - Nothing here panics on foreign bytes or allocates in proportion to a count it read.
//! - [`validate`] is the only gate for bytes of a producer: what passes has a length field that equals the slice,
//!   a correct CRC-32C, one offset per record without gaps, and (uncompressed) records that fill it exactly.
//! - [`stamp`] changes only the fields a leader owns: base offset, leader epoch, maximum timestamp and the timestamp
//!   type bit. The first two lie outside the CRC; the others cost a new CRC.
//! - Compressed payloads are never opened.
//!
//! All integers of a batch are big-endian. The layout is Kafka's, published in its protocol guide; field positions
//! are in [`field`], the table is in `engine/README.md`.

mod builder;
mod records;
#[cfg(test)]
mod tests;

use thiserror::Error;

pub use builder::{BatchBuilder, NewRecord};
pub use records::{Headers, Record, RecordFault, Records, first_at_or_after, records};

use crate::limits::MAX_BATCH_BYTES;
use crate::types::{LeaderEpoch, Offset};

/// Byte positions of the header's fields within a batch.
pub mod field {
    /// i64: offset of the first record.
    pub const BASE_OFFSET: usize = 0;
    /// i32: bytes after this field.
    pub const BATCH_LENGTH: usize = 8;
    /// i32: reign of the leader that stamped the batch; -1 from a producer.
    pub const LEADER_EPOCH: usize = 12;
    /// i8: 2.
    pub const MAGIC: usize = 16;
    /// u32: CRC-32C over everything from [`ATTRIBUTES`] to the end of the batch.
    pub const CRC: usize = 17;
    /// u16: see [`super::attribute`].
    pub const ATTRIBUTES: usize = 21;
    /// i32: offset of the last record minus the base offset.
    pub const LAST_OFFSET_DELTA: usize = 23;
    /// i64: what the records' timestamp deltas are added to (milliseconds since 1970).
    pub const BASE_TIMESTAMP: usize = 27;
    /// i64: largest timestamp of a record; the append time where the timestamp type bit is set.
    pub const MAX_TIMESTAMP: usize = 35;
    /// i64: idempotent producer, -1 without.
    pub const PRODUCER_ID: usize = 43;
    /// i16: epoch of the producer id, -1 without.
    pub const PRODUCER_EPOCH: usize = 51;
    /// i32: sequence of the first record, -1 without a producer id.
    pub const BASE_SEQUENCE: usize = 53;
    /// i32: number of records.
    pub const RECORD_COUNT: usize = 57;
}

/// Bits of the attributes field.
pub mod attribute {
    /// Compression codec: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd.
    pub const CODEC: u16 = 0b111;
    /// Set: the maximum timestamp is the leader's append time and counts for every record.
    pub const LOG_APPEND_TIME: u16 = 1 << 3;
    /// Part of a transaction.
    pub const TRANSACTIONAL: u16 = 1 << 4;
    /// Holds control records.
    pub const CONTROL: u16 = 1 << 5;
    /// Every bit a producer may set today.
    pub const FROM_PRODUCER: u16 = CODEC;
}

/// Bytes of a batch header, and so the least size of a batch.
pub const HEADER_BYTES: usize = 61;

/// The one batch format the engine stores.
pub const MAGIC: u8 = 2;

/// Bytes in front of what the length field counts: base offset and the field itself.
const LENGTH_OVERHEAD: usize = field::LEADER_EPOCH;

/// Highest codec number (zstd).
const CODEC_MAX: u16 = 4;

/// `message.timestamp.type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TimestampType {
    /// The producer's timestamps are kept.
    #[default]
    CreateTime,
    /// The leader stamps its wall clock on the batch.
    LogAppendTime,
}

/// Why bytes are not one valid record batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BatchError {
    #[error("{found} bytes are fewer than the {needed} of the batch")]
    TooShort { found: usize, needed: usize },
    #[error("the batch has {size} bytes, more than {max}", max = MAX_BATCH_BYTES)]
    TooLarge { size: usize },
    #[error("length field {0} is negative or smaller than a header")]
    Length(i32),
    #[error("{0} bytes follow the batch")]
    TrailingBytes(usize),
    #[error("magic {0} is not {MAGIC}")]
    Magic(u8),
    #[error("CRC-32C is {found:08x}, the header says {stated:08x}")]
    Crc { stated: u32, found: u32 },
    #[error("base offset {0} is negative")]
    BaseOffset(i64),
    #[error("attributes {0:#06x} are reserved or not for producers (transaction, control, append time)")]
    Attributes(u16),
    #[error("codec {0} is unknown")]
    Codec(u16),
    #[error("record count {0} is not positive")]
    Count(i32),
    #[error("{count} records do not fit {bytes} bytes")]
    CountTooLarge { count: u32, bytes: usize },
    #[error("{count} records but last offset delta {last_offset_delta}")]
    OffsetDelta { count: u32, last_offset_delta: i32 },
    #[error("timestamp {0} is below -1")]
    Timestamp(i64),
    #[error("producer id {id} with epoch {epoch} and sequence {sequence}")]
    Producer { id: i64, epoch: i16, sequence: i32 },
    #[error("record {index}: {fault}")]
    Record { index: u32, fault: RecordFault },
    #[error("{0} bytes follow the last record")]
    BytesAfterRecords(usize),
    #[error("records of a compressed batch (codec {0}) are opaque")]
    Compressed(u16),
}

/// The header of one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchHeader {
    /// Offset of the first record; whatever the producer wrote until stamped.
    pub base_offset: Offset,
    /// Bytes of the whole batch, header included.
    pub size: usize,
    /// Reign of the leader that stamped it; `None` (-1 in the bytes) from a producer.
    pub leader_epoch: Option<LeaderEpoch>,
    /// CRC-32C as stated in the header.
    pub crc: u32,
    /// Raw attributes, see [`attribute`].
    pub attributes: u16,
    /// Offset of the last record minus the base offset.
    pub last_offset_delta: u32,
    /// What the records' timestamp deltas are added to.
    pub base_timestamp: i64,
    /// Largest timestamp of a record (milliseconds since 1970, -1 for none).
    pub max_timestamp: i64,
    /// Idempotent producer, -1 without.
    pub producer_id: i64,
    /// Epoch of the producer id, -1 without.
    pub producer_epoch: i16,
    /// Sequence of the first record, -1 without.
    pub base_sequence: i32,
    /// Number of records, at least 1.
    pub count: u32,
}

impl BatchHeader {
    /// Reads the header of the batch that starts `bytes` and demands that the whole batch is there; more bytes may
    /// follow. Checks lengths, magic, counts and signs, not the CRC and not the rules for producers.
    pub fn parse(bytes: &[u8]) -> Result<BatchHeader, BatchError> {
        let header = parse_head(bytes)?;
        if header.size > bytes.len() {
            return Err(BatchError::TooShort {
                found: bytes.len(),
                needed: header.size,
            });
        }
        Ok(header)
    }

    /// Offset of the last record.
    #[must_use]
    pub fn last_offset(&self) -> Offset {
        self.base_offset.plus(u64::from(self.last_offset_delta))
    }

    /// Offset after the last record.
    #[must_use]
    pub fn next_offset(&self) -> Offset {
        self.last_offset().plus(1)
    }

    /// Codec number; 0 is uncompressed.
    #[must_use]
    pub fn codec(&self) -> u16 {
        self.attributes & attribute::CODEC
    }

    /// Whose clock the timestamps are.
    #[must_use]
    pub fn timestamp_type(&self) -> TimestampType {
        if self.attributes & attribute::LOG_APPEND_TIME == 0 {
            TimestampType::CreateTime
        } else {
            TimestampType::LogAppendTime
        }
    }

    /// Whether an idempotent producer sent it.
    #[must_use]
    pub fn has_producer(&self) -> bool {
        self.producer_id >= 0
    }

    /// Sequence of the last record. Sequences wrap from `i32::MAX` to 0: first 2147483646 with three records ends
    /// at 0.
    #[must_use]
    pub fn last_sequence(&self) -> i32 {
        const RANGE: i64 = i32::MAX as i64 + 1;
        let last = i64::from(self.base_sequence) + i64::from(self.last_offset_delta);
        // Both summands are below RANGE, so the remainder fits an i32 whatever the header said.
        (last % RANGE) as i32
    }
}

/// Like [`BatchHeader::parse`] but needs only the [`HEADER_BYTES`] of the header.
pub(crate) fn parse_head(bytes: &[u8]) -> Result<BatchHeader, BatchError> {
    let raw = bytes.first_chunk::<HEADER_BYTES>().ok_or(BatchError::TooShort {
        found: bytes.len(),
        needed: HEADER_BYTES,
    })?;
    if raw[field::MAGIC] != MAGIC {
        return Err(BatchError::Magic(raw[field::MAGIC]));
    }
    let base_offset = i64::from_be_bytes(take(raw, field::BASE_OFFSET));
    let last_offset_delta = i32::from_be_bytes(take(raw, field::LAST_OFFSET_DELTA));
    let epoch = i32::from_be_bytes(take(raw, field::LEADER_EPOCH));
    let count = i32::from_be_bytes(take(raw, field::RECORD_COUNT));
    let count = u32::try_from(count).map_err(|_| BatchError::Count(count))?;
    if count == 0 {
        return Err(BatchError::Count(0));
    }
    Ok(BatchHeader {
        base_offset: Offset(u64::try_from(base_offset).map_err(|_| BatchError::BaseOffset(base_offset))?),
        size: stated_size(raw)?,
        leader_epoch: u32::try_from(epoch).ok().map(LeaderEpoch),
        crc: u32::from_be_bytes(take(raw, field::CRC)),
        attributes: u16::from_be_bytes(take(raw, field::ATTRIBUTES)),
        last_offset_delta: u32::try_from(last_offset_delta).map_err(|_| BatchError::OffsetDelta {
            count,
            last_offset_delta,
        })?,
        base_timestamp: i64::from_be_bytes(take(raw, field::BASE_TIMESTAMP)),
        max_timestamp: i64::from_be_bytes(take(raw, field::MAX_TIMESTAMP)),
        producer_id: i64::from_be_bytes(take(raw, field::PRODUCER_ID)),
        producer_epoch: i16::from_be_bytes(take(raw, field::PRODUCER_EPOCH)),
        base_sequence: i32::from_be_bytes(take(raw, field::BASE_SEQUENCE)),
        count,
    })
}

/// Bytes of the batch by its length field.
fn stated_size(raw: &[u8; HEADER_BYTES]) -> Result<usize, BatchError> {
    let length = i32::from_be_bytes(take(raw, field::BATCH_LENGTH));
    let size = usize::try_from(length).map_err(|_| BatchError::Length(length))? + LENGTH_OVERHEAD;
    if size < HEADER_BYTES {
        return Err(BatchError::Length(length));
    }
    if size > MAX_BATCH_BYTES {
        return Err(BatchError::TooLarge { size });
    }
    Ok(size)
}

/// The `N` bytes at `at` of a header; `at` is always one of [`field`].
fn take<const N: usize>(raw: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&raw[at..at + N]);
    out
}

/// Checks that `bytes` are exactly one batch as a producer sends it, CRC and (uncompressed) every record included.
///
/// Two fields follow Kafka's tolerance, because real clients depend on it: base offset and leader epoch are ignored
/// (the leader stamps them), and the stated maximum timestamp of an uncompressed batch may be wrong. The header
/// returned carries the true one; [`stamp`] writes it. A sequence without a producer id is ignored too.
pub fn validate(bytes: &[u8]) -> Result<BatchHeader, BatchError> {
    let mut header = BatchHeader::parse(bytes)?;
    if header.size < bytes.len() {
        return Err(BatchError::TrailingBytes(bytes.len() - header.size));
    }
    // Before the rules: damaged bytes shall not be taken for a client's mistake, which it would not send again.
    check_crc(bytes, header.crc)?;
    check_producer_rules(&header)?;
    if header.codec() == 0 {
        header.max_timestamp = records::walk(bytes, &header)?;
    }
    Ok(header)
}

/// The rules on header fields for a batch that comes from a client.
fn check_producer_rules(header: &BatchHeader) -> Result<(), BatchError> {
    if header.attributes & !attribute::FROM_PRODUCER != 0 {
        return Err(BatchError::Attributes(header.attributes));
    }
    if header.codec() > CODEC_MAX {
        return Err(BatchError::Codec(header.codec()));
    }
    if header.count - 1 != header.last_offset_delta {
        return Err(BatchError::OffsetDelta {
            count: header.count,
            // parse_head took it from an i32
            last_offset_delta: header.last_offset_delta as i32,
        });
    }
    for timestamp in [header.base_timestamp, header.max_timestamp] {
        if timestamp < -1 {
            return Err(BatchError::Timestamp(timestamp));
        }
    }
    let (id, epoch, sequence) = (header.producer_id, header.producer_epoch, header.base_sequence);
    if id < -1 || (id >= 0 && (epoch < 0 || sequence < 0)) {
        return Err(BatchError::Producer { id, epoch, sequence });
    }
    Ok(())
}

/// Reads a header where the rest of the batch may be missing: only [`HEADER_BYTES`] are needed. For batches that
/// were checked before; nothing but the shape of the header is checked. `None` when it is none.
#[must_use]
pub fn peek(bytes: &[u8]) -> Option<BatchHeader> {
    parse_head(bytes).ok()
}

/// Whether `batch`, exactly one whole batch, has the CRC-32C its header states.
#[must_use]
pub fn verify_crc(batch: &[u8]) -> bool {
    BatchHeader::parse(batch).is_ok_and(|h| h.size == batch.len() && check_crc(batch, h.crc).is_ok())
}

/// CRC-32C of one whole batch; `batch` holds at least a header.
fn batch_crc(batch: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(&batch[field::ATTRIBUTES..])
}

/// Compares the CRC-32C of one whole batch with the one its header states.
pub(crate) fn check_crc(batch: &[u8], stated: u32) -> Result<(), BatchError> {
    let found = batch_crc(batch);
    if found == stated {
        Ok(())
    } else {
        Err(BatchError::Crc { stated, found })
    }
}

/// Makes a validated batch the leader's: writes base offset and leader epoch, with `log_append_time` also the
/// timestamp type bit and that time as maximum timestamp, without it the true maximum that [`validate`] found.
/// `header` follows. The CRC is computed again only if bytes below it changed.
///
/// # Panics
/// When `bytes` are not the batch `header` was read from (shorter than it): a bug of the caller.
pub fn stamp(
    bytes: &mut [u8],
    header: &mut BatchHeader,
    base_offset: Offset,
    leader_epoch: LeaderEpoch,
    log_append_time: Option<i64>,
) {
    assert_eq!(
        bytes.len(),
        header.size,
        "stamping another batch than the header's"
    );
    header.base_offset = base_offset;
    header.leader_epoch = Some(leader_epoch);
    if let Some(time) = log_append_time {
        header.attributes |= attribute::LOG_APPEND_TIME;
        header.max_timestamp = time;
    }
    put(bytes, field::BASE_OFFSET, base_offset.0.to_be_bytes());
    put(bytes, field::LEADER_EPOCH, leader_epoch.0.to_be_bytes());
    let attributes_changed = put(bytes, field::ATTRIBUTES, header.attributes.to_be_bytes());
    let timestamp_changed = put(bytes, field::MAX_TIMESTAMP, header.max_timestamp.to_be_bytes());
    if attributes_changed || timestamp_changed {
        header.crc = batch_crc(bytes);
        put(bytes, field::CRC, header.crc.to_be_bytes());
    }
}

/// Writes a field; whether that changed it.
fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) -> bool {
    let place = &mut bytes[at..at + N];
    let changed = *place != value;
    place.copy_from_slice(&value);
    changed
}

/// Iterates over a run of whole batches; see [`Batches`].
#[must_use]
pub fn batches(bytes: &[u8]) -> Batches<'_> {
    Batches { rest: bytes }
}

/// Header and bytes of one batch after the other. The first bytes that are no whole batch give one error, then the
/// iterator ends. No CRC is checked.
#[derive(Debug, Clone)]
pub struct Batches<'a> {
    rest: &'a [u8],
}

impl<'a> Batches<'a> {
    /// Bytes not yet iterated over.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

impl<'a> Iterator for Batches<'a> {
    type Item = Result<(BatchHeader, &'a [u8]), BatchError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        match BatchHeader::parse(self.rest) {
            Ok(header) => {
                let (batch, rest) = self.rest.split_at(header.size);
                self.rest = rest;
                Some(Ok((header, batch)))
            }
            Err(error) => {
                self.rest = &[];
                Some(Err(error))
            }
        }
    }
}
