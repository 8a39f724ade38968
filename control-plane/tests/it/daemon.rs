//! The daemon as its peers see it: played here are filters, Envoys, people and the files they write.

mod admin;
mod calls;
mod cli;
mod discovered;
mod eds;
mod ext_proc;
mod files;
pub(crate) mod harness;
mod ordering;
mod state_stream;
mod tls;
