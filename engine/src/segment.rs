//! A segment of a partition: its bytes in memory, its places on disk, the order in which they move.
//!
//! `written <= submitted <= durable <= end` and `end <= allocated` once placed, all byte positions of the file.
//! [`Tail`] holds `[tail.start(), end)` in memory; chunks begin at block multiples, so whole blocks go to the ring
//! without copying. Bytes below `written` may leave memory: the journal has them until a checkpoint has synced them.

use std::collections::VecDeque;

use crate::batch::BatchHeader;
use crate::index::{BatchBytes, IndexBuilder, SegmentIndex, SegmentKey};
use crate::io::FileId;
use crate::io::buf::{AppendBuf, BufSlice};
use crate::limits::BLOCK;
use crate::loading::Load;
use crate::types::{Offset, PartitionId, Pos};

const B: u64 = BLOCK as u64;
/// Largest chunk of a tail.
const MAX_CHUNK: usize = 1 << 20;

#[derive(Debug)]
struct Chunk {
    start: Pos,
    buf: AppendBuf,
}

impl Chunk {
    fn end(&self) -> Pos {
        self.start.plus(self.buf.len() as u64)
    }
}

/// The bytes of a segment that are in memory: a contiguous run up to the segment's end.
#[derive(Debug)]
pub struct Tail {
    chunks: VecDeque<Chunk>,
    end: Pos,
    memory: u64,
}

impl Tail {
    /// An empty tail whose next byte goes to `at`, a block multiple; or, with the `prefix` bytes of the block that
    /// contains the end, one that continues a partial block.
    ///
    /// # Panics
    /// When `at` is not a block multiple.
    #[must_use]
    pub fn new(at: Pos, prefix: &[u8]) -> Tail {
        assert!(at.0.is_multiple_of(B), "a tail begins at a block");
        let mut tail = Tail {
            chunks: VecDeque::new(),
            end: at,
            memory: 0,
        };
        if !prefix.is_empty() {
            tail.append(prefix);
        }
        tail
    }

    /// First position in memory (the end when nothing is).
    #[must_use]
    pub fn start(&self) -> Pos {
        self.chunks.front().map_or(self.end, |chunk| chunk.start)
    }

    /// Position after the last byte.
    #[must_use]
    pub fn end(&self) -> Pos {
        self.end
    }

    /// Bytes of memory held.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.memory
    }

    /// Appends `bytes`; `hint` is how many bytes will follow at once, so that one chunk takes them all.
    pub fn append_with(&mut self, mut bytes: &[u8], mut hint: usize) {
        while !bytes.is_empty() {
            if self.chunks.back().is_none_or(|chunk| chunk.buf.remaining() == 0) {
                self.add_chunk(bytes.len() + hint);
            }
            let Some(chunk) = self.chunks.back_mut() else {
                unreachable!("a chunk was just made")
            };
            let (now, later) = bytes.split_at(bytes.len().min(chunk.buf.remaining()));
            chunk.buf.append(now);
            self.end = self.end.plus(now.len() as u64);
            bytes = later;
            hint = hint.saturating_sub(now.len());
        }
    }

    /// Appends `bytes`.
    pub fn append(&mut self, bytes: &[u8]) {
        self.append_with(bytes, 0);
    }

    fn add_chunk(&mut self, wanted: usize) {
        let start = self.chunks.back().map_or(self.end.floor(B), Chunk::end);
        debug_assert_eq!(
            start, self.end,
            "chunks are contiguous and end at block multiples"
        );
        // A partition that has filled a chunk is busy: the next one is twice as large.
        let grown = self.chunks.back().map_or(BLOCK, |chunk| chunk.buf.capacity() * 2);
        let size = wanted.max(grown).min(MAX_CHUNK).next_power_of_two();
        self.push_chunk(Chunk {
            start,
            buf: AppendBuf::with_capacity(size),
        });
    }

    fn push_chunk(&mut self, chunk: Chunk) {
        self.memory += chunk.buf.capacity() as u64;
        self.chunks.push_back(chunk);
    }

    fn pop_back_chunk(&mut self) -> Option<Chunk> {
        let chunk = self.chunks.pop_back()?;
        self.memory -= chunk.buf.capacity() as u64;
        Some(chunk)
    }

    /// Views of the bytes `from..to`, in order; nothing is copied.
    ///
    /// # Panics
    /// When the range is not wholly in memory.
    #[must_use]
    pub fn slices(&self, from: Pos, to: Pos) -> Vec<BufSlice> {
        assert!(
            self.start() <= from && from <= to && to <= self.end,
            "the range is in memory"
        );
        let first = self.chunks.partition_point(|chunk| chunk.end() <= from);
        self.chunks
            .iter()
            .skip(first)
            .take_while(|chunk| chunk.start < to)
            .map(|chunk| {
                let start = from.max(chunk.start).0 - chunk.start.0;
                let end = to.min(chunk.end()).0 - chunk.start.0;
                chunk.buf.slice(start as usize..end as usize)
            })
            .filter(|slice| !slice.is_empty())
            .collect()
    }

    /// Copies bytes from `from` on into `out`, as far as there are any; returns how many.
    ///
    /// # Panics
    /// When `from` is below the start.
    pub fn copy_to(&self, from: Pos, out: &mut [u8]) -> usize {
        let to = self.end.min(from.plus(out.len() as u64));
        if from >= to {
            return 0;
        }
        let mut done = 0;
        for slice in self.slices(from, to) {
            out[done..done + slice.len()].copy_from_slice(&slice);
            done += slice.len();
        }
        done
    }

    fn copy_of(&self, from: Pos, to: Pos) -> Vec<u8> {
        let mut bytes = Vec::with_capacity((to.0 - from.0) as usize);
        for slice in self.slices(from, to) {
            bytes.extend_from_slice(&slice);
        }
        bytes
    }

    /// The block that contains `end`, zero-padded, when `end` is inside a block.
    #[must_use]
    pub fn partial_block(&self) -> Option<BufSlice> {
        let floor = self.end.floor(B);
        if floor == self.end {
            return None;
        }
        let mut block = AppendBuf::with_capacity(BLOCK);
        self.slices(floor, self.end)
            .iter()
            .for_each(|slice| block.append(slice));
        block.append_zeros(BLOCK - block.len());
        Some(block.freeze())
    }

    /// Lets go of whole chunks that end at or below `pos`; returns the bytes of memory freed. The chunk that holds
    /// the end stays while it has room, since the next append continues in it.
    pub fn evict(&mut self, pos: Pos) -> u64 {
        let mut freed = 0;
        while let Some(chunk) = self.chunks.front() {
            let full = chunk.buf.remaining() == 0 || self.chunks.len() > 1;
            if !full || chunk.end() > pos {
                break;
            }
            freed += chunk.buf.capacity() as u64;
            self.chunks.pop_front();
        }
        self.memory -= freed;
        freed
    }

    /// Replaces a large last chunk, of which only bytes from `pos` on are still needed, by a small one.
    /// Returns the bytes of memory freed.
    pub fn shrink(&mut self, pos: Pos) -> u64 {
        let before = self.memory();
        let keep = pos.floor(B);
        if self.chunks.len() != 1 || before <= 4 * B || self.end.0 - keep.0 >= before / 4 {
            return 0;
        }
        let rest = self.copy_of(keep, self.end);
        *self = Tail::new(keep, &rest);
        before - self.memory()
    }

    /// Forgets everything from `to` on. `to` must be in memory, or be the start of a block that is not.
    pub fn cut(&mut self, to: Pos) {
        let floor = to.floor(B);
        let prefix = match to > floor {
            true => self.copy_of(floor, to),
            false => Vec::new(),
        };
        while self.chunks.back().is_some_and(|chunk| chunk.start >= floor) {
            self.pop_back_chunk();
        }
        match self.pop_back_chunk() {
            // The chunk that contains the cut block is rebuilt: its memory may still be in flight.
            Some(chunk) if chunk.end() > floor => {
                let kept = chunk.buf.slice(0..(floor.0 - chunk.start.0) as usize);
                self.end = chunk.start;
                let mut buf = AppendBuf::with_capacity(kept.len());
                buf.append(&kept);
                self.end = self.end.plus(buf.len() as u64);
                if !buf.is_empty() {
                    self.push_chunk(Chunk {
                        start: chunk.start,
                        buf,
                    });
                }
            }
            Some(chunk) => {
                self.end = chunk.end();
                self.push_chunk(chunk);
            }
            None => self.end = floor,
        }
        debug_assert_eq!(self.end, floor);
        self.append(&prefix);
    }
}

/// Descriptor of a segment's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileState {
    /// Not open; whether it exists is not known.
    Closed,
    /// An open (or the first placing) is in flight.
    Opening,
    /// Open under this id.
    Open(FileId),
}

/// Where a segment stands on its way to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentState {
    /// Takes appends.
    Active,
    /// Takes no more appends; its last bytes are on their way to the file.
    Sealing,
    /// All bytes are in the file, which is cut to its exact end.
    Sealed,
}

/// One segment.
#[derive(Debug)]
pub struct Segment {
    /// Offset of its first record; names the file.
    pub base: Offset,
    /// Offset after its last record.
    pub next: Offset,
    /// Bytes in memory, up to the exact end.
    pub tail: Tail,
    /// End covered by completed journal writes.
    pub durable: Pos,
    /// End handed to the ring for write-back, a block multiple (or the end's block once sealing).
    pub submitted: Pos,
    /// Unbroken end of completed write-back.
    pub written: Pos,
    /// Write-backs in flight: their end, and whether they completed (out of order).
    pub in_flight: VecDeque<(Pos, bool)>,
    /// One of them met a full disk: when the others have completed too, all of them are written again.
    pub refused: bool,
    /// End of the place allocated in the file; 0 when not placed in this life.
    pub allocated: Pos,
    /// An allocation in flight reaches up to here.
    pub allocating: Option<Pos>,
    /// The descriptor.
    pub file: FileState,
    /// Active, sealing or sealed.
    state: SegmentState,
    /// Wall clock (ms) of the first append in this life, for `segment.ms`; 0 when there was none.
    pub first_append_ms: i64,
    /// The index, as far as it is known.
    pub index: IndexState,
    /// Full index blocks in the index file.
    pub index_blocks: usize,
    /// The index file ends with its seal.
    pub index_sealed: bool,
    /// The index file disagreed with good bytes: it is not read again.
    pub index_distrusted: bool,
    /// What is known of the index below a cut, where a load begins.
    pub index_kept: Option<SegmentIndex>,
    /// What a distrusted index said: where a walk meets damage, it tells where batches may begin again.
    pub index_hint: Option<SegmentIndex>,
    /// Disk reads of the file in flight.
    pub readers: u32,
    /// The cut to its exact length is in flight.
    pub cutting: bool,
}

/// What is known of a segment's index.
#[derive(Debug)]
pub enum IndexState {
    /// Complete up to the segment's end (or up to damage).
    Ready(IndexBuilder),
    /// On disk and in the bytes, not looked at in this life.
    Unloaded,
    /// Being loaded.
    Loading(Box<Load>),
}

impl Segment {
    /// A new empty segment at `base`.
    #[must_use]
    pub fn empty(partition: PartitionId, base: Offset) -> Segment {
        let index = IndexState::Ready(IndexBuilder::new(SegmentKey { partition, base }));
        Segment::at(base, base, Tail::new(Pos(0), &[]), index)
    }

    fn at(base: Offset, next: Offset, tail: Tail, index: IndexState) -> Segment {
        let end = tail.end();
        Segment {
            base,
            next,
            durable: end,
            submitted: end.floor(B),
            written: end.floor(B),
            in_flight: VecDeque::new(),
            refused: false,
            allocated: Pos(0),
            allocating: None,
            file: FileState::Closed,
            state: SegmentState::Active,
            first_append_ms: 0,
            index,
            index_blocks: 0,
            index_sealed: false,
            index_distrusted: false,
            index_kept: None,
            index_hint: None,
            readers: 0,
            cutting: false,
            tail,
        }
    }

    /// A segment that continues at `end` with `tail`, the bytes after the last whole block in the file.
    #[must_use]
    pub fn resumed(partition: PartitionId, base: Offset, next: Offset, end: Pos, tail: &[u8]) -> Segment {
        if end == Pos(0) {
            return Segment::empty(partition, base);
        }
        let tail = Tail::new(Pos(end.0 - tail.len() as u64), tail);
        let written = tail.start();
        let index = IndexState::Unloaded;
        let mut segment = Segment::at(base, next, tail, index);
        segment.written = written;
        segment.submitted = written;
        segment
    }

    /// A sealed segment found on disk.
    #[must_use]
    pub fn sealed(base: Offset, next: Offset, len: u64) -> Segment {
        let end = Pos(len);
        let tail = Tail {
            chunks: VecDeque::new(),
            end,
            memory: 0,
        };
        let mut segment = Segment::at(base, next, tail, IndexState::Unloaded);
        segment.state = SegmentState::Sealed;
        segment.written = end;
        segment.submitted = end;
        segment
    }

    /// Carries out a cut in memory: the segment ends at `pos` (offset `next`) and is active again. `prefix` holds the
    /// bytes of the cut block before `pos`, for the case that they are not in memory.
    pub fn reopen(&mut self, id: PartitionId, pos: Pos, next: Offset, prefix: &[u8]) {
        let floor = pos.floor(B);
        if self.tail.start() <= floor && pos <= self.tail.end() {
            self.tail.cut(pos);
        } else {
            self.tail = Tail::new(floor, prefix);
        }
        if self.state != SegmentState::Active {
            // Its file was (or is being) cut to the exact end: the place must be made again.
            self.allocated = Pos(0);
        }
        self.next = next;
        self.durable = pos;
        self.written = self.written.min(floor);
        self.submitted = self.written;
        self.in_flight.clear();
        self.refused = false;
        self.state = SegmentState::Active;
        self.cutting = false;
        self.cut_index(id, pos, next);
    }

    /// An index that reaches exactly up to the cut is kept; else the rest is walked when it is wanted. The file is
    /// written anew.
    fn cut_index(&mut self, partition: PartitionId, pos: Pos, next: Offset) {
        self.index_sealed = false;
        self.index_blocks = 0;
        let kept = self.index_kept.take();
        let index = match std::mem::replace(&mut self.index, IndexState::Unloaded) {
            IndexState::Ready(builder) => Some(builder.into_index()),
            IndexState::Unloaded | IndexState::Loading(_) => kept,
        };
        if pos == Pos(0) {
            self.index = IndexState::Ready(IndexBuilder::new(SegmentKey {
                partition,
                base: self.base,
            }));
        } else if let Some(mut index) = index {
            index.truncate(pos);
            if index.end() == pos && index.next_offset() == next {
                self.index = IndexState::Ready(IndexBuilder::resume(index));
            } else {
                self.index_kept = Some(index);
            }
        }
    }

    /// Adds an appended batch to the index, when it is complete so far; else a later walk finds the batch.
    pub fn index_batch(
        &mut self,
        partition: PartitionId,
        header: &BatchHeader,
        pos: Pos,
        bytes: BatchBytes<'_>,
    ) {
        if let IndexState::Ready(builder) = &mut self.index {
            debug_assert_eq!(builder.key().partition, partition);
            if builder.end() == pos && builder.next_offset() == header.base_offset {
                builder.add_batch(header, pos, bytes);
            }
        }
    }

    /// Adds a run of lost bytes to the index, when it is complete so far; else a later walk skips them.
    pub fn index_hole(&mut self, from: Pos, to: Pos, next: Offset) {
        if let IndexState::Ready(builder) = &mut self.index
            && (builder.end() != from || !builder.add_hole(to, next, -1))
        {
            self.index = IndexState::Unloaded;
        }
    }

    /// Largest timestamp, when the index is loaded.
    #[must_use]
    pub fn max_timestamp(&self) -> Option<i64> {
        crate::loading::newest_time(&self.index)
    }

    /// Whether the times of some of its records are lost or were never given: its largest timestamp then says nothing.
    #[must_use]
    pub fn is_untimed(&self) -> bool {
        match &self.index {
            IndexState::Ready(builder) => builder.is_untimed() || builder.next_offset() < self.next,
            IndexState::Unloaded | IndexState::Loading(_) => false,
        }
    }

    /// Whether the index is being loaded.
    #[must_use]
    pub fn is_loading(&self) -> bool {
        matches!(self.index, IndexState::Loading(_))
    }

    /// Position after the last byte.
    #[must_use]
    pub fn end(&self) -> Pos {
        self.tail.end()
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> SegmentState {
        self.state
    }

    /// Moves Active -> Sealing -> Sealed; a truncation reopens any state to Active.
    ///
    /// # Panics
    /// On any other move: that is a bug of ours.
    pub fn set_state(&mut self, to: SegmentState) {
        let legal = match to {
            SegmentState::Active => true,
            SegmentState::Sealing => self.state == SegmentState::Active,
            SegmentState::Sealed => self.state == SegmentState::Sealing && self.written >= self.end(),
        };
        assert!(legal, "segment state {:?} -> {to:?}", self.state);
        self.state = to;
    }

    /// Bytes not yet in the file that write-back may submit now: durable whole blocks, and the padded last block once
    /// the segment is sealing and wholly durable.
    #[must_use]
    pub fn writable_end(&self) -> Pos {
        if self.state == SegmentState::Sealing && self.durable == self.end() {
            self.end().ceil(B)
        } else {
            self.durable.floor(B)
        }
    }

    /// Whether everything that a checkpoint must find in the file is there.
    #[must_use]
    pub fn is_written(&self) -> bool {
        match self.state {
            SegmentState::Active => self.written >= self.end().floor(B),
            SegmentState::Sealing => false,
            SegmentState::Sealed => true,
        }
    }

    /// Bytes accepted and not yet in the file.
    #[must_use]
    pub fn dirty(&self) -> u64 {
        self.end().0.saturating_sub(self.written.0)
    }

    /// Takes note of a completed write-back up to `end`; moves `written` along the unbroken prefix.
    pub fn write_completed(&mut self, end: Pos) {
        for entry in &mut self.in_flight {
            if entry.0 == end {
                entry.1 = true;
            }
        }
        if self.refused {
            if self.in_flight.iter().all(|(_, completed)| *completed) {
                self.in_flight.clear();
                self.submitted = self.written;
                self.refused = false;
            }
            return;
        }
        while let Some(&(end, true)) = self.in_flight.front() {
            self.written = end;
            self.in_flight.pop_front();
        }
    }

    /// Takes note of a write-back up to `end` that found the disk full.
    pub fn write_refused(&mut self, end: Pos) {
        self.refused = true;
        self.write_completed(end);
    }

    /// Whether all its bytes are in the file and the file must be cut to its exact end. An allocation that ended after
    /// the cut would make the file longer again.
    #[must_use]
    pub fn wants_cut(&self) -> bool {
        self.state == SegmentState::Sealing
            && self.durable == self.end()
            && self.written >= self.end()
            && self.allocating.is_none()
            && !self.cutting
    }

    /// The buffers of a write-back of `from..to`; the last one is padded where `to` lies beyond the end.
    #[must_use]
    pub fn write_buffers(&self, from: Pos, to: Pos) -> Vec<BufSlice> {
        let whole = to.min(self.end().floor(B));
        let mut bufs = self.tail.slices(from, whole.max(from));
        if to > whole {
            bufs.extend(self.tail.partial_block());
        }
        bufs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(tail: &Tail, from: u64, to: u64) -> Vec<u8> {
        tail.slices(Pos(from), Pos(to))
            .iter()
            .flat_map(|s| s.iter().copied())
            .collect()
    }

    fn filled(len: usize) -> (Tail, Vec<u8>) {
        let data: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        let mut tail = Tail::new(Pos(0), &[]);
        data.chunks(700).for_each(|piece| tail.append(piece));
        (tail, data)
    }

    #[test]
    fn slices_are_block_aligned_and_exact() {
        let (tail, data) = filled(50_000);
        assert_eq!(tail.end(), Pos(50_000));
        assert_eq!(bytes(&tail, 0, 50_000), data);
        assert_eq!(bytes(&tail, 4096, 8192), data[4096..8192]);
        for slice in tail.slices(Pos(4096), Pos(49_152)) {
            assert_eq!(slice.as_ptr() as usize % BLOCK, 0);
            assert_eq!(slice.len() % BLOCK, 0);
        }
        let partial = tail.partial_block().expect("the end is inside a block");
        assert_eq!(partial[..50_000 - 49_152], data[49_152..]);
        assert!(partial[50_000 - 49_152..].iter().all(|b| *b == 0));
    }

    #[test]
    fn a_cut_keeps_what_lies_below_and_appends_go_on() {
        for cut in [0u64, 1, 4095, 4096, 4097, 12_288, 20_000, 30_000] {
            let (mut tail, data) = filled(30_000);
            tail.cut(Pos(cut));
            assert_eq!(tail.end(), Pos(cut));
            tail.append(b"after");
            let mut expect = data[..cut as usize].to_vec();
            expect.extend_from_slice(b"after");
            assert_eq!(bytes(&tail, 0, cut + 5), expect, "cut at {cut}");
        }
    }

    #[test]
    fn eviction_frees_whole_chunks_and_keeps_the_end() {
        let (mut tail, data) = filled(200_000);
        assert!(tail.evict(Pos(100_000)) > 0);
        assert!(tail.start() <= Pos(100_000) && tail.start() > Pos(0));
        let start = tail.start().0;
        assert_eq!(bytes(&tail, start, 200_000), data[start as usize..]);
        tail.evict(Pos(196_608));
        tail.shrink(Pos(196_608));
        assert!(tail.memory() <= 8192, "{}", tail.memory());
        assert_eq!(bytes(&tail, 196_608, 200_000), data[196_608..]);
        tail.append(b"x");
        assert_eq!(tail.end(), Pos(200_001));
    }

    #[test]
    fn written_moves_only_along_the_unbroken_prefix() {
        let mut segment = Segment::empty(PartitionId::default(), Offset(0));
        segment.tail.append(&vec![1; 20_000]);
        segment.in_flight = [(Pos(4096), false), (Pos(8192), false), (Pos(16_384), false)].into();
        segment.write_completed(Pos(8192));
        assert_eq!(segment.written, Pos(0));
        segment.write_completed(Pos(4096));
        assert_eq!(segment.written, Pos(8192));
        assert!(!segment.is_written());
        segment.write_completed(Pos(16_384));
        assert!(segment.is_written());
    }
}
