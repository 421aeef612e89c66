//! The network's share of an acknowledgement: a request of a size to an echo thread and a small answer back.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::latency::{Latencies, Percentiles};

/// Bytes of the answer: about what an acknowledgement has.
const ANSWER: usize = 90;

/// Round trips of `size` bytes and a small answer at `per_second`, `count` of them, with the other end on `core`.
///
/// # Errors
/// When the loopback device fails.
pub fn round_trips(size: usize, per_second: f64, count: u64, core: usize) -> io::Result<Percentiles> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let echo = thread::spawn(move || answer(&listener, size, core));
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let request = vec![0x5a; size];
    let mut latencies = Latencies::new();
    let start = Instant::now();
    for number in 0..count {
        let due = start + Duration::from_secs_f64(number as f64 / per_second);
        while Instant::now() < due {
            std::hint::spin_loop();
        }
        let mut sent = 0;
        while sent < size {
            sent += retry(|| stream.write(&request[sent..]))?;
        }
        let mut left = ANSWER;
        while left > 0 {
            left -= match retry(|| stream.read(&mut [0; ANSWER][..left]))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => count,
            };
        }
        latencies.record(due.elapsed());
    }
    drop(stream);
    echo.join().expect("the echo thread does not panic")?;
    Ok(latencies.percentiles())
}

/// Polls as the load generator does.
fn retry<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
            other => return other,
        }
    }
}

fn answer(listener: &TcpListener, size: usize, core: usize) -> io::Result<()> {
    affinity::set_thread_affinity([core]).map_err(|error| io::Error::other(error.to_string()))?;
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut request = vec![0; size];
    loop {
        match stream.read_exact(&mut request) {
            Ok(()) => stream.write_all(&[0x5a; ANSWER])?,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_trip_is_counted() {
        let found = round_trips(1024, 2000.0, 50, 0).expect("the loopback device works");
        assert_eq!(found.count, 50);
        assert!(found.p50_us > 0.0);
    }
}
