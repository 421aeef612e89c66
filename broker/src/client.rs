//! Client library for the native protocol.
