//! `ringfence produce`: lines of stdin become records.

use std::io::{IsTerminal, Read, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use ringfence_engine::limits::MAX_BATCH_BYTES;
use serde_json::json;
use tokio::sync::mpsc;

use super::Remote;
use super::output::CliError;
use crate::client::{ClientError, OutgoingRecord, Partitioner, Producer, ProducerConfig, Topic};
use crate::native::Acks;

/// Write the lines of stdin into a topic, one record each
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  echo hello | ringfence produce events
  ringfence produce events --partition 3 --acks 1 < lines.txt
  ringfence produce events --key-separator ':' < keyed.txt

Records without a key go to the partitions in turn; records with one go where Kafka's clients put them.
A summary goes to stderr (one JSON object with --json).")]
pub(super) struct Produce {
    /// The topic
    topic: String,
    /// The partition of all records
    #[arg(long, value_name = "P")]
    partition: Option<u32>,
    /// Each line is key, this text, value
    #[arg(long, value_name = "S", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    key_separator: Option<String>,
    /// What an acknowledgement means: synced on all in-sync replicas, synced on the leader, or none is awaited
    #[arg(long, value_enum, default_value_t = AcksArg::All)]
    acks: AcksArg,
    /// A batch is sent before it grows beyond this
    #[arg(long, value_name = "N", default_value_t = 256 << 10, value_parser = batch_bytes)]
    batch_bytes: usize,
    /// How long a batch that is not full waits for more records
    #[arg(long, value_name = "MS", default_value_t = 5)]
    linger_ms: u64,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AcksArg {
    All,
    #[value(name = "1")]
    Leader,
    #[value(name = "0")]
    None,
}

impl From<AcksArg> for Acks {
    fn from(acks: AcksArg) -> Acks {
        match acks {
            AcksArg::All => Acks::All,
            AcksArg::Leader => Acks::Leader,
            AcksArg::None => Acks::None,
        }
    }
}

fn batch_bytes(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(bytes) if (1..=MAX_BATCH_BYTES).contains(&bytes) => Ok(bytes),
        _ => Err(format!(
            "expected a number of bytes between 1 and {MAX_BATCH_BYTES}"
        )),
    }
}

/// Bytes read from stdin at once.
const CHUNK: usize = 256 << 10;

/// Chunks read ahead of the producer.
const CHUNKS_AHEAD: usize = 4;

impl Produce {
    pub(super) async fn run(self) -> Result<(), CliError> {
        let client = self.remote.connect().await?;
        let topic = client.topic(&self.topic).await?;
        self.check_partition(&topic)?;
        let producer = Producer::new(
            &client,
            ProducerConfig {
                acks: self.acks.into(),
                batch_bytes: self.batch_bytes,
                linger: Duration::from_millis(self.linger_ms),
                ..ProducerConfig::default()
            },
        )
        .await?;
        let mut job = Job {
            separator: self.key_separator.as_deref().map(str::as_bytes),
            fixed: self.partition,
            partitioner: Partitioner::new(topic.partitions),
            producer,
            topic,
            lines: 0,
            bytes: 0,
        };
        let began = Instant::now();
        let sent = job.send_all().await;
        // What was handed in before an error is still delivered, so that the summary tells the truth.
        job.producer.flush().await;
        let summary = job.summary(began.elapsed());
        self.print(&summary)?;
        sent?;
        match summary.failed {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    fn check_partition(&self, topic: &Topic) -> Result<(), CliError> {
        match self.partition {
            Some(partition) if partition >= topic.partitions => Err(ClientError::UnknownPartition {
                topic: topic.name.clone(),
                partition,
                count: topic.partitions,
            }
            .into()),
            _ => Ok(()),
        }
    }

    fn print(&self, summary: &Summary) -> Result<(), CliError> {
        let seconds = summary.took.as_secs_f64();
        let megabytes = summary.bytes as f64 / 1e6;
        let rate = megabytes / seconds.max(1e-9);
        let mut err = std::io::stderr().lock();
        if self.remote.json {
            let object = json!({
                "topic": self.topic,
                "records": summary.records,
                "acknowledged": summary.acknowledged,
                "bytes": summary.bytes,
                "seconds": seconds,
            });
            writeln!(err, "{object}")?;
        } else {
            writeln!(
                err,
                "{} of {} records ({megabytes:.1} MB) written to {} in {seconds:.2} s, {rate:.1} MB/s",
                summary.acknowledged, summary.records, self.topic
            )?;
        }
        Ok(())
    }
}

/// The work of one run.
struct Job<'a> {
    separator: Option<&'a [u8]>,
    fixed: Option<u32>,
    partitioner: Partitioner,
    producer: Producer,
    topic: Topic,
    lines: u64,
    bytes: u64,
}

struct Summary {
    records: u64,
    acknowledged: u64,
    bytes: u64,
    took: Duration,
    failed: Option<ClientError>,
}

impl Job<'_> {
    async fn send_all(&mut self) -> Result<(), CliError> {
        let mut chunks = read_stdin();
        let progress = progress();
        while let Some(chunk) = chunks.recv().await {
            for line in split(&chunk?) {
                self.send(line).await?;
            }
            progress.set_position(self.lines);
            progress.set_message(format!("{:.1} MB", self.bytes as f64 / 1e6));
            // After a failure more lines would only fail too.
            if self.producer.totals().first_error.is_some() {
                break;
            }
        }
        progress.finish_and_clear();
        Ok(())
    }

    async fn send(&mut self, line: &[u8]) -> Result<(), CliError> {
        self.lines += 1;
        let (key, value) = match self.separator {
            None => (None, line),
            Some(separator) => {
                let (key, value) = split_key(line, separator).ok_or_else(|| {
                    CliError::failed(format!(
                        "line {} has no key separator; the lines before it are written",
                        self.lines
                    ))
                })?;
                (Some(key), value)
            }
        };
        let index = self.fixed.unwrap_or_else(|| self.partitioner.choose(key));
        let record = OutgoingRecord {
            timestamp: wall_clock_ms(),
            key,
            value: Some(value),
        };
        self.producer.send(self.topic.partition(index), record).await?;
        self.bytes += line.len() as u64;
        Ok(())
    }

    fn summary(&self, took: Duration) -> Summary {
        let totals = self.producer.totals();
        Summary {
            records: totals.records,
            acknowledged: totals.acknowledged,
            bytes: self.bytes,
            took,
            failed: totals.first_error,
        }
    }
}

fn wall_clock_ms() -> i64 {
    // A clock before 1970 gives "no timestamp".
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(-1, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// A spinner on a terminal; nothing in a pipe, or where the user types the lines.
fn progress() -> ProgressBar {
    if !std::io::stderr().is_terminal() || std::io::stdin().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {pos} records, {msg}, {elapsed}") {
        bar.set_style(style);
    }
    bar
}

/// Reads stdin on a thread of its own (reads of a terminal or pipe block); each chunk holds whole lines.
fn read_stdin() -> mpsc::Receiver<Result<Vec<u8>, CliError>> {
    let (sender, receiver) = mpsc::channel(CHUNKS_AHEAD);
    std::thread::spawn(move || {
        let mut lines = Lines::default();
        let mut input = std::io::stdin().lock();
        loop {
            let chunk = match lines.read(&mut input) {
                Ok(Some(chunk)) => Ok(chunk),
                Ok(None) => return,
                Err(error) => Err(error),
            };
            let stop = chunk.is_err();
            // The receiver is gone when the command ends early.
            if sender.blocking_send(chunk).is_err() || stop {
                return;
            }
        }
    });
    receiver
}

/// Cuts a stream into pieces of whole lines.
#[derive(Default)]
struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    /// The next piece; the last one may lack its newline. `None` at the end.
    fn read(&mut self, input: &mut impl Read) -> Result<Option<Vec<u8>>, CliError> {
        loop {
            let filled = self.partial.len();
            if filled > MAX_BATCH_BYTES {
                return Err(CliError::failed(format!(
                    "a line is longer than {MAX_BATCH_BYTES} bytes, the most a record batch can hold"
                )));
            }
            self.partial.resize(filled + CHUNK, 0);
            let count = match input.read(&mut self.partial[filled..]) {
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                    self.partial.truncate(filled);
                    continue;
                }
                Err(error) => return Err(CliError::failed(format!("cannot read stdin: {error}"))),
            };
            self.partial.truncate(filled + count);
            if count == 0 {
                return Ok(Some(std::mem::take(&mut self.partial)).filter(|rest| !rest.is_empty()));
            }
            if let Some(end) = self.partial[filled..].iter().rposition(|byte| *byte == b'\n') {
                let rest = self.partial.split_off(filled + end + 1);
                return Ok(Some(std::mem::replace(&mut self.partial, rest)));
            }
        }
    }
}

/// The lines of a piece, without their newlines.
fn split(chunk: &[u8]) -> impl Iterator<Item = &[u8]> {
    let whole = chunk.strip_suffix(b"\n").unwrap_or(chunk);
    whole.split(|byte| *byte == b'\n')
}

/// Key and value around the first separator.
fn split_key<'a>(line: &'a [u8], separator: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let at = line
        .windows(separator.len())
        .position(|window| window == separator)?;
    Some((&line[..at], &line[at + separator.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands out its pieces one by one, as a pipe does.
    struct Pieces(Vec<&'static [u8]>);

    impl Read for Pieces {
        fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
            if self.0.is_empty() {
                return Ok(0);
            }
            let piece = self.0.remove(0);
            buf[..piece.len()].copy_from_slice(piece);
            Ok(piece.len())
        }
    }

    fn check_lines(pieces: &[&'static [u8]], expect: &[&str]) {
        let mut input = Pieces(pieces.to_vec());
        let mut lines = Lines::default();
        let mut found = Vec::new();
        while let Some(chunk) = lines.read(&mut input).unwrap() {
            found.extend(split(&chunk).map(|line| String::from_utf8(line.to_vec()).unwrap()));
        }
        assert_eq!(found, expect);
    }

    #[test]
    fn lines_survive_any_cut_and_a_missing_last_newline() {
        check_lines(&[b"one\ntwo\n"], &["one", "two"]);
        check_lines(&[b"on", b"e\ntw", b"o"], &["one", "two"]);
        check_lines(&[b"one\n\n", b"\ntwo"], &["one", "", "", "two"]);
        check_lines(&[b"\n"], &[""]);
        check_lines(&[], &[]);
    }

    #[test]
    fn a_key_ends_at_the_first_separator() {
        assert_eq!(
            split_key(b"a::b::c", b"::"),
            Some((b"a".as_slice(), b"b::c".as_slice()))
        );
        assert_eq!(split_key(b"::", b"::"), Some((b"".as_slice(), b"".as_slice())));
        assert_eq!(split_key(b"abc", b"::"), None);
    }
}
