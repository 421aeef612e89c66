//! Retention by bytes and time, log start, delayed deletion.
