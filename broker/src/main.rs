//! The `ringfence` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ringfence_broker::shell::cli::main()
}
