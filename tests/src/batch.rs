//! Record batches (magic 2) built and read byte by byte, independently of the engine's own code.
//!
//! Tests craft valid batches here, break single fields with [`put`], and read back what the broker serves.

use crc_fast::CrcAlgorithm;

/// Where the header fields of a batch start, in bytes.
pub mod at {
    /// Base offset, i64.
    pub const BASE_OFFSET: usize = 0;
    /// Bytes after this field, i32.
    pub const LENGTH: usize = 8;
    /// Leader epoch, i32.
    pub const LEADER_EPOCH: usize = 12;
    /// Magic, i8.
    pub const MAGIC: usize = 16;
    /// CRC-32C of everything after it, u32.
    pub const CRC: usize = 17;
    /// Attributes, i16; the codec is the lowest three bits.
    pub const ATTRIBUTES: usize = 21;
    /// Last offset delta, i32.
    pub const LAST_OFFSET_DELTA: usize = 23;
    /// Timestamp of the first record, i64.
    pub const BASE_TIMESTAMP: usize = 27;
    /// Largest timestamp, i64.
    pub const MAX_TIMESTAMP: usize = 35;
    /// Producer id, i64.
    pub const PRODUCER_ID: usize = 43;
    /// Producer epoch, i16.
    pub const PRODUCER_EPOCH: usize = 51;
    /// Sequence of the first record, i32.
    pub const BASE_SEQUENCE: usize = 53;
    /// Number of records, i32.
    pub const COUNT: usize = 57;
    /// The records.
    pub const RECORDS: usize = 61;
}

/// Who wrote a batch: producer id, epoch, sequence of the first record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Producer {
    /// Id; -1 is nobody.
    pub id: i64,
    /// Epoch of the id.
    pub epoch: i16,
    /// Sequence of the batch's first record.
    pub sequence: i32,
}

impl Producer {
    /// A batch without identity; it may be written any number of times.
    pub const NONE: Producer = Producer {
        id: -1,
        epoch: -1,
        sequence: -1,
    };
}

/// A batch of `values` without keys, all with the timestamp `time` (milliseconds).
#[must_use]
pub fn build(values: &[&[u8]], time: i64, producer: Producer) -> Vec<u8> {
    let mut batch = vec![0; at::RECORDS];
    for (delta, value) in values.iter().enumerate() {
        let mut record = vec![0, 0]; // attributes, timestamp delta
        varint(&mut record, delta as i64);
        varint(&mut record, -1); // no key
        varint(&mut record, value.len() as i64);
        record.extend_from_slice(value);
        varint(&mut record, 0); // headers
        varint(&mut batch, record.len() as i64);
        batch.extend_from_slice(&record);
    }
    let count = values.len() as i32;
    let length = (batch.len() - at::LEADER_EPOCH) as i32;
    put(&mut batch, at::LENGTH, &length.to_be_bytes());
    put(&mut batch, at::MAGIC, &[2]);
    put(&mut batch, at::LAST_OFFSET_DELTA, &(count - 1).to_be_bytes());
    put(&mut batch, at::BASE_TIMESTAMP, &time.to_be_bytes());
    put(&mut batch, at::MAX_TIMESTAMP, &time.to_be_bytes());
    put(&mut batch, at::PRODUCER_ID, &producer.id.to_be_bytes());
    put(&mut batch, at::PRODUCER_EPOCH, &producer.epoch.to_be_bytes());
    put(&mut batch, at::BASE_SEQUENCE, &producer.sequence.to_be_bytes());
    put(&mut batch, at::COUNT, &count.to_be_bytes());
    seal(&mut batch);
    batch
}

/// A batch whose records section is `body` as it is, marked as compressed with `codec`.
#[must_use]
pub fn compressed(codec: i16, count: i32, body: &[u8]) -> Vec<u8> {
    let mut batch = build(&[], 1_000, Producer::NONE);
    batch.extend_from_slice(body);
    let length = (batch.len() - at::LEADER_EPOCH) as i32;
    put(&mut batch, at::LENGTH, &length.to_be_bytes());
    put(&mut batch, at::ATTRIBUTES, &codec.to_be_bytes());
    put(&mut batch, at::LAST_OFFSET_DELTA, &(count - 1).to_be_bytes());
    put(&mut batch, at::COUNT, &count.to_be_bytes());
    seal(&mut batch);
    batch
}

/// Overwrites bytes; does not renew the CRC.
pub fn put(batch: &mut [u8], position: usize, bytes: &[u8]) {
    batch[position..position + bytes.len()].copy_from_slice(bytes);
}

/// Renews the CRC.
pub fn seal(batch: &mut [u8]) {
    let crc = crc(batch);
    put(batch, at::CRC, &crc.to_be_bytes());
}

/// The CRC-32C that the batch should carry.
#[must_use]
pub fn crc(batch: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, &batch[at::ATTRIBUTES..]) as u32
}

/// One record read back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its offset.
    pub offset: i64,
    /// Its timestamp, milliseconds.
    pub timestamp: i64,
    /// Its value; `None` is null.
    pub value: Option<Vec<u8>>,
}

/// Splits served bytes into whole batches.
///
/// # Panics
/// When a batch is cut or its CRC is wrong.
#[must_use]
pub fn split(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut batches = Vec::new();
    while !bytes.is_empty() {
        let size = i32_at(bytes, at::LENGTH) as usize + at::LEADER_EPOCH;
        let (batch, rest) = bytes.split_at(size);
        let carried = i32_at(batch, at::CRC) as u32;
        assert_eq!(carried, crc(batch), "CRC of a served batch");
        batches.push(batch);
        bytes = rest;
    }
    batches
}

/// The records of served, uncompressed bytes.
///
/// # Panics
/// When the bytes are not whole valid batches.
#[must_use]
pub fn records(bytes: &[u8]) -> Vec<Record> {
    let mut records = Vec::new();
    for batch in split(bytes) {
        let base = i64_at(batch, at::BASE_OFFSET);
        let attributes = i16::from_be_bytes([batch[at::ATTRIBUTES], batch[at::ATTRIBUTES + 1]]);
        let log_append_time = (attributes & 8 != 0).then(|| i64_at(batch, at::MAX_TIMESTAMP));
        let mut rest = &batch[at::RECORDS..];
        for _ in 0..i32_at(batch, at::COUNT) {
            records.push(record(
                &mut rest,
                base,
                i64_at(batch, at::BASE_TIMESTAMP),
                log_append_time,
            ));
        }
        assert!(rest.is_empty(), "nothing after the last record");
    }
    records
}

fn record(rest: &mut &[u8], base: i64, base_time: i64, log_append_time: Option<i64>) -> Record {
    let length = read_varint(rest) as usize;
    let (mut record, tail) = rest.split_at(length);
    *rest = tail;
    record = &record[1..]; // attributes
    let time_delta = read_varint(&mut record);
    let offset = base + read_varint(&mut record);
    let key = read_varint(&mut record).max(0) as usize;
    record = &record[key..];
    let value = usize::try_from(read_varint(&mut record)).ok();
    Record {
        offset,
        timestamp: log_append_time.unwrap_or(base_time + time_delta),
        value: value.map(|length| record[..length].to_vec()),
    }
}

/// A big-endian i32 at `position`.
#[must_use]
pub fn i32_at(bytes: &[u8], position: usize) -> i32 {
    let field = bytes[position..position + 4].try_into();
    i32::from_be_bytes(field.expect("four bytes"))
}

/// A big-endian i64 at `position`.
#[must_use]
pub fn i64_at(bytes: &[u8], position: usize) -> i64 {
    let field = bytes[position..position + 8].try_into();
    i64::from_be_bytes(field.expect("eight bytes"))
}

/// Appends a zigzag varint.
fn varint(out: &mut Vec<u8>, value: i64) {
    let mut rest = ((value << 1) ^ (value >> 63)) as u64;
    while rest >= 0x80 {
        out.push((rest as u8) | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

/// Takes a zigzag varint off the front.
fn read_varint(bytes: &mut &[u8]) -> i64 {
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    ((value >> 1) as i64) ^ -((value & 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_as_they_went_in() {
        let bytes = build(&[b"a", b"", b"\xff\n"], 77, Producer::NONE);
        let values: Vec<_> = records(&bytes)
            .into_iter()
            .map(|r| (r.offset, r.timestamp, r.value))
            .collect();
        let expected: [(i64, i64, Option<Vec<u8>>); 3] = [
            (0, 77, Some(b"a".to_vec())),
            (1, 77, Some(Vec::new())),
            (2, 77, Some(b"\xff\n".to_vec())),
        ];
        assert_eq!(values, expected);
    }

    #[test]
    fn the_crc_is_castagnoli() {
        // The check value of CRC-32C for the nine digits.
        let mut batch = vec![0; at::ATTRIBUTES];
        batch.extend_from_slice(b"123456789");
        assert_eq!(crc(&batch), 0xe306_9283);
    }
}
