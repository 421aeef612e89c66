//! `ringfence consume`: records of a topic to stdout.

use std::collections::BTreeMap;
use std::io::{BufWriter, StdoutLock, Write};
use std::ops::ControlFlow;

use clap::Args;
use ringfence_engine::batch::Record;
use ringfence_engine::types::{Offset, PartitionId};
use serde_json::{Map, Value, json};

use super::Remote;
use super::output::CliError;
use crate::client::{Client, ClientError, Consumer, ConsumerConfig, Fetched, StartAt, Topic};
use crate::native::TIMESTAMP_LATEST;

/// Print the records of a topic
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ringfence consume events
  ringfence consume events --partition 3 --from 1000 --max 10 --json
  ringfence consume events --from end --follow

Ends at the last record there was when it began, unless --follow is given. Records of one partition come in order.")]
pub(super) struct Consume {
    /// The topic
    topic: String,
    /// Only these partitions [default: all]
    #[arg(long, value_name = "P")]
    partition: Vec<u32>,
    /// Where to begin in each partition: beginning, end, or an offset
    #[arg(long, value_name = "beginning|end|OFFSET", default_value = "beginning", value_parser = start_at)]
    from: StartAt,
    /// Stop after this many records
    #[arg(long, value_name = "N")]
    max: Option<u64>,
    /// Wait for new records when the end is reached
    #[arg(long)]
    follow: bool,
    /// Print the key and this text before each value
    #[arg(long, value_name = "S")]
    key_separator: Option<String>,
    #[command(flatten)]
    remote: Remote,
}

fn start_at(text: &str) -> Result<StartAt, String> {
    match text {
        "beginning" => Ok(StartAt::Beginning),
        "end" => Ok(StartAt::End),
        offset => match offset.parse::<i64>() {
            Ok(offset) if offset >= 0 => Ok(StartAt::Offset(Offset(offset.unsigned_abs()))),
            _ => Err("expected beginning, end, or an offset from 0".to_owned()),
        },
    }
}

impl Consume {
    pub(super) async fn run(self) -> Result<(), CliError> {
        let client = self.remote.connect().await?;
        let topic = client.topic(&self.topic).await?;
        let partitions = self.partitions(&topic)?;
        let mut consumer = Consumer::new(&client, ConsumerConfig::default());
        for partition in &partitions {
            consumer.assign(*partition, self.from).await?;
        }
        let mut ends = BTreeMap::new();
        if !self.follow {
            ends = self.ends(&client, &consumer, &partitions).await?;
        }
        let mut printer = Printer {
            out: BufWriter::new(std::io::stdout().lock()),
            json: self.remote.json,
            key_separator: self.key_separator.as_deref(),
            left: self.max.unwrap_or(u64::MAX),
        };
        while printer.left > 0 && (self.follow || !ends.is_empty()) {
            let fetched = consumer.next().await?;
            let end = ends.get(&fetched.partition).copied();
            let flow = printer.print(&fetched, end)?;
            if end.is_some_and(|end| fetched.next >= end) {
                ends.remove(&fetched.partition);
                consumer.unassign(fetched.partition);
            }
            if flow.is_break() {
                break;
            }
        }
        Ok(printer.out.flush()?)
    }

    fn partitions(&self, topic: &Topic) -> Result<Vec<PartitionId>, CliError> {
        let mut wanted = self.partition.clone();
        if wanted.is_empty() {
            wanted = (0..topic.partitions).collect();
        }
        wanted.sort_unstable();
        wanted.dedup();
        if let Some(wrong) = wanted.iter().find(|index| **index >= topic.partitions) {
            return Err(ClientError::UnknownPartition {
                topic: topic.name.clone(),
                partition: *wrong,
                count: topic.partitions,
            }
            .into());
        }
        Ok(wanted.into_iter().map(|index| topic.partition(index)).collect())
    }

    /// Where each partition ends now; those with nothing to read are left out.
    async fn ends(
        &self,
        client: &Client,
        consumer: &Consumer,
        partitions: &[PartitionId],
    ) -> Result<BTreeMap<PartitionId, Offset>, CliError> {
        let mut ends = BTreeMap::new();
        for partition in partitions {
            let end = client
                .offset_for(*partition, TIMESTAMP_LATEST)
                .await?
                .unwrap_or_default();
            let begin = consumer.position(*partition).unwrap_or_default();
            if begin > end {
                return Err(CliError::failed(format!(
                    "offset {begin} lies behind the end {end} of partition {}; choose one up to it",
                    partition.index
                )));
            }
            if begin < end {
                ends.insert(*partition, end);
            }
        }
        Ok(ends)
    }
}

struct Printer<'a> {
    out: BufWriter<StdoutLock<'static>>,
    json: bool,
    key_separator: Option<&'a str>,
    left: u64,
}

impl Printer<'_> {
    /// Prints the records below `end`; breaks when enough were printed.
    fn print(&mut self, fetched: &Fetched, end: Option<Offset>) -> Result<ControlFlow<()>, CliError> {
        for record in fetched.records() {
            let record = record?;
            if end.is_some_and(|end| record.offset >= end) {
                break;
            }
            if self.left == 0 {
                return Ok(ControlFlow::Break(()));
            }
            self.left -= 1;
            if self.json {
                let object = record_object(fetched.partition.index, &record);
                writeln!(self.out, "{object}")?;
            } else {
                self.plain(&record)?;
            }
        }
        // A follower of the output shall see what there is.
        self.out.flush()?;
        Ok(ControlFlow::Continue(()))
    }

    fn plain(&mut self, record: &Record<'_>) -> Result<(), CliError> {
        if let Some(separator) = self.key_separator {
            self.out.write_all(record.key.unwrap_or_default())?;
            self.out.write_all(separator.as_bytes())?;
        }
        self.out.write_all(record.value.unwrap_or_default())?;
        self.out.write_all(b"\n")?;
        Ok(())
    }
}

/// A record as JSON. Bytes that are no UTF-8 go into `key_hex` or `value_hex` instead.
fn record_object(partition: u32, record: &Record<'_>) -> Value {
    let mut object = Map::new();
    object.insert("partition".to_owned(), json!(partition));
    object.insert("offset".to_owned(), json!(record.offset.0));
    object.insert("timestamp".to_owned(), json!(record.timestamp));
    insert_bytes(&mut object, "key", record.key);
    insert_bytes(&mut object, "value", record.value);
    let headers: Vec<Value> = record
        .headers
        .clone()
        .map(|(key, value)| {
            let mut header = Map::new();
            insert_bytes(&mut header, "key", Some(key));
            insert_bytes(&mut header, "value", value);
            Value::Object(header)
        })
        .collect();
    if !headers.is_empty() {
        object.insert("headers".to_owned(), Value::Array(headers));
    }
    Value::Object(object)
}

fn insert_bytes(object: &mut Map<String, Value>, name: &str, bytes: Option<&[u8]>) {
    match bytes.map(|bytes| (bytes, std::str::from_utf8(bytes))) {
        None => object.insert(name.to_owned(), Value::Null),
        Some((_, Ok(text))) => object.insert(name.to_owned(), json!(text)),
        Some((bytes, Err(_))) => {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            object.insert(format!("{name}_hex"), json!(hex))
        }
    };
}
