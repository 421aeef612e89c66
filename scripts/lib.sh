# Sourced by the other scripts: installs what a fresh Debian machine lacks, and nothing that is there.
# shellcheck shell=bash

# need COMMAND PACKAGE...: makes sure COMMAND exists; installs the packages when root, else says what to type.
need() {
    local command=$1
    shift
    command -v "$command" >/dev/null && return
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        echo "'$command' is missing; install it first: apt-get install $*" >&2
        return 1
    fi
    echo "installing $*" >&2
    apt-get update -qq >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
}

# need_rust: cargo in reach, and a linker for it.
need_rust() {
    PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
    if ! command -v cargo >/dev/null; then
        echo "Rust 1.90 or newer is needed and cargo is not in PATH; install it with rustup" >&2
        return 1
    fi
    need cc gcc libc6-dev
}

# need_component COMMAND COMPONENT: a part of the Rust tool chain that minimal installations lack.
need_component() {
    "$1" --version >/dev/null 2>&1 || rustup component add "$2"
}
