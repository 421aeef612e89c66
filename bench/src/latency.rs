//! Latencies of one measurement: an HDR histogram in nanoseconds, printed as percentiles in microseconds.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Everything longer counts as this; nothing measured here may take a minute.
const LONGEST: Duration = Duration::from_secs(60);

/// Latencies recorded so far; three significant digits from 1 ns to 60 s.
#[derive(Debug, Clone)]
pub struct Latencies(Histogram<u64>);

impl Latencies {
    /// None yet.
    #[must_use]
    pub fn new() -> Latencies {
        let bounds = Histogram::new_with_bounds(1, LONGEST.as_nanos() as u64, 3);
        Latencies(bounds.expect("1 ns to 60 s with three digits is within the histogram's range"))
    }

    /// Records one latency.
    pub fn record(&mut self, latency: Duration) {
        self.0.saturating_record(latency.as_nanos() as u64);
    }

    /// Adds all latencies of `other`.
    pub fn add(&mut self, other: &Latencies) {
        self.0.add(&other.0).expect("both have the same bounds");
    }

    /// How many were recorded.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The percentiles of the report.
    #[must_use]
    pub fn percentiles(&self) -> Percentiles {
        let at = |quantile: f64| self.0.value_at_quantile(quantile) as f64 / 1_000.0;
        Percentiles {
            count: self.0.len(),
            p50_us: at(0.5),
            p95_us: at(0.95),
            p99_us: at(0.99),
            p99_9_us: at(0.999),
            p99_99_us: at(0.9999),
            max_us: self.0.max() as f64 / 1_000.0,
        }
    }
}

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies::new()
    }
}

/// Percentiles in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Percentiles {
    pub count: u64,
    pub p50_us: f64,
    pub p95_us: f64,
    pub p99_us: f64,
    pub p99_9_us: f64,
    pub p99_99_us: f64,
    pub max_us: f64,
}

impl fmt::Display for Percentiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Percentiles {
            count,
            p50_us,
            p95_us,
            p99_us,
            p99_9_us,
            p99_99_us,
            max_us,
        } = self;
        write!(
            f,
            "p50 {p50_us:.0} us, p95 {p95_us:.0}, p99 {p99_us:.0}, p99.9 {p99_9_us:.0}, p99.99 {p99_99_us:.0}, \
             max {max_us:.0} ({count} samples)"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_microseconds() {
        let mut latencies = Latencies::new();
        for us in 1..=1000 {
            latencies.record(Duration::from_micros(us));
        }
        let p = latencies.percentiles();
        assert_eq!(p.count, 1000);
        assert!(
            (p.p50_us - 500.0).abs() < 1.0 && (p.p99_us - 990.0).abs() < 2.0,
            "{p}"
        );
        assert!((p.max_us - 1000.0).abs() < 2.0, "{p}");
    }

    #[test]
    fn a_latency_beyond_the_longest_is_kept_as_the_longest() {
        let mut latencies = Latencies::new();
        latencies.record(Duration::from_secs(3600));
        assert_eq!(latencies.count(), 1);
        assert!(latencies.percentiles().max_us >= 59e6);
    }
}
