//! Events and requests that a shard's state machine takes, whatever listener they came from.
