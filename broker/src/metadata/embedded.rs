//! Embedded metadata store of one node.
