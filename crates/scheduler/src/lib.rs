//! Endpoint picking as a pure function: the core of Switchpoint.
//!
//! The function takes a [`Snapshot`] of the pool, a [`Request`] and the proxy's [`LocalState`], and
//! returns a [`Decision`]. This crate reads no clock, entropy, file, socket or environment; time
//! and randomness are arguments. So the decisions of this crate are the same natively and in wasm.
//!
//! [`schedule()`] has all the control flow: a profile handler runs profiles. In each profile,
//! filters narrow the candidates, weighted scorers rank the candidates, and a picker draws a ranked
//! list. Each plugin is one file, and one table lists all plugins: [`registry::PLUGINS`].
#![deny(clippy::indexing_slicing, clippy::cast_lossless)]
// Tests compare floats exactly on purpose: every host must compute the same numbers.
#![cfg_attr(not(test), deny(clippy::float_cmp))]
#![forbid(unsafe_code)]

// The modules are listed by layer, the lowest first. A module uses only modules of the same layer
// and of lower layers. The only exception is `run`, which uses two structural filters and the
// ranking that all pickers share.

// These modules use no other module: numbers, names and texts.
mod rng;
pub use rng::Rng;
pub mod sort;
mod text;
mod time;
pub use time::Timestamp;

// These modules have the state: endpoints and requests.
mod endpoint;
pub use endpoint::{
    ENDPOINTS_MAX, Endpoint, EndpointIndex, EndpointRef, Generation, ROLE_LABEL, Readiness, Slot,
    decodes,
};
pub mod metrics;
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
pub use settings::{
    BYTES_PER_TOKEN, IdentitySettings, LatencySettings, LoadSettings, PrefixSettings,
    ProducerSetting, ProducerSettings, TokenSettings,
};
mod endpoint_table;
pub use endpoint_table::{EndpointTable, InvalidSnapshot};
mod local_state;
pub use local_state::{AdapterRoom, LocalState};
mod predictions;
pub use predictions::{EndpointPrediction, Headroom};
mod candidates;
pub use candidates::Candidates;
mod decision;
pub use decision::{
    CostTerms, Decision, DroppedEndpoint, Explanation, ProfileExplanation, RANKED_MAX, RankedList,
    Route, ScoreColumn, ShedReason, UnavailableReason,
};

// These modules have the plugin traits, the run of a profile, and the type of a plugin.
pub mod plugin;
mod run;
pub use run::{ProfileHandler, Reference, SETTLED_MS, SchedulingRun, Stage};
pub mod flow;
mod plugin_type;

// These modules have the plugins, with one folder for each kind.
mod admitter;
mod decider;
mod detector;
mod filter;
mod handler;
mod parser;
mod picker;
mod producer;
mod scorer;

// These modules have the table of all plugins, and build pipelines from the table.
mod pipeline;
pub mod registry;
pub use pipeline::{
    FAIRNESS_ID, InvalidPipeline, PLUGINS_MAX, PROFILES_MAX, Pipeline, PipelineSpec, PluginSpec,
    ProfilePlugin, ProfileSpec, REQUEST_ID, WEIGHT_MAX,
};
mod snapshot;
pub use snapshot::{Snapshot, Version};
mod schedule;
pub use schedule::{
    has_room, is_full, possible_slo, predict, saturation, schedule, schedule_again, tracked_slo,
};
