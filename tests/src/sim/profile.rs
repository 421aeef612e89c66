//! Fault profiles: what may go wrong in a run, and what the store then owes.

use std::fmt;
use std::str::FromStr;

use ringfence_engine::io::sim::{Fault, FaultKind, OpKind, Rng, When};
use ringfence_engine::io::{DiskError, FileClass};

/// A set of faults with one contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Profile {
    /// Only crashes, stalls and slow operations. Everything acknowledged survives; nothing is fenced.
    Calm,
    /// The disk fills up and gets room again. Produce is refused with a typed error, nothing else changes.
    Enospc,
    /// Operations fail with EIO, writes tear and then fail, syncs fail. Typed errors and fences; after a restart on
    /// a healthy disk everything acknowledged is there.
    Eio,
    /// Full disk, EIO, short writes, failed syncs and stalls together; the contract of `eio`.
    Flaky,
    /// Bits flip, writes are lost or misdirected. Wrong bytes are never served; what is damaged answers with typed
    /// errors, everything else is intact.
    Rot,
    /// Once in a run, after a quiet time, a bit of the journal flips while the process is down. The contract of `rot`.
    Decay,
}

impl Profile {
    /// All of them.
    pub const ALL: [Profile; 6] = [
        Profile::Calm,
        Profile::Enospc,
        Profile::Eio,
        Profile::Flaky,
        Profile::Rot,
        Profile::Decay,
    ];

    /// Whether operations may fail, so that partitions or the shard may be fenced.
    #[must_use]
    pub fn may_fence(self) -> bool {
        matches!(
            self,
            Profile::Eio | Profile::Flaky | Profile::Rot | Profile::Decay
        )
    }

    /// Whether acknowledged bytes may become unreadable (never wrong).
    #[must_use]
    pub fn may_damage(self) -> bool {
        matches!(self, Profile::Rot | Profile::Decay)
    }

    /// Whether the disk may fill up.
    #[must_use]
    pub fn may_fill(self) -> bool {
        matches!(self, Profile::Enospc | Profile::Flaky)
    }

    /// Faults of one life of the process.
    #[must_use]
    pub fn faults(self, rng: &mut Rng) -> Vec<Fault> {
        let mut faults = Vec::new();
        // A stalled Mark would leave the last frame without a promise.
        if self != Profile::Decay && rng.odds(1, 3) {
            let stall = FaultKind::Stall(rng.between(10_000_000, 3_000_000_000));
            faults.push(Fault::new(stall, When::OneIn(rng.between(20, 400))).at_most(3));
        }
        match self {
            Profile::Calm | Profile::Enospc | Profile::Decay => {}
            Profile::Eio => faults.extend(failures(rng)),
            Profile::Flaky => {
                faults.extend(failures(rng));
                let refuse = FaultKind::Error(DiskError::NoSpace);
                let kind = *rng.pick(&[OpKind::Allocate, OpKind::MakeDir, OpKind::Open, OpKind::Write]);
                let segment = Fault::new(refuse, When::OneIn(rng.between(5, 60))).kind(kind);
                faults.push(segment.path("logs/").at_most(4));
            }
            Profile::Rot => faults.extend(rot(rng)),
        }
        faults
    }
}

fn failures(rng: &mut Rng) -> Vec<Fault> {
    let eio = FaultKind::Error(DiskError::Io(5));
    let kinds = [
        OpKind::Write,
        OpKind::Write,
        OpKind::Read,
        OpKind::Sync,
        OpKind::SyncAll,
        OpKind::SyncDir,
        OpKind::Allocate,
        OpKind::Rename,
        OpKind::Open,
        OpKind::Unlink,
        OpKind::Resize,
        OpKind::MakeDir,
    ];
    let classes = [
        FileClass::Segment,
        FileClass::Segment,
        FileClass::Index,
        FileClass::Epochs,
        FileClass::Checkpoint,
        FileClass::Journal,
    ];
    let count = rng.between(1, 2);
    let mut faults: Vec<Fault> = (0..count)
        .map(|_| {
            let kind = *rng.pick(&kinds);
            let fault = Fault::new(eio, When::Nth(rng.below(60))).kind(kind);
            match kind {
                OpKind::Write | OpKind::Read | OpKind::Sync => fault.class(*rng.pick(&classes)),
                _ => fault,
            }
        })
        .collect();
    if rng.odds(1, 2) {
        let short = Fault::new(FaultKind::ShortWrite, When::Nth(rng.below(200)));
        faults.push(short.class(*rng.pick(&classes)));
    }
    faults
}

/// Not in the journal: a rotten last frame and a crash within the Mark window look like a torn tail, which is a stated
/// limit of one copy. [`Profile::Decay`] is for the journal.
fn rot(rng: &mut Rng) -> Vec<Fault> {
    let classes = [
        FileClass::Segment,
        FileClass::Segment,
        FileClass::Index,
        FileClass::Epochs,
        FileClass::Checkpoint,
    ];
    let kinds = [
        FaultKind::FlipOnWrite,
        FaultKind::FlipOnRead,
        FaultKind::Misdirect,
        FaultKind::Lose,
    ];
    let fault = Fault::new(*rng.pick(&kinds), When::Nth(rng.below(100)));
    vec![fault.class(*rng.pick(&classes))]
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Profile::Calm => "calm",
            Profile::Enospc => "enospc",
            Profile::Eio => "eio",
            Profile::Flaky => "flaky",
            Profile::Rot => "rot",
            Profile::Decay => "decay",
        })
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Profile, String> {
        let found = Profile::ALL
            .into_iter()
            .find(|profile| profile.to_string() == text);
        found.ok_or_else(|| format!("unknown profile {text}: one of calm, enospc, eio, flaky, rot, decay"))
    }
}
