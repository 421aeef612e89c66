//! When each batch is due: the open loop of a rate, or as fast as a window of batches in flight allows.

use std::time::{Duration, Instant};

/// How batches follow each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// So many batches per second, evenly, whatever the broker does; latency counts from the due time.
    PerSecond(f64),
    /// Always this many in flight per connection; latency counts from sending.
    Window(usize),
}

/// When a run is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// After so many bytes of batches.
    Bytes(u64),
    /// After so long.
    Time(Duration),
}

/// Hands out the batches of a run, one after the other.
#[derive(Debug)]
pub struct Schedule {
    start: Instant,
    interval: Option<Duration>,
    length: Length,
    batch_bytes: u64,
    issued: u64,
}

impl Schedule {
    /// A run that begins at `start`.
    #[must_use]
    pub fn new(pace: Pace, length: Length, batch_bytes: u64, start: Instant) -> Schedule {
        let interval = match pace {
            Pace::PerSecond(rate) => Some(Duration::from_secs_f64(1.0 / rate)),
            Pace::Window(_) => None,
        };
        Schedule {
            start,
            interval,
            length,
            batch_bytes,
            issued: 0,
        }
    }

    /// The next batch, when it is due by `now`: its number and the moment it should leave.
    pub fn next(&mut self, now: Instant) -> Option<(u64, Instant)> {
        let due = match self.interval {
            Some(interval) => self.start + interval.mul_f64(self.issued as f64),
            None => now,
        };
        if due > now || self.finished(now) {
            return None;
        }
        let number = self.issued;
        self.issued += 1;
        Some((number, due))
    }

    /// When the next batch is due; `None` when a window, not the time, decides.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        let interval = self.interval?;
        Some(self.start + interval.mul_f64(self.issued as f64))
    }

    /// Whether nothing more will be issued.
    #[must_use]
    pub fn finished(&self, now: Instant) -> bool {
        match self.length {
            Length::Bytes(bytes) => self.issued * self.batch_bytes >= bytes,
            Length::Time(time) => now >= self.start + time,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_generator_gets_the_times_it_missed() {
        let start = Instant::now();
        let mut schedule = Schedule::new(Pace::PerSecond(1000.0), Length::Bytes(300), 100, start);
        assert_eq!(schedule.next(start), Some((0, start)));
        assert_eq!(schedule.next(start), None);
        let late = start + Duration::from_millis(10);
        assert_eq!(schedule.next(late), Some((1, start + Duration::from_millis(1))));
        assert_eq!(schedule.next(late), Some((2, start + Duration::from_millis(2))));
        assert_eq!(schedule.next(late), None);
        assert!(schedule.finished(late));
    }

    #[test]
    fn a_window_is_always_due_until_the_time_is_up() {
        let start = Instant::now();
        let mut schedule = Schedule::new(Pace::Window(4), Length::Time(Duration::from_secs(1)), 1, start);
        assert_eq!(schedule.next(start), Some((0, start)));
        assert_eq!(schedule.next(start + Duration::from_secs(2)), None);
    }
}
