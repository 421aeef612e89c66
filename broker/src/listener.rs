//! Connections: framing, limits, order of answers.
