//! Aligned, pooled, reference-counted buffers that the ring can own until a completion.
//!
//! An [`AppendBuf`] is the only writer of its memory and writes only beyond its length; a [`BufSlice`] sees only
//! bytes below the length at the time it was made. So a slice is immutable for life, and may be in flight while its
//! buffer grows. Memory is block-aligned, always initialised, and recycled when the last view of it is dropped.

#![allow(unsafe_code)]

mod pool;

use std::fmt;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::Arc;

pub use pool::mapped_bytes;

/// A block-aligned piece of memory of the pool.
struct Memory {
    start: NonNull<u8>,
    capacity: usize,
}

// SAFETY: `Memory` is a plain owned allocation; who may read or write which part of it is decided by `AppendBuf`
// and `BufSlice`, whose ranges never overlap between a writer and a reader.
unsafe impl Send for Memory {}
// SAFETY: as above; shared readers only see bytes that no one writes any more.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(capacity: usize) -> Memory {
        let capacity = pool::capacity_for(capacity);
        Memory {
            start: pool::take(capacity),
            capacity,
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        pool::give(self.start, self.capacity);
    }
}

/// A buffer that grows by appending, within a capacity fixed at creation.
pub struct AppendBuf {
    memory: Arc<Memory>,
    len: usize,
}

impl AppendBuf {
    /// An empty buffer for at least `capacity` bytes, block-aligned; up to 64 MiB the capacity is a power of two.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> AppendBuf {
        AppendBuf {
            memory: Arc::new(Memory::new(capacity)),
            len: 0,
        }
    }

    /// Bytes written.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is written yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes the buffer can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.memory.capacity
    }

    /// Bytes that still fit.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.memory.capacity - self.len
    }

    /// Appends `bytes`.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn append(&mut self, bytes: &[u8]) {
        self.spare()[..bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    /// Appends `count` zero bytes.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn append_zeros(&mut self, count: usize) {
        self.spare()[..count].fill(0);
        self.len += count;
    }

    /// The unwritten rest, to be filled in place and then taken in with [`AppendBuf::advance`].
    pub fn spare(&mut self) -> &mut [u8] {
        // SAFETY: the range len..capacity lies in the allocation and is initialised; no `BufSlice` covers bytes at
        // or above `len`, and `self` is the only writer (not Clone, `&mut self`).
        unsafe {
            std::slice::from_raw_parts_mut(
                self.memory.start.as_ptr().add(self.len),
                self.memory.capacity - self.len,
            )
        }
    }

    /// Takes in `count` bytes written through [`AppendBuf::spare`].
    ///
    /// # Panics
    /// When `count` is more than what remains.
    pub fn advance(&mut self, count: usize) {
        assert!(count <= self.remaining(), "advance within the capacity");
        self.len += count;
    }

    /// An immutable view of `range`.
    ///
    /// # Panics
    /// When the range ends beyond the length.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> BufSlice {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "slice within the written bytes"
        );
        BufSlice {
            memory: Some(Arc::clone(&self.memory)),
            start: range.start,
            len: range.len(),
        }
    }

    /// The whole buffer as an immutable view.
    #[must_use]
    pub fn freeze(self) -> BufSlice {
        let len = self.len;
        BufSlice {
            memory: Some(self.memory),
            start: 0,
            len,
        }
    }

    /// Overwrites bytes already written, for headers whose content is known last.
    ///
    /// # Panics
    /// When a slice of this buffer is alive (its bytes would change under it) or the range is out of bounds.
    pub fn patch(&mut self, at: usize, bytes: &[u8]) {
        assert!(
            Arc::get_mut(&mut self.memory).is_some(),
            "patch only while nobody looks"
        );
        assert!(at + bytes.len() <= self.len, "patch within the written bytes");
        // SAFETY: the range lies in the allocation and, as just asserted, no other reference to it exists.
        let target =
            unsafe { std::slice::from_raw_parts_mut(self.memory.start.as_ptr().add(at), bytes.len()) };
        target.copy_from_slice(bytes);
    }
}

impl Deref for AppendBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: bytes below `len` are initialised and change only through `patch`, which takes `&mut self`.
        unsafe { std::slice::from_raw_parts(self.memory.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for AppendBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppendBuf({} of {})", self.len, self.memory.capacity)
    }
}

/// An immutable, cheaply cloned view of bytes in an aligned buffer.
#[derive(Clone, Default)]
pub struct BufSlice {
    memory: Option<Arc<Memory>>,
    start: usize,
    len: usize,
}

impl BufSlice {
    /// No bytes.
    #[must_use]
    pub fn empty() -> BufSlice {
        BufSlice::default()
    }

    /// A copy of `bytes` in a buffer of its own.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> BufSlice {
        if bytes.is_empty() {
            return BufSlice::empty();
        }
        let mut buf = AppendBuf::with_capacity(bytes.len());
        buf.append(bytes);
        buf.freeze()
    }

    /// A view of `range` within this view.
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> BufSlice {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "slice within the view"
        );
        BufSlice {
            memory: self.memory.clone(),
            start: self.start + range.start,
            len: range.len(),
        }
    }
}

impl Deref for BufSlice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            // SAFETY: the range was below the length of the only writer when the view was made, and that writer
            // never again writes there (`patch` refuses while a view lives).
            Some(memory) => unsafe {
                std::slice::from_raw_parts(memory.start.as_ptr().add(self.start), self.len)
            },
            None => &[],
        }
    }
}

impl fmt::Debug for BufSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufSlice({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::BLOCK;

    #[test]
    fn a_slice_keeps_its_bytes_while_the_buffer_grows() {
        let mut buf = AppendBuf::with_capacity(10);
        assert_eq!(buf.capacity(), BLOCK);
        buf.append(b"hello");
        let early = buf.slice(1..5);
        buf.append(b" world");
        buf.append_zeros(2);
        assert_eq!(&*early, b"ello");
        assert_eq!(&*buf, b"hello world\0\0");
        assert_eq!(&*early.slice(1..3), b"ll");
        assert_eq!(buf.as_ptr() as usize % BLOCK, 0);
    }

    #[test]
    #[should_panic(expected = "patch only while nobody looks")]
    fn a_patch_under_a_living_slice_is_refused() {
        let mut buf = AppendBuf::with_capacity(10);
        buf.append(b"abc");
        let _slice = buf.slice(0..1);
        buf.patch(0, b"x");
    }
}
