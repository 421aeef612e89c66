//! Puts frames together out of chunks of any size, or lends a large frame's buffer out to be filled in place.

use ringfence_engine::io::buf::{AppendBuf, BufSlice};

use crate::native::{FrameError, HEADER, Header};

/// Memory taken for a frame at first; it grows by at most [`GROWTH`] as bytes come, so a false length costs little, and
/// a frame of a few MiB is moved once.
const FIRST_BYTES: usize = 256 << 10;
const GROWTH: usize = 16;

/// A frame that misses at least this much is filled in place; less is not worth a receive of its own.
const FILL_LEAST: usize = 64 << 10;
/// Memory taken at first for a frame that is filled in place.
const FILL_FIRST: usize = 4 << 20;

/// One frame, or the beginning of one, and bytes that must wait.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    /// The beginning of a frame whose length is not known yet.
    start: Vec<u8>,
    /// A frame being received, and its full length.
    frame: Option<(AppendBuf, usize)>,
    /// Of the frame whose buffer is lent out: its full length, and how much of it was there.
    lent: Option<(usize, usize)>,
    /// Bytes that may not be looked at yet.
    backlog: Vec<u8>,
}

/// What a step of [`Assembler::feed`] found.
#[derive(Debug)]
pub(super) enum Step {
    /// The data is used up.
    More,
    /// A frame of this length was begun.
    Started { len: usize },
    /// A frame is complete.
    Whole(BufSlice),
    /// There is no room to begin the next frame.
    Blocked,
    /// The bytes are no frame.
    Garbage(FrameError),
}

impl Assembler {
    /// Keeps bytes for later.
    pub(super) fn keep(&mut self, data: &[u8]) {
        self.backlog.extend_from_slice(data);
    }

    /// Whether bytes are kept.
    pub(super) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// The kept bytes.
    pub(super) fn take_backlog(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.backlog)
    }

    /// Whether [`Assembler::lend`] would lend a buffer.
    pub(super) fn wants_fill(&self) -> bool {
        matches!(&self.frame, Some((buf, len)) if len - buf.len() >= FILL_LEAST)
    }

    /// Lends out the buffer of a frame that misses much, and how many bytes of it are to be filled in.
    pub(super) fn lend(&mut self) -> Option<(AppendBuf, usize)> {
        let (mut buf, len) = self.frame.take_if(|(buf, len)| *len - buf.len() >= FILL_LEAST)?;
        if buf.capacity() < len {
            let most = FILL_FIRST.max(buf.len().saturating_mul(GROWTH));
            if buf.capacity() < most.min(len) {
                buf = moved(&buf, most.min(len));
            }
        }
        self.lent = Some((len, buf.len()));
        let room = (len - buf.len()).min(buf.remaining());
        Some((buf, room))
    }

    /// Takes a lent buffer back, and tells how many bytes arrived in it.
    ///
    /// # Panics
    /// When none was lent out.
    pub(super) fn filled(&mut self, buf: AppendBuf) -> (usize, Step) {
        let (len, had) = self.lent.take().expect("a buffer comes back to whom it belongs");
        let arrived = buf.len() - had;
        if buf.len() < len {
            self.frame = Some((buf, len));
            return (arrived, Step::More);
        }
        (arrived, Step::Whole(buf.freeze()))
    }

    /// Takes the next step on `data`, which shrinks by what was used. `room` says whether a frame of that many bytes
    /// may be begun; frames longer than `max` are refused.
    pub(super) fn feed(&mut self, data: &mut &[u8], max: usize, room: impl FnOnce(usize) -> bool) -> Step {
        assert!(
            self.lent.is_none(),
            "the driver fills a lent buffer before it delivers more"
        );
        if let Some((buf, len)) = &mut self.frame {
            let len = *len;
            let wanted = (len - buf.len()).min(data.len());
            append(buf, len, &data[..wanted]);
            *data = &data[wanted..];
            if buf.len() < len {
                return Step::More;
            }
            let (buf, _) = self.frame.take().expect("the frame was there a line ago");
            return Step::Whole(buf.freeze());
        }
        let missing = HEADER.saturating_sub(self.start.len()).min(data.len());
        self.start.extend_from_slice(&data[..missing]);
        *data = &data[missing..];
        match Header::peek(&self.start, max) {
            Err(error) => Step::Garbage(error),
            Ok(None) => Step::More,
            Ok(Some(header)) => self.begin(header.frame_len(), room),
        }
    }

    fn begin(&mut self, len: usize, room: impl FnOnce(usize) -> bool) -> Step {
        if !room(len) {
            return Step::Blocked;
        }
        let mut buf = AppendBuf::with_capacity(len.min(FIRST_BYTES));
        buf.append(&self.start);
        self.start.clear();
        self.frame = Some((buf, len));
        Step::Started { len }
    }
}

/// Appends to a frame of `len` bytes in the end, growing the buffer when it is full.
fn append(buf: &mut AppendBuf, len: usize, data: &[u8]) {
    if data.len() > buf.remaining() {
        let needed = buf.len() + data.len();
        let capacity = buf.capacity().saturating_mul(GROWTH).max(needed).min(len);
        *buf = moved(buf, capacity);
    }
    buf.append(data);
}

/// The bytes of `buf` in a buffer of at least `capacity` bytes.
fn moved(buf: &AppendBuf, capacity: usize) -> AppendBuf {
    let mut larger = AppendBuf::with_capacity(capacity);
    larger.append(buf);
    larger
}
