//! Shared helpers of the tests: starting brokers, the simulator, models.
