//! Effects: threads, control runtime, HTTP, command line.

pub mod cli;
pub mod control;
pub mod datadir;
pub mod http;
pub mod runtime;
