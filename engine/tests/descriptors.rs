//! A process without free descriptors: alone in its test binary, since it takes them all.

use std::fs::File;
use std::net::TcpStream;

use ringfence_engine::io::NetEvent;
use ringfence_engine::io::uring::{IoEvent, Reactor, RingConfig};

#[test]
fn accepting_without_descriptors_waits_and_recovers() {
    let dir = tempfile::TempDir::new().unwrap();
    let mut reactor = Reactor::new(&RingConfig::new(dir.path())).unwrap();
    let (_, addr) = reactor.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let client = TcpStream::connect(addr).unwrap();

    let mut taken = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        taken.push(file);
    }
    let before = reactor.stats();
    let until = reactor.now().mono + 50_000_000;
    while reactor.now().mono < until {
        reactor
            .turn(Some(until), &mut |event| panic!("{event:?}"))
            .unwrap();
    }
    let during = reactor.stats();
    assert_eq!(during.accept_errors, 1);
    assert!(during.enters - before.enters < 10, "the loop spins");

    drop(taken);
    let mut accepted = false;
    while !accepted {
        reactor
            .turn(None, &mut |event| {
                accepted = matches!(event, IoEvent::Net(NetEvent::Accepted { .. }));
            })
            .unwrap();
    }
    drop(client);
}
