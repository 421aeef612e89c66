//! Idempotent-producer state of a partition and its file form.
