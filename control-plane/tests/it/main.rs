//! Integration tests of the daemon: its parts through their public interfaces, with real
//! counterparts where such exist.

#![cfg(test)] // With this attribute, lints treat helpers outside #[test] functions as test code.

mod commit;
mod configs;
mod daemon;
mod docs;
mod exposition;
mod hostile;
#[cfg(target_os = "linux")] // This module reads /proc.
mod hostile_ext_proc;
mod json_schema;
mod manifests;
mod others;
mod scrape;
