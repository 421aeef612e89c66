//! A round trip over loopback TCP without any of our code: what the kernel alone costs a request.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::latency::{Latencies, Percentiles};

/// `count` round trips of `size` bytes each way, `per_second` of them, evenly, between two threads.
///
/// # Errors
/// When loopback does not work.
pub fn round_trips(size: usize, per_second: f64, count: u64) -> io::Result<Percentiles> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    client.set_nodelay(true)?;
    let (server, _) = listener.accept()?;
    server.set_nodelay(true)?;
    let echo = thread::Builder::new()
        .name("loopback-echo".into())
        .spawn(move || echo(server, size, count))?;
    let mut latencies = Latencies::new();
    let mut message = vec![0x5a; size];
    let start = Instant::now();
    for number in 0..count {
        let due = start + Duration::from_secs_f64(number as f64 / per_second);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let sent = Instant::now();
        client.write_all(&message)?;
        client.read_exact(&mut message)?;
        latencies.record(sent.elapsed());
    }
    echo.join()
        .map_err(|_| io::Error::other("the echo thread panicked"))??;
    Ok(latencies.percentiles())
}

fn echo(mut stream: TcpStream, size: usize, count: u64) -> io::Result<()> {
    let mut message = vec![0; size];
    for _ in 0..count {
        stream.read_exact(&mut message)?;
        stream.write_all(&message)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_trip_is_counted() {
        let trips = round_trips(4096, 10_000.0, 50).expect("loopback works");
        assert_eq!(trips.count, 50);
        assert!(trips.p50_us > 0.0 && trips.p50_us <= trips.max_us);
    }
}
