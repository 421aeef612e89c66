//! Messages between shards and from the control thread.
