//! Batches for benchmarks: built once, sent many times.

use std::time::{SystemTime, UNIX_EPOCH};

use ringfence_engine::batch::{BatchBuilder, NewRecord};
use ringfence_engine::io::buf::BufSlice;

use crate::device::noise;

/// A batch without producer identity of about `batch_bytes`, of records of `record_bytes` each (at least one), with
/// values that no device compresses. `number` makes batches differ.
#[must_use]
pub fn batch(batch_bytes: usize, record_bytes: usize, number: usize) -> BufSlice {
    // Header of the batch, and what a record adds to its value: lengths and deltas.
    const HEADER: usize = 61;
    const RECORD: usize = 12;
    let values = noise(record_bytes + number * 8);
    let value = &values[number * 8..];
    let value = &value[..value
        .len()
        .min(batch_bytes.saturating_sub(HEADER + RECORD))
        .max(1)];
    let count = (batch_bytes.saturating_sub(HEADER) / (value.len() + RECORD)).max(1);
    // An old time would set retention off in the middle of a measurement.
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_ms = now.map_or(0, |since| since.as_millis() as i64);
    let mut builder = BatchBuilder::new();
    for _ in 0..count {
        let record = NewRecord {
            timestamp: now_ms,
            key: None,
            value: Some(value),
            headers: &[],
        };
        builder
            .push(record)
            .expect("a benchmark's batch is below the engine's limit");
    }
    BufSlice::copy_of(&builder.finish().expect("count is at least one"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_about_the_size_asked_for() {
        for (batch_bytes, record_bytes) in [
            (1 << 10, 1 << 10),
            (4 << 10, 4 << 10),
            (1 << 20, 1 << 10),
            (512 << 10, 100),
        ] {
            let size = batch(batch_bytes, record_bytes, 3).len();
            assert!(
                size <= batch_bytes && size * 10 >= batch_bytes * 9,
                "{size} for {batch_bytes}"
            );
        }
        assert_ne!(batch(4096, 1024, 0)[..], batch(4096, 1024, 1)[..]);
    }
}
