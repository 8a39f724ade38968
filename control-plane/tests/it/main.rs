//! Integration tests of the daemon: its parts through their public face, against real counterparts where there are any.

#![cfg(test)] // so that the lints know helpers outside #[test] functions for tests too

mod configs;
mod daemon;
mod docs;
mod exposition;
mod hostile;
#[cfg(target_os = "linux")] // it reads /proc
mod hostile_ext_proc;
mod manifests;
mod scrape;
