//! The `leader-epoch-checkpoint` file of a partition: 16-byte slots, the first a header, then one per entry.
//!
//! Every slot has its own CRC, seeded with the partition and the slot's number, so that the file can be appended to
//! and cut without touching what is there, and a slot of another partition or place never counts. Zeros after the
//! last slot are padding (the file is written in whole blocks).
//!
//! Invariant: reading never fails. Whatever is in the file, the answer is the entries that are certainly good and
//! whether the file should be written again.

use super::EpochEntry;
use crate::codec::{Put, Reader};
use crate::limits::FORMAT_VERSION;
use crate::types::{LeaderEpoch, Offset, PartitionId};

/// Bytes of a slot.
pub const SLOT_BYTES: usize = 16;

const MAGIC: [u8; 8] = *b"RFepoch\n";

/// What a checkpoint file holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CheckpointRead {
    /// The entries before the first fault, rising. They may be older than the log: compare with the snapshot.
    pub entries: Vec<EpochEntry>,
    /// The file is damaged, torn, empty, zeroed or foreign from here on: write it again.
    pub rewrite: bool,
}

/// Closes a slot: its CRC over the partition, the slot's number and the 12 bytes before it.
fn seal_slot(partition: PartitionId, number: u32, body: [u8; SLOT_BYTES - 4]) -> [u8; SLOT_BYTES] {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&partition.topic.0);
    crc.update(&partition.index.to_le_bytes());
    crc.update(&number.to_le_bytes());
    crc.update(&body);
    let mut slot = [0; SLOT_BYTES];
    slot[..body.len()].copy_from_slice(&body);
    slot[body.len()..].copy_from_slice(&crc.finalize().to_le_bytes());
    slot
}

fn header_slot(partition: PartitionId) -> [u8; SLOT_BYTES] {
    let mut body = [0; SLOT_BYTES - 4];
    body[..8].copy_from_slice(&MAGIC);
    body[8..].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    seal_slot(partition, 0, body)
}

/// The slot of the table's `index`-th entry (from 0), which lies at byte `(index + 1) * SLOT_BYTES`: for appending.
#[must_use]
pub fn encode_slot(partition: PartitionId, index: u32, entry: EpochEntry) -> [u8; SLOT_BYTES] {
    let mut body = [0; SLOT_BYTES - 4];
    body[..4].copy_from_slice(&entry.epoch.0.to_le_bytes());
    body[4..].copy_from_slice(&entry.start.0.to_le_bytes());
    seal_slot(partition, index.wrapping_add(1), body)
}

/// The whole file, not padded.
#[must_use]
pub fn encode_checkpoint(
    partition: PartitionId,
    entries: impl ExactSizeIterator<Item = EpochEntry>,
) -> Vec<u8> {
    let mut file = Vec::with_capacity((entries.len() + 1) * SLOT_BYTES);
    file.put(header_slot(partition));
    for (index, entry) in (0u32..).zip(entries) {
        file.put(encode_slot(partition, index, entry));
    }
    file
}

/// Reads a checkpoint file of `partition`, whatever it holds.
#[must_use]
pub fn decode_checkpoint(partition: PartitionId, file: &[u8]) -> CheckpointRead {
    let mut read = CheckpointRead::default();
    let (slots, partial) = file.as_chunks::<SLOT_BYTES>();
    let Some((header, slots)) = slots.split_first() else {
        read.rewrite = true;
        return read;
    };
    if *header != header_slot(partition) {
        read.rewrite = true;
        return read;
    }
    for (index, slot) in (0u32..).zip(slots) {
        match decode_slot(partition, index, slot) {
            Some(entry) if read.entries.last().is_none_or(|last| entry.follows(*last)) => {
                read.entries.push(entry);
            }
            _ => {
                let rest = &slots[index as usize..];
                read.rewrite = rest.iter().flatten().chain(partial).any(|byte| *byte != 0);
                return read;
            }
        }
    }
    read.rewrite = partial.iter().any(|byte| *byte != 0);
    read
}

fn decode_slot(partition: PartitionId, index: u32, slot: &[u8; SLOT_BYTES]) -> Option<EpochEntry> {
    let mut reader = Reader::new(slot);
    let entry = EpochEntry {
        epoch: LeaderEpoch(reader.u32()?),
        start: Offset(reader.u64()?),
    };
    (encode_slot(partition, index, entry) == *slot).then_some(entry)
}
