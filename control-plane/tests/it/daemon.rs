//! The daemon as its peers see it. The tests act as filters, Envoys and operators, and write the
//! files that operators write.

mod admin;
pub(crate) mod calls;
mod certificates;
mod cli;
#[path = "../../../crates/discovery/tests/it/cluster.rs"]
mod cluster;
mod console;
mod discovered;
mod eds;
mod ext_proc;
#[allow(
    dead_code,
    reason = "also a part of other tests, none of which uses all of it"
)]
#[path = "../../../crates/discovery/tests/it/fake_api.rs"]
mod fake_api;
mod files;
mod handover;
pub(crate) mod harness;
mod kv_events;
mod kv_events_interop;
mod metric_names;
mod ordering;
mod outsiders;
mod promptness;
mod scaler;
mod standby;
mod state_stream;
mod tls;
mod unconfirmed;
