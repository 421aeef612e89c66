//! Journal files and frames: byte layout, encoding, decoding, scanning.
