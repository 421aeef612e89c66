//! `scripts/demo`: real text through a broker that is killed half-way, compared to the byte.
//!
//! Line n goes to partition n % 8 as one record, with `acks=all`, through the client library. So record k of partition
//! p must be line 8 k + p: nothing lost, nothing doubled, nothing out of order.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use ringfence_broker::client::{
    Client, ClientConfig, Consumer, ConsumerConfig, Delivery, NewTopic, OutgoingRecord, Producer,
    ProducerConfig, StartAt, Topic,
};
use ringfence_tests::process::{Broker, Setup, scratch};

const TOPIC: &str = "demo";
const PARTITIONS: usize = 8;
/// Lines of the short form.
const SHORT: usize = 300_000;
/// Deliveries looked at this many lines later; far more than are ever unacknowledged.
const BEHIND: usize = 500_000;

/// Writes text into a broker, kills it half-way, and compares what comes back.
#[derive(Debug, Parser)]
struct Args {
    /// The `ringfence` program.
    #[arg(long)]
    ringfence: PathBuf,
    /// Only the first lines.
    #[arg(long)]
    short: bool,
    /// The text; each line becomes a record, empty ones too.
    file: PathBuf,
}

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let args = Args::parse();
    match tokio_uring::start(demo(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn demo(args: &Args) -> Outcome<()> {
    let text = std::fs::read(&args.file)?;
    let limit = if args.short { SHORT } else { usize::MAX };
    let lines: Vec<&[u8]> = lines(&text).take(limit).collect();
    let bytes: usize = lines.iter().map(|line| line.len()).sum();
    println!(
        "{} lines, {:.1} MB of text from {}",
        lines.len(),
        megabytes(bytes),
        args.file.display()
    );

    let dir = scratch();
    let mut broker = Setup::of(args.ringfence.clone(), dir.path()).start();
    println!(
        "broker on {}, data in {}",
        broker.setup.native,
        broker.setup.data.display()
    );
    let client = Client::connect(ClientConfig::new(&broker.setup.native.to_string())).await?;
    let topic = NewTopic {
        name: TOPIC.into(),
        partitions: PARTITIONS as u32,
        ..NewTopic::default()
    };
    client.create_topic(topic).await?;
    let topic = client.topic(TOPIC).await?;

    write(&client, &topic, &lines, bytes, &mut broker).await?;
    read(&client, &topic, &lines, bytes).await?;
    read_by_command(&broker, &lines)?;
    println!(
        "same lines, same order within each of {PARTITIONS} partitions: {} written, {} read, 0 lost, 0 doubled",
        lines.len(),
        lines.len()
    );
    let status = broker.stop();
    if !status.success() {
        return Err(format!("the broker did not stop cleanly: {status}").into());
    }
    Ok(())
}

/// Lines without their line feeds. What follows the last line feed is a line only if it is not empty.
fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let whole = text.strip_suffix(b"\n").unwrap_or(text);
    let none = text.is_empty();
    whole.split(|byte| *byte == b'\n').skip(usize::from(none))
}

/// Deliveries that were not looked at yet, and what the others told.
struct Receipts {
    waiting: VecDeque<(Instant, Delivery)>,
    next_offset: [u64; PARTITIONS],
    latencies: Histogram<u64>,
}

impl Receipts {
    /// Looks at the oldest delivery: acknowledged, at the offset that its line must have.
    async fn check_oldest(&mut self) -> Outcome<()> {
        let Some((sent, delivery)) = self.waiting.pop_front() else {
            return Ok(());
        };
        let delivered = delivery.wait().await?;
        let partition = delivered.partition.index as usize;
        let expected = self.next_offset[partition];
        if delivered.offset.map(|offset| offset.0) != Some(expected) {
            return Err(format!(
                "line {expected} of partition {partition} was stored at {:?}",
                delivered.offset
            )
            .into());
        }
        self.next_offset[partition] += 1;
        let latency = delivered.at.saturating_duration_since(sent);
        self.latencies.saturating_record(latency.as_micros() as u64);
        Ok(())
    }
}

async fn write(
    client: &Client,
    topic: &Topic,
    lines: &[&[u8]],
    bytes: usize,
    broker: &mut Broker,
) -> Outcome<()> {
    let producer = Producer::new(client, ProducerConfig::default()).await?;
    let mut receipts = Receipts {
        waiting: VecDeque::new(),
        next_offset: [0; PARTITIONS],
        latencies: Histogram::new_with_bounds(1, 600_000_000, 3)?,
    };
    let progress = progress("writing", lines.len());
    let start = Instant::now();
    let mut outage = Duration::ZERO;
    for (number, line) in lines.iter().enumerate() {
        if number == lines.len() / 2 {
            outage = kill_and_restart(broker)?;
        }
        let record = OutgoingRecord {
            timestamp: SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as i64,
            key: None,
            value: Some(line),
        };
        let partition = topic.partition((number % PARTITIONS) as u32);
        let delivery = producer.send(partition, record).await?;
        receipts.waiting.push_back((Instant::now(), delivery));
        if receipts.waiting.len() > BEHIND {
            receipts.check_oldest().await?;
        }
        progress.inc(1);
    }
    producer.flush().await;
    let elapsed = start.elapsed();
    while !receipts.waiting.is_empty() {
        receipts.check_oldest().await?;
    }
    progress.finish_and_clear();
    let writing = elapsed.saturating_sub(outage);
    println!(
        "written: {} lines acknowledged (acks=all) in {:.2} s without the outage, {:.1} MB/s",
        receipts.next_offset.iter().sum::<u64>(),
        writing.as_secs_f64(),
        megabytes(bytes) / writing.as_secs_f64()
    );
    let at = |quantile| receipts.latencies.value_at_quantile(quantile) as f64 / 1e3;
    println!(
        "acknowledgement of a line, batching and outage included: p50 {:.1} ms, p95 {:.1}, p99 {:.1}, p99.9 {:.1}, \
         max {:.1}",
        at(0.5),
        at(0.95),
        at(0.99),
        at(0.999),
        receipts.latencies.max() as f64 / 1e3
    );
    Ok(())
}

/// SIGKILL in the middle of the writing; the time until the broker is ready again.
fn kill_and_restart(broker: &mut Broker) -> Outcome<Duration> {
    let start = Instant::now();
    let pid = broker.pid();
    broker.kill();
    *broker = broker.setup.start();
    println!(
        "half-way: SIGKILL of process {pid}, ready again as {} after {:.0} ms",
        broker.pid(),
        start.elapsed().as_secs_f64() * 1e3
    );
    Ok(start.elapsed())
}

async fn read(client: &Client, topic: &Topic, lines: &[&[u8]], bytes: usize) -> Outcome<()> {
    let mut consumer = Consumer::new(client, ConsumerConfig::default());
    for index in 0..PARTITIONS {
        consumer
            .assign(topic.partition(index as u32), StartAt::Beginning)
            .await?;
    }
    let progress = progress("reading", lines.len());
    let start = Instant::now();
    let mut next = [0usize; PARTITIONS];
    while next.iter().sum::<usize>() < lines.len() {
        let fetched = tokio::time::timeout(Duration::from_secs(60), consumer.next()).await;
        let fetched = fetched.map_err(|_| format!("only {next:?} of {} lines came back", lines.len()))??;
        let partition = fetched.partition.index as usize;
        for record in fetched.records() {
            let record = record?;
            let place = &mut next[partition];
            let expected = lines.get(*place * PARTITIONS + partition);
            if record.offset.0 != *place as u64 || record.value != expected.copied() {
                return Err(format!(
                    "record {} of partition {partition} is not line {place}",
                    record.offset
                )
                .into());
            }
            *place += 1;
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    for (index, next) in next.iter().enumerate() {
        let partition = topic.partition(index as u32);
        let end = consumer.high_watermark(partition).map(|offset| offset.0);
        if end != Some(*next as u64) {
            return Err(format!("partition {index} ends at {end:?}, {next} lines were written to it").into());
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "read back: {} lines in {seconds:.2} s, {:.1} MB/s",
        lines.len(),
        megabytes(bytes) / seconds
    );
    Ok(())
}

/// One partition once more with the command line, as a user would.
fn read_by_command(broker: &Broker, lines: &[&[u8]]) -> Outcome<()> {
    let mut expected = Vec::new();
    for line in lines.iter().step_by(PARTITIONS) {
        expected.extend_from_slice(line);
        expected.push(b'\n');
    }
    let count = lines.len().div_ceil(PARTITIONS).to_string();
    let args = [
        "consume",
        TOPIC,
        "--partition",
        "0",
        "--from",
        "beginning",
        "--max",
        &count,
    ];
    let output = broker.cli(&args, b"");
    if output.code != 0 || output.stdout != expected {
        return Err(format!(
            "`ringfence consume` ended with {} and printed {} bytes instead of {}: {}",
            output.code,
            output.stdout.len(),
            expected.len(),
            output.stderr
        )
        .into());
    }
    println!(
        "`ringfence {}`: {} bytes, as they went in",
        args.join(" "),
        expected.len()
    );
    Ok(())
}

fn progress(what: &'static str, lines: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}");
    let style = style.expect("a template with known fields");
    ProgressBar::new(lines as u64)
        .with_style(style)
        .with_message(what)
}

fn megabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::lines;

    #[test]
    fn every_line_counts_and_empty_ones_too() {
        let check = |text: &[u8], expected: &[&[u8]]| assert_eq!(lines(text).collect::<Vec<_>>(), expected);
        check(b"", &[]);
        check(b"\n", &[b""]);
        check(b"a", &[b"a"]);
        check(b"a\n", &[b"a"]);
        check(b"a\n\n\xff", &[b"a", b"", b"\xff"]);
        check(b"\n\n", &[b"", b""]);
    }
}
