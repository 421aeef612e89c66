//! Group commit: collects records into frames and tracks the durable prefix.
