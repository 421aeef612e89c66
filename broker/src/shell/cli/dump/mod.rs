//! `ringfence dump`: the content of files of a data directory, and whether it is damaged.
//!
//! Each file is judged by itself and by its neighbours in the same directory, with the broker's own decoders. What only the
//! journal can tell (where an active segment ends) is not guessed: bytes that may simply not be written yet are
//! reported as an open end, not as damage.

mod journal;
mod segment;
mod small;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use ringfence_engine::meta::PartitionMeta;
use ringfence_engine::types::{Offset, PartitionId};
use serde_json::{Map, Value, json};

use super::output::CliError;

/// Show what files of a data directory hold
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ringfence dump data/logs/<topic id>-0/00000000000000000000.log
  ringfence dump --records data/logs/<topic id>-0
  ringfence dump --verify data

Knows segments, indexes, epoch checkpoints, producer snapshots, identity files, journal files and checkpoints;
a directory means all of those below it. The broker may be running, but what it is just writing may look torn.")]
pub(super) struct Dump {
    /// Files or directories
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Check everything, print one line per file, exit with 1 when something is damaged
    #[arg(long)]
    verify: bool,
    /// Print the records of segments too
    #[arg(long, conflicts_with = "verify")]
    records: bool,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// What a file is, by its name and place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    NodeMeta,
    JournalSet,
    PartitionMeta,
    Segment(Offset),
    Index(Offset),
    Producers,
    Epochs,
    Journal,
    Snapshot,
}

impl Kind {
    fn of(path: &Path) -> Option<Kind> {
        let name = path.file_name()?.to_str()?;
        match name {
            "node.meta" => return Some(Kind::NodeMeta),
            "journal-set" => return Some(Kind::JournalSet),
            "partition.meta" => return Some(Kind::PartitionMeta),
            "leader-epoch-checkpoint" => return Some(Kind::Epochs),
            "checkpoint-a" | "checkpoint-b" => return Some(Kind::Snapshot),
            _ => {}
        }
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if name.len() == 3 && digits(name) {
            return Some(Kind::Journal);
        }
        let (base, extension) = name.split_once('.')?;
        let base = Offset(base.parse().ok().filter(|_| base.len() == 20 && digits(base))?);
        match extension {
            "log" => Some(Kind::Segment(base)),
            "index" => Some(Kind::Index(base)),
            "producers" => Some(Kind::Producers),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::NodeMeta => "identity of the node",
            Kind::JournalSet => "journal set",
            Kind::PartitionMeta => "identity of a partition",
            Kind::Segment(_) => "segment",
            Kind::Index(_) => "index",
            Kind::Producers => "producer snapshot",
            Kind::Epochs => "leader-epoch checkpoint",
            Kind::Journal => "journal file",
            Kind::Snapshot => "checkpoint snapshot",
        }
    }
}

/// Why a file could not be looked at.
#[derive(Debug)]
enum Trouble {
    /// The file cannot be read.
    Unreadable(std::io::Error),
    /// Printing failed.
    Output(CliError),
}

impl From<std::io::Error> for Trouble {
    fn from(error: std::io::Error) -> Trouble {
        Trouble::Unreadable(error)
    }
}

impl From<CliError> for Trouble {
    fn from(error: CliError) -> Trouble {
        Trouble::Output(error)
    }
}

impl Dump {
    pub(super) fn run(&self) -> Result<(), CliError> {
        let mut report = Report {
            out: BufWriter::new(Box::new(std::io::stdout().lock())),
            json: self.json,
            verify: self.verify,
            records: self.records,
            path: PathBuf::new(),
            problems: 0,
            files: 0,
        };
        for path in &self.paths {
            let found = collect(path)
                .map_err(|error| CliError::failed(format!("cannot read {}: {error}", path.display())))?;
            if found.is_empty() {
                return Err(CliError::failed(format!(
                    "{} is none of the files that dump knows; `ringfence dump --help` lists them",
                    path.display()
                )));
            }
            for (path, kind) in found {
                report.file(&path, kind)?;
            }
        }
        report.out.flush()?;
        match (self.verify, report.problems) {
            (false, _) | (_, 0) => Ok(()),
            (true, problems) => Err(CliError::failed(format!(
                "{problems} problems in {} files; damaged ranges of a partition are fetched again from another replica, \
                 or restored from a copy",
                report.files
            ))),
        }
    }
}

/// The files that a path stands for, sorted.
fn collect(path: &Path) -> std::io::Result<Vec<(PathBuf, Kind)>> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(Kind::of(path)
            .map(|kind| (path.to_owned(), kind))
            .into_iter()
            .collect());
    }
    let mut found = Vec::new();
    let mut pending = vec![path.to_owned()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                pending.push(path);
            } else if let Some(kind) = Kind::of(&path) {
                found.push((path, kind));
            }
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// The partition that a file belongs to: by its directory's name, or by `partition.meta` where that was renamed.
fn partition_of(path: &Path) -> Option<PartitionId> {
    let dir = path.parent()?;
    let absolute = fs::canonicalize(dir).ok()?;
    let by_name = absolute
        .file_name()?
        .to_str()
        .and_then(PartitionId::parse_dir_name);
    by_name.or_else(|| {
        let meta = fs::read(dir.join("partition.meta")).ok()?;
        Some(PartitionMeta::decode(&meta).ok()?.partition)
    })
}

/// Prints what is found.
struct Report {
    out: BufWriter<Box<dyn Write>>,
    json: bool,
    verify: bool,
    records: bool,
    /// The file that is looked at.
    path: PathBuf,
    problems: u64,
    files: u64,
}

impl Report {
    fn file(&mut self, path: &Path, kind: Kind) -> Result<(), CliError> {
        self.path = path.to_owned();
        self.files += 1;
        let before = self.problems;
        if !self.verify && !self.json {
            writeln!(self.out, "{}: {}", path.display(), kind.name())?;
        }
        let looked = match kind {
            Kind::Segment(base) => segment::dump(self, path, base),
            Kind::Index(base) => small::index(self, path, base),
            Kind::Journal => journal::dump(self, path),
            Kind::Snapshot => small::snapshot(self, path),
            Kind::NodeMeta => small::node_meta(self, path),
            Kind::JournalSet => small::journal_set(self, path),
            Kind::PartitionMeta => small::partition_meta(self, path),
            Kind::Epochs => small::epochs(self, path),
            Kind::Producers => small::producers(self, path),
        };
        match looked {
            Ok(()) => {}
            Err(Trouble::Output(error)) => return Err(error),
            Err(Trouble::Unreadable(error)) => self.problem(format!("cannot be read: {error}"))?,
        }
        if self.verify && before == self.problems {
            self.write("file", vec![("verdict", json!("ok"))])?;
        }
        Ok(())
    }

    /// One thing in the file; not shown with --verify.
    fn item(&mut self, what: &str, fields: Vec<(&'static str, Value)>) -> Result<(), CliError> {
        if self.verify {
            return Ok(());
        }
        self.write(what, fields)
    }

    /// Damage.
    fn problem(&mut self, cause: impl ToString) -> Result<(), CliError> {
        self.problems += 1;
        self.write("damage", vec![("cause", json!(cause.to_string()))])
    }

    fn write(&mut self, what: &str, fields: Vec<(&'static str, Value)>) -> Result<(), CliError> {
        if self.json {
            let mut object = Map::new();
            object.insert("file".to_owned(), json!(self.path.display().to_string()));
            object.insert("what".to_owned(), json!(what));
            object.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
            writeln!(self.out, "{}", Value::Object(object))?;
            return Ok(());
        }
        let lead = match self.verify {
            true => format!("{}: {what}", self.path.display()),
            false => format!("  {what}"),
        };
        write!(self.out, "{lead}")?;
        for (name, value) in fields {
            match value {
                Value::String(text) => write!(self.out, " {name}={text}")?,
                other => write!(self.out, " {name}={other}")?,
            }
        }
        writeln!(self.out)?;
        Ok(())
    }
}

/// Bytes as text where they are UTF-8, else as hexadecimal digits.
fn bytes_value(bytes: Option<&[u8]>) -> Value {
    match bytes {
        None => Value::Null,
        Some(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => json!(text),
            Err(_) => {
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                json!(format!("0x{hex}"))
            }
        },
    }
}
