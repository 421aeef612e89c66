//! Input that no client should send: a typed error or a close, and unchanged data.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use ringfence_broker::error::WireError;
use ringfence_broker::native::{Acks, Api, HEADER, PREFIX, Request, Response};
use ringfence_engine::types::{PartitionId, TopicId};
use ringfence_tests::batch::{self, at};
use ringfence_tests::native::{self, From, Native};

use super::{Fixture, partition, plain, values};

/// A broker with a topic of one partition that holds one record.
struct Witness {
    fixture: Fixture,
    native: Native,
    partition: PartitionId,
}

impl Witness {
    fn new() -> Witness {
        let fixture = Fixture::new();
        let mut native = fixture.connect();
        let topic = native.create_topic("witness", 1, &[]).expect("a good topic");
        let partition = partition(topic, 0);
        assert_eq!(native.produce(partition, &plain(&[b"first"])), Ok(0));
        Witness {
            fixture,
            native,
            partition,
        }
    }

    /// The batch is refused with `error` and leaves no trace.
    #[track_caller]
    fn refuses(&mut self, records: &[u8], error: WireError) {
        assert_eq!(self.native.produce(self.partition, records), Err(error));
        self.is_unchanged();
    }

    /// The record is still the only one, and the next one gets the next offset.
    #[track_caller]
    fn is_unchanged(&mut self) {
        let mut native = self.fixture.connect();
        assert_eq!(values(&mut native, self.partition), [b"first"]);
        let latest = native.offset_at(self.partition, ringfence_broker::native::TIMESTAMP_LATEST);
        assert_eq!(latest.offset.map(|offset| offset.0), Some(1));
    }

    /// Raw bytes on a connection that has said Hello end in a refusal or a close.
    #[track_caller]
    fn rejects_frame(&mut self, bytes: &[u8]) {
        let mut native = self.fixture.connect();
        // The broker may close before it has read everything.
        let _ = native.stream().write_all(bytes);
        assert_rejected(native.stream());
        self.is_unchanged();
    }
}

/// The other end closes, at most after one answer that refuses.
#[track_caller]
fn assert_rejected(stream: &mut TcpStream) {
    let mut answer = Vec::new();
    let end = stream.take(1 << 20).read_to_end(&mut answer);
    match end {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("not closed: {error}"),
    }
    if answer.len() >= HEADER {
        let refused = ringfence_broker::native::FLAG_REFUSED.to_le_bytes()[0];
        assert_ne!(
            answer[6] & refused,
            0,
            "an answer that does not refuse: {answer:?}"
        );
    }
}

#[test]
fn unknown_topic() {
    let mut w = Witness::new();
    assert_eq!(
        w.native.topic("nobody").error,
        Some(WireError::UnknownTopicOrPartition)
    );
    let stranger = partition(TopicId([7; 16]), 0);
    let unknown = [WireError::UnknownTopicOrPartition, WireError::UnknownTopicId];
    let error = w
        .native
        .produce(stranger, &plain(&[b"x"]))
        .expect_err("no such topic");
    assert!(unknown.contains(&error), "{error}");
    let read = w.native.fetch(From::offset(stranger, 0)).expect("an answer");
    assert!(
        read.error.is_some_and(|error| unknown.contains(&error)),
        "{read:?}"
    );
    let beyond = PartitionId {
        index: 1,
        ..w.partition
    };
    let error = w
        .native
        .produce(beyond, &plain(&[b"x"]))
        .expect_err("no such partition");
    assert!(unknown.contains(&error), "{error}");
    w.is_unchanged();
}

#[test]
fn bad_topic_name() {
    let mut w = Witness::new();
    for name in [
        "",
        ".",
        "..",
        "a/b",
        "a b",
        "ümlaut",
        &"x".repeat(250),
        "../../etc/passwd",
    ] {
        let refusal = w.native.create_topic(name, 1, &[]).expect_err(name);
        assert_eq!(
            refusal.error,
            Some(WireError::InvalidTopic),
            "{name}: {refusal:?}"
        );
    }
    let refusal = w.native.create_topic("witness", 1, &[]).expect_err("it exists");
    assert_eq!(refusal.error, Some(WireError::TopicAlreadyExists));
    let refusal = w
        .native
        .create_topic("none", 2_000_000, &[])
        .expect_err("too many partitions");
    assert_eq!(refusal.error, Some(WireError::InvalidPartitions));
    w.is_unchanged();
}

#[test]
fn oversized_record() {
    let mut w = Witness::new();
    let big = vec![b'x'; 2 << 20];
    w.refuses(&plain(&[&big]), WireError::MessageTooLarge);
    let topic = w
        .native
        .create_topic("small", 1, &[("max.message.bytes", "200")])
        .expect("a good topic");
    let small = partition(topic, 0);
    assert_eq!(w.native.produce(small, &plain(&[&[b'y'; 100]])), Ok(0));
    let refused = w.native.produce(small, &plain(&[&[b'y'; 200]]));
    assert_eq!(refused, Err(WireError::MessageTooLarge));
    assert_eq!(values(&mut w.native, small), [[b'y'; 100]]);
}

#[test]
fn bad_crc() {
    let mut w = Witness::new();
    for position in [at::CRC, at::ATTRIBUTES, at::PRODUCER_ID, at::RECORDS + 5] {
        let mut records = plain(&[b"second"]);
        records[position] ^= 0x40;
        w.refuses(&records, WireError::CorruptMessage);
    }
}

#[test]
fn wrong_magic() {
    let mut w = Witness::new();
    for magic in [0, 1, 3, 255] {
        let mut records = plain(&[b"second"]);
        batch::put(&mut records, at::MAGIC, &[magic]);
        w.refuses(&records, WireError::UnsupportedForMessageFormat);
    }
}

#[test]
fn count_and_offsets_disagree() {
    let mut w = Witness::new();
    for (position, value) in [
        (at::COUNT, 1i32),
        (at::COUNT, 3),
        (at::COUNT, 0),
        (at::LAST_OFFSET_DELTA, 0),
        (at::LAST_OFFSET_DELTA, 2),
    ] {
        let mut records = plain(&[b"one", b"two"]);
        batch::put(&mut records, position, &value.to_be_bytes());
        batch::seal(&mut records);
        w.refuses(&records, WireError::InvalidRecord);
    }
}

#[test]
fn negative_and_huge_numbers_in_a_batch() {
    let mut w = Witness::new();
    for value in [-1i32, i32::MIN, i32::MAX, 0, 48] {
        let mut records = plain(&[b"second"]);
        batch::put(&mut records, at::LENGTH, &value.to_be_bytes());
        let error = w
            .native
            .produce(w.partition, &records)
            .expect_err("a wrong length");
        assert!(
            [
                WireError::CorruptMessage,
                WireError::InvalidRecord,
                WireError::MessageTooLarge
            ]
            .contains(&error),
            "length {value}: {error}"
        );
    }
    for position in [at::COUNT, at::LAST_OFFSET_DELTA] {
        for value in [-1i32, i32::MIN, i32::MAX] {
            let mut records = plain(&[b"second"]);
            batch::put(&mut records, position, &value.to_be_bytes());
            batch::seal(&mut records);
            w.refuses(&records, WireError::InvalidRecord);
        }
    }
}

#[test]
fn less_and_more_than_one_batch() {
    let mut w = Witness::new();
    let one = plain(&[b"second"]);
    for cut in [0, 1, at::LEADER_EPOCH, at::RECORDS, one.len() - 1] {
        assert!(
            w.native.produce(w.partition, &one[..cut]).is_err(),
            "{cut} bytes of a batch"
        );
    }
    let two = [one.clone(), one].concat();
    assert!(
        w.native.produce(w.partition, &two).is_err(),
        "two batches where one belongs"
    );
    w.is_unchanged();
}

#[test]
fn huge_lengths_and_counts_in_a_frame() {
    let mut w = Witness::new();
    let before = w.fixture.resident();
    for length in [0u32, 1, 19, u32::MAX, i32::MAX as u32, 1 << 30] {
        w.rejects_frame(&length.to_le_bytes());
    }
    // A fetch that claims four billion partitions, with a matching checksum.
    let fetch = native::fetch(From::offset(w.partition, 0)).encode(9).into_vec();
    let count = fetch.len() - size_of_partition(&fetch) - 4;
    for claim in [u32::MAX, 1 << 31, 2] {
        let mut frame = fetch.clone();
        frame[count..count + 4].copy_from_slice(&claim.to_le_bytes());
        reseal(&mut frame);
        let mut native = w.fixture.connect();
        native.stream().write_all(&frame).expect("the broker reads it");
        let (_, answer) = native.receive(Api::Fetch).expect("a refusal");
        let Response::Refused(refusal) = answer else {
            panic!("{claim} partitions were answered with {answer:?}")
        };
        assert_eq!(refusal.error, Some(WireError::InvalidRequest));
    }
    let grown = w.fixture.resident().saturating_sub(before);
    assert!(grown < 64 << 20, "memory grew by {grown} bytes");
    w.is_unchanged();
}

/// Bytes of the one entry at the end of an encoded fetch: what a second entry adds.
fn size_of_partition(one: &[u8]) -> usize {
    let Request::Fetch(mut request) = native::fetch(From::offset(PartitionId::default(), 0)) else {
        unreachable!("fetch builds a fetch")
    };
    request.partitions.push(request.partitions[0].clone());
    let two: Request<ringfence_engine::io::buf::BufSlice> = Request::Fetch(request);
    two.encode(9).into_vec().len() - one.len()
}

/// Renews the checksum of a frame that is all head.
fn reseal(frame: &mut [u8]) {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&frame[..HEADER - 4]);
    hasher.update(&frame[HEADER..]);
    frame[HEADER - 4..HEADER].copy_from_slice(&hasher.finalize().to_le_bytes());
}

#[test]
fn a_flipped_bit_in_a_frame() {
    let mut w = Witness::new();
    let good = native::fetch(From::offset(w.partition, 0)).encode(9).into_vec();
    for position in [HEADER - 1, HEADER, PREFIX, good.len() - 1, 5, 6] {
        let mut frame = good.clone();
        frame[position] ^= 0x10;
        let mut native = w.fixture.connect();
        native.stream().write_all(&frame).expect("the broker reads it");
        native
            .stream()
            .shutdown(std::net::Shutdown::Write)
            .expect("the connection stands");
        assert_rejected(native.stream());
    }
    w.is_unchanged();
}

#[test]
fn requests_before_hello() {
    let mut w = Witness::new();
    let mut stream = native::open(w.fixture.broker.setup.native).expect("the broker listens");
    let early = native::produce(w.partition, &plain(&[b"second"]), Acks::All);
    stream
        .write_all(&early.encode(1).into_vec())
        .expect("the broker reads it");
    assert_rejected(&mut stream);
    w.is_unchanged();
}

#[test]
fn half_a_frame() {
    let mut w = Witness::new();
    let frame = native::produce(w.partition, &plain(&[b"second"]), Acks::All)
        .encode(1)
        .into_vec();
    for cut in [1, 4, HEADER, PREFIX + 3, frame.len() - 1] {
        let mut native = w.fixture.connect();
        native
            .stream()
            .write_all(&frame[..cut])
            .expect("the broker reads it");
        native
            .stream()
            .shutdown(std::net::Shutdown::Write)
            .expect("the connection stands");
        assert_rejected(native.stream());
    }
    w.is_unchanged();
}

#[test]
fn client_gone_mid_frame() {
    let mut w = Witness::new();
    let big = vec![b'z'; 500_000];
    let frame = native::produce(w.partition, &plain(&[&big]), Acks::All)
        .encode(1)
        .into_vec();
    let before = w.fixture.resident();
    for _ in 0..200 {
        let mut native = w.fixture.connect();
        native
            .stream()
            .write_all(&frame[..frame.len() - 1])
            .expect("the broker reads it");
        drop(native);
    }
    w.is_unchanged();
    let grown = w.fixture.resident().saturating_sub(before);
    assert!(grown < 64 << 20, "memory grew by {grown} bytes");
}

#[test]
fn garbage_on_the_port() {
    let mut w = Witness::new();
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut garbage = |length: usize| -> Vec<u8> {
        let step = |_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed as u8
        };
        (0..length).map(step).collect()
    };
    let mut inputs: Vec<Vec<u8>> = (0..50).map(|n| garbage(1 + n * 40)).collect();
    inputs.push(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec());
    inputs.push(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec());
    inputs.push(vec![0; 4096]);
    for input in inputs {
        let mut stream = native::open(w.fixture.broker.setup.native).expect("the broker listens");
        // The broker may close before it has read everything.
        let _ = stream.write_all(&input);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        assert_rejected(&mut stream);
    }
    w.is_unchanged();
}

#[test]
fn garbage_on_the_admin_port() {
    let mut w = Witness::new();
    for input in [
        &b"\0\0\0\0"[..],
        b"GET",
        b"POST /metrics HTTP/1.1\r\n\r\n",
        &[b'x'; 100_000],
    ] {
        let mut stream = TcpStream::connect(w.fixture.broker.setup.admin).expect("the broker listens");
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .expect("a valid timeout");
        let _ = stream.write_all(input);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let text = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || !text.starts_with("HTTP/1.1 200"), "{text}");
    }
    assert!(w.fixture.broker.admin("/metrics").contains("# TYPE"));
    w.is_unchanged();
}

/// Idle connections, and connections that send a byte now and then, take neither service nor memory from others.
#[test]
fn thousands_of_idle_and_slow_connections() {
    const IDLE: usize = 2000;
    const SLOW: usize = 200;
    let own = std::process::id().to_string();
    let raised = Command::new("prlimit")
        .args(["--nofile=8192:8192", "--pid", &own])
        .status();
    if !raised.is_ok_and(|status| status.success()) {
        ringfence_tests::process::skip(
            "thousands_of_idle_and_slow_connections",
            "8192 open files are not allowed",
        );
        return;
    }
    let mut w = Witness::new();
    let before = w.fixture.resident();
    let address = w.fixture.broker.setup.native;
    let idle: Vec<TcpStream> = (0..IDLE)
        .map(|n| native::open(address).unwrap_or_else(|e| panic!("{n}: {e}")))
        .collect();
    let hello = native::hello(Some(0)).encode(0).into_vec();
    let mut slow: Vec<TcpStream> = (0..SLOW)
        .map(|_| native::open(address).expect("the broker listens"))
        .collect();
    let started = Instant::now();
    for (n, byte) in hello.iter().enumerate() {
        for stream in &mut slow {
            stream
                .write_all(&[*byte])
                .unwrap_or_else(|e| panic!("slow byte {n} after {:?}: {e}", started.elapsed()));
        }
        if n % 8 == 0 {
            w.is_unchanged();
        }
    }
    for stream in &mut slow {
        let frame = native::read_frame(stream).expect("a slow Hello is answered");
        assert_eq!(frame.header.api, Api::Hello.number());
    }
    let grown = w.fixture.resident().saturating_sub(before);
    assert!(
        grown < 128 << 20,
        "{} connections took {grown} bytes",
        IDLE + SLOW
    );
    drop((idle, slow));
    w.is_unchanged();
}

/// A client that asks for much and reads nothing is bounded; others go on.
#[test]
fn a_client_that_never_reads() {
    let mut w = Witness::new();
    let topic = w.native.create_topic("big", 1, &[]).expect("a good topic");
    let big = partition(topic, 0);
    for _ in 0..16 {
        w.native
            .produce(big, &plain(&[&vec![b'b'; 1 << 19]]))
            .expect("a good batch");
    }
    let before = w.fixture.resident();
    let mut deaf = w.fixture.connect();
    deaf.stream()
        .set_write_timeout(Some(Duration::from_millis(500)))
        .expect("a valid timeout");
    let mut from = From::offset(big, 0);
    from.max_bytes = 8 << 20;
    for _ in 0..2000 {
        if deaf.send(&native::fetch(from)).is_err() {
            break; // The broker stopped reading, as it should.
        }
    }
    w.is_unchanged();
    let grown = w.fixture.resident().saturating_sub(before);
    assert!(grown < 160 << 20, "memory grew by {grown} bytes");
}
