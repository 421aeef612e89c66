//! Frames, limits and the order of answers, event by event.

use super::*;
use crate::native::{Request, Response};
use proptest::prelude::*;

const CONN: ConnId = ConnId {
    slot: 1,
    generation: 1,
};

fn limits() -> Limits {
    Limits {
        max_connections: 3,
        max_request_bytes: 1 << 20,
        idle_ms: 60_000,
        handshake_ms: 1_000,
        max_in_flight: 4,
        max_connection_bytes: 1 << 20,
        max_shard_bytes: 2 << 20,
        max_forward_bytes: 1 << 20,
        max_fetch_wait_ms: 1_000,
        max_fetch_bytes: 1 << 20,
        max_request_timeout_ms: 1_000,
    }
}

fn at(ms: u64) -> Now {
    Now {
        mono: ms * 1_000_000,
        wall_ms: 0,
    }
}

fn peer() -> SocketAddr {
    "127.0.0.1:1".parse().unwrap()
}

struct Bench {
    listener: Listener,
    stats: Arc<ShardStats>,
    net: Vec<NetOp>,
    /// A buffer lent out, and how much of it is to come.
    fill: Option<(AppendBuf, usize)>,
}

fn bench(limits: Limits) -> Bench {
    let stats = Arc::new(ShardStats::default());
    Bench {
        listener: Listener::new(limits, 1, Arc::clone(&stats)),
        stats,
        net: Vec::new(),
        fill: None,
    }
}

impl Bench {
    /// A connection past its Hello.
    fn open(&mut self, id: ConnId) {
        self.listener.accepted(at(0), id, peer(), &mut self.net);
        self.listener.greeted(id);
    }

    /// Delivers as the driver does: what a lent buffer misses goes there.
    fn receive(&mut self, id: ConnId, mut data: &[u8]) {
        if let Some((mut buf, left)) = self.fill.take() {
            let (ours, rest) = data.split_at(data.len().min(left));
            buf.append(ours);
            data = rest;
            if left > ours.len() {
                self.fill = Some((buf, left - ours.len()));
            } else {
                self.listener.filled(at(1), id, buf, &mut self.net);
            }
        }
        if !data.is_empty() {
            self.listener.received(at(1), id, data, &mut self.net);
        }
    }

    /// The end of a loop turn; whether a buffer was lent out.
    fn lend(&mut self) -> bool {
        self.listener.lend_buffers(&mut self.net);
        let fill = self.net.iter().position(|op| matches!(op, NetOp::Fill { .. }));
        let Some(fill) = fill else { return false };
        let NetOp::Fill { buf, len, .. } = self.net.remove(fill) else {
            unreachable!("just found")
        };
        assert!(self.fill.replace((buf, len)).is_none(), "one fill at a time");
        true
    }

    fn frames(&mut self) -> Vec<Incoming> {
        std::iter::from_fn(|| self.listener.next_frame()).collect()
    }

    fn answer(&mut self, seq: Seq, correlation: u64) -> usize {
        let answer = Response::<BufSlice>::DeleteTopic.encode(crate::native::Api::DeleteTopic, correlation);
        let len = answer.frame_len();
        self.listener.answer(at(2), CONN, seq, answer, &mut self.net);
        len
    }

    fn sent(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for op in self.net.drain(..) {
            if let NetOp::Send { bufs, .. } = op {
                bufs.iter().for_each(|buf| bytes.extend_from_slice(buf));
            }
        }
        bytes
    }

    fn count(&self, wanted: fn(&NetOp) -> bool) -> usize {
        self.net.iter().filter(|op| wanted(op)).count()
    }
}

fn request(correlation: u64) -> Vec<u8> {
    Request::<&[u8]>::ListTopics.encode(correlation).into_vec()
}

/// A frame of `len` bytes in all; only its length field is meaningful.
fn frame_of(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[..4].copy_from_slice(&(len as u32 - 4).to_le_bytes());
    bytes
}

proptest! {
    #[test]
    fn frames_come_out_whole_whatever_the_chunks(
        lens in proptest::collection::vec(24usize..400_000, 1..4),
        cuts in proptest::collection::vec((1usize..70_000, any::<bool>()), 1..20),
    ) {
        let mut bench = bench(Limits { max_connection_bytes: 4 << 20, max_shard_bytes: 8 << 20, ..limits() });
        bench.open(CONN);
        let mut stream = Vec::new();
        for (at, len) in lens.iter().enumerate() {
            let mut frame = frame_of(*len);
            let last = frame.len() - 1;
            frame[last] = at as u8;
            stream.extend_from_slice(&frame);
        }
        let mut cuts = cuts.iter().cycle();
        let mut left = stream.as_slice();
        while !left.is_empty() {
            let (cut, turn_ends) = *cuts.next().unwrap();
            let take = cut.min(left.len());
            bench.receive(CONN, &left[..take]);
            left = &left[take..];
            if turn_ends {
                bench.lend();
            }
        }
        let out: Vec<u8> = bench.frames().iter().flat_map(|incoming| incoming.frame.to_vec()).collect();
        prop_assert!(out == stream);
    }

    #[test]
    fn garbage_never_panics_and_holds_little(data in proptest::collection::vec(any::<u8>(), 0..300)) {
        let mut bench = bench(limits());
        bench.listener.accepted(at(0), CONN, peer(), &mut bench.net);
        bench.receive(CONN, &data);
        bench.frames();
        prop_assert!(bench.stats.held_bytes.get() <= 2 * HELLO_MAX_FRAME as u64);
        bench.listener.closed(CONN);
        prop_assert_eq!(bench.stats.held_bytes.get(), 0);
        prop_assert_eq!(bench.stats.requests_in_flight.get(), 0);
        prop_assert_eq!(bench.stats.connections.get(), 0);
    }
}

#[test]
fn answers_leave_in_the_order_of_their_requests() {
    let mut bench = bench(limits());
    bench.open(CONN);
    let stream: Vec<u8> = (0..3).flat_map(request).collect();
    bench.receive(CONN, &stream);
    let seqs: Vec<Seq> = bench.frames().iter().map(|incoming| incoming.seq).collect();
    bench.answer(seqs[2], 2);
    bench.listener.skip(at(2), CONN, seqs[1], &mut bench.net);
    assert!(bench.sent().is_empty());
    let len = bench.answer(seqs[0], 0);
    let sent = bench.sent();
    assert_eq!(sent.len(), 2 * len);
    assert_eq!((sent[8], sent[len + 8]), (0, 2));
    bench.listener.sent(at(3), CONN, 2 * len, &mut bench.net);
    assert!(bench.listener.is_settled());
    assert_eq!(bench.stats.held_bytes.get(), 0);
    assert_eq!(bench.stats.requests_in_flight.get(), 0);
}

#[test]
fn too_many_requests_pause_the_connection_until_some_are_answered() {
    let mut bench = bench(limits());
    bench.open(CONN);
    let stream: Vec<u8> = (0..7).flat_map(request).collect();
    bench.receive(CONN, &stream);
    let first = bench.frames();
    assert_eq!(first.len(), 4);
    assert_eq!(bench.count(|op| matches!(op, NetOp::Pause { .. })), 1);
    assert_eq!(bench.stats.paused_connections.get(), 1);
    let len = bench.answer(first[0].seq, 0);
    assert_eq!(bench.frames().len(), 1);
    assert_eq!(bench.count(|op| matches!(op, NetOp::Resume { .. })), 0);
    for incoming in &first[1..] {
        bench.answer(incoming.seq, 0);
    }
    assert_eq!(bench.frames().len(), 2);
    assert_eq!(bench.count(|op| matches!(op, NetOp::Resume { .. })), 1);
    bench.listener.sent(at(3), CONN, 4 * len, &mut bench.net);
    assert_eq!(bench.stats.paused_connections.get(), 0);
    assert_eq!(bench.stats.held_bytes.get(), 3 * request(0).len() as u64);
    bench.listener.closed(CONN);
    assert_eq!(bench.stats.held_bytes.get(), 0);
    assert_eq!(bench.stats.requests_in_flight.get(), 0);
}

#[test]
fn a_large_frame_is_filled_in_place_and_grows_with_what_came() {
    let len = 20 << 20;
    let mut bench = bench(Limits {
        max_request_bytes: 32 << 20,
        max_connection_bytes: 32 << 20,
        max_shard_bytes: 64 << 20,
        ..limits()
    });
    bench.open(CONN);
    let frame = frame_of(len);
    bench.receive(CONN, &frame[..100]);
    let mut at = 100;
    while at < len {
        assert!(bench.lend());
        let (buf, want) = bench.fill.as_ref().unwrap();
        assert!(
            buf.capacity() <= (16 * at).max(4 << 20),
            "{} at {at}",
            buf.capacity()
        );
        let want = *want;
        bench.receive(CONN, &frame[at..at + want / 2]);
        assert!(!bench.lend(), "a lent buffer is lent once");
        bench.receive(CONN, &frame[at + want / 2..at + want]);
        at += want;
    }
    let frames = bench.frames();
    assert!(frames.len() == 1 && *frames[0].frame == frame[..]);
    assert_eq!(bench.stats.received_bytes.get(), len as u64);
    bench.receive(CONN, &frame_of(100));
    assert!(!bench.lend());
    assert_eq!(bench.frames().len(), 1);
    bench.listener.closed(CONN);
    assert_eq!(bench.stats.held_bytes.get(), 0);
}

#[test]
fn a_frame_without_budget_waits_for_others_to_finish() {
    let other = ConnId {
        slot: 2,
        generation: 1,
    };
    let mut bench = bench(Limits {
        max_shard_bytes: 1 << 20,
        ..limits()
    });
    bench.open(CONN);
    bench.open(other);
    bench.receive(CONN, &frame_of(900 << 10));
    let held = bench.frames();
    assert_eq!(held.len(), 1);
    bench.receive(other, &frame_of(400 << 10)[..100]);
    assert_eq!(
        bench.count(|op| matches!(op, NetOp::Pause { conn } if *conn == ConnId { slot: 2, generation: 1 })),
        1
    );
    bench.answer(held[0].seq, 0);
    assert_eq!(
        bench.count(|op| matches!(op, NetOp::Resume { conn } if *conn == ConnId { slot: 2, generation: 1 })),
        1
    );
    bench.receive(other, &frame_of(400 << 10)[100..]);
    assert_eq!(bench.frames().len(), 1);
}

#[test]
fn a_false_length_is_refused_or_costs_nothing() {
    let mut bench = bench(limits());
    bench.open(CONN);
    bench.receive(CONN, &u32::MAX.to_le_bytes());
    assert_eq!(
        bench.count(|op| matches!(op, NetOp::Close { abort: true, .. })),
        1
    );
    assert_eq!(bench.stats.malformed.get(), 1);
    bench.receive(CONN, &[0; 1000]);
    assert!(bench.frames().is_empty());
    bench.listener.closed(CONN);
    assert_eq!(bench.stats.held_bytes.get(), 0);

    bench.listener.accepted(at(0), CONN, peer(), &mut bench.net);
    bench.receive(CONN, &frame_of(HELLO_MAX_FRAME + 1)[..4]);
    assert_eq!(bench.stats.malformed.get(), 2);
}

#[test]
fn deadlines_close_the_silent_the_slow_and_the_idle_but_not_the_busy() {
    let ids: Vec<ConnId> = (0..4).map(|slot| ConnId { slot, generation: 1 }).collect();
    let mut bench = bench(Limits {
        max_connections: 4,
        ..limits()
    });
    bench.listener.accepted(at(0), ids[0], peer(), &mut bench.net);
    for id in &ids[1..] {
        bench.open(*id);
    }
    bench.receive(ids[1], &frame_of(1000)[..500]);
    bench.receive(ids[2], &request(0));
    assert_eq!(bench.frames().len(), 1);
    let closed = |bench: &Bench| -> Vec<u32> {
        let mut slots: Vec<u32> = bench
            .net
            .iter()
            .filter_map(|op| match op {
                NetOp::Close { conn, .. } => Some(conn.slot),
                _ => None,
            })
            .collect();
        slots.sort_unstable();
        slots
    };
    bench.listener.tick(at(999), &mut bench.net);
    assert!(closed(&bench).is_empty());
    bench.listener.tick(at(1_000), &mut bench.net);
    assert_eq!(closed(&bench), [0]);
    bench.listener.tick(at(2_001), &mut bench.net);
    assert_eq!(closed(&bench), [0, 1]);
    bench.listener.tick(at(60_001), &mut bench.net);
    assert_eq!(closed(&bench), [0, 1, 3]);
    assert_eq!(bench.stats.connections_expired.get(), 3);
}

#[test]
fn the_connection_limit_refuses_and_forgets() {
    let mut bench = bench(limits());
    for slot in 0..5 {
        bench
            .listener
            .accepted(at(0), ConnId { slot, generation: 1 }, peer(), &mut bench.net);
    }
    assert_eq!(
        bench.count(|op| matches!(op, NetOp::Close { abort: true, .. })),
        2
    );
    assert_eq!(bench.stats.connections_refused.get(), 2);
    for slot in 0..5 {
        assert!(!bench.listener.closed(ConnId { slot, generation: 1 }));
    }
    assert!(bench.listener.is_empty());
    assert_eq!(bench.listener.next_deadline(), None);
}

#[test]
fn a_leaving_connection_takes_its_unread_bytes_along() {
    let mut bench = bench(limits());
    bench.listener.accepted(at(0), CONN, peer(), &mut bench.net);
    let mut stream = request(1);
    stream.extend_from_slice(&request(2));
    bench.receive(CONN, &stream);
    let hello = bench.frames();
    assert_eq!(hello.len(), 1);
    assert!(!hello[0].greeted);
    bench.listener.leave(CONN, &mut bench.net);
    bench.receive(CONN, &[7, 8]);
    let left = bench.listener.left(CONN).unwrap();
    assert_eq!(left.rest, [request(2), vec![7, 8]].concat());
    assert_eq!(bench.stats.held_bytes.get(), 0);
    assert_eq!(bench.stats.requests_in_flight.get(), 0);
}

#[test]
fn who_does_not_read_is_not_served_on_and_keeps_nobody_out() {
    let mut bench = bench(limits());
    bench.open(CONN);
    bench.receive(CONN, &[request(1), request(2), request(3)].concat());
    let first = bench.listener.next_frame().expect("nothing is unsent yet");
    let answer = Encoded {
        head: vec![0; 64],
        tail: vec![BufSlice::copy_of(&vec![0; 3 << 19])],
    };
    bench
        .listener
        .answer(at(2), CONN, first.seq, answer, &mut bench.net);
    assert!(bench.listener.next_frame().is_none(), "too much is unsent");
    let other = ConnId {
        slot: 2,
        generation: 1,
    };
    bench.listener.accepted(at(3), other, peer(), &mut bench.net);
    bench.receive(other, &request(9));
    assert_eq!(bench.frames().len(), 1, "a first frame gets through");
    bench.listener.sent(at(4), CONN, 3 << 19, &mut bench.net);
    assert_eq!(bench.frames().len(), 2, "it goes on once it reads");
}
