//! Fuzzy snapshots of a shard.
