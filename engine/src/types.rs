//! Small named types: ids, offsets, positions, epochs, time.
//!
//! An offset counts records of a partition, a position counts bytes of a segment file, an lsn counts bytes of a
//! shard's journal stream; the types keep them apart.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($raw:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $raw);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// Number of a record in its partition, from 0. At most `i64::MAX` (Kafka's wire type).
    Offset(u64)
}
number! {
    /// Byte position in a segment file.
    Pos(u64)
}
number! {
    /// Byte address in a shard's endless journal stream.
    Lsn(u64)
}
number! {
    /// Life of the process on a data directory; strictly higher at every start (STORAGE.md section 2).
    Term(u64)
}
number! {
    /// Reign of a partition's leader; at most `i32::MAX` (Kafka's wire type).
    LeaderEpoch(u32)
}
number! {
    /// Index of a shard within its process.
    ShardId(u16)
}

impl Offset {
    /// The offset `n` records later; saturates instead of wrapping.
    #[must_use]
    pub fn plus(self, n: u64) -> Offset {
        Offset(self.0.saturating_add(n))
    }
}

impl Pos {
    /// The position `n` bytes later.
    #[must_use]
    pub fn plus(self, n: u64) -> Pos {
        Pos(self.0 + n)
    }

    /// This position rounded down to a multiple of `block` (a power of two). `Pos(5000).floor(4096)` is 4096.
    #[must_use]
    pub fn floor(self, block: u64) -> Pos {
        Pos(self.0 & !(block - 1))
    }

    /// This position rounded up to a multiple of `block` (a power of two). `Pos(5000).ceil(4096)` is 8192.
    #[must_use]
    pub fn ceil(self, block: u64) -> Pos {
        Pos((self.0 + block - 1) & !(block - 1))
    }
}

impl Lsn {
    /// The address `n` bytes later.
    #[must_use]
    pub fn plus(self, n: u64) -> Lsn {
        Lsn(self.0 + n)
    }
}

/// Identity of a topic: random, non-zero, new at every creation. Names are for people; ids are for machines.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TopicId(pub [u8; 16]);

impl fmt::Display for TopicId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TopicId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TopicId {
    /// Reads the 32 hexadecimal digits that `Display` writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<TopicId> {
        let digits = text.as_bytes();
        if digits.len() != 32 || !digits.iter().all(|d| matches!(d, b'0'..=b'9' | b'a'..=b'f')) {
            return None;
        }
        let mut id = [0u8; 16];
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            let text = std::str::from_utf8(pair).ok()?;
            *byte = u8::from_str_radix(text, 16).ok()?;
        }
        Some(TopicId(id))
    }
}

/// One partition of one topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PartitionId {
    /// The topic.
    pub topic: TopicId,
    /// Number of the partition within its topic, from 0.
    pub index: u32,
}

impl fmt::Display for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.topic, self.index)
    }
}

impl PartitionId {
    /// The shard that owns this partition among `shards`: `(fnv1a64(topic id) + index) % shards`.
    ///
    /// FNV-1a 64 is part of the on-disk format: another hash would look for partitions in the wrong journal.
    #[must_use]
    pub fn shard(self, shards: u16) -> ShardId {
        let hash = self.topic.0.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| {
            (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3)
        });
        let shard = hash.wrapping_add(u64::from(self.index)) % u64::from(shards.max(1));
        ShardId(shard as u16)
    }

    /// Name of the partition's directory below `logs/`: `<topic id>-<index>`.
    #[must_use]
    pub fn dir_name(self) -> String {
        self.to_string()
    }

    /// Reads a directory name written by [`PartitionId::dir_name`]; anything else is `None`.
    #[must_use]
    pub fn parse_dir_name(name: &str) -> Option<PartitionId> {
        let (topic, index) = name.split_once('-')?;
        let canonical = !index.is_empty() && index.bytes().all(|b| b.is_ascii_digit());
        let index = index.parse().ok().filter(|_| canonical)?;
        let id = PartitionId {
            topic: TopicId::parse(topic)?,
            index,
        };
        (id.dir_name() == name).then_some(id)
    }
}

/// A moment, as the driver tells it to the core. The core never asks a clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Now {
    /// Nanoseconds of a monotonic clock; for deadlines and latencies.
    pub mono: u64,
    /// Milliseconds since 1970 of the wall clock; only for timestamps and retention.
    pub wall_ms: i64,
}

impl Now {
    /// The monotonic time `ms` milliseconds from now.
    #[must_use]
    pub fn after_ms(self, ms: u64) -> u64 {
        self.mono.saturating_add(ms.saturating_mul(1_000_000))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_names_round_trip_and_reject_look_alikes() {
        let id = PartitionId {
            topic: TopicId([0xab; 16]),
            index: 7,
        };
        assert_eq!(PartitionId::parse_dir_name(&id.dir_name()), Some(id));
        for bad in [
            "",
            "x",
            "abab-1",
            &format!("{}-07", id.topic),
            &format!("{}-", id.topic),
            &format!("{}-1-delete", id.topic),
        ] {
            assert_eq!(PartitionId::parse_dir_name(bad), None, "{bad}");
        }
    }

    #[test]
    fn shard_spreads_partitions_and_is_fixed() {
        let topic = TopicId(*b"0123456789abcdef");
        let shards: Vec<u16> = (0..4)
            .map(|index| PartitionId { topic, index }.shard(4).0)
            .collect();
        let mut sorted = shards.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3]);
        assert_eq!(PartitionId { topic, index: 0 }.shard(1), ShardId(0));
    }
}
