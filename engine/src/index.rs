//! Sparse offset and time index of a segment, with a checksum over each interval it opens.
