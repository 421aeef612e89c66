//! A partition's replica: the rules of leading it (and, with replication, of following).

pub mod leader;
