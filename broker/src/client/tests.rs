//! Client against a scripted broker: retries, repetitions, reconnects, order, damage.

mod fake;

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use ringfence_engine::types::Offset;

use super::*;
use crate::error::WireError;
use crate::native::Acks;
use fake::{FakeBroker, Fault};

fn config(broker: &FakeBroker) -> ClientConfig {
    ClientConfig::new(&broker.address.to_string())
}

/// Small batches, so that many are in flight.
fn producer_config() -> ProducerConfig {
    ProducerConfig {
        batch_bytes: 200,
        linger: Duration::ZERO,
        ..ProducerConfig::default()
    }
}

async fn send(producer: &Producer, topic: &Topic, partition: u32, value: &str) -> Delivery {
    let record = OutgoingRecord {
        timestamp: 5,
        key: None,
        value: Some(value.as_bytes()),
    };
    producer.send(topic.partition(partition), record).await.unwrap()
}

fn numbered(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("record {number}")).collect()
}

/// Writes `count` records into each of two partitions while the broker follows `faults`; returns what became of them.
fn produce_under(faults: &[Fault], count: usize) -> (FakeBroker, Vec<Result<Offset, ClientError>>) {
    let broker = FakeBroker::start(2);
    broker.model.lock().unwrap().faults.extend(faults);
    let results = tokio_uring::start(async {
        let client = Client::connect(config(&broker)).await.unwrap();
        let topic = client.topic("events").await.unwrap();
        let producer = Producer::new(&client, producer_config()).await.unwrap();
        let mut deliveries = Vec::new();
        for value in numbered(count) {
            for partition in 0..2 {
                deliveries.push(send(&producer, &topic, partition, &value).await);
            }
        }
        producer.flush().await;
        let mut results = Vec::new();
        for delivery in deliveries {
            results.push(delivery.wait().await.map(|done| done.offset.unwrap()));
        }
        results
    });
    (broker, results)
}

/// Every record stored once, in order, at the offset that was told.
fn check_exactly_once(faults: &[Fault]) {
    const COUNT: usize = 60;
    let (broker, results) = produce_under(faults, COUNT);
    let model = broker.model.lock().unwrap();
    for partition in 0..2 {
        assert_eq!(
            model.values(partition),
            numbered(COUNT),
            "partition {partition}, {faults:?}"
        );
    }
    for (number, result) in results.iter().enumerate() {
        assert_eq!(*result, Ok(Offset(number as u64 / 2)), "{faults:?}");
    }
}

#[test]
fn without_faults_everything_is_stored_once() {
    check_exactly_once(&[]);
}

#[test]
fn a_lost_answer_does_not_double_the_batch() {
    check_exactly_once(&[Fault::StoreAndClose]);
    check_exactly_once(&[
        Fault::None,
        Fault::None,
        Fault::StoreAndClose,
        Fault::StoreAndClose,
    ]);
}

#[test]
fn a_passing_refusal_with_batches_behind_it_does_not_reorder() {
    check_exactly_once(&[Fault::None, Fault::Refuse(WireError::DiskFull), Fault::None]);
    check_exactly_once(&[Fault::StoreAndRefuse(WireError::RequestTimedOut)]);
}

fn passing_fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => Just(Fault::None),
        1 => Just(Fault::Refuse(WireError::Overloaded)),
        1 => Just(Fault::StoreAndRefuse(WireError::NotEnoughReplicasAfterAppend)),
        1 => Just(Fault::Close),
        1 => Just(Fault::StoreAndClose),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_passing_faults_leave_every_record_stored_once(faults in prop::collection::vec(passing_fault(), 0..12)) {
        check_exactly_once(&faults);
    }

    #[test]
    fn a_final_refusal_leaves_a_prefix(
        before in prop::collection::vec(passing_fault(), 0..6),
        after in prop::collection::vec(passing_fault(), 0..6),
    ) {
        let faults: Vec<Fault> =
            before.into_iter().chain([Fault::Refuse(WireError::InvalidRecord)]).chain(after).collect();
        check_prefix(&faults);
    }
}

/// Of each partition a prefix is acknowledged, everything behind it failed; what is stored is a prefix too, at least as
/// long (a batch whose answer was lost may be stored and yet be refused when it is sent again).
fn check_prefix(faults: &[Fault]) {
    const COUNT: usize = 40;
    let (broker, results) = produce_under(faults, COUNT);
    let model = broker.model.lock().unwrap();
    for partition in 0..2 {
        let of_partition = results.iter().skip(partition).step_by(2);
        let stored = model.values(partition as u32);
        let acknowledged = of_partition.clone().take_while(|result| result.is_ok()).count();
        assert!(
            of_partition.skip(acknowledged).all(Result::is_err),
            "no gap in {faults:?}"
        );
        assert!(stored.len() >= acknowledged, "partition {partition}, {faults:?}");
        assert_eq!(
            stored,
            numbered(COUNT)[..stored.len()],
            "partition {partition}, {faults:?}"
        );
    }
}

#[test]
fn after_a_final_refusal_new_records_are_taken() {
    let broker = FakeBroker::start(1);
    broker
        .model
        .lock()
        .unwrap()
        .faults
        .push_back(Fault::Refuse(WireError::MessageTooLarge));
    tokio_uring::start(async {
        let client = Client::connect(config(&broker)).await.unwrap();
        let topic = client.topic("events").await.unwrap();
        let producer = Producer::new(&client, producer_config()).await.unwrap();
        let refused = send(&producer, &topic, 0, "first").await.wait().await;
        assert_eq!(refused.unwrap_err().wire(), Some(WireError::MessageTooLarge));
        let stored = send(&producer, &topic, 0, "second").await.wait().await;
        assert_eq!(stored.unwrap().offset, Some(Offset(0)));
        let totals = producer.totals();
        assert_eq!((totals.records, totals.acknowledged, totals.failed), (2, 1, 1));
    });
    assert_eq!(broker.model.lock().unwrap().values(0), ["second"]);
}

#[test]
fn producer_and_consumer_survive_a_restart_of_the_broker() {
    let mut broker = FakeBroker::start(2);
    tokio_uring::start(async {
        let client = Client::connect(config(&broker)).await.unwrap();
        let topic = client.topic("events").await.unwrap();
        let producer = Producer::new(&client, producer_config()).await.unwrap();
        let mut consumer = Consumer::new(&client, ConsumerConfig::default());
        consumer
            .assign(topic.partition(0), StartAt::Beginning)
            .await
            .unwrap();
        send(&producer, &topic, 0, "before").await.wait().await.unwrap();
        let mut read = values(&consumer.next().await.unwrap());

        broker.kill();
        let waiting = send(&producer, &topic, 0, "meanwhile").await;
        broker = FakeBroker::listen(broker.address, Arc::clone(&broker.model));
        waiting.wait().await.unwrap();
        while read.len() < 2 {
            read.extend(values(&consumer.next().await.unwrap()));
        }
        assert_eq!(read, ["before", "meanwhile"]);
    });
    assert_eq!(broker.model.lock().unwrap().values(0), ["before", "meanwhile"]);
}

#[test]
fn a_batch_that_cannot_be_delivered_fails_at_its_deadline() {
    let mut broker = FakeBroker::start(1);
    tokio_uring::start(async {
        let client = Client::connect(config(&broker)).await.unwrap();
        let topic = client.topic("events").await.unwrap();
        let config = ProducerConfig {
            delivery_timeout: Duration::from_millis(100),
            ..producer_config()
        };
        let producer = Producer::new(&client, config).await.unwrap();
        broker.kill();
        let error = send(&producer, &topic, 0, "lost").await.wait().await.unwrap_err();
        assert!(matches!(error, ClientError::GaveUp { .. }), "{error}");
    });
}

#[test]
fn acks_0_counts_as_done_when_sent() {
    let broker = FakeBroker::start(1);
    tokio_uring::start(async {
        let client = Client::connect(config(&broker)).await.unwrap();
        let topic = client.topic("events").await.unwrap();
        let config = ProducerConfig {
            acks: Acks::None,
            ..producer_config()
        };
        let producer = Producer::new(&client, config).await.unwrap();
        let delivered = send(&producer, &topic, 0, "gone").await.wait().await.unwrap();
        assert_eq!(delivered.offset, None);
    });
}

#[test]
fn one_connection_per_shard_carries_all_its_partitions() {
    let broker = FakeBroker::start(16);
    tokio_uring::start(async {
        let client = Client::connect(config(&broker)).await.unwrap();
        let topic = client.topic("events").await.unwrap();
        let producer = Producer::new(&client, producer_config()).await.unwrap();
        for partition in 0..16 {
            send(&producer, &topic, partition, "x").await;
        }
        producer.flush().await;
        assert_eq!(producer.totals().acknowledged, 16);
    });
    // One for questions, one per shard.
    assert_eq!(
        broker.model.lock().unwrap().connections,
        1 + u32::from(fake::SHARDS)
    );
}

#[test]
fn a_consumer_begins_where_it_was_told_and_reads_in_order() {
    let (broker, _) = produce_under(&[], 30);
    tokio_uring::start(async {
        let client = Client::connect(config(&broker)).await.unwrap();
        let topic = client.topic("events").await.unwrap();
        for (start, first) in [(StartAt::Beginning, 0), (StartAt::Offset(Offset(7)), 7)] {
            let mut consumer = Consumer::new(&client, ConsumerConfig::default());
            consumer.assign(topic.partition(1), start).await.unwrap();
            let mut read = Vec::new();
            while read.len() < 30 - first {
                read.extend(values(&consumer.next().await.unwrap()));
            }
            assert_eq!(read, numbered(30)[first..]);
            assert_eq!(consumer.position(topic.partition(1)), Some(Offset(30)));
        }
        let mut consumer = Consumer::new(&client, ConsumerConfig::default());
        assert_eq!(
            consumer.assign(topic.partition(1), StartAt::End).await,
            Ok(Offset(30))
        );
    });
}

#[test]
fn damaged_bytes_are_never_handed_out() {
    let (broker, _) = produce_under(&[], 3);
    broker.model.lock().unwrap().rot = true;
    tokio_uring::start(async {
        let client = Client::connect(config(&broker)).await.unwrap();
        let topic = client.topic("events").await.unwrap();
        let mut consumer = Consumer::new(&client, ConsumerConfig::default());
        consumer
            .assign(topic.partition(0), StartAt::Beginning)
            .await
            .unwrap();
        let error = consumer.next().await.unwrap_err();
        assert!(matches!(error, ClientError::Damaged { .. }), "{error}");
    });
}

#[test]
fn an_offset_behind_the_end_is_an_error() {
    let broker = FakeBroker::start(1);
    tokio_uring::start(async {
        let client = Client::connect(config(&broker)).await.unwrap();
        let topic = client.topic("events").await.unwrap();
        let mut consumer = Consumer::new(&client, ConsumerConfig::default());
        consumer
            .assign(topic.partition(0), StartAt::Offset(Offset(9)))
            .await
            .unwrap();
        let error = consumer.next().await.unwrap_err();
        assert_eq!(error.wire(), Some(WireError::OffsetOutOfRange));
    });
}

#[test]
fn unknown_topics_and_dead_addresses_are_named() {
    let mut broker = FakeBroker::start(1);
    tokio_uring::start(async {
        let client = Client::connect(config(&broker)).await.unwrap();
        let error = client.topic("nothing").await.unwrap_err();
        assert_eq!(error, ClientError::UnknownTopic("nothing".to_owned()));
        broker.kill();
        let error = Client::connect(config(&broker)).await.err().unwrap();
        assert!(matches!(error, ClientError::Connect { .. }), "{error}");
        let error = Client::connect(ClientConfig::new("no-port")).await.err().unwrap();
        assert!(matches!(error, ClientError::Resolve { .. }), "{error}");
    });
}

fn values(fetched: &Fetched) -> Vec<String> {
    fetched
        .records()
        .map(|record| String::from_utf8(record.unwrap().value.unwrap().to_vec()).unwrap())
        .collect()
}
