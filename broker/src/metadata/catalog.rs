//! Decisions on cluster identity, boots, topics and producer ids, each one guarded transaction.
//!
//! Absence never deletes: a topic leaves only by a tombstone that names its id, and the tombstone goes when every
//! shard has made the drop durable. Identity is the topic id; a name may be reused the moment it is free.

use std::ops::Range;
use std::sync::Arc;

use ringfence_engine::types::{LeaderEpoch, TopicId};
use thiserror::Error;

use super::records::{
    BOOT, BootRecord, CHUNK, CLUSTER, ClusterRecord, PRODUCER_IDS, PartitionChunk, PartitionRecord,
    ProducerIdRecord, TOMBSTONES, TOPICS, Tombstone, TopicRecord, decode, encode, fetch, partitions_key,
    partitions_prefix, tombstone_key, topic_id, topic_key,
};
use super::{Commit, MetadataError, MetadataStore, Transaction, Version};
use crate::config::{TopicConfig, TopicConfigError, TopicNameError, TopicSettings, check_topic_name};

/// Producer ids in one durable block.
pub const PRODUCER_BLOCK: i64 = 1000;

/// A topic as everyone who serves it sees it; immutable, replaced by a newer one on change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topic {
    /// Identity.
    pub id: TopicId,
    /// Name.
    pub name: String,
    /// Replicas of each partition.
    pub replication_factor: u16,
    /// Settings of its own.
    pub config: TopicConfig,
    /// All settings in force on this node.
    pub settings: TopicSettings,
    /// State of each partition, by index.
    pub partitions: Vec<PartitionRecord>,
}

/// Why a topic command was refused; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TopicError {
    #[error(transparent)]
    Name(#[from] TopicNameError),
    #[error(transparent)]
    Config(#[from] TopicConfigError),
    #[error("topic '{0}' exists already")]
    Exists(String),
    #[error("there is no topic '{0}'")]
    Unknown(String),
    #[error("topic '{name}' has id {found}, not {wanted}")]
    OtherId {
        name: String,
        wanted: TopicId,
        found: TopicId,
    },
    #[error("{asked} partitions are outside 1..={most}")]
    Partitions { asked: u32, most: u32 },
    #[error("the topic has {present} partitions; {asked} is not more")]
    FewerPartitions { present: u32, asked: u32 },
    #[error("replication factor {asked} is outside 1..={nodes}, the number of nodes")]
    ReplicationFactor { asked: u16, nodes: u16 },
    #[error("min.insync.replicas {min} is above the replication factor {factor}")]
    MinInsync { min: u32, factor: u16 },
    /// Someone else changed the same records at the same time.
    #[error("the topic was changed by someone else; retry")]
    Conflict,
    #[error(transparent)]
    Store(#[from] MetadataError),
}

/// A topic to create.
#[derive(Debug, Clone)]
pub struct NewTopic<'a> {
    /// Its name.
    pub name: &'a str,
    /// A fresh random id.
    pub id: TopicId,
    /// Number of partitions.
    pub partitions: u32,
    /// Replicas of each.
    pub replication_factor: u16,
    /// Settings of its own.
    pub config: TopicConfig,
}

/// The catalogue of a cluster of one node.
#[derive(Debug)]
pub struct Catalog<S> {
    store: S,
    node: u32,
    epoch: LeaderEpoch,
    defaults: TopicSettings,
    max_partitions: u32,
}

/// What a start of the node found and decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Boot {
    /// Identity of the cluster; new when the store was empty.
    pub cluster_id: [u8; 16],
    /// Number of this start, from 1: the leader epoch of every partition this node leads.
    pub epoch: LeaderEpoch,
}

/// Identity of the cluster, when the store knows one.
///
/// # Errors
/// When the store fails or the record is damaged.
pub fn cluster_id(store: &impl MetadataStore) -> Result<Option<[u8; 16]>, MetadataError> {
    match fetch::<ClusterRecord>(store, CLUSTER)? {
        Some((record, _)) => Ok(Some(topic_id(CLUSTER, &record.cluster_id)?.0)),
        None => Ok(None),
    }
}

/// Raises the boot counter, durably, and reads or makes the cluster's identity (`fresh_id`, used for a new one).
///
/// # Errors
/// When the store fails, a record is damaged, or the counter is used up.
pub fn boot(store: &mut impl MetadataStore, fresh_id: [u8; 16], now_ms: i64) -> Result<Boot, MetadataError> {
    let mut transaction = Transaction::default();
    let cluster_id = match cluster_id(store)? {
        Some(known) => known,
        None => {
            transaction.guard(CLUSTER, Version(0));
            let cluster_id = TopicId(fresh_id).to_string();
            transaction.put(
                CLUSTER,
                encode(ClusterRecord {
                    cluster_id,
                    created_ms: now_ms,
                }),
            );
            fresh_id
        }
    };
    let (last, version) = fetch::<BootRecord>(store, BOOT)?.map_or((0, Version(0)), |(r, v)| (r.starts, v));
    let starts = last
        .checked_add(1)
        .filter(|starts| *starts <= i32::MAX as u32)
        .ok_or_else(|| MetadataError::Damaged {
            key: BOOT.to_owned(),
            reason: format!("boot counter {last} is used up"),
        })?;
    transaction.guard(BOOT, version);
    transaction.put(BOOT, encode(BootRecord { starts }));
    match store.commit(transaction)? {
        Commit::Applied(_) => Ok(Boot {
            cluster_id,
            epoch: LeaderEpoch(starts),
        }),
        // The store is held by this process alone; a conflict means the records changed under us.
        Commit::Conflict { key } => Err(MetadataError::Damaged {
            key,
            reason: "it changed during start-up".to_owned(),
        }),
    }
}

impl<S: MetadataStore> Catalog<S> {
    /// A catalogue over `store` for node `node` in its boot `epoch`.
    pub fn new(
        store: S,
        node: u32,
        epoch: LeaderEpoch,
        defaults: TopicSettings,
        max_partitions: u32,
    ) -> Catalog<S> {
        Catalog {
            store,
            node,
            epoch,
            defaults,
            max_partitions,
        }
    }

    /// The node's defaults of topic settings.
    #[must_use]
    pub fn defaults(&self) -> &TopicSettings {
        &self.defaults
    }

    /// Every topic.
    ///
    /// # Errors
    /// When the store fails or a record is damaged.
    pub fn topics(&self) -> Result<Vec<Arc<Topic>>, MetadataError> {
        self.store
            .list(TOPICS)?
            .into_iter()
            .map(|(key, found)| {
                let name = key.strip_prefix(TOPICS).unwrap_or(&key);
                self.assemble(name, decode(&key, &found.value)?).map(Arc::new)
            })
            .collect()
    }

    /// One topic.
    ///
    /// # Errors
    /// When it does not exist, the store fails or a record is damaged.
    pub fn topic(&self, name: &str) -> Result<Arc<Topic>, TopicError> {
        let (record, _) = self.record(name)?;
        Ok(Arc::new(self.assemble(name, record)?))
    }

    /// Topics whose deletion was accepted but is not known to be finished on every shard: id and partition count.
    ///
    /// # Errors
    /// When the store fails or a record is damaged.
    pub fn tombstones(&self) -> Result<Vec<(TopicId, u32)>, MetadataError> {
        self.store
            .list(TOMBSTONES)?
            .into_iter()
            .map(|(key, found)| {
                let record: Tombstone = decode(&key, &found.value)?;
                let id = topic_id(&key, key.strip_prefix(TOMBSTONES).unwrap_or(&key))?;
                Ok((id, record.partitions))
            })
            .collect()
    }

    /// Creates a topic; with `validate_only` just says whether it could be.
    ///
    /// # Errors
    /// See [`TopicError`].
    pub fn create(
        &mut self,
        new: NewTopic<'_>,
        now_ms: i64,
        validate_only: bool,
    ) -> Result<Arc<Topic>, TopicError> {
        check_topic_name(new.name)?;
        self.check_partitions(new.partitions)?;
        check_replicas(&new.config.over(&self.defaults), new.replication_factor)?;
        let key = topic_key(new.name);
        if self.store.read(&key)?.is_some() {
            return Err(TopicError::Exists(new.name.to_owned()));
        }
        let record = TopicRecord {
            id: new.id.to_string(),
            partitions: new.partitions,
            replication_factor: new.replication_factor,
            settings: new.config,
            created_ms: now_ms,
        };
        let states = vec![PartitionRecord::single(self.node, self.epoch); new.partitions as usize];
        if !validate_only {
            let mut transaction = Transaction::default();
            transaction.guard(&key, Version(0));
            transaction.put(&key, encode(&record));
            put_chunks(&mut transaction, new.id, &states, 0);
            self.apply(transaction)?;
        }
        Ok(Arc::new(self.build(new.name, new.id, record, states)))
    }

    /// Deletes a topic: the name is free at once, the tombstone orders its files away.
    ///
    /// # Errors
    /// See [`TopicError`].
    pub fn delete(
        &mut self,
        name: &str,
        wanted: Option<TopicId>,
        now_ms: i64,
    ) -> Result<Arc<Topic>, TopicError> {
        let (record, version) = self.record(name)?;
        let topic = self.assemble(name, record)?;
        if let Some(wanted) = wanted.filter(|wanted| *wanted != topic.id) {
            return Err(TopicError::OtherId {
                name: name.to_owned(),
                wanted,
                found: topic.id,
            });
        }
        let partitions = topic.partitions.len() as u32;
        let mut transaction = Transaction::default();
        transaction.guard(topic_key(name), version);
        transaction.remove(topic_key(name));
        for chunk in 0..partitions.div_ceil(CHUNK) {
            transaction.remove(partitions_key(topic.id, chunk));
        }
        transaction.put(
            tombstone_key(topic.id),
            encode(Tombstone {
                name: name.to_owned(),
                partitions,
                deleted_ms: now_ms,
            }),
        );
        self.apply(transaction)?;
        Ok(Arc::new(topic))
    }

    /// Forgets a deletion that every shard has made durable.
    ///
    /// # Errors
    /// When the store fails.
    pub fn deletion_finished(&mut self, id: TopicId) -> Result<(), TopicError> {
        let mut transaction = Transaction::default();
        transaction.remove(tombstone_key(id));
        self.apply(transaction)
    }

    /// Changes settings of a topic.
    ///
    /// # Errors
    /// See [`TopicError`].
    pub fn alter<'a>(
        &mut self,
        name: &str,
        set: impl IntoIterator<Item = (&'a str, &'a str)>,
        unset: impl IntoIterator<Item = &'a str>,
    ) -> Result<Arc<Topic>, TopicError> {
        let (mut record, version) = self.record(name)?;
        for key in unset {
            record.settings.unset(key)?;
        }
        for (key, value) in set {
            record.settings.set(key, value)?;
        }
        check_replicas(&record.settings.over(&self.defaults), record.replication_factor)?;
        let mut transaction = Transaction::default();
        transaction.guard(topic_key(name), version);
        transaction.put(topic_key(name), encode(&record));
        self.apply(transaction)?;
        Ok(Arc::new(self.assemble(name, record)?))
    }

    /// Raises a topic's number of partitions to `total`.
    ///
    /// # Errors
    /// See [`TopicError`].
    pub fn add_partitions(&mut self, name: &str, total: u32) -> Result<Arc<Topic>, TopicError> {
        let (mut record, version) = self.record(name)?;
        self.check_partitions(total)?;
        if total <= record.partitions {
            return Err(TopicError::FewerPartitions {
                present: record.partitions,
                asked: total,
            });
        }
        let first_changed = record.partitions / CHUNK;
        let mut topic = self.assemble(name, record.clone())?;
        topic
            .partitions
            .resize(total as usize, PartitionRecord::single(self.node, self.epoch));
        record.partitions = total;
        let mut transaction = Transaction::default();
        transaction.guard(topic_key(name), version);
        transaction.put(topic_key(name), encode(&record));
        put_chunks(&mut transaction, topic.id, &topic.partitions, first_changed);
        self.apply(transaction)?;
        Ok(Arc::new(topic))
    }

    /// A block of producer ids that no one else gets, durable before it is returned.
    ///
    /// # Errors
    /// When the store fails, someone else took a block at the same time, or the ids are used up.
    pub fn producer_block(&mut self) -> Result<Range<i64>, TopicError> {
        let found = fetch::<ProducerIdRecord>(&self.store, PRODUCER_IDS)?;
        let (first, version) = found.map_or((0, Version(0)), |(record, version)| (record.next, version));
        let next = first
            .checked_add(PRODUCER_BLOCK)
            .filter(|_| first >= 0)
            .ok_or_else(|| MetadataError::Damaged {
                key: PRODUCER_IDS.to_owned(),
                reason: format!("next id {first} leaves no room for a block"),
            })?;
        let mut transaction = Transaction::default();
        transaction.guard(PRODUCER_IDS, version);
        transaction.put(PRODUCER_IDS, encode(ProducerIdRecord { next }));
        self.apply(transaction)?;
        Ok(first..next)
    }

    fn apply(&mut self, transaction: Transaction) -> Result<(), TopicError> {
        match self.store.commit(transaction)? {
            Commit::Applied(_) => Ok(()),
            Commit::Conflict { .. } => Err(TopicError::Conflict),
        }
    }

    fn check_partitions(&self, asked: u32) -> Result<(), TopicError> {
        if (1..=self.max_partitions).contains(&asked) {
            Ok(())
        } else {
            Err(TopicError::Partitions {
                asked,
                most: self.max_partitions,
            })
        }
    }

    fn record(&self, name: &str) -> Result<(TopicRecord, Version), TopicError> {
        check_topic_name(name)?;
        fetch(&self.store, &topic_key(name))?.ok_or_else(|| TopicError::Unknown(name.to_owned()))
    }

    /// A topic from its record and its partition records.
    fn assemble(&self, name: &str, record: TopicRecord) -> Result<Topic, MetadataError> {
        let id = topic_id(name, &record.id)?;
        let mut states = Vec::new();
        for (key, found) in self.store.list(&partitions_prefix(id))? {
            states.extend(decode::<PartitionChunk>(&key, &found.value)?.partitions);
        }
        if states.len() != record.partitions as usize {
            return Err(MetadataError::Damaged {
                key: topic_key(name),
                reason: format!(
                    "{} partitions promised, {} described",
                    record.partitions,
                    states.len()
                ),
            });
        }
        Ok(self.build(name, id, record, states))
    }

    fn build(&self, name: &str, id: TopicId, record: TopicRecord, mut states: Vec<PartitionRecord>) -> Topic {
        for state in states.iter_mut().filter(|state| state.leader == Some(self.node)) {
            state.leader_epoch = state.leader_epoch.max(self.epoch.0);
        }
        Topic {
            id,
            name: name.to_owned(),
            replication_factor: record.replication_factor,
            settings: record.settings.over(&self.defaults),
            config: record.settings,
            partitions: states,
        }
    }
}

/// On a single node the only factor is 1.
fn check_replicas(settings: &TopicSettings, factor: u16) -> Result<(), TopicError> {
    const NODES: u16 = 1;
    if !(1..=NODES).contains(&factor) {
        return Err(TopicError::ReplicationFactor {
            asked: factor,
            nodes: NODES,
        });
    }
    if settings.min_insync_replicas > u32::from(factor) {
        return Err(TopicError::MinInsync {
            min: settings.min_insync_replicas,
            factor,
        });
    }
    Ok(())
}

fn put_chunks(transaction: &mut Transaction, id: TopicId, states: &[PartitionRecord], first: u32) {
    for (chunk, partitions) in (0u32..).zip(states.chunks(CHUNK as usize)).skip(first as usize) {
        transaction.put(
            partitions_key(id, chunk),
            encode(PartitionChunk {
                partitions: partitions.to_vec(),
            }),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::embedded::Embedded;
    use super::*;

    fn new(name: &str, id: u8, partitions: u32) -> NewTopic<'_> {
        NewTopic {
            name,
            id: TopicId([id; 16]),
            partitions,
            replication_factor: 1,
            config: TopicConfig::default(),
        }
    }

    fn start(path: &std::path::Path) -> (Boot, Catalog<Embedded>) {
        let mut store = Embedded::open(path).unwrap();
        let boot = boot(&mut store, [7; 16], 5).unwrap();
        let epoch = boot.epoch;
        (
            boot,
            Catalog::new(store, 1, epoch, TopicSettings::default(), 20_000),
        )
    }

    #[test]
    fn everything_is_there_after_a_restart_and_the_epoch_is_higher() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metadata.redb");
        let (boot, mut catalog) = start(&path);
        assert_eq!((boot.cluster_id, boot.epoch), ([7; 16], LeaderEpoch(1)));
        let made = catalog.create(new("orders", 1, 300), 5, false).unwrap();
        assert_eq!(made.partitions.len(), 300);
        catalog.create(new("gone", 2, 3), 5, false).unwrap();
        catalog.alter("orders", [("retention.ms", "9")], []).unwrap();
        catalog.add_partitions("orders", 310).unwrap();
        catalog.delete("gone", None, 6).unwrap();
        assert_eq!(catalog.producer_block().unwrap(), 0..1000);
        drop(catalog);

        let (boot, mut catalog) = start(&path);
        assert_eq!((boot.cluster_id, boot.epoch), ([7; 16], LeaderEpoch(2)));
        let topics = catalog.topics().unwrap();
        assert_eq!(topics.len(), 1);
        let orders = &topics[0];
        assert_eq!((orders.name.as_str(), orders.id), ("orders", TopicId([1; 16])));
        assert_eq!(orders.partitions.len(), 310);
        assert!(
            orders
                .partitions
                .iter()
                .all(|state| state.leader_epoch == 2 && state.isr == [1])
        );
        assert_eq!(orders.settings.retention_ms, Some(9));
        assert_eq!(catalog.tombstones().unwrap(), [(TopicId([2; 16]), 3)]);
        catalog.deletion_finished(TopicId([2; 16])).unwrap();
        assert_eq!(catalog.tombstones().unwrap(), []);
        assert_eq!(catalog.producer_block().unwrap(), 1000..2000);
    }

    #[test]
    fn refused_commands_change_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (_, mut catalog) = start(&dir.path().join("metadata.redb"));
        catalog.create(new("a", 1, 2), 0, false).unwrap();
        let before = catalog.topics().unwrap();
        let min_two = NewTopic {
            config: TopicConfig::new([("min.insync.replicas", "2")]).unwrap(),
            ..new("b", 2, 1)
        };
        let wide = NewTopic {
            replication_factor: 3,
            ..new("b", 2, 1)
        };
        let id = TopicId([9; 16]);
        let refused = [
            catalog.create(new("a", 2, 1), 0, false),
            catalog.create(new("..", 2, 1), 0, false),
            catalog.create(new("b", 2, 0), 0, false),
            catalog.create(new("b", 2, 20_001), 0, false),
            catalog.create(min_two, 0, false),
            catalog.create(wide, 0, false),
            catalog.delete("b", None, 0),
            catalog.delete("a", Some(id), 0),
            catalog.alter("a", [("retention.ms", "1"), ("nope", "1")], []),
            catalog.alter("a", [], ["nope"]),
            catalog.add_partitions("a", 2),
            catalog.add_partitions("a", 20_001),
        ];
        for (at, result) in refused.iter().enumerate() {
            assert!(result.is_err(), "command {at}");
        }
        catalog.create(new("b", 2, 1), 0, true).unwrap();
        assert_eq!(catalog.topics().unwrap(), before);
        assert_eq!(catalog.tombstones().unwrap(), []);
    }

    #[test]
    fn a_name_is_free_at_once_under_another_id() {
        let dir = tempfile::tempdir().unwrap();
        let (_, mut catalog) = start(&dir.path().join("metadata.redb"));
        catalog.create(new("a", 1, 200), 0, false).unwrap();
        catalog.delete("a", Some(TopicId([1; 16])), 0).unwrap();
        let again = catalog.create(new("a", 2, 1), 0, false).unwrap();
        assert_eq!((again.id, again.partitions.len()), (TopicId([2; 16]), 1));
        assert_eq!(catalog.tombstones().unwrap(), [(TopicId([1; 16]), 200)]);
    }
}
