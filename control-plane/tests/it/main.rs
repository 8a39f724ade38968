//! Integration tests of the daemon: its parts through their public interfaces, against real
//! counterparts where there are any.

#![cfg(test)] // so that lints treat helpers outside #[test] functions as test code

mod commit;
mod configs;
mod daemon;
mod docs;
mod exposition;
mod hostile;
#[cfg(target_os = "linux")] // it reads /proc
mod hostile_ext_proc;
mod json_schema;
mod manifests;
mod others;
mod scrape;
