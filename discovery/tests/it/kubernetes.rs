//! Kubernetes for real.
