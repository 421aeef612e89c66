//! Start-up: from snapshot and journal to a shard's state.
