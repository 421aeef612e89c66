//! A segment of a partition: tail buffers, positions, sealing.
