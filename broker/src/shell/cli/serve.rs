//! `ringfence serve`: settings from file, environment and flags, then the node until it is told to stop.

use std::path::{Path, PathBuf};

use clap::Args;
use tracing_subscriber::EnvFilter;

use super::output::CliError;
use crate::config::{Config, ConfigError, KEYS, Layer, Source};
use crate::shell::runtime;

/// Run a broker until SIGTERM or SIGINT
#[derive(Debug, Args)]
#[command(after_long_help = long_help())]
pub(super) struct Serve {
    /// Where the data live; made when missing
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,
    /// Number of this node in its cluster
    #[arg(long, value_name = "N")]
    node_id: Option<String>,
    /// Cores that carry a shard each: how many, or which ones (0,2-5)
    #[arg(long, value_name = "LIST|N")]
    cores: Option<String>,
    /// Address of the native listener
    #[arg(long, value_name = "ADDR:PORT")]
    native: Option<String>,
    /// Address of admin HTTP: /metrics, /livez, /readyz
    #[arg(long, value_name = "ADDR:PORT")]
    admin: Option<String>,
    /// Address that clients are told to dial
    #[arg(long, value_name = "HOST:PORT")]
    advertised_native: Option<String>,
    /// Bytes of journal per shard [default: chosen by the engine]
    #[arg(long, value_name = "BYTES")]
    journal_bytes: Option<String>,
    /// Bytes of memory per shard for records not yet in segments [default: chosen by the engine]
    #[arg(long, value_name = "BYTES")]
    memory_bytes: Option<String>,
    /// Where cluster metadata live: embedded
    #[arg(long, value_name = "STORE")]
    metadata: Option<String>,
    /// File with more settings (TOML, Kafka's key names)
    #[arg(long, value_name = "FILE", env = "RINGFENCE_CONFIG")]
    config: Option<PathBuf>,
    /// One more setting
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = super::key_value)]
    settings: Vec<(String, String)>,
}

/// Every setting of the file, with its variable of the environment.
fn long_help() -> String {
    let width = KEYS.iter().map(|key| key.name.len()).max().unwrap_or(0);
    let lines: String = KEYS
        .iter()
        .map(|key| format!("  {:width$}  {}\n", key.name, key.doc))
        .collect();
    format!(
        "Examples:\n  ringfence serve --data-dir ./data\n  \
         ringfence serve --data-dir /var/lib/ringfence --cores 0,2-5 --native 0.0.0.0:9192 --advertised-native db1:9192\n  \
         ringfence serve --config ringfence.toml --set log.retention.hours=24\n\n\
         Settings of the file and of --set; in the environment log.dirs is RINGFENCE_LOG_DIRS. Flags win over the\n\
         environment, the environment over the file:\n{lines}\n\
         RINGFENCE_LOG sets the log filter, for instance debug or ringfence_engine=trace."
    )
}

impl Serve {
    pub(super) fn run(self) -> Result<(), CliError> {
        start_log();
        let config = self.settings().map_err(|error| match error {
            ConfigError::BadValue {
                from: Source::Flag, ..
            }
            | ConfigError::UnknownKey {
                from: Source::Flag, ..
            }
            | ConfigError::Missing { .. } => CliError::Usage(error.to_string()),
            _ => CliError::failed(error.to_string()),
        })?;
        runtime::serve(&config).map_err(|error| CliError::Broke {
            status: error.exit_status(),
            message: error.to_string(),
        })
    }

    fn settings(self) -> Result<Config, ConfigError> {
        let mut layers = Vec::new();
        if let Some(path) = &self.config {
            layers.push(read_file(path)?);
        }
        layers.push(Layer::from_env(std::env::vars_os().filter_map(
            |(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)),
        )));
        layers.push(self.flags());
        Config::from_layers(&layers)
    }

    fn flags(self) -> Layer {
        let native = self.native.map(|address| format!("NATIVE://{address}"));
        let admin = self.admin.map(|address| format!("ADMIN://{address}"));
        let listeners: Vec<String> = native.into_iter().chain(admin).collect();
        let pairs = [
            ("log.dirs", self.data_dir),
            ("node.id", self.node_id),
            ("shard.cores", self.cores),
            (
                "listeners",
                Some(listeners.join(",")).filter(|text| !text.is_empty()),
            ),
            (
                "advertised.listeners",
                self.advertised_native
                    .map(|address| format!("NATIVE://{address}")),
            ),
            ("metadata.store", self.metadata),
            ("log.journal.bytes", self.journal_bytes),
            ("log.memory.bytes", self.memory_bytes),
        ];
        let named = pairs
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Layer::flags(self.settings.into_iter().chain(named).collect())
    }
}

fn read_file(path: &Path) -> Result<Layer, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Unreadable {
        path: path.display().to_string(),
        reason: error.to_string(),
    })?;
    Layer::from_toml(&text)
}

/// Log lines on standard error; set by RINGFENCE_LOG.
fn start_log() {
    let filter = EnvFilter::try_from_env("RINGFENCE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // Fails only when a log is set up already, by a test.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .try_init();
}
