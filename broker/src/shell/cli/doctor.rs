//! `ringfence doctor`: what the host offers, what is missing, how to fix it.

use std::path::PathBuf;

use clap::Args;
use ringfence_engine::io::probe::{self, Finding, Needs, Verdict};
use serde_json::{Value, json};

use super::output::{self, CliError, line};

/// Files and connections that a broker of ordinary size has open.
const DESCRIPTORS: u64 = 65_536;

/// Check kernel, limits, file system and device of this host
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ringfence doctor --data-dir /var/lib/ringfence
  ringfence doctor --json

Exit status 1 means that a broker cannot run like this; warnings leave it at 0.")]
pub(super) struct Doctor {
    /// The data directory that a broker shall use; it must exist
    #[arg(long, value_name = "DIR", default_value = ".")]
    data_dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    pub(super) fn run(&self) -> Result<(), CliError> {
        let dir = self.data_dir.display();
        if !self.data_dir.is_dir() {
            return Err(CliError::failed(format!(
                "{dir} is not a directory; make it, or name another with --data-dir"
            )));
        }
        let needs = Needs {
            descriptors: DESCRIPTORS,
        };
        let findings = probe::examine(&self.data_dir, needs);
        if self.json {
            output::json(&findings.iter().map(object).collect::<Vec<_>>())?;
        } else {
            findings.iter().try_for_each(print)?;
        }
        match probe::worst(&findings) {
            Verdict::Ok | Verdict::Warn => Ok(()),
            Verdict::Fail => Err(CliError::failed(
                "a broker cannot run on this host as it is; the failed checks above say what to change",
            )),
        }
    }
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Ok => "ok",
        Verdict::Warn => "warn",
        Verdict::Fail => "FAIL",
    }
}

fn print(finding: &Finding) -> Result<(), CliError> {
    line(&format!(
        "{:<5} {}: {}",
        word(finding.verdict),
        finding.name,
        finding.found
    ))?;
    if finding.fix.is_empty() {
        return Ok(());
    }
    line(&format!("      -> {}", finding.fix))
}

fn object(finding: &Finding) -> Value {
    json!({
        "check": finding.name,
        "verdict": word(finding.verdict).to_ascii_lowercase(),
        "found": finding.found,
        "fix": if finding.fix.is_empty() { Value::Null } else { json!(finding.fix) },
    })
}
