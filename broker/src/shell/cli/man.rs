//! `ringfence man`: one manual page per command.

use std::path::PathBuf;

use clap::{Args, Command};

use super::output::CliError;

/// Write manual pages into a directory
#[derive(Debug, Args)]
#[command(after_help = "Example:
  ringfence man ~/.local/share/man/man1")]
pub(super) struct Man {
    /// The directory; made when it is missing
    dir: PathBuf,
}

impl Man {
    pub(super) fn run(&self, command: Command) -> Result<(), CliError> {
        std::fs::create_dir_all(&self.dir)
            .and_then(|()| clap_mangen::generate_to(command, &self.dir))
            .map_err(|error| {
                let dir = self.dir.display();
                CliError::failed(format!(
                    "cannot write manual pages into {dir}: {error}; name a directory you may write to"
                ))
            })
    }
}
