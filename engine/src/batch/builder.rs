//! Builds uncompressed batches, as a producer sends them: for the client library, load generator and tests.

use super::{BatchError, HEADER_BYTES, LENGTH_OVERHEAD, MAGIC, batch_crc, field, put};
use crate::limits::MAX_BATCH_BYTES;

/// A record to add to a batch.
#[derive(Debug, Clone, Copy, Default)]
pub struct NewRecord<'a> {
    /// Milliseconds since 1970; anything negative counts as -1, "none".
    pub timestamp: i64,
    /// The key; `None` is null.
    pub key: Option<&'a [u8]>,
    /// The value; `None` is null.
    pub value: Option<&'a [u8]>,
    /// Headers: key and value (`None` is null).
    pub headers: &'a [(&'a [u8], Option<&'a [u8]>)],
}

/// Collects records into one batch. Holds the finished bytes at all times but for the header.
///
/// Invariant: `bytes` = room for the header, then `count` encoded records; never above [`MAX_BATCH_BYTES`].
#[derive(Debug, Clone)]
pub struct BatchBuilder {
    bytes: Vec<u8>,
    count: u32,
    base_timestamp: i64,
    max_timestamp: i64,
    producer: (i64, i16, i32),
}

impl Default for BatchBuilder {
    fn default() -> BatchBuilder {
        BatchBuilder::new()
    }
}

impl BatchBuilder {
    /// An empty batch without producer id.
    #[must_use]
    pub fn new() -> BatchBuilder {
        BatchBuilder {
            bytes: vec![0; HEADER_BYTES],
            count: 0,
            base_timestamp: -1,
            max_timestamp: -1,
            producer: (-1, -1, -1),
        }
    }

    /// Sets producer id, its epoch, and the sequence of the first record (all at least 0).
    pub fn producer(&mut self, id: i64, epoch: i16, base_sequence: i32) -> &mut BatchBuilder {
        self.producer = (id, epoch, base_sequence);
        self
    }

    /// Adds a record.
    ///
    /// # Errors
    /// [`BatchError::TooLarge`] when the batch would exceed [`MAX_BATCH_BYTES`]; nothing is added.
    pub fn push(&mut self, record: NewRecord<'_>) -> Result<(), BatchError> {
        let timestamp = record.timestamp.max(-1);
        let base = if self.count == 0 {
            timestamp
        } else {
            self.base_timestamp
        };
        // Wraps as the reader does: the sum is right for every pair of timestamps.
        let delta = timestamp.wrapping_sub(base);
        let body = body_size(&record, delta, self.count);
        let size = (self.bytes.len() as u64)
            .saturating_add(body)
            .saturating_add(varint_size(body as i64) as u64);
        if size > MAX_BATCH_BYTES as u64 {
            return Err(BatchError::TooLarge {
                size: usize::try_from(size).unwrap_or(usize::MAX),
            });
        }
        let out = &mut self.bytes;
        put_varint(out, body as i64);
        out.push(0);
        put_varint(out, delta);
        put_varint(out, i64::from(self.count));
        put_field(out, record.key);
        put_field(out, record.value);
        put_varint(out, record.headers.len() as i64);
        for (key, value) in record.headers {
            put_field(out, Some(key));
            put_field(out, *value);
        }
        self.base_timestamp = base;
        self.max_timestamp = self.max_timestamp.max(timestamp);
        self.count += 1;
        Ok(())
    }

    /// Records so far.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of the batch if it were finished now.
    #[must_use]
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Writes the header and returns the batch, with base offset 0 and leader epoch -1. `None` without records:
    /// there is no empty batch.
    #[must_use]
    pub fn finish(mut self) -> Option<Vec<u8>> {
        let last = self.count.checked_sub(1)?;
        let (id, epoch, sequence) = self.producer;
        // push keeps the size within MAX_BATCH_BYTES and so within an i32
        let length = (self.bytes.len() - LENGTH_OVERHEAD) as u32;
        let bytes = &mut self.bytes;
        put(bytes, field::BATCH_LENGTH, length.to_be_bytes());
        put(bytes, field::LEADER_EPOCH, (-1i32).to_be_bytes());
        put(bytes, field::MAGIC, [MAGIC]);
        put(bytes, field::LAST_OFFSET_DELTA, last.to_be_bytes());
        put(bytes, field::BASE_TIMESTAMP, self.base_timestamp.to_be_bytes());
        put(bytes, field::MAX_TIMESTAMP, self.max_timestamp.to_be_bytes());
        put(bytes, field::PRODUCER_ID, id.to_be_bytes());
        put(bytes, field::PRODUCER_EPOCH, epoch.to_be_bytes());
        put(bytes, field::BASE_SEQUENCE, sequence.to_be_bytes());
        put(bytes, field::RECORD_COUNT, self.count.to_be_bytes());
        let crc = batch_crc(bytes);
        put(bytes, field::CRC, crc.to_be_bytes());
        Some(self.bytes)
    }
}

/// Bytes of a record after its length.
fn body_size(record: &NewRecord<'_>, timestamp_delta: i64, index: u32) -> u64 {
    let fixed = 1
        + varint_size(timestamp_delta)
        + varint_size(i64::from(index))
        + varint_size(record.headers.len() as i64);
    let headers: u64 = record
        .headers
        .iter()
        .map(|(key, value)| field_size(Some(key)) + field_size(*value))
        .sum();
    fixed as u64 + field_size(record.key) + field_size(record.value) + headers
}

fn field_size(value: Option<&[u8]>) -> u64 {
    match value {
        None => 1,
        Some(value) => (varint_size(value.len() as i64) + value.len()) as u64,
    }
}

fn put_field(out: &mut Vec<u8>, value: Option<&[u8]>) {
    match value {
        None => put_varint(out, -1),
        Some(value) => {
            put_varint(out, value.len() as i64);
            out.extend_from_slice(value);
        }
    }
}

fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

fn varint_size(value: i64) -> usize {
    let bits = 64 - (zigzag(value) | 1).leading_zeros() as usize;
    bits.div_ceil(7)
}

fn put_varint(out: &mut Vec<u8>, value: i64) {
    let mut rest = zigzag(value);
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}
