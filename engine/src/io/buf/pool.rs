//! Recycled memory of the buffers: size classes, a small cache per thread, a shared overflow.
//!
//! Sizes are powers of two from one block. Up to 1 MiB they are carved from 2 MiB slabs that stay mapped, so the
//! footprint of a class is its peak use; larger ones are mappings of their own, of which a bounded number is kept.
//! A buffer may be dropped on another thread than the one that made it (a request for another shard): a thread that
//! only drops hands its surplus to the shared overflow, a thread that only allocates takes from there before it maps.
//!
//! Memory is zero when mapped and may hold an earlier buffer's bytes when recycled; it is never uninitialised.

use std::alloc::{Layout, handle_alloc_error};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::limits::BLOCK;

/// Size and alignment of a slab: one huge page.
const SLAB: usize = 2 << 20;

/// Largest size carved from a slab.
const LARGEST_CARVED: usize = 1 << 20;

/// Largest size that is recycled at all; beyond it every buffer is mapped and unmapped.
const LARGEST_POOLED: usize = 64 << 20;

/// Smallest size whose slabs ask for huge pages; smaller ones hold idle partitions and must cost single pages.
/// Measured (2-core VM, Linux 6.18): 4 GiB of 1 MiB direct writes take 0.07 s of system time from huge pages and
/// 0.2 s from small ones, because the kernel pins one page instead of 256.
const SMALLEST_HUGE: usize = 64 << 10;

/// Bytes of mappings larger than [`LARGEST_CARVED`] that the shared overflow keeps.
const SHARED_LARGE_BYTES: usize = 64 << 20;

const CLASSES: usize = (LARGEST_POOLED / BLOCK).ilog2() as usize + 1;

/// Bytes mapped for buffers, in use or free.
static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// Bytes of address space that all buffers of this process, in use or free, have mapped.
#[must_use]
pub fn mapped_bytes() -> usize {
    MAPPED.load(Ordering::Relaxed)
}

/// A free piece of memory of some class.
struct Chunk(NonNull<u8>);

// SAFETY: a free chunk has exactly one owner, the list that holds it, and nobody reads or writes it.
unsafe impl Send for Chunk {}

/// The capacity of a buffer that shall hold at least `wanted` bytes.
pub(super) fn capacity_for(wanted: usize) -> usize {
    if wanted <= LARGEST_POOLED {
        wanted.max(BLOCK).next_power_of_two()
    } else {
        wanted
            .checked_next_multiple_of(SLAB)
            .expect("a buffer is smaller than the address space")
    }
}

fn class_of(capacity: usize) -> usize {
    (capacity / BLOCK).ilog2() as usize
}

fn capacity_of(class: usize) -> usize {
    BLOCK << class
}

/// Free chunks that one thread keeps of a class: about a slab's worth, at least a few.
fn local_bound(class: usize) -> usize {
    let least = if capacity_of(class) <= LARGEST_CARVED {
        8
    } else {
        1
    };
    (SLAB / capacity_of(class)).max(least)
}

/// The rest of a slab being carved.
#[derive(Clone, Copy)]
struct Rest {
    next: NonNull<u8>,
    left: usize,
}

/// The free memory of one thread.
struct Local {
    free: [Vec<Chunk>; CLASSES],
    rest: [Option<Rest>; CLASSES],
}

thread_local! {
    static LOCAL: RefCell<Local> = const {
        RefCell::new(Local { free: [const { Vec::new() }; CLASSES], rest: [None; CLASSES] })
    };
}

static SHARED: Mutex<[Vec<Chunk>; CLASSES]> = Mutex::new([const { Vec::new() }; CLASSES]);

fn shared() -> MutexGuard<'static, [Vec<Chunk>; CLASSES]> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory for a capacity given by [`capacity_for`]: aligned to the block, initialised, owned by the caller.
pub(super) fn take(capacity: usize) -> NonNull<u8> {
    if capacity > LARGEST_POOLED {
        return map(capacity);
    }
    let class = class_of(capacity);
    // The thread-local is gone only while its thread ends; then the shared list serves alone.
    LOCAL
        .try_with(|local| local.borrow_mut().take(class))
        .unwrap_or_else(|_| {
            shared()[class]
                .pop()
                .map_or_else(|| map(capacity), |chunk| chunk.0)
        })
}

/// Takes memory back that [`take`] gave out for `capacity`.
pub(super) fn give(start: NonNull<u8>, capacity: usize) {
    if capacity > LARGEST_POOLED {
        // SAFETY: mapped by `take` with exactly this capacity, and the caller gives up its only owner.
        unsafe { unmap(start, capacity) };
        return;
    }
    let class = class_of(capacity);
    let chunk = Chunk(start);
    let mut slot = Some(chunk);
    let kept = LOCAL.try_with(|local| {
        if let Some(chunk) = slot.take() {
            local.borrow_mut().give(class, chunk);
        }
    });
    if let (Err(_), Some(chunk)) = (kept, slot) {
        give_shared(class, std::iter::once(chunk));
    }
}

fn give_shared(class: usize, chunks: impl Iterator<Item = Chunk>) {
    let capacity = capacity_of(class);
    let mut shared = shared();
    for chunk in chunks {
        if capacity > LARGEST_CARVED && (shared[class].len() + 1) * capacity > SHARED_LARGE_BYTES {
            // SAFETY: a chunk above the carved sizes is a mapping of its own, of its class's capacity, and free.
            unsafe { unmap(chunk.0, capacity) };
        } else {
            shared[class].push(chunk);
        }
    }
}

impl Local {
    fn take(&mut self, class: usize) -> NonNull<u8> {
        if let Some(chunk) = self.free[class].pop() {
            return chunk.0;
        }
        let mut shared = shared();
        let from = shared[class].len().saturating_sub(local_bound(class).div_ceil(2));
        self.free[class].extend(shared[class].drain(from..));
        drop(shared);
        match self.free[class].pop() {
            Some(chunk) => chunk.0,
            None => self.fresh(class),
        }
    }

    fn fresh(&mut self, class: usize) -> NonNull<u8> {
        let capacity = capacity_of(class);
        if capacity > LARGEST_CARVED {
            return map(capacity);
        }
        let rest = self.rest[class].take().unwrap_or_else(|| Rest {
            next: new_slab(capacity),
            left: SLAB,
        });
        if rest.left > capacity {
            // SAFETY: `left` bytes from `next` are the rest of a slab, and more than `capacity`.
            let next = unsafe { rest.next.add(capacity) };
            self.rest[class] = Some(Rest {
                next,
                left: rest.left - capacity,
            });
        }
        rest.next
    }

    fn give(&mut self, class: usize, chunk: Chunk) {
        let free = &mut self.free[class];
        free.push(chunk);
        if free.len() > local_bound(class) {
            let from = free.len() / 2;
            give_shared(class, free.drain(from..));
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        for class in 0..CLASSES {
            give_shared(class, self.free[class].drain(..));
            while self.rest[class].is_some() {
                let chunk = Chunk(self.fresh(class));
                give_shared(class, std::iter::once(chunk));
            }
        }
    }
}

fn new_slab(chunk: usize) -> NonNull<u8> {
    let slab = map(SLAB);
    if chunk < SMALLEST_HUGE {
        // SAFETY: the range was just mapped. The advice cannot fail in a way that matters: it only selects pages.
        unsafe { libc::madvise(slab.as_ptr().cast(), SLAB, libc::MADV_NOHUGEPAGE) };
    }
    slab
}

/// Maps `len` zeroed bytes, aligned to a huge page when at least that long, and asks for huge pages.
fn map(len: usize) -> NonNull<u8> {
    let padded = len.saturating_add(SLAB);
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no other memory.
    let raw = unsafe { libc::mmap(std::ptr::null_mut(), padded, protection, flags, -1, 0) };
    let layout = Layout::from_size_align(len, BLOCK).expect("a buffer is smaller than isize::MAX");
    if raw == libc::MAP_FAILED {
        handle_alloc_error(layout);
    }
    let raw: *mut u8 = raw.cast();
    let head = raw.align_offset(SLAB);
    // SAFETY: `head < SLAB`, so `start..start + len` lies in the mapping; head and tail around it are page-aligned
    // parts of the same mapping that nobody has seen yet.
    let start = unsafe {
        let start = raw.add(head);
        if head > 0 {
            libc::munmap(raw.cast(), head);
        }
        if SLAB > head {
            libc::munmap(start.add(len).cast(), SLAB - head);
        }
        if len >= SLAB {
            libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE);
        }
        start
    };
    MAPPED.fetch_add(len, Ordering::Relaxed);
    NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout))
}

/// # Safety
/// `start..start + len` is exactly one mapping made by [`map`], and nobody uses it any more.
unsafe fn unmap(start: NonNull<u8>, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::munmap(start.as_ptr().cast(), len) };
    MAPPED.fetch_sub(len, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::buf::AppendBuf;

    #[test]
    fn capacities_are_powers_of_two_up_to_the_pooled_limit() {
        for (wanted, capacity) in [
            (0, BLOCK),
            (1, BLOCK),
            (BLOCK, BLOCK),
            (BLOCK + 1, 2 * BLOCK),
            (1 << 20, 1 << 20),
            (LARGEST_POOLED, LARGEST_POOLED),
            (LARGEST_POOLED + 1, LARGEST_POOLED + SLAB),
        ] {
            assert_eq!(capacity_for(wanted), capacity, "{wanted}");
        }
    }

    #[test]
    fn a_dropped_buffer_is_the_next_one_of_its_class() {
        for capacity in [BLOCK, 64 << 10, 1 << 20, 4 << 20] {
            let first = AppendBuf::with_capacity(capacity);
            let address = first.as_ptr();
            drop(first);
            assert_eq!(AppendBuf::with_capacity(capacity).as_ptr(), address);
        }
    }

    #[test]
    fn buffers_of_every_size_are_writable_to_the_end_and_disjoint() {
        let mut buffers: Vec<AppendBuf> = (0..60)
            .map(|n| AppendBuf::with_capacity(BLOCK << (n % 10)))
            .collect();
        for (n, buffer) in buffers.iter_mut().enumerate() {
            let len = buffer.capacity();
            buffer.spare().fill(n as u8);
            buffer.advance(len);
        }
        for (n, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|byte| *byte == n as u8), "{n}");
        }
    }

    #[test]
    fn a_thread_that_only_drops_feeds_the_one_that_only_allocates() {
        let before = mapped_bytes();
        let (send, receive) = std::sync::mpsc::sync_channel::<AppendBuf>(64);
        let dropper = std::thread::spawn(move || receive.into_iter().count());
        let total = 100_000;
        for _ in 0..total {
            send.send(AppendBuf::with_capacity(BLOCK)).unwrap();
        }
        drop(send);
        assert_eq!(dropper.join().unwrap(), total);
        // 400 MB went through; other tests of this process map some memory meanwhile.
        assert!(
            mapped_bytes() < before + (200 << 20),
            "{}",
            mapped_bytes() - before
        );
    }
}
