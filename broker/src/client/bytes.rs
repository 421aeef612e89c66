//! Shared bytes of a received frame or a batch to send.

use std::ops::{Deref, Range};
use std::rc::Rc;

use crate::native::Records;

/// A cheaply cloned view of immutable bytes.
#[derive(Debug, Clone, Default)]
pub struct Bytes {
    data: Rc<Vec<u8>>,
    range: Range<usize>,
}

impl From<Vec<u8>> for Bytes {
    fn from(data: Vec<u8>) -> Bytes {
        let range = 0..data.len();
        Bytes {
            data: Rc::new(data),
            range,
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.data[self.range.clone()]
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Bytes) -> bool {
        **self == **other
    }
}

impl Eq for Bytes {}

impl Records for Bytes {
    fn cut(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.range.len(),
            "cut within the view"
        );
        Bytes {
            data: Rc::clone(&self.data),
            range: self.range.start + range.start..self.range.start + range.end,
        }
    }
}
