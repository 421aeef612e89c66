//! `ringfence topics`: create, list, describe, alter, add-partitions, delete.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::output::{CliError, Table, joined, line, or_dash};
use super::{Remote, key_value, output};
use crate::client::{Client, ClientError, NewTopic};
use crate::error::WireError;
use crate::native::{PartitionInfo, TopicDescription};

/// Create, list, describe, change and delete topics
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ringfence topics create events --partitions 8 --config retention.ms=3600000
  ringfence topics alter events --config segment.bytes=1073741824 --delete-config retention.ms
  ringfence topics add-partitions events --partitions 16
  ringfence topics describe events --json")]
pub(super) struct Topics {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Create(Create),
    List(List),
    Describe(Describe),
    Alter(Alter),
    AddPartitions(AddPartitions),
    Delete(Delete),
}

/// Create a topic
#[derive(Debug, Args)]
struct Create {
    /// Its name: 1 to 249 of the characters a-z A-Z 0-9 . _ -
    name: String,
    /// Number of partitions [default: the broker's num.partitions]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    partitions: Option<u32>,
    /// Replicas of each partition
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    replication_factor: u16,
    /// A setting that differs from the default, for instance retention.ms=3600000
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    config: Vec<(String, String)>,
    /// Succeed when the topic exists already, whatever its settings
    #[arg(long)]
    if_not_exists: bool,
    #[command(flatten)]
    remote: Remote,
}

/// List all topics
#[derive(Debug, Args)]
struct List {
    #[command(flatten)]
    remote: Remote,
}

/// Show settings and partitions of a topic, or of all
#[derive(Debug, Args)]
struct Describe {
    /// The topic [default: all]
    name: Option<String>,
    #[command(flatten)]
    remote: Remote,
}

/// Change settings of a topic
#[derive(Debug, Args)]
struct Alter {
    /// The topic
    name: String,
    /// A new value
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value, required_unless_present = "delete_config")]
    config: Vec<(String, String)>,
    /// A setting that goes back to its default
    #[arg(long, value_name = "KEY")]
    delete_config: Vec<String>,
    #[command(flatten)]
    remote: Remote,
}

/// Raise the number of partitions; keys may move to other partitions
#[derive(Debug, Args)]
struct AddPartitions {
    /// The topic
    name: String,
    /// The new total
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    partitions: u32,
    #[command(flatten)]
    remote: Remote,
}

/// Delete a topic and its records
#[derive(Debug, Args)]
struct Delete {
    /// The topic
    name: String,
    /// Succeed when there is no such topic
    #[arg(long)]
    if_exists: bool,
    #[command(flatten)]
    remote: Remote,
}

impl Topics {
    pub(super) async fn run(self) -> Result<(), CliError> {
        match self.action {
            Action::Create(create) => create.run().await,
            Action::List(list) => list.run().await,
            Action::Describe(describe) => describe.run().await,
            Action::Alter(alter) => alter.run().await,
            Action::AddPartitions(add) => add.run().await,
            Action::Delete(delete) => delete.run().await,
        }
    }
}

/// Prints what was done: a sentence, or an object.
fn done(remote: &Remote, sentence: &str, object: &Value) -> Result<(), CliError> {
    if remote.json {
        output::json(object)
    } else {
        line(sentence)
    }
}

impl Create {
    async fn run(self) -> Result<(), CliError> {
        let client = self.remote.connect().await?;
        let name = self.name;
        let created = client
            .create_topic(NewTopic {
                name: name.clone(),
                partitions: self.partitions.unwrap_or(0),
                replication_factor: self.replication_factor,
                settings: self.config,
            })
            .await;
        match created {
            Ok(id) => {
                let object = json!({"name": name, "id": id.to_string(), "created": true});
                done(&self.remote, &format!("created topic {name} ({id})"), &object)
            }
            Err(error) if self.if_not_exists && error.wire() == Some(WireError::TopicAlreadyExists) => {
                let object = json!({"name": name, "created": false});
                done(&self.remote, &format!("topic {name} exists"), &object)
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl List {
    async fn run(self) -> Result<(), CliError> {
        let topics = self.remote.connect().await?.list_topics().await?;
        if self.remote.json {
            let topic = |topic: &crate::native::TopicListed| {
                json!({
                    "name": topic.name,
                    "id": topic.id.to_string(),
                    "partitions": topic.partitions,
                    "replication_factor": topic.replication_factor,
                })
            };
            return output::json(&topics.iter().map(topic).collect::<Vec<_>>());
        }
        let mut table = Table::new(&["TOPIC", "PARTITIONS", "REPLICAS", "ID"]);
        for topic in topics {
            table.row(vec![
                topic.name,
                topic.partitions.to_string(),
                topic.replication_factor.to_string(),
                topic.id.to_string(),
            ]);
        }
        if table.is_empty() {
            return line("no topics; `ringfence topics create NAME` makes one");
        }
        table.print()
    }
}

impl Describe {
    async fn run(self) -> Result<(), CliError> {
        let client = self.remote.connect().await?;
        let topics = match &self.name {
            Some(name) => vec![client.describe_topic(name).await?],
            None => describe_all(&client).await?,
        };
        if self.remote.json {
            let objects: Vec<Value> = topics.iter().map(topic_object).collect();
            // One topic asked for by name is one object, not a list of one.
            return match (self.name, objects.as_slice()) {
                (Some(_), [object]) => output::json(object),
                _ => output::json(&objects),
            };
        }
        topics.iter().try_for_each(print_topic)
    }
}

async fn describe_all(client: &Client) -> Result<Vec<TopicDescription>, CliError> {
    let mut topics = Vec::new();
    for topic in client.list_topics().await? {
        match client.describe_topic(&topic.name).await {
            Ok(description) => topics.push(description),
            // Deleted between the two questions.
            Err(ClientError::UnknownTopic(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(topics)
}

fn topic_object(topic: &TopicDescription) -> Value {
    let settings: serde_json::Map<String, Value> = topic
        .settings
        .iter()
        .map(|setting| {
            let value = json!({"value": setting.value, "default": !setting.own});
            (setting.key.clone(), value)
        })
        .collect();
    json!({
        "name": topic.name,
        "id": topic.id.to_string(),
        "replication_factor": topic.replication_factor,
        "settings": settings,
        "partitions": topic.partitions.iter().map(partition_object).collect::<Vec<_>>(),
    })
}

fn partition_object(partition: &PartitionInfo) -> Value {
    json!({
        "partition": partition.index,
        "error": partition.error.map(WireError::name),
        "leader": partition.leader.map(|node| node.0),
        "leader_epoch": partition.leader_epoch.0,
        "partition_epoch": partition.partition_epoch,
        "shard": partition.shard.0,
        "replicas": partition.replicas.iter().map(|node| node.0).collect::<Vec<_>>(),
        "isr": partition.isr.iter().map(|node| node.0).collect::<Vec<_>>(),
    })
}

fn print_topic(topic: &TopicDescription) -> Result<(), CliError> {
    line(&format!(
        "topic {}  id {}  partitions {}  replication factor {}",
        topic.name,
        topic.id,
        topic.partitions.len(),
        topic.replication_factor
    ))?;
    let mut settings = Table::new(&["SETTING", "VALUE", "FROM"]);
    for setting in &topic.settings {
        let from = if setting.own { "topic" } else { "default" };
        settings.row(vec![setting.key.clone(), setting.value.clone(), from.to_owned()]);
    }
    settings.print()?;
    let mut partitions = Table::new(&[
        "PARTITION",
        "LEADER",
        "EPOCH",
        "SHARD",
        "REPLICAS",
        "ISR",
        "STATE",
    ]);
    for partition in &topic.partitions {
        partitions.row(vec![
            partition.index.to_string(),
            or_dash(partition.leader),
            partition.leader_epoch.to_string(),
            partition.shard.to_string(),
            joined(&partition.replicas),
            joined(&partition.isr),
            partition.error.map_or("ok", WireError::name).to_owned(),
        ]);
    }
    partitions.print()?;
    line("")
}

impl Alter {
    async fn run(self) -> Result<(), CliError> {
        let client = self.remote.connect().await?;
        client
            .alter_topic(&self.name, self.config, self.delete_config)
            .await?;
        let object = json!({"name": self.name, "altered": true});
        done(&self.remote, &format!("altered topic {}", self.name), &object)
    }
}

impl AddPartitions {
    async fn run(self) -> Result<(), CliError> {
        let client = self.remote.connect().await?;
        client.add_partitions(&self.name, self.partitions).await?;
        let object = json!({"name": self.name, "partitions": self.partitions});
        let sentence = format!("topic {} has {} partitions now", self.name, self.partitions);
        done(&self.remote, &sentence, &object)
    }
}

impl Delete {
    async fn run(self) -> Result<(), CliError> {
        let client = self.remote.connect().await?;
        let name = &self.name;
        match client.delete_topic(name).await {
            Ok(()) => {
                let object = json!({"name": name, "deleted": true});
                done(&self.remote, &format!("deleted topic {name}"), &object)
            }
            Err(error) if error.wire() == Some(WireError::UnknownTopicOrPartition) => {
                if !self.if_exists {
                    return Err(CliError::failed(format!(
                        "topic '{name}' does not exist; `ringfence topics list` shows those that do"
                    )));
                }
                let object = json!({"name": name, "deleted": false});
                done(&self.remote, &format!("there is no topic {name}"), &object)
            }
            Err(error) => Err(error.into()),
        }
    }
}
