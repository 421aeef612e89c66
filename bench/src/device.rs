//! The device as the journal uses it: O_DIRECT and O_DSYNC writes over a zero-filled file, through the engine's reactor.
//!
//! This is the ceiling that every other figure stands beside. The file wraps like a journal: after the first pass all
//! writes are pure overwrites.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use ringfence_engine::io::buf::{AppendBuf, BufSlice};
use ringfence_engine::io::uring::{IoEvent, Reactor, RingConfig, RingError};
use ringfence_engine::io::{Disk, DiskError, DiskGone, DiskOp, FileClass, FileId, OpId, OpenHow};
use serde::Serialize;
use thiserror::Error;

use crate::latency::{Latencies, Percentiles};

const NAME: &str = "device.tmp";
const FILE: FileId = FileId(0);
const ZERO_CHUNK: usize = 4 << 20;

/// Why the device could not be measured.
#[derive(Debug, Error)]
pub enum DeviceError {
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error(transparent)]
    Gone(#[from] DiskGone),
    #[error("the test file failed: {0}")]
    Disk(#[from] DiskError),
}

/// Throughput and latency of synced writes of one size.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Synced {
    /// Bytes of one write.
    pub write_bytes: usize,
    /// Writes in flight.
    pub depth: usize,
    /// Bytes per second / 10^6.
    pub mb_per_s: f64,
    /// From submission to completion.
    pub latency: Percentiles,
}

/// An open test file on the device.
pub struct Device {
    reactor: Reactor,
    file_bytes: u64,
    position: u64,
    next_op: u64,
}

impl Device {
    /// Makes and zero-fills a test file of `file_bytes` in `dir`.
    ///
    /// # Errors
    /// When the ring or the file system refuses.
    pub fn open(dir: &Path, file_bytes: u64) -> Result<Device, DeviceError> {
        let mut reactor = Reactor::new(&RingConfig::new(dir))?;
        let how = OpenHow {
            class: FileClass::Journal,
            create: true,
            write: true,
        };
        let open = DiskOp::Open {
            file: FILE,
            path: NAME.into(),
            how,
        };
        run(&mut reactor, vec![open])?;
        let zeros = zeros(ZERO_CHUNK);
        for pos in (0..file_bytes).step_by(ZERO_CHUNK) {
            run(&mut reactor, vec![write(pos, &zeros)])?;
        }
        run(&mut reactor, vec![DiskOp::Sync { file: FILE }])?;
        Ok(Device {
            reactor,
            file_bytes,
            position: 0,
            next_op: 0,
        })
    }

    /// Keeps `depth` writes of `size` bytes (a multiple of the block) in flight until `total` bytes are written.
    ///
    /// # Errors
    /// When a write fails.
    pub fn stream(&mut self, size: usize, depth: usize, total: u64) -> Result<Synced, DeviceError> {
        let data = noise(size);
        let writes = (total / size as u64).max(1);
        let mut latencies = Latencies::new();
        let mut sent = HashMap::new();
        let mut issued = 0;
        let start = Instant::now();
        while issued < writes || !sent.is_empty() {
            while issued < writes && sent.len() < depth {
                let op = self.submit(size, &data);
                sent.insert(op, Instant::now());
                issued += 1;
            }
            self.turn(None, &mut sent, &mut latencies)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(Synced {
            write_bytes: size,
            depth,
            mb_per_s: (writes * size as u64) as f64 / seconds / 1e6,
            latency: latencies.percentiles(),
        })
    }

    /// `count` single writes of `size` bytes, `per_second` of them, evenly: what an idle machine needs for one.
    ///
    /// # Errors
    /// When a write fails.
    pub fn paced(&mut self, size: usize, per_second: f64, count: u64) -> Result<Synced, DeviceError> {
        let data = noise(size);
        let mut latencies = Latencies::new();
        let mut sent = HashMap::new();
        let start = Instant::now();
        for number in 0..count {
            let due = start + Duration::from_secs_f64(number as f64 / per_second);
            while let Some(left) = due
                .checked_duration_since(Instant::now())
                .filter(|left| !left.is_zero())
            {
                let until = self.reactor.now().mono + left.as_nanos() as u64;
                self.turn(Some(until), &mut sent, &mut latencies)?;
            }
            let op = self.submit(size, &data);
            sent.insert(op, Instant::now());
            while !sent.is_empty() {
                self.turn(None, &mut sent, &mut latencies)?;
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(Synced {
            write_bytes: size,
            depth: 1,
            mb_per_s: (count * size as u64) as f64 / seconds / 1e6,
            latency: latencies.percentiles(),
        })
    }

    fn submit(&mut self, size: usize, data: &BufSlice) -> OpId {
        if self.position + size as u64 > self.file_bytes {
            self.position = 0;
        }
        let op = OpId(self.next_op);
        self.next_op += 1;
        self.reactor.submit_disk(op, write(self.position, data));
        self.position += size as u64;
        op
    }

    fn turn(
        &mut self,
        until: Option<u64>,
        sent: &mut HashMap<OpId, Instant>,
        latencies: &mut Latencies,
    ) -> Result<(), DeviceError> {
        let mut failed = None;
        self.reactor.turn(until, &mut |event| {
            if let IoEvent::Disk(completion) = event {
                failed = failed.or(completion.result.err());
                if let Some(since) = sent.remove(&completion.op) {
                    latencies.record(since.elapsed());
                }
            }
        })?;
        failed.map_or(Ok(()), |error| Err(error.into()))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A file left behind is only untidy.
        let _ = run(&mut self.reactor, vec![DiskOp::Close { file: FILE }]);
        let _ = run(&mut self.reactor, vec![DiskOp::Unlink { path: NAME.into() }]);
    }
}

fn run(reactor: &mut Reactor, ops: Vec<DiskOp>) -> Result<(), DeviceError> {
    for result in reactor.run(ops)? {
        result?;
    }
    Ok(())
}

fn write(pos: u64, data: &BufSlice) -> DiskOp {
    DiskOp::Write {
        file: FILE,
        pos,
        bufs: vec![data.clone()],
    }
}

fn zeros(size: usize) -> BufSlice {
    let mut buf = AppendBuf::with_capacity(size);
    buf.append_zeros(size);
    buf.freeze()
}

/// Bytes that no device compresses, the same in every run.
#[must_use]
pub fn noise(size: usize) -> BufSlice {
    let mut seed = 0x2545_f491_4f6c_dd1du64;
    let mut buf = AppendBuf::with_capacity(size);
    while buf.len() < size {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        let bytes = seed.to_le_bytes();
        let count = bytes.len().min(size - buf.len());
        buf.append(&bytes[..count]);
    }
    buf.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_the_size_asked_for_and_repeats() {
        for size in [1, 7, 4096, 10_001] {
            assert_eq!(noise(size).len(), size);
        }
        assert_eq!(noise(64)[..], noise(64)[..]);
        assert_ne!(noise(16)[..8], noise(16)[8..]);
    }

    #[test]
    fn writes_are_counted_and_the_file_is_removed() {
        let dir = ringfence_tests::process::scratch();
        let mut device = Device::open(dir.path(), 8 << 20).expect("the build's disk takes a file");
        let stream = device.stream(64 << 10, 4, 20 << 20).expect("writes succeed");
        assert_eq!(stream.latency.count, 320);
        assert!(stream.mb_per_s > 0.0);
        let paced = device.paced(4096, 1000.0, 20).expect("writes succeed");
        assert_eq!(paced.latency.count, 20);
        drop(device);
        assert_eq!(std::fs::read_dir(dir.path()).expect("readable").count(), 0);
    }
}
