//! One HTTP exchange of an inference request without I/O: headers and bytes in, actions out.
//!
//! The wasm filter and the ext_proc server are two hosts of the same [`RequestDriver`], and the
//! rules of the protocol are only here. Time comes from the host ([`Timestamp`]). State is in a
//! [`ManagedPool`] that the host owns. [`driver`] says what a host must do.
#![deny(clippy::indexing_slicing, clippy::string_slice)]
#![forbid(unsafe_code)]

mod exchange;
pub use exchange::{
    ClaimedRequest, Exchange, ExchangeOutcome, ExchangeStep, HELD_BYTES_MAX, HeadersStep,
    ParsedBody, PendingRequest, QueuedAttempt, RequestChanges, ResponseBody, ResponseHead,
    ResponseOrigin, ResponseStep,
};

pub mod driver;
pub use driver::{
    BodyProgress, FilterStatus, PoolUse, RequestCount, RequestDriver, RequestHost, RewriteError,
};

mod settings;
pub use settings::{
    DecideAt, DecisionLogSettings, DestinationFormat, DestinationSettings, ExchangeSettings,
    FailureMode, FlowRequestSettings, HeaderTrust, RetrySettings, SubsetSettings,
};

pub use pool_state::{ManagedPool, Timestamp};

pub mod api;
pub mod bodies;
pub mod body;
pub mod json;
mod number;
pub mod restore;
pub mod rewrite;
pub mod sse;
pub mod trace;
pub mod usage;

pub mod headers;
mod hint;
mod kept_bodies;
pub use kept_bodies::KeptBodies;
mod prompt;
pub use prompt::{HashSettings, PromptSums};

mod reply;
pub use reply::{LocalReply, Refusal, ready as ready_reply};

pub mod explain;
mod load;
pub mod record;
