//! Brokers as real processes on the real kernel: bad input, bad days, kills, topics, the command line.
//!
//! Each test has a broker and a data directory of its own and leaves neither behind.

mod bad_days;
mod bad_input;
mod commands;
mod full_disk;
mod kills;
mod topics;

use ringfence_engine::types::{PartitionId, TopicId};
use ringfence_tests::batch::{self, Producer};
use ringfence_tests::native::Native;
use ringfence_tests::process::{Broker, Setup, scratch};
use tempfile::TempDir;

/// A broker with its folder. The broker goes first when both are dropped.
struct Fixture {
    broker: Broker,
    dir: TempDir,
}

/// Settings of all tests: a journal small enough to be made at every start and to wrap in every second test.
fn setup(dir: &TempDir) -> Setup {
    Setup::new(dir.path())
        .config("log.journal.bytes", "134217728")
        .config("log.memory.bytes", "134217728")
}

impl Fixture {
    /// A fresh broker of one shard.
    fn new() -> Fixture {
        Fixture::with(|setup| setup)
    }

    /// A fresh broker with changed settings.
    fn with(change: impl FnOnce(Setup) -> Setup) -> Fixture {
        let dir = scratch();
        let broker = change(setup(&dir)).start();
        Fixture { broker, dir }
    }

    /// A connection to shard 0.
    fn connect(&self) -> Native {
        Native::connect(self.broker.setup.native, Some(0)).expect("the broker takes connections")
    }

    /// Resident memory of the broker in bytes.
    fn resident(&self) -> u64 {
        self.broker.memory("VmRSS").expect("the broker runs")
    }
}

/// Partition `index` of `topic`.
fn partition(topic: TopicId, index: u32) -> PartitionId {
    PartitionId { topic, index }
}

/// A batch without producer identity.
fn plain(values: &[&[u8]]) -> Vec<u8> {
    batch::build(values, 1_700_000_000_000, Producer::NONE)
}

/// Values of all records from offset 0.
fn values(native: &mut Native, partition: PartitionId) -> Vec<Vec<u8>> {
    let records = batch::records(&native.read_all(partition, 0));
    for (expected, record) in records.iter().enumerate() {
        assert_eq!(record.offset, expected as i64, "offsets have no gap");
    }
    records
        .into_iter()
        .map(|record| record.value.expect("no null value was written"))
        .collect()
}
