//! The `ringfence-bench` command.

#![forbid(unsafe_code)]

fn main() {}
