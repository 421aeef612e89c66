//! Constants, in two classes: part of the on-disk format, or bounds of this process.

/// On-disk format: version of every file's layout. Raised on an incompatible change.
pub const FORMAT_VERSION: u32 = 1;

/// On-disk format: the block that segments are written in, and the least frame grain.
pub const BLOCK: usize = 4096;

/// Largest record batch the engine takes, whatever a topic's `max.message.bytes` says.
pub const MAX_BATCH_BYTES: usize = 64 << 20;

/// Segment files stay below this so that Kafka's 32-bit positions can address them.
pub const MAX_SEGMENT_BYTES: u64 = (i32::MAX as u64) & !(BLOCK as u64 - 1);

/// Journal frames in flight at once, per shard (STORAGE.md section 2).
pub const MAX_FRAMES_IN_FLIGHT: usize = 8;
