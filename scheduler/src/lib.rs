//! The mind of Switchpoint: endpoint picking as a pure function.
//!
//! A [`Snapshot`] of the pool, a [`Request`] and the proxy's own [`Local`] state go in; a [`Decision`] comes out. Nothing here reads
//! a clock, entropy, a file, a socket or the environment: time and randomness are arguments. So this crate cannot fail, only
//! decide, and it decides the same natively and in wasm.
//!
//! [`schedule()`] is all the control flow there is: a profile handler runs profiles; in each, filters narrow the candidates, weighted
//! scorers rank them, a picker draws a ranked list. Plugins are one file each, listed in one table, [`registry::PLUGINS`].
#![deny(clippy::indexing_slicing, clippy::cast_lossless)]
// Tests compare floats exactly on purpose: the same numbers on every host are what is promised.
#![cfg_attr(not(test), deny(clippy::float_cmp))]
#![forbid(unsafe_code)]

mod schedule;
pub use schedule::{predict, schedule, schedule_again, tracked_slo};

mod run;
pub use run::{Reference, Run, SETTLED_MS, Stage};

mod endpoint;
pub use endpoint::{ENDPOINTS_MAX, Endpoint, EndpointIndex, EndpointRef, Incarnation, ROLE_LABEL, Readiness, Slot, decodes};

mod metrics;
pub use metrics::{ATTRIBUTES_MAX, EndpointMetrics, LoraMetrics, SEQUENCES_MAX_ATTRIBUTE};

mod endpoint_table;
pub use endpoint_table::{EndpointTable, InvalidSnapshot};

mod snapshot;
pub use snapshot::{Snapshot, Version};

mod request;
pub use request::{Request, SubsetHint};

mod slo;
pub use slo::{Slo, TrackedSlo};

mod predictions;
pub use predictions::{EndpointPrediction, Headroom};

mod local;
pub use local::{AdapterRoom, Local};

mod candidates;
pub use candidates::Candidates;

mod decision;
pub use decision::{CostTerms, Decision, Drop, Explanation, ProfileExplanation, RANKED_MAX, Ranked, Route, ScoreColumn, Shed, Unavailable};

mod pipeline;
pub use pipeline::{
    InvalidPipeline, PLUGINS_MAX, PROFILES_MAX, Pipeline, PipelineSpec, PluginSpec, ProfilePlugin, ProfileSpec, REQUEST_ID, WEIGHT_MAX,
};

pub mod plugin;

mod admitter;
mod decider;
mod detector;
mod filter;
mod handler;
mod parser;
mod picker;
mod producer;
mod scorer;

mod plugin_type;
pub mod registry;

mod settings;
mod text;
pub use settings::{BYTES_PER_TOKEN, IdentitySettings, LatencySettings, LoadSettings, PrefixSettings, Production, TokenSettings};

mod rng;
pub use rng::Rng;

mod session;
pub use session::{SessionToken, name_hash, session_token};

pub mod sort;

pub mod in_flight;
pub mod latency;
pub mod objects;
pub mod prefix;
