//! Small files of a partition, each written by one chain of operations: open, size, write, close.
//!
//! They are hints or derived data (leader-epoch checkpoint, index blocks, producer snapshots) or written once
//! (`partition.meta`); a checkpoint's sync makes them durable, and a failed write costs a rewrite, never data.

use std::collections::HashMap;

use crate::io::buf::BufSlice;
use crate::io::{DiskError, DiskOp, Done, FileClass, FileId, OpenHow};
use crate::log::{DirState, LogNo};
use crate::store::{Outbox, Pending, Store};
use crate::types::{Now, Offset};

/// What a small file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SmallKind {
    /// `partition.meta`.
    PartitionMeta,
    /// `leader-epoch-checkpoint`.
    Epochs,
    /// Blocks of a segment's `.index`.
    Index { segment: Offset },
    /// A segment's `.producers`.
    Producers { segment: Offset },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Open,
    Resize,
    Write,
    Close,
}

#[derive(Debug)]
struct SmallWrite {
    log: LogNo,
    kind: SmallKind,
    pos: u64,
    bytes: BufSlice,
    /// The file ends behind the written bytes.
    exact: bool,
    step: Step,
    failed: Option<DiskError>,
}

/// Chains in flight, by their descriptor.
#[derive(Debug, Default)]
pub(crate) struct SmallFiles {
    writes: HashMap<FileId, SmallWrite>,
}

impl SmallFiles {
    /// Whether a chain of this kind is in flight for the log.
    pub(crate) fn is_writing(&self, log: LogNo, kind: SmallKind) -> bool {
        self.writes.values().any(|w| w.log == log && w.kind == kind)
    }

    /// The log that the chain on `file` writes for.
    pub(crate) fn owner(&self, file: FileId) -> Option<LogNo> {
        self.writes.get(&file).map(|w| w.log)
    }

    /// Whether any chain is in flight for the log.
    pub(crate) fn is_writing_any(&self, log: LogNo) -> bool {
        self.writes.values().any(|w| w.log == log)
    }
}

impl Store {
    /// Writes `bytes` at `pos` of the file at `path`; with `exact` the file ends there.
    #[expect(
        clippy::too_many_arguments,
        reason = "one chain has that many properties; each call site names them"
    )]
    pub(crate) fn write_small(
        &mut self,
        log: LogNo,
        kind: SmallKind,
        class: FileClass,
        path: String,
        pos: u64,
        bytes: &[u8],
        exact: bool,
        out: &mut Outbox,
    ) {
        let file = self.ops.file();
        let bytes = BufSlice::copy_of(bytes);
        let write = SmallWrite {
            log,
            kind,
            pos,
            bytes,
            exact,
            step: Step::Open,
            failed: None,
        };
        self.small.writes.insert(file, write);
        let op = self.ops.id(Pending::Small { file });
        let how = OpenHow {
            class,
            create: true,
            write: true,
        };
        out.ops.push((op, DiskOp::Open { file, path, how }));
    }

    pub(crate) fn small_step(
        &mut self,
        now: Now,
        file: FileId,
        result: Result<Done, DiskError>,
        out: &mut Outbox,
    ) {
        let Some(write) = self.small.writes.get_mut(&file) else {
            return;
        };
        let opened = !(write.step == Step::Open && result.is_err());
        if let Err(error) = result {
            write.failed = write.failed.or(Some(error));
        }
        write.step = match (write.step, write.failed) {
            (Step::Open, None) if write.exact => Step::Resize,
            (Step::Open | Step::Resize, None) => Step::Write,
            (Step::Open | Step::Resize | Step::Write, _) if opened => Step::Close,
            _ => {
                if let Some(write) = self.small.writes.remove(&file) {
                    self.ops.free_file(file);
                    self.small_written(now, &write, out);
                }
                return;
            }
        };
        let next = match write.step {
            Step::Resize => DiskOp::Resize {
                file,
                len: write.pos + write.bytes.len() as u64,
            },
            Step::Write => DiskOp::Write {
                file,
                pos: write.pos,
                bufs: vec![write.bytes.clone()],
            },
            Step::Open | Step::Close => DiskOp::Close { file },
        };
        let op = self.ops.id(Pending::Small { file });
        out.ops.push((op, next));
    }

    fn small_written(&mut self, now: Now, write: &SmallWrite, out: &mut Outbox) {
        match (write.kind, write.failed) {
            (SmallKind::PartitionMeta, None) => self.directory_ready(now, write.log, out),
            (SmallKind::PartitionMeta, Some(error)) => {
                if let Some(log) = self.log_mut(write.log) {
                    log.dir = DirState::Unknown;
                }
                self.place_failed(now, write.log, error, out);
            }
            (SmallKind::Epochs, Some(_)) => {
                if let Some(log) = self.log_mut(write.log) {
                    log.epochs_dirty = true;
                }
            }
            // A missing index block or producer snapshot is rebuilt when it is wanted.
            (SmallKind::Producers { segment }, None) => {
                if let Some(log) = self.log_mut(write.log) {
                    log.trust_producers(segment);
                }
            }
            (SmallKind::Epochs, None) | (SmallKind::Index { .. } | SmallKind::Producers { .. }, _) => {}
        }
    }
}
