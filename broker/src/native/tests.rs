//! Round trips of random messages, and total decoding of arbitrary and mutated bytes.

mod golden;

use proptest::prelude::*;
use ringfence_engine::types::{LeaderEpoch, Offset, PartitionId, ShardId, TopicId};

use super::wire::{DecodeError, Wire, decode_all};
use super::*;
use crate::error::WireError;

const MAX: usize = 1 << 20;

/// Random bytes that samples are made of; zeros once they are used up, so that shrinking finds small messages.
pub(crate) struct Entropy<'a> {
    left: &'a [u8],
}

impl Entropy<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, left)) = self.left.split_first() else {
            return 0;
        };
        self.left = left;
        *first
    }

    fn number(&mut self) -> u64 {
        u64::from_le_bytes([(); 8].map(|()| self.byte()))
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()]
    }
}

/// A random value of a message's field.
pub(crate) trait Sample: Sized {
    fn sample(from: &mut Entropy<'_>) -> Self;
}

macro_rules! samples {
    ($($type:ty: $from:ident => $value:expr;)*) => {
        $(impl Sample for $type {
            fn sample($from: &mut Entropy<'_>) -> Self {
                $value
            }
        })*
    };
}

samples! {
    u8: from => from.byte();
    bool: from => from.byte() & 1 == 1;
    i16: from => from.number() as i16;
    u16: from => from.number() as u16;
    u32: from => from.number() as u32;
    u64: from => from.number();
    i64: from => from.number() as i64;
    String: from => (0..from.byte() % 8).map(|_| from.pick(&['a', '-', '.', 'ß', '\u{1f600}', '\0'])).collect();
    Offset: from => Offset(from.number() >> 1);
    Option<Offset>: from => (from.byte() != 0).then(|| Offset::sample(from));
    LeaderEpoch: from => LeaderEpoch((from.number() as u32) >> 1);
    Option<LeaderEpoch>: from => (from.byte() != 0).then(|| LeaderEpoch::sample(from));
    NodeId: from => NodeId((from.number() as u32) >> 1);
    Option<NodeId>: from => (from.byte() != 0).then(|| NodeId::sample(from));
    ShardId: from => ShardId(u16::from(from.byte()));
    Option<ShardId>: from => (from.byte() != 0).then(|| ShardId::sample(from));
    TopicId: from => TopicId([(); 16].map(|()| from.byte()));
    ClusterId: from => ClusterId([(); 16].map(|()| from.byte()));
    PartitionId: from => PartitionId { topic: Sample::sample(from), index: Sample::sample(from) };
    Option<WireError>: from => (from.byte() != 0).then(|| from.pick(WireError::ALL));
}

impl<T: Sample> Sample for Vec<T> {
    fn sample(from: &mut Entropy<'_>) -> Self {
        (0..from.byte() % 4).map(|_| T::sample(from)).collect()
    }
}

fn records(from: &mut Entropy<'_>) -> &'static [u8] {
    const BYTES: [u8; 300] = [7; 300];
    &BYTES[..usize::from(from.byte())]
}

fn sample_produce(from: &mut Entropy<'_>) -> ProduceRequest<&'static [u8]> {
    ProduceRequest {
        acks: Sample::sample(from),
        timeout_ms: Sample::sample(from),
        batches: (0..from.byte() % 4)
            .map(|_| ProduceBatch {
                partition: Sample::sample(from),
                epoch: Sample::sample(from),
                records: records(from),
            })
            .collect(),
    }
}

fn sample_fetched(from: &mut Entropy<'_>) -> FetchAnswer<&'static [u8]> {
    let partitions = (0..from.byte() % 4)
        .map(|_| FetchedPartition {
            partition: Sample::sample(from),
            error: Sample::sample(from),
            epoch: Sample::sample(from),
            high_watermark: Sample::sample(from),
            log_start: Sample::sample(from),
            log_end: Sample::sample(from),
            diverging_epoch: Sample::sample(from),
            diverging_end: Sample::sample(from),
            records: Some(records(from))
                .filter(|piece| !piece.is_empty())
                .into_iter()
                .collect(),
        })
        .collect();
    FetchAnswer { partitions }
}

fn sample_request(api: Api, from: &mut Entropy<'_>) -> Request<&'static [u8]> {
    match api {
        Api::Hello => Request::Hello(Sample::sample(from)),
        Api::Metadata => Request::Metadata(Sample::sample(from)),
        Api::Produce => Request::Produce(sample_produce(from)),
        Api::Fetch => Request::Fetch(Sample::sample(from)),
        Api::FetchAck => Request::FetchAck(Sample::sample(from)),
        Api::EpochEnd => Request::EpochEnd(Sample::sample(from)),
        Api::ListOffsets => Request::ListOffsets(Sample::sample(from)),
        Api::InitProducer => Request::InitProducer,
        Api::CreateTopic => Request::CreateTopic(Sample::sample(from)),
        Api::DeleteTopic => Request::DeleteTopic(Sample::sample(from)),
        Api::AlterTopic => Request::AlterTopic(Sample::sample(from)),
        Api::ListTopics => Request::ListTopics,
        Api::DescribeTopic => Request::DescribeTopic(Sample::sample(from)),
        Api::AddPartitions => Request::AddPartitions(Sample::sample(from)),
        Api::ClusterInfo => Request::ClusterInfo,
    }
}

fn sample_response(api: Api, from: &mut Entropy<'_>) -> Response<&'static [u8]> {
    if from.byte() == 1 {
        return Response::Refused(Sample::sample(from));
    }
    match api {
        Api::Hello => Response::Hello(Sample::sample(from)),
        Api::Metadata => Response::Metadata(Sample::sample(from)),
        Api::Produce => Response::Produce(Sample::sample(from)),
        Api::Fetch => Response::Fetch(sample_fetched(from)),
        Api::FetchAck => Response::FetchAck(Sample::sample(from)),
        Api::EpochEnd => Response::EpochEnd(Sample::sample(from)),
        Api::ListOffsets => Response::ListOffsets(Sample::sample(from)),
        Api::InitProducer => Response::InitProducer(Sample::sample(from)),
        Api::CreateTopic => Response::CreateTopic(Sample::sample(from)),
        Api::DeleteTopic => Response::DeleteTopic,
        Api::AlterTopic => Response::AlterTopic,
        Api::ListTopics => Response::ListTopics(Sample::sample(from)),
        Api::DescribeTopic => Response::DescribeTopic(Sample::sample(from)),
        Api::AddPartitions => Response::AddPartitions,
        Api::ClusterInfo => Response::ClusterInfo(Sample::sample(from)),
    }
}

/// Decodes `bytes` as a request and as an answer; whatever decodes must encode to the same length again.
fn decode_anyhow(bytes: &[u8]) {
    let Ok(frame) = Frame::open(bytes, MAX) else {
        return;
    };
    let Ok(api) = frame.header.api() else {
        return;
    };
    let correlation = frame.header.correlation;
    if let Ok(request) = Request::decode(api, &frame) {
        assert_eq!(request.encode(correlation).frame_len(), bytes.len());
    }
    if let Ok(response) = Response::decode(api, &frame) {
        assert_eq!(response.encode(api, correlation).frame_len(), bytes.len());
    }
}

/// Repairs length, head length and crc of mutated bytes so that the mutation reaches the layouts.
fn reseal(bytes: &mut [u8], head_len: usize) {
    let head_len = head_len.min(bytes.len() - PREFIX);
    bytes[HEADER..PREFIX].copy_from_slice(&(head_len as u32).to_le_bytes());
    let tail = bytes.len() - PREFIX - head_len;
    seal(&mut bytes[..PREFIX + head_len], 9, tail);
}

fn api() -> impl Strategy<Value = Api> {
    prop::sample::select(Api::ALL)
}

proptest! {
    #[test]
    fn requests_round_trip(api in api(), seed in prop::collection::vec(any::<u8>(), 0..600), correlation: u64) {
        let request = sample_request(api, &mut Entropy { left: &seed });
        let bytes = request.encode(correlation).into_vec();
        let frame = Frame::open(bytes.as_slice(), MAX).unwrap();
        prop_assert_eq!(frame.header.api(), Ok(api));
        prop_assert_eq!(frame.header.correlation, correlation);
        prop_assert_eq!(Request::decode(api, &frame), Ok(request));
    }

    #[test]
    fn answers_round_trip(api in api(), seed in prop::collection::vec(any::<u8>(), 0..600), correlation: u64) {
        let response = sample_response(api, &mut Entropy { left: &seed });
        let bytes = response.clone().encode(api, correlation).into_vec();
        let frame = Frame::open(bytes.as_slice(), MAX).unwrap();
        prop_assert_eq!(frame.header.correlation, correlation);
        prop_assert_eq!(Response::decode(api, &frame), Ok(response));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        decode_anyhow(&bytes);
    }

    #[test]
    fn arbitrary_heads_never_panic(
        api in api(),
        flags in 0u16..4,
        body in prop::collection::vec(any::<u8>(), 0..300),
        head in 0usize..300,
    ) {
        let mut bytes = vec![0; PREFIX];
        bytes[4] = api.version();
        bytes[5] = api.number();
        bytes[6..8].copy_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&body);
        reseal(&mut bytes, head);
        decode_anyhow(&bytes);
    }

    #[test]
    fn mutated_messages_never_panic(
        api in api(),
        answer: bool,
        seed in prop::collection::vec(any::<u8>(), 0..400),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let encoded = if answer {
            sample_response(api, &mut Entropy { left: &seed }).encode(api, 9)
        } else {
            sample_request(api, &mut Entropy { left: &seed }).encode(9)
        };
        let head_len = encoded.head.len() - PREFIX;
        let mut bytes = encoded.into_vec();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(PREFIX + cut.index(bytes.len() - PREFIX + 1));
        reseal(&mut bytes, head_len);
        decode_anyhow(&bytes);
    }
}

#[test]
fn a_count_that_cannot_fit_is_refused_before_memory_is_taken() {
    for count in [3, 1 << 20, u32::MAX] {
        let mut bytes = Vec::new();
        count.put(&mut bytes);
        bytes.resize(4 + 2 * PartitionId::MIN, 0);
        let expected = DecodeError::Count {
            count,
            left: 2 * PartitionId::MIN,
        };
        assert_eq!(decode_all::<Vec<PartitionId>>(&bytes), Err(expected));
    }
}

#[test]
fn strings_are_capped_and_utf8() {
    let long = "ß".repeat(MAX_STRING);
    let mut bytes = Vec::new();
    long.put(&mut bytes);
    assert_eq!(decode_all::<String>(&bytes), Ok("ß".repeat(MAX_STRING / 2)));
    assert_eq!(decode_all::<String>(&[1, 0, 0xff]), Err(DecodeError::Utf8));
    let too_long = (MAX_STRING + 1) as u16;
    let mut bytes = too_long.to_le_bytes().to_vec();
    bytes.resize(2 + MAX_STRING + 1, b'a');
    assert_eq!(
        decode_all::<String>(&bytes),
        Err(DecodeError::LongString(too_long))
    );
}

#[test]
fn negative_offsets_and_trailing_bytes_are_refused() {
    assert_eq!(decode_all::<Option<Offset>>(&(-1i64).to_le_bytes()), Ok(None));
    let expected = DecodeError::Value {
        what: "offset",
        value: -2,
    };
    assert_eq!(
        decode_all::<Option<Offset>>(&(-2i64).to_le_bytes()),
        Err(expected)
    );
    assert_eq!(decode_all::<u8>(&[1, 2]), Err(DecodeError::Trailing(1)));
}

#[test]
fn frames_out_of_bounds_are_refused_by_their_first_bytes() {
    let huge = u32::MAX.to_le_bytes();
    assert_eq!(
        Header::peek(&huge, DEFAULT_MAX_FRAME),
        Err(FrameError::TooLong {
            length: u64::from(u32::MAX) + 4,
            max: DEFAULT_MAX_FRAME
        })
    );
    assert_eq!(Header::peek(&[3, 0, 0, 0], MAX), Err(FrameError::TooShort(3)));
    assert_eq!(Header::peek(&[3, 0], MAX), Ok(None));
}

#[test]
fn one_flipped_bit_outside_the_records_breaks_the_checksum_or_the_shape() {
    let request = Request::Produce(ProduceRequest {
        acks: Acks::All,
        timeout_ms: 1000,
        batches: vec![ProduceBatch {
            partition: PartitionId::default(),
            epoch: None,
            records: b"records".as_slice(),
        }],
    });
    let encoded = request.encode(1);
    let head = encoded.head.len();
    let bytes = encoded.into_vec();
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        let opened = Frame::open(flipped.as_slice(), MAX);
        assert_eq!(opened.is_ok(), bit / 8 >= head, "bit {bit}");
    }
}
