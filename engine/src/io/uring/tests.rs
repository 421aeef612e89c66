//! The reactor on the real kernel.

mod disk;
mod net;
