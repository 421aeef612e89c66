//! Admin HTTP: `/metrics`, `/livez`, `/readyz`, answered on the control thread.
//!
//! A small server for GET of fixed pages: one request per connection, bounded in number, size and time. Figures are
//! read from the shards' [`ShardStats`] without stopping them.

use std::cell::Cell;
use std::fmt;
use std::net::Shutdown;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio_uring::net::{TcpListener, TcpStream};

use crate::error::WireError;
use crate::native::Api;
use crate::stats::{BOUNDS, Histogram, Kind, METRICS, ShardStats};

/// Connections served at once; more are closed.
const MAX_CONNECTIONS: usize = 64;
/// Longest request head.
const MAX_REQUEST: usize = 8 << 10;
/// Time for a whole exchange.
const PATIENCE: Duration = Duration::from_secs(5);
/// A shard that has not looked at its clock for this long is stuck.
const STUCK: Duration = Duration::from_secs(10);

/// What the pages tell.
#[derive(Debug)]
pub(super) struct Health {
    /// Why the node is not ready; empty when it is.
    not_ready: std::cell::RefCell<String>,
    stats: Vec<Arc<ShardStats>>,
    registry: Registry,
}

impl Health {
    /// Not ready yet.
    pub(super) fn new(stats: Vec<Arc<ShardStats>>) -> Health {
        let mut registry = Registry::with_prefix("ringfence");
        registry.register(
            "build",
            "Version of this program",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        registry.register_collector(Box::new(Figures(stats.clone())));
        Health {
            not_ready: std::cell::RefCell::new("starting".to_owned()),
            stats,
            registry,
        }
    }

    /// The node serves.
    pub(super) fn ready(&self) {
        self.not_ready.borrow_mut().clear();
    }

    /// The node does not serve, or not as it should.
    pub(super) fn not_ready(&self, why: impl Into<String>) {
        *self.not_ready.borrow_mut() = why.into();
    }

    /// A shard's loop that does not turn.
    fn stuck(&self) -> Option<usize> {
        let now = ringfence_engine::io::uring::now().mono;
        let limit = STUCK.as_nanos() as u64;
        self.stats
            .iter()
            .position(|stats| now.saturating_sub(stats.turned_at.get()) > limit && stats.turned_at.get() > 0)
    }

    fn page(&self, path: &str) -> (u16, &'static str, String) {
        const TEXT: &str = "text/plain; charset=utf-8";
        match path {
            "/livez" => match self.stuck() {
                None => (200, TEXT, "ok\n".to_owned()),
                Some(shard) => (503, TEXT, format!("shard {shard} does not turn\n")),
            },
            "/readyz" => match (self.not_ready.borrow().as_str(), self.stuck()) {
                ("", None) => (200, TEXT, "ok\n".to_owned()),
                ("", Some(shard)) => (503, TEXT, format!("shard {shard} does not turn\n")),
                (why, _) => (503, TEXT, format!("{why}\n")),
            },
            "/metrics" => {
                let mut text = String::new();
                match encode(&mut text, &self.registry) {
                    Ok(()) => (
                        200,
                        "application/openmetrics-text; version=1.0.0; charset=utf-8",
                        text,
                    ),
                    Err(fmt::Error) => (500, TEXT, "the metrics cannot be written\n".to_owned()),
                }
            }
            _ => (404, TEXT, "pages: /metrics /livez /readyz\n".to_owned()),
        }
    }
}

/// The shards' figures, summed over the shards.
#[derive(Debug)]
struct Figures(Vec<Arc<ShardStats>>);

impl Figures {
    fn total(&self, get: impl Fn(&ShardStats) -> u64) -> u64 {
        self.0.iter().map(|stats| get(stats)).sum()
    }

    fn histogram(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        get: impl Fn(&ShardStats) -> &Histogram,
    ) -> fmt::Result {
        let (mut counts, mut sum) = ([0u64; BOUNDS.len() + 1], 0u64);
        for (part, nanos) in self.0.iter().map(|stats| get(stats).read()) {
            counts.iter_mut().zip(part).for_each(|(total, n)| *total += n);
            sum += nanos;
        }
        let bounds = BOUNDS.iter().map(|nanos| *nanos as f64 / 1e9);
        let buckets: Vec<(f64, u64)> = bounds.chain([f64::INFINITY]).zip(counts).collect();
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(sum as f64 / 1e9, counts.iter().sum(), &buckets, None)
    }
}

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for metric in METRICS {
            let value = self.total(metric.get);
            match metric.kind {
                Kind::Counter => {
                    let counter = ConstCounter::new(value);
                    let out =
                        encoder.encode_descriptor(metric.name, metric.help, None, counter.metric_type())?;
                    counter.encode(out)?;
                }
                Kind::Gauge => {
                    let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
                    let out =
                        encoder.encode_descriptor(metric.name, metric.help, None, gauge.metric_type())?;
                    gauge.encode(out)?;
                }
            }
        }
        let mut family =
            encoder.encode_descriptor("requests", "Requests by api", None, MetricType::Counter)?;
        for (at, api) in Api::ALL.iter().enumerate() {
            let count = ConstCounter::new(self.total(|stats| stats.requests[at].get()));
            count.encode(family.encode_family(&[("api", api.name())])?)?;
        }
        let mut family = encoder.encode_descriptor("errors", "Errors sent", None, MetricType::Counter)?;
        for (at, error) in WireError::ALL.iter().enumerate() {
            let count = ConstCounter::new(self.total(|stats| stats.errors[at].get()));
            count.encode(family.encode_family(&[("error", error.name())])?)?;
        }
        self.histogram(
            &mut encoder,
            "journal_write_seconds",
            "From submission to completion of journal writes",
            |stats| &stats.journal_write_latency,
        )?;
        self.histogram(
            &mut encoder,
            "produce_seconds",
            "From a whole produce request to its answer",
            |stats| &stats.produce_latency,
        )
    }
}

/// Serves pages until the runtime ends.
pub(super) async fn serve(listener: TcpListener, health: Rc<Health>) {
    let open = Rc::new(Cell::new(0usize));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "admin listener: accept failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if open.get() >= MAX_CONNECTIONS {
            continue;
        }
        open.set(open.get() + 1);
        let (health, open) = (Rc::clone(&health), Rc::clone(&open));
        tokio_uring::spawn(async move {
            if tokio::time::timeout(PATIENCE, exchange(&stream, &health))
                .await
                .is_err()
            {
                tracing::debug!("admin connection closed: too slow");
            }
            // Ends a read or write that a timeout left in the kernel; a peer that is gone already is fine.
            let _ = stream.shutdown(Shutdown::Both);
            open.set(open.get() - 1);
        });
    }
}

/// One request and its answer; errors of the connection end it.
async fn exchange(stream: &TcpStream, health: &Health) {
    let mut head = Vec::new();
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        let (result, chunk) = stream.read(Vec::with_capacity(1024)).await;
        match result {
            Ok(count) if count > 0 && head.len() + count <= MAX_REQUEST => head.extend_from_slice(&chunk),
            _ => return,
        }
    }
    let (status, kind, body) = match request_path(&head) {
        Some(path) => health.page(path),
        None => (
            405,
            "text/plain; charset=utf-8",
            "only GET is served\n".to_owned(),
        ),
    };
    let reason = match status {
        200 => "OK",
        404 => "Not Found",
        405 => "Method Not Allowed",
        500 => "Internal Server Error",
        _ => "Service Unavailable",
    };
    let answer = format!(
        "HTTP/1.1 {status} {reason}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    let (result, _) = stream.write_all(answer.into_bytes()).await;
    if let Err(error) = result {
        tracing::debug!(%error, "admin answer not sent");
    }
}

/// The path of a GET, without its query.
fn request_path(head: &[u8]) -> Option<&str> {
    let line = head.split(|byte| *byte == b'\r').next()?;
    let mut words = std::str::from_utf8(line).ok()?.split(' ');
    if words.next() != Some("GET") {
        return None;
    }
    words.next()?.split('?').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read() {
        assert_eq!(request_path(b"GET /readyz HTTP/1.1\r\n\r\n"), Some("/readyz"));
        assert_eq!(
            request_path(b"GET /metrics?x=1 HTTP/1.1\r\n\r\n"),
            Some("/metrics")
        );
        assert_eq!(request_path(b"POST / HTTP/1.1\r\n\r\n"), None);
        assert_eq!(request_path(b"\xff\r\n\r\n"), None);
    }

    #[test]
    fn figures_are_summed_over_shards() {
        let stats: Vec<Arc<ShardStats>> = (0..2).map(|_| Arc::default()).collect();
        stats[0].connections.set(3);
        stats[1].connections.set(4);
        stats[0].received_bytes.add(10);
        stats[1].error(WireError::DiskFull);
        stats[1].journal_write_latency.record(20_000);
        let health = Health::new(stats);
        let (status, _, text) = health.page("/metrics");
        assert_eq!(status, 200);
        for line in [
            "ringfence_connections 7",
            "ringfence_received_bytes_total 10",
            "ringfence_errors_total{error=\"DISK_FULL\"} 1",
            "ringfence_requests_total{api=\"Produce\"} 0",
            "ringfence_journal_write_seconds_count 1",
            "ringfence_journal_write_seconds_bucket{le=\"+Inf\"} 1",
        ] {
            assert!(
                text.lines().any(|found| found == line),
                "{line} is missing in\n{text}"
            );
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn readiness_says_why_not() {
        let health = Health::new(Vec::new());
        assert_eq!(health.page("/readyz").0, 503);
        health.ready();
        assert_eq!(health.page("/readyz").0, 200);
        health.not_ready("shard 1 is fenced");
        assert_eq!(health.page("/readyz").2, "shard 1 is fenced\n");
        assert_eq!(health.page("/livez").0, 200);
        assert_eq!(health.page("/nope").0, 404);
    }
}
