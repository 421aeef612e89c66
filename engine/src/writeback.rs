//! Write-back of durable bytes from memory to segments.
