//! The native protocol.
