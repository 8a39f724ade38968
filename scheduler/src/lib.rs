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

// Lowest layer first: a module uses only its own layer and those before it. One exception: `run`
// uses two structural filters and the ranking that all pickers share.

// Leaves: numbers, names and texts.
mod rng;
pub use rng::Rng;
pub mod sort;
mod text;

// State: what is known of endpoints and of a request.
mod endpoint;
pub use endpoint::{ENDPOINTS_MAX, Endpoint, EndpointIndex, EndpointRef, Incarnation, ROLE_LABEL, Readiness, Slot, decodes};
mod metrics;
pub use metrics::{ATTRIBUTES_MAX, EndpointMetrics, LoraMetrics, SEQUENCES_MAX_ATTRIBUTE};
mod slo;
pub use slo::{Slo, TrackedSlo};
pub mod in_flight;
pub mod latency;
pub mod objects;
pub mod prefix;
mod request;
pub use request::{Request, SubsetHint};
mod session;
pub use session::{SessionToken, name_hash, session_token};
mod settings;
pub use settings::{BYTES_PER_TOKEN, IdentitySettings, LatencySettings, LoadSettings, PrefixSettings, Producer, Production, TokenSettings};
mod endpoint_table;
pub use endpoint_table::{EndpointTable, InvalidSnapshot};
mod local;
pub use local::{AdapterRoom, Local};
mod predictions;
pub use predictions::{EndpointPrediction, Headroom};
mod candidates;
pub use candidates::Candidates;
mod decision;
pub use decision::{CostTerms, Decision, Drop, Explanation, ProfileExplanation, RANKED_MAX, Ranked, Route, ScoreColumn, Shed, Unavailable};

// Plugin traits, the run of a profile, and the type of a plugin.
pub mod plugin;
mod run;
pub use run::{ProfileHandler, Reference, Run, SETTLED_MS, Stage};
mod plugin_type;

// Plugins, a folder a kind.
mod admitter;
mod decider;
mod detector;
mod filter;
mod handler;
mod parser;
mod picker;
mod producer;
mod scorer;

// The table of all plugins, and what is built from it.
mod pipeline;
pub mod registry;
pub use pipeline::{
    InvalidPipeline, PLUGINS_MAX, PROFILES_MAX, Pipeline, PipelineSpec, PluginSpec, ProfilePlugin, ProfileSpec, REQUEST_ID, WEIGHT_MAX,
};
mod snapshot;
pub use snapshot::{Snapshot, Version};
mod schedule;
pub use schedule::{predict, schedule, schedule_again, tracked_slo};
