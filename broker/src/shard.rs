//! The shard's state machine: partitions, requests, parked fetches.
