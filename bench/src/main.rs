//! The `ringfence-bench` command.

fn main() {}
