//! One simulated file: what reads see, what a power cut surely leaves, and everything in between.
//!
//! `visible` has every completed operation; `durable` has what a sync (or an O_DSYNC write) promised. Between them
//! lie the versions of each block written since, and the changes of length and allocation. After a power cut every
//! 512-byte sector is, independently, the durable one or one of its later versions; of the changes of length and
//! allocation an arbitrary prefix survives, as a file system's journal keeps their order.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::rng::Rng;
use crate::io::FileClass;
use crate::limits::BLOCK;

/// What a device writes atomically at best.
pub(super) const SECTOR: usize = 512;

const BLOCK_U64: u64 = BLOCK as u64;
type Block = [u8; BLOCK];

/// A block's place in a file.
#[derive(Debug, Clone, Default)]
enum Slot {
    /// Not allocated; reads as zeros.
    #[default]
    Hole,
    /// Allocated but never written; reads as zeros.
    Unwritten,
    Data(Arc<Block>),
}

impl Slot {
    fn bytes(&self) -> &Block {
        static ZEROS: Block = [0; BLOCK];
        match self {
            Slot::Hole | Slot::Unwritten => &ZEROS,
            Slot::Data(block) => block,
        }
    }

    fn edit(&mut self) -> &mut Block {
        if !matches!(self, Slot::Data(_)) {
            *self = Slot::Data(Arc::new([0; BLOCK]));
        }
        match self {
            Slot::Data(block) => Arc::make_mut(block),
            Slot::Hole | Slot::Unwritten => unreachable!("made into data just above"),
        }
    }
}

/// Bytes of a file in one view.
#[derive(Debug, Clone, Default)]
struct Content {
    len: u64,
    slots: Vec<Slot>,
}

impl Content {
    fn slot(&self, block: u64) -> Slot {
        self.slots.get(block as usize).cloned().unwrap_or_default()
    }

    fn slot_mut(&mut self, block: u64) -> &mut Slot {
        let index = block as usize;
        if self.slots.len() <= index {
            self.slots.resize(index + 1, Slot::Hole);
        }
        &mut self.slots[index]
    }

    /// Bytes from `pos` into `out`; zeros beyond the end.
    fn read(&self, pos: u64, out: &mut [u8]) {
        for (at, part) in pieces(pos, out.len()) {
            let start = (at % BLOCK_U64) as usize;
            let slot = self.slots.get((at / BLOCK_U64) as usize);
            match slot {
                Some(slot) => out[part.clone()].copy_from_slice(&slot.bytes()[start..start + part.len()]),
                None => out[part].fill(0),
            }
        }
    }

    fn write(&mut self, pos: u64, bytes: &[u8]) {
        for (at, part) in pieces(pos, bytes.len()) {
            let start = (at % BLOCK_U64) as usize;
            let block = self.slot_mut(at / BLOCK_U64).edit();
            block[start..start + part.len()].copy_from_slice(&bytes[part]);
        }
        self.len = self.len.max(pos + bytes.len() as u64);
    }

    /// Sets the length; what a cut removes is zero when the file grows again.
    fn resize(&mut self, len: u64) {
        if len < self.len {
            self.slots.truncate(len.div_ceil(BLOCK_U64) as usize);
            let rest = (len % BLOCK_U64) as usize;
            if rest > 0
                && let Some(slot @ Slot::Data(_)) = self.slots.get_mut((len / BLOCK_U64) as usize)
            {
                slot.edit()[rest..].fill(0);
            }
        }
        self.len = len;
    }

    fn allocate(&mut self, pos: u64, len: u64) {
        for block in blocks(pos, len) {
            let slot = self.slot_mut(block);
            if matches!(slot, Slot::Hole) {
                *slot = Slot::Unwritten;
            }
        }
        self.len = self.len.max(pos + len);
    }

    fn allocated(&self) -> u64 {
        let count = self.slots.iter().filter(|slot| !matches!(slot, Slot::Hole));
        count.count() as u64 * BLOCK_U64
    }

    fn missing(&self, pos: u64, len: u64) -> u64 {
        let holes = blocks(pos, len)
            .filter(|block| matches!(self.slots.get(*block as usize), None | Some(Slot::Hole)));
        holes.count() as u64 * BLOCK_U64
    }
}

/// Numbers of the blocks that a range touches.
fn blocks(pos: u64, len: u64) -> std::ops::Range<u64> {
    pos / BLOCK_U64..(pos + len).div_ceil(BLOCK_U64)
}

/// A range cut at block boundaries: file position and place in the buffer of each piece.
fn pieces(pos: u64, len: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = pos + done as u64;
        let size = (BLOCK - (at % BLOCK_U64) as usize).min(len - done);
        let part = done..done + size;
        done += size;
        Some((at, part))
    })
}

/// A block as some write left it, not yet promised.
#[derive(Debug, Clone)]
struct Version {
    seq: u64,
    slot: Slot,
    /// From a write that was in flight at the crash: a sector of it may be torn inside.
    in_flight: bool,
}

/// A change of length or allocation, not yet promised.
#[derive(Debug, Clone, Copy)]
enum Shape {
    Resize(u64),
    /// A write beyond the end made the file this long.
    Extend(u64),
    Allocate {
        pos: u64,
        len: u64,
    },
}

/// A file.
#[derive(Debug, Clone)]
pub(super) struct SimFile {
    pub(super) class: FileClass,
    visible: Content,
    durable: Content,
    dirty: BTreeMap<u64, Vec<Version>>,
    shapes: Vec<(u64, Shape)>,
}

impl SimFile {
    pub(super) fn new(class: FileClass) -> SimFile {
        SimFile {
            class,
            visible: Content::default(),
            durable: Content::default(),
            dirty: BTreeMap::new(),
            shapes: Vec::new(),
        }
    }

    /// Length that everyone sees.
    pub(super) fn len(&self) -> u64 {
        self.visible.len
    }

    /// Bytes of disk space taken.
    pub(super) fn allocated(&self) -> u64 {
        self.visible.allocated()
    }

    /// Bytes of disk space that a write or allocation of this range would add.
    pub(super) fn missing(&self, pos: u64, len: u64) -> u64 {
        self.visible.missing(pos, len)
    }

    /// Up to `len` bytes at `pos`, fewer only at the end of the file.
    pub(super) fn read(&self, pos: u64, len: usize) -> Vec<u8> {
        let left = self.visible.len.saturating_sub(pos);
        let mut out = vec![0; left.min(len as u64) as usize];
        self.visible.read(pos, &mut out);
        out
    }

    /// Writes; `durable` is for O_DSYNC: data, length and allocation are promised at once.
    pub(super) fn write(&mut self, seq: u64, pos: u64, bytes: &[u8], durable: bool) {
        self.push_write(seq, pos, bytes, false);
        if durable {
            self.commit_shapes(u64::MAX);
            for block in blocks(pos, bytes.len() as u64) {
                *self.durable.slot_mut(block) = self.visible.slot(block);
                self.dirty.remove(&block);
            }
        }
    }

    /// A write that was in flight at a crash: visible, not promised, and open to tearing.
    pub(super) fn write_in_flight(&mut self, seq: u64, pos: u64, bytes: &[u8]) {
        self.push_write(seq, pos, bytes, true);
    }

    fn push_write(&mut self, seq: u64, pos: u64, bytes: &[u8], in_flight: bool) {
        let end = pos + bytes.len() as u64;
        if end > self.visible.len {
            self.shapes.push((seq, Shape::Extend(end)));
        }
        self.visible.write(pos, bytes);
        for block in blocks(pos, bytes.len() as u64) {
            let version = Version {
                seq,
                slot: self.visible.slot(block),
                in_flight,
            };
            self.dirty.entry(block).or_default().push(version);
        }
    }

    pub(super) fn resize(&mut self, seq: u64, len: u64) {
        self.visible.resize(len);
        self.shapes.push((seq, Shape::Resize(len)));
    }

    pub(super) fn allocate(&mut self, seq: u64, pos: u64, len: u64) {
        self.visible.allocate(pos, len);
        self.shapes.push((seq, Shape::Allocate { pos, len }));
    }

    /// Promises everything up to `upto`.
    pub(super) fn sync(&mut self, upto: u64) {
        self.commit_shapes(upto);
        let end = self.durable.len.div_ceil(BLOCK_U64);
        let durable = &mut self.durable;
        self.dirty.retain(|block, versions| {
            let covered = versions.iter().take_while(|v| v.seq <= upto).count();
            if let Some(last) = versions.drain(..covered).next_back()
                && *block < end
            {
                *durable.slot_mut(*block) = last.slot;
            }
            !versions.is_empty()
        });
    }

    /// A sync that failed: of what it covered any sector may be on the disk, all of it counts as clean, and with
    /// `evict` the cache forgets what the disk does not have.
    pub(super) fn sync_failed(&mut self, upto: u64, evict: bool, rng: &mut Rng) {
        self.commit_shapes(upto);
        let end = self.durable.len.div_ceil(BLOCK_U64);
        let mut kept = BTreeMap::new();
        for (block, mut versions) in std::mem::take(&mut self.dirty) {
            let newer = versions.split_off(versions.iter().take_while(|v| v.seq <= upto).count());
            if block < end {
                blend(self.durable.slot_mut(block), &versions, 2, rng);
                if evict && newer.is_empty() && block < self.visible.len.div_ceil(BLOCK_U64) {
                    *self.visible.slot_mut(block) = self.durable.slot(block);
                }
            }
            if !newer.is_empty() {
                kept.insert(block, newer);
            }
        }
        self.dirty = kept;
    }

    /// What a power cut leaves: `keep` in 4 of the unpromised sectors survive.
    pub(super) fn lose_power(&mut self, keep: u64, rng: &mut Rng) {
        let survivors = rng.index(self.shapes.len() + 1);
        let upto = match survivors {
            0 => None,
            n => Some(self.shapes[n - 1].0),
        };
        if let Some(upto) = upto {
            self.commit_shapes(upto);
        }
        self.shapes.clear();
        let end = self.durable.len.div_ceil(BLOCK_U64);
        for (block, versions) in std::mem::take(&mut self.dirty) {
            if block < end {
                blend(self.durable.slot_mut(block), &versions, keep, rng);
            }
        }
        self.trim_tail();
        self.visible = self.durable.clone();
    }

    /// A version may hold bytes beyond a length that did not survive with it; the file must not show them.
    fn trim_tail(&mut self) {
        let len = self.durable.len;
        self.durable.len = len.next_multiple_of(BLOCK_U64);
        self.durable.resize(len);
    }

    fn commit_shapes(&mut self, upto: u64) {
        let count = self.shapes.iter().take_while(|(seq, _)| *seq <= upto).count();
        for (seq, shape) in self.shapes.drain(..count).collect::<Vec<_>>() {
            match shape {
                Shape::Resize(len) => {
                    self.durable.resize(len);
                    self.forget_beyond(len, seq);
                }
                Shape::Extend(len) => self.durable.len = self.durable.len.max(len),
                Shape::Allocate { pos, len } => self.durable.allocate(pos, len),
            }
        }
    }

    /// After a cut no version from before it may come back, and the cut block's rest is zero in all of them.
    fn forget_beyond(&mut self, len: u64, before: u64) {
        for (_, versions) in self.dirty.range_mut(len.div_ceil(BLOCK_U64)..) {
            versions.retain(|version| version.seq > before);
        }
        let rest = (len % BLOCK_U64) as usize;
        if rest > 0
            && let Some(versions) = self.dirty.get_mut(&(len / BLOCK_U64))
        {
            for version in versions.iter_mut().filter(|version| version.seq < before) {
                version.slot.edit()[rest..].fill(0);
            }
        }
        self.dirty.retain(|_, versions| !versions.is_empty());
    }

    /// Flips one bit at rest: in the cache, on the disk and in every version between.
    pub(super) fn flip(&mut self, pos: u64, bit: u8) {
        let block = pos / BLOCK_U64;
        let at = (pos % BLOCK_U64) as usize;
        for content in [&mut self.visible, &mut self.durable] {
            if pos < content.len {
                content.slot_mut(block).edit()[at] ^= 1 << bit;
            }
        }
        for version in self.dirty.get_mut(&block).into_iter().flatten() {
            version.slot.edit()[at] ^= 1 << bit;
        }
    }
}

/// Replaces each sector of `base`, with a chance of `keep` in 4, by that of one of `versions`.
fn blend(base: &mut Slot, versions: &[Version], keep: u64, rng: &mut Rng) {
    if versions.is_empty() || keep == 0 {
        return;
    }
    let was_allocated = !matches!(base, Slot::Hole);
    let mut next = *base.bytes();
    let mut changed = false;
    for start in (0..BLOCK).step_by(SECTOR) {
        if !rng.odds(keep, 4) {
            continue;
        }
        // The newest is the likeliest; any other may be what the device got to.
        let version = match rng.odds(3, 4) {
            true => &versions[versions.len() - 1],
            false => rng.pick(versions),
        };
        let torn = version.in_flight && rng.odds(1, 16);
        let end = start + if torn { rng.index(SECTOR) } else { SECTOR };
        next[start..end].copy_from_slice(&version.slot.bytes()[start..end]);
        changed = true;
    }
    if changed || was_allocated {
        *base.edit() = next;
    }
}

/// Replaces sectors of `bytes`, which start at a file position that is a multiple of the sector, by those of `old`
/// with even odds: what a reader sees of a write in flight.
pub(super) fn mix_sectors(bytes: &mut [u8], old: &[u8], rng: &mut Rng) {
    for (new, old) in bytes.chunks_mut(SECTOR).zip(old.chunks(SECTOR)) {
        if rng.odds(1, 2) {
            new[..old.len()].copy_from_slice(old);
        }
    }
}
