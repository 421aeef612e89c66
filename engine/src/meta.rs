//! Small identity files: node.meta, journal-set, partition.meta.
