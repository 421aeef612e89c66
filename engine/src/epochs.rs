//! Leader-epoch table of a partition and its checkpoint file.
