//! What goes wrong, and when: the fault plan of a simulated disk.

use super::rng::Rng;
use crate::io::{DiskError, DiskOp, FileClass};

/// The kind of an operation, as fault plans and statistics name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OpKind {
    Open,
    Close,
    Write,
    Read,
    Sync,
    Resize,
    Allocate,
    Rename,
    Unlink,
    MakeDir,
    RemoveDir,
    SyncDir,
    SyncAll,
    List,
}

impl OpKind {
    /// The kind of `op`.
    #[must_use]
    pub fn of(op: &DiskOp) -> OpKind {
        match op {
            DiskOp::Open { .. } => OpKind::Open,
            DiskOp::Close { .. } => OpKind::Close,
            DiskOp::Write { .. } => OpKind::Write,
            DiskOp::Read { .. } => OpKind::Read,
            DiskOp::Sync { .. } => OpKind::Sync,
            DiskOp::Resize { .. } => OpKind::Resize,
            DiskOp::Allocate { .. } => OpKind::Allocate,
            DiskOp::Rename { .. } => OpKind::Rename,
            DiskOp::Unlink { .. } => OpKind::Unlink,
            DiskOp::MakeDir { .. } => OpKind::MakeDir,
            DiskOp::RemoveDir { .. } => OpKind::RemoveDir,
            DiskOp::SyncDir { .. } => OpKind::SyncDir,
            DiskOp::SyncAll => OpKind::SyncAll,
            DiskOp::List { .. } => OpKind::List,
        }
    }

    /// Whether a crash before, during or after it can leave different disks.
    #[must_use]
    pub fn changes_disk(self) -> bool {
        !matches!(self, OpKind::Close | OpKind::Read | OpKind::List)
    }
}

/// What happens to an operation that a fault hits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// It fails. A write may have reached the disk in any of its sectors. A failed sync marks what it covered
    /// clean although any sector of it may be missing, as Linux does: a later sync then promises nothing.
    Error(DiskError),
    /// A prefix of the write lands, then it fails with EIO.
    ShortWrite,
    /// The write completes, but one bit of it is wrong on the disk.
    FlipOnWrite,
    /// One bit of what is read is wrong in memory; the disk is fine.
    FlipOnRead,
    /// The write completes, but landed on another block of a file of the same class.
    Misdirect,
    /// The write completes, but never lands.
    Lose,
    /// It takes this many nanoseconds longer.
    Stall(u64),
}

impl FaultKind {
    /// Whether the fault makes sense for this kind of operation; elsewhere it never fires.
    fn applies_to(self, kind: OpKind) -> bool {
        match self {
            FaultKind::Error(_) => kind != OpKind::Close,
            FaultKind::Stall(_) => true,
            FaultKind::FlipOnRead => kind == OpKind::Read,
            FaultKind::ShortWrite | FaultKind::FlipOnWrite | FaultKind::Misdirect | FaultKind::Lose => {
                kind == OpKind::Write
            }
        }
    }

    /// Whether the fault leaves wrong bytes behind without telling anyone.
    #[must_use]
    pub fn is_silent(self) -> bool {
        matches!(
            self,
            FaultKind::FlipOnWrite | FaultKind::FlipOnRead | FaultKind::Misdirect | FaultKind::Lose
        )
    }
}

/// Which of the matching operations a fault hits; counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Only this one.
    Nth(u64),
    /// This one and all later ones.
    From(u64),
    /// Each with a chance of one in so many.
    OneIn(u64),
}

/// One line of a fault plan: which operations, when, and what happens to them.
#[derive(Debug, Clone)]
pub struct Fault {
    /// What happens.
    pub what: FaultKind,
    /// Which of the matching operations.
    pub when: When,
    /// Only operations of this kind.
    pub kind: Option<OpKind>,
    /// Only operations on files of this class. Directory operations have no class and do not match.
    pub class: Option<FileClass>,
    /// Only operations whose path contains this text.
    pub path: Option<String>,
    /// At most so many times.
    pub at_most: u64,
}

impl Fault {
    /// A fault that may hit any operation it makes sense for.
    #[must_use]
    pub fn new(what: FaultKind, when: When) -> Fault {
        Fault {
            what,
            when,
            kind: None,
            class: None,
            path: None,
            at_most: u64::MAX,
        }
    }

    /// Only operations of this kind.
    #[must_use]
    pub fn kind(mut self, kind: OpKind) -> Fault {
        self.kind = Some(kind);
        self
    }

    /// Only operations on files of this class.
    #[must_use]
    pub fn class(mut self, class: FileClass) -> Fault {
        self.class = Some(class);
        self
    }

    /// Only operations whose path contains `text`.
    #[must_use]
    pub fn path(mut self, text: &str) -> Fault {
        self.path = Some(text.to_owned());
        self
    }

    /// At most `times` times.
    #[must_use]
    pub fn at_most(mut self, times: u64) -> Fault {
        self.at_most = times;
        self
    }

    fn matches(&self, kind: OpKind, class: Option<FileClass>, path: &str) -> bool {
        self.what.applies_to(kind)
            && self.kind.is_none_or(|only| only == kind)
            && self.class.is_none_or(|only| Some(only) == class)
            && self.path.as_deref().is_none_or(|text| path.contains(text))
    }
}

/// The faults of a disk with their counters.
#[derive(Debug, Clone, Default)]
pub(super) struct FaultPlan {
    lines: Vec<Line>,
}

#[derive(Debug, Clone)]
struct Line {
    fault: Fault,
    seen: u64,
    fired: u64,
}

impl FaultPlan {
    pub(super) fn add(&mut self, fault: Fault) {
        self.lines.push(Line {
            fault,
            seen: 0,
            fired: 0,
        });
    }

    pub(super) fn clear(&mut self) {
        self.lines.clear();
    }

    /// What happens to this operation; the first line of the plan that fires wins.
    pub(super) fn draw(
        &mut self,
        kind: OpKind,
        class: Option<FileClass>,
        path: &str,
        rng: &mut Rng,
    ) -> Option<FaultKind> {
        let mut hit = None;
        for line in &mut self.lines {
            if !line.fault.matches(kind, class, path) {
                continue;
            }
            let index = line.seen;
            line.seen += 1;
            let due = match line.fault.when {
                When::Nth(n) => index == n,
                When::From(n) => index >= n,
                When::OneIn(n) => rng.odds(1, n),
            };
            if due && hit.is_none() && line.fired < line.fault.at_most {
                line.fired += 1;
                hit = Some(line.fault.what);
            }
        }
        hit
    }
}
