//! Reads and writes the little-endian fields of the engine's own files.
//!
//! Invariant: a read beyond the end is `None`, whatever the bytes say; nothing is allocated here.

/// Reads fields one after the other.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    /// What was not read yet.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk::<N>()?;
        self.rest = rest;
        Some(*taken)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn i16(&mut self) -> Option<i16> {
        self.array().map(i16::from_le_bytes)
    }

    pub(crate) fn i32(&mut self) -> Option<i32> {
        self.array().map(i32::from_le_bytes)
    }

    pub(crate) fn i64(&mut self) -> Option<i64> {
        self.array().map(i64::from_le_bytes)
    }

    /// A count of items that follow, each at least `item` bytes (above 0): `None` when they cannot be there. So a
    /// count may size an allocation.
    pub(crate) fn count(&mut self, item: usize) -> Option<usize> {
        let count = usize::try_from(self.u32()?).ok()?;
        (count <= self.rest.len() / item).then_some(count)
    }
}

/// Appends fields to a growing file image.
pub(crate) trait Put {
    fn put<const N: usize>(&mut self, field: [u8; N]);

    fn put_u16(&mut self, value: u16) {
        self.put(value.to_le_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.put(value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.put(value.to_le_bytes());
    }

    fn put_i64(&mut self, value: i64) {
        self.put(value.to_le_bytes());
    }
}

impl Put for Vec<u8> {
    fn put<const N: usize>(&mut self, field: [u8; N]) {
        self.extend_from_slice(&field);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_round_trip_and_end_with_none() {
        let mut bytes = Vec::new();
        bytes.put_u16(0xabcd);
        bytes.put_u32(0x0123_4567);
        bytes.put_u64(u64::MAX - 1);
        bytes.put_i64(-5);
        bytes.put((-2i32).to_le_bytes());
        bytes.put((-3i16).to_le_bytes());
        assert_eq!(&bytes[..2], [0xcd, 0xab]);
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.u16(), Some(0xabcd));
        assert_eq!(reader.u32(), Some(0x0123_4567));
        assert_eq!(reader.u64(), Some(u64::MAX - 1));
        assert_eq!(reader.i64(), Some(-5));
        assert_eq!(reader.i32(), Some(-2));
        assert_eq!(reader.i16(), Some(-3));
        assert_eq!((reader.u8(), reader.rest().len()), (None, 0));
    }

    #[test]
    fn a_count_beyond_the_bytes_is_refused() {
        let mut bytes = Vec::new();
        bytes.put_u32(3);
        bytes.extend_from_slice(&[0; 12]);
        assert_eq!(Reader::new(&bytes).count(4), Some(3));
        assert_eq!(Reader::new(&bytes).count(5), None);
        assert_eq!(Reader::new(&bytes[..3]).count(1), None);
    }
}
