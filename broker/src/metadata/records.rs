//! The records of the metadata store: keys, contents, encoding.
//!
//! Values are JSON with a format number, readable by people and by the next version; unknown fields are ignored.

use ringfence_engine::types::{LeaderEpoch, TopicId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{MetadataError, MetadataStore, Version};
use crate::config::TopicConfig;

/// Partitions described by one record (REPLICATION.md section 5).
pub const CHUNK: u32 = 128;

/// Key of [`ClusterRecord`].
pub const CLUSTER: &str = "cluster";
/// Key of [`BootRecord`].
pub const BOOT: &str = "boot";
/// Key of [`ProducerIdRecord`].
pub const PRODUCER_IDS: &str = "producer-ids";
/// Prefix of the keys of [`TopicRecord`]s.
pub const TOPICS: &str = "topics/";
/// Prefix of the keys of [`Tombstone`]s.
pub const TOMBSTONES: &str = "tombstones/";

/// Key of the topic record under `name`.
#[must_use]
pub fn topic_key(name: &str) -> String {
    format!("{TOPICS}{name}")
}

/// Prefix of a topic's partition records.
#[must_use]
pub fn partitions_prefix(id: TopicId) -> String {
    format!("partitions/{id}/")
}

/// Key of the record that describes partitions `chunk * CHUNK ..`.
#[must_use]
pub fn partitions_key(id: TopicId, chunk: u32) -> String {
    format!("{}{chunk:08}", partitions_prefix(id))
}

/// Key of a deleted topic's tombstone.
#[must_use]
pub fn tombstone_key(id: TopicId) -> String {
    format!("{TOMBSTONES}{id}")
}

/// Identity of the cluster; written once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRecord {
    /// 32 hexadecimal digits.
    pub cluster_id: String,
    /// Milliseconds since 1970.
    pub created_ms: i64,
}

/// Starts of this node. On a single node the leader epoch of every partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootRecord {
    /// From 1; at most `i32::MAX`.
    pub starts: u32,
}

/// Producer ids given out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProducerIdRecord {
    /// First id never given to any block.
    pub next: i64,
}

/// A topic: its name is in the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopicRecord {
    /// 32 hexadecimal digits.
    pub id: String,
    /// Number of partitions.
    pub partitions: u32,
    /// Replicas of each.
    pub replication_factor: u16,
    /// Settings of its own.
    pub settings: TopicConfig,
    /// Milliseconds since 1970.
    pub created_ms: i64,
}

/// State of one partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionRecord {
    /// The leading node; `None` while there is none.
    pub leader: Option<u32>,
    /// Its epoch. On a single node the boot counter overrules it upwards.
    pub leader_epoch: u32,
    /// Version of leader and in-sync set.
    pub partition_epoch: u32,
    /// Assigned nodes, preferred leader first.
    pub replicas: Vec<u32>,
    /// Nodes in sync.
    pub isr: Vec<u32>,
}

impl PartitionRecord {
    /// A partition on one node, led from `epoch` on.
    #[must_use]
    pub fn single(node: u32, epoch: LeaderEpoch) -> PartitionRecord {
        PartitionRecord {
            leader: Some(node),
            leader_epoch: epoch.0,
            partition_epoch: 0,
            replicas: vec![node],
            isr: vec![node],
        }
    }
}

/// States of up to [`CHUNK`] consecutive partitions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionChunk {
    /// By index, from `chunk * CHUNK`.
    pub partitions: Vec<PartitionRecord>,
}

/// A deleted topic whose files may still exist somewhere; its id is in the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// The name it had.
    pub name: String,
    /// Number of partitions it had.
    pub partitions: u32,
    /// Milliseconds since 1970.
    pub deleted_ms: i64,
}

#[derive(Serialize, Deserialize)]
struct Envelope<T> {
    format: u32,
    #[serde(flatten)]
    record: T,
}

/// Version of the encoding.
const FORMAT: u32 = 1;

/// The bytes of a record.
#[must_use]
pub fn encode<T: Serialize>(record: T) -> Vec<u8> {
    serde_json::to_vec(&Envelope {
        format: FORMAT,
        record,
    })
    .expect("records are plain structs of numbers, strings, lists and maps with string keys")
}

/// A record from its bytes.
///
/// # Errors
/// [`MetadataError::Damaged`] when the bytes are not a record of this kind and format.
pub fn decode<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T, MetadataError> {
    let damaged = |reason: String| MetadataError::Damaged {
        key: key.to_owned(),
        reason,
    };
    let envelope: Envelope<T> = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
    if envelope.format != FORMAT {
        return Err(damaged(format!(
            "format {} is not known to this version, which writes {FORMAT}",
            envelope.format
        )));
    }
    Ok(envelope.record)
}

/// The record under `key` with its version, or `None`.
///
/// # Errors
/// When the store fails or the record is damaged.
pub fn fetch<T: DeserializeOwned>(
    store: &impl MetadataStore,
    key: &str,
) -> Result<Option<(T, Version)>, MetadataError> {
    match store.read(key)? {
        None => Ok(None),
        Some(found) => Ok(Some((decode(key, &found.value)?, found.version))),
    }
}

/// A topic id from its text in a record.
///
/// # Errors
/// [`MetadataError::Damaged`] when it is not 32 hexadecimal digits.
pub fn topic_id(key: &str, text: &str) -> Result<TopicId, MetadataError> {
    TopicId::parse(text).ok_or_else(|| MetadataError::Damaged {
        key: key.to_owned(),
        reason: format!("'{text}' is not a topic id"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_is_fixed() {
        let record = TopicRecord {
            id: "00112233445566778899aabbccddeeff".into(),
            partitions: 2,
            replication_factor: 1,
            settings: TopicConfig::new([("retention.ms", "5")]).unwrap(),
            created_ms: 7,
        };
        let bytes = encode(&record);
        assert_eq!(
            std::str::from_utf8(&bytes).unwrap(),
            "{\"format\":1,\"id\":\"00112233445566778899aabbccddeeff\",\"partitions\":2,\
             \"replication_factor\":1,\"settings\":{\"retention.ms\":\"5\"},\"created_ms\":7}"
        );
        assert_eq!(decode::<TopicRecord>("k", &bytes).unwrap(), record);
    }

    #[test]
    fn other_bytes_are_damage() {
        for bytes in [
            &b""[..],
            b"{}",
            b"{\"format\":2,\"starts\":1}",
            b"{\"format\":1}",
            b"[1]",
        ] {
            assert!(matches!(
                decode::<BootRecord>("boot", bytes),
                Err(MetadataError::Damaged { .. })
            ));
        }
    }
}
