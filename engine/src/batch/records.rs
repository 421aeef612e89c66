//! The records inside an uncompressed batch: one parser, used by the check on the way in and by readers.
//!
//! Records borrow from the batch; nothing is copied or allocated.

use thiserror::Error;

use super::{BatchError, BatchHeader, HEADER_BYTES, TimestampType};
use crate::types::Offset;

/// Least bytes of a record: length, attributes, two deltas, two lengths, header count.
const RECORD_MIN: usize = 7;
/// Least bytes of a record header: two lengths.
const RECORD_HEADER_MIN: usize = 2;

/// What is wrong with one record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RecordFault {
    #[error("a varint is cut or too long")]
    Varint,
    #[error("its length is negative or beyond the batch")]
    Length,
    #[error("a field goes beyond the record")]
    Field,
    #[error("bytes follow its last field")]
    Trailing,
    #[error("its offset delta {0} is out of order")]
    OffsetDelta(i64),
    #[error("its timestamp {0} is below -1")]
    Timestamp(i64),
    #[error("its header count is negative or beyond the record")]
    HeaderCount,
    #[error("a header has no key")]
    HeaderKey,
}

/// One record of an uncompressed batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record<'a> {
    /// Its offset: base offset of the batch plus its number.
    pub offset: Offset,
    /// Milliseconds since 1970, -1 for none; the append time where the batch has one.
    pub timestamp: i64,
    /// The key; `None` is null, not empty.
    pub key: Option<&'a [u8]>,
    /// The value; `None` is null (a tombstone), not empty.
    pub value: Option<&'a [u8]>,
    /// The headers.
    pub headers: Headers<'a>,
}

/// Iterates over a record's headers: key and value (`None` is null). Their bytes were checked when the record was
/// read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Headers<'a> {
    rest: &'a [u8],
    left: u32,
}

impl<'a> Iterator for Headers<'a> {
    type Item = (&'a [u8], Option<&'a [u8]>);

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        next_header(&mut self.rest).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left as usize))
    }
}

/// Iterates over the records of one uncompressed batch; `batch` is exactly that batch.
///
/// # Errors
/// When the header is none, the slice is not exactly one batch, or it is compressed.
pub fn records(batch: &[u8]) -> Result<Records<'_>, BatchError> {
    let header = BatchHeader::parse(batch)?;
    if header.size < batch.len() {
        return Err(BatchError::TrailingBytes(batch.len() - header.size));
    }
    if header.codec() != 0 {
        return Err(BatchError::Compressed(header.codec()));
    }
    Records::new(batch, &header)
}

/// The first record of `batch` (exactly one whole batch) with a timestamp at or after `timestamp`: its offset and
/// timestamp. `None` when every record is older.
///
/// The records of a compressed batch are opaque: there the answer is the batch's base offset and maximum timestamp, so
/// that a reader who starts there misses nothing.
///
/// # Errors
/// When the bytes are not one batch or a record is damaged.
pub fn first_at_or_after(batch: &[u8], timestamp: i64) -> Result<Option<(Offset, i64)>, BatchError> {
    let header = BatchHeader::parse(batch)?;
    if header.max_timestamp < timestamp {
        return Ok(None);
    }
    if header.codec() != 0 {
        return Ok(Some((header.base_offset, header.max_timestamp)));
    }
    for record in records(batch)? {
        let record = record?;
        if record.timestamp >= timestamp {
            return Ok(Some((record.offset, record.timestamp)));
        }
    }
    Ok(None)
}

/// The records of one batch, in order. The first fault is returned once, then the iterator ends.
#[derive(Debug, Clone)]
pub struct Records<'a> {
    rest: &'a [u8],
    base_offset: Offset,
    base_timestamp: i64,
    /// Counts for every record when set.
    append_time: Option<i64>,
    index: u32,
    count: u32,
}

impl<'a> Records<'a> {
    fn new(batch: &'a [u8], header: &BatchHeader) -> Result<Records<'a>, BatchError> {
        let rest = &batch[HEADER_BYTES..];
        if header.count as usize > rest.len() / RECORD_MIN {
            return Err(BatchError::CountTooLarge {
                count: header.count,
                bytes: rest.len(),
            });
        }
        Ok(Records {
            rest,
            base_offset: header.base_offset,
            base_timestamp: header.base_timestamp,
            append_time: (header.timestamp_type() == TimestampType::LogAppendTime)
                .then_some(header.max_timestamp),
            index: 0,
            count: header.count,
        })
    }

    fn next_record(&mut self) -> Result<Record<'a>, RecordFault> {
        let length = varint(&mut self.rest)?;
        let length = usize::try_from(length).map_err(|_| RecordFault::Length)?;
        let (mut record, rest) = self.rest.split_at_checked(length).ok_or(RecordFault::Length)?;
        self.rest = rest;
        let record = &mut record;
        // The attributes of a record are unused; Kafka ignores the byte, so do we.
        *record = record.get(1..).ok_or(RecordFault::Field)?;
        let timestamp = self.base_timestamp.wrapping_add(varlong(record)?);
        let delta = varint(record)?;
        if delta != i64::from(self.index) {
            return Err(RecordFault::OffsetDelta(delta));
        }
        if timestamp < -1 {
            return Err(RecordFault::Timestamp(timestamp));
        }
        let key = field(record)?;
        let value = field(record)?;
        let headers = headers(record)?;
        Ok(Record {
            offset: self.base_offset.plus(u64::from(self.index)),
            timestamp: self.append_time.unwrap_or(timestamp),
            key,
            value,
            headers,
        })
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, BatchError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.index == self.count {
            return None;
        }
        let index = self.index;
        match self.next_record() {
            Ok(record) => {
                self.index += 1;
                Some(Ok(record))
            }
            Err(fault) => {
                self.index = self.count;
                Some(Err(BatchError::Record { index, fault }))
            }
        }
    }
}

/// Checks every record of an uncompressed batch and that they fill it; the largest timestamp of a record.
pub(super) fn walk(batch: &[u8], header: &BatchHeader) -> Result<i64, BatchError> {
    let mut records = Records::new(batch, header)?;
    let mut max_timestamp = -1;
    for record in records.by_ref() {
        max_timestamp = max_timestamp.max(record?.timestamp);
    }
    if records.rest.is_empty() {
        Ok(max_timestamp)
    } else {
        Err(BatchError::BytesAfterRecords(records.rest.len()))
    }
}

/// Checks the headers at the end of a record and returns an iterator over them.
fn headers<'a>(input: &mut &'a [u8]) -> Result<Headers<'a>, RecordFault> {
    let count = u32::try_from(varint(input)?).map_err(|_| RecordFault::HeaderCount)?;
    if count as usize > input.len() / RECORD_HEADER_MIN {
        return Err(RecordFault::HeaderCount);
    }
    let checked = Headers {
        rest: input,
        left: count,
    };
    for _ in 0..count {
        next_header(input)?;
    }
    if input.is_empty() {
        Ok(checked)
    } else {
        Err(RecordFault::Trailing)
    }
}

fn next_header<'a>(input: &mut &'a [u8]) -> Result<(&'a [u8], Option<&'a [u8]>), RecordFault> {
    let key = field(input)?.ok_or(RecordFault::HeaderKey)?;
    Ok((key, field(input)?))
}

/// A length (-1 is null) and that many bytes.
fn field<'a>(input: &mut &'a [u8]) -> Result<Option<&'a [u8]>, RecordFault> {
    let length = varint(input)?;
    if length == -1 {
        return Ok(None);
    }
    let length = usize::try_from(length).map_err(|_| RecordFault::Field)?;
    let (value, rest) = input.split_at_checked(length).ok_or(RecordFault::Field)?;
    *input = rest;
    Ok(Some(value))
}

/// A zigzag varint of at most 5 bytes that fits an i32.
fn varint(input: &mut &[u8]) -> Result<i64, RecordFault> {
    let value = zigzag::<5>(input)?;
    if i32::try_from(value).is_ok() {
        Ok(value)
    } else {
        Err(RecordFault::Varint)
    }
}

/// A zigzag varint of at most 10 bytes that fits an i64.
fn varlong(input: &mut &[u8]) -> Result<i64, RecordFault> {
    zigzag::<10>(input)
}

fn zigzag<const MAX_BYTES: usize>(input: &mut &[u8]) -> Result<i64, RecordFault> {
    let mut value = 0u64;
    for (at, byte) in input.iter().take(MAX_BYTES).enumerate() {
        let bits = u64::from(byte & 0x7f);
        let shift = 7 * at as u32;
        if shift == 63 && bits > 1 {
            return Err(RecordFault::Varint);
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            *input = &input[at + 1..];
            return Ok((value >> 1) as i64 ^ -((value & 1) as i64));
        }
    }
    Err(RecordFault::Varint)
}
