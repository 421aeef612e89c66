//! Setting files and directories aside under unique `-delete` names, and removing them later.
//!
//! A name set aside is removed only when two checkpoints that began after its rename have completed, so that no
//! snapshot which recovery could use still counts on it, and when `file.delete.delay.ms` has passed. One file is
//! removed at a time, a large one in steps with pauses: freeing gigabytes at once stalls the journal (STORAGE.md
//! section 3). The new name is unique, so a file made later under the old name is never meant (F30).

use std::collections::{HashSet, VecDeque};

use crate::checkpoint::Phase;
use crate::error::FenceReason;
use crate::io::{DiskError, DiskOp, Done, FileClass, FileId, OpenHow};
use crate::log::{Listing, LogNo};
use crate::segment::FileState;
use crate::store::{Outbox, Pending, Store, StoreEvent};
use crate::types::{Now, Offset, PartitionId};

/// A file to be removed shrinks by this much at a time.
const SHRINK_STEP: u64 = 32 << 20;
/// Pause between two steps, so that the journal's writes pass.
const PAUSE_NS: u64 = 5_000_000;
/// Ending of every name set aside.
pub const DELETE_SUFFIX: &str = "-delete";

/// A name set aside.
#[derive(Debug)]
struct Doomed {
    path: String,
    is_dir: bool,
    /// Checkpoints begun when it was renamed.
    begun: u64,
    /// Mono time from which it may go.
    not_before: u64,
    /// Its time has come and the checkpoints it still needs were asked for: without them an idle shard, or one whose
    /// disk is full, would never free the space.
    asked: bool,
}

/// What the removal of the name on top of the stack waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Open { file: FileId },
    Shrink { file: FileId, len: u64 },
    Close { file: FileId },
    Unlink,
    List,
    RemoveDir,
}

/// Names on their way out.
#[derive(Debug, Default)]
pub(crate) struct Removal {
    waiting: VecDeque<Doomed>,
    /// The name being removed, on top of the directories that contain it.
    stack: Vec<(String, bool)>,
    step: Option<Step>,
    /// A further step of shrinking is due then.
    paused: Option<(FileId, u64)>,
    pause_until: u64,
    unique: u64,
    /// Partitions whose drop was accepted and whose directory is not set aside yet.
    pub(crate) dropping: Vec<LogNo>,
    /// Names that are being renamed.
    pub(crate) under_way: HashSet<String>,
    /// Renames in flight; a checkpoint's sync waits for them.
    pub(crate) renaming: usize,
    /// Logs whose directories may hold files that recovery let go, until they were listed.
    pub(crate) leftovers: Vec<LogNo>,
    /// Cuts whose record is not durable yet, and the number of the record.
    pub(crate) cutting: Vec<(LogNo, u64)>,
    /// Segments cut off by a truncation whose record is not durable yet.
    pub(crate) cut: Vec<(LogNo, Offset, FileState)>,
}

impl Removal {
    /// When the store should be called although nothing happened.
    pub(crate) fn next_wake(&self) -> Option<u64> {
        if self.paused.is_some() {
            return Some(self.pause_until);
        }
        let idle = self.stack.is_empty() && self.step.is_none();
        self.waiting
            .front()
            .filter(|doomed| idle && !doomed.asked)
            .map(|doomed| doomed.not_before.max(self.pause_until))
    }
}

impl Store {
    /// Renames a file or directory to a unique `-delete` name; `answer` names the drop that is done with it.
    pub(crate) fn set_aside(
        &mut self,
        no: LogNo,
        path: String,
        is_dir: bool,
        answer: Option<(u64, PartitionId)>,
        out: &mut Outbox,
    ) {
        if !self.removal.under_way.insert(path.clone()) {
            // Two reasons for one name: a cut reopened a segment that another one, or the log start, takes.
            return;
        }
        self.removal.unique += 1;
        let to = format!("{path}.{}.{}{DELETE_SUFFIX}", self.cfg.term, self.removal.unique);
        self.removal.renaming += 1;
        if let Some(log) = self.log_mut(no) {
            log.renaming += 1;
            log.relist |= log.listing == Listing::Pending;
        }
        let op = self.ops.id(Pending::SetAside {
            log: no,
            from: path.clone(),
            to: to.clone(),
            is_dir,
            answer,
        });
        out.ops.push((op, DiskOp::Rename { from: path, to }));
    }

    /// A rename came to its end. A missing name was never made, or its rename survived an earlier life.
    #[expect(clippy::too_many_arguments, reason = "the fields of one pending operation")]
    pub(crate) fn was_set_aside(
        &mut self,
        now: Now,
        no: LogNo,
        path: String,
        is_dir: bool,
        answer: Option<(u64, PartitionId)>,
        result: Result<Done, DiskError>,
        out: &mut Outbox,
    ) {
        self.removal.renaming -= 1;
        if let Some(log) = self.log_mut(no) {
            log.renaming -= 1;
        }
        match result {
            Ok(_) | Err(DiskError::NotFound) => {}
            // Under its old name it could be taken for a live segment once a later one lies above it.
            Err(_) => self.fence_partition(no, FenceReason::SegmentFailed, out),
        }
        self.list_again(no, out);
        if self.log(no).is_some_and(|log| log.renaming == 0) {
            self.write_seals(no, out);
        }
        self.advance_open_segments(now, no, out);
        if result.is_ok() {
            self.doom(path, is_dir, now.after_ms(self.cfg.delete_delay_ms));
        }
        if let Some((token, partition)) = answer {
            out.events.push(StoreEvent::Done {
                token,
                partition,
                result: Ok(()),
            });
        }
    }

    /// Sets aside what recovery let go, before a checkpoint may forget the segments around it: between two live ones an
    /// old file would later be taken for a live one. Whether any is still to be done.
    pub(crate) fn clear_leftovers(&mut self, out: &mut Outbox) -> bool {
        let mut left = std::mem::take(&mut self.removal.leftovers);
        left.retain(|no| {
            let pending = self
                .log(*no)
                .is_some_and(|log| log.leftovers && log.fenced.is_none() && !log.is_dropping());
            if pending {
                self.list_segments(*no, out);
            }
            pending
        });
        self.removal.leftovers = left;
        // A drop that the snapshot holds takes effect on the files first: the next start will not replay it. One that is
        // in no frame yet may wait for the space that this checkpoint frees; it will be replayed.
        let issued = |no: &LogNo| {
            self.log(*no)
                .is_some_and(|log| self.commit.is_issued(log.drop_seq))
        };
        // So with a cut: what it takes must be set aside before a snapshot holds it.
        let recorded = |(_, seq): &(LogNo, u64)| self.commit.is_issued(*seq);
        !self.removal.leftovers.is_empty()
            || self.removal.renaming > 0
            || self.removal.dropping.iter().any(issued)
            || self.removal.cutting.iter().any(recorded)
    }

    /// Queues a `-delete` name for removal.
    pub(crate) fn doom(&mut self, path: String, is_dir: bool, not_before: u64) {
        let begun = self.checkpoint.begun();
        self.removal.waiting.push_back(Doomed {
            path,
            is_dir,
            begun,
            not_before,
            asked: false,
        });
    }

    /// Removes what may go now, one step at a time.
    pub(crate) fn pump_removal(&mut self, now: Now, out: &mut Outbox) {
        if self.removal.step.is_some() || now.mono < self.removal.pause_until {
            return;
        }
        if let Some((file, len)) = self.removal.paused.take() {
            let len = len.saturating_sub(SHRINK_STEP);
            self.removal_op(Step::Shrink { file, len }, DiskOp::Resize { file, len }, out);
            return;
        }
        if self.removal.stack.is_empty() {
            let completed = self.checkpoint.completed();
            match self.removal.waiting.front_mut() {
                Some(doomed) if now.mono < doomed.not_before => return,
                Some(doomed) if completed < doomed.begun + 2 => {
                    doomed.asked = true;
                    if self.checkpoint.phase() == Phase::Idle {
                        self.request_checkpoint();
                    }
                    return;
                }
                Some(_) => {}
                None => return,
            }
            if let Some(doomed) = self.removal.waiting.pop_front() {
                self.removal.stack.push((doomed.path, doomed.is_dir));
            }
        }
        self.remove_top(out);
    }

    fn remove_top(&mut self, out: &mut Outbox) {
        let Some((path, is_dir)) = self.removal.stack.last().cloned() else {
            return;
        };
        if is_dir {
            self.removal_op(Step::List, DiskOp::List { path }, out);
        } else {
            let file = self.ops.file();
            let how = OpenHow {
                class: FileClass::Segment,
                create: false,
                write: true,
            };
            self.removal_op(Step::Open { file }, DiskOp::Open { file, path, how }, out);
        }
    }

    fn removal_op(&mut self, step: Step, disk_op: DiskOp, out: &mut Outbox) {
        self.removal.step = Some(step);
        let op = self.ops.id(Pending::Remove);
        out.ops.push((op, disk_op));
    }

    /// Takes in the end of a step. A failure leaves the name behind: it is met again when its directory is listed.
    pub(crate) fn removal_step(&mut self, now: Now, result: Result<Done, DiskError>, out: &mut Outbox) {
        let Some(step) = self.removal.step.take() else {
            return;
        };
        match (step, result) {
            (Step::Open { file }, Ok(Done::Opened { len })) => self.shrink_or_close(now, file, len, out),
            (Step::Open { file }, _) => {
                self.ops.free_file(file);
                self.unlink_top(out);
            }
            (Step::Shrink { file, len }, Ok(_)) => self.shrink_or_close(now, file, len, out),
            (Step::Shrink { file, .. }, Err(_)) => {
                self.removal_op(Step::Close { file }, DiskOp::Close { file }, out);
            }
            (Step::Close { file }, _) => {
                self.ops.free_file(file);
                self.unlink_top(out);
            }
            (Step::List, Ok(Done::Listed(names))) if names.is_empty() => {
                let Some((path, _)) = self.removal.stack.last().cloned() else {
                    return;
                };
                self.removal_op(Step::RemoveDir, DiskOp::RemoveDir { path }, out);
            }
            (Step::List, Ok(Done::Listed(names))) => {
                let Some((dir, _)) = self.removal.stack.last().cloned() else {
                    return;
                };
                self.removal
                    .stack
                    .extend(names.into_iter().map(|n| (format!("{dir}/{}", n.name), n.is_dir)));
                self.remove_top(out);
            }
            (Step::Unlink | Step::RemoveDir, Ok(_)) => {
                self.removal.stack.pop();
            }
            (Step::Unlink | Step::RemoveDir | Step::List, _) => self.removal.stack.clear(),
        }
    }

    fn shrink_or_close(&mut self, now: Now, file: FileId, len: u64, out: &mut Outbox) {
        if len > SHRINK_STEP {
            self.removal.paused = Some((file, len));
            self.removal.pause_until = now.mono.saturating_add(PAUSE_NS);
        } else {
            self.removal_op(Step::Close { file }, DiskOp::Close { file }, out);
        }
    }

    fn unlink_top(&mut self, out: &mut Outbox) {
        let Some((path, _)) = self.removal.stack.last().cloned() else {
            return;
        };
        self.removal_op(Step::Unlink, DiskOp::Unlink { path }, out);
    }
}
