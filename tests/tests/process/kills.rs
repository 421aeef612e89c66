//! SIGKILL at any moment: what was acknowledged is there, in order, once.

use std::collections::VecDeque;
use std::thread;
use std::time::Duration;

use ringfence_broker::error::WireError;
use ringfence_broker::native::{Acks, Api, Request, Response};
use ringfence_engine::types::{PartitionId, TopicId};
use ringfence_tests::batch::{self, Producer};
use ringfence_tests::native::{self, Native};

use super::{Fixture, partition, plain, values};

fn new_producer(native: &mut Native) -> Producer {
    match native.call(&Request::InitProducer).expect("an answer") {
        Response::InitProducer(assigned) => Producer {
            id: assigned.producer_id,
            epoch: assigned.producer_epoch,
            sequence: 0,
        },
        other => panic!("InitProducer was answered with {other:?}"),
    }
}

/// A small generator of test moments, the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// An idempotent writer of one partition that remembers what it may have to send again.
struct Writer {
    partition: PartitionId,
    producer: Producer,
    /// Batches sent and not acknowledged, oldest first.
    pending: VecDeque<Vec<u8>>,
    acknowledged: u64,
    written: u64,
}

impl Writer {
    fn new(partition: PartitionId, producer: Producer) -> Writer {
        Writer {
            partition,
            producer,
            pending: VecDeque::new(),
            acknowledged: 0,
            written: 0,
        }
    }

    fn value(partition: PartitionId, number: u64) -> Vec<u8> {
        let mut value = format!("{}:{number}:", partition.index).into_bytes();
        value.resize(value.len() + (number * 37 % 900) as usize, b'.');
        value
    }

    fn send_next(&mut self, native: &mut Native) -> std::io::Result<()> {
        let values: Vec<Vec<u8>> = (0..3)
            .map(|n| Writer::value(self.partition, self.written + n))
            .collect();
        let slices: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
        let records = batch::build(&slices, 1_000, self.producer);
        self.producer.sequence += 3;
        self.written += 3;
        self.pending.push_back(records.clone());
        native.send(&native::produce(self.partition, &records, Acks::All))?;
        Ok(())
    }

    fn resend(&self, native: &mut Native) -> std::io::Result<()> {
        for records in &self.pending {
            native.send(&native::produce(self.partition, records, Acks::All))?;
        }
        Ok(())
    }

    fn acknowledge(&mut self, error: Option<WireError>, base: Option<u64>) {
        assert_eq!(error, None, "partition {}", self.partition.index);
        assert_eq!(
            base,
            Some(self.acknowledged),
            "every batch has its place, also when it is sent again"
        );
        self.pending.pop_front().expect("an answer is to a pending batch");
        self.acknowledged += 3;
    }
}

/// Takes the next answer, which belongs to the writer whose request is the oldest.
fn take_answer(native: &mut Native, writers: &mut [Writer], order: &mut VecDeque<usize>) {
    let (_, response) = native.receive(Api::Produce).expect("the broker runs");
    let Response::Produce(answer) = response else {
        panic!("Produce was answered with {response:?}")
    };
    let writer = order.pop_front().expect("an answer is to a request");
    let produced = &answer.partitions[0];
    writers[writer].acknowledge(produced.error, produced.base_offset.map(|offset| offset.0));
}

/// One life of the broker: everything unacknowledged again, then new batches until it is killed.
fn life(f: &mut Fixture, writers: &mut [Writer], dice: &mut Dice) {
    let mut native = f.connect();
    let mut order = VecDeque::new();
    for (index, writer) in writers.iter().enumerate() {
        writer.resend(&mut native).expect("the broker runs");
        order.extend(std::iter::repeat_n(index, writer.pending.len()));
    }
    for _ in 0..50 + dice.below(200) {
        let index = dice.below(writers.len() as u64) as usize;
        writers[index].send_next(&mut native).expect("the broker runs");
        order.push_back(index);
        // An idempotent producer keeps at most five batches of a partition in flight.
        while writers.iter().any(|writer| writer.pending.len() >= 5) {
            take_answer(&mut native, writers, &mut order);
        }
    }
    f.broker.kill();
}

#[test]
fn nothing_acknowledged_is_lost_or_doubled_over_many_kills() {
    let mut f = Fixture::new();
    let mut native = f.connect();
    let settings = [("segment.bytes", "262144")];
    let topic = native.create_topic("killed", 4, &settings).expect("a good topic");
    let mut writers: Vec<Writer> = (0..4)
        .map(|index| Writer::new(partition(topic, index), new_producer(&mut native)))
        .collect();
    let mut dice = Dice(20);
    let mut epochs = Vec::new();
    for _ in 0..8 {
        let info = f.connect().topic("killed");
        epochs.push(info.partitions[0].leader_epoch);
        life(&mut f, &mut writers, &mut dice);
        f.broker = f.broker.setup.start();
    }
    assert!(
        epochs.is_sorted_by(|a, b| a < b),
        "the leader epoch rises at every start: {epochs:?}"
    );
    let mut native = f.connect();
    for writer in &mut writers {
        writer.resend(&mut native).expect("the broker runs");
        for _ in 0..writer.pending.len() {
            let mut order = VecDeque::from([0]);
            take_answer(&mut native, std::slice::from_mut(writer), &mut order);
        }
        let expected: Vec<Vec<u8>> = (0..writer.written)
            .map(|n| Writer::value(writer.partition, n))
            .collect();
        let found = values(&mut native, writer.partition);
        assert_eq!(
            found.len(),
            expected.len(),
            "partition {}",
            writer.partition.index
        );
        assert!(
            found == expected,
            "partition {} holds what was written, in order",
            writer.partition.index
        );
    }
}

#[test]
fn an_idempotent_retry_after_a_kill_is_answered_with_its_old_place() {
    let mut f = Fixture::new();
    let mut native = f.connect();
    let topic = native.create_topic("retry", 1, &[]).expect("a good topic");
    let p = partition(topic, 0);
    let producer = new_producer(&mut native);
    let at = |sequence| Producer { sequence, ..producer };
    assert_eq!(native.produce(p, &batch::build(&[b"0", b"1"], 1, at(0))), Ok(0));
    assert_eq!(native.produce(p, &batch::build(&[b"2"], 1, at(2))), Ok(2));
    f.broker.kill_and_restart();
    let mut native = f.connect();
    assert_eq!(
        native.produce(p, &batch::build(&[b"2"], 1, at(2))),
        Ok(2),
        "the retry of the last batch"
    );
    assert_eq!(
        native.produce(p, &batch::build(&[b"0", b"1"], 1, at(0))),
        Ok(0),
        "the retry of the one before"
    );
    let gap = native.produce(p, &batch::build(&[b"9"], 1, at(9)));
    assert_eq!(gap, Err(WireError::OutOfOrderSequenceNumber));
    let newer = Producer {
        epoch: producer.epoch + 1,
        sequence: 0,
        ..producer
    };
    assert_eq!(native.produce(p, &batch::build(&[b"3"], 1, newer)), Ok(3));
    let fenced = native.produce(p, &batch::build(&[b"x"], 1, at(3)));
    assert_eq!(fenced, Err(WireError::InvalidProducerEpoch));
    let other = new_producer(&mut native);
    assert_ne!(other.id, producer.id, "a producer id is given out once");
    assert_eq!(values(&mut native, p), [b"0", b"1", b"2", b"3"]);
}

fn write_one_each(native: &mut [Native], topic: TopicId, partitions: u32, text: &str) {
    for index in 0..partitions {
        let p = partition(topic, index);
        let shard = usize::from(p.shard(native.len() as u16).0);
        let value = format!("{text}-{index}");
        native[shard]
            .produce(p, &plain(&[value.as_bytes()]))
            .expect("a good batch");
    }
}

/// A connection to every shard.
fn connections(f: &Fixture, shards: u16) -> Vec<Native> {
    let connect = |shard| Native::connect(f.broker.setup.native, Some(shard)).expect("the shard serves");
    let all: Vec<Native> = (0..shards).map(connect).collect();
    assert!(all.iter().all(|native| native.hello.shards == shards));
    all
}

#[test]
fn the_number_of_shards_may_change_at_a_restart() {
    const PARTITIONS: u32 = 7;
    if thread::available_parallelism().is_ok_and(|cores| cores.get() < 2) {
        ringfence_tests::process::skip("the_number_of_shards_may_change_at_a_restart", "one core only");
        return;
    }
    let mut f = Fixture::new();
    let mut all = connections(&f, 1);
    let topic = all[0]
        .create_topic("moving", PARTITIONS, &[])
        .expect("a good topic");
    let producer = new_producer(&mut all[0]);
    let idempotent = batch::build(&[b"once"], 1, producer);
    let p0 = partition(topic, 0);
    assert_eq!(all[0].produce(p0, &idempotent), Ok(0));
    for (round, shards) in [(0u32, 1u16), (1, 2), (2, 1), (3, 2)] {
        if round > 0 {
            if round % 2 == 0 {
                assert!(f.broker.stop().success());
            } else {
                f.broker.kill();
            }
            f.broker = f.broker.setup.clone().cores(&shards.to_string()).start();
        }
        let mut all = connections(&f, shards);
        write_one_each(&mut all, topic, PARTITIONS, &format!("round{round}"));
        let shard = usize::from(p0.shard(shards).0);
        assert_eq!(
            all[shard].produce(p0, &idempotent),
            Ok(0),
            "producer state moves too"
        );
        for index in 0..PARTITIONS {
            let p = partition(topic, index);
            let shard = usize::from(p.shard(shards).0);
            let mut expected: Vec<Vec<u8>> = (0..=round)
                .map(|r| format!("round{r}-{index}").into_bytes())
                .collect();
            if index == 0 {
                expected.insert(0, b"once".to_vec());
            }
            assert_eq!(
                values(&mut all[shard], p),
                expected,
                "partition {index} in round {round}"
            );
        }
    }
}

#[test]
fn a_clean_stop_keeps_everything_even_from_memory() {
    for signal in ["TERM", "INT"] {
        let mut f = Fixture::new();
        let mut native = f.connect();
        let topic = native
            .create_topic("quick", 1, &[("durability", "memory")])
            .expect("good settings");
        let p = partition(topic, 0);
        for n in 0..100u8 {
            native.produce(p, &plain(&[&[n]])).expect("a good batch");
        }
        f.broker.signal(signal);
        let status = f.broker.wait_exit();
        assert!(status.success(), "{signal}: {status}\n{}", f.broker.output());
        f.broker = f.broker.setup.start();
        let expected: Vec<Vec<u8>> = (0..100u8).map(|n| vec![n]).collect();
        assert_eq!(values(&mut f.connect(), p), expected);
    }
}

#[test]
fn kills_during_the_start_do_no_harm() {
    let mut f = Fixture::new();
    let mut native = f.connect();
    let topic = native.create_topic("patient", 2, &[]).expect("a good topic");
    let mut expected = Vec::new();
    let p = partition(topic, 1);
    for n in 0..50u8 {
        native.produce(p, &plain(&[&[n; 300]])).expect("a good batch");
        expected.push(vec![n; 300]);
    }
    f.broker.kill();
    let mut dice = Dice(7);
    for _ in 0..12 {
        let mut broker = f.broker.setup.spawn().expect("the process starts");
        // The pause picks the moment of the kill; nothing depends on its length.
        thread::sleep(Duration::from_micros(dice.below(60_000)));
        broker.kill();
    }
    f.broker = f.broker.setup.start();
    let mut native = f.connect();
    assert_eq!(values(&mut native, p), expected);
    assert_eq!(native.produce(p, &plain(&[b"after"])), Ok(50));
}
