//! A process without free descriptors: alone in its test binary, since it takes them all.

use std::fs::File;
use std::net::TcpStream;
use std::sync::Mutex;

use ringfence_engine::io::uring::{IoEvent, Reactor, RingConfig};
use ringfence_engine::io::{Disk, DiskOp, NetEvent};

/// One test at a time has the descriptors.
static ALL: Mutex<()> = Mutex::new(());

fn take_all() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// A sync that fails ends the shard, so the lack of descriptors must not make one fail.
#[test]
fn everything_is_synced_without_descriptors() {
    let _alone = ALL.lock().unwrap();
    let dir = tempfile::TempDir::new().unwrap();
    let mut reactor = Reactor::new(&RingConfig::new(dir.path())).unwrap();
    let taken = take_all();
    let results = reactor.run(vec![DiskOp::SyncAll]).unwrap();
    drop(taken);
    assert!(matches!(results[..], [Ok(_)]), "{results:?}");
}

#[test]
fn accepting_without_descriptors_waits_and_recovers() {
    let _alone = ALL.lock().unwrap();
    let dir = tempfile::TempDir::new().unwrap();
    let mut reactor = Reactor::new(&RingConfig::new(dir.path())).unwrap();
    let (_, addr) = reactor.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let client = TcpStream::connect(addr).unwrap();

    let taken = take_all();
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
