//! Shard threads: one reactor each.
