//! `ringfence cluster`: how brokers, shards and partitions stand.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use clap::Args;
use ringfence_engine::types::TopicId;
use serde_json::{Map, Value, json};

use super::Remote;
use super::output::{self, CliError, Table, joined, line, or_dash};
use crate::native::{BrokerInfo, ClusterInfo, PartitionStanding, ShardStanding};

/// Show brokers, shards and partitions
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ringfence cluster
  ringfence cluster --topic events --watch
  ringfence cluster --json | jq '.partitions[] | select(.leader == null)'")]
pub(super) struct Cluster {
    /// Only partitions of this topic
    #[arg(long, value_name = "NAME")]
    topic: Option<String>,
    /// Show it again and again until interrupted
    #[arg(long)]
    watch: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "S", default_value_t = 1, requires = "watch", value_parser = clap::value_parser!(u64).range(1..))]
    interval: u64,
    #[command(flatten)]
    remote: Remote,
}

impl Cluster {
    pub(super) async fn run(self) -> Result<(), CliError> {
        let client = self.remote.connect().await?;
        loop {
            let mut info = client.cluster_info().await?;
            self.keep_topic(&mut info)?;
            if self.watch && !self.remote.json && std::io::stdout().is_terminal() {
                // Clear the screen, cursor to the top.
                write!(std::io::stdout().lock(), "\x1b[2J\x1b[H")?;
            }
            if self.remote.json {
                output::json(&object(&info))?;
            } else {
                print(&info)?;
            }
            if !self.watch {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_secs(self.interval)).await;
        }
    }

    fn keep_topic(&self, info: &mut ClusterInfo) -> Result<(), CliError> {
        let Some(name) = &self.topic else {
            return Ok(());
        };
        let topic = info.topics.iter().find(|topic| topic.name == *name);
        let id = topic.map(|topic| topic.id).ok_or_else(|| {
            CliError::failed(format!(
                "topic '{name}' does not exist; `ringfence topics list` shows those that do"
            ))
        })?;
        info.partitions.retain(|standing| standing.partition.topic == id);
        Ok(())
    }
}

fn names(info: &ClusterInfo) -> HashMap<TopicId, &str> {
    let name = |topic: &'_ crate::native::TopicName| topic.id;
    info.topics
        .iter()
        .map(|topic| (name(topic), topic.name.as_str()))
        .collect()
}

fn offline(info: &ClusterInfo) -> usize {
    info.partitions
        .iter()
        .filter(|standing| standing.leader.is_none())
        .count()
}

fn under_replicated(info: &ClusterInfo) -> usize {
    let short = |standing: &&PartitionStanding| standing.isr.len() < standing.replicas.len();
    info.partitions.iter().filter(short).count()
}

fn print(info: &ClusterInfo) -> Result<(), CliError> {
    line(&format!(
        "cluster {}  controller {}  partitions {}  offline {}  under-replicated {}",
        info.cluster,
        or_dash(info.controller),
        info.partitions.len(),
        offline(info),
        under_replicated(info)
    ))?;
    let mut brokers = Table::new(&["BROKER", "ADDRESS", "SHARDS", "GENERATION"]);
    for broker in &info.brokers {
        brokers.row(vec![
            broker.node.to_string(),
            format!("{}:{}", broker.host, broker.port),
            broker.shards.to_string(),
            broker.generation.to_string(),
        ]);
    }
    brokers.print()?;
    print_shards(&info.shards)?;
    print_partitions(info)
}

/// One row per figure, one column per shard: there are more figures than a line has room for.
fn print_shards(shards: &[ShardStanding]) -> Result<(), CliError> {
    if shards.is_empty() {
        return Ok(());
    }
    let mut heads = vec!["SHARD".to_owned()];
    heads.extend(
        shards
            .iter()
            .map(|shard| format!("{}/{}", shard.node, shard.shard)),
    );
    let heads: Vec<&str> = heads.iter().map(String::as_str).collect();
    let mut table = Table::new(&heads);
    let mut names: Vec<&str> = Vec::new();
    for figure in shards.iter().flat_map(|shard| &shard.figures) {
        if !names.contains(&figure.name.as_str()) {
            names.push(&figure.name);
        }
    }
    for name in names {
        let mut row = vec![name.to_owned()];
        for shard in shards {
            let figure = shard.figures.iter().find(|figure| figure.name == name);
            row.push(or_dash(figure.map(|figure| figure.value)));
        }
        table.row(row);
    }
    table.print()?;
    for shard in shards.iter().filter(|shard| !shard.fenced.is_empty()) {
        line(&format!(
            "shard {}/{} takes no writes: {}",
            shard.node, shard.shard, shard.fenced
        ))?;
    }
    Ok(())
}

fn print_partitions(info: &ClusterInfo) -> Result<(), CliError> {
    let names = names(info);
    let mut table = Table::new(&[
        "TOPIC",
        "PARTITION",
        "LEADER",
        "EPOCH",
        "SHARD",
        "ISR",
        "START",
        "HIGH",
        "DURABLE",
        "END",
        "STATE",
    ]);
    for standing in &info.partitions {
        let state = match (&standing.leader, standing.fenced.as_str()) {
            (None, _) => "offline",
            (Some(_), "") => "ok",
            (Some(_), fenced) => fenced,
        };
        let topic = standing.partition.topic;
        table.row(vec![
            names
                .get(&topic)
                .map_or_else(|| topic.to_string(), |name| (*name).to_owned()),
            standing.partition.index.to_string(),
            or_dash(standing.leader),
            standing.leader_epoch.to_string(),
            standing.shard.to_string(),
            joined(&standing.isr),
            or_dash(standing.log_start),
            or_dash(standing.high_watermark),
            or_dash(standing.durable_end),
            or_dash(standing.log_end),
            state.to_owned(),
        ]);
    }
    table.print()
}

fn object(info: &ClusterInfo) -> Value {
    let names = names(info);
    json!({
        "cluster": info.cluster.to_string(),
        "controller": info.controller.map(|node| node.0),
        "offline": offline(info),
        "under_replicated": under_replicated(info),
        "brokers": info.brokers.iter().map(broker_object).collect::<Vec<_>>(),
        "shards": info.shards.iter().map(shard_object).collect::<Vec<_>>(),
        "partitions": info
            .partitions
            .iter()
            .map(|standing| partition_object(standing, names.get(&standing.partition.topic).copied()))
            .collect::<Vec<_>>(),
    })
}

fn broker_object(broker: &BrokerInfo) -> Value {
    json!({
        "node": broker.node.0,
        "host": broker.host,
        "port": broker.port,
        "shards": broker.shards,
        "generation": broker.generation,
    })
}

fn shard_object(shard: &ShardStanding) -> Value {
    let figures: Map<String, Value> = shard
        .figures
        .iter()
        .map(|figure| (figure.name.clone(), json!(figure.value)))
        .collect();
    json!({
        "node": shard.node.0,
        "shard": shard.shard.0,
        "fenced": if shard.fenced.is_empty() { Value::Null } else { json!(shard.fenced) },
        "figures": figures,
    })
}

fn partition_object(standing: &PartitionStanding, topic: Option<&str>) -> Value {
    json!({
        "topic": topic,
        "topic_id": standing.partition.topic.to_string(),
        "partition": standing.partition.index,
        "leader": standing.leader.map(|node| node.0),
        "leader_epoch": standing.leader_epoch.0,
        "partition_epoch": standing.partition_epoch,
        "shard": standing.shard.0,
        "replicas": standing.replicas.iter().map(|node| node.0).collect::<Vec<_>>(),
        "isr": standing.isr.iter().map(|node| node.0).collect::<Vec<_>>(),
        "log_start": standing.log_start.map(|offset| offset.0),
        "high_watermark": standing.high_watermark.map(|offset| offset.0),
        "durable_end": standing.durable_end.map(|offset| offset.0),
        "log_end": standing.log_end.map(|offset| offset.0),
        "fenced": if standing.fenced.is_empty() { Value::Null } else { json!(standing.fenced) },
    })
}
