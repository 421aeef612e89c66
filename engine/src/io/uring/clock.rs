//! The two clocks, read here and nowhere in the core.

use crate::types::Now;

/// The time: monotonic nanoseconds that all threads of the host share, wall clock milliseconds.
#[must_use]
pub fn now() -> Now {
    let mono = read(libc::CLOCK_MONOTONIC);
    let wall = read(libc::CLOCK_REALTIME);
    Now {
        mono: (mono.tv_sec as u64)
            .saturating_mul(1_000_000_000)
            .saturating_add(mono.tv_nsec as u64),
        wall_ms: wall
            .tv_sec
            .saturating_mul(1000)
            .saturating_add(wall.tv_nsec / 1_000_000),
    }
}

fn read(clock: libc::clockid_t) -> libc::timespec {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the structure lives across the call. Both clocks exist on every Linux, so it cannot fail.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time
}
