//! The table of a node's settings: name, meaning, how its text is read.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use super::{Cores, Draft, HostPort, MetadataChoice, topic};

/// One setting of a node.
#[derive(Debug)]
pub struct Key {
    /// Kafka's name where Kafka has the setting.
    pub name: &'static str,
    /// Meaning and unit, one line.
    pub doc: &'static str,
    /// Reads the text into the draft; the error says what is allowed.
    pub(super) set: fn(&mut Draft, &str) -> Result<(), String>,
}

macro_rules! keys {
    ($($name:literal, $doc:literal, $set:expr;)*) => {
        /// Every setting of a node.
        pub const KEYS: &[Key] = &[$(Key { name: $name, doc: $doc, set: $set }),*];
    };
}

keys! {
    "node.id", "Number of this node in its cluster.",
        |d, v| put(&mut d.config.node_id, number(v, 0, i32::MAX as u64)? as u32);
    "log.dirs", "The data directory.",
        |d, v| put(&mut d.data_dir, Some(directory(v)?));
    "shard.cores", "Cores that carry shards: a count (4) or a list (0,2-5 or 3-3). Default: all.",
        |d, v| put(&mut d.config.cores, cores(v)?);
    "listeners", "Addresses to listen on: NATIVE://HOST:PORT,ADMIN://HOST:PORT.",
        set_listeners;
    "advertised.listeners", "Addresses clients are told to dial: NATIVE://HOST:PORT.",
        set_advertised;
    "metadata.store", "Where cluster metadata live: embedded.",
        |d, v| put(&mut d.config.metadata, metadata(v)?);
    "num.partitions", "Partitions of a topic created without a count.",
        |d, v| put(&mut d.config.num_partitions, number(v, 1, 1_000_000)? as u32);
    "max.partitions.per.topic", "Most partitions one topic may have.",
        |d, v| put(&mut d.config.max_partitions_per_topic, number(v, 1, 1_000_000)? as u32);
    "log.segment.bytes", "Default of segment.bytes.",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "segment.bytes", v);
    "log.roll.ms", "Default of segment.ms.",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "segment.ms", v);
    "log.roll.hours", "Default of segment.ms, in hours.",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "segment.ms", &times(v, 3_600_000)?);
    "log.retention.bytes", "Default of retention.bytes, per partition; -1 is unlimited.",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "retention.bytes", v);
    "log.retention.ms", "Default of retention.ms; -1 is unlimited.",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "retention.ms", v);
    "log.retention.minutes", "Default of retention.ms, in minutes.",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "retention.ms", &times(v, 60_000)?);
    "log.retention.hours", "Default of retention.ms, in hours.",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "retention.ms", &times(v, 3_600_000)?);
    "message.max.bytes", "Default of max.message.bytes: the largest record batch.",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "max.message.bytes", v);
    "min.insync.replicas", "Default of the topic setting.",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "min.insync.replicas", v);
    "log.message.timestamp.type", "Default of message.timestamp.type.",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "message.timestamp.type", v);
    "log.durability", "Default of durability: sync, or memory (acknowledged before it is synced).",
        |d, v| topic::set_default(&mut d.config.topic_defaults, "durability", v);
    "log.journal.bytes", "Journal of one shard, in bytes. Default: chosen by the engine.",
        |d, v| put(&mut d.config.journal_bytes, Some(number(v, 1 << 20, 1 << 40)?));
    "log.memory.bytes", "Memory of one shard for bytes not yet in segments. Default: chosen by the engine.",
        |d, v| put(&mut d.config.memory_bytes, Some(number(v, 1 << 20, 1 << 40)?));
    "log.linger.us", "How long a journal frame may wait for company, in microseconds.",
        |d, v| put(&mut d.config.linger_us, number(v, 0, 1_000_000)?);
    "file.delete.delay.ms", "Time between a deletion and the removal of its files.",
        |d, v| put(&mut d.config.delete_delay_ms, number(v, 0, i64::MAX as u64)?);
    "leader.epoch.checkpoint.max.entries", "Leader epochs kept per partition in memory.",
        |d, v| put(&mut d.config.epoch_entries, number(v, 2, 10_000)? as usize);
    "max.connections", "Connections of the process.",
        |d, v| put(&mut d.config.limits.max_connections, number(v, 1, 10_000_000)? as usize);
    "socket.request.max.bytes", "Largest request frame.",
        |d, v| put(&mut d.config.limits.max_request_bytes, number(v, 4096, 1 << 30)? as usize);
    "connections.max.idle.ms", "Idle connections are closed after this.",
        |d, v| put(&mut d.config.limits.idle_ms, number(v, 1, i64::MAX as u64)?);
    "handshake.timeout.ms", "Time a new connection has for its Hello.",
        |d, v| put(&mut d.config.limits.handshake_ms, number(v, 1, i64::MAX as u64)?);
    "max.in.flight.requests.per.connection", "Requests of one connection worked on at once.",
        |d, v| put(&mut d.config.limits.max_in_flight, number(v, 1, 100_000)? as usize);
    "max.in.flight.bytes.per.connection", "Bytes of requests and unsent answers of one connection.",
        |d, v| put(&mut d.config.limits.max_connection_bytes, number(v, 4096, 1 << 40)? as usize);
    "queued.max.request.bytes", "Bytes of requests and unsent answers of one shard.",
        |d, v| put(&mut d.config.limits.max_shard_bytes, number(v, 4096, 1 << 40)? as usize);
    "forward.max.bytes", "Bytes of requests on their way from one shard to one other.",
        |d, v| put(&mut d.config.limits.max_forward_bytes, number(v, 4096, 1 << 40)? as usize);
    "fetch.max.wait.limit.ms", "Longest a fetch may be parked.",
        |d, v| put(&mut d.config.limits.max_fetch_wait_ms, number(v, 1, 86_400_000)?);
    "fetch.max.bytes", "Most bytes one fetch is answered with.",
        |d, v| put(&mut d.config.limits.max_fetch_bytes, number(v, 1024, 1 << 30)? as usize);
    "request.timeout.limit.ms", "Longest a produce may wait for its acknowledgement.",
        |d, v| put(&mut d.config.limits.max_request_timeout_ms, number(v, 1, 86_400_000)?);
}

/// Stores a value; the last step of every setting.
pub(super) fn put<T>(slot: &mut T, value: T) -> Result<(), String> {
    *slot = value;
    Ok(())
}

/// Reads a whole number within `least..=most`.
pub(super) fn number(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let value = u64::from_str(text).map_err(|_| "expected a whole number".to_owned())?;
    if (least..=most).contains(&value) {
        Ok(value)
    } else {
        Err(format!("expected a number between {least} and {most}"))
    }
}

/// A count of a larger unit as text in the smaller one; -1 stays -1.
fn times(text: &str, factor: i64) -> Result<String, String> {
    let value = i64::from_str(text).map_err(|_| "expected a whole number".to_owned())?;
    if value == -1 {
        return Ok("-1".to_owned());
    }
    let scaled = value.checked_mul(factor).ok_or("the number is too large")?;
    Ok(scaled.to_string())
}

fn directory(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() || text.contains(',') {
        return Err("expected one directory; several are not supported".to_owned());
    }
    Ok(PathBuf::from(text))
}

fn metadata(text: &str) -> Result<MetadataChoice, String> {
    match text {
        "embedded" => Ok(MetadataChoice::Embedded),
        _ => Err("expected 'embedded'; clusters on etcd are not supported by this version".to_owned()),
    }
}

fn cores(text: &str) -> Result<Cores, String> {
    const MOST: u64 = 1023;
    if !text.contains([',', '-']) {
        return match number(text, 0, MOST)? {
            0 => Err("expected at least 1 core".to_owned()),
            count => Ok(Cores::Count(count as u16)),
        };
    }
    let mut list = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first.trim(), 0, MOST)?, number(last.trim(), 0, MOST)?);
        if first > last {
            return Err(format!("'{part}' is not a range of cores"));
        }
        list.extend((first..=last).map(|core| core as u16));
    }
    let mut sorted = list.clone();
    sorted.sort_unstable();
    sorted.dedup();
    match list.len() {
        0 => Err("expected at least 1 core".to_owned()),
        n if n != sorted.len() => Err("a core is named twice".to_owned()),
        _ => Ok(Cores::List(list)),
    }
}

fn named_addresses(text: &str) -> Result<Vec<(String, &str)>, String> {
    text.split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .map(|part| {
            let (name, address) = part
                .split_once("://")
                .ok_or_else(|| format!("'{part}' is not NAME://HOST:PORT"))?;
            Ok((name.to_ascii_uppercase(), address))
        })
        .collect()
}

/// An address to listen on; names are not resolved here, but for `localhost`.
fn socket_address(text: &str) -> Result<SocketAddr, String> {
    let numeric = match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}"),
        None => text.to_owned(),
    };
    numeric
        .parse()
        .map_err(|_| format!("'{text}' is not HOST:PORT with an IP address or localhost"))
}

fn set_listeners(draft: &mut Draft, text: &str) -> Result<(), String> {
    for (name, address) in named_addresses(text)? {
        let address = socket_address(address)?;
        match name.as_str() {
            "NATIVE" => draft.config.native = address,
            "ADMIN" => draft.config.admin = address,
            _ => {
                return Err(format!(
                    "listener '{name}' is unknown; NATIVE and ADMIN are served"
                ));
            }
        }
    }
    Ok(())
}

fn set_advertised(draft: &mut Draft, text: &str) -> Result<(), String> {
    for (name, address) in named_addresses(text)? {
        let address = host_port(address)?;
        match name.as_str() {
            "NATIVE" => draft.config.advertised_native = Some(address),
            _ => return Err(format!("listener '{name}' is unknown; NATIVE can be advertised")),
        }
    }
    Ok(())
}

fn host_port(text: &str) -> Result<HostPort, String> {
    let wrong = || format!("'{text}' is not HOST:PORT");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() || host.len() > 255 {
        return Err(wrong());
    }
    Ok(HostPort {
        host: host.to_owned(),
        port,
    })
}
