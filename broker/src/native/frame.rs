//! Frames: header, head (everything but records), tail (records).
//!
//! ```text
//! length u32 | version u8 | api u8 | flags u16 | correlation u64 | crc32 u32 | head_len u32 | head | tail
//! ```
//!
//! `length` counts what follows it. The crc covers bytes 0..16, `head_len` and the head; the tail is record batches,
//! which carry a CRC-32C of their own, so that no byte is summed twice. Only Produce requests and Fetch answers have
//! a tail.

use std::ops::{Deref, Range};

use ringfence_engine::io::buf::BufSlice;
use thiserror::Error;

use super::Api;

/// Bytes of the fixed header, up to and including the crc.
pub const HEADER: usize = 20;

/// Bytes before the head: the header and `head_len`.
pub const PREFIX: usize = HEADER + 4;

/// Largest frame, unless configured otherwise.
pub const DEFAULT_MAX_FRAME: usize = 100 << 20;

/// Largest frame before Hello: enough for a Hello, little enough for strangers.
pub const HELLO_MAX_FRAME: usize = 4096;

/// Flag: the frame is an answer.
pub const FLAG_ANSWER: u16 = 1;

/// Flag (with [`FLAG_ANSWER`]): the request was refused as a whole; the head is a [`super::Refusal`].
pub const FLAG_REFUSED: u16 = 2;

const KNOWN_FLAGS: u16 = FLAG_ANSWER | FLAG_REFUSED;

/// Why bytes are no frame. All but `Api` and `Version` leave no way to find the next frame's beginning or trust
/// this one's content: the connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FrameError {
    #[error("a frame of {length} bytes exceeds the limit of {max}")]
    TooLong { length: u64, max: usize },
    #[error("a frame of {0} bytes is too short to be one")]
    TooShort(u32),
    #[error("the head of {head} bytes is longer than the frame's {body}")]
    Head { head: u32, body: usize },
    #[error("frame checksum {found:08x} does not match {expected:08x}")]
    Checksum { expected: u32, found: u32 },
    #[error("unknown flags {0:#06x}")]
    Flags(u16),
    /// Answered with `UnsupportedVersion`.
    #[error("unknown api {0}")]
    Api(u8),
    /// Answered with `UnsupportedVersion`.
    #[error("version {version} of {} is not spoken here", api.name())]
    Version { api: Api, version: u8 },
}

/// The fixed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes after the length field.
    pub length: u32,
    /// Version of the api's layout.
    pub version: u8,
    /// Number of the api; see [`Header::api`].
    pub api: u8,
    /// [`FLAG_ANSWER`], [`FLAG_REFUSED`].
    pub flags: u16,
    /// Chosen by the requester, repeated in the answer.
    pub correlation: u64,
    /// crc32 (IEEE) over bytes 0..16, `head_len` and the head.
    pub crc: u32,
}

impl Header {
    /// Reads the header at the beginning of `bytes`; `None` when fewer than [`HEADER`] bytes are there. A length
    /// that cannot be right is refused as soon as its four bytes are there.
    pub fn peek(bytes: &[u8], max_frame: usize) -> Result<Option<Header>, FrameError> {
        let Some(length) = bytes.first_chunk().map(|raw| u32::from_le_bytes(*raw)) else {
            return Ok(None);
        };
        let total = u64::from(length) + 4;
        if total > max_frame as u64 {
            return Err(FrameError::TooLong {
                length: total,
                max: max_frame,
            });
        }
        if total < PREFIX as u64 {
            return Err(FrameError::TooShort(length));
        }
        let Some(raw) = bytes.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [
            _,
            _,
            _,
            _,
            version,
            api,
            f0,
            f1,
            c0,
            c1,
            c2,
            c3,
            c4,
            c5,
            c6,
            c7,
            k0,
            k1,
            k2,
            k3,
        ] = *raw;
        let flags = u16::from_le_bytes([f0, f1]);
        if flags & !KNOWN_FLAGS != 0 {
            return Err(FrameError::Flags(flags));
        }
        Ok(Some(Header {
            length,
            version,
            api,
            flags,
            correlation: u64::from_le_bytes([c0, c1, c2, c3, c4, c5, c6, c7]),
            crc: u32::from_le_bytes([k0, k1, k2, k3]),
        }))
    }

    /// Bytes of the whole frame, the length field included.
    #[must_use]
    pub fn frame_len(&self) -> usize {
        self.length as usize + 4
    }

    /// The api, when its number and the layout's version are known.
    pub fn api(&self) -> Result<Api, FrameError> {
        let api = Api::from_number(self.api).ok_or(FrameError::Api(self.api))?;
        if api.versions().contains(&self.version) {
            Ok(api)
        } else {
            Err(FrameError::Version {
                api,
                version: self.version,
            })
        }
    }
}

/// Bytes of records, cut out of a frame without copying them.
pub trait Records: Deref<Target = [u8]> + Clone {
    /// The part `range` of these bytes.
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[must_use]
    fn cut(&self, range: Range<usize>) -> Self;
}

impl Records for &[u8] {
    fn cut(&self, range: Range<usize>) -> Self {
        &self[range]
    }
}

impl Records for BufSlice {
    fn cut(&self, range: Range<usize>) -> Self {
        self.slice(range)
    }
}

/// A whole frame, checked.
#[derive(Debug, Clone)]
pub struct Frame<B> {
    /// Its header.
    pub header: Header,
    bytes: B,
    head: Range<usize>,
}

impl<B: Records> Frame<B> {
    /// Checks the frame that `bytes` is, from the length field to its last byte, and nothing else.
    pub fn open(bytes: B, max_frame: usize) -> Result<Frame<B>, FrameError> {
        let header = Header::peek(&bytes, max_frame)?.ok_or(FrameError::TooShort(0))?;
        if header.frame_len() != bytes.len() {
            return Err(FrameError::TooShort(header.length));
        }
        let raw = bytes[HEADER..]
            .first_chunk()
            .ok_or(FrameError::TooShort(header.length))?;
        let head_len = u32::from_le_bytes(*raw);
        let body = bytes.len() - PREFIX;
        if head_len as usize > body {
            return Err(FrameError::Head { head: head_len, body });
        }
        let head = PREFIX..PREFIX + head_len as usize;
        let found = checksum(&bytes[..HEADER - 4], &bytes[HEADER..head.end]);
        if found != header.crc {
            return Err(FrameError::Checksum {
                expected: header.crc,
                found,
            });
        }
        Ok(Frame { header, bytes, head })
    }

    /// Everything but records.
    #[must_use]
    pub fn head(&self) -> &[u8] {
        &self.bytes[self.head.clone()]
    }

    /// The records.
    #[must_use]
    pub fn tail(&self) -> B {
        self.bytes.cut(self.head.end..self.bytes.len())
    }
}

fn checksum(header: &[u8], head: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    hasher.update(head);
    hasher.finalize()
}

/// A frame ready to be sent: its beginning, then the records as they are.
#[derive(Debug, Clone)]
pub struct Encoded<B> {
    /// Header, `head_len` and head.
    pub head: Vec<u8>,
    /// The records, sent after the head, in this order.
    pub tail: Vec<B>,
}

impl<B: Records> Encoded<B> {
    /// Bytes of the whole frame.
    #[must_use]
    pub fn frame_len(&self) -> usize {
        self.head.len() + self.tail.iter().map(|records| records.len()).sum::<usize>()
    }

    /// The whole frame in one piece; copies the records.
    #[must_use]
    pub fn into_vec(self) -> Vec<u8> {
        let mut bytes = self.head;
        for records in &self.tail {
            bytes.extend_from_slice(records);
        }
        bytes
    }
}

/// Puts the head of a frame together: `fill` appends the layout, `tail` is the number of record bytes that follow.
///
/// # Panics
/// When the frame would exceed 32 bits of length; callers bound their lists by `max_frame` long before.
pub(super) fn frame_head(
    api: Api,
    flags: u16,
    correlation: u64,
    tail: usize,
    fill: impl FnOnce(&mut Vec<u8>),
) -> Vec<u8> {
    let mut bytes = vec![0; PREFIX];
    fill(&mut bytes);
    let head_len = u32::try_from(bytes.len() - PREFIX).expect("a head is bounded by max_frame");
    bytes[HEADER..PREFIX].copy_from_slice(&head_len.to_le_bytes());
    bytes[4] = api.version();
    bytes[5] = api.number();
    bytes[6..8].copy_from_slice(&flags.to_le_bytes());
    seal(&mut bytes, correlation, tail);
    bytes
}

/// Writes length, correlation and crc of a head whose other bytes are in place; `tail` record bytes follow it.
pub(crate) fn seal(head: &mut [u8], correlation: u64, tail: usize) {
    let length = u32::try_from(head.len() - 4 + tail).expect("a frame is bounded by max_frame");
    head[..4].copy_from_slice(&length.to_le_bytes());
    head[8..16].copy_from_slice(&correlation.to_le_bytes());
    let crc = checksum(&head[..HEADER - 4], &head[HEADER..]);
    head[HEADER - 4..HEADER].copy_from_slice(&crc.to_le_bytes());
}
