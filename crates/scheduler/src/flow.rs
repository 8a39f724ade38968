//! Flow control: the rules for which waiting request is sent next, and whether an endpoint has room
//! for a request. The queues are in the crate `pool-state`.
//!
//! A *band* holds the requests of one priority. Within a band, a *flow* holds the requests of one
//! fairness id or of one client.

mod control;
pub use control::{BandRules, FLOW_CONTROL, FlowControl};
pub(crate) use control::{PLUGIN, Policies};

mod order;
pub use order::{
    BandService, FullEndpoint, OrderRow, OrderStep, OwnerShare, QueuedInBand, QueuedTag, RowBand,
    SharedOrder, TRIES_AT_ENDPOINT,
};

mod settings;
pub use settings::FlowSettings;

pub(crate) mod fairness;
pub(crate) mod ordering;
pub(crate) mod usage_limit;

use crate::endpoint::EndpointRef;
use crate::plugin::{PluginDebug, debug_by_show};
use crate::time::Timestamp;

/// The tokens that a flow is charged for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FlowCost {
    /// The estimated number of prompt tokens that the picked endpoint has not cached.
    pub prompt: f64,
    /// The number of output tokens, which is the expected number until the request ends.
    pub output: f64,
}

/// The service that a flow has received so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FlowAccount {
    /// The virtual time at which the next request of the flow starts, in tokens.
    pub start: f64,
    /// The value of [`BandAccount::turn`] when the flow was last served; 0 means never.
    pub turn: u64,
    /// The number of weighted tokens that the flow has received, decayed until the time
    /// `attained_at`.
    pub attained: f64,
    pub attained_at: Timestamp,
}

/// The service that a band has received so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BandAccount {
    /// The lowest start among the requests that waited when a request was last served, in tokens.
    pub virtual_time: f64,
    /// The number of requests served.
    pub turn: u64,
}

/// A waiting request, in the form that ordering policies use.
#[derive(Clone, Copy, Debug)]
pub struct QueuedFacts {
    pub arrived: Timestamp,
    /// The time when the wait of the request ends without service.
    pub expires: Timestamp,
    /// The TTFT SLO of the request, in µs; `None` if the request has no TTFT SLO.
    pub ttft_slo_us: Option<u32>,
}

/// The room that a request waits for. A running request may be aborted to make this room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomAsk {
    /// The endpoint that needs room; `None` if room at every endpoint of the pool helps.
    pub endpoint: Option<EndpointRef>,
    /// The priority of the request that waits. Only requests of a lower priority are aborted.
    pub priority: i32,
}

/// How full an endpoint or a pool may be for a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoomLimits {
    /// Whether the request belongs to the highest band in use. Other requests leave a reserve.
    pub critical: bool,
    /// The saturation up to which the band may fill the pool.
    pub ceiling: UsageCeiling,
    /// The share of the allowed saturation that this proxy may fill, above 0 and up to 1.
    pub share: f64,
}

/// The saturation at or above which requests of a band are held; 1 is full.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UsageCeiling {
    /// The limit is the same at every load.
    Fixed(f64),
    /// The limit falls as the load rises: 1 - `share` x saturation. Above the limit, one of
    /// saturation / (1 - saturation) tries passes.
    Reflective {
        /// The place of the band: 0 for the highest band, 1 for the lowest, and between 0 and 1 for
        /// others.
        share: f64,
        /// How often a request of the band has been tried before.
        turn: u64,
    },
}

/// The position of a band among the bands in use, the highest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BandRank {
    /// The number of higher bands.
    pub higher: usize,
    /// The number of bands in use; at least 1.
    pub bands: usize,
    /// The priorities of this band, of the highest band, and of the lowest band.
    pub priorities: (i32, i32, i32),
}

/// Chooses among the flows of a band.
pub trait FairnessPolicy: PluginDebug + Send + Sync {
    /// Returns the rank of a flow whose first request has waited for `waited_ms` milliseconds. The
    /// flow with the lowest rank is served first. If ranks are equal, the ordering policy decides.
    fn rank(&self, flow: &FlowAccount, band: &BandAccount, waited_ms: f64, now: Timestamp) -> f64;

    /// Records that a request of a flow arrived while no other request of the flow waited.
    fn begin(&self, _flow: &mut FlowAccount, _band: &BandAccount) {}

    /// Records that a request of the band is sent to an endpoint now. `lowest` is the lowest rank
    /// of the waiting flows and of the request's flow, before the request's flow is charged.
    fn advance(&self, _band: &mut BandAccount, _lowest: f64) {}

    /// Charges the flow for a request that is sent to an endpoint now.
    fn charge(
        &self,
        flow: &mut FlowAccount,
        band: &mut BandAccount,
        cost: FlowCost,
        now: Timestamp,
    );

    /// Corrects the charge of a request that has ended. The output of this request differed from
    /// the expectation by `output` tokens.
    fn settle(&self, flow: &mut FlowAccount, output: f64);

    /// Returns the minimum share of all tokens that a band gets while it waits behind a higher
    /// band.
    fn minimum_share(&self) -> f64 {
        0.0
    }
}

/// Orders the requests of a flow.
pub trait OrderingPolicy: PluginDebug + Send + Sync {
    /// Returns the key of a request. The request with the lowest key is sent first; if keys are
    /// equal, the request that arrived first.
    fn key(&self, request: &QueuedFacts) -> u64;
}

/// Decides how much of the pool a band may fill.
pub trait UsageLimitPolicy: PluginDebug + Send + Sync {
    /// Returns how much of the pool the band may fill. `turn` is how often a request of the band
    /// was tried before.
    fn ceiling(&self, band: BandRank, turn: u64) -> UsageCeiling;
}

debug_by_show!(FairnessPolicy, OrderingPolicy, UsageLimitPolicy);

// === impl FlowCost ===

impl FlowCost {
    #[must_use]
    pub fn tokens(self) -> f64 {
        self.prompt + self.output
    }
}

// === impl UsageCeiling ===

impl UsageCeiling {
    pub fn at(self, saturation: impl FnOnce() -> f64) -> f64 {
        let (share, turn) = match self {
            Self::Fixed(ceiling) => return ceiling,
            Self::Reflective { share, turn } => (share, turn),
        };
        let saturation = saturation();
        if share <= 0.0 || saturation < 1.0 - share * saturation {
            return 1.0;
        }
        // The cast loses nothing that matters: the number is positive, and for a large number the
        // cast saturates.
        let period = libm::round(saturation / (1.0 - saturation)).max(1.0) as u64;
        if saturation < 1.0 && turn.is_multiple_of(period) {
            1.0
        } else {
            0.0
        }
    }
}

// === impl RoomLimits ===

impl RoomLimits {
    /// The limits of a request that may fill the whole pool.
    pub const ALL: Self = Self {
        critical: true,
        ceiling: UsageCeiling::Fixed(1.0),
        share: 1.0,
    };
}
