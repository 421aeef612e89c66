//! The reactor: one io_uring per shard for files, sockets, timers and mailbox.
