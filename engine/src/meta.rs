//! Small identity files: `node.meta`, `journal-set`, `partition.meta`.
//!
//! Each is one sector of [`META_BYTES`] bytes: magic, format version, fields, zeros, CRC-32 (IEEE) over all before.
//! One sector, so that no device tears it; the CRC, so that nobody has to rely on that. They are replaced as a whole
//! (temp, fsync, rename, fsync of the directory) by whoever owns the file.
//!
//! Invariant: a decoder never panics and never guesses; it says which of the ways to be wrong it met, so that the
//! start can tell a foreign directory from a newer version from damage.

use thiserror::Error;

use crate::codec::{Put, Reader};
use crate::limits::FORMAT_VERSION;
use crate::types::{PartitionId, Term, TopicId};

/// Size of every identity file: the least sector of a block device.
pub const META_BYTES: usize = 512;

/// Longest topic name, in bytes (Kafka's bound; it leaves a directory name room for suffixes).
pub const MAX_TOPIC_NAME: usize = 249;

/// Magic, version, reserved.
const HEAD_BYTES: usize = 16;
const CRC_AT: usize = META_BYTES - 4;

/// Why bytes are not the identity file that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MetaError {
    /// Fewer bytes than the file has.
    #[error("the file has {found} bytes instead of {META_BYTES}")]
    Truncated { found: usize },
    /// More bytes than the file has.
    #[error("the file has {found} bytes instead of {META_BYTES}")]
    TooLong { found: usize },
    /// The file is of another kind, or not ours at all.
    #[error("the file does not begin with the mark of {expected}")]
    WrongMagic { expected: &'static str },
    /// Written by another release.
    #[error("format version {found} is not {FORMAT_VERSION}")]
    UnsupportedVersion { found: u32 },
    /// Damaged.
    #[error("the checksum is {found:08x}, the file says {stated:08x}")]
    BadChecksum { stated: u32, found: u32 },
    /// The checksum is right but the content is not: written by a bug.
    #[error("field {0} holds an impossible value")]
    BadField(&'static str),
}

/// `node.meta`: whose data directory this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeMeta {
    /// The cluster.
    pub cluster_id: [u8; 16],
    /// The node.
    pub node_id: u32,
    /// This data directory: random, non-zero, new with the directory.
    pub disk_id: [u8; 16],
}

/// `journal-set`: which journals are current and the term of the newest life on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalSet {
    /// The node.
    pub node_id: u32,
    /// Names the set; one more at every change of the shard count.
    pub generation: u64,
    /// Journals in the set, at least 1.
    pub shards: u16,
    /// Term of the newest process start; durable here before the process uses it.
    pub term: Term,
}

/// `partition.meta`: which partition's directory this is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionMeta {
    /// Name of the topic at the time the directory was made; for people, never used to find anything.
    /// 1 to [`MAX_TOPIC_NAME`] bytes.
    pub topic_name: String,
    /// The partition.
    pub partition: PartitionId,
    /// The node.
    pub node_id: u32,
}

struct Kind {
    magic: [u8; 8],
    name: &'static str,
}

const NODE: Kind = Kind {
    magic: *b"RFnode\r\n",
    name: "node.meta",
};
const JOURNAL_SET: Kind = Kind {
    magic: *b"RFjset\r\n",
    name: "journal-set",
};
const PARTITION: Kind = Kind {
    magic: *b"RFpart\r\n",
    name: "partition.meta",
};

impl Kind {
    /// The file around `fields`.
    fn seal(&self, fields: &[u8]) -> Vec<u8> {
        let mut file = Vec::with_capacity(META_BYTES);
        file.put(self.magic);
        file.put_u32(FORMAT_VERSION);
        file.put_u32(0);
        file.extend_from_slice(fields);
        assert!(file.len() <= CRC_AT, "fields of {} outgrow a sector", self.name);
        file.resize(CRC_AT, 0);
        let crc = crc32fast::hash(&file);
        file.put_u32(crc);
        file
    }

    /// The fields (and the zeros after them) of a file of this kind.
    fn open<'a>(&self, file: &'a [u8]) -> Result<Reader<'a>, MetaError> {
        let truncated = MetaError::Truncated { found: file.len() };
        let mut reader = Reader::new(file);
        let magic: [u8; 8] = reader.array().ok_or(truncated)?;
        if magic != self.magic {
            return Err(MetaError::WrongMagic { expected: self.name });
        }
        let version = reader.u32().ok_or(truncated)?;
        if version != FORMAT_VERSION {
            return Err(MetaError::UnsupportedVersion { found: version });
        }
        let (body, stated) = file.split_last_chunk::<4>().ok_or(truncated)?;
        match file.len() {
            META_BYTES => {}
            found if found > META_BYTES => return Err(MetaError::TooLong { found }),
            _ => return Err(truncated),
        }
        let (stated, found) = (u32::from_le_bytes(*stated), crc32fast::hash(body));
        if stated != found {
            return Err(MetaError::BadChecksum { stated, found });
        }
        Ok(Reader::new(&body[HEAD_BYTES..]))
    }
}

impl NodeMeta {
    /// The file.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut fields = Vec::new();
        fields.put(self.cluster_id);
        fields.put(self.disk_id);
        fields.put_u32(self.node_id);
        NODE.seal(&fields)
    }

    /// Reads the file.
    pub fn decode(file: &[u8]) -> Result<NodeMeta, MetaError> {
        let mut fields = NODE.open(file)?;
        Ok(NodeMeta {
            cluster_id: fields.array().ok_or(MetaError::BadField("cluster id"))?,
            disk_id: fields.array().ok_or(MetaError::BadField("disk id"))?,
            node_id: fields.u32().ok_or(MetaError::BadField("node id"))?,
        })
    }
}

impl JournalSet {
    /// The file.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut fields = Vec::new();
        fields.put_u64(self.generation);
        fields.put_u64(self.term.0);
        fields.put_u32(self.node_id);
        fields.put_u16(self.shards);
        JOURNAL_SET.seal(&fields)
    }

    /// Reads the file.
    pub fn decode(file: &[u8]) -> Result<JournalSet, MetaError> {
        let mut fields = JOURNAL_SET.open(file)?;
        Ok(JournalSet {
            generation: fields.u64().ok_or(MetaError::BadField("generation"))?,
            term: fields.u64().map(Term).ok_or(MetaError::BadField("term"))?,
            node_id: fields.u32().ok_or(MetaError::BadField("node id"))?,
            shards: fields
                .u16()
                .filter(|shards| *shards > 0)
                .ok_or(MetaError::BadField("shards"))?,
        })
    }
}

impl PartitionMeta {
    /// The file.
    ///
    /// # Panics
    /// When the topic name is empty or longer than [`MAX_TOPIC_NAME`]: names are checked where topics are created.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let name = self.topic_name.as_bytes();
        assert!(
            (1..=MAX_TOPIC_NAME).contains(&name.len()),
            "topic name of {} bytes",
            name.len()
        );
        let mut fields = Vec::new();
        fields.put(self.partition.topic.0);
        fields.put_u32(self.partition.index);
        fields.put_u32(self.node_id);
        // at most MAX_TOPIC_NAME
        fields.put_u16(name.len() as u16);
        fields.extend_from_slice(name);
        PARTITION.seal(&fields)
    }

    /// Reads the file.
    pub fn decode(file: &[u8]) -> Result<PartitionMeta, MetaError> {
        let mut fields = PARTITION.open(file)?;
        let topic = fields
            .array()
            .map(TopicId)
            .ok_or(MetaError::BadField("topic id"))?;
        let index = fields.u32().ok_or(MetaError::BadField("partition"))?;
        let node_id = fields.u32().ok_or(MetaError::BadField("node id"))?;
        let name = fields
            .u16()
            .map(usize::from)
            .filter(|len| (1..=MAX_TOPIC_NAME).contains(len))
            .and_then(|len| fields.bytes(len))
            .and_then(|name| std::str::from_utf8(name).ok())
            .ok_or(MetaError::BadField("topic name"))?;
        Ok(PartitionMeta {
            topic_name: name.to_owned(),
            partition: PartitionId { topic, index },
            node_id,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn node() -> NodeMeta {
        NodeMeta {
            cluster_id: *b"cluster-cluster-",
            node_id: 3,
            disk_id: *b"disk-disk-disk-d",
        }
    }

    fn set() -> JournalSet {
        JournalSet {
            node_id: 3,
            generation: 5,
            shards: 4,
            term: Term(17),
        }
    }

    fn partition(name: &str) -> PartitionMeta {
        PartitionMeta {
            topic_name: name.to_owned(),
            partition: PartitionId {
                topic: TopicId([7; 16]),
                index: 12,
            },
            node_id: 3,
        }
    }

    fn reseal(mut file: Vec<u8>) -> Vec<u8> {
        let crc = crc32fast::hash(&file[..CRC_AT]);
        file[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        file
    }

    #[test]
    fn files_round_trip() {
        assert_eq!(NodeMeta::decode(&node().encode()), Ok(node()));
        assert_eq!(JournalSet::decode(&set().encode()), Ok(set()));
        for name in ["t", "täglich", &"x".repeat(MAX_TOPIC_NAME)] {
            let meta = partition(name);
            assert_eq!(meta.encode().len(), META_BYTES);
            assert_eq!(PartitionMeta::decode(&meta.encode()), Ok(meta));
        }
    }

    #[test]
    fn layout_is_fixed() {
        let file = set().encode();
        let head: Vec<u8> = [b"RFjset\r\n".as_slice(), &[1, 0, 0, 0, 0, 0, 0, 0]].concat();
        assert_eq!(&file[..HEAD_BYTES], head);
        assert_eq!(
            &file[16..38],
            [5, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 4, 0]
        );
        assert!(file[38..CRC_AT].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn every_way_to_be_wrong_is_told_apart() {
        let file = node().encode();
        let check =
            |file: &[u8], expect: MetaError| assert_eq!(NodeMeta::decode(file), Err(expect), "{expect}");
        check(&[], MetaError::Truncated { found: 0 });
        check(&file[..7], MetaError::Truncated { found: 7 });
        check(&file[..511], MetaError::Truncated { found: 511 });
        check(
            &[file.clone(), vec![0]].concat(),
            MetaError::TooLong { found: 513 },
        );
        check(
            &set().encode(),
            MetaError::WrongMagic {
                expected: "node.meta",
            },
        );
        check(
            &[0; META_BYTES],
            MetaError::WrongMagic {
                expected: "node.meta",
            },
        );
        let mut newer = file.clone();
        newer[8] = 2;
        check(&newer, MetaError::UnsupportedVersion { found: 2 });
        let mut rotten = file.clone();
        rotten[20] ^= 4;
        assert!(matches!(
            NodeMeta::decode(&rotten),
            Err(MetaError::BadChecksum { .. })
        ));
    }

    #[test]
    fn impossible_fields_are_refused() {
        let mut file = set().encode();
        file[36..38].fill(0);
        assert_eq!(
            JournalSet::decode(&reseal(file)),
            Err(MetaError::BadField("shards"))
        );
        for len in [0u16, MAX_TOPIC_NAME as u16 + 1, u16::MAX] {
            let mut file = partition("name").encode();
            file[40..42].copy_from_slice(&len.to_le_bytes());
            assert_eq!(
                PartitionMeta::decode(&reseal(file)),
                Err(MetaError::BadField("topic name"))
            );
        }
        let mut file = partition("name").encode();
        file[42] = 0xff;
        assert_eq!(
            PartitionMeta::decode(&reseal(file)),
            Err(MetaError::BadField("topic name"))
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn a_changed_bit_never_reads_as_valid(at in 0..META_BYTES, bit in 0..8u8) {
            for mut file in [node().encode(), set().encode(), partition("orders").encode()] {
                file[at] ^= 1u8 << bit;
                prop_assert!(NodeMeta::decode(&file).is_err());
                prop_assert!(JournalSet::decode(&file).is_err());
                prop_assert!(PartitionMeta::decode(&file).is_err());
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..600), kind in 0..3usize) {
            let magic = [NODE.magic, JOURNAL_SET.magic, PARTITION.magic][kind];
            let mut file = magic.to_vec();
            file.put_u32(FORMAT_VERSION);
            file.extend_from_slice(&bytes);
            if file.len() >= META_BYTES {
                file.truncate(META_BYTES);
                file = reseal(file);
            }
            for file in [&bytes, &file] {
                let _ = (NodeMeta::decode(file), JournalSet::decode(file));
                if let Ok(meta) = PartitionMeta::decode(file) {
                    prop_assert_eq!(PartitionMeta::decode(&meta.encode()), Ok(meta));
                }
            }
        }
    }
}
