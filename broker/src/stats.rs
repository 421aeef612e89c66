//! Counters and gauges of a shard.
