//! Settings of a node and of a topic: names, defaults, layers, validation.
//!
//! Kafka's key names are kept where Kafka has the setting. Each key is defined once, in the table [`KEYS`]; file,
//! environment and flags are layers of (key, value) text, a later layer wins. Pure: reading a file or the
//! environment is the caller's work.

mod keys;
mod topic;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

pub use keys::{KEYS, Key};
pub use topic::{Durability, TopicConfig, TopicConfigError, TopicNameError, TopicSettings, check_topic_name};

/// Prefix of environment variables: `log.dirs` is `RINGFENCE_LOG_DIRS`.
pub const ENV_PREFIX: &str = "RINGFENCE_";

/// Where a setting came from; shown in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// The configuration file.
    File,
    /// An environment variable.
    Environment,
    /// The command line.
    Flag,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::File => "configuration file",
            Source::Environment => "environment",
            Source::Flag => "command line",
        })
    }
}

/// Why the settings cannot be used. The message names the key, the value and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// No such key.
    #[error("unknown setting '{key}' in the {from}; `ringfence serve --help` lists the known ones")]
    UnknownKey { key: String, from: Source },
    /// The value does not fit the key.
    #[error("setting '{key}' = '{value}' ({from}): {reason}")]
    BadValue {
        key: String,
        value: String,
        from: Source,
        reason: String,
    },
    /// A key without default is not set.
    #[error("setting '{key}' is required: {hint}")]
    Missing { key: &'static str, hint: &'static str },
    /// Two settings contradict each other.
    #[error("{0}")]
    Contradiction(String),
    /// The file cannot be read.
    #[error("the configuration file {path} cannot be read: {reason}")]
    Unreadable { path: String, reason: String },
    /// The file is not TOML.
    #[error("the configuration file is not valid TOML: {0}")]
    Syntax(String),
}

/// One source of settings: (key, value) pairs of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Where the pairs came from.
    pub from: Source,
    /// Key as in [`KEYS`], value as text.
    pub entries: Vec<(String, String)>,
}

impl Layer {
    /// A layer of command-line flags.
    #[must_use]
    pub fn flags(entries: Vec<(String, String)>) -> Layer {
        Layer {
            from: Source::Flag,
            entries,
        }
    }

    /// Reads the text of a configuration file. Dotted keys and tables mean the same: `log.dirs = "x"` and
    /// `[log]` with `dirs = "x"`.
    ///
    /// # Errors
    /// [`ConfigError::Syntax`] when the text is not TOML.
    pub fn from_toml(text: &str) -> Result<Layer, ConfigError> {
        let table: toml::Table = text
            .parse()
            .map_err(|error: toml::de::Error| ConfigError::Syntax(error.to_string()))?;
        let mut entries = Vec::new();
        flatten("", &table, &mut entries);
        Ok(Layer {
            from: Source::File,
            entries,
        })
    }

    /// Picks the settings out of environment variables. `RINGFENCE_LOG_SEGMENT_BYTES` is `log.segment.bytes`; other
    /// variables with the prefix (of the command line or of tests) are left alone.
    #[must_use]
    pub fn from_env(variables: impl Iterator<Item = (String, String)>) -> Layer {
        let entries = variables
            .filter_map(|(name, value)| {
                let wanted = name.strip_prefix(ENV_PREFIX)?;
                let key = KEYS.iter().find(|key| env_name(key.name) == wanted)?;
                Some((key.name.to_owned(), value))
            })
            .collect();
        Layer {
            from: Source::Environment,
            entries,
        }
    }
}

/// `log.dirs` becomes `LOG_DIRS`.
fn env_name(key: &str) -> String {
    key.to_ascii_uppercase().replace('.', "_")
}

fn flatten(prefix: &str, table: &toml::Table, entries: &mut Vec<(String, String)>) {
    for (name, value) in table {
        let key = if prefix.is_empty() {
            name.clone()
        } else {
            format!("{prefix}.{name}")
        };
        match value {
            toml::Value::Table(inner) => flatten(&key, inner, entries),
            toml::Value::Array(items) => {
                let items: Vec<String> = items.iter().map(plain).collect();
                entries.push((key, items.join(",")));
            }
            other => entries.push((key, plain(other))),
        }
    }
}

fn plain(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Which cores carry shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cores {
    /// One shard per core the process may use.
    All,
    /// The first this many of them.
    Count(u16),
    /// Exactly these cores.
    List(Vec<u16>),
}

/// Where the cluster's metadata live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetadataChoice {
    /// In this node's data directory; a cluster of one.
    Embedded,
}

/// An address as told to clients: a name or IP address, and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    /// Name or IP address.
    pub host: String,
    /// Port; not 0.
    pub port: u16,
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Bounds on what clients may hold of the node. All per shard unless said otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// `max.connections`: connections of the process; each shard takes its share, rounded up.
    pub max_connections: usize,
    /// `socket.request.max.bytes`: the largest request frame.
    pub max_request_bytes: usize,
    /// `connections.max.idle.ms`: a connection without traffic and without a request in flight is closed after this.
    pub idle_ms: u64,
    /// `handshake.timeout.ms`: time from accept to a complete Hello.
    pub handshake_ms: u64,
    /// `max.in.flight.requests.per.connection`: beyond it the connection is not read from.
    pub max_in_flight: usize,
    /// `max.in.flight.bytes.per.connection`: requests being worked on and answers not yet sent.
    pub max_connection_bytes: usize,
    /// `queued.max.request.bytes`: the same over all connections of a shard.
    pub max_shard_bytes: usize,
    /// `forward.max.bytes`: requests on their way from one shard to one other.
    pub max_forward_bytes: usize,
    /// `fetch.max.wait.limit.ms`: the longest a fetch may be parked.
    pub max_fetch_wait_ms: u64,
    /// `fetch.max.bytes`: the most one fetch answers with, whatever it asks for.
    pub max_fetch_bytes: usize,
    /// `request.timeout.limit.ms`: the longest a produce may wait for its acknowledgement.
    pub max_request_timeout_ms: u64,
}

/// All settings of a node, validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `node.id`.
    pub node_id: u32,
    /// `log.dirs`: the data directory.
    pub data_dir: PathBuf,
    /// `shard.cores`.
    pub cores: Cores,
    /// Native listener.
    pub native: SocketAddr,
    /// Admin HTTP listener.
    pub admin: SocketAddr,
    /// What clients are told to dial; the listener's own address when unset.
    pub advertised_native: Option<HostPort>,
    /// `metadata.store`.
    pub metadata: MetadataChoice,
    /// Defaults of topics.
    pub topic_defaults: TopicSettings,
    /// `num.partitions`: of a topic created without a count.
    pub num_partitions: u32,
    /// `max.partitions.per.topic`.
    pub max_partitions_per_topic: u32,
    /// Bounds on clients.
    pub limits: Limits,
    /// `log.journal.bytes`: journal of one shard; `None` lets the engine choose.
    pub journal_bytes: Option<u64>,
    /// `log.memory.bytes`: memory for accepted bytes not yet in segments, of one shard; `None` lets the engine choose.
    pub memory_bytes: Option<u64>,
    /// `file.delete.delay.ms`.
    pub delete_delay_ms: u64,
    /// `log.linger.us`: how long a journal frame may wait for company.
    pub linger_us: u64,
    /// `leader.epoch.checkpoint.max.entries`.
    pub epoch_entries: usize,
}

impl Config {
    /// Settings from `layers`, weakest first, over the defaults.
    ///
    /// # Errors
    /// See [`ConfigError`]; the first problem found is reported.
    pub fn from_layers(layers: &[Layer]) -> Result<Config, ConfigError> {
        let mut draft = Draft::default();
        for layer in layers {
            for (name, value) in &layer.entries {
                let key =
                    KEYS.iter()
                        .find(|key| key.name == name)
                        .ok_or_else(|| ConfigError::UnknownKey {
                            key: name.clone(),
                            from: layer.from,
                        })?;
                (key.set)(&mut draft, value.trim()).map_err(|reason| ConfigError::BadValue {
                    key: name.clone(),
                    value: value.clone(),
                    from: layer.from,
                    reason,
                })?;
            }
        }
        draft.finish()
    }
}

/// Settings while layers are being applied: as [`Config`], with what has no default still open.
#[derive(Debug, Clone)]
pub struct Draft {
    data_dir: Option<PathBuf>,
    config: Config,
}

impl Default for Draft {
    fn default() -> Draft {
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        Draft {
            data_dir: None,
            config: Config {
                node_id: 1,
                data_dir: PathBuf::new(),
                cores: Cores::All,
                native: local(9192),
                admin: local(9644),
                advertised_native: None,
                metadata: MetadataChoice::Embedded,
                topic_defaults: TopicSettings::default(),
                num_partitions: 1,
                max_partitions_per_topic: 100_000,
                limits: Limits {
                    max_connections: 10_000,
                    max_request_bytes: 100 << 20,
                    idle_ms: 600_000,
                    handshake_ms: 10_000,
                    max_in_flight: 64,
                    max_connection_bytes: 128 << 20,
                    max_shard_bytes: 256 << 20,
                    max_forward_bytes: 64 << 20,
                    max_fetch_wait_ms: 60_000,
                    max_fetch_bytes: 64 << 20,
                    max_request_timeout_ms: 300_000,
                },
                journal_bytes: None,
                memory_bytes: None,
                delete_delay_ms: 60_000,
                linger_us: 0,
                epoch_entries: 100,
            },
        }
    }
}

impl Draft {
    fn finish(self) -> Result<Config, ConfigError> {
        let mut config = self.config;
        config.data_dir = self.data_dir.ok_or(ConfigError::Missing {
            key: "log.dirs",
            hint: "name the data directory with --data-dir DIR, log.dirs in the file or RINGFENCE_LOG_DIRS",
        })?;
        let limits = &config.limits;
        if limits.max_connection_bytes < limits.max_request_bytes {
            return Err(ConfigError::Contradiction(format!(
                "max.in.flight.bytes.per.connection ({}) must hold one request of socket.request.max.bytes ({})",
                limits.max_connection_bytes, limits.max_request_bytes
            )));
        }
        if limits.max_shard_bytes < limits.max_connection_bytes {
            return Err(ConfigError::Contradiction(format!(
                "queued.max.request.bytes ({}) must not be below max.in.flight.bytes.per.connection ({})",
                limits.max_shard_bytes, limits.max_connection_bytes
            )));
        }
        if config.topic_defaults.max_message_bytes + 4096 > limits.max_request_bytes {
            return Err(ConfigError::Contradiction(format!(
                "message.max.bytes ({}) does not fit a request of socket.request.max.bytes ({})",
                config.topic_defaults.max_message_bytes, limits.max_request_bytes
            )));
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(entries: &[(&str, &str)]) -> Layer {
        Layer::flags(entries.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect())
    }

    fn build(entries: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let mut all = vec![("log.dirs", "data")];
        all.extend_from_slice(entries);
        Config::from_layers(&[flags(&all)])
    }

    #[test]
    fn later_layers_win() {
        let file = Layer::from_toml(
            "node.id = 3\n[log]\ndirs = \"from-file\"\nretention.hours = 2\n[log.segment]\nbytes = 1048576\n",
        )
        .unwrap();
        let env = Layer::from_env(
            [
                ("RINGFENCE_LOG_DIRS".to_owned(), "from-env".to_owned()),
                ("RINGFENCE_NODE_ID".to_owned(), "4".to_owned()),
                ("RINGFENCE_BOOTSTRAP".to_owned(), "not a setting".to_owned()),
                ("PATH".to_owned(), "/bin".to_owned()),
            ]
            .into_iter(),
        );
        let config = Config::from_layers(&[file, env, flags(&[("node.id", "5")])]).unwrap();
        assert_eq!(config.node_id, 5);
        assert_eq!(config.data_dir, PathBuf::from("from-env"));
        assert_eq!(config.topic_defaults.segment_bytes, 1 << 20);
        assert_eq!(config.topic_defaults.retention_ms, Some(2 * 3_600_000));
    }

    #[test]
    fn listeners_and_cores() {
        let config = build(&[
            ("listeners", "NATIVE://0.0.0.0:19192, ADMIN://[::1]:1"),
            ("advertised.listeners", "NATIVE://broker.example:7"),
            ("shard.cores", "0,2-4"),
        ])
        .unwrap();
        assert_eq!(config.native, "0.0.0.0:19192".parse().unwrap());
        assert_eq!(config.admin, "[::1]:1".parse().unwrap());
        assert_eq!(config.advertised_native.unwrap().to_string(), "broker.example:7");
        assert_eq!(config.cores, Cores::List(vec![0, 2, 3, 4]));
        assert_eq!(build(&[("shard.cores", "4")]).unwrap().cores, Cores::Count(4));
        assert_eq!(
            build(&[("shard.cores", "3-3")]).unwrap().cores,
            Cores::List(vec![3])
        );
    }

    #[test]
    fn bad_values_are_refused_by_name() {
        for (key, value, part) in [
            ("node.id", "-1", "whole number"),
            ("shard.cores", "0", "at least 1"),
            ("shard.cores", "1,1", "twice"),
            ("shard.cores", "5-2", "range"),
            ("log.segment.bytes", "10", "between"),
            ("log.retention.ms", "-2", "-1"),
            ("listeners", "PLAINTEXT://127.0.0.1:1", "NATIVE"),
            ("listeners", "NATIVE://nonsense", "HOST:PORT"),
            ("log.message.timestamp.type", "Sometimes", "CreateTime"),
            ("log.durability", "maybe", "sync"),
            ("metadata.store", "etcd://h:1", "embedded"),
            ("log.dirs", "a,b", "one directory"),
        ] {
            let error = build(&[(key, value)]).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(key) && text.contains(part), "{key}={value}: {text}");
        }
        assert!(matches!(
            build(&[("no.such.key", "1")]),
            Err(ConfigError::UnknownKey { .. })
        ));
        assert!(matches!(
            Config::from_layers(&[]),
            Err(ConfigError::Missing { key: "log.dirs", .. })
        ));
        assert!(matches!(Layer::from_toml("= 3"), Err(ConfigError::Syntax(_))));
        assert!(matches!(
            build(&[("socket.request.max.bytes", "200000000")]),
            Err(ConfigError::Contradiction(_))
        ));
    }

    #[test]
    fn keys_are_unique_and_documented() {
        let mut names: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), KEYS.len());
        assert!(KEYS.iter().all(|key| !key.doc.is_empty()));
    }
}
