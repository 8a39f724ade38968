//! The library as its users meet it: over a directory, over HTTP, over a real Kubernetes API.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test stops where it cannot go on")]

#[cfg(feature = "kubernetes")]
mod cluster;
mod directory;
mod events;
#[cfg(feature = "kubernetes")]
mod fake_api;
#[cfg(feature = "kubernetes")]
mod kubernetes;
#[cfg(feature = "kubernetes")]
mod kubernetes_faults;
mod metadata;
