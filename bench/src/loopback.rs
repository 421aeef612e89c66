//! A round trip over loopback TCP without any of our code: what the kernel alone costs a request.
//!
//! Both ends sleep in the kernel, as a broker and the load generator do; the asking side spins only for the last moments
//! before a request is due.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::latency::{Latencies, Percentiles};

/// The last moments before a request are spun away: more than a timer is late.
const SPIN: Duration = Duration::from_micros(150);

/// What goes over loopback.
#[derive(Debug, Clone, Copy)]
pub struct Trips {
    /// Bytes of a request.
    pub request: usize,
    /// Bytes of its answer.
    pub answer: usize,
    /// Round trips per second, evenly.
    pub per_second: f64,
    /// How many.
    pub count: u64,
    /// Core of the answering thread; `None` leaves it to the kernel.
    pub core: Option<usize>,
}

/// Makes the round trips.
///
/// # Errors
/// When loopback does not work.
pub fn round_trips(trips: Trips) -> io::Result<Percentiles> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let echo = thread::spawn(move || answer(&listener, trips));
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let request = vec![0x5a; trips.request];
    let mut received = vec![0; trips.answer];
    let mut latencies = Latencies::new();
    let start = Instant::now();
    for number in 0..trips.count {
        let due = start + Duration::from_secs_f64(number as f64 / trips.per_second);
        let early = due.saturating_duration_since(Instant::now()).saturating_sub(SPIN);
        if !early.is_zero() {
            thread::sleep(early);
        }
        while Instant::now() < due {
            std::hint::spin_loop();
        }
        stream.write_all(&request)?;
        stream.read_exact(&mut received)?;
        latencies.record(due.elapsed());
    }
    drop(stream);
    echo.join().expect("the echo thread does not panic")?;
    Ok(latencies.percentiles())
}

fn answer(listener: &TcpListener, trips: Trips) -> io::Result<()> {
    if let Some(core) = trips.core {
        affinity::set_thread_affinity([core]).map_err(|error| io::Error::other(error.to_string()))?;
    }
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut request = vec![0; trips.request];
    let answer = vec![0x5a; trips.answer];
    loop {
        match stream.read_exact(&mut request) {
            Ok(()) => stream.write_all(&answer)?,
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
        let found = round_trips(Trips {
            request: 4096,
            answer: 90,
            per_second: 2000.0,
            count: 50,
            core: None,
        });
        let found = found.expect("loopback works");
        assert_eq!(found.count, 50);
        assert!(found.p50_us > 0.0);
    }
}
