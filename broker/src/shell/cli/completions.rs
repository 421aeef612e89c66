//! `ringfence completions`: a completion script for a shell.

use std::io::Write;

use clap::{Args, Command};
use clap_complete::Shell;

use super::output::CliError;

/// Print a completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = "Example:
  ringfence completions bash > ~/.local/share/bash-completion/completions/ringfence")]
pub(super) struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    pub(super) fn run(&self, command: &mut Command) -> Result<(), CliError> {
        // Written to memory first: the generator panics when its output breaks.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, command, "ringfence", &mut script);
        std::io::stdout().lock().write_all(&script)?;
        Ok(())
    }
}
