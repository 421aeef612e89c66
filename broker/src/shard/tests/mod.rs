//! The shard machine driven by scripted events, on simulated disks.

mod rig;

use ringfence_engine::io::buf::BufSlice;
use ringfence_engine::io::sim::{Fault, FaultKind, OpKind, When};
use ringfence_engine::io::{DiskError, FileClass};
use ringfence_engine::types::{LeaderEpoch, Offset};

use crate::config::Limits;
use crate::error::WireError;
use crate::event::{Mail, News, Order};
use crate::native::{
    Acks, ClusterId, EpochQuestion, HelloRequest, MetadataRequest, OffsetQuestion, Refusal, Request,
    Response, Role, Scope, TIMESTAMP_EARLIEST, TIMESTAMP_LATEST,
};
use rig::{MS, Rig, at, batch, batch_of, fetch, fetched, hello, limits, produce, produced, topic};

fn metadata() -> Request<BufSlice> {
    Request::Metadata(MetadataRequest {
        scope: Scope::All,
        names: Vec::new(),
        ids: Vec::new(),
    })
}

/// Every journal write from now on takes `nanos` longer.
fn stall_journal(nanos: u64) -> Fault {
    Fault::new(FaultKind::Stall(nanos), When::From(0))
        .class(FileClass::Journal)
        .kind(OpKind::Write)
}

#[test]
fn a_hello_for_another_shard_moves_the_connection_and_its_unread_bytes() {
    let mut rig = Rig::new(2);
    let client = rig.dial(0);
    let mut bytes = rig.bytes(client, &hello(Some(1)));
    let request = rig.bytes(client, &metadata());
    bytes.extend_from_slice(&request[..10]);
    rig.send_bytes(client, &bytes);
    rig.send_bytes(client, &request[10..]);
    rig.run(MS);
    match &rig.answers(client)[..] {
        [Response::Hello(hello), Response::Metadata(metadata)] => {
            assert_eq!((hello.shard.0, hello.shards), (1, 2));
            assert_eq!(metadata.brokers.len(), 1);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(
        (rig.stats(0).connections.get(), rig.stats(1).connections.get()),
        (0, 1)
    );
    assert_eq!(rig.stats(0).handovers.get(), 1);
    assert_eq!(rig.stats(0).held_bytes.get(), 0);
}

#[test]
fn a_hello_that_cannot_be_served_is_refused_and_closed() {
    let mut rig = Rig::new(2);
    let other_cluster = Request::Hello(HelloRequest {
        role: Role::Client,
        cluster: ClusterId([9; 16]),
        node: None,
        generation: 0,
        shard: None,
        software: String::new(),
    });
    for (request, error) in [
        (hello(Some(2)), WireError::InvalidRequest),
        (other_cluster, WireError::InconsistentClusterId),
        (metadata(), WireError::HelloRequired),
    ] {
        let client = rig.dial(0);
        rig.send(client, &request);
        match rig.answer(client) {
            Response::Refused(refusal) => assert_eq!(refusal.error, Some(error)),
            other => panic!("{other:?}"),
        }
        assert!(rig.is_closed(client));
    }
}

#[test]
fn malformed_requests_get_a_typed_error_and_garbage_a_close() {
    let mut rig = Rig::new(1);
    let client = rig.connect(0);
    let mut unknown = rig.bytes(client, &metadata());
    unknown[5] = 99;
    let checksum = crc_of(&unknown);
    unknown[16..20].copy_from_slice(&checksum.to_le_bytes());
    rig.send_bytes(client, &unknown);
    let unsupported = rig.answer(client);
    assert!(
        matches!(
            &unsupported,
            Response::Refused(Refusal {
                error: Some(WireError::UnsupportedVersion),
                ..
            })
        ),
        "{unsupported:?}"
    );
    let mut flipped = rig.bytes(client, &metadata());
    *flipped.last_mut().unwrap() ^= 1;
    rig.send_bytes(client, &flipped);
    assert!(rig.is_closed(client));
    assert_eq!(rig.stats(0).malformed.get(), 1);
    assert_eq!(rig.stats(0).held_bytes.get(), 0);
}

/// The checksum of a frame without records, as the codec defines it.
fn crc_of(frame: &[u8]) -> u32 {
    let mut bytes = frame[..16].to_vec();
    bytes.extend_from_slice(&frame[20..]);
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                crc >> 1 ^ 0xedb8_8320
            } else {
                crc >> 1
            };
        }
    }
    !crc
}

#[test]
fn a_batch_is_acknowledged_when_the_journal_has_it_and_read_only_then() {
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 1, &[]);
    let (writer, reader) = (rig.connect(0), rig.connect(0));
    rig.disk(0).add_fault(stall_journal(5 * MS));
    rig.send(writer, &produce(Acks::All, vec![(at(id, 0), batch(100))]));
    rig.run(2 * MS);
    assert!(rig.answers(writer).is_empty());
    assert_eq!(rig.stats(0).parked_produces.get(), 1);
    assert_eq!(
        fetched(rig_fetch(&mut rig, reader, at(id, 0))),
        [(None, 0, Some(0))]
    );
    rig.run(10 * MS);
    assert_eq!(produced(rig.answer(writer)), [(None, Some(0))]);
    assert_eq!(rig.stats(0).parked_produces.get(), 0);
    let parts = fetched(rig_fetch(&mut rig, reader, at(id, 0)));
    assert_eq!(parts, [(None, batch(100).len(), Some(1))]);
}

/// A fetch of everything there is, answered at once.
fn rig_fetch(
    rig: &mut Rig,
    client: rig::Client,
    partition: ringfence_engine::types::PartitionId,
) -> Response<BufSlice> {
    rig.send(client, &fetch(0, 0, &[(partition, 0)]));
    rig.run(MS);
    rig.answer(client)
}

#[test]
fn durability_memory_is_acknowledged_and_read_before_the_journal() {
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 1, &[("durability", "memory")]);
    let client = rig.connect(0);
    rig.disk(0).add_fault(stall_journal(50 * MS));
    for (at_offset, acks) in [Acks::All, Acks::Leader].into_iter().enumerate() {
        rig.send(client, &produce(acks, vec![(at(id, 0), batch(10))]));
        rig.run(MS);
        assert_eq!(produced(rig.answer(client)), [(None, Some(at_offset as u64))]);
    }
    assert_eq!(fetched(rig_fetch(&mut rig, client, at(id, 0)))[0].2, Some(2));
}

#[test]
fn a_retry_is_answered_with_the_original_and_only_when_that_is_durable() {
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 1, &[]);
    let client = rig.connect(0);
    rig.disk(0).add_fault(stall_journal(5 * MS));
    let request = produce(Acks::All, vec![(at(id, 0), batch_of(10, Some((77, 0))))]);
    rig.send(client, &request);
    rig.send(client, &request);
    rig.run(2 * MS);
    assert!(rig.answers(client).is_empty());
    rig.run(20 * MS);
    let answers: Vec<_> = rig.answers(client).into_iter().map(produced).collect();
    assert_eq!(answers, [[(None, Some(0))], [(None, Some(0))]]);
    assert_eq!(rig.stats(0).produced_duplicates.get(), 1);
    let gap = produce(Acks::All, vec![(at(id, 0), batch_of(10, Some((77, 9))))]);
    assert_eq!(
        produced(rig.ask(client, &gap))[0].0,
        Some(WireError::OutOfOrderSequenceNumber)
    );
}

#[test]
fn one_connection_reaches_every_shard_and_answers_keep_their_order() {
    let mut rig = Rig::new(3);
    let id = rig.topic(1, 6, &[]);
    let client = rig.connect(0);
    let batches = (0..6).map(|index| (at(id, index), batch(50))).collect();
    rig.send(client, &produce(Acks::All, batches));
    rig.send(client, &metadata());
    rig.run(20 * MS);
    match &rig.answers(client)[..] {
        [Response::Produce(answer), Response::Metadata(_)] => {
            let indexes: Vec<u32> = answer
                .partitions
                .iter()
                .map(|part| part.partition.index)
                .collect();
            assert_eq!(indexes, [0, 1, 2, 3, 4, 5]);
            assert!(answer.partitions.iter().all(|part| part.error.is_none()));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(rig.stats(0).forwarded.get(), 2);
    let ranges: Vec<_> = (0..6).map(|index| (at(id, index), 0)).collect();
    rig.send(client, &fetch(500, 6 * batch(50).len() as u32, &ranges));
    rig.run(5 * MS);
    let early = rig.answers(client);
    rig.run(600 * MS);
    let answer = early.into_iter().chain(rig.answers(client)).next().unwrap();
    let parts = fetched(answer);
    assert_eq!(parts.len(), 6);
    assert!(
        parts
            .iter()
            .all(|part| part.0.is_none() && part.1 == batch(50).len()),
        "{parts:?}"
    );
}

#[test]
fn a_fetch_over_several_shards_is_answered_as_soon_as_one_has_data() {
    let mut rig = Rig::new(2);
    let id = rig.topic(1, 2, &[]);
    let (reader, writer) = (rig.connect(0), rig.connect(0));
    rig.send(reader, &fetch(10_000, 1, &[(at(id, 0), 0), (at(id, 1), 0)]));
    rig.run(5 * MS);
    let parked = rig.stats(0).parked_fetches.get() + rig.stats(1).parked_fetches.get();
    assert_eq!(parked, 2);
    assert_eq!(
        produced(rig.ask(writer, &produce(Acks::All, vec![(at(id, 1), batch(9))]))),
        [(None, Some(0))]
    );
    let parts = fetched(rig.answer(reader));
    assert_eq!((parts[0].1, parts[1].1), (0, batch(9).len()));
    let parked = rig.stats(0).parked_fetches.get() + rig.stats(1).parked_fetches.get();
    assert_eq!(parked, 0);
}

#[test]
fn too_much_for_one_other_shard_is_overloaded_not_queued() {
    let mut rig = Rig::with(
        2,
        Limits {
            max_forward_bytes: 50_000,
            ..limits()
        },
    );
    let id = rig.topic(1, 2, &[]);
    let (remote, own) =
        (0..2)
            .map(|index| at(id, index))
            .fold((None, None), |(remote, own), part| match part.shard(2).0 {
                0 => (remote, Some(part)),
                _ => (Some(part), own),
            });
    let (remote, own) = (remote.unwrap(), own.unwrap());
    let client = rig.connect(0);
    rig.disk(1).add_fault(stall_journal(5 * MS));
    rig.send(client, &produce(Acks::All, vec![(remote, batch(40_000))]));
    rig.send(
        client,
        &produce(Acks::All, vec![(remote, batch(40_000)), (own, batch(40_000))]),
    );
    rig.run(30 * MS);
    let answers: Vec<_> = rig.answers(client).into_iter().map(produced).collect();
    assert_eq!(answers[0], [(None, Some(0))]);
    assert_eq!(answers[1], [(Some(WireError::Overloaded), None), (None, Some(0))]);
    assert_eq!(
        produced(rig.ask(client, &produce(Acks::All, vec![(remote, batch(40_000))])))[0].0,
        None
    );
}

#[test]
fn a_long_poll_collects_until_there_is_enough_or_the_wait_is_over() {
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 1, &[]);
    let (reader, writer) = (rig.connect(0), rig.connect(0));
    let size = batch(100).len() as u32;
    rig.send(reader, &fetch(1_000, 2 * size, &[(at(id, 0), 0)]));
    assert_eq!(
        produced(rig.ask(writer, &produce(Acks::All, vec![(at(id, 0), batch(100))]))).len(),
        1
    );
    assert!(rig.answers(reader).is_empty());
    assert_eq!(rig.stats(0).parked_fetches.get(), 1);
    assert_eq!(
        produced(rig.ask(writer, &produce(Acks::All, vec![(at(id, 0), batch(100))]))).len(),
        1
    );
    assert_eq!(fetched(rig.answer(reader)), [(None, 2 * size as usize, Some(2))]);
    assert_eq!(rig.stats(0).memory_reads.get().max(2), 2);

    rig.send(reader, &fetch(50, 1, &[(at(id, 0), 2)]));
    rig.run(49 * MS);
    assert!(rig.answers(reader).is_empty());
    rig.run(2 * MS);
    assert_eq!(fetched(rig.answer(reader)), [(None, 0, Some(2))]);
    assert_eq!(rig.stats(0).parked_fetches.get(), 0);
}

#[test]
fn parked_fetches_cost_no_work_and_leave_nothing_behind() {
    const COUNT: usize = 2_000;
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 4, &[]);
    let ranges: Vec<_> = (0..4).map(|index| (at(id, index), 0)).collect();
    let clients: Vec<_> = (0..COUNT).map(|_| rig.connect(0)).collect();
    for client in &clients {
        rig.send(*client, &fetch(30_000, 1, &ranges));
    }
    assert_eq!(rig.stats(0).parked_fetches.get(), COUNT as u64);
    let (half, rest) = clients.split_at(COUNT / 2);
    half.iter().for_each(|client| rig.hang_up(*client));
    assert_eq!(rig.stats(0).parked_fetches.get(), (COUNT - half.len()) as u64);
    let writer = rig.connect(0);
    assert_eq!(
        produced(rig.ask(writer, &produce(Acks::All, vec![(at(id, 3), batch(10))])))[0].0,
        None
    );
    for client in rest {
        assert_eq!(fetched(rig.answer(*client))[3].1, batch(10).len());
    }
    let shard = rig.shard(0);
    assert!(shard.waiters.is_empty() && shard.deadlines.is_empty() && shard.fetches.is_empty());
    assert_eq!((shard.tasks.len(), shard.store_calls.len()), (0, 0));
    assert!(shard.home.is_idle());
}

#[test]
fn bounds_and_epochs_of_a_fetch_are_checked() {
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 1, &[]);
    let client = rig.connect(0);
    assert_eq!(
        produced(rig.ask(client, &produce(Acks::All, vec![(at(id, 0), batch(10))])))[0].0,
        None
    );
    let other = ringfence_engine::types::TopicId([8; 16]);
    let ranges = [(at(id, 0), 0), (at(id, 0), 2), (at(id, 1), 0), (at(other, 0), 0)];
    let parts = fetched(rig.ask(client, &fetch(1_000, 1, &ranges)));
    let errors: Vec<_> = parts.iter().map(|part| part.0).collect();
    assert_eq!(
        errors,
        [
            None,
            Some(WireError::OffsetOutOfRange),
            Some(WireError::UnknownTopicOrPartition),
            Some(WireError::UnknownTopicId)
        ]
    );
    assert_eq!(parts[0].1, batch(10).len());
    for (epoch, error) in [
        (0, WireError::FencedLeaderEpoch),
        (2, WireError::UnknownLeaderEpoch),
    ] {
        let Request::Fetch(mut request) = fetch(1_000, 1, &[(at(id, 0), 0)]) else {
            unreachable!()
        };
        request.partitions[0].epoch = Some(LeaderEpoch(epoch));
        assert_eq!(
            fetched(rig.ask(client, &Request::Fetch(request)))[0].0,
            Some(error)
        );
    }
    let Request::Fetch(mut request) = fetch(1_000, 1, &[(at(id, 0), 5)]) else {
        unreachable!()
    };
    request.partitions[0].last_fetched_epoch = Some(LeaderEpoch(1));
    match rig.ask(client, &Request::Fetch(request)) {
        Response::Fetch(answer) => {
            let part = &answer.partitions[0];
            let diverging = (part.diverging_epoch, part.diverging_end);
            assert_eq!(diverging, (Some(LeaderEpoch(1)), Some(Offset(1))));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn offsets_and_epoch_ends_are_told() {
    let mut rig = Rig::new(2);
    let id = rig.topic(1, 2, &[]);
    let client = rig.connect(0);
    let both = vec![(at(id, 0), batch(10)), (at(id, 1), batch(10))];
    assert_eq!(produced(rig.ask(client, &produce(Acks::All, both)))[1].0, None);
    let question = |index, timestamp| OffsetQuestion {
        partition: at(id, index),
        current: None,
        timestamp,
    };
    let questions = vec![
        question(0, TIMESTAMP_LATEST),
        question(1, TIMESTAMP_EARLIEST),
        question(1, 5),
        question(0, 6),
        question(9, 0),
    ];
    let Response::ListOffsets(found) = rig.ask(client, &Request::ListOffsets(questions)) else {
        panic!()
    };
    let offsets: Vec<_> = found
        .iter()
        .map(|f| (f.error, f.offset.map(|o| o.0), f.timestamp))
        .collect();
    assert_eq!(
        offsets,
        [
            (None, Some(1), -1),
            (None, Some(0), -1),
            (None, Some(0), 5),
            (None, None, -1),
            (Some(WireError::UnknownTopicOrPartition), None, -1)
        ]
    );
    let ends = vec![EpochQuestion {
        partition: at(id, 0),
        current: Some(LeaderEpoch(1)),
        epoch: LeaderEpoch(7),
    }];
    let Response::EpochEnd(found) = rig.ask(client, &Request::EpochEnd(ends)) else {
        panic!()
    };
    assert_eq!(
        (found[0].epoch, found[0].end),
        (Some(LeaderEpoch(1)), Some(Offset(1)))
    );
}

#[test]
fn without_acks_nothing_is_answered_and_a_refusal_closes() {
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 1, &[]);
    let client = rig.connect(0);
    rig.send(client, &produce(Acks::None, vec![(at(id, 0), batch(10))]));
    rig.send(client, &metadata());
    rig.run(5 * MS);
    assert!(matches!(rig.answers(client)[..], [Response::Metadata(_)]));
    assert!(!rig.is_closed(client));
    rig.send(client, &produce(Acks::None, vec![(at(id, 7), batch(10))]));
    rig.run(MS);
    assert!(rig.answers(client).is_empty());
    assert!(rig.is_closed(client));
}

#[test]
fn a_late_acknowledgement_times_out() {
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 1, &[]);
    let client = rig.connect(0);
    rig.disk(0).add_fault(stall_journal(3_000 * MS));
    rig.send(client, &produce(Acks::All, vec![(at(id, 0), batch(10))]));
    rig.run(999 * MS);
    assert!(rig.answers(client).is_empty());
    rig.run(2 * MS);
    assert_eq!(
        produced(rig.answer(client)),
        [(Some(WireError::RequestTimedOut), None)]
    );
    rig.disk(0).clear_faults();
    rig.run(5_000 * MS);
    assert_eq!(rig.stats(0).parked_produces.get(), 0);
    assert_eq!(fetched(rig_fetch(&mut rig, client, at(id, 0)))[0].2, Some(1));
}

#[test]
fn a_failed_journal_write_fences_the_shard_and_is_never_acknowledged() {
    let mut rig = Rig::new(2);
    let id = rig.topic(1, 2, &[]);
    let broken = usize::from(at(id, 0).shard(2).0);
    let client = rig.connect(broken);
    assert_eq!(
        produced(rig.ask(client, &produce(Acks::All, vec![(at(id, 0), batch(10))])))[0].0,
        None
    );
    let fault = Fault::new(FaultKind::Error(DiskError::Io(5)), When::From(0))
        .class(FileClass::Journal)
        .kind(OpKind::Write);
    rig.disk(broken).add_fault(fault);
    let both = vec![(at(id, 0), batch(10)), (at(id, 1), batch(10))];
    let parts = produced(rig.ask(client, &produce(Acks::All, both.clone())));
    assert_eq!(parts, [(Some(WireError::StorageError), None), (None, Some(0))]);
    assert!(
        rig.news
            .iter()
            .any(|(shard, news)| *shard == broken && matches!(news, News::Fenced(_)))
    );
    assert_eq!(
        produced(rig.ask(client, &produce(Acks::All, both)))[0].0,
        Some(WireError::StorageError)
    );
    assert_eq!(
        fetched(rig_fetch(&mut rig, client, at(id, 0))),
        [(None, batch(10).len(), Some(1))]
    );
    assert_eq!(rig.stats(broken).shard_fenced.get(), 1);
    rig.run(100 * MS);
    let wake = rig.shard(broken).next_wake().unwrap();
    assert!(wake > rig.now().mono, "a fenced shard does not spin");
}

#[test]
fn too_few_replicas_refuse_acks_all() {
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 1, &[("min.insync.replicas", "2")]);
    let client = rig.connect(0);
    let all = produce(Acks::All, vec![(at(id, 0), batch(10))]);
    assert_eq!(
        produced(rig.ask(client, &all))[0].0,
        Some(WireError::NotEnoughReplicas)
    );
    let leader = produce(Acks::Leader, vec![(at(id, 0), batch(10))]);
    assert_eq!(produced(rig.ask(client, &leader))[0], (None, Some(0)));
}

#[test]
fn a_dropped_topic_answers_its_waiters_and_is_gone() {
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 2, &[]);
    let client = rig.connect(0);
    rig.send(client, &fetch(10_000, 1, &[(at(id, 0), 0)]));
    let failed = rig.order(|token| Order::Drop {
        token,
        topic: id,
        partitions: 2,
    });
    assert_eq!(failed, 0);
    assert_eq!(fetched(rig.answer(client))[0].0, Some(WireError::UnknownTopicId));
    let late = produce(Acks::All, vec![(at(id, 0), batch(10))]);
    assert_eq!(
        produced(rig.ask(client, &late))[0].0,
        Some(WireError::UnknownTopicId)
    );
    let Response::Metadata(answer) = rig.ask(client, &metadata()) else {
        panic!()
    };
    assert!(answer.topics.is_empty());
    let again = rig.order(|token| Order::Drop {
        token,
        topic: id,
        partitions: 2,
    });
    assert_eq!(again, 0);
}

#[test]
fn nothing_is_served_before_the_leader_epoch_is_durable() {
    let mut rig = Rig::new(1);
    rig.disk(0).add_fault(stall_journal(5 * MS));
    let topic = topic(1, 1, &[]);
    let id = topic.id;
    let client = rig.connect(0);
    rig.post(Order::Topics {
        token: 99,
        epoch: LeaderEpoch(1),
        topics: vec![topic],
    });
    rig.run(MS);
    let request = produce(Acks::All, vec![(at(id, 0), batch(10))]);
    rig.send(client, &request);
    rig.run(MS);
    assert_eq!(
        produced(rig.answer(client))[0].0,
        Some(WireError::LeaderNotAvailable)
    );
    rig.run(20 * MS);
    assert!(matches!(rig.news[..], [(0, News::Ordered { token: 99, .. })]));
    assert_eq!(produced(rig.ask(client, &request))[0], (None, Some(0)));
}

#[test]
fn altered_settings_count_at_once() {
    let mut rig = Rig::new(1);
    let id = rig.topic(1, 1, &[]);
    let client = rig.connect(0);
    let failed = rig.order(|token| Order::Topics {
        token,
        epoch: LeaderEpoch(1),
        topics: vec![topic(1, 1, &[("max.message.bytes", "100")])],
    });
    assert_eq!(failed, 0);
    let parts = produced(rig.ask(client, &produce(Acks::All, vec![(at(id, 0), batch(200))])));
    assert_eq!(parts[0].0, Some(WireError::MessageTooLarge));
}

#[test]
fn producer_ids_come_from_control_and_are_given_once() {
    let mut rig = Rig::new(1);
    let client = rig.connect(0);
    for _ in 0..3 {
        rig.send(client, &Request::InitProducer);
    }
    let wanted = rig
        .news
        .iter()
        .filter(|(_, news)| matches!(news, News::ProducerIdsWanted))
        .count();
    assert_eq!(wanted, 1);
    rig.post(Order::ProducerIds(10..12));
    rig.run(MS);
    rig.post(Order::NoProducerIds);
    rig.run(MS);
    match &rig.answers(client)[..] {
        [
            Response::InitProducer(a),
            Response::InitProducer(b),
            Response::Refused(refusal),
        ] => {
            assert_eq!((a.producer_id, b.producer_id), (10, 11));
            assert_eq!(refusal.error, Some(WireError::StorageError));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_stop_answers_everyone_and_ends() {
    let mut rig = Rig::new(2);
    let id = rig.topic(1, 2, &[]);
    let (reader, writer) = (rig.connect(0), rig.connect(0));
    rig.send(reader, &fetch(60_000, 1, &[(at(id, 0), 0), (at(id, 1), 0)]));
    rig.send(
        writer,
        &produce(Acks::All, vec![(at(id, 0), batch(10)), (at(id, 1), batch(10))]),
    );
    rig.post(Order::Stop);
    rig.run(50 * MS);
    assert_eq!(produced(rig.answer(writer)), [(None, Some(0)), (None, Some(0))]);
    assert_eq!(fetched(rig.answer(reader)).len(), 2);
    assert!(rig.is_closed(reader) && rig.is_closed(writer));
    assert!(rig.shard(0).is_stopped() && rig.shard(1).is_stopped());
}

#[test]
fn a_mail_of_an_unknown_call_is_ignored() {
    let mut rig = Rig::new(1);
    let client = rig.connect(0);
    rig.post_mail(Mail::Hurry(crate::event::CallRef {
        home: ringfence_engine::types::ShardId(0),
        call: 5,
    }));
    rig.run(MS);
    assert!(matches!(rig.ask(client, &metadata()), Response::Metadata(_)));
}
