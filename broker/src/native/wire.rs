//! Reading and writing of fixed little-endian layouts, total on any input.
//!
//! Nothing here allocates more than the bytes at hand justify: a list's count is checked against the bytes left
//! (count x least size of an item) before its memory is taken. Layouts nest only as far as the types do; no layout
//! contains itself.

use ringfence_engine::types::{LeaderEpoch, Offset, PartitionId, ShardId, TopicId};
use thiserror::Error;

use crate::error::WireError;

/// Longest string on the wire, in bytes of UTF-8.
pub const MAX_STRING: usize = 1024;

/// Why bytes are not the layout they should be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    #[error("{needed} bytes needed, {left} left")]
    Short { needed: usize, left: usize },
    #[error("a list of {count} items does not fit into the {left} bytes left")]
    Count { count: u32, left: usize },
    #[error("a string of {0} bytes is longer than {MAX_STRING}")]
    LongString(u16),
    #[error("a string is not UTF-8")]
    Utf8,
    #[error("{value} is no valid {what}")]
    Value { what: &'static str, value: i64 },
    #[error("{0} bytes too many at the end")]
    Trailing(usize),
    #[error("record lengths add up to {expected} bytes, {found} are there")]
    Records { expected: u64, found: usize },
}

/// Bytes not read yet.
#[derive(Debug)]
pub struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads `bytes` from their beginning.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { left: bytes }
    }

    /// The next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let (taken, left) = self.left.split_at_checked(count).ok_or(DecodeError::Short {
            needed: count,
            left: self.left.len(),
        })?;
        self.left = left;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (taken, left) = self.left.split_first_chunk().ok_or(DecodeError::Short {
            needed: N,
            left: self.left.len(),
        })?;
        self.left = left;
        Ok(*taken)
    }

    /// Checks that nothing is left.
    pub fn finish(self) -> Result<(), DecodeError> {
        match self.left.len() {
            0 => Ok(()),
            more => Err(DecodeError::Trailing(more)),
        }
    }
}

/// A value with a fixed layout.
pub trait Wire: Sized {
    /// Least number of bytes the value takes.
    const MIN: usize;

    /// Appends the value.
    fn put(&self, out: &mut Vec<u8>);

    /// Reads the value.
    fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

/// Reads one value that must fill all of `bytes`.
pub fn decode_all<T: Wire>(bytes: &[u8]) -> Result<T, DecodeError> {
    let mut input = Reader::new(bytes);
    let value = T::take(&mut input)?;
    input.finish()?;
    Ok(value)
}

macro_rules! integers {
    ($($int:ty)*) => {
        $(impl Wire for $int {
            const MIN: usize = size_of::<$int>();

            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
                Ok(<$int>::from_le_bytes(input.array()?))
            }
        })*
    };
}

integers!(u8 i8 u16 i16 u32 i32 u64 i64);

/// One byte, 0 or 1.
impl Wire for bool {
    const MIN: usize = 1;

    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match u8::take(input)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(DecodeError::Value {
                what: "truth value",
                value: other.into(),
            }),
        }
    }
}

/// `u16` length and that many bytes of UTF-8. A string longer than [`MAX_STRING`] is cut at a character when it
/// is written: only free text may be that long, names and settings are checked before they get here.
impl Wire for String {
    const MIN: usize = 2;

    fn put(&self, out: &mut Vec<u8>) {
        let mut end = self.len().min(MAX_STRING);
        while !self.is_char_boundary(end) {
            end -= 1;
        }
        let cut = &self[..end];
        let len = u16::try_from(cut.len()).expect("MAX_STRING fits into 16 bits");
        len.put(out);
        out.extend_from_slice(cut.as_bytes());
    }

    fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let len = u16::take(input)?;
        if usize::from(len) > MAX_STRING {
            return Err(DecodeError::LongString(len));
        }
        let text = std::str::from_utf8(input.bytes(len.into())?).map_err(|_| DecodeError::Utf8)?;
        Ok(text.to_owned())
    }
}

/// `u32` count and the items.
impl<T: Wire> Wire for Vec<T> {
    const MIN: usize = 4;

    fn put(&self, out: &mut Vec<u8>) {
        let count =
            u32::try_from(self.len()).expect("a list in memory is bounded by the frame limit of 32 bits");
        count.put(out);
        self.iter().for_each(|item| item.put(out));
    }

    fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let count = u32::take(input)?;
        let left = input.left.len();
        let fits = u64::from(count) * T::MIN.max(1) as u64 <= left as u64;
        if !fits {
            return Err(DecodeError::Count { count, left });
        }
        let mut items = Vec::with_capacity(count as usize);
        for _ in 0..count {
            items.push(T::take(input)?);
        }
        Ok(items)
    }
}

macro_rules! minus_one_is_none {
    ($($name:ident($raw:ty) as $int:ty, $what:literal;)*) => {
        $(impl Wire for Option<$name> {
            const MIN: usize = size_of::<$int>();

            fn put(&self, out: &mut Vec<u8>) {
                // Values beyond the signed range cannot arise: the types' documented bound is the wire type's.
                self.map_or(-1, |value| <$int>::try_from(value.0).unwrap_or(<$int>::MAX)).put(out);
            }

            fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
                match <$int>::take(input)? {
                    -1 => Ok(None),
                    value => match <$raw>::try_from(value) {
                        Ok(raw) => Ok(Some($name(raw))),
                        Err(_) => Err(DecodeError::Value { what: $what, value: value.into() }),
                    },
                }
            }
        })*
    };
}

minus_one_is_none! {
    Offset(u64) as i64, "offset";
    LeaderEpoch(u32) as i32, "leader epoch";
    NodeId(u32) as i32, "node id";
}

macro_rules! never_none {
    ($($name:ty, $what:literal;)*) => {
        $(impl Wire for $name {
            const MIN: usize = <Option<$name> as Wire>::MIN;

            fn put(&self, out: &mut Vec<u8>) {
                Some(*self).put(out);
            }

            fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
                <Option<$name> as Wire>::take(input)?.ok_or(DecodeError::Value { what: $what, value: -1 })
            }
        })*
    };
}

never_none! {
    Offset, "offset";
    LeaderEpoch, "leader epoch";
    NodeId, "node id";
}

impl Wire for ShardId {
    const MIN: usize = 2;

    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }

    fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(ShardId(u16::take(input)?))
    }
}

/// `u16`; 65535 is `None` (no process has that many shards).
impl Wire for Option<ShardId> {
    const MIN: usize = 2;

    fn put(&self, out: &mut Vec<u8>) {
        self.map_or(u16::MAX, |shard| shard.0).put(out);
    }

    fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let raw = u16::take(input)?;
        Ok((raw != u16::MAX).then_some(ShardId(raw)))
    }
}

macro_rules! sixteen_bytes {
    ($($name:ident)*) => {
        $(impl Wire for $name {
            const MIN: usize = 16;

            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.0);
            }

            fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
                Ok($name(input.array()?))
            }
        })*
    };
}

sixteen_bytes!(TopicId ClusterId);

impl Wire for PartitionId {
    const MIN: usize = 20;

    fn put(&self, out: &mut Vec<u8>) {
        self.topic.put(out);
        self.index.put(out);
    }

    fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(PartitionId {
            topic: TopicId::take(input)?,
            index: u32::take(input)?,
        })
    }
}

/// `i16`; 0 is no error. A number that this version does not know reads as `UnknownServerError`.
impl Wire for Option<WireError> {
    const MIN: usize = 2;

    fn put(&self, out: &mut Vec<u8>) {
        self.map_or(0, WireError::code).put(out);
    }

    fn take(input: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match i16::take(input)? {
            0 => None,
            code => Some(WireError::from_code(code).unwrap_or(WireError::UnknownServerError)),
        })
    }
}

/// Number of a node in its cluster; at most `i32::MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NodeId(pub u32);

impl std::fmt::Display for NodeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Identity of a cluster: random; all zero means "any" in a client's Hello.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ClusterId(pub [u8; 16]);

impl std::fmt::Display for ClusterId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for ClusterId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Defines a struct whose layout on the wire is its fields in their order.
macro_rules! layout {
    ($(
        $(#[$doc:meta])*
        $vis:vis struct $name:ident {
            $($(#[$field_doc:meta])* $field_vis:vis $field:ident: $type:ty,)*
        }
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, PartialEq, Eq)]
            $vis struct $name {
                $($(#[$field_doc])* $field_vis $field: $type,)*
            }

            impl $crate::native::wire::Wire for $name {
                const MIN: usize = 0 $(+ <$type as $crate::native::wire::Wire>::MIN)*;

                fn put(&self, _out: &mut Vec<u8>) {
                    $($crate::native::wire::Wire::put(&self.$field, _out);)*
                }

                fn take(
                    _input: &mut $crate::native::wire::Reader<'_>,
                ) -> Result<Self, $crate::native::wire::DecodeError> {
                    Ok($name { $($field: $crate::native::wire::Wire::take(_input)?,)* })
                }
            }

            #[cfg(test)]
            impl $crate::native::tests::Sample for $name {
                fn sample(_from: &mut $crate::native::tests::Entropy<'_>) -> Self {
                    $name { $($field: $crate::native::tests::Sample::sample(_from),)* }
                }
            }
        )*
    };
}

/// Defines an enum without data that is one integer on the wire.
macro_rules! choice {
    (
        $(#[$doc:meta])*
        pub enum $name:ident as $int:ty, $what:literal {
            $($(#[$variant_doc:meta])* $variant:ident = $number:literal,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $crate::native::wire::Wire for $name {
            const MIN: usize = size_of::<$int>();

            fn put(&self, out: &mut Vec<u8>) {
                let number: $int = match self {
                    $($name::$variant => $number,)*
                };
                number.put(out);
            }

            fn take(
                input: &mut $crate::native::wire::Reader<'_>,
            ) -> Result<Self, $crate::native::wire::DecodeError> {
                match <$int as $crate::native::wire::Wire>::take(input)? {
                    $($number => Ok($name::$variant),)*
                    other => Err($crate::native::wire::DecodeError::Value { what: $what, value: other.into() }),
                }
            }
        }

        #[cfg(test)]
        impl $crate::native::tests::Sample for $name {
            fn sample(from: &mut $crate::native::tests::Entropy<'_>) -> Self {
                from.pick(&[$($name::$variant),*])
            }
        }
    };
}

pub(crate) use {choice, layout};
