//! The seeded simulated disk.
