//! One partition's log in memory: offsets, segments, tail, tables.
