//! The buffers that the kernel picks from when bytes arrive, and the ring through which it gets them.
//!
//! Only for sockets: the kernel had a race that gave one buffer to several file reads (F69). A buffer belongs to the
//! kernel from [`RecvBuffers::give_back`] until the completion that names it, then to us.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::BufRingEntry;

use super::RingError;
use super::ring::Ring;
use crate::limits::BLOCK;

/// The only group of a reactor.
pub(super) const GROUP: u16 = 0;

/// Zeroed, page-aligned memory.
struct Region {
    start: NonNull<u8>,
    layout: Layout,
}

impl Region {
    fn new(len: usize) -> Region {
        let layout = Layout::from_size_align(len.max(1), BLOCK).expect("buffers are smaller than isize::MAX");
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else {
            handle_alloc_error(layout)
        };
        Region { start, layout }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and dropped once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// All receive buffers of a reactor.
pub(super) struct RecvBuffers {
    entries: Region,
    memory: Region,
    count: u16,
    size: usize,
    tail: u16,
}

impl RecvBuffers {
    /// Makes `count` buffers (a power of two) of `size` bytes and registers them with the ring.
    pub(super) fn new(ring: &Ring, count: u16, size: u32) -> Result<RecvBuffers, RingError> {
        let count = count.clamp(1, 1 << 15).next_power_of_two();
        let size = (size as usize).max(1);
        let mut buffers = RecvBuffers {
            entries: Region::new(usize::from(count) * std::mem::size_of::<BufRingEntry>()),
            memory: Region::new(usize::from(count) * size),
            count,
            size,
            tail: 0,
        };
        let address = buffers.entries.start.as_ptr() as u64;
        // SAFETY: the entries stay mapped and in place until after the ring is drained or for ever.
        let registered = unsafe {
            ring.submitter()
                .register_buf_ring_with_flags(address, count, GROUP, 0)
        };
        registered.map_err(|error| RingError::Resource {
            what: "registering receive buffers (Linux 5.19)",
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        })?;
        for id in 0..count {
            buffers.give_back(id);
        }
        Ok(buffers)
    }

    /// The first `len` bytes of buffer `id`, which the kernel has just filled; `None` for a buffer that is not ours.
    pub(super) fn filled(&self, id: u16, len: usize) -> Option<&[u8]> {
        if id >= self.count || len > self.size {
            return None;
        }
        // SAFETY: the range lies in the region; the kernel is done with the buffer until it is given back, which
        // needs `&mut self`.
        Some(unsafe {
            std::slice::from_raw_parts(self.memory.start.as_ptr().add(usize::from(id) * self.size), len)
        })
    }

    /// Lets the kernel fill buffer `id` again.
    pub(super) fn give_back(&mut self, id: u16) {
        assert!(id < self.count, "only buffers of this ring come back");
        let base = self.entries.start.as_ptr().cast::<BufRingEntry>();
        let slot = usize::from(self.tail & (self.count - 1));
        // SAFETY: slot and buffer lie in their regions. The kernel reads an entry only below the tail, which moves
        // past this one afterwards, with release ordering. The tail overlays an unused field of the first entry.
        unsafe {
            let entry = &mut *base.add(slot);
            entry.set_addr(self.memory.start.as_ptr().add(usize::from(id) * self.size) as u64);
            entry.set_len(self.size as u32);
            entry.set_bid(id);
            self.tail = self.tail.wrapping_add(1);
            let tail = BufRingEntry::tail(base).cast_mut();
            AtomicU16::from_ptr(tail).store(self.tail, Ordering::Release);
        }
    }

    /// Keeps the memory for ever: the kernel may still write it.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.entries, Region::new(1)));
        std::mem::forget(std::mem::replace(&mut self.memory, Region::new(1)));
        self.count = 0;
    }
}
