//! Topic administration and questions about the cluster.

use std::time::Instant;

use ringfence_engine::types::{Offset, PartitionId, TopicId};

use super::{Bytes, Client, ClientError};
use crate::error::WireError;
use crate::native::{
    AddPartitions, AlterTopic, ClusterInfo, CreateTopic, DeleteTopic, DescribeTopic, OffsetQuestion,
    ProducerAssigned, Request, Response, Setting, TopicDescription, TopicListed,
};

/// A topic to create.
#[derive(Debug, Clone, Default)]
pub struct NewTopic {
    /// Its name.
    pub name: String,
    /// Number of partitions; 0 is the broker's default.
    pub partitions: u32,
    /// Replicas of each partition; 0 is the broker's default.
    pub replication_factor: u16,
    /// Settings that differ from the defaults.
    pub settings: Vec<(String, String)>,
}

fn settings(pairs: Vec<(String, String)>) -> Vec<Setting> {
    let setting = |(key, value)| Setting { key, value };
    pairs.into_iter().map(setting).collect()
}

/// Names and settings longer than a string of the protocol would be cut on the wire; they are refused before.
fn check_strings<'a>(mut strings: impl Iterator<Item = &'a str>) -> Result<(), ClientError> {
    match strings.find(|text| text.len() > crate::native::MAX_STRING) {
        None => Ok(()),
        Some(text) => Err(ClientError::refused(
            WireError::InvalidRequest,
            &format!(
                "'{:.40}...' is longer than {} bytes",
                text,
                crate::native::MAX_STRING
            ),
        )),
    }
}

macro_rules! answer {
    ($client:ident, $request:expr, $pattern:pat => $value:expr) => {{
        match $client.ask(&$request).await? {
            $pattern => Ok($value),
            _ => Err(ClientError::Protocol {
                address: $client.config().bootstrap.join(","),
                cause: "the answer is of another kind than the request".to_owned(),
            }),
        }
    }};
}

impl Client {
    /// Creates a topic; returns its id. A repetition after a lost answer fails with `TopicAlreadyExists`.
    pub async fn create_topic(&self, topic: NewTopic) -> Result<TopicId, ClientError> {
        let pairs = topic
            .settings
            .iter()
            .flat_map(|(key, value)| [key.as_str(), value.as_str()]);
        check_strings(pairs.chain([topic.name.as_str()]))?;
        let request = Request::CreateTopic(CreateTopic {
            name: topic.name,
            partitions: topic.partitions,
            replication_factor: topic.replication_factor,
            settings: settings(topic.settings),
            validate_only: false,
        });
        answer!(self, request, Response::CreateTopic(created) => created.id)
    }

    /// Deletes a topic and its records.
    pub async fn delete_topic(&self, name: &str) -> Result<(), ClientError> {
        check_strings([name].into_iter())?;
        let request = Request::DeleteTopic(DeleteTopic {
            name: name.to_owned(),
            id: TopicId::default(),
        });
        answer!(self, request, Response::DeleteTopic => ())
    }

    /// Changes settings of a topic: new values, and keys that go back to their defaults.
    pub async fn alter_topic(
        &self,
        name: &str,
        set: Vec<(String, String)>,
        unset: Vec<String>,
    ) -> Result<(), ClientError> {
        let pairs = set.iter().flat_map(|(key, value)| [key.as_str(), value.as_str()]);
        check_strings(pairs.chain(unset.iter().map(String::as_str)).chain([name]))?;
        let request = Request::AlterTopic(AlterTopic {
            name: name.to_owned(),
            set: settings(set),
            unset,
        });
        answer!(self, request, Response::AlterTopic => ())
    }

    /// Raises the number of partitions to `total`.
    pub async fn add_partitions(&self, name: &str, total: u32) -> Result<(), ClientError> {
        check_strings([name].into_iter())?;
        let request = Request::AddPartitions(AddPartitions {
            name: name.to_owned(),
            total,
        });
        answer!(self, request, Response::AddPartitions => ())
    }

    /// All topics, sorted by name.
    pub async fn list_topics(&self) -> Result<Vec<TopicListed>, ClientError> {
        answer!(self, Request::ListTopics, Response::ListTopics(topics) => topics)
    }

    /// Settings and partitions of a topic.
    pub async fn describe_topic(&self, name: &str) -> Result<TopicDescription, ClientError> {
        check_strings([name].into_iter())?;
        let request = Request::DescribeTopic(DescribeTopic {
            name: name.to_owned(),
        });
        match answer!(self, request, Response::DescribeTopic(topic) => topic) {
            Err(error) if error.wire() == Some(WireError::UnknownTopicOrPartition) => {
                Err(ClientError::UnknownTopic(name.to_owned()))
            }
            other => other,
        }
    }

    /// How brokers, shards and partitions stand.
    pub async fn cluster_info(&self) -> Result<ClusterInfo, ClientError> {
        answer!(self, Request::ClusterInfo, Response::ClusterInfo(info) => info)
    }

    /// A fresh producer id.
    pub async fn init_producer(&self) -> Result<ProducerAssigned, ClientError> {
        answer!(self, Request::InitProducer, Response::InitProducer(assigned) => assigned)
    }

    /// The offset of a time (see [`OffsetQuestion::timestamp`]); `None` when every record is older.
    pub async fn offset_for(
        &self,
        partition: PartitionId,
        timestamp: i64,
    ) -> Result<Option<Offset>, ClientError> {
        let question = OffsetQuestion {
            partition,
            current: None,
            timestamp,
        };
        let request: Request<Bytes> = Request::ListOffsets(vec![question]);
        let deadline = Instant::now() + self.config().retry_deadline;
        self.retry(deadline, || async {
            let seen = self.topology().version();
            let result = self.ask_leader(partition, &request).await;
            if result.as_ref().is_err_and(ClientError::retriable) {
                // The error that matters is the one that led here.
                let _ = self.refresh_topology(seen, &[]).await;
            }
            result
        })
        .await
    }

    async fn ask_leader(
        &self,
        partition: PartitionId,
        request: &Request<Bytes>,
    ) -> Result<Option<Offset>, ClientError> {
        let (_, connection) = self.leader_connection(partition).await?;
        match connection.request(request).await? {
            Response::ListOffsets(found) if found.len() == 1 && found[0].partition == partition => {
                match found[0].error {
                    None => Ok(found[0].offset),
                    Some(error) => Err(ClientError::refused(error, "")),
                }
            }
            other => Err(connection.unexpected(&other)),
        }
    }
}
