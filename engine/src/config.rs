//! Settings of one shard's store.
