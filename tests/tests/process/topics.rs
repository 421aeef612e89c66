//! What topics promise: settings, timestamps, codecs, long polls, retention, deletion.

use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ringfence_broker::error::WireError;
use ringfence_broker::native::{
    AlterTopic, DescribeTopic, Request, Response, Setting, TIMESTAMP_EARLIEST, TIMESTAMP_LATEST,
    TopicDescription,
};
use ringfence_tests::batch::{self, Producer, at};
use ringfence_tests::native::{From, Native};
use ringfence_tests::process::PATIENCE;

use super::{Fixture, partition, plain, values};

fn describe(native: &mut Native, name: &str) -> TopicDescription {
    let request = Request::DescribeTopic(DescribeTopic { name: name.into() });
    match native.call(&request).expect("an answer") {
        Response::DescribeTopic(description) => description,
        other => panic!("DescribeTopic was answered with {other:?}"),
    }
}

fn value<'a>(description: &'a TopicDescription, key: &str) -> &'a str {
    let setting = description.settings.iter().find(|setting| setting.key == key);
    setting.map_or_else(|| panic!("no setting {key}"), |setting| &setting.value)
}

fn alter(
    native: &mut Native,
    name: &str,
    key: &str,
    value: &str,
) -> Response<ringfence_engine::io::buf::BufSlice> {
    let set = vec![Setting {
        key: key.into(),
        value: value.into(),
    }];
    let request = Request::AlterTopic(AlterTopic {
        name: name.into(),
        set,
        unset: Vec::new(),
    });
    native.call(&request).expect("an answer")
}

#[test]
fn settings_are_checked_kept_and_altered() {
    let mut f = Fixture::new();
    let mut native = f.connect();
    let chosen = [
        ("retention.ms", "86400000"),
        ("retention.bytes", "1073741824"),
        ("segment.bytes", "1048576"),
        ("segment.ms", "3600000"),
        ("max.message.bytes", "100000"),
        ("min.insync.replicas", "1"),
        ("message.timestamp.type", "LogAppendTime"),
        ("durability", "memory"),
    ];
    native.create_topic("chosen", 3, &chosen).expect("good settings");
    for (key, wrong) in [
        ("retention.ms", "soon"),
        ("segment.bytes", "-5"),
        ("message.timestamp.type", "Tomorrow"),
        ("durability", "maybe"),
        ("no.such.key", "1"),
    ] {
        let refusal = native.create_topic("wrong", 1, &[(key, wrong)]).expect_err(key);
        assert_eq!(refusal.error, Some(WireError::InvalidConfig), "{refusal:?}");
        assert!(refusal.message.contains(key), "{refusal:?}");
    }
    assert_eq!(
        native.topic("wrong").error,
        Some(WireError::UnknownTopicOrPartition)
    );
    assert!(matches!(
        alter(&mut native, "chosen", "retention.ms", "1000000"),
        Response::AlterTopic
    ));
    assert!(matches!(
        alter(&mut native, "chosen", "segment.ms", "x"),
        Response::Refused(_)
    ));
    f.broker.kill_and_restart();
    let description = describe(&mut f.connect(), "chosen");
    assert_eq!(description.partitions.len(), 3);
    assert_eq!(value(&description, "retention.ms"), "1000000");
    for (key, expected) in &chosen[1..] {
        assert_eq!(value(&description, key), *expected, "{key}");
    }
}

#[test]
fn log_append_time_is_the_brokers_and_survives() {
    let mut f = Fixture::new();
    let mut native = f.connect();
    let topic = native
        .create_topic("stamped", 1, &[("message.timestamp.type", "LogAppendTime")])
        .expect("good settings");
    let p = partition(topic, 0);
    let before = wall_ms();
    let answer = native
        .try_produce(p, &batch::build(&[b"a", b"b"], 5, Producer::NONE))
        .expect("an answer");
    assert_eq!(answer.error, None);
    let stamped = answer.log_append_time;
    assert!(
        (before..=wall_ms()).contains(&stamped),
        "{stamped} is the time of the append"
    );
    let check = |native: &mut Native| {
        let bytes = native.read_all(p, 0);
        let attributes = bytes[at::ATTRIBUTES + 1];
        assert_eq!(attributes & 8, 8, "the batch says that its time is the broker's");
        for record in batch::records(&bytes) {
            assert_eq!(record.timestamp, stamped);
        }
    };
    check(&mut native);
    f.broker.kill_and_restart();
    check(&mut f.connect());
}

fn wall_ms() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("the clock is after 1970");
    since.as_millis() as i64
}

#[test]
fn offsets_by_timestamp() {
    let mut f = Fixture::new();
    let mut native = f.connect();
    let topic = native
        .create_topic("times", 1, &[("segment.bytes", "65536")])
        .expect("good settings");
    let p = partition(topic, 0);
    assert_eq!(
        native.offset_at(p, TIMESTAMP_EARLIEST).offset.map(|o| o.0),
        Some(0)
    );
    assert_eq!(native.offset_at(p, TIMESTAMP_LATEST).offset.map(|o| o.0), Some(0));
    assert_eq!(native.offset_at(p, 0).offset, None);
    // 100 batches of two records, one second apart, over several segments.
    let filler = vec![b'f'; 2000];
    for n in 0..100i64 {
        let records = batch::build(&[&filler, b"second"], 1_000_000 + n * 1000, Producer::NONE);
        assert_eq!(native.produce(p, &records), Ok(n as u64 * 2));
    }
    let check = |native: &mut Native| {
        for n in [0i64, 1, 17, 50, 99] {
            let time = 1_000_000 + n * 1000;
            let exact = native.offset_at(p, time);
            assert_eq!(
                (exact.offset.map(|o| o.0), exact.timestamp),
                (Some(n as u64 * 2), time)
            );
            let between = native.offset_at(p, time - 1);
            assert_eq!(
                (between.offset.map(|o| o.0), between.timestamp),
                (Some(n as u64 * 2), time)
            );
        }
        assert_eq!(
            native.offset_at(p, 1_000_000 + 99_001).offset,
            None,
            "every record is older"
        );
        assert_eq!(
            native.offset_at(p, TIMESTAMP_LATEST).offset.map(|o| o.0),
            Some(200)
        );
    };
    check(&mut native);
    f.broker.kill_and_restart();
    check(&mut f.connect());
}

/// The broker looks at the header of a compressed batch only: its bytes come back as they went in.
#[test]
fn codecs_pass_through_untouched() {
    let mut f = Fixture::new();
    let mut native = f.connect();
    let topic = native.create_topic("codecs", 1, &[]).expect("a good topic");
    let p = partition(topic, 0);
    let bodies: [(i16, Vec<u8>); 4] = [
        (1, b"\x1f\x8b\x08\0 gzip as far as the broker knows".to_vec()),
        (2, vec![0xff; 3000]),
        (3, b"\x04\x22\x4d\x18".repeat(100)),
        (4, b"\x28\xb5\x2f\xfd".repeat(7)),
    ];
    let mut sent = Vec::new();
    for (codec, body) in &bodies {
        let records = batch::compressed(*codec, 5, body);
        assert_eq!(native.produce(p, &records), Ok(sent.len() as u64 * 5));
        sent.push(records);
    }
    let check = |native: &mut Native| {
        let bytes = native.read_all(p, 0);
        let served = batch::split(&bytes);
        assert_eq!(served.len(), sent.len());
        for (served, sent) in served.iter().zip(&sent) {
            assert_eq!(served[at::CRC..], sent[at::CRC..]);
        }
    };
    check(&mut native);
    f.broker.kill_and_restart();
    check(&mut f.connect());
    let unknown = batch::compressed(7, 5, b"no such codec");
    assert!(
        f.connect().produce(p, &unknown).is_err(),
        "codec 7 does not exist"
    );
}

#[test]
fn a_long_poll_ends_with_the_record_it_waits_for() {
    let f = Fixture::new();
    let mut native = f.connect();
    let topic = native.create_topic("poll", 1, &[]).expect("a good topic");
    let p = partition(topic, 0);
    let mut reader = f.connect();
    let mut from = From::offset(p, 0);
    from.min_bytes = 1;
    from.max_wait_ms = 25_000;
    let waiting = thread::spawn(move || reader.fetch(from).expect("an answer"));
    // The other connection works while the fetch is parked.
    assert_eq!(native.topic("poll").error, None);
    assert_eq!(native.produce(p, &plain(&[b"at last"])), Ok(0));
    let read = waiting.join().expect("the reader ends");
    assert_eq!(read.error, None);
    let records = batch::records(&read.records.concat_bytes());
    assert_eq!(records[0].value.as_deref(), Some(&b"at last"[..]));
}

#[test]
fn a_long_poll_without_records_ends_empty() {
    let f = Fixture::new();
    let mut native = f.connect();
    let topic = native.create_topic("poll", 1, &[]).expect("a good topic");
    let mut from = From::offset(partition(topic, 0), 0);
    from.min_bytes = 1;
    from.max_wait_ms = 50;
    let read = native.fetch(from).expect("an answer");
    assert_eq!((read.error, read.records.concat_bytes().len()), (None, 0));
    from.offset = 1;
    let beyond = native.fetch(from).expect("an answer");
    assert_eq!(beyond.error, Some(WireError::OffsetOutOfRange));
}

/// A parked fetch may not be answered early with fewer bytes than asked for.
#[test]
fn a_long_poll_waits_for_min_bytes() {
    let f = Fixture::new();
    let mut native = f.connect();
    let topic = native.create_topic("poll", 1, &[]).expect("a good topic");
    let p = partition(topic, 0);
    let mut reader = f.connect();
    let mut from = From::offset(p, 0);
    from.min_bytes = 3000;
    from.max_wait_ms = 25_000;
    let waiting = thread::spawn(move || reader.fetch(from).expect("an answer"));
    for _ in 0..4 {
        native.produce(p, &plain(&[&[b'm'; 1000]])).expect("a good batch");
    }
    let read = waiting.join().expect("the reader ends");
    assert!(read.records.concat_bytes().len() >= 3000);
}

#[test]
fn retention_by_bytes_moves_the_log_start() {
    let mut f = Fixture::new();
    let mut native = f.connect();
    let settings = [("segment.bytes", "1048576"), ("retention.bytes", "4194304")];
    let topic = native.create_topic("short", 1, &settings).expect("good settings");
    let p = partition(topic, 0);
    let value = vec![b'r'; 100_000];
    for _ in 0..200 {
        native.produce(p, &plain(&[&value])).expect("a good batch");
    }
    let start = wait_for(&f, "retention", |native| {
        let start = native
            .offset_at(p, TIMESTAMP_EARLIEST)
            .offset
            .expect("an offset")
            .0;
        (start >= 100).then_some(start)
    });
    let gone = native.fetch(From::offset(p, start - 1)).expect("an answer");
    assert_eq!(gone.error, Some(WireError::OffsetOutOfRange));
    f.broker.kill_and_restart();
    let mut native = f.connect();
    let after = native
        .offset_at(p, TIMESTAMP_EARLIEST)
        .offset
        .expect("an offset")
        .0;
    assert!(after >= start, "log start {start} went back to {after}");
    let kept = batch::records(&native.read_all(p, after));
    assert_eq!(kept.last().map(|record| record.offset), Some(199));
}

/// Asks until there is an answer; the background work of a broker has no other sign of its end.
fn wait_for<T>(f: &Fixture, what: &str, mut ask: impl FnMut(&mut Native) -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    let mut native = f.connect();
    loop {
        if let Some(answer) = ask(&mut native) {
            return answer;
        }
        assert!(
            Instant::now() < deadline,
            "{what} took more than {PATIENCE:?}:\n{}",
            f.broker.output()
        );
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_topic_created_again_is_another_topic() {
    let mut f = Fixture::with(|setup| setup.config("file.delete.delay.ms", "0"));
    let mut native = f.connect();
    let old = native.create_topic("again", 2, &[]).expect("a good topic");
    native
        .produce(partition(old, 0), &plain(&[b"old"]))
        .expect("a good batch");
    native.delete_topic("again").expect("it exists");
    assert!(native.delete_topic("again").is_err(), "it is gone");
    assert!(
        native.produce(partition(old, 0), &plain(&[b"late"])).is_err(),
        "it is gone"
    );
    let new = native.create_topic("again", 1, &[]).expect("the name is free");
    assert_ne!(old, new);
    assert_eq!(values(&mut native, partition(new, 0)), Vec::<Vec<u8>>::new());
    assert_eq!(native.produce(partition(new, 0), &plain(&[b"new"])), Ok(0));
    f.broker.kill_and_restart();
    let mut native = f.connect();
    assert_eq!(values(&mut native, partition(new, 0)), [b"new"]);
    let logs = f.dir.path().join("data/logs");
    wait_for(&f, "removal of the old topic's files", |_| {
        let names = std::fs::read_dir(&logs)
            .ok()?
            .flatten()
            .map(|entry| entry.file_name());
        let left = names
            .filter(|name| name.to_string_lossy().starts_with(&old.to_string()))
            .count();
        (left == 0).then_some(())
    });
}

/// Pieces of an answer as one.
trait Concat {
    fn concat_bytes(&self) -> Vec<u8>;
}

impl Concat for Vec<ringfence_engine::io::buf::BufSlice> {
    fn concat_bytes(&self) -> Vec<u8> {
        self.iter().flat_map(|piece| piece.to_vec()).collect()
    }
}
