//! The library as users see it: with a directory, over HTTP, and with a real Kubernetes API.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where it cannot go on"
)]
#![allow(clippy::print_stdout, reason = "a skipped test says so")]

#[cfg(any(feature = "kubernetes", feature = "etcd"))]
mod cluster;
mod directory;
mod documented;
#[cfg(feature = "etcd")]
mod etcd;
mod events;
mod examples;
#[cfg(feature = "kubernetes")]
mod fake_api;
mod generated;
#[cfg(feature = "kubernetes")]
mod kubernetes;
#[cfg(feature = "kubernetes")]
mod kubernetes_faults;
#[cfg(feature = "kubernetes")]
mod manifests;
mod metadata;
