//! Admin HTTP: /metrics, /livez, /readyz.
