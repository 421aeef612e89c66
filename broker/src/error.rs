//! Wire errors: what a client may see.
