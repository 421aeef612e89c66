//! Canaries: deliberate bugs, each of which breaks one rule of the store, to test that the tests notice.
//!
//! They exist only with the cargo feature `canary`, which no default enables and which the broker refuses to be built
//! with; without it every hook is a constant `false`. `tests/README.md` has the table: canary, rule, timeline, and what
//! catches it.

use std::fmt;
use std::str::FromStr;

use crate::config::StoreConfig;

/// Whether this build can have deliberate bugs. A program that keeps anybody's data must refuse to be built then.
pub const BUILT_IN: bool = cfg!(feature = "canary");

/// A deliberate bug, named after what is missing or wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Canary {
    /// The journal is written without O_DSYNC, so records are acknowledged from the kernel's cache.
    AckBeforeSync,
    /// Journal files do not count their lives, so that frames of an earlier one can pass for this one's.
    NoIncarnation,
    /// A start goes on in the term of the life before it.
    NoNewTerm,
    /// A snapshot is written without waiting for the segments that it refers to.
    CheckpointBeforeSync,
    /// Journal files are freed below the newer snapshot, so the older one finds no journal.
    FreedBelowNewer,
    /// The journal's grain is 4096 bytes on a disk with larger physical blocks: frames share a block.
    SmallGrain,
    /// The `Truncate` record does not carry the bytes of the cut block.
    TruncateWithoutPrefix,
    /// A retry is answered as if the original were durable.
    DuplicateBeforeDurable,
    /// A partition's directory is named after its topic, not after the topic's id.
    DropByName,
    /// Nothing promises the last frame before a quiet time.
    NoMark,
    /// The names of a new journal's files are not synced.
    NoDirectorySync,
    /// Recovery reads the journal without syncing it first.
    TrustedCache,
    /// The entries of a snapshot are not tied to its number.
    UnnumberedSnapshot,
}

impl Canary {
    /// All of them.
    pub const ALL: [Canary; 13] = [
        Canary::AckBeforeSync,
        Canary::NoIncarnation,
        Canary::NoNewTerm,
        Canary::CheckpointBeforeSync,
        Canary::FreedBelowNewer,
        Canary::SmallGrain,
        Canary::TruncateWithoutPrefix,
        Canary::DuplicateBeforeDurable,
        Canary::DropByName,
        Canary::NoMark,
        Canary::NoDirectorySync,
        Canary::TrustedCache,
        Canary::UnnumberedSnapshot,
    ];
}

impl fmt::Display for Canary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl FromStr for Canary {
    type Err = String;

    fn from_str(text: &str) -> Result<Canary, String> {
        let found = Canary::ALL.into_iter().find(|canary| canary.to_string() == text);
        found.ok_or_else(|| format!("unknown canary {text}: one of {:?}", Canary::ALL))
    }
}

impl StoreConfig {
    /// Whether `canary` is switched on.
    #[cfg(feature = "canary")]
    pub(crate) fn has(&self, canary: Canary) -> bool {
        self.canary == Some(canary)
    }

    /// Never: this build has no deliberate bugs.
    #[cfg(not(feature = "canary"))]
    #[inline(always)]
    pub(crate) const fn has(&self, _: Canary) -> bool {
        false
    }
}
