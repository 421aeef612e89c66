//! Puts frames together out of chunks of any size.

use ringfence_engine::io::buf::{AppendBuf, BufSlice};

use crate::native::{FrameError, HEADER, Header};

/// Memory taken for a frame at first; it grows by at most [`GROWTH`] as bytes come, so a false length costs little, and
/// a frame of a few MiB is moved once.
const FIRST_BYTES: usize = 256 << 10;
const GROWTH: usize = 16;

/// One frame, or the beginning of one, and bytes that must wait.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    /// The beginning of a frame whose length is not known yet.
    start: Vec<u8>,
    /// A frame being received, and its full length.
    frame: Option<(AppendBuf, usize)>,
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

    /// Takes the next step on `data`, which shrinks by what was used. `room` says whether a frame of that many bytes
    /// may be begun; frames longer than `max` are refused.
    pub(super) fn feed(&mut self, data: &mut &[u8], max: usize, room: impl FnOnce(usize) -> bool) -> Step {
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
        let mut larger = AppendBuf::with_capacity(capacity);
        larger.append(buf);
        *buf = larger;
    }
    buf.append(data);
}
