//! What the kernel, the limits and the file system offer; what is missing and how to fix it.
//!
//! Every finding comes from trying the thing itself where that is possible: a ring is set up, bytes go through it, a
//! block is written durably and read back. Nothing of it stays behind.

#![allow(unsafe_code)]

mod kernel;
mod storage;

use std::path::Path;

pub use kernel::{raise_descriptor_limit, release};
pub use storage::{BlockSizes, block_sizes, device_name, file_system_name};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Works, but slower or less safe than it could.
    Warn,
    /// The broker cannot run like this.
    Fail,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at; the same words in every report.
    pub name: &'static str,
    /// How bad it is.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to change; empty when nothing needs to.
    pub fix: String,
}

impl Finding {
    fn ok(name: &'static str, found: String) -> Finding {
        Finding {
            name,
            verdict: Verdict::Ok,
            found,
            fix: String::new(),
        }
    }

    fn warn(name: &'static str, found: String, fix: String) -> Finding {
        Finding {
            name,
            verdict: Verdict::Warn,
            found,
            fix,
        }
    }

    fn fail(name: &'static str, found: String, fix: String) -> Finding {
        Finding {
            name,
            verdict: Verdict::Fail,
            found,
            fix,
        }
    }
}

/// What the broker is going to ask of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Files and connections open at once.
    pub descriptors: u64,
}

/// Looks at the kernel, its limits, and the file system and device of `data_dir`. Takes some milliseconds and writes
/// a few blocks to a nameless file.
#[must_use]
pub fn examine(data_dir: &Path, needs: Needs) -> Vec<Finding> {
    let mut findings = kernel::findings(data_dir, needs);
    findings.extend(storage::findings(data_dir));
    findings
}

/// The worst of `findings`.
#[must_use]
pub fn worst(findings: &[Finding]) -> Verdict {
    findings
        .iter()
        .map(|finding| finding.verdict)
        .max()
        .unwrap_or(Verdict::Ok)
}
