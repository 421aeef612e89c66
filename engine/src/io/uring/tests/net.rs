//! The reactor's connections against real sockets.

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread::JoinHandle;

use tempfile::TempDir;

use crate::io::buf::{AppendBuf, BufSlice};
use crate::io::mailbox::mesh;
use crate::io::uring::{IoEvent, Reactor, RingConfig};
use crate::io::{ConnId, Disk, DiskOp, NetEvent, NetOp, Socket};

const SECOND: u64 = 1_000_000_000;

fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn config(dir: &TempDir) -> RingConfig {
    RingConfig::new(dir.path())
}

/// What a test server saw, copied out of the turn.
#[derive(Debug)]
enum Seen {
    Accepted(ConnId),
    Received(ConnId, Vec<u8>),
    Filled(ConnId, AppendBuf),
    Sent(ConnId, usize),
    Closed(ConnId),
    Released(ConnId, Socket),
    Adopted(ConnId, u64),
    Mail,
}

/// One turn; waits at most a few seconds, so that a lost event fails a test instead of hanging it.
fn turn(reactor: &mut Reactor) -> VecDeque<Seen> {
    let until = reactor.now().mono + 20 * SECOND;
    turn_until(reactor, until)
}

fn turn_until(reactor: &mut Reactor, until: u64) -> VecDeque<Seen> {
    let mut seen = VecDeque::new();
    reactor
        .turn(Some(until), &mut |event| {
            seen.push_back(match event {
                IoEvent::Net(NetEvent::Accepted { conn, peer, .. }) => {
                    assert!(peer.ip().is_loopback());
                    Seen::Accepted(conn)
                }
                IoEvent::Net(NetEvent::Received { conn, data }) => Seen::Received(conn, data.to_vec()),
                IoEvent::Net(NetEvent::Filled { conn, buf }) => Seen::Filled(conn, buf),
                IoEvent::Net(NetEvent::Sent { conn, bytes }) => Seen::Sent(conn, bytes),
                IoEvent::Net(NetEvent::Closed { conn }) => Seen::Closed(conn),
                IoEvent::Net(NetEvent::Released { conn, socket }) => Seen::Released(conn, socket),
                IoEvent::Net(NetEvent::Adopted { conn, tag }) => Seen::Adopted(conn, tag),
                IoEvent::Mail => Seen::Mail,
                IoEvent::Disk(other) => panic!("{other:?}"),
            });
        })
        .unwrap();
    assert!(
        seen.front().is_some() || reactor.now().mono < until || until == 0,
        "nothing happened"
    );
    seen
}

/// Bytes that differ at every place and for every seed.
fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|n| (n as u8).wrapping_mul(31) ^ (n >> 8) as u8 ^ seed)
        .collect()
}

fn buffer(bytes: &[u8]) -> BufSlice {
    let mut buf = AppendBuf::with_capacity(bytes.len());
    buf.append(bytes);
    buf.freeze()
}

/// A client that sends `payload`, reads as much back and compares.
fn echo_client(addr: SocketAddr, payload: Vec<u8>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut stream = TcpStream::connect(addr).unwrap();
        let mut writer = stream.try_clone().unwrap();
        let sent = payload.clone();
        let writing = std::thread::spawn(move || writer.write_all(&sent).unwrap());
        let mut back = vec![0; payload.len()];
        stream.read_exact(&mut back).unwrap();
        writing.join().unwrap();
        assert!(back == payload, "the echo differs");
    })
}

/// Echoes until `clients` connections came and went.
fn echo(reactor: &mut Reactor, clients: usize) {
    let (mut accepted, mut closed) = (0, 0);
    while closed < clients {
        for event in turn(reactor) {
            match event {
                Seen::Accepted(_) => accepted += 1,
                Seen::Received(conn, data) => reactor.submit_net(NetOp::Send {
                    conn,
                    bufs: data.chunks(1000).map(BufSlice::copy_of).collect(),
                }),
                Seen::Sent(to, bytes) => assert!(bytes > 0, "{to}"),
                Seen::Closed(_) => closed += 1,
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!((accepted, reactor.connections()), (clients, 0));
    assert_eq!(reactor.stats().stale, 0);
}

fn echo_with(cfg: &RingConfig, clients: usize, bytes: usize) -> Reactor {
    let mut reactor = Reactor::new(cfg).unwrap();
    let (listener, addr) = reactor.listen(loopback()).unwrap();
    assert_eq!(listener, 0);
    let clients: Vec<_> = (0..clients)
        .map(|n| echo_client(addr, pattern(n as u8, bytes)))
        .collect();
    echo(&mut reactor, clients.len());
    clients.into_iter().for_each(|client| client.join().unwrap());
    reactor
}

#[test]
fn many_connections_get_their_own_bytes_back() {
    let dir = TempDir::new().unwrap();
    echo_with(&config(&dir), 100, 200_000);
}

#[test]
fn receives_go_on_after_the_buffers_ran_out() {
    let dir = TempDir::new().unwrap();
    let mut cfg = config(&dir);
    (cfg.recv_buffers, cfg.recv_buffer_bytes) = (2, 512);
    let reactor = echo_with(&cfg, 16, 100_000);
    assert!(
        reactor.stats().out_of_buffers > 0,
        "two buffers suffice for nobody"
    );
}

#[test]
fn a_tiny_ring_serves_all_the_same() {
    let dir = TempDir::new().unwrap();
    let mut cfg = config(&dir);
    (cfg.sq_entries, cfg.cq_entries) = (4, 4);
    echo_with(&cfg, 40, 50_000);
}

#[test]
fn a_turn_that_takes_few_bytes_leaves_the_rest_to_the_next() {
    let dir = TempDir::new().unwrap();
    let mut cfg = config(&dir);
    cfg.turn_bytes = 1;
    echo_with(&cfg, 50, 200_000);
}

fn accept_one(reactor: &mut Reactor) -> (ConnId, TcpStream) {
    let (_, addr) = reactor.listen(loopback()).unwrap();
    let client = TcpStream::connect(addr).unwrap();
    match turn(reactor).pop_front() {
        Some(Seen::Accepted(conn)) => (conn, client),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_paused_connection_pushes_back_and_loses_nothing() {
    let dir = TempDir::new().unwrap();
    let mut reactor = Reactor::new(&config(&dir)).unwrap();
    let (conn, client) = accept_one(&mut reactor);
    let payload = pattern(1, 32 << 20);
    let expect = payload.clone();
    let writer = std::thread::spawn(move || {
        let mut client = client;
        client.write_all(&payload).unwrap();
        client
    });
    let mut got = Vec::new();
    let mut closed = false;
    let mut take = |seen: VecDeque<Seen>, got: &mut Vec<u8>| {
        for event in seen {
            match event {
                Seen::Received(_, data) => got.extend(data),
                Seen::Closed(_) => closed = true,
                other => panic!("{other:?}"),
            }
        }
        closed
    };
    take(turn(&mut reactor), &mut got);
    reactor.submit_net(NetOp::Pause { conn });
    let mut quiet = 0;
    while quiet < 3 {
        let before = got.len();
        let until = reactor.now().mono + 5_000_000;
        let mut seen = VecDeque::new();
        reactor
            .turn(Some(until), &mut |event| {
                if let IoEvent::Net(NetEvent::Received { conn, data }) = event {
                    seen.push_back(Seen::Received(conn, data.to_vec()));
                }
            })
            .unwrap();
        take(seen, &mut got);
        quiet = if got.len() == before { quiet + 1 } else { 0 };
    }
    assert!(got.len() < expect.len(), "the pause held nothing back");
    reactor.submit_net(NetOp::Resume { conn });
    while got.len() < expect.len() {
        take(turn(&mut reactor), &mut got);
    }
    drop(writer.join().unwrap());
    while !take(turn(&mut reactor), &mut got) {}
    assert!(got == expect);
}

/// Reads a stream partly through fills: the bytes in order, and how many fills there were.
fn read_with_fills(
    reactor: &mut Reactor,
    conn: ConnId,
    len: usize,
    fill_of: fn(usize) -> usize,
) -> (Vec<u8>, usize) {
    let (mut got, mut fills, mut filling) = (Vec::new(), 0, 0);
    while got.len() < len {
        for event in turn(reactor) {
            match event {
                Seen::Received(_, data) => {
                    assert_eq!(filling, 0, "a fill comes first");
                    got.extend_from_slice(&data);
                }
                Seen::Filled(of, buf) => {
                    assert_eq!(of, conn);
                    assert_eq!((&buf[..3], buf.len()), (&b"pre"[..], 3 + filling));
                    got.extend_from_slice(&buf[3..]);
                    filling = 0;
                    fills += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        let want = fill_of(got.len()).min(len - got.len());
        if filling == 0 && want > 0 {
            let mut buf = AppendBuf::with_capacity(want + 3);
            buf.append(b"pre");
            filling = want;
            reactor.submit_net(NetOp::Fill { conn, buf, len: want });
        }
    }
    (got, fills)
}

#[test]
fn fills_and_deliveries_together_are_the_stream() {
    let dir = TempDir::new().unwrap();
    let mut reactor = Reactor::new(&config(&dir)).unwrap();
    let (conn, mut client) = accept_one(&mut reactor);
    let payload = pattern(9, 24 << 20);
    let sent = payload.clone();
    let writer = std::thread::spawn(move || {
        client.write_all(&sent).unwrap();
        client
    });
    // Large and small fills, and stretches without any, decided by how far the stream is.
    let fill_of = |got: usize| match got % 7 {
        0 | 1 => 3 << 20,
        2 => 1,
        3 => 70_001,
        _ => 0,
    };
    let (got, fills) = read_with_fills(&mut reactor, conn, payload.len(), fill_of);
    assert!(got == payload, "the stream differs");
    assert!(fills > 0);
    drop(writer.join().unwrap());
    assert!(matches!(turn(&mut reactor).pop_front(), Some(Seen::Closed(_))));
    assert_eq!((reactor.connections(), reactor.stats().stale), (0, 0));
}

#[test]
fn a_connection_that_ends_under_a_fill_is_closed_and_its_buffer_dropped() {
    let dir = TempDir::new().unwrap();
    let mut reactor = Reactor::new(&config(&dir)).unwrap();
    for ours in [false, true] {
        let (conn, mut client) = accept_one(&mut reactor);
        let buf = AppendBuf::with_capacity(1 << 20);
        reactor.submit_net(NetOp::Fill {
            conn,
            buf,
            len: 1 << 20,
        });
        client.write_all(&pattern(1, 1000)).unwrap();
        if ours {
            reactor.submit_net(NetOp::Close { conn, abort: true });
        } else {
            drop(client);
        }
        loop {
            match turn(&mut reactor).pop_front() {
                Some(Seen::Closed(closed)) => break assert_eq!(closed, conn),
                None => {}
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!((reactor.connections(), reactor.stats().stale), (0, 0));
}

#[test]
fn much_is_sent_in_order_and_a_close_waits_for_it() {
    let dir = TempDir::new().unwrap();
    let mut reactor = Reactor::new(&config(&dir)).unwrap();
    let (conn, mut client) = accept_one(&mut reactor);
    let payload = pattern(3, 20 << 20);
    for piece in payload.chunks(7 << 20) {
        let bufs = piece.chunks(100_001).map(buffer).collect();
        reactor.submit_net(NetOp::Send { conn, bufs });
    }
    reactor.submit_net(NetOp::Close { conn, abort: false });
    reactor.submit_net(NetOp::Pause { conn });
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        client.read_to_end(&mut got).unwrap();
        got
    });
    let (mut sent, mut closed) = (0, false);
    while !closed {
        for event in turn(&mut reactor) {
            match event {
                Seen::Sent(_, bytes) => sent += bytes,
                Seen::Closed(_) => closed = true,
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(sent, payload.len());
    assert!(reader.join().unwrap() == payload);
    // Dead ids are ignored.
    reactor.submit_net(NetOp::Close { conn, abort: true });
    reactor.submit_net(NetOp::Release { conn });
    assert!(!reactor.net.has_ready());
}

#[test]
fn an_abort_does_not_wait_for_a_stuck_peer() {
    let dir = TempDir::new().unwrap();
    let mut reactor = Reactor::new(&config(&dir)).unwrap();
    let (conn, client) = accept_one(&mut reactor);
    let bufs = vec![buffer(&pattern(0, 32 << 20))];
    reactor.submit_net(NetOp::Send { conn, bufs });
    // The peer reads nothing, so the send cannot end by itself.
    turn_until(&mut reactor, 0);
    reactor.submit_net(NetOp::Close { conn, abort: true });
    while !matches!(turn(&mut reactor).back(), Some(Seen::Closed(_))) {}
    drop(client);
    assert_eq!(reactor.connections(), 0);
}

#[test]
fn a_peer_that_only_ends_its_side_gets_what_is_queued() {
    let dir = TempDir::new().unwrap();
    let mut reactor = Reactor::new(&config(&dir)).unwrap();
    let (conn, mut client) = accept_one(&mut reactor);
    let bufs = vec![buffer(&pattern(9, 8 << 20))];
    reactor.submit_net(NetOp::Send { conn, bufs });
    client.shutdown(Shutdown::Write).unwrap();
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        client.read_to_end(&mut got).unwrap();
        got
    });
    while !matches!(turn(&mut reactor).back(), Some(Seen::Closed(_))) {}
    assert!(reader.join().unwrap() == pattern(9, 8 << 20));
}

/// The first shard serves until it has seen some bytes, then hands the connection over in mid-stream.
#[test]
fn a_connection_moves_between_shards_without_losing_a_byte() {
    let mut corners = mesh::<(u64, Socket)>(2, 4).unwrap();
    let mut second = corners.pop().unwrap();
    let mut first = corners.pop().unwrap();
    let payload = pattern(7, 8 << 20);
    let (send_addr, receive_addr) = std::sync::mpsc::channel();
    let accepting = std::thread::spawn(move || {
        let dir = TempDir::new().unwrap();
        let mut reactor = Reactor::new(&config(&dir)).unwrap();
        reactor.attach(&first);
        send_addr.send(reactor.listen(loopback()).unwrap().1).unwrap();
        let mut got: HashMap<ConnId, Vec<u8>> = HashMap::new();
        let mut moved = 0;
        while moved < 8 {
            for event in turn(&mut reactor) {
                match event {
                    Seen::Accepted(conn) => drop(got.insert(conn, Vec::new())),
                    Seen::Received(conn, data) => {
                        let bytes = got.get_mut(&conn).unwrap();
                        bytes.extend(data);
                        if bytes.len() > 100_000 {
                            reactor.submit_net(NetOp::Release { conn });
                        }
                    }
                    Seen::Released(conn, socket) => {
                        let len = got[&conn].len() as u64;
                        first.send(1, (len, socket)).unwrap();
                        moved += 1;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        // The last wake goes out with the next turn, or with the end of the reactor.
        drop(reactor);
        got.into_values().collect::<Vec<_>>()
    });
    let expect = payload.clone();
    let adopting = std::thread::spawn(move || {
        let dir = TempDir::new().unwrap();
        let mut reactor = Reactor::new(&config(&dir)).unwrap();
        reactor.attach(&second);
        let mut at: HashMap<ConnId, usize> = HashMap::new();
        let mut closed = 0;
        while closed < 8 {
            for event in turn(&mut reactor) {
                match event {
                    Seen::Mail => {
                        second.drain(|_, (tag, socket)| reactor.submit_net(NetOp::Adopt { socket, tag }));
                    }
                    Seen::Adopted(conn, tag) => drop(at.insert(conn, tag as usize)),
                    Seen::Received(conn, data) => {
                        let pos = at.get_mut(&conn).unwrap();
                        assert!(data == expect[*pos..*pos + data.len()], "at {pos}");
                        *pos += data.len();
                    }
                    Seen::Closed(conn) => {
                        assert_eq!(at[&conn], expect.len());
                        closed += 1;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    });
    let addr = receive_addr.recv().unwrap();
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let payload = payload.clone();
            std::thread::spawn(move || TcpStream::connect(addr).unwrap().write_all(&payload).unwrap())
        })
        .collect();
    let heads = accepting.join().unwrap();
    assert!(heads.iter().all(|head| *head == payload[..head.len()]));
    clients.into_iter().for_each(|client| client.join().unwrap());
    adopting.join().unwrap();
}

/// Two shards that sleep whenever they can, and a thread without a ring, exchange messages; a lost wake ends the turn
/// at its deadline and fails.
#[test]
fn sleeping_shards_miss_no_message() {
    const ROUNDS: u64 = 20_000;
    let mut corners = mesh::<u64>(3, 8).unwrap();
    let mut outside = corners.pop().unwrap();
    let shards: Vec<_> = corners
        .into_iter()
        .enumerate()
        .map(|(me, mut endpoint)| {
            std::thread::spawn(move || {
                let dir = TempDir::new().unwrap();
                let mut reactor = Reactor::new(&config(&dir)).unwrap();
                reactor.attach(&endpoint);
                if me == 0 {
                    endpoint.send(1, 0).unwrap();
                }
                let (mut last, mut from_outside) = (0, 0);
                while last + 2 < ROUNDS || from_outside < ROUNDS / 4 {
                    let mut back = None;
                    for event in turn(&mut reactor) {
                        assert!(matches!(event, Seen::Mail), "{event:?}");
                        endpoint.drain(|from, n| {
                            if from == 2 {
                                assert_eq!(n, from_outside);
                                from_outside += 1;
                            } else {
                                last = n;
                                back = Some(n + 1);
                            }
                        });
                    }
                    if let Some(n) = back.filter(|n| *n < ROUNDS) {
                        endpoint.send(1 - me, n).unwrap();
                    }
                }
                reactor.stats().stale
            })
        })
        .collect();
    for n in 0..ROUNDS / 4 {
        for shard in 0..2 {
            while outside.send(shard, n).is_err() {
                std::thread::yield_now();
            }
        }
    }
    for shard in shards {
        assert_eq!(shard.join().unwrap(), 0);
    }
}

#[test]
fn a_waker_of_another_thread_wakes_a_sleeping_shard() {
    let dir = TempDir::new().unwrap();
    let corner = mesh::<()>(1, 1).unwrap().remove(0);
    let mut reactor = Reactor::new(&config(&dir)).unwrap();
    reactor.attach(&corner);
    let waker = corner.waker();
    for _ in 0..100 {
        let waker = waker.clone();
        let thread = std::thread::spawn(move || waker.wake());
        while turn(&mut reactor).is_empty() {}
        thread.join().unwrap();
    }
}

#[test]
fn mail_that_comes_during_start_up_is_told_afterwards() {
    let dir = TempDir::new().unwrap();
    let mut corner = mesh::<u8>(1, 1).unwrap().remove(0);
    let mut reactor = Reactor::new(&config(&dir)).unwrap();
    reactor.attach(&corner);
    corner.send(0, 7).unwrap();
    let list = DiskOp::List { path: String::new() };
    assert!(reactor.run(vec![list]).unwrap()[0].is_ok());
    assert!(matches!(turn(&mut reactor).pop_front(), Some(Seen::Mail)));
    assert_eq!(corner.drain(|_, message| assert_eq!(message, 7)), 1);
}

#[test]
fn a_listener_that_stops_refuses_and_lets_connections_live() {
    let dir = TempDir::new().unwrap();
    let mut reactor = Reactor::new(&config(&dir)).unwrap();
    let (_, addr) = reactor.listen(loopback()).unwrap();
    let mut client = TcpStream::connect(addr).unwrap();
    let Some(Seen::Accepted(conn)) = turn(&mut reactor).pop_front() else {
        panic!("no connection")
    };
    reactor.stop_listening();
    let until = reactor.now().mono + 1_000_000;
    reactor.turn(Some(until), &mut |_| {}).unwrap();
    assert!(TcpStream::connect(addr).is_err());
    client.write_all(b"still here").unwrap();
    match turn(&mut reactor).pop_front() {
        Some(Seen::Received(from, data)) => assert_eq!((from, &data[..]), (conn, &b"still here"[..])),
        other => panic!("{other:?}"),
    }
}

#[test]
fn two_reactors_share_a_port() {
    let dir = TempDir::new().unwrap();
    let mut first = Reactor::new(&config(&dir)).unwrap();
    let mut second = Reactor::new(&config(&dir)).unwrap();
    let (_, addr) = first.listen(loopback()).unwrap();
    assert_eq!(second.listen(addr).unwrap().1, addr);
}
