//! The `ringfence` command.

use std::process::ExitCode;

const _: () = assert!(
    !ringfence_engine::canary::BUILT_IN,
    "a broker is never built with the deliberate bugs of the engine's tests"
);

fn main() -> ExitCode {
    ringfence_broker::shell::cli::main()
}
