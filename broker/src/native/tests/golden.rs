//! Golden fixtures: one request and one answer of every api, compared byte by byte with `broker/fixtures/native`.
//!
//! `UPDATE_FIXTURES=1 cargo test -p ringfence-broker golden` writes them anew after a deliberate change; a change of
//! an existing layout needs a new version of its api instead.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::*;

const TOPIC: TopicId = TopicId(*b"topic-identity-1");
const CLUSTER: ClusterId = ClusterId(*b"cluster-identity");
const AT: PartitionId = PartitionId {
    topic: TOPIC,
    index: 3,
};
const BATCH: &[u8] = b"<record batch>";

fn setting(key: &str, value: &str) -> Setting {
    Setting {
        key: key.to_owned(),
        value: value.to_owned(),
    }
}

fn broker() -> BrokerInfo {
    BrokerInfo {
        node: NodeId(1),
        generation: 7,
        host: "127.0.0.1".to_owned(),
        port: 9192,
        shards: 2,
    }
}

fn partition() -> PartitionInfo {
    PartitionInfo {
        error: None,
        index: 3,
        leader: Some(NodeId(1)),
        leader_epoch: LeaderEpoch(7),
        partition_epoch: 2,
        shard: ShardId(1),
        replicas: vec![NodeId(1)],
        isr: vec![NodeId(1)],
    }
}

fn request(api: Api) -> Request<&'static [u8]> {
    let name = "changelogs".to_owned();
    match api {
        Api::Hello => Request::Hello(HelloRequest {
            role: Role::Client,
            cluster: ClusterId::default(),
            node: None,
            generation: 0,
            shard: Some(ShardId(1)),
            software: "ringfence/0.1.0".to_owned(),
        }),
        Api::Metadata => Request::Metadata(MetadataRequest {
            scope: Scope::Listed,
            names: vec![name],
            ids: vec![TOPIC],
        }),
        Api::Produce => Request::Produce(ProduceRequest {
            acks: Acks::All,
            timeout_ms: 30_000,
            batches: vec![ProduceBatch {
                partition: AT,
                epoch: Some(LeaderEpoch(7)),
                records: BATCH,
            }],
        }),
        Api::Fetch => Request::Fetch(FetchRequest {
            max_wait_ms: 500,
            min_bytes: 1,
            max_bytes: 1 << 20,
            isolation: Isolation::Uncommitted,
            replica: None,
            generation: 0,
            partitions: vec![FetchPartition {
                partition: AT,
                epoch: None,
                offset: Offset(42),
                max_bytes: 1 << 20,
                last_fetched_epoch: None,
                durable_end: None,
            }],
        }),
        Api::FetchAck => Request::FetchAck(FetchAck {
            replica: NodeId(2),
            generation: 9,
            partitions: vec![Ack {
                partition: AT,
                epoch: LeaderEpoch(7),
                durable_end: Offset(42),
            }],
        }),
        Api::EpochEnd => Request::EpochEnd(vec![EpochQuestion {
            partition: AT,
            current: None,
            epoch: LeaderEpoch(6),
        }]),
        Api::ListOffsets => Request::ListOffsets(vec![OffsetQuestion {
            partition: AT,
            current: None,
            timestamp: TIMESTAMP_LATEST,
        }]),
        Api::InitProducer => Request::InitProducer,
        Api::CreateTopic => Request::CreateTopic(CreateTopic {
            name,
            partitions: 8,
            replication_factor: 1,
            settings: vec![setting("retention.ms", "604800000")],
            validate_only: false,
        }),
        Api::DeleteTopic => Request::DeleteTopic(DeleteTopic { name, id: TOPIC }),
        Api::AlterTopic => Request::AlterTopic(AlterTopic {
            name,
            set: vec![setting("segment.bytes", "1048576")],
            unset: vec!["retention.ms".to_owned()],
        }),
        Api::ListTopics => Request::ListTopics,
        Api::DescribeTopic => Request::DescribeTopic(DescribeTopic { name }),
        Api::AddPartitions => Request::AddPartitions(AddPartitions { name, total: 16 }),
        Api::ClusterInfo => Request::ClusterInfo,
    }
}

fn fetched() -> FetchAnswer<&'static [u8]> {
    FetchAnswer {
        partitions: vec![FetchedPartition {
            partition: AT,
            error: None,
            epoch: Some(LeaderEpoch(7)),
            high_watermark: Some(Offset(50)),
            log_start: Some(Offset(0)),
            log_end: Some(Offset(50)),
            diverging_epoch: None,
            diverging_end: None,
            records: vec![BATCH],
        }],
    }
}

fn standing() -> ClusterInfo {
    ClusterInfo {
        cluster: CLUSTER,
        controller: Some(NodeId(1)),
        brokers: vec![broker()],
        topics: vec![TopicName {
            id: TOPIC,
            name: "changelogs".to_owned(),
        }],
        partitions: vec![PartitionStanding {
            partition: AT,
            leader: Some(NodeId(1)),
            leader_epoch: LeaderEpoch(7),
            partition_epoch: 2,
            shard: ShardId(1),
            replicas: vec![NodeId(1)],
            isr: vec![NodeId(1)],
            log_start: Some(Offset(0)),
            high_watermark: Some(Offset(50)),
            durable_end: Some(Offset(50)),
            log_end: Some(Offset(50)),
            fenced: String::new(),
        }],
        shards: vec![ShardStanding {
            node: NodeId(1),
            shard: ShardId(1),
            fenced: String::new(),
            figures: vec![Figure {
                name: "journal_used_bytes".to_owned(),
                value: 4096,
            }],
        }],
    }
}

fn answer(api: Api) -> Response<&'static [u8]> {
    let name = "changelogs".to_owned();
    match api {
        Api::Hello => Response::Hello(HelloAnswer {
            cluster: CLUSTER,
            node: NodeId(1),
            generation: 7,
            shard: ShardId(1),
            shards: 2,
            max_frame: 100 << 20,
            max_in_flight: 64,
            apis: vec![ApiVersions {
                api: 1,
                first: 1,
                last: 1,
            }],
            software: "ringfence/0.1.0".to_owned(),
        }),
        Api::Metadata => Response::Metadata(MetadataAnswer {
            cluster: CLUSTER,
            controller: Some(NodeId(1)),
            brokers: vec![broker()],
            topics: vec![TopicInfo {
                error: None,
                name,
                id: TOPIC,
                settings: vec![setting("retention.ms", "604800000")],
                partitions: vec![partition()],
            }],
        }),
        Api::Produce => Response::Produce(ProduceAnswer {
            partitions: vec![ProducedPartition {
                partition: AT,
                error: None,
                base_offset: Some(Offset(42)),
                log_append_time: -1,
                log_start: Some(Offset(0)),
                message: String::new(),
            }],
        }),
        Api::Fetch => Response::Fetch(fetched()),
        Api::FetchAck => Response::FetchAck(vec![AckedPartition {
            partition: AT,
            error: None,
            high_watermark: Some(Offset(42)),
        }]),
        Api::EpochEnd => Response::EpochEnd(vec![EpochEnd {
            partition: AT,
            error: None,
            epoch: Some(LeaderEpoch(6)),
            end: Some(Offset(40)),
        }]),
        Api::ListOffsets => Response::ListOffsets(vec![OffsetFound {
            partition: AT,
            error: None,
            timestamp: -1,
            offset: Some(Offset(50)),
            epoch: Some(LeaderEpoch(7)),
        }]),
        Api::InitProducer => Response::InitProducer(ProducerAssigned {
            producer_id: 1000,
            producer_epoch: 0,
        }),
        Api::CreateTopic => Response::CreateTopic(TopicCreated { id: TOPIC }),
        Api::DeleteTopic => Response::DeleteTopic,
        Api::AlterTopic => Response::AlterTopic,
        Api::ListTopics => Response::ListTopics(vec![TopicListed {
            name,
            id: TOPIC,
            partitions: 8,
            replication_factor: 1,
        }]),
        Api::DescribeTopic => Response::DescribeTopic(TopicDescription {
            name,
            id: TOPIC,
            replication_factor: 1,
            settings: vec![TopicSetting {
                key: "retention.ms".to_owned(),
                value: "604800000".to_owned(),
                own: true,
            }],
            partitions: vec![partition()],
        }),
        Api::AddPartitions => Response::AddPartitions,
        Api::ClusterInfo => Response::ClusterInfo(standing()),
    }
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for line in bytes.chunks(16) {
        let digits: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(text, "{}", digits.join(" ")).unwrap();
    }
    text
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.split_whitespace();
    digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

/// Compares `bytes` with the fixture; returns the fixture's bytes.
fn check(name: &str, bytes: &[u8]) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/native");
    let path = folder.join(format!("{name}.hex"));
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&path, hex(bytes)).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(golden, hex(bytes), "{name}");
    unhex(&golden)
}

#[test]
fn golden_frames_are_written_and_read_byte_for_byte() {
    for &api in Api::ALL {
        let bytes = check(
            &format!("{}.request", api.name()),
            &request(api).encode(0x0102_0304).into_vec(),
        );
        let frame = Frame::open(bytes.as_slice(), MAX).unwrap();
        assert_eq!(Request::decode(api, &frame), Ok(request(api)));

        let bytes = check(
            &format!("{}.answer", api.name()),
            &answer(api).encode(api, 0x0102_0304).into_vec(),
        );
        let frame = Frame::open(bytes.as_slice(), MAX).unwrap();
        assert_eq!(Response::decode(api, &frame), Ok(answer(api)));
    }
    let refused = Response::<&[u8]>::Refused(Refusal::because(
        WireError::InvalidTopic,
        "no topic has this name",
    ));
    let bytes = check(
        "Refused.answer",
        &refused.clone().encode(Api::CreateTopic, 5).into_vec(),
    );
    let frame = Frame::open(bytes.as_slice(), MAX).unwrap();
    assert_eq!(Response::decode(Api::CreateTopic, &frame), Ok(refused));
}
